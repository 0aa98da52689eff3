"""Activations of expert MLPs, written as tile functions in the DSL."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from tileweave.primitives import language as tw
from tileweave.primitives.tile import Tile


def silu(x: Tile) -> Tile:
    """x · sigmoid(x)."""
    return x * tw.sigmoid(x)


def gelu(x: Tile) -> Tile:
    """x · Φ(x), with the error function."""
    return x * 0.5 * (tw.erf(x * math.sqrt(0.5)) + 1.0)


def gelu_tanh(x: Tile) -> Tile:
    """The tanh approximation of GELU (Hendrycks and Gimpel, 2016)."""
    inner = (x + x * x * x * 0.044715) * math.sqrt(2.0 / math.pi)
    return x * 0.5 * (tw.tanh(inner) + 1.0)


def relu(x: Tile) -> Tile:
    """max(x, 0)."""
    return tw.maximum(x, 0.0)


def identity(x: Tile) -> Tile:
    """x."""
    return x


ACTIVATIONS: Mapping[str, Callable[[Tile], Tile]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
    "identity": identity,
}
