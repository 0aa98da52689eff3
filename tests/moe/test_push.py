"""Results pushed to the ranks of their tokens give the bits of results pulled from there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import pytest
import torch

from tests.moe.layers import Inputs, even, random_inputs, run_layer
from tests.moe.test_layer_bits import same_bits
from tests.moe.test_layer_values import FULL, PLAIN
from tileweave.codegen.case import Case
from tileweave.codegen.reference.interpret import interpret
from tileweave.compiler.config import Config, QueueKind
from tileweave.compiler.order import ORDERS
from tileweave.errors import ConfigError, SyncError
from tileweave.moe.cases import half_cases, layer_case, routed_case
from tileweave.primitives.launch import VirtualGroup

Virtual: TypeAlias = Callable[[int], VirtualGroup]


def pushed(run: Config) -> Config:
    """`run` with results pushed."""
    return replace(run, tunables={**run.tunables, "returns": "push"})


def pushed_case(case: Case) -> Case:
    return replace(case, config=pushed(case.config))


def check(virtual: Virtual, inputs: Inputs, counts: list[int], run: Config) -> None:
    """Push and pull agree to the bit."""
    parts = inputs.split(counts)
    want = run_layer(virtual(len(counts)), FULL, parts, Config())
    assert same_bits(run_layer(virtual(len(counts)), FULL, parts, pushed(run)), want), (counts, run)


@pytest.mark.parametrize("queue", ["static", "dynamic"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_bits_on_even_and_uneven_ranks(virtual: Virtual, world_size: int, queue: QueueKind) -> None:
    inputs = random_inputs(FULL, 150, unused=0.2)
    uneven = {1: [150], 2: [149, 1], 3: [7, 0, 143], 4: [0, 64, 85, 1]}[world_size]
    for comm_workers in (0, 1):
        for counts in (even(150, world_size), uneven):
            check(virtual, inputs, counts, Config(workers=2, comm_workers=comm_workers, queue=queue))


@pytest.mark.parametrize("expert", [-1, 0, 5])
def test_bits_where_all_rows_go_to_one_expert_or_none(virtual: Virtual, expert: int) -> None:
    inputs = random_inputs(FULL, 140)
    check(virtual, replace(inputs, topk_idx=torch.full_like(inputs.topk_idx, expert)), [70, 0, 70], Config(workers=2))


def test_bits_in_bfloat16(virtual: Virtual) -> None:
    config = replace(FULL, dtype=torch.bfloat16)
    parts = random_inputs(config, 90, unused=0.1).split([30, 60])
    got, want = (run_layer(virtual(2), config, parts, run) for run in (pushed(Config(workers=2)), Config()))
    assert same_bits(got, want)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_checks_pass_under_every_order(world_size: int, order: str) -> None:
    for case in (layer_case(world_size), half_cases(world_size)[1]):
        config = pushed(replace(case.config, comm_workers=1, order=order))
        replace(case, config=config).compile().check(case.arguments)


@pytest.mark.parametrize("seed", range(20))
def test_checks_pass_on_random_routings(seed: int) -> None:
    random = np.random.default_rng(seed)
    world_size = int(random.integers(1, 5))
    tokens = random.integers(0, 25, world_size) * random.integers(0, 2, world_size)
    index = [random.integers(-1, 5, (n, 2)) for n in tokens]
    case = pushed_case(routed_case(index))
    case.compile().check(case.arguments)


def test_the_interpreter_finds_no_race() -> None:
    case = pushed_case(layer_case(3))
    compiled = case.compile()
    random = np.random.default_rng(0)
    arguments = [
        {n: random.standard_normal(a).astype(np.float32) if isinstance(a, tuple) else a for n, a in given.items()}
        for given in case.arguments
    ]
    interpret(compiled.program, compiled.plan, arguments, seed=1)


def test_a_missing_row_is_noticed() -> None:
    """The check can fail: a result that is sent to another place than combine reads."""
    case = pushed_case(routed_case([np.array([[0, 1], [2, 3]]), np.array([[0, 4]])]))
    broken = dict(case.arguments[0])
    broken["plan.num_slots"] = broken["plan.num_slots"] - 1
    with pytest.raises(SyncError):
        case.compile().check([broken, case.arguments[1]])


def test_another_word_is_refused() -> None:
    case = layer_case(2)
    config = replace(case.config, tunables={**case.config.tunables, "returns": "shove"})
    with pytest.raises(ConfigError, match=r"returns='shove': expected one of pull, push"):
        replace(case, config=config).compile()


def test_layer_without_shared_expert(virtual: Virtual) -> None:
    parts = random_inputs(PLAIN, 60, unused=0.5).split([20, 40])
    got, want = (run_layer(virtual(2), PLAIN, parts, run) for run in (pushed(Config()), Config()))
    assert same_bits(got, want)
