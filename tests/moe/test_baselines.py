"""The torch.distributed baseline against the fp64 reference, and the reference against plain loops."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tileweave.errors import ArgumentError
from tileweave.moe.baselines import GlooMoE, activate, reference_moe
from tileweave.moe.config import ExpertWeights, MoEConfig, local_experts, random_weights


@dataclass(frozen=True)
class Case:
    name: str
    config: MoEConfig
    num_tokens: tuple[int, ...]  # of each rank; a shorter world uses the first ones
    unused: float = 0.0  # share of slots that are -1
    experts: int | None = None  # route to the first experts only


BASE = MoEConfig(hidden=40, intermediate=24, num_experts=8, num_topk=3)
CASES = [
    Case("plain", BASE, (17, 5, 9)),
    Case("many rows an expert", replace(BASE, num_experts=2), (64, 33, 40)),
    Case("uneven experts", replace(BASE, num_experts=7), (6, 7, 8)),
    Case("fewer experts than ranks", replace(BASE, num_experts=2), (3, 4, 5)),
    Case("an empty rank", BASE, (12, 0, 4)),
    Case("all ranks empty", replace(BASE, shared_intermediate=8), (0, 0, 0)),
    Case("unused slots", BASE, (16, 9, 3), unused=0.4),
    Case("only unused slots", BASE, (4, 4, 4), unused=1.0),
    Case("one expert takes all", BASE, (20, 10, 5), experts=1),
    Case("bias", replace(BASE, bias=True), (20, 3, 11), unused=0.2),
    Case("shared expert", replace(BASE, shared_intermediate=13), (20, 3, 0)),
    Case("not gated", replace(BASE, gated=False, activation="relu", bias=True, shared_intermediate=8), (9, 9, 9)),
    Case("identity", replace(BASE, activation="identity"), (9, 9, 9)),
    Case("geglu", replace(BASE, activation="gelu_tanh"), (9, 9, 9)),
    Case("bf16", replace(BASE, dtype=torch.bfloat16, bias=True, shared_intermediate=8), (33, 2, 9), unused=0.1),
    Case("bf16 many rows", replace(BASE, dtype=torch.bfloat16, num_experts=2), (64, 64, 64)),
]


def tokens_of(case: Case, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, topk_idx, topk_weights) of a rank. Experts may repeat in a row."""
    config, count = case.config, case.num_tokens[rank]
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(count, config.hidden, generator=generator).to(config.dtype)
    idx = torch.randint(case.experts or config.num_experts, (count, config.num_topk), generator=generator)
    idx[torch.rand(idx.shape, generator=generator) < case.unused] = -1
    return x, idx, torch.rand(idx.shape, generator=generator)


def run_cases(rank: int, world_size: int) -> list[torch.Tensor]:
    results = []
    for case in CASES:
        experts = local_experts(case.config.num_experts, world_size, rank)
        layer = GlooMoE(case.config, random_weights(case.config, experts, seed=3))
        out = layer(*tokens_of(case, rank))
        again = layer(*tokens_of(case, rank))  # in the buffers of the first call
        assert torch.equal(out, again), case.name
        results.append(out)
    return results


def run_rank(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a machine without a network has no resolvable host name
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    torch.save(run_cases(rank, world_size), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def check_cases(results: list[torch.Tensor], rank: int) -> None:
    for case, out in zip(CASES, results, strict=True):
        weights = random_weights(case.config, range(case.config.num_experts), seed=3)
        want = reference_moe(*tokens_of(case, rank), weights, case.config)
        assert out.dtype == case.config.dtype
        assert out.shape == want.shape
        error = (out.double() - want).norm() / want.norm().clamp_min(1e-30)
        assert error < (2e-6 if out.dtype == torch.float32 else 1e-2), f"{case.name} on rank {rank}: {error}"


@pytest.mark.parametrize("world_size", [2, 3])
def test_gloo_layer_matches_reference(world_size: int, tmp_path: Path) -> None:
    mp.spawn(run_rank, (world_size, str(tmp_path)), nprocs=world_size)
    for rank in range(world_size):
        check_cases(torch.load(tmp_path / f"{rank}.pt"), rank)


def test_one_rank_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    check_cases(run_cases(0, 1), 0)


def test_reference_is_the_formula() -> None:
    config = replace(BASE, num_experts=3, num_topk=4, bias=True, shared_intermediate=5, activation="gelu")
    weights = random_weights(config, range(3), seed=1)
    x = torch.randn(2, config.hidden, dtype=torch.float64)
    idx = torch.tensor([[2, 2, -1, 0], [-1, 1, -1, -1]])
    scale = torch.rand(2, 4, dtype=torch.float64)
    scale[1, 0] = float("nan")  # of an unused slot: ignored
    assert weights.gate_up_bias is not None
    assert weights.down_bias is not None
    assert weights.shared_gate_up is not None
    assert weights.shared_down is not None

    def expert(row: torch.Tensor, e: int) -> torch.Tensor:
        gate, up = (weights.gate_up[e].double() @ row + weights.gate_up_bias[e].double()).chunk(2)
        return weights.down[e].double() @ (activate(gate, "gelu") * up) + weights.down_bias[e].double()

    want = torch.stack(
        [
            (scale[0, 0] + scale[0, 1]) * expert(x[0], 2) + scale[0, 3] * expert(x[0], 0),
            scale[1, 1] * expert(x[1], 1),
        ]
    )
    gate, up = (x @ weights.shared_gate_up.double().t()).chunk(2, 1)
    want += (activate(gate, "gelu") * up) @ weights.shared_down.double().t()
    torch.testing.assert_close(reference_moe(x, idx, scale, weights, config), want, rtol=1e-12, atol=1e-12)


def test_wrong_input_is_refused() -> None:
    config = CASES[0].config
    weights = random_weights(config, range(8), seed=0)
    layer = GlooMoE(config, weights)
    x, idx, scale = tokens_of(CASES[0], 0)
    with pytest.raises(
        ArgumentError, match=r"x is torch.float64 \[17, 40\]; expected torch.float32 \[num_tokens, 40\]"
    ):
        layer(x.double(), idx, scale)
    with pytest.raises(ArgumentError, match=r"topk_idx has shape \[17, 2\]; expected \[17, 3\]"):
        layer(x, idx[:, :2], scale)
    with pytest.raises(ArgumentError, match=r"gate_up has shape \[7, 48, 40\]; expected \[8, 48, 40\]"):
        GlooMoE(config, weights.select(range(7)))


def test_weights_check() -> None:
    weights = random_weights(BASE, range(8), seed=0)
    with pytest.raises(ArgumentError, match="down_bias is given; expected None"):
        replace(weights, down_bias=torch.zeros(8, 40)).check(BASE, 8)
    with pytest.raises(ArgumentError, match=r"gate_up has dtype torch.float64; expected torch.float32"):
        replace(weights, gate_up=weights.gate_up.double()).check(BASE, 8)
    strided = weights.gate_up.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ArgumentError, match=r"gate_up is not contiguous; pass gate_up.contiguous\(\)"):
        replace(weights, gate_up=strided).check(BASE, 8)
    with pytest.raises(ArgumentError, match=r"shared_down is None; expected shape \[40, 6\]"):
        ExpertWeights(weights.gate_up, weights.down, shared_gate_up=torch.zeros(12, 40)).check(
            replace(BASE, shared_intermediate=6), 8
        )
