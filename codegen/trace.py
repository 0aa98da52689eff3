"""What a traced launch recorded, and its forms for people: Perfetto JSON and a timeline picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


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


def write_perfetto(events: Sequence[TraceEvent], path: Path) -> None:
    """Write Chrome trace JSON: a process a rank, a thread a worker, microseconds from the first event."""
    start = min((e.begin_ns for e in events), default=0)
    rows = [
        {
            "name": e.task, "ph": "X", "pid": e.rank, "tid": e.worker, "ts": (e.begin_ns - start) / 1e3,
            "dur": (e.end_ns - e.begin_ns) / 1e3, "args": {"tile": list(e.tile), "waited_us": e.waited_ns / 1e3},
        }
        for e in events
    ]  # fmt: skip
    names = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({e.rank for e in events})
    ]
    path.write_text(json.dumps({"traceEvents": [*names, *rows], "displayTimeUnit": "ms"}))
