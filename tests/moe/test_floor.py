"""The floor: formulas, and rates from measured work."""

from __future__ import annotations

import pytest
import torch

from tileweave.errors import ConfigError
from tileweave.moe.config import MoEConfig
from tileweave.moe.floor import MACHINE_WORK, MachineRates, floor_seconds, layer_bytes, layer_flops, machine_work

CONFIG = MoEConfig(hidden=2048, intermediate=768, num_experts=64, num_topk=8)


def test_flops() -> None:
    assert layer_flops(CONFIG, 10) == 10 * 6 * 2048 * 768
    plain = MoEConfig(hidden=16, intermediate=8, num_experts=4, num_topk=2, gated=False, shared_intermediate=3)
    assert layer_flops(plain, 10, num_tokens=5) == 10 * 4 * 16 * 8 + 5 * 4 * 16 * 3


def test_bytes() -> None:
    weights = 3 * 3 * 2048 * 768
    assert layer_bytes(CONFIG, 4, 32, 3) == 4 * (weights + 2 * 4 * 2048 + 4 * 32 * 2048)
    plain = MoEConfig(
        hidden=16,
        intermediate=8,
        num_experts=4,
        num_topk=2,
        gated=False,
        bias=True,
        shared_intermediate=3,
        dtype=torch.bfloat16,
    )
    expert = 2 * 16 * 8 + 8 + 16
    assert layer_bytes(plain, 5, 10, 2) == 2 * (2 * expert + 2 * 16 * 3 + 2 * 5 * 16 + 4 * 10 * 16)
    assert layer_bytes(plain, 0, 0, 0) == 0


def test_floor_is_the_larger_bound() -> None:
    rows = [8] * 16 + [0] * 48
    flops, moved = layer_flops(CONFIG, 128), layer_bytes(CONFIG, 16, 128, 16)
    compute_bound = MachineRates(num_cores=2, gemm_flops_per_s=1e9, copy_bytes_per_s=1e15)
    memory_bound = MachineRates(num_cores=2, gemm_flops_per_s=1e15, copy_bytes_per_s=1e9)
    assert floor_seconds(compute_bound, CONFIG, 16, rows) == pytest.approx(flops / 2e9)
    assert floor_seconds(memory_bound, CONFIG, 16, rows) == pytest.approx(moved / 2e9)


def test_rates_of_measured_work() -> None:
    work = machine_work()
    assert tuple(w.name for w in work) == MACHINE_WORK
    for each in work:
        each.run()
    rates = MachineRates.of(1, {"gemm": 2.0, "copy": 0.5}, work)
    amounts = {w.name: w.amount for w in work}
    assert (rates.num_cores, rates.gemm_flops_per_s) == (1, amounts["gemm"] / 2)
    assert rates.copy_bytes_per_s == amounts["copy"] * 2


def test_no_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_ranks is 0; expected at least 1"):
        MachineRates.of(0, dict.fromkeys(MACHINE_WORK, 1.0), machine_work())
