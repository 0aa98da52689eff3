"""Data dependences through one memory: who comes before whom because they touch the same cells.

Boxes are cut along all their boundaries to elementary cells; cells that the same nodes
use in the same way are one; and a cell links its writers to its readers through a hub.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tileweave.compiler.boxes import Boxes, ragged_arange
from tileweave.compiler.edges import DATA_KINDS, Edges
from tileweave.compiler.regions import Regions
from tileweave.compiler.segments import Segments
from tileweave.primitives.expr import IntArray


@dataclass(frozen=True)
class _Uses:
    """Uses of memory cells, one row a (cell class, node, kind), in the order that the kernel means.

    Neighbours with equal `group` `[num_uses, 2]` (task, and moment if they write) are one phase.
    """

    cell: IntArray
    node: IntArray
    group: IntArray
    is_write: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Dependences:
    """Edges through one memory; its hubs are numbered up to `next_hub`.

    `clash` are two segments that write the same cell at the same moment, if there are any:
    then nothing says who comes first.
    """

    edges: Edges
    next_hub: int
    clash: tuple[int, int] | None


def data_edges(regions: Regions, segments: Segments, boxes: Boxes, moments: IntArray, first: int) -> Dependences:
    """Dependences through one memory, in the order of the segments' `moments`; hubs are numbered from `first` on."""
    uses = _cell_uses(regions, segments, boxes, moments)
    # A phase is a run of reads of one cell by one task, or of writes at one moment.
    changes = (uses.cell[1:] != uses.cell[:-1]) | (uses.group[1:] != uses.group[:-1]).any(axis=1)
    starts = np.concatenate(([True], changes))
    phase = np.cumsum(starts) - 1
    phase_cell, phase_write = uses.cell[starts], uses.is_write[starts]
    source_phase, target_phase, kind = _phase_links(phase_cell, phase_write)
    parts: list[Edges] = []
    for k, name in enumerate(DATA_KINDS):
        chosen = kind == k
        if not chosen.any():
            continue
        parts_into, parts_out, first = _expand_links(
            name, (source_phase[chosen], target_phase[chosen]), (phase, uses.node), first
        )
        parts += [parts_into, parts_out]
    edges = Edges.join(parts) if parts else Edges.of("raw", *(np.empty(0, dtype=np.int64),) * 2)
    return Dependences(edges, first, _clash(segments.tile[uses.node], phase, uses))


def _clash(tile: IntArray, phase: IntArray, uses: _Uses) -> tuple[int, int] | None:
    """Two tiles in one phase of writes."""
    both = uses.is_write[1:] & (phase[1:] == phase[:-1]) & (tile[1:] != tile[:-1])
    found = np.flatnonzero(both)
    return (int(uses.node[found[0]]), int(uses.node[found[0] + 1])) if len(found) else None


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
    # A tile that both reads and writes a cell does not depend on itself, but on the others of its hub.
    stride = int(node.max()) + 1
    own = np.isin(out_hub * stride + out_node, into_hub * stride + into_node)
    into_parts, out_parts = [(into_node, into_hub)], [(out_hub[~own], out_node[~own])]
    next_hub = first + len(source)
    shared = np.flatnonzero(own & (np.bincount(into_hub - first, minlength=len(source))[out_hub - first] > 1))
    for link in shared.tolist():
        others = into_node[(into_hub == out_hub[link]) & (into_node != out_node[link])]
        into_parts.append((others, np.full(len(others), next_hub)))
        out_parts.append((np.full(1, next_hub), out_node[link : link + 1]))
        next_hub += 1
    return (
        Edges.of(kind, *(np.concatenate(column) for column in zip(*into_parts, strict=True))),
        Edges.of(kind, *(np.concatenate(column) for column in zip(*out_parts, strict=True))),
        next_hub,
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


def _cell_uses(regions: Regions, segments: Segments, boxes: Boxes, moments: IntArray) -> _Uses:
    """Cut boxes along all boundaries into cells and merge the cells that the same nodes use in the same way."""
    node = segments.of(boxes.tile, boxes.step)
    cell, which = _cells(boxes)
    use = node * 2 + boxes.is_write
    cell, use_of_cell = _unique_pairs(cell, use[which])
    cell, use_of_cell = _unique_pairs(_merge_alike(cell, use_of_cell), use_of_cell)
    use_node, use_write = use_of_cell // 2, use_of_cell % 2
    # A tile that updates a cell reads the value from before.
    order = np.lexsort((use_node, use_write, moments[use_node], cell))
    cell, use_node, use_write = cell[order], use_node[order], use_write[order]
    moved = np.where(use_write == 1, moments[use_node], -1)
    tasks = regions.task_of(segments.tile[use_node])
    return _Uses(cell, use_node, np.stack([tasks, moved], axis=1), use_write.astype(bool))


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
