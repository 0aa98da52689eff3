"""Bulk copies as loops of loads and stores, for backends whose unit is a tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tileweave.primitives.dtypes import DType
from tileweave.primitives.expr import Const, Expr, LoopIndex
from tileweave.primitives.memory import IndexItem, Rows, Slice
from tileweave.primitives.ops import (
    Copy,
    For,
    Index,
    Load,
    Op,
    Peer,
    Store,
    Task,
    Value,
    When,
    copied_extents,
    result,
    walk,
)

# Elements of a copy tile along its last axis, and along the one before it.
_CHUNKS = (16, 512)


def expand_copies(task: Task, keep: Callable[[Copy], bool] = lambda _: False) -> Task:
    """`task` with each bulk copy, but those to `keep`, as loops over tiles.

    Before: `copy box[0 +: 7, 0 +: 2048] @ 1 = x[0 +: 7, 0 +: 2048]`
    After:  `for i in 0 .. 7 step 16: for j in 0 .. 2048 step 512: store box[…] @ 1 = load x[…]`
    """
    if not any(isinstance(op, Copy) and not keep(op) for op in walk(task.body)):
        return task
    ids = [value.id for op in walk(task.body) if (value := result(op)) is not None]
    loops = [op.index.id for op in walk(task.body) if isinstance(op, For)]
    fresh = _Fresh(max(ids, default=-1) + 1, max(loops, default=-1) + 1)
    return replace(task, body=_expand(task.body, fresh, keep))


class _Fresh:
    """Numbers for new values and loops."""

    def __init__(self, value: int, loop: int) -> None:
        self._value, self._loop = value, loop

    def value(self, shape: tuple[int, ...], extents: tuple[Expr, ...], dtype: DType) -> Value:
        self._value += 1
        return Value(self._value, shape, extents, dtype)

    def loop(self) -> LoopIndex:
        self._loop += 1
        return LoopIndex(self._loop)


def _expand(body: tuple[Op, ...], fresh: _Fresh, keep: Callable[[Copy], bool]) -> tuple[Op, ...]:
    ops: list[Op] = []
    for op in body:
        if isinstance(op, Copy) and not keep(op):
            ops += _tiled(op, fresh)
        elif isinstance(op, (For, When)):
            ops.append(replace(op, body=_expand(op.body, fresh, keep)))
        else:
            ops.append(op)
    return tuple(ops)


def _tiled(op: Copy, fresh: _Fresh) -> tuple[Op, ...]:
    extents = copied_extents(op)
    sizes = [item.size for item in op.source_index if not isinstance(item, Expr)]
    most = (*[1] * len(sizes), *_CHUNKS)[len(_CHUNKS) :]
    chunks = [min(chunk, size) for chunk, size in zip(most, sizes, strict=True)]
    loops = [fresh.loop() for _ in sizes]
    parts = list(zip(loops, chunks, extents, strict=True))
    source, target = _chunk(op.source_index, parts), _chunk(op.target_index, parts)
    inner = tuple(item.extent for item in source if not isinstance(item, Expr))
    value = fresh.value(tuple(chunks), inner, op.source.dtype)
    body: tuple[Op, ...] = (
        Load(op.location, value, op.source, source, _chunk_peer(op.source_peer, op.source_index, parts)),
        Store(op.location, op.target, target, value, _chunk_peer(op.target_peer, op.target_index, parts)),
    )
    for loop, chunk, extent in reversed(parts):
        body = (For(op.location, loop, Const(0), extent, chunk, body),)
    return body


_Part = tuple[LoopIndex, int, Expr]


def _narrowed(item: Slice, loop: LoopIndex, chunk: int, extent: Expr) -> Slice:
    return Slice(item.start + loop, chunk, item.start + extent)


def _narrowed_rows(rows: Rows, part: _Part) -> Rows:
    return Rows(rows.table, tuple(_narrowed(i, *part) if isinstance(i, Slice) else i for i in rows.index))


def _chunk(index: Index, parts: Sequence[_Part]) -> Index:
    """`index` narrowed to one chunk of every sliced axis."""
    of = iter(parts)

    def one(item: IndexItem) -> IndexItem:
        if isinstance(item, Slice):
            return _narrowed(item, *next(of))
        return _narrowed_rows(item, next(of)) if isinstance(item, Rows) else item

    return tuple(one(item) for item in index)


def _chunk_peer(peer: Peer, index: Index, parts: Sequence[_Part]) -> Peer:
    """Peers listed by a table go with the rows that a table lists."""
    if not isinstance(peer, Rows):
        return peer
    sliced = [item for item in index if not isinstance(item, Expr)]
    return _narrowed_rows(peer, next(p for item, p in zip(sliced, parts, strict=True) if isinstance(item, Rows)))
