"""Storage types of buffers and tiles."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """A storage type: its name, its bytes an element, and whether it holds real numbers."""

    name: str
    itemsize_bytes: int
    is_float: bool

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"tw.{self.name}"


float32 = DType("float32", 4, True)
bfloat16 = DType("bfloat16", 2, True)
float8_e4m3fn = DType("float8_e4m3fn", 1, True)
"""Sign, 4 bits of exponent, 3 of mantissa; no infinities. Numbers beyond ±448 are stored as ±448, NaN as NaN."""
int32 = DType("int32", 4, False)

ALL = {dtype.name: dtype for dtype in (float32, bfloat16, float8_e4m3fn, int32)}
FLOATS = tuple(dtype for dtype in ALL.values() if dtype.is_float)
"""The types that tiles of numbers may have."""


def as_dtype(value: object) -> DType:
    """The `DType` named by `value`: a `DType`, a name, or a torch or NumPy dtype.

    Raises:
        ValueError: no storage type of that name exists.
    """
    if isinstance(value, DType):
        return value
    name = str(value).removeprefix("torch.")
    if name in ALL:
        return ALL[name]
    raise ValueError(f"dtype {value} is not supported; use one of {', '.join(ALL)}")
