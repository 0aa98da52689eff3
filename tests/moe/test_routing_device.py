"""The plan computed on the device against the one that the host computes, table by table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from hypothesis import given

from tests.moe.test_routing import Index, quick, routings
from tileweave.errors import ArgumentError
from tileweave.moe.routing import Placement, RoutingPlan, plan_all
from tileweave.moe.routing_device import DevicePlacement, DeviceTables, plan_routing_device

CPU = torch.device("cpu")
ROOMY = 1 << 20


def on_device(index: list[Index], placement: Placement, capacity: int = ROOMY) -> tuple[list[DeviceTables], list[int]]:
    plan = plan_routing_device([torch.from_numpy(i) for i in index], DevicePlacement.of(placement, CPU), capacity)
    return list(plan.tables), plan.refusals.tolist()


def assert_same(found: list[DeviceTables], want: list[RoutingPlan]) -> None:
    for tables, plan in zip(found, want, strict=True):
        for name, table in plan.named().items():
            got = getattr(tables, name)
            assert got.is_contiguous(), name
            assert torch.equal(got, torch.from_numpy(table)), name


@given(routings())
@quick
def test_every_table_is_that_of_the_host(drawn: tuple[list[Index], Placement]) -> None:
    index, placement = drawn
    found, (outside, most) = on_device(index, placement)
    want = plan_all(index, placement)
    assert_same(found, want)
    assert outside == 0
    assert most == max(int(plan.expert_offsets[-1]) for plan in want)


@pytest.mark.parametrize("name", ["one expert", "nothing", "some empty", "large"])
def test_skewed_and_empty_routings(name: str) -> None:
    random = np.random.default_rng(1)
    index = {
        "one expert": [np.full((7, 2), 3), np.full((0, 2), 3), np.full((4, 2), 3)],
        "nothing": [np.full((3, 2), -1)] * 3,
        "some empty": [np.zeros((0, 2), np.int64), random.integers(-1, 5, (9, 2)), np.zeros((0, 2), np.int64)],
        "large": [random.integers(-1, 5, (3000, 2)), random.integers(0, 2, (1500, 2)), random.integers(4, 5, (1, 2))],
    }[name]
    placement = Placement.contiguous(5, 3)
    assert_same(on_device(index, placement)[0], plan_all(index, placement))


def test_nothing_is_routed_where_an_expert_does_not_exist_or_a_rank_would_receive_too_much() -> None:
    placement = Placement.contiguous(4, 2)
    index = [np.array([[0, 1], [2, -1]]), np.array([[0, 0]])]
    nothing = plan_all([np.full_like(i, -1) for i in index], placement)
    found, refusals = on_device(index, placement, capacity=3)
    assert refusals == [0, 4]
    assert_same(found, nothing)
    assert_same(on_device(index, placement, capacity=4)[0], plan_all(index, placement))
    for wrong in (4, -2, 1 << 40):
        found, refusals = on_device([index[0], np.array([[0, wrong]])], placement)
        assert refusals[0] == 1
        assert_same(found, nothing)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_any_integer_dtype(dtype: torch.dtype) -> None:
    placement = Placement.contiguous(4, 1)
    index = np.array([[3, 0], [-1, 2]])
    plan = plan_routing_device([torch.from_numpy(index).to(dtype)], DevicePlacement.of(placement, CPU), ROOMY)
    assert_same(list(plan.tables), plan_all([index], placement))


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ([torch.zeros(2, 2)] * 2, r"topk_idx needs integers of shape \[num_tokens, num_topk\], got torch.float32"),
        ([torch.zeros(2, dtype=torch.int64)] * 2, r"got torch.int64 \[2\]"),
        ([torch.zeros(2, 2, dtype=torch.int64, device="meta")] * 2, r"is on device meta; pass topk_idx.to\('cpu'\)"),
        (torch.zeros(2, 2, dtype=torch.int64), "topk_idx has 1 tensors; expected 2, one for each rank here"),
    ],
)
def test_what_does_not_fit_is_refused(index: list[torch.Tensor], text: str) -> None:
    placement = DevicePlacement.of(Placement.contiguous(4, 2), CPU)
    with pytest.raises(ArgumentError, match=text):
        plan_routing_device(index, placement, ROOMY)


def rank_main(rank: int, file: str, index: list[Index]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=len(index))
    placement = Placement.contiguous(5, len(index))
    own = torch.from_numpy(index[rank])
    plan = plan_routing_device(own, DevicePlacement.of(placement, CPU), ROOMY, dist.group.WORLD)
    assert_same(list(plan.tables), [plan_all(index, placement)[rank]])
    dist.destroy_process_group()


def test_ranks_that_are_processes(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    index = [random.integers(-1, 5, (9, 2)), random.integers(-1, 5, (4, 2))]
    processes.spawn(rank_main, (str(tmp_path / "store"), index), nprocs=2)
