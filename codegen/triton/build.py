"""Emitted Triton compiled for an architecture, with or without a GPU at hand."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tileweave.codegen.lower import Lowered, LoweredTask
from tileweave.codegen.nvshmem import nvshmem_file
from tileweave.codegen.report import MAX_SHARED_BYTES, KernelReport, SourceLines, check_shared_memory, report_of_cubin
from tileweave.codegen.triton.persistent import companion_name
from tileweave.codegen.triton.shapes import block_shapes
from tileweave.codegen.triton.source import load_kernel, write_source
from tileweave.compiler.config import GpuConfig
from tileweave.errors import BuildError, CompileError, ConfigError
from tileweave.primitives.ops import Dot, walk

ARCHITECTURES = ("sm_90", "sm_100")
COMPANION_WARPS = 8
# How the parameters of both kernels are passed; in the order of the emitted signature.
SIGNATURE = {
    "memory": "*i64", "dims": "*i64", "heap": "*i64", "queue": "*i32", "counts": "*i32", "cursor": "*i32",
    "state": "*i64", "first_rank": "i32", "capacity": "i32", "limit": "i64", "zero": "i32",
}  # fmt: skip


@dataclass(frozen=True)
class Binary:
    """A kernel compiled by Triton: `ptx` text, `cubin` bytes, shared bytes and warps of a worker."""

    name: str
    arch: str
    ptx: str
    cubin: bytes
    shared_bytes: int
    warps: int
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
    kernel = _Kernel(lowered.program.name, lowered.tasks, "run")
    return _compile(lowered, gpu, arch, kernel, compile_options(gpu))


def build_companion(lowered: Lowered, gpu: GpuConfig, arch: str) -> Binary:
    """Compile the companion kernel of `lowered` for `arch` and link it with NVSHMEM. Takes about 20 s.

    Raises:
        ConfigError: the architecture is unknown, or the kernel has no companion.
        BuildError: Triton or NVSHMEM is missing, or Triton runs as an interpreter or refuses the kernel.
    """
    if lowered.companion is None:
        name, topology = lowered.program.name, lowered.schedule.topology
        raise ConfigError(f"kernel '{name}' has no companion: nothing leaves a node of topology '{topology.name}'")
    libraries = {"libnvshmem_device": str(nvshmem_file(f"libnvshmem_device_{arch}.bc"))}
    options = {"num_warps": COMPANION_WARPS, "extern_libs": libraries}
    kernel = _Kernel(companion_name(lowered), lowered.companion.tasks, "send")
    return _compile(lowered, gpu, arch, kernel, options)


@dataclass(frozen=True)
class _Kernel:
    """One kernel of an emitted module, its tasks, and how the names of their functions begin."""

    name: str
    tasks: Sequence[LoweredTask]
    verb: str

    @property
    def functions(self) -> Mapping[str, str]:
        """The function of each task."""
        return {task.task.name: f"{self.verb}_{task.task.name}" for task in self.tasks}


def _compile(lowered: Lowered, gpu: GpuConfig, arch: str, made: _Kernel, options: Mapping[str, Any]) -> Binary:
    name = made.name
    if arch not in ARCHITECTURES:
        raise ConfigError(f"arch={arch!r}: expected one of {', '.join(ARCHITECTURES)}")
    _check_operands(made.tasks)
    kernel = load_kernel(lowered, gpu, name)
    import triton
    from triton.backends.compiler import GPUTarget

    if triton.knobs.runtime.interpret:
        raise BuildError("Triton compiles nothing while it interprets; unset TRITON_INTERPRET and start again")
    path = write_source(lowered, gpu)
    source = triton.compiler.ASTSource(kernel, {each: SIGNATURE[each] for each in kernel.arg_names}, {}, {})
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    try:
        with warnings.catch_warnings(), triton.knobs.cache.scope():
            warnings.simplefilter("ignore", UserWarning)  # about defaults of the next Triton
            # A folder a module: Triton would find the same kernel of another module, whose line numbers differ.
            triton.knobs.cache.dir = str(path.with_suffix(""))
            compiled = triton.compile(source, target=target, options=dict(options))
    except Exception as error:
        raise BuildError(f"Triton refused kernel '{name}' for {arch}: {_first_line(error)}") from error
    shared_bytes = compiled.metadata.shared
    check_shared_memory(name, shared_bytes)
    lines = _source_lines(made.functions, path)
    return Binary(name, arch, compiled.asm["ptx"], compiled.asm["cubin"], shared_bytes, options["num_warps"], lines)


def _check_operands(tasks: Sequence[LoweredTask]) -> None:
    """Refuse products that cannot fit, which Triton would be at for many minutes.

    Raises:
        CompileError: the two sides of a product are larger than shared memory.
    """
    for task in (lowered.task for lowered in tasks):
        blocks = block_shapes(task)
        for op in (op for op in walk(task.body) if isinstance(op, Dot)):
            sides = [blocks.of[side.id] for side in (op.a, op.b)]
            sizes = [side.dtype.itemsize_bytes for side in (op.a, op.b)]
            needed = sum(math.prod(shape) * size for shape, size in zip(sides, sizes, strict=True))
            if needed > MAX_SHARED_BYTES:
                shapes = " by ".join(str(list(shape)) for shape in sides)
                raise CompileError(
                    f"task '{task.name}': a product of tiles {shapes} takes {needed:,} bytes of shared memory, but a "
                    f"worker on a GPU has {MAX_SHARED_BYTES:,}; use smaller tiles, such as a depth of 64",
                    op.location,
                )


def _source_lines(functions: Mapping[str, str], path: Path) -> SourceLines:
    """Where each task's function stands in the emitted module: from its `def` to the line before the next."""
    rows = path.read_text().splitlines()
    starts = {name: number for number, row in enumerate(rows, 1) if (name := _defined(row)) is not None}
    ends = {
        number: min((n for n in starts.values() if n > number), default=len(rows) + 1) - 1 for number in starts.values()
    }
    tasks = {task: starts[function] for task, function in functions.items()}
    return SourceLines(path.name, {task: (range(first, ends[first] + 1),) for task, first in tasks.items()})


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
