"""Which signals a wait waits for, matched exactly.

A counter is monotone and starts at zero in each launch.  A wait is exact when its target
equals the sum of all signals that can reach its counter before it passes: those that do
not themselves depend on it.

What depends on a wait is known through waits that are matched already, so matching goes on
until no wait is left, or none can be matched.  Each match is proven by those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import breadth_first_order

from tileweave.compiler.boxes import Counts
from tileweave.compiler.regions import Regions
from tileweave.compiler.segments import Segments
from tileweave.errors import SignalMismatchError
from tileweave.primitives.expr import IntArray


@dataclass(frozen=True)
class Hub:
    """All nodes in `signals` together release all nodes in `waits`."""

    signals: IntArray
    waits: IntArray


@dataclass(frozen=True)
class _Release:
    """The waits for one target of a counter, and all signals to this counter, as nodes with amounts."""

    counter: str
    index: int
    target: int
    wait_node: IntArray
    wait_op: int
    signal_node: IntArray
    amount: IntArray

    def hub(self, before: npt.NDArray[np.bool_]) -> Hub:
        """The match with the signals `before`; one that adds nothing may come later and releases nobody."""
        return Hub(self.signal_node[before & (self.amount > 0)], self.wait_node)


def match(regions: Regions, segments: Segments, body: tuple[IntArray, IntArray]) -> list[Hub]:
    """One hub for each target of each counter.

    Raises:
        SignalMismatchError: a wait's target is not met exactly.
    """
    releases = _releases(regions, segments)
    hubs: dict[int, Hub] = {}
    for number, release in enumerate(releases):
        # Whoever waits for all signals needs no look at what depends on what.
        if release.target == release.amount.sum():
            hubs[number] = release.hub(np.ones(len(release.amount), dtype=bool))
    if len(hubs) < len(releases):
        _match_phased(regions, segments, body, (releases, hubs))
    return list(hubs.values())


def _match_phased(
    regions: Regions,
    segments: Segments,
    body: tuple[IntArray, IntArray],
    known: tuple[list[_Release], dict[int, Hub]],
) -> None:
    """Add to the known hubs those that wait for some of their counter's signals, as long as one proves another.

    High targets first: where a buffer comes round, its last round is settled by the sum of all signals, and
    settles the round before it.
    """
    releases, hubs = known
    order = _Order.of(len(segments.tile), body, releases)
    for number, hub in hubs.items():
        order = order.with_signals(number, hub)
    waiting = sorted(set(range(len(releases))) - set(hubs), key=lambda n: releases[n].target)
    skipped: list[int] = []
    while waiting:
        number = waiting.pop()
        release = releases[number]
        before = ~order.after(number)[release.signal_node]
        if release.amount[before].sum() == release.target:
            hubs[number] = release.hub(before)
            order = order.with_signals(number, hubs[number])
            waiting += reversed(skipped)
            skipped = []
        else:
            skipped.append(number)
    if skipped:
        _refuse(regions, segments, order, [(n, releases[n]) for n in sorted(skipped)])


@dataclass(frozen=True)
class _Order:
    """Who comes before whom for all that is known: from release `n`, node `first + n`, to its waits and so on."""

    first: int
    num_nodes: int
    source: IntArray
    target: IntArray

    @staticmethod
    def of(first: int, body: tuple[IntArray, IntArray], releases: Sequence[_Release]) -> _Order:
        """The order inside tiles, and from each release to its waits."""
        out = np.repeat(np.arange(first, first + len(releases)), [len(r.wait_node) for r in releases])
        waits = [r.wait_node for r in releases]
        return _Order(first, first + len(releases), np.concatenate([body[0], out]), np.concatenate([body[1], *waits]))

    def with_signals(self, number: int, hub: Hub) -> _Order:
        """This order, with the signals of a hub before its release."""
        release = np.full(len(hub.signals), self.first + number)
        return replace(
            self, source=np.concatenate([self.source, hub.signals]), target=np.concatenate([self.target, release])
        )

    @cached_property
    def _edges(self) -> csr_array:
        ones = np.ones(len(self.source), dtype=np.int8)
        return coo_array((ones, (self.source, self.target)), shape=(self.num_nodes,) * 2).tocsr()

    def after(self, number: int) -> npt.NDArray[np.bool_]:
        """For each node, whether it comes after a release."""
        reached = np.zeros(self.num_nodes, dtype=bool)
        reached[breadth_first_order(self._edges, self.first + number, return_predecessors=False)] = True
        return reached


def _refuse(regions: Regions, segments: Segments, order: _Order, releases: list[tuple[int, _Release]]) -> None:
    """Refuse the first release that too few signals can reach, else the first that too many can."""
    arriving = [int(r.amount[~order.after(n)[r.signal_node]].sum()) for n, r in releases]
    short = [sum_ < r.target for (_, r), sum_ in zip(releases, arriving, strict=True)]
    worst = short.index(True) if any(short) else 0
    release, reaching = releases[worst][1], arriving[worst]
    place = np.unravel_index(release.index, regions.program.by_name[release.counter].static_shape)
    at = ", ".join(str(int(i)) for i in place)
    what = "it would wait forever" if short[worst] else "it would pass before the last of them"
    senders = np.unique(release.signal_node)
    listed = "; ".join(regions.describe(int(segments.tile[s])) for s in senders[:4].tolist()) or "nobody"
    more = f" and {len(senders) - 4} more" if len(senders) > 4 else ""
    raise SignalMismatchError(
        f"{regions.describe(int(segments.tile[release.wait_node[0]]))} waits for {release.counter}[{at}] to reach "
        f"{release.target}, but the signals that can reach it add up to {reaching}: {what} "
        f"(signalled by {listed}{more})",
        regions.ops[release.wait_op].location,
    )


def _releases(regions: Regions, segments: Segments) -> list[_Release]:
    """Every target that somebody waits for, counter by counter in ascending order."""
    found: list[_Release] = []
    empty = np.empty(0, dtype=np.int64)
    for name, waits in regions.waits.items():
        signals = regions.signals.get(name)
        rows_of = _groups(signals) if signals is not None else {}
        for (owner, index), wait_rows in _groups(waits).items():
            node, amount = empty, empty
            if signals is not None and (owner, index) in rows_of:
                rows = rows_of[owner, index]
                node, amount = segments.of(signals.tile[rows], signals.step[rows]), signals.amount[rows]
            wait_node, targets = segments.of(waits.tile[wait_rows], waits.step[wait_rows]), waits.amount[wait_rows]
            for target in np.unique(targets).tolist():
                same = np.flatnonzero(targets == target)
                op = int(waits.op[wait_rows[same[0]]])
                found.append(_Release(name, index, target, wait_node[same], op, node, amount))
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
