"""The shipped kernels for a GPU: tile sizes with which they fit, and kernels compiled with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tileweave.codegen.compiled import CompiledKernel
from tileweave.codegen.compiled import compile as compile_kernel
from tileweave.compiler.config import Config, GpuConfig
from tileweave.compiler.topology import Topology
from tileweave.errors import ConfigError
from tileweave.moe.config import MoEConfig
from tileweave.moe.kernels import LayerShape, Tiles, dispatch_gemm, gemm_combine, moe_layer
from tileweave.moe.layer import layer_specs
from tileweave.moe.routing import Placement
from tileweave.primitives.memory import Tensor


@dataclass(frozen=True)
class GpuDefaults:
    """Tile sizes and the way they are compiled."""

    tiles: Tiles
    gpu: GpuConfig


@dataclass(frozen=True)
class Deployment:
    """How a layer is used: ranks, most tokens that each brings, workers (SMs) of each, and the nodes the ranks are on.

    Without a topology all ranks are on one node.
    """

    world_size: int = 8
    num_tokens: int = 4096
    workers: int = 132
    topology: Topology | None = None

    @property
    def between_nodes(self) -> bool:
        """Whether some rank is on another node."""
        return self.topology is not None and self.topology.gpus_per_node < self.world_size


# Gate and up each have `columns`, so the first product holds twice as many accumulators as the second.
DEFAULTS: Mapping[str, GpuDefaults] = {
    "sm_90": GpuDefaults(Tiles(128, 128, 64, 16, 64), GpuConfig(warps=8, stages=4, loads="tma", registers=255)),
    "sm_100": GpuDefaults(Tiles(128, 64, 64, 32, 64), GpuConfig(warps=8, stages=4, loads="pointers", registers=255)),
}


def compile_layer(model: MoEConfig, arch: str, group: Deployment) -> list[CompiledKernel]:
    """`moe_layer`, `dispatch_gemm` and `gemm_combine` of `model` with the defaults of `arch`, ready to emit or build.

    Raises:
        ConfigError: the architecture is unknown.
    """
    defaults = gpu_defaults(arch)
    placement = Placement.contiguous(model.num_experts, group.world_size)
    # The most rows that a rank can receive: every token of every rank, in as many slots as the rank has experts.
    capacity = group.world_size * group.num_tokens * min(model.num_topk, placement.max_local)
    shape = LayerShape(placement.max_local, capacity, group.num_tokens, model.activation, model.gated)
    x, topk_weights, weights, plan, out = layer_specs(model, placement)
    activations = Tensor(("num_rows", model.intermediate), model.dtype)
    config = Config(workers=group.workers, gpu=defaults.gpu, tunables={"tiles": defaults.tiles})
    # Nobody reads the memory of another node, so results are sent there.
    push = replace(config, tunables={**config.tunables, "returns": "push"} if group.between_nodes else config.tunables)
    return [
        compile_kernel(
            kernel,
            *specs,
            shape,
            world_size=group.world_size,
            topology=group.topology,
            backend="triton",
            config=push if "returns" in kernel.tunables else config,
        )
        for kernel, specs in (
            (moe_layer, (x, topk_weights, weights, plan, out)),
            (dispatch_gemm, (x, weights, plan, activations)),
            (gemm_combine, (activations, topk_weights, weights, plan, out)),
        )
    ]


def gpu_defaults(arch: str) -> GpuDefaults:
    """What to compile the shipped kernels with for `arch`.

    Raises:
        ConfigError: the architecture is unknown.
    """
    if arch not in DEFAULTS:
        raise ConfigError(f"arch={arch!r}: expected one of {', '.join(DEFAULTS)}")
    return DEFAULTS[arch]
