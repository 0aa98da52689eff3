"""Every shipped kernel and example as TileLang text of target `c`, run on CPU ranks, against the C engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tilelang")

import tileweave as tw
from tests.triton.interpreted import every_case, given
from tileweave.codegen.launch import Engine
from tileweave.codegen.tilelang.engine import TileLangExecutable
from tileweave.moe.cases import cases as moe_cases

Outputs = dict[str, np.ndarray[Any, Any]]


def all_cases(world_size: int) -> Iterator[tw.Case]:
    """On uneven, skewed and empty routings; with results pushed as well as pulled."""
    yield from every_case(world_size)
    for case in moe_cases(world_size):
        if "returns" in case.kernel.tunables:
            yield replace(case, config=replace(case.config, tunables={**case.config.tunables, "returns": "push"}))


def launch_twice(group: tw.Group, case: tw.Case, compiled: tw.CompiledKernel, load: Callable[..., Engine]) -> Outputs:
    """What a rank has after two launches, the second of which meets the buffers of the first."""
    arrays = given(case, compiled, group.rank)
    executable = load(group)
    for _ in range(2):
        passed = dict(zip((m.name for m in compiled.program.arguments), copy.deepcopy(arrays), strict=True))
        executable.launch(compiled.bind(passed))
    return {name: array.float().numpy() for name, array in passed.items() if name in compiled.written}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_values(world_size: int) -> None:
    """Within fp32 rounding of the C engine: sums differ in order only."""
    seen = set()
    for number, case in enumerate(all_cases(world_size)):
        if case.world_size != world_size:
            continue
        config = replace(case.config, queue=("static", "dynamic")[number % 2])
        compiled = tw.compile(case.kernel, *case.specs, world_size=world_size, config=config)

        def rank(group: tw.Group, case: tw.Case = case, compiled: tw.CompiledKernel = compiled) -> list[Outputs]:
            loads = (compiled.load, lambda group: TileLangExecutable(compiled.lowered, group))
            return [launch_twice(group, case, compiled, load) for load in loads]

        with tw.VirtualGroup(world_size) as ranks:
            for number_of_rank, (want, got) in enumerate(ranks.run(rank)):
                for name, expected in want.items():
                    scale = max(float(np.abs(expected).max(initial=0.0)), 1e-30)
                    error = float(np.abs(got[name] - expected).max(initial=0.0)) / scale
                    assert error < 5e-6, f"{case.kernel.name}, rank {number_of_rank}: {name} differs by {error}"
        seen.add(case.kernel.name)
    assert {"moe_layer", "dispatch_gemm", "gemm_combine", "ring", "gpt_oss_experts"} <= seen
