"""The persistent kernel around the tasks: entry of a launch, queues, dispatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tileweave.codegen.layout import COUNTER_BYTES, COUNTER_SETS
from tileweave.codegen.lower import Lowered
from tileweave.codegen.state import ENTRY_SITE, EPOCH, STATE_WORDS
from tileweave.codegen.tilelang.scalars import Scalars, identifier
from tileweave.codegen.tilelang.tasks import TaskText
from tileweave.codegen.tilelang.writer import TILELANG_TYPES
from tileweave.primitives.memory import Memory, Signal
from tileweave.primitives.recorder import MAX_GRID_DIMS


def signature(lowered: Lowered) -> list[str]:
    """The kernel's parameters: this rank's memories, every rank's segment, the queue, and the state of the launch."""
    lanes, world = len(lowered.schedule.lanes), lowered.program.world_size
    memories = [_tensor(m) for m in lowered.program.memories if not isinstance(m, Signal)]
    return [
        *(f"    {text}," for text in memories),
        f'    heap: T.Tensor(({world},), "int64"),  # address of every rank\'s segment',
        f'    queue: T.Tensor(({lanes}, capacity, {MAX_GRID_DIMS + 1}), "int32"),  # task number, grid indices',
        f'    counts: T.Tensor(({lanes},), "int32"),  # tiles in each lane',
        f'    cursor: T.Tensor(({lanes},), "int32"),  # next tile of a dynamic lane',
        f'    state: T.Tensor(({STATE_WORDS},), "int64"),  # epoch, and the record of a wait that gave up',
        "    rank: T.int32,",
        "    limit: T.int64,  # spins of a wait",
    ]


def _tensor(memory: Memory) -> str:
    shape = ", ".join(Scalars()(size) for size in memory.dims)
    return f"{identifier(memory.name)}: T.Tensor(({shape},), {TILELANG_TYPES[memory.dtype]})"


def serial_kernel(lowered: Lowered, tasks: Sequence[TaskText]) -> str:
    """One worker of one rank as a function that a CPU thread runs."""
    first, following = first_and_next(lowered)
    lines = [
        "",
        "",
        "@T.prim_func",
        f"def {lowered.program.name}(",
        *signature(lowered),
        "    worker: T.int32,",
        "):",
        f'    """Worker `worker` of {lowered.schedule.num_workers}, which serve this rank\'s lanes of tiles."""',
        "    with T.Kernel(1, threads=1) as _:",
        "        T.import_source(c_text())",
        *(f"        {line}" for line in (*enter(lowered, "worker == 0"), *choose_lane(lowered))),
        '        position = T.alloc_var("int32")',
        f"        position = {first}",
        "        while T.And(position < counts[lane], failed(state) == 0):",
        "            launch = (T.address_of(state[0]), worker, position, limit)",
        *(f"            {line}" for line in dispatch(lowered, tasks)),
        f"            position = {following}",
    ]
    return "\n".join(lines)


def enter(lowered: Lowered, one: str) -> Iterator[str]:
    """Tell every rank that this one has entered its launch, wait until all have, and clear the last launch's counters.

    So no rank writes into buffers that a slower one still reads in the launch before. `one` is true in one thread.
    """
    segment, world = lowered.segment, lowered.program.world_size
    one_set, entered = segment.counter_set_bytes, segment.entered_offset_bytes
    yield f"epoch = state[{EPOCH}]"
    yield f"if {one}:"
    yield f"    for peer in T.serial({world}):"
    yield f'        signal(heap[peer] + {entered}, 1, "release", "sys")'
    start = f"(T.address_of(state[0]), worker, {ENTRY_SITE}, limit)"
    yield f'wait(heap[rank] + {entered}, epoch * {world}, {start}, {ENTRY_SITE}, 0, "acquire", "sys")'
    yield f"counters = epoch % {COUNTER_SETS} * {one_set}"
    yield f"if {one}:  # the launch before used the other set of counters"
    stale = f"{segment.counters_offset_bytes} + (epoch + 1) % {COUNTER_SETS} * {one_set}"
    yield f"    clear(heap[rank] + {stale}, {one_set // COUNTER_BYTES})"


def choose_lane(lowered: Lowered) -> Iterator[str]:
    """The lane that a worker serves."""
    lane, lanes = "0", lowered.schedule.lanes_of("megakernel")
    for number, each in lanes[1:]:
        lane = f"T.if_then_else(worker >= {each.workers[0]}, {number}, {lane})"
    yield f"lane = {lane}  # {', '.join(each.name for _, each in lanes)}"


def first_and_next(lowered: Lowered) -> tuple[str, str]:
    """A worker's first position in its lane, and the one after `position`."""
    if lowered.schedule.queue == "dynamic":
        return "take(cursor[lane])", "take(cursor[lane])"
    place, step = lane_and_step(lowered)
    return place, f"position + {step}"


def lane_and_step(lowered: Lowered) -> tuple[str, str]:
    """A worker's place in its lane, and how many workers serve it."""
    # The kernel knows a parameter by its latest name: `place = worker` would rename it.
    (_, lane), *others = lowered.schedule.lanes_of("megakernel")
    place, step = "worker", str(len(lane.workers))
    for _, each in others:
        inside = f"worker >= {each.workers[0]}"
        place = f"T.if_then_else({inside}, worker - {each.workers[0]}, {place})"
        step = f"T.if_then_else({inside}, {len(each.workers)}, {step})"
    return place, step


def dispatch(lowered: Lowered, tasks: Sequence[TaskText]) -> Iterator[str]:
    """Run the entry at `position` of `lane`."""
    yield "task = queue[lane, position, 0]"
    for number in range(MAX_GRID_DIMS):
        yield f"e{number} = queue[lane, position, {number + 1}]"
    for lowered_task, text in zip(lowered.tasks, tasks, strict=True):
        indices = (f"e{n}" for n in range(len(lowered_task.task.dims)))
        yield f"if task == {lowered_task.number}:"
        yield f"    {text.name}({', '.join((*text.parameters, *indices))})"
