"""A whole kernel as one Triton module: a function a task, and the persistent kernel that dispatches to them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tileweave.codegen.common import common_scalars
from tileweave.codegen.copies import expand_copies
from tileweave.codegen.gemm import grid_intervals
from tileweave.codegen.lower import Companion, Lowered, used_memories
from tileweave.codegen.triton.network import network_of, stage_bindings
from tileweave.codegen.triton.ops import emit_body
from tileweave.codegen.triton.persistent import TASK_PARAMETERS, companion_kernel, megakernel
from tileweave.codegen.triton.scalars import Scalars, identifier
from tileweave.codegen.triton.shapes import block_shapes
from tileweave.codegen.triton.writer import TRITON_TYPES, TaskWriter, element_offset
from tileweave.compiler.config import GpuConfig
from tileweave.compiler.printer import place
from tileweave.primitives.memory import Memory, Signal, Symmetric, Table
from tileweave.primitives.ops import Cast, Expand, Load, Task, Transpose, walk

_COMPANION_IMPORTS = (
    "from tileweave.codegen.triton.nvshmem import enter_off_node, put, put_now, put_signal, quiet, signal_peer",
)


def emit_module(lowered: Lowered, gpu: GpuConfig) -> str:
    """Python source of `lowered` for Triton 3.6 and later."""
    schedule, companion = lowered.schedule, lowered.companion
    tma = gpu.loads == "tma"
    parts = [
        f'"""{lowered.program.name} for {lowered.program.world_size} ranks: {schedule.order}, {schedule.queue} queues.',
        "",
        "Written by Tileweave.",
        '"""',
        "",
        "import triton",
        "import triton.language as tl",
        "",
        "from tileweave.codegen.triton.device import (",
        "    address, clear, dot, enter, failed, fence, floordiv, floormod, from_e4m3, pointer, proxy_fence,",
        "    round_to_bf16, round_to_e4m3, signal, tanh, wait,",
        ")",
        *(_COMPANION_IMPORTS if companion else ()),
        "",
        f"STAGES = tl.constexpr({gpu.stages})  # of main loops",
        "",
        *(_task_function(lowered, expand_copies(task.task), tma=tma) for task in lowered.tasks),
        megakernel(lowered),
    ]
    if companion:
        parts += ["", *(_task_function(lowered, task.task, companion) for task in companion.tasks)]
        parts.append(companion_kernel(lowered, companion))
    return "\n".join(parts) + "\n"


def _task_function(lowered: Lowered, task: Task, companion: Companion | None = None, *, tma: bool = False) -> str:
    """The function of one task, in the megakernel or in its companion."""
    names_of = {e: f"s{n}" for n, e in enumerate(common_scalars(task))}
    network = network_of(companion, task) if companion else None
    known = grid_intervals(task)
    writer = TaskWriter(lowered, block_shapes(task), _zero_filled(task), Scalars(names_of), known, tma, network)
    emit_body(writer, task.body)
    body = "\n".join(writer.lines)
    spelled = [f"    {name} = {writer.scalar.spelled(e)}" for e, name in names_of.items()]
    grid = "".join(f", {identifier(d)}" for d in task.dims)
    name, parameters = f"run_{task.name}", TASK_PARAMETERS
    bindings = list(_bindings(lowered, task, "\n".join([*spelled, body])))
    if companion:
        name, parameters = f"send_{task.name}", f"{TASK_PARAMETERS}, stage"
        bindings += stage_bindings(companion, task)
    head = [
        "",
        "@triton.jit",
        f"def {name}({parameters}{grid}):",
        f'    """{task.name}, {task.role}: {place(task.location)}"""',
        *(f"    {line}" for line in bindings),
    ]
    return "\n".join([*head, *spelled, body, ""])


def _zero_filled(task: Task) -> frozenset[int]:
    """Values that are zero outside their extents: what is loaded, and rearrangements of it."""
    found: set[int] = set()
    for op in walk(task.body):
        if isinstance(op, Load) or (isinstance(op, (Cast, Expand, Transpose)) and op.value.id in found):
            found.add(op.result.id)
    return frozenset(found)


def _bindings(lowered: Lowered, task: Task, text: str) -> Iterator[str]:
    """Pointers to the memories, and the dynamic dimensions, that `text` names."""
    words = set(re.findall(r"\w+", "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))))
    direct = {m.name for m in used_memories(task)}
    for number, memory in enumerate(lowered.program.memories):
        name = identifier(memory.name)
        if name in words and (memory.name in direct or isinstance(memory, Table)) and not isinstance(memory, Signal):
            yield f"{name} = {_base(lowered, memory, number)}"
    for number, dim in enumerate(lowered.program.dims):
        if identifier(dim) in words:
            yield f"{identifier(dim)} = tl.load(dims + {number}).to(tl.int32)"


def _base(lowered: Lowered, memory: Memory, number: int) -> str:
    dtype = TRITON_TYPES[memory.dtype]
    if isinstance(memory, Symmetric):
        return f"pointer(address(heap, rank), {dtype}) + {element_offset(lowered.segment, memory)}"
    return f"pointer(address(memory, {number}), {dtype})"
