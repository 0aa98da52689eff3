"""Starting ranks as local processes: `spawn`. Also the home of `VirtualGroup` and `init` for importers."""

from __future__ import annotations

import ctypes
import importlib.util
import multiprocessing
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from tileweave.errors import GroupError, HangError, RankDiedError
from tileweave.primitives.control import AbortKind, Control
from tileweave.primitives.failures import SIGNAL_CHECK_S, raise_first_cause, reason_of
from tileweave.primitives.group import Group, set_current_group
from tileweave.primitives.torchrun import init
from tileweave.primitives.virtual import VirtualGroup

__all__ = ["VirtualGroup", "init", "spawn"]

T = TypeVar("T")

_START_S = 120.0  # how long the ranks may take to come up
_GRACE_S = 2.0  # how long a rank may take to end after the group has stopped
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class _Job:
    """What a rank process needs to begin."""

    rank: int
    world_size: int
    supervisor: int
    descriptor: int
    environ: dict[str, str]
    folder: str
    call: bytes


def spawn(fn: Callable[..., T], world_size: int, *args: Any, timeout_s: float | None = None) -> list[T]:
    """Run `fn(group, *args)` in `world_size` processes on this host; the results in rank order.

    `fn` must be importable: defined at the top level of a module, and a script that
    calls `spawn` needs its `if __name__ == "__main__":` guard, because each rank imports
    the script. Arguments and results are pickled. In a rank, `current_group()` is its group.

    Ranks are forked from a fork server, which is started at the first call, with torch
    and tileweave imported, and ends with this process. No rank outlives the call.

    `timeout_s` limits the whole call, seconds; single waits are limited by TILEWEAVE_TIMEOUT_S.

    Raises:
        GroupError: `fn` is no function, it or its arguments cannot be pickled, or `world_size` is out of range.
        RankDiedError: a rank was killed or exited.
        HangError: `timeout_s` has passed.
        Exception: what `fn` raised; with several, the first cause, its traceback in
            `__cause__` together with the errors of the other ranks.
    """
    if not callable(fn):
        raise GroupError(f"tw.spawn runs a function on every rank, got {fn!r}")
    call = _pickled_call(fn, args)
    control, descriptor = Control.create(world_size, shared=True)
    try:
        job = _Supervisor(control, None if timeout_s is None else time.monotonic() + timeout_s, timeout_s)
        environ, folder = dict(os.environ), str(Path.cwd())
        try:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(_preload())
            for rank in range(world_size):
                job.start(context, _Job(rank, world_size, os.getpid(), descriptor, environ, folder, call))
            job.supervise()
        except BaseException as error:
            control.stop(AbortKind.FAILED, None, f"the job was stopped by {reason_of(error)}")
            raise
        finally:
            job.end()
        results = job.results()
    finally:
        os.close(descriptor)
    return results


def _preload() -> list[str]:
    """What the fork server imports once, so that no rank has to: torch, and what the caller has loaded of Tileweave."""
    torch = ["torch"] if importlib.util.find_spec("torch") is not None else []
    return torch + sorted(name for name in sys.modules if name.partition(".")[0] == "tileweave")


def _pickled_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    main = sys.modules.get("__main__")
    if getattr(fn, "__module__", None) == "__main__" and not hasattr(main, "__file__"):
        raise GroupError(
            f"spawn cannot run {fn!r}: it is defined in an interactive session, which other processes cannot import; "
            "put it into a module, or use VirtualGroup"
        )
    try:
        return pickle.dumps((fn, args))
    except Exception as error:
        raise GroupError(
            f"spawn cannot send {fn!r} and its arguments to other processes: {error}; define the function at the top "
            "level of a module, pass arguments that pickle, or use VirtualGroup"
        ) from error


class _Supervisor:
    """Watches the rank processes of one job."""

    def __init__(self, control: Control, deadline: float | None, limit_s: float | None) -> None:
        self.control = control
        self.deadline, self.limit_s = deadline, limit_s
        self.processes: list[Any] = []
        self.pipes: dict[Connection[Any, Any], int] = {}
        self.returned: dict[int, Any] = {}
        self.errors: dict[int, BaseException] = {}
        self.traces: dict[int, str] = {}

    def start(self, context: Any, job: _Job) -> None:
        """Start one rank."""
        ours, theirs = context.Pipe(duplex=False)
        self.pipes[ours] = job.rank
        try:
            process = context.Process(target=_rank_main, args=(theirs, job), name=f"tileweave-rank-{job.rank}")
            process.start()
            self.processes.append(process)
        finally:
            theirs.close()

    def supervise(self) -> None:
        """Return when every rank has reported or ended, or the grace period after a failure is over."""
        waiting = set(self.pipes)
        # The sentinel tells of a death also when a child of the rank keeps the rank's end of the pipe open.
        sentinels = {process.sentinel: pipe for process, pipe in zip(self.processes, self.pipes, strict=True)}
        limit = self.deadline
        while waiting:
            left = None if limit is None else limit - time.monotonic()
            if left is not None and left <= 0:
                if self.control.abort() is not None or self.errors:
                    return
                self._pass_deadline(waiting)
                limit = time.monotonic() + _GRACE_S / 4
                continue
            watched: list[Any] = [*waiting, *(mark for mark, pipe in sentinels.items() if pipe in waiting)]
            for ready in wait(watched, SIGNAL_CHECK_S if left is None else min(left, SIGNAL_CHECK_S)):
                pipe = ready if isinstance(ready, Connection) else sentinels[ready]
                if pipe in waiting:
                    waiting.discard(pipe)
                    self._take(pipe)
            if self.errors and (limit is None or limit == self.deadline):
                grace = time.monotonic() + _GRACE_S
                limit = grace if limit is None else min(limit, grace)

    def _pass_deadline(self, waiting: set[Connection[Any, Any]]) -> None:
        late = ", ".join(str(rank) for rank in sorted(self.pipes[pipe] for pipe in waiting))
        text = f"the job did not end within {self.limit_s:g} s; still at work: rank {late}"
        self.control.stop(AbortKind.TIMEOUT, None, text)
        self.errors[-1] = HangError(f"{text}; pass a larger timeout_s to spawn if it needs longer")

    def _take(self, pipe: Connection[Any, Any]) -> None:
        """Read a rank's report; the end of the pipe without one means that the rank has ended."""
        rank = self.pipes[pipe]
        try:
            if not pipe.poll():
                raise EOFError
            fine, value, trace = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            error = RankDiedError(self._obituary(rank))
            self.control.stop(AbortKind.RANK_DIED, rank, str(error))
            self.errors[rank] = error
            return
        if fine:
            self.returned[rank] = value
        else:
            self.errors[rank], self.traces[rank] = value, trace

    def _obituary(self, rank: int) -> str:
        process = self.processes[rank]
        process.join(_GRACE_S)
        code, who = process.exitcode, f"rank {rank} (process {process.pid})"
        if code is not None and code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:
                name = f"signal {-code}"
            hint = "; the kernel does this when memory runs out, see dmesg" if -code == signal.SIGKILL else ""
            return f"{who} was killed by {name}{hint}"
        text = f"{who} exited with code {code} before its function returned"
        if self.control.pid(rank) == 0:
            text += (
                "; it had not begun. If its output above speaks of bootstrapping, put the script's entry under "
                'if __name__ == "__main__":'
            )
        return text

    def end(self) -> None:
        """See every process to its end, by force where need be."""
        stopped = self.control.abort() is not None
        until = time.monotonic() + (0.5 if stopped else _GRACE_S)
        for act in (None, "terminate", "kill"):
            for process in self.processes:
                if act is not None and process.exitcode is None:
                    getattr(process, act)()
            for process in self.processes:
                process.join(max(0.0, until - time.monotonic()))
            until = time.monotonic() + 2.0
        for process in self.processes:
            process.join()
            process.close()
        for pipe in self.pipes:
            pipe.close()

    def results(self) -> list[Any]:
        """The results in rank order, or the error that tells most."""
        if self.errors:
            if -1 in self.errors:  # the time limit of the job; what ranks said after it is its echo
                raise_first_cause({-1: self.errors[-1]}, None)
            raise_first_cause(self.errors, self.control.abort(), self.traces)
        return [self.returned[rank] for rank in range(self.control.world_size)]


def _rank_main(pipe: Connection[Any, Any], job: _Job) -> None:
    """The life of a rank process."""
    # However the supervisor dies, and the fork server that is this process's parent, the rank ends too.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_with, args=(job.supervisor,), name="tileweave-watch", daemon=True).start()
    # A terminal sends Ctrl-C to all; the supervisor alone decides, and stops the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(job.environ)
    os.chdir(job.folder)
    _limit_threads(job.world_size)
    group: Group | None = None
    try:
        group = Group(job.rank, Control.attach(job.supervisor, job.descriptor, job.world_size), "processes")
        limit = group.timeout_s
        group.timeout_s = max(limit, _START_S)
        group.barrier()  # a slow start is not a hang
        group.timeout_s = limit
        set_current_group(group)
        fn, args = pickle.loads(job.call)
        report = pickle.dumps((True, fn(group, *args), ""))
    except BaseException as error:  # noqa: BLE001  (whatever it is, the peers and the supervisor must hear of it)
        if group is not None:
            group.fail(reason_of(error))
        report = _pickled_error(error)
    with suppress(BrokenPipeError):  # the supervisor may have given up on the job
        pipe.send_bytes(report)
    pipe.close()
    if group is not None:
        group.close()


def _end_with(supervisor: int) -> None:
    """Kill this process when the supervisor is gone. The fork server does not see to it: it outlives its master
    for as long as it has children."""
    try:
        watch = os.pidfd_open(supervisor)
        select.select([watch], [], [])
    except ProcessLookupError:
        pass
    except OSError:  # a kernel before 5.3 has no pidfd
        while Path(f"/proc/{supervisor}").exists():
            time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def _limit_threads(world_size: int) -> None:
    """Share the cores between ranks unless the user has set thread counts."""
    if "OMP_NUM_THREADS" not in os.environ:
        count = max(1, len(os.sched_getaffinity(0)) // world_size)
        os.environ["OMP_NUM_THREADS"] = str(count)
        torch = sys.modules.get("torch")  # imported by the fork server, before the variable was set
        if torch is not None:
            torch.set_num_threads(count)


def _pickled_error(error: BaseException) -> bytes:
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    if isinstance(error, Exception):
        try:
            report = pickle.dumps((False, error, trace))
            pickle.loads(report)  # some exceptions pickle but do not come back
            return report
        except Exception:  # noqa: BLE001  (pickling runs code of the exception's class)
            pass
    return pickle.dumps((False, GroupError(f"a rank ended with {reason_of(error)}"), trace))
