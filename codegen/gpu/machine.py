"""What of a machine for GPU kernels is here, and for each missing part the sentence that says so and what to do.

The same sentences are raised as errors and shown by `tileweave doctor`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tileweave.codegen.missing import MISSING
from tileweave.errors import DeviceError

ARCH_OF = {9: "sm_90", 10: "sm_100"}
"""Major compute capability → the architecture whose defaults and binaries it takes."""


@dataclass(frozen=True)
class Gpu:
    """One device: `arch` such as "sm_90", streaming multiprocessors, bytes of memory."""

    index: int
    name: str
    arch: str
    num_sms: int
    memory_bytes: int


@dataclass(frozen=True)
class Seen:
    """What torch knows of GPUs: its own version, that of CUDA it is built for (None: for CPUs), and each device's
    name and compute capability; `visible` is CUDA_VISIBLE_DEVICES, None if it is not set."""

    torch_version: str
    cuda_version: str | None
    devices: Sequence[tuple[str, tuple[int, int]]]
    visible: str | None = None

    @staticmethod
    def now() -> Seen:
        """As torch has it in this process."""
        count = torch.cuda.device_count() if torch.version.cuda else 0
        devices = [(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in range(count)]
        return Seen(torch.__version__, torch.version.cuda, devices, os.environ.get("CUDA_VISIBLE_DEVICES"))


@dataclass(frozen=True)
class Part:
    """One thing that GPU kernels need: what was found, or the sentence that says that it is missing."""

    name: str
    found: str | None
    missing: str


def gpu_problem(seen: Seen, index: int = 0) -> str | None:
    """Why device `index` cannot run kernels, in one sentence; None if it can."""
    instead = "or run on CPU ranks with backend='c'"
    if seen.cuda_version is None:
        return (
            f"a GPU is needed, but torch {seen.torch_version} is built without CUDA; install a CUDA build of torch on "
            f"a machine with an NVIDIA GPU, {instead}"
        )
    if not seen.devices:
        where = "" if seen.visible is None else f" with CUDA_VISIBLE_DEVICES={seen.visible!r}"
        return (
            f"a GPU is needed, but torch {seen.torch_version} sees none{where}; check that nvidia-smi lists one, "
            f"{instead}"
        )
    if not 0 <= index < len(seen.devices):
        return f"GPU {index} is asked for, but there are {len(seen.devices)}; use 0 to {len(seen.devices) - 1}"
    name, (major, minor) = seen.devices[index]
    if major not in ARCH_OF:
        return (
            f"GPU {index} ({name}) is of compute capability {major}.{minor}, but kernels are compiled for "
            f"{' and '.join(ARCH_OF.values())}; use such a GPU, {instead}"
        )
    return None


def require_gpu(index: int | None = None) -> Gpu:
    """Device `index`, by default the current one.

    Raises:
        DeviceError: there is none, or kernels cannot run on it.
    """
    seen = Seen.now()
    at = index if index is not None else torch.cuda.current_device() if seen.devices else 0
    problem = gpu_problem(seen, at)
    if problem is not None:
        raise DeviceError(problem)
    facts = torch.cuda.get_device_properties(at)
    return Gpu(at, facts.name, ARCH_OF[facts.major], facts.multi_processor_count, facts.total_memory)


def require_nvshmem() -> None:
    """Raise unless nvshmem4py can be imported.

    Raises:
        DeviceError: it cannot.
    """
    part = _nvshmem()
    if part.found is None:
        raise DeviceError(part.missing)


def gpu_parts() -> tuple[Part, ...]:
    """The GPU, the packages and the compiler, present or not."""
    seen = Seen.now()
    problem = gpu_problem(seen)
    names = ", ".join(f"{name} ({ARCH_OF.get(major, f'sm_{major}{minor}')})" for name, (major, minor) in seen.devices)
    return (
        Part("GPU", names if problem is None else None, problem or ""),
        _package("triton"),
        _package("tilelang"),
        _nvshmem(),
        _nvcc(),
    )


def _package(name: str) -> Part:
    return Part(name, _version(name) if importlib.util.find_spec(name) is not None else None, MISSING[name])


def _nvshmem() -> Part:
    found = None
    try:
        if importlib.util.find_spec("nvshmem.core") is not None:
            found = _version("nvshmem4py-cu13") or _version("nvshmem4py-cu12") or "unknown version"
    except ModuleNotFoundError:
        pass
    return Part("nvshmem4py", found, MISSING["nvshmem4py"])


def _nvcc() -> Part:
    path = shutil.which("nvcc")
    if path is None:
        return Part("nvcc", None, MISSING["nvcc"])
    run = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=30)
    version = re.search(r"release ([\d.]+)", run.stdout)
    return Part("nvcc", version.group(1) if version else path, MISSING["nvcc"])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """The NVIDIA driver's, None if nvidia-smi does not tell."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return run.stdout.splitlines()[0].strip() if run.returncode == 0 and run.stdout.strip() else None


def versions() -> Mapping[str, str | None]:
    """Of what a measurement on a GPU depends on."""
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": driver_version(),
        **{part.name: part.found for part in gpu_parts() if part.name != "GPU"},
    }
