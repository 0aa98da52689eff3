"""Running `MoELayer` on virtual ranks with inputs given for all ranks, and what it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tileweave.compiler.config import Config
from tileweave.moe.baselines import reference_moe
from tileweave.moe.config import MoEConfig, random_weights
from tileweave.moe.layer import MoELayer
from tileweave.primitives.group import Group
from tileweave.primitives.launch import VirtualGroup


@dataclass(frozen=True)
class Inputs:
    """Tokens of all ranks in global order, and their routing."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor

    def split(self, counts: Sequence[int]) -> list[Inputs]:
        """The part of each rank, which brings `counts[rank]` tokens."""
        assert sum(counts) == len(self.x)
        parts = zip(
            self.x.split(list(counts)),
            self.topk_idx.split(list(counts)),
            self.topk_weights.split(list(counts)),
            strict=True,
        )
        return [Inputs(x.contiguous(), i.contiguous(), w.contiguous()) for x, i, w in parts]


def random_inputs(config: MoEConfig, num_tokens: int, *, unused: float = 0.0, seed: int = 0) -> Inputs:
    """Experts at random, with repetition; a share `unused` of the slots is −1 and has NaN as its weight."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, config.num_topk)
    index = torch.randint(config.num_experts, shape, generator=generator)
    weights = torch.rand(shape, generator=generator)
    empty = torch.rand(shape, generator=generator) < unused
    x = torch.randn(num_tokens, config.hidden, generator=generator).to(config.dtype)
    return Inputs(x, index.masked_fill(empty, -1), weights.masked_fill(empty, float("nan")))


def even(num_tokens: int, world_size: int) -> list[int]:
    """Counts that differ by at most one."""
    return [num_tokens // world_size + (rank < num_tokens % world_size) for rank in range(world_size)]


def forward(group: Group, config: MoEConfig, run: Config, parts: Sequence[Inputs], routed: bool) -> torch.Tensor:
    """What one rank does."""
    layer, part = MoELayer(config, group, run=run), parts[group.rank]
    return layer(part.x, part.topk_idx, part.topk_weights) if routed else layer(part.x)


def run_layer(
    ranks: VirtualGroup, config: MoEConfig, parts: Sequence[Inputs], run: Config | None = None, *, routed: bool = True
) -> torch.Tensor:
    """The outputs of all ranks in global order; with `routed=False` the layer's own router decides."""
    return torch.cat(ranks.run(forward, config, run or Config(), parts, routed))


def reference(config: MoEConfig, inputs: Inputs) -> torch.Tensor:
    """Float64."""
    return reference_moe(
        inputs.x, inputs.topk_idx, inputs.topk_weights, random_weights(config, range(config.num_experts), 0), config
    )


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """In the Frobenius norm; 0 where both are empty or zero."""
    error = float((got.double() - want.double()).norm())
    return error / float(want.double().norm()) if error else 0.0


LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
