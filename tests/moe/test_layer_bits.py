"""The same global tokens give the same bits, however they are run: from the layer's input on, router included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import pytest
import torch

from tests.moe.layers import Inputs, even, random_inputs, run_layer
from tests.moe.test_layer_values import FULL, PLAIN
from tileweave.codegen.compiled import compile as compile_kernel
from tileweave.compiler.config import Config
from tileweave.compiler.order import ORDERS
from tileweave.moe.config import MoEConfig
from tileweave.moe.kernels import LayerShape, dispatch_gemm, gemm_combine
from tileweave.moe.layer import MoELayer, layer_specs
from tileweave.moe.router import Router
from tileweave.moe.routing import plan_routing
from tileweave.primitives.group import Group
from tileweave.primitives.launch import VirtualGroup, spawn
from tileweave.primitives.memory import Tensor

Virtual: TypeAlias = Callable[[int], VirtualGroup]

NUM_TOKENS = 150
BIASED = replace(FULL, shared_intermediate=0)
BF16 = replace(FULL, dtype=torch.bfloat16)
UNEVEN = {1: [150], 2: [149, 1], 3: [7, 0, 143], 4: [0, 64, 85, 1]}


def inputs_of(config: MoEConfig) -> Inputs:
    return random_inputs(config, NUM_TOKENS, unused=0.1, seed=5)


@pytest.fixture(scope="module")
def expected(virtual: Virtual) -> Callable[[MoEConfig, bool], torch.Tensor]:
    """What one rank with one worker computes."""
    made: dict[tuple[MoEConfig, bool], torch.Tensor] = {}

    def get(config: MoEConfig, routed: bool) -> torch.Tensor:
        if (config, routed) not in made:
            made[config, routed] = run_layer(virtual(1), config, [inputs_of(config)], Config(), routed=routed)
        return made[config, routed]

    return get


Expected: TypeAlias = Callable[[MoEConfig, bool], torch.Tensor]


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    assert got.isfinite().all()
    return torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_world_size_order_workers_and_queue(virtual: Virtual, expected: Expected, world_size: int, order: str) -> None:
    split = (world_size + list(ORDERS).index(order)) % 2 == 0  # the same kernels as in the tests of values
    for workers in (2, 3) if split else (1, 2, 3):
        for queue in ("static", "dynamic"):
            run = Config(workers=workers, comm_workers=int(split), order=order, queue=queue)  # type: ignore[arg-type]
            for counts in (even(NUM_TOKENS, world_size), UNEVEN[world_size]):
                for routed in (True, False):
                    got = run_layer(virtual(world_size), FULL, inputs_of(FULL).split(counts), run, routed=routed)
                    assert same_bits(got, expected(FULL, routed)), (run, counts, routed)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bf16(virtual: Virtual, expected: Expected, world_size: int) -> None:
    for counts in (even(NUM_TOKENS, world_size), UNEVEN[world_size]):
        got = run_layer(virtual(world_size), BF16, inputs_of(BF16).split(counts), Config(workers=2), routed=False)
        assert same_bits(got, expected(BF16, False))


def process_rank(group: Group, config: MoEConfig, run: Config, parts: Sequence[Inputs]) -> list[torch.Tensor]:
    """One layer, called again and again."""
    layer, part = MoELayer(config, group, run=run), parts[group.rank]
    return [layer(part.x, part.topk_idx, part.topk_weights), *(layer(part.x) for _ in range(3))]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_are_processes(expected: Expected, world_size: int) -> None:
    parts = inputs_of(FULL).split(UNEVEN[world_size])
    run = Config(workers=2, queue="dynamic")
    routed, *own = (torch.cat(each) for each in zip(*spawn(process_rank, world_size, FULL, run, parts), strict=True))
    assert same_bits(routed, expected(FULL, True))
    assert all(same_bits(each, expected(FULL, False)) for each in own)


def test_twenty_repetitions(virtual: Virtual, expected: Expected) -> None:
    parts = inputs_of(FULL).split(UNEVEN[3])

    def repeat(group: Group) -> list[torch.Tensor]:
        layer, part = MoELayer(FULL, group, run=Config(workers=3, queue="dynamic")), parts[group.rank]
        return [layer(part.x) for _ in range(20)]

    for got in zip(*virtual(3).run(repeat), strict=True):
        assert same_bits(torch.cat(got), expected(FULL, False))


def test_more_tokens_do_not_change_those_that_were_there(virtual: Virtual, expected: Expected) -> None:
    """A token's row falls into other tiles, at other places, among other rows; and memory has grown."""
    inputs, others = inputs_of(PLAIN), random_inputs(PLAIN, 300, seed=9)
    want = expected(PLAIN, True)
    both = Inputs(
        torch.cat((others.x, inputs.x)),
        torch.cat((others.topk_idx, inputs.topk_idx)),
        torch.cat((others.topk_weights, inputs.topk_weights)),
    )
    assert same_bits(run_layer(virtual(2), PLAIN, both.split([101, 349]))[300:], want)
    for first in (0, 149, 60):
        part = inputs.split([first, 1, 149 - first])[1]
        assert same_bits(run_layer(virtual(1), PLAIN, [part]), want[first : first + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("hidden", "num_experts"), [(36, 6), (1000, 70)])
def test_router_logits_do_not_depend_on_the_rows_beside(hidden: int, num_experts: int, dtype: torch.dtype) -> None:
    router = Router(hidden, num_experts, 3, dtype=dtype)
    x = torch.randn(133, hidden).to(dtype)
    together = router.logits(x)
    index, weights = router(x)
    for size in (1, 2, 5, 64, 65):
        parts = [router.logits(part.contiguous()) for part in x.split(size)]
        assert torch.equal(torch.cat(parts), together)
        chosen = [router(part.contiguous()) for part in x.split(size)]
        assert torch.equal(torch.cat([c[0] for c in chosen]), index)
        assert torch.equal(torch.cat([c[1] for c in chosen]), weights)
    error = (together - x.double() @ router.weight.double().T).norm() / together.norm()
    assert error < 1e-6


def test_kernels_of_the_two_halves_give_the_bits_of_the_whole(virtual: Virtual, expected: Expected) -> None:
    config, world_size = BIASED, 2
    parts = inputs_of(config).split(UNEVEN[world_size])
    shape = LayerShape(3, 512, 256, config.activation, config.gated)

    def halves(group: Group) -> torch.Tensor:
        layer, part = MoELayer(config, group), parts[group.rank]
        x, topk_weights, weights, plan, out = layer_specs(config, layer.placement)
        rows = Tensor(("num_rows", config.intermediate))
        run = Config(workers=2)
        first = compile_kernel(dispatch_gemm, x, weights, plan, rows, shape, world_size=world_size, config=run)
        second = compile_kernel(
            gemm_combine, rows, topk_weights, weights, plan, out, shape, world_size=world_size, config=run
        )
        tables = plan_routing(part.topk_idx, layer.placement, group)
        activations = torch.full((int(tables.expert_offsets[-1]), config.intermediate), torch.nan)
        first.run((part.x, layer.weights, tables, activations), group)
        result = torch.full_like(part.x, torch.nan)
        used = part.topk_weights.nan_to_num()  # an unused slot takes no row, but its weight is read
        second.run((activations, used, layer.weights, tables, result), group)
        return result

    assert same_bits(torch.cat(virtual(world_size).run(halves)), expected(config, True))
