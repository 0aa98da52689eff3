"""Loads of a main loop through the tensor memory accelerator (TMA)."""

from __future__ import annotations

from tileweave.codegen.gemm import GemmLoop
from tileweave.codegen.triton.scalars import identifier
from tileweave.codegen.triton.writer import TaskWriter
from tileweave.compiler.bounds import interval
from tileweave.primitives.expr import Const, Expr
from tileweave.primitives.memory import Slice
from tileweave.primitives.ops import Load

_ALIGNMENT_BYTES = 16
_MAX_BOX = 256


def descriptors(writer: TaskWriter, gemm: GemmLoop) -> dict[int, str]:
    """Make a descriptor for every load of the loop that can have one; their names by id of the load's value.

    A descriptor zero-fills past the end of the memory, and only there: so the depth of a
    dot must end at the end of the memory. Past the end of rows and columns it may bring
    anything, since that reaches no element that is ever stored.
    """
    depths = _depth_axes(gemm)
    made: dict[int, str] = {}
    for load in gemm.loads:
        if _fits(writer, load, depths[load.result.id]):
            made[load.result.id] = _descriptor(writer, load)
    return made


def load_text(writer: TaskWriter, load: Load, descriptor: str) -> str:
    """The load of one tile through its descriptor."""
    starts = [writer.scalar(i.start if isinstance(i, Slice) else _scalar(i)) for i in load.index]
    text = f"{descriptor}.load([{', '.join(starts)}])"
    block = writer.blocks.of[load.result.id]
    return text if len(block) == len(load.index) else f"tl.reshape({text}, {block})"


def _scalar(item: object) -> Expr:
    assert isinstance(item, Expr)
    return item


def _depth_axes(gemm: GemmLoop) -> dict[int, set[int]]:
    """Axes along which each loaded tile is summed over."""
    axes: dict[int, set[int]] = {load.result.id: set() for load in gemm.loads}
    for _, a, b in gemm.dots:
        axes[a.load.result.id].add(0 if a.transposed else 1)
        axes[b.load.result.id].add(1 if b.transposed else 0)
    return axes


def _fits(writer: TaskWriter, load: Load, depths: set[int]) -> bool:
    memory, itemsize = load.memory, load.memory.dtype.itemsize_bytes
    if load.peer is not None or not isinstance(load.index[-1], Slice) or len(load.index) > 5:
        return False
    if not all(isinstance(item, (Slice, Expr)) for item in load.index):
        return False
    inner = memory.dims[-1]
    if not isinstance(inner, Const) or inner.value * itemsize % _ALIGNMENT_BYTES:
        return False
    block = writer.blocks.of[load.result.id]
    if block != load.result.shape or max(block) > _MAX_BOX or block[-1] * itemsize < _ALIGNMENT_BYTES:
        return False
    axes = [axis for axis, item in enumerate(load.index) if isinstance(item, Slice)]
    return all(_ends_with_memory(writer, load, axes[depth]) for depth in depths)


def _ends_with_memory(writer: TaskWriter, load: Load, axis: int) -> bool:
    item = load.index[axis]
    assert isinstance(item, Slice)
    if item.stop is None or item.stop == load.memory.dims[axis]:
        return True
    return interval(item.start, writer.known)[1] + item.size <= interval(item.stop, writer.known)[0]


def _descriptor(writer: TaskWriter, load: Load) -> str:
    memory = load.memory
    shape = ", ".join(writer.scalar(size) for size in memory.dims)
    strides = ", ".join(writer.scalar.stride(memory.dims, axis) for axis in range(len(memory.dims)))
    block = iter(writer.blocks.of[load.result.id])
    box = ", ".join(str(next(block)) if isinstance(item, Slice) else "1" for item in load.index)
    base = identifier(memory.name)
    return writer.named("d", f"tl.make_tensor_descriptor({base}, [{shape}], [{strides}], [{box}])")
