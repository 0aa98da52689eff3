"""Emitted Triton compiled for an architecture, with or without a GPU at hand."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

from tileweave.codegen.lower import Lowered
from tileweave.codegen.report import KernelReport, SourceLines, report_of_cubin
from tileweave.codegen.triton.source import load_kernel, write_source
from tileweave.compiler.config import GpuConfig
from tileweave.errors import BuildError, ConfigError

ARCHITECTURES = ("sm_90", "sm_100")
MAX_SHARED_BYTES = 227 * 1024  # of one worker on either architecture
# How the megakernel's parameters are passed; in the order of the emitted signature.
SIGNATURE = {
    "memory": "*i64", "dims": "*i64", "heap": "*i64", "queue": "*i32", "counts": "*i32", "cursor": "*i32",
    "state": "*i64", "first_rank": "i32", "capacity": "i32", "limit": "i64", "zero": "i32",
}  # fmt: skip


@dataclass(frozen=True)
class Binary:
    """A megakernel compiled by Triton: `ptx` text, `cubin` bytes, shared memory of a worker in bytes."""

    name: str
    arch: str
    ptx: str
    cubin: bytes
    shared_bytes: int
    lines: SourceLines

    def report(self) -> KernelReport:
        """Registers, spills and instructions, for all and for each task.

        Raises:
            BuildError: no disassembler.
        """
        return replace(report_of_cubin(self.cubin, self.name, self.lines), shared_bytes=self.shared_bytes)


def build(lowered: Lowered, gpu: GpuConfig, arch: str) -> Binary:
    """Compile for `arch`, "sm_90" or "sm_100". Takes 1 to 4 s; Triton caches the result.

    Raises:
        ConfigError: the architecture is unknown.
        BuildError: Triton is missing, runs as an interpreter, or refuses the kernel.
    """
    if arch not in ARCHITECTURES:
        raise ConfigError(f"arch={arch!r}: expected one of {', '.join(ARCHITECTURES)}")
    kernel = load_kernel(lowered, gpu)
    import triton
    from triton.backends.compiler import GPUTarget

    if triton.knobs.runtime.interpret:
        raise BuildError("Triton compiles nothing while it interprets; unset TRITON_INTERPRET and start again")
    source = triton.compiler.ASTSource(kernel, {name: SIGNATURE[name] for name in kernel.arg_names}, {}, {})
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about defaults of the next Triton
            compiled = triton.compile(source, target=target, options=compile_options(gpu))
    except Exception as error:
        raise BuildError(f"Triton refused kernel '{lowered.program.name}' for {arch}: {_first_line(error)}") from error
    shared_bytes = compiled.metadata.shared
    if shared_bytes > MAX_SHARED_BYTES:
        raise BuildError(
            f"kernel '{lowered.program.name}' needs {shared_bytes:,} bytes of shared memory, but a worker on {arch} "
            f"can have {MAX_SHARED_BYTES:,}; use smaller tiles or fewer stages"
        )
    return Binary(
        lowered.program.name, arch, compiled.asm["ptx"], compiled.asm["cubin"], shared_bytes,
        _source_lines(lowered, write_source(lowered, gpu)),
    )  # fmt: skip


def _source_lines(lowered: Lowered, path: Path) -> SourceLines:
    """Where each task's function stands in the emitted module: from its `def` to the line before the next."""
    rows = path.read_text().splitlines()
    starts = {name: number for number, row in enumerate(rows, 1) if (name := _defined(row)) is not None}
    ends = {
        number: min((n for n in starts.values() if n > number), default=len(rows) + 1) - 1 for number in starts.values()
    }
    tasks = {t.task.name: starts[f"run_{t.task.name}"] for t in lowered.tasks}
    return SourceLines(path.name, {name: (first, ends[first]) for name, first in tasks.items()})


def _defined(row: str) -> str | None:
    found = re.match(r"def (\w+)\(", row)
    return None if found is None else found.group(1)


def compile_options(gpu: GpuConfig) -> dict[str, int]:
    """Triton's options for one compilation or launch."""
    options = {"num_warps": gpu.warps, "num_stages": gpu.stages}
    return options if gpu.registers is None else {**options, "maxnreg": gpu.registers}


def _first_line(error: Exception) -> str:
    text = re.sub(r"\s+", " ", str(error)).strip()
    return text if len(text) < 400 else text[:400] + " …"
