"""The CUDA toolkit's compiler, as a function from text to machine code."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tileweave.codegen.missing import MISSING
from tileweave.errors import BuildError


@dataclass(frozen=True)
class Compiled:
    """`ptx` text and `cubin` bytes of one file, and what the assembler had to say."""

    ptx: str
    cubin: bytes
    log: str


def compile_cuda(source: Path, arch: str, include: Sequence[Path], flags: Sequence[str] = ()) -> Compiled:
    """Compile one file for `arch`, such as "sm_90a".

    Raises:
        BuildError: nvcc is missing, or refuses the file.
    """
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "out.cubin"
        log = run_tool(
            [
                find_tool("nvcc"), f"-arch={arch}", "-cubin", "-std=c++17", "-O3", "-lineinfo", "-Xptxas=-v",
                "-keep", f"-keep-dir={folder}", *flags, *(f"-I{each}" for each in include), str(source),
                "-o", str(cubin),
            ]
        )  # fmt: skip
        (ptx,) = Path(folder).glob("*.ptx")
        return Compiled(ptx.read_text(), cubin.read_bytes(), log)


def find_tool(name: str) -> str:
    """Path of `nvcc` or `nvlink`.

    Raises:
        BuildError: it is not there.
    """
    path = shutil.which(name)
    if path is None:
        raise BuildError(MISSING[name])
    return path


def run_tool(command: list[str]) -> str:
    """What a tool writes to its error stream.

    Raises:
        BuildError: it fails.
    """
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        raise BuildError(f"{Path(command[0]).name} failed (exit code {done.returncode}): {done.stderr.strip()[:2000]}")
    return done.stderr
