"""Boxes of memory: what one access of a task touches, evaluated over all its tiles at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tileweave.primitives.expr import Env, Expr, IntArray, TableRead, evaluate, read_table
from tileweave.primitives.memory import IndexItem, Rows, Slice
from tileweave.primitives.ops import Access

MASKED = np.iinfo(np.int64).min
"""End of a listed row that is skipped."""


@dataclass(frozen=True)
class Boxes:
    """Accesses to one memory, one row a box; `low`/`high` are `[num_boxes, ndim]`, half open.

    `tile` is the accessing tile, `step` its place in the tile's program order, `owner`
    the rank whose memory it is, `op` the index into `Regions.ops`.
    """

    tile: IntArray
    step: IntArray
    owner: IntArray
    op: IntArray
    is_write: npt.NDArray[np.bool_]
    low: IntArray
    high: IntArray


@dataclass(frozen=True)
class Counts:
    """Signals to, or waits on, one counter array; `counter` is the linear index, `amount` the count or target."""

    tile: IntArray
    step: IntArray
    owner: IntArray
    op: IntArray
    counter: IntArray
    amount: IntArray


def ragged_arange(counts: IntArray) -> IntArray:
    """`0 … counts[0]-1, 0 … counts[1]-1, …` end to end."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    offsets: IntArray = np.arange(total, dtype=np.int64) - np.repeat(ends - counts, counts)
    return offsets


def expand_rows(access: Access, env: Env) -> tuple[IntArray, dict[int, IntArray]]:
    """Repeat each tile once a row of its `Rows`; returns the repeat and the rows by axis (−1 for the peer)."""
    listed = {axis: item for axis, item in enumerate(access.index) if isinstance(item, Rows)}
    if isinstance(access.peer, Rows):
        listed[-1] = access.peer
    which = np.arange(len(env.rank), dtype=np.int64)
    if not listed:
        return which, {}
    sliced = [axis for axis, item in enumerate(access.index) if not isinstance(item, Expr)]
    extent = evaluate(access.extents[sliced.index(next(iter(listed)))], env)
    which = np.repeat(which, extent)
    return which, {axis: row_values(rows, env.select(which), ragged_arange(extent)) for axis, rows in listed.items()}


def row_values(rows: Rows, env: Env, offset: IntArray) -> IntArray:
    """Entries of `rows` at `offset` from the slice's start, one an instance of `env`."""
    indices = [evaluate(i.start, env) + offset if isinstance(i, Slice) else evaluate(i, env) for i in rows.index]
    starts = tuple(i.start if isinstance(i, Slice) else i for i in rows.index)
    return read_table(TableRead(rows.table.name, starts, rows.table.dims), indices, env)


def item_range(item: IndexItem, env: Env, rows: IntArray | None, extent: Expr | None) -> tuple[IntArray, IntArray]:
    """Low and high end of `item` on its axis, one an instance; of the listed `rows` if there are any."""
    if rows is not None:
        masked = np.where(rows < 0, MASKED, rows)
        return masked, np.where(rows < 0, MASKED, rows + 1)
    if isinstance(item, Slice):
        assert extent is not None
        start = evaluate(item.start, env)
        return start, start + evaluate(extent, env)
    assert isinstance(item, Expr)
    position = evaluate(item, env)
    return position, position + 1


def peer_ranks(peer: object, env: Env) -> IntArray:
    """The rank that each instance addresses."""
    return env.rank if peer is None else evaluate(peer, env)  # type: ignore[arg-type]


def overlap(reads: Boxes, writes: Boxes) -> tuple[int, int] | None:
    """A read and a write at the same step of a tile that share elements, by their places in `reads` and `writes`."""
    width = 1 + max(int(boxes.step.max(initial=0)) for boxes in (reads, writes))
    read_keys, write_keys = (boxes.tile * width + boxes.step for boxes in (reads, writes))
    order = np.argsort(read_keys, kind="stable")
    first, last = (np.searchsorted(read_keys[order], write_keys, side=side) for side in ("left", "right"))
    write = np.repeat(np.arange(len(write_keys)), last - first)
    read = order[np.repeat(first, last - first) + ragged_arange(last - first)]
    shared = reads.owner[read] == writes.owner[write]
    shared &= ((reads.low[read] < writes.high[write]) & (writes.low[write] < reads.high[read])).all(axis=1)
    found = np.flatnonzero(shared)
    return (int(read[found[0]]), int(write[found[0]])) if len(found) else None


def concat(parts: Sequence[Any]) -> Any:
    """Boxes or counts laid end to end."""
    fields = parts[0].__dataclass_fields__
    return type(parts[0])(**{f: np.concatenate([getattr(p, f) for p in parts]) for f in fields})
