"""bfloat16 as NumPy sees it: uint16 bit patterns in memory, float32 values in tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def widen(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The values of bfloat16 `bits`, exactly; any shape."""
    words: npt.NDArray[np.uint32] = np.left_shift(bits, 16, dtype=np.uint32)
    return words.view(np.float32)


def narrow(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """`values`, taken as float32, rounded to the nearest bfloat16, ties to even; any shape."""
    exact = np.asarray(values, dtype=np.float32)
    bits: npt.NDArray[np.uint32] = exact.view(np.uint32)
    # Adding half a unit, less one where the kept part is even, carries into the kept part exactly when it must.
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # The carry could turn a NaN into an infinity, so NaNs are cut instead and made quiet.
    quiet = (bits >> np.uint32(16)) | np.uint32(0x0040)
    narrowed: npt.NDArray[np.uint16] = np.where(np.isnan(exact), quiet, rounded).astype(np.uint16)
    return narrowed
