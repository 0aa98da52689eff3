"""Kernels on GPUs: heaps that hold symmetric memory there, and `load`, which makes a compiled kernel ready on one."""

from tileweave.codegen.gpu.heaps import GpuAllocation, GpuHeap, LocalHeap, NvshmemHeap, TorchHeap
from tileweave.codegen.gpu.kernel import GpuKernel, load

__all__ = ["GpuAllocation", "GpuHeap", "GpuKernel", "LocalHeap", "NvshmemHeap", "TorchHeap", "load"]
