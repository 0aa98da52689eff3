"""Ranks as threads of one process."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

from tileweave import knobs
from tileweave.errors import GroupError
from tileweave.primitives.control import AbortKind, Control
from tileweave.primitives.failures import SIGNAL_CHECK_S, raise_first_cause, reason_of
from tileweave.primitives.group import Group, set_current_group
from tileweave.primitives.heap import LocalParts

T = TypeVar("T")


class VirtualGroup:
    """`world_size` ranks as threads of this process, for tests, notebooks and debuggers.

    Python code of ranks takes turns (the GIL); waits and compiled kernels run side by
    side. The threads live until `close`. Use it as a context manager.
    """

    def __init__(self, world_size: int) -> None:
        """Raises GroupError when `world_size` is out of range, BuildError without a C compiler."""
        self._control = Control.create(world_size)[0]
        parts = LocalParts()
        self.groups = [Group(rank, self._control, "threads", parts) for rank in range(world_size)]
        self.world_size = world_size
        self._closed = False
        self._busy = threading.Lock()
        self._results: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._tasks: list[queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]] | None]] = []
        for rank in range(world_size):
            tasks: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
            self._tasks.append(tasks)
            # Daemons, so that a rank that never returns cannot keep the process alive.
            thread = threading.Thread(target=self._serve, args=(rank,), name=f"tileweave-rank-{rank}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def run(self, fn: Callable[..., T], *args: Any) -> list[T]:
        """`fn(group, *args)` on every rank; the results in rank order.

        Raises:
            GroupError: the group is closed, running already, or has failed before.
            Exception: what a rank raised; with several, the first cause. The group is
                unusable after.
        """
        if self._closed:
            raise GroupError("this VirtualGroup is closed; make a new one")
        if not self._busy.acquire(blocking=False):
            raise GroupError("this VirtualGroup is running a function already; nested or parallel runs need another")
        try:
            info = self._control.abort()
            if info is not None:
                text = self._control.describe(info, self.groups[0].timeout_s)
                raise GroupError(f"this VirtualGroup has stopped and cannot be used any more: {text}; make a new one")
            for rank, group in enumerate(self.groups):
                group.timeout_s = knobs.timeout_s.get()
                self._control.set_left(rank, False)
            for tasks in self._tasks:
                tasks.put((fn, args))
            results, errors = self._collect()
        finally:
            self._busy.release()
        if errors:
            raise_first_cause(errors, self._control.abort())
        return [results[rank] for rank in range(self.world_size)]

    def _collect(self) -> tuple[dict[int, Any], dict[int, BaseException]]:
        results: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        try:
            for _ in range(self.world_size):
                rank, value, error = self._next_result()
                if error is None:
                    results[rank] = value
                else:
                    errors[rank] = error
        except BaseException as error:  # Ctrl-C: ranks that wait end; others cannot be stopped and are left behind
            self._control.stop(AbortKind.FAILED, None, f"the run was stopped by {reason_of(error)}")
            raise
        return results, errors

    def _next_result(self) -> tuple[int, Any, BaseException | None]:
        while True:
            with suppress(queue.Empty):
                return self._results.get(timeout=SIGNAL_CHECK_S)

    def _serve(self, rank: int) -> None:
        group, tasks = self.groups[rank], self._tasks[rank]
        set_current_group(group)
        while (task := tasks.get()) is not None:
            fn, args = task
            value, error = None, None
            try:
                value = fn(group, *args)
            except BaseException as problem:  # noqa: BLE001  (`run` raises it)
                error = problem
                group.fail(reason_of(problem))
            self._control.set_left(rank, True)  # a peer that still waits for this rank waits in vain
            self._results.put((rank, value, error))
            del task, fn, args, value, error  # do not keep the caller's objects alive while idle
        group.close()  # here, not in close(): the thread may be at work still when that is called

    def close(self) -> None:
        """End the threads and drop the memory. Calling it again does nothing."""
        if not self._closed:
            self._closed = True
            for tasks in self._tasks:
                tasks.put(None)
            until = time.monotonic() + 2.0
            for thread in self._threads:
                thread.join(max(0.0, until - time.monotonic()))

    def __enter__(self) -> VirtualGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
