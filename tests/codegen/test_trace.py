"""Traces: sums, what was hidden, Perfetto JSON, the picture."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tileweave.codegen.overlap import cores_computing, intersection, length, measure_overlap, spans, union
from tileweave.codegen.timeline import draw_timeline, task_colours
from tileweave.codegen.trace import TraceEvent, launch_ns, sum_by_task, write_perfetto

ROLES = {"send": "comm", "gemm": "compute", "add": "reduce"}


def event(rank: int, worker: int, task: str, begin: int, end: int, waited: int = 0) -> TraceEvent:
    return TraceEvent(rank, worker, task, (0,), begin, end, waited)


# Rank 0 sends 0-10, then computes 10-30. Rank 1 waits 0-12 and computes 12-20, waits 20-25 and adds 25-30.
TWO_RANKS = [
    event(0, 0, "send", 0, 10),
    event(0, 0, "gemm", 10, 30),
    event(1, 0, "gemm", 0, 20, waited=12),
    event(1, 0, "add", 20, 30, waited=5),
]

pairs = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda p: (min(p), max(p))), max_size=12)


def instants(of: list[tuple[int, int]]) -> set[int]:
    return {t for begin, end in of for t in range(begin, end)}


@given(pairs, pairs)
def test_spans_are_sets_of_instants(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    left, right = spans(a), spans(b)
    assert np.all(left[1:, 0] > left[:-1, 1])
    assert instants(left.tolist()) == instants(a)
    assert instants(union(left, right).tolist()) == instants(a) | instants(b)
    both = intersection(left, right)
    assert instants(both.tolist()) == instants(a) & instants(b)
    assert length(both) == len(instants(a) & instants(b))


def test_a_lone_worker_hides_its_peers_sending_but_not_its_own() -> None:
    first, second = measure_overlap(TWO_RANKS, ROLES)
    assert (first.sending_ns, first.waiting_ns, first.computing_ns) == (10, 0, 20)
    assert (first.communication_ns, first.hidden_ns, first.hidden_share) == (10, 0, 0.0)
    assert (second.sending_ns, second.waiting_ns, second.computing_ns) == (0, 17, 13)
    assert (second.communication_ns, second.hidden_ns) == (17, 0)


def test_a_second_worker_hides_what_the_first_sends_and_waits_for() -> None:
    events = [event(0, 0, "send", 0, 10), event(0, 0, "send", 10, 30, waited=10), event(0, 1, "gemm", 5, 25)]
    (only,) = measure_overlap(events, ROLES)
    assert (only.sending_ns, only.waiting_ns, only.computing_ns) == (20, 10, 20)
    assert (only.communication_ns, only.hidden_ns) == (30, 20)


def test_no_communication_counts_as_hidden() -> None:
    (only,) = measure_overlap([event(0, 0, "gemm", 0, 5)], ROLES)
    assert only.hidden_share == 1.0
    assert measure_overlap([], ROLES) == []


@pytest.mark.parametrize(("cores", "share"), [(1, 20 / 30), (2, (20 + 8 + 5) / 60)])
def test_cores_computing(cores: int, share: float) -> None:
    assert cores_computing(TWO_RANKS, ROLES, cores) == pytest.approx(share)


def test_cores_computing_of_nothing() -> None:
    assert cores_computing([], ROLES, 2) == 0.0
    assert cores_computing([event(0, 0, "send", 0, 4)], ROLES, 2) == 0.0


def test_sums_by_task() -> None:
    send, gemm, add = sum_by_task(TWO_RANKS, ROLES)
    assert (send.task, send.role, send.tiles, send.busy_ns, send.waited_ns) == ("send", "comm", 1, 10, 0)
    assert (gemm.tiles, gemm.busy_ns, gemm.most_busy_ns, gemm.waited_ns, gemm.most_waited_ns) == (2, 28, 20, 12, 12)
    assert (add.busy_ns, add.waited_ns) == (5, 5)
    assert launch_ns(TWO_RANKS) == 30
    assert launch_ns([]) == 0


def test_perfetto(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_perfetto(TWO_RANKS, path, ROLES)
    rows = json.loads(path.read_text())["traceEvents"]
    tiles = [r for r in rows if r["ph"] == "X" and r["cat"] != "wait"]
    assert [(r["name"], r["cat"], r["pid"], r["ts"], r["dur"]) for r in tiles] == [
        ("send", "comm", 0, 0.0, 0.01),
        ("gemm", "compute", 0, 0.01, 0.02),
        ("gemm", "compute", 1, 0.0, 0.02),
        ("add", "reduce", 1, 0.02, 0.01),
    ]
    assert [(r["pid"], r["ts"], r["dur"]) for r in rows if r.get("cat") == "wait"] == [
        (1, 0.0, 0.012),
        (1, 0.02, 0.005),
    ]
    assert {(r["name"], r["pid"]) for r in rows if r["ph"] == "M"} == {
        (name, rank) for name in ("process_name", "thread_name") for rank in (0, 1)
    }


@pytest.mark.parametrize("events", [TWO_RANKS, []])
def test_picture(tmp_path: Path, events: list[TraceEvent]) -> None:
    path = tmp_path / "timeline.png"
    draw_timeline(events, ROLES, path, "two ranks")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_colours_differ_and_follow_roles() -> None:
    colours = task_colours({**ROLES, "relay": "relay", "gemm2": "compute"})
    assert list(colours) == [*ROLES, "relay", "gemm2"]
    assert len(set(colours.values())) == 5
