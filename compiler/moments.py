"""The moments of a kernel: in which order it means the accesses to a piece of memory.

By declaration: tasks in order, the tiles of a task in grid order and part by part, on all
ranks side by side.  By signals: as the signals order them, and by declaration what they
leave open.  A kernel whose signals contradict its declarations, such as a ring whose
buffers come round, means what the signals say.
"""

from __future__ import annotations

import numpy as np

from tileweave.compiler.boxes import ragged_arange
from tileweave.compiler.edges import Edges
from tileweave.compiler.regions import Regions
from tileweave.compiler.segments import Segments
from tileweave.primitives.expr import IntArray


def declared_moments(regions: Regions, segments: Segments) -> IntArray:
    """The moment of each segment by declaration; segments of several ranks share one."""
    part = np.arange(len(segments.tile)) - np.searchsorted(segments.tile, segments.tile)
    return _numbered(regions.task_of(segments.tile), regions.grid_positions()[segments.tile], part)


def signalled_moments(declared: IntArray, order: Edges, num_nodes: int) -> IntArray:
    """The moment of each segment by the edges `order` of signals, then by declaration.

    What comes later in `order` has a later moment.  Where `order` leaves two accesses open, either
    may come first: they are a race.
    """
    return _numbered(_depths(order, num_nodes)[: len(declared)], declared)


def _numbered(*columns: IntArray) -> IntArray:
    """Rows numbered from 0 in their order; equal ones alike."""
    order = np.lexsort(columns[::-1])
    new = np.zeros(len(order), dtype=bool)
    for column in columns:
        new[1:] |= np.diff(column[order]) != 0
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.cumsum(new)
    return number


def _depths(order: Edges, num_nodes: int) -> IntArray:
    """Length of the longest path to each node; what lies on a circle or behind one is deepest.  (Kahn, by fronts.)"""
    sort = np.argsort(order.source, kind="stable")
    targets, begin = order.target[sort], np.searchsorted(order.source[sort], np.arange(num_nodes + 1))
    missing = np.bincount(order.target, minlength=num_nodes)
    depth, depths = 0, np.full(num_nodes, num_nodes)
    front = np.flatnonzero(missing == 0)
    while len(front):
        depths[front] = depth
        depth += 1
        counts = begin[front + 1] - begin[front]
        reached = targets[np.repeat(begin[front], counts) + ragged_arange(counts)]
        np.subtract.at(missing, reached, 1)
        front = np.unique(reached[missing[reached] == 0])
    return depths
