"""The nine tile-centric primitives of TileLink, by their names in the literature.

Zheng et al., "TileLink: Generating Efficient Compute-Communication Overlapping Kernels
using Tile-Centric Primitives" (MLSys 2025, arXiv 2503.20313).  There a compiler maps a
tile's id to a region, a rank and a barrier; here the author names memory, index and
counter, and the mapping is plain arithmetic on grid indices.  Each primitive is one or two ops of
`tileweave.primitives.language`, so the graph, the checks and every backend see nothing new.

| pair of primitives | counter | who adds, who waits |
| --- | --- | --- |
| `producer_tile_notify`, `consumer_tile_wait` | `counters[tile]` | its producers; consumers on one or all ranks |
| `peer_tile_notify`, `peer_tile_wait` | `counters[sender, tile]` | its sender; the rank that it was sent to |
| `rank_notify`, `rank_wait` | `counters[sender]` | a rank; the rank that it wrote to |

A notify adds to a counter, with release order: whoever sees the new count sees all that the
task wrote before.  A wait acquires: what the task reads after it is what was released.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from tileweave.errors import TraceError
from tileweave.primitives import language as tw
from tileweave.primitives.expr import ScalarLike
from tileweave.primitives.language import IndexLike, PeerLike, Scope
from tileweave.primitives.memory import Memory, Signal
from tileweave.primitives.source import caller_location
from tileweave.primitives.tile import Tile

TileId: TypeAlias = "ScalarLike | tuple[ScalarLike, ...]"

__all__ = [
    "consumer_tile_wait",
    "peer_tile_notify",
    "peer_tile_wait",
    "producer_tile_notify",
    "rank_copy_data",
    "rank_notify",
    "rank_wait",
    "tile_pull_data",
    "tile_push_data",
]


# ---------------------------------------------------------------- signals


def producer_tile_notify(
    counters: Signal, tile: TileId, mode: Literal["p2p", "broadcast"] = "p2p", *, amount: ScalarLike = 1
) -> None:
    """Tell the consumers of `tile` that this task has written its part of it.

    Adds `amount` to `counters[tile]`: with `p2p` on this rank, release order, scope GPU; with
    `broadcast` on every rank, this one included, release order, scope SYSTEM.

    Raises:
        TraceError: the mode is unknown.
    """
    if mode == "p2p":
        tw.signal(counters, tile, amount, scope=Scope.GPU)
    elif mode == "broadcast":
        for peer in tw.range(tw.world_size()):
            tw.signal(counters, tile, amount, peer)
    else:
        raise TraceError(f"producer_tile_notify has modes 'p2p' and 'broadcast', got {mode!r}", caller_location())


def consumer_tile_wait(counters: Signal, tile: TileId, target: ScalarLike = 1, *, scope: Scope = Scope.SYSTEM) -> None:
    """Wait until the producers of `tile` have written it.

    Blocks until this rank's `counters[tile]` is `target`, the sum of all amounts that producers
    add to it; acquire order. Scope SYSTEM sees producers on any rank, GPU those on this rank.
    """
    tw.wait(counters, tile, target, scope=scope)


def peer_tile_notify(counters: Signal, tile: TileId, peer: ScalarLike, *, amount: ScalarLike = 1) -> None:
    """Tell rank `peer` that this task has sent it `tile`.

    Adds `amount` to `counters[r, tile]` on `peer`, where `r` is this rank; release order, scope SYSTEM.
    """
    tw.signal(counters, _of(tw.rank(), tile), amount, peer)


def peer_tile_wait(counters: Signal, tile: TileId, peer: ScalarLike, target: ScalarLike = 1) -> None:
    """Wait until rank `peer` has sent `tile` to this rank.

    Blocks until this rank's `counters[peer, tile]` is `target`; acquire order, scope SYSTEM.
    """
    tw.wait(counters, _of(peer, tile), target)


def rank_notify(counters: Signal, peer: ScalarLike, *, amount: ScalarLike = 1) -> None:
    """Tell rank `peer` that this rank's data for it is written, or one of its parts.

    Adds `amount` to `counters[r]` on `peer`, where `r` is this rank; release order, scope SYSTEM.
    """
    tw.signal(counters, tw.rank(), amount, peer)


def rank_wait(counters: Signal, peer: ScalarLike, target: ScalarLike = 1) -> None:
    """Wait until rank `peer` has written its data for this rank.

    Blocks until this rank's `counters[peer]` is `target`, the sum of all amounts that `peer` adds;
    acquire order, scope SYSTEM.
    """
    tw.wait(counters, peer, target)


# ---------------------------------------------------------------- data


def tile_push_data(memory: Memory, index: IndexLike, value: Tile, peer: PeerLike) -> None:
    """Write the tile `value` to `index` of `memory` on rank `peer`; publish it with a notify after."""
    tw.remote_store(memory, index, value, peer)


def tile_pull_data(memory: Memory, index: IndexLike, peer: PeerLike) -> Tile:
    """The tile at `index` of `memory` on rank `peer`; wait for its producer before."""
    return tw.remote_load(memory, index, peer)


def rank_copy_data(
    target: Memory,
    target_index: IndexLike,
    source: Memory,
    source_index: IndexLike,
    *,
    push_to: ScalarLike | None = None,
    pull_from: ScalarLike | None = None,
) -> None:
    """Copy a block of `source` to `target` without a tile in between.

    With `push_to` the target lies on that rank and the source here; with `pull_from` the source lies
    on that rank and the target here. Like all data primitives it signals nothing.

    Raises:
        TraceError: not exactly one of `push_to` and `pull_from` is given.
    """
    if push_to is not None and pull_from is None:
        tw.put(target, target_index, source, source_index, push_to)
    elif pull_from is not None and push_to is None:
        tw.get(target, target_index, source, source_index, pull_from)
    else:
        raise TraceError("rank_copy_data needs one of push_to=rank and pull_from=rank", caller_location())


def _of(sender: ScalarLike, tile: TileId) -> tuple[ScalarLike, ...]:
    """The counter of a tile of one sender."""
    return (sender, *(tile if isinstance(tile, tuple) else (tile,)))
