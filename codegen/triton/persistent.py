"""The persistent kernels of a module: the megakernel and, where ranks sit on several nodes, its companion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tileweave.codegen.layout import COUNTER_BYTES, COUNTER_SETS
from tileweave.codegen.lower import Companion, Lowered, LoweredTask
from tileweave.compiler.schedule import Lane
from tileweave.primitives.recorder import MAX_GRID_DIMS

PARAMETERS = "memory, dims, heap, queue, counts, cursor, state, first_rank, capacity, limit, zero"
# Triton would compile a kernel anew for a value of 1 or a multiple of 16, and rank 1 would run other code than rank 2.
_RUN_TIME = '["first_rank", "capacity", "limit", "zero"]'
TASK_PARAMETERS = "memory, dims, heap, counters, launch, rank, zero"


@dataclass(frozen=True)
class _Kernel:
    """What differs between the two: the lanes served, how a launch begins, and the functions of tasks."""

    name: str
    what: str
    lanes: Sequence[tuple[int, Lane]]
    enter: Sequence[str]
    tasks: Sequence[LoweredTask]
    function: str
    arguments: str
    leave: Sequence[str]


def megakernel(lowered: Lowered) -> str:
    """The kernel that runs all tiles but those of the companion; it reaches peers of its node through pointers."""
    program, segment = lowered.program, lowered.segment
    near, entered = lowered.schedule.topology.gpus_per_node, segment.entered_offset_bytes // COUNTER_BYTES
    first_word, set_words = (n // COUNTER_BYTES for n in (segment.counters_offset_bytes, segment.counter_set_bytes))
    enter = [
        f"epoch = enter(heap, rank, {program.world_size}, {near}, {entered}, launch)",
        f"counters = epoch % {COUNTER_SETS} * {set_words}",
        "if worker == 0:  # the launch before used the other set of counters",
        f"    stale = {first_word} + (epoch + 1) % {COUNTER_SETS} * {set_words}",
        f"    clear(pointer(address(heap, rank), tl.int64) + stale, {set_words})",
    ]
    lanes = lowered.schedule.lanes_of("megakernel")
    what = "serve its lanes of tiles"
    kernel = _Kernel(program.name, what, lanes, enter, lowered.tasks, "run", TASK_PARAMETERS, ())
    return _persistent(lowered, kernel)


def companion_name(lowered: Lowered) -> str:
    """Name of the companion kernel."""
    return f"{lowered.program.name}_companion"


def companion_kernel(lowered: Lowered, companion: Companion) -> str:
    """The kernel that runs beside the megakernel and sends to other nodes."""
    program, segment = lowered.program, lowered.segment
    near, entered = lowered.schedule.topology.gpus_per_node, segment.entered_offset_bytes // COUNTER_BYTES
    enter = [
        f"epoch = enter_off_node(heap, rank, place, {program.world_size}, {near}, {entered}, launch)",
        f"counters = epoch % {COUNTER_SETS} * {segment.counter_set_bytes // COUNTER_BYTES}",
        f"stage = tl.cast(place, tl.int64) * {companion.stage_bytes} + {lowered.stages_offset_bytes}",
        "stage += address(heap, rank)",
    ]
    lanes = [(companion.lane, lowered.schedule.lanes[companion.lane])]
    leave = ["quiet()  # the next launch writes what is still being sent"]
    kernel = _Kernel(
        companion_name(lowered), "send to other nodes", lanes, enter, companion.tasks, "send",
        f"{TASK_PARAMETERS}, stage", leave,
    )  # fmt: skip
    return _persistent(lowered, kernel)


def _persistent(lowered: Lowered, kernel: _Kernel) -> str:
    program, schedule = lowered.program, lowered.schedule
    workers = [worker for _, lane in kernel.lanes for worker in lane.workers]
    first = f"{workers[0]} + " if workers[0] else ""
    lines = [
        "",
        f"@triton.jit(do_not_specialize={_RUN_TIME})",
        f"def {kernel.name}({PARAMETERS}):",
        f'    """Persistent kernel: {len(workers)} programs a rank {kernel.what}."""',
        f"    here = tl.program_id(0) // {len(workers)}",
        f"    worker = {first}tl.program_id(0) % {len(workers)}",
        "    rank = first_rank + here",
        f"    memory += here * {len(program.memories)}",
        f"    dims += here * {max(len(program.dims), 1)}",
        "    state += here * 8",
        *(f"    {line}" for line in _choose_lane(kernel.lanes)),
        "    launch = (state, worker, -1, limit)",
        *(f"    {line}" for line in kernel.enter),
        f"    lane += here * {len(schedule.lanes)}",
        "    count = tl.load(counts + lane)",
        f"    position = {'tl.atomic_add(cursor + lane, 1)' if schedule.queue == 'dynamic' else 'place'}",
        "    while (position < count) & (failed(state) == 0):",
        f"        entry = queue + (tl.cast(lane, tl.int64) * capacity + position) * {MAX_GRID_DIMS + 1}",
        "        task = tl.load(entry)",
        *(f"        e{n} = tl.load(entry + {n + 1})" for n in range(MAX_GRID_DIMS)),
        "        launch = (state, worker, position, limit)",
    ]
    for task in kernel.tasks:
        indices = "".join(f", e{n}" for n in range(len(task.task.dims)))
        lines += [
            f"        if task == {task.number}:",
            f"            {kernel.function}_{task.task.name}({kernel.arguments}{indices})",
        ]
    step = "tl.atomic_add(cursor + lane, 1)" if schedule.queue == "dynamic" else "position + step"
    return "\n".join([*lines, f"        position = {step}", *(f"    {line}" for line in kernel.leave)])


def _choose_lane(lanes: Sequence[tuple[int, Lane]]) -> list[str]:
    """The lane that a worker serves, its place among the lane's workers, and their number."""
    number, lane = lanes[0]
    begin, size = lane.workers[0], len(lane.workers)
    place = "place = worker" + (f" - {begin}" if begin else "")
    if len(lanes) == 1:
        return [f"lane = {number}", place, f"step = {size}"]
    assert [n for n, _ in lanes] == [0, 1], "a kernel serves one lane, or one for communication and one for computing"
    return [
        f"lane = (worker >= {size}).to(tl.int32)  # {lane.name}, then {lanes[1][1].name}",
        f"place = worker - lane * {size}",
        f"step = tl.where(lane == 0, {size}, {len(lanes[1][1].workers)})",
    ]
