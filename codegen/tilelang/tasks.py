"""One task as text: a macro that is named after it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tileweave.codegen.c.scratch import plan_scratch
from tileweave.codegen.common import common_scalars
from tileweave.codegen.copies import expand_copies
from tileweave.codegen.lower import Lowered, LoweredTask, used_memories
from tileweave.codegen.tilelang.ops import emit_body
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


def names_of_scalars(task: Task) -> Mapping[Expr, str]:
    """Names of the scalars that the task computes once."""
    return {e: f"s{n}" for n, e in enumerate(common_scalars(task))}


def macro(writer: TaskWriter, names: Mapping[Expr, str], name: str, arrays: list[str]) -> TaskText:
    """The macro around the lines of `writer`, with its arrays and named scalars before them."""
    task = writer.task
    spelled = [f"    {name} = {writer.scalar.spelled(e)}" for e, name in names.items()]
    body = [*(f"    {line}" for line in (*arrays, *writer.arrays)), *spelled, *writer.lines]
    parameters = (*FIXED, *_memories(writer.lowered, task, "\n".join(body)))
    grid = tuple(identifier(d) for d in task.dims)
    head = [
        "@T.macro",
        f"def {name}({', '.join((*parameters, *grid))}):",
        f'    """{task.name}, {task.role}: {place(task.location)}"""',
    ]
    return TaskText(name, parameters, (*head, *body))


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
