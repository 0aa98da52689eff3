"""The C text of each op, in a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tileweave.codegen.c.scratch import DOT_TYPES, PURE
from tileweave.codegen.c.writer import C_TYPES, Access, Loop, TaskWriter, literal, narrow_to
from tileweave.compiler.printer import print_op
from tileweave.primitives.expr import Const, Expr
from tileweave.primitives.memory import Slice
from tileweave.primitives.ops import (
    Copy,
    Dot,
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
    copied_extents,
    narrow,
    stored_extents,
)

ORDERS = {order: f"memory_order_{order.value}" for order in Order}


def emit_body(writer: TaskWriter, body: tuple[Op, ...]) -> None:
    """All ops of `body` in order."""
    for op in body:
        EMIT[type(op)](writer, op)


def _emit_nest(writer: TaskWriter, extents: Sequence[Expr], fill: Callable[[Loop], None]) -> None:
    """Loops over `extents`; `fill` adds what happens for one element to the loop."""
    indices = tuple(writer.fresh("i") for _ in extents)
    loop = Loop(writer, indices)
    fill(loop)
    heads = [
        f"for (int64_t {i} = 0, {i}_end = {writer.scalar(e)}; {i} < {i}_end; {i}++)"
        for i, e in zip(indices, extents, strict=True)
    ]
    _nest(writer, heads, loop)


def _nest(writer: TaskWriter, heads: list[str], loop: Loop) -> None:
    if len(heads) > 1:
        with writer.block(heads[0]):
            _nest(writer, heads[1:], loop)
        return
    for text in loop.outer:
        writer.line(text)
    if not heads:
        for text in loop.inner:
            writer.line(text)
        return
    # Iterations touch distinct elements: lowering keeps a value in scratch where a store could overlap its loads.
    writer.lines.append("#pragma GCC ivdep")
    with writer.block(heads[0]):
        for text in loop.inner:
            writer.line(text)


def _pure(writer: TaskWriter, op: Op) -> None:
    value: Value = op.result  # type: ignore[attr-defined]
    if not writer.kept(value):
        return
    writer.note(op)

    def fill(loop: Loop) -> None:
        text = loop.compute(op, loop.indices)
        loop.inner.append(f"{_scratch_at(writer, value, loop.indices)} = {text};")

    with writer.block(""):
        _emit_nest(writer, value.extents, fill)


def _scratch_at(writer: TaskWriter, value: Value, indices: Sequence[str]) -> str:
    at = writer.scalar.linear([*indices], tuple(Const(size) for size in value.shape)) if indices else "0"
    return f"{writer.scratch(value)}[{at}]"


def _fill(writer: TaskWriter, op: Fill) -> None:
    writer.note(op)

    def fill(loop: Loop) -> None:
        loop.inner.append(f"{_scratch_at(writer, op.result, loop.indices)} = {literal(op.value)};")

    with writer.block(""):
        _emit_nest(writer, writer.places.filled[op.result.id], fill)


def _update(writer: TaskWriter, op: Update) -> None:
    writer.note(op)
    extents = [
        narrow(filled, extent, size)
        for filled, extent, size in zip(
            writer.places.filled[op.target.id], op.value.extents, op.target.shape, strict=True
        )
    ]

    def fill(loop: Loop) -> None:
        text = loop.element(op.value, loop.indices)
        loop.inner.append(f"{_scratch_at(writer, op.target, loop.indices)} = {text};")

    with writer.block(""):
        _emit_nest(writer, extents, fill)


def _store(writer: TaskWriter, op: Store) -> None:
    writer.note(op)
    extents = stored_extents(op)
    with writer.block(""):
        if _is_copy(writer, op):
            _store_copy(writer, op, extents)
            return

        def fill(loop: Loop) -> None:
            place, masks = loop.pointer(Access(op.memory, op.index, op.peer, ""), loop.indices)
            _skip_masked(loop, masks)
            value = loop.element(op.value, loop.indices)
            loop.inner.append(f"{place} = {narrow_to(op.memory.dtype, value)};")

        _emit_nest(writer, extents, fill)


def _is_copy(writer: TaskWriter, op: Store) -> bool:
    """A load stored unchanged, contiguous along the inner axis at both ends."""
    source = writer.task.definitions.get(op.value.id)
    if writer.kept(op.value) or not isinstance(source, Load) or source.memory.dtype != op.memory.dtype:
        return False
    return bool(op.value.shape) and all(isinstance(i, Slice) for i in (source.index[-1], op.index[-1]))


def _store_copy(writer: TaskWriter, op: Store, extents: Sequence[Expr]) -> None:
    source = writer.task.definitions[op.value.id]
    assert isinstance(source, Load)
    _copy_rows(
        writer, Access(source.memory, source.index, source.peer, "const "),
        Access(op.memory, op.index, op.peer, ""), extents,
    )  # fmt: skip


def _copy_rows(writer: TaskWriter, source: Access, target: Access, extents: Sequence[Expr]) -> None:
    """Copy contiguous runs of the inner axis; masked source rows give zeros, masked target rows are skipped."""
    indices = tuple(writer.fresh("i") for _ in extents[:-1])
    loop = Loop(writer, (*indices, "inner"))
    to, to_masks = loop.pointer(target, (*indices, "0"))
    _skip_masked(loop, to_masks)
    of, of_masks = loop.pointer(source, (*indices, "0"))
    size = f"(size_t)({writer.scalar(extents[-1])}) * sizeof({C_TYPES[source.memory.dtype]})"
    move = f"memcpy(&{to}, &{of}, {size});"
    if of_masks:
        move = f"if ({' || '.join(f'{m} < 0' for m in of_masks)}) memset(&{to}, 0, {size}); else {move}"
    heads = [
        f"for (int64_t {i} = 0, {i}_end = {writer.scalar(e)}; {i} < {i}_end; {i}++)"
        for i, e in zip(indices, extents[:-1], strict=True)
    ]
    for head in heads:
        writer.line(f"{head} {{")
        writer.depth += 1
    for text in (*loop.outer, *loop.inner, move):
        writer.line(text)
    for _ in heads:
        writer.depth -= 1
        writer.line("}")


def _skip_masked(loop: Loop, masks: list[str]) -> None:
    if masks:
        where = loop.inner if any(m in " ".join(loop.inner).split() for m in masks) else loop.outer
        where.append(f"if ({' || '.join(f'{m} < 0' for m in masks)}) continue;")


def _copy(writer: TaskWriter, op: Copy) -> None:
    writer.note(op)
    extents = copied_extents(op)
    source = Access(op.source, op.source_index, op.source_peer, "const ")
    target = Access(op.target, op.target_index, op.target_peer, "")
    contiguous = bool(extents) and all(isinstance(i, Slice) for i in (op.source_index[-1], op.target_index[-1]))
    with writer.block(""):
        if contiguous:
            _copy_rows(writer, source, target, extents)
            return

        def fill(loop: Loop) -> None:
            to, masks = loop.pointer(target, loop.indices)
            _skip_masked(loop, masks)
            of, source_masks = loop.pointer(source, loop.indices)
            guard = f"{' || '.join(f'{m} < 0' for m in source_masks)} ? 0 : " if source_masks else ""
            loop.inner.append(f"{to} = {guard}{of};")

        _emit_nest(writer, extents, fill)


@dataclass(frozen=True)
class _View:
    """A matrix in memory: pointer, element type, and the stride of each of its axes."""

    pointer: str
    dtype: str
    strides: tuple[str, str]

    @property
    def transposed(self) -> _View:
        """The same memory with its axes exchanged."""
        return _View(self.pointer, self.dtype, self.strides[::-1])

    def operand(self) -> str:
        """A `tw_operand` whose rows are axis 0 and whose depth is axis 1."""
        k_major = self.strides[1] != "1"
        lead = self.strides[1] if k_major else self.strides[0]
        return f"(tw_operand){{{self.pointer}, {lead}, {self.dtype}, {int(k_major)}}}"


def _view(writer: TaskWriter, value: Value) -> _View:
    if writer.kept(value):
        return _View(writer.scratch(value), "TW_F32", (str(value.shape[1]), "1"))
    op = writer.task.definitions[value.id]
    if isinstance(op, Transpose):
        return _view(writer, op.value).transposed
    assert isinstance(op, Load), f"{print_op(op)} is no view"
    loop = Loop(writer, ())
    pointer, _ = loop.pointer(Access(op.memory, op.index, op.peer, "const "), ("0", "0"))
    for text in loop.outer:
        writer.line(text)
    axes = [axis for axis, item in enumerate(op.index) if not isinstance(item, Expr)]
    first, second = (writer.scalar.stride(op.memory.dims, axis) for axis in axes)
    return _View(f"&{pointer}", DOT_TYPES[op.memory.dtype], (first, second))


def _dot(writer: TaskWriter, op: Dot) -> None:
    writer.note(op)
    with writer.block(""):
        a, b = _view(writer, op.a), _view(writer, op.b).transposed
        depth = narrow(op.a.extents[1], op.b.extents[0], op.a.shape[1])
        sizes = f"{writer.scalar(op.a.extents[0])}, {writer.scalar(op.b.extents[1])}, {writer.scalar(depth)}"
        accumulator = f"{writer.scratch(op.accumulator)}, {op.accumulator.shape[1]}"
        writer.line(f"tw_dot({sizes}, {a.operand()}, {b.operand()}, {accumulator}, dot_scratch);")


def _reduce(writer: TaskWriter, op: Reduce) -> None:
    writer.note(op)
    start = {"sum": "0.0f", "max": "(-__builtin_inff())"}[op.function]
    step = {"sum": "{0} + {1}", "max": "tw_fmax({0}, {1})"}[op.function]
    outer = [e for axis, e in enumerate(op.value.extents) if axis != op.axis]
    with writer.block(""):
        indices = tuple(writer.fresh("i") for _ in outer)
        for i, extent in zip(indices, outer, strict=True):
            writer.line(f"for (int64_t {i} = 0, {i}_end = {writer.scalar(extent)}; {i} < {i}_end; {i}++) {{")
            writer.depth += 1
        along = writer.fresh("i")
        total = writer.fresh("s")
        writer.line(f"float {total} = {start};")
        loop = Loop(writer, (*indices, along))
        text = loop.element(op.value, (*indices[: op.axis], along, *indices[op.axis :]))
        for line in loop.outer:
            writer.line(line)
        end = writer.scalar(op.value.extents[op.axis])
        with writer.block(f"for (int64_t {along} = 0, {along}_end = {end}; {along} < {along}_end; {along}++)"):
            for line in loop.inner:
                writer.line(line)
            writer.line(f"{total} = {step.format(total, text)};")
        at = (*indices[: op.axis], "0", *indices[op.axis :])
        writer.line(f"{_scratch_at(writer, op.result, at)} = {total};")
        for _ in outer:
            writer.depth -= 1
            writer.line("}")


def _signal(writer: TaskWriter, op: SignalOp) -> None:
    writer.note(op)
    rank = "rank" if op.peer is None else writer.scalar(op.peer)
    counter = f"tw_counter(launch, {rank}, {writer.lowered.segment.offset_bytes[op.signal.name]})"
    index = writer.scalar.linear([writer.scalar(i) for i in op.index], op.signal.dims)
    writer.line(f"tw_signal_order({counter} + ({index}), {writer.scalar(op.amount)}, {ORDERS[op.order]});")


def _wait(writer: TaskWriter, op: WaitOp) -> None:
    writer.note(op)
    counter = f"tw_counter(launch, rank, {writer.lowered.segment.offset_bytes[op.signal.name]})"
    number, site = writer.lowered.number_of[op.signal.name], writer.lowered.site_of[id(op)]
    with writer.block(""):
        writer.line(f"const int64_t at = {writer.scalar.linear([writer.scalar(i) for i in op.index], op.signal.dims)};")
        target = f"(uint64_t)tw_max({writer.scalar(op.target)}, 0)"
        writer.line(f"if (tw_wait(&worker->base, {counter} + at, {target}, {site}, {number}, at)) return 1;")


def _fence(writer: TaskWriter, op: Fence) -> None:
    writer.note(op)
    writer.line(f"atomic_thread_fence({ORDERS[op.order]});")


def _for(writer: TaskWriter, op: For) -> None:
    writer.note(op)
    i = f"k{op.index.id}"
    start, stop = writer.scalar(op.start), writer.scalar(op.stop)
    head = f"for (int64_t {i} = {start}, {i}_end = {stop}; {i} < {i}_end; {i} += {op.step})"
    with writer.block(head):
        emit_body(writer, op.body)


def _when(writer: TaskWriter, op: When) -> None:
    writer.note(op)
    with writer.block(f"if ({writer.scalar(op.condition)})"):
        emit_body(writer, op.body)


EMIT: dict[type[Op], Callable[..., None]] = {
    **dict.fromkeys(PURE, _pure),
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
