"""Sizes, the split of experts over ranks, and random weights."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tileweave.errors import ConfigError
from tileweave.moe.config import MoEConfig, local_experts, random_weights

GOOD: dict[str, Any] = {"hidden": 16, "intermediate": 8, "num_experts": 5, "num_topk": 2}


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("hidden", 0, "MoEConfig.hidden is 0; expected an int of at least 1"),
        ("intermediate", 2.5, "MoEConfig.intermediate is 2.5; expected an int of at least 1"),
        ("num_experts", -1, "MoEConfig.num_experts is -1; expected an int of at least 1"),
        ("num_topk", True, "MoEConfig.num_topk is True; expected an int of at least 1"),
        ("shared_intermediate", -4, "MoEConfig.shared_intermediate is -4; expected an int of at least 0"),
        ("gated", 1, "MoEConfig.gated is 1; expected True or False"),
        (
            "activation",
            "swish",
            "MoEConfig.activation is 'swish'; expected one of 'silu', 'gelu', 'gelu_tanh', 'relu', 'identity'",
        ),
        (
            "dtype",
            torch.float16,
            "MoEConfig.dtype is torch.float16; expected torch.float32 or torch.bfloat16",
        ),
    ],
)
def test_bad_field_is_named(field: str, value: object, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        MoEConfig(**{**GOOD, field: value})


@pytest.mark.parametrize("num_experts", [1, 2, 7, 8, 160])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_experts_are_split_evenly_and_in_order(num_experts: int, world_size: int) -> None:
    parts = [local_experts(num_experts, world_size, rank) for rank in range(world_size)]
    assert [expert for part in parts for expert in part] == list(range(num_experts))
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank is 2; expected 0 to 1 for world_size 2"):
        local_experts(8, 2, 2)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_an_expert_do_not_depend_on_the_split(gated: bool, dtype: torch.dtype) -> None:
    config = MoEConfig(**GOOD, gated=gated, bias=True, shared_intermediate=3, dtype=dtype)
    whole = random_weights(config, range(5), seed=7)
    whole.check(config, 5)
    for rank in range(3):
        experts = local_experts(5, 3, rank)
        part, view = random_weights(config, experts, seed=7), whole.select(experts)
        part.check(config, len(experts))
        for name in ("gate_up", "down", "gate_up_bias", "down_bias", "shared_gate_up", "shared_down"):
            assert torch.equal(getattr(part, name), getattr(view, name)), name
    assert not torch.equal(whole.gate_up[0], whole.gate_up[1])
    assert not torch.equal(whole.gate_up, random_weights(config, range(5), seed=8).gate_up)


def test_weights_are_scaled_by_fan_in() -> None:
    config = MoEConfig(hidden=256, intermediate=64, num_experts=2, num_topk=1)
    weights = random_weights(config, range(2), seed=0)
    assert weights.gate_up.std().item() == pytest.approx(256**-0.5, rel=0.02)
    assert weights.down.std().item() == pytest.approx(64**-0.5, rel=0.02)
