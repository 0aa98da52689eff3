"""The NumPy interpreter against straightforward NumPy: tiles, scalars and loops of one rank."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from tests.codegen.reference_helpers import Array, check, empty, int32, normal
from tileweave.codegen.reference import bf16
from tileweave.codegen.reference import ops as reference_ops
from tileweave.codegen.reference import scalars as reference_scalars
from tileweave.codegen.reference.interpret import interpret
from tileweave.compiler.config import Config
from tileweave.compiler.passes import compile_program
from tileweave.compiler.trace import kernel
from tileweave.errors import ArgumentError
from tileweave.primitives import language as tw
from tileweave.primitives import ops
from tileweave.primitives.expr import OPERATORS, Expr
from tileweave.primitives.functions import FUNCTIONS
from tileweave.primitives.memory import Table, Tensor
from tileweave.primitives.tile import elementwise


def test_every_op_and_operator_has_a_meaning() -> None:
    assert set(reference_ops.MEANING) == set(ops.op_classes())
    assert set(reference_scalars.MEANING) == set(OPERATORS)


@pytest.mark.parametrize("name", OPERATORS)
def test_scalar_operators_agree_with_numpy(name: str) -> None:
    for a, b in itertools.product((-7, -1, 0, 1, 2, 7), (-3, -1, 0, 1, 3)):
        if name not in ("floordiv", "mod") or b:
            assert reference_scalars.MEANING[name](a, b) == int(OPERATORS[name].meaning(a, b))


def test_elementwise_chain() -> None:
    @kernel
    def chain(x: Tensor, y: Tensor, out: Tensor) -> None:
        rows, columns = x.shape

        @tw.task(grid={"i": tw.ceildiv(rows, 4), "j": tw.ceildiv(columns, 8)})
        def body(i: Expr, j: Expr) -> None:
            at = (tw.ds(i * 4, 4, stop=rows), tw.ds(j * 8, 8, stop=columns))
            row = tw.load(y, at[1])
            value = tw.exp(tw.load(x, at) * 0.5) + row[None, :]
            tw.store(out, at, tw.select(value > 1.0, 1.0 / value, -value))

    x, y = normal((11, 21)), normal((21,), 1)
    value = np.exp(x * 0.5) + y
    specs = (Tensor(("n", 21)), Tensor((21,)), Tensor(("n", 21)))
    want = np.where(value > 1, 1 / value, -value)
    check(chain, specs, lambda: [{"x": x, "y": y, "out": empty((11, 21))}], [{"out": want}])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    arity = FUNCTIONS[name].arity

    @kernel
    def apply(a: Tensor, b: Tensor, c: Tensor, out: Tensor) -> None:
        @tw.task(grid={"i": 1})
        def body(i: Expr) -> None:
            at = tw.ds(0, 8, stop=a.shape[0])
            tw.store(out, at, elementwise(name, *[tw.load(m, at) for m in (a, b, c)[:arity]]))

    a, b, c = np.abs(normal((7,))) + 0.1, normal((7,), 1), normal((7,), 2)
    want = FUNCTIONS[name].meaning(*[m.astype(np.float64) for m in (a, b, c)[:arity]])
    check(apply, (Tensor(("n",)),) * 4, lambda: [{"a": a, "b": b, "c": c, "out": empty((7,))}], [{"out": want}])


@kernel
def gemm(a: Tensor, b: Tensor, c: Tensor) -> None:
    """`c` [M, N] = `a` [M, K] · `b` [N, K]ᵀ."""
    (m, k), (n, _) = a.shape, b.shape

    @tw.task(grid={"i": tw.ceildiv(m, 8), "j": tw.ceildiv(n, 4)})
    def tile(i: Expr, j: Expr) -> None:
        rows, columns = tw.ds(i * 8, 8, stop=m), tw.ds(j * 4, 4, stop=n)
        total = tw.zeros((8, 4))
        for start in tw.range(0, k, 16):
            inner = tw.ds(start, 16, stop=k)
            tw.dot(tw.load(a, (rows, inner)), tw.load(b, (columns, inner)).T, total)
        tw.store(c, (rows, columns), total)


@pytest.mark.parametrize(("m", "n", "k"), [(8, 4, 16), (13, 7, 37), (1, 1, 1), (9, 5, 15), (0, 4, 16), (3, 4, 0)])
def test_ragged_gemm(m: int, n: int, k: int) -> None:
    a, b = normal((m, k)), normal((n, k), 1)
    specs = (Tensor(("m", "k")), Tensor(("n", "k")), Tensor(("m", "n")))
    check(gemm, specs, lambda: [{"a": a, "b": b, "c": empty((m, n))}], [{"c": a @ b.T}])


def test_gather_and_scatter_skip_masked_rows() -> None:
    @kernel
    def permute(x: Tensor, source: Table, target: Table, out: Tensor) -> None:
        (count,) = source.shape

        @tw.task(grid={"i": tw.ceildiv(count, 4)})
        def body(i: Expr) -> None:
            part = tw.ds(i * 4, 4, stop=count)
            tile = tw.gather(x, (source.rows(part), tw.ds(0, 3)))
            tw.scatter(out, (target.rows(part), tw.ds(0, 3)), tile)

    x = normal((6, 3))
    source, target = int32([5, -1, 0, 2, 2, -7]), int32([1, 0, -1, 4, 2, 3])
    want = np.full((5, 3), 9, dtype=np.float32)
    want[[1, 0, 4, 2, 3]] = [x[5], np.zeros(3), x[2], x[2], np.zeros(3)]
    specs = (Tensor(("rows", 3)), Table(("count",)), Table(("count",)), Tensor(("n", 3)))

    def make() -> list[dict[str, Array]]:
        return [{"x": x, "source": source, "target": target, "out": np.full((5, 3), 9, dtype=np.float32)}]

    check(permute, specs, make, [{"out": want}])


def test_when_and_nested_loops() -> None:
    @kernel
    def staircase(limits: Table, out: Tensor) -> None:
        (count,) = limits.shape

        @tw.task(grid={"i": count, "j": lambda i: limits[i]})
        def body(i: Expr, j: Expr) -> None:
            total = tw.zeros((1, 1))
            for a in tw.range(j, limits[i], 2):
                for b in tw.range(a):
                    with tw.when((a % 2).differs(b % 2) | (b > 3)):
                        total += 1.0
            tw.store(out, (tw.ds(i, 1), tw.ds(j, 1)), total)

    limits = int32([0, 3, 7, 5])
    want = np.full((4, 8), -1, dtype=np.float32)
    for i, j in itertools.product(range(4), range(8)):
        if j < limits[i]:
            want[i, j] = sum((a % 2 != b % 2) or b > 3 for a in range(j, limits[i], 2) for b in range(a))

    def make() -> list[dict[str, Array]]:
        return [{"limits": limits, "out": np.full((4, 8), -1, dtype=np.float32)}]

    check(staircase, (Table(("n",)), Tensor(("n", 8))), make, [{"out": want}])


@pytest.mark.parametrize(("rows", "columns"), [(4, 8), (3, 5), (7, 1)])
def test_reductions_run_over_the_extent(rows: int, columns: int) -> None:
    @kernel
    def softmax(x: Tensor, out: Tensor, column_sums: Tensor) -> None:
        (m, n) = x.shape

        @tw.task(grid={"i": tw.ceildiv(m, 4)})
        def body(i: Expr) -> None:
            at = (tw.ds(i * 4, 4, stop=m), tw.ds(0, 8, stop=n))
            value = tw.load(x, at)
            value = tw.exp(value - tw.max(value, 1))
            tw.store(out, at, value / tw.sum(value, 1))
            tw.store(column_sums, (tw.ds(i, 1), at[1]), tw.sum(tw.load(x, at), 0))

    x = normal((rows, columns)) - 5  # so that zeros outside the extent would win the maximum
    e = np.exp(x - x.max(1, keepdims=True))
    sums = np.stack([x[i : i + 4].sum(0) for i in range(0, rows, 4)])
    specs = (Tensor(("m", "n")), Tensor(("m", "n")), Tensor(("tiles", "n")))

    def make() -> list[dict[str, Array]]:
        return [{"x": x, "out": empty(x.shape), "column_sums": empty(sums.shape)}]

    check(softmax, specs, make, [{"out": e / e.sum(1, keepdims=True), "column_sums": sums}])


def test_sum_adds_in_ascending_order() -> None:
    @kernel
    def total(x: Tensor, out: Tensor) -> None:
        @tw.task(grid={"i": 1})
        def body(i: Expr) -> None:
            tw.store(out, tw.ds(0, 1), tw.sum(tw.load(x, tw.ds(0, 1000)), 0))

    x = normal((1000,))
    want = np.float32(0)
    for value in x:
        want += value
    check(total, (Tensor((1000,)), Tensor((1,))), lambda: [{"x": x, "out": empty((1,))}], [{"out": want[None]}], 0)


def test_bfloat16_rounds_where_it_is_stored_or_cast() -> None:
    @kernel
    def convert(x: Tensor, y: Tensor, stored: Tensor, cast: Tensor, copied: Tensor) -> None:
        staged = tw.symmetric("staged", (16,), "bfloat16")

        @tw.task(grid={"i": 1})
        def body(i: Expr) -> None:
            at = tw.ds(0, 16, stop=x.shape[0])
            value = tw.load(x, at)
            tw.store(stored, at, value)
            tw.store(cast, at, tw.cast(value, "bfloat16") + tw.load(y, at))
            tw.put(staged, at, y, at, 0)
            tw.get(copied, at, staged, at, 0)

    x, y = normal((13,)), bf16.narrow(normal((13,), 1))
    y[3] = 0xFF81  # a copy keeps the bits of a signalling NaN
    rounded = bf16.widen(bf16.narrow(x))
    assert (rounded != x).any()
    plain, half = Tensor(("n",)), Tensor(("n",), "bfloat16")

    def make() -> list[dict[str, Array]]:
        return [{"x": x, "y": y, "stored": np.zeros_like(y), "cast": empty((13,)), "copied": np.zeros_like(y)}]

    with np.errstate(invalid="ignore"):
        want = {"stored": bf16.narrow(x), "cast": rounded + bf16.widen(y), "copied": y}
    check(convert, (plain, half, half, plain, half), make, [want], 0)


def test_bfloat16_conversions() -> None:
    bits = np.arange(1 << 16).astype(np.uint16)
    values = bf16.widen(bits)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(bf16.narrow(values[numbers]), bits[numbers])
    assert np.isnan(bf16.widen(bf16.narrow(values[~numbers]))).all()
    # Halfway goes to the even neighbour; past the largest finite value lies infinity.
    patterns = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800001, 0xFFFFFFFF], dtype=np.uint32)
    narrowed = bf16.narrow(patterns.view(np.float32))
    np.testing.assert_array_equal(narrowed[:4], [0x3F80, 0x3F82, 0x3F81, 0x7F80])
    assert np.isnan(bf16.widen(narrowed[4:])).all()
    assert bf16.narrow(np.ones((4, 6), dtype=np.float32)[:, ::2].T).shape == (3, 4)


def test_int32_tiles_are_moved_as_they_are() -> None:
    @kernel
    def move(n: Tensor, out: Tensor) -> None:
        @tw.task()
        def copy() -> None:
            tw.store(out, tw.ds(0, 5), tw.load(n, tw.ds(0, 5)))

    n = int32([0, -1, 2**31 - 1, 2**24 + 1, -(2**31)])
    specs = (Tensor((5,), "int32"), Tensor((5,), "int32"))
    check(move, specs, lambda: [{"n": n, "out": int32([0] * 5)}], [{"out": n}], 0)


def test_values_made_from_an_accumulator_do_not_follow_it() -> None:
    @kernel
    def snapshots(out: Tensor) -> None:
        @tw.task(grid={"i": 1})
        def body(i: Expr) -> None:
            total = tw.full((2, 3), 1.0)
            turned, taller, same = total.T, tw.sum(total, 0)[None, :, :], total * 1.0
            total += 5.0
            at = (tw.ds(0, 2), tw.ds(0, 3))
            tw.store(out, (0, *at), turned.T)
            tw.store(out, (tw.ds(1, 1), tw.ds(0, 1), at[1]), taller)
            tw.store(out, (2, *at), same)
            tw.store(out, (3, *at), total)

    want = np.ones((4, 2, 3), dtype=np.float32)
    want[1, 0], want[1, 1], want[3] = 2, 0, 6
    check(snapshots, (Tensor((4, 2, 3)),), lambda: [{"out": np.zeros((4, 2, 3), dtype=np.float32)}], [{"out": want}])


def test_ragged_update_keeps_the_rest_of_an_accumulator() -> None:
    @kernel
    def fold(x: Tensor, out: Tensor) -> None:
        @tw.task(grid={"i": 1})
        def body(i: Expr) -> None:
            total = tw.zeros((4,))
            for start in tw.range(0, x.shape[0], 4):
                total += tw.load(x, tw.ds(start, 4, stop=x.shape[0]))
            tw.store(out, tw.ds(0, 4), total)

    x = normal((10,))
    want = x[:4] + x[4:8]
    want[:2] += x[8:]
    check(fold, (Tensor(("n",)), Tensor((4,))), lambda: [{"x": x, "out": empty((4,))}], [{"out": want}])


def test_what_nobody_wrote_shows_as_nan() -> None:
    @kernel
    def early(out: Tensor) -> None:
        scratch = tw.workspace("scratch", (4,))
        small = tw.workspace("small", (4,), "bfloat16")

        @tw.task(grid={"i": 1})
        def body(i: Expr) -> None:
            tw.store(out, (0, tw.ds(0, 4)), tw.load(scratch, tw.ds(0, 4)))
            tw.store(out, (1, tw.ds(0, 4)), tw.load(small, tw.ds(0, 4)))

    check(early, (Tensor((2, 4)),), lambda: [{"out": np.zeros((2, 4), dtype=np.float32)}], [{"out": empty((2, 4))}])


def test_storage_dtypes_are_checked() -> None:
    program, schedule = compile_program(gemm, (Tensor((8, 4), "bfloat16"), Tensor((4, 4)), Tensor((8, 4))), 1, Config())
    arguments = {"a": normal((8, 4)), "b": normal((4, 4)), "c": empty((8, 4))}
    message = "argument 'a' needs a NumPy array of uint16 of bfloat16 bit patterns, got float32"
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        interpret(program, schedule, [arguments])
