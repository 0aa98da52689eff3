"""Circles among the nodes of a graph: tiles that wait for each other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from tileweave.compiler.edges import Edges


def on_circle(edges: Edges, num_nodes: int) -> npt.NDArray[np.bool_]:
    """For each node, whether it lies on a circle of `edges`."""
    label, size = _components(edges, num_nodes)
    on = size[label] > 1
    on[edges.source[edges.source == edges.target]] = True
    return on


def circle(edges: Edges, num_nodes: int) -> list[int]:
    """A shortest circle through one node of the largest set of nodes that reach each other; empty if there is none."""
    label, size = _components(edges, num_nodes)
    on = on_circle(edges, num_nodes)
    if not on.any():
        return []
    largest = int(np.argmax(np.where(on, size[label], 0)))
    inside = label == label[largest]
    return _through(int(np.flatnonzero(inside)[0]), edges, inside)


def _components(edges: Edges, num_nodes: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """The strongly connected component of each node, and each component's size."""
    ones = np.ones(len(edges.source), dtype=np.int8)
    adjacency = coo_array((ones, (edges.source, edges.target)), shape=(num_nodes,) * 2).tocsr()
    _, label = connected_components(adjacency, directed=True, connection="strong")
    return label, np.bincount(label)


def _through(start: int, edges: Edges, inside: npt.NDArray[np.bool_]) -> list[int]:
    """A shortest circle through `start`, by breadth-first search."""
    following: dict[int, list[int]] = {}
    among = inside[edges.source] & inside[edges.target]
    for s, t in zip(edges.source[among].tolist(), edges.target[among].tolist(), strict=True):
        following.setdefault(s, []).append(t)
    parent: dict[int, int] = {}
    frontier = [start]
    while frontier and start not in parent:
        nexts = []
        for node in frontier:
            for child in following.get(node, ()):
                if child not in parent:
                    parent[child] = node
                    nexts.append(child)
        frontier = nexts
    found = [start]
    while parent[found[-1]] != start:
        found.append(parent[found[-1]])
    return found[::-1]
