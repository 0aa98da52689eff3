"""Timing things on ranks side by side, and telling the parent how far they are."""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from tileweave.errors import ConfigError
from tileweave.primitives.group import Group

Times = dict[str, list[tuple[float, float]]]
"""Name → (begin, end) of each repetition on one rank; seconds of a clock that all ranks of a host share."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype called `fp32` or `bf16`.

    Raises:
        ConfigError: another name.
    """
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is unknown; use one of {', '.join(DTYPES)}")
    return DTYPES[name]


@contextmanager
def gloo(group: Group, store: Path) -> Iterator[None]:
    """The ranks of `group` as a torch.distributed gloo job; `store` is a file that does not exist yet."""
    # Ranks share a host, and its name need not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=group.rank, world_size=group.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def alternate(group: Group, work: Mapping[str, Callable[[], object]], repeats: int, ticks: Ticks) -> Times:
    """Run each entry of `work` `repeats` times, turn by turn, all ranks starting together; collective.

    The order turns around every time, so neither always runs in the wake of the other.
    """
    times: Times = {name: [] for name in work}
    names = list(work)
    for _ in range(repeats):
        for name in names:
            group.barrier()
            begin = time.perf_counter()
            work[name]()
            times[name].append((begin, time.perf_counter()))
        names.reverse()
        ticks.add(group)
    return times


def repetitions(group: Group, work: Sequence[Callable[[], object]], seconds: float, most: int) -> int:
    """How often `work` can be run in `seconds`, 5 to `most`; the same on all ranks. Also warms up; collective."""
    for each in work:
        each()
    group.barrier()
    begin = time.perf_counter()
    for each in work:
        each()
    once = int((time.perf_counter() - begin) * 1e9)
    slowest = max(int.from_bytes(row.tobytes(), "little") for row in group.all_gather(once.to_bytes(8, "little")))
    return int(min(max(seconds * 1e9 // max(slowest, 1), 5), most))


def seconds_of(ranks: Sequence[Times], name: str) -> list[float]:
    """Each repetition's time over all ranks: from the first begin to the last end."""
    return [
        max(end for _, end in spans) - min(begin for begin, _ in spans)
        for spans in zip(*(times[name] for times in ranks), strict=True)
    ]


def median_ms(seconds: Sequence[float]) -> float:
    """Median in milliseconds."""
    return statistics.median(seconds) * 1e3


@dataclass(frozen=True)
class Ticks:
    """A count that ranks raise and the parent reads, kept in the size of a file."""

    path: Path

    def add(self, group: Group) -> None:
        """One more repetition is done; rank 0 counts."""
        if group.rank == 0:
            with self.path.open("ab") as file:
                file.write(b".")

    def count(self) -> int:
        """Repetitions done."""
        return self.path.stat().st_size if self.path.exists() else 0


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for rendezvous and tick files, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="tileweave-") as folder:
        yield Path(folder)


@contextmanager
def followed(ticks: Ticks, show: Callable[[int], None], every_s: float = 0.2) -> Iterator[None]:
    """Call `show(count)` now and then while the block runs."""
    done = threading.Event()

    def follow() -> None:
        while not done.wait(every_s):
            show(ticks.count())

    thread = threading.Thread(target=follow, name="tileweave-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
