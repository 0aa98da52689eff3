"""Loads of a main loop through the tensor memory accelerator (TMA)."""

from __future__ import annotations

from tileweave.codegen.gemm import GemmLoop, depth_axes, fits_tma
from tileweave.codegen.triton.scalars import identifier
from tileweave.codegen.triton.writer import TaskWriter
from tileweave.primitives.expr import Expr
from tileweave.primitives.memory import Slice
from tileweave.primitives.ops import Load


def descriptors(writer: TaskWriter, gemm: GemmLoop) -> dict[int, str]:
    """Make a descriptor for every load of the loop that can have one; their names by id of the load's value."""
    depths = depth_axes(gemm)
    made: dict[int, str] = {}
    for load in gemm.loads:
        padded = writer.blocks.of[load.result.id] != load.result.shape
        if not padded and fits_tma(load, depths[load.result.id], writer.known):
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


def _descriptor(writer: TaskWriter, load: Load) -> str:
    memory = load.memory
    shape = ", ".join(writer.scalar(size) for size in memory.dims)
    strides = ", ".join(writer.scalar.stride(memory.dims, axis) for axis in range(len(memory.dims)))
    block = iter(writer.blocks.of[load.result.id])
    box = ", ".join(str(next(block)) if isinstance(item, Slice) else "1" for item in load.index)
    base = identifier(memory.name)
    return writer.named("d", f"tl.make_tensor_descriptor({base}, [{shape}], [{strides}], [{box}])")
