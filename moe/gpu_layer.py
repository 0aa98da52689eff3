"""An MoE layer on GPUs: routing planned on the device and `moe_layer` launched there, for a CUDA graph to capture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from tileweave import knobs
from tileweave.codegen.compiled import CompiledKernel
from tileweave.codegen.compiled import compile as compile_kernel
from tileweave.codegen.gpu.heaps import GpuHeap
from tileweave.codegen.gpu.kernel import load
from tileweave.codegen.gpu.machine import require_gpu
from tileweave.codegen.gpu.residency import sms_to_use
from tileweave.compiler.config import Config
from tileweave.errors import ArgumentError
from tileweave.moe.config import ExpertWeights, MoEConfig
from tileweave.moe.gpu import gpu_defaults
from tileweave.moe.kernels import LayerShape, Tiles, moe_layer, row_tiles
from tileweave.moe.layer import layer_specs
from tileweave.moe.routing import Placement
from tileweave.moe.routing_device import DevicePlacement, plan_routing_device


class GpuMoELayer:
    """Routed and shared experts of a layer on the ranks of a heap, whatever its home; forward only.

    A call enqueues work on the current stream and reads nothing back, so it can be captured in a
    CUDA graph once it has been called with the same shapes. What is wrong with a routing is found
    on the device: then no slot is routed, and `check` raises.

    Example, four ranks on one GPU:

        heap = tw.gpu.LocalHeap(world_size=4)
        layer = tw.moe.GpuMoELayer(config, heap, weights, num_tokens=4096)
        outs = layer(xs, topk_idx, topk_weights)
    """

    def __init__(
        self,
        config: MoEConfig,
        heap: GpuHeap,
        weights: Sequence[ExpertWeights],
        *,
        num_tokens: int,
        capacity: int | None = None,
        run: Config | None = None,
        backend: Literal["triton", "tilelang"] = "triton",
    ) -> None:
        """Compile and load; collective. Takes seconds.

        Args:
            config: sizes and kind.
            heap: the ranks, those of this process, and their device.
            weights: of the experts of each rank of this process, on the heap's device.
            num_tokens: most tokens that a rank brings.
            capacity: rows that a rank can receive, which memory and the cost of listing tiles grow with; by default
                as many as can come when no token names an expert twice.
            run: workers, order, queue and tiles; by default those of the GPU's architecture, on all SMs that
                TILEWEAVE_GPU_SMS allows, shared among the ranks of this process.
            backend: whose kernel runs.

        Raises:
            ArgumentError: weights do not fit, or a number is out of range.
            ConfigError: the workers of all ranks here do not fit the GPU at once.
            BuildError, DeviceError, GroupError: see `tw.gpu.load`.
        """
        if num_tokens < 1 or (capacity is not None and capacity < 1):
            raise ArgumentError(f"num_tokens={num_tokens}, capacity={capacity}: expected at least 1")
        self.config, self.heap, self.num_tokens = config, heap, num_tokens
        placement = Placement.contiguous(config.num_experts, heap.world_size)
        self.weights = tuple(weights)
        self._check_weights(placement)
        most = heap.world_size * num_tokens * min(config.num_topk, placement.max_local)
        self.capacity = capacity or most
        chosen = run or default_run(heap)
        shape = LayerShape(placement.max_local, self.capacity, num_tokens, config.activation, config.gated)
        self.compiled = compile_on_gpu(config, heap.world_size, shape, chosen, backend)
        tiles = chosen.tunables.get("tiles", Tiles())
        self._kernel = load(self.compiled, heap, layer_room(config, heap.world_size, shape, tiles))
        self._placement = DevicePlacement.of(placement, heap.device)
        self._refusals = torch.zeros(3, dtype=torch.int64, device=heap.device)

    def _check_weights(self, placement: Placement) -> None:
        if len(self.weights) != self.heap.count:
            raise ArgumentError(
                f"weights has {len(self.weights)} entries; expected {self.heap.count}, one for each rank here"
            )
        for at, each in enumerate(self.weights):
            each.check(self.config, len(placement.experts_of(self.heap.first + at)))

    @torch.no_grad()
    def __call__(
        self, x: Sequence[torch.Tensor], topk_idx: Sequence[torch.Tensor], topk_weights: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The layer's output for the tokens of each rank of this process; collective.

        Args:
            x: `[num_tokens, hidden]` of the config's dtype; the number may differ by rank and be 0.
            topk_idx: integers `[num_tokens, num_topk]`, −1 = unused slot.
            topk_weights: float32 `[num_tokens, num_topk]`; those of unused slots are ignored.

        Raises:
            ArgumentError: wrong number of ranks, shape, dtype, device, layout or alignment.
        """
        for name, given in (("x", x), ("topk_idx", topk_idx), ("topk_weights", topk_weights)):
            if len(given) != self.heap.count:
                raise ArgumentError(
                    f"{name} has {len(given)} tensors; expected {self.heap.count}, one for each rank here"
                )
        for tokens, index, scale in zip(x, topk_idx, topk_weights, strict=True):
            self._check_shapes(tokens, index, scale)
        group = self.heap.group
        plan = plan_routing_device(topk_idx if group is None else topk_idx[0], self._placement, self.capacity, group)
        scales = [each.masked_fill(index < 0, 0.0) for each, index in zip(topk_weights, topk_idx, strict=True)]
        strange = torch.stack([(~torch.isfinite(each)).sum() for each in scales]).sum()
        torch.maximum(self._refusals, torch.cat([plan.refusals, strange.reshape(1)]), out=self._refusals)
        outs = [torch.empty_like(each) for each in x]
        rows = zip(x, scales, self.weights, plan.tables, outs, strict=True)
        self._kernel.launch(*(list(each) for each in rows))
        if knobs.debug.get():
            self.check()
        return outs

    def _check_shapes(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> None:
        hidden, num_topk = self.config.hidden, self.config.num_topk
        if x.dim() != 2 or x.shape[1] != hidden:
            raise ArgumentError(f"x needs shape [num_tokens, hidden={hidden}], got {list(x.shape)}")
        if x.shape[0] > self.num_tokens:
            raise ArgumentError(
                f"x has {x.shape[0]} tokens, but the layer was made for num_tokens={self.num_tokens} a rank; "
                "make it with more"
            )
        for name, given in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
            if given.shape != (x.shape[0], num_topk):
                raise ArgumentError(
                    f"{name} needs shape [num_tokens={x.shape[0]}, num_topk={num_topk}], got {list(given.shape)}"
                )

    def check(self) -> None:
        """Wait for all calls so far, and raise what went wrong in any of them.

        Raises:
            ArgumentError: a slot named an expert that does not exist, a rank would have received more rows than
                `capacity`, or a weight was not finite. The outputs of that call are of no use; the layer goes on.
            HangError, LaunchError: see `GpuKernel.check`.
        """
        outside, most, strange = self._refusals.tolist()
        self._refusals.zero_()
        self._kernel.check()
        experts = self.config.num_experts
        if outside:
            raise ArgumentError(f"topk_idx had {outside} entries that are neither -1 (unused) nor 0 to {experts - 1}")
        if most > self.capacity:
            raise ArgumentError(
                f"a rank would have received {most} rows, but the layer's capacity is {self.capacity}; make it with "
                "a larger capacity"
            )
        if strange:
            raise ArgumentError(f"topk_weights had {strange} entries that are not finite, in slots that are used")


def default_run(heap: GpuHeap) -> Config:
    """What the heap's GPU runs layers with: one worker on each SM that may be used, shared among the ranks here.

    Raises:
        DeviceError: the heap is not on a GPU that kernels are compiled for.
    """
    gpu = require_gpu(heap.device.index)
    defaults = gpu_defaults(gpu.arch)
    workers = max(1, sms_to_use(gpu.num_sms) // heap.count)
    return Config(workers=workers, gpu=defaults.gpu, tunables={"tiles": defaults.tiles})


def compile_on_gpu(
    config: MoEConfig,
    world_size: int,
    shape: LayerShape,
    run: Config,
    backend: Literal["triton", "tilelang"] = "triton",
) -> CompiledKernel:
    """`moe_layer` for a GPU backend."""
    specs = layer_specs(config, Placement.contiguous(config.num_experts, world_size))
    return compile_kernel(moe_layer, *specs, shape, world_size=world_size, backend=backend, config=run)


def layer_room(config: MoEConfig, world_size: int, shape: LayerShape, tiles: Tiles) -> int:
    """Most tiles of `moe_layer` on one rank, whatever the routing within `shape`.

    A group of rows that is cut into tiles has at most one partial tile, or two if it begins inside one.
    """

    def columns(width: int) -> int:
        return -(-width // tiles.columns)

    experts, sent = shape.num_local_experts, shape.max_tokens * config.num_topk
    pieces = experts * world_size
    received = shape.capacity // tiles.rows + min(experts, shape.capacity)
    dispatch = max(pieces, sent // tiles.rows + 2 * min(pieces, sent))
    grouped = received * (columns(config.intermediate) + columns(config.hidden))
    combined = columns(config.hidden) * -(-shape.max_tokens // tiles.tokens)
    shared = 0
    if config.shared_intermediate:
        shared = row_tiles(shape.max_tokens, tiles) * (columns(config.shared_intermediate) + columns(config.hidden))
    return dispatch + grouped + combined + shared


def on_device(weights: ExpertWeights, device: torch.device) -> ExpertWeights:
    """`weights` copied to `device`."""
    moved: dict[str, Any] = {n: None if t is None else t.to(device) for n, t in vars(weights).items()}
    return ExpertWeights(**moved)
