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
import numpy.typing as npt

from tileweave.compiler.match import Hub, match
from tileweave.compiler.regions import Boxes, Regions, ragged_arange, written
from tileweave.compiler.segments import Segments, cut_segments
from tileweave.primitives.expr import IntArray

DATA_KINDS = ("raw", "war", "waw")
EDGE_KINDS = (*DATA_KINDS, "sync", "body")


@dataclass(frozen=True)
class Edges:
    """Edges `source[i]` → `target[i]` of kind `EDGE_KINDS[kind[i]]`; numbers past the segments are hubs."""

    source: IntArray
    target: IntArray
    kind: npt.NDArray[np.int8]

    @staticmethod
    def of(kind: str, source: IntArray, target: IntArray) -> Edges:
        """Edges of one kind."""
        return Edges(source, target, np.full(len(source), EDGE_KINDS.index(kind), dtype=np.int8))

    @staticmethod
    def join(parts: Sequence[Edges]) -> Edges:
        """All edges of `parts`."""
        return Edges(
            np.concatenate([p.source for p in parts]),
            np.concatenate([p.target for p in parts]),
            np.concatenate([p.kind for p in parts]),
        )

    def of_kinds(self, kinds: Sequence[str]) -> Edges:
        """Only the edges of `kinds`."""
        keep = np.isin(self.kind, [EDGE_KINDS.index(k) for k in kinds])
        return Edges(self.source[keep], self.target[keep], self.kind[keep])


@dataclass(frozen=True)
class Graph:
    """The tile graph of one routing."""

    regions: Regions
    segments: Segments
    num_nodes: int
    edges: Edges

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

    def __str__(self) -> str:
        return print_graph(self)


def build_graph(regions: Regions) -> Graph:
    """Derive the tile graph.

    Raises:
        SignalMismatchError: a wait's target is not what the signals that can reach it add up to.
    """
    segments = cut_segments(regions)
    body = _body_edges(segments)
    hubs = match(regions, segments, (body.source, body.target))
    parts, count = [body], len(segments.tile)
    sync, count = _hub_edges(hubs, count)
    parts.append(sync)
    for _, boxes in written(regions.boxes):
        data, count = _data_edges(regions, segments, boxes, count)
        parts.append(data)
    return Graph(regions, segments, count, Edges.join(parts))


def _body_edges(segments: Segments) -> Edges:
    same = np.flatnonzero(segments.tile[1:] == segments.tile[:-1])
    return Edges.of("body", same, same + 1)


def _hub_edges(hubs: Sequence[Hub], first: int) -> tuple[Edges, int]:
    sources = [h.signals for h in hubs]
    targets = [h.waits for h in hubs]
    numbers = np.arange(first, first + len(hubs), dtype=np.int64)
    empty = np.empty(0, dtype=np.int64)
    into = Edges.of("sync", np.concatenate([empty, *sources]), np.repeat(numbers, [len(s) for s in sources] or []))
    out = Edges.of("sync", np.repeat(numbers, [len(t) for t in targets] or []), np.concatenate([empty, *targets]))
    return Edges.join([into, out]), first + len(hubs)


@dataclass(frozen=True)
class _Uses:
    """Uses of memory cells, one row a (cell class, node, kind), in the order that the kernel means.

    Neighbours with equal `group` `[num_uses, 2]` (task, and grid position if they write) are one phase.
    """

    cell: IntArray
    node: IntArray
    group: IntArray
    is_write: npt.NDArray[np.bool_]


def _data_edges(regions: Regions, segments: Segments, boxes: Boxes, first: int) -> tuple[Edges, int]:
    """Dependences through one memory, in the order in which the kernel declares its tasks."""
    uses = _cell_uses(regions, segments, boxes)
    # A phase is a run of reads of one cell by one task, or of writes by one grid position of it.
    changes = (uses.cell[1:] != uses.cell[:-1]) | (uses.group[1:] != uses.group[:-1]).any(axis=1)
    starts = np.concatenate(([True], changes))
    phase = np.cumsum(starts) - 1
    phase_cell, phase_write = uses.cell[starts], uses.is_write[starts]
    source_phase, target_phase, kind = _phase_links(phase_cell, phase_write)
    hub_of = {name: k for k, name in enumerate(DATA_KINDS)}
    parts: list[Edges] = []
    for name, k in hub_of.items():
        chosen = kind == k
        if not chosen.any():
            continue
        parts_into, parts_out, first = _expand_links(
            name, (source_phase[chosen], target_phase[chosen]), (phase, uses.node), first
        )
        parts += [parts_into, parts_out]
    return (Edges.join(parts) if parts else Edges.of("raw", *(np.empty(0, dtype=np.int64),) * 2)), first


def _expand_links(
    kind: str, links: tuple[IntArray, IntArray], uses: tuple[IntArray, IntArray], first: int
) -> tuple[Edges, Edges, int]:
    """One hub per source phase: its nodes → hub → the nodes of its target phases, except a node to itself."""
    phase, node = uses
    begin = np.searchsorted(phase, np.arange(int(phase[-1]) + 2))
    source, hub_index = np.unique(links[0], return_inverse=True)
    hubs = first + np.arange(len(source), dtype=np.int64)

    def members(phases: IntArray, hub: IntArray) -> tuple[IntArray, IntArray]:
        counts = begin[phases + 1] - begin[phases]
        return node[np.repeat(begin[phases], counts) + ragged_arange(counts)], np.repeat(hub, counts)

    into_node, into_hub = members(source, hubs)
    out_node, out_hub = members(links[1], hubs[hub_index])
    # A tile that both reads and writes a cell does not depend on itself.
    stride = int(node.max()) + 1
    own = np.isin(out_hub * stride + out_node, into_hub * stride + into_node)
    return (
        Edges.of(kind, into_node, into_hub),
        Edges.of(kind, out_hub[~own], out_node[~own]),
        first + len(source),
    )


def _phase_links(cell: IntArray, is_write: npt.NDArray[np.bool_]) -> tuple[IntArray, IntArray, IntArray]:
    """Links between the phases of a cell: writer → readers until the next writer, reader → next writer, writer → it."""
    number = np.arange(len(cell), dtype=np.int64)
    last_write = np.maximum.accumulate(np.where(is_write, number, -1))
    previous_write = np.concatenate(([-1], last_write[:-1]))
    has = (previous_write >= 0) & (cell[np.maximum(previous_write, 0)] == cell)
    reads, writes = np.flatnonzero(~is_write & has), np.flatnonzero(is_write & has)
    raw = (previous_write[reads], reads)
    waw = (previous_write[writes], writes)
    next_write = np.minimum.accumulate(np.where(is_write, number, len(cell))[::-1])[::-1]
    following = np.concatenate((next_write[1:], [len(cell)])) if len(cell) else next_write
    readers = np.flatnonzero(~is_write & (following < len(cell)))
    readers = readers[cell[following[readers]] == cell[readers]]
    war = (readers, following[readers])
    links = (raw, war, waw)
    kind = np.concatenate([np.full(len(s), k) for k, (s, _) in enumerate(links)])
    return np.concatenate([s for s, _ in links]), np.concatenate([t for _, t in links]), kind


def _cell_uses(regions: Regions, segments: Segments, boxes: Boxes) -> _Uses:
    """Cut boxes along all boundaries into cells and merge the cells that the same nodes use in the same way."""
    node = segments.of(boxes.tile, boxes.step)
    tasks, positions = regions.task_of(segments.tile), regions.grid_positions()[segments.tile]
    cell, which = _cells(boxes)
    use = node * 2 + boxes.is_write
    cell, use_of_cell = _unique_pairs(cell, use[which])
    cell, use_of_cell = _unique_pairs(_merge_alike(cell, use_of_cell), use_of_cell)
    use_node, use_write = use_of_cell // 2, use_of_cell % 2
    # The kernel means its tasks in order, and the tiles of a task in grid order, on all ranks side by side;
    # a tile that updates a cell reads the value from before.
    order = np.lexsort((use_node, use_write, positions[use_node], tasks[use_node], cell))
    cell, use_node, use_write = cell[order], use_node[order], use_write[order]
    moved = np.where(use_write == 1, positions[use_node], -1)
    return _Uses(cell, use_node, np.stack([tasks[use_node], moved], axis=1), use_write.astype(bool))


def _unique_pairs(cell: IntArray, use: IntArray) -> tuple[IntArray, IntArray]:
    """Distinct (cell, use) pairs, sorted; cells are renumbered from 0."""
    _, compact = np.unique(cell, return_inverse=True)
    stride = int(use.max()) + 1
    pairs = np.unique(compact.reshape(-1) * stride + use)
    return pairs // stride, pairs % stride


def _cells(boxes: Boxes) -> tuple[IntArray, IntArray]:
    """For each (box, elementary cell in it): the cell's number and the box's."""
    low = np.concatenate([boxes.owner[:, None], boxes.low], axis=1)
    high = np.concatenate([boxes.owner[:, None] + 1, boxes.high], axis=1)
    which = np.arange(len(low), dtype=np.int64)
    cell = np.zeros(len(low), dtype=np.int64)
    for axis in range(low.shape[1]):
        cuts = np.unique(np.concatenate([low[:, axis], high[:, axis]]))
        begin, end = np.searchsorted(cuts, low[which, axis]), np.searchsorted(cuts, high[which, axis])
        repeat = np.repeat(np.arange(len(which)), end - begin)
        cell = cell[repeat] * len(cuts) + begin[repeat] + ragged_arange(end - begin)
        which = which[repeat]
    return cell, which


def _merge_alike(cell: IntArray, use: IntArray) -> IntArray:
    """Renumber sorted `cell` so that cells with equal sets of uses share a number.

    Sets are compared by the sum of a 64-bit mix of their members (splitmix64), twice with
    different constants, so two different sets are merged with a probability below 2⁻¹⁰⁰.
    """
    _, first = np.unique(cell, return_index=True)
    counts = np.diff(np.concatenate((first, [len(cell)])))
    first_digest, second_digest = (np.add.reduceat(_mix(use, seed), first) for seed in (1, 2))
    order = np.lexsort((second_digest, first_digest))
    a, b = first_digest[order], second_digest[order]
    merged = np.empty(len(order), dtype=np.int64)
    merged[order] = np.cumsum(np.concatenate(([0], (a[1:] != a[:-1]) | (b[1:] != b[:-1]))))
    return np.repeat(merged, counts)


def _mix(value: IntArray, seed: int) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        z = value.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15) * np.uint64(seed)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(31))
        return mixed


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
