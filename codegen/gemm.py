"""Main loops of matrix products, which GPU backends pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tileweave.compiler.bounds import Interval, interval
from tileweave.primitives.expr import Const, Expr, Index
from tileweave.primitives.memory import Slice
from tileweave.primitives.ops import Dot, For, Load, Op, Task, Transpose, Value

_TMA_ALIGNMENT_BYTES = 16
_TMA_MAX_BOX = 256


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


def depth_axes(gemm: GemmLoop) -> dict[int, set[int]]:
    """Axes along which each loaded tile is summed over, by id of the load's value."""
    axes: dict[int, set[int]] = {load.result.id: set() for load in gemm.loads}
    for _, a, b in gemm.dots:
        axes[a.load.result.id].add(0 if a.transposed else 1)
        axes[b.load.result.id].add(1 if b.transposed else 0)
    return axes


def grid_intervals(task: Task) -> dict[Expr, Interval]:
    """Ranges of the grid indices whose extents are static."""
    return {Index(d.name): (0, d.extent.value - 1) for d in task.grid if isinstance(d.extent, Const)}


def fits_tma(load: Load, depths: set[int], known: Mapping[Expr, Interval]) -> bool:
    """Whether the tensor memory accelerator can bring a tile of a main loop that sums along its axes `depths`.

    It zero-fills past the end of the memory, and only there: so the depth of a dot must end
    at the end of the memory. Past the end of rows and columns it may bring anything, since
    that reaches no element that is ever stored.
    """
    memory, itemsize, shape = load.memory, load.memory.dtype.itemsize_bytes, load.result.shape
    if load.peer is not None or not isinstance(load.index[-1], Slice) or len(load.index) > 5:
        return False
    if not all(isinstance(item, (Slice, Expr)) for item in load.index):
        return False
    inner = memory.dims[-1]
    if not isinstance(inner, Const) or inner.value * itemsize % _TMA_ALIGNMENT_BYTES:
        return False
    if max(shape) > _TMA_MAX_BOX or shape[-1] * itemsize % _TMA_ALIGNMENT_BYTES:
        return False
    axes = [axis for axis, item in enumerate(load.index) if isinstance(item, Slice)]
    return all(_ends_with_memory(load, axes[depth], known) for depth in depths)


def _ends_with_memory(load: Load, axis: int, known: Mapping[Expr, Interval]) -> bool:
    item = load.index[axis]
    assert isinstance(item, Slice)
    if item.stop is None or item.stop == load.memory.dims[axis]:
        return True
    return interval(item.start, known)[1] + item.size <= interval(item.stop, known)[0]
