"""Virtual ranks of one device in one launch, in Triton's interpreter with programs that take turns.

Not collected by itself: `test_virtual.py` runs it where TRITON_INTERPRET=1 is set before Triton is imported.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import tileweave as tw
from tests.triton.interleaved import interleave
from tests.triton.interpreted import given
from tileweave.codegen.gpu.heaps import LocalHeap
from tileweave.codegen.gpu.kernel import load
from tileweave.moe.cases import cases as moe_cases
from tileweave.moe.cases import layer_case, routed_case

NOTHING = routed_case([np.full((3, 2), -1), np.zeros((0, 2), np.int64)])
CASES = [*moe_cases(2), NOTHING, layer_case(3)]


@pytest.fixture(autouse=True)
def _turns() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        interleave(patch)
        yield


def on_c(case: tw.Case, arguments: list[list[Any]]) -> None:
    """Twice on the C engine, in place."""
    compiled = tw.compile(case.kernel, *case.specs, world_size=case.world_size, config=case.config)

    def rank_main(group: tw.Group) -> None:
        for _ in range(2):
            named = dict(zip((m.name for m in compiled.program.arguments), arguments[group.rank], strict=True))
            compiled.load(group).launch(compiled.bind(named))

    with tw.VirtualGroup(case.world_size) as ranks:
        ranks.run(rank_main)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{c.kernel.name}-{c.world_size}" for c in CASES])
def test_values(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[number]
    config = replace(case.config, workers=2, comm_workers=number % 2, queue=("static", "dynamic")[number // 2 % 2])
    compiled = tw.compile(case.kernel, *case.specs, world_size=case.world_size, backend="triton", config=config)
    arguments = [given(case, compiled, rank) for rank in range(case.world_size)]
    want, got = copy.deepcopy(arguments), copy.deepcopy(arguments)
    on_c(case, want)
    kernel = load(compiled, LocalHeap(case.world_size, "cpu"))
    names = [memory.name for memory in compiled.program.arguments]
    monkeypatch.setattr(tw.CompiledKernel, "named", lambda self, args: dict(zip(names, args, strict=True)))
    for _ in range(2):
        kernel.launch(*got)
    kernel.check()
    for rank in range(case.world_size):
        for name, expected, found in zip(names, want[rank], got[rank], strict=True):
            if name in compiled.written:
                exact = expected.float().numpy()
                error = np.abs(found.float().numpy() - exact).max(initial=0.0)
                assert error <= 5e-6 * np.abs(exact).max(initial=0.0), name
            else:
                assert torch.equal(found, expected), name
