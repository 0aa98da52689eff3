"""Bounds of scalar expressions from their form alone, by interval arithmetic."""

from __future__ import annotations

from tileweave.errors import VerifyError
from tileweave.primitives.expr import Binary, Const, Expr

# Symbols and table entries are taken to lie here; clips against static sizes tighten the result.
_SYMBOL = (0, 1 << 31)


def interval(expr: Expr) -> tuple[int, int]:
    """Lowest and highest value that `expr` can take, if symbols and table entries are in [0, 2³¹]."""
    if isinstance(expr, Const):
        return expr.value, expr.value
    if not isinstance(expr, Binary):
        return _SYMBOL
    (a, b), (c, d) = interval(expr.lhs), interval(expr.rhs)
    if expr.op == "add":
        return a + c, b + d
    if expr.op == "sub":
        return a - d, b - c
    if expr.op == "mul":
        products = (a * c, a * d, b * c, b * d)
        return min(products), max(products)
    if expr.op == "floordiv":
        return _floordiv((a, b), (c, d))
    if expr.op == "mod":
        return 0, max(d - 1, 0)
    if expr.op == "min":
        return min(a, c), min(b, d)
    if expr.op == "max":
        return max(a, c), max(b, d)
    return 0, 1


def _floordiv(numerator: tuple[int, int], denominator: tuple[int, int]) -> tuple[int, int]:
    low, high = max(denominator[0], 1), max(denominator[1], 1)
    quotients = [n // d for n in numerator for d in (low, high)]
    return min(quotients), max(quotients)


def upper_bound(expr: Expr) -> int:
    """The highest value of `interval(expr)`."""
    low, high = interval(expr)
    if low > high:
        raise VerifyError(f"`{expr}` has an empty interval [{low}, {high}]")
    return high
