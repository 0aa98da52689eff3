"""The functions of `tw_math.h` against float64, over all magnitudes and at their edges."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.special import erf, expit

from tileweave import native
from tileweave.codegen.c.engine import FLAGS, INCLUDE_DIR
from tileweave.codegen.reference import bf16

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

NAMES = ("exp", "sigmoid", "tanh", "log", "erf", "round_bf16")
SOURCE = '#include "tw_math.h"\n' + "".join(
    f"void all_{name}(const float *x, float *y, int64_t n) {{ for (int64_t i = 0; i < n; i++) y[i] = tw_{name}(x[i]); }}\n"
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


# The largest relative error that is allowed where the true result is normal: 2e-6, but most are far better.
CASES: dict[str, tuple[Float32, Callable[[Float64], Float64], float]] = {
    "exp": (
        np.concatenate(
            (both_signs(every_magnitude(1e-30, 88.7)), np.linspace(-87.34, 88.73, 400_000, dtype=np.float32))
        ),
        np.exp,
        1.5e-7,
    ),
    "sigmoid": (both_signs(every_magnitude(1e-30, 88.0)), expit, 3e-7),
    "tanh": (both_signs(every_magnitude(1e-30, 100.0)), np.tanh, 3e-7),
    "log": (every_magnitude(float(TINY), 3.4e38, 2_000_000), np.log, 3e-7),
    "erf": (both_signs(every_magnitude(1e-30, 10.0)), erf, 1e-6),
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
    assert np.abs(apply(library, "erf", x) - erf(x.astype(np.float64))).max() <= 2e-7
