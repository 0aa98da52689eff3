"""Programs in a form that a person can read; one printed form per op, in a table."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from tileweave.compiler.program import Program
from tileweave.primitives.expr import Expr
from tileweave.primitives.functions import FUNCTIONS
from tileweave.primitives.memory import IndexItem, Rows, Slice
from tileweave.primitives.ops import (
    Cast,
    Copy,
    Dot,
    Elementwise,
    Expand,
    Fence,
    Fill,
    For,
    Index,
    Load,
    Op,
    Peer,
    Reduce,
    SignalOp,
    Store,
    Task,
    Transpose,
    Update,
    Value,
    WaitOp,
    When,
    nested,
)


def _item(item: IndexItem) -> str:
    if isinstance(item, Slice):
        return f"{item.start} +: {item.size}" + ("" if item.stop is None else f" < {item.stop}")
    if isinstance(item, Rows):
        return f"{item.table.name}[{', '.join(_item(i) for i in item.index)}]"
    return str(item)


def _place(name: str, index: Index | tuple[Expr, ...], peer: Peer) -> str:
    where = "" if peer is None else f" @ {_item(peer)}"
    return f"{name}[{', '.join(_item(i) for i in index)}]{where}"


def _number(value: float) -> str:
    """The shortest text that reads back as the same number, since the printed form is hashed."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def _elementwise(op: Elementwise) -> str:
    operands = [str(o) if isinstance(o, Value) else _number(o) for o in op.operands]
    infix = FUNCTIONS[op.function].infix
    text = f" {infix} ".join(operands) if infix else f"{op.function}({', '.join(operands)})"
    return f"{op.result}: {op.result.type_text} = {text}"


PRINTED: dict[type[Op], Callable[..., str]] = {
    Load: lambda o: f"{o.result}: {o.result.type_text} = load {_place(o.memory.name, o.index, o.peer)}",
    Store: lambda o: f"store {_place(o.memory.name, o.index, o.peer)} = {o.value}",
    Copy: lambda o: (
        f"copy {_place(o.target.name, o.target_index, o.target_peer)} = "
        f"{_place(o.source.name, o.source_index, o.source_peer)}"
    ),
    Fill: lambda o: f"{o.result}: {o.result.type_text} = fill {_number(o.value)}",
    Dot: lambda o: f"{o.accumulator} += dot({o.a}, {o.b})",
    Elementwise: _elementwise,
    Cast: lambda o: f"{o.result}: {o.result.type_text} = cast {o.value}",
    Expand: lambda o: f"{o.result}: {o.result.type_text} = expand {o.value} axis {o.axis}",
    Transpose: lambda o: f"{o.result}: {o.result.type_text} = transpose {o.value}",
    Reduce: lambda o: f"{o.result}: {o.result.type_text} = {o.function} {o.value} axis {o.axis}",
    Update: lambda o: f"{o.target} = {o.value}",
    SignalOp: lambda o: (
        f"signal {_place(o.signal.name, o.index, o.peer)} += {o.amount} ({o.order.value}, {o.scope.value})"
    ),
    WaitOp: lambda o: f"wait {_place(o.signal.name, o.index, None)} >= {o.target} ({o.order.value}, {o.scope.value})",
    Fence: lambda o: f"fence {o.order.value} {o.scope.value}",
    For: lambda o: f"for {o.index} in {o.start} .. {o.stop} step {o.step}:",
    When: lambda o: f"when {o.condition}:",
}


def print_op(op: Op) -> str:
    """One line for `op`, without its body."""
    return PRINTED[type(op)](op)


def place(location: object) -> str:
    """`file.py:12`, without the folder, which differs between machines."""
    return "" if location is None else Path(str(location)).name


def _body(body: tuple[Op, ...], indent: str, locations: bool) -> Iterator[str]:
    for op in body:
        line = indent + print_op(op)
        yield f"{line:<88}  # {place(op.location)}" if locations else line
        yield from _body(nested(op), indent + "  ", locations)


def print_task(task: Task, *, locations: bool = True) -> str:
    """A task with its grid and body."""
    grid = ", ".join(f"{d.name} < {d.extent}" for d in task.grid)
    head = f"  task {task.name}[{grid}] {task.role}"
    return "\n".join([head, *_body(task.body, "    ", locations)])


def print_program(program: Program, *, locations: bool = True) -> str:
    """The whole kernel: memories, then tasks."""
    lines = [f"kernel {program.name} for {program.world_size} ranks"]
    lines += [f"  {memory}" for memory in program.memories]
    lines += [print_task(task, locations=locations) for task in program.tasks]
    return "\n".join(lines) + "\n"


def program_key(program: Program) -> str:
    """A hash of everything that the program means: of its printed form without source locations."""
    return hashlib.sha256(print_program(program, locations=False).encode()).hexdigest()
