"""Scalars that a task computes once: subexpressions that its body uses more than once."""

from __future__ import annotations

from collections.abc import Iterator

from tileweave.compiler.verify import scalars
from tileweave.primitives.expr import Binary, Const, Expr, LoopIndex, TableRead, children, walk
from tileweave.primitives.ops import For, Op, Task, result


def common_scalars(task: Task) -> tuple[Expr, ...]:
    """Subexpressions worth a name, operands before what uses them.

    Only expressions that every run of the body evaluates are taken: a table entry that is
    read under a guard, or in a loop that may not run, may not exist otherwise.
    """
    roots = list(_unconditional(task.body))
    uses: dict[Expr, int] = {}
    order: dict[Expr, None] = {}

    def visit(expr: Expr) -> None:
        uses[expr] = uses.get(expr, 0) + 1
        if expr in order:
            return
        for child in children(expr):
            visit(child)
        order[expr] = None

    for root in roots:
        visit(root)
    return tuple(e for e in order if uses[e] > 1 and _worth_a_name(e))


def _unconditional(body: tuple[Op, ...]) -> Iterator[Expr]:
    for op in body:
        yield from scalars(op)
        value = result(op)
        if value is not None:
            yield from value.extents
        if isinstance(op, For) and _runs(op):
            yield from _unconditional(op.body)


def _runs(op: For) -> bool:
    return isinstance(op.start, Const) and isinstance(op.stop, Const) and op.start.value < op.stop.value


def _worth_a_name(expr: Expr) -> bool:
    if any(isinstance(part, LoopIndex) for part in walk(expr)):
        return False
    return isinstance(expr, TableRead) or (isinstance(expr, Binary) and sum(1 for _ in walk(expr)) > 3)
