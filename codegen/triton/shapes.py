"""Block shapes: Triton's tiles have power-of-two sizes, and those of a dot at least 16, or 32 bytes along K."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from networkx.utils import UnionFind

from tileweave.primitives.ops import (
    Cast,
    Dot,
    Elementwise,
    Expand,
    Op,
    Reduce,
    Task,
    Transpose,
    Update,
    Value,
    operands,
    result,
    walk,
)

MIN_DOT_SIZE = 16
MIN_DOT_DEPTH_BYTES = 32
Axis = tuple[int, int]


@dataclass(frozen=True)
class Blocks:
    """Block sizes of every value's axes: `of[id]` is at least the value's shape."""

    of: Mapping[int, tuple[int, ...]]


def block_shapes(task: Task) -> Blocks:
    """The smallest block sizes with which every op of `task` sees matching operands."""
    values: dict[int, Value] = {}
    alike: UnionFind[Axis] = UnionFind()
    depths: dict[Axis, int] = {}
    dotted: dict[Axis, int] = {}
    for op in walk(task.body):
        for value in (*operands(op), *([v] if (v := result(op)) is not None else [])):
            values[value.id] = value
        for a, b in _pairs(op):
            alike.union(a, b)
        if isinstance(op, Dot):
            dotted |= {(v.id, axis): MIN_DOT_SIZE for v in (op.accumulator, op.a, op.b) for axis in (0, 1)}
            widest = max(op.a.dtype.itemsize_bytes, op.b.dtype.itemsize_bytes)
            depths[op.a.id, 1] = max(MIN_DOT_SIZE, MIN_DOT_DEPTH_BYTES // widest)
    least: dict[Axis, int] = {}
    for axis, size in (*dotted.items(), *depths.items()):
        least[alike[axis]] = max(size, least.get(alike[axis], 1))
    return Blocks(
        {
            v.id: tuple(max(_power_of_two(size), least.get(alike[v.id, axis], 1)) for axis, size in enumerate(v.shape))
            for v in values.values()
        }
    )


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _pairs(op: Op) -> Iterator[tuple[Axis, Axis]]:
    """Axes that must have one block size."""
    if isinstance(op, Dot):
        total, a, b = op.accumulator.id, op.a.id, op.b.id
        yield from (((total, 0), (a, 0)), ((total, 1), (b, 1)), ((a, 1), (b, 0)))
    elif isinstance(op, Transpose):
        yield from (((op.result.id, 0), (op.value.id, 1)), ((op.result.id, 1), (op.value.id, 0)))
    elif isinstance(op, Expand):
        kept = [axis for axis in range(len(op.result.shape)) if axis != op.axis]
        yield from (((op.result.id, new), (op.value.id, old)) for old, new in enumerate(kept))
    elif isinstance(op, Reduce):
        yield from (((op.result.id, a), (op.value.id, a)) for a in range(len(op.value.shape)) if a != op.axis)
    elif isinstance(op, Update):
        yield from (((op.target.id, axis), (op.value.id, axis)) for axis in range(len(op.value.shape)))
    elif isinstance(op, (Elementwise, Cast)):
        target = op.result
        for operand in operands(op):
            yield from (
                ((target.id, axis), (operand.id, axis))
                for axis, size in enumerate(operand.shape)
                if size == target.shape[axis]
            )
