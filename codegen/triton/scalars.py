"""Scalar expressions as Triton text, in int32."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tileweave.compiler.bounds import interval
from tileweave.primitives.expr import Binary, Const, Dim, Expr, Index, LoopIndex, Rank, TableRead

BINARY: Mapping[str, str] = {
    "add": "({} + {})",
    "sub": "({} - {})",
    "mul": "({} * {})",
    "floordiv": "floordiv({}, {})",
    "mod": "floormod({}, {})",
    "min": "tl.minimum({}, {})",
    "max": "tl.maximum({}, {})",
    "lt": "({} < {})",
    "le": "({} <= {})",
    "eq": "({} == {})",
    "ne": "({} != {})",
    "and": "({} & {})",
    "or": "({} | {})",
}
# These give a truth value, which Triton does no arithmetic with.
TRUTHS = frozenset({"lt", "le", "eq", "ne", "and", "or"})
# Where neither side can be negative, Triton's own operators, which round towards zero, agree with the language's.
UNSIGNED: Mapping[str, str] = {"floordiv": "({} // {})", "mod": "({} % {})"}

_TAKEN = frozenset(
    {
        *keyword.kwlist, *dir(__builtins__), "tl", "triton", "rank", "launch", "zero", "site", "device", "task", "here",
        "stage", "put", "put_now", "put_signal", "quiet", "signal_peer",
    }
)  # fmt: skip
_GENERATED = re.compile(r"[a-z]\d+|(rows|cols)\d+|run_.*|send_.*|.*_ptr")


def identifier(name: str) -> str:
    """A Python name for a memory, dimension or grid index; `_` follows one that the emitted module uses itself."""
    text = name.replace(".", "_")
    return f"{text}_" if text in _TAKEN or _GENERATED.fullmatch(text) else text


@dataclass(frozen=True)
class Scalars:
    """Writes expressions; those in `names` by name."""

    names: Mapping[Expr, str] = field(default_factory=dict)

    def __call__(self, expr: Expr) -> str:
        """`expr` in Triton; tables are int32 pointers under their own names."""
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
            return f"tl.load({identifier(expr.table)} + {self.linear(expr.indices, expr.shape)})"
        assert isinstance(expr, Binary), f"no Triton text for {type(expr).__name__}"
        if expr.op in TRUTHS:
            return f"tl.cast({self.truth(expr)}, tl.int32)"
        form = BINARY[expr.op]
        if expr.op in UNSIGNED and interval(expr.lhs)[0] >= 0 and interval(expr.rhs)[0] >= 0:
            form = UNSIGNED[expr.op]
        return form.format(self(expr.lhs), self(expr.rhs))

    def truth(self, expr: Expr) -> str:
        """Whether `expr` is not 0, as a condition."""
        if isinstance(expr, Binary) and expr.op in TRUTHS:
            side = self.truth if expr.op in ("and", "or") else self
            return BINARY[expr.op].format(side(expr.lhs), side(expr.rhs))
        return f"({self(expr)} != 0)"

    def linear(self, indices: Sequence[Expr], shape: tuple[Expr, ...]) -> str:
        """Row-major offset of `indices` in an array of `shape`, in parentheses."""
        text = self(indices[0])
        for index, size in zip(indices[1:], shape[1:], strict=True):
            text = f"({text}) * {self(size)} + {self(index)}"
        return f"({text})"

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
            factors.insert(0, str(static))
        return " * ".join(factors)
