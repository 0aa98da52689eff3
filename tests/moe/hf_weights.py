"""Small random MoE blocks of Hugging Face transformers 5, with their weights in Tileweave's layout.

Transformers keeps experts as `experts.gate_up_proj` [num_experts, 2 * intermediate, hidden], gate rows
first, and `experts.down_proj` [num_experts, hidden, intermediate]: the layout of `ExpertWeights`. The
router is `gate.weight` [num_experts, hidden]; calling `gate` gives (logits, weights, indices). Mixtral
always renormalises its top-k probabilities, Qwen3-MoE when `norm_topk_prob` is set.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from tileweave.moe.config import ExpertWeights, MoEConfig

Family = Literal["mixtral", "qwen3_moe"]


@dataclass(frozen=True)
class HFBlock:
    """One sparse block and what a Tileweave layer needs to compute the same.

    Attributes:
        block: the module of transformers, in eval mode.
        config: sizes of the layer.
        router_weight: [num_experts, hidden].
        weights: of all experts; use `weights.select(experts)` for a rank's.
        renormalize: whether the top-k probabilities are divided by their sum.
    """

    block: torch.nn.Module
    config: MoEConfig
    router_weight: torch.Tensor
    weights: ExpertWeights
    renormalize: bool

    @torch.inference_mode()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's own output for x [num_tokens, hidden]: [num_tokens, hidden]."""
        out: torch.Tensor = self.block(x.unsqueeze(0))
        return out.squeeze(0)

    @torch.inference_mode()
    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The block's own routing of x [num_tokens, hidden]: (topk_idx int64, topk_weights), [num_tokens, num_topk]."""
        gate: Any = self.block.gate
        _, topk_weights, topk_idx = gate(x)
        return topk_idx, topk_weights


def make_block(
    family: Family,
    *,
    hidden: int = 64,
    intermediate: int = 48,
    num_experts: int = 8,
    num_topk: int = 2,
    renormalize: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> HFBlock:
    """A block of `family` with random weights of standard deviation 1 / sqrt(fan_in).

    `renormalize` is for Qwen3-MoE; Mixtral knows only True.
    """
    block: torch.nn.Module
    if family == "mixtral":
        assert renormalize, "Mixtral always renormalises"
        block = MixtralSparseMoeBlock(
            MixtralConfig(
                hidden_size=hidden,
                intermediate_size=intermediate,
                num_local_experts=num_experts,
                num_experts_per_tok=num_topk,
                experts_implementation="eager",
            )
        )
    else:
        block = Qwen3MoeSparseMoeBlock(
            Qwen3MoeConfig(
                hidden_size=hidden,
                moe_intermediate_size=intermediate,
                num_experts=num_experts,
                num_experts_per_tok=num_topk,
                norm_topk_prob=renormalize,
                experts_implementation="eager",
            )
        )
    block = block.to(dtype).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in block.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1]))
    module: Any = block
    weights = ExpertWeights(module.experts.gate_up_proj.detach(), module.experts.down_proj.detach())
    config = MoEConfig(hidden, intermediate, num_experts, num_topk, activation="silu", gated=True, dtype=dtype)
    weights.check(config, num_experts)
    return HFBlock(block, config, module.gate.weight.detach(), weights, renormalize)
