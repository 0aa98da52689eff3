"""Programs that the compiler refuses, with the exact text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tileweave as tw
from tileweave.compiler.order import ORDERS
from tileweave.compiler.printer import program_key
from tileweave.errors import BoundsError, CompileError, DeadlockError, RaceError, SignalMismatchError, VerifyError
from tileweave.primitives.expr import Expr

Specs = tuple[object, ...]
X = tw.Tensor(("n", 8))


def message(error: BaseException) -> str:
    """The message without place and caret."""
    assert isinstance(error, CompileError)
    assert error.location is not None
    assert Path(error.location.file).name == "test_refused.py"
    return error.message


@tw.kernel
def handshake(x: tw.Tensor, *, amount: int = 1, target: int = 1, swapped: bool = False, peer: int = 1) -> None:
    box = tw.symmetric("box", (2, 8))
    ready = tw.signals("ready", (2,))

    def push() -> None:
        tw.remote_store(box, (tw.rank(), tw.ds(0, 8)), tw.load(x, (0, tw.ds(0, 8))), peer - tw.rank())
        tw.signal(ready, tw.rank(), amount, peer - tw.rank())

    def pull() -> None:
        tw.wait(ready, 1 - tw.rank(), target)
        tw.store(x, (1, tw.ds(0, 8)), tw.load(box, (1 - tw.rank(), tw.ds(0, 8))))

    first, second = (pull, push) if swapped else (push, pull)

    @tw.task(grid={})
    def one() -> None:
        first()

    @tw.task(grid={})
    def two() -> None:
        second()


def handshake_with(**tunables: object) -> None:
    compiled = tw.compile(handshake, X, world_size=2, config=tw.Config(order="program", tunables=tunables))
    compiled.check([{"x": (2, 8)}] * 2)


def test_accepted() -> None:
    handshake_with()


def test_too_few_signals() -> None:
    with pytest.raises(SignalMismatchError) as caught:
        handshake_with(target=2)
    assert message(caught.value) == (
        "two[] on rank 0 waits for ready[1] to reach 2, but the signals that can reach it add up to 1: "
        "it would wait forever (signalled by one[] on rank 1)"
    )


def test_too_many_signals() -> None:
    with pytest.raises(SignalMismatchError) as caught:
        handshake_with(amount=3, target=2)
    assert message(caught.value) == (
        "two[] on rank 0 waits for ready[1] to reach 2, but the signals that can reach it add up to 3: "
        "it would pass before the last of them (signalled by one[] on rank 1)"
    )


def test_cycle_through_two_ranks() -> None:
    with pytest.raises(DeadlockError) as caught:
        handshake_with(swapped=True)
    assert message(caught.value).splitlines() == [
        "kernel 'handshake' can hang under order 'program': these tiles wait for each other in a circle:",
        "    two[] on rank 0: its lane runs it after one[] on rank 0",
        "    one[] on rank 1: it waits for a signal of two[] on rank 0",
        "    two[] on rank 1: its lane runs it after one[] on rank 1",
        "    one[] on rank 0: it waits for a signal of two[] on rank 1",
    ]


def test_negative_signal() -> None:
    with pytest.raises(BoundsError) as caught:
        handshake_with(amount=-1)
    assert message(caught.value) == (
        "one[] on rank 0 adds -1 to 'ready': counters only grow, so that a wait cannot pass and then be undone"
    )


def test_peer_outside_the_world() -> None:
    with pytest.raises(BoundsError) as caught:
        handshake_with(peer=2)
    assert message(caught.value) == "one[] on rank 0 addresses rank 2 of 2"


def check(body: Callable[[tw.Tensor, tw.Table], None], table: list[int] | None = None) -> None:
    """Compile and check a kernel of one task over `m < 3` with the given body."""

    @tw.kernel
    def refused(x: tw.Tensor, table: tw.Table) -> None:
        body(x, table)

    compiled = tw.compile(refused, X, tw.Table((3,)))
    compiled.check([{"x": (4, 8), "table": np.array(table or [0, 1, 2])}])


def test_load_out_of_bounds() -> None:
    def body(x: tw.Tensor, table: tw.Table) -> None:
        @tw.task(grid={"m": 3})
        def copy(m: Expr) -> None:
            tw.store(x, (m, tw.ds(0, 8)), tw.load(x, (m * 2, tw.ds(0, 8))))

    with pytest.raises(BoundsError) as caught:
        check(body)
    assert message(caught.value) == (
        "copy[m=2] on rank 0 reads x at 4 … 5 in dimension 0, which has size 4 on rank 0; "
        "limit the slice with tw.ds(…, stop=…)"
    )


def test_table_out_of_bounds() -> None:
    def body(x: tw.Tensor, table: tw.Table) -> None:
        @tw.task(grid={"m": 3})
        def copy(m: Expr) -> None:
            tw.store(x, (table[m + 1], tw.ds(0, 8)), tw.load(x, (0, tw.ds(0, 8))))

    with pytest.raises(BoundsError) as caught:
        check(body)
    assert message(caught.value) == (
        "`table[m + 1]` reads entry 3 along dimension 0 of table 'table' on rank 0, which has 3"
    )


def test_division_by_zero() -> None:
    def body(x: tw.Tensor, table: tw.Table) -> None:
        @tw.task(grid={"m": 3})
        def copy(m: Expr) -> None:
            tw.store(x, (m // table[m], tw.ds(0, 8)), tw.load(x, (0, tw.ds(0, 8))))

    with pytest.raises(BoundsError) as caught:
        check(body)
    assert message(caught.value) == "`m // table[m]` divides by zero on rank 0"


def test_counter_out_of_bounds() -> None:
    def body(x: tw.Tensor, table: tw.Table) -> None:
        ready = tw.signals("ready", (2,))

        @tw.task(grid={"m": 3})
        def notify(m: Expr) -> None:
            tw.signal(ready, m)

    with pytest.raises(BoundsError) as caught:
        check(body)
    assert message(caught.value) == ("notify[m=2] on rank 0 uses counter ready[…2…] in dimension 0, which has size 2")


def test_grid_symbol_of_another_task() -> None:
    def body(x: tw.Tensor, table: tw.Table) -> None:
        kept: list[Expr] = []

        @tw.task(grid={"m": 3})
        def one(m: Expr) -> None:
            kept.append(m)
            tw.store(x, (m, tw.ds(0, 8)), tw.load(x, (m, tw.ds(0, 8))))

        @tw.task(grid={"k": 3})
        def two(k: Expr) -> None:
            tw.store(x, (kept[0], tw.ds(0, 8)), tw.load(x, (k, tw.ds(0, 8))))

    with pytest.raises(VerifyError) as caught:
        check(body)
    assert message(caught.value) == "task 'two' uses `m` outside its grid or loop"


def test_no_task() -> None:
    with pytest.raises(VerifyError) as caught:
        check(lambda x, table: None)
    assert message(caught.value) == "kernel 'refused' declares no task; add one with @tw.task"


def test_phased_counter_is_matched_exactly() -> None:
    """Two waits of different targets on one counter: the second signal depends on the first wait."""

    @tw.kernel
    def ping(x: tw.Tensor) -> None:
        ready = tw.signals("ready", (1,))

        @tw.task(grid={})
        def start() -> None:
            tw.signal(ready, 0)

        @tw.task(grid={})
        def middle() -> None:
            tw.wait(ready, 0, 1)
            tw.store(x, (0, tw.ds(0, 8)), tw.load(x, (1, tw.ds(0, 8))))
            tw.signal(ready, 0)

        @tw.task(grid={})
        def end() -> None:
            tw.wait(ready, 0, 2)
            tw.store(x, (2, tw.ds(0, 8)), tw.load(x, (0, tw.ds(0, 8))))

    compiled = tw.compile(ping, X, config=tw.Config(order="program"))
    compiled.check([{"x": (4, 8)}])


@tw.kernel
def relay(x: tw.Tensor, *, synchronised: str = "both") -> None:
    """Rank 0 hands a row to rank 1 through two counters, one after the other."""
    box = tw.symmetric("box", (8,))
    first, second = tw.signals("first", (1,)), tw.signals("second", (1,))

    @tw.task(grid={"m": 1 - tw.rank()})
    def write(m: Expr) -> None:
        tw.remote_store(box, tw.ds(0, 8), tw.load(x, (0, tw.ds(0, 8))), 1)
        tw.signal(first, 0, peer=1)

    @tw.task(grid={"m": tw.rank()})
    def forward(m: Expr) -> None:
        if synchronised == "both":
            tw.wait(first, 0, 1)
        tw.signal(second, 0)

    @tw.task(grid={"m": tw.rank()})
    def read(m: Expr) -> None:
        if synchronised != "none":
            tw.wait(second, 0, 1)
        tw.store(x, (1, tw.ds(0, 8)), tw.load(box, tw.ds(0, 8)))


def relay_with(synchronised: str) -> None:
    tw.compile(relay, X, world_size=2, config=tw.Config(tunables={"synchronised": synchronised})).check(
        [{"x": (2, 8)}] * 2
    )


def test_order_through_two_counters() -> None:
    relay_with("both")


@pytest.mark.parametrize("synchronised", ["second", "none"])
def test_race(synchronised: str) -> None:
    with pytest.raises(RaceError) as caught:
        relay_with(synchronised)
    assert message(caught.value) == (
        "write[m=0] on rank 0 writes 'box' and read[m=0] on rank 1 reads the same elements after it, but no signal "
        "orders them: add tw.signal behind the first access and tw.wait before the second"
    )


def test_two_ranks_write_the_same_place() -> None:
    @tw.kernel
    def clash(x: tw.Tensor) -> None:
        box = tw.symmetric("box", (8,))

        @tw.task()
        def push() -> None:
            tw.remote_store(box, tw.ds(0, 8), tw.load(x, (0, tw.ds(0, 8))), 0)

    with pytest.raises(RaceError) as caught:
        tw.compile(clash, X, world_size=2).check([{"x": (2, 8)}] * 2)
    assert message(caught.value) == (
        "push[] on rank 0 and push[] on rank 1 both write the same elements of 'box' at the same point of the kernel's "
        "order, so the result depends on timing: give each its own place, or order them by a signal"
    )


def test_two_tiles_write_the_same_place() -> None:
    def body(x: tw.Tensor, table: tw.Table) -> None:
        @tw.task(grid={"m": 3})
        def copy(m: Expr) -> None:
            tw.store(x, (3, tw.ds(0, 8)), tw.load(x, (m, tw.ds(0, 8))))

    with pytest.raises(RaceError) as caught:
        check(body)
    assert message(caught.value) == (
        "copy[m=0] on rank 0 writes 'x' and copy[m=1] on rank 0 writes the same elements after it, but no signal "
        "orders them: add tw.signal behind the first access and tw.wait before the second"
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"order": tw.Order.RELAXED},
            "a relaxed signal or wait orders nothing; leave out `order`, or give RELEASE or ACQUIRE",
        ),
        ({"scope": tw.Scope.GPU}, "a signal to a peer needs Scope.SYSTEM; Scope.GPU reaches this rank only"),
    ],
)
def test_signal_too_weak_to_order(options: dict[str, Any], text: str) -> None:
    @tw.kernel
    def weak(x: tw.Tensor) -> None:
        box, full = tw.symmetric("box", (8,)), tw.signals("full", (1,))

        @tw.task()
        def push() -> None:
            tw.remote_store(box, tw.ds(0, 8), tw.load(x, (0, tw.ds(0, 8))), 1 - tw.rank())
            tw.signal(full, 0, peer=1 - tw.rank(), **options)

        @tw.task()
        def pull() -> None:
            tw.wait(full, 0, 1)
            tw.store(x, (1, tw.ds(0, 8)), tw.load(box, tw.ds(0, 8)))

    with pytest.raises(RaceError) as caught:
        tw.compile(weak, X, world_size=2).check([{"x": (2, 8)}] * 2)
    assert message(caught.value) == text


def test_a_task_without_experts_stands_between_those_with() -> None:
    @tw.kernel
    def phases(x: tw.Tensor) -> None:
        first, second = tw.signals("first", (1,)), tw.signals("second", (1,))

        @tw.task(grid={"expert": 3})
        def one(expert: Expr) -> None:
            tw.signal(first, 0)

        @tw.task()
        def middle() -> None:
            tw.wait(first, 0, 3)
            tw.signal(second, 0)

        @tw.task(grid={"expert": 3})
        def two(expert: Expr) -> None:
            tw.wait(second, 0, 1)
            tw.store(x, (expert, tw.ds(0, 8)), tw.load(x, (expert, tw.ds(0, 8))))

    for order in ORDERS:
        tw.compile(phases, X, config=tw.Config(order=order)).check([{"x": (3, 8)}])


def test_names_stay_apart() -> None:
    @tw.kernel
    def alike(x: tw.Tensor) -> None:
        tw.workspace("my buffer", (8,))

        @tw.task()
        def only() -> None:
            tw.store(x, (0, tw.ds(0, 8)), tw.load(x, (1, tw.ds(0, 8))))

    with pytest.raises(VerifyError, match=r"memory 'my buffer' needs a name of letters, digits and underscores"):
        tw.compile(alike, X)


def test_almost_equal_numbers_are_other_kernels() -> None:
    def scaled(factor: float) -> str:
        @tw.kernel
        def scale(x: tw.Tensor) -> None:
            @tw.task()
            def only() -> None:
                tw.store(x, (0, tw.ds(0, 8)), tw.load(x, (0, tw.ds(0, 8))) * factor)

        return program_key(tw.compile(scale, X).program)

    assert scaled(1.0) != scaled(1.0000002)
