"""Every shipped kernel and example, as Triton text run by Triton's interpreter, against the C engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
KERNELS = {
    "moe_layer",
    "dispatch_gemm",
    "gemm_combine",
    "linear_norm",
    "ring",
    "all_gather_gemm",
    "gemm_reduce_scatter",
    "gpt_oss_experts",
}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_values(world_size: int) -> None:
    """Within fp32 rounding of the C engine: sums differ in order only."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton.interpreted", str(world_size)],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    # Example 01 is a kernel of one rank.
    assert {name for name, *_ in rows} == KERNELS - ({"linear_norm"} if world_size > 1 else set())
    assert {rank for _, rank, *_ in rows} == set(range(world_size))
    for name, rank, argument, error in rows:
        assert error < 5e-6, f"{name} on rank {rank}: {argument} differs by {error}"


def test_random_kernels_and_known_results() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/triton/single_rank.py"],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
