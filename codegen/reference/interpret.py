"""Run a Program in one process with NumPy: the oracle for what every backend computes.

All ranks and workers are generators of one thread. Memory is sequentially consistent, so
the interpreter shows a missing dependence only in an order of steps that breaks it; seeds
try such orders.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tileweave.codegen.reference.machine import Array, Frame, Observer, World, make_world
from tileweave.codegen.reference.ops import Blocked, Steps, run
from tileweave.compiler.binding import bind
from tileweave.compiler.program import Program
from tileweave.compiler.regions import Regions, regions
from tileweave.compiler.schedule import Queues, Schedule, build_queues
from tileweave.errors import HangError
from tileweave.primitives.expr import Index


def interpret(
    program: Program,
    schedule: Schedule,
    arguments: Sequence[Mapping[str, Array]],
    *,
    seed: int | None = None,
    observer: Observer | None = None,
) -> None:
    """Run all ranks of `program`; outputs are written in place.

    Args:
        arguments: per rank, dotted argument name → array; bfloat16 tensors are uint16 bit patterns.
        seed: None lets each worker run until it blocks, in turn; a number steps workers in a
            random order, which changes at every load, store, copy and signal.
        observer: called for every access, signal and wait, after it has happened.

    Raises:
        ArgumentError: an argument is missing, or of the wrong shape or dtype.
        BoundsError: an access leaves its memory.
        HangError: nobody can go on; names each wait.
    """
    tiles = regions(program, bind(program, arguments))
    world = make_world(program, tiles.routing, arguments, observer)
    workers = list(_workers(build_queues(schedule, tiles), world))
    if seed is None:
        _run_in_turn(workers, tiles)
    else:
        _run_at_random(workers, tiles, random.Random(seed))


@dataclass
class _Worker:
    """A worker, what it has left to do, and the wait that it stands at."""

    rank: int
    number: int
    steps: Steps
    blocked: Blocked | None = None

    @property
    def can_run(self) -> bool:
        return self.blocked is None or self.blocked.is_open

    def advance(self) -> bool:
        """Go on to the next stop; False at the end of the queue."""
        try:
            self.blocked = next(self.steps)
        except StopIteration:
            return False
        return True


def _workers(queues: Queues, world: World) -> Iterator[_Worker]:
    for rank, lanes in enumerate(queues.lanes):
        for lane, tiles in zip(queues.schedule.lanes, lanes, strict=True):
            shared = deque(tiles.tolist())
            for place, number in enumerate(lane.workers):
                own = deque(tiles[place :: len(lane.workers)].tolist())
                queue = shared if queues.schedule.queue == "dynamic" else own
                yield _Worker(rank, number, _run_queue(queue, queues.regions, world))


def _run_queue(queue: deque[int], tiles: Regions, world: World) -> Steps:
    """Take tiles from `queue`, which others may take from too, until it is empty."""
    while queue:
        frame = _frame(queue.popleft(), tiles, world)
        yield from run(tiles.program.tasks[_task_of(frame.tile, tiles)].body, frame)


def _frame(tile: int, tiles: Regions, world: World) -> Frame:
    task = _task_of(tile, tiles)
    instances = tiles.instances[task]
    at = tile - instances.first
    symbols: dict[str | int, int] = {
        name: int(instances.env.symbols[Index(name)][at]) for name in tiles.program.tasks[task].dims
    }
    return Frame(world, int(instances.env.rank[at]), tile, symbols)


def _task_of(tile: int, tiles: Regions) -> int:
    return next(i.task for i in reversed(tiles.instances) if i.first <= tile and i.count)


def _run_in_turn(workers: list[_Worker], tiles: Regions) -> None:
    """Round robin: each worker runs until it blocks."""
    while workers:
        able = [w for w in workers if w.can_run]
        if not able:
            raise HangError(_describe(workers, tiles))
        for worker in able:
            while worker.can_run:
                if not worker.advance():
                    workers.remove(worker)
                    break


def _run_at_random(workers: list[_Worker], tiles: Regions, choice: random.Random) -> None:
    """A random able worker makes each step."""
    while workers:
        able = [w for w in workers if w.can_run]
        if not able:
            raise HangError(_describe(workers, tiles))
        worker = choice.choice(able)
        if not worker.advance():
            workers.remove(worker)


def _describe(workers: list[_Worker], tiles: Regions) -> str:
    lines = [f"kernel '{tiles.program.name}' hangs: nobody can go on, as"]
    for worker in workers:
        at = worker.blocked
        assert at is not None
        tile = tiles.describe(at.frame.tile).rpartition(" on ")[0]
        counter = f"{at.op.signal.name}[{', '.join(map(str, at.index))}]"
        lines.append(
            f"    rank {worker.rank} worker {worker.number}, {tile}, at {at.op.location or 'an unknown line'}, "
            f"waits for {counter}: expected {at.target}, observed {at.observed}"
        )
    return "\n".join(lines)
