"""Shipped kernels as machine code through TileLang and nvcc: what the compiler says of them, without a GPU."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("tilelang")
if shutil.which("nvcc") is None:
    pytest.skip("no nvcc", allow_module_level=True)

import tileweave as tw
from tests.handshake import check_orders, check_scopes, handshake
from tileweave.codegen.cuda.build import build_companion
from tileweave.codegen.report import report_of_cubin
from tileweave.codegen.tilelang.build import _refuse_losses, build_for_gpu
from tileweave.codegen.tilelang.emit import DEFAULT_GPU, emit_module
from tileweave.compiler.config import GpuConfig
from tileweave.errors import BuildError, CompileError, ConfigError
from tileweave.moe.gpu import Deployment, compile_layer
from tileweave.moe.models import MODELS
from tileweave.primitives.ops import Order, Scope

GEMMS = {"gate_up", "down"}
# The whole layer holds every task of its halves, which are compiled for one model: nvcc takes ten seconds a kernel.
KERNELS: Mapping[str, int] = {name: 3 if name == "gpt-oss-120b" else 1 for name in MODELS}


@pytest.mark.parametrize("model", MODELS)
def test_layers_of_published_models(model: str) -> None:
    """No spilled byte; wgmma and loads by the tensor memory accelerator in every product; wide loads in every copy."""
    for kernel in compile_layer(MODELS[model], "sm_90", Deployment())[: KERNELS[model]]:
        report = build_for_gpu(kernel.lowered, kernel.config.gpu, "sm_90").report()
        figures = f"{report.registers} registers, {report.spilled_bytes} spilled, {report.shared_bytes} shared bytes"
        print(f"sm_90 {model} {report.name}: {figures}")  # the table, with `pytest -s`
        assert report.spilled_bytes == 0
        assert report.instructions.spills == 0
        assert report.instructions.matrix == sum(part.matrix for part in report.tasks.values())
        for task, instructions in report.tasks.items():
            assert (instructions.matrix > 0) == (task in GEMMS)
            assert (instructions.tma > 0) == (task in GEMMS)
        if "dispatch" in report.tasks:
            assert 16 in report.tasks["dispatch"].loads
            assert 16 in report.tasks["dispatch"].stores


def ptx(release: Order = Order.RELEASE, acquire: Order = Order.ACQUIRE, scope: Scope = Scope.SYSTEM) -> str:
    """The kernel alone: all device functions are inlined into it."""
    return build_for_gpu(handshake(release, acquire, scope).lowered, DEFAULT_GPU, "sm_90").ptx


def test_signals_release_and_waits_acquire() -> None:
    check_orders(ptx)


def test_scopes() -> None:
    check_scopes(ptx)


def test_stores_are_fenced_and_met_before_a_release() -> None:
    """What the tensor memory accelerator of another worker may read passes a fence; then all threads meet."""
    strong = [line.strip() for line in ptx().splitlines()]
    (at,) = [n for n, line in enumerate(strong) if line.startswith("red.release.sys") and ", 1;" not in line]
    before = [line for line in strong[:at] if line.startswith(("st.", "fence.proxy.async", "bar.sync"))]
    assert before[-2:] == ["fence.proxy.async.global;", "bar.sync 14, 256;"]
    assert "fence.proxy.async.global" not in ptx(release=Order.RELAXED)


def test_feeders_fence_between_a_wait_and_what_they_bring() -> None:
    kernel = compile_layer(MODELS["Qwen3-30B-A3B"], "sm_90", Deployment())[0]
    text = build_for_gpu(kernel.lowered, kernel.config.gpu, "sm_90").ptx
    lines = [line.strip() for line in text.splitlines()]
    first = next(n for n, line in enumerate(lines) if line.startswith("cp.async.bulk.tensor"))
    order = [line for line in lines[:first] if line.startswith(("ld.acquire", "bar.sync", "fence.proxy.async.global"))]
    assert order[-1] == "fence.proxy.async.global;"
    assert order[-2] == "bar.sync 15, 128;"
    assert order[-3].startswith("ld.acquire.sys")


@tw.kernel
def product(x: tw.Tensor, y: tw.Tensor, out: tw.Tensor, *, rows: int = 128, form: str = "plain") -> None:
    """`x · yᵀ` in forms that this target takes or refuses."""
    depth = 256

    @tw.task(grid={"m": 2})
    def multiply(m: tw.Expr) -> None:
        total = tw.zeros((rows, 128))
        if form == "in place":
            tw.store(x, (tw.ds(0, rows), tw.ds(0, 64)), tw.load(out, (tw.ds(0, rows), tw.ds(0, 64))))
        for k in tw.range(0, depth, 64):
            stop = depth - 32 if form == "short" else depth
            left = tw.load(x, (tw.ds(m * rows, rows), tw.ds(k, 64, stop=stop)))
            right = tw.load(y, (tw.ds(0, 128), tw.ds(k, 64, stop=stop)))
            if form == "scaled":
                left = tw.cast(left * 2.0, tw.bfloat16)
            tw.dot(left, right.T, total)
        if form == "summed":
            tw.store(out, (tw.ds(m * rows, rows), tw.ds(0, 1)), tw.sum(total, 1))
            return
        tw.store(out, (tw.ds(m * rows, rows), tw.ds(0, 128)), total)


def compile_product(dtype: tw.DType = tw.bfloat16, **tunables: object) -> tw.CompiledKernel:
    specs = (tw.Tensor((256, 256), dtype), tw.Tensor((128, 256), dtype), tw.Tensor((256, 128), dtype))
    return tw.compile(product, *specs, config=tw.Config(tunables=tunables))


@pytest.mark.parametrize("gpu", [GpuConfig(4, 4), GpuConfig(8, 2)], ids=["4 warps", "8 warps"])
def test_one_and_two_warpgroups(gpu: GpuConfig) -> None:
    report = build_for_gpu(compile_product().lowered, gpu, "sm_90").report()
    assert report.spilled_bytes == 0
    assert report.tasks["multiply"].matrix > 0
    assert report.shared_bytes > gpu.stages * 2 * 128 * 64 * 2


@pytest.mark.parametrize(
    ("dtype", "tunables", "problem"),
    [
        (tw.float32, {}, "matrix products take bfloat16, but 'x' is float32; or use the Triton backend"),
        (tw.bfloat16, {"form": "short"}, "the tensor memory accelerator cannot bring this tile of 'x'; or use"),
        (tw.bfloat16, {"form": "in place"}, "'x' is written by this task as well; write it in a task before; or use"),
        (tw.bfloat16, {"form": "scaled"}, "a dot belongs in a loop over K that does nothing but load tiles and multi"),
        (tw.bfloat16, {"form": "summed"}, "sum over an axis is not written for GPUs yet; use the Triton backend"),
        (tw.bfloat16, {"rows": 64}, "a product of 64 rows does not fit 8 warps; use tiles of a multiple of 128 rows"),
    ],
    ids=["fp32", "short", "in place", "scaled", "summed", "rows"],
)
def test_what_the_target_does_not_take(dtype: tw.DType, tunables: dict[str, object], problem: str) -> None:
    with pytest.raises(CompileError) as caught:
        emit_module(compile_product(dtype, **tunables).lowered, "cuda")
    assert caught.value.message.startswith(f"TileLang, target 'cuda', task 'multiply': {problem}")
    assert caught.value.location is not None


def test_refusals_of_the_build() -> None:
    lowered = compile_product().lowered
    with pytest.raises(ConfigError, match=r"arch='sm_100': TileLang code is for sm_90; use the Triton backend"):
        build_for_gpu(lowered, DEFAULT_GPU, "sm_100")
    with pytest.raises(ConfigError, match=r"GpuConfig.warps=16: TileLang, target 'cuda', takes 4 or 8"):
        build_for_gpu(lowered, GpuConfig(warps=16), "sm_90")
    big = r"kernel 'product' needs 263,168 bytes of shared memory, but a worker can have 232,448; use smaller tiles"
    with pytest.raises(BuildError, match=big):
        build_for_gpu(lowered, GpuConfig(stages=8), "sm_90")


@pytest.mark.skipif(importlib.util.find_spec("nvidia") is None, reason="no NVSHMEM")
def test_a_layer_across_two_nodes() -> None:
    """The megakernel knows no network and does not spill; what leaves a node is sent by a companion of nvcc's."""
    group = Deployment(4, topology=tw.Topology("two nodes of two", 2, 2))
    kernel = compile_layer(MODELS["Qwen3-30B-A3B"], "sm_90", group)[0]
    binary = build_for_gpu(kernel.lowered, kernel.config.gpu, "sm_90")
    report = binary.report()
    assert report.spilled_bytes == report.instructions.spills == 0
    assert {task for task, part in report.tasks.items() if part.matrix} == GEMMS
    assert b"nvshmem" not in binary.cubin
    companion = build_companion(kernel.lowered, "sm_90")
    assert b"nvshmemi_device_state_d" in companion
    assert report_of_cubin(companion, "moe_layer_companion").instructions.matrix == 0


def test_what_the_assembler_warns_of_is_refused() -> None:
    line = "ptxas info    : (C7509) Potential Performance Loss: wgmma.mma_async instructions are serialized due to …"
    with pytest.raises(BuildError, match=r"kernel 'k' lost its speed: ptxas info    : \(C7509\)"):
        _refuse_losses("k", f"ptxas info    : Used 168 registers\n{line}\n", Path("k.cu"))
    _refuse_losses("k", "ptxas info    : Used 168 registers\n", Path("k.cu"))
