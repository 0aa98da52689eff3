"""The control block that the ranks of a group share, as Python sees it.

The block itself is `tw_control` of `runtime/tw_runtime.h`; all access goes through
`runtime/group.c`, so no layout is repeated here.
"""

from __future__ import annotations

import ctypes
import enum
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tileweave import native
from tileweave.errors import GroupError, HangError, LaunchError, RankDiedError
from tileweave.primitives.heap import Mapping, create_segment, open_segment

RUNTIME_DIR = Path(__file__).resolve().parent / "runtime"
"""Folder of `tw_runtime.h`, for `include_dirs` of `native.build`."""

MAX_RANKS, MAX_WORKERS = 1024, 64
SLOT_BYTES = 4096
OK, ABORTED, REFUSED, INTERRUPTED, MISMATCH, GROW = range(6)
SITE_ENTER, SITE_GATHER = -2, -3

_STATES = ("idle", "running", "waiting", "done")
_HOST = MAX_WORKERS
_void, _int, _u32, _u64, _text = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_char_p
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "twg_control_bytes": (_u64, [_u32, _u64]),
    "twg_control_init": (None, [_void, _u32, _u64, _u32]),
    "twg_control_check": (_int, [_void, _u32]),
    "twg_open": (_void, [_void, _int, _u64]),
    "twg_free": (None, [_void]),
    "twg_set_timeout": (None, [_void, _u64]),
    "twg_set_left": (None, [_void, _int, _int]),
    "twg_left": (_int, [_void, _int]),
    "twg_pid": (ctypes.c_int64, [_void, _int]),
    "twg_use_slots": (None, [_void, _void, _u64, _u64]),
    "twg_capacity": (_u64, [_void]),
    "twg_all_gather": (_int, [_void, _void, _u64, _void, _int]),
    "twg_gather_sizes": (None, [_void, _void]),
    "twg_enter": (_int, [_void, _u64, _int]),
    "twg_set_kernel": (None, [_void, _int, _u64, _u64]),
    "twg_kernel": (_u64, [_void, _int, _u64]),
    "twg_set_refusal": (None, [_void, _int, _u64, _text]),
    "twg_refusal": (_text, [_void, _int, _u64]),
    "twg_abort": (_int, [_void, _int, _int, _int, _int, _text]),
    "twg_aborted": (_u64, [_void]),
    "twg_failure": (_text, [_void, _int]),
    "twg_read_record": (None, [_void, _int, _int, _void]),
}
_library: ctypes.CDLL | None = None
_library_lock = threading.Lock()


def library() -> ctypes.CDLL:
    """`runtime/group.c`, compiled at first use. Raises BuildError."""
    global _library
    with _library_lock:
        if _library is None:
            source = (RUNTIME_DIR / "group.c").read_text()
            loaded = native.load(native.build(source, "group", include_dirs=(RUNTIME_DIR,)))
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(loaded, name)
                function.restype, function.argtypes = result, arguments
            _library = loaded
        return _library


class AbortKind(enum.IntEnum):
    """Why a group stopped."""

    TIMEOUT = 1
    RANK_DIED = 2
    FAILED = 3

    @property
    def error(self) -> type[LaunchError]:
        """The exception that ranks raise for it."""
        return {1: HangError, 2: RankDiedError, 3: LaunchError}[int(self)]


@dataclass(frozen=True, slots=True)
class AbortInfo:
    """The first thing that went wrong in a group.

    `rank` is the rank at fault: the one whose wait timed out, that died or that failed;
    None when the cause lies outside the ranks. `worker` is its worker, None for the host
    thread. `text` is what it, or a supervisor, wrote; often empty.
    """

    kind: AbortKind
    rank: int | None
    worker: int | None
    text: str


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """What one worker of one rank was doing when the record was read.

    `worker` is None for the rank's host thread. `site`, `signal` and `signal_index` tell
    what it waits for while `state` is "waiting"; they are -1 or meaningless otherwise.
    For the host sites SITE_ENTER and SITE_GATHER, `signal_index` is the awaited rank.
    """

    rank: int
    worker: int | None
    state: str
    task: int
    tile: tuple[int, int, int, int]
    site: int
    signal: int
    signal_index: int
    expected: int
    observed: int
    epoch: int


class Control:
    """A mapped control block. `address` is what generated kernels take as `tw_control *`."""

    def __init__(self, mapping: Mapping, world_size: int) -> None:
        self._mapping = mapping
        self.address = mapping.address
        self.world_size = world_size
        self.library = library()

    @classmethod
    def create(cls, world_size: int, *, shared: bool = False) -> tuple[Control, int]:
        """A new block and the descriptor that holds it, to be closed by the caller; -1 if not `shared`.

        Raises:
            GroupError: `world_size` is out of range, or memory is short.
            BuildError: no usable C compiler.
        """
        if not isinstance(world_size, int) or not 1 <= world_size <= MAX_RANKS:
            raise GroupError(f"world_size is {world_size!r}; expected 1 to {MAX_RANKS}")
        nbytes = int(library().twg_control_bytes(world_size, SLOT_BYTES))
        try:
            descriptor = create_segment("control", nbytes) if shared else -1
            control = cls(Mapping(nbytes, descriptor if shared else None), world_size)
        except OSError as error:
            raise GroupError(f"cannot create the control block of {nbytes} bytes: {error}") from error
        # With a core for each rank, spinning is the fastest; with fewer it keeps the awaited rank from running.
        spins = 200 if len(os.sched_getaffinity(0)) >= world_size else 20
        control.library.twg_control_init(control.address, world_size, SLOT_BYTES, spins)
        return control, descriptor

    @classmethod
    def attach(cls, pid: int, descriptor: int, world_size: int) -> Control:
        """The block that process `pid` holds open as `descriptor`.

        Raises:
            GroupError: it cannot be opened, or was made by another version of Tileweave.
        """
        nbytes = int(library().twg_control_bytes(world_size, SLOT_BYTES))
        try:
            control = cls(open_segment(pid, descriptor, nbytes), world_size)
        except OSError as error:
            raise GroupError(
                f"cannot open the control block of process {pid}: {error}; all ranks of a group must run on one "
                "host, in one container, as one user"
            ) from error
        if control.library.twg_control_check(control.address, world_size):
            raise GroupError(f"process {pid} runs another version of Tileweave or another world size")
        return control

    def abort(self) -> AbortInfo | None:
        """Why the group stopped, None while it is well."""
        word = int(self.library.twg_aborted(self.address))
        if word == 0:
            return None
        rank, worker = ((word >> 8) & 0xFFFFFF) - 1, (word >> 32) - 1
        kind = AbortKind(word & 0xFF)
        text = self._failure(-1) or (self._failure(rank) if rank >= 0 and kind is AbortKind.FAILED else "")
        return AbortInfo(kind, rank if rank >= 0 else None, worker if 0 <= worker < _HOST else None, text)

    def _failure(self, rank: int) -> str:
        data: bytes = self.library.twg_failure(self.address, rank)
        return data.decode(errors="replace")

    def stop(self, kind: AbortKind, rank: int | None, text: str, *, by: int | None = None) -> bool:
        """Stop the group; True to the first caller. `by` is the calling rank, None for a supervisor."""
        return bool(
            self.library.twg_abort(
                self.address, int(kind), -1 if rank is None else rank, -1, -1 if by is None else by, text.encode()
            )
        )

    def set_left(self, rank: int, left: bool) -> None:
        """Announce that `rank` takes part no more (or again): waits for it end at once with an error."""
        self.library.twg_set_left(self.address, rank, int(left))

    def pid(self, rank: int) -> int:
        """Process id of `rank`, 0 until it has joined."""
        return int(self.library.twg_pid(self.address, rank))

    def kernels(self, epoch: int) -> list[int]:
        """Digest of the kernel that each rank came to launch as `epoch`, by rank."""
        return [int(self.library.twg_kernel(self.address, rank, epoch)) for rank in range(self.world_size)]

    def refusals(self, epoch: int) -> dict[int, str]:
        """Reasons of the ranks that refused the launch `epoch`, by rank."""
        texts = ((rank, self.library.twg_refusal(self.address, rank, epoch)) for rank in range(self.world_size))
        return {rank: text.decode(errors="replace") for rank, text in texts if text is not None}

    def records(self, rank: int | None = None) -> Iterator[WorkerRecord]:
        """Records of all workers (of one rank) that are not idle."""
        words = (ctypes.c_int64 * 12)()
        for each in range(self.world_size) if rank is None else (rank,):
            for worker in range(MAX_WORKERS + 1):
                self.library.twg_read_record(self.address, each, worker, words)
                state, task, t0, t1, t2, t3, site, signal, index, expected, observed, epoch = words
                if state:
                    name = None if worker == _HOST else worker
                    tile = (t0, t1, t2, t3)
                    yield WorkerRecord(
                        each, name, _STATES[state], task, tile, site, signal, index, expected, observed, epoch
                    )

    def describe(self, info: AbortInfo, timeout_s: float) -> str:
        """One text for what happened, the same on every rank but for the time limit."""
        who = "the group" if info.rank is None else f"rank {info.rank}"
        if info.kind is AbortKind.FAILED:
            return info.text if info.rank is None else f"{who} failed: {info.text}"
        if info.kind is AbortKind.RANK_DIED:
            if info.text:
                return info.text
            rank = info.rank or 0
            if self.library.twg_left(self.address, rank):
                return f"{who} left the group (its function returned, or it closed the group) while others wait for it"
            return f"{who} (process {self.pid(rank)}) died while others wait for it; look for its own error output"
        if info.rank is None:
            return info.text
        return self._describe_timeout(info, info.rank, timeout_s)

    def _describe_timeout(self, info: AbortInfo, rank: int, timeout_s: float) -> str:
        waiting = [record for record in self.records() if record.state == "waiting"]
        stuck = next((r for r in waiting if (r.rank, r.worker) == (rank, info.worker)), None)
        text = f"the time limit of {timeout_s:g} s has passed: " + (describe_wait(stuck) if stuck else f"rank {rank}")
        others = [describe_wait(record) for record in waiting if record is not stuck]
        idle = sorted(set(range(self.world_size)) - {record.rank for record in waiting})
        if others:
            text += "; " + "; ".join(others[:8]) + (f"; and {len(others) - 8} more" if len(others) > 8 else "")
        if idle:
            text += f"; not waiting: rank {', '.join(map(str, idle))}"
        return text + (
            ". Every rank must make the same calls in the same order; if ranks may take this long, "
            "set TILEWEAVE_TIMEOUT_S to more seconds"
        )


def describe_wait(record: WorkerRecord) -> str:
    """A waiting record in words."""
    if record.site == SITE_GATHER:
        return (
            f"rank {record.rank} waits for rank {record.signal_index} in collective call {record.expected} "
            f"(it has made {record.observed})"
        )
    if record.site == SITE_ENTER:
        return (
            f"rank {record.rank} waits for rank {record.signal_index} at launch {record.expected} "
            f"(it has come to {record.observed})"
        )
    worker = "host" if record.worker is None else f"worker {record.worker}"
    return (
        f"rank {record.rank} {worker}, task {record.task}, tile {record.tile}, waits at site {record.site} for signal "
        f"{record.signal}[{record.signal_index}]: expected {record.expected}, observed {record.observed}"
    )
