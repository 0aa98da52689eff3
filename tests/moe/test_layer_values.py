"""The layer's values against eager float64: 1e-5 in fp32 and 2e-2 in bf16, relative, in the Frobenius norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.moe.layers import LIMITS, Inputs, even, random_inputs, reference, relative_error, run_layer
from tileweave.compiler.config import Config
from tileweave.compiler.order import ORDERS
from tileweave.moe.config import Activation, MoEConfig
from tileweave.primitives.launch import VirtualGroup

Virtual: TypeAlias = Callable[[int], VirtualGroup]

PLAIN = MoEConfig(36, 20, 6, 3)
FULL = MoEConfig(36, 20, 6, 3, bias=True, shared_intermediate=12)


def check(
    virtual: Virtual, config: MoEConfig, inputs: Inputs, counts: list[int], run: Config | None = None
) -> torch.Tensor:
    """Run on `len(counts)` ranks that bring so many tokens each, and compare."""
    got = run_layer(virtual(len(counts)), config, inputs.split(counts), run)
    assert got.shape == inputs.x.shape
    assert got.dtype == config.dtype
    error = relative_error(got, reference(config, inputs))
    assert error <= LIMITS[config.dtype], f"relative error {error:.3g}"
    return got


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_world_sizes_orders_workers_and_queues(virtual: Virtual, world_size: int, order: str) -> None:
    inputs = random_inputs(FULL, 150, unused=0.2)
    # The other half of orders and worker splits: each order meets both kinds of lanes over the world sizes.
    split = (world_size + list(ORDERS).index(order)) % 2 == 0
    for workers in (2, 3) if split else (1, 2, 3):
        for queue in ("static", "dynamic"):
            run = Config(workers=workers, comm_workers=workers - 1 if split else 0, order=order, queue=queue)  # type: ignore[arg-type]
            check(virtual, FULL, inputs, even(150, world_size), run)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("hidden", [1000, 2560])
def test_hidden_sizes_that_no_tile_divides(virtual: Virtual, hidden: int, dtype: torch.dtype) -> None:
    config = MoEConfig(hidden, 264, 5, 2, dtype=dtype)
    check(virtual, config, random_inputs(config, 61), [40, 21], Config(workers=2))


@pytest.mark.parametrize(
    ("num_experts", "num_topk", "world_size"),
    [(1, 1, 2), (2, 5, 4), (160, 1, 2), (160, 16, 3), (3, 16, 2)],
)
def test_numbers_of_experts_and_slots(virtual: Virtual, num_experts: int, num_topk: int, world_size: int) -> None:
    """Also fewer experts than ranks, more slots than experts, and experts that no token goes to."""
    config = replace(PLAIN, num_experts=num_experts, num_topk=num_topk)
    check(virtual, config, random_inputs(config, 77, unused=0.1), even(77, world_size))


ACTIVATIONS = [(name, gated, torch.float32) for name in get_args(Activation) for gated in (True, False)]


@pytest.mark.parametrize(
    ("activation", "gated", "dtype"),
    [*ACTIVATIONS, ("silu", True, torch.bfloat16), ("gelu_tanh", False, torch.bfloat16)],
)
def test_activations(virtual: Virtual, activation: Activation, gated: bool, dtype: torch.dtype) -> None:
    config = replace(FULL, activation=activation, gated=gated, dtype=dtype)
    inputs = random_inputs(config, 50)
    check(virtual, config, replace(inputs, x=inputs.x * 3), [20, 30])


def test_thousands_of_tokens(virtual: Virtual) -> None:
    """More rows than one tile, on every expert, and a rank without tokens between two that have many."""
    inputs = random_inputs(PLAIN, 4100, unused=0.05)
    for counts in ([2100, 0, 2000], [4100, 0, 0], [1, 0, 4099]):
        check(virtual, PLAIN, inputs, counts, Config(workers=2, queue="dynamic"))


def test_no_tokens_at_all(virtual: Virtual) -> None:
    inputs = random_inputs(FULL, 0)
    for world_size in (1, 2, 4):
        assert check(virtual, FULL, inputs, [0] * world_size).shape == (0, 36)


@pytest.mark.parametrize("expert", [0, 5])
def test_every_slot_of_every_token_to_one_expert(virtual: Virtual, expert: int) -> None:
    """Nothing is dropped: memory grows to what the fullest rank receives."""
    inputs = random_inputs(PLAIN, 700)
    check(virtual, PLAIN, replace(inputs, topk_idx=torch.full_like(inputs.topk_idx, expert)), [300, 100, 300])


def test_unused_slots(virtual: Virtual) -> None:
    inputs = random_inputs(PLAIN, 90, unused=1.0)
    assert not check(virtual, PLAIN, inputs, [60, 30]).any()
    inputs = random_inputs(FULL, 90, unused=1.0)
    assert check(virtual, FULL, inputs, [60, 30]).any(), "the shared expert is left"


def test_zero_and_negative_weights(virtual: Virtual) -> None:
    inputs = random_inputs(PLAIN, 90)
    weights = inputs.topk_weights - 0.5
    weights[::3] = 0.0
    got = check(virtual, PLAIN, replace(inputs, topk_weights=weights), [10, 80])
    assert not got[::3].any()


def test_tokens_of_any_leading_shape(virtual: Virtual) -> None:
    def batches(group: Any) -> None:
        from tileweave.moe.layer import MoELayer

        layer = MoELayer(PLAIN, group)
        x = torch.randn(4, 5, 36)
        assert torch.equal(layer(x), layer(x.reshape(20, 36)).reshape(4, 5, 36))
        assert layer(x[:, :0]).shape == (4, 0, 36)
        assert torch.equal(layer(x[0, 0]), layer(x[0, :1])[0])

    virtual(2).run(batches)


@st.composite
def routed(draw: st.DrawFn) -> tuple[Inputs, list[int], Config]:
    """Anything that a layer of `PLAIN` may be called with on 1 to 4 ranks."""
    counts = draw(st.lists(st.integers(0, 24), min_size=1, max_size=4))
    shape = (sum(counts), PLAIN.num_topk)
    inputs = random_inputs(PLAIN, sum(counts), seed=draw(st.integers(0, 3)))
    chosen = st.sampled_from(draw(st.lists(st.integers(-1, 5), min_size=1, max_size=7)))
    index = torch.from_numpy(draw(arrays(np.int64, shape, elements=chosen, fill=chosen)))
    weights = torch.from_numpy(draw(arrays(np.float32, shape, elements=st.floats(-4, 4, width=32))))
    workers = draw(st.integers(1, 3))
    queue = draw(st.sampled_from(("static", "dynamic")))
    return Inputs(inputs.x, index, weights), counts, Config(workers=workers, order="own_rank_first", queue=queue)


@given(routed())
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_any_routing(virtual: Virtual, drawn: tuple[Inputs, list[int], Config]) -> None:
    inputs, counts, run = drawn
    check(virtual, PLAIN, inputs, counts, run)
