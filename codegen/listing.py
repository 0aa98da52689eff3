"""A launch's tiles listed and sorted on the device that runs them, with no host read.

The same grids and key expressions that the checker evaluates with NumPy are evaluated here
with torch, over arrays of a fixed capacity, so that planning and launch can be captured in
a CUDA graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from tileweave.codegen.lower import Lowered
from tileweave.primitives.expr import Binary, Const, Dim, Expr, Index, Rank, TableRead
from tileweave.primitives.ops import Task
from tileweave.primitives.recorder import MAX_GRID_DIMS

ENTRY_WORDS = 1 + MAX_GRID_DIMS
"""int32 words of a queue entry: task number and four grid indices."""

Value: TypeAlias = "torch.Tensor | int"
"""A scalar for all tiles at once, int64 `[capacity]` or `[]`; or a number that is known here and needs no kernel."""

_LAST = (1 << 63) - 1


def _truth(value: Any) -> Value:
    return value.long() if isinstance(value, torch.Tensor) else int(value)


def _divisor(b: Value) -> Value:
    return torch.where(b == 0, 1, b) if isinstance(b, torch.Tensor) else b or 1


def _smaller(a: Value, b: Value) -> Value:
    if isinstance(a, torch.Tensor):
        return torch.minimum(a, b) if isinstance(b, torch.Tensor) else a.clamp(max=b)
    return b.clamp(max=a) if isinstance(b, torch.Tensor) else min(a, b)


def _larger(a: Value, b: Value) -> Value:
    if isinstance(a, torch.Tensor):
        return torch.maximum(a, b) if isinstance(b, torch.Tensor) else a.clamp(min=b)
    return b.clamp(min=a) if isinstance(b, torch.Tensor) else max(a, b)


TORCH_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": lambda a, b: a // _divisor(b),
    "mod": lambda a, b: a % _divisor(b),
    "min": _smaller,
    "max": _larger,
    "lt": lambda a, b: _truth(a < b),
    "le": lambda a, b: _truth(a <= b),
    "eq": lambda a, b: _truth(a == b),
    "ne": lambda a, b: _truth(a != b),
    "and": lambda a, b: _truth((a != 0) & (b != 0)),
    "or": lambda a, b: _truth((a != 0) | (b != 0)),
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
    schedule, device = lowered.schedule, bound.device
    tasks = [_tiles_of(task.task, bound, capacity) for task in lowered.tasks]
    lane_of = [_evaluate(schedule.lane_of(n, t.task.role), tasks[n].reader) for n, t in enumerate(lowered.tasks)]
    keys = [[_evaluate(key, tasks[n].reader) for key in schedule.keys[n]] for n in range(len(tasks))]
    entries = torch.zeros((len(schedule.lanes), capacity, ENTRY_WORDS), dtype=torch.int32, device=device)
    totals: list[torch.Tensor] = []
    for number in range(len(schedule.lanes)):
        members = [n for n, lane in enumerate(lane_of) if isinstance(lane, torch.Tensor) or lane == number]
        if not members:
            totals.append(torch.zeros((), dtype=torch.int64, device=device))
            continue
        own = [_in_lane(tasks[n].valid, lane_of[n], number) for n in members]
        valid = torch.cat(own)
        order = _order([keys[n] for n in members], valid, capacity)
        entries[number] = torch.cat([tasks[n].rows(n) for n in members])[order[:capacity]]
        totals.append(valid.sum())
    counts = torch.stack(totals)
    most: Value = counts.amax()
    for each in tasks:
        most = _larger(most, each.most)
    assert isinstance(most, torch.Tensor)
    return Listing(entries, counts.clamp(max=capacity).int(), most)


def _in_lane(valid: torch.Tensor, lane: Value, number: int) -> torch.Tensor:
    return valid & (lane == number) if isinstance(lane, torch.Tensor) else valid


def _order(keys: Sequence[Sequence[Value]], valid: torch.Tensor, capacity: int) -> torch.Tensor:
    """Positions of the tiles of a lane in key order, those that are not `valid` last.

    `keys[i]` are those of task i's `capacity` places, most significant first. One stable sort a column, last column
    first; a column that is one number for all tasks sorts nothing.
    """
    columns = [parts for parts in zip(*keys, strict=True) if isinstance(parts[0], torch.Tensor) or len(set(parts)) > 1]
    if not columns:
        return torch.argsort((~valid).to(torch.uint8), stable=True)
    order: torch.Tensor | None = None
    for number in reversed(range(len(columns))):
        column = torch.cat([_spread(part, capacity, valid.device) for part in columns[number]])
        if number == 0:
            column = column.masked_fill(~valid, _LAST)
        if order is None:
            order = torch.argsort(column, stable=True)
        else:
            order = order[torch.argsort(column[order], stable=True)]
    assert order is not None
    return order


def _spread(value: Value, capacity: int, device: torch.device) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.expand(capacity)
    return torch.full((capacity,), value, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class _Reader:
    """Where scalars of one task's tiles are evaluated, and what has been, so that each is evaluated once."""

    bound: Bound
    indices: Mapping[Expr, torch.Tensor]
    known: dict[Expr, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class _Tiles:
    """One task's tiles in `capacity` places, of which the first `count` hold one; `reader` has their grid indices.

    `most` is the largest count of any prefix of the grid: beyond the capacity, tiles got lost on the way.
    """

    reader: _Reader
    place: torch.Tensor
    count: Value
    most: Value

    @property
    def valid(self) -> torch.Tensor:
        return self.place < self.count

    def rows(self, task: int) -> torch.Tensor:
        """Queue entries, int32 `[capacity, 5]`."""
        entries = self.place.new_zeros((len(self.place), ENTRY_WORDS), dtype=torch.int32)
        entries[:, 0].fill_(task)
        for column, values in enumerate(self.reader.indices.values(), 1):
            entries[:, column] = values
        return entries


def _tiles_of(task: Task, bound: Bound, capacity: int) -> _Tiles:
    """Expand the grid dimension by dimension: each tile so far has as many successors as the extent says."""
    place = torch.arange(capacity, device=bound.device)
    count: Value = 1
    most: Value = 1
    indices: dict[Expr, torch.Tensor] = {}
    for dim in task.grid:
        extent = _larger(_evaluate(dim.extent, _Reader(bound, indices)), 0)
        if isinstance(extent, int):
            parent, own = place // max(extent, 1), place % max(extent, 1)
            count = count * extent
        else:
            ends = torch.where(place < count, extent, 0).cumsum(0)
            parent = torch.searchsorted(ends, place, right=True).clamp(max=capacity - 1)
            own = place - torch.where(parent > 0, ends[parent - 1], 0)
            count = ends[-1]
        indices = {symbol: values[parent] for symbol, values in indices.items()}
        indices[Index(dim.name)] = own
        most = _larger(most, count)
    return _Tiles(_Reader(bound, indices), place, count, most)


def _evaluate(expr: Expr, reader: _Reader) -> Value:
    """`expr` for all tiles at once; places past the last tile give anything."""
    found = reader.known.get(expr)
    if found is None:
        found = reader.known[expr] = _evaluate_anew(expr, reader)
    return found


def _evaluate_anew(expr: Expr, reader: _Reader) -> Value:
    bound = reader.bound
    if isinstance(expr, Const):
        return expr.value
    if isinstance(expr, Rank):
        return bound.rank
    if isinstance(expr, Dim):
        return bound.dims[expr.name]
    if isinstance(expr, Index):
        return reader.indices[expr]
    if isinstance(expr, TableRead):
        table = bound.tables[expr.table]
        if not table.numel():
            return 0
        at: Value = 0
        for axis, index in enumerate(expr.indices):
            at = at * table.shape[axis] + _evaluate(index, reader)
        last, flat = table.numel() - 1, table.reshape(-1)
        if isinstance(at, int):
            return flat[min(max(at, 0), last)].long()
        return flat[at.clamp(0, last)].long()
    assert isinstance(expr, Binary), f"no torch reading for {type(expr).__name__}"
    result: Value = TORCH_OPERATORS[expr.op](_evaluate(expr.lhs, reader), _evaluate(expr.rhs, reader))
    return result
