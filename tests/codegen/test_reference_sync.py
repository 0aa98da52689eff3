"""The NumPy interpreter on several ranks and workers: signals, peers, queues and hangs."""

from __future__ import annotations

import numpy as np
import pytest

from tests.codegen.reference_helpers import Array, check, empty, int32, normal, run
from tileweave.codegen.reference.interpret import interpret
from tileweave.compiler.config import Config, QueueKind
from tileweave.compiler.order import ORDERS
from tileweave.compiler.passes import compile_program
from tileweave.compiler.trace import kernel
from tileweave.errors import HangError
from tileweave.primitives import language as tw
from tileweave.primitives.expr import Expr
from tileweave.primitives.memory import Table, Tensor


def test_gather_from_a_peer_a_row() -> None:
    @kernel
    def collect(x: Tensor, row: Table, owner: Table, out: Tensor) -> None:
        memory = tw.symmetric("memory", (4, 3))
        ready = tw.signals("ready", (1,))

        @tw.task(grid={"i": 1}, role="comm")
        def publish(i: Expr) -> None:
            tw.store(memory, (tw.ds(0, 4), tw.ds(0, 3)), tw.load(x, (tw.ds(0, 4), tw.ds(0, 3))))
            for peer in range(tw.world_size()):
                tw.signal(ready, 0, 1, peer)

        @tw.task(grid={"i": 1})
        def read(i: Expr) -> None:
            tw.wait(ready, 0, tw.world_size())
            part = tw.ds(0, 8, stop=row.shape[0])
            tile = tw.gather(memory, (row.rows(part), tw.ds(1, 2)), owner.rows(part))
            tw.store(out, (part, tw.ds(0, 2)), tile)

    xs = [normal((4, 3), seed) for seed in range(3)]
    row, owner = int32([3, -1, 0, 1, 1]), int32([2, -1, 0, 2, 1])
    want = np.stack([xs[2][3], np.zeros(3), xs[0][0], xs[2][1], xs[1][1]])[:, 1:]
    specs = (Tensor((4, 3)), Table(("n",)), Table(("n",)), Tensor(("n", 2)))

    def make() -> list[dict[str, Array]]:
        return [{"x": x, "row": row, "owner": owner, "out": empty((5, 2))} for x in xs]

    check(collect, specs, make, [{"out": want}] * 3)


@kernel
def ring(x: Tensor, out: Tensor, forget: bool) -> None:
    """Pass `x` around; `out[s]` is the block that arrives after `s` steps. `forget` leaves out the last signal."""
    world = tw.world_size()
    blocks = tw.symmetric("blocks", (world, 5))
    arrived = tw.signals("arrived", (world,))
    whole = tw.ds(0, 5)

    @tw.task(grid={"step": world}, role="comm")
    def send(step: Expr) -> None:
        right = (tw.rank() + 1) % world
        with tw.when(step.equals(0)):
            tw.remote_store(blocks, (0, whole), tw.load(x, whole), right)
        with tw.when(step > 0):
            tw.wait(arrived, step - 1, 1)
            tw.remote_store(blocks, (step, whole), tw.load(blocks, (step - 1, whole)), right)
        with tw.when(step < (world - 1 if forget else world)):
            tw.signal(arrived, step, 1, right)

    @tw.task(grid={"step": world})
    def take(step: Expr) -> None:
        tw.wait(arrived, step, 1)
        tw.store(out, (step, whole), tw.load(blocks, (step, whole)))


def test_ring_exchange() -> None:
    xs = [normal((5,), seed) for seed in range(3)]
    want = [{"out": np.stack([xs[(rank - step - 1) % 3] for step in range(3)])} for rank in range(3)]
    specs = (Tensor((5,)), Tensor((3, 5)), False)
    # The analysis takes tiles of one task for independent, and refuses a task that hands data to itself.
    check(ring, specs, lambda: [{"x": x, "out": empty((3, 5))} for x in xs], want, analysed=False)


@pytest.mark.parametrize("seed", [None, *range(5)])
def test_missing_signal_is_named(seed: int | None) -> None:
    specs = (Tensor((5,)), Tensor((2, 5)), True)
    program, schedule = compile_program(ring, specs, 2, Config(workers=2, comm_workers=1))
    arguments = [{"x": normal((5,)), "out": empty((2, 5))} for _ in range(2)]
    with pytest.raises(HangError) as caught:
        interpret(program, schedule, arguments, seed=seed)
    wait = program.tasks[1].body[0].location
    assert wait is not None
    assert "tw.wait(arrived, step, 1)" in wait.text
    assert str(caught.value) == (
        "kernel 'ring' hangs: nobody can go on, as\n"
        f"    rank 0 worker 1, take[step=1], at {wait}, waits for arrived[1]: expected 1, observed 0\n"
        f"    rank 1 worker 1, take[step=1], at {wait}, waits for arrived[1]: expected 1, observed 0"
    )


def test_put_get_multicast() -> None:
    @kernel
    def exchange(x: Tensor, pushed: Tensor, pulled: Tensor, shared: Tensor) -> None:
        world = tw.world_size()
        inbox, board = tw.symmetric("inbox", (world, 6)), tw.symmetric("board", (world, 6))
        own = tw.symmetric("own", (6,))
        done, seen = tw.signals("done", (1,)), tw.signals("seen", (1,))
        whole = tw.ds(0, 6)

        @tw.task(grid={"peer": world}, role="comm")
        def push(peer: Expr) -> None:
            tw.put(inbox, (tw.rank(), whole), x, (whole,), peer)
            with tw.when(peer.equals(0)):
                tw.store(own, whole, tw.load(x, whole) * 2.0)
                tw.multicast(board, (tw.rank(), whole), tw.load(x, whole) + 1.0)
                for other in tw.range(world):
                    tw.signal(seen, 0, 1, other)
            tw.signal(done, 0, 1, peer)

        @tw.task(grid={"peer": world})
        def pull(peer: Expr) -> None:
            tw.wait(done, 0, world)
            tw.wait(seen, 0, world)
            row = tw.ds(peer, 1)
            tw.get(pulled, (peer, whole), own, (whole,), peer)
            tw.store(pushed, (row, whole), tw.load(inbox, (row, whole)))
            tw.store(shared, (row, whole), tw.load(board, (row, whole)))

    xs = [normal((6,), seed) for seed in range(3)]
    every = np.stack(xs)
    specs = (Tensor((6,)), Tensor((3, 6)), Tensor((3, 6)), Tensor((3, 6)))
    outputs = ("pushed", "pulled", "shared")

    def make() -> list[dict[str, Array]]:
        return [{"x": x, **{name: empty((3, 6)) for name in outputs}} for x in xs]

    check(exchange, specs, make, [{"pushed": every, "pulled": every * 2, "shared": every + 1}] * 3)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("queue", ["static", "dynamic"])
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_no_schedule_changes_the_bits(order: str, queue: QueueKind, seed: int | None) -> None:
    """A pipeline of two GEMMs over counters, on two ranks that swap the intermediate."""

    @kernel
    def pipeline(x: Tensor, w: Tensor, out: Tensor) -> None:
        middle = tw.symmetric("middle", (16, 8))
        ready = tw.signals("ready", (2,))

        @tw.task(grid={"m": 4, "n": 2}, role="comm")
        def first(m: Expr, n: Expr) -> None:
            rows, columns = tw.ds(m * 4, 4), tw.ds(n * 4, 4)
            value = tw.dot(tw.load(x, (rows, tw.ds(0, 8))), tw.load(w, (columns, tw.ds(0, 8))).T)
            tw.remote_store(middle, (rows, columns), value, 1 - tw.rank())
            tw.signal(ready, m // 2, 1, 1 - tw.rank())

        @tw.task(grid={"m": 4})
        def second(m: Expr) -> None:
            rows, whole = tw.ds(m * 4, 4), tw.ds(0, 8)
            tw.wait(ready, m // 2, 4)
            tw.store(out, (rows, whole), tw.dot(tw.load(middle, (rows, whole)), tw.load(w, (whole, whole)).T))

    def launch(config: Config, at: int | None) -> list[Array]:
        arguments = [{"x": normal((16, 8), r), "w": normal((8, 8), r + 5), "out": empty((16, 8))} for r in range(2)]
        run(pipeline, (Tensor((16, 8)), Tensor((8, 8)), Tensor((16, 8))), arguments, config, at)
        return [given["out"] for given in arguments]

    got = launch(Config(workers=3, comm_workers=1, order=order, queue=queue), seed)
    for rank, (out, plain) in enumerate(zip(got, launch(Config(), None), strict=True)):
        np.testing.assert_array_equal(out, plain)
        middle = normal((16, 8), 1 - rank) @ normal((8, 8), 6 - rank).T
        np.testing.assert_allclose(out, middle @ normal((8, 8), rank + 5).T, rtol=1e-4, atol=1e-4)


def test_a_seed_finds_a_missing_wait() -> None:
    @kernel
    def racy(out: Tensor) -> None:
        scratch = tw.workspace("scratch", (4,))

        @tw.task(grid={"i": 1}, role="comm")
        def write(i: Expr) -> None:
            tw.store(scratch, tw.ds(0, 4), tw.full((4,), 1.0))

        @tw.task(grid={"i": 1})
        def read(i: Expr) -> None:
            tw.store(out, tw.ds(0, 4), tw.load(scratch, tw.ds(0, 4)))

    program, schedule = compile_program(racy, (Tensor((4,)),), 1, Config(workers=2, comm_workers=1))
    seen = set()
    for seed in range(20):
        out = np.zeros(4, dtype=np.float32)
        interpret(program, schedule, [{"out": out}], seed=seed)
        seen.add(bool(np.isnan(out).any()))
    assert seen == {True, False}
