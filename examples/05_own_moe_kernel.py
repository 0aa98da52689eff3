"""An MoE kernel of one's own: the experts of gpt-oss, whose activation Tileweave does not ship.

The kernels of `tileweave.moe` are sequences of *stages*: functions that declare tasks and hand
on memory with the counters that tell when it is written. A kernel of one's own keeps the stages that fit and
writes the one that does not. Here only the first grouped GEMM is new; its activation is

    gate = min(gate, limit), up = clip(up, -limit, limit)
    (up + 1) * gate * sigmoid(alpha * gate)

Nothing in the compiler knows what an expert is: tiles, dependences and the schedule follow from
the addresses that the tasks compute.

    python examples/05_own_moe_kernel.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import tileweave as tw
from tileweave.moe import ExpertWeights, MoEConfig, Placement, plan_routing
from tileweave.moe.config import random_weights
from tileweave.moe.kernels import (
    LayerShape,
    Ready,
    Tiles,
    WeightSpecs,
    add_bias,
    combine,
    dispatch,
    expert_grid,
    expert_rows,
    grouped_gemm,
    linear,
    row_tiles,
)
from tileweave.moe.routing import Plan, plan_all, plan_specs


@dataclass(frozen=True)
class ClampedSwiGLU:
    """Constants of the activation; plain values specialise the kernel."""

    alpha: float = 1.702
    limit: float = 7.0

    def __call__(self, gate: tw.Tile, up: tw.Tile) -> tw.Tile:
        """Tile arithmetic reads like NumPy."""
        gate = tw.minimum(gate, self.limit)
        up = tw.maximum(tw.minimum(up, self.limit), -self.limit)
        return (up + 1.0) * gate * tw.sigmoid(gate * self.alpha)

    def reference(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """The same in torch."""
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1.0) * gate * torch.sigmoid(gate * self.alpha)


TILES = Tiles(rows=32, columns=128)


@tw.kernel
def gpt_oss_experts(
    x: tw.Tensor,
    topk_weights: tw.Tensor,
    weights: WeightSpecs,
    plan: Plan[tw.Table],
    out: tw.Tensor,
    shape: LayerShape,
    activation: ClampedSwiGLU,
    *,
    tiles: Tiles = TILES,
) -> None:
    """x, out [num_tokens, hidden]; topk_weights [num_tokens, num_topk]."""
    received = dispatch(x, plan, shape, tiles)
    activated = clamped_swiglu_gemm(received, weights, plan, shape, activation, tiles)
    results = grouped_gemm(activated, weights, plan, shape, tiles)
    combine(results, None, topk_weights, plan, out, tiles)


def clamped_swiglu_gemm(
    received: Ready,
    weights: WeightSpecs,
    plan: Plan[tw.Table],
    shape: LayerShape,
    activation: ClampedSwiGLU,
    tiles: Tiles,
) -> Ready:
    """The stage that is new: gate and up of each expert's rows, activated; [capacity, intermediate]."""
    width = int(weights.gate_up.shape[1]) // 2
    memory = tw.workspace("activated", (shape.capacity, width), weights.gate_up.dtype)
    counters = tw.signals("activated_tiles", (shape.num_local_experts, row_tiles(shape.capacity, tiles)))

    @tw.task(grid=expert_grid(plan, shape, tiles, width))
    def gate_up(expert: tw.Expr, m: tw.Expr, n: tw.Expr) -> None:
        rows = expert_rows(plan, expert, m, tiles)
        # `dispatch` counts rows, so that partial tiles are exact: wait for all rows of this one.
        first, end = plan.expert_offsets[expert] + m * tiles.rows, plan.expert_offsets[expert + 1]
        tw.wait(received.counters, (expert, m), tw.minimum(end - first, tiles.rows))
        gate_at, up_at = (
            (expert, tw.ds(part + n * tiles.columns, tiles.columns, stop=part + width)) for part in (0, width)
        )
        gate, up = linear(received.memory, rows, weights.gate_up, [gate_at, up_at], tiles)
        value = activation(
            add_bias(gate, weights.gate_up_bias, gate_at),
            add_bias(up, weights.gate_up_bias, up_at),
        )
        tw.store(memory, (rows, tw.ds(n * tiles.columns, tiles.columns, stop=width)), value)
        tw.signal(counters, (expert, m))

    return Ready(memory, counters)


CONFIG = MoEConfig(hidden=200, intermediate=150, num_experts=10, num_topk=4, bias=True)
NUM_TOKENS = 60  # of rank 0; each further rank has 7 fewer


@dataclass(frozen=True)
class Problem:
    """What the ranks start with; the weights are of all experts."""

    placement: Placement
    weights: ExpertWeights
    x: list[torch.Tensor]
    topk_idx: list[torch.Tensor]
    topk_weights: list[torch.Tensor]

    @staticmethod
    def of(world_size: int) -> Problem:
        """Random, but the same each time; large gates, so that the clamps matter."""
        torch.manual_seed(0)
        counts = [NUM_TOKENS - 7 * rank for rank in range(world_size)]
        weights = random_weights(CONFIG, range(CONFIG.num_experts), seed=0)
        weights.gate_up.mul_(4.0)
        scores = [torch.randn(count, CONFIG.num_experts).softmax(dim=-1).topk(CONFIG.num_topk) for count in counts]
        return Problem(
            Placement.contiguous(CONFIG.num_experts, world_size),
            weights,
            [torch.randn(count, CONFIG.hidden) for count in counts],
            [s.indices for s in scores],
            [s.values / s.values.sum(dim=-1, keepdim=True) for s in scores],
        )

    def on_one_rank(self) -> Problem:
        """The same tokens, all on one rank."""
        parts = [[torch.cat(each)] for each in (self.x, self.topk_idx, self.topk_weights)]
        return Problem(Placement.contiguous(CONFIG.num_experts, 1), self.weights, *parts)

    def shape(self) -> LayerShape:
        """Room for the worst case: every slot of every token to one rank."""
        tokens = [len(x) for x in self.x]
        capacity = sum(tokens) * CONFIG.num_topk
        return LayerShape(self.placement.max_local, capacity, max(tokens), CONFIG.activation, CONFIG.gated)

    def specs(self) -> tuple[object, ...]:
        """Specs of the kernel's arguments."""
        hidden, intermediate, topk = CONFIG.hidden, CONFIG.intermediate, CONFIG.num_topk
        weights = WeightSpecs(
            gate_up=tw.Tensor(("num_local_experts", 2 * intermediate, hidden)),
            down=tw.Tensor(("num_local_experts", hidden, intermediate)),
            gate_up_bias=tw.Tensor(("num_local_experts", 2 * intermediate)),
            down_bias=tw.Tensor(("num_local_experts", hidden)),
        )
        x, topk_weights = tw.Tensor(("num_tokens", hidden)), tw.Tensor(("num_tokens", topk))
        return (x, topk_weights, weights, plan_specs(self.placement, topk), x, self.shape(), ClampedSwiGLU())

    def own_weights(self, rank: int) -> ExpertWeights:
        """Those of the experts of `rank`."""
        own = self.placement.experts_of(rank)
        return self.weights.select(range(int(own[0]), int(own[-1]) + 1))

    def arguments(self) -> list[dict[str, Any]]:
        """Names and arrays of every rank, for looking without running."""
        plans = plan_all([index.numpy() for index in self.topk_idx], self.placement)
        return [
            {
                "x": x,
                "topk_weights": self.topk_weights[rank],
                "out": x,
                **{f"weights.{name}": value for name, value in vars(self.own_weights(rank)).items()},
                **{f"plan.{name}": table for name, table in plans[rank].named().items()},
            }
            for rank, x in enumerate(self.x)
        ]


def reference(problem: Problem, rank: int) -> npt.NDArray[np.float64]:
    """The tokens of `rank` in fp64, an expert at a time."""
    x, weights = problem.x[rank].double(), {k: v.double() for k, v in vars(problem.weights).items() if v is not None}
    out = torch.zeros_like(x)
    for expert in range(CONFIG.num_experts):
        token, slot = torch.nonzero(problem.topk_idx[rank] == expert, as_tuple=True)
        projected = x[token] @ weights["gate_up"][expert].T + weights["gate_up_bias"][expert]
        hidden = ClampedSwiGLU().reference(*projected.chunk(2, dim=-1))
        result = hidden @ weights["down"][expert].T + weights["down_bias"][expert]
        out.index_add_(0, token, result * problem.topk_weights[rank].double()[token, slot, None])
    return out.numpy()


def cases(world_size: int = 2) -> list[tw.Case]:
    """One worker for dispatch, one for the rest."""
    problem = Problem.of(world_size)
    return [tw.Case(gpt_oss_experts, problem.specs(), problem.arguments(), tw.Config(workers=2, comm_workers=1))]


def run(problem: Problem, config: tw.Config) -> torch.Tensor:
    """The output of all tokens, one rank's below the other's."""
    world_size, specs = problem.placement.world_size, problem.specs()
    kernel = tw.compile(gpt_oss_experts, *specs, world_size=world_size, config=config)
    kernel.check(problem.arguments())

    def launch(group: tw.Group) -> torch.Tensor:
        rank = group.rank
        plan = plan_routing(problem.topk_idx[rank], problem.placement, group)  # counts are exchanged here
        x, out = problem.x[rank], torch.empty_like(problem.x[rank])
        kernel(x, problem.topk_weights[rank], problem.own_weights(rank), plan, out)
        return out

    with tw.VirtualGroup(world_size) as ranks:
        return torch.cat(ranks.run(launch))


def main() -> None:
    """Compare with fp64, and the bits with those of the same tokens on one rank."""
    (case,) = cases()
    print(case.compile().graph(case.arguments))

    problem = Problem.of(2)
    out = run(problem, case.config)
    expected = np.concatenate([reference(problem, rank) for rank in range(2)])
    error = np.abs(out.numpy() - expected).max() / np.abs(expected).max()
    print(f"{len(out)} tokens on 2 ranks: largest error against fp64 {error:.1e} of the largest value")
    assert error < 1e-5
    assert torch.equal(out, run(problem.on_one_rank(), tw.Config())), "the bits depend on the number of ranks"
    print("the same bits as on 1 rank with 1 worker")


if __name__ == "__main__":
    main()
