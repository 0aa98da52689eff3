"""The dot kernel of generated C: its values, and that an element's bits depend on its operands alone."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

INCLUDE = Path(__file__).resolve().parents[2] / "codegen" / "c" / "include"
CC = os.environ.get("CC", "cc")

F32, BF16 = 0, 1

SOURCE = """
#include "tw_dot.h"
int64_t scratch_floats(void) { return TW_DOT_SCRATCH; }
void dot(int64_t m, int64_t n, int64_t k, const void *a, int64_t lda, int32_t ta, int32_t ka,
         const void *b, int64_t ldb, int32_t tb, int32_t kb, float *c, int64_t ldc, float *scratch) {
    tw_operand x = {a, lda, ta, ka}, y = {b, ldb, tb, kb};
    tw_dot(m, n, k, x, y, c, ldc, scratch);
}
"""

Floats = npt.NDArray[np.float32]
Dot = Callable[..., Floats]


def as_bf16(x: Floats) -> npt.NDArray[np.uint16]:
    """The upper halves of values that are exact in bf16."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).astype(np.uint16)


def cut(x: Floats) -> Floats:
    """Values cut to bf16."""
    bits: npt.NDArray[np.uint32] = x.view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def compile_library(folder: Path, *flags: str) -> ctypes.CDLL:
    source, library = folder / "dot.c", folder / "libdot.so"
    source.write_text(SOURCE)
    command = [CC, "-O3", *flags, "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{INCLUDE}"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    lib = ctypes.CDLL(str(library))
    lib.scratch_floats.restype = ctypes.c_int64
    pointer, size, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    operand = (pointer, size, flag, flag)
    lib.dot.argtypes = (size, size, size, *operand, *operand, pointer, size, pointer)
    lib.dot.restype = None
    return lib


def caller(lib: ctypes.CDLL) -> Dot:
    """dot(a [m, k], b [n, k], ...) -> c + a @ b.T, with a choice of storage for each operand."""
    floats = int(lib.scratch_floats())
    raw = np.full(floats + 48, np.nan, np.float32)
    start = -raw.ctypes.data % 64 // 4
    guard = np.float32(12345.0)
    raw[start + floats :] = guard

    def store(x: Floats, bf16: bool, k_major: bool, pad: int, shift: int) -> tuple[npt.NDArray[np.generic], int, int]:
        held: npt.NDArray[np.generic] = as_bf16(x) if bf16 else x
        if k_major:
            held = held.T
        rows, width = held.shape
        hostile = 0x7FC0 if bf16 else np.nan  # read past an edge, and the sum is a NaN
        memory = np.full(shift + rows * (width + pad), hostile, held.dtype)
        memory[shift:].reshape(rows, width + pad)[:, :width] = held
        return memory, memory.ctypes.data + shift * memory.itemsize, width + pad

    def dot(
        a: Floats,
        b: Floats,
        c: Floats | None = None,
        *,
        bf16: tuple[bool, bool] = (False, False),
        k_major: tuple[bool, bool] = (False, False),
        pad: int = 0,
        shift: int = 0,
    ) -> Floats:
        (m, k), n = a.shape, b.shape[0]
        start_value = np.zeros((m, n), np.float32) if c is None else c
        out = np.full((m, n + pad), guard, np.float32)
        out[:, :n] = start_value
        keep_a, at_a, lda = store(a, bf16[0], k_major[0], pad, shift)
        keep_b, at_b, ldb = store(b, bf16[1], k_major[1], pad, shift)
        x = (at_a, lda, int(bf16[0]), int(k_major[0]))
        y = (at_b, ldb, int(bf16[1]), int(k_major[1]))
        raw[start : start + floats] = np.nan
        lib.dot(m, n, k, *x, *y, out.ctypes.data, n + pad, raw.ctypes.data + start * 4)
        del keep_a, keep_b
        assert (out[:, n:] == guard).all()
        assert (raw[start + floats :] == guard).all()
        result: Floats = out[:, :n].copy()
        return result

    return dot


@pytest.fixture(scope="module")
def dot(tmp_path_factory: pytest.TempPathFactory) -> Dot:
    return caller(compile_library(tmp_path_factory.mktemp("dot"), "-march=native"))


def operands(m: int, n: int, k: int) -> tuple[Floats, Floats, Floats]:
    rng = np.random.default_rng([m, n, k])
    a, b, c = (rng.standard_normal(shape).astype(np.float32) for shape in ((m, k), (n, k), (m, n)))
    return a, b, c


def same_bits(x: Floats, y: Floats) -> bool:
    return x.shape == y.shape and bool((x.view(np.uint32) == y.view(np.uint32)).all())


SHAPES = [
    (1, 1, 1),
    (1, 5, 7),
    (2, 3, 15),
    (3, 4, 16),
    (4, 7, 17),
    (5, 8, 31),
    (7, 9, 100),
    (13, 19, 511),
    (16, 16, 512),
    (17, 33, 513),
    (64, 20, 768),
    (96, 12, 1024),
    (97, 13, 1040),
    (128, 30, 2048),
    (193, 6, 1100),
    (200, 37, 530),
    (3, 5, 60000),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("k_major", [(False, False), (False, True), (True, False), (True, True)], ids=str)
@pytest.mark.parametrize("bf16", [(False, False), (True, True), (True, False), (False, True)], ids=str)
def test_values(dot: Dot, shape: tuple[int, int, int], k_major: tuple[bool, bool], bf16: tuple[bool, bool]) -> None:
    a, b, c = operands(*shape)
    a, b = cut(a) if bf16[0] else a, cut(b) if bf16[1] else b
    got = dot(a, b, c, bf16=bf16, k_major=k_major, pad=3)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    want = c + wide_a @ wide_b.T
    bound = (abs(wide_a) @ abs(wide_b).T + abs(c)) * 2.0**-23 * (shape[2] / 8 + 16)
    assert (abs(got - want) <= bound).all()
    assert same_bits(got, dot(a, b, c))  # nor do storage, layout, padding or the type held change a bit


def test_order_is_the_documented_one(dot: Dot) -> None:
    """The order of the header's first comment, with each step in fp64 and rounded to fp32."""
    a, b, c = operands(3, 5, 1100)
    want = c.copy()
    for k0 in range(0, 1100, 512):
        lanes = np.zeros((3, 5, 8), np.float32)
        for k in range(k0, min(k0 + 512, 1100)):
            product = a[:, None, k].astype(np.float64) * b[None, :, k].astype(np.float64)
            lanes[:, :, k % 8] = (product + lanes[:, :, k % 8]).astype(np.float32)
        half = lanes[:, :, :4] + lanes[:, :, 4:]
        pair = half[:, :, :2] + half[:, :, 2:]
        want += pair[:, :, 0] + pair[:, :, 1]
    # fp64 rounds once more than an fma does, on rare ties
    assert (dot(a, b, c) != want).sum() <= 1


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("k", [2048, 1000])
def test_a_row_has_the_same_bits_in_any_product(dot: Dot, bf16: bool, k: int) -> None:
    a, b, c = operands(200, 9, k)
    if bf16:
        a, b = cut(a), cut(b)
    kinds = (bf16, bf16)
    alone = np.concatenate([dot(a[i : i + 1], b, c[i : i + 1], bf16=kinds) for i in range(200)])
    for m in range(1, 201):
        first = (m * 37) % (201 - m)
        rows = slice(first, first + m)
        assert same_bits(dot(a[rows], b, c[rows], bf16=kinds), alone[rows]), m


def test_a_row_has_the_same_bits_in_any_place(dot: Dot) -> None:
    a, b, _ = operands(200, 6, 600)
    alone = dot(a[:1], b)
    for m in (*range(1, 20), 64, 95, 96, 97, 128, 200):
        repeated = np.repeat(a[:1], m, axis=0)
        assert same_bits(dot(repeated, b), np.repeat(alone, m, axis=0)), m
    for place in range(200):
        moved = np.roll(a, place, axis=0)
        assert same_bits(dot(moved, b)[place : place + 1], alone), place


@pytest.mark.parametrize("m", [1, 2, 3, 4, 50, 130])
@pytest.mark.parametrize("k_major", [False, True])
def test_a_column_has_the_same_bits_in_any_product(dot: Dot, m: int, k_major: bool) -> None:
    a, b, c = operands(m, 60, 1032)
    layout = (False, k_major)
    alone = np.concatenate([dot(a, b[j : j + 1], c[:, j : j + 1].copy()) for j in range(60)], axis=1)
    for n in range(1, 61):
        first = (n * 17) % (61 - n)
        columns = slice(first, first + n)
        part = dot(a, b[columns], c[:, columns].copy(), k_major=layout)
        assert same_bits(part, alone[:, columns].copy()), n


def test_strides_and_alignment_change_no_bit(dot: Dot) -> None:
    a, b, c = operands(37, 22, 700)
    want = dot(a, b, c)
    for pad in (0, 1, 4, 9, 324):
        for shift in (0, 1, 3, 8):
            assert same_bits(dot(a, b, c, pad=pad, shift=shift), want), (pad, shift)


def test_panels_of_columns_make_the_product(dot: Dot) -> None:
    a, b, c = operands(70, 100, 1536)
    panels = [dot(a, b[j : j + 27], c[:, j : j + 27].copy()) for j in range(0, 100, 27)]
    assert same_bits(np.concatenate(panels, axis=1), dot(a, b, c))


def test_products_of_nothing_leave_c(dot: Dot) -> None:
    for shape in ((0, 3, 8), (3, 0, 8), (3, 4, 0)):
        a, b, c = operands(*shape)
        assert same_bits(dot(a, b, c), c)


def test_infinities_and_nans_stay_in_their_row_and_column(dot: Dot) -> None:
    a, b, _ = operands(9, 10, 530)
    want = dot(a, b)
    a[4, 7], b[6, 529] = np.inf, np.nan
    got = dot(a, b)
    hit = np.zeros((9, 10), bool)
    hit[4, :], hit[:, 6] = True, True
    assert not np.isfinite(got[hit]).any()
    assert (got[~hit] == want[~hit]).all()


@pytest.mark.parametrize("flags", [(), ("-march=native", "-ffp-contract=off"), ("-march=native", "-O1")], ids=str)
def test_other_flags_keep_one_order(dot: Dot, flags: tuple[str, ...], tmp_path: Path) -> None:
    """Builds without FMA have bits of their own, yet one order; with FMA the flags do not matter."""
    other = caller(compile_library(tmp_path, *flags))
    a, b, c = operands(101, 11, 1000)
    whole = other(a, b, c)
    for i in (0, 1, 2, 50, 98, 99, 100):
        assert same_bits(other(a[i : i + 1], b, c[i : i + 1]), whole[i : i + 1])
    assert same_bits(other(a[:8], b, c[:8], k_major=(True, True)), whole[:8])
    if flags and platform.machine() == "x86_64":
        assert same_bits(whole, dot(a, b, c))
