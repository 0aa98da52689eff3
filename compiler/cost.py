"""What a tile costs: FLOPs and bytes of each op, as scalar expressions of its extents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tileweave.compiler.bounds import upper_bound
from tileweave.primitives.expr import Const, Expr, LoopIndex, TableRead, as_expr, ceildiv, walk
from tileweave.primitives.ops import (
    Cast,
    Copy,
    Dot,
    Elementwise,
    Expand,
    Fence,
    Fill,
    For,
    Load,
    Op,
    Reduce,
    SignalOp,
    Store,
    Task,
    Transpose,
    Update,
    Value,
    WaitOp,
    When,
    accesses,
)


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes of memory traffic of one tile, as expressions of its grid indices."""

    flops: Expr
    traffic_bytes: Expr

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.traffic_bytes + other.traffic_bytes)

    def times(self, count: Expr) -> Cost:
        """`count` repetitions."""
        return Cost(self.flops * count, self.traffic_bytes * count)


FREE = Cost(Const(0), Const(0))


def _size(extent: Expr, static: int) -> Expr:
    """`extent`, or the static size where it depends on a loop, whose iterations are not told apart."""
    return as_expr(static) if any(isinstance(e, LoopIndex) for e in walk(extent)) else extent


def _elements(value: Value) -> Expr:
    total: Expr = Const(1)
    for extent, size in zip(value.extents, value.shape, strict=True):
        total = total * _size(extent, size)
    return total


def _accessed(op: Op) -> Cost:
    """Bytes that `op` reads and writes."""
    total = FREE
    for access in accesses(op):
        elements: Expr = Const(access.memory.dtype.itemsize_bytes)
        for extent, item in zip(access.extents, (i for i in access.index if not isinstance(i, Expr)), strict=True):
            elements = elements * _size(extent, item.size)
        total = total + Cost(Const(0), elements)
    return total


def _guarded(cost: Cost) -> Cost:
    """A cost that does not read tables: under a guard, or in a loop that may not run, their entries may not exist."""
    return Cost(*(_without_tables(e) for e in (cost.flops, cost.traffic_bytes)))


def _without_tables(expr: Expr) -> Expr:
    return Const(upper_bound(expr)) if any(isinstance(e, TableRead) for e in walk(expr)) else expr


def _dot(op: Dot) -> Cost:
    rows, depth = (_size(e, s) for e, s in zip(op.a.extents, op.a.shape, strict=True))
    columns = _size(op.b.extents[1], op.b.shape[1])
    return Cost(rows * columns * depth * 2, Const(0))


def _work(value: Value, flops_per_element: int) -> Cost:
    return Cost(_elements(value) * flops_per_element, Const(0))


COSTS: dict[type[Op], Callable[..., Cost]] = {
    Load: _accessed,
    Store: _accessed,
    Copy: _accessed,
    Fill: lambda op: FREE,
    Dot: _dot,
    Elementwise: lambda op: _work(op.result, 1),
    Cast: lambda op: _work(op.result, 1),
    Expand: lambda op: FREE,
    Transpose: lambda op: FREE,
    Reduce: lambda op: _work(op.value, 1),
    Update: lambda op: FREE,
    SignalOp: lambda op: FREE,
    WaitOp: lambda op: FREE,
    Fence: lambda op: FREE,
    For: lambda op: _guarded(body_cost(op.body)).times(_size(ceildiv(op.stop - op.start, op.step), 1)),
    When: lambda op: _guarded(body_cost(op.body)),
}


def body_cost(body: tuple[Op, ...]) -> Cost:
    """Sum over `body`; a guard counts as taken."""
    total = FREE
    for op in body:
        total = total + COSTS[type(op)](op)
    return total


def task_cost(task: Task) -> Cost:
    """Cost of one tile of `task`."""
    return body_cost(task.body)
