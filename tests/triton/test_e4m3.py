"""Products of float8_e4m3fn as machine code for sm_90, and what TileLang says of them."""

from __future__ import annotations

import re

import pytest

import tileweave as tw
from tileweave.compiler.config import GpuConfig

pytest.importorskip("triton")

from tileweave.codegen.triton.build import build


@tw.kernel
def product(a: tw.Tensor, b: tw.Tensor, c: tw.Tensor, *, block: int = 128) -> None:
    """c [m, n] = a [m, k] times b [n, k] transposed."""
    (m, k), n = a.shape, b.shape[0]

    @tw.task(grid={"i": tw.ceildiv(m, block), "j": tw.ceildiv(n, block)})
    def gemm(i: tw.Expr, j: tw.Expr) -> None:
        rows, columns = tw.ds(i * block, block, stop=m), tw.ds(j * block, block, stop=n)
        total = tw.zeros((block, block))
        for at in tw.range(0, k, block):
            depth = tw.ds(at, block, stop=k)
            total = tw.dot(tw.load(a, (rows, depth)), tw.load(b, (columns, depth)).T, total)
        tw.store(c, (rows, columns), total)


def compiled(right: tw.DType = tw.float8_e4m3fn, block: int = 128) -> tw.CompiledKernel:
    small = tw.float8_e4m3fn
    specs = tw.Tensor(("m", 7168), small), tw.Tensor((4096, 7168), right), tw.Tensor(("m", 4096), small)
    return tw.compile(product, *specs, config=tw.Config(tunables={"block": block}))


@pytest.mark.parametrize("loads", ["tma", "pointers"])
def test_products_use_the_tensor_cores_and_spill_nothing(loads: str) -> None:
    binary = build(compiled().lowered, GpuConfig(warps=8, stages=3, loads=loads), "sm_90")
    report = binary.report()
    assert report.spilled_bytes == 0
    assert report.instructions.matrix > 0
    assert (report.instructions.tma > 0) == (loads == "tma")
    assert re.search(r"wgmma\.mma_async\S*\.f32\.e4m3\.e4m3", binary.ptx)
    assert "cvt.rn.satfinite.e4m3x2.f32" in binary.ptx


@pytest.mark.parametrize(("right", "block"), [(tw.bfloat16, 64), (tw.float8_e4m3fn, 8)], ids=["bfloat16", "small"])
def test_other_products_compile(right: tw.DType, block: int) -> None:
    """Of two types, and of tiles that are smaller than what a tensor core takes."""
    report = build(compiled(right, block).lowered, GpuConfig(warps=4, stages=2), "sm_90").report()
    assert report.spilled_bytes == 0


@pytest.mark.parametrize("target", ["c", "cuda"])
def test_tilelang_has_no_e4m3(target: str) -> None:
    from tileweave.codegen.tilelang.emit import emit_module

    message = (
        f"TileLang, target '{target}', task 'gemm': it has no float8_e4m3fn; compile the kernel with backend 'triton' "
        "or 'c', or keep these numbers in bfloat16"
    )
    with pytest.raises(tw.errors.CompileError, match=re.escape(message)):
        emit_module(compiled().lowered, target)  # type: ignore[arg-type]
