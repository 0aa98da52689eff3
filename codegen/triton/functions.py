"""Elementwise functions as Triton text, in fp32; `device.py` defines those that Triton lacks."""

from __future__ import annotations

from collections.abc import Mapping

TRITON_FUNCTIONS: Mapping[str, str] = {
    "add": "{} + {}",
    "subtract": "{} - {}",
    "multiply": "{} * {}",
    "divide": "{} / {}",
    "maximum": "tl.maximum({}, {})",
    "minimum": "tl.minimum({}, {})",
    "negative": "-{}",
    "abs": "tl.abs({})",
    "exp": "tl.exp({})",
    "log": "tl.log({})",
    "sqrt": "tl.sqrt({})",
    "rsqrt": "tl.rsqrt({})",
    "tanh": "tanh({})",
    "erf": "tl.erf({})",
    "sigmoid": "tl.sigmoid({})",
    "greater": "tl.where({} > {}, 1.0, 0.0)",
    "greater_equal": "tl.where({} >= {}, 1.0, 0.0)",
    "select": "tl.where({} != 0.0, {}, {})",
}
