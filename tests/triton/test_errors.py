"""What a user of the Triton backend is told when something is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tileweave as tw
from tileweave.codegen.triton.build import build
from tileweave.compiler.config import GpuConfig

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]

KERNEL = """
import numpy as np, tileweave as tw

@tw.kernel
def lonely(x: tw.Tensor) -> None:
    ready = tw.signals("ready", (4,))

    @tw.task(grid={"i": 2})
    def waits(i: tw.Expr) -> None:
        tw.wait(ready, i + 1, 3)
        tw.store(x, i, tw.load(x, i) * 2.0)

kernel = tw.compile(lonely, tw.Tensor((2,)), backend="triton", config=tw.Config(workers=WORKERS))
kernel(np.ones(2, np.float32))
"""


def error_of(script: str, tmp_path: Path, **environ: str) -> str:
    path = tmp_path / "script.py"
    path.write_text(script)
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    return done.stderr


def test_a_hang_names_who_waits_for_what(tmp_path: Path) -> None:
    text = error_of(KERNEL.replace("WORKERS", "1"), tmp_path, TRITON_INTERPRET="1", TILEWEAVE_TIMEOUT_S="0.05")
    assert text.rstrip().endswith(
        "tileweave.errors.HangError: kernel 'lonely' stopped: rank 0 waited longer than 0.05 s (TILEWEAVE_TIMEOUT_S)\n"
        "  rank 0 worker 0: waits[i=0] at script.py:10 waits for ready[1]: expected 3, observed 0"
    )


def test_the_interpreter_must_be_asked_for(tmp_path: Path) -> None:
    text = error_of(KERNEL.replace("WORKERS", "1"), tmp_path, TRITON_INTERPRET="0")
    assert text.rstrip().endswith(
        "tileweave.errors.BuildError: Triton code runs on CPU ranks only in Triton's interpreter, which must be chosen "
        "before Triton is imported; set TRITON_INTERPRET=1 in the environment, or use backend='c'"
    )


def test_the_interpreter_has_one_worker(tmp_path: Path) -> None:
    text = error_of(KERNEL.replace("WORKERS", "3"), tmp_path, TRITON_INTERPRET="1")
    assert text.rstrip().endswith(
        "tileweave.errors.ConfigError: Triton's interpreter runs the 3 workers of a launch one after the other, so "
        "that one may wait for ever for the next; use Config(workers=1) and one process a rank"
    )


def test_unknown_backends_and_architectures() -> None:
    @tw.kernel
    def double(x: tw.Tensor) -> None:
        @tw.task(grid={})
        def body() -> None:
            tw.store(x, tw.ds(0, 4), tw.load(x, tw.ds(0, 4)) * 2.0)

    with pytest.raises(tw.errors.ConfigError, match="backend 'cuda' is unknown; use one of c, triton"):
        tw.compile(double, tw.Tensor((4,)), backend="cuda")  # type: ignore[arg-type]
    kernel = tw.compile(double, tw.Tensor((4,)))
    with pytest.raises(tw.errors.ConfigError, match="arch='sm_1': expected one of sm_90, sm_100"):
        build(kernel.lowered, GpuConfig(), "sm_1")
    text = r"kernel 'product' needs [\d,]+ bytes of shared memory, but a worker can have 232,448; use smaller"
    with pytest.raises(tw.errors.BuildError, match=text):
        build(huge(128).lowered, GpuConfig(stages=4), "sm_90")
    with pytest.raises(tw.errors.CompileError, match=r"a product of tiles \[256, 512\] by \[512, 256\] takes 524,288"):
        build(huge(512).lowered, GpuConfig(), "sm_90")


def huge(depth: int) -> tw.CompiledKernel:
    """A product whose operands exceed shared memory, one pair alone from a depth of 512 on."""

    @tw.kernel
    def product(x: tw.Tensor, out: tw.Tensor) -> None:
        @tw.task(grid={})
        def body() -> None:
            total = tw.zeros((256, 256))
            for k in tw.range(0, 1024, depth):
                inner = tw.ds(k, depth)
                left = tw.load(x, (tw.ds(0, 256), inner))
                tw.dot(left, tw.load(x, (tw.ds(0, 256), inner)).T, total)
            tw.store(out, (tw.ds(0, 256), tw.ds(0, 256)), total)

    return tw.compile(product, tw.Tensor((256, 1024), "bfloat16"), tw.Tensor((256, 256)))


@pytest.mark.parametrize("field", [{"warps": 3}, {"stages": 0}, {"loads": "smoke"}, {"registers": 8}])
def test_gpu_config_is_checked(field: dict[str, object]) -> None:
    (name, value), *_ = field.items()
    with pytest.raises(tw.errors.ConfigError, match=rf"GpuConfig\.{name}={value!r}: expected"):
        GpuConfig(**field)  # type: ignore[arg-type]


def test_triton_ranks_are_processes() -> None:
    @tw.kernel
    def double(x: tw.Tensor) -> None:
        @tw.task(grid={})
        def body() -> None:
            tw.store(x, tw.ds(0, 4), tw.load(x, tw.ds(0, 4)) * 2.0)

    kernel = tw.compile(double, tw.Tensor((4,)), world_size=2, backend="triton")
    with tw.VirtualGroup(2) as ranks, pytest.raises(tw.errors.ConfigError, match="start ranks as processes"):
        ranks.run(lambda group: kernel.run((np.ones(4, np.float32),), group))
