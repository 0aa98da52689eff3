"""A group of ranks: collectives of the host, launch epochs, and how a failure reaches everybody.

The collectives here move small things (counts, offers of memory, errors). They run in C
on shared memory and take microseconds. Every wait is bounded: a rank that is late ends
it with HangError, one that died with RankDiedError, one that failed with LaunchError, on
every rank. After that the group is unusable and says so.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from tileweave import knobs
from tileweave.errors import GroupError, PeerError
from tileweave.primitives.control import (
    ABORTED,
    GROW,
    INTERRUPTED,
    MISMATCH,
    OK,
    REFUSED,
    RUNTIME_DIR,
    AbortInfo,
    AbortKind,
    Control,
    WorkerRecord,
)
from tileweave.primitives.heap import LocalHeap, LocalParts, ShmHeap, SymmetricAllocation, SymmetricHeap

__all__ = [
    "RUNTIME_DIR",
    "AbortInfo",
    "AbortKind",
    "Group",
    "Kind",
    "WorkerRecord",
    "active_group",
    "current_group",
    "set_current_group",
    "solo_group",
]

Kind = Literal["single", "threads", "processes"]

_STAGE_BYTES = 64 << 10  # gathers up to this size in all pass through a buffer of fixed address


@dataclass(frozen=True, slots=True)
class LaunchKey:
    """What a rank launches: a name for people, and 64 bits that are equal on ranks that launch the same."""

    name: str = ""
    digest: int = 0

    def __str__(self) -> str:
        return f"'{self.name}' ({self.digest:016x})" if self.digest else "nothing by name"


NO_KERNEL = LaunchKey()


class Group:
    """One rank's handle on its group. Use it from one thread at a time.

    `cache` is for compiled workspaces and the like; it is cleared by `close`.
    """

    def __init__(self, rank: int, control: Control, kind: Kind, parts: LocalParts | None = None) -> None:
        """Join as `rank`. Made by `spawn`, `VirtualGroup`, `init` and `current_group`, seldom by hand."""
        self.rank = rank
        self.world_size = control.world_size
        self.kind: Kind = kind
        self.cache: dict[Any, Any] = {}
        self._control = control
        self._timeout_s = knobs.timeout_s.get()
        self._handle: int | None = control.library.twg_open(control.address, rank, int(self._timeout_s * 1e9))
        if self._handle is None:
            raise MemoryError("no memory for a group handle")
        self._c_gather = control.library.twg_all_gather
        self._pid = os.getpid()
        self._epoch = 0
        self._key = NO_KERNEL
        self._poison: str | None = None
        self._stage = np.empty(_STAGE_BYTES, np.uint8)
        self._stage_address = int(self._stage.__array_interface__["data"][0])
        self._slots: SymmetricAllocation | None = None
        self.heap: SymmetricHeap = ShmHeap(self) if kind == "processes" else LocalHeap(self, parts or LocalParts())

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, world_size={self.world_size}, kind={self.kind!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # a handle: what is copied with it, a layer, belongs to the same ranks

    def __reduce__(self) -> NoReturn:
        raise GroupError(
            "a Group belongs to its process and cannot be pickled; of a layer, save state_dict(), make the layer anew "
            "with the group of the process that loads it, and call load_state_dict()"
        )

    # ------------------------------------------------------------------ collectives

    def barrier(self) -> None:
        """Return when every rank has called it. Raises as `all_gather`."""
        self._gather(0, 0, 0)

    def all_gather(self, payload: npt.NDArray[Any] | bytes | bytearray | memoryview) -> npt.NDArray[Any]:
        """Everybody's payload, [world_size, *payload.shape] in rank order; bytes give uint8 [world_size, n].

        The size must be the same on all ranks.

        Raises:
            GroupError: sizes differ (on all ranks alike; the group stays usable), or the
                group is closed or has stopped before.
            HangError, RankDiedError, LaunchError: a rank is late, died, or failed.
        """
        own = payload if isinstance(payload, np.ndarray) else np.frombuffer(payload, np.uint8)
        if own.dtype.hasobject:
            raise GroupError("all_gather moves plain memory; use all_gather_object for Python objects")
        shape, total = (self.world_size, *own.shape), self.world_size * own.nbytes
        if self.world_size == 1:
            self.check_abort()
            return np.array(own.reshape(shape))
        if total <= _STAGE_BYTES:
            # NumPy takes microseconds to tell an array's address, much longer than to copy this little.
            self._gather(own.tobytes(), own.nbytes, self._stage_address)
            staged = np.frombuffer(self._stage, own.dtype, total // (own.itemsize or 1))
            return np.array(staged.reshape(shape))
        own = np.ascontiguousarray(own)
        out = np.empty(shape, own.dtype)
        self._gather(own.__array_interface__["data"][0], own.nbytes, out.__array_interface__["data"][0])
        return out

    def all_gather_object(self, value: Any) -> list[Any]:
        """Everybody's object, in rank order, by pickle. For start-up: it takes two gathers. Raises as `all_gather`."""
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = self.all_gather(np.array([data.size], np.int64))[:, 0]
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: data.size] = data
        rows = self.all_gather(padded)
        return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def agree(self, error: str | None, kind: type[Exception] = PeerError) -> None:
        """Raise `kind` on every rank when any rank passes an error text. Collective; one small gather if none does.

        Raises:
            PeerError: (or `kind`) with the ranks and their texts.
        """
        flags = self.all_gather(b"\0" if error is None else b"\1")
        if flags.any():
            texts = enumerate(self.all_gather_object(error))
            raise kind("; ".join(f"rank {rank}: {text}" for rank, text in texts if text is not None))

    # ------------------------------------------------------------------ launches

    @property
    def control_address(self) -> int:
        """Address of `tw_control`, for generated kernels."""
        return self._control.address

    @property
    def timeout_s(self) -> float:
        """Seconds that one wait may last; from TILEWEAVE_TIMEOUT_S when the group was made."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._timeout_s = seconds
        self._control.library.twg_set_timeout(self._usable(), int(seconds * 1e9))

    def next_epoch(self, key: LaunchKey = NO_KERNEL) -> int:
        """The number of the next launch, which is of `key`. Every rank must draw one for every launch, refused too."""
        self._epoch += 1
        self._key = key
        self._control.library.twg_set_kernel(self.control_address, self.rank, self._epoch, key.digest)
        return self._epoch

    def refuse(self, epoch: int, reason: str) -> None:
        """Write why this rank refuses the launch; then enter with ok = 0, here or in the kernel."""
        self._control.library.twg_set_refusal(self.control_address, self.rank, epoch, reason.encode())

    def refusals(self, epoch: int) -> dict[int, str]:
        """Reasons by rank, after an entry ended with TW_REFUSED and before the next launch."""
        return self._control.refusals(epoch)

    def enter(self, epoch: int, refusal: str | None = None) -> None:
        """The entry barrier of a launch, for engines that do not call `tw_enter` themselves.

        Raises:
            PeerError: on every rank, when a rank (this one included) passed a refusal; the
                next launch may go on.
            GroupError: on every rank, when the keys of `next_epoch` differ; the next launch may go on.
            GroupError, HangError, RankDiedError, LaunchError: as `all_gather`.
        """
        if refusal is not None:
            self.refuse(epoch, refusal)
        call, ok = self._control.library.twg_enter, int(refusal is None)
        code = self._wait(call, (self._usable(), epoch, ok), (self._usable(), epoch, ok))
        if code == REFUSED:
            raise self.refused(epoch)

    def refused(self, epoch: int) -> PeerError | GroupError:
        """The exception for an entry that ended with TW_REFUSED, as it did on all ranks. Collective."""
        if len(set(self._control.kernels(epoch))) > 1:
            return _launch_apart(self.all_gather_object(self._key))
        reasons = "; ".join(f"rank {rank}: {text}" for rank, text in self.refusals(epoch).items())
        return PeerError(f"nothing was launched on any rank, because of {reasons}")

    # ------------------------------------------------------------------ failures

    def abort(self) -> AbortInfo | None:
        """Why the group stopped, None while it is well."""
        return self._control.abort()

    def worker_records(self) -> list[WorkerRecord]:
        """What the workers of all ranks are doing; idle ones are left out."""
        return list(self._control.records())

    def fail(self, reason: str) -> None:
        """Stop the group because of this rank: waits of all ranks end with LaunchError giving the reason."""
        self._control.stop(AbortKind.FAILED, self.rank, reason, by=self.rank)

    def check_abort(self, describe: Callable[[AbortInfo, list[WorkerRecord]], str] | None = None) -> None:
        """Raise when the group has stopped. `describe` may compose the text from the records.

        Raises:
            HangError, RankDiedError, LaunchError: this rank learns of it now.
            GroupError: the group is closed, or this rank has been told before.
        """
        self._usable()
        info = self._control.abort()
        if info is not None:
            self._raise_abort(info, describe(info, self.worker_records()) if describe and not self._poison else None)

    def _raise_abort(self, info: AbortInfo, text: str | None = None) -> NoReturn:
        if self._poison is not None:
            raise GroupError(f"this group has stopped and cannot be used any more: {self._poison}")
        self._poison = text or self._control.describe(info, self._timeout_s)
        raise info.kind.error(self._poison)

    def close(self) -> None:
        """Leave the group and drop its memory. Not collective; calling it again does nothing.

        A peer that still waits for this rank in a collective or at a launch is told that it left.
        """
        # A forked child holds a copy of this object but is not the rank.
        if self._handle is None or os.getpid() != self._pid:
            return
        handle, self._handle = self._handle, None
        self._control.set_left(self.rank, True)
        self.cache.clear()
        self.heap.close()
        self._slots = None
        self._control.library.twg_free(handle)

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._handle is None

    # ------------------------------------------------------------------ inside

    def _usable(self) -> int:
        if self._handle is None:
            raise GroupError("this group is closed; join or start a new one")
        return self._handle

    def _wait(self, call: Callable[..., int], first: tuple[Any, ...], again: tuple[Any, ...]) -> int:
        """Run a C wait to its end, coming back to Python now and then so that Ctrl-C works.

        Called with `first`, and with `again` to resume. Raises what an abort means; returns other codes.
        """
        try:
            code = call(*first)
            while code == INTERRUPTED:
                code = call(*again)
        except BaseException as error:
            # Half done it cannot be entered again, so the peers must not wait for this rank.
            self.fail(f"{type(error).__name__} in a collective call")
            raise
        if code == ABORTED:
            info = self._control.abort()
            assert info is not None
            self._raise_abort(info)
        return code

    def _gather(self, source: int | bytes, nbytes: int, target: int) -> None:
        handle = self._usable()
        code = self._wait(self._c_gather, (handle, source, nbytes, target, 0), (handle, source, nbytes, target, 1))
        if code == OK:
            return
        if code == GROW:  # on all ranks alike
            self._grow(nbytes)
            self._gather(source, nbytes, target)
        elif code == MISMATCH:
            sizes = (ctypes.c_uint64 * self.world_size)()
            self._control.library.twg_gather_sizes(handle, sizes)
            listed = ", ".join(f"rank {rank}: {size}" for rank, size in enumerate(sizes))
            raise GroupError(
                f"ranks gather different numbers of bytes ({listed}); every rank must make the same calls in the "
                "same order, with payloads of one size"
            )

    def _grow(self, nbytes: int) -> None:
        """Larger gather slots: both parities of a rank lie in its part of a symmetric allocation."""
        capacity = 1 << (nbytes - 1).bit_length()
        old, new = self._slots, self.heap.allocate("tileweave.gather", 2 * capacity)
        stride = new.stride
        assert stride is not None
        self._control.library.twg_use_slots(self._usable(), new.addresses[0], stride, capacity)
        self._slots = new
        if old is not None:
            self.heap.free(old)  # allocate() ended with a collective, so nobody reads the old ones


# Thread ranks differ per thread. A process rank is one for the whole process, also for
# threads that the user or torch starts, and these begin with an empty context.
_thread_group: ContextVar[Group | None] = ContextVar("tileweave_group", default=None)
_process_group: Group | None = None
_creating = threading.Lock()


def active_group() -> Group | None:
    """The group this thread belongs to, or None when there is none that is open."""
    return next((group for group in (_thread_group.get(), _process_group) if group and not group.closed), None)


def current_group() -> Group:
    """The group this thread belongs to; a group of one rank, made at first use, outside any job."""
    global _process_group
    with _creating:
        group = active_group()
        if group is None:
            group = _process_group = Group(0, Control.create(1)[0], "single")
        return group


def solo_group(group: Group) -> Group:
    """A group of one rank for work that `group`'s rank does alone; made at first use and kept with it."""
    if group.world_size == 1:
        return group
    solo = group.cache.get("solo")
    if not isinstance(solo, Group):
        solo = group.cache["solo"] = Group(0, Control.create(1)[0], "single")
    return solo


def set_current_group(group: Group | None) -> None:
    """Make `group` current: for this thread if its ranks are threads, else for the whole process; None clears both."""
    global _process_group
    if group is None or group.kind != "threads":
        _process_group = group
        _thread_group.set(None)
    else:
        _thread_group.set(group)


def _launch_apart(keys: list[LaunchKey]) -> GroupError:
    """The error of ranks that came to one launch with different kernels."""
    ranks: dict[LaunchKey, list[str]] = {}
    for rank, key in enumerate(keys):
        ranks.setdefault(key, []).append(str(rank))
    listed = "; ".join(f"rank {', '.join(numbers)}: kernel {key}" for key, numbers in ranks.items())
    hint = ""
    if len({key.name for key in ranks}) < len(ranks):
        hint = ". Of one name with different digests, the shapes, dtypes, constants, tunables or config differ"
    return GroupError(
        f"ranks launch different kernels, so nothing was launched: {listed}; every rank must launch the same kernels "
        f"in the same order{hint}"
    )
