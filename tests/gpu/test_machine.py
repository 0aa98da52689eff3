"""What a machine is told that lacks something, and what fits a GPU."""

from __future__ import annotations

import importlib.util
import shutil

import pytest
import torch

import tileweave as tw
from tileweave.codegen.cuda.nvcc import find_tool
from tileweave.codegen.gpu import machine
from tileweave.codegen.gpu.machine import Gpu, Seen, gpu_parts, gpu_problem, require_gpu
from tileweave.codegen.gpu.residency import Occupancy, check_resident, sms_to_use
from tileweave.codegen.tilelang.target import require_tilelang
from tileweave.codegen.triton.source import require_triton
from tileweave.errors import ConfigError, DeviceError, TileweaveError

H200, A100 = ("NVIDIA H200", (9, 0)), ("NVIDIA A100", (8, 0))


@pytest.mark.parametrize(
    ("seen", "index", "text"),
    [
        (
            Seen("2.13.0+cpu", None, []),
            0,
            "a GPU is needed, but torch 2.13.0+cpu is built without CUDA; install a CUDA build of torch on a machine "
            "with an NVIDIA GPU, or run on CPU ranks with backend='c'",
        ),
        (
            Seen("2.13.0", "13.0", []),
            0,
            "a GPU is needed, but torch 2.13.0 sees none; check that nvidia-smi lists one, or run on CPU ranks with "
            "backend='c'",
        ),
        (
            Seen("2.13.0", "13.0", [], visible=""),
            0,
            "a GPU is needed, but torch 2.13.0 sees none with CUDA_VISIBLE_DEVICES=''; check that nvidia-smi lists "
            "one, or run on CPU ranks with backend='c'",
        ),
        (Seen("2.13.0", "13.0", [H200, H200]), 2, "GPU 2 is asked for, but there are 2; use 0 to 1"),
        (
            Seen("2.13.0", "13.0", [A100]),
            0,
            "GPU 0 (NVIDIA A100) is of compute capability 8.0, but kernels are compiled for sm_90 and sm_100; use such "
            "a GPU, or run on CPU ranks with backend='c'",
        ),
        (Seen("2.13.0", "13.0", [A100, H200]), 1, None),
        (Seen("2.13.0", "13.0", [("NVIDIA B300", (10, 3))]), 0, None),
    ],
)
def test_gpus(seen: Seen, index: int, text: str | None) -> None:
    assert gpu_problem(seen, index) == text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_one_refuses_at_once() -> None:
    sentence = gpu_problem(Seen.now())
    assert sentence is not None
    for act in (require_gpu, lambda: tw.gpu.LocalHeap(2), tw.gpu.TorchHeap):
        with pytest.raises(DeviceError) as caught:
            act()
        assert str(caught.value) == sentence


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    hidden = ("triton", "tilelang", "nvshmem.core")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in hidden else find(name))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = {part.name: part for part in gpu_parts()}
    assert {name: part.missing for name, part in found.items() if name != "GPU"} == {
        "triton": "the Triton backend needs Triton 3.6 or later; run: pip install 'triton>=3.6'",
        "tilelang": "the TileLang backend needs TileLang 0.1.15 or later; run: pip install 'tileweave[gpu]'",
        "nvshmem4py": "symmetric memory across nodes needs nvshmem4py; run: pip install 'nvshmem4py-cu13>=0.1.2'",
        "nvcc": "nvcc is not on the PATH; install the CUDA toolkit, 13.0 or later",
    }
    assert all(part.found is None for name, part in found.items() if name != "GPU")
    raising = {
        "triton": require_triton,
        "tilelang": require_tilelang,
        "nvshmem4py": tw.gpu.NvshmemHeap,
        "nvcc": lambda: find_tool("nvcc"),
    }
    for name, act in raising.items():
        with pytest.raises(TileweaveError) as caught:
            act()
        assert str(caught.value) == found[name].missing


@pytest.mark.parametrize(
    ("occupancy", "workers", "ranks", "text"),
    [
        (Occupancy("k", 2, 132), 264, 1, None),
        (Occupancy("k", 1, 132), 33, 4, None),
        (
            Occupancy("k", 1, 132),
            132,
            4,
            "kernel 'k' asks for 528 workers at once (4 ranks x 132), but 132 fit the GPU (1 an SM, 132 SMs), and "
            "workers that are not resident would never answer those that wait for them; set Config(workers=33)",
        ),
        (
            Occupancy("k", 2, 132, most_sms=100),
            101,
            1,
            "kernel 'k' asks for 101 workers at once (1 rank x 101), but 100 fit the GPU (2 an SM, 132 SMs, of which "
            "TILEWEAVE_GPU_SMS=100 may be used), and workers that are not resident would never answer those that wait "
            "for them; set Config(workers=100)",
        ),
        (Occupancy("k", 0, 132), 1, 1, "; use smaller tiles or fewer stages"),
        (Occupancy("k", 1, 4), 1, 8, "; use smaller tiles, or fewer virtual ranks"),
    ],
)
def test_workers_must_be_resident(occupancy: Occupancy, workers: int, ranks: int, text: str | None) -> None:
    if text is None:
        check_resident(occupancy, workers, ranks)
        return
    with pytest.raises(ConfigError) as caught:
        check_resident(occupancy, workers, ranks)
    assert text in str(caught.value)


def test_sms_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sms_to_use(132) == 132
    monkeypatch.setenv("TILEWEAVE_GPU_SMS", "100")
    assert (sms_to_use(132), sms_to_use(64)) == (100, 64)
    monkeypatch.setenv("TILEWEAVE_GPU_SMS", "0")
    with pytest.raises(ConfigError, match="TILEWEAVE_GPU_SMS='0' is not valid: expected a whole number above 0"):
        sms_to_use(132)


def test_the_compiler_says_how_many_workers_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from tests.handshake import handshake
    from tileweave.codegen.triton import engine

    lowered = handshake().lowered
    ranks = engine.Ranks(0, 2, (0, 0), torch.device("cuda", 0))
    gpu = tw.Config().gpu
    monkeypatch.setattr(engine, "require_gpu", lambda index: Gpu(index, "a GPU", "sm_90", 1, 0))
    engine._check_gpu(lowered, ranks, gpu)  # two workers of 8 warps on one SM
    monkeypatch.setenv("TILEWEAVE_GPU_SMS", "1")
    with pytest.raises(ConfigError, match=r"kernel 'exchange' asks for 2 workers at once \(2 ranks x 1\), but 1 fit"):
        engine._check_gpu(lowered, ranks, gpu)


def test_driver_version_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert machine.driver_version() is None
    assert machine.versions()["torch"] == torch.__version__
