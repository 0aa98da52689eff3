"""How launches end that cannot end well: hangs, dead ranks, exceptions, Ctrl-C; and that nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.runtime.test_spawn import ranks_alive
from tileweave.codegen.compiled import CompiledKernel
from tileweave.codegen.compiled import compile as compile_kernel
from tileweave.compiler.config import Config
from tileweave.compiler.trace import kernel
from tileweave.errors import ArgumentError, GroupError, HangError, LaunchError, RankDiedError
from tileweave.primitives import language as tw
from tileweave.primitives.expr import Expr
from tileweave.primitives.group import Group
from tileweave.primitives.launch import VirtualGroup, spawn
from tileweave.primitives.memory import Table, Tensor

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process and no shared memory file stays."""
    files = shared_files()
    yield
    assert ranks_alive() == []
    assert shared_files() <= files


def shared_files() -> set[str]:
    """POSIX shared memory of this machine, but for the semaphores that other Python processes come and go with."""
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")}


@kernel
def handshake(send: Table, out: Tensor) -> None:
    """Each rank adds `send` to two counters of its right neighbour and waits for 3 in each of its own."""
    given = tw.signals("given", (2, 2))

    @tw.task(grid={"i": 2}, role="comm")
    def give(i: Expr) -> None:
        tw.signal(given, (i, 1), send[i], (tw.rank() + 1) % tw.world_size())

    @tw.task(grid={"i": 2})
    def take(i: Expr) -> None:
        tw.wait(given, (i, 1), 3)
        tw.store(out, (i, tw.ds(0, 4)), tw.full((4,), 1.0))


WAIT_LINE = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "tw.wait(given" in line)


def compiled(world_size: int) -> CompiledKernel:
    run = Config(workers=3, comm_workers=1)
    return compile_kernel(handshake, Table((2,)), Tensor((2, 4)), world_size=world_size, config=run)


def launch(group: Group, *send: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """One launch in which this rank sends `send`."""
    out = np.zeros((2, 4), np.float32)
    compiled(group.world_size).run((np.array(send, np.int32), out), group)
    return out


def outcome(call: Callable[[], object]) -> str:
    """Type and text of what `call` raises."""
    try:
        call()
    except (LaunchError, ArgumentError, GroupError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def forgetful(group: Group) -> list[str]:
    """A good launch, one in which rank 0 sends too little, which rank 0 itself does not notice, and two more."""
    texts = []
    for send in ((3, 3), (3, 2), (3, 3), (3, 3)):
        texts.append(outcome(lambda send=send: launch(group, *(send if group.rank == 0 else (3, 3)))))  # type: ignore[misc]
        if group.rank == 0:
            time.sleep(0.3)  # so that rank 1 has waited longer than rank 0 when the time is up
    return texts


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_hang_names_who_waits_for_what_on_every_rank(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("TILEWEAVE_TIMEOUT_S", "1")
    if kind == "threads":
        with VirtualGroup(2) as ranks:
            rank_0, rank_1 = ranks.run(forgetful)
    else:
        rank_0, rank_1 = spawn(forgetful, 2)
    text = (
        "kernel 'handshake' stopped: rank 1 waited longer than 1 s (TILEWEAVE_TIMEOUT_S)\n"
        "  rank 0 host: waits for rank 1 to enter the launch\n"
        f"  rank 1 worker 2: take[i=1] at test_failures.py:{WAIT_LINE} waits for given[1, 1]: expected 3, observed 2"
    )
    after = f"GroupError: this group has stopped and cannot be used any more: {text}"
    assert rank_0 == ["fine", "fine", f"HangError: {text}", after]
    assert rank_1 == ["fine", f"HangError: {text}", after, after]


@kernel
def other() -> None:
    """A kernel whose first task and wait are not those of `handshake`."""
    unused = tw.signals("unused", (5,))

    @tw.task(grid={"z": 3})
    def elsewhere(z: Expr) -> None:
        tw.signal(unused, z, 1)
        tw.wait(unused, z, 1)


def stuck_behind(group: Group) -> str:
    """Rank 1 hangs in one kernel while rank 0 is at the next, which is another."""
    bystander = compile_kernel(other, world_size=2)
    bystander.run((), group)
    launch(group, 3, 3)
    first = outcome(lambda: launch(group, *((3, 2) if group.rank == 0 else (3, 3))))
    time.sleep(0.3)
    return first if group.rank else outcome(lambda: bystander.run((), group))


def test_a_hang_is_told_in_terms_of_its_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWEAVE_TIMEOUT_S", "1")
    with VirtualGroup(2) as ranks:
        for text in ranks.run(stuck_behind):
            assert text.startswith("HangError: kernel 'handshake' stopped: rank 1 waited longer than 1 s")
            assert f"take[i=1] at test_failures.py:{WAIT_LINE} waits for given[1, 1]: expected 3, observed 2" in text


@kernel
def stuck() -> None:
    """Ends on no rank: everybody waits for a signal that nobody sends."""
    never = tw.signals("never", (3,))

    @tw.task(grid={"a": 1, "b": 2})
    def wait(a: Expr, b: Expr) -> None:
        tw.wait(never, b + 1, 7)


def test_a_hang_of_everybody_lists_every_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWEAVE_TIMEOUT_S", "0.3")
    with VirtualGroup(2) as ranks, pytest.raises(HangError) as caught:
        ranks.run(lambda group: compile_kernel(stuck, world_size=2, config=Config(workers=2)).run((), group))
    first, *lines = str(caught.value).splitlines()
    assert re.fullmatch(r"kernel 'stuck' stopped: rank [01] waited longer than 0.3 s \(TILEWEAVE_TIMEOUT_S\)", first)
    assert [re.sub(r"py:\d+", "py:N", line) for line in lines] == [
        f"  rank {rank} worker {b}: wait[a=0, b={b}] at test_failures.py:N waits for never[{b + 1}]: "
        "expected 7, observed 0"
        for rank in range(2)
        for b in range(2)
    ]


def killed(group: Group, folder: str) -> None:
    """Launches without end, in the middle of which rank 1 is killed; the others note when they are told."""

    def kill() -> None:
        Path(folder, "died").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    launch(group, 3, 3)
    if group.rank == 1:
        threading.Timer(0.3, kill).start()
    try:
        while True:
            launch(group, 3, 3)
    except RankDiedError as error:
        Path(folder, f"rank{group.rank}").write_text(f"{time.monotonic()} {error}")
        raise


def test_a_killed_rank_ends_the_launches_of_the_others(tmp_path: Path) -> None:
    with pytest.raises(RankDiedError, match=r"^rank 1 \(process \d+\) was killed by SIGKILL"):
        spawn(killed, 3, str(tmp_path), timeout_s=60)
    died = float((tmp_path / "died").read_text())
    for rank in (0, 2):
        when, told = (tmp_path / f"rank{rank}").read_text().split(" ", 1)
        assert "rank 1" in told
        assert "died" in told or "was killed" in told
        assert float(when) - died < 2.0


def raising(group: Group) -> None:
    """Rank 1 raises between two launches, while the others are in the second."""
    launch(group, 3, 3)
    if group.rank == 1:
        raise ValueError("no second launch")
    launch(group, 3, 3)


def start(kind: str, world_size: int, fn: Callable[[Group], object]) -> None:
    """On ranks that are threads or processes."""
    if kind == "threads":
        with VirtualGroup(world_size) as ranks:
            ranks.run(fn)
    else:
        spawn(fn, world_size)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_an_exception_in_a_rank_ends_the_launches_of_the_others(kind: str) -> None:
    with pytest.raises(ValueError, match="no second launch") as caught:
        start(kind, 3, raising)
    said = str(caught.value.__cause__) + "".join(getattr(caught.value, "__notes__", ()))
    for rank in (0, 2):
        assert re.search(
            rf"rank [02, ]*{rank}[02, ]*: LaunchError: .*rank 1 failed: ValueError: no second launch", said
        )


def refused(group: Group, culprit: int) -> list[str]:
    """Arguments that do not fit, on one rank; then a launch that does."""
    kernel_ = compiled(2)
    bad = [
        (np.zeros(2, np.int64), np.zeros((2, 4), np.float32)),
        (np.zeros(2, np.int32), np.zeros((2, 5), np.float32)),
        (np.zeros(2, np.int32), np.zeros((2, 8), np.float32)[:, ::2]),
        (np.zeros(2, np.int32), [[1.0]]),
        (np.zeros(2, np.int32),),
    ]
    good = (np.full(2, 3, np.int32), np.zeros((2, 4), np.float32))
    texts = [outcome(lambda args=args: kernel_.run(args if group.rank == culprit else good, group)) for args in bad]  # type: ignore[misc]
    assert launch(group, 3, 3).all()
    return texts


def test_arguments_of_a_launch() -> None:
    texts = [
        "argument 'send' needs dtype int32, got int64",
        "argument 'out' needs shape [2, 4], got [2, 5]: dimension 1 is 5, expected 4",
        "argument 'out' is not contiguous; allocate it contiguous, since the kernel writes it",
        "argument 'out' needs a torch tensor or NumPy array, got list",
        "kernel 'handshake' takes 2 arguments (send, out), got 1; plain values were fixed when it was compiled",
    ]
    with VirtualGroup(2) as ranks:
        peer, own = ranks.run(refused, 1)
    assert own == [f"ArgumentError: {text}" for text in texts]
    assert peer == [f"PeerError: nothing was launched on any rank, because of rank 1: {text}" for text in texts]


def differing(group: Group) -> str:
    """Rank 1 has compiled the kernel for another order."""
    config = Config(order="program" if group.rank else "expert_ascending")
    own = compile_kernel(handshake, Table((2,)), Tensor((2, 4)), world_size=2, config=config)
    try:
        own.load(group)
    except GroupError as error:
        assert launch(group, 3, 3).all()
        return str(error)
    return "fine"


def test_kernels_that_differ_between_ranks() -> None:
    with VirtualGroup(2) as ranks:
        first, second = ranks.run(differing)
    assert first == second
    kernels = r"rank 0: kernel 'handshake' \(\w{16}\); rank 1: kernel 'handshake' \(\w{16}\)"
    assert re.match(f"ranks launch different kernels, so nothing was launched: {kernels}; every rank", first)
    assert first.endswith("the shapes, dtypes, constants, tunables or config differ")


SCRIPT = """
import os, signal, sys
from pathlib import Path
from tests.engine.test_failures import launch
from tileweave.primitives.launch import VirtualGroup, spawn

def rank(group, folder):
    launch(group, 3, 3)
    Path(folder, f"pid{group.rank}").write_text(str(os.getpid()))
    while True:
        launch(group, 3, 3)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs tests in the background ignores it
    if sys.argv[2] == "threads":
        VirtualGroup(2).run(rank, sys.argv[1])
    else:
        spawn(rank, 2, sys.argv[1])
"""


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_ctrl_c_in_the_middle_of_launches(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path), kind]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    job = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True, start_new_session=True)
    pids = [tmp_path / f"pid{rank}" for rank in range(2)]
    try:
        _until(lambda: all(path.exists() and path.read_text() for path in pids), 60)
        time.sleep(0.2)
        began = time.monotonic()
        os.killpg(job.pid, signal.SIGINT)  # as a terminal does
        errors = job.communicate(timeout=20)[1]
    finally:
        job.kill()  # its ranks end with it
        job.wait()
    assert time.monotonic() - began < 10
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert job.returncode in (1, 130, -signal.SIGINT)
    _until(lambda: not any(Path(f"/proc/{path.read_text()}").exists() for path in pids), 10)


def _until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def test_launch_errors_are_launch_errors() -> None:
    assert issubclass(HangError, LaunchError)
    assert issubclass(RankDiedError, LaunchError)
