"""What each op does, on NumPy arrays.

A tile value is an array of its *extents*, not of its static shape, so what is undefined
does not exist here; an accumulator is a full array. All float types are float32 arrays
in a tile. Where a program reads past an extent, NaN appears.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from tileweave.codegen.reference.machine import Array, Frame, Touch, TouchKind
from tileweave.codegen.reference.storage import STORAGE, narrow, widen
from tileweave.primitives.expr import Expr, IntArray
from tileweave.primitives.functions import FUNCTIONS
from tileweave.primitives.memory import IndexItem, Rows
from tileweave.primitives.ops import (
    Access,
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
    Transpose,
    Update,
    Value,
    WaitOp,
    When,
    accesses,
)


@dataclass(frozen=True, slots=True)
class Blocked:
    """A tile at a wait: `counter` is this rank's array of `op.signal`."""

    frame: Frame
    op: WaitOp
    counter: IntArray
    index: tuple[int, ...]
    target: int

    @property
    def observed(self) -> int:
        """The count now."""
        return int(self.counter[self.index])

    @property
    def is_open(self) -> bool:
        """Whether the wait is over."""
        return self.observed >= self.target


Steps: TypeAlias = Iterator[Blocked | None]
"""A running body: stops at each op that others can see, and at each wait that is not over."""


def run(body: tuple[Op, ...], frame: Frame) -> Steps:
    """Run `body` op by op."""
    for op in body:
        steps = MEANING[type(op)](op, frame)
        if steps is not None:
            yield from steps
        elif accesses(op) or isinstance(op, SignalOp):
            yield None


# ---------------------------------------------------------------- memory


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of an access that lies on one rank: `at` in its memory, `inside` the tile."""

    owner: int
    at: tuple[IntArray, ...]
    inside: tuple[Any, ...]


def _locate(access: Access, frame: Frame) -> tuple[tuple[int, ...], list[_Part]]:
    """The extents of an access and its parts; masked rows belong to none."""
    scalars = frame.world.scalars
    rows_axis = next((axis for axis, item in enumerate(access.index) if isinstance(item, Rows)), None)
    valid = iter(access.extents)
    positions = [
        _positions(item, frame)[: None if isinstance(item, Expr) else scalars.value(next(valid), frame)]
        for item in access.index
    ]
    extents = tuple(len(p) for item, p in zip(access.index, positions, strict=True) if not isinstance(item, Expr))
    if rows_axis is None:
        return extents, [_Part(_peer(access, frame), np.ix_(*positions), (...,))]
    rows = positions[rows_axis]
    if isinstance(access.peer, Rows):
        owners = scalars.entries(access.peer, len(rows), frame)
    else:
        owners = np.full(len(rows), _peer(access, frame), dtype=np.int64)
    before = sum(not isinstance(item, Expr) for item in access.index[:rows_axis])
    parts = []
    for owner in np.unique(owners[rows >= 0]).tolist():
        kept = np.flatnonzero((rows >= 0) & (owners == owner))
        at = [rows[kept] if axis == rows_axis else p for axis, p in enumerate(positions)]
        parts.append(_Part(owner, np.ix_(*at), (*(slice(None),) * before, kept)))
    return extents, parts


def _positions(item: IndexItem, frame: Frame) -> IntArray:
    scalars = frame.world.scalars
    if isinstance(item, Rows):
        return scalars.entries(item, scalars.extent(item.slice, frame), frame)
    if isinstance(item, Expr):
        return np.array([scalars.value(item, frame)], dtype=np.int64)
    return scalars.positions(item, frame)


def _peer(access: Access, frame: Frame) -> int:
    assert not isinstance(access.peer, Rows), "a peer a row needs rows in the index"
    return frame.rank if access.peer is None else frame.world.scalars.value(access.peer, frame)


def _read(access: Access, op: Op, frame: Frame) -> Array:
    """The accessed tile in its storage dtype; masked rows are zero."""
    extents, parts = _locate(access, frame)
    arrays = frame.world.memories[access.memory.name]
    tile = np.zeros(extents, dtype=STORAGE[access.memory.dtype])
    for part in parts:
        tile[part.inside] = arrays[part.owner][part.at].reshape(tile[part.inside].shape)
    _report(access, op, frame, parts)
    return tile


def _write(access: Access, op: Op, frame: Frame, tile: Array) -> None:
    """Write the valid part of `tile`, in the storage dtype."""
    extents, parts = _locate(access, frame)
    arrays = frame.world.memories[access.memory.name]
    fitted = tile[tuple(slice(size) for size in extents)]
    for part in parts:
        target = arrays[part.owner]
        target[part.at] = fitted[part.inside].reshape(target[part.at].shape)
    _report(access, op, frame, parts)


def _report(access: Access, op: Op, frame: Frame, parts: list[_Part]) -> None:
    observer = frame.world.observer
    if observer is None:
        return
    places = [np.empty((0, 2), dtype=np.int64)]
    for part in parts:
        shape = frame.world.memories[access.memory.name][part.owner].shape
        elements = np.ravel_multi_index(np.broadcast_arrays(*part.at), shape).ravel()
        places.append(np.stack([np.full(len(elements), part.owner), elements], axis=1))
    observer(Touch(frame.tile, op, access.kind, access.memory.name, np.concatenate(places)))


def _load(op: Load, frame: Frame) -> None:
    (access,) = accesses(op)
    raw = _read(access, op, frame)
    frame.values[op.result.id] = widen(raw, op.memory.dtype)


def _store(op: Store, frame: Frame) -> None:
    (access,) = accesses(op)
    _write(access, op, frame, narrow(frame.values[op.value.id], op.memory.dtype))


def _copy(op: Copy, frame: Frame) -> None:
    source, target = accesses(op)
    _write(target, op, frame, _read(source, op, frame))


# ---------------------------------------------------------------- tiles


def _fill(op: Fill, frame: Frame) -> None:
    frame.values[op.result.id] = np.full(op.result.shape, op.value, dtype=np.float32)


def _dot(op: Dot, frame: Frame) -> None:
    a, b, total = (frame.values[v.id] for v in (op.a, op.b, op.accumulator))
    depth = min(a.shape[1], b.shape[0])
    with np.errstate(all="ignore"):
        total[: a.shape[0], : b.shape[1]] += a[:, :depth] @ b[:depth]


def _elementwise(op: Elementwise, frame: Frame) -> None:
    extents = _extents(op.result, frame)
    operands = [_operand(o, op.result, extents, frame) if isinstance(o, Value) else np.float32(o) for o in op.operands]
    with np.errstate(all="ignore"):
        value = FUNCTIONS[op.function].meaning(*operands)
    frame.values[op.result.id] = np.array(np.broadcast_to(value, extents), dtype=np.float32)


def _operand(value: Value, result: Value, extents: tuple[int, ...], frame: Frame) -> Array:
    """An operand in fp32, cut to the extents of the result; dimensions that broadcast keep their size 1."""
    sizes = tuple(
        1 if own == 1 and wide > 1 else size for own, wide, size in zip(value.shape, result.shape, extents, strict=True)
    )
    cut: Array = frame.values[value.id][tuple(slice(size) for size in sizes)]
    return cut.astype(np.float32)


def _extents(value: Value, frame: Frame) -> tuple[int, ...]:
    return tuple(frame.world.scalars.value(e, frame) for e in value.extents)


def _cast(op: Cast, frame: Frame) -> None:
    frame.values[op.result.id] = widen(narrow(frame.values[op.value.id], op.result.dtype), op.result.dtype)


# Both copy, so that a later update of an accumulator does not reach what was made from it.
def _expand(op: Expand, frame: Frame) -> None:
    frame.values[op.result.id] = np.expand_dims(frame.values[op.value.id], op.axis).copy()


def _transpose(op: Transpose, frame: Frame) -> None:
    frame.values[op.result.id] = frame.values[op.value.id].T.copy()


def _reduce(op: Reduce, frame: Frame) -> None:
    tile = frame.values[op.value.id].astype(np.float32)
    if op.function == "max":
        result = tile.max(axis=op.axis, keepdims=True, initial=-np.inf)
    elif tile.shape[op.axis] == 0:
        result = tile.sum(axis=op.axis, keepdims=True)
    else:
        # A running sum is the sum in ascending order; np.sum would add pairwise.
        with np.errstate(all="ignore"):
            result = np.cumsum(tile, axis=op.axis, dtype=np.float32).take([-1], axis=op.axis)
    frame.values[op.result.id] = result


def _update(op: Update, frame: Frame) -> None:
    source = frame.values[op.value.id]
    frame.values[op.target.id][tuple(slice(size) for size in source.shape)] = source


# ---------------------------------------------------------------- synchronisation and control


def _signal(op: SignalOp, frame: Frame) -> None:
    value = frame.world.scalars.value
    owner = frame.rank if op.peer is None else value(op.peer, frame)
    index, amount = tuple(value(i, frame) for i in op.index), value(op.amount, frame)
    frame.world.counters[op.signal.name][owner][index] += amount
    _report_counter(op, frame, owner, index, amount)


def _wait(op: WaitOp, frame: Frame) -> Steps:
    value = frame.world.scalars.value
    counter = frame.world.counters[op.signal.name][frame.rank]
    blocked = Blocked(frame, op, counter, tuple(value(i, frame) for i in op.index), value(op.target, frame))
    while not blocked.is_open:
        yield blocked
    _report_counter(op, frame, frame.rank, blocked.index, blocked.target)


def _report_counter(op: SignalOp | WaitOp, frame: Frame, owner: int, index: tuple[int, ...], amount: int) -> None:
    if frame.world.observer is None:
        return
    shape = frame.world.counters[op.signal.name][owner].shape
    place = np.array([[owner, np.ravel_multi_index(index, shape)]], dtype=np.int64)
    kind: TouchKind = "signal" if isinstance(op, SignalOp) else "wait"
    frame.world.observer(Touch(frame.tile, op, kind, op.signal.name, place, amount))


def _for(op: For, frame: Frame) -> Steps:
    value = frame.world.scalars.value
    for index in range(value(op.start, frame), value(op.stop, frame), op.step):
        frame.symbols[op.index.id] = index
        yield from run(op.body, frame)


def _when(op: When, frame: Frame) -> Steps:
    if frame.world.scalars.value(op.condition, frame):
        yield from run(op.body, frame)


MEANING: Mapping[type[Op], Callable[..., Steps | None]] = {
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
    Fence: lambda op, frame: None,
    For: _for,
    When: _when,
}
"""Op class → `(op, frame)`; a loop, guard or wait returns the steps that remain."""
