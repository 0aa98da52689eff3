"""Elementwise functions as C text, in fp32; `tw_math.h` defines those that libm has no vector form of."""

from __future__ import annotations

from collections.abc import Mapping

C_FUNCTIONS: Mapping[str, str] = {
    "add": "({} + {})",
    "subtract": "({} - {})",
    "multiply": "({} * {})",
    "divide": "({} / {})",
    "maximum": "tw_fmax({}, {})",
    "minimum": "tw_fmin({}, {})",
    "negative": "(-{})",
    "abs": "__builtin_fabsf({})",
    "exp": "tw_exp({})",
    "log": "tw_log({})",
    "sqrt": "__builtin_sqrtf({})",
    "rsqrt": "(1.0f / __builtin_sqrtf({}))",
    "tanh": "tw_tanh({})",
    "erf": "tw_erf({})",
    "sigmoid": "tw_sigmoid({})",
    "greater": "({} > {} ? 1.0f : 0.0f)",
    "greater_equal": "({} >= {} ? 1.0f : 0.0f)",
    "select": "({} != 0.0f ? {} : {})",
}
