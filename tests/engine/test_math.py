"""The functions of `tw_math.h` against float64, over all magnitudes and at their edges."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.special import erf, expit

from tileweave import native
from tileweave.codegen.c.engine import FLAGS, INCLUDE_DIR
from tileweave.codegen.reference import bf16, e4m3

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

NAMES = ("exp", "sigmoid", "tanh", "log", "erf", "round_bf16", "round_e4m3")
SOURCE = '#include "tw_math.h"\n' + "".join(
    f"void all_{name}(const float *x, float *y, int64_t n) {{\n"
    f"    for (int64_t i = 0; i < n; i++) y[i] = tw_{name}(x[i]);\n}}\n"
    f"float one_{name}(float x) {{ return tw_{name}(x); }}\n"
    for name in NAMES
)
TINY = np.float32(np.finfo(np.float32).tiny)
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], np.float32)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    """Compiled as kernels are."""
    loaded = native.load(native.build(SOURCE, "math_test", include_dirs=(INCLUDE_DIR,), flags=FLAGS))
    for name in NAMES:
        getattr(loaded, f"one_{name}").argtypes = [ctypes.c_float]
        getattr(loaded, f"one_{name}").restype = ctypes.c_float
    return loaded


def apply(library: ctypes.CDLL, name: str, x: Float32) -> Float32:
    x = np.ascontiguousarray(x, np.float32)
    y = np.empty_like(x)
    address: Callable[[Any], ctypes.c_void_p] = lambda array: ctypes.c_void_p(array.ctypes.data)  # noqa: E731
    getattr(library, f"all_{name}")(address(x), address(y), ctypes.c_int64(x.size))
    return y


def every_magnitude(low: float, high: float, count: int = 400_000) -> Float32:
    """Floats with evenly spaced bit patterns from `low` to `high`, both positive."""
    first, last = np.array([low, high], np.float32).view(np.uint32)
    return np.linspace(first, last, count).astype(np.uint32).view(np.float32)


def both_signs(x: Float32) -> Float32:
    return np.concatenate((x, -x))


# Inputs, the truth, and the largest relative error allowed where the true result is a normal float32.
CASES: dict[str, tuple[Float32, Callable[[Float64], Float64], float]] = {
    "exp": (
        np.concatenate(
            (both_signs(every_magnitude(1e-30, 88.7)), np.linspace(-87.34, 88.73, 400_000, dtype=np.float32))
        ),
        np.exp,
        1.2e-7,
    ),
    "sigmoid": (both_signs(every_magnitude(1e-30, 88.0)), expit, 2e-7),
    "tanh": (both_signs(every_magnitude(1e-30, 100.0)), np.tanh, 2e-7),
    "log": (every_magnitude(float(TINY), 3.4e38, 2_000_000), np.log, 2e-7),
    "erf": (both_signs(every_magnitude(1e-30, 10.0)), erf, 4e-7),
}


@pytest.mark.parametrize("name", CASES)
def test_relative_error(library: ctypes.CDLL, name: str) -> None:
    x, exact, limit = CASES[name]
    with np.errstate(over="ignore"):
        want = exact(x.astype(np.float64))
    normal = (np.abs(want) >= TINY) & (np.abs(want) <= np.finfo(np.float32).max)
    got = apply(library, name, x).astype(np.float64)
    error = np.abs(got - want)[normal] / np.abs(want)[normal]
    assert error.max() <= limit, f"{error.max():.3g} at {x[normal][error.argmax()]!r}"


def test_absolute_error_of_erf(library: ctypes.CDLL) -> None:
    x = np.linspace(-12, 12, 1_000_001, dtype=np.float32)
    assert np.abs(apply(library, "erf", x) - erf(x.astype(np.float64))).max() <= 2.5e-7


def test_results_too_small_to_be_normal(library: ctypes.CDLL) -> None:
    x = np.linspace(-104.5, -87.3, 100_001, dtype=np.float32)
    smallest = float(np.finfo(np.float32).smallest_subnormal)
    assert np.abs(apply(library, "exp", x) - np.exp(x.astype(np.float64))).max() <= smallest
    x = every_magnitude(1e-45, float(TINY))
    want = np.log(x.astype(np.float64))
    assert np.abs(apply(library, "log", x) / want - 1).max() <= 2e-7


def test_special_values(library: ctypes.CDLL) -> None:
    inf, nan = float("inf"), float("nan")
    want = {
        "exp": [1, 1, inf, 0, nan],
        "sigmoid": [0.5, 0.5, 1, 0, nan],
        "tanh": [0.0, -0.0, 1, -1, nan],
        "log": [-inf, -inf, inf, nan, nan],
        "erf": [0.0, -0.0, 1, -1, nan],
        "round_bf16": SPECIAL.tolist(),
        "round_e4m3": [0.0, -0.0, 448, -448, nan],
    }
    for name, values in want.items():
        got = apply(library, name, SPECIAL)
        np.testing.assert_array_equal(got, np.array(values, np.float32), err_msg=name)
        assert np.signbit(got[0:2]).tolist() == np.signbit(values[0:2]).tolist(), name
    assert np.isnan(apply(library, "log", -every_magnitude(1e-45, 3e38, 1000))).all()
    assert apply(library, "exp", np.array([88.72283, 88.72284, 1e30], np.float32)).tolist() == [
        pytest.approx(3.4027985e38),
        inf,
        inf,
    ]


@pytest.mark.parametrize("name", NAMES)
def test_vector_and_scalar_code_give_equal_bits(library: ctypes.CDLL, name: str) -> None:
    random = np.random.default_rng(0)
    x = random.integers(0, 1 << 32, 20_003, dtype=np.uint32).view(np.float32)
    x = np.concatenate((x, random.standard_normal(20_000, np.float32) * 10, SPECIAL))
    one = getattr(library, f"one_{name}")
    alone = np.array([one(value) for value in x.tolist()], np.float32)
    together = apply(library, name, x)
    same = (alone.view(np.uint32) == together.view(np.uint32)) | (np.isnan(alone) & np.isnan(together))
    assert same.all(), x[~same][:5]


def test_bf16_rounds_to_nearest_even(library: ctypes.CDLL) -> None:
    every = np.arange(1 << 16, dtype=np.uint32) << 16  # each bf16 number, and what lies around it and its halfway point
    offsets = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    x = (every[:, None] + offsets).ravel().view(np.float32)
    got, want = apply(library, "round_bf16", x), bf16.widen(bf16.narrow(x))
    numbers = ~np.isnan(x)
    np.testing.assert_array_equal(got[numbers].view(np.uint32), want[numbers].view(np.uint32))
    np.testing.assert_array_equal(got[numbers], torch.from_numpy(x[numbers]).bfloat16().float().numpy())
    assert np.isnan(got[~numbers]).all()


def test_e4m3_rounds_to_nearest_even_and_saturates(library: ctypes.CDLL) -> None:
    every = np.arange(1 << 12, dtype=np.uint32) << 20  # floats of 3 bits of mantissa, and what lies around each
    offsets = np.array([0, 1, 0x3FFFF, 0x7FFFF, 0x80000, 0x80001, 0xFFFFF], np.uint32)
    subnormal = (np.arange(-20, 20, 0.25, dtype=np.float32) * np.float32(2**-10)).view(np.uint32)
    x = np.concatenate(((every[:, None] + offsets).ravel(), subnormal)).view(np.float32)
    got, want = apply(library, "round_e4m3", x), e4m3.widen(e4m3.narrow(x))
    numbers = ~np.isnan(x)
    np.testing.assert_array_equal(got[numbers].view(np.uint32), want[numbers].view(np.uint32))
    assert np.isnan(got[~numbers]).all()
