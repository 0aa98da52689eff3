"""Rank processes: results, deaths, time limits, Ctrl-C, torchrun; and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tileweave.errors import BoundsError, GroupError, HangError, PeerError, RankDiedError, SourceLocation
from tileweave.primitives.failures import RankTracebackError
from tileweave.primitives.group import Group
from tileweave.primitives.launch import init, spawn

ROOT = Path(__file__).resolve().parents[2]


def ranks_alive() -> list[str]:
    """Processes below this one, other than the fork server and the resource tracker of multiprocessing."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = (entry / "stat").read_text()
            mapped = (entry / "maps").read_text()
        except OSError:
            continue
        if status.split(") ")[1][0] == "Z" or "memfd:tileweave" in mapped:
            parent = int(status.rsplit(") ", 1)[1].split()[1])
            if entry.name != str(os.getpid()) and _is_ours(parent):
                found.append(f"{entry.name} {status[:60]}")
    return found


def _is_ours(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[1])
        except OSError:
            return False
    return False


def shared_files() -> set[Path]:
    """POSIX shared memory; semaphores of other programs' process pools come and go."""
    return {path for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process, no shared memory file, no descriptor stays."""
    files = shared_files()
    yield
    assert ranks_alive() == []
    assert shared_files() <= files


def report(group: Group, word: str, **_: Any) -> tuple[int, int, str, str, str]:
    """What a rank sees of the world."""
    return group.rank, group.world_size, word, os.environ.get("TILEWEAVE_TEST", ""), str(Path.cwd())


def test_results_in_rank_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILEWEAVE_TEST", "seen")
    monkeypatch.chdir(tmp_path)
    assert spawn(report, 3, "hello") == [(rank, 3, "hello", "seen", str(tmp_path)) for rank in range(3)]
    assert spawn(report, 1, "one") == [(0, 1, "one", "seen", str(tmp_path))]


def large(group: Group) -> np.ndarray[Any, Any]:
    """More than a pipe holds."""
    return np.full(1 << 20, group.rank, np.uint8)


def test_large_results() -> None:
    assert [int(array.sum()) for array in spawn(large, 3)] == [0, 1 << 20, 2 << 20]


def fail_in(group: Group, culprit: int) -> None:
    """One rank raises, the others wait."""
    if group.rank == culprit:
        raise BoundsError("tile leaves buffer", SourceLocation("kernel.py", 3))
    group.barrier()


def test_exception_of_a_rank() -> None:
    begin = time.perf_counter()
    with pytest.raises(BoundsError, match=r"kernel.py:3: tile leaves buffer") as caught:
        spawn(fail_in, 3, 2)
    assert time.perf_counter() - begin < 10
    assert caught.value.location == SourceLocation("kernel.py", 3)
    assert isinstance(caught.value.__cause__, RankTracebackError)
    text = str(caught.value.__cause__)
    assert "in rank 2" in text
    assert "fail_in" in text
    assert "rank 0, 1: LaunchError: rank 2 failed" in text


class Stubborn(Exception):  # noqa: N818
    """Pickles, but does not come back."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("stubborn")


def odd(group: Group, what: str) -> Any:
    """Ends of functions that are hard to send home."""
    if what == "exception":
        raise Stubborn(1, 2)
    if what == "value":
        return lambda: None
    if what == "exit":
        sys.exit(3)
    if what == "agree":
        group.agree("no room" if group.rank == 1 else None)
    return None


@pytest.mark.parametrize(
    ("what", "text"), [("exception", "Stubborn: stubborn"), ("value", "pickle"), ("exit", "SystemExit: 3")]
)
def test_ends_that_cannot_be_sent(what: str, text: str) -> None:
    with pytest.raises(Exception, match=text):
        spawn(odd, 2, what)


def test_agreement_reaches_the_caller() -> None:
    with pytest.raises(PeerError, match=r"^rank 1: no room$"):
        spawn(odd, 2, "agree")


def die(group: Group, how: str, folder: str) -> None:
    """Rank 1 dies; the others note when and what they are told."""
    group.barrier()
    if group.rank == 1:
        Path(folder, "died").write_text(str(time.monotonic()))
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.barrier()
    except RankDiedError as error:
        Path(folder, f"rank{group.rank}").write_text(f"{time.monotonic()} {error}")
        raise


@pytest.mark.parametrize(("how", "text"), [("kill", "killed by SIGKILL"), ("exit", "exited with code 7")])
def test_dead_rank_is_named_everywhere_and_soon(how: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(RankDiedError, match=rf"rank 1 \(process \d+\) (was )?{text}"):
        spawn(die, 3, how, str(tmp_path))
    died = float((tmp_path / "died").read_text())
    for rank in (0, 2):
        when, told = (tmp_path / f"rank{rank}").read_text().split(" ", 1)
        assert told.startswith("rank 1 (process ")
        assert float(when) - died < 1.0


def late(group: Group) -> None:
    """Rank 0 comes too late."""
    if group.rank == 0:
        time.sleep(1.5)
    group.barrier()


def test_late_rank_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWEAVE_TIMEOUT_S", "0.5")
    with pytest.raises(HangError, match=r"time limit of 0.5 s has passed: rank 1 waits for rank 0"):
        spawn(late, 2)


def sleep(group: Group) -> None:
    """Too long."""
    time.sleep(100)


def test_time_limit_of_the_job() -> None:
    begin = time.perf_counter()
    with pytest.raises(HangError, match=r"did not end within 0.5 s; still at work: rank 0, 1"):
        spawn(sleep, 2, timeout_s=0.5)
    assert time.perf_counter() - begin < 10


def early(group: Group) -> None:
    """Rank 0 does not come at all."""
    if group.rank:
        group.barrier()


def test_rank_that_returns_early() -> None:
    with pytest.raises(RankDiedError, match="rank 0 left the group"):
        spawn(early, 2)


def own_init(group: Group) -> bool:
    """init() inside a rank."""
    return init() is group


def test_init_in_a_rank() -> None:
    assert spawn(own_init, 2) == [True, True]


def test_refused_before_any_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GroupError, match="top level"):
        spawn(lambda group: None, 2)
    with pytest.raises(GroupError, match="1 to 1024"):
        spawn(report, 0, "x")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(GroupError, match="torchrun"):
        init()
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(GroupError, match="4 ranks, 2 of them on this host"):
        init()


SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from tileweave.primitives.launch import spawn

def rank(group, folder):
    Path(folder, f"pid{group.rank}").write_text(str(os.getpid()))
    group.barrier()
    if group.rank == 0:
        time.sleep(100)
    group.barrier()

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs tests in the background ignores it
    spawn(rank, 3, sys.argv[1])
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_their_starter(how: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(tmp_path)]
    job = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True, start_new_session=True)
    pids = [tmp_path / f"pid{rank}" for rank in range(3)]
    _until(lambda: all(path.exists() and path.read_text() for path in pids), 60)
    time.sleep(0.2)
    begin = time.perf_counter()
    if how == signal.SIGINT:
        os.killpg(job.pid, how)  # as a terminal does
    else:
        job.send_signal(how)
    errors = job.communicate(timeout=20)[1]
    if how == signal.SIGINT:
        assert "KeyboardInterrupt" in errors
    _until(lambda: not any(_running(int(path.read_text())) for path in pids), 10)
    assert time.perf_counter() - begin < 10


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False


def _until(condition: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


TORCHRUN = """
import os, signal, sys, time
import numpy as np
from tileweave.errors import GroupError, RankDiedError
from tileweave.primitives.group import current_group
from tileweave.primitives.launch import init

assert "torch" not in sys.modules
group = init()
assert init() is group and current_group() is group and group.kind == "processes"
sys.stdout.write(f"SUM {int(group.all_gather(np.array([group.rank + 1])).sum())}\\n")
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
group.close()
again = init()
assert again is not group
again.barrier()
sys.stdout.write("AGAIN\\n")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.stdout.flush()
if again.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    again.barrier()
except RankDiedError as error:
    sys.stdout.write(f"TOLD {error}\\n")
    sys.stdout.flush()
"""


def test_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "job.py"
    script.write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.count("SUM 3") == 2, done.stderr
    assert done.stdout.count("AGAIN") == 2, done.stderr
    assert "TOLD rank 1 (process " in done.stdout
