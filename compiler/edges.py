"""Edges of the tile graph, by kind, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tileweave.primitives.expr import IntArray

DATA_KINDS = ("raw", "war", "waw")
EDGE_KINDS = (*DATA_KINDS, "sync", "body", "lane")


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
