"""Pass 3, regions: what every tile of every rank reads, writes, signals and waits for.

The central idea of Tileweave.  All addresses of a task are scalar expressions, so for a
given routing they are evaluated with NumPy over all tile instances of all ranks at once,
and the exact boxes of memory that each tile touches fall out as arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tileweave.compiler.binding import Routing
from tileweave.compiler.boxes import (
    MASKED,
    Boxes,
    Counts,
    concat,
    expand_rows,
    item_range,
    overlap,
    peer_ranks,
    ragged_arange,
)
from tileweave.compiler.program import Program
from tileweave.compiler.verify import COPIES_APART
from tileweave.errors import BoundsError, RaceError
from tileweave.primitives.expr import Env, EvaluationError, Expr, Index, IntArray, evaluate
from tileweave.primitives.memory import Rows
from tileweave.primitives.ops import Access, Copy, For, Op, SignalOp, WaitOp, When, accesses


@dataclass(frozen=True)
class Instances:
    """The tiles of one task on all ranks: rank-major, then row-major in the grid.

    `first` is the global number of the first one; `env.symbols` holds the grid indices.
    """

    task: int
    first: int
    env: Env

    @property
    def count(self) -> int:
        """Number of tiles on all ranks."""
        return len(self.env.rank)


@dataclass(frozen=True)
class Regions:
    """All tiles and all that they touch, for one routing."""

    program: Program
    routing: Routing
    instances: tuple[Instances, ...]
    ops: tuple[Op, ...]
    boxes: Mapping[str, Boxes]
    signals: Mapping[str, Counts]
    waits: Mapping[str, Counts]

    @property
    def num_tiles(self) -> int:
        """Number of tiles of all tasks on all ranks."""
        return sum(i.count for i in self.instances)

    def task_of(self, tile: IntArray) -> IntArray:
        """Task index of each tile."""
        starts = np.array([i.first for i in self.instances])
        return np.searchsorted(starts, tile, side="right").astype(np.int64) - 1

    def tile_ranks(self) -> IntArray:
        """Executing rank of every tile."""
        return np.concatenate([i.env.rank for i in self.instances])

    def grid_positions(self) -> IntArray:
        """Each tile's place in the grid of its task on its rank, row-major."""
        counts = [np.bincount(i.env.rank, minlength=self.program.world_size) for i in self.instances]
        return np.concatenate([ragged_arange(c) for c in counts])

    def describe(self, tile: int) -> str:
        """`gemm[expert=3, m=0, n=1] on rank 2`."""
        number = int(self.task_of(np.array([tile]))[0])
        instances, task = self.instances[number], self.program.tasks[number]
        at = tile - instances.first
        grid = ", ".join(f"{d}={int(instances.env.symbols[Index(d)][at])}" for d in task.dims)
        return f"{task.name}[{grid}] on rank {int(instances.env.rank[at])}"


def regions(program: Program, routing: Routing) -> Regions:
    """Evaluate every address of `program` for `routing`.

    Raises:
        BoundsError: an access, counter or table read leaves its memory; names tile, rank and line.
        RaceError: source and target of a bulk copy overlap.
    """
    world = np.arange(program.world_size, dtype=np.int64)
    instances: list[Instances] = []
    collector = _Collector(program, routing)
    first = 0
    for number, task in enumerate(program.tasks):
        env = _enumerate_grid(program, number, Env(world, {}, routing.dims, routing.tables))
        tiles = np.arange(first, first + len(env.rank), dtype=np.int64)
        instances.append(Instances(number, first, env))
        first += len(tiles)
        collector.instances = tuple(instances)
        collector.walk(task.body, env, tiles, np.zeros(len(tiles), dtype=np.int64))
    return collector.finish()


def _enumerate_grid(program: Program, number: int, env: Env) -> Env:
    task = program.tasks[number]
    for dim in task.grid:
        try:
            extent = np.maximum(evaluate(dim.extent, env), 0)
        except EvaluationError as error:
            raise BoundsError(f"grid of task '{task.name}': {error}", task.location) from None
        env = env.select(np.repeat(np.arange(len(extent)), extent)).bind(Index(dim.name), ragged_arange(extent))
    return env


@dataclass(frozen=True)
class _At:
    """Tiles at one op: their environment, numbers and steps."""

    env: Env
    tiles: IntArray
    step: IntArray


class _Collector:
    """Walks task bodies, vectorised over tiles, and gathers boxes and counts."""

    def __init__(self, program: Program, routing: Routing) -> None:
        self.program = program
        self.routing = routing
        self.instances: tuple[Instances, ...] = ()
        self.ops: list[Op] = []
        self.boxes: dict[str, list[Boxes]] = {}
        self.signals: dict[str, list[Counts]] = {}
        self.waits: dict[str, list[Counts]] = {}

    def walk(self, body: tuple[Op, ...], env: Env, tiles: IntArray, step: IntArray) -> IntArray:
        """Collect `body` for `tiles`, whose next free step is `step`; returns the step after it."""
        for op in body:
            number = len(self.ops)
            self.ops.append(op)
            try:
                if isinstance(op, When):
                    keep = evaluate(op.condition, env) != 0
                    step = step.copy()
                    step[keep] = self.walk(op.body, env.select(keep), tiles[keep], step[keep])
                elif isinstance(op, For):
                    step = self._loop(op, env, tiles, step)
                else:
                    self._collect(op, number, _At(env, tiles, step))
                    step = step + 1
            except EvaluationError as error:
                raise BoundsError(str(error), op.location) from None
        return step

    def _loop(self, op: For, env: Env, tiles: IntArray, step: IntArray) -> IntArray:
        start, stop = evaluate(op.start, env), evaluate(op.stop, env)
        trips = np.maximum(-((start - stop) // op.step), 0)
        if not trips.size or not trips.max():
            return step
        which = np.repeat(np.arange(len(tiles)), trips)
        iteration = ragged_arange(trips)
        inner = env.select(which).bind(op.index, start[which] + iteration * op.step)
        # One iteration's steps are reserved at the widest that any tile needs, so that order is kept.
        width = _width(op.body, inner)
        self.walk(op.body, inner, tiles[which], step[which] + iteration * width)
        after: IntArray = step + trips * width
        return after

    def _collect(self, op: Op, number: int, at: _At) -> None:
        if isinstance(op, SignalOp):
            peer = at.env.rank if op.peer is None else evaluate(op.peer, at.env)
            self._check_peer(peer, op, at)
            counts = self._counts(op, number, at, peer, self._amount(op, at))
            self.signals.setdefault(op.signal.name, []).append(counts)
        elif isinstance(op, WaitOp):
            counts = self._counts(op, number, at, at.env.rank, evaluate(op.target, at.env))
            self.waits.setdefault(op.signal.name, []).append(counts)
        touched = accesses(op)
        boxes = [self._boxes(access, op, number, at) for access in touched]
        for access, part in zip(touched, boxes, strict=True):
            self.boxes.setdefault(access.memory.name, []).append(part)
        if isinstance(op, Copy) and op.source.name == op.target.name:
            self._check_apart(op, *boxes)

    def _check_apart(self, op: Copy, reads: Boxes, writes: Boxes) -> None:
        pair = overlap(reads, writes)
        if pair is not None:
            tile, rank = self._describe(int(reads.tile[pair[0]])), int(reads.owner[pair[0]])
            raise RaceError(f"{tile} copies '{op.source.name}' onto itself on rank {rank}: {COPIES_APART}", op.location)

    def _amount(self, op: SignalOp, at: _At) -> IntArray:
        amount = evaluate(op.amount, at.env)
        bad = np.flatnonzero(amount < 0)
        if len(bad):
            raise BoundsError(
                f"{self._tile(at, bad[0])} adds {int(amount[bad[0]])} to '{op.signal.name}': counters only grow, so "
                "that a wait cannot pass and then be undone",
                op.location,
            )
        return amount

    def _counts(self, op: SignalOp | WaitOp, number: int, at: _At, owner: IntArray, amount: IntArray) -> Counts:
        linear = np.zeros(len(at.tiles), dtype=np.int64)
        for axis, (item, size) in enumerate(zip(op.index, op.signal.static_shape, strict=True)):
            position = evaluate(item, at.env)
            bad = np.flatnonzero((position < 0) | (position >= size))
            if len(bad):
                raise BoundsError(
                    f"{self._tile(at, bad[0])} uses counter {op.signal.name}[…{int(position[bad[0]])}…] in dimension "
                    f"{axis}, which has size {size}",
                    op.location,
                )
            linear = linear * size + position
        return Counts(at.tiles, at.step, owner, np.full(len(at.tiles), number), linear, amount)

    def _boxes(self, access: Access, op: Op, number: int, at: _At) -> Boxes:
        which, rows = expand_rows(access, at.env)
        env = at.env.select(which)
        extents = iter(access.extents)
        ranges = [
            item_range(item, env, rows.get(axis), None if isinstance(item, Expr) else next(extents))
            for axis, item in enumerate(access.index)
        ]
        owner = rows[-1] if isinstance(access.peer, Rows) else peer_ranks(access.peer, env)
        keep = np.ones(len(which), dtype=bool)
        for low, high in ranges:
            keep &= (low < high) & (low != MASKED)
        self._check_peer(owner[keep], op, _At(env.select(keep), at.tiles[which][keep], at.step[which][keep]))
        boxes = Boxes(
            at.tiles[which][keep], at.step[which][keep], owner[keep], np.full(int(keep.sum()), number),
            np.full(int(keep.sum()), access.kind == "write"),
            np.stack([low[keep] for low, _ in ranges], axis=1), np.stack([high[keep] for _, high in ranges], axis=1),
        )  # fmt: skip
        self._check_bounds(access, op, boxes)
        return boxes

    def _check_bounds(self, access: Access, op: Op, boxes: Boxes) -> None:
        for axis, declared in enumerate(access.memory.dims):
            owners = Env(boxes.owner, {}, self.routing.dims, self.routing.tables)
            size = evaluate(declared, owners)
            bad = np.flatnonzero((boxes.low[:, axis] < 0) | (boxes.high[:, axis] > size))
            if len(bad):
                b = int(bad[0])
                raise BoundsError(
                    f"{self._describe(int(boxes.tile[b]))} {access.kind}s {access.memory.name} at "
                    f"{int(boxes.low[b, axis])} … {int(boxes.high[b, axis])} in dimension {axis}, which has size "
                    f"{int(size[b])} on rank {int(boxes.owner[b])}; limit the slice with tw.ds(…, stop=…)",
                    op.location,
                )

    def _check_peer(self, peer: IntArray, op: Op, at: _At) -> None:
        bad = np.flatnonzero((peer < 0) | (peer >= self.program.world_size))
        if len(bad):
            raise BoundsError(
                f"{self._tile(at, bad[0])} addresses rank {int(peer[bad[0]])} of {self.program.world_size}", op.location
            )

    def _tile(self, at: _At, position: Any) -> str:
        return self._describe(int(at.tiles[int(position)]))

    def _describe(self, tile: int) -> str:
        return Regions(self.program, self.routing, self.instances, (), {}, {}, {}).describe(tile)

    def finish(self) -> Regions:
        """Lay the collected pieces end to end."""
        return Regions(
            self.program, self.routing, self.instances, tuple(self.ops),
            {name: concat(parts) for name, parts in self.boxes.items()},
            {name: concat(parts) for name, parts in self.signals.items()},
            {name: concat(parts) for name, parts in self.waits.items()},
        )  # fmt: skip


def _width(body: tuple[Op, ...], env: Env) -> int:
    total = 0
    for op in body:
        if isinstance(op, For):
            trips = np.maximum(-((evaluate(op.start, env) - evaluate(op.stop, env)) // op.step), 0)
            which = np.repeat(np.arange(len(trips)), trips)
            index = evaluate(op.start, env)[which] + ragged_arange(trips) * op.step
            total += (int(trips.max()) if len(trips) else 0) * _width(op.body, env.select(which).bind(op.index, index))
        elif isinstance(op, When):
            total += _width(op.body, env.select(evaluate(op.condition, env) != 0))
        else:
            total += 1
    return total


def written(boxes: Mapping[str, Boxes]) -> Iterator[tuple[str, Boxes]]:
    """The memories that some tile writes: only these can carry a dependence."""
    for name, box in boxes.items():
        if box.is_write.any():
            yield name, box
