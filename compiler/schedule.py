"""Pass 5, schedule: who runs which tile, and in what order.

A schedule is a value; each verb below returns a new one.  It holds no tiles: its sort
keys are scalar expressions, evaluated here with NumPy for printing and checking, and in
the emitted code at launch, so that what is checked is what runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from tileweave.compiler.circles import circle
from tileweave.compiler.config import Config, QueueKind
from tileweave.compiler.edges import EDGE_KINDS, Edges
from tileweave.compiler.graph import Graph
from tileweave.compiler.order import Key, keys_of
from tileweave.compiler.program import Program
from tileweave.compiler.regions import Regions
from tileweave.compiler.topology import Topology
from tileweave.errors import DeadlockError, SourceLocation
from tileweave.primitives.expr import Const, Expr, IntArray, evaluate
from tileweave.primitives.ops import ROLES, Role


@dataclass(frozen=True)
class Lane:
    """A queue: the roles whose tiles it holds, the workers that serve it, and the kernel that they are programs of."""

    name: str
    roles: tuple[Role, ...]
    workers: tuple[int, ...]
    kernel: Literal["megakernel", "companion"] = "megakernel"


@dataclass(frozen=True)
class Schedule:
    """Lanes, the kind of their queues, and a sort key for each task (`order` names where the keys come from).

    `off_node` says for each task which of its tiles are the companion's, as a condition on the tile.
    """

    lanes: tuple[Lane, ...]
    queue: QueueKind
    order: str
    keys: tuple[Key, ...]
    topology: Topology
    off_node: tuple[Expr, ...]

    @property
    def num_workers(self) -> int:
        """Workers of all lanes."""
        return sum(len(lane.workers) for lane in self.lanes)

    def lanes_of(self, kernel: str) -> list[tuple[int, Lane]]:
        """The lanes that a kernel serves, with their indices."""
        return [(n, lane) for n, lane in enumerate(self.lanes) if lane.kernel == kernel]

    def lane_of(self, number: int, role: Role) -> Expr:
        """Index of the lane that runs a tile of task `number`, as a scalar of the tile."""
        own = next(n for n, lane in enumerate(self.lanes) if role in lane.roles)
        companion = len(self.lanes) - 1
        return own + self.off_node[number] * (companion - own)


def initial_schedule(program: Program) -> Schedule:
    """One worker, one static queue, program order."""
    lanes = (Lane("all", ROLES, (0,)),)
    together = (Const(0),) * len(program.tasks)
    one_node = Topology.one_node(program.world_size)
    return Schedule(lanes, "static", "program", keys_of(program, "program"), one_node, together)


def reorder(schedule: Schedule, program: Program, order: str) -> Schedule:
    """Sort each lane by another order.

    Before: `dispatch[0] dispatch[1] gemm[0] gemm[1]` (program)
    After:  `dispatch[0] gemm[0] dispatch[1] gemm[1]` (expert_ascending)
    """
    return replace(schedule, order=order, keys=keys_of(program, order))


def with_workers(schedule: Schedule, workers: int) -> Schedule:
    """Serve one common lane with `workers` workers.

    Before: `lane all: workers 0`
    After:  `lane all: workers 0 1 2`
    """
    return replace(schedule, lanes=(Lane("all", ROLES, tuple(range(workers))),))


def split_workers(schedule: Schedule, comm: int) -> Schedule:
    """Give communication its own lane with the first `comm` workers; 0 leaves the schedule as it is.

    Before: `lane all: workers 0 1 2`
    After:  `lane comm: workers 0` and `lane compute: workers 1 2`
    """
    if comm == 0:
        return schedule
    every = tuple(w for lane in schedule.lanes for w in lane.workers)
    lanes = (Lane("comm", ("comm", "relay"), every[:comm]), Lane("compute", ("compute", "reduce"), every[comm:]))
    return replace(schedule, lanes=lanes)


def with_queue(schedule: Schedule, queue: QueueKind) -> Schedule:
    """Take tiles from a static queue a worker, or from one atomic counter a lane.

    Before: `static: worker 0: a c, worker 1: b d`
    After:  `dynamic: workers 0 1: a b c d`
    """
    return replace(schedule, queue=queue)


def build_schedule(program: Program, config: Config) -> Schedule:
    """The schedule that `config` asks for."""
    schedule = reorder(initial_schedule(program), program, config.order)
    schedule = split_workers(with_workers(schedule, config.workers), config.comm_workers)
    return with_queue(schedule, config.queue)


@dataclass(frozen=True)
class Queues:
    """A schedule's tiles for one routing: `lanes[rank][lane]` lists tile numbers in order."""

    schedule: Schedule
    regions: Regions
    lanes: tuple[tuple[IntArray, ...], ...]

    def workers(self, rank: int) -> Iterator[tuple[int, IntArray]]:
        """`(worker, its tiles)` of a static schedule; a dynamic one gives each lane's to its first worker."""
        for lane, tiles in zip(self.schedule.lanes, self.lanes[rank], strict=True):
            if self.schedule.queue == "dynamic":
                yield lane.workers[0], tiles
                continue
            for place, worker in enumerate(lane.workers):
                yield worker, tiles[place :: len(lane.workers)]

    def __str__(self) -> str:
        return print_queues(self)


def build_queues(schedule: Schedule, regions: Regions) -> Queues:
    """Evaluate the keys and sort every lane of every rank; equal keys keep declaration and grid order."""
    columns = []
    for column in range(len(schedule.keys[0])):
        parts = [evaluate(schedule.keys[i.task][column], i.env) for i in regions.instances]
        columns.append(np.concatenate(parts))
    lane = np.concatenate(
        [evaluate(schedule.lane_of(i.task, regions.program.tasks[i.task].role), i.env) for i in regions.instances]
    )
    rank = regions.tile_ranks()
    tile = np.arange(regions.num_tiles, dtype=np.int64)
    order = np.lexsort((tile, *reversed(columns), lane, rank))
    slot = (rank * len(schedule.lanes) + lane)[order]
    cuts = np.searchsorted(slot, np.arange(regions.program.world_size * len(schedule.lanes) + 1))
    pieces = [tile[order][a:b] for a, b in pairwise(cuts)]
    width = len(schedule.lanes)
    return Queues(
        schedule, regions, tuple(tuple(pieces[r * width : (r + 1) * width]) for r in range(regions.program.world_size))
    )


def check_progress(graph: Graph, queues: Queues) -> None:
    """Refuse a schedule that could hang.

    The union of all dependences with the order of every lane must be acyclic.  Then some
    tile can always run, whatever the number of workers that serve a lane: the first
    unfinished tile in a topological order has been taken or is next in its lane, and all
    that it waits for is done.

    Raises:
        DeadlockError: with one shortest circle, tile by tile.
    """
    edges = Edges.join([graph.edges, Edges.of("lane", *_queue_edges(graph, queues))])
    found = circle(edges, graph.num_nodes)
    if found:
        _refuse_circle(graph, queues, edges, found)


_REASONS = {
    "sync": "it waits for a signal of",
    "raw": "it reads what is written by",
    "war": "it overwrites what is read by",
    "waw": "it overwrites what is written by",
    "body": "the same tile goes on after",
    "lane": "its lane runs it after",
}


def _refuse_circle(graph: Graph, queues: Queues, edges: Edges, nodes: list[int]) -> None:
    pairs = zip(edges.source.tolist(), edges.target.tolist(), edges.kind.tolist(), strict=True)
    kinds = {(source, target): EDGE_KINDS[kind] for source, target, kind in pairs}
    lines = []
    for before, node in zip([nodes[-1], *nodes], nodes, strict=False):
        if node < graph.num_segments:
            # Through a hub the tile before is one step further back.
            source = before if before < graph.num_segments else nodes[nodes.index(before) - 1]
            lines.append(f"    {graph.describe(node)}: {_REASONS[kinds[before, node]]} {graph.describe(source)}")
    program = graph.regions.program
    raise DeadlockError(
        f"kernel '{program.name}' can hang under order '{queues.schedule.order}': these tiles wait for each other in a "
        "circle:\n" + "\n".join(lines),
        _wait_location(graph, nodes),
    )


def _wait_location(graph: Graph, nodes: list[int]) -> SourceLocation | None:
    """The line of a wait in the circle, or of its first task."""
    nodes = [n for n in nodes if n < graph.num_segments]
    for waits in graph.regions.waits.values():
        at = np.flatnonzero(np.isin(graph.segments.of(waits.tile, waits.step), nodes))
        if len(at):
            return graph.regions.ops[int(waits.op[at[0]])].location
    return graph.regions.program.tasks[int(graph.regions.task_of(graph.segments.tile[nodes[:1]])[0])].location


def _queue_edges(graph: Graph, queues: Queues) -> tuple[IntArray, IntArray]:
    """The last segment of a tile before the first of the next tile in its lane."""
    every = np.arange(queues.regions.num_tiles)
    first = np.searchsorted(graph.segments.tile, every)
    last = np.searchsorted(graph.segments.tile, every, side="right") - 1
    lanes = [lane for rank in queues.lanes for lane in rank]
    return (
        np.concatenate([last[lane[:-1]] for lane in lanes]),
        np.concatenate([first[lane[1:]] for lane in lanes]),
    )


def print_schedule(schedule: Schedule, program: Program) -> str:
    """Lanes and keys."""
    lines = [f"schedule of {program.name}: order {schedule.order}, {schedule.queue} queues"]
    for lane in schedule.lanes:
        workers = " ".join(map(str, lane.workers))
        if lane.kernel == "companion":
            lines.append(f"  lane {lane.name}: {_off_node(schedule, program)}; workers {workers} of a companion kernel")
        else:
            lines.append(f"  lane {lane.name}: roles {' '.join(lane.roles)}; workers {workers}")
    for task, key in zip(program.tasks, schedule.keys, strict=True):
        lines.append(f"  key {task.name}: ({', '.join(map(str, key))})")
    return "\n".join(lines) + "\n"


def _off_node(schedule: Schedule, program: Program) -> str:
    parts = zip(program.tasks, schedule.off_node, strict=True)
    return ", ".join(f"{task.name} where {away}" for task, away in parts if away != Const(0))


def print_queues(queues: Queues, limit: int = 12) -> str:
    """The schedule, then for each rank and worker its first tiles."""
    regions = queues.regions
    lines = [print_schedule(queues.schedule, regions.program).rstrip()]
    for rank in range(regions.program.world_size):
        for worker, tiles in queues.workers(rank):
            lines.append(f"  rank {rank} worker {worker}: {len(tiles)} tiles")
            lines += [f"    {regions.describe(t).rpartition(' on ')[0]}" for t in tiles[:limit].tolist()]
            if len(tiles) > limit:
                lines.append(f"    … {len(tiles) - limit} more")
    return "\n".join(lines) + "\n"
