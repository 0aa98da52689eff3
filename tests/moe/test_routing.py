"""Properties of the layout of routed rows, whatever the routing."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tileweave.errors import ArgumentError, ConfigError
from tileweave.moe.routing import Placement, RoutingPlan, plan_all, plan_routing, received_rows
from tileweave.primitives.group import Group
from tileweave.primitives.launch import VirtualGroup

Index: TypeAlias = npt.NDArray[np.int64]

quick = settings(max_examples=150, deadline=None, derandomize=True, database=None)


@st.composite
def routings(draw: st.DrawFn) -> tuple[list[Index], Placement]:
    """`topk_idx` of each rank, with few or many different experts and any share of unused slots."""
    num_experts = draw(st.integers(1, 9))
    num_topk = draw(st.integers(1, 4))
    counts = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    expert = st.sampled_from(draw(st.lists(st.integers(-1, num_experts - 1), min_size=1, max_size=6)))
    index = [draw(arrays(np.int64, (count, num_topk), elements=expert, fill=expert)) for count in counts]
    return index, Placement.contiguous(num_experts, len(counts))


def slots(index: list[Index], plans: list[RoutingPlan]) -> list[tuple[int, int, int, int, int]]:
    """(expert, source rank, flat slot, owner, row) of each used slot, by source and slot."""
    found = []
    for rank, (topk_idx, plan) in enumerate(zip(index, plans, strict=True)):
        for at, expert in enumerate(topk_idx.ravel().tolist()):
            owner, row = int(plan.slot_rank.ravel()[at]), int(plan.slot_row.ravel()[at])
            if expert < 0:
                assert (owner, row) == (-1, -1)
            else:
                found.append((expert, rank, at, owner, row))
    return found


@given(routings())
@quick
def test_every_slot_has_a_row_of_its_own_at_the_owner_of_its_expert(drawn: tuple[list[Index], Placement]) -> None:
    index, placement = drawn
    found = slots(index, plan_all(index, placement))
    places = [(owner, row) for *_, owner, row in found]
    assert len(set(places)) == len(places)
    assert all(owner == placement.owner[expert] for expert, _, _, owner, _ in found)
    for rank in range(placement.world_size):  # and no row of a rank is left out
        rows = sorted(row for owner, row in places if owner == rank)
        assert rows == list(range(len(rows)))


@given(routings())
@quick
def test_rows_of_an_expert_are_contiguous_and_in_global_token_order(drawn: tuple[list[Index], Placement]) -> None:
    index, placement = drawn
    plans = plan_all(index, placement)
    for expert in range(placement.num_experts):
        rows = [row for e, _, _, _, row in slots(index, plans) if e == expert]
        plan, local = plans[placement.owner[expert]], placement.local[expert]
        first, last = plan.expert_offsets[local : local + 2].tolist()
        assert rows == list(range(first, last))


@given(routings())
@quick
def test_sums_agree(drawn: tuple[list[Index], Placement]) -> None:
    index, placement = drawn
    plans = plan_all(index, placement)
    used = [int((i >= 0).sum()) for i in index]
    assert [int(p.num_slots[0]) for p in plans] == used == [int(p.send_count.sum()) for p in plans]
    assert [len(p.send_token) for p in plans] == [i.size for i in index]
    received = [int(p.expert_offsets[-1]) for p in plans]
    assert sum(received) == sum(used)
    counts = np.stack([np.bincount(i[i >= 0], minlength=placement.num_experts) for i in index])
    assert received_rows(counts, placement).tolist() == received
    for owner, plan in enumerate(plans):
        assert (np.diff(plan.expert_offsets) == plan.source_start[:, -1]).all()
        for source, sender in enumerate(plans):
            sent = sender.send_count[owner]
            assert (np.diff(plan.source_start)[:, source] == sent).all()
            assert (plan.source_start[:, source][sent > 0] == sender.send_row[owner][sent > 0]).all()
            assert (plan.expert_offsets[:-1][sent > 0] == sender.expert_start[owner][sent > 0]).all()


@given(routings())
@quick
def test_a_row_goes_back_to_the_place_from_which_it_was_sent(drawn: tuple[list[Index], Placement]) -> None:
    index, placement = drawn
    plans = plan_all(index, placement)
    for expert, source, slot, rank, row in slots(index, plans):
        owner, local = plans[rank], placement.local[expert]
        inside = row - int(owner.expert_offsets[local]) - int(owner.source_start[local, source])
        assert plans[source].slot_place.ravel()[slot] == owner.return_start[local, source] + inside
    for topk_idx, plan in zip(index, plans, strict=True):
        assert ((plan.slot_place < 0) == (topk_idx < 0)).all()


@given(routings())
@quick
def test_senders_list_their_tokens_by_expert(drawn: tuple[list[Index], Placement]) -> None:
    index, placement = drawn
    for topk_idx, plan in zip(index, plan_all(index, placement), strict=True):
        for expert in range(placement.num_experts):
            at = placement.owner[expert], placement.local[expert]
            first = plan.send_start[at]
            tokens = plan.send_token[first : first + plan.send_count[at]]
            assert tokens.tolist() == np.nonzero(topk_idx == expert)[0].tolist()


@given(routings(), st.randoms(use_true_random=False))
@quick
def test_rows_do_not_depend_on_how_tokens_are_split(drawn: tuple[list[Index], Placement], random: object) -> None:
    """Whoever brings a token, its slots get the same place among the rows of their expert."""
    index, placement = drawn
    tokens = np.concatenate(index)
    ranks = len(index)
    cuts = sorted(random.randint(0, len(tokens)) for _ in range(ranks - 1))  # type: ignore[attr-defined]
    other = np.split(tokens, cuts)
    one = slots([tokens], plan_all([tokens], Placement.contiguous(placement.num_experts, 1)))
    for split in (index, other):
        plans = plan_all(split, placement)
        starts = [plans[placement.owner[e]].expert_offsets[placement.local[e]] for e in range(placement.num_experts)]
        totals = np.cumsum([0, *np.bincount(tokens[tokens >= 0], minlength=placement.num_experts)])
        rows = [int(row - starts[e] + totals[e]) for e, _, _, _, row in slots(split, plans)]
        assert rows == [row for *_, row in one]


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_plan_together_what_one_computes_for_all(world_size: int) -> None:
    random = np.random.default_rng(0)
    placement = Placement.contiguous(7, world_size)
    index = [random.integers(-1, 7, size=(int(random.integers(0, 40)), 3)) for _ in range(world_size)]
    want = plan_all(index, placement)

    def rank(group: Group) -> list[RoutingPlan]:
        own = index[group.rank]
        kinds = (own, own.astype(np.int32), own.tolist() or own, torch.from_numpy(own), torch.from_numpy(own).int())
        return [plan_routing(kind, placement, group) for kind in kinds]

    with VirtualGroup(world_size) as ranks:
        for plans, wanted in zip(ranks.run(rank), want, strict=True):
            for plan in plans:
                for name, table in plan.named().items():
                    assert table.dtype == np.int32, name
                    np.testing.assert_array_equal(table, wanted.named()[name], err_msg=name)


def test_placement() -> None:
    placement = Placement.contiguous(7, 3)
    assert [placement.experts_of(rank).tolist() for rank in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert placement.max_local == 3
    assert Placement.contiguous(2, 4).experts_of(3).tolist() == []
    with pytest.raises(ConfigError, match=r"^need at least 1 expert and 1 rank, got 0 and 2$"):
        Placement.contiguous(0, 2)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (np.zeros((2, 3)), "topk_idx needs integers of shape [num_tokens, num_topk], got float64 [2, 3]"),
        (np.zeros(3, int), "topk_idx needs integers of shape [num_tokens, num_topk], got int64 [3]"),
        (np.array([[0, 1], [2, 7]]), "topk_idx[1, 1] = 7: expected -1 (unused) or 0 to 6"),
        (np.array([[0, -2], [2, 7]]), "topk_idx[0, 1] = -2: expected -1 (unused) or 0 to 6"),
    ],
)
def test_refused(bad: npt.NDArray[np.int64], text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        plan_all([bad], Placement.contiguous(7, 1))
    assert str(caught.value) == text
