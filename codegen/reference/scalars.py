"""Scalar expressions as Python functions, evaluated one tile at a time.

`primitives.expr.evaluate` is vectorised over tiles and would be slow on one. Having two
readings of an expression also lets a test hold the regions against what a run touches.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np

from tileweave.primitives.expr import Binary, Const, Dim, Expr, Index, IntArray, LoopIndex, Rank, TableRead
from tileweave.primitives.memory import Rows, Slice


class Scope(Protocol):
    """Where symbols get their values: grid indices by name, loop variables by number."""

    @property
    def rank(self) -> int: ...
    @property
    def symbols(self) -> Mapping[str | int, int]: ...
    @property
    def dims(self) -> Mapping[str, int]: ...
    @property
    def tables(self) -> Mapping[str, IntArray]: ...


Scalar: TypeAlias = Callable[[Scope], int]

MEANING: Mapping[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "min": min,
    "max": max,
    "lt": lambda a, b: int(a < b),
    "le": lambda a, b: int(a <= b),
    "eq": lambda a, b: int(a == b),
    "ne": lambda a, b: int(a != b),
    "and": lambda a, b: int(bool(a) and bool(b)),
    "or": lambda a, b: int(bool(a) or bool(b)),
}
"""What each operator of `expr.OPERATORS` does to two Python integers."""


def compile_scalar(expr: Expr) -> Scalar:
    """`expr` as a function of a scope.

    Raises (the function):
        IndexError: a table is read outside its bounds.
    """
    if isinstance(expr, Const):
        value = expr.value
        return lambda scope: value
    if isinstance(expr, Rank):
        return lambda scope: scope.rank
    if isinstance(expr, Dim):
        name = expr.name
        return lambda scope: scope.dims[name]
    if isinstance(expr, (Index, LoopIndex)):
        key: str | int = expr.name if isinstance(expr, Index) else expr.id
        return lambda scope: scope.symbols[key]
    if isinstance(expr, TableRead):
        return _compile_read(expr)
    assert isinstance(expr, Binary), f"no Python reading for {type(expr).__name__}"
    meaning, lhs, rhs = MEANING[expr.op], compile_scalar(expr.lhs), compile_scalar(expr.rhs)
    return lambda scope: meaning(lhs(scope), rhs(scope))


def _compile_read(expr: TableRead) -> Scalar:
    indices = tuple(compile_scalar(i) for i in expr.indices)

    def read(scope: Scope) -> int:
        at = tuple(index(scope) for index in indices)
        table = scope.tables[expr.table]
        if any(not 0 <= i < size for i, size in zip(at, table.shape, strict=True)):
            raise IndexError(f"`{expr}` reads entry {at} of table '{expr.table}', which has {table.shape}")
        return int(table[at])

    return read


@dataclass(frozen=True)
class Scalars:
    """Compiled scalars of one program.

    They are found by identity, as hashing a tree at each use would cost more than
    evaluating it; the entry keeps the tree alive, so an identity is never used twice.
    """

    known: dict[int, tuple[object, Scalar]] = field(default_factory=dict)

    def value(self, expr: Expr, scope: Scope) -> int:
        """`expr` in `scope`."""
        return self._find(expr, lambda: expr)(scope)

    def extent(self, item: Slice, scope: Scope) -> int:
        """How many positions of `item` are valid."""
        return self._find(item, lambda: item.extent)(scope)

    def positions(self, item: Slice, scope: Scope) -> IntArray:
        """The valid positions of `item`, ascending."""
        start = self.value(item.start, scope)
        return np.arange(start, start + self.extent(item, scope), dtype=np.int64)

    def entries(self, rows: Rows, count: int, scope: Scope) -> IntArray:
        """The first `count` entries that `rows` lists, masked (negative) ones included."""
        table = scope.tables[rows.table.name]
        at: list[int | IntArray] = []
        for item, size in zip(rows.index, table.shape, strict=True):
            start = self.value(item.start if isinstance(item, Slice) else item, scope)
            length = count if isinstance(item, Slice) else 1
            if length and not 0 <= start <= size - length:
                raise IndexError(f"entries {start} … {start + length} of table '{rows.table.name}' {table.shape}")
            at.append(np.arange(start, start + length) if isinstance(item, Slice) else start)
        return np.asarray(table[tuple(at)], dtype=np.int64)

    def _find(self, key: object, source: Callable[[], Expr]) -> Scalar:
        found = self.known.get(id(key))
        if found is None:
            found = self.known[id(key)] = (key, compile_scalar(source()))
        return found[1]
