"""The Triton text of each op, in a table."""

from __future__ import annotations

from collections.abc import Callable

from tileweave.codegen.gemm import gemm_loop
from tileweave.codegen.layout import COUNTER_BYTES
from tileweave.codegen.triton.functions import TRITON_FUNCTIONS
from tileweave.codegen.triton.network import emit_put, emit_signal
from tileweave.codegen.triton.tma import descriptors, load_text
from tileweave.codegen.triton.writer import WIDEN, TaskWriter, Tile, literal, locate
from tileweave.primitives.dtypes import int32
from tileweave.primitives.expr import Binary, Const, Expr, Rank
from tileweave.primitives.memory import Rows, Signal, Slice
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
)


def emit_body(writer: TaskWriter, body: tuple[Op, ...]) -> None:
    """All ops of `body` in order."""
    for op in body:
        EMIT[type(op)](writer, op)


def _assign(writer: TaskWriter, value: Value, text: str) -> None:
    writer.line(f"{writer.value(value)} = {text}")


def _load(writer: TaskWriter, op: Load) -> None:
    writer.note(op)
    if op.result.id in writer.descriptors:
        _assign(writer, op.result, load_text(writer, op, writer.descriptors[op.result.id]))
        return
    place = locate(writer, Tile(op.memory, op.index, op.peer, op.result))
    other = "0" if op.memory.dtype == int32 else "0.0"
    masked = f"{place.masked}, other={other}" if place.mask else ""
    _assign(writer, op.result, f"tl.load({place.pointer}{masked})")


def _store(writer: TaskWriter, op: Store) -> None:
    writer.note(op)
    sliced = [item for item in op.index if isinstance(item, (Slice, Rows))]
    masks = [
        mask
        for axis, item in enumerate(sliced)
        if op.value.extents[axis] not in (item.extent, Const(item.size)) and (mask := writer.inside(op.value, axis))
    ]
    place = locate(writer, Tile(op.memory, op.index, op.peer, op.value), masks)
    value = writer.rounded(op.value, op.memory.dtype)
    writer.line(f"tl.store({place.pointer}, {value}{place.masked})")


def _copy(writer: TaskWriter, op: Copy) -> None:
    assert writer.network is not None, f"copies are expanded before text is written, but for puts between nodes: {op}"
    emit_put(writer, writer.network, op)


def _fill(writer: TaskWriter, op: Fill) -> None:
    writer.note(op)
    _assign(writer, op.result, f"tl.full({writer.blocks.of[op.result.id]}, {literal(op.value)}, tl.float32)")


def _dot(writer: TaskWriter, op: Dot) -> None:
    writer.note(op)
    a, b = _depth_masked(writer, op.a, 1, op.b.extents[0]), _depth_masked(writer, op.b, 0, op.a.extents[1])
    if op.a.dtype != op.b.dtype:
        a, b = WIDEN[op.a.dtype].format(a), WIDEN[op.b.dtype].format(b)
    _assign(writer, op.accumulator, f"dot({a}, {b}, {writer.value(op.accumulator)})")


def _depth_masked(writer: TaskWriter, value: Value, axis: int, other_extent: Expr) -> str:
    """An operand that is zero past the depth; loads are, if both sides end at one place."""
    name = writer.value(value)
    if value.id in writer.zero_filled and value.extents[axis] == other_extent:
        return name
    masks = [mask for extent in (value.extents[axis], other_extent) if (mask := _within(writer, value, axis, extent))]
    return f"tl.where({' & '.join(dict.fromkeys(masks))}, {name}, 0.0)" if masks else name


def _within(writer: TaskWriter, value: Value, axis: int, extent: Expr) -> str | None:
    if extent == Const(writer.blocks.of[value.id][axis]):
        return None
    return f"({writer.lanes(value, axis)} < {writer.scalar(extent)})"


def _elementwise(writer: TaskWriter, op: Elementwise) -> None:
    writer.note(op)
    operands = [writer.operand(o) for o in op.operands]
    _assign(writer, op.result, TRITON_FUNCTIONS[op.function].format(*operands))


def _cast(writer: TaskWriter, op: Cast) -> None:
    writer.note(op)
    _assign(writer, op.result, writer.rounded(op.value, op.result.dtype))


def _expand(writer: TaskWriter, op: Expand) -> None:
    _assign(writer, op.result, f"tl.expand_dims({writer.value(op.value)}, {op.axis})")


def _transpose(writer: TaskWriter, op: Transpose) -> None:
    _assign(writer, op.result, f"tl.trans({writer.value(op.value)})")


def _reduce(writer: TaskWriter, op: Reduce) -> None:
    writer.note(op)
    neutral = {"sum": 0.0, "max": float("-inf")}[op.function]
    text, mask = writer.operand(op.value), writer.inside(op.value, op.axis)
    if mask:
        text = f"tl.where({mask}, {text}, {literal(neutral)})"
    _assign(writer, op.result, f"tl.{op.function}({text}, axis={op.axis}, keep_dims=True)")


def _update(writer: TaskWriter, op: Update) -> None:
    """Outside the extents of the new value the accumulator keeps what it has."""
    writer.note(op)
    text = writer.operand(op.value)
    masks = [
        mask
        for axis, extent in enumerate(op.target.extents)
        if op.value.extents[axis] != extent and (mask := writer.inside(op.value, axis))
    ]
    if masks:
        text = f"tl.where({' & '.join(masks)}, {text}, {writer.value(op.target)})"
    _assign(writer, op.target, text)


def _counter(writer: TaskWriter, signal: Signal, index: tuple[Expr, ...], peer: str) -> str:
    offset = writer.lowered.segment.offset_bytes[signal.name] // COUNTER_BYTES
    at = writer.scalar.linear(index, signal.dims)
    return f"pointer(address(heap, {peer}), tl.int64) + counters + {offset} + {at}"


def _signal(writer: TaskWriter, op: SignalOp) -> None:
    if writer.network is not None and op.peer not in (None, Rank()):
        emit_signal(writer, writer.network, op)
        return
    writer.note(op)
    peer = "rank" if op.peer is None else writer.scalar(op.peer)
    counter = _counter(writer, op.signal, op.index, peer)
    if writer.tma:
        writer.line("proxy_fence()")
    writer.line(f"signal({counter}, {writer.scalar(op.amount)}, {_ordering(op)})")


def _wait(writer: TaskWriter, op: WaitOp) -> None:
    writer.note(op)
    counter = _counter(writer, op.signal, op.index, "rank")
    at = writer.scalar.linear(op.index, op.signal.dims)
    site = writer.lowered.site_of[id(op)]
    writer.line(f"wait({counter}, {writer.scalar(op.target)}, launch, {site}, {at}, {_ordering(op)})")
    if writer.tma:
        writer.line("proxy_fence()")


def _fence(writer: TaskWriter, op: Fence) -> None:
    writer.note(op)
    writer.line(f"fence({_ordering(op)})")


def _ordering(op: SignalOp | WaitOp | Fence) -> str:
    # A fence is sequentially at least acquire and release: PTX has no weaker one.
    order = Order.ACQ_REL if isinstance(op, Fence) else op.order
    return f'"{order.value}", "{op.scope.value}"'


def _for(writer: TaskWriter, op: For) -> None:
    writer.note(op)
    start, stop = writer.scalar(op.start), writer.scalar(op.stop)
    staged = ""
    gemm = gemm_loop(op)
    if gemm is not None:
        # The bound stays a run-time value: a loop of known length would be unrolled, and spill.
        stop, staged = f"{stop} + zero", ", num_stages=STAGES"
    if isinstance(op.start, Const) and isinstance(op.stop, Const) and op.stop.value > op.start.value:
        last = op.start.value + (op.stop.value - op.start.value - 1) // op.step * op.step
        writer.known[op.index] = op.start.value, last
    if gemm is not None and writer.tma:
        writer.descriptors |= descriptors(writer, gemm)
    with writer.block(f"for k{op.index.id} in tl.range({start}, {stop}, {op.step}{staged}):"):
        emit_body(writer, op.body)


def _when(writer: TaskWriter, op: When) -> None:
    """Conditions joined by `and` nest, so that a later one is evaluated only where the earlier hold."""
    writer.note(op)
    _guard(writer, _conjunction(op.condition), op.body)


def _guard(writer: TaskWriter, conditions: list[Expr], body: tuple[Op, ...]) -> None:
    if not conditions:
        emit_body(writer, body)
        return
    with writer.block(f"if {writer.scalar.truth(conditions[0])}:"):
        _guard(writer, conditions[1:], body)


def _conjunction(condition: Expr) -> list[Expr]:
    if isinstance(condition, Binary) and condition.op == "and":
        return _conjunction(condition.lhs) + _conjunction(condition.rhs)
    return [condition]


EMIT: dict[type[Op], Callable[..., None]] = {
    Load: _load,
    Store: _store,
    Copy: _copy,
    Fill: _fill,
    Dot: _dot,
    Elementwise: _elementwise,
    Cast: _cast,
    Expand: _expand,
    Transpose: _transpose,
    Reduce: _reduce,
    Update: _update,
    SignalOp: _signal,
    WaitOp: _wait,
    Fence: _fence,
    For: _for,
    When: _when,
}
"""Op class → text."""
