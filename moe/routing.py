"""Where every routed row goes: the deterministic layout of expert parallelism.

From `topk_idx` `[num_tokens, num_topk]` (−1 = unused slot) each rank counts its rows per
expert; the counts are exchanged once.  An exclusive prefix sum in (expert, source rank)
order plus the stable position inside the source then gives every routed row a unique
destination, with no lock and no atomic: rows of an expert are contiguous, in global token
order, without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from tileweave.errors import ArgumentError, ConfigError, PeerError
from tileweave.moe.config import local_experts
from tileweave.primitives.group import Group
from tileweave.primitives.memory import Table

Int32Array = npt.NDArray[np.int32]
T = TypeVar("T")


@dataclass(frozen=True)
class Placement:
    """Which rank owns each expert, and its number there; `owner` and `local` are `[num_experts]`."""

    world_size: int
    owner: npt.NDArray[np.int64]
    local: npt.NDArray[np.int64]

    @staticmethod
    def contiguous(num_experts: int, world_size: int) -> Placement:
        """Blocks of consecutive experts; sizes differ by at most one, earlier ranks have the extra."""
        if num_experts < 1 or world_size < 1:
            raise ConfigError(f"need at least 1 expert and 1 rank, got {num_experts} and {world_size}")
        blocks = [local_experts(num_experts, world_size, rank) for rank in range(world_size)]
        owner = np.repeat(np.arange(world_size), [len(b) for b in blocks])
        local = np.concatenate([np.arange(len(b)) for b in blocks])
        return Placement(world_size, owner, local)

    def experts_of(self, rank: int) -> npt.NDArray[np.int64]:
        """Experts of `rank`, in local order."""
        own = np.flatnonzero(self.owner == rank)
        return own[np.argsort(self.local[own])]

    @property
    def num_experts(self) -> int:
        """Experts of all ranks."""
        return len(self.owner)

    @property
    def max_local(self) -> int:
        """Experts of the rank that has most."""
        return int(self.local.max()) + 1

    def by_place(self, per_expert: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """`[num_experts]` rearranged to `[world_size, max_local]`, zero where a rank has fewer experts."""
        grid = np.zeros((self.world_size, self.max_local), dtype=np.int64)
        grid[self.owner, self.local] = per_expert
        return grid


@dataclass(frozen=True)
class Plan(Generic[T]):
    """The tables of one rank that the kernels read. `W` ranks, `L` = most experts a rank owns.

    Send side (this rank's tokens): `send_count`, `send_start` (into `send_token`),
    `send_row` (first row inside the expert), `expert_start` (the expert's first row at its
    owner), each `[W, L]`; `send_token` `[num_tokens * num_topk]`, tokens by expert;
    `slot_rank` and `slot_row` `[num_tokens, num_topk]`, where each slot's row lives, −1 if unused;
    `slot_place` `[num_tokens, num_topk]`, each slot's place among the rows sent, −1 if unused;
    `num_slots` `[1]`, used slots.
    Receive side (this rank's experts): `expert_offsets` `[L + 1]`; `source_start`
    `[L, W + 1]`, rows of an expert before those of each source rank; `return_start` `[L, W]`,
    the place among the rows that a source rank sent of its first row for an expert.
    """

    send_count: T
    send_start: T
    send_row: T
    expert_start: T
    send_token: T
    slot_rank: T
    slot_row: T
    slot_place: T
    num_slots: T
    expert_offsets: T
    source_start: T
    return_start: T

    def named(self) -> dict[str, T]:
        """Field name → table."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


RoutingPlan = Plan[Int32Array]


def plan_specs(placement: Placement, num_topk: int) -> Plan[Table]:
    """Argument specs of a plan, for `tw.compile`."""
    world, most = placement.world_size, placement.max_local
    return Plan(
        send_count=Table((world, most)),
        send_start=Table((world, most)),
        send_row=Table((world, most)),
        expert_start=Table((world, most)),
        send_token=Table(("num_slots_max",)),
        slot_rank=Table(("num_tokens", num_topk)),
        slot_row=Table(("num_tokens", num_topk)),
        slot_place=Table(("num_tokens", num_topk)),
        num_slots=Table((1,)),
        expert_offsets=Table((most + 1,)),
        source_start=Table((most, world + 1)),
        return_start=Table((most, world)),
    )


def plan_routing(topk_idx: Any, placement: Placement, group: Group) -> RoutingPlan:
    """Plan this rank's part of a layer; collective.

    Args:
        topk_idx: `[num_tokens, num_topk]` integers, a torch tensor or NumPy array; −1 = unused slot.
        placement: who owns which expert.
        group: the ranks.

    Raises:
        ArgumentError: this rank's `topk_idx` is not valid.
        PeerError: another rank's is not; raised on every other rank.
    """
    error, counts = None, np.zeros(placement.num_experts, dtype=np.int32)
    try:
        index = check_topk_idx(topk_idx, placement.num_experts)
        counts = count_experts(index, placement.num_experts)
    except ArgumentError as problem:
        error = problem
    every = exchange_counts(counts, error, group)
    return plan_rank(index, every, placement, group.rank)


def exchange_counts(counts: Int32Array, error: ArgumentError | None, group: Group) -> npt.NDArray[np.int64]:
    """Gather `[num_experts]` counts of all ranks to `[world_size, num_experts]`; an error of one rank stops all."""
    message = np.append(counts, np.int32(error is not None))
    gathered = group.all_gather(message)
    if gathered[:, -1].any():
        refuse_together(error, group)
    return gathered[:, :-1].astype(np.int64)


def refuse_together(error: ArgumentError | None, group: Group) -> NoReturn:
    """Raise on every rank when at least one has an `error`: its own there, PeerError on the others; collective."""
    try:
        group.agree(None if error is None else str(error))
    except PeerError:
        if error is None:
            raise
    assert error is not None
    raise error


def check_topk_idx(topk_idx: Any, num_experts: int) -> npt.NDArray[np.int64]:
    """`topk_idx` as int64 `[num_tokens, num_topk]`.

    Raises:
        ArgumentError: wrong shape or dtype, or an expert out of range.
    """
    try:
        index = np.asarray(topk_idx)
    except (TypeError, ValueError, RuntimeError) as problem:  # ragged lists, dtypes and devices that NumPy lacks
        raise ArgumentError(f"topk_idx cannot be read as an array: {problem}") from None
    if index.ndim != 2 or index.dtype.kind not in "iu":
        raise ArgumentError(
            f"topk_idx needs integers of shape [num_tokens, num_topk], got {index.dtype} {list(index.shape)}"
        )
    if index.size and (index.min() < -1 or index.max() >= num_experts):
        bad = np.argwhere((index < -1) | (index >= num_experts))[0]
        raise ArgumentError(
            f"topk_idx[{bad[0]}, {bad[1]}] = {index[tuple(bad)]}: expected -1 (unused) or 0 to {num_experts - 1}"
        )
    return index.astype(np.int64, copy=False)


def count_experts(topk_idx: npt.NDArray[np.int64], num_experts: int) -> Int32Array:
    """Rows per expert, `[num_experts]`."""
    return np.bincount(topk_idx.ravel() + 1, minlength=num_experts + 1)[1:].astype(np.int32)


def plan_rank(
    topk_idx: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], placement: Placement, rank: int
) -> RoutingPlan:
    """The plan of `rank` from its own `topk_idx` and everybody's `counts` `[world_size, num_experts]`; pure."""
    earlier = np.cumsum(counts, axis=0) - counts
    totals = placement.by_place(counts.sum(axis=0))
    start_at_owner = (np.cumsum(totals, axis=1) - totals)[placement.owner, placement.local]
    mine = counts[rank]
    send_start = np.cumsum(mine) - mine
    flat = topk_idx.ravel()
    order = _stable_order(flat)[flat.size - int(mine.sum()) :]
    expert = flat[order]
    slot_row = np.full(flat.size, -1, dtype=np.int32)
    slot_rank = np.full(flat.size, -1, dtype=np.int32)
    slot_row[order] = np.arange(len(order)) + (start_at_owner + earlier[rank] - send_start)[expert]
    slot_rank[order] = placement.owner[expert]
    slot_place = np.full(flat.size, -1, dtype=np.int32)
    slot_place[order] = np.arange(len(order))
    send_token = np.zeros(flat.size, dtype=np.int32)
    send_token[: len(order)] = order // max(topk_idx.shape[1], 1)
    own = placement.by_place(np.arange(placement.num_experts))[rank]
    by_source = np.where(totals[rank] > 0, counts[:, own], 0)
    return Plan(
        send_count=_int32(placement.by_place(mine)),
        send_start=_int32(placement.by_place(send_start)),
        send_row=_int32(placement.by_place(earlier[rank])),
        expert_start=_int32(placement.by_place(start_at_owner)),
        send_token=send_token,
        slot_rank=slot_rank.reshape(topk_idx.shape),
        slot_row=slot_row.reshape(topk_idx.shape),
        slot_place=slot_place.reshape(topk_idx.shape),
        num_slots=_int32(np.array([len(order)])),
        expert_offsets=_int32(np.concatenate(([0], np.cumsum(totals[rank])))),
        source_start=_int32(np.concatenate((np.zeros((1, len(own))), np.cumsum(by_source, axis=0))).T),
        return_start=_int32((np.cumsum(counts, axis=1) - counts)[:, own].T),
    )


def plan_all(topk_idx: Sequence[Any], placement: Placement) -> list[RoutingPlan]:
    """The plans of every rank from all of their `topk_idx`; for analysis without ranks."""
    index = [check_topk_idx(i, placement.num_experts) for i in topk_idx]
    counts = np.stack([count_experts(i, placement.num_experts) for i in index]).astype(np.int64)
    return [plan_rank(i, counts, placement, rank) for rank, i in enumerate(index)]


def received_rows(counts: npt.NDArray[np.int64], placement: Placement) -> npt.NDArray[np.int64]:
    """Rows that each rank receives, `[world_size]`."""
    return np.bincount(placement.owner, weights=counts.sum(axis=0), minlength=placement.world_size).astype(np.int64)


def _stable_order(flat: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    # NumPy sorts 16-bit keys by radix, in linear time.
    small = flat.astype(np.int16) if flat.size and flat.max() < 1 << 15 else flat
    return np.argsort(small, kind="stable")


def _int32(values: npt.NDArray[Any]) -> Int32Array:
    return np.ascontiguousarray(values, dtype=np.int32)
