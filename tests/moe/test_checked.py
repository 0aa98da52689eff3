"""The shipped kernels pass every compile-time check, under all orders and many routings."""

from __future__ import annotations

import numpy as np
import pytest

import tileweave as tw
from tileweave.compiler.order import ORDERS
from tileweave.errors import SyncError
from tileweave.moe.cases import cases, routed_case
from tileweave.moe.routing import Placement, plan_all


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("order", sorted(ORDERS))
def test_cases_pass_under_every_order(world_size: int, order: str) -> None:
    for case in cases(world_size):
        config = tw.Config(workers=2, comm_workers=1, order=order, tunables=case.config.tunables)
        tw.compile(case.kernel, *case.specs, world_size=world_size, config=config).check(case.arguments)


@pytest.mark.parametrize("seed", range(60))
def test_layer_passes_on_random_routings(seed: int) -> None:
    random = np.random.default_rng(seed)
    world_size = int(random.integers(1, 5))
    tokens = random.integers(0, 25, world_size) * (random.random(world_size) < 0.8)
    skew = random.dirichlet(np.full(5, random.choice([0.1, 1.0, 10.0])))
    index = [random.choice(5, size=(n, 2), p=skew) for n in tokens]
    index = [np.where(random.random(i.shape) < random.choice([0.0, 0.3]), -1, i) for i in index]
    case = routed_case(index)
    case.compile().check(case.arguments)


def test_a_missing_row_is_noticed() -> None:
    """The check can fail: one row fewer than the consumer expects."""
    case = routed_case([np.array([[0, 1], [2, 3]]), np.array([[0, 4]])])
    broken = dict(case.arguments[0])
    broken["plan.send_count"] = broken["plan.send_count"].copy()
    broken["plan.send_count"][0, 0] = 0
    with pytest.raises(SyncError):
        case.compile().check([broken, case.arguments[1]])


def test_plans_do_not_depend_on_who_makes_them() -> None:
    placement = Placement.contiguous(5, 2)
    index = [np.array([[0, 1], [2, -1]]), np.array([[4, 4]])]
    first, second = plan_all(index, placement), plan_all([i.astype(np.int32) for i in index], placement)
    for a, b in zip(first, second, strict=True):
        assert all(np.array_equal(a.named()[name], b.named()[name]) for name in a.named())
