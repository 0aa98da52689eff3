"""Cases of the shipped kernels, for the command line and for tests: small shapes, uneven routings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tileweave.codegen.case import Case
from tileweave.compiler.config import Config
from tileweave.moe.config import MoEConfig
from tileweave.moe.kernels import LayerShape, Tiles, dispatch_gemm, gemm_combine, moe_layer
from tileweave.moe.layer import layer_specs
from tileweave.moe.routing import Placement, RoutingPlan, plan_all
from tileweave.primitives.memory import Tensor

CONFIG = MoEConfig(hidden=96, intermediate=64, num_experts=5, num_topk=2, shared_intermediate=32)
TOKENS = 24


def cases(world_size: int = 2) -> list[Case]:
    """One case for each kernel of `moe/kernels.py`."""
    return [layer_case(world_size), *half_cases(world_size)]


def layer_case(world_size: int = 2) -> Case:
    """`moe_layer` with a shared expert on a random routing; the last rank has fewer tokens."""
    return routed_case(_random_routing(world_size))


def routed_case(topk_idx: Sequence[npt.NDArray[np.int64]]) -> Case:
    """`moe_layer` with a shared expert for the given `[num_tokens, 2]` slots of each rank, over 5 experts."""
    world_size = len(topk_idx)
    placement = Placement.contiguous(CONFIG.num_experts, world_size)
    plans = plan_all(topk_idx, placement)
    most = max(TOKENS, *(len(i) for i in topk_idx))
    shape = LayerShape(placement.max_local, 2 * most * world_size, most, CONFIG.activation, CONFIG.gated)
    arguments = [_arguments(placement, plans, rank) for rank in range(world_size)]
    return Case(moe_layer, (*layer_specs(CONFIG, placement), shape), arguments, _run())


def half_cases(world_size: int = 2) -> list[Case]:
    """`dispatch_gemm` and `gemm_combine` without a shared expert."""
    config = MoEConfig(CONFIG.hidden, CONFIG.intermediate, CONFIG.num_experts, CONFIG.num_topk)
    placement = Placement.contiguous(config.num_experts, world_size)
    plans = plan_all(_random_routing(world_size), placement)
    shape = LayerShape(placement.max_local, 2 * TOKENS * world_size, TOKENS, config.activation, config.gated)
    x, topk_weights, weights, plan, out = layer_specs(config, placement)
    activations = Tensor(("num_rows", config.intermediate))
    first, second = [], []
    for rank in range(world_size):
        given = {n: v for n, v in _arguments(placement, plans, rank).items() if ".shared_" not in n}
        tokens, topk, result = (given.pop(name) for name in ("x", "topk_weights", "out"))
        rows = (int(plans[rank].expert_offsets[-1]), config.intermediate)
        first.append({**given, "x": tokens, "out": rows})
        second.append({**given, "activations": rows, "topk_weights": topk, "out": result})
    return [
        Case(dispatch_gemm, (x, weights, plan, activations, shape), first, _run()),
        Case(gemm_combine, (activations, topk_weights, weights, plan, out, shape), second, _run()),
    ]


def _run() -> Config:
    return Config(workers=2, tunables={"tiles": Tiles(rows=16, columns=32, depth=64, tokens=8, copy=96)})


def _random_routing(world_size: int) -> list[npt.NDArray[np.int64]]:
    random = np.random.default_rng(0)
    tokens = [TOKENS] * (world_size - 1) + [TOKENS // 2]
    return [random.integers(-1, CONFIG.num_experts, (n, CONFIG.num_topk)) for n in tokens]


def _arguments(placement: Placement, plans: list[RoutingPlan], rank: int) -> dict[str, Any]:
    """Arguments of one rank: tables as arrays, tensors by shape."""
    num_tokens = len(plans[rank].slot_row)
    local = len(placement.experts_of(rank))
    hidden, intermediate, shared = CONFIG.hidden, CONFIG.intermediate, CONFIG.shared_intermediate
    return {
        **{f"plan.{name}": table for name, table in plans[rank].named().items()},
        "x": (num_tokens, hidden),
        "topk_weights": (num_tokens, CONFIG.num_topk),
        "out": (num_tokens, hidden),
        "weights.gate_up": (local, CONFIG.projection_width(intermediate), hidden),
        "weights.down": (local, hidden, intermediate),
        "weights.shared_gate_up": (CONFIG.projection_width(shared), hidden),
        "weights.shared_down": (hidden, shared),
    }
