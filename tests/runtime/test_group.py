"""Collectives, launch entry, waits of C code, and failures."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tileweave import native
from tileweave.errors import GroupError, HangError, LaunchError, PeerError, RankDiedError
from tileweave.primitives.group import RUNTIME_DIR, AbortKind, Group, current_group, set_current_group
from tileweave.primitives.launch import VirtualGroup, spawn

WAITER = """
#include "tw_runtime.h"
/* Waits as worker 3 in task 7, tile (1, 2, 3, 4). */
int wait_for(tw_control *control, int rank, uint64_t *counter, uint64_t target, double timeout_s, uint64_t *waited) {
    tw_worker worker;
    tw_worker_init(&worker, control, rank, 3, (uint64_t)(timeout_s * 1e9), 5);
    tw_record_tile(&worker, 7, 1, 2, 3, 4);
    int result = tw_wait(&worker, (_Atomic uint64_t *)counter, target, 11, 2, 99);
    if (result == TW_OK) tw_record_state(&worker, TW_DONE);
    *waited = worker.waited_ns;
    return result;
}
void give(uint64_t *counter, uint64_t amount) { tw_signal(counter, amount); }
void give_relaxed(uint64_t *counter) { tw_signal_order(counter, 1, memory_order_relaxed); }
"""


def waiter() -> ctypes.CDLL:
    """The C code above."""
    library = native.load(native.build(WAITER, "waiter", include_dirs=(RUNTIME_DIR,)))
    word = ctypes.c_void_p
    library.wait_for.argtypes = [word, ctypes.c_int, word, ctypes.c_uint64, ctypes.c_double, word]
    library.give.argtypes = [word, ctypes.c_uint64]
    library.give_relaxed.argtypes = [word]
    return library


def test_runtime_compiles_without_a_warning() -> None:
    for source in (WAITER, (RUNTIME_DIR / "group.c").read_text()):
        native.build(source, "strict", include_dirs=(RUNTIME_DIR,), flags=(*native.DEFAULT_FLAGS, "-Werror"))


RACES = """
#include "group.c"
#include <pthread.h>
enum { RANKS = 4, ROUNDS = 2000 };
static tw_control *control;
static _Atomic uint64_t counters[RANKS];
static uint64_t data[RANKS];
static void *rank_main(void *argument) {
    int rank = (int)(intptr_t)argument, failures = 0;
    twg_group *group = twg_open(control, rank, 60000000000u);
    uint64_t out[RANKS * 8], mine[8];
    for (uint64_t round = 1; round <= ROUNDS; round++) {
        for (int i = 0; i < 8; i++) mine[i] = round * 10 + (uint64_t)rank;
        int code;
        for (int again = 0; (code = twg_all_gather(group, mine, sizeof mine, out, again)) == TW_INTERRUPTED;) again = 1;
        failures += code != TW_OK;
        for (int i = 0; i < RANKS * 8; i++) failures += out[i] != round * 10 + (uint64_t)(i / 8);
        int refuse = round % 5 == (uint64_t)rank;
        if (refuse) twg_set_refusal(control, rank, round, "no");
        while ((code = twg_enter(group, round, !refuse)) == TW_INTERRUPTED) {}
        failures += code != (round % 5 < RANKS ? TW_REFUSED : TW_OK);
        for (int peer = 0; code == TW_REFUSED && peer < RANKS; peer++)
            failures += (twg_refusal(control, peer, round) != NULL) != (round % 5 == (uint64_t)peer);
        tw_worker worker;
        tw_worker_init(&worker, control, rank, 0, 60000000000u, round);
        data[(rank + 1) % RANKS] = round;
        tw_signal(&counters[(rank + 1) % RANKS], 1);
        failures += tw_wait(&worker, &counters[rank], round, 0, 0, rank) != TW_OK || data[rank] != round;
    }
    twg_free(group);
    return (void *)(intptr_t)failures;
}
int main(void) {
    control = aligned_alloc(4096, twg_control_bytes(RANKS, 4096));
    memset(control, 0, twg_control_bytes(RANKS, 4096));
    twg_control_init(control, RANKS, 4096, 20);
    pthread_t threads[RANKS];
    for (int i = 0; i < RANKS; i++) pthread_create(&threads[i], NULL, rank_main, (void *)(intptr_t)i);
    int64_t failures = 0;
    for (int i = 0; i < RANKS; i++) {
        void *result;
        pthread_join(threads[i], &result);
        failures += (intptr_t)result;
    }
    printf("failures %lld\\n", (long long)failures);
    return failures != 0;
}
"""


def test_no_race_under_thread_sanitizer(tmp_path: Path) -> None:
    source, program = tmp_path / "races.c", tmp_path / "races"
    source.write_text(RACES)
    words = ["cc", "-O1", "-g", "-std=gnu11", "-pthread", "-fsanitize=thread", f"-I{RUNTIME_DIR}", str(source)]
    if subprocess.run([*words, "-o", str(program)], capture_output=True, check=False).returncode != 0:
        pytest.skip("the compiler has no ThreadSanitizer")
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60, check=False)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run with this kernel's address randomisation")
    assert done.stdout == "failures 0\n", done.stdout + done.stderr
    assert done.stderr == ""
    assert done.returncode == 0


def test_importing_needs_no_torch() -> None:
    code = "import sys, tileweave.primitives.launch; print(sorted({'torch', 'triton', 'tilelang'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# ---------------------------------------------------------------------- one rank


def test_one_rank() -> None:
    set_current_group(None)
    group = current_group()
    assert group is current_group()
    assert (group.rank, group.world_size, group.kind) == (0, 1, "single")
    group.barrier()
    assert group.all_gather(np.arange(6).reshape(2, 3)).tolist() == [[[0, 1, 2], [3, 4, 5]]]
    assert group.all_gather(b"ab").tolist() == [[97, 98]]
    assert group.all_gather_object({"a": 1}) == [{"a": 1}]
    assert group.all_gather(np.array(3, np.float32)).shape == (1,)
    group.agree(None)
    with pytest.raises(PeerError, match="rank 0: too small"):
        group.agree("too small")
    group.enter(group.next_epoch())
    assert group.abort() is None
    with pytest.raises(GroupError, match="all_gather_object"):
        group.all_gather(np.array([object()]))
    group.close()
    group.close()
    with pytest.raises(GroupError, match="closed"):
        group.barrier()
    assert current_group() is not group


# ---------------------------------------------------------------------- several ranks


def hammer(group: Group, rounds: int, seed: int) -> int:
    """Random sizes (the same on all ranks), random delays (different ones), every value checked."""
    sizes, delays = np.random.default_rng(seed), np.random.default_rng([seed, group.rank])
    for number in range(rounds):
        size = (
            int(sizes.integers(0, 40))
            if sizes.random() < 0.9
            else int(sizes.integers(0, 1 + (1 << sizes.integers(16))))
        )
        mine = np.arange(size, dtype=np.int64) * (group.rank + 1) + number
        if delays.random() < 0.05:
            time.sleep(float(delays.random()) * 2e-3)
        got = group.all_gather(mine)
        wanted = np.arange(size)[None] * np.arange(1, group.world_size + 1)[:, None] + number
        np.testing.assert_array_equal(got, wanted)
        if sizes.random() < 0.1:
            group.barrier()
    return rounds


@pytest.mark.parametrize("world_size", [2, 8])
def test_hammered_by_processes(world_size: int) -> None:
    assert spawn(hammer, world_size, 1000, world_size) == [1000] * world_size


@pytest.mark.parametrize("world_size", [2, 8])
def test_hammered_by_threads(world_size: int) -> None:
    with VirtualGroup(world_size) as virtual:
        assert virtual.run(hammer, 1000, world_size) == [1000] * world_size


def mismatch(group: Group) -> str:
    """Different sizes, then on."""
    with pytest.raises(GroupError) as caught:
        group.all_gather(np.zeros(1 + group.rank * 10_000, np.uint8))
    assert group.all_gather_object(group.rank) == list(range(group.world_size))
    return str(caught.value)


def test_sizes_that_differ_are_an_error_on_every_rank() -> None:
    with VirtualGroup(3) as virtual:
        texts = virtual.run(mismatch)
    assert len(set(texts)) == 1
    assert "rank 0: 1, rank 1: 10001, rank 2: 20001" in texts[0]


def entries(group: Group, refuser: int) -> list[str]:
    """Launches, every third of them refused by one rank."""
    outcomes = []
    for number in range(300):
        epoch = group.next_epoch()
        refusal = f"launch {number} is bad" if number % 3 == 1 and group.rank == refuser else None
        if number % 50 == group.rank:
            time.sleep(1e-3)
        try:
            group.enter(epoch, refusal)
            outcomes.append("")
        except PeerError as error:
            outcomes.append(str(error))
    return outcomes


def test_entry_is_refused_on_all_ranks_alike() -> None:
    with VirtualGroup(4) as virtual:
        outcomes = virtual.run(entries, 2)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert [bool(text) for text in outcomes[0]] == [number % 3 == 1 for number in range(300)]
    assert "rank 2: launch 4 is bad" in outcomes[0][4]
    assert "nothing was launched" in outcomes[0][4]


def agreement(group: Group) -> str:
    """Two of three ranks report an error."""
    group.agree(None)
    with pytest.raises(PeerError) as caught:
        group.agree(None if group.rank == 1 else f"no {group.rank}")
    return str(caught.value)


def test_agree() -> None:
    with VirtualGroup(3) as virtual:
        assert virtual.run(agreement) == ["rank 0: no 0; rank 2: no 2"] * 3


def own_group(group: Group) -> bool:
    """Whether the rank finds its group, also from a thread of its own."""
    seen: list[Group] = []
    thread = threading.Thread(target=lambda: seen.append(current_group()))
    thread.start()
    thread.join()
    return current_group() is group and (group.kind == "threads" or seen[0] is group)


def test_current_group() -> None:
    before = current_group()
    with VirtualGroup(2) as virtual:
        assert virtual.run(own_group) == [True, True]
        assert current_group() is before
    assert spawn(own_group, 2) == [True, True]


# ---------------------------------------------------------------------- waits of compiled code


def signalled(group: Group) -> tuple[int, int, str]:
    """Rank 0 waits in C for what rank 1 adds, late."""
    library = waiter()
    counters = group.heap.allocate("counters", 64)
    group.barrier()
    waited = ctypes.c_uint64()
    result = 0
    if group.rank == 0:
        address = counters.peer_address(0)
        result = library.wait_for(group.control_address, 0, address, 3, 30.0, ctypes.byref(waited))
        assert library.wait_for(group.control_address, 0, address, 2, 30.0, ctypes.byref(ctypes.c_uint64())) == 0
    else:
        time.sleep(0.05)
        library.give(counters.peer_address(0), 2)
        library.give_relaxed(counters.peer_address(0))
    group.barrier()
    state = next((r.state for r in group.worker_records() if (r.rank, r.worker) == (0, 3)), "none")
    return result, waited.value, state


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_wait_and_signal(kind: str) -> None:
    if kind == "processes":
        first, second = spawn(signalled, 2)
    else:
        with VirtualGroup(2) as virtual:
            first, second = virtual.run(signalled)
    assert first[0] == 0
    assert first[1] > 20e6
    assert first[2] == second[2] == "done"


def starved(group: Group) -> tuple[Any, ...]:
    """Rank 0 waits in C for nothing; the group stops; all can read who waited for what."""
    library = waiter()
    counter = (ctypes.c_uint64 * 1)(4)
    if group.rank == 0:
        assert library.wait_for(group.control_address, 0, counter, 6, 0.2, ctypes.byref(ctypes.c_uint64())) == 1
    else:
        with pytest.raises(HangError):
            group.barrier()
    info = group.abort()
    assert info is not None
    record = next(r for r in group.worker_records() if r.worker is not None)
    if group.rank == 0:
        with pytest.raises(HangError, match=r"composed for 3"):
            group.check_abort(lambda info, records: f"composed for {info.worker}")
    for call in (group.barrier, group.check_abort, lambda: group.heap.allocate("x", 1)):
        with pytest.raises(GroupError, match="cannot be used any more"):
            call()
    return info.kind, info.rank, info.worker, record


def test_starved_wait_leaves_its_record() -> None:
    with VirtualGroup(2) as virtual:
        for kind, rank, worker, record in virtual.run(starved):
            assert (kind, rank, worker) == (AbortKind.TIMEOUT, 0, 3)
            assert (record.rank, record.worker, record.state) == (0, 3, "waiting")
            assert (record.task, record.tile, record.site) == (7, (1, 2, 3, 4), 11)
            assert (record.signal, record.signal_index, record.expected, record.observed) == (2, 99, 6, 4)
            assert record.epoch == 5


# ---------------------------------------------------------------------- failures of threads


def one_fails(group: Group) -> None:
    """Rank 1 raises, the others wait."""
    if group.rank == 1:
        raise KeyError("lost")
    group.barrier()


def test_exception_in_a_thread_ends_the_others() -> None:
    with VirtualGroup(3) as virtual:
        begin = time.perf_counter()
        with pytest.raises(KeyError, match="lost") as caught:
            virtual.run(one_fails)
        assert time.perf_counter() - begin < 2
        if sys.version_info >= (3, 11):
            assert "rank 0, 2: LaunchError: rank 1 failed: KeyError: 'lost'" in caught.value.__notes__[0]
        with pytest.raises(GroupError, match="rank 1 failed: KeyError"):
            virtual.run(one_fails)


def returns_early(group: Group) -> None:
    """Rank 2 forgets the barrier."""
    if group.rank != 2:
        group.barrier()


def test_rank_that_returns_early_is_named() -> None:
    with VirtualGroup(3) as virtual, pytest.raises(RankDiedError, match="rank 2 left the group"):
        virtual.run(returns_early)


def late(group: Group) -> None:
    """Rank 1 comes too late."""
    if group.rank == 1:
        time.sleep(1.0)
    group.barrier()


def test_late_thread_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWEAVE_TIMEOUT_S", "0.3")
    with VirtualGroup(2) as virtual:
        with pytest.raises(HangError, match="rank 0 waits for rank 1 in collective call 1") as caught:
            virtual.run(late)
        assert "TILEWEAVE_TIMEOUT_S" in str(caught.value)


def test_virtual_group_lives_on_between_runs() -> None:
    with VirtualGroup(4) as virtual:
        for number in range(20):
            assert virtual.run(lambda group, x: int(group.all_gather(np.array([x])).sum()), number) == [4 * number] * 4
        with pytest.raises(LaunchError, match="rank 3 failed: by hand"):
            virtual.run(lambda group: group.fail("by hand") if group.rank == 3 else group.barrier())
    virtual.close()
    with pytest.raises(GroupError, match="closed"):
        virtual.run(one_fails)
    with pytest.raises(GroupError, match="1 to 1024"):
        VirtualGroup(0)


def test_forked_child_does_not_close_the_group() -> None:
    group = current_group()
    child = os.fork()
    if child == 0:
        group.close()
        os._exit(0 if not group.closed else 1)
    assert os.waitpid(child, 0)[1] == 0
