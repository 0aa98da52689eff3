"""A layer's launch described by shapes and routing alone, to look at it without running it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tileweave.codegen.compiled import CompiledKernel
from tileweave.compiler.config import Config
from tileweave.compiler.trace import flatten
from tileweave.moe.config import MoEConfig
from tileweave.moe.kernels import LayerShape
from tileweave.moe.layer import Capacity, compile_layer
from tileweave.moe.routing import Placement, count_experts, plan_all, received_rows
from tileweave.primitives.expr import Const

IndexArray = npt.NDArray[np.int64]


def layer_kernel(config: MoEConfig, topk_idx: Sequence[IndexArray], run: Config) -> CompiledKernel:
    """The kernel that a new `MoELayer` runs for the `topk_idx` of every rank."""
    placement = Placement.contiguous(config.num_experts, len(topk_idx))
    counts = np.stack([count_experts(index, config.num_experts) for index in topk_idx]).astype(np.int64)
    room = Capacity(0, 0).grown(int(received_rows(counts, placement).max()), max(map(len, topk_idx)))
    shape = LayerShape(placement.max_local, room.rows, room.tokens, config.activation, config.gated)
    return compile_layer(config, len(topk_idx), shape, run)


def layer_arguments(kernel: CompiledKernel, topk_idx: Sequence[IndexArray], num_experts: int) -> list[dict[str, Any]]:
    """Each rank's arguments, tables by value and tensors by shape, for `CompiledKernel.graph` and its kin."""
    placement = Placement.contiguous(num_experts, len(topk_idx))
    every = []
    for rank, (index, plan) in enumerate(zip(topk_idx, plan_all(topk_idx, placement), strict=True)):
        sizes = {"num_tokens": len(index), "num_local_experts": len(placement.experts_of(rank))}
        given: dict[str, Any] = {f"plan.{name}": table for name, table in plan.named().items()}
        for name, spec in flatten(kernel.kernel.parameters, kernel.specs, kernel.specs):
            if name not in given:
                given[name] = tuple(d.value if isinstance(d, Const) else sizes[str(d)] for d in spec.dims)
        every.append(given)
    return every
