"""`MoELayer`: an MoE layer under expert parallelism, run as one megakernel a rank."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tileweave.codegen.compiled import CompiledKernel
from tileweave.codegen.compiled import compile as compile_kernel
from tileweave.codegen.trace import TraceEvent
from tileweave.compiler.config import Config
from tileweave.compiler.topology import Topology
from tileweave.errors import ArgumentError
from tileweave.moe.config import ExpertWeights, MoEConfig, random_weights
from tileweave.moe.kernels import LayerShape, WeightSpecs, moe_layer
from tileweave.moe.router import Router
from tileweave.moe.routing import (
    Placement,
    RoutingPlan,
    check_topk_idx,
    count_experts,
    plan_rank,
    plan_specs,
    received_rows,
    refuse_together,
)
from tileweave.primitives.group import Group, current_group
from tileweave.primitives.memory import Tensor

_SMALLEST_CAPACITY = 256
_WEIGHT_NAMES = tuple(ExpertWeights.__dataclass_fields__)


@dataclass(frozen=True)
class Capacity:
    """Room that a rank's symmetric memory has: `rows` received, `tokens` brought."""

    rows: int
    tokens: int

    def grown(self, rows: int, tokens: int) -> Capacity:
        """Enough for more, in powers of two, so that a growing batch compiles few kernels."""
        return Capacity(max(self.rows, _bucket(rows)), max(self.tokens, _bucket(tokens)))


def _bucket(count: int) -> int:
    return max(_SMALLEST_CAPACITY, 1 << max(count - 1, 0).bit_length())


class MoELayer(nn.Module):
    """Router, experts and their communication; forward under `no_grad` in this version.

    Every rank of the group makes the layer alike and calls it together, ranks without
    tokens too.  Results depend on the global tokens only, to the bit: not on the number of
    ranks or workers, the order, or the queue.

    Args:
        config: sizes and kind.
        group: the ranks; the current group by default.
        run: workers, order and queue; by default the cores of the host shared among its ranks.
        topology: how ranks are spread over nodes, by default all on one. Between nodes results are pushed.
        renormalize: make the router's weights of a token sum to one.
        capacity: most rows that a rank may receive in a forward; by default memory grows as needed.
        seed: of the weights, whose values do not depend on the number of ranks.
    """

    def __init__(
        self,
        config: MoEConfig,
        group: Group | None = None,
        *,
        run: Config | None = None,
        topology: Topology | None = None,
        renormalize: bool = True,
        capacity: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.config = config
        self.group = group or current_group()
        self.run_config = run or default_run_config(self.group)
        self.topology = topology or Topology.one_node(self.group.world_size)
        self.topology.check(self.group.world_size)
        self.placement = Placement.contiguous(config.num_experts, self.group.world_size)
        if capacity is not None and capacity < 1:
            raise ArgumentError(f"capacity is {capacity}; expected at least 1 row, or None to grow memory as needed")
        self._alike, self._fingerprint = False, np.int32(0)
        self._fixed_rows = capacity
        self._capacity = Capacity(capacity or _SMALLEST_CAPACITY, _SMALLEST_CAPACITY)
        own = self.placement.experts_of(self.group.rank)
        self._num_local = len(own)
        first = int(own[0]) if len(own) else 0
        self._set_parameters(vars(random_weights(config, range(first, first + len(own)), seed)))
        self.router: Router | None = None
        if config.num_topk <= config.num_experts:
            self.router = Router(
                config.hidden, config.num_experts, config.num_topk, renormalize=renormalize, dtype=config.dtype
            )
            with torch.no_grad():
                generator = torch.Generator().manual_seed(seed)
                values = torch.randn(config.num_experts, config.hidden, generator=generator)
                self.router.weight.copy_(values * config.hidden**-0.5)

    def _set_parameters(self, weights: Mapping[str, torch.Tensor | None]) -> None:
        for name, tensor in weights.items():
            self.register_parameter(name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))

    @property
    def weights(self) -> ExpertWeights:
        """This rank's expert weights, as stored."""
        return ExpertWeights(**{name: getattr(self, name) for name in _WEIGHT_NAMES})

    def load_experts(self, weights: ExpertWeights) -> None:
        """Take weights of all experts, `[num_experts, …]`, and keep this rank's.

        Raises:
            ArgumentError: a tensor has another shape or dtype than the config asks for.
        """
        weights.check(self.config, self.config.num_experts)
        own = torch.from_numpy(self.placement.experts_of(self.group.rank))

        def keep(name: str) -> torch.Tensor | None:
            tensor: torch.Tensor | None = getattr(weights, name)
            if tensor is None:
                return None
            part = tensor if name.startswith("shared") else tensor[own]
            return part.detach().clone(memory_format=torch.contiguous_format)

        self._set_parameters({name: keep(name) for name in _WEIGHT_NAMES})

    @torch.no_grad()
    def forward(
        self, x: torch.Tensor, topk_idx: torch.Tensor | None = None, topk_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The layer's output for this rank's tokens; collective.

        Args:
            x: `[..., hidden]` of the config's dtype.
            topk_idx: int `[num_tokens, num_topk]`, −1 = unused slot; from the router by default.
            topk_weights: float32 `[num_tokens, num_topk]`, given with `topk_idx`.

        Raises:
            ArgumentError: an argument of this rank does not fit, or a rank would receive more rows
                than `capacity`; nothing runs.
            PeerError: another rank refused its arguments; nothing runs.
        """
        return self._forward(x, topk_idx, topk_weights, trace=False)[0]

    @torch.no_grad()
    def traced(
        self, x: torch.Tensor, topk_idx: torch.Tensor | None = None, topk_weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, list[TraceEvent]]:
        """As `forward`, with what each worker of this rank did and when."""
        return self._forward(x, topk_idx, topk_weights, trace=True)

    def _forward(
        self, x: torch.Tensor, topk_idx: torch.Tensor | None, topk_weights: torch.Tensor | None, *, trace: bool
    ) -> tuple[torch.Tensor, list[TraceEvent]]:
        self._check_alike()
        plan, weights = self._agree(lambda: self._route(x, topk_idx, topk_weights))
        tokens = as_rows(x)
        out = torch.empty_like(tokens)
        kernel = self.compiled()
        args = (tokens, weights, self.weights, plan, out)
        return out.reshape(x.shape), kernel.run(args, self.group, trace=trace)

    def _route(
        self, x: torch.Tensor, topk_idx: torch.Tensor | None, topk_weights: torch.Tensor | None
    ) -> tuple[npt.NDArray[np.int64], torch.Tensor]:
        """This rank's checked routing."""
        if not isinstance(x, torch.Tensor):
            raise ArgumentError(f"x needs to be a torch tensor, got {type(x).__name__}")
        x = as_rows(x)
        check_tokens(x, self.config)
        self.weights.check(self.config, self._num_local)
        if topk_idx is None:
            if topk_weights is not None:
                raise ArgumentError("topk_weights is given without topk_idx; pass both, or neither to use the router")
            if self.router is None:
                raise ArgumentError("topk_idx is needed: num_topk exceeds num_experts, so there is no router")
            topk_idx, topk_weights = self.router(x)
        assert topk_idx is not None
        return check_routing(topk_idx, topk_weights, (x.shape[0], self.config.num_topk), self.config.num_experts)

    def _check_alike(self) -> None:
        """At the first forward: refuse layers that differ between ranks, on all ranks alike."""
        if self._alike:
            return
        renormalize = self.router is not None and self.router.renormalize
        own = f"{self.config}, {self.run_config}, {self.topology}, renormalize={renormalize}, "
        own += f"capacity={self._fixed_rows}"
        every = self.group.all_gather_object(own)
        for rank, other in enumerate(every):
            if other != every[0]:
                raise ArgumentError(
                    f"the ranks made different layers; every rank must pass the same arguments\n"
                    f"  rank 0: {every[0]}\n  rank {rank}: {other}"
                )
        self._fingerprint = np.int32(zlib.crc32(own.encode()) >> 1)
        self._alike = True

    def _agree(
        self, route: Callable[[], tuple[npt.NDArray[np.int64], torch.Tensor]]
    ) -> tuple[RoutingPlan, torch.Tensor]:
        """Exchange counts; one rank's refusal becomes everybody's before anything is launched."""
        error: ArgumentError | None = None
        counts = np.zeros(self.config.num_experts, dtype=np.int32)
        index, weights = np.empty((0, self.config.num_topk), dtype=np.int64), torch.empty(0)
        try:
            index, weights = route()
            counts = count_experts(index, self.config.num_experts)
        except ArgumentError as problem:
            error = problem
        message = np.concatenate((counts, np.array([len(index), error is not None, self._fingerprint], dtype=np.int32)))
        gathered = self.group.all_gather(message).astype(np.int64)
        if (gathered[:, -1] != gathered[0, -1]).any():
            raise ArgumentError(
                "the ranks call different layers; every rank must call the same layers in the same order"
            )
        if gathered[:, -2].any():
            refuse_together(error, self.group)
        every = gathered[:, :-3]
        self._make_room(received_rows(every, self.placement), int(gathered[:, -3].max()))
        return plan_rank(index, every, self.placement, self.group.rank), weights

    def _make_room(self, rows: npt.NDArray[np.int64], tokens: int) -> None:
        """Grow on all ranks alike: all know all counts."""
        most = int(rows.max())
        if self._fixed_rows is not None and most > self._fixed_rows:
            raise ArgumentError(
                f"rank {int(rows.argmax())} would receive {most} rows, but the layer's capacity is "
                f"{self._fixed_rows}; raise capacity, or leave it out so that memory grows as needed"
            )
        room = self._capacity
        if most > room.rows or tokens > room.tokens:
            grown = room.grown(most, tokens)
            self._capacity = replace(grown, rows=self._fixed_rows) if self._fixed_rows is not None else grown

    def _shape(self) -> LayerShape:
        return LayerShape(
            self.placement.max_local,
            self._capacity.rows,
            self._capacity.tokens,
            self.config.activation,
            self.config.gated,
        )

    def compiled(self) -> CompiledKernel:
        """The kernel that the layer runs at its present capacity."""
        world_size = self.placement.world_size
        return compile_layer(self.config, world_size, self._shape(), self.run_config, self.topology)


def default_run_config(group: Group) -> Config:
    """All cores of the host, shared among the ranks."""
    return Config(workers=max(1, len(os.sched_getaffinity(0)) // group.world_size))


@lru_cache(maxsize=64)
def compile_layer(
    config: MoEConfig, world_size: int, shape: LayerShape, run: Config, topology: Topology | None = None
) -> CompiledKernel:
    """The layer kernel for one shape; the same one for equal arguments, so layers of a model share it."""
    placement = Placement.contiguous(config.num_experts, world_size)
    if topology is not None and topology.nodes > 1:  # a rank cannot read the memory of another node
        run = replace(run, tunables={"returns": "push", **run.tunables})
    return compile_kernel(
        moe_layer, *layer_specs(config, placement), shape, world_size=world_size, topology=topology, config=run
    )


def layer_specs(config: MoEConfig, placement: Placement) -> tuple[object, ...]:
    """Specs of `moe_layer`'s arguments, in order, without the shape."""
    hidden, width, shared = config.hidden, config.projection_width(config.intermediate), config.shared_intermediate
    local = "num_local_experts"
    dtype = config.dtype
    weights = WeightSpecs(
        gate_up=Tensor((local, width, hidden), dtype),
        down=Tensor((local, hidden, config.intermediate), dtype),
        gate_up_bias=Tensor((local, width), dtype) if config.bias else None,
        down_bias=Tensor((local, hidden), dtype) if config.bias else None,
        shared_gate_up=Tensor((config.projection_width(shared), hidden), dtype) if shared else None,
        shared_down=Tensor((hidden, shared), dtype) if shared else None,
    )
    return (
        Tensor(("num_tokens", hidden), dtype),
        Tensor(("num_tokens", config.num_topk), torch.float32),
        weights,
        plan_specs(placement, config.num_topk),
        Tensor(("num_tokens", hidden), dtype),
    )


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """`[..., hidden]` as `[num_tokens, hidden]`."""
    return x if x.dim() in (0, 2) else x.reshape(-1, x.shape[-1])


def check_tokens(x: torch.Tensor, config: MoEConfig) -> None:
    """Refuse tokens that do not fit the config.

    Raises:
        ArgumentError: wrong shape, dtype, device or layout.
    """
    if x.dim() != 2 or x.shape[1] != config.hidden:
        raise ArgumentError(f"x needs shape [num_tokens, hidden={config.hidden}], got {list(x.shape)}")
    if x.dtype != config.dtype:
        raise ArgumentError(f"x needs dtype {config.dtype}, got {x.dtype}")
    if x.device.type != "cpu":
        raise ArgumentError(f"x is on device {x.device}; the C engine needs CPU memory: pass x.cpu()")
    if not x.is_contiguous():
        raise ArgumentError("x is not contiguous; pass x.contiguous()")


def check_routing(
    topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, shape: tuple[int, int], num_experts: int
) -> tuple[npt.NDArray[np.int64], torch.Tensor]:
    """Checked `topk_idx`, and `topk_weights` with zeros in unused slots.

    Raises:
        ArgumentError: wrong shape or dtype, an expert out of range, or a weight of a used slot that is not finite.
    """
    if topk_weights is None:
        raise ArgumentError("topk_weights is needed with topk_idx")
    for name, tensor in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"{name} needs to be a torch tensor, got {type(tensor).__name__}")
        if tuple(tensor.shape) != shape:
            raise ArgumentError(
                f"{name} needs shape [num_tokens={shape[0]}, num_topk={shape[1]}], got {list(tensor.shape)}"
            )
        if tensor.device.type != "cpu":
            raise ArgumentError(f"{name} is on device {tensor.device}; the C engine needs CPU memory")
    if topk_weights.dtype != torch.float32:
        raise ArgumentError(f"topk_weights needs dtype torch.float32, got {topk_weights.dtype}")
    index = check_topk_idx(topk_idx, num_experts)
    unused = torch.from_numpy(index < 0)
    weights = topk_weights.masked_fill(unused, 0.0)
    if not torch.isfinite(weights).all():
        row, slot = torch.nonzero(~torch.isfinite(weights))[0].tolist()
        raise ArgumentError(f"topk_weights[{row}, {slot}] is {float(weights[row, slot])}; expected a finite number")
    return index, weights.contiguous()
