"""Emitted TileLang compiled: to a library for CPU ranks, or to machine code of a GPU."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from tileweave import knobs, native
from tileweave.codegen.cuda.nvcc import compile_cuda
from tileweave.codegen.lower import Lowered
from tileweave.codegen.report import KernelReport, SourceLines, check_shared_memory, report_of_cubin
from tileweave.codegen.tilelang.emit import DEFAULT_GPU, pipeline_of
from tileweave.codegen.tilelang.source import load_module, write_source
from tileweave.codegen.tilelang.specialised import FEEDERS
from tileweave.codegen.tilelang.target import Target, require_tilelang
from tileweave.compiler.config import GpuConfig
from tileweave.errors import BuildError, ConfigError
from tileweave.native import write_atomically

# TileLang's guards against accesses out of bounds also skip calls of device functions, signals included; the emitted
# text has conditions of its own. Without `noalias` memory that peers write is not taken to be constant.
PASSES: Mapping[str, Any] = {
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_out_of_bound_warning": True,
    "tirx.noalias": False,
    # Feeders and consumers are told apart by hand, and meet where the emitted text says so.
    "tl.disable_warp_specialized": True,
    "tl.disable_thread_storage_sync": True,
}
_TARGETS: Mapping[Target, Any] = {"c": "c", "cuda": {"kind": "cuda", "arch": "sm_90a"}}
_C_FLAGS = (*native.DEFAULT_FLAGS, "-w", "-lm")
_INCLUDES = re.compile(r"^#include <tl_templates.*$", re.MULTILINE)
_ADDRESS = re.compile(r"\(\*\(void\* \*\)\(&\((\w+)\)\)\)")
_OURS = "TW_CONSUMERS"
_MARK = re.compile(r"^ *tw_task\((-?\d+)\);$")
_LOSS = "Potential Performance Loss"  # matrix instructions one after the other, or registers not moved between roles
_STATIC_BYTES = 1024  # barriers and the like
_lowering = threading.Lock()


@dataclass(frozen=True)
class CpuLibrary:
    """A kernel as a shared library: `function` takes the parameters named `parameters` in this order."""

    path: Path
    function: str
    parameters: tuple[str, ...]


def build_for_cpu(lowered: Lowered) -> CpuLibrary:
    """Lower for target `c` and compile with the machine's C compiler, or find the library in the cache.

    Raises:
        BuildError: no TileLang or no compiler, or one of them refuses the kernel.
        CompileError: the target has no text for the kernel.
    """
    source = lower_kernel(lowered, "c")
    text = _INCLUDES.sub("#include <stdbool.h>", source)
    path = native.build(text, f"{lowered.program.name}_tilelang", flags=_C_FLAGS)
    function = f"{lowered.program.name}_kernel"
    return CpuLibrary(path, function, parameters_of(source, function))


@dataclass(frozen=True)
class GpuBinary:
    """A kernel as CUDA text and compiled by nvcc: `ptx` text, `cubin` bytes.

    ring_bytes of shared memory and warps are those of a worker.
    """

    name: str
    cuda: str
    ptx: str
    cubin: bytes
    ring_bytes: int
    warps: int
    lines: SourceLines

    def report(self) -> KernelReport:
        """Registers, spills and instructions, for all and for each task.

        Raises:
            BuildError: no disassembler.
        """
        found = report_of_cubin(self.cubin, f"{self.name}_kernel", self.lines)
        return replace(found, name=self.name, shared_bytes=found.shared_bytes + self.ring_bytes)


def build_for_gpu(lowered: Lowered, gpu: GpuConfig, arch: str) -> GpuBinary:
    """Lower for target `cuda` and compile with nvcc, which takes about 10 s, or find both in the cache.

    Raises:
        ConfigError: an architecture or a number of warps that this backend has no text for.
        BuildError: no TileLang or no nvcc, or one of them refuses the kernel; or it does not fit an SM.
        CompileError: the target has no text for the kernel.
    """
    name = lowered.program.name
    if arch != "sm_90":
        raise ConfigError(f"arch={arch!r}: TileLang code is for sm_90; use the Triton backend")
    ring_bytes = pipeline_of(lowered, gpu).ring_bytes
    check_shared_memory(name, ring_bytes + _STATIC_BYTES)
    text = lower_kernel(lowered, "cuda", gpu)
    import tilelang

    root = Path(tilelang.__file__).parent
    path = knobs.cache_dir.get() / f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}.cu"
    cubin, ptx = path.with_suffix(".cubin"), path.with_suffix(".ptx")
    if not (cubin.exists() and ptx.exists()):
        write_atomically(path, text)
        compiled = compile_cuda(path, "sm_90a", [root / "src", root / "3rdparty" / "cutlass" / "include"], ["-w"])
        _refuse_losses(name, compiled.log, path)
        write_atomically(ptx, compiled.ptx)
        write_atomically(cubin, compiled.cubin)
    lines = _source_lines(lowered, text, path.name)
    return GpuBinary(name, text, ptx.read_text(), cubin.read_bytes(), ring_bytes, gpu.warps + FEEDERS // 32, lines)


def _refuse_losses(name: str, log: str, path: Path) -> None:
    """What the assembler says that the kernel's form costs is taken for an error."""
    for line in log.splitlines():
        if _LOSS in line:
            raise BuildError(f"kernel '{name}' lost its speed: {line.strip()}; its text is {path}")


def _source_lines(lowered: Lowered, text: str, file: str) -> SourceLines:
    """The lines between the marks of each task: the feeders' and the consumers' part of it."""
    spans: dict[str, list[range]] = {task.task.name: [] for task in lowered.tasks}
    name_of = {task.number: task.task.name for task in lowered.tasks}
    begun = 0, -1
    for number, line in enumerate(text.splitlines(), 1):
        mark = _MARK.match(line)
        if mark is not None and int(mark.group(1)) >= 0:
            begun = number, int(mark.group(1))
        elif mark is not None:
            spans[name_of[begun[1]]].append(range(begun[0], number))
    return SourceLines(file, spans)


def lower_kernel(lowered: Lowered, target: Target, gpu: GpuConfig = DEFAULT_GPU) -> str:
    """TileLang's C or CUDA text of the kernel.

    Raises:
        BuildError: TileLang is missing, or refuses the kernel.
        CompileError: the target has no text for the kernel.
    """
    require_tilelang()
    path = write_source(lowered, target, gpu)
    with _lowering:  # ranks that are threads ask for one kernel at a time, and the first one's answer serves all
        return _lower(path, lowered.program.name, target)


@lru_cache(maxsize=16)
def _lower(path: Path, name: str, target: Target) -> str:
    import tilelang
    from tilelang import tvm

    _rewrite_cuda()
    made = tvm.target.Target(_TARGETS[target])
    try:
        kernel = getattr(load_module(path), name)
        with tvm.transform.PassContext(opt_level=3, config=dict(PASSES)), made:
            return str(tilelang.lower(kernel, target=made).kernel_source)
    except Exception as error:
        raise BuildError(f"TileLang refused kernel '{name}': {_last_line(error)}; its source is {path}") from error


def load_for_gpu(lowered: Lowered, gpu: GpuConfig) -> tuple[Callable[..., None], tuple[str, ...]]:
    """The kernel as a function of torch tensors on a GPU, and the names of its parameters. Needs no GPU to be made.

    Raises:
        BuildError: no TileLang or no nvcc, or one of them refuses the kernel.
        CompileError: the target has no text for the kernel.
    """
    require_tilelang()
    name, path = lowered.program.name, write_source(lowered, "cuda", gpu)
    with _lowering:
        import tilelang

        _rewrite_cuda()
        try:
            kernel = getattr(load_module(path), name)
            compiled = tilelang.compile(
                kernel, target=_TARGETS["cuda"], execution_backend="tvm_ffi", pass_configs=dict(PASSES)
            )
        except Exception as error:
            raise BuildError(f"TileLang refused kernel '{name}': {_last_line(error)}; its source is {path}") from error
    return compiled, tuple(str(each.name).removesuffix("_handle") for each in kernel.params)


@lru_cache(maxsize=1)
def _rewrite_cuda() -> None:
    """Have TileLang pass the CUDA text of our kernels, and of no others, through `_of_global_memory`."""
    import tvm_ffi
    from tilelang.engine.callback import register_cuda_postproc

    before = tvm_ffi.get_global_func("tilelang_callback_cuda_postproc", allow_missing=True)

    def rewrite(code: str, target: Any) -> str:
        code = code if before is None else before(code, target)
        return _of_global_memory(code) if _OURS in code else code

    register_cuda_postproc(rewrite)


def _of_global_memory(source: str) -> str:
    """The text, told that memory which peers write is not constant, and that addresses are of global memory."""
    return _ADDRESS.sub(r"__cvta_global_to_generic(\1)", source.replace("__restrict__ ", ""))


def parameters_of(source: str, function: str) -> tuple[str, ...]:
    """Names of the parameters of a function in the order that TileLang gave them."""
    found = re.search(rf"\b{re.escape(function)}\(([^)]*)\)", source)
    if found is None:
        raise BuildError(f"TileLang's output holds no function {function!r}")
    return tuple(part.split()[-1].lstrip("*") for part in found.group(1).split(","))


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1][:400]
