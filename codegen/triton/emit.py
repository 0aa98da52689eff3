"""A whole kernel as one Triton module: a function a task, and the persistent kernel that dispatches to them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tileweave.codegen.common import common_scalars
from tileweave.codegen.copies import expand_copies
from tileweave.codegen.layout import COUNTER_BYTES, COUNTER_SETS
from tileweave.codegen.lower import MAX_GRID_DIMS, Lowered, LoweredTask, used_memories
from tileweave.codegen.triton.ops import emit_body
from tileweave.codegen.triton.scalars import Scalars, identifier
from tileweave.codegen.triton.shapes import block_shapes
from tileweave.codegen.triton.writer import TRITON_TYPES, TaskWriter, element_offset
from tileweave.compiler.bounds import Interval
from tileweave.compiler.config import GpuConfig
from tileweave.compiler.printer import place
from tileweave.primitives.expr import Const, Expr, Index
from tileweave.primitives.memory import Memory, Signal, Symmetric, Table
from tileweave.primitives.ops import Cast, Expand, Load, Task, Transpose, walk


def emit_module(lowered: Lowered, gpu: GpuConfig) -> str:
    """Python source of `lowered` for Triton 3.6 and later."""
    schedule = lowered.schedule
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
        "    address, clear, dot, enter, failed, fence, floordiv, floormod, pointer, proxy_fence, round_to_bf16, signal,",
        "    tanh, wait,",
        ")",
        "",
        f"STAGES = tl.constexpr({gpu.stages})  # of main loops",
        "",
        *(_task_function(lowered, task, tma=gpu.loads == "tma") for task in lowered.tasks),
        _megakernel(lowered),
    ]
    return "\n".join(parts) + "\n"


def _task_function(lowered: Lowered, lowered_task: LoweredTask, *, tma: bool) -> str:
    task = expand_copies(lowered_task.task)
    names_of = {e: f"s{n}" for n, e in enumerate(common_scalars(task))}
    writer = TaskWriter(lowered, block_shapes(task), _zero_filled(task), Scalars(names_of), _known(task), tma)
    emit_body(writer, task.body)
    body = "\n".join(writer.lines)
    spelled = [f"    {name} = {writer.scalar.spelled(e)}" for e, name in names_of.items()]
    grid = "".join(f", {identifier(d)}" for d in task.dims)
    head = [
        "",
        "@triton.jit",
        f"def run_{task.name}(memory, dims, heap, counters, launch, rank, zero{grid}):",
        f'    """{task.name}, {task.role}: {place(task.location)}"""',
        *(f"    {line}" for line in _bindings(lowered, task, "\n".join([*spelled, body]))),
    ]
    return "\n".join([*head, *spelled, body, ""])


def _zero_filled(task: Task) -> frozenset[int]:
    """Values that are zero outside their extents: what is loaded, and rearrangements of it."""
    found: set[int] = set()
    for op in walk(task.body):
        if isinstance(op, Load) or (isinstance(op, (Cast, Expand, Transpose)) and op.value.id in found):
            found.add(op.result.id)
    return frozenset(found)


def _known(task: Task) -> dict[Expr, Interval]:
    """Ranges of grid indices whose extents are static."""
    return {Index(d.name): (0, d.extent.value - 1) for d in task.grid if isinstance(d.extent, Const)}


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


def _megakernel(lowered: Lowered) -> str:
    program, schedule, segment = lowered.program, lowered.schedule, lowered.segment
    lanes = len(schedule.lanes)
    first_word, set_words = (n // COUNTER_BYTES for n in (segment.counters_offset_bytes, segment.counter_set_bytes))
    lines = [
        "",
        "@triton.jit",
        f"def {program.name}(memory, dims, heap, queue, counts, cursor, state, first_rank, capacity, limit, zero):",
        f'    """Persistent kernel: {schedule.num_workers} programs a rank serve its lanes of tiles."""',
        f"    here = tl.program_id(0) // {schedule.num_workers}",
        f"    worker = tl.program_id(0) % {schedule.num_workers}",
        "    rank = first_rank + here",
        f"    memory += here * {len(program.memories)}",
        f"    dims += here * {max(len(program.dims), 1)}",
        "    state += here * 8",
        *(f"    {line}" for line in _choose_lane(lowered)),
        "    launch = (state, worker, -1, limit)",
        f"    epoch = enter(heap, rank, {program.world_size}, {segment.entered_offset_bytes // COUNTER_BYTES}, launch)",
        f"    counters = epoch % {COUNTER_SETS} * {set_words}",
        "    if worker == 0:  # the launch before used the other set of counters",
        f"        stale = {first_word} + (epoch + 1) % {COUNTER_SETS} * {set_words}",
        f"        clear(pointer(address(heap, rank), tl.int64) + stale, {set_words})",
        f"    lane += here * {lanes}",
        "    count = tl.load(counts + lane)",
        *(f"    {line}" for line in _first(lowered)),
        "    while (position < count) & (failed(state) == 0):",
        f"        entry = queue + (tl.cast(lane, tl.int64) * capacity + position) * {MAX_GRID_DIMS + 1}",
        "        task = tl.load(entry)",
        *(f"        e{n} = tl.load(entry + {n + 1})" for n in range(MAX_GRID_DIMS)),
        "        launch = (state, worker, position, limit)",
    ]
    for lowered_task in lowered.tasks:
        indices = "".join(f", e{n}" for n in range(len(lowered_task.task.dims)))
        lines += [
            f"        if task == {lowered_task.number}:",
            f"            run_{lowered_task.task.name}(memory, dims, heap, counters, launch, rank, zero{indices})",
        ]
    step = "tl.atomic_add(cursor + lane, 1)" if schedule.queue == "dynamic" else "position + step"
    return "\n".join([*lines, f"        position = {step}"])


def _choose_lane(lowered: Lowered) -> list[str]:
    """The lane that a worker serves, its place among the lane's workers, and their number."""
    lanes = lowered.schedule.lanes
    if len(lanes) == 1:
        return ["lane = 0", "place = worker", f"step = {len(lanes[0].workers)}"]
    assert len(lanes) == 2, "a schedule has a lane for all workers, or one for communication and one for computing"
    first, second = (len(lane.workers) for lane in lanes)
    return [
        f"lane = (worker >= {first}).to(tl.int32)  # {lanes[0].name}, then {lanes[1].name}",
        f"place = worker - lane * {first}",
        f"step = tl.where(lane == 0, {first}, {second})",
    ]


def _first(lowered: Lowered) -> list[str]:
    return ["position = tl.atomic_add(cursor + lane, 1)" if lowered.schedule.queue == "dynamic" else "position = place"]
