"""MoE layers of published models, by name, from their configuration files; routed experts only."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tileweave.errors import ConfigError
from tileweave.moe.config import MoEConfig


def _layer(hidden: int, intermediate: int, num_experts: int, num_topk: int, *, bias: bool = False) -> MoEConfig:
    return MoEConfig(hidden, intermediate, num_experts, num_topk, bias=bias, dtype=torch.bfloat16)


MODELS: Mapping[str, MoEConfig] = {
    "Qwen3-30B-A3B": _layer(2048, 768, 128, 8),
    "Qwen3-235B-A22B": _layer(4096, 1536, 128, 8),
    "Mixtral-8x7B": _layer(4096, 14336, 8, 2),
    "DeepSeek-V3": _layer(7168, 2048, 256, 8),
    "gpt-oss-120b": _layer(2880, 2880, 128, 4, bias=True),
    "Qwen2-57B-A14B": _layer(3584, 2560, 64, 8),
}


def model(name: str) -> MoEConfig:
    """The layer of a model.

    Raises:
        ConfigError: no such model; with the names that there are.
    """
    if name not in MODELS:
        raise ConfigError(f"model {name!r} is unknown; use one of {', '.join(MODELS)}")
    return MODELS[name]
