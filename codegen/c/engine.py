"""Building, loading and launching an emitted C kernel on the CPU ranks of a group."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tileweave import native
from tileweave.codegen.c.emit import emit_unit
from tileweave.codegen.hang import describe_abort
from tileweave.codegen.launch import Launch
from tileweave.codegen.layout import COUNTER_SETS, num_elements
from tileweave.codegen.lower import Lowered
from tileweave.codegen.trace import TraceEvent
from tileweave.errors import ConfigError, GroupError
from tileweave.primitives.control import MAX_WORKERS, RUNTIME_DIR, AbortInfo, WorkerRecord
from tileweave.primitives.group import Group
from tileweave.primitives.heap import Mapping as MemoryMapping

INCLUDE_DIR = Path(__file__).resolve().parent / "include"
# Contraction is off: which products gcc would fuse may differ between a vector loop and its
# remainder, and then a row's bits would depend on its length.
FLAGS = (*native.DEFAULT_FLAGS, "-ffp-contract=off", "-Wno-unused-function")

_OK, _ABORTED, _REFUSED = 0, 1, 2
_REMEMBERED = 4  # kernels of the last launches, to say what ranks that lag behind are doing


class _Event(ctypes.Structure):
    _fields_ = [
        ("begin_ns", ctypes.c_int64), ("end_ns", ctypes.c_int64), ("waited_ns", ctypes.c_int64),
        ("worker", ctypes.c_int32), ("task", ctypes.c_int32), ("tile", ctypes.c_int32 * 4),
    ]  # fmt: skip


def _launch_type(lanes: int) -> type[ctypes.Structure]:
    """`tw_launch` of `tw_kernel.h`."""

    class Launch(ctypes.Structure):
        _fields_ = [
            ("control", ctypes.c_void_p), ("memory", ctypes.c_void_p), ("dims", ctypes.c_void_p),
            ("heap", ctypes.c_void_p), ("scratch", ctypes.c_void_p),
            ("epoch", ctypes.c_uint64), ("timeout_ns", ctypes.c_uint64),
            ("counters", ctypes.c_int64), ("stale_counters", ctypes.c_int64), ("counter_bytes", ctypes.c_int64),
            ("rank", ctypes.c_int32), ("ok", ctypes.c_int32), ("dynamic", ctypes.c_int32), ("traced", ctypes.c_int32),
            ("workers", ctypes.c_int32 * lanes), ("events", ctypes.POINTER(_Event)), ("num_events", ctypes.c_int64),
        ]  # fmt: skip

    return Launch


class Executable:
    """A kernel loaded for one rank of a group, with its symmetric and local memory.

    Making one is collective: symmetric memory is allocated on all ranks.
    """

    def __init__(self, lowered: Lowered, group: Group) -> None:
        """Build or find the library, and allocate.

        Raises:
            BuildError: no compiler, or it refused the source.
            ConfigError: more workers than one rank can run.
        """
        if lowered.schedule.num_workers > MAX_WORKERS:
            raise ConfigError(
                f"Config.workers={lowered.schedule.num_workers}: the C engine runs at most {MAX_WORKERS} threads a rank"
            )
        self.lowered = lowered
        self.group = group
        self._library = native.load(build(lowered))
        self._library.tw_worker_floats.restype = ctypes.c_int64
        self._library.tw_free_events.argtypes = [ctypes.POINTER(_Event)]
        segment = lowered.segment
        self._symmetric = group.heap.allocate(lowered.program.name, segment.total_bytes)
        # Kept by mmap, not NumPy: pages exist once they are touched, and stay for the next launch.
        self._local = {
            m.name: MemoryMapping(max(num_elements(m) * m.dtype.itemsize_bytes, 1)) for m in lowered.program.workspaces
        }
        floats = int(self._library.tw_worker_floats()) * lowered.schedule.num_workers
        self._scratch = MemoryMapping(4 * floats)
        self._heap = (ctypes.c_void_p * group.world_size)(*self._symmetric.addresses)
        self._memory = (ctypes.c_void_p * len(lowered.program.memories))()
        self._slots = [lowered.number_of[m.name] for m in lowered.program.arguments]
        for memory in lowered.program.workspaces:
            self._memory[lowered.number_of[memory.name]] = self._local[memory.name].address
        self._dims = (ctypes.c_int64 * max(len(lowered.program.dims), 1))()
        self._record = self._make_record()
        self._launches = 0
        self._busy = threading.Lock()

    def _make_record(self) -> Any:
        schedule = self.lowered.schedule
        record = _launch_type(len(schedule.lanes))()
        record.control = self.group.control_address
        record.memory = ctypes.addressof(self._memory)
        record.dims = ctypes.addressof(self._dims)
        record.heap = ctypes.addressof(self._heap)
        record.scratch = self._scratch.address
        record.counter_bytes = self.lowered.segment.counter_set_bytes
        record.rank = self.group.rank
        record.dynamic = int(schedule.queue == "dynamic")
        for number, lane in enumerate(schedule.lanes):
            record.workers[number] = len(lane.workers)
        return record

    def symmetric(self, name: str) -> npt.NDArray[np.uint8]:
        """Bytes of this rank's part of one symmetric memory, for looking at it after a launch."""
        memory = self.lowered.program.by_name[name]
        start = self.lowered.segment.offset_bytes[name]
        return self._symmetric.local()[start : start + num_elements(memory) * memory.dtype.itemsize_bytes]

    def launch(self, launch: Launch) -> list[TraceEvent]:
        """Run the kernel with all ranks of the group; collective. Returns events if traced.

        Raises:
            GroupError: another thread of this rank is in a launch of this kernel.
            PeerError: some rank refused its arguments; nothing ran.
            GroupError: ranks launch different kernels; nothing ran.
            HangError, RankDiedError, LaunchError: the launch ended before its work was done.
        """
        if not self._busy.acquire(blocking=False):
            raise GroupError(
                f"kernel '{self.lowered.program.name}' is already running on this rank; launch from one thread at "
                "a time"
            )
        try:
            return self._launch(launch)
        finally:
            self._busy.release()

    def _launch(self, launch: Launch) -> list[TraceEvent]:
        group, record = self.group, self._record
        launched: dict[int, Lowered] = group.cache.setdefault("launched", {})

        def describe(info: AbortInfo, records: Sequence[WorkerRecord]) -> str:
            return describe_abort(launched, info, records, group.timeout_s)

        group.check_abort(describe if launched else None)
        epoch = group.next_epoch(launch.key)
        launched[epoch] = self.lowered
        launched.pop(epoch - _REMEMBERED, None)
        if launch.refusal is not None:
            group.refuse(epoch, launch.refusal)
        else:
            for slot, address in zip(self._slots, launch.addresses, strict=True):
                self._memory[slot] = address
            self._dims[: len(launch.dims)] = list(launch.dims)
        self._set_counters(record)
        record.epoch, record.timeout_ns = epoch, int(group.timeout_s * 1e9)
        record.ok, record.traced = int(launch.refusal is None), int(launch.traced)
        code = self._library.tw_launch_kernel(ctypes.byref(record))
        if code == _REFUSED:
            raise group.refused(epoch)
        self._launches += 1
        events = self._take_events(record)
        if code != _OK:
            group.check_abort(describe)
        return events

    def _set_counters(self, record: Any) -> None:
        one_set = self.lowered.segment.counter_set_bytes
        first = self.lowered.segment.counters_offset_bytes
        record.counters = self._launches % COUNTER_SETS * one_set
        record.stale_counters = first + (self._launches + 1) % COUNTER_SETS * one_set

    def _take_events(self, record: Any) -> list[TraceEvent]:
        if not record.events:
            return []
        tasks = self.lowered.program.tasks
        events = [
            TraceEvent(
                self.group.rank, e.worker, tasks[e.task].name, tuple(e.tile[: len(tasks[e.task].grid)]),
                e.begin_ns, e.end_ns, e.waited_ns,
            )
            for e in record.events[: record.num_events]
        ]  # fmt: skip
        self._library.tw_free_events(record.events)
        return events


def build(lowered: Lowered) -> Path:
    """Compile the emitted C, or find it in the cache.

    Raises:
        BuildError: no compiler, or it refused the source.
    """
    return native.build(emit_unit(lowered), lowered.program.name, include_dirs=(INCLUDE_DIR, RUNTIME_DIR), flags=FLAGS)


def address_of(array: Any) -> int:
    """Address of a torch tensor's or NumPy array's first element."""
    if isinstance(array, np.ndarray):
        return int(array.__array_interface__["data"][0])
    return int(array.data_ptr())
