"""Scalar expressions as C text, in int64."""

from __future__ import annotations

from collections.abc import Mapping

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


def identifier(name: str) -> str:
    """A C name for a memory, dimension or grid index."""
    return name.replace(".", "_")


def scalar(expr: Expr) -> str:
    """`expr` in C; tables are `const int32_t *` under their own names."""
    if isinstance(expr, Const):
        return f"INT64_C({expr.value})" if abs(expr.value) >= 1 << 31 else str(expr.value)
    if isinstance(expr, (Index, Dim)):
        return identifier(expr.name)
    if isinstance(expr, LoopIndex):
        return f"k{expr.id}"
    if isinstance(expr, Rank):
        return "rank"
    if isinstance(expr, TableRead):
        return f"{identifier(expr.table)}[{linear([scalar(i) for i in expr.indices], expr.shape)}]"
    assert isinstance(expr, Binary), f"no C text for {type(expr).__name__}"
    return BINARY[expr.op].format(scalar(expr.lhs), scalar(expr.rhs))


def linear(indices: list[str], shape: tuple[Expr, ...]) -> str:
    """Row-major offset of `indices` in an array of `shape`."""
    text = indices[0]
    for index, size in zip(indices[1:], shape[1:], strict=True):
        text = f"({text}) * {scalar(size)} + {index}"
    return text


def stride(shape: tuple[Expr, ...], axis: int) -> str:
    """Elements between neighbours along `axis` of a row-major array; '1' for the last axis."""
    static = 1
    factors = []
    for size in shape[axis + 1 :]:
        if isinstance(size, Const):
            static *= size.value
        else:
            factors.append(scalar(size))
    if static != 1 or not factors:
        factors.insert(0, f"INT64_C({static})" if static != 1 else "1")
    return " * ".join(factors)
