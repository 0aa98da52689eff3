"""The floor: the least time in which this machine's cores could do a layer's work.

    floor = max(FLOPs / GEMM rate, bytes / copy rate)

with both rates measured while all cores that the ranks use are busy at once, because cores share
memory bandwidth and clocks. Work is taken as spread evenly over those cores, so a skewed routing
cannot reach the floor on its busiest rank.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from statistics import fmean

import torch

from tileweave.errors import ConfigError, LaunchError
from tileweave.moe.config import MoEConfig

_GEMM_SHAPE = (1024, 1536, 2048)  # large enough that more does not make it faster
_STREAM_BYTES = 256 << 20  # far beyond a last-level cache
_REPETITION_S = 0.07  # about what one repetition of any kind of work takes
_PEER_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class MachineRates:
    """Rates per core with `num_cores` cores busy at once, one thread each.

    Attributes:
        num_cores: cores that the ranks share, min(ranks, cores of the machine).
        gemm_flops: fp32 FLOP/s of one core, of torch.mm on a large shape.
        copy_bytes: bytes/s of one core in a large copy, bytes read plus bytes written.
        read_bytes: bytes/s of one core that only reads, as weights are streamed by a matrix-vector product.
    """

    num_cores: int
    gemm_flops: float
    copy_bytes: float
    read_bytes: float


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure_machine(num_ranks: int, seconds: float = 1.0) -> MachineRates:
    """Measure the rates that `num_ranks` ranks with one thread each can draw on; takes about 3 * `seconds` + 5 s.

    Each repetition starts at a barrier, so all processes work at once; a rate is the best
    repetition's mean over the processes, which sheds what other programs took.

    Raises:
        ConfigError: `num_ranks` is below 1.
        LaunchError: a measuring process died.
    """
    if num_ranks < 1:
        raise ConfigError(f"num_ranks is {num_ranks}; expected at least 1")
    num_cores = min(num_ranks, usable_cores())
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(num_cores)
    pipes = [context.Pipe(duplex=False) for _ in range(num_cores)]
    processes = [
        context.Process(target=_measure_core, args=(barrier, sender, seconds), daemon=True) for _, sender in pipes
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()  # so that a dead child reads as end of file
    try:
        per_core = [receiver.recv() for receiver, _ in pipes]
    except EOFError:
        raise LaunchError("a process that measures this machine ended early; is there memory for it?") from None
    finally:
        for process in processes:
            process.join(_PEER_TIMEOUT_S)
    best = [max(map(fmean, zip(*repetitions, strict=True))) for repetitions in zip(*per_core, strict=True)]
    return MachineRates(num_cores, *best)


def _measure_core(barrier: Barrier, sender: Connection, seconds: float) -> None:
    """One core's share: sends, for each kind of work, its rates in all repetitions."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        sender.send([_rates(work, amount, barrier, seconds) for work, amount in _kinds_of_work()])


def _kinds_of_work() -> Iterator[tuple[Callable[[], object], int]]:
    """(what to run, its FLOPs or bytes): a product, a copy, a pure read."""
    m, n, k = _GEMM_SHAPE
    a, b, c = torch.rand(m, k), torch.rand(n, k), torch.empty(m, n)
    yield partial(torch.mm, a, b.t(), out=c), 2 * m * n * k
    source = torch.ones(_STREAM_BYTES // 4)
    target = torch.zeros_like(source)
    yield partial(target.copy_, source), 2 * _STREAM_BYTES
    matrix, vector = source.view(-1, 2048), torch.ones(2048)
    yield partial(torch.mv, matrix, vector), _STREAM_BYTES


def _rates(work: Callable[[], object], amount: int, barrier: Barrier, seconds: float) -> list[float]:
    """Amount per second of each repetition; all processes do as many, each starting together."""
    work()
    rates = []
    for _ in range(max(3, round(seconds / _REPETITION_S))):
        barrier.wait(_PEER_TIMEOUT_S)
        start = time.perf_counter()
        work()
        rates.append(amount / (time.perf_counter() - start))
    return rates


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
    """max(layer_flops / (gemm_flops * num_cores), layer_bytes / (copy_bytes * num_cores)).

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
    compute = layer_flops(config, num_rows, num_tokens) / (rates.gemm_flops * rates.num_cores)
    memory = layer_bytes(config, num_tokens, num_rows, num_active) / (rates.copy_bytes * rates.num_cores)
    return max(compute, memory)
