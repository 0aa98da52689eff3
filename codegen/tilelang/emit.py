"""A whole kernel as one TileLang module: a macro a task, and the persistent kernel that dispatches to them."""

from __future__ import annotations

from tileweave.codegen.lower import Lowered
from tileweave.codegen.tilelang.kernel import serial_kernel
from tileweave.codegen.tilelang.scalars import identifier
from tileweave.codegen.tilelang.target import Target
from tileweave.codegen.tilelang.tasks import TaskText, serial_task

_HELPERS = "clear, failed, fence, proxy_fence, signal, take, wait"


def emit_module(lowered: Lowered, target: Target) -> str:
    """Python source of `lowered` for TileLang 0.1.15.

    Raises:
        CompileError: an op, or a combination of ops, that the target has no text for; at the user's line.
    """
    program, schedule = lowered.program, lowered.schedule
    tasks = [serial_task(lowered, task) for task in lowered.tasks]
    parts = [
        f'"""{program.name} for {program.world_size} ranks: {schedule.order}, {schedule.queue} queues.',
        "",
        f"Written by Tileweave, target {target}.",
        '"""',
        "",
        "import tilelang.language as T",
        "",
        f"from tileweave.codegen.tilelang.device import {_HELPERS}",
        "from tileweave.codegen.tilelang.device_text import device_text",
        "",
        *(f'{identifier(dim)} = T.dynamic("{identifier(dim)}")' for dim in program.dims),
        'capacity = T.dynamic("capacity")  # of a lane of the queue',
        *(_macros(task) for task in tasks),
        serial_kernel(lowered, tasks),
    ]
    return "\n".join(parts) + "\n"


def _macros(task: TaskText) -> str:
    return "\n".join(["", "", *task.lines])
