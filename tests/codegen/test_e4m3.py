"""float8_e4m3fn on the NumPy interpreter: conversions against torch and the format itself, and kernels with it.

The kernels' tests run on the C engine and in Triton's interpreter as well, where their results must be the same bits.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.codegen.reference_helpers import Array, check, empty, int32
from tileweave.codegen.reference import bf16, e4m3
from tileweave.codegen.reference.interpret import interpret
from tileweave.compiler.config import Config
from tileweave.compiler.passes import compile_program
from tileweave.compiler.trace import kernel
from tileweave.errors import ArgumentError
from tileweave.primitives import language as tw
from tileweave.primitives.expr import Expr
from tileweave.primitives.memory import Table, Tensor

Float32 = npt.NDArray[np.float32]
CODES = np.arange(256).astype(np.uint8)
NANS = (CODES & 127) == 127
PLAIN, SMALL, HALF = Tensor(("n",)), Tensor(("n",), "float8_e4m3fn"), Tensor(("n",), "bfloat16")


def edges() -> Float32:
    """Every value, what lies halfway between neighbours, the floats beside those, and what is too large or small."""
    ladder = np.append(e4m3.widen(CODES[:127]), np.float32(480))  # 480 would follow 448, were it not NaN
    halfway = (ladder[1:] + ladder[:-1]) / 2
    exact = np.concatenate((ladder, halfway))
    beside = [np.nextafter(exact, np.float32(to)) for to in (0, np.inf)]
    far = np.array([0, 1e-45, 1e-38, 1e-10, 463.99997, 464, 464.00003, 500, 3e38, np.inf, np.nan], np.float32)
    values = np.concatenate((exact, *beside, far))
    patterns = np.random.default_rng(0).integers(0, 1 << 32, 2000, dtype=np.uint32).view(np.float32)
    return np.concatenate((values, -values, patterns)).astype(np.float32)


def by_torch(values: Float32) -> Array:
    """The codes that torch gives; it does not saturate, so the range is cut before."""
    cut = torch.from_numpy(values).clamp(-448, 448)
    return cut.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def test_codes_have_their_values() -> None:
    want = torch.from_numpy(CODES).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(e4m3.widen(CODES), want)
    assert np.isnan(e4m3.widen(CODES[NANS])).all()
    assert np.signbit(e4m3.widen(CODES[128:255])).all()
    np.testing.assert_array_equal(e4m3.widen(CODES[[0, 1, 7, 8, 126]]), np.array([0, 2**-9, 7 * 2**-9, 2**-6, 448]))


def test_floats_round_to_the_nearest_code() -> None:
    values = edges()
    codes, nans = e4m3.narrow(values), np.isnan(values)
    np.testing.assert_array_equal(codes[~nans], by_torch(values[~nans]))
    np.testing.assert_array_equal(codes[nans] & 127, 127)
    np.testing.assert_array_equal(e4m3.narrow(e4m3.widen(CODES))[~NANS], CODES[~NANS])
    # Halfway goes to the even code; 2⁻¹⁰ is halfway to the smallest number, 464 halfway to a number that is not there.
    limits = np.array([2**-10, 3 * 2**-10, 1.0625, 1.1875, 464, 1e30, np.inf, -np.inf], np.float32)
    np.testing.assert_array_equal(e4m3.narrow(limits), [0, 2, 56, 58, 126, 126, 126, 254])
    assert e4m3.narrow(np.ones((4, 6), dtype=np.float32)[:, ::2].T).shape == (3, 4)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1))
def test_rounding_is_monotone_and_nearest(values: list[float]) -> None:
    x = np.sort(np.array(values, np.float32))
    rounded = e4m3.widen(e4m3.narrow(x))
    assert (np.diff(rounded) >= 0).all()
    np.testing.assert_array_equal(e4m3.narrow(x), by_torch(x))
    np.testing.assert_array_equal(e4m3.widen(e4m3.narrow(rounded)), rounded)
    numbers = e4m3.widen(CODES[~NANS]).astype(np.float64)
    inside = np.clip(x.astype(np.float64), -448, 448)
    nearest = np.abs(inside[:, None] - numbers).min(axis=1)
    np.testing.assert_array_equal(np.abs(inside - rounded), nearest)


def test_e4m3_rounds_where_it_is_stored_or_cast() -> None:
    @kernel
    def narrow(x: Tensor, stored: Tensor, cast: Tensor, halves: Tensor) -> None:
        @tw.task(grid={"i": tw.ceildiv(x.shape[0], 64)})
        def body(i: Expr) -> None:
            at = tw.ds(i * 64, 64, stop=x.shape[0])
            value = tw.load(x, at)
            small = tw.cast(value, "float8_e4m3fn")
            tw.store(stored, at, value)
            tw.store(cast, at, tw.cast(small, "float32"))
            tw.store(halves, at, tw.cast(tw.cast(tw.cast(value, "bfloat16"), "float8_e4m3fn"), "bfloat16"))

    x = edges()
    codes, twice = e4m3.narrow(x), e4m3.narrow(bf16.widen(bf16.narrow(x)))
    numbers = ~np.isnan(x)

    def make() -> list[dict[str, Array]]:
        some = {"stored": np.zeros_like(codes), "cast": empty(x.shape), "halves": np.zeros(x.shape, np.uint16)}
        return [{"x": x.copy(), **some}]

    want = {"stored": codes, "cast": e4m3.widen(codes), "halves": bf16.narrow(e4m3.widen(twice))}
    check(narrow, (PLAIN, SMALL, PLAIN, HALF), make, [want], 0)
    assert (want["stored"][numbers] & 127 != 127).all()


def test_every_code_is_read_and_copied() -> None:
    @kernel
    def widen(y: Tensor, wide: Tensor, half: Tensor, copied: Tensor, moved: Tensor, sums: Tensor) -> None:
        staged = tw.symmetric("staged", (256,), "float8_e4m3fn")

        @tw.task(grid={"i": 1})
        def body(i: Expr) -> None:
            at = tw.ds(0, 256)
            value = tw.load(y, at)
            tw.store(wide, at, value)
            tw.store(half, at, tw.cast(value, "bfloat16"))
            tw.store(copied, at, value)
            tw.put(staged, at, y, at, 0)
            tw.get(moved, at, staged, at, 0)
            tw.store(sums, at, value * 2.0 + tw.load(y, at))

    values = e4m3.widen(CODES)

    def make() -> list[dict[str, Array]]:
        blank = np.zeros_like(CODES)
        half = np.zeros(256, np.uint16)
        return [{"y": CODES.copy(), "wide": empty((256,)), "half": half, "copied": blank, "moved": blank.copy(),
                 "sums": empty((256,))}]  # fmt: skip

    want = {"wide": values, "half": bf16.narrow(values), "copied": CODES, "moved": CODES, "sums": values * 3}
    small, plain, half = (Tensor((256,), dtype) for dtype in ("float8_e4m3fn", "float32", "bfloat16"))
    check(widen, (small, plain, half, small, small, plain), make, [want], 0)


def whole_numbers(shape: tuple[int, ...], seed: int) -> Array:
    """Codes of whole numbers up to 8: sums of their products are exact in any order."""
    return e4m3.narrow(np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32))


@pytest.mark.parametrize("other", ["float8_e4m3fn", "bfloat16", "float32"])
def test_ragged_products(other: str) -> None:
    @kernel
    def product(a: Tensor, b: Tensor, c: Tensor) -> None:
        (m, k), n = a.shape, b.shape[0]

        @tw.task(grid={"i": tw.ceildiv(m, 16), "j": tw.ceildiv(n, 16)})
        def body(i: Expr, j: Expr) -> None:
            rows, columns = tw.ds(i * 16, 16, stop=m), tw.ds(j * 16, 16, stop=n)
            total = tw.zeros((16, 16))
            for at in tw.range(0, k, 16):
                depth = tw.ds(at, 16, stop=k)
                total = tw.dot(tw.load(a, (rows, depth)), tw.load(b, (columns, depth)).T, total)
            tw.store(c, (rows, columns), total)

    narrow = {"float8_e4m3fn": lambda x: x, "bfloat16": lambda x: bf16.narrow(e4m3.widen(x)), "float32": e4m3.widen}
    a, codes = whole_numbers((33, 65), 0), whole_numbers((17, 65), 1)
    want = e4m3.widen(a) @ e4m3.widen(codes).T
    specs = (Tensor(("m", "k"), "float8_e4m3fn"), Tensor(("n", "k"), other), Tensor(("m", "n")))
    check(product, specs, lambda: [{"a": a, "b": narrow[other](codes), "c": empty((33, 17))}], [{"c": want}], 0)


def test_products_of_tiles_made_in_the_task() -> None:
    """Rows gathered by a table, and a result rounded before it is multiplied again."""

    @kernel
    def chain(a: Tensor, b: Tensor, rows: Table, c: Tensor) -> None:
        @tw.task(grid={"i": 1})
        def body(i: Expr) -> None:
            whole = (tw.ds(0, 16), tw.ds(0, 32))
            taken = tw.gather(a, (rows.rows(tw.ds(0, 16)), tw.ds(0, 32)))
            first = tw.dot(taken, tw.load(b, whole).T)
            again = tw.dot(tw.cast(first, "float8_e4m3fn"), tw.load(b, whole))
            tw.store(c, whole, again + tw.max(taken, axis=1))

    a, b = whole_numbers((20, 32), 2), whole_numbers((16, 32), 3)
    listed = int32([3, -1, 19, 0, *range(12)])
    taken = np.where((listed >= 0)[:, None], e4m3.widen(a[listed]), 0)
    first = e4m3.widen(e4m3.narrow(taken @ e4m3.widen(b).T))
    want = first @ e4m3.widen(b) + taken.max(axis=1, keepdims=True)
    specs = (Tensor((20, 32), "float8_e4m3fn"), Tensor((16, 32), "float8_e4m3fn"), Table((16,)), Tensor((16, 32)))
    check(chain, specs, lambda: [{"a": a, "b": b, "rows": listed, "c": empty((16, 32))}], [{"c": want}], 0)


def test_accumulators_take_e4m3_and_what_nobody_wrote_is_nan() -> None:
    @kernel
    def take(x: Tensor, out: Tensor) -> None:
        unwritten = tw.workspace("unwritten", (4,), "float8_e4m3fn")

        @tw.task(grid={"i": 1})
        def body(i: Expr) -> None:
            total = tw.full((4,), 5.0)
            tw.assign(total, tw.load(x, tw.ds(0, 4)))
            total += tw.load(x, tw.ds(0, 4))
            tw.store(out, (0, tw.ds(0, 4)), total)
            tw.store(out, (1, tw.ds(0, 4)), tw.load(unwritten, tw.ds(0, 4)))

    x = whole_numbers((4,), 4)
    want = np.stack((e4m3.widen(x) * 2, empty((4,))))
    specs = (Tensor((4,), "float8_e4m3fn"), Tensor((2, 4)))
    check(take, specs, lambda: [{"x": x, "out": np.zeros((2, 4), np.float32)}], [{"out": want}], 0)


def test_the_interpreter_takes_bit_patterns() -> None:
    @kernel
    def move(x: Tensor) -> None:
        @tw.task()
        def body() -> None:
            tw.store(x, tw.ds(0, 4), tw.load(x, tw.ds(0, 4)) + 1.0)

    program, schedule = compile_program(move, (Tensor((4,), "float8_e4m3fn"),), 1, Config())
    message = "argument 'x' needs a NumPy array of uint8 of float8_e4m3fn bit patterns, got float32"
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        interpret(program, schedule, [{"x": np.zeros(4, np.float32)}])
