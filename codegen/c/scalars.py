"""Scalar expressions as C text, in int64."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tileweave.primitives.expr import Binary, Const, Dim, Expr, Index, LoopIndex, Rank, TableRead

BINARY: Mapping[str, str] = {
    "add": "({} + {})",
    "sub": "({} - {})",
    "mul": "({} * {})",
    "floordiv": "tw_floordiv({}, {})",
    "mod": "tw_mod({}, {})",
    "min": "tw_min({}, {})",
    "max": "tw_max({}, {})",
    "lt": "({} < {})",
    "le": "({} <= {})",
    "eq": "({} == {})",
    "ne": "({} != {})",
    "and": "({} && {})",
    "or": "({} || {})",
}


_TAKEN = frozenset(
    """
    auto break case char const continue default do double else enum extern float for goto if inline int long register
    restrict return short signed sizeof static struct switch typedef union unsigned void volatile while asm typeof
    rank worker launch tile lanes entry dot_scratch at inner abort memcpy memset main
    """.split()  # noqa: SIM905  (a list of words is easier to read without quotes)
)
_GENERATED = re.compile(r"[a-z]\d+(_end)?|tw_.*|TW_.*|task_.*")


def identifier(name: str) -> str:
    """A C name for a memory, dimension or grid index; `_` follows one that C or the emitted code uses itself."""
    text = name.replace(".", "_")
    return f"{text}_" if text in _TAKEN or _GENERATED.fullmatch(text) else text


@dataclass(frozen=True)
class Scalars:
    """Writes expressions; those in `names` by name."""

    names: Mapping[Expr, str] = field(default_factory=dict)

    def __call__(self, expr: Expr) -> str:
        """`expr` in C; tables are `const int32_t *` under their own names."""
        return self.names[expr] if expr in self.names else self.spelled(expr)

    def spelled(self, expr: Expr) -> str:
        """`expr` in C, spelled out even if it has a name."""
        if isinstance(expr, Const):
            return f"INT64_C({expr.value})" if abs(expr.value) >= 1 << 31 else str(expr.value)
        if isinstance(expr, (Index, Dim)):
            return identifier(expr.name)
        if isinstance(expr, LoopIndex):
            return f"k{expr.id}"
        if isinstance(expr, Rank):
            return "rank"
        if isinstance(expr, TableRead):
            return f"{identifier(expr.table)}[{self.linear([self(i) for i in expr.indices], expr.shape)}]"
        assert isinstance(expr, Binary), f"no C text for {type(expr).__name__}"
        return BINARY[expr.op].format(self(expr.lhs), self(expr.rhs))

    def linear(self, indices: Sequence[str], shape: tuple[Expr, ...]) -> str:
        """Row-major offset of `indices` in an array of `shape`."""
        text = indices[0]
        for index, size in zip(indices[1:], shape[1:], strict=True):
            text = f"({text}) * {self(size)} + {index}"
        return text

    def stride(self, shape: tuple[Expr, ...], axis: int) -> str:
        """Elements between neighbours along `axis` of a row-major array; '1' for the last axis."""
        static = 1
        factors = []
        for size in shape[axis + 1 :]:
            if isinstance(size, Const):
                static *= size.value
            else:
                factors.append(self(size))
        if static != 1 or not factors:
            factors.insert(0, f"INT64_C({static})" if static != 1 else "1")
        return " * ".join(factors)
