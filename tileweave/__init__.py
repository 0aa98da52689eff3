"""Tileweave: a tile-level DSL and compiler that overlaps computation with communication."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from tileweave import errors
from tileweave.compiler.config import Config
from tileweave.compiler.topology import Topology
from tileweave.compiler.trace import Kernel, kernel
from tileweave.primitives import tilelink
from tileweave.primitives.dtypes import bfloat16, float8_e4m3fn, float32, int32
from tileweave.primitives.expr import Expr
from tileweave.primitives.language import (
    Order,
    Scope,
    Tile,
    abs,
    assign,
    cast,
    ceildiv,
    dot,
    ds,
    erf,
    exp,
    fence,
    full,
    gather,
    get,
    load,
    log,
    max,
    maximum,
    minimum,
    multicast,
    put,
    range,
    rank,
    remote_load,
    remote_store,
    rsqrt,
    scatter,
    select,
    sigmoid,
    signal,
    signals,
    sqrt,
    store,
    sum,
    symmetric,
    tanh,
    task,
    wait,
    when,
    workspace,
    world_size,
    zeros,
)
from tileweave.primitives.memory import Signal, Symmetric, Table, Tensor, Workspace

if TYPE_CHECKING:
    from tileweave import gpu, moe
    from tileweave.codegen.case import Case
    from tileweave.codegen.compiled import CompiledKernel, compile
    from tileweave.primitives.group import Group, current_group
    from tileweave.primitives.launch import VirtualGroup, init, spawn

__version__ = version("tileweave")

# Loaded at first use, so that writing and checking kernels needs neither a compiler nor torch.
_LAZY = {
    "Case": "tileweave.codegen.case",
    "CompiledKernel": "tileweave.codegen.compiled",
    "compile": "tileweave.codegen.compiled",
    "Group": "tileweave.primitives.group",
    "current_group": "tileweave.primitives.group",
    "VirtualGroup": "tileweave.primitives.launch",
    "init": "tileweave.primitives.launch",
    "spawn": "tileweave.primitives.launch",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in ("gpu", "moe"):
        return import_module(f"tileweave.{name}")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'tileweave' has no attribute '{name}'")


__all__ = [
    "Case", "CompiledKernel", "Config", "Expr", "Group", "Kernel", "Order", "Scope", "Signal", "Symmetric", "Table",
    "Tensor", "Tile", "Topology", "VirtualGroup", "Workspace", "__version__", "abs", "assign", "bfloat16", "cast",
    "ceildiv", "compile", "current_group", "dot", "ds", "erf", "errors", "exp", "fence", "float8_e4m3fn", "float32",
    "full", "gather", "get", "gpu", "init", "int32", "kernel", "load", "log", "max", "maximum", "minimum", "moe",
    "multicast", "put", "range", "rank", "remote_load", "remote_store", "rsqrt", "scatter", "select", "sigmoid",
    "signal", "signals", "spawn", "sqrt", "store", "sum", "symmetric", "tanh", "task", "tilelink", "wait", "when",
    "workspace", "world_size", "zeros",
]  # fmt: skip
