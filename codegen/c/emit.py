"""A whole kernel as one C translation unit."""

from __future__ import annotations

from collections.abc import Iterator

from tileweave.codegen.c.ops import emit_body
from tileweave.codegen.c.scalars import Scalars, identifier
from tileweave.codegen.c.scratch import Scratch, plan_scratch
from tileweave.codegen.c.writer import C_TYPES, TaskWriter
from tileweave.codegen.common import common_scalars
from tileweave.codegen.lower import Lowered, LoweredTask, used_memories
from tileweave.compiler.printer import place
from tileweave.primitives.expr import Dim, Expr, TableRead, walk
from tileweave.primitives.memory import Signal, Symmetric, Table


def emit_unit(lowered: Lowered) -> str:
    """C source of `lowered`: one function a task, the list of tiles, and the dispatch."""
    program, schedule = lowered.program, lowered.schedule
    places = [plan_scratch(task.task) for task in lowered.tasks]
    parts = [
        f"/* {program.name} for {program.world_size} ranks: order {schedule.order}, written by Tileweave. */",
        f"#define TW_LANES {len(schedule.lanes)}",
        f"#define TW_KEYS {len(schedule.keys[0])}",
        f"#define TW_SCRATCH_FLOATS {max(p.floats for p in places)}",
        '#include "tw_kernel.h"',
        "",
        *(_task_function(lowered, *each) for each in zip(lowered.tasks, places, strict=True)),
        _dispatch(lowered),
        _list_tiles(lowered),
        "TW_DEFINE_LAUNCH",
    ]
    return "\n".join(parts) + "\n"


def _task_function(lowered: Lowered, task: LoweredTask, places: Scratch) -> str:
    names_of = {e: f"s{n}" for n, e in enumerate(common_scalars(task.task))}
    writer = TaskWriter(lowered, task, places, Scalars(names_of))
    emit_body(writer, task.task.body)
    body = "\n".join(writer.lines)
    spelled = [f"const int64_t {name} = {writer.scalar.spelled(e)};" for e, name in names_of.items()]
    head = [
        f"/* {task.task.name}, {task.task.role} */",
        f"static int task_{task.task.name}(tw_lane_worker *worker, const int32_t *tile) {{",
        "    tw_launch *const launch = worker->launch;",
        "    const int64_t rank = launch->rank;",
        "    float *const dot_scratch = worker->scratch + TW_SCRATCH_FLOATS;",
    ]
    for number, dim in enumerate(task.task.dims):
        head.append(f"    const int64_t {identifier(dim)} = tile[{number}];")
    head += [f"    {line}" for line in _bindings(lowered, "\n".join([*spelled, body]), task)]
    head += [f"    {line}" for line in spelled]
    for value, offset in places.offset.items():
        head.append(f"    float *const t{value} = worker->scratch + {offset};")
    names = ["rank", "dot_scratch", "tile", *map(identifier, task.task.dims), *(f"t{v}" for v in places.offset)]
    names += names_of.values()
    unused = " ".join(f"(void){name};" for name in names)
    return "\n".join([*head, f"    {unused}", "", body, "    return 0;", "}", ""])


def _bindings(lowered: Lowered, text: str, task: LoweredTask) -> Iterator[str]:
    """Declarations of the memories, tables and dynamic dimensions that `text` names."""
    program = lowered.program
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("/*"))
    words = set(_words(code))
    direct = {m.name for m in used_memories(task.task)}
    for number, memory in enumerate(program.memories):
        name = identifier(memory.name)
        if name not in words or isinstance(memory, Signal):
            continue
        if isinstance(memory, Table):
            yield f"const int32_t *const {name} = launch->memory[{number}];"
        elif memory.name in direct:
            c_type = C_TYPES[memory.dtype]
            if isinstance(memory, Symmetric):
                offset = lowered.segment.offset_bytes[memory.name]
                yield f"{c_type} *const {name} = ({c_type} *)(launch->heap[rank] + INT64_C({offset}));"
            else:
                yield f"{c_type} *const {name} = launch->memory[{number}];"
    for number, dim in enumerate(program.dims):
        if identifier(dim) in words:
            yield f"const int64_t {identifier(dim)} = launch->dims[{number}];"


def _words(text: str) -> Iterator[str]:
    word = ""
    for character in text + " ":
        if character.isalnum() or character == "_":
            word += character
        elif word:
            yield word
            word = ""


def _dispatch(lowered: Lowered) -> str:
    cases = [f"    case {task.number}: return task_{task.task.name}(worker, entry->tile);" for task in lowered.tasks]
    return "\n".join(
        [
            "static int tw_run_tile(tw_lane_worker *worker, const tw_entry *entry) {",
            "    switch (entry->task) {",
            *cases,
            "    }",
            "    return 0;",
            "}",
            "",
        ]
    )


def _list_tiles(lowered: Lowered) -> str:
    """The grids of all tasks, and each tile's lane and key, for the tables of this launch."""
    scalar = Scalars()
    lines: list[str] = []
    for task, key in zip(lowered.tasks, lowered.schedule.keys, strict=True):
        lane = scalar(lowered.schedule.lane_of(task.number, task.task.role))
        lines.append(f"    /* {task.task.name}, {place(task.task.location)} */")
        for depth, dim in enumerate(task.task.grid):
            name = identifier(dim.name)
            pad = "    " * (depth + 1)
            lines.append(
                f"{pad}for (int64_t {name} = 0, {name}_end = {scalar(dim.extent)}; {name} < {name}_end; {name}++)"
            )
        pad = "    " * (len(task.task.grid) + 1)
        keys = " ".join(f"entry->key[{n}] = {scalar(k)};" for n, k in enumerate(key))
        tile = " ".join(f"entry->tile[{n}] = (int32_t){identifier(d)};" for n, d in enumerate(task.task.dims))
        rest = " ".join(f"entry->tile[{n}] = 0;" for n in range(len(task.task.dims), 4))
        lines += [
            f"{pad}{{",
            f"{pad}    tw_entry *entry = tw_append(&lanes[{lane}]);",
            f"{pad}    entry->task = {task.number}; {tile} {rest}",
            f"{pad}    {keys}",
            f"{pad}}}",
        ]
    bindings = list(_scalar_bindings(lowered))
    return "\n".join(
        [
            "static void tw_list_tiles(const tw_launch *launch, tw_lane *lanes) {",
            "    const int64_t rank = launch->rank;",
            "    (void)rank;",
            *(f"    {line}" for line in bindings),
            *lines,
            "}",
            "",
        ]
    )


def _scalar_bindings(lowered: Lowered) -> Iterator[str]:
    """Tables and dynamic dimensions that grids, keys and the choice of a lane read."""
    program = lowered.program
    read: set[Expr] = set()
    for task, key, off_node in zip(program.tasks, lowered.schedule.keys, lowered.schedule.off_node, strict=True):
        for scalar_expr in (*(d.extent for d in task.grid), *key, off_node):
            read.update(walk(scalar_expr))
    tables = {e.table for e in read if isinstance(e, TableRead)}
    dims = {e.name for e in read if isinstance(e, Dim)}
    for e in read:
        if isinstance(e, TableRead):
            dims |= {d.name for size in e.shape for d in walk(size) if isinstance(d, Dim)}
    for number, memory in enumerate(program.memories):
        if memory.name in tables:
            yield f"const int32_t *const {identifier(memory.name)} = launch->memory[{number}];"
    for number, dim in enumerate(program.dims):
        if dim in dims:
            yield f"const int64_t {identifier(dim)} = launch->dims[{number}];"
