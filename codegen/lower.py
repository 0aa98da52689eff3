"""Lowering: what all backends decide alike before they write text.

Numbers for memories, tasks and wait sites, and where things lie in the symmetric segment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from tileweave.codegen.layout import Segment, aligned, num_elements, symmetric_segment
from tileweave.codegen.puts import with_puts
from tileweave.compiler.program import Program
from tileweave.compiler.schedule import Lane, Schedule
from tileweave.primitives.expr import Const
from tileweave.primitives.memory import Memory, Symmetric
from tileweave.primitives.ops import Op, Task, WaitOp, result
from tileweave.primitives.ops import walk as walk_ops


@dataclass(frozen=True)
class Site:
    """One wait in the program text."""

    number: int
    task: Task
    op: WaitOp


@dataclass(frozen=True)
class LoweredTask:
    """A task, its number, and the op that defines each of its values."""

    number: int
    task: Task
    definitions: Mapping[int, Op]


@dataclass(frozen=True)
class Companion:
    """The kernel beside the megakernel whose workers send to other nodes.

    Its tasks send by puts. What they have to stage lies in memory of each worker, `stage_bytes` long, in which
    `stage_offset_bytes` says where each stage begins.
    """

    lane: int
    workers: tuple[int, ...]
    tasks: tuple[LoweredTask, ...]
    stages: Mapping[str, Symmetric]
    stage_offset_bytes: Mapping[str, int]
    stage_bytes: int


@dataclass(frozen=True)
class Lowered:
    """A program ready to be written as text by any backend."""

    program: Program
    schedule: Schedule
    tasks: tuple[LoweredTask, ...]
    sites: tuple[Site, ...]
    segment: Segment

    @cached_property
    def number_of(self) -> Mapping[str, int]:
        """Position of each memory in the launch's pointer table."""
        return {m.name: n for n, m in enumerate(self.program.memories)}

    @cached_property
    def site_of(self) -> Mapping[int, int]:
        """Site number by the identity of the wait op."""
        return {id(site.op): site.number for site in self.sites}

    @cached_property
    def companion(self) -> Companion | None:
        """The companion kernel, if the schedule has a lane for one.

        Raises:
            CompileError: a block to send to another node is not made of rows.
        """
        lanes = self.schedule.lanes_of("companion")
        return _companion(*lanes[0], self) if lanes else None

    @property
    def stages_offset_bytes(self) -> int:
        """Where in a rank's segment on a GPU the stages of the companion's workers begin."""
        return aligned(self.segment.gpu_bytes)

    @property
    def gpu_bytes(self) -> int:
        """Bytes of a rank's segment on a GPU, with the companion's stages."""
        companion = self.companion
        if companion is None:
            return self.segment.gpu_bytes
        return self.stages_offset_bytes + len(companion.workers) * companion.stage_bytes


def lower(program: Program, schedule: Schedule) -> Lowered:
    """Decide what backends share."""
    waits = [(task, op) for task in program.tasks for op in walk_ops(task.body) if isinstance(op, WaitOp)]
    sites = tuple(Site(number, task, op) for number, (task, op) in enumerate(waits))
    tasks = tuple(LoweredTask(number, task, _definitions(task)) for number, task in enumerate(program.tasks))
    return Lowered(program, schedule, tasks, sites, symmetric_segment(program))


def _companion(number: int, lane: Lane, lowered: Lowered) -> Companion:
    tasks: list[LoweredTask] = []
    stages: dict[str, Symmetric] = {}
    for task, away in zip(lowered.tasks, lowered.schedule.off_node, strict=True):
        if away != Const(0):
            sends = with_puts(task.task)
            tasks.append(LoweredTask(task.number, sends.task, _definitions(sends.task)))
            stages |= {stage.name: stage for stage in sends.stages}
    sizes = [aligned(num_elements(stage) * stage.dtype.itemsize_bytes) for stage in stages.values()]
    offsets = dict(zip(stages, accumulate(sizes, initial=0), strict=False))
    return Companion(number, lane.workers, tuple(tasks), stages, offsets, sum(sizes))


def _definitions(task: Task) -> Mapping[int, Op]:
    return {value.id: op for op in walk_ops(task.body) if (value := result(op)) is not None}


def used_memories(task: Task) -> tuple[Memory, ...]:
    """Memories that a task touches directly, in order of first use."""
    found: dict[str, Memory] = {}
    for op in walk_ops(task.body):
        for field in ("memory", "target", "source", "signal"):
            memory = getattr(op, field, None)
            if isinstance(memory, Memory):
                found.setdefault(memory.name, memory)
    return tuple(found.values())
