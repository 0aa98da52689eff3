"""Tile segments: what a tile does between two of its own synchronisations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tileweave.compiler.boxes import Boxes, Counts
from tileweave.compiler.regions import Regions
from tileweave.primitives.expr import IntArray


@dataclass(frozen=True)
class Segments:
    """Tile segments: node `n` is part of tile `tile[n]`; `start[n]` is its first step in the tile's program order."""

    tile: IntArray
    start: IntArray

    def of(self, tile: IntArray, step: IntArray) -> IntArray:
        """The node that holds each (tile, step)."""
        stride = int(max(self.start.max(initial=0), step.max(initial=0))) + 1
        keys = self.tile * stride + self.start
        return np.searchsorted(keys, tile * stride + step, side="right").astype(np.int64) - 1


def cut_segments(regions: Regions) -> Segments:
    """Cut each tile where a wait follows work, or work follows a signal."""
    classes: list[tuple[int, Counts | Boxes]] = [(0, c) for c in regions.waits.values()]
    classes += [(1, b) for b in regions.boxes.values()]
    classes += [(2, c) for c in regions.signals.values()]
    every = np.arange(regions.num_tiles, dtype=np.int64)
    if not len(every):
        return Segments(every, every)
    tile = np.concatenate([every, *(c.tile for _, c in classes)])
    # Each tile has a segment from step 0 on, even if it touches nothing.
    step = np.concatenate([np.full(len(every), -1), *(c.step for _, c in classes)])
    phase = np.concatenate([np.full(len(every), -1), *(np.full(len(c.tile), k) for k, c in classes)])
    order = np.lexsort((step, tile))
    tile, step, phase = tile[order], step[order], phase[order]
    first = np.concatenate(([True], tile[1:] != tile[:-1]))
    cut = first | np.concatenate(([False], (phase[1:] < phase[:-1]) & ~first[1:]))
    return Segments(tile[cut], np.maximum(step[cut], 0))
