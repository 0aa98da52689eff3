"""The layer computes what the sparse blocks of Hugging Face transformers compute with the same weights.

The tolerance is that of fp32 rounding: both sides sum 64 and 48 products in fp32 in their
own order, which costs each about 2e-7 of the result's norm against float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch

pytest.importorskip("transformers")
from tests.moe.hf_weights import Family, HFBlock, make_block
from tests.moe.layers import even, relative_error
from tileweave.compiler.config import Config
from tileweave.moe.layer import MoELayer
from tileweave.primitives.group import Group
from tileweave.primitives.launch import VirtualGroup

Virtual: TypeAlias = Callable[[int], VirtualGroup]

TOLERANCE = 1e-6
BLOCKS: list[tuple[Family, int, bool]] = [("mixtral", 2, True), ("qwen3_moe", 4, True), ("qwen3_moe", 4, False)]


def layer_of(hf: HFBlock, group: Group) -> MoELayer:
    layer = MoELayer(hf.config, group, run=Config(workers=2), renormalize=hf.renormalize)
    layer.load_experts(hf.weights)
    assert layer.router is not None
    layer.router.weight.copy_(hf.router_weight)
    return layer


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("family", "num_topk", "renormalize"), BLOCKS)
def test_same_forward(virtual: Virtual, family: Family, num_topk: int, renormalize: bool, world_size: int) -> None:
    hf = make_block(family, num_topk=num_topk, renormalize=renormalize)
    x = torch.randn(133, hf.config.hidden, generator=torch.Generator().manual_seed(1))
    parts = x.split(even(len(x), world_size))

    @torch.no_grad()
    def rank(group: Group) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        layer = layer_of(hf, group)
        assert layer.router is not None
        return layer(parts[group.rank]), *layer.router(parts[group.rank])

    out, topk_idx, topk_weights = (torch.cat(part) for part in zip(*virtual(world_size).run(rank), strict=True))
    want_idx, want_weights = hf.route(x)
    assert torch.equal(topk_idx, want_idx)
    assert relative_error(topk_weights, want_weights) < TOLERANCE
    assert relative_error(out, hf.forward(x)) < TOLERANCE


def test_same_forward_in_bf16(virtual: Virtual) -> None:
    """Each side rounds its activations to bf16 at its own places; tokens whose routing is a near tie may differ."""
    hf = make_block("mixtral", dtype=torch.bfloat16)
    x = torch.randn(133, hf.config.hidden, generator=torch.Generator().manual_seed(1)).bfloat16()

    @torch.no_grad()
    def rank(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        layer = layer_of(hf, group)
        assert layer.router is not None
        return layer(x), layer.router(x)[0]

    out, index = virtual(1).run(rank)[0]
    same = (index == hf.route(x)[0]).all(1)
    assert same.float().mean() > 0.9
    assert relative_error(out[same], hf.forward(x)[same]) < 2e-2
