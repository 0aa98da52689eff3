"""Scalar expressions as TileLang text."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tileweave.primitives.expr import Binary, Const, Dim, Expr, Index, LoopIndex, Rank, TableRead

BINARY: Mapping[str, str] = {
    "add": "({} + {})",
    "sub": "({} - {})",
    "mul": "({} * {})",
    "floordiv": "({} // {})",
    "mod": "({} % {})",
    "min": "T.min({}, {})",
    "max": "T.max({}, {})",
    "lt": "({} < {})",
    "le": "({} <= {})",
    "eq": "({} == {})",
    "ne": "({} != {})",
    "and": "T.And({}, {})",
    "or": "T.Or({}, {})",
}

_TAKEN = frozenset(
    """
    T auto char const device do double empty entry enum extern float full goto heap inline int kernel launch
    limit long main memory position rank register restrict seen short signed sizeof slot state static struct
    switch task thread turn typedef union unsigned void volatile worker
    """.split()  # noqa: SIM905  (a list of words is easier to read without quotes)
)
_GENERATED = re.compile(r"[a-z]\d+|acc\d+|ring\d+|run_.*|feed_.*|tw_.*")


def identifier(name: str) -> str:
    """A name for a memory, dimension or grid index; `_` follows one that Python, C or the emitted module uses."""
    text = name.replace(".", "_")
    taken = text in _TAKEN or keyword.iskeyword(text) or hasattr(builtins, text) or _GENERATED.fullmatch(text)
    return f"{text}_" if taken else text


@dataclass(frozen=True)
class Scalars:
    """Writes expressions; those in `names` by name."""

    names: Mapping[Expr, str] = field(default_factory=dict)

    def __call__(self, expr: Expr) -> str:
        """`expr` in TileLang; tables are tensors under their own names."""
        return self.names[expr] if expr in self.names else self.spelled(expr)

    def spelled(self, expr: Expr) -> str:
        """`expr`, spelled out even if it has a name."""
        if isinstance(expr, Const):
            return str(expr.value) if expr.value >= 0 else f"({expr.value})"
        if isinstance(expr, (Index, Dim)):
            return identifier(expr.name)
        if isinstance(expr, LoopIndex):
            return f"k{expr.id}"
        if isinstance(expr, Rank):
            return "rank"
        if isinstance(expr, TableRead):
            return f"{identifier(expr.table)}[{', '.join(self(i) for i in expr.indices)}]"
        assert isinstance(expr, Binary), f"no TileLang text for {type(expr).__name__}"
        return BINARY[expr.op].format(self(expr.lhs), self(expr.rhs))

    def linear(self, indices: tuple[Expr, ...], shape: tuple[Expr, ...]) -> str:
        """Row-major offset of `indices` in an array of `shape`, in parentheses."""
        text = self(indices[0])
        for index, size in zip(indices[1:], shape[1:], strict=True):
            text = f"({text}) * {self(size)} + {self(index)}"
        return f"({text})"
