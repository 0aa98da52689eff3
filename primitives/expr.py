"""Scalar expressions: the language of addresses.

Every address, extent, count and condition of a kernel is one of these frozen trees
over grid indices, loop variables, dynamic dimensions, the rank and table entries.
`OPERATORS` gives each operator its NumPy meaning and its printed text; backends keep
their own text beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tileweave.errors import TraceError
from tileweave.primitives.source import caller_location

IntArray: TypeAlias = npt.NDArray[np.int64]


class EvaluationError(ArithmeticError):
    """A scalar has no value for some tile; the compiler turns it into an error at the user's line."""


@dataclass(frozen=True, slots=True)
class Operator:
    """A binary operator: how it prints (infix or call), how tightly, and what it means."""

    text: str
    precedence: int
    meaning: Callable[[Any, Any], Any]
    is_call: bool = False


OPERATORS: Mapping[str, Operator] = {
    "add": Operator("+", 5, np.add),
    "sub": Operator("-", 5, np.subtract),
    "mul": Operator("*", 6, np.multiply),
    "floordiv": Operator("//", 6, np.floor_divide),
    "mod": Operator("%", 6, np.mod),
    "min": Operator("min", 9, np.minimum, is_call=True),
    "max": Operator("max", 9, np.maximum, is_call=True),
    "lt": Operator("<", 3, np.less),
    "le": Operator("<=", 3, np.less_equal),
    "eq": Operator("==", 3, np.equal),
    "ne": Operator("!=", 3, np.not_equal),
    "and": Operator("&", 2, np.logical_and),
    "or": Operator("|", 1, np.logical_or),
}


class Expr:
    """Base of all scalar expressions; arithmetic on it records instead of computing."""

    __slots__ = ()

    def __add__(self, other: ScalarLike) -> Expr:
        return binary("add", self, other)

    def __radd__(self, other: ScalarLike) -> Expr:
        return binary("add", other, self)

    def __sub__(self, other: ScalarLike) -> Expr:
        return binary("sub", self, other)

    def __rsub__(self, other: ScalarLike) -> Expr:
        return binary("sub", other, self)

    def __mul__(self, other: ScalarLike) -> Expr:
        return binary("mul", self, other)

    def __rmul__(self, other: ScalarLike) -> Expr:
        return binary("mul", other, self)

    def __floordiv__(self, other: ScalarLike) -> Expr:
        return binary("floordiv", self, other)

    def __rfloordiv__(self, other: ScalarLike) -> Expr:
        return binary("floordiv", other, self)

    def __mod__(self, other: ScalarLike) -> Expr:
        return binary("mod", self, other)

    def __rmod__(self, other: ScalarLike) -> Expr:
        return binary("mod", other, self)

    def __lt__(self, other: ScalarLike) -> Expr:
        return binary("lt", self, other)

    def __le__(self, other: ScalarLike) -> Expr:
        return binary("le", self, other)

    def __gt__(self, other: ScalarLike) -> Expr:
        return binary("lt", other, self)

    def __ge__(self, other: ScalarLike) -> Expr:
        return binary("le", other, self)

    def __and__(self, other: ScalarLike) -> Expr:
        return binary("and", self, other)

    def __or__(self, other: ScalarLike) -> Expr:
        return binary("or", self, other)

    def __eq__(self, other: object) -> bool:
        """Whether two expressions are the same tree; comparing with a number is refused, as it is always False."""
        if isinstance(other, (int, np.integer)):
            raise TraceError(
                f"`{self} == {other}` is known only at run time, so Python cannot compare it; "
                f"use ({self}).equals({other}) as a recorded condition",
                caller_location(),
            )
        return type(self) is type(other) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash((type(self), self._fields()))

    def _fields(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in getattr(self, "__dataclass_fields__", ()))

    def equals(self, other: ScalarLike) -> Expr:
        """`self == other` as a recorded condition; `==` itself compares the trees."""
        return binary("eq", self, other)

    def differs(self, other: ScalarLike) -> Expr:
        """`self != other` as a recorded condition."""
        return binary("ne", self, other)

    def __bool__(self) -> bool:
        raise TraceError(
            f"the value of `{self}` is known only at run time, so Python cannot branch on it; "
            "use tw.when(condition) for a guard, or tw.range(n) for a loop",
            caller_location(),
        )

    def __index__(self) -> int:
        raise TraceError(
            f"`{self}` is known only at run time and cannot be used as a Python integer; "
            "use tw.range(n) to loop over it, or make it a keyword-only parameter of the kernel",
            caller_location(),
        )

    __iter__ = None

    def __str__(self) -> str:
        return print_expr(self)


ScalarLike: TypeAlias = Expr | int


@dataclass(frozen=True, slots=True, eq=False)
class Const(Expr):
    """A number known when the kernel is traced."""

    value: int

    __str__ = Expr.__str__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Expr):
            return isinstance(other, Const) and self.value == other.value
        return self.value == other

    def __hash__(self) -> int:
        return hash(self.value)

    def __bool__(self) -> bool:
        return self.value != 0

    def __index__(self) -> int:
        return self.value


@dataclass(frozen=True, slots=True, eq=False)
class Index(Expr):
    """A grid index of the task, by its dimension's name."""

    name: str

    __str__ = Expr.__str__


@dataclass(frozen=True, slots=True, eq=False)
class LoopIndex(Expr):
    """The variable of a `tw.range` loop; `id` is unique within the task."""

    id: int

    __str__ = Expr.__str__


@dataclass(frozen=True, slots=True, eq=False)
class Dim(Expr):
    """A dynamic dimension, bound at each launch, such as `num_tokens`."""

    name: str

    __str__ = Expr.__str__


@dataclass(frozen=True, slots=True, eq=False)
class Rank(Expr):
    """The rank that runs the tile."""

    __str__ = Expr.__str__


@dataclass(frozen=True, slots=True, eq=False)
class TableRead(Expr):
    """One int32 entry of a table of the executing rank; `shape` is the table's shape."""

    table: str
    indices: tuple[Expr, ...]
    shape: tuple[Expr, ...]

    __str__ = Expr.__str__


@dataclass(frozen=True, slots=True, eq=False)
class Binary(Expr):
    """`op` of `OPERATORS` applied to two expressions."""

    op: str
    lhs: Expr
    rhs: Expr

    __str__ = Expr.__str__


def as_expr(value: object) -> Expr:
    """`value` as an expression; integers become constants."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, (bool, int, np.integer)):
        return Const(int(value))
    hints = {
        "slice": "; write tw.ds(start, size) for a part of a dimension",
        "Tile": "; tiles hold data, and only scalars form addresses and counts",
    }
    kind = type(value).__name__
    raise TraceError(
        f"expected an integer or a recorded scalar, got {kind}{hints.get(kind, f' {value!r}')}", caller_location()
    )


def simplify(value: Expr) -> ScalarLike:
    """A plain `int` for a constant, so that Python control flow specialises; else the expression."""
    return value.value if isinstance(value, Const) else value


def static_size(value: object) -> int | None:
    """`value` as a plain `int`, if it is an integer above 0 that is known when the kernel is traced."""
    if isinstance(value, Const):
        value = value.value
    return int(value) if isinstance(value, (int, np.integer)) and value > 0 else None


def binary(op: str, lhs: ScalarLike, rhs: ScalarLike) -> Expr:
    """`op(lhs, rhs)` with constants folded and neutral elements dropped."""
    a, b = as_expr(lhs), as_expr(rhs)
    if isinstance(a, Const) and isinstance(b, Const):
        if op in ("floordiv", "mod") and b.value == 0:
            raise TraceError(f"division by zero in `{a} {OPERATORS[op].text} 0`", caller_location())
        return Const(int(OPERATORS[op].meaning(a.value, b.value)))
    folded = _neutral(op, a, b)
    return Binary(op, a, b) if folded is None else folded


def _neutral(op: str, a: Expr, b: Expr) -> Expr | None:
    zero, one = Const(0), Const(1)
    if op == "add" and zero in (a, b):
        return b if a == zero else a
    if op == "sub" and b == zero:
        return a
    if op == "mul" and zero in (a, b):
        return zero
    if op in ("mul", "floordiv") and b == one:
        return a
    if op == "mul" and a == one:
        return b
    if op in ("min", "max") and a == b:
        return a
    return None


def minimum(a: ScalarLike, b: ScalarLike) -> Expr:
    """The smaller of two scalars."""
    return binary("min", a, b)


def maximum(a: ScalarLike, b: ScalarLike) -> Expr:
    """The larger of two scalars."""
    return binary("max", a, b)


def ceildiv(a: ScalarLike, b: int) -> Expr:
    """`a / b` rounded up, for `a` ≥ 0 and `b` > 0."""
    if static_size(b) is None:
        raise TraceError(f"tw.ceildiv needs a static divisor above 0, got {b!r}", caller_location())
    return (as_expr(a) + (b - 1)) // b


def clip(value: Expr, low: int, high: int) -> Expr:
    """`value` limited to `[low, high]`."""
    return maximum(minimum(value, high), low)


def children(expr: Expr) -> tuple[Expr, ...]:
    """The direct operands of `expr`."""
    if isinstance(expr, Binary):
        return (expr.lhs, expr.rhs)
    if isinstance(expr, TableRead):
        return expr.indices
    return ()


def walk(expr: Expr) -> Iterator[Expr]:
    """`expr` and everything below it."""
    yield expr
    for child in children(expr):
        yield from walk(child)


def substitute(expr: Expr, replacement: Mapping[Expr, Expr]) -> Expr:
    """`expr` with each key of `replacement` exchanged for its value."""
    if expr in replacement:
        return replacement[expr]
    if isinstance(expr, Binary):
        return binary(expr.op, substitute(expr.lhs, replacement), substitute(expr.rhs, replacement))
    if isinstance(expr, TableRead):
        return TableRead(expr.table, tuple(substitute(i, replacement) for i in expr.indices), expr.shape)
    return expr


def print_expr(expr: Expr, outer: int = 0) -> str:
    """`expr` as a person would write it, with the parentheses that it needs in a context `outer`."""
    if isinstance(expr, Const):
        return str(expr.value)
    if isinstance(expr, (Index, Dim)):
        return expr.name
    if isinstance(expr, LoopIndex):
        return f"i{expr.id}"
    if isinstance(expr, Rank):
        return "rank"
    if isinstance(expr, TableRead):
        return f"{expr.table}[{', '.join(print_expr(i) for i in expr.indices)}]"
    assert isinstance(expr, Binary), f"no printed form for {type(expr).__name__}"
    operator = OPERATORS[expr.op]
    if operator.is_call:
        return f"{operator.text}({print_expr(expr.lhs)}, {print_expr(expr.rhs)})"
    text = (
        f"{print_expr(expr.lhs, operator.precedence)} {operator.text} {print_expr(expr.rhs, operator.precedence + 1)}"
    )
    return f"({text})" if operator.precedence < outer else text


@dataclass(frozen=True)
class TableData:
    """A table of every rank, laid end to end: entry `i` of rank `r` is `flat[start[r] + i]`.

    `shapes` is `[world_size, ndim]`.
    """

    flat: IntArray
    start: IntArray
    shapes: IntArray

    @staticmethod
    def of(tables: Sequence[npt.NDArray[Any]]) -> TableData:
        """Lay one array per rank end to end."""
        sizes = np.array([t.size for t in tables], dtype=np.int64)
        start = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64)
        flat = np.concatenate([np.asarray(t, dtype=np.int64).ravel() for t in tables])
        return TableData(flat, start, np.array([t.shape for t in tables], dtype=np.int64))


@dataclass(frozen=True)
class Env:
    """Values for a vectorised evaluation; every array has one entry per evaluated instance.

    `rank` is the executing rank; `symbols` maps grid indices and loop variables to
    arrays; `dims` holds each dynamic dimension for every rank `[world_size]`.
    """

    rank: IntArray
    symbols: Mapping[Expr, IntArray]
    dims: Mapping[str, IntArray]
    tables: Mapping[str, TableData]

    def select(self, keep: npt.NDArray[Any]) -> Env:
        """The same environment for the instances that `keep` (mask or positions) names."""
        return Env(self.rank[keep], {k: v[keep] for k, v in self.symbols.items()}, self.dims, self.tables)

    def bind(self, symbol: Expr, values: IntArray) -> Env:
        """The same environment with `symbol` bound as well."""
        return Env(self.rank, {**self.symbols, symbol: values}, self.dims, self.tables)


def evaluate(expr: Expr, env: Env) -> IntArray:
    """`expr` for all instances of `env` at once; int64 `[num_instances]`.

    Raises:
        EvaluationError: a table is read outside its bounds, or a divisor is zero.
    """
    if isinstance(expr, Const):
        return np.full(env.rank.shape, expr.value, dtype=np.int64)
    if isinstance(expr, Rank):
        return env.rank
    if isinstance(expr, Dim):
        return env.dims[expr.name][env.rank]
    if isinstance(expr, (Index, LoopIndex)):
        return env.symbols[expr]
    if isinstance(expr, TableRead):
        return read_table(expr, [evaluate(i, env) for i in expr.indices], env)
    assert isinstance(expr, Binary), f"no NumPy reading for {type(expr).__name__}"
    lhs, rhs = evaluate(expr.lhs, env), evaluate(expr.rhs, env)
    if expr.op in ("floordiv", "mod") and not rhs.all():
        raise EvaluationError(f"`{expr}` divides by zero on rank {int(env.rank[np.flatnonzero(rhs == 0)[0]])}")
    value = OPERATORS[expr.op].meaning(lhs, rhs)
    return np.asarray(value, dtype=np.int64)


def read_table(expr: TableRead, indices: Sequence[IntArray], env: Env) -> IntArray:
    """The entries of `expr.table` at `indices` (one array a dimension), with bounds checked."""
    table = env.tables[expr.table]
    linear = np.zeros(env.rank.shape, dtype=np.int64)
    for axis, position in enumerate(indices):
        size = table.shapes[env.rank, axis]
        outside = (position < 0) | (position >= size)
        if outside.any():
            where = int(np.flatnonzero(outside)[0])
            raise EvaluationError(
                f"`{expr}` reads entry {int(position[where])} along dimension {axis} of table "
                f"'{expr.table}' on rank {int(env.rank[where])}, which has {int(size[where])}"
            )
        linear = linear * size + position
    entries: IntArray = table.flat[table.start[env.rank] + linear]
    return entries
