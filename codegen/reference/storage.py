"""How the interpreter holds each storage type: in memory, and as a tile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tileweave.codegen.reference import bf16, e4m3
from tileweave.primitives.dtypes import DType, bfloat16, float8_e4m3fn, float32, int32

STORAGE: Mapping[DType, npt.DTypeLike] = {
    float32: np.float32,
    bfloat16: np.uint16,
    float8_e4m3fn: np.uint8,
    int32: np.int32,
}
"""NumPy dtype that holds memory of each storage type; what NumPy does not know is kept as bit patterns."""

UNWRITTEN: Mapping[DType, float] = {
    float32: np.nan,
    bfloat16: 0xFFFF,
    float8_e4m3fn: 0xFF,
    int32: np.iinfo(np.int32).min,
}
"""What memory holds before it is written: NaN, so that a read too early shows in the result."""

PATTERNS: Mapping[DType, tuple[Callable[..., npt.NDArray[Any]], Callable[..., npt.NDArray[Any]]]] = {
    bfloat16: (bf16.widen, bf16.narrow),
    float8_e4m3fn: (e4m3.widen, e4m3.narrow),
}
"""Of each type kept as bit patterns: the float32 values of patterns, and the patterns of values."""


def widen(raw: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    """What memory of `dtype` holds, as a tile."""
    return PATTERNS[dtype][0](raw) if dtype in PATTERNS else raw


def narrow(tile: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    """A tile as memory of `dtype` holds it."""
    return PATTERNS[dtype][1](tile) if dtype in PATTERNS else tile.astype(STORAGE[dtype])
