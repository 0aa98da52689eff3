"""A companion kernel in CUDA C++ compiled by nvcc and linked with NVSHMEM's device library."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from tileweave import knobs
from tileweave.codegen.cuda.companion import emit_companion
from tileweave.codegen.cuda.nvcc import compile_cuda, find_tool, run_tool
from tileweave.codegen.lower import Lowered
from tileweave.errors import BuildError, ConfigError
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
    nvshmem, nvcc, nvlink = nvshmem_folder(), find_tool("nvcc"), find_tool("nvlink")
    header = (INCLUDE_DIR / "tw_companion.cuh").read_text()
    digest = hashlib.sha256("\0".join([text, header, arch, str(nvshmem), nvcc]).encode()).hexdigest()[:12]
    source = knobs.cache_dir.get() / f"{lowered.program.name}_companion_{digest}.cu"
    linked = source.with_suffix(".cubin")
    if linked.exists():
        return linked.read_bytes()
    source.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(source, text)
    # Relocatable device code would ruin a megakernel's matrix instructions; this kernel has none.
    includes = [INCLUDE_DIR, nvshmem / "include"]
    relocatable = source.with_suffix(".o.cubin")
    relocatable.write_bytes(compile_cuda(source, arch, includes, ["-rdc=true"]).cubin)
    library = nvshmem / "lib" / "libnvshmem_device.a"
    run_tool([nvlink, f"-arch={arch}", str(relocatable), str(library), "-o", str(linked)])
    return linked.read_bytes()


def nvshmem_folder() -> Path:
    """Where NVSHMEM's headers and device library are.

    Raises:
        BuildError: it is not installed.
    """
    try:
        found = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:
        found = None
    folders = [] if found is None else [Path(each) for each in found.submodule_search_locations or ()]
    for folder in folders:
        if (folder / "lib" / "libnvshmem_device.a").is_file():
            return folder
    raise BuildError("sends between nodes need NVSHMEM's device library; run: pip install 'nvidia-nvshmem-cu13>=3.8'")
