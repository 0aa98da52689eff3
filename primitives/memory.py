"""The memory that a kernel acts on.

The same classes describe an argument before tracing (`Tensor(("num_tokens", 1024),
"bfloat16")`, where a string names a dynamic dimension) and stand for it inside the
kernel, where `shape` gives plain integers for static dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tileweave.errors import DTypeError, ShapeError, TraceError
from tileweave.primitives import dtypes
from tileweave.primitives.dtypes import DType
from tileweave.primitives.expr import Const, Dim, Expr, ScalarLike, TableRead, as_expr, clip, simplify, static_size
from tileweave.primitives.source import caller_location


@dataclass(frozen=True, slots=True)
class Slice:
    """`size` positions from `start`; those from `stop` on, if there is one, are masked."""

    start: Expr
    size: int
    stop: Expr | None

    @property
    def extent(self) -> Expr:
        """How many positions are valid."""
        return as_expr(self.size) if self.stop is None else clip(self.stop - self.start, 0, self.size)


@dataclass(frozen=True, slots=True)
class Rows:
    """Positions that a table lists: entry `i` is `table[…, start + i, …]`; negative entries are masked."""

    table: Table
    index: tuple[Expr | Slice, ...]

    @property
    def slice(self) -> Slice:
        """The one sliced dimension of the table."""
        return next(i for i in self.index if isinstance(i, Slice))

    @property
    def size(self) -> int:
        """How many positions a full tile has."""
        return self.slice.size

    @property
    def extent(self) -> Expr:
        """How many positions are valid."""
        return self.slice.extent


IndexItem = Expr | Slice | Rows


def ds(start: ScalarLike, size: ScalarLike, stop: ScalarLike | None = None) -> Slice:
    """A dynamic slice of static `size`; positions from `stop` on are masked.

    `tw.ds(m * 128, 128, stop=num_rows)` is a tile that may be ragged at its end.
    """
    static = static_size(size)
    if static is None:
        raise ShapeError(f"tw.ds needs a static size above 0, got {size!r}", caller_location())
    return Slice(as_expr(start), static, None if stop is None else as_expr(stop))


def _dims(shape: Sequence[ScalarLike | str]) -> tuple[Expr, ...]:
    if not isinstance(shape, (tuple, list)):
        raise ShapeError(f"a shape is a tuple of sizes, as in (128, 64), got {shape!r}", caller_location())
    dims = tuple(Dim(d) if isinstance(d, str) else as_expr(d) for d in shape)
    for dim in dims:
        if isinstance(dim, Const) and dim.value < 0:
            raise ShapeError(f"a size is at least 0, got {dim.value} in {tuple(shape)}", caller_location())
    return dims


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise TraceError(f"a memory's name is text, got {name!r}", caller_location())
    return name


def known_dtype(dtype: object) -> DType:
    """`dtype` as a storage type, or an error at the author's line."""
    try:
        return dtypes.as_dtype(dtype)
    except ValueError as error:
        raise DTypeError(str(error), caller_location()) from None


@dataclass(frozen=True, init=False)
class Memory:
    """A named n-dimensional array. `dims` are its sizes as expressions of dynamic dimensions."""

    space: ClassVar[str] = ""
    name: str
    dims: tuple[Expr, ...]
    dtype: DType

    def __init__(self, shape: Sequence[ScalarLike | str], dtype: object = dtypes.float32, name: str = "") -> None:
        object.__setattr__(self, "name", _name(name))
        object.__setattr__(self, "dims", _dims(shape))
        object.__setattr__(self, "dtype", known_dtype(dtype))

    @property
    def shape(self) -> tuple[ScalarLike, ...]:
        """Sizes; plain integers where they are static."""
        return tuple(simplify(d) for d in self.dims)

    @property
    def static_shape(self) -> tuple[int, ...]:
        """Sizes as plain integers, of a memory that has no dynamic dimension."""
        return tuple(int(size) for size in self.shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.dims)

    def named(self, name: str) -> Memory:
        """The same memory under another name."""
        return type(self)(self.shape, self.dtype, name)

    def __str__(self) -> str:
        return f"{self.name}: {self.space} {self.dtype}[{', '.join(map(str, self.dims))}]"


class Tensor(Memory):
    """An argument of the kernel in this rank's memory; contiguous."""

    space = "tensor"


class Workspace(Memory):
    """Scratch memory of this rank, kept between launches, declared by `tw.workspace`."""

    space = "workspace"


class Symmetric(Memory):
    """Memory of the same shape on every rank, addressable by all, declared by `tw.symmetric`."""

    space = "symmetric"


class Signal(Memory):
    """Monotone counters in symmetric memory, zero at the start of a launch, declared by `tw.signals`."""

    space = "signal"

    def __init__(self, shape: Sequence[ScalarLike | str], dtype: object = dtypes.int32, name: str = "") -> None:
        super().__init__(shape, dtype, name)


class Table(Memory):
    """An int32 argument whose entries form addresses and counts; constant during a launch."""

    space = "table"

    def __init__(self, shape: Sequence[ScalarLike | str], dtype: object = dtypes.int32, name: str = "") -> None:
        super().__init__(shape, dtype, name)

    def read(self, *index: ScalarLike) -> Expr:
        """The entry at `index` as a scalar; `table[i, j]` with only scalars is the same."""
        self._check_rank(index)
        return TableRead(self.name, tuple(as_expr(i) for i in index), self.dims)

    def rows(self, *index: ScalarLike | Slice) -> Rows:
        """The positions listed by one slice of the table, for gather and scatter."""
        self._check_rank(index)
        items = tuple(i if isinstance(i, Slice) else as_expr(i) for i in index)
        if sum(isinstance(i, Slice) for i in items) != 1:
            raise ShapeError(f"rows of table '{self.name}' need exactly one tw.ds slice", caller_location())
        return Rows(self, items)

    def __getitem__(self, index: ScalarLike | tuple[ScalarLike, ...]) -> Expr:
        return self.read(*(index if isinstance(index, tuple) else (index,)))

    def __iter__(self) -> Iterator[Expr]:
        raise TraceError(
            f"table '{self.name}' is known only at run time, so Python cannot loop over it; use tw.range",
            caller_location(),
        )

    def _check_rank(self, index: Sequence[object]) -> None:
        if len(index) != self.ndim:
            raise ShapeError(
                f"table '{self.name}' has {self.ndim} dimensions, but {len(index)} indices were given",
                caller_location(),
            )
