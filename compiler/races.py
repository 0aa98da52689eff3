"""Pass 6, races: every data dependence is ordered by signals, whatever runs where.

A dependence from tile `s` to tile `t` is ordered if `t` waits, itself or through other
tiles, for a signal that `s` sends after its access.  The order of a queue does not count:
it changes with the number of workers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array
from scipy.sparse.csgraph import breadth_first_order

from tileweave.compiler.boxes import ragged_arange
from tileweave.compiler.edges import DATA_KINDS, EDGE_KINDS, Edges
from tileweave.compiler.graph import Graph
from tileweave.errors import RaceError, SourceLocation
from tileweave.primitives.expr import IntArray
from tileweave.primitives.ops import Op, Order, Scope, SignalOp, WaitOp

_WORDS = {"raw": ("writes", "reads"), "war": ("reads", "writes"), "waw": ("writes", "writes")}


def check_ordered(graph: Graph) -> None:
    """Refuse a program with two conflicting accesses that no chain of signals orders.

    Almost all dependences are ordered by one counter, and are checked by a join over
    counters; what remains is searched for longer chains.

    Raises:
        RaceError: with the two tiles, the memory and the user's line.
    """
    for op in graph.regions.ops:
        _check_strength(op)
    for name, (one, other) in graph.clashes.items():
        raise RaceError(
            f"{graph.describe(one)} and {graph.describe(other)} both write the same elements of '{name}' at the same "
            "point of the kernel's order, so the result depends on timing: give each its own place, or order them by a "
            "signal",
            _access_location(graph, name, other),
        )
    data = graph.edges.of_kinds(DATA_KINDS)
    if not len(data.source):
        return
    links = _Links.of(graph, data)
    open_links = np.flatnonzero(~_ordered_by_one_counter(graph, links))
    if len(open_links):
        _search_chains(graph, links, open_links)


def _check_strength(op: Op) -> None:
    """A signal or wait that is too weak to order accesses.  Fences are not taken into account yet."""
    if not isinstance(op, (SignalOp, WaitOp)):
        return
    if op.order is Order.RELAXED:
        raise RaceError(
            "a relaxed signal or wait orders nothing; leave out `order`, or give RELEASE or ACQUIRE", op.location
        )
    if isinstance(op, SignalOp) and op.peer is not None and op.scope is Scope.GPU:
        raise RaceError("a signal to a peer needs Scope.SYSTEM; Scope.GPU reaches this rank only", op.location)


@dataclass(frozen=True)
class _Links:
    """Data hubs as pairs: `into` (segment, hub) and `out` (hub, segment)."""

    into_node: IntArray
    into_hub: IntArray
    out_hub: IntArray
    out_node: IntArray

    @staticmethod
    def of(graph: Graph, data: Edges) -> _Links:
        """The two halves of the data edges."""
        into = data.target >= graph.num_segments
        return _Links(data.source[into], data.target[into], data.source[~into], data.target[~into])


def _ordered_by_one_counter(graph: Graph, links: _Links) -> npt.NDArray[np.bool_]:
    """For each `(hub, segment)` link: whether one counter collects all of the hub's tiles and releases the segment."""
    sync = graph.edges.of_kinds(("sync",))
    sends = sync.target >= graph.num_segments
    after = _spread(graph, sync.source[sends], sync.target[sends], later=False)
    before = _spread(graph, sync.target[~sends], sync.source[~sends], later=True)
    hub, counter = _join(links.into_hub, links.into_node, after)
    pairs, counts = np.unique(hub * graph.num_nodes + counter, return_counts=True)
    members = np.bincount(links.into_hub, minlength=graph.num_nodes)
    complete = pairs[counts == members[pairs // graph.num_nodes]]
    number = np.arange(len(links.out_hub), dtype=np.int64)
    link, released_by = _join(number, links.out_node, before)
    good = np.isin(links.out_hub[link] * graph.num_nodes + released_by, complete)
    ordered = np.zeros(len(number), dtype=bool)
    ordered[link[good]] = True
    return ordered


def _spread(graph: Graph, node: IntArray, counter: IntArray, *, later: bool) -> tuple[IntArray, IntArray]:
    """Distinct `(segment, counter)` pairs, sorted; a counter counts for all earlier (or later) segments of its tile."""
    tile = graph.segments.tile
    edge = np.searchsorted(tile, tile[node], side="right") - 1 if later else np.searchsorted(tile, tile[node])
    low, high = (node, edge) if later else (edge, node)
    counts = high - low + 1
    offset = ragged_arange(counts)
    pairs = np.unique((np.repeat(low, counts) + offset) * graph.num_nodes + np.repeat(counter, counts))
    return pairs // graph.num_nodes, pairs % graph.num_nodes


def _join(label: IntArray, key: IntArray, pairs: tuple[IntArray, IntArray]) -> tuple[IntArray, IntArray]:
    """`(label, value)` for each label whose key occurs in the sorted `(key, value)` pairs."""
    keys, values = pairs
    low, high = np.searchsorted(keys, key), np.searchsorted(keys, key, side="right")
    counts = high - low
    offset = ragged_arange(counts)
    return np.repeat(label, counts), values[np.repeat(low, counts) + offset]


def _search_chains(graph: Graph, links: _Links, open_links: IntArray) -> None:
    """Look for longer chains, backwards from each segment whose dependences are still open."""
    order = graph.edges.of_kinds(("sync", "body"))
    ones = np.ones(len(order.source), dtype=np.int8)
    backwards = coo_array((ones, (order.target, order.source)), shape=(graph.num_nodes,) * 2).tocsr()
    sort = np.argsort(links.into_hub, kind="stable")
    into_hub, into_node = links.into_hub[sort], links.into_node[sort]
    for node in np.unique(links.out_node[open_links]).tolist():
        earlier = breadth_first_order(backwards, node, return_predecessors=False)
        for hub in links.out_hub[open_links[links.out_node[open_links] == node]].tolist():
            sources = into_node[np.searchsorted(into_hub, hub) : np.searchsorted(into_hub, hub, side="right")]
            loose = np.setdiff1d(sources, earlier)
            loose = loose[loose != node]
            if len(loose):
                _refuse(graph, int(loose[0]), node, hub)


def _refuse(graph: Graph, source: int, target: int, hub: int) -> None:
    edge = int(np.flatnonzero((graph.edges.source == hub) & (graph.edges.target == target))[0])
    first, second = _WORDS[EDGE_KINDS[int(graph.edges.kind[edge])]]
    name = graph.memory_of(hub)
    raise RaceError(
        f"{graph.describe(source)} {first} '{name}' and {graph.describe(target)} {second} the same elements after it, "
        "but no signal orders them: add tw.signal behind the first access and tw.wait before the second",
        _access_location(graph, name, target),
    )


def _access_location(graph: Graph, name: str, node: int) -> SourceLocation | None:
    """The line at which a segment first touches a memory."""
    boxes = graph.regions.boxes[name]
    return graph.regions.ops[int(boxes.op[graph.segments.of(boxes.tile, boxes.step) == node][0])].location
