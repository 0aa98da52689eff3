"""A script: every shipped kernel in Triton's interpreter beside the C engine, on process ranks.

`python -m tests.triton.interpreted WORLD_SIZE` prints one line of JSON, a list of
`[kernel, rank, argument, error]` with the error relative to the largest magnitude.
TRITON_INTERPRET=1 must be in the environment.
"""

from __future__ import annotations

import copy
import json
import runpy
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tileweave as tw
from tileweave.moe.cases import cases as moe_cases
from tileweave.moe.cases import routed_case

ROOT = Path(__file__).resolve().parents[2]


def every_case(world_size: int) -> Iterator[tw.Case]:
    """The kernels of `moe/` on uneven, skewed and empty routings, and those of the examples."""
    yield from moe_cases(world_size)
    one_expert = [np.full((5, 2), 0) for _ in range(world_size)]
    nothing = [np.full((3, 2), -1)] * (world_size - 1) + [np.zeros((0, 2), np.int64)]
    for topk_idx in (one_expert, nothing):
        yield routed_case(topk_idx)
    for path in sorted((ROOT / "examples").glob("[0-9][0-9]_*.py")):
        yield from runpy.run_path(str(path))["cases"](world_size)


def given(case: tw.Case, compiled: tw.CompiledKernel, rank: int) -> list[Any]:
    """Arguments of one rank in order; where a case gives a shape alone, random numbers."""
    random = np.random.default_rng(rank)
    arrays = []
    for memory in compiled.program.arguments:
        array = case.arguments[rank][memory.name]
        if isinstance(array, tuple):
            array = random.standard_normal(array).astype(np.float32)
        tensor = torch.from_numpy(np.array(array))
        arrays.append(tensor.to(torch.bfloat16) if memory.dtype.name == "bfloat16" else tensor)
    return arrays


def compare(group: tw.Group, case: tw.Case, number: int) -> list[list[Any]]:
    """Launch on both engines: twice, so that the second launch meets the buffers of the first, but for many ranks."""
    launches = 2 if case.world_size < 4 else 1
    queue = ("static", "dynamic")[number % 2]
    config = replace(case.config, workers=1, comm_workers=0, queue=queue)
    worlds = {"world_size": case.world_size, "config": config}
    outputs = []
    for backend in ("c", "triton"):
        compiled = tw.compile(case.kernel, *case.specs, backend=backend, **worlds)
        arrays = given(case, compiled, group.rank)
        executable = compiled.load(group)
        for _ in range(launches):
            passed = dict(zip((m.name for m in compiled.program.arguments), copy.deepcopy(arrays), strict=True))
            executable.launch(compiled.bind(passed))
        outputs.append({name: array.float().numpy() for name, array in passed.items() if name in compiled.written})
    errors = []
    for name, want in outputs[0].items():
        scale = max(float(np.abs(want).max(initial=0.0)), 1e-30)
        error = float(np.abs(outputs[1][name] - want).max(initial=0.0))
        errors.append([case.kernel.name, group.rank, name, error / scale])
    return errors


def rank_main(group: tw.Group, world_size: int) -> list[list[Any]]:
    torch.set_num_threads(1)
    found = []
    for number, case in enumerate(every_case(world_size)):
        if case.world_size == world_size:
            found += compare(group, case, number)
    return found


if __name__ == "__main__":
    size = int(sys.argv[1])
    sys.stdout.write(json.dumps([row for rows in tw.spawn(rank_main, size, size) for row in rows]) + "\n")
