"""Tiles as a kernel author handles them: values with operators that record ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TypeAlias

from tileweave.errors import DTypeError, ShapeError
from tileweave.primitives import dtypes
from tileweave.primitives.dtypes import DType
from tileweave.primitives.expr import Const, Expr, minimum
from tileweave.primitives.functions import FUNCTIONS
from tileweave.primitives.memory import known_dtype
from tileweave.primitives.ops import Cast, Elementwise, Expand, Transpose, Update, Value
from tileweave.primitives.recorder import current
from tileweave.primitives.source import caller_location

TileLike: TypeAlias = "Tile | float"


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """A tile of a task: arithmetic on it records elementwise ops in fp32."""

    value: Value

    @property
    def shape(self) -> tuple[int, ...]:
        """Static sizes."""
        return self.value.shape

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.value.dtype

    @property
    def T(self) -> Tile:  # noqa: N802  (the name that NumPy and torch use)
        """The transposed tile; only of two dimensions."""
        value = visible(self)
        if len(value.shape) != 2:
            raise ShapeError(f".T needs a tile of 2 dimensions, got {value.type_text}", caller_location())
        result = current().new_value(value.shape[::-1], value.extents[::-1], value.dtype)
        current().emit(Transpose(caller_location(), result, value))
        return Tile(result)

    def cast(self, dtype: object) -> Tile:
        """This tile rounded to `dtype`; see `tw.cast`."""
        target = known_dtype(dtype)
        value = visible(self)
        if target == value.dtype:
            return self
        floats("cast", self)
        if not target.is_float:
            raise DTypeError(f"tw.cast to {target}: tiles of numbers are {any_float()}", caller_location())
        result = current().new_value(value.shape, value.extents, target)
        current().emit(Cast(caller_location(), result, value))
        return Tile(result)

    def __getitem__(self, key: object) -> Tile:
        """`tile[:, None]` and `tile[None, :]`: a new dimension of size 1."""
        items = key if isinstance(key, tuple) else (key,)
        if sum(i is None for i in items) != 1 or any(i is not None and i != slice(None) for i in items):
            raise ShapeError(
                "a tile is indexed only to add one dimension, as in tile[:, None]; to read a part of memory, "
                "load it with tw.ds",
                caller_location(),
            )
        value, axis = visible(self), items.index(None)
        result = current().new_value(
            (*value.shape[:axis], 1, *value.shape[axis:]),
            (*value.extents[:axis], Const(1), *value.extents[axis:]),
            value.dtype,
        )
        current().emit(Expand(caller_location(), result, value, axis))
        return Tile(result)

    def __add__(self, other: TileLike) -> Tile:
        return elementwise("add", self, other)

    def __radd__(self, other: TileLike) -> Tile:
        return elementwise("add", other, self)

    def __sub__(self, other: TileLike) -> Tile:
        return elementwise("subtract", self, other)

    def __rsub__(self, other: TileLike) -> Tile:
        return elementwise("subtract", other, self)

    def __mul__(self, other: TileLike) -> Tile:
        return elementwise("multiply", self, other)

    def __rmul__(self, other: TileLike) -> Tile:
        return elementwise("multiply", other, self)

    def __truediv__(self, other: TileLike) -> Tile:
        return elementwise("divide", self, other)

    def __rtruediv__(self, other: TileLike) -> Tile:
        return elementwise("divide", other, self)

    def __gt__(self, other: TileLike) -> Tile:
        return elementwise("greater", self, other)

    def __lt__(self, other: TileLike) -> Tile:
        return elementwise("greater", other, self)

    def __ge__(self, other: TileLike) -> Tile:
        return elementwise("greater_equal", self, other)

    def __le__(self, other: TileLike) -> Tile:
        return elementwise("greater_equal", other, self)

    def __abs__(self) -> Tile:
        return elementwise("abs", self)

    def __neg__(self) -> Tile:
        return elementwise("negative", self)

    def __iadd__(self, other: TileLike) -> Tile:
        """In place on an accumulator; on any other tile `a += b` is `a = a + b`."""
        total = elementwise("add", self, other)
        if not self.value.mutable:
            return total
        assign(self, total)
        return self

    def __bool__(self) -> bool:
        raise ShapeError(
            "a tile has no single truth value; use tw.select(condition, a, b) to choose element by element",
            caller_location(),
        )


def visible(tile: Tile) -> Value:
    """The value of `tile`, checked to be in scope."""
    if not isinstance(tile, Tile):
        raise DTypeError(f"expected a tile, got {type(tile).__name__} {tile!r}", caller_location())
    current().check_visible(tile.value)
    return tile.value


def any_float() -> str:
    """The names of the types that hold real numbers, for messages."""
    names = [str(dtype) for dtype in dtypes.FLOATS]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def floats(what: str, tile: Tile) -> Value:
    """The value of `tile`, checked to hold real numbers: int32 tiles are only moved."""
    value = visible(tile)
    if not value.dtype.is_float:
        raise DTypeError(
            f"tw.{what} of {value.dtype}: int32 tiles are only moved from memory to memory; keep numbers in float32",
            caller_location(),
        )
    return value


def assign(target: Tile, value: Tile) -> None:
    """Set the accumulator `target` to `value`, of the same shape."""
    goal, source = visible(target), visible(value)
    if not goal.mutable:
        raise DTypeError(f"{goal} is not an accumulator; make it with tw.zeros or tw.full", caller_location())
    if goal.shape != source.shape:
        raise ShapeError(
            f"an accumulator of shape {list(goal.shape)} cannot take a tile of shape {list(source.shape)}",
            caller_location(),
        )
    current().emit(Update(caller_location(), goal, source))


def elementwise(function: str, *args: TileLike) -> Tile:
    """Record `function` of `FUNCTIONS` over tiles and numbers; the result is float32."""
    operands = tuple(floats(function, a) if isinstance(a, Tile) else number(function, a) for a in args)
    if len(operands) != FUNCTIONS[function].arity:
        raise ShapeError(
            f"tw.{function} takes {FUNCTIONS[function].arity} operands, got {len(operands)}", caller_location()
        )
    values = [o for o in operands if isinstance(o, Value)]
    if not values:
        raise DTypeError(f"tw.{function} needs at least one tile", caller_location())
    shape, extents = _broadcast(function, values)
    result = current().new_value(shape, extents, dtypes.float32)
    current().emit(Elementwise(caller_location(), result, function, operands))
    return Tile(result)


def number(function: str, value: object) -> float:
    """`value` as a float, if it is a number that is known when the kernel is traced."""
    if isinstance(value, Expr):
        raise DTypeError(
            f"tw.{function} got the scalar `{value}` as a tile operand; scalars form addresses only", caller_location()
        )
    if not isinstance(value, Real):  # NumPy's numbers as well as Python's
        raise DTypeError(f"tw.{function} takes tiles and numbers, got {type(value).__name__}", caller_location())
    return float(value)


def _broadcast(function: str, values: Sequence[Value]) -> tuple[tuple[int, ...], tuple[Expr, ...]]:
    if len({len(v.shape) for v in values}) > 1:
        raise ShapeError(
            f"tw.{function} of tiles with different numbers of dimensions: "
            f"{', '.join(v.type_text for v in values)}; add one with tile[:, None]",
            caller_location(),
        )
    shape: list[int] = []
    extents: list[Expr] = []
    for axis in range(len(values[0].shape)):
        sizes = {v.shape[axis] for v in values} - {1}
        if len(sizes) > 1:
            raise ShapeError(
                f"tw.{function} of tiles whose sizes differ in dimension {axis}: "
                f"{', '.join(v.type_text for v in values)}",
                caller_location(),
            )
        size = sizes.pop() if sizes else 1
        shape.append(size)
        extents.append(meet([_stretched(v.extents[axis], v.shape[axis], size) for v in values], size))
    return tuple(shape), tuple(extents)


def _stretched(extent: Expr, own: int, size: int) -> Expr:
    """The extent of an operand of size `own` in a dimension of `size`: one that is empty makes the result empty."""
    if own == size:
        return extent
    return Const(size) if extent == Const(1) else extent * size


def meet(extents: Sequence[Expr], size: int) -> Expr:
    """The part of a dimension of `size` that is valid in all of `extents`."""
    common: Expr = Const(size)
    for extent in extents:
        if common == Const(size):
            common = extent
        elif extent not in (common, Const(size)):
            common = minimum(common, extent)
    return common
