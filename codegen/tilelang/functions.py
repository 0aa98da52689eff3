"""Elementwise functions as TileLang text, in fp32."""

from __future__ import annotations

from collections.abc import Mapping

TILELANG_FUNCTIONS: Mapping[str, str] = {
    "add": "({} + {})",
    "subtract": "({} - {})",
    "multiply": "({} * {})",
    "divide": "({} / {})",
    "maximum": "T.max({}, {})",
    "minimum": "T.min({}, {})",
    "negative": "(-{})",
    "abs": "T.abs({})",
    "exp": "T.exp({})",
    "log": "T.log({})",
    "sqrt": "T.sqrt({})",
    "rsqrt": "(1.0 / T.sqrt({}))",
    "tanh": "T.tanh({})",
    "erf": "T.erf({})",
    "sigmoid": "(1.0 / (1.0 + T.exp(-{})))",
    "greater": "T.if_then_else({} > {}, 1.0, 0.0)",
    "greater_equal": "T.if_then_else({} >= {}, 1.0, 0.0)",
    "select": "T.if_then_else({} != 0.0, {}, {})",
}
