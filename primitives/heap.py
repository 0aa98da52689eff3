"""Symmetric memory: the same number of bytes on every rank, addressable by every rank.

One small interface, several homes. `LocalHeap` serves ranks that are threads of one
process, `ShmHeap` ranks that are processes of one host. In both, a rank maps all ranks'
parts in one piece, so the address of a peer's part is `base + rank * stride`.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tileweave.errors import GroupError

Bytes = npt.NDArray[np.uint8]

PAGE = 4096
_HUGE = 4 << 20
_PROT_READ_WRITE = 0x1 | 0x2
_MAP_SHARED, _MAP_PRIVATE, _MAP_ANONYMOUS = 0x01, 0x02, 0x20
_MADV_HUGEPAGE = 14

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Mapping:
    """Zeroed memory from mmap(2), unmapped when the last array that views it is gone.

    `mmap.mmap` would keep a descriptor open for each mapping, which adds up.
    """

    def __init__(self, nbytes: int, descriptor: int | None = None) -> None:
        """Map `nbytes` of `descriptor`, shared; or anonymous memory of this process without one.

        Raises:
            OSError: the kernel refused.
        """
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS if descriptor is None else _MAP_SHARED
        address = _libc.mmap(None, nbytes, _PROT_READ_WRITE, flags, -1 if descriptor is None else descriptor, 0)
        if address is None or address == ctypes.c_void_p(-1).value:
            code = ctypes.get_errno()
            raise OSError(code, f"mmap of {nbytes} bytes: {os.strerror(code)}")
        if nbytes >= _HUGE:
            _libc.madvise(address, nbytes, _MADV_HUGEPAGE)  # advice: no matter if it is refused
        self.address: int = address
        self.nbytes = nbytes
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, False)}
        # Not at exit: views in other objects may be used until the very end of the process.
        weakref.finalize(self, _libc.munmap, address, nbytes).atexit = False

    def array(self) -> Bytes:
        """All of it as uint8 [nbytes]; the array keeps the mapping alive."""
        return np.asarray(self)


class Collective(Protocol):
    """What a heap needs of its group."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def barrier(self) -> None: ...
    def all_gather_object(self, value: Any) -> list[Any]: ...
    def agree(self, error: str | None, kind: type[Exception] = ...) -> None: ...


@dataclass(frozen=True, eq=False)
class SymmetricAllocation:
    """`nbytes` bytes on each rank under one name; zero-filled, parts begin on a page.

    `stride` is the distance in bytes between the parts of neighbouring ranks, or None
    for registered arrays, which lie anywhere. `addresses[r]` is where this process sees
    the part of rank r.
    """

    name: str
    nbytes: int
    rank: int
    stride: int | None
    addresses: tuple[int, ...]
    parts: tuple[Bytes | None, ...] = field(repr=False)

    def peer_address(self, rank: int) -> int:
        """Address of rank `rank`'s part in this process."""
        return self.addresses[rank]

    def local(self) -> Bytes:
        """This rank's part, uint8 [nbytes], writable. The memory lives as long as a view of it."""
        return self.peer(self.rank)

    def peer(self, rank: int) -> Bytes:
        """The part of rank `rank`, uint8 [nbytes]; ordering its accesses is the caller's duty.

        Raises:
            GroupError: the part was registered by a peer and is known by address only.
        """
        part = self.parts[rank]
        if part is None:
            raise GroupError(f"{self.name!r} of rank {rank} is known by its address only; use peer_address({rank})")
        return part


class SymmetricHeap(ABC):
    """Where symmetric memory comes from. All methods but `free` and the properties are collective."""

    home: str = ""

    def __init__(self, group: Collective) -> None:
        self._group = group
        self._live: list[SymmetricAllocation] = []
        self._closed = False

    @property
    def total_bytes(self) -> int:
        """Bytes of this rank's parts of live allocations, with page rounding."""
        return sum(allocation.stride or 0 for allocation in self._live)

    def allocate(self, name: str, nbytes: int) -> SymmetricAllocation:
        """`nbytes` zeroed bytes on every rank, each part beginning on a page. Collective.

        Raises:
            GroupError: on all ranks alike, when names or sizes differ between ranks, the
                size is negative, memory is short, or the heap is closed.
        """
        self._check_open()
        _check_requests([(str(n), int(b)) for n, b in self._group.all_gather_object((name, nbytes))])
        stride = max(PAGE, -(-nbytes // PAGE) * PAGE)
        mapping = self._map(name, stride * self._group.world_size)
        whole = mapping.array()
        parts = tuple(whole[rank * stride : rank * stride + nbytes] for rank in range(self._group.world_size))
        addresses = tuple(mapping.address + rank * stride for rank in range(self._group.world_size))
        allocation = SymmetricAllocation(name, nbytes, self._group.rank, stride, addresses, parts)
        self._live.append(allocation)
        return allocation

    @abstractmethod
    def register(self, name: str, array: npt.NDArray[Any]) -> SymmetricAllocation:
        """Make an existing array of each rank addressable by all. Collective. The array is kept alive.

        Raises:
            GroupError: on all ranks alike, when this home cannot address the memory, or
                sizes differ, or an array is not C-contiguous.
        """

    @abstractmethod
    def _map(self, name: str, nbytes: int) -> Mapping:
        """`nbytes` of memory that all ranks see; raises GroupError on all ranks alike."""

    def free(self, allocation: SymmetricAllocation) -> None:
        """Forget an allocation. Its memory goes when no rank holds a view of it any more."""
        self._live = [other for other in self._live if other is not allocation]

    def close(self) -> None:
        """Forget all allocations and refuse new ones. Not collective; calling it again does nothing."""
        self._live.clear()
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise GroupError("the symmetric heap is closed; join or start a new group")


def _check_requests(requests: Sequence[tuple[str, int]]) -> None:
    """Every rank sees the same list, so every rank raises or none does."""
    name, nbytes = requests[0]
    for rank, (other_name, other_bytes) in enumerate(requests):
        if other_name != name:
            raise GroupError(
                f"symmetric memory: rank 0 asks for {name!r} while rank {rank} asks for {other_name!r}; "
                "every rank must allocate the same names in the same order"
            )
        if other_bytes != nbytes:
            raise GroupError(
                f"symmetric memory {name!r}: rank 0 asks for {nbytes} bytes, rank {rank} for {other_bytes}; "
                "the size must be the same on every rank"
            )
    if nbytes < 0:
        raise GroupError(f"symmetric memory {name!r}: {nbytes} bytes; expected a size of at least 0")


def check_memory(name: str, nbytes: int) -> None:
    """Refuse what the machine cannot hold; the kernel would promise it and kill the job on first use.

    Raises:
        MemoryError: `nbytes` exceeds the memory that is free or can be freed.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return
    if nbytes > available:
        raise MemoryError(
            f"symmetric memory {name!r} needs {nbytes / 2**20:.0f} MiB on this host for all ranks together, "
            f"{available / 2**20:.0f} MiB are free; use fewer ranks, smaller tiles or fewer tokens"
        )


@dataclass
class LocalParts:
    """What the heaps of thread ranks share: mappings on their way from rank 0 to its peers."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    offers: dict[int, Mapping] = field(default_factory=dict)


class LocalHeap(SymmetricHeap):
    """Ranks are threads of this process (or there is one rank): anonymous memory."""

    home = "local"

    def __init__(self, group: Collective, shared: LocalParts) -> None:
        super().__init__(group)
        self._shared = shared
        self._serial = 0

    def _map(self, name: str, nbytes: int) -> Mapping:
        self._serial += 1
        error = None
        if self._group.rank == 0:
            try:
                check_memory(name, nbytes)
                mapping = Mapping(nbytes)
                with self._shared.lock:
                    self._shared.offers[self._serial] = mapping
            except (OSError, MemoryError) as problem:
                error = str(problem)
        self._group.agree(error, GroupError)
        with self._shared.lock:
            taken = self._shared.offers[self._serial]
        self._group.barrier()
        if self._group.rank == 0:
            with self._shared.lock:
                del self._shared.offers[self._serial]
        return taken

    def register(self, name: str, array: npt.NDArray[Any]) -> SymmetricAllocation:
        """See `SymmetricHeap.register`; any memory of the process will do."""
        self._check_open()
        contiguous = array.flags.c_contiguous
        self._group.agree(None if contiguous else f"{name!r} is not C-contiguous; pass a contiguous copy", GroupError)
        address = int(array.__array_interface__["data"][0])
        known = self._group.all_gather_object((name, array.nbytes, address))
        _check_requests([(n, b) for n, b, _ in known])
        own = array.reshape(-1).view(np.uint8)
        parts = tuple(own if rank == self._group.rank else None for rank in range(self._group.world_size))
        addresses = tuple(int(a) for _, _, a in known)
        allocation = SymmetricAllocation(name, array.nbytes, self._group.rank, None, addresses, parts)
        self._live.append(allocation)
        return allocation


class ShmHeap(SymmetricHeap):
    """Ranks are processes of one host: memfd segments, which have no name and so cannot be left behind."""

    home = "shm"

    def _map(self, name: str, nbytes: int) -> Mapping:
        descriptor, refusal, mapping, error = -1, "", None, None
        if self._group.rank == 0:
            try:
                check_memory(name, nbytes)
                descriptor = create_segment(name, nbytes)
            except (OSError, MemoryError) as problem:
                refusal = str(problem)
        try:
            owner, opened, refusal = self._group.all_gather_object((os.getpid(), descriptor, refusal))[0]
            if refusal:
                raise GroupError(f"rank 0 cannot create symmetric memory: {refusal}")
            try:
                mapping = open_segment(owner, opened, nbytes)
            except OSError as problem:
                error = f"cannot map symmetric memory {name!r} of rank 0: {problem}"
            self._group.agree(error, GroupError)
            assert mapping is not None
            return mapping
        finally:
            if descriptor >= 0:
                os.close(descriptor)  # everybody has mapped it by now, or nobody will

    def register(self, name: str, array: npt.NDArray[Any]) -> SymmetricAllocation:
        """See `SymmetricHeap.register`; the array must lie in an allocation of this heap, at one offset on all ranks.

        A process cannot address another's ordinary memory.
        """
        self._check_open()
        address = int(array.__array_interface__["data"][0])
        owner = next((a for a in self._live if a.addresses[a.rank] <= address < a.addresses[a.rank] + a.nbytes), None)
        error = None
        if not array.flags.c_contiguous:
            error = f"{name!r} is not C-contiguous; pass a contiguous copy"
        elif owner is None:
            error = f"{name!r} does not lie in symmetric memory; allocate it from the heap and copy into it"
        self._group.agree(error, GroupError)
        assert owner is not None
        offset = address - owner.addresses[owner.rank]
        known = self._group.all_gather_object((name, array.nbytes, owner.name, offset))
        _check_requests([(n, b) for n, b, *_ in known])
        if len({place[2:] for place in known}) > 1:
            raise GroupError(f"{name!r} lies at different places on different ranks: {[place[2:] for place in known]}")
        parts = tuple(part[offset : offset + array.nbytes] if part is not None else None for part in owner.parts)
        addresses = tuple(base + offset for base in owner.addresses)
        allocation = SymmetricAllocation(name, array.nbytes, self._group.rank, None, addresses, parts)
        self._live.append(allocation)
        return allocation


def create_segment(name: str, nbytes: int) -> int:
    """A zeroed memfd of `nbytes`; returns its descriptor. Raises OSError."""
    descriptor = os.memfd_create(f"tileweave:{name}"[:200], os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_segment(pid: int, descriptor: int, nbytes: int) -> Mapping:
    """Map the memfd that process `pid` holds as `descriptor`. Raises OSError."""
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return Mapping(nbytes, opened)
    finally:
        os.close(opened)
