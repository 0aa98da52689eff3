"""The persistent kernel of target `cuda`: feeders and consumers, each with the loop over the queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tileweave.codegen.layout import COUNTER_BYTES, COUNTER_SETS
from tileweave.codegen.lower import Lowered
from tileweave.codegen.state import EPOCH
from tileweave.codegen.tilelang.kernel import choose_lane, lane_and_step, signature
from tileweave.codegen.tilelang.pipeline import Pipeline
from tileweave.codegen.tilelang.tasks import TaskText
from tileweave.primitives.recorder import MAX_GRID_DIMS

FEEDERS = 128
# Registers a thread: feeders hold addresses only, so that consumers can have more than an even share.
_FEEDER_REGISTERS, _CONSUMER_REGISTERS = 56, {1: 240, 2: 224}


@dataclass(frozen=True)
class RoleText:
    """Macros of each task number that a role has something to do for."""

    tasks: Sequence[tuple[int, TaskText]]
    num_dims: Sequence[int]


def specialised_kernel(lowered: Lowered, pipeline: Pipeline, feeders: RoleText, consumers: RoleText) -> str:
    """Workers of one rank as blocks of a launch."""
    workers = sum(len(lane.workers) for _, lane in lowered.schedule.lanes_of("megakernel"))
    groups = ", ".join(str(n + 1) for n in range(pipeline.warpgroups))
    lines = [
        "",
        "",
        "@T.prim_func",
        f"def {lowered.program.name}(",
        *signature(lowered),
        "):",
        f'    """{workers} blocks of a rank serve its lanes of tiles."""',
        f"    with T.Kernel({workers}, threads={FEEDERS + pipeline.consumers}) as worker:",
        f"        T.import_source(cuda_text({pipeline.consumers}))",
        *(f"        {line}" for line in (*_shared(pipeline), *_enter(lowered), *choose_lane(lowered))),
        "        with T.ws(0):",
        f"            T.dec_max_nreg({_FEEDER_REGISTERS})",
        *(f"            {line}" for line in _serve(lowered, feeders)),
        f"        with T.ws({groups}):",
        f"            T.inc_max_nreg({_CONSUMER_REGISTERS[pipeline.warpgroups]})",
        f"            thread = T.get_thread_binding() - {FEEDERS}",
        *(f"            {line}" for line in _serve(lowered, consumers)),
    ]
    return "\n".join(lines)


def _shared(pipeline: Pipeline) -> Iterator[str]:
    for name, shape in pipeline.rings.items():
        yield f'{name} = T.alloc_shared(({pipeline.stages}, {", ".join(map(str, shape))}), "bfloat16")'
    for name, shape in pipeline.accumulators.items():
        yield f'{name} = T.alloc_fragment(({", ".join(map(str, shape))}), "float32")'
    yield f"full = T.alloc_barrier([{FEEDERS}] * {pipeline.stages})"
    yield f"empty = T.alloc_barrier([{pipeline.consumers}] * {pipeline.stages})"


def _enter(lowered: Lowered) -> Iterator[str]:
    """As for target `c`; a companion tells the ranks of other nodes."""
    segment, world, near = lowered.segment, lowered.program.world_size, lowered.schedule.topology.gpus_per_node
    one_set, entered = segment.counter_set_bytes, segment.entered_offset_bytes
    yield f"epoch = state[{EPOCH}]"
    yield "if T.And(worker == 0, T.get_thread_binding() == 0):"
    yield f"    for near in T.serial({near}):"
    yield f"        announce(heap[rank // {near} * {near} + near] + {entered})"
    yield f"enter(heap[rank] + {entered}, epoch * {world}, (T.address_of(state[0]), worker, -1, limit))"
    yield f"counters = epoch % {COUNTER_SETS} * {one_set}"
    yield "if worker == 0:  # the launch before used the other set of counters"
    stale = f"{segment.counters_offset_bytes} + (epoch + 1) % {COUNTER_SETS} * {one_set}"
    yield f"    clear(heap[rank] + {stale}, {one_set // COUNTER_BYTES})"


def _serve(lowered: Lowered, role: RoleText) -> Iterator[str]:
    """The loop over a lane. Feeders and consumers run the same tiles, and end together."""
    place, step = lane_and_step(lowered)
    dynamic = lowered.schedule.queue == "dynamic"
    first, following = place, f"position + {step}"
    position = "next_from(cursor[lane], counts[lane], state, turn[0])"
    yield 'seen = T.alloc_local((1,), "int32")  # tiles of main loops so far'
    yield 'turn = T.alloc_local((1,), "int32")'
    yield 'position = T.alloc_var("int32")'
    yield "seen[0] = 0"
    yield "turn[0] = 0"
    yield f"position = {position if dynamic else f'next_of({first}, counts[lane], state, turn[0])'}"
    yield "while position >= 0:"
    yield "    launch = (T.address_of(state[0]), worker, position, limit)"
    yield "    task = queue[lane, position, 0]"
    for number in range(MAX_GRID_DIMS):
        yield f"    e{number} = queue[lane, position, {number + 1}]"
    for (number, text), dims in zip(role.tasks, role.num_dims, strict=True):
        indices = (f"e{n}" for n in range(dims))
        yield f"    if task == {number}:"
        yield f"        mark({number})"
        yield f"        {text.name}({', '.join((*text.parameters, *indices))})"
        yield "        mark(-1)"
    yield "    turn[0] = turn[0] + 1"
    yield f"    position = {position if dynamic else f'next_of({following}, counts[lane], state, turn[0])'}"
