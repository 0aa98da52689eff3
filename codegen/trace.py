"""What a traced launch recorded: its events, sums by kind of task, and Perfetto JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tileweave.compiler.program import Program


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One executed tile. Clock in nanoseconds, common to all ranks of a host; `waited_ns` of it was waiting."""

    rank: int
    worker: int
    task: str
    tile: tuple[int, ...]
    begin_ns: int
    end_ns: int
    waited_ns: int

    @property
    def busy_ns(self) -> int:
        """Time that was not waiting."""
        return self.end_ns - self.begin_ns - self.waited_ns


@dataclass(frozen=True)
class TaskTime:
    """Tiles of one task on all ranks, nanoseconds: sums, and the largest sum of one rank."""

    task: str
    role: str
    tiles: int
    busy_ns: int
    waited_ns: int
    most_busy_ns: int
    most_waited_ns: int


def task_roles(program: Program) -> dict[str, str]:
    """Task name → role."""
    return {task.name: task.role for task in program.tasks}


def launch_ns(events: Sequence[TraceEvent]) -> int:
    """From the first begin to the last end, over all ranks."""
    return max((e.end_ns for e in events), default=0) - min((e.begin_ns for e in events), default=0)


def sum_by_task(events: Sequence[TraceEvent], roles: Mapping[str, str]) -> list[TaskTime]:
    """Where the time went, one entry a task, in the order of `roles`."""
    found = []
    for task, role in roles.items():
        chosen = [e for e in events if e.task == task]
        busy, waited = dict.fromkeys((e.rank for e in events), 0), dict.fromkeys((e.rank for e in events), 0)
        for event in chosen:
            busy[event.rank] += event.busy_ns
            waited[event.rank] += event.waited_ns
        most = max(busy.values(), default=0), max(waited.values(), default=0)
        found.append(TaskTime(task, role, len(chosen), sum(busy.values()), sum(waited.values()), *most))
    return found


def write_perfetto(events: Sequence[TraceEvent], path: Path, roles: Mapping[str, str] | None = None) -> None:
    """Write Chrome trace JSON: a process a rank, a thread a worker, microseconds from the first event.

    A wait is a slice of its own inside the tile's, at its begin; `roles` become categories.
    Open it at https://ui.perfetto.dev.
    """
    start = min((e.begin_ns for e in events), default=0)
    category = roles or {}
    rows: list[dict[str, Any]] = []
    for e in events:
        place = {"ph": "X", "pid": e.rank, "tid": e.worker, "ts": (e.begin_ns - start) / 1e3}
        rows.append(
            {
                "name": e.task, "cat": category.get(e.task, "tile"), **place, "dur": (e.end_ns - e.begin_ns) / 1e3,
                "args": {"tile": list(e.tile), "waited_us": e.waited_ns / 1e3},
            }
        )  # fmt: skip
        if e.waited_ns:
            rows.append({"name": "wait", "cat": "wait", **place, "dur": e.waited_ns / 1e3, "cname": "grey"})
    names = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({e.rank for e in events})
    ]
    names += [
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": worker, "args": {"name": f"worker {worker}"}}
        for rank, worker in sorted({(e.rank, e.worker) for e in events})
    ]
    path.write_text(json.dumps({"traceEvents": [*names, *rows], "displayTimeUnit": "ms"}))
