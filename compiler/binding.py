"""What a launch binds: dynamic dimensions and tables, read off the arguments of every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tileweave.compiler.program import Program
from tileweave.errors import ArgumentError
from tileweave.primitives.expr import Const, Dim, IntArray, TableData
from tileweave.primitives.memory import Memory, Table


@dataclass(frozen=True)
class Routing:
    """What a launch binds: for each rank its dynamic dimensions and its tables.

    `dims[name]` is int64 `[world_size]`; `tables[name]` holds one int array per rank.
    """

    dims: Mapping[str, IntArray]
    tables: Mapping[str, TableData]


def bind(program: Program, arguments: Sequence[Mapping[str, Any]]) -> Routing:
    """Read dynamic dimensions and tables off the arguments of every rank.

    Args:
        program: the traced kernel.
        arguments: per rank, argument name → array, or its shape alone for a tensor.

    Raises:
        ArgumentError: an argument is missing, or its shape disagrees with the kernel.
    """
    if len(arguments) != program.world_size:
        raise ArgumentError(
            f"kernel '{program.name}' was traced for {program.world_size} ranks, got arguments of {len(arguments)}"
        )
    per_rank = [bind_dims(program, given) for given in arguments]
    dims = {name: np.array([d[name] for d in per_rank], dtype=np.int64) for name in program.dims}
    tables = {
        m.name: TableData.of([np.asarray(given[m.name]) for given in arguments])
        for m in program.arguments
        if isinstance(m, Table)
    }
    return Routing(dims, tables)


def bind_dims(program: Program, given: Mapping[str, Any]) -> dict[str, int]:
    """The value of each dynamic dimension on one rank, with every argument's shape checked."""
    dims: dict[str, int] = {}
    known = [m.name for m in program.arguments]
    for name, value in given.items():
        if name not in known and value is not None:
            raise ArgumentError(f"kernel '{program.name}' has no argument '{name}'; it has {', '.join(known)}")
    for memory in program.arguments:
        if memory.name not in given:
            raise ArgumentError(f"argument '{memory.name}' ({memory}) is missing")
        shape = getattr(given[memory.name], "shape", given[memory.name])
        check_shape(memory, tuple(shape), dims)
    return dims


def check_shape(memory: Memory, shape: tuple[int, ...], dims: dict[str, int]) -> None:
    """Compare an argument's shape with its declaration, binding dynamic dimensions on first sight."""
    if len(shape) != memory.ndim:
        raise ArgumentError(
            f"argument '{memory.name}' needs {memory.ndim} dimensions {_listed(memory)}, "
            f"got {len(shape)}: {list(shape)}"
        )
    for axis, (size, declared) in enumerate(zip(shape, memory.dims, strict=True)):
        if isinstance(declared, Dim):
            want = dims.setdefault(declared.name, int(size))
        else:
            assert isinstance(declared, Const), "verify refuses other sizes of arguments"
            want = declared.value
        if size != want:
            bound = ", ".join(f"{k}={v}" for k, v in dims.items())
            raise ArgumentError(
                f"argument '{memory.name}' needs shape {_listed(memory)}{f' with {bound}' if bound else ''}, "
                f"got {list(shape)}: dimension {axis} is {size}, expected {want}"
            )


def _listed(memory: Memory) -> str:
    return f"[{', '.join(map(str, memory.dims))}]"
