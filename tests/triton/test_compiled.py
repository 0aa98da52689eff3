"""Shipped kernels as machine code: what the compiler says of them, without a GPU."""

from __future__ import annotations

import pytest

from tests.handshake import check_orders, check_scopes, count, handshake
from tileweave.compiler.config import GpuConfig

pytest.importorskip("triton")

from tileweave.codegen.report import KernelReport
from tileweave.codegen.triton.build import build
from tileweave.moe.gpu import Deployment, compile_layer
from tileweave.moe.models import MODELS
from tileweave.primitives.ops import Order, Scope

GEMMS = {"gate_up", "down"}
WITH_HALVES = ("gpt-oss-120b", "Qwen3-30B-A3B")


def reports(model: str, arch: str) -> list[KernelReport]:
    """The whole layer, which holds every task of its halves; the halves too for one model with biases and one without.

    `benchmarks/gpu_report.py` compiles all.
    """
    kernels = compile_layer(MODELS[model], arch, Deployment())[: 3 if model in WITH_HALVES else 1]
    found = [build(kernel.lowered, kernel.config.gpu, arch).report() for kernel in kernels]
    for report in found:
        figures = f"{report.registers} registers, {report.spilled_bytes} spilled, {report.shared_bytes} shared bytes"
        print(f"{arch} {model} {report.name}: {figures}")  # the table, with `pytest -s`
    return found


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("model", MODELS)
def test_layers_of_published_models(model: str, arch: str) -> None:
    """No spilled byte, matrix instructions in every product, wide loads in every copy."""
    for report in reports(model, arch):
        assert report.spilled_bytes == 0
        assert report.instructions.spills == 0
        assert report.instructions.matrix > 0
        # Triton before 3.9 says of some instructions for sm_100 not which line they are of.
        attributed = report.instructions.matrix == sum(part.matrix for part in report.tasks.values())
        for task, instructions in report.tasks.items():
            if task in GEMMS and attributed:
                assert instructions.matrix > 0, f"{task} has no matrix instruction"
                assert instructions.tma > 0 or 16 in instructions.copies, f"{task} loads no wide tile"
            else:
                assert instructions.matrix == 0
        if "dispatch" in report.tasks:
            assert 16 in report.tasks["dispatch"].loads
            assert set(report.tasks["dispatch"].stores) == {16}


def ptx(release: Order = Order.RELEASE, acquire: Order = Order.ACQUIRE, scope: Scope = Scope.SYSTEM) -> str:
    return build(handshake(release, acquire, scope).lowered, GpuConfig(), "sm_90").ptx


def test_signals_release_and_waits_acquire() -> None:
    check_orders(ptx)


def test_scopes() -> None:
    check_scopes(ptx)


def test_a_barrier_stands_before_every_release() -> None:
    """All threads' stores come before the one thread that signals."""
    lines = [line.strip() for line in ptx().splitlines()]
    for number, line in enumerate(lines):
        if count(line, "release", "sys"):
            before = next(text for text in reversed(lines[:number]) if text.startswith(("bar.sync", "st.global")))
            assert before.startswith("bar.sync")


def test_asynchronous_copies_are_fenced() -> None:
    """Reads by the tensor memory accelerator come after the wait that guards them, and a release before them."""
    kernel = compile_layer(MODELS["Qwen3-30B-A3B"], "sm_90", Deployment())[0]
    fenced = build(kernel.lowered, kernel.config.gpu, "sm_90").ptx
    plain = build(kernel.lowered, GpuConfig(loads="pointers"), "sm_90").ptx
    assert "cp.async.bulk.tensor" in fenced
    assert fenced.count("fence.proxy.async.global") >= 2
    assert "cp.async.bulk.tensor" not in plain
    assert "fence.proxy.async.global" not in plain
