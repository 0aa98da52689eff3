"""Which signals a wait waits for, matched exactly.

A counter is monotone and starts at zero in each launch.  A wait is exact when its target
equals the sum of all signals that can reach its counter before it passes: those that do
not themselves depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tileweave.compiler.regions import Counts, Regions
from tileweave.compiler.segments import Segments
from tileweave.errors import SignalMismatchError
from tileweave.primitives.expr import IntArray


@dataclass(frozen=True)
class Hub:
    """All nodes in `signals` together release all nodes in `waits`."""

    signals: IntArray
    waits: IntArray


@dataclass(frozen=True)
class _Counter:
    """Signals and waits of one counter, as nodes with amounts and targets."""

    name: str
    owner: int
    index: int
    signal_node: IntArray
    amount: IntArray
    wait_node: IntArray
    target: IntArray
    wait_op: IntArray


def match(regions: Regions, segments: Segments, body: tuple[IntArray, IntArray]) -> list[Hub]:
    """The hubs of all counters.

    Counters whose waits all expect the sum of all signals are done at once.  The others are
    taken in order of declaration, and know of those before them only.

    Raises:
        SignalMismatchError: a wait's target is not met exactly.
    """
    hubs: list[Hub] = []
    phased: list[_Counter] = []
    for counter in _counters(regions, segments):
        if (counter.target == counter.amount.sum()).all():
            hubs.append(Hub(counter.signal_node, counter.wait_node))
        else:
            phased.append(counter)
    for counter in phased:
        hubs += _match_phases(regions, segments, counter, (body, hubs))
    return hubs


def _match_phases(
    regions: Regions,
    segments: Segments,
    counter: _Counter,
    known: tuple[tuple[IntArray, IntArray], list[Hub]],
) -> list[Hub]:
    """Waits of several targets on one counter, in ascending order of target."""
    body, hubs = known
    found: list[Hub] = []
    for target in np.unique(counter.target):
        waits = counter.wait_node[counter.target == target]
        behind = _reachable(waits, body, [*hubs, *found])
        before = ~np.isin(counter.signal_node, list(behind))
        _require(regions, segments, counter, int(target), int(counter.amount[before].sum()))
        found.append(Hub(counter.signal_node[before], waits))
    return found


def _reachable(nodes: IntArray, body: tuple[IntArray, IntArray], hubs: list[Hub]) -> set[int]:
    """Nodes that depend on any of `nodes`, themselves included."""
    following: dict[int, list[int]] = {}
    for source, target in zip(body[0].tolist(), body[1].tolist(), strict=True):
        following.setdefault(source, []).append(target)
    through: dict[int, list[int]] = {}
    for number, hub in enumerate(hubs):
        for node in hub.signals.tolist():
            through.setdefault(node, []).append(number)
    seen, passed, stack = set(nodes.tolist()), set[int](), nodes.tolist()
    while stack:
        node = stack.pop()
        nexts = list(following.get(node, ()))
        for number in through.get(node, ()):
            if number not in passed:
                passed.add(number)
                nexts += hubs[number].waits.tolist()
        stack += [n for n in nexts if n not in seen]
        seen.update(nexts)
    return seen


def _require(regions: Regions, segments: Segments, counter: _Counter, target: int, arriving: int) -> None:
    if target == arriving:
        return
    node = int(counter.wait_node[counter.target == target][0])
    place = np.unravel_index(counter.index, regions.program.by_name[counter.name].static_shape)
    at = ", ".join(str(int(i)) for i in place)
    op = regions.ops[int(counter.wait_op[counter.target == target][0])]
    what = "it would wait forever" if target > arriving else "it would pass before the last of them"
    senders = np.unique(counter.signal_node)
    listed = "; ".join(regions.describe(int(segments.tile[s])) for s in senders[:4].tolist()) or "nobody"
    more = f" and {len(senders) - 4} more" if len(senders) > 4 else ""
    raise SignalMismatchError(
        f"{regions.describe(int(segments.tile[node]))} waits for {counter.name}[{at}] to reach {target}, "
        f"but the signals that can reach it add up to {arriving}: {what} (signalled by {listed}{more})",
        op.location,
    )


def _counters(regions: Regions, segments: Segments) -> list[_Counter]:
    """Every counter that somebody waits for."""
    found: list[_Counter] = []
    empty = np.empty(0, dtype=np.int64)
    for name, waits in regions.waits.items():
        signals = regions.signals.get(name)
        rows_of = _groups(signals) if signals is not None else {}
        for (owner, index), wait_rows in _groups(waits).items():
            node, amount = empty, empty
            if signals is not None and (owner, index) in rows_of:
                rows = rows_of[owner, index]
                node, amount = segments.of(signals.tile[rows], signals.step[rows]), signals.amount[rows]
            wait_node = segments.of(waits.tile[wait_rows], waits.step[wait_rows])
            target, op = waits.amount[wait_rows], waits.op[wait_rows]
            found.append(_Counter(name, owner, index, node, amount, wait_node, target, op))
    return found


def _groups(counts: Counts) -> dict[tuple[int, int], IntArray]:
    """Rows of `counts` by (owner, counter)."""
    if not len(counts.owner):
        return {}
    order = np.lexsort((counts.counter, counts.owner))
    owner, counter = counts.owner[order], counts.counter[order]
    new = np.flatnonzero(np.concatenate(([True], (owner[1:] != owner[:-1]) | (counter[1:] != counter[:-1]))))
    groups = np.split(order, new[1:])
    return dict(zip(zip(owner[new].tolist(), counter[new].tolist(), strict=True), groups, strict=True))
