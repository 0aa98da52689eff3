"""The plan of `moe/routing.py` computed where the routing is, with no host read: a CUDA graph can capture it.

Every table has the same entries as `plan_routing`'s. What a host would refuse is recorded in
`DevicePlan.refusals` instead, and then nothing is routed, so that a kernel that runs the plan
touches no memory outside its buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tileweave.errors import ArgumentError
from tileweave.moe.routing import Placement, Plan

DeviceTables = Plan[torch.Tensor]


@dataclass(frozen=True)
class DevicePlacement:
    """A `Placement` on a device: `owner`, `local` int64 `[num_experts]`; for each rank and local number the expert
    `expert_at` and whether it is `present`, `[world_size, max_local]`."""

    world_size: int
    owner: torch.Tensor
    local: torch.Tensor
    expert_at: torch.Tensor
    present: torch.Tensor

    @staticmethod
    def of(placement: Placement, device: torch.device) -> DevicePlacement:
        """Copied to `device`, once; not to be called while a graph is captured."""
        owner, local = (torch.from_numpy(each).to(device) for each in (placement.owner, placement.local))
        shape = (placement.world_size, placement.max_local)
        expert_at = torch.zeros(shape, dtype=torch.int64, device=device)
        expert_at[owner, local] = torch.arange(placement.num_experts, device=device)
        present = torch.zeros(shape, dtype=torch.bool, device=device)
        present[owner, local] = True
        return DevicePlacement(placement.world_size, owner, local, expert_at, present)

    @property
    def num_experts(self) -> int:
        """Experts of all ranks."""
        return self.owner.shape[0]

    def by_place(self, per_expert: torch.Tensor) -> torch.Tensor:
        """`[num_experts]` rearranged to `[world_size, max_local]`, zero where a rank has fewer experts."""
        return per_expert[self.expert_at].masked_fill(~self.present, 0)


@dataclass(frozen=True)
class DevicePlan:
    """Tables of the ranks of this process, and int64 `refusals` `[2]` on the device: slots whose expert does not
    exist, over all ranks, and the most rows that a rank would receive. If the first is above 0, or the second above
    the capacity, no slot is routed."""

    tables: tuple[DeviceTables, ...]
    refusals: torch.Tensor


def plan_routing_device(
    topk_idx: torch.Tensor | Sequence[torch.Tensor],
    placement: DevicePlacement,
    capacity: int,
    group: dist.ProcessGroup | None = None,
) -> DevicePlan:
    """Plan a layer where the routing is; collective if ranks are processes.

    Args:
        topk_idx: integers `[num_tokens, num_topk]` of this rank, one of a process group; or a sequence of these, one
            for each rank, all of which are this process's. −1 = unused slot.
        placement: who owns which expert, on the device of `topk_idx`.
        capacity: rows that a rank can receive.
        group: the processes, where ranks are processes; counts are gathered by torch.distributed.

    Raises:
        ArgumentError: wrong shape, dtype, device or number of tensors; what the entries are is not looked at here.
    """
    first = 0 if group is None else dist.get_rank(group)
    every = [topk_idx] if isinstance(topk_idx, torch.Tensor) else list(topk_idx)
    expected = 1 if group is not None else placement.world_size
    if len(every) != expected:
        raise ArgumentError(f"topk_idx has {len(every)} tensors; expected {expected}, one for each rank here")
    for each in every:
        check_index(each, placement)
    every = [each.long() for each in every]
    outside = torch.stack([((each < -1) | (each >= placement.num_experts)).sum() for each in every])
    counts = torch.stack([count_experts(each, placement.num_experts) for each in every])
    if group is not None:
        counts, outside = _exchange(counts, outside, group)
    received = placement.by_place(counts.sum(dim=0)).sum(dim=1)
    refusals = torch.stack([outside.sum(), received.amax()])
    fine = (refusals[0] == 0) & (refusals[1] <= capacity)
    counts = torch.where(fine, counts, 0)
    kept = [torch.where(fine, each, -1) for each in every]
    tables = tuple(_plan_rank(each, counts, placement, first + at) for at, each in enumerate(kept))
    return DevicePlan(tables, refusals)


def check_index(topk_idx: torch.Tensor, placement: DevicePlacement) -> None:
    """Refuse what shows without looking at the entries.

    Raises:
        ArgumentError: wrong shape, dtype or device.
    """
    if topk_idx.dim() != 2 or topk_idx.dtype not in (torch.int64, torch.int32, torch.int16):
        raise ArgumentError(
            f"topk_idx needs integers of shape [num_tokens, num_topk], got {topk_idx.dtype} {list(topk_idx.shape)}"
        )
    if topk_idx.device != placement.owner.device:
        raise ArgumentError(f"topk_idx is on device {topk_idx.device}; pass topk_idx.to('{placement.owner.device}')")


def count_experts(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Rows per expert, int64 `[num_experts]`; unused slots and experts that do not exist are left out.

    `torch.bincount` would read the largest entry back.
    """
    flat = topk_idx.reshape(-1)
    inside = (flat >= 0) & (flat < num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, torch.where(inside, flat, num_experts), torch.ones_like(flat))[:-1]


def _exchange(
    counts: torch.Tensor, outside: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's `[1, num_experts]` and `[1]` gathered to `[world_size, …]`, in one message."""
    message = torch.cat([counts[0], outside])
    gathered = torch.empty(dist.get_world_size(group) * len(message), dtype=message.dtype, device=message.device)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
    gather(gathered, message, group)
    rows = gathered.view(-1, len(message))
    return rows[:, :-1], rows[:, -1]


def _plan_rank(topk_idx: torch.Tensor, counts: torch.Tensor, placement: DevicePlacement, rank: int) -> DeviceTables:
    """As `plan_rank` of moe/routing.py; sizes depend on shapes alone, and what is past the used slots is masked."""
    earlier = counts.cumsum(0) - counts
    totals = placement.by_place(counts.sum(dim=0))
    start_at_owner = (totals.cumsum(1) - totals)[placement.owner, placement.local]
    mine = counts[rank]
    send_start = mine.cumsum(0) - mine
    flat = topk_idx.reshape(-1)
    # Unused slots last, so that the used ones are a prefix of a length that no shape depends on.
    order = torch.where(flat < 0, placement.num_experts, flat).argsort(stable=True)
    place = torch.arange(len(flat), device=flat.device)
    used = place < mine.sum()
    expert = flat[order].clamp(min=0)
    row = place + (start_at_owner + earlier[rank] - send_start)[expert]

    def by_slot(values: torch.Tensor) -> torch.Tensor:
        """`values` of sorted slots back at their slots, −1 where unused; int32 `[num_tokens, num_topk]`."""
        sorted_values = torch.where(used, values, -1).int()
        return torch.empty_like(sorted_values).scatter_(0, order, sorted_values).view(topk_idx.shape)

    own = placement.expert_at[rank]
    by_source = torch.where(totals[rank] > 0, counts[:, own], 0)
    zero = torch.zeros_like(counts[:1, :1])
    return Plan(
        send_count=placement.by_place(mine).int(),
        send_start=placement.by_place(send_start).int(),
        send_row=placement.by_place(earlier[rank]).int(),
        expert_start=placement.by_place(start_at_owner).int(),
        send_token=torch.where(used, order // max(topk_idx.shape[1], 1), 0).int(),
        slot_rank=by_slot(placement.owner[expert]),
        slot_row=by_slot(row),
        slot_place=by_slot(place),
        num_slots=mine.sum().reshape(1).int(),
        expert_offsets=torch.cat([zero[0], totals[rank].cumsum(0)]).int(),
        source_start=torch.cat([zero.expand(1, len(own)), by_source.cumsum(0)]).T.int().contiguous(),
        return_start=(counts.cumsum(1) - counts)[:, own].T.int().contiguous(),
    )
