"""The companion kernel in CUDA C++, for backends that build with nvcc: its tasks move rows, wait, and send."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from tileweave.codegen.c.scalars import Scalars, identifier
from tileweave.codegen.common import common_scalars
from tileweave.codegen.layout import COUNTER_BYTES, COUNTER_SETS
from tileweave.codegen.lower import Companion, Lowered, LoweredTask
from tileweave.codegen.puts import put_of, signal_of_put
from tileweave.compiler.printer import place
from tileweave.errors import CompileError
from tileweave.primitives.expr import Expr, Rank
from tileweave.primitives.memory import IndexItem, Memory, Rows, Signal, Slice, Symmetric, Table
from tileweave.primitives.ops import (
    Copy,
    Fence,
    For,
    Index,
    Load,
    Op,
    SignalOp,
    Store,
    WaitOp,
    When,
    stored_extents,
    walk,
)
from tileweave.primitives.recorder import MAX_GRID_DIMS

THREADS = 256
_STATE_WORDS = 8


def emit_companion(lowered: Lowered, companion: Companion) -> str:
    """CUDA C++ of the companion kernel.

    Raises:
        CompileError: a task does more than move rows, wait and signal.
    """
    head = [
        f"/* {lowered.program.name} for {lowered.program.world_size} ranks: what it sends to other nodes.",
        " * Written by Tileweave. */",
        '#include "tw_companion.cuh"',
        "",
    ]
    tasks = [_task_function(lowered, companion, task) for task in companion.tasks]
    return "\n".join([*head, *tasks, _kernel(lowered, companion), ""])


@dataclass
class _Writer:
    """Text of one task under construction."""

    lowered: Lowered
    companion: Companion
    task: LoweredTask
    scalar: Scalars
    together: tuple[Copy, SignalOp] | None
    repeated: frozenset[int]
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    loaded: dict[int, Load] = field(default_factory=dict)

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def note(self, op: Op) -> None:
        """A comment that names the user's line, unless the one before stands for the same."""
        if op.location is not None:
            text = "    " * self.depth + f"/* {place(op.location)}: {op.location.text.strip().replace('*/', '* /')} */"
            if text not in self.lines[-3:]:
                self.lines.append(text)

    def body(self, ops: tuple[Op, ...]) -> None:
        """A block. A load is done where its tile is stored, so nothing but loads and stores may stand between."""
        for op in ops:
            if not isinstance(op, (Load, Store)):
                self.loaded.clear()
            self._emit(op)

    def block(self, head: str, ops: tuple[Op, ...]) -> None:
        """A block under a loop or guard."""
        self.line(f"{head} {{")
        self.depth += 1
        self.body(ops)
        self.loaded.clear()
        self.depth -= 1
        self.line("}")

    def _emit(self, op: Op) -> None:
        if type(op) not in _EMIT:
            raise CompileError(
                f"task '{self.task.task.name}' computes what it sends to another node; here a companion only moves "
                "rows: store the result to memory in a task before, and send it from there",
                op.location,
            )
        _EMIT[type(op)](self, op)

    def counter(self, op: SignalOp | WaitOp) -> str:
        """Address of a counter in this rank's segment."""
        offset = self.lowered.segment.offset_bytes[op.signal.name]
        at = self.scalar.linear([self.scalar(i) for i in op.index], op.signal.dims)
        return f"at.heap[rank] + at.counters + {offset} + ({at}) * {COUNTER_BYTES}"

    def address(self, memory: Memory, index: Index, row: str) -> str:
        """Address of one row of a block."""
        size = memory.dtype.itemsize_bytes
        parts = [self._base(memory)]
        for axis, item in enumerate(index):
            position = self.position(item, row if axis < len(index) - 1 else "0")
            if position != "0":
                parts.append(f"({position}) * {self.scalar.stride(memory.dims, axis)} * {size}")
        return " + ".join(parts)

    def _base(self, memory: Memory) -> str:
        if memory.name in self.companion.stages:
            return f"at.stage + {self.companion.stage_offset_bytes[memory.name]}"
        if isinstance(memory, Symmetric):
            return f"at.heap[rank] + INT64_C({self.lowered.segment.offset_bytes[memory.name]})"
        return f"at.memory[{self.lowered.number_of[memory.name]}]"

    def position(self, item: IndexItem, row: str) -> str:
        """Where a block's row stands along one axis."""
        if isinstance(item, Expr):
            return self.scalar(item)
        if isinstance(item, Slice):
            return " + ".join(part for part in (self.scalar(item.start), row) if part != "0") or "0"
        at = [self.position(inner, row) for inner in item.index]
        return f"{identifier(item.table.name)}[{self.scalar.linear(at, item.table.dims)}]"


def _load(writer: _Writer, op: Load) -> None:
    writer.loaded[op.result.id] = op


def _store(writer: _Writer, op: Store) -> None:
    source = writer.loaded.get(op.value.id)
    if source is None or source.memory.dtype != op.memory.dtype or not _rows(source) or not _rows(op):
        raise CompileError(
            f"task '{writer.task.task.name}' sends more than rows of '{op.memory.name}' to another node; here a "
            "companion only moves rows: store them to memory in a task before, and send them from there",
            op.location,
        )
    writer.note(op)
    *leading, columns = stored_extents(op)
    rows = writer.scalar(leading[0]) if leading else "1"
    size = f"({writer.scalar(columns)}) * {op.memory.dtype.itemsize_bytes}"
    ends = [writer.address(each.memory, each.index, "row") for each in (op, source)]
    masks = [_mask(writer, each.index) for each in (op, source)]
    writer.line(f"for (int64_t row = threadIdx.x / TW_WARP; row < {rows}; row += blockDim.x / TW_WARP)")
    skip = f"if ({masks[0]}) " if masks[0] else ""
    wanted = f"{masks[1]} ? {ends[1]} : 0" if masks[1] else ends[1]
    writer.line(f"    {skip}tw_copy_row({ends[0]}, {wanted}, {size});")
    writer.line("__syncthreads();")


def _rows(op: Load | Store) -> bool:
    """Whether a tile is made of rows of its memory."""
    sliced = [item for item in op.index if not isinstance(item, Expr)]
    return isinstance(op.index[-1], Slice) and len(sliced) <= 2


def _mask(writer: _Writer, index: Index) -> str:
    """Whether a table names a place for `row`; empty where no table is asked."""
    listed = [writer.position(item, "row") for item in index if isinstance(item, Rows)]
    return f"{listed[0]} >= 0" if listed else ""


def _put(writer: _Writer, op: Copy) -> None:
    writer.note(op)
    put, peer = put_of(op), op.target_peer
    assert isinstance(peer, Expr)
    ends = ((op.target, op.target_index), (op.source, op.source_index))
    function = "tw_put_now" if id(op) in writer.repeated else "tw_put"
    size = f"({writer.scalar(put.columns)}) * {op.target.dtype.itemsize_bytes}"
    if put.contiguous:
        given = [*(writer.address(*end, "0") for end in ends), f"({writer.scalar(put.rows)}) * {size}"]
        given.append(writer.scalar(peer))
        if writer.together is not None and writer.together[0] is op:
            function, signal = "tw_put_signal", writer.together[1]
            given += [writer.counter(signal), writer.scalar(signal.amount)]
        writer.line(f"{function}({', '.join(given)});")
        return
    given = [*(writer.address(*end, "row") for end in ends), size, writer.scalar(peer)]
    mask = _mask(writer, op.target_index)
    writer.line(f"for (int64_t row = 0; row < {writer.scalar(put.rows)}; row++)")
    writer.line(f"    {f'if ({mask}) ' if mask else ''}{function}({', '.join(given)});")


def _signal(writer: _Writer, op: SignalOp) -> None:
    if writer.together is not None and writer.together[1] is op:
        return
    writer.note(op)
    if op.peer in (None, Rank()):
        writer.line(f"tw_signal({writer.counter(op)}, {writer.scalar(op.amount)});")
        return
    assert op.peer is not None
    writer.line(f"tw_signal_peer({writer.counter(op)}, {writer.scalar(op.amount)}, {writer.scalar(op.peer)});")


def _wait(writer: _Writer, op: WaitOp) -> None:
    writer.note(op)
    index = writer.scalar.linear([writer.scalar(i) for i in op.index], op.signal.dims)
    site = writer.lowered.site_of[id(op)]
    writer.line(f"tw_wait({writer.counter(op)}, {writer.scalar(op.target)}, at, {site}, {index});")


def _fence(writer: _Writer, op: Fence) -> None:
    writer.note(op)
    writer.line("tw_fence();")


def _for(writer: _Writer, op: For) -> None:
    index = f"k{op.index.id}"
    start, stop = writer.scalar(op.start), writer.scalar(op.stop)
    writer.block(f"for (int64_t {index} = {start}; {index} < {stop}; {index} += {op.step})", op.body)


def _when(writer: _Writer, op: When) -> None:
    writer.block(f"if ({writer.scalar(op.condition)})", op.body)


_EMIT: Mapping[type[Op], Callable[..., None]] = {
    Load: _load, Store: _store, Copy: _put, SignalOp: _signal, WaitOp: _wait, Fence: _fence, For: _for, When: _when,
}  # fmt: skip
"""What a companion does without a tile in registers."""


def _task_function(lowered: Lowered, companion: Companion, task: LoweredTask) -> str:
    names_of = {e: f"s{n}" for n, e in enumerate(common_scalars(task.task))}
    loops = [op for op in walk(task.task.body) if isinstance(op, For)]
    repeated = frozenset(id(op) for loop in loops for op in walk(loop.body) if isinstance(op, Copy))
    writer = _Writer(lowered, companion, task, Scalars(names_of), signal_of_put(task.task.body), repeated)
    if any(isinstance(op, Copy) and op.source.name in companion.stages for op in walk(task.task.body)):
        writer.line("tw_quiet(); /* the puts before have left this worker's stage */")
    writer.body(task.task.body)
    body = "\n".join(writer.lines)
    spelled = [f"    const int64_t {name} = {writer.scalar.spelled(e)};" for e, name in names_of.items()]
    grid = [f"    const int64_t {identifier(d)} = tile[{n}];" for n, d in enumerate(task.task.dims)]
    return "\n".join(
        [
            f"/* {task.task.name}, {task.task.role}: {place(task.task.location)} */",
            f"static __device__ void send_{task.task.name}(const tw_companion &at, const int32_t *tile) {{",
            "    const int64_t rank = at.rank;",
            *grid,
            *_bindings(lowered, "\n".join([*spelled, body])),
            *spelled,
            body,
            "}",
            "",
        ]
    )


def _bindings(lowered: Lowered, text: str) -> Iterator[str]:
    """Tables and dynamic dimensions that `text` names."""
    words = set(re.findall(r"\w+", re.sub(r"/\*.*?\*/", "", text)))
    for number, memory in enumerate(lowered.program.memories):
        name = identifier(memory.name)
        if isinstance(memory, Table) and not isinstance(memory, Signal) and name in words:
            yield f"    const int32_t *const {name} = (const int32_t *)at.memory[{number}];"
    for number, dim in enumerate(lowered.program.dims):
        if identifier(dim) in words:
            yield f"    const int64_t {identifier(dim)} = at.dims[{number}];"


def _kernel(lowered: Lowered, companion: Companion) -> str:
    program, segment, schedule = lowered.program, lowered.segment, lowered.schedule
    workers, near, world = companion.workers, schedule.topology.gpus_per_node, program.world_size
    following = "tw_take(cursor + lane)" if schedule.queue == "dynamic" else f"position + {len(workers)}"
    first = "tw_take(cursor + lane)" if schedule.queue == "dynamic" else "place"
    cases = [f"        case {t.number}: send_{t.task.name}(at, entry + 1); break;" for t in companion.tasks]
    return "\n".join(
        [
            f"/* Persistent kernel: {len(workers)} blocks a rank send to other nodes. */",
            f'extern "C" __global__ void __launch_bounds__({THREADS}) {program.name}_companion(',
            "    const int64_t *memory, const int64_t *dims, const int64_t *heap, const int32_t *queue,",
            "    const int32_t *counts, int32_t *cursor, int64_t *state, int32_t first_rank, int32_t capacity,",
            "    int64_t limit) {",
            f"    const int64_t here = blockIdx.x / {len(workers)}, place = blockIdx.x % {len(workers)};",
            f"    memory += here * {len(program.memories)}, dims += here * {max(len(program.dims), 1)};",
            f"    state += here * {_STATE_WORDS};",
            f"    tw_companion at = {{memory, dims, heap, state, first_rank + here, {workers[0]} + place, -1, limit}};",
            "    const int64_t rank = at.rank, epoch = at.state[TW_EPOCH];",
            f"    const int64_t entered = heap[rank] + INT64_C({segment.entered_offset_bytes});",
            "    if (place == 0) /* the megakernel tells the ranks of this node */",
            f"        for (int64_t further = {near}; further < {world}; further++)",
            f"            tw_signal_peer(entered, 1, (rank / {near} * {near} + further) % {world});",
            f"    tw_wait(entered, epoch * {world}, at, -1, 0);",
            f"    at.counters = epoch % {COUNTER_SETS} * INT64_C({segment.counter_set_bytes});",
            f"    at.stage = heap[rank] + INT64_C({lowered.stages_offset_bytes});",
            f"    at.stage += place * INT64_C({companion.stage_bytes});",
            f"    const int64_t lane = here * {len(schedule.lanes)} + {companion.lane};",
            f"    for (int64_t position = {first}; position < counts[lane] && !tw_failed(at.state);",
            f"         position = {following}) {{",
            f"        const int32_t *const entry = queue + (lane * capacity + position) * {MAX_GRID_DIMS + 1};",
            "        at.position = position;",
            "        switch (entry[0]) {",
            *cases,
            "        }",
            "    }",
            "    tw_quiet(); /* the next launch writes what is still being sent */",
            "}",
        ]
    )
