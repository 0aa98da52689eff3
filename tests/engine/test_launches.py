"""Many launches: memory is counted and used again, ranks drift apart, and more workers run than there are cores."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import tileweave as tw
from tests.moe.layers import Inputs, even, random_inputs, reference, relative_error, run_layer
from tests.moe.test_layer_values import FULL, PLAIN
from tileweave.codegen.launch import Launch
from tileweave.compiler.config import Config
from tileweave.errors import GroupError, HangError
from tileweave.moe.config import MoEConfig
from tileweave.moe.layer import MoELayer, compile_layer
from tileweave.primitives.control import Control
from tileweave.primitives.group import Group
from tileweave.primitives.heap import PAGE
from tileweave.primitives.launch import VirtualGroup, spawn

ROOT = Path(__file__).resolve().parents[2]

torch.set_num_threads(1)


@pytest.mark.parametrize("config", [PLAIN, FULL], ids=["plain", "full"])
def test_symmetric_bytes_are_those_of_the_printed_formula(config: MoEConfig) -> None:
    with VirtualGroup(2) as ranks:
        kernel = compile_layer(config, 2, MoELayer(config, ranks.groups[0])._shape(), Config())
        *parts, total = kernel.memory().splitlines()
        added = 0
        for line in parts:
            factors, size = re.fullmatch(r"\D+ ([\dx ]+) = ([\d,]+)", line).groups()  # type: ignore[union-attr]
            product = 1
            for factor in factors.split(" x "):
                product *= int(factor)
            assert product == int(size.replace(",", "")) or line.startswith("alignment to 64 = ")
            added += int(size.replace(",", ""))
        assert added == kernel.symmetric_bytes
        assert total == f"total {kernel.symmetric_bytes:,} bytes a rank"

        def rank(group: Group) -> tuple[int, int]:
            before = group.heap.total_bytes
            kernel.load(group)
            once = group.heap.total_bytes
            kernel.load(group)
            return once - before, group.heap.total_bytes - before

        pages = -(-kernel.symmetric_bytes // PAGE) * PAGE
        assert ranks.run(rank) == [(pages, pages)] * 2


def drifting(group: Group, count: int, batches: list[list[Inputs]]) -> list[int]:
    """Launches whose tokens and routing change, with ranks asleep here and there; numbers of those that went wrong."""
    layer = MoELayer(PLAIN, group, run=Config(workers=2, queue="dynamic"))
    chance = random.Random(group.rank)
    wants: list[torch.Tensor] = []
    wrong = []
    for number in range(count):
        part = batches[number % len(batches)][group.rank]
        torch.full((4096,), float("nan"))  # so that memory the allocator hands out again does not hold the answer
        out = layer(part.x, part.topk_idx, part.topk_weights)
        if number < len(batches):
            wants.append(out.clone())
        if not torch.equal(out, wants[number % len(batches)]):
            wrong.append(number)
        out.fill_(float("nan"))
        if chance.random() < 0.2:
            time.sleep(chance.random() * 0.003)
    return wrong


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_three_hundred_launches_back_to_back(kind: str) -> None:
    """A fast rank is in the next launch while a slow one is in the last; neither may see the other's data."""
    inputs = [random_inputs(PLAIN, 120, unused=0.1, seed=seed) for seed in range(3)]
    batches = [i.split(counts) for i, counts in zip(inputs, ([40, 40, 40], [0, 119, 1], [60, 0, 60]), strict=True)]
    with VirtualGroup(3) as ranks:
        wrong = ranks.run(drifting, 300, batches) if kind == "threads" else spawn(drifting, 3, 300, batches)
        assert wrong == [[], [], []]
        for each, parts in zip(inputs, batches, strict=True):
            assert relative_error(run_layer(ranks, PLAIN, parts), reference(PLAIN, each)) < 1e-5


def sixteen(group: Group, parts: list[Inputs]) -> torch.Tensor:
    """Two workers on each of eight ranks."""
    layer, part = MoELayer(PLAIN, group, run=Config(workers=2)), parts[group.rank]
    for _ in range(5):
        out = layer(part.x, part.topk_idx, part.topk_weights)
    return out


def test_more_workers_than_cores() -> None:
    inputs = random_inputs(PLAIN, 100)
    parts = inputs.split(even(100, 8))
    with VirtualGroup(8) as ranks:
        threads = torch.cat(ranks.run(sixteen, parts))
    assert relative_error(threads, reference(PLAIN, inputs)) < 1e-5
    assert torch.equal(torch.cat(spawn(sixteen, 8, parts)), threads)


TORCHRUN = """
import sys
import torch
import tileweave as tw
from tests.moe.layers import even, random_inputs
from tests.moe.test_layer_values import PLAIN
from tileweave.moe.layer import MoELayer

group = tw.init()
inputs = random_inputs(PLAIN, 100)
layer = MoELayer(PLAIN, run=tw.Config())
assert layer.group is group
part = inputs.split(even(100, group.world_size))[group.rank]
torch.save(layer(part.x, part.topk_idx, part.topk_weights), f"{sys.argv[1]}/{group.rank}.pt")
"""


def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path)], env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    got = torch.cat([torch.load(tmp_path / f"{rank}.pt") for rank in range(2)])
    inputs = random_inputs(PLAIN, 100)
    with VirtualGroup(1) as ranks:
        assert torch.equal(got, run_layer(ranks, PLAIN, [inputs]))


def test_two_threads_of_a_rank_do_not_launch_at_once() -> None:
    """A rank's launch record is one; the second thread is told so instead of overwriting it."""

    @tw.kernel
    def patient(x: tw.Tensor) -> None:
        done = tw.signals("done", (1,))

        @tw.task()
        def wait() -> None:
            tw.wait(done, 0, 1)
            tw.store(x, tw.ds(0, 8), tw.load(x, tw.ds(0, 8)))

    group = Group(0, Control.create(1)[0], "single")
    group.timeout_s = 2.0
    compiled = tw.compile(patient, tw.Tensor((8,)))
    executable = compiled.load(group)
    x = np.zeros(8, np.float32)

    def hang() -> None:
        with pytest.raises(HangError):
            compiled.run((x,), group)

    first = threading.Thread(target=hang)
    first.start()
    while not any(record.state == "waiting" for record in group.worker_records()):
        time.sleep(0.01)
    with pytest.raises(GroupError, match="kernel 'patient' is already running on this rank"):
        executable.launch(Launch([0], []))
    first.join()
