"""Kernels between nodes as machine code: a megakernel that knows no network, and a companion linked with NVSHMEM."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
import torch

import tileweave as tw
from tileweave.compiler.config import Config, GpuConfig
from tileweave.errors import BuildError, ConfigError

pytest.importorskip("triton")
pytest.importorskip("nvidia.nvshmem")

from tileweave.codegen.gpu.queued import Ranks
from tileweave.codegen.triton.build import Binary, build, build_companion
from tileweave.codegen.triton.engine import TritonKernel
from tileweave.moe.gpu import Deployment, compile_layer
from tileweave.moe.models import MODELS
from tileweave.primitives.expr import Expr

STATE = b"nvshmemi_device_state_d"  # what NVSHMEM's host part fills in before the first launch


def check_megakernel(binary: Binary) -> None:
    """No spill, matrix instructions, and nothing of the network."""
    report = binary.report()
    assert report.spilled_bytes == report.instructions.spills == 0
    assert report.tasks["gate_up"].matrix > 0
    assert report.tasks["down"].matrix > 0
    assert STATE not in binary.cubin
    assert "nvshmem" not in binary.ptx


def check_companion(binary: Binary) -> None:
    """NVSHMEM is linked in: nothing is left to be found but its functions of the CUDA runtime."""
    assert binary.report().instructions.matrix == 0
    assert STATE in binary.cubin
    assert "nvshmem" in binary.ptx
    unknown = re.findall(r"^\.extern \.func.*?(\w+)\s*$", binary.ptx, re.MULTILINE)
    assert set(unknown) <= {"__assertfail", "vprintf"}


def test_a_layer_across_two_nodes() -> None:
    topology = tw.Topology("two nodes of two", 2, 2)
    kernel = compile_layer(MODELS["Qwen3-30B-A3B"], "sm_90", Deployment(topology.world_size, topology=topology))[0]
    check_megakernel(build(kernel.lowered, kernel.config.gpu, "sm_90"))
    check_companion(build_companion(kernel.lowered, kernel.config.gpu, "sm_90"))


@tw.kernel
def every_send(x: tw.Tensor, rows: tw.Table) -> None:
    """One task for each form that a send can take."""
    box, wide, ready = tw.symmetric("box", (64, 64)), tw.symmetric("wide", (64, 128)), tw.signals("ready", (4,))
    whole = (tw.ds(0, 64), tw.ds(0, 64))

    @tw.task(grid={"peer": tw.world_size()}, role="comm")
    def columns(peer: Expr) -> None:
        tw.put(wide, whole, box, whole, peer)
        tw.signal(ready, 0, 1, peer)

    @tw.task(grid={"peer": tw.world_size()}, role="comm")
    def listed(peer: Expr) -> None:
        tw.scatter(box, (rows.rows(tw.ds(0, 64)), tw.ds(0, 64)), tw.load(x, whole), peer)
        tw.signal(ready, 1, 1, peer)

    @tw.task(grid={"peer": tw.world_size()}, role="relay")
    def loop(peer: Expr) -> None:
        tw.wait(ready, 0, 1)
        for step in tw.range(2):
            tw.remote_store(wide, (tw.ds(0, 64), tw.ds(step * 64, 64)), tw.load(x, whole) * 2.0, peer)
            tw.signal(ready, 2, 1, peer)
        tw.signal(ready, 3)


def companion_text(kernel: tw.CompiledKernel) -> str:
    """What the module says after the megakernel."""
    return kernel.source("triton").split("def every_send(")[1]


def compile_every_send(**settings: Any) -> tw.CompiledKernel:
    specs, topology = (tw.Tensor((64, 64)), tw.Table((64,))), tw.Topology("two nodes", 2, 1)
    return tw.compile(every_send, *specs, world_size=2, topology=topology, backend="triton", config=Config(**settings))


def test_every_form_of_a_send_compiles() -> None:
    kernel = compile_every_send(queue="dynamic", companion_workers=1)
    text = companion_text(kernel)
    columns, listed, loop = (text.split(f"def send_{name}(")[1].split("@triton.jit")[0] for name in
                             ("columns", "listed", "loop"))  # fmt: skip
    assert re.search(r"for r\d+ in tl.range\(64\):\n +put\(address\(heap, rank\)", columns)
    assert "signal_peer(" in columns
    assert re.search(r"if tl.load\(rows \+ r\d+\) >= 0:\n +put\(", listed)
    assert "put_now(" in loop  # the stage is written again in the next iteration
    assert loop.count("signal_peer(") == 1
    assert loop.count(" signal(") == 1
    assert "wait(pointer(address(heap, rank), tl.int64)" in loop
    check_companion(build_companion(kernel.lowered, kernel.config.gpu, "sm_90"))


def test_workers_of_the_companion_are_numbered_after_those_of_the_megakernel() -> None:
    text = companion_text(compile_every_send(workers=7, comm_workers=2, companion_workers=3))
    megakernel, companion = text.split("def every_send_companion(")
    assert "worker = tl.program_id(0) % 7" in megakernel
    assert "epoch = enter(heap, rank, 2, 1, " in megakernel
    assert "worker = 7 + tl.program_id(0) % 3" in companion
    assert "place = worker - 7" in companion
    assert "lane = 2" in companion
    assert "epoch = enter_off_node(heap, rank, place, 2, 1, " in companion


def test_a_kernel_of_one_node_has_no_companion() -> None:
    kernel = tw.compile(every_send, tw.Tensor((64, 64)), tw.Table((64,)), world_size=2, backend="triton")
    assert "nvshmem" not in kernel.source()
    with pytest.raises(ConfigError, match="kernel 'every_send' has no companion: nothing leaves a node of topology"):
        build_companion(kernel.lowered, GpuConfig(), "sm_90")


def test_missing_device_code(monkeypatch: pytest.MonkeyPatch) -> None:
    text = r"need NVSHMEM's libnvshmem_device_sm_90\.bc; run: pip install 'nvidia-nvshmem-cu13>=3.8'"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match=text):
        build_companion(compile_every_send().lowered, GpuConfig(), "sm_90")


def test_launching_is_refused() -> None:
    kernel = compile_every_send()
    ranks = Ranks(0, 1, [0, 0], torch.device("cpu"))
    text = r"kernel 'every_send' sends between nodes \(topology 'two nodes'\), which this version compiles for GPUs"
    with pytest.raises(ConfigError, match=text):
        TritonKernel(kernel.lowered, ranks, kernel.config.gpu)
