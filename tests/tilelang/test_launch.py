"""TileLang kernels on a GPU, as far as a CPU can tell: what a launch passes is what the kernel takes."""

from __future__ import annotations

import shutil

import pytest
import torch

pytest.importorskip("tilelang")

import tileweave as tw
from tests.handshake import handshake
from tileweave.codegen.gpu.queued import Arguments, Dims, QueuedKernel, Queues, Ranks
from tileweave.codegen.tilelang.emit import DEFAULT_GPU
from tileweave.codegen.tilelang.launch import TileLangKernel, parameters_of_rank
from tileweave.errors import DeviceError


class OnCpu(QueuedKernel):
    """Lists a launch's tiles, and keeps what its rank would be given."""

    def launch(self, arguments: Arguments, dims: Dims, timeout_s: float) -> None:
        self.queues: Queues = self._next_queues(arguments, dims)
        self.given = [parameters_of_rank(self, place, each, self.queues) for place, each in enumerate(arguments)]


def listed(kernel: tw.CompiledKernel, *arguments: dict[str, torch.Tensor]) -> OnCpu:
    lowered, count = kernel.lowered, len(arguments)
    parts = [torch.zeros(lowered.gpu_bytes, dtype=torch.uint8) for _ in range(count)]
    found = OnCpu(lowered, Ranks(0, count, [part.data_ptr() for part in parts], torch.device("cpu"), parts))
    dims = [dict(zip(kernel.program.dims, kernel.bind(given).dims, strict=True)) for given in arguments]
    found.launch(list(arguments), dims, 1.0)
    return found


def test_parameters_are_views_of_the_memory_of_the_rank() -> None:
    kernel = handshake()
    arguments = [{"x": torch.ones(64), "out": torch.zeros(64)} for _ in range(2)]
    found = listed(kernel, *arguments)
    for rank, given in enumerate(found.given):
        assert given["x"] is arguments[rank]["x"]
        assert given["rank"] == rank
        assert given["box"].shape == (64,)
        assert given["box"].data_ptr() == found.heap[rank] + kernel.lowered.segment.offset_bytes["box"]
        assert given["queue"].shape[1:] == (found.queues.capacity, 5)
        assert given["state"].tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
        given["box"][0] = 5.0
        assert found.ranks.parts[rank].view(torch.float32)[given["box"].storage_offset()] == 5.0


def test_empty_arguments_have_a_row() -> None:
    @tw.kernel
    def double(x: tw.Tensor, y: tw.Tensor) -> None:
        @tw.task(grid={"row": x.shape[0]})
        def each(row: tw.Expr) -> None:
            tw.store(y, (row, tw.ds(0, 4)), tw.load(x, (row, tw.ds(0, 4))) * 2.0)

    kernel = tw.compile(double, tw.Tensor(("rows", 4)), tw.Tensor(("rows", 4)))
    found = listed(kernel, {"x": torch.ones(0, 4), "y": torch.ones(0, 4)})
    assert found.given[0]["x"].tolist() == [[0.0] * 4]
    assert found.queues.counts.tolist() == [[0]]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_the_loaded_function_takes_them() -> None:
    """The names agree, and the text is the one whose machine code is reported; other kernels' text is left alone."""
    import tilelang
    import tilelang.language as T  # noqa: N812

    from tileweave.codegen.tilelang.build import build_for_gpu, load_for_gpu

    kernel = handshake()
    function, names = load_for_gpu(kernel.lowered, DEFAULT_GPU)
    found = listed(kernel, *[{"x": torch.ones(64), "out": torch.zeros(64)} for _ in range(2)])
    assert set(names) == {*found.given[0], "limit"}
    source = function.get_kernel_source()  # type: ignore[attr-defined]
    assert source == build_for_gpu(kernel.lowered, DEFAULT_GPU, "sm_90").cuda
    assert "__restrict__" not in source

    @T.prim_func
    def foreign(x: T.Tensor((128,), "float32")):  # type: ignore[no-untyped-def, valid-type]  # noqa: ANN202
        with T.Kernel(1, threads=128) as _:
            x[T.get_thread_binding()] = 1.0

    with tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}) as target:
        assert "__restrict__" in tilelang.lower(foreign, target=target).kernel_source


def test_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    kernel = handshake()
    with pytest.raises(DeviceError, match="GPU"):
        TileLangKernel(kernel.lowered, Ranks(0, 1, [0, 0], torch.device("cuda", 0)), DEFAULT_GPU)
