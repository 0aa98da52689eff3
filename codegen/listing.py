"""A launch's tiles listed and sorted on the device that runs them, with no host read.

The same grids and key expressions that the checker evaluates with NumPy are evaluated here
with torch, over arrays of a fixed capacity, so that planning and launch can be captured in
a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tileweave.codegen.lower import MAX_GRID_DIMS, Lowered
from tileweave.primitives.expr import Binary, Const, Dim, Expr, Index, Rank, TableRead
from tileweave.primitives.ops import Task

ENTRY_WORDS = 1 + MAX_GRID_DIMS
"""int32 words of a queue entry: task number and four grid indices."""

TORCH_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "floordiv": lambda a, b: torch.div(a, torch.where(b == 0, 1, b), rounding_mode="floor"),
    "mod": lambda a, b: torch.remainder(a, torch.where(b == 0, 1, b)),
    "min": torch.minimum,
    "max": torch.maximum,
    "lt": lambda a, b: (a < b).long(),
    "le": lambda a, b: (a <= b).long(),
    "eq": lambda a, b: (a == b).long(),
    "ne": lambda a, b: (a != b).long(),
    "and": lambda a, b: ((a != 0) & (b != 0)).long(),
    "or": lambda a, b: ((a != 0) | (b != 0)).long(),
}


@dataclass(frozen=True)
class Bound:
    """What scalar expressions read in one launch of one rank; tables int32, on the device."""

    rank: int
    dims: Mapping[str, int]
    tables: Mapping[str, torch.Tensor]
    device: torch.device


@dataclass(frozen=True)
class Listing:
    """`entries` int32 `[lanes, capacity, 5]`, `counts` int32 `[lanes]`, and the tiles of the fullest lane or task,
    those of its grid's outer dimensions included.

    Where `most` exceeds the capacity, tiles are missing.
    """

    entries: torch.Tensor
    counts: torch.Tensor
    most: torch.Tensor


def list_tiles(lowered: Lowered, bound: Bound, capacity: int) -> Listing:
    """All tiles of one rank by lane, in key order; equal keys keep declaration and grid order."""
    schedule = lowered.schedule
    lists = [_tiles_of(task.task, bound, capacity) for task in lowered.tasks]
    entries = torch.zeros((len(schedule.lanes), capacity, ENTRY_WORDS), dtype=torch.int32, device=bound.device)
    counts, most = [], torch.stack([tiles.most for tiles in lists]).amax()
    lane_of = [schedule.lane_of(n, task.task.role) for n, task in enumerate(lowered.tasks)]
    for number in range(len(schedule.lanes)):
        members = [n for n, lane in enumerate(lane_of) if not isinstance(lane, Const) or lane.value == number]
        if not members:
            counts.append(torch.zeros((), dtype=torch.int64, device=bound.device))
            continue
        keys = [[_evaluate(k, lists[n].indices, bound, capacity) for k in schedule.keys[n]] for n in members]
        columns = [torch.cat(parts) for parts in zip(*keys, strict=True)]
        rows = torch.cat([lists[n].rows(n) for n in members])
        here = [_evaluate(lane_of[n], lists[n].indices, bound, capacity) == number for n in members]
        valid = torch.cat([lists[n].valid & mine for n, mine in zip(members, here, strict=True)])
        order = torch.argsort(columns[-1], stable=True)
        for column in reversed(columns[:-1]):
            order = order[torch.argsort(column[order], stable=True)]
        order = order[torch.argsort((~valid[order]).long(), stable=True)]
        entries[number] = rows[order[:capacity]]
        counts.append(valid.sum())
    totals = torch.stack(counts)
    return Listing(entries, totals.clamp(max=capacity).int(), torch.maximum(most, totals.amax()))


@dataclass(frozen=True)
class _Tiles:
    """Grid indices of one task's tiles, int64 `[capacity]` each, of which the first `count` exist.

    `most` is the largest count of any prefix of the grid: beyond the capacity, tiles got lost on the way.
    """

    indices: Mapping[Expr, torch.Tensor]
    count: torch.Tensor
    most: torch.Tensor
    capacity: int

    @property
    def valid(self) -> torch.Tensor:
        return torch.arange(self.capacity, device=self.count.device) < self.count

    def rows(self, task: int) -> torch.Tensor:
        """Queue entries, int32 `[capacity, 5]`."""
        columns = [torch.full((self.capacity,), task, device=self.count.device), *self.indices.values()]
        columns += [torch.zeros_like(columns[0])] * (ENTRY_WORDS - len(columns))
        return torch.stack(columns, dim=1).int()


def _tiles_of(task: Task, bound: Bound, capacity: int) -> _Tiles:
    """Expand the grid dimension by dimension: each tile so far has as many successors as the extent says."""
    place = torch.arange(capacity, device=bound.device)
    count = most = torch.ones((), dtype=torch.int64, device=bound.device)
    indices: dict[Expr, torch.Tensor] = {}
    for dim in task.grid:
        extent = _evaluate(dim.extent, indices, bound, capacity).clamp(min=0)
        ends = torch.where(place < count, extent, 0).cumsum(0)
        parent = torch.searchsorted(ends, place, right=True).clamp(max=capacity - 1)
        indices = {symbol: values[parent] for symbol, values in indices.items()}
        indices[Index(dim.name)] = place - torch.where(parent > 0, ends[parent - 1], 0)
        count = ends[-1]
        most = torch.maximum(most, count)
    return _Tiles(indices, count, most, capacity)


def _evaluate(expr: Expr, indices: Mapping[Expr, torch.Tensor], bound: Bound, capacity: int) -> torch.Tensor:
    """`expr` for all tiles at once, int64 `[capacity]`; tiles past the last give anything."""
    if isinstance(expr, (Const, Rank, Dim)):
        value = (
            expr.value if isinstance(expr, Const) else bound.rank if isinstance(expr, Rank) else bound.dims[expr.name]
        )
        return torch.full((capacity,), value, dtype=torch.int64, device=bound.device)
    if isinstance(expr, Index):
        return indices[expr]
    if isinstance(expr, TableRead):
        table = bound.tables[expr.table]
        at = torch.zeros(capacity, dtype=torch.int64, device=bound.device)
        for axis, index in enumerate(expr.indices):
            at = at * table.shape[axis] + _evaluate(index, indices, bound, capacity)
        if not table.numel():
            return torch.zeros_like(at)
        return table.reshape(-1)[at.clamp(0, table.numel() - 1)].long()
    assert isinstance(expr, Binary), f"no torch reading for {type(expr).__name__}"
    lhs, rhs = (_evaluate(side, indices, bound, capacity) for side in (expr.lhs, expr.rhs))
    result: torch.Tensor = TORCH_OPERATORS[expr.op](lhs, rhs)
    return result
