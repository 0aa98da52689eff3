"""Bounds of scalar expressions from their form alone, by interval arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from tileweave.errors import VerifyError
from tileweave.primitives.expr import Binary, Const, Expr

Interval: TypeAlias = tuple[int, int]

# Symbols and table entries are taken to lie here; clips against static sizes tighten the result.
_SYMBOL = (0, 1 << 31)


def interval(expr: Expr, known: Mapping[Expr, Interval] = MappingProxyType({})) -> Interval:
    """Lowest and highest value that `expr` can take, if symbols and table entries are in [0, 2³¹], or as `known`."""
    if isinstance(expr, Const):
        return expr.value, expr.value
    if not isinstance(expr, Binary):
        return known.get(expr, _SYMBOL)
    return INTERVALS[expr.op](interval(expr.lhs, known), interval(expr.rhs, known))


def _mul(a: Interval, b: Interval) -> Interval:
    products = [x * y for x in a for y in b]
    return min(products), max(products)


def _floordiv(numerator: Interval, denominator: Interval) -> Interval:
    low, high = max(denominator[0], 1), max(denominator[1], 1)
    quotients = [n // d for n in numerator for d in (low, high)]
    return min(quotients), max(quotients)


def _truth(_: Interval, __: Interval) -> Interval:
    return 0, 1


INTERVALS: Mapping[str, Callable[[Interval, Interval], Interval]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _mul,
    "floordiv": _floordiv,
    "mod": lambda a, b: (0, max(b[1] - 1, 0)),
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    **dict.fromkeys(("lt", "le", "eq", "ne", "and", "or"), _truth),
}


def upper_bound(expr: Expr) -> int:
    """The highest value of `interval(expr)`."""
    low, high = interval(expr)
    if low > high:
        raise VerifyError(f"`{expr}` has an empty interval [{low}, {high}]")
    return high
