"""Every example runs as a user would run it, and each of its cases passes the checks."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tileweave as tw

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9][0-9]_*.py"))
# What each must have printed: the point that it makes.
SAYS = {
    "01_first_kernel": ["sync gemm -> normalise", "largest error against NumPy in fp64"],
    "02_ring_exchange": [
        "waits for arrived[0] to reach 1, but the signals that can reach it add up to 0: it would wait forever",
        "waits for arrived[0] to reach 2, but the signals that can reach it add up to 1",
        "DeadlockError",
        "can hang under order 'sends_first': these tiles wait for each other in a circle",
    ],
    "03_all_gather_gemm": ["4 ranks with [133, 0, 117, 50] rows", "the same bits on 4 ranks"],
    "04_gemm_reduce_scatter": ["4 ranks", "the same bits on 4 ranks"],
    "05_own_moe_kernel": ["raw  gate_up -> down", "113 tokens on 2 ranks", "the same bits as on 1 rank"],
    "06_moe_layer": ["2 ranks from tw.spawn", "the same bits on 1 rank"],
}


def name_of(path: Path) -> str:
    return path.stem


def run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_each_example_says_something() -> None:
    assert [path.stem for path in EXAMPLES] == list(SAYS)


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_main(path: Path) -> None:
    printed = run([sys.executable, str(path.relative_to(ROOT))])
    for text in SAYS[path.stem]:
        assert text in printed, printed


def test_the_layer_under_torchrun() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert "2 ranks under torchrun" in run([*torchrun, "examples/06_moe_layer.py"])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_cases(path: Path, world_size: int) -> None:
    cases: Callable[[int], list[tw.Case]] = runpy.run_path(str(path))["cases"]
    for case in cases(world_size):
        compiled = case.compile()
        compiled.check(case.arguments)
        assert str(compiled.graph(case.arguments)).startswith(f"graph of {case.kernel.name}: ")
        assert f"rank {case.world_size - 1} worker 0" in str(compiled.schedule(case.arguments))


def test_examples_need_nothing_below_the_compiler() -> None:
    """A kernel of a user's own needs the DSL and the stages of `moe`, never the inside of the compiler."""
    for path in EXAMPLES:
        for line in path.read_text().splitlines():
            if line.startswith(("from tileweave.compiler", "from tileweave.codegen")):
                assert line == "from tileweave.compiler.order import ORDERS", f"{path.name}: {line}"
