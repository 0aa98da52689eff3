"""float8_e4m3fn as NumPy sees it: uint8 bit patterns in memory, float32 values in tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_LARGEST = np.float32(448)
_SMALLEST_NORMAL = np.float32(2**-6)
_STEP_ABOVE = np.float32(2**14)
"""Floats from here on lie 2⁻⁹ apart, as subnormals of e4m3 do."""


def widen(bits: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """The values of float8_e4m3fn `bits`, exactly; any shape."""
    exponent, mantissa = (bits >> 3) & 15, (bits & 7).astype(np.float32)
    subnormal = np.ldexp(mantissa, -9)
    normal = np.ldexp(mantissa + 8, exponent.astype(np.int32) - 10)
    magnitude = np.where(exponent == 0, subnormal, normal)
    magnitude = np.where((bits & 127) == 127, np.float32(np.nan), magnitude)
    values: npt.NDArray[np.float32] = np.where(bits >= 128, -magnitude, magnitude).astype(np.float32)
    return values


def narrow(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """`values`, taken as float32, rounded to the nearest float8_e4m3fn, ties to even; any shape.

    Magnitudes beyond 448, infinity too, become 448; a NaN becomes 127, or 255 where its sign is set.
    """
    exact = np.asarray(values, dtype=np.float32)
    magnitude = np.where(np.isnan(exact), np.float32(0), np.minimum(np.abs(exact), _LARGEST))
    bits: npt.NDArray[np.uint32] = np.maximum(magnitude, _SMALLEST_NORMAL).view(np.uint32)
    # Adding half a unit, less one where the kept part is even, carries into the kept part exactly when it must.
    normal = ((bits + np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)) - np.uint32(960)
    subnormal = (magnitude + _STEP_ABOVE).view(np.uint32) - _STEP_ABOVE.view(np.uint32)
    rounded = np.where(magnitude < _SMALLEST_NORMAL, subnormal, normal)
    rounded = np.where(np.isnan(exact), np.uint32(127), rounded)
    narrowed: npt.NDArray[np.uint8] = (rounded + np.signbit(exact) * np.uint32(128)).astype(np.uint8)
    return narrowed
