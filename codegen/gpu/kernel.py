"""A compiled kernel loaded on GPUs: for virtual ranks on one, or in each of several processes with one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch

from tileweave import knobs
from tileweave.codegen.compiled import CompiledKernel
from tileweave.codegen.gpu.heaps import GpuHeap
from tileweave.codegen.gpu.queued import QueuedKernel, Ranks
from tileweave.codegen.lower import Lowered
from tileweave.codegen.tilelang.launch import TileLangKernel
from tileweave.codegen.triton.engine import TritonKernel
from tileweave.compiler.config import GpuConfig
from tileweave.errors import ArgumentError, ConfigError, DeviceError, GroupError

logger = logging.getLogger("tileweave")


_KERNELS: Mapping[str, Callable[[Lowered, Ranks, GpuConfig, int | None], QueuedKernel]] = {
    "triton": TritonKernel,
    "tilelang": TileLangKernel,
}


class GpuKernel:
    """A kernel with its memory on the ranks of a heap. Launches are asynchronous, and a CUDA graph can capture them.

    Example, two ranks on one GPU:

        heap = tw.gpu.LocalHeap(world_size=2)
        kernel = tw.gpu.load(tw.compile(exchange, spec, world_size=2, backend="triton"), heap)
        kernel.launch((x0,), (x1,))
        kernel.check()
    """

    def __init__(self, compiled: CompiledKernel, heap: GpuHeap, room: int | None = None) -> None:
        """As `load`."""
        if compiled.backend not in _KERNELS:
            raise ConfigError(
                f"kernel '{compiled.program.name}' is compiled with backend={compiled.backend!r}, which has no launch "
                f"on a GPU; compile it with backend={' or '.join(map(repr, _KERNELS))}"
            )
        if compiled.program.world_size != heap.world_size:
            raise GroupError(
                f"kernel '{compiled.program.name}' was compiled for world_size={compiled.program.world_size}, but this "
                f"heap has {heap.world_size} ranks; compile it with world_size={heap.world_size}"
            )
        self.compiled, self.heap = compiled, heap
        lowered = compiled.lowered
        logger.info("symmetric memory of %s:\n%s", compiled.program.name, compiled.memory())
        self._symmetric = heap.allocate(f"{compiled.program.name} {compiled.key.digest:016x}", lowered.gpu_bytes)
        check_reachable(self._symmetric.addresses)
        ranks = Ranks(heap.first, heap.count, self._symmetric.addresses, heap.device, self._symmetric.parts)
        self._kernel = _KERNELS[compiled.backend](lowered, ranks, compiled.config.gpu, room)

    def launch(self, *arguments: Sequence[object]) -> None:
        """Enqueue one launch on the current stream: for each rank of this process, what a call of the kernel takes.

        All ranks' processes must launch the same kernels in the same order. With TILEWEAVE_DEBUG=1 waits for the
        launch and checks it.

        Raises:
            ArgumentError: the arguments of a rank do not fit, by dtype, shape, device, layout or alignment.
            ConfigError: a graph is being captured before the first launch.
        """
        if len(arguments) != self.heap.count:
            raise ArgumentError(
                f"kernel '{self.compiled.program.name}' runs {self.heap.count} ranks in this process, but got "
                f"arguments of {len(arguments)}; pass one sequence of arguments for each rank"
            )
        self.launch_named(*(self.compiled.named(tuple(given)) for given in arguments))

    def launch_named(self, *arguments: Mapping[str, torch.Tensor]) -> None:
        """As `launch`, with the arguments of each rank by dotted name, in the order of `program.arguments`."""
        device = str(self.heap.device)
        bound = [self.compiled.bind(given, device=device) for given in arguments]
        names = self.compiled.program.dims
        dims = [dict(zip(names, launch.dims, strict=True)) for launch in bound]
        self._kernel.launch([dict(launch.arrays) for launch in bound], dims, knobs.timeout_s.get())
        if knobs.debug.get():
            self.check()

    def check(self) -> None:
        """Wait for all launches so far, and raise what went wrong in them. Not for use inside a graph.

        Raises:
            HangError: a wait gave up; with who waited for what.
            LaunchError: a launch had more tiles than there was room for.
        """
        self._kernel.check(knobs.timeout_s.get())


def load(compiled: CompiledKernel, heap: GpuHeap, room: int | None = None) -> GpuKernel:
    """Load `compiled`, made with backend="triton" or "tilelang", on the ranks of `heap`; collective. Takes seconds.

    Args:
        compiled: the kernel.
        heap: where its symmetric memory comes from; it says which ranks this process runs, and on which device.
        room: tiles of a rank's lane that a launch can have, see `QueuedKernel`.

    Raises:
        ConfigError: another backend, or more workers than the GPU holds at once.
        GroupError: the heap has another number of ranks, the ranks load different kernels, or memory is short.
        BuildError: the backend's compiler is missing, or refuses the kernel.
        DeviceError: a rank cannot address another's memory.
    """
    return GpuKernel(compiled, heap, room)


def check_reachable(addresses: Sequence[int]) -> None:
    """Refuse peers whose memory this device cannot address.

    Raises:
        DeviceError: an address is 0.
    """
    far = [str(rank) for rank, address in enumerate(addresses) if address == 0]
    if far:
        raise DeviceError(
            f"the memory of rank {', '.join(far)} is not mapped here, as on another node; run ranks on one NVLink "
            "domain, which is what this version launches on GPUs"
        )
