"""The TileLang text of each op, in a table."""

from __future__ import annotations

from collections.abc import Callable

from tileweave.codegen.tilelang.nest import Nest, elements, in_fragments
from tileweave.codegen.tilelang.writer import TILELANG_TYPES, TaskWriter, literal
from tileweave.primitives.expr import Binary, Const, Expr
from tileweave.primitives.memory import Signal
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
    Order,
    Reduce,
    SignalOp,
    Store,
    Transpose,
    Update,
    Value,
    WaitOp,
    When,
    narrow,
    stored_extents,
)


def emit_body(writer: TaskWriter, body: tuple[Op, ...]) -> None:
    """All ops of `body` in order."""
    for op in body:
        EMIT[type(op)](writer, op)


def _pure(writer: TaskWriter, op: Op) -> None:
    """Compute a kept value into its array; any other is computed where it is read."""
    value: Value = op.result  # type: ignore[attr-defined]
    if value.id not in writer.kept:
        return
    writer.note(op)
    with elements(writer, value, value.extents) as nest:
        text = nest.compute(op, nest.at)
        _assign(nest, nest.kept(value, nest.at), text)


def _assign(nest: Nest, place: str, text: str) -> None:
    """`place = text` for every element of the vector."""
    writer = nest.writer
    with writer.blocks((f"for e in T.serial({nest.width}):",) if nest.width > 1 else ()):
        nest.flush()
        writer.line(f"{place} = {text}")


def _fill(writer: TaskWriter, op: Fill) -> None:
    writer.note(op)
    with elements(writer, op.result, tuple(Const(size) for size in op.result.shape)) as nest:
        _assign(nest, nest.kept(op.result, nest.at), literal(op.value))


def _update(writer: TaskWriter, op: Update) -> None:
    """Outside the extents of the new value the accumulator keeps what it has."""
    writer.note(op)
    home = op.target if in_fragments(writer, op.target) else op.value
    with elements(writer, home, op.value.extents) as nest:
        text = nest.operand(op.value, nest.at)
        _assign(nest, nest.kept(op.target, nest.at), text)


def _store(writer: TaskWriter, op: Store) -> None:
    writer.note(op)
    with elements(writer, op.value, stored_extents(op)) as nest:
        spot = nest.spot(op.memory, op.index, op.peer, nest.at)
        with writer.blocks((f"if {spot.condition}:",) if spot.condition else ()):
            source = None if op.value.id in writer.kept else writer.definitions[op.value.id]
            if nest.width > 1 and isinstance(source, Load) and source.memory.dtype == op.memory.dtype:
                nest.copy(source, nest.at, spot)
                return
            text = nest.element(op.value, nest.at)
            if op.value.dtype != op.memory.dtype:
                text = f"T.cast({text}, {TILELANG_TYPES[op.memory.dtype]})"
            if nest.width == 1:
                nest.flush()
                writer.line(f"{spot.text()} = {text}")
                return
            if nest.inner or "(" in text:
                rounded = writer.array("l", (nest.width,), TILELANG_TYPES[op.memory.dtype])
                _assign(nest, f"{rounded}[e]", text)
                text = f"{rounded}[e]"
            with writer.block(f"for e in T.vectorized({nest.width}):"):
                writer.line(f"{spot.text('e')} = {text}")


def _copy(writer: TaskWriter, op: Copy) -> None:
    raise AssertionError(f"copies are expanded before text is written, but one reached {type(writer).__name__}: {op}")


def _dot(writer: TaskWriter, op: Dot) -> None:
    """Element by element; on a GPU main loops are written as a whole instead, by `pipeline.py`."""
    if writer.target != "c":
        raise writer.refuse(
            op, "a dot belongs in a loop over K that does nothing but load tiles and multiply them, with what is done "
            "to the sum after the loop",
        )  # fmt: skip
    writer.note(op)
    depth = narrow(op.a.extents[1], op.b.extents[0], op.a.shape[1])
    i, j, k = (writer.fresh("i") for _ in range(3))
    ranges = ((i, op.a.extents[0]), (j, op.b.extents[1]), (k, depth))
    with writer.blocks(tuple(f"for {name} in T.serial({writer.scalar(extent)}):" for name, extent in ranges)):
        nest = Nest(writer, (i, j, k))
        a, b = nest.operand(op.a, (i, k)), nest.operand(op.b, (k, j))
        nest.flush()
        total = f"t{op.accumulator.id}[{i}, {j}]"
        writer.line(f"{total} = {total} + {a} * {b}")


def _reduce(writer: TaskWriter, op: Reduce) -> None:
    if writer.target != "c":
        raise writer.refuse(op, f"{op.function} over an axis is not written for GPUs yet; use the Triton backend")
    writer.note(op)
    start, step = {"sum": ("0.0", "{0} + {1}"), "max": ('float("-inf")', "T.max({0}, {1})")}[op.function]
    names = tuple(writer.fresh("i") for _ in op.value.shape)
    heads = [f"for {n} in T.serial({writer.scalar(e)}):" for n, e in zip(names, op.value.extents, strict=True)]
    along = heads.pop(op.axis)
    at = tuple("0" if axis == op.axis else name for axis, name in enumerate(names))
    total = f"t{op.result.id}[{', '.join(at)}]"
    with writer.blocks(tuple(heads)):
        writer.line(f"{total} = T.float32({start})")
        with writer.block(along):
            nest = Nest(writer, names)
            text = nest.operand(op.value, names)
            nest.flush()
            writer.line(f"{total} = {step.format(total, text)}")


def _counter(writer: TaskWriter, signal: Signal, index: tuple[Expr, ...], peer: str) -> str:
    """Address of a counter in the set of this launch."""
    at = writer.scalar.linear(index, signal.dims)
    return f"heap[{peer}] + counters + {writer.lowered.segment.offset_bytes[signal.name]} + 8 * {at}"


def _signal(writer: TaskWriter, op: SignalOp) -> None:
    writer.note(op)
    peer = "rank" if op.peer is None else writer.scalar(op.peer)
    counter = _counter(writer, op.signal, op.index, peer)
    writer.line(f"signal({counter}, {writer.scalar(op.amount)}, {_ordering(op)})")


def _wait(writer: TaskWriter, op: WaitOp) -> None:
    writer.note(op)
    counter = _counter(writer, op.signal, op.index, "rank")
    at, site = writer.scalar.linear(op.index, op.signal.dims), writer.lowered.site_of[id(op)]
    writer.line(f"{writer.helpers}wait({counter}, {writer.scalar(op.target)}, launch, {site}, {at}, {_ordering(op)})")


def _fence(writer: TaskWriter, op: Fence) -> None:
    writer.note(op)
    writer.line(f"fence({_ordering(op)})")


def _ordering(op: SignalOp | WaitOp | Fence) -> str:
    # A fence is at least acquire and release: PTX has no weaker one.
    order = Order.ACQ_REL if isinstance(op, Fence) else op.order
    return f'"{order.value}", "{op.scope.value}"'


def _for(writer: TaskWriter, op: For) -> None:
    writer.note(op)
    if id(op) in writer.main_loops:
        writer.main_loops[id(op)](writer)
        return
    start, stop = writer.scalar(op.start), writer.scalar(op.stop)
    step = f", {op.step}" if op.step != 1 else ""
    with writer.block(f"for k{op.index.id} in T.serial({start}, {stop}{step}):"):
        emit_body(writer, op.body)


def _when(writer: TaskWriter, op: When) -> None:
    """Conditions joined by `and` nest, so that a later one is evaluated only where the earlier hold."""
    writer.note(op)
    with writer.blocks(tuple(f"if {writer.scalar(c)}:" for c in _conjunction(op.condition))):
        emit_body(writer, op.body)


def _conjunction(condition: Expr) -> list[Expr]:
    if isinstance(condition, Binary) and condition.op == "and":
        return _conjunction(condition.lhs) + _conjunction(condition.rhs)
    return [condition]


EMIT: dict[type[Op], Callable[..., None]] = {
    **dict.fromkeys((Load, Elementwise, Cast, Expand, Transpose), _pure),
    Store: _store,
    Copy: _copy,
    Fill: _fill,
    Dot: _dot,
    Reduce: _reduce,
    Update: _update,
    SignalOp: _signal,
    WaitOp: _wait,
    Fence: _fence,
    For: _for,
    When: _when,
}
"""Op class → text."""
