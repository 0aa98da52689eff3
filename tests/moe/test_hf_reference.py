"""The fp64 reference is the same layer as the sparse blocks of Hugging Face transformers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
from tests.moe.hf_weights import Family, make_block
from tileweave.moe.baselines import reference_moe


@pytest.mark.parametrize(
    ("family", "num_topk", "renormalize"),
    [("mixtral", 2, True), ("qwen3_moe", 4, True), ("qwen3_moe", 4, False)],
)
def test_reference_is_the_block(family: Family, num_topk: int, renormalize: bool) -> None:
    hf = make_block(family, num_topk=num_topk, renormalize=renormalize)
    x = torch.randn(33, hf.config.hidden, generator=torch.Generator().manual_seed(1))
    topk_idx, topk_weights = hf.route(x)
    probabilities = torch.softmax(x @ hf.router_weight.t(), dim=-1).gather(1, topk_idx)
    if renormalize:
        probabilities /= probabilities.sum(1, keepdim=True)
    torch.testing.assert_close(topk_weights, probabilities)
    want = reference_moe(x, topk_idx, topk_weights, hf.weights, hf.config)
    out = hf.forward(x)
    assert (out.double() - want).norm() / want.norm() < 2e-6
