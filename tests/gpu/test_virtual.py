"""Virtual ranks of one device in one launch, all their workers at work at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("script", ["virtual.py"])
def test_in_the_interpreter(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", f"tests/gpu/{script}"],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]


def test_ranks_that_are_processes(tmp_path: Path) -> None:
    """Counts go through torch.distributed, rows through memory that all processes map."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.process_ranks", str(tmp_path / "store")],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    errors = [float(word) for word in done.stdout.split()]
    assert len(errors) == 2
    assert max(errors) < 5e-6
