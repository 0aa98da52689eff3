"""The floor: the least time in which this machine's cores could do a layer's work.

    floor = max(FLOPs / GEMM rate, bytes / copy rate)

with both rates measured while all cores that the ranks use are busy at once, because cores share
memory bandwidth and clocks. Work is taken as spread evenly over those cores, so a skewed routing
cannot reach the floor on its busiest rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tileweave.errors import ConfigError
from tileweave.moe.config import MoEConfig

_GEMM_SHAPE = (1024, 1536, 2048)  # large enough that more does not make it faster
_STREAM_BYTES = 128 << 20  # far beyond a last-level cache


@dataclass(frozen=True)
class MachineRates:
    """Rates per core with `num_cores` cores busy at once, one thread each.

    Attributes:
        num_cores: cores that the ranks share, min(ranks, cores of the machine).
        gemm_flops_per_s: fp32 FLOP/s of one core, of torch.mm on a large shape.
        copy_bytes_per_s: bytes/s of one core in a large copy, bytes read plus bytes written.
    """

    num_cores: int
    gemm_flops_per_s: float
    copy_bytes_per_s: float

    @staticmethod
    def of(num_ranks: int, seconds: Mapping[str, float], work: Sequence[Work]) -> MachineRates:
        """Rates from the seconds that each entry of `work` took on the cores that `num_ranks` ranks share.

        Raises:
            ConfigError: `num_ranks` is below 1.
        """
        if num_ranks < 1:
            raise ConfigError(f"num_ranks is {num_ranks}; expected at least 1")
        gemm, copy = (w.amount / seconds[w.name] for w in work)
        return MachineRates(min(num_ranks, usable_cores()), gemm, copy)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Work:
    """Something to time: `amount` FLOPs or bytes each time that `run` is called."""

    name: str
    run: Callable[[], object]
    amount: int


MACHINE_WORK = ("gemm", "copy")
"""Names of `machine_work`."""


def machine_work() -> tuple[Work, Work]:
    """A large product (`gemm`) and a large copy (`copy`), for one core.

    Time them on as many ranks at once as there are cores to share, turn by turn with the
    layer, and pass the medians to `MachineRates.of`: the machine's speed drifts.
    """
    m, n, k = _GEMM_SHAPE
    a, b, c = torch.rand(m, k), torch.rand(n, k), torch.empty(m, n)
    source = torch.ones(_STREAM_BYTES // 4)
    target = torch.zeros_like(source)
    return (
        Work("gemm", partial(torch.mm, a, b.t(), out=c), 2 * m * n * k),
        Work("copy", partial(target.copy_, source), 2 * _STREAM_BYTES),
    )


def layer_flops(config: MoEConfig, num_rows: int, num_tokens: int = 0) -> int:
    """FLOPs of the matrix products, a multiply-add being 2; activations and sums are left out.

        num_rows * 2 * hidden * intermediate * p  +  num_tokens * 2 * hidden * shared_intermediate * p

    with p = 3 projections when gated (gate, up, down), else 2.

    Args:
        config: of the layer.
        num_rows: routed rows, used slots of all tokens.
        num_tokens: tokens that pass the shared expert; matters only when there is one.
    """
    projections = 3 if config.gated else 2
    per_width = 2 * config.hidden * projections
    return per_width * (num_rows * config.intermediate + num_tokens * config.shared_intermediate)


def layer_bytes(config: MoEConfig, num_tokens: int, num_rows: int, num_active_experts: int) -> int:
    """Bytes that must cross between core and memory, in the layer's dtype.

        weights of each expert with a row, and of the shared expert, read once
        + num_tokens * hidden      x, read once
        + num_rows * hidden * 2    routed rows, written at their expert and read there
        + num_rows * hidden * 2    experts' results, written at the token's rank and read there
        + num_tokens * hidden      output, written once

    Activations between the two products are left out: a tile's can stay in cache.

    Args:
        config: of the layer.
        num_tokens: tokens of all ranks.
        num_rows: routed rows, used slots of all tokens.
        num_active_experts: experts with at least one row.
    """
    projections = 3 if config.gated else 2
    expert = projections * config.hidden * config.intermediate
    if config.bias:
        expert += config.projection_width(config.intermediate) + config.hidden
    shared = projections * config.hidden * config.shared_intermediate if num_tokens else 0
    elements = num_active_experts * expert + shared + config.hidden * (2 * num_tokens + 4 * num_rows)
    return elements * config.dtype.itemsize


def floor_seconds(rates: MachineRates, config: MoEConfig, num_tokens: int, expert_rows: Sequence[int]) -> float:
    """max(layer_flops / (gemm_flops_per_s * num_cores), layer_bytes / (copy_bytes_per_s * num_cores)).

    All arguments count the whole group. The shared expert's weights count once, though each rank reads
    them: cores may share a cache.

    Args:
        rates: of the cores that the ranks share.
        config: of the layer.
        num_tokens: tokens of all ranks.
        expert_rows: [num_experts] routed rows of each expert.
    """
    num_rows = sum(expert_rows)
    num_active = sum(1 for rows in expert_rows if rows)
    compute = layer_flops(config, num_rows, num_tokens) / (rates.gemm_flops_per_s * rates.num_cores)
    memory = layer_bytes(config, num_tokens, num_rows, num_active) / (rates.copy_bytes_per_s * rates.num_cores)
    return max(compute, memory)
