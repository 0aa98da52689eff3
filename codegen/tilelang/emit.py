"""A whole kernel as one TileLang module: a macro a task, and the persistent kernel that dispatches to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from tileweave.codegen.copies import expand_copies
from tileweave.codegen.lower import Lowered
from tileweave.codegen.tilelang.kernel import serial_kernel
from tileweave.codegen.tilelang.pipeline import Pipeline, plan_pipeline
from tileweave.codegen.tilelang.scalars import identifier
from tileweave.codegen.tilelang.specialised import RoleText, specialised_kernel
from tileweave.codegen.tilelang.target import Target
from tileweave.codegen.tilelang.tasks import TaskText, consumer_task, feeder_task, serial_task
from tileweave.codegen.tilelang.writer import TILELANG_TYPES
from tileweave.compiler.config import GpuConfig
from tileweave.errors import CompileError, ConfigError
from tileweave.primitives.ops import accesses, operands, result, walk

DEFAULT_GPU = GpuConfig(warps=8, stages=4, loads="tma")
WARPGROUPS: Mapping[int, int] = {4: 1, 8: 2}
"""Warpgroups that multiply, by warps of a worker."""

_IMPORTS: Mapping[Target, tuple[str, str]] = {
    "c": ("clear, failed, fence, signal, take, wait", "c_text"),
    "cuda": ("announce, clear, enter, feed_wait, fence, mark, next_from, next_of, signal, wait", "cuda_text"),
}


def emit_module(lowered: Lowered, target: Target, gpu: GpuConfig = DEFAULT_GPU) -> str:
    """Python source of `lowered` for TileLang 0.1.15.

    Raises:
        CompileError: an op, or a combination of ops, that the target has no text for; at the user's line.
        ConfigError: warps that are not one or two warpgroups.
    """
    program, schedule = lowered.program, lowered.schedule
    _refuse_unknown_types(lowered, target)
    helpers, text = _IMPORTS[target]
    parts = [
        f'"""{program.name} for {program.world_size} ranks: {schedule.order}, {schedule.queue} queues.',
        "",
        f"Written by Tileweave, target {target}.",
        '"""',
        "",
        "import tilelang.language as T",
        "",
        f"from tileweave.codegen.tilelang.device import {helpers}",
        f"from tileweave.codegen.tilelang.device_text import {text}",
        "",
        *(f'{identifier(dim)} = T.dynamic("{identifier(dim)}")' for dim in program.dims),
        'capacity = T.dynamic("capacity")  # of a lane of the queue',
        *(_serial(lowered) if target == "c" else _specialised(lowered, gpu)),
    ]
    return "\n".join(parts) + "\n"


def _refuse_unknown_types(lowered: Lowered, target: Target) -> None:
    for task in lowered.tasks:
        for op in walk(task.task.body):
            values = (*operands(op), *([] if (value := result(op)) is None else [value]))
            types = [v.dtype for v in values] + [access.memory.dtype for access in accesses(op)]
            for dtype in types:
                if dtype not in TILELANG_TYPES:
                    raise CompileError(
                        f"TileLang, target '{target}', task '{task.task.name}': it has no {dtype}; compile the kernel "
                        "with backend 'triton' or 'c', or keep these numbers in bfloat16",
                        op.location,
                    )


def _serial(lowered: Lowered) -> Iterator[str]:
    tasks = [serial_task(lowered, task) for task in lowered.tasks]
    yield from map(_macro, tasks)
    yield serial_kernel(lowered, tasks)


def _specialised(lowered: Lowered, gpu: GpuConfig) -> Iterator[str]:
    lowered = _expanded(lowered)
    pipeline = pipeline_of(lowered, gpu)
    feeders = {
        task.number: text for task in lowered.tasks if (text := feeder_task(lowered, task, pipeline)) is not None
    }
    consumers = {task.number: consumer_task(lowered, task, pipeline) for task in lowered.tasks}
    yield from map(_macro, (*feeders.values(), *consumers.values()))
    dims = [len(task.task.dims) for task in lowered.tasks]
    roles = [RoleText(list(role.items()), [dims[number] for number in role]) for role in (feeders, consumers)]
    yield specialised_kernel(lowered, pipeline, *roles)


def _expanded(lowered: Lowered) -> Lowered:
    """`lowered` without bulk copies."""
    return replace(lowered, tasks=tuple(replace(task, task=expand_copies(task.task)) for task in lowered.tasks))


def pipeline_of(lowered: Lowered, gpu: GpuConfig) -> Pipeline:
    """The main loops of a kernel for target `cuda`.

    Raises:
        CompileError: a main loop that wgmma, or the tensor memory accelerator, cannot run.
        ConfigError: warps that are not one or two warpgroups.
    """
    if gpu.warps not in WARPGROUPS:
        known = " or ".join(map(str, WARPGROUPS))
        raise ConfigError(f"GpuConfig.warps={gpu.warps}: TileLang, target 'cuda', takes {known}")
    return plan_pipeline([task.task for task in lowered.tasks], gpu.stages, WARPGROUPS[gpu.warps])


def _macro(task: TaskText) -> str:
    return "\n".join(["", "", *task.lines])
