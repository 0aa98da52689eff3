"""Sends between nodes, split off into a lane that a small companion kernel serves.

A put to another node costs the kernel that makes it registers, and may serialise its
matrix instructions.  So tiles that send off the node run in a companion kernel beside the
megakernel, on a few workers of its own; both count on the same signals.  Which tiles these
are is a scalar expression of the tile, part of the schedule: the checker, the listing on a
device and the emitted C evaluate the same one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tileweave.compiler.program import Program
from tileweave.compiler.regions import Regions
from tileweave.compiler.schedule import Lane, Queues, Schedule
from tileweave.compiler.topology import Topology
from tileweave.errors import CompileError, SourceLocation
from tileweave.primitives.expr import Const, Expr, LoopIndex, Rank, walk
from tileweave.primitives.memory import Rows
from tileweave.primitives.ops import Op, Peer, SignalOp, Task, accesses
from tileweave.primitives.ops import walk as walk_ops

_ROLES = ("comm", "relay")


def split_off_node(schedule: Schedule, program: Program, topology: Topology, workers: int) -> Schedule:
    """Give tiles that send to another node a lane of their own, served by `workers` further workers.

    Before: `lane all: … workers 0 1`
    After:  `lane all: … workers 0 1` and `lane companion: dispatch where peer // 4 != rank // 4; workers 2 3, in a
    kernel of their own`

    Raises:
        CompileError: a task reaches peers in a way that cannot cross nodes.
    """
    if topology.nodes == 1:
        return schedule
    peers = [peer_of_sends(task) for task in program.tasks]
    if all(peer is None for peer in peers):
        return replace(schedule, topology=topology)
    here = topology.node_of(Rank())
    off_node = tuple(Const(0) if peer is None else topology.node_of(peer).differs(here) for peer in peers)
    first = schedule.num_workers
    lane = Lane("companion", (), tuple(range(first, first + workers)), "companion")
    return replace(schedule, lanes=(*schedule.lanes, lane), off_node=off_node, topology=topology)


def peer_of_sends(task: Task) -> Expr | None:
    """The one peer that a tile of `task` sends to, None if it reaches no peer.

    Raises:
        CompileError: the task reads from peers, sends to more than one, or sends but does not communicate alone.
    """
    found: Expr | None = None
    for op, kind, peer in _remote(task):
        problem = _refusal(task, kind, peer)
        if problem is None and found not in (None, peer):
            problem = f"sends to two peers, {found} and {peer}; use one task for each, or a grid dimension for the peer"
        if problem is not None:
            raise _error(task, problem, op.location)
        assert isinstance(peer, Expr)
        found = peer
    return found


def _remote(task: Task) -> Iterator[tuple[Op, str, Peer]]:
    """Ops of `task` that reach another rank, what they do there, and which rank it is."""
    for op in walk_ops(task.body):
        reached: list[tuple[str, Peer]] = [(access.kind, access.peer) for access in accesses(op)]
        if isinstance(op, SignalOp):
            reached.append(("signal", op.peer))
        yield from ((op, kind, peer) for kind, peer in reached if peer not in (None, Rank()))


def _refusal(task: Task, kind: str, peer: Peer) -> str | None:
    """Why an access cannot be a send between nodes."""
    if kind == "read":
        return "reads from a peer; let the peer send instead (the MoE kernels do with returns='push')"
    if isinstance(peer, Rows):
        return "sends each row to the peer that a table names; use a grid dimension for the peer"
    assert peer is not None
    if any(isinstance(e, LoopIndex) for e in walk(peer)):
        return "reaches peers in a loop; use a grid dimension for the peer"
    if task.role not in _ROLES:
        return f"sends to a peer, but has role '{task.role}'; store here, and send from there in a task of role 'comm'"
    return None


def _error(task: Task, problem: str, location: SourceLocation | None) -> CompileError:
    return CompileError(f"task '{task.name}' cannot run between nodes: it {problem}", location)


def check_nodes(queues: Queues) -> None:
    """Refuse queues in which a tile of the megakernel reaches another node, or one of the companion its own.

    Raises:
        CompileError: with the tile.
    """
    schedule, regions = queues.schedule, queues.regions
    if schedule.topology.nodes == 1:
        return
    rank, per_node = regions.tile_ranks(), schedule.topology.gpus_per_node
    far, near = np.zeros((2, regions.num_tiles), dtype=bool)
    reached = [(boxes.tile, boxes.owner) for boxes in regions.boxes.values()]
    reached += [(signals.tile, signals.owner) for signals in regions.signals.values()]
    for tile, owner in reached:
        same_node = owner // per_node == rank[tile] // per_node
        far[tile[~same_node]] = True
        near[tile[same_node & (owner != rank[tile])]] = True
    split = np.zeros(regions.num_tiles, dtype=bool)
    for lanes in queues.lanes:
        for lane, tiles in zip(schedule.lanes, lanes, strict=True):
            split[tiles] = lane.kernel == "companion"
    _refuse_tile(regions, far & ~split, "reaches another node, but its lane is the megakernel's")
    _refuse_tile(regions, near & split, "reaches a peer on its own node, but its lane is the companion's")


def _refuse_tile(regions: Regions, wrong: npt.NDArray[np.bool_], problem: str) -> None:
    if not wrong.any():
        return
    tile = int(np.flatnonzero(wrong)[0])
    task = regions.program.tasks[int(regions.task_of(np.array([tile]))[0])]
    raise CompileError(f"{regions.describe(tile)} {problem}", task.location)
