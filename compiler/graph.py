"""Pass 4, graph: dependences between tiles, derived from regions and from signals.

Nodes are tile segments: a body that synchronises in its middle is cut there, so that a
segment first waits, then works, then signals.  A data dependence goes through one *hub*
per set of identically used memory cells, and a signal through one hub per counter and
target, which keeps a many-to-many dependence linear in size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx
import numpy as np

from tileweave.compiler.circles import on_circle
from tileweave.compiler.dependences import data_edges
from tileweave.compiler.edges import EDGE_KINDS, Edges
from tileweave.compiler.match import Hub, match
from tileweave.compiler.moments import declared_moments, signalled_moments
from tileweave.compiler.regions import Regions, written
from tileweave.compiler.segments import Segments, cut_segments
from tileweave.primitives.expr import IntArray


@dataclass(frozen=True)
class Graph:
    """The tile graph of one routing."""

    regions: Regions
    segments: Segments
    num_nodes: int
    edges: Edges
    first_hub: Mapping[str, int]
    """First hub of each memory with dependences; hubs of a memory are numbered in a row."""
    clashes: Mapping[str, tuple[int, int]]
    """For a memory, two segments that write the same cell with nothing in the kernel to say who comes first."""

    @property
    def num_segments(self) -> int:
        """Nodes that are tile segments; the rest are hubs."""
        return len(self.segments.tile)

    @property
    def num_hubs(self) -> int:
        """Nodes that stand for a counter or a set of memory cells."""
        return self.num_nodes - self.num_segments

    @cached_property
    def task_edges(self) -> Mapping[tuple[str, str, str], int]:
        """`(source task, target task, kind)` → number of hub-to-segment links between their tiles."""
        names = [t.name for t in self.regions.program.tasks]
        task = self.regions.task_of(self.segments.tile)
        into_hub, out_of_hub = self._split()
        counts: dict[tuple[str, str, str], int] = {}
        hub_tasks: dict[int, set[int]] = {}
        for source, hub in zip(task[into_hub.source].tolist(), into_hub.target.tolist(), strict=True):
            hub_tasks.setdefault(hub, set()).add(source)
        for hub, target, kind in zip(
            out_of_hub.source.tolist(), task[out_of_hub.target].tolist(), out_of_hub.kind.tolist(), strict=True
        ):
            for source in hub_tasks.get(hub, ()):
                key = (names[source], names[target], EDGE_KINDS[kind])
                counts[key] = counts.get(key, 0) + 1
        return counts

    def _split(self) -> tuple[Edges, Edges]:
        n, e = self.num_segments, self.edges
        into, out = e.target >= n, e.source >= n
        return Edges(e.source[into], e.target[into], e.kind[into]), Edges(e.source[out], e.target[out], e.kind[out])

    def to_networkx(self, level: str = "task") -> nx.MultiDiGraph:
        """The graph of tasks (`level="task"`) or of tile segments and hubs (`level="tile"`, when small)."""
        graph = nx.MultiDiGraph()
        if level == "task":
            graph.add_nodes_from((t.name, {"role": t.role}) for t in self.regions.program.tasks)
            graph.add_edges_from((s, t, {"kind": k, "count": c}) for (s, t, k), c in self.task_edges.items())
            return graph
        graph.add_nodes_from((n, {"label": self.describe(n)}) for n in range(self.num_nodes))
        kinds = [EDGE_KINDS[k] for k in self.edges.kind.tolist()]
        graph.add_edges_from(
            (s, t, {"kind": k})
            for s, t, k in zip(self.edges.source.tolist(), self.edges.target.tolist(), kinds, strict=True)
        )
        return graph

    def describe(self, node: int) -> str:
        """The tile of a segment, or `hub`."""
        if node >= self.num_segments:
            return "hub"
        return self.regions.describe(int(self.segments.tile[node]))

    def memory_of(self, hub: int) -> str:
        """The memory whose cells a data hub stands for."""
        return max((first, name) for name, first in self.first_hub.items() if first <= hub)[1]

    def __str__(self) -> str:
        return print_graph(self)


def build_graph(regions: Regions) -> Graph:
    """Derive the tile graph.

    Raises:
        SignalMismatchError: a wait's target is not what the signals that can reach it add up to.
    """
    segments = cut_segments(regions)
    body = _body_edges(segments)
    sync, count = _hub_edges(match(regions, segments, (body.source, body.target)), len(segments.tile))
    order = Edges.join([body, sync])
    declared = declared_moments(regions, segments)
    graph = _with_data(regions, segments, order, count, dict.fromkeys(regions.boxes, declared))
    contradicted = _contradicted(graph)
    if not contradicted:
        return graph
    signalled = signalled_moments(declared, order, count)
    moments = {name: signalled if name in contradicted else declared for name in regions.boxes}
    return _with_data(regions, segments, order, count, moments)


def _with_data(
    regions: Regions, segments: Segments, order: Edges, count: int, moments: Mapping[str, IntArray]
) -> Graph:
    """The graph of `order`, which has `count` nodes, and of data dependences, each memory's by its own moments."""
    parts = [order]
    first_hub: dict[str, int] = {}
    clashes: dict[str, tuple[int, int]] = {}
    for name, boxes in written(regions.boxes):
        data = data_edges(regions, segments, boxes, moments[name], count)
        if data.next_hub > count:
            first_hub[name] = count
        if data.clash is not None:
            clashes[name] = data.clash
        parts.append(data.edges)
        count = data.next_hub
    return Graph(regions, segments, count, Edges.join(parts), first_hub, clashes)


def _contradicted(graph: Graph) -> set[str]:
    """Memories with accesses that may be ordered by signals otherwise than by declaration, or by signals alone.

    A dependence that signals contradict lies on a circle of signals and dependences.
    """
    circle = on_circle(graph.edges, graph.num_nodes)
    hubs = np.flatnonzero(circle & (np.arange(graph.num_nodes) >= min(graph.first_hub.values(), default=0)))
    return {*graph.clashes, *(graph.memory_of(hub) for hub in hubs.tolist())}


def _body_edges(segments: Segments) -> Edges:
    same = np.flatnonzero(segments.tile[1:] == segments.tile[:-1])
    return Edges.of("body", same, same + 1)


def _hub_edges(hubs: Sequence[Hub], first: int) -> tuple[Edges, int]:
    sources = [h.signals for h in hubs]
    targets = [h.waits for h in hubs]
    numbers = np.arange(first, first + len(hubs), dtype=np.int64)
    empty = np.empty(0, dtype=np.int64)
    into = Edges.of("sync", np.concatenate([empty, *sources]), np.repeat(numbers, [len(s) for s in sources]))
    out = Edges.of("sync", np.repeat(numbers, [len(t) for t in targets]), np.concatenate([empty, *targets]))
    return Edges.join([into, out]), first + len(hubs)


def print_graph(graph: Graph) -> str:
    """Counts a rank, then the edges between tasks."""
    regions = graph.regions
    world = regions.program.world_size
    lines = [
        (
            f"graph of {regions.program.name}: {regions.num_tiles} tiles, {graph.num_segments} segments, "
            f"{graph.num_hubs} hubs, {len(graph.edges.source)} edges"
        )
    ]
    for task, instances in zip(regions.program.tasks, regions.instances, strict=True):
        per_rank = np.bincount(instances.env.rank, minlength=world)
        lines.append(f"  {task.name:<16} {task.role:<8} tiles a rank: {' '.join(map(str, per_rank.tolist()))}")
    for (source, target, kind), count in sorted(
        graph.task_edges.items(), key=lambda e: (EDGE_KINDS.index(e[0][2]), e[0])
    ):
        lines.append(f"  {kind:<4} {source} -> {target}  ({count})")
    return "\n".join(lines) + "\n"
