"""What an MoE layer is made of: its sizes, and the weights of the experts that one rank holds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch

from tileweave.errors import ArgumentError, ConfigError

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "identity"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
DTYPES = (torch.float32, torch.bfloat16)
_SHARED_EXPERT = 1 << 31  # takes the place of an expert id in the seed of the shared expert's weights


@dataclass(frozen=True)
class MoEConfig:
    """Sizes and kind of one MoE layer.

    A gated expert computes down(act(gate(x)) * up(x)), a plain one down(act(up(x))). `num_topk` may
    exceed `num_experts`: slots may repeat an expert or be unused, though a softmax router never
    does so.

    Attributes:
        hidden: width of a token.
        intermediate: width of an expert.
        num_experts: experts over all ranks.
        num_topk: slots per token.
        activation: "silu", "gelu" (exact), "gelu_tanh", "relu" or "identity".
        gated: whether experts have a gate beside `up`; silu gives SwiGLU, gelu GeGLU.
        bias: whether both projections of the routed experts add a bias.
        shared_intermediate: width of a shared expert that every token passes, without bias; 0 = none.
        dtype: of tokens and weights, torch.float32 or torch.bfloat16.

    Raises:
        ConfigError: a field is out of range; the text names it, its value and what is expected.
    """

    hidden: int
    intermediate: int
    num_experts: int
    num_topk: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    shared_intermediate: int = 0
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name, least in (
            ("hidden", 1),
            ("intermediate", 1),
            ("num_experts", 1),
            ("num_topk", 1),
            ("shared_intermediate", 0),
        ):
            value: object = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"MoEConfig.{name} is {value!r}; expected an int of at least {least}")
        for name in ("gated", "bias"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ConfigError(f"MoEConfig.{name} is {value!r}; expected True or False")
        if self.activation not in ACTIVATIONS:
            raise ConfigError(
                f"MoEConfig.activation is {self.activation!r}; expected one of {', '.join(map(repr, ACTIVATIONS))}"
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f"MoEConfig.dtype is {self.dtype}; expected torch.float32 or torch.bfloat16")

    def projection_width(self, intermediate: int) -> int:
        """Rows of the first projection of an expert that is `intermediate` wide: twice that when gated."""
        return 2 * intermediate if self.gated else intermediate


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of consecutive experts, all of one dtype, contiguous, on one device.

    Attributes:
        gate_up: [num_local_experts, 2 * intermediate, hidden], gate rows first, then up rows; without
            a gate [num_local_experts, intermediate, hidden].
        down: [num_local_experts, hidden, intermediate].
        gate_up_bias: [num_local_experts, 2 * intermediate or intermediate], or None.
        down_bias: [num_local_experts, hidden], or None.
        shared_gate_up: [2 * shared or shared, hidden] of the shared expert, the same on all ranks, or None.
        shared_down: [hidden, shared], or None.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    shared_gate_up: torch.Tensor | None = None
    shared_down: torch.Tensor | None = None

    @property
    def num_local_experts(self) -> int:
        """How many experts there are."""
        return self.gate_up.shape[0]

    def select(self, experts: range) -> ExpertWeights:
        """Views of the experts at `experts`, counted from this value's first; the shared expert is kept."""
        part = slice(experts.start, experts.stop)
        return replace(
            self,
            gate_up=self.gate_up[part],
            down=self.down[part],
            gate_up_bias=None if self.gate_up_bias is None else self.gate_up_bias[part],
            down_bias=None if self.down_bias is None else self.down_bias[part],
        )

    def check(self, config: MoEConfig, num_local_experts: int) -> None:
        """Compare every tensor with what `config` asks of a rank with `num_local_experts` experts.

        Raises:
            ArgumentError: a tensor is missing, not asked for, or of wrong shape, dtype or layout.
        """
        for name, shape in _shapes(config, num_local_experts).items():
            tensor: torch.Tensor | None = getattr(self, name)
            if shape is None:
                if tensor is not None:
                    raise ArgumentError(f"ExpertWeights.{name} is given; expected None for this MoEConfig")
                continue
            if tensor is None:
                raise ArgumentError(f"ExpertWeights.{name} is None; expected shape {list(shape)}")
            if tuple(tensor.shape) != shape:
                raise ArgumentError(f"ExpertWeights.{name} has shape {list(tensor.shape)}; expected {list(shape)}")
            if tensor.dtype != config.dtype:
                raise ArgumentError(f"ExpertWeights.{name} has dtype {tensor.dtype}; expected {config.dtype}")
            if not tensor.is_contiguous():
                raise ArgumentError(f"ExpertWeights.{name} is not contiguous; pass {name}.contiguous()")


def local_experts(num_experts: int, world_size: int, rank: int) -> range:
    """Experts that `rank` holds: contiguous; counts differ by at most one, lower ranks hold the extra ones.

    Raises:
        ConfigError: `rank` is outside 0 … world_size - 1.
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank is {rank}; expected 0 to {world_size - 1} for world_size {world_size}")
    each, extra = divmod(num_experts, world_size)
    start = rank * each + min(rank, extra)
    return range(start, start + each + (1 if rank < extra else 0))


def random_weights(config: MoEConfig, experts: range, seed: int) -> ExpertWeights:
    """Random weights of `experts`, uniform with standard deviation 1 / sqrt(fan_in); biases with 0.1.

    An expert's values depend on (seed, its id) only, so every split over ranks sees the same weights.
    """
    shapes = _shapes(config, len(experts))
    made: dict[str, torch.Tensor | None] = {}
    for part, (name, shape) in enumerate(shapes.items()):
        if shape is None:
            made[name] = None
            continue
        is_bias, is_shared = name.endswith("bias"), name.startswith("shared")
        std = 0.1 if is_bias else 1 / math.sqrt(shape[-1])
        tensor = torch.empty(shape, dtype=config.dtype)
        if is_shared:
            tensor.copy_(_uniform(shape, std, (seed, _SHARED_EXPERT, part)))
        else:
            for index, expert in enumerate(experts):
                tensor[index] = _uniform(shape[1:], std, (seed, expert, part))
        made[name] = tensor
    gate_up, down = made.pop("gate_up"), made.pop("down")
    assert gate_up is not None
    assert down is not None
    return ExpertWeights(gate_up, down, **made)


def _uniform(shape: tuple[int, ...], std: float, key: tuple[int, int, int]) -> torch.Tensor:
    values = np.random.Generator(np.random.SFC64(key)).random(shape, dtype=np.float32)
    values -= 0.5
    values *= std * math.sqrt(12)
    return torch.from_numpy(values)


def _shapes(config: MoEConfig, num_local: int) -> dict[str, tuple[int, ...] | None]:
    """Shape of every field of `ExpertWeights`, None where the config has no such tensor."""
    hidden, width = config.hidden, config.projection_width(config.intermediate)
    shared = config.shared_intermediate
    return {
        "gate_up": (num_local, width, hidden),
        "down": (num_local, hidden, config.intermediate),
        "gate_up_bias": (num_local, width) if config.bias else None,
        "down_bias": (num_local, hidden) if config.bias else None,
        "shared_gate_up": (config.projection_width(shared), hidden) if shared else None,
        "shared_down": (hidden, shared) if shared else None,
    }
