"""One task as text: a macro that is named after it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from tileweave.codegen.c.scratch import plan_scratch
from tileweave.codegen.common import common_scalars
from tileweave.codegen.copies import expand_copies
from tileweave.codegen.lower import Lowered, LoweredTask, used_memories
from tileweave.codegen.tilelang.nest import in_fragments, items
from tileweave.codegen.tilelang.ops import emit_body
from tileweave.codegen.tilelang.pipeline import Pipeline, feed, feeding, multiply
from tileweave.codegen.tilelang.scalars import Scalars, identifier
from tileweave.codegen.tilelang.writer import TILELANG_TYPES, TaskWriter
from tileweave.compiler.printer import place
from tileweave.errors import CompileError
from tileweave.primitives.dtypes import bfloat16
from tileweave.primitives.expr import Expr
from tileweave.primitives.memory import Signal, Table
from tileweave.primitives.ops import Task, result, walk

# What every macro takes before the memories that it names.
FIXED = ("heap", "counters", "launch", "rank")
_RING = ("thread", "seen", "full", "empty")
_VECTOR_BYTES = 16


@dataclass(frozen=True)
class TaskText:
    """A macro's lines, and its parameters but for the grid indices, which come last."""

    name: str
    parameters: tuple[str, ...]
    lines: tuple[str, ...]


def serial_task(lowered: Lowered, lowered_task: LoweredTask) -> TaskText:
    """The task as plain loops over elements, for target `c`.

    Raises:
        CompileError: the task touches bfloat16 memory, which this target has not.
    """
    for memory in used_memories(lowered_task.task):
        if memory.dtype == bfloat16:
            raise CompileError(
                f"TileLang, target 'c': '{memory.name}' is bfloat16, and this target computes in fp32 alone; compile "
                "the kernel with float32 tensors, or use target 'cuda'",
                lowered_task.task.location,
            )
    task = expand_copies(lowered_task.task)
    names = names_of_scalars(task)
    kept = frozenset(plan_scratch(task).offset)
    writer = TaskWriter(lowered, task, "c", kept, Scalars(names))
    emit_body(writer, task.body)
    values = (value for op in walk(task.body) if (value := result(op)) is not None and value.id in kept)
    arrays = [
        f"t{v.id} = T.alloc_local(({', '.join(map(str, v.shape or (1,)))},), {TILELANG_TYPES[v.dtype]})" for v in values
    ]
    return macro(writer, names, f"run_{task.name}", arrays)


def consumer_task(lowered: Lowered, lowered_task: LoweredTask, pipeline: Pipeline) -> TaskText:
    """What the consumers of a worker do of a task, for target `cuda`: all but bringing the tiles of main loops.

    Raises:
        CompileError: an op, or a combination of ops, that this target has no text for.
    """
    task = lowered_task.task
    loops = pipeline.in_task(task)
    fragments = {number: name for loop in loops for number, name in loop.accumulators.items()}
    names = names_of_scalars(task)
    writer = TaskWriter(
        lowered, task, "cuda", frozenset(plan_scratch(task).offset), Scalars(names), threads=pipeline.consumers,
        width=_VECTOR_BYTES // min((m.dtype.itemsize_bytes for m in used_memories(task)), default=4),
        fragments=fragments,
        main_loops={id(loop.gemm.loop): partial(multiply, loop=loop, pipeline=pipeline) for loop in loops},
    )  # fmt: skip
    arrays = list(_thread_arrays(writer))
    emit_body(writer, task.body)
    return macro(writer, names, f"run_{task.name}", arrays, (*_RING, *pipeline.rings, *pipeline.accumulators))


def feeder_task(lowered: Lowered, lowered_task: LoweredTask, pipeline: Pipeline) -> TaskText | None:
    """What the feeders of a worker do of a task, for target `cuda`; None if it has no main loop."""
    task = lowered_task.task
    loops = pipeline.in_task(task)
    if not loops:
        return None
    task = replace(task, body=feeding(task.body, pipeline))
    names = names_of_scalars(task)
    writer = TaskWriter(
        lowered, task, "cuda", frozenset(), Scalars(names), helpers="feed_",
        main_loops={id(loop.gemm.loop): partial(feed, loop=loop, pipeline=pipeline) for loop in loops},
    )  # fmt: skip
    emit_body(writer, task.body)
    return macro(writer, names, f"feed_{task.name}", [], (*_RING, *pipeline.rings))


def _thread_arrays(writer: TaskWriter) -> Iterator[str]:
    """Arrays of the values that each thread keeps its elements of."""
    for value in (v for op in walk(writer.task.body) if (v := result(op)) is not None):
        if value.id in writer.kept and not in_fragments(writer, value):
            width = writer.width if value.shape and value.shape[-1] % writer.width == 0 else 1
            yield f"t{value.id} = T.alloc_local(({items(writer, value.shape)}, {width}), {TILELANG_TYPES[value.dtype]})"


def names_of_scalars(task: Task) -> Mapping[Expr, str]:
    """Names of the scalars that the task computes once."""
    return {e: f"s{n}" for n, e in enumerate(common_scalars(task))}


def macro(
    writer: TaskWriter, names: Mapping[Expr, str], name: str, arrays: list[str], shared: tuple[str, ...] = ()
) -> TaskText:
    """The macro around the lines of `writer`, with its arrays and named scalars before them.

    `shared` are names of the kernel that the macro takes if it uses them.
    """
    task = writer.task
    spelled = [f"    {line}" for e, name in names.items() for line in _scalar(writer, name, e)]
    body = [*(f"    {line}" for line in (*arrays, *writer.arrays)), *spelled, *writer.lines]
    words = set(re.findall(r"\w+", "\n".join(body)))
    memories = _memories(writer.lowered, task, "\n".join(body))
    parameters = (*FIXED, *memories, *(each for each in shared if each in words))
    grid = tuple(identifier(d) for d in task.dims)
    head = [
        "@T.macro",
        f"def {name}({', '.join((*parameters, *grid))}):",
        f'    """{task.name}, {task.role}: {place(task.location)}"""',
    ]
    return TaskText(name, parameters, (*head, *body))


def _scalar(writer: TaskWriter, name: str, expr: Expr) -> Iterator[str]:
    """A scalar under its name. On a GPU it is a variable: TileLang would compute a name's expression at each use."""
    if writer.target == "cuda":
        yield f'{name} = T.alloc_var("int32")'
    yield f"{name} = {writer.scalar.spelled(expr)}"


def _memories(lowered: Lowered, task: Task, text: str) -> Iterator[str]:
    """Names of this rank's memories that `text` uses."""
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    words = set(re.findall(r"\w+", code))
    direct = {m.name for m in used_memories(task)}
    for memory in lowered.program.memories:
        if isinstance(memory, Signal) or not (memory.name in direct or isinstance(memory, Table)):
            continue
        if identifier(memory.name) in words:
            yield identifier(memory.name)
