"""A companion kernel in CUDA C++ compiled by nvcc and linked with NVSHMEM's device library."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
from pathlib import Path

from tileweave import knobs
from tileweave.codegen.cuda.companion import emit_companion
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
    nvshmem, nvcc, nvlink = nvshmem_folder(), _tool("nvcc"), _tool("nvlink")
    header = (INCLUDE_DIR / "tw_companion.cuh").read_text()
    digest = hashlib.sha256("\0".join([text, header, arch, str(nvshmem), nvcc]).encode()).hexdigest()[:12]
    source = knobs.cache_dir.get() / f"{lowered.program.name}_companion_{digest}.cu"
    linked = source.with_suffix(".cubin")
    if linked.exists():
        return linked.read_bytes()
    source.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(source, text)
    relocatable = source.with_suffix(".o.cubin")
    # Relocatable device code would ruin a megakernel's matrix instructions; this kernel has none.
    flags = ["-std=c++17", "-O3", "-rdc=true", "-cubin", "-lineinfo"]
    _run([nvcc, f"-arch={arch}", *flags, f"-I{INCLUDE_DIR}", f"-I{nvshmem / 'include'}", str(source),
          "-o", str(relocatable)])  # fmt: skip
    library = nvshmem / "lib" / "libnvshmem_device.a"
    _run([nvlink, f"-arch={arch}", str(relocatable), str(library), "-o", str(linked)])
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


def _tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise BuildError(f"{name} is not on the PATH; install the CUDA toolkit, 13.0 or later")
    return path


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        raise BuildError(f"{Path(command[0]).name} failed (exit code {done.returncode}): {done.stderr.strip()[:2000]}")
