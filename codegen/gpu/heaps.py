"""Symmetric memory on GPUs: the same number of bytes for every rank, at an address that every rank's kernel can use.

The interface is that of the CPU heaps of `primitives/heap.py`: allocate, addresses of all ranks'
parts, close. Three homes: `LocalHeap`, slices of one GPU for ranks that share it; `TorchHeap`,
torch's symmetric memory, for processes with a GPU each that NVLink connects; `NvshmemHeap`,
nvshmem4py, for the same across nodes.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tileweave.codegen.gpu.machine import require_gpu, require_nvshmem
from tileweave.errors import DeviceError, GroupError

logger = logging.getLogger("tileweave")

PAGE = 4096


@dataclass(frozen=True, eq=False)
class GpuAllocation:
    """`nbytes` zeroed bytes for each rank under one name.

    `addresses[r]` is where kernels of this process see the part of rank r, 0 if they cannot.
    `parts` are those of the ranks `first`, `first + 1`, … of this process, uint8 `[nbytes]`.
    """

    name: str
    nbytes: int
    first: int
    addresses: tuple[int, ...]
    parts: tuple[torch.Tensor, ...] = field(repr=False)

    def peer_address(self, rank: int) -> int:
        """Address of rank `rank`'s part in this process."""
        return self.addresses[rank]

    def part(self, rank: int) -> torch.Tensor:
        """The part of a rank of this process, uint8 `[nbytes]`."""
        return self.parts[rank - self.first]


class GpuHeap(ABC):
    """Where symmetric memory on GPUs comes from; `count` ranks from `first` on are this process's."""

    home: str = ""
    group: dist.ProcessGroup | None = None
    """The processes, where ranks are processes."""

    def __init__(self, device: torch.device, world_size: int, first: int, count: int) -> None:
        self.device, self.world_size, self.first, self.count = device, world_size, first, count
        self._live: list[GpuAllocation] = []
        self._closed = False

    def allocate(self, name: str, nbytes: int) -> GpuAllocation:
        """`nbytes` zeroed bytes for every rank. Collective; returns when all ranks' are zeroed.

        Raises:
            GroupError: names or sizes differ between ranks, memory is short, or the heap is closed.
            DeviceError: a rank cannot address another's memory.
        """
        if self._closed:
            raise GroupError("the symmetric heap is closed; make a new one")
        _check_requests(self._gather((name, nbytes)))
        try:
            allocation = self._allocate(name, nbytes)
        except torch.OutOfMemoryError as error:
            raise GroupError(
                f"symmetric memory {name!r} needs {nbytes / 2**20:.0f} MiB for each of {self.count} ranks on "
                f"{self.device}, {_free_mib(self.device)} MiB are free; use fewer ranks, smaller tiles or fewer tokens"
            ) from error
        self._live.append(allocation)
        return allocation

    @abstractmethod
    def _allocate(self, name: str, nbytes: int) -> GpuAllocation:
        """As `allocate`, after the checks."""

    def _gather(self, value: Any) -> list[Any]:
        """`value` of every process."""
        return [value]

    def close(self) -> None:
        """Drop all allocations and refuse new ones; calling it again does nothing.

        Kernels that use the memory must have ended, on all ranks.
        """
        self._live.clear()
        self._closed = True


class LocalHeap(GpuHeap):
    """All ranks share one device: their parts are slices of one tensor, and one launch runs their workers."""

    home = "local"

    def __init__(self, world_size: int, device: torch.device | str | None = None) -> None:
        """Of `device`, by default the current GPU; a CPU device serves Triton's interpreter.

        Raises:
            GroupError: `world_size` is below 1.
            DeviceError: there is no GPU.
        """
        if world_size < 1:
            raise GroupError(f"world_size={world_size}: expected at least 1")
        super().__init__(_device(device), world_size, 0, world_size)

    def _allocate(self, name: str, nbytes: int) -> GpuAllocation:
        stride = max(PAGE, -(-nbytes // PAGE) * PAGE)
        whole = torch.zeros((self.world_size, stride), dtype=torch.uint8, device=self.device)
        parts = tuple(row[:nbytes] for row in whole)
        return GpuAllocation(name, nbytes, 0, tuple(whole.data_ptr() + r * stride for r in range(len(parts))), parts)


class ProcessHeap(GpuHeap):
    """Ranks are processes with a GPU each, the members of a process group of torch.distributed."""

    group: dist.ProcessGroup

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Join with this process's current GPU; collective.

        Raises:
            DeviceError: there is no GPU, or two ranks chose the same one.
            GroupError: torch.distributed is not initialised.
        """
        gpu = require_gpu()
        if not dist.is_initialized():
            raise GroupError(
                f"a {self.home} heap needs the processes of a job; start them with torchrun, and call "
                "torch.cuda.set_device(LOCAL_RANK) and torch.distributed.init_process_group('nccl') first"
            )
        chosen = group or dist.group.WORLD
        assert chosen is not None  # that of an initialised torch.distributed
        self.group = chosen
        super().__init__(torch.device("cuda", gpu.index), dist.get_world_size(self.group), dist.get_rank(self.group), 1)
        check_own_gpus(self._gather(str(torch.cuda.get_device_properties(gpu.index).uuid)))

    def _gather(self, value: Any) -> list[Any]:
        gathered: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(gathered, value, self.group)
        return gathered

    def _settle(self) -> None:
        """Return when the work of all ranks' devices so far is done."""
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group)


class TorchHeap(ProcessHeap):
    """torch's symmetric memory: GPUs of one node, or of one NVLink domain, that map each other's memory."""

    home = "torch"

    def _allocate(self, name: str, nbytes: int) -> GpuAllocation:
        import torch.distributed._symmetric_memory as symmetric

        part = symmetric.empty(max(nbytes, PAGE), dtype=torch.uint8, device=self.device)
        part.zero_()
        try:
            handle = symmetric.rendezvous(part, self.group.group_name)
        except RuntimeError as error:
            raise DeviceError(
                f"the GPUs of the {self.world_size} ranks cannot map each other's memory: {error}; use GPUs that "
                "nvidia-smi topo -m shows as connected by NVLink, or an NvshmemHeap"
            ) from error
        # Newer versions of torch put several tensors into one block, whose beginning they tell.
        offsets = self._gather(part.data_ptr() - handle.buffer_ptrs[self.first])
        addresses = tuple(base + offset for base, offset in zip(handle.buffer_ptrs, offsets, strict=True))
        self._settle()
        return GpuAllocation(name, nbytes, self.first, addresses, (part[:nbytes],))


class NvshmemHeap(ProcessHeap):
    """NVSHMEM's symmetric heap, through nvshmem4py; peers that NVLink does not reach have address 0."""

    home = "nvshmem"

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Join, and start NVSHMEM in this process; collective.

        Raises:
            DeviceError: there is no GPU or no nvshmem4py, or two ranks chose the same GPU.
            GroupError: torch.distributed is not initialised.
        """
        require_nvshmem()
        super().__init__(group)
        import nvshmem.core as nvshmem
        from cuda.core import Device

        device = Device(self.device.index)
        device.set_current()
        identity = self._gather(nvshmem.get_unique_id() if self.first == 0 else None)[0]
        nvshmem.init(device=device, uid=identity, rank=self.first, nranks=self.world_size, initializer_method="uid")

    def _allocate(self, name: str, nbytes: int) -> GpuAllocation:
        from nvshmem import bindings
        from nvshmem.core.interop import torch as memory

        part = memory.bytetensor((max(nbytes, PAGE),), dtype=torch.uint8)
        part.zero_()
        addresses = tuple(int(bindings.ptr(part.data_ptr(), rank)) for rank in range(self.world_size))
        self._settle()
        return GpuAllocation(name, nbytes, self.first, addresses, (part[:nbytes],))

    def close(self) -> None:
        """As `GpuHeap.close`; collective, and ends NVSHMEM in this process."""
        if self._closed:
            return
        import nvshmem.core as nvshmem
        from nvshmem.core.interop import torch as memory

        self._settle()
        for allocation in self._live:
            memory.free_tensor(allocation.parts[0])
        super().close()
        nvshmem.finalize()


def check_own_gpus(uuids: Sequence[str]) -> None:
    """Refuse processes that share a GPU.

    Raises:
        DeviceError: two have the same; `uuids[r]` is that of rank r.
    """
    for rank, uuid in enumerate(uuids):
        other = uuids.index(uuid)
        if other != rank:
            raise DeviceError(
                f"ranks {other} and {rank} both use the GPU {uuid}; call torch.cuda.set_device(LOCAL_RANK) in each, "
                "or run virtual ranks on it with a LocalHeap"
            )


def _check_requests(requests: Sequence[tuple[str, int]]) -> None:
    """Every process sees the same list, so all raise or none does."""
    for rank, request in enumerate(requests):
        if request != requests[0]:
            (name, nbytes), (other, other_bytes) = requests[0], request
            raise GroupError(
                f"symmetric memory: rank 0 asks for {name!r} of {nbytes} bytes while rank {rank} asks for {other!r} of "
                f"{other_bytes}; every rank must allocate the same in the same order"
            )


def _device(device: torch.device | str | None) -> torch.device:
    chosen = None if device is None else torch.device(device)
    if chosen is not None and chosen.type == "cpu":
        return chosen
    return torch.device("cuda", require_gpu(None if chosen is None else chosen.index).index)


def _free_mib(device: torch.device) -> str:
    return f"{torch.cuda.mem_get_info(device)[0] / 2**20:.0f}" if device.type == "cuda" else "few"
