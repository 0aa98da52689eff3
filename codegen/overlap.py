"""How much of a launch's communication was hidden, read off its trace.

For one rank, with time taken as sets of instants:

* it **computes** while one of its workers is inside a tile of role `compute` or `reduce` and does not wait;
* it **waits** while one of its workers waits for a signal;
* **communication** goes on while a worker of *any* rank is inside a tile of role `comm` or `relay`
  (rows for this rank may be under way), and while this rank waits;
* the communication is **hidden** while this rank computes, and exposed otherwise.

So a rank that sends with its only worker does not hide that sending; it hides the sending of its
peers if it computes meanwhile.  A `reduce` tile that reads from peers counts as computing.

A trace tells how long a tile waited, not when; a tile is taken to wait first and work then, which is
so for nearly all of them.  With more workers than cores a tile's time also contains the
time in which its thread was not running, and a waiting worker costs nothing as long as another
rank's worker has its core.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tileweave.codegen.trace import TraceEvent

Spans = npt.NDArray[np.int64]
"""Disjoint time spans in order, `[n, 2]`: begin and end in nanoseconds."""

COMMUNICATION_ROLES = ("comm", "relay")

DEFINITION = (
    "communication = time in which any rank sends (a comm tile) or this rank waits; hidden = the part of it in which "
    "this rank computes"
)


@dataclass(frozen=True)
class RankOverlap:
    """One rank's part of a launch, nanoseconds. `sending`, `waiting`, `computing`: summed over its workers.

    `communication` and `hidden` are lengths of time, as defined above.
    """

    rank: int
    sending_ns: int
    waiting_ns: int
    computing_ns: int
    communication_ns: int
    hidden_ns: int

    @property
    def hidden_share(self) -> float:
        """Hidden part of the communication, 0 to 1; 1 when there was none."""
        return self.hidden_ns / self.communication_ns if self.communication_ns else 1.0


def measure_overlap(events: Sequence[TraceEvent], roles: Mapping[str, str]) -> list[RankOverlap]:
    """What each rank hid, from the events of all ranks of one launch.

    Args:
        events: in any order.
        roles: task name → role.
    """
    comm = [e for e in events if roles[e.task] in COMMUNICATION_ROLES]
    sending = spans((e.begin_ns + e.waited_ns, e.end_ns) for e in comm)
    result = []
    for rank in sorted({e.rank for e in events}):
        own = [e for e in events if e.rank == rank]
        work = [e for e in own if roles[e.task] not in COMMUNICATION_ROLES]
        computing = spans((e.begin_ns + e.waited_ns, e.end_ns) for e in work)
        waiting = spans((e.begin_ns, e.begin_ns + e.waited_ns) for e in own)
        communication = union(sending, waiting)
        result.append(
            RankOverlap(
                rank=rank,
                sending_ns=sum(e.busy_ns for e in comm if e.rank == rank),
                waiting_ns=sum(e.waited_ns for e in own),
                computing_ns=sum(e.busy_ns for e in work),
                communication_ns=length(communication),
                hidden_ns=length(intersection(communication, computing)),
            )
        )
    return result


def cores_computing(events: Sequence[TraceEvent], roles: Mapping[str, str], cores: int) -> float:
    """Share of the cores' time that went into computing, 0 to 1, from the first begin to the last end.

    At any instant as many cores compute as workers of all ranks do, but no more than there are.  With more workers
    than cores this, not the share of one rank, says what communication cost the job.
    """
    work = [e for e in events if roles[e.task] not in COMMUNICATION_ROLES and e.busy_ns > 0]
    if not work:
        return 0.0
    times = np.array([(e.begin_ns + e.waited_ns, e.end_ns) for e in work], dtype=np.int64)
    moments = times.ravel()
    order = np.argsort(moments, kind="stable")
    running = np.cumsum(np.tile([1, -1], len(work))[order])[:-1]
    busy = int((np.minimum(running, cores) * np.diff(moments[order])).sum())
    whole = max(e.end_ns for e in events) - min(e.begin_ns for e in events)
    return busy / (whole * cores) if whole else 0.0


def spans(pairs: Iterable[tuple[int, int]]) -> Spans:
    """The union of half-open (begin, end) pairs."""
    every = np.array([p for p in pairs if p[1] > p[0]], dtype=np.int64).reshape(-1, 2)
    every = every[np.argsort(every[:, 0], kind="stable")]
    if not len(every):
        return every
    reach = np.maximum.accumulate(every[:, 1])
    first = np.concatenate(([True], every[1:, 0] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.stack([every[first, 0], reach[last]], axis=1)


def union(a: Spans, b: Spans) -> Spans:
    """Instants in `a` or `b`."""
    return spans((int(p[0]), int(p[1])) for p in np.concatenate([a, b]))


def intersection(a: Spans, b: Spans) -> Spans:
    """Instants in `a` and `b`."""
    if not len(a) or not len(b):
        return np.empty((0, 2), dtype=np.int64)
    # For each span of `a`, the run of spans of `b` that it meets.
    begin = np.searchsorted(b[:, 1], a[:, 0], side="right")
    end = np.searchsorted(b[:, 0], a[:, 1], side="left")
    counts = np.maximum(end - begin, 0)
    left = np.repeat(np.arange(len(a)), counts)
    right = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(begin, counts)
    return np.stack([np.maximum(a[left, 0], b[right, 0]), np.minimum(a[left, 1], b[right, 1])], axis=1)


def length(of: Spans) -> int:
    """Total length."""
    return int((of[:, 1] - of[:, 0]).sum())
