"""A TileLang kernel of target `c` on the CPU ranks of a group, for testing the emitter by execution."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tileweave import native
from tileweave.codegen import state
from tileweave.codegen.hang import describe_record
from tileweave.codegen.launch import Launch
from tileweave.codegen.layout import num_elements
from tileweave.codegen.listing import Bound, list_tiles
from tileweave.codegen.lower import Lowered
from tileweave.codegen.tilelang.build import build_for_cpu
from tileweave.codegen.tilelang.scalars import identifier
from tileweave.codegen.trace import TraceEvent
from tileweave.errors import HangError
from tileweave.primitives.control import WorkerRecord
from tileweave.primitives.group import Group
from tileweave.primitives.memory import Table

_SPINS_A_SECOND = 200_000  # of a wait that yields; its limit is counted, not timed
_FIRST_CAPACITY = 256
_STACK_BYTES = 256 << 20  # tiles that a task keeps lie on the stack of its thread
_starting = threading.Lock()


class TileLangExecutable:
    """A kernel loaded for one rank of a group, with its symmetric and local memory; making one is collective."""

    def __init__(self, lowered: Lowered, group: Group) -> None:
        """Build or find the library, and allocate.

        Raises:
            BuildError: no TileLang or no compiler, or one of them refuses the kernel.
            CompileError: the target has no text for the kernel.
        """
        self.lowered, self.group = lowered, group
        self._built = build_for_cpu(lowered)
        self._function = getattr(native.load(self._built.path), self._built.function)
        self._symmetric = group.heap.allocate(f"{lowered.program.name} in TileLang", lowered.segment.gpu_bytes)
        self._local = {
            m.name: np.zeros(max(num_elements(m) * m.dtype.itemsize_bytes, 1), np.uint8)
            for m in lowered.program.workspaces
        }
        self._heap = np.array(self._symmetric.addresses, np.int64)
        self._state = np.zeros(state.STATE_WORDS, np.int64)
        self._capacity = _FIRST_CAPACITY

    def launch(self, launch: Launch) -> list[TraceEvent]:
        """Run with all ranks of the group; collective. Records no events.

        Raises:
            PeerError: some rank refused its arguments; nothing ran.
            GroupError: ranks launch different kernels; nothing ran.
            HangError: a wait gave up.
        """
        self.group.enter(self.group.next_epoch(launch.key), launch.refusal)
        queue = self._list(launch)
        arguments = self._arguments(launch, queue)
        self._state[state.EPOCH] += 1
        self._run(arguments)
        if self._state[state.FAILED]:
            message = self._describe(queue["queue"])
            self.group.fail(message)
            raise HangError(message)
        return []

    def _list(self, launch: Launch) -> dict[str, npt.NDArray[np.int32]]:
        """This rank's tiles, in order."""
        program = self.lowered.program
        tables = {
            m.name: torch.as_tensor(np.asarray(launch.arrays[m.name])) for m in program.memories if isinstance(m, Table)
        }
        dims = dict(zip(program.dims, launch.dims, strict=True))
        bound = Bound(self.group.rank, dims, tables, torch.device("cpu"))
        while True:
            listing = list_tiles(self.lowered, bound, self._capacity)
            most = int(listing.most)
            if most <= self._capacity:
                break
            self._capacity = 1 << (most - 1).bit_length()
        counts = listing.counts.numpy()
        return {"queue": listing.entries.numpy(), "counts": counts, "cursor": np.zeros_like(counts)}

    def _arguments(self, launch: Launch, queue: Mapping[str, npt.NDArray[np.int32]]) -> dict[str, Any]:
        """Values of the kernel's parameters by name, but for the worker."""
        program, segment = self.lowered.program, self.lowered.segment
        own = int(self._heap[self.group.rank])
        addresses = {m.name: a for m, a in zip(program.arguments, launch.addresses, strict=True)}
        addresses |= {name: array.ctypes.data for name, array in self._local.items()}
        addresses |= {m.name: own + segment.offset_bytes[m.name] for m in program.symmetric}
        pointers = {identifier(name): ctypes.c_void_p(address) for name, address in addresses.items()}
        tables: dict[str, npt.NDArray[Any]] = {"heap": self._heap, "state": self._state, **queue}
        pointers |= {name: ctypes.c_void_p(array.ctypes.data) for name, array in tables.items()}
        dims = {identifier(n): ctypes.c_int32(s) for n, s in zip(program.dims, launch.dims, strict=True)}
        return {
            **pointers,
            **dims,
            "rank": ctypes.c_int32(self.group.rank),
            "capacity": ctypes.c_int32(self._capacity),
            "limit": ctypes.c_int64(int(self.group.timeout_s * _SPINS_A_SECOND)),
        }

    def _run(self, arguments: Mapping[str, Any]) -> None:
        """All workers of this rank, a thread each."""

        def work(worker: int) -> None:
            named = {**arguments, "worker": ctypes.c_int32(worker)}
            self._function(*(named[name] for name in self._built.parameters))

        threads = [threading.Thread(target=work, args=(w,)) for w in range(self.lowered.schedule.num_workers)]
        with _starting:  # the size of a stack is a setting of the process
            before = threading.stack_size(_STACK_BYTES)
            for thread in threads:
                thread.start()
            threading.stack_size(before)
        for thread in threads:
            thread.join()

    def _describe(self, queue: npt.NDArray[np.int32]) -> str:
        rank, row = self.group.rank, self._state.tolist()
        worker, position, site, index, expected, observed = (row[word] for word in state.RECORD)
        head = f"kernel '{self.lowered.program.name}' stopped: rank {rank} waited longer than "
        head += f"{self.group.timeout_s:g} s (TILEWEAVE_TIMEOUT_S)"
        if site == state.ENTRY_SITE:
            what = f"waits for all ranks to enter the launch: expected {expected} entries so far, observed {observed}"
            return f"{head}\n  rank {rank} worker {worker}: {what}"
        lane = next(n for n, each in enumerate(self.lowered.schedule.lanes) if worker in each.workers)
        task, *tile = queue[lane, position].tolist()
        record = WorkerRecord(rank, worker, "waiting", task, tuple(tile), site, -1, index, expected, observed, -1)
        return f"{head}\n  {describe_record(self.lowered, record)}"
