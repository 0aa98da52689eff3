"""Symmetric memory between threads and between processes."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tileweave.errors import GroupError
from tileweave.primitives.group import Group, current_group
from tileweave.primitives.heap import PAGE
from tileweave.primitives.launch import VirtualGroup, spawn


def _run(kind: str, fn: Any, world_size: int, *args: Any) -> list[Any]:
    if kind == "processes":
        return spawn(fn, world_size, *args)
    with VirtualGroup(world_size) as virtual:
        return virtual.run(fn, *args)


BOTH = pytest.mark.parametrize("kind", ["threads", "processes"])


def exchange(group: Group) -> tuple[int, bool]:
    """Every rank writes into every peer's part."""
    small = group.heap.allocate("small", 100)
    large = group.heap.allocate("large", 5 << 20)
    assert not small.local().any()
    assert not large.local()[:: PAGE - 1].any()
    assert small.local().nbytes == 100
    assert all(address % PAGE == 0 for address in small.addresses + large.addresses)
    assert small.stride == PAGE
    group.barrier()
    for peer in range(group.world_size):
        small.peer(peer)[group.rank] = 10 * group.rank + peer
        large.peer(peer)[group.rank * 1000] = group.rank + 1
    group.barrier()
    mine = [10 * writer + group.rank for writer in range(group.world_size)]
    fine = small.local()[: group.world_size].tolist() == mine
    fine &= [int(large.local()[writer * 1000]) for writer in range(group.world_size)] == [
        writer + 1 for writer in range(group.world_size)
    ]
    return group.heap.total_bytes, bool(fine)


@BOTH
def test_exchange(kind: str) -> None:
    assert _run(kind, exchange, 3) == [(PAGE + (5 << 20), True)] * 3


def refusals(group: Group) -> list[str]:
    """What each rank is told when requests do not fit together."""
    texts = []
    requests = [
        ("rows", 64 if group.rank == 0 else 128),
        ("rows" if group.rank == 0 else "columns", 64),
        ("rows", -1),
        ("rows", 1 << 60),
    ]
    for name, nbytes in requests:
        with pytest.raises(GroupError) as caught:
            group.heap.allocate(name, nbytes)
        texts.append(str(caught.value))
    group.heap.allocate("rows", 64)  # the group goes on
    return texts


@BOTH
def test_requests_that_do_not_fit(kind: str) -> None:
    first, second = _run(kind, refusals, 2)
    assert first == second
    sizes, names, negative, huge = first
    assert "rank 0 asks for 64 bytes, rank 1 for 128" in sizes
    assert "'rows'" in names
    assert "'columns'" in names
    assert "-1 bytes" in negative
    assert "MiB" in huge


def descriptors(group: Group) -> int:
    """Growth of open descriptors over many allocations."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    for index in range(20):
        group.heap.allocate(f"a{index}", 1000)
    return len(list(Path("/proc/self/fd").iterdir())) - before


def test_segments_keep_no_descriptor_open() -> None:
    assert spawn(descriptors, 2) == [0, 0]


def outlive(group: Group) -> int:
    """Views stay valid after the heap is closed."""
    view = group.heap.allocate("view", 4096).local()
    view[:] = 7
    group.barrier()
    group.heap.close()
    group.heap.close()
    gc.collect()
    with pytest.raises(GroupError, match="closed"):
        group.heap.allocate("more", 1)
    return int(view.sum())


@BOTH
def test_views_outlive_the_heap(kind: str) -> None:
    assert _run(kind, outlive, 2) == [7 * 4096] * 2


def register_local(group: Group) -> bool:
    """Thread ranks may register any array."""
    own = np.full(4, group.rank, np.int64)
    known = group.heap.register("own", own)
    assert known.local().view(np.int64)[0] == group.rank
    with pytest.raises(GroupError, match="address"):
        known.peer(1 - group.rank)
    with pytest.raises(GroupError, match="contiguous"):
        group.heap.register("bad", np.zeros((4, 4))[:, 1])
    seen = group.all_gather(np.array([own.__array_interface__["data"][0]], np.int64)).ravel().tolist()
    return bool(list(known.addresses) == seen)


def register_shared(group: Group) -> int:
    """Process ranks may register what lies in symmetric memory."""
    with pytest.raises(GroupError, match="rank 0: 'own' does not lie in symmetric memory"):
        group.heap.register("own", np.zeros(4))
    part = group.heap.allocate("all", 256).local()[64:128]
    known = group.heap.register("part", part)
    known.peer((group.rank + 1) % 2)[0] = 9 + group.rank
    group.barrier()
    return int(part[0])


def test_register() -> None:
    assert _run("threads", register_local, 2) == [True, True]
    assert spawn(register_shared, 2) == [10, 9]


def test_one_rank() -> None:
    group = current_group()
    before = group.heap.total_bytes  # of what other tests of this process keep loaded
    allocation = group.heap.allocate("alone", 10)
    allocation.local()[:] = 1
    assert allocation.peer(0).sum() == 10
    group.heap.free(allocation)
    assert group.heap.total_bytes == before
