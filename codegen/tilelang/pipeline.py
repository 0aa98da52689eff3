"""Main loops of matrix products on sm_90a: feeders bring tiles to a ring in shared memory, consumers multiply them.

All loops of a kernel share one ring and one set of accumulators, so that a worker's shared memory and registers
are those of its largest product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from tileweave.codegen.gemm import GemmLoop, depth_axes, fits_tma, gemm_loop, grid_intervals
from tileweave.codegen.tilelang.scalars import identifier
from tileweave.codegen.tilelang.writer import TaskWriter
from tileweave.errors import CompileError
from tileweave.primitives.dtypes import bfloat16
from tileweave.primitives.expr import Expr
from tileweave.primitives.memory import Slice
from tileweave.primitives.ops import Copy, For, Load, Op, Store, Task, WaitOp, When, walk

_WARPGROUP_ROWS = 64  # of a wgmma
Shape = tuple[int, ...]


@dataclass(frozen=True)
class MainLoop:
    """One loop, with the ring buffer of each of its loads, and the accumulator of each of its dots, by name."""

    gemm: GemmLoop
    rings: tuple[str, ...]
    accumulators: Mapping[int, str]


@dataclass(frozen=True)
class Pipeline:
    """The main loops of a kernel by identity of the loop, and the shapes of what they share, by name."""

    loops: Mapping[int, MainLoop]
    rings: Mapping[str, Shape]
    accumulators: Mapping[str, Shape]
    stages: int
    warpgroups: int

    @property
    def consumers(self) -> int:
        """Threads that multiply."""
        return 128 * self.warpgroups

    @property
    def ring_bytes(self) -> int:
        """Shared memory of the ring."""
        return 2 * self.stages * sum(rows * columns for rows, columns in self.rings.values())

    def in_task(self, task: Task) -> list[MainLoop]:
        """Those of one task, in order."""
        return [self.loops[id(op)] for op in walk(task.body) if id(op) in self.loops]


def plan_pipeline(tasks: Sequence[Task], stages: int, warpgroups: int) -> Pipeline:
    """Find the main loops of all tasks, and name what they share.

    Raises:
        CompileError: a main loop that wgmma, or the tensor memory accelerator, cannot run.
    """
    loops: dict[int, MainLoop] = {}
    rings: dict[str, Shape] = {}
    accumulators: dict[str, Shape] = {}
    for task in tasks:
        found = [gemm for op in walk(task.body) if isinstance(op, For) and (gemm := gemm_loop(op)) is not None]
        totals = {total.id: total for gemm in found for total, _, _ in gemm.dots}
        named = dict(zip(totals, _names("acc", [total.shape for total in totals.values()], accumulators), strict=True))
        for gemm in found:
            _check(task, gemm, warpgroups)
            buffers = _names("ring", [load.result.shape for load in gemm.loads], rings)
            loops[id(gemm.loop)] = MainLoop(gemm, tuple(buffers), named)
    return Pipeline(loops, rings, accumulators, stages, warpgroups)


def _names(stem: str, shapes: Sequence[Shape], known: dict[str, Shape]) -> list[str]:
    """A name for each of `shapes`, no two alike; those `known` are used first, and new ones are added to them."""
    taken: list[str] = []
    for shape in shapes:
        names = (f"{stem}{n}" for n in count())
        name = next(n for n in names if n not in taken and known.get(n, shape) == shape)
        known[name] = shape
        taken.append(name)
    return taken


def _check(task: Task, gemm: GemmLoop, warpgroups: int) -> None:
    depths, known = depth_axes(gemm), grid_intervals(task)
    written = {op.memory.name for op in walk(task.body) if isinstance(op, Store)}
    written |= {op.target.name for op in walk(task.body) if isinstance(op, Copy)}
    for load in gemm.loads:
        if load.memory.dtype != bfloat16:
            problem = f"matrix products take bfloat16, but '{load.memory.name}' is {load.memory.dtype}"
        elif not fits_tma(load, depths[load.result.id], known):
            problem = f"the tensor memory accelerator cannot bring this tile of '{load.memory.name}'"
        elif load.memory.name in written:
            problem = f"'{load.memory.name}' is written by this task as well; write it in a task before"
        else:
            continue
        raise _refusal(task, load, f"{problem}; or use the Triton backend")
    for total, _, _ in gemm.dots:
        if total.shape[0] % (_WARPGROUP_ROWS * warpgroups):
            needed = _WARPGROUP_ROWS * warpgroups
            problem = (
                f"a product of {total.shape[0]} rows does not fit {4 * warpgroups} warps; use tiles of a multiple "
            )
            raise _refusal(task, gemm.loop, f"{problem}of {needed} rows, or fewer warps")


def _refusal(task: Task, op: Op, problem: str) -> CompileError:
    return CompileError(f"TileLang, target 'cuda', task '{task.name}': {problem}", op.location)


def multiply(writer: TaskWriter, loop: MainLoop, pipeline: Pipeline) -> None:
    """The consumers' side: one product is in flight while the tiles of the next are awaited."""
    gemm, op, stages = loop.gemm, loop.gemm.loop, pipeline.stages
    ring_of = {load.result.id: ring for load, ring in zip(gemm.loads, loop.rings, strict=True)}
    index = f"k{op.index.id}"
    with writer.block(f"for {index} in T.serial({_range(writer, op)}):"):
        writer.line(f"T.mbarrier_wait_parity(full[seen[0] % {stages}], seen[0] // {stages} % 2)")
        for total, a, b in gemm.dots:
            tiles = (f"{ring_of[side.load.result.id]}[seen[0] % {stages}, :, :]" for side in (a, b))
            flags = f"transpose_A={a.transposed}, transpose_B={b.transposed}, policy=T.GemmWarpPolicy.FullRow"
            writer.line(f"T.wgmma_gemm({', '.join(tiles)}, {loop.accumulators[total.id]}, {flags})")
        writer.line(f"T.wait_wgmma({len(gemm.dots)})")
        with writer.block(f"if {index} > {writer.scalar(op.start)}:"):
            writer.line(f"T.mbarrier_arrive(empty[(seen[0] + {stages - 1}) % {stages}])")
        writer.line("seen[0] = seen[0] + 1")
    writer.line("T.wait_wgmma(0)")
    with writer.block(f"if {writer.scalar(op.start)} < {writer.scalar(op.stop)}:"):
        writer.line(f"T.mbarrier_arrive(empty[(seen[0] + {stages - 1}) % {stages}])")


def feed(writer: TaskWriter, loop: MainLoop, pipeline: Pipeline) -> None:
    """The feeders' side: tiles to the ring, up to `stages` ahead of the products."""
    op, stages = loop.gemm.loop, pipeline.stages
    with writer.block(f"for k{op.index.id} in T.serial({_range(writer, op)}):"):
        writer.line(f"T.mbarrier_wait_parity(empty[seen[0] % {stages}], (seen[0] // {stages} + 1) % 2)")
        for load, ring in zip(loop.gemm.loads, loop.rings, strict=True):
            source = f"{identifier(load.memory.name)}[{', '.join(_box(writer, load))}]"
            slot = f"seen[0] % {stages}"
            writer.line(f"T.tma_copy({source}, {ring}[{slot}, :, :], barrier=full[{slot}])")
        writer.line(f"T.mbarrier_arrive(full[seen[0] % {stages}])")
        writer.line("seen[0] = seen[0] + 1")


def _range(writer: TaskWriter, op: For) -> str:
    step = f", {op.step}" if op.step != 1 else ""
    return f"{writer.scalar(op.start)}, {writer.scalar(op.stop)}{step}"


def _box(writer: TaskWriter, load: Load) -> Iterator[str]:
    for item in load.index:
        if isinstance(item, Slice):
            start = writer.scalar(item.start)
            yield f"{start}:{start} + {item.size}"
        else:
            assert isinstance(item, Expr)
            yield writer.scalar(item)


def feeding(body: tuple[Op, ...], pipeline: Pipeline) -> tuple[Op, ...]:
    """What the feeders do of `body`: its main loops, the waits before them, and the control flow around them."""
    kept: list[Op] = []
    length = 0
    for op in body:
        if isinstance(op, WaitOp) or id(op) in pipeline.loops:
            kept.append(op)
        elif isinstance(op, (For, When)) and any(id(inner) in pipeline.loops for inner in walk(op.body)):
            kept.append(replace(op, body=feeding(op.body, pipeline)))
        if any(id(inner) in pipeline.loops for inner in walk((op,))):
            length = len(kept)
    return tuple(kept[:length])
