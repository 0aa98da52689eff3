"""Sends between nodes as puts: what a task becomes, that it computes the same, and which signals go with the data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tileweave as tw
from tileweave.codegen.case import Case
from tileweave.codegen.lower import lower
from tileweave.codegen.puts import is_put, put_of, signal_of_put, with_puts
from tileweave.codegen.reference.interpret import interpret
from tileweave.compiler.printer import print_program
from tileweave.compiler.program import Program
from tileweave.errors import CompileError
from tileweave.moe.cases import layer_case
from tileweave.moe.kernels import Tiles
from tileweave.primitives.expr import Expr
from tileweave.primitives.ops import Copy, Task, walk

TWO_BY_TWO = tw.Topology("two nodes of two", 2, 2)


def compiled(case: Case, copy: int = 96) -> tw.CompiledKernel:
    """`moe_layer` on two nodes; a dispatch tile is copied `copy` columns at a time."""
    tiles = Tiles(rows=16, columns=32, depth=64, tokens=8, copy=copy)
    config = tw.Config(tunables={"tiles": tiles, "returns": "push"})
    return tw.compile(case.kernel, *case.specs, world_size=4, topology=TWO_BY_TWO, config=config)


def arguments(case: Case) -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    return [
        {n: random.standard_normal(a).astype(np.float32) if isinstance(a, tuple) else a for n, a in given.items()}
        for given in case.arguments
    ]


def sending(program: Program) -> Program:
    """The program with every task of the companion as the companion runs it, on all tiles."""
    sends = [with_puts(task) for task in program.tasks if task.role == "comm"]
    by_name = {each.task.name: each.task for each in sends}
    stages = [stage for each in sends for stage in each.stages]
    tasks = tuple(by_name.get(task.name, task) for task in program.tasks)
    return replace(program, tasks=tasks, memories=(*program.memories, *stages))


@pytest.mark.parametrize("copy", [96, 64, 32, 16])
def test_puts_move_what_stores_would(copy: int) -> None:
    case = layer_case(4)
    kernel = compiled(case, copy)
    plain, put = arguments(case), arguments(case)
    interpret(kernel.program, kernel.plan, plain)
    interpret(sending(kernel.program), kernel.plan, put)
    for want, got in zip(plain, put, strict=True):
        np.testing.assert_array_equal(got["out"], want["out"])


def test_a_loop_along_rows_sends_them_whole() -> None:
    program = sending(compiled(layer_case(4), copy=64).program)
    dispatch = print_program(program, locations=False).split("  task ")[1]
    loop, store, put = (
        n for n, line in enumerate(dispatch.splitlines()) if line.split()[0] in ("for", "store", "copy")
    )
    lines = dispatch.splitlines()
    assert lines[loop].strip() == "for i0 in 0 .. 96 step 64:"
    assert lines[store].startswith("      store stage_dispatch_0[0 +: 16")
    assert lines[put].startswith("    copy received[")
    assert ", 0 +: 96] @ peer = stage_dispatch_0[0 +: 16" in lines[put]


def test_stages_lie_one_behind_the_other_for_each_worker() -> None:
    kernel = compiled(layer_case(4))
    lowered = lower(kernel.program, kernel.plan)
    companion = lowered.companion
    assert companion is not None
    assert companion.workers == (1, 2, 3, 4)
    assert [t.task.name for t in companion.tasks] == ["dispatch", "send_results"]
    assert companion.stage_offset_bytes == {
        "stage_dispatch_0": 0
    }  # results are symmetric, and sent from where they are
    assert companion.stage_bytes == 16 * 96 * 4
    assert lowered.gpu_bytes == lowered.stages_offset_bytes + 4 * companion.stage_bytes
    assert lowered.stages_offset_bytes >= lowered.segment.gpu_bytes
    one_node = layer_case(2).compile().lowered
    assert one_node.companion is None
    assert one_node.gpu_bytes == one_node.segment.gpu_bytes


@tw.kernel
def sends(x: tw.Tensor, rows: tw.Table, *, how: str = "") -> None:
    box = tw.symmetric("box", (8, 8))
    cube = tw.symmetric("cube", (4, 4, 8))
    ready = tw.signals("ready", (1,))
    left, whole = (tw.ds(0, 4), tw.ds(0, 4)), (tw.ds(0, 4), tw.ds(0, 8))

    @tw.task(grid={"peer": tw.world_size()}, role="comm")
    def send(peer: Expr) -> None:
        if how == "columns":
            tw.put(box, left, box, left, peer)
        elif how == "listed":
            tw.scatter(box, (rows.rows(tw.ds(0, 4)), tw.ds(0, 8)), tw.load(x, whole), peer)
        elif how == "cube":
            tw.put(cube, (tw.ds(0, 2), *whole), cube, (tw.ds(2, 2), *whole), peer)
        elif how == "rows first":
            tw.put(cube, (*left, 0), cube, (*left, 1), peer)
        elif how == "loop":
            for step in tw.range(2):
                tw.remote_store(box, (tw.ds(step * 4, 4), tw.ds(0, 8)), tw.load(x, whole), peer)
                tw.signal(ready, 0, 1, peer)
            return
        elif how == "two":
            tw.put(box, whole, box, whole, peer)
            tw.put(cube, (0, *whole), cube, (1, *whole), peer)
        elif how == "elsewhere":
            tw.put(box, whole, box, whole, peer)
            tw.signal(ready, 0)
        elif how == "argument":
            tw.put(box, whole, x, whole, peer)
        elif how == "guarded":
            with tw.when(peer.differs(tw.rank())):
                tw.put(box, whole, box, whole, peer)
                tw.signal(ready, 0, 1, peer)
            return
        else:
            tw.put(box, whole, box, whole, peer)
        tw.signal(ready, 0, 1, peer)


def task_of(how: str) -> Task:
    config = tw.Config(tunables={"how": how})
    kernel = tw.compile(sends, tw.Tensor((4, 8)), tw.Table((4,)), world_size=2, config=config)
    return with_puts(kernel.program.tasks[0]).task


@pytest.mark.parametrize(
    ("how", "contiguous", "together"),
    [
        ("", [True], True),
        ("guarded", [True], True),
        ("columns", [False], False),
        ("listed", [False], False),
        ("loop", [True], False),
        ("two", [True, True], False),
        ("elsewhere", [True], False),
        ("argument", [True], False),
    ],
)
def test_a_signal_goes_with_the_only_put_before_it(how: str, contiguous: list[bool], together: bool) -> None:
    task = task_of(how)
    puts = [op for op in walk(task.body) if isinstance(op, Copy)]
    assert all(map(is_put, puts))
    assert [put_of(op).contiguous for op in puts] == contiguous
    assert (signal_of_put(task.body) is not None) == together


@pytest.mark.parametrize("how", ["cube", "rows first"])
def test_blocks_that_are_not_rows_are_refused(how: str) -> None:
    with pytest.raises(CompileError) as caught:
        task_of(how)
    assert caught.value.message == (
        "a send to another node needs rows, slices of the last dimension of 'cube' and at most one more; loop over the "
        "other dimensions"
    )
    assert caught.value.location is not None
