"""Defects found by trying to break things. A marked test stands for one that is open; mended, it must lose its mark."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tileweave as tw
from tests.codegen.reference_helpers import Arguments, empty, normal
from tests.engine.c_engine import run_on_c
from tileweave.codegen.reference.interpret import interpret
from tileweave.compiler.passes import compile_program
from tileweave.compiler.trace import Kernel

ROOT = Path(__file__).resolve().parents[2]


def agree(kernel: Kernel, specs: tuple[object, ...], arguments: list[Arguments]) -> None:
    """The C engine writes what the interpreter writes."""
    want = copy.deepcopy(arguments)
    program, schedule = compile_program(kernel, specs, len(arguments), tw.Config())
    interpret(program, schedule, want)
    run_on_c(kernel, specs, arguments)
    for given, expected in zip(arguments, want, strict=True):
        for name, array in expected.items():
            np.testing.assert_allclose(given[name], array, rtol=1e-3, atol=1e-3, err_msg=name)


def test_an_accumulator_takes_its_own_transpose() -> None:
    @tw.kernel
    def transpose(x: tw.Tensor, out: tw.Tensor) -> None:
        @tw.task(grid={})
        def body() -> None:
            whole = (tw.ds(0, 4), tw.ds(0, 4))
            total = tw.zeros((4, 4))
            tw.assign(total, tw.load(x, whole))
            tw.assign(total, total.T)
            tw.store(out, whole, total)

    agree(transpose, (tw.Tensor((4, 4)),) * 2, [{"x": normal((4, 4)), "out": empty((4, 4))}])


def test_a_dot_takes_its_accumulator_as_an_operand() -> None:
    @tw.kernel
    def square(x: tw.Tensor, out: tw.Tensor) -> None:
        @tw.task(grid={})
        def body() -> None:
            whole = (tw.ds(0, 40), tw.ds(0, 40))
            total = tw.zeros((40, 40))
            tw.assign(total, tw.load(x, whole))
            tw.dot(tw.load(x, whole), total.T, total)
            tw.store(out, whole, total)

    agree(square, (tw.Tensor((40, 40)),) * 2, [{"x": normal((40, 40)), "out": empty((40, 40))}])


@pytest.mark.parametrize("get", [False, True])
def test_a_copy_onto_itself_is_refused(get: bool) -> None:
    @tw.kernel
    def shift(x: tw.Tensor, out: tw.Tensor) -> None:
        box = tw.symmetric("box", (16, 8))

        @tw.task(grid={"m": 2})
        def body(m: tw.Expr) -> None:
            columns = tw.ds(0, 8)
            copy_rows = tw.get if get else tw.put
            copy_rows(box, (tw.ds(m * 8 + 1, 7), columns), box, (tw.ds(m * 8, 7), columns), tw.rank())
            tw.store(out, (tw.ds(0, 8), columns), tw.load(x, (tw.ds(0, 8), columns)))

    with pytest.raises(
        tw.errors.VerifyError, match=r"copies 'box' onto itself: .* load the tile and store it"
    ) as caught:
        tw.compile(shift, *(tw.Tensor((8, 8)),) * 2, world_size=2)
    assert caught.value.location is not None
    assert "copy_rows(box" in caught.value.location.text


def test_a_loaded_tile_may_be_stored_over_its_source() -> None:
    """What the error of an overlapping copy advises."""

    @tw.kernel
    def shift(x: tw.Tensor, out: tw.Tensor) -> None:
        box = tw.symmetric("box", (8, 8))

        @tw.task(grid={})
        def body() -> None:
            whole, columns = (tw.ds(0, 8), tw.ds(0, 8)), tw.ds(0, 8)
            tw.store(box, whole, tw.load(x, whole))
            tw.store(box, (tw.ds(1, 7), columns), tw.load(box, (tw.ds(0, 7), columns)))
            tw.store(out, whole, tw.load(box, whole))

    agree(shift, (tw.Tensor((8, 8)),) * 2, [{"x": normal((8, 8)), "out": empty((8, 8))}])


@pytest.mark.parametrize("listed", [False, True])
def test_a_copy_whose_place_a_table_gives_is_checked_for_overlap(listed: bool) -> None:
    @tw.kernel
    def move(table: tw.Table, out: tw.Tensor) -> None:
        box = tw.symmetric("box", (16, 8))

        @tw.task(grid={})
        def body() -> None:
            columns = tw.ds(0, 8)
            rows = table.rows(tw.ds(0, 4)) if listed else tw.ds(table[0], 4)
            tw.put(box, (rows, columns), box, (tw.ds(0, 4), columns), tw.rank())
            tw.store(out, columns, tw.load(box, (0, columns)))

    kernel = tw.compile(move, tw.Table((4,)), tw.Tensor((8,)))
    kernel.check([{"table": np.array([4, 5, -1, 7], np.int32), "out": (8,)}])
    with pytest.raises(tw.errors.RaceError, match="copies 'box' onto itself on rank 0"):
        kernel.check([{"table": np.array([3, 9, 8, 7], np.int32), "out": (8,)}])


def test_readers_beside_a_tile_that_updates_are_a_race() -> None:
    @tw.kernel
    def update(x: tw.Tensor, out: tw.Tensor) -> None:
        @tw.task(grid={"m": 4})
        def body(m: tw.Expr) -> None:
            value = tw.load(x, tw.ds(0, 8))
            tw.store(out, (m, tw.ds(0, 8)), value)
            with tw.when(m.equals(3)):
                tw.store(x, tw.ds(0, 8), value * 2.0)

    compiled = tw.compile(update, tw.Tensor((8,)), tw.Tensor((4, 8)), config=tw.Config(workers=4))
    with pytest.raises(tw.errors.RaceError):
        compiled.check([{"x": (8,), "out": (4, 8)}])


def test_a_rank_that_reads_what_another_updates_is_a_race() -> None:
    @tw.kernel
    def update(out: tw.Tensor) -> None:
        box = tw.symmetric("box", (8,))

        @tw.task(grid={})
        def body() -> None:
            value = tw.remote_load(box, tw.ds(0, 8), 0)
            tw.store(out, tw.ds(0, 8), value)
            with tw.when(tw.rank().equals(0)):
                tw.store(box, tw.ds(0, 8), value * 2.0)

    with pytest.raises(tw.errors.RaceError):
        tw.compile(update, tw.Tensor((8,)), world_size=2).check([{"out": (8,)}] * 2)


def test_one_task_may_send_and_then_receive() -> None:
    @tw.kernel
    def exchange(x: tw.Tensor, out: tw.Tensor) -> None:
        box, full = tw.symmetric("box", (8,)), tw.signals("full", (1,))

        @tw.task(grid={})
        def body() -> None:
            tw.remote_store(box, tw.ds(0, 8), tw.load(x, tw.ds(0, 8)), 1 - tw.rank())
            tw.signal(full, 0, 1, 1 - tw.rank())
            tw.wait(full, 0, 1)
            tw.store(out, tw.ds(0, 8), tw.load(box, tw.ds(0, 8)))

    tw.compile(exchange, tw.Tensor((8,)), tw.Tensor((8,)), world_size=2).check([{"x": (8,), "out": (8,)}] * 2)


def test_a_ring_with_credits_is_accepted() -> None:
    @tw.kernel
    def ring(x: tw.Tensor, out: tw.Tensor) -> None:
        box = tw.symmetric("box", (2, 8))
        full, free = tw.signals("full", (4,)), tw.signals("free", (4,))
        row = tw.ds(0, 8)

        @tw.task(grid={}, role="comm")
        def produce() -> None:
            for k in tw.range(4):
                with tw.when(k >= 2):
                    tw.wait(free, k - 2, 1)
                tw.remote_store(box, (k % 2, row), tw.load(x, (k, row)), 1 - tw.rank())
                tw.signal(full, k, 1, 1 - tw.rank())

        @tw.task(grid={})
        def consume() -> None:
            for k in tw.range(4):
                tw.wait(full, k, 1)
                tw.store(out, (k, row), tw.load(box, (k % 2, row)))
                tw.signal(free, k, 1, 1 - tw.rank())

    config = tw.Config(workers=2, comm_workers=1)
    kernel = tw.compile(ring, tw.Tensor((4, 8)), tw.Tensor((4, 8)), world_size=2, config=config)
    kernel.check([{"x": (4, 8), "out": (4, 8)}] * 2)


def test_return_inside_when_is_refused() -> None:
    @tw.kernel
    def leave(x: tw.Tensor, out: tw.Tensor) -> None:
        @tw.task(grid={"i": 4})
        def body(i: tw.Expr) -> None:
            with tw.when(i.equals(0)):
                tw.store(out, i, tw.load(x, i) * 0.0)
                return
            tw.store(out, i, tw.load(x, i))  # type: ignore[unreachable]

    with pytest.raises(tw.errors.TraceError):
        tw.compile(leave, tw.Tensor((4,)), tw.Tensor((4,)))


def test_continue_inside_when_is_refused() -> None:
    @tw.kernel
    def skip(x: tw.Tensor, out: tw.Tensor) -> None:
        @tw.task(grid={})
        def body() -> None:
            for k in tw.range(4):
                with tw.when(k.equals(0)):
                    tw.store(out, 0, tw.load(x, 0) * 0.0)
                    continue
                tw.store(out, k, tw.load(x, k))  # type: ignore[unreachable]

    with pytest.raises(tw.errors.TraceError):
        tw.compile(skip, tw.Tensor((4,)), tw.Tensor((4,)))


def test_written_arguments_may_not_overlap_others() -> None:
    @tw.kernel
    def shift(x: tw.Tensor, out: tw.Tensor) -> None:
        (size,) = x.shape

        @tw.task(grid={"i": tw.ceildiv(size, 8)})
        def body(i: tw.Expr) -> None:
            tw.store(out, tw.ds(i * 8 + 1, 8, stop=size), tw.load(x, tw.ds(i * 8, 8, stop=size - 1)))

    x = np.arange(32, dtype=np.float32)
    with pytest.raises(tw.errors.ArgumentError):
        tw.compile(shift, tw.Tensor(("n",)), tw.Tensor(("n",)))(x, x)


def test_a_broadcast_of_nothing_is_nothing() -> None:
    @tw.kernel
    def add(x: tw.Tensor, b: tw.Tensor, out: tw.Tensor) -> None:
        size, _ = b.shape

        @tw.task(grid={"i": 4})
        def body(i: tw.Expr) -> None:
            whole = (tw.ds(0, 4), tw.ds(0, 8))
            row = tw.load(b, (tw.ds(i, 1, stop=size), tw.ds(0, 8)))
            tw.store(out, (i, *whole), tw.load(x, whole) + row)

    memory = np.full((4, 8), 7.0, np.float32)  # rows 2 and 3 lie behind the argument
    out = np.zeros((4, 4, 8), np.float32)
    specs = tw.Tensor((4, 8)), tw.Tensor(("n", 8)), tw.Tensor((4, 4, 8))
    tw.compile(add, *specs)(np.zeros((4, 8), np.float32), memory[:2], out)
    assert not (out[2:] == 7.0).any()


DIVIDES = """
import numpy as np, tileweave as tw
@tw.kernel
def k(table: tw.Table, out: tw.Tensor):
    @tw.task(grid={"i": 2})
    def body(i):
        total = tw.zeros((4,))
        with tw.when(table[i] > 0):
            tw.store(out, tw.ds(0, 4, stop=8 // table[i]), total)
kernel, table = tw.compile(k, tw.Table((2,)), tw.Tensor((4,))), np.zeros(2, np.int32)
kernel.check([{"table": table, "out": (4,)}])
kernel(table, np.zeros(4, np.float32))
"""


def test_a_guarded_extent_is_not_evaluated_outside_its_guard(tmp_path: Path) -> None:
    path = tmp_path / "divides.py"
    path.write_text(DIVIDES)
    done = subprocess.run([sys.executable, str(path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def scaling(factor: float) -> tw.CompiledKernel:
    @tw.kernel
    def scale(x: tw.Tensor, factor: float) -> None:
        @tw.task(grid={})
        def body() -> None:
            tw.store(x, tw.ds(0, 4), tw.load(x, tw.ds(0, 4)) * factor)

    return tw.compile(scale, tw.Tensor((4,)), factor, world_size=2)


def test_ranks_that_launch_different_kernels_are_told() -> None:
    kernels = scaling(2.0), scaling(3.0)

    def rank(group: tw.Group) -> tuple[str, float]:
        x = np.ones(4, np.float32)
        for kernel in kernels:
            kernel(x)
        with pytest.raises(tw.errors.GroupError) as caught:
            kernels[group.rank](x)
        kernels[0](x)  # the group goes on
        return str(caught.value), float(x[0])

    with tw.VirtualGroup(2) as ranks:
        (first, x), other = ranks.run(rank)
    assert (first, x) == other
    assert x == 12
    assert "rank 0: kernel 'scale' (" in first
    assert "; rank 1: kernel 'scale' (" in first


def test_a_rank_that_loads_one_kernel_while_another_launches_one_is_told() -> None:
    kernels = scaling(2.0), scaling(3.0)

    def rank(group: tw.Group) -> str:
        x = np.ones(4, np.float32)
        kernels[0](x)
        with pytest.raises(tw.errors.GroupError) as caught:
            kernels[group.rank](x)
        return str(caught.value)

    with tw.VirtualGroup(2) as ranks:
        first, second = ranks.run(rank)
    assert first == second
    assert "ranks launch different kernels" in first


def test_the_kernel_cache_may_be_the_current_folder(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text("import tileweave as tw\ntw.VirtualGroup(1).close()\n")
    env = {**os.environ, "TILEWEAVE_CACHE_DIR": "."}
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_misaligned_array_is_refused() -> None:
    @tw.kernel
    def clear(x: tw.Tensor) -> None:
        @tw.task(grid={})
        def body() -> None:
            tw.store(x, tw.ds(0, 4), tw.zeros((4,)))

    x = np.ndarray((4,), np.float32, bytearray(20), offset=1)
    with pytest.raises(tw.errors.ArgumentError, match="'x' begins at an address that is no multiple of its 4-byte"):
        tw.compile(clear, tw.Tensor((4,)))(x)
