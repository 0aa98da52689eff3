"""A companion kernel in CUDA C++ compiled by nvcc and linked with NVSHMEM's device library."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tileweave import knobs
from tileweave.codegen.cuda.companion import emit_companion
from tileweave.codegen.cuda.nvcc import compile_cuda, find_tool, run_tool
from tileweave.codegen.lower import Lowered
from tileweave.codegen.nvshmem import nvshmem_file
from tileweave.errors import ConfigError
from tileweave.native import write_atomically

INCLUDE_DIR = Path(__file__).resolve().parent / "include"


def build_companion(lowered: Lowered, arch: str) -> bytes:
    """The companion kernel of `lowered` as a cubin for `arch`, such as "sm_90". Takes about 8 s, once per text.

    Raises:
        ConfigError: the kernel has no companion.
        CompileError: a task of the companion does more than move rows, wait and signal.
        BuildError: nvcc or NVSHMEM is missing, or nvcc refuses the kernel.
    """
    if lowered.companion is None:
        name, topology = lowered.program.name, lowered.schedule.topology
        raise ConfigError(f"kernel '{name}' has no companion: nothing leaves a node of topology '{topology.name}'")
    text = emit_companion(lowered, lowered.companion)
    library, nvcc, nvlink = nvshmem_file("libnvshmem_device.a"), find_tool("nvcc"), find_tool("nvlink")
    header = (INCLUDE_DIR / "tw_companion.cuh").read_text()
    digest = hashlib.sha256("\0".join([text, header, arch, str(library), nvcc]).encode()).hexdigest()[:12]
    source = knobs.cache_dir.get() / f"{lowered.program.name}_companion_{digest}.cu"
    linked = source.with_suffix(".cubin")
    if linked.exists():
        return linked.read_bytes()
    source.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(source, text)
    # Relocatable device code would ruin a megakernel's matrix instructions; this kernel has none.
    includes = [INCLUDE_DIR, library.parents[1] / "include"]
    relocatable = source.with_suffix(".o.cubin")
    relocatable.write_bytes(compile_cuda(source, arch, includes, ["-rdc=true"]).cubin)
    run_tool([nvlink, f"-arch={arch}", str(relocatable), str(library), "-o", str(linked)])
    return linked.read_bytes()
