"""Elementwise functions: name, number of operands, and NumPy meaning in fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Function:
    """An elementwise function of `arity` operands; `infix` is its operator text, if it has one."""

    arity: int
    meaning: Callable[..., Any]
    infix: str = ""


def _sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-x))


def _erf(x: Any) -> Any:
    from scipy.special import erf

    return erf(x)


FUNCTIONS: Mapping[str, Function] = {
    "add": Function(2, np.add, "+"),
    "subtract": Function(2, np.subtract, "-"),
    "multiply": Function(2, np.multiply, "*"),
    "divide": Function(2, np.divide, "/"),
    "maximum": Function(2, np.maximum),
    "minimum": Function(2, np.minimum),
    "negative": Function(1, np.negative),
    "abs": Function(1, np.abs),
    "exp": Function(1, np.exp),
    "log": Function(1, np.log),
    "sqrt": Function(1, np.sqrt),
    "rsqrt": Function(1, lambda x: 1.0 / np.sqrt(x)),
    "tanh": Function(1, np.tanh),
    "erf": Function(1, _erf),
    "sigmoid": Function(1, _sigmoid),
    "greater": Function(2, lambda a, b: np.greater(a, b).astype(np.float32), ">"),
    "greater_equal": Function(2, lambda a, b: np.greater_equal(a, b).astype(np.float32), ">="),
    "select": Function(3, lambda c, a, b: np.where(c != 0, a, b)),
}
