"""Emitted TileLang compiled: to a library for CPU ranks."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tileweave import native
from tileweave.codegen.lower import Lowered
from tileweave.codegen.tilelang.source import load_module, write_source
from tileweave.codegen.tilelang.target import Target, require_tilelang
from tileweave.compiler.config import GpuConfig
from tileweave.errors import BuildError

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


def lower_kernel(lowered: Lowered, target: Target, gpu: GpuConfig = GpuConfig()) -> str:
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

    made = tvm.target.Target(_TARGETS[target])
    try:
        kernel = getattr(load_module(path), name)
        with tvm.transform.PassContext(opt_level=3, config=dict(PASSES)), made:
            # Memory that peers write must not be taken for constant.
            return str(tilelang.lower(kernel, target=made).kernel_source).replace("__restrict__ ", "")
    except Exception as error:
        raise BuildError(f"TileLang refused kernel '{name}': {_last_line(error)}; its source is {path}") from error


def parameters_of(source: str, function: str) -> tuple[str, ...]:
    """Names of the parameters of a function in the order that TileLang gave them."""
    found = re.search(rf"\b{re.escape(function)}\(([^)]*)\)", source)
    if found is None:
        raise BuildError(f"TileLang's output holds no function {function!r}")
    return tuple(part.split()[-1].lstrip("*") for part in found.group(1).split(","))


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1][:400]
