"""Orders: for each task a sort key of scalar expressions.

A lane runs its tiles in ascending key.  All keys of a program have one length, so tiles
of different tasks compare.  Every order here puts a tile after all tiles that it may
depend on, as long as tasks are declared in the order in which data flow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from tileweave.compiler.bounds import upper_bound
from tileweave.compiler.cost import task_cost
from tileweave.compiler.program import Program
from tileweave.errors import ConfigError
from tileweave.primitives.expr import Const, Expr, Index, LoopIndex, Rank, walk
from tileweave.primitives.ops import Access, SignalOp, Task, WaitOp, accesses
from tileweave.primitives.ops import walk as walk_ops

Key: TypeAlias = tuple[Expr, ...]
_MOST_NS = 1 << 40


def program_order(program: Program) -> tuple[Key, ...]:
    """Tasks as declared, tiles row-major: all of task 0, then all of task 1, …"""
    return _padded(program, [(Const(number),) for number in range(len(program.tasks))])


def expert_ascending(program: Program) -> tuple[Key, ...]:
    """All tasks of expert 0, then all of expert 1, …: a consumer follows its producer closely.

    The expert of a tile is its grid dimension named `expert`.  A task without one stands
    between what is declared before it and after it.
    """
    phase = 0
    keys: list[Key] = []
    for number, task in enumerate(program.tasks):
        has_expert = "expert" in task.dims
        # What comes after a task without experts must not run before it.
        phase += not has_expert
        keys.append((Const(phase), Index("expert") if has_expert else Const(-1), Const(number)))
    return _padded(program, keys)


def sends_first(program: Program) -> tuple[Key, ...]:
    """Communication that waits for nothing, then expert by expert: no peer waits for what could long be there.

    Like `expert_ascending`, but `comm` and `relay` tasks without a wait come before all
    else, since a rank that delays a send to finish its own tiles makes its peers idle.
    """
    keys = []
    for task, key in zip(program.tasks, expert_ascending(program), strict=True):
        waits = any(isinstance(op, WaitOp) for op in walk_ops(task.body))
        keys.append((Const(int(waits or task.role not in ("comm", "relay"))), *key))
    return tuple(keys)


def own_rank_first(program: Program) -> tuple[Key, ...]:
    """Tasks as declared; those that address a peer start with this rank and go round the others.

    Each rank starts at another peer, so no peer receives from all at once.
    """
    keys: list[Key] = []
    for number, task in enumerate(program.tasks):
        peer = _peer_of(task)
        distance = Const(0) if peer is None else (peer - Rank() + program.world_size) % program.world_size
        keys.append((Const(number), distance))
    return _padded(program, keys)


def critical_path(program: Program) -> tuple[Key, ...]:
    """Longest remaining work first: HEFT's upward rank with the tail taken a task at a time.

    A tile's rank is its own cost plus the longest chain of full tiles of the tasks that
    use what its task writes or signals (Topcuoglu, Hariri, Wu, "Performance-effective and
    low-complexity task scheduling", 2002).  Within a task the largest tiles come first.
    """
    tails = task_tails(program)
    keys: list[Key] = []
    for number, task in enumerate(program.tasks):
        keys.append((Const(0) - (tile_cost_ns(task) + tails[number]), Const(number)))
    return _padded(program, keys)


ORDERS: Mapping[str, Callable[[Program], tuple[Key, ...]]] = {
    "program": program_order,
    "sends_first": sends_first,
    "expert_ascending": expert_ascending,
    "own_rank_first": own_rank_first,
    "critical_path": critical_path,
}


def keys_of(program: Program, order: str) -> tuple[Key, ...]:
    """The keys of the order called `order`.

    Raises:
        ConfigError: no such order.
    """
    if not isinstance(order, str) or order not in ORDERS:
        raise ConfigError(f"order {order!r} is unknown; use one of {', '.join(ORDERS)}")
    return ORDERS[order](program)


def tile_cost_ns(task: Task) -> Expr:
    """A nominal duration that ranks tiles: 20 FLOPs or 4 bytes a nanosecond, plus one."""
    cost = task_cost(task)
    return cost.flops // 20 + cost.traffic_bytes // 4 + 1


def task_tails(program: Program) -> list[int]:
    """For each task, the cost of the longest chain of full tiles that comes after it."""
    full = [_full_cost_ns(task) for task in program.tasks]
    tails = [0] * len(program.tasks)
    for number in reversed(range(len(program.tasks))):
        after = [n for n in range(number + 1, len(program.tasks)) if _feeds(program.tasks[number], program.tasks[n])]
        tails[number] = max((full[n] + tails[n] for n in after), default=0)
    return tails


def _full_cost_ns(task: Task) -> int:
    """An upper bound of `tile_cost_ns`, with every extent at its static size, but no more than `_MOST_NS`."""
    return min(upper_bound(tile_cost_ns(task)), _MOST_NS)


def _feeds(producer: Task, consumer: Task) -> bool:
    out = {a.memory.name for a in _accesses(producer) if a.kind == "write"}
    out |= {op.signal.name for op in walk_ops(producer.body) if isinstance(op, SignalOp)}
    into = {a.memory.name for a in _accesses(consumer)}
    into |= {op.signal.name for op in walk_ops(consumer.body) if isinstance(op, WaitOp)}
    return bool(out & into)


def _accesses(task: Task) -> list[Access]:
    return [a for op in walk_ops(task.body) for a in accesses(op)]


def _peer_of(task: Task) -> Expr | None:
    """The first peer expression of `task` that its grid indices decide."""
    for op in walk_ops(task.body):
        peers = [a.peer for a in accesses(op)] + ([op.peer] if isinstance(op, SignalOp) else [])
        for peer in peers:
            if isinstance(peer, Expr) and not any(isinstance(e, LoopIndex) for e in walk(peer)):
                return peer
    return None


def _padded(program: Program, keys: list[Key]) -> tuple[Key, ...]:
    """Append the grid indices, row-major, and pad all keys to one length."""
    whole = [(*key, *(Index(d) for d in task.dims)) for key, task in zip(keys, program.tasks, strict=True)]
    longest = max(map(len, whole))
    return tuple((*key, *(Const(0),) * (longest - len(key))) for key in whole)
