"""Main loops of matrix products, which GPU backends pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tileweave.primitives.ops import Dot, For, Load, Op, Transpose, Value


@dataclass(frozen=True)
class Operand:
    """One side of a dot: the load that brings it, and whether the dot takes its transpose."""

    load: Load
    transposed: bool


@dataclass(frozen=True)
class GemmLoop:
    """A loop over K whose body does nothing but load tiles and multiply them.

    Its loads depend on no earlier iteration, so that they may run ahead of the dots.
    `loads` are in order, each once; `dots` pair an accumulator with its operands.
    """

    loop: For
    loads: tuple[Load, ...]
    dots: tuple[tuple[Value, Operand, Operand], ...]


def gemm_loop(op: For) -> GemmLoop | None:
    """`op` read as a main loop, or None if its body does anything else."""
    if not all(isinstance(inner, (Load, Transpose, Dot)) for inner in op.body):
        return None
    loads = tuple(inner for inner in op.body if isinstance(inner, Load))
    sources: Mapping[int, Op] = {i.result.id: i for i in op.body if isinstance(i, (Load, Transpose))}
    dots = [inner for inner in op.body if isinstance(inner, Dot)]
    pairs = [(dot.accumulator, _operand(dot.a, sources), _operand(dot.b, sources)) for dot in dots]
    found = tuple((total, a, b) for total, a, b in pairs if a is not None and b is not None)
    return GemmLoop(op, loads, found) if dots and len(found) == len(dots) else None


def _operand(value: Value, sources: Mapping[int, Op]) -> Operand | None:
    source = sources.get(value.id)
    if isinstance(source, Load):
        return Operand(source, transposed=False)
    if isinstance(source, Transpose):
        inner = _operand(source.value, sources)
        return None if inner is None else Operand(inner.load, not inner.transposed)
    return None
