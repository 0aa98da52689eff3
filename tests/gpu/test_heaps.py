"""Symmetric memory for GPU ranks: where it lies, and what its homes refuse."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tileweave as tw
from tileweave.codegen.compiled import aligned_address, check_array
from tileweave.codegen.gpu import heaps
from tileweave.codegen.gpu.heaps import LocalHeap, NvshmemHeap, TorchHeap, check_own_gpus
from tileweave.codegen.gpu.kernel import check_reachable
from tileweave.codegen.gpu.machine import Gpu
from tileweave.errors import ArgumentError, DeviceError, GroupError


def test_virtual_ranks_have_slices_of_one_tensor() -> None:
    heap = LocalHeap(3, "cpu")
    allocation = heap.allocate("box", 5000)
    assert [part.data_ptr() for part in allocation.parts] == list(allocation.addresses)
    assert {b - a for a, b in zip(allocation.addresses, allocation.addresses[1:], strict=False)} == {8192}
    assert all(address % 16 == 0 for address in allocation.addresses)
    allocation.part(1).fill_(7)
    assert [int(part.sum()) for part in allocation.parts] == [0, 7 * 5000, 0]
    assert allocation.peer_address(2) == allocation.addresses[2]
    assert (heap.first, heap.count, heap.world_size, heap.group) == (0, 3, 3, None)
    assert len(heap.allocate("nothing", 0).part(0)) == 0


def test_a_closed_heap_gives_nothing() -> None:
    heap = LocalHeap(1, "cpu")
    heap.close()
    heap.close()
    with pytest.raises(GroupError, match="the symmetric heap is closed; make a new one"):
        heap.allocate("box", 16)
    with pytest.raises(GroupError, match="world_size=0: expected at least 1"):
        LocalHeap(0, "cpu")


def test_ranks_must_ask_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = LocalHeap(2, "cpu")
    monkeypatch.setattr(heap, "_gather", lambda request: [("box", 16), ("box", 32)])
    with pytest.raises(GroupError, match="rank 0 asks for 'box' of 16 bytes while rank 1 asks for 'box' of 32"):
        heap.allocate("box", 16)


def test_memory_that_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError

    heap = LocalHeap(2, "cpu")
    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(GroupError, match=r"'box' needs 3 MiB for each of 2 ranks on cpu, .* use fewer ranks"):
        heap.allocate("box", 3 << 20)


def test_processes_have_a_gpu_each() -> None:
    check_own_gpus(["a", "b"])
    with pytest.raises(DeviceError, match=r"ranks 1 and 2 both use the GPU b; call torch.cuda.set_device"):
        check_own_gpus(["a", "b", "b"])


def test_peers_must_be_mapped() -> None:
    check_reachable([16, 32])
    with pytest.raises(DeviceError, match="the memory of rank 1, 2 is not mapped here, as on another node"):
        check_reachable([16, 0, 0])


def test_a_kernel_fits_its_heap() -> None:
    @tw.kernel
    def double(x: tw.Tensor) -> None:
        @tw.task(grid={})
        def body() -> None:
            tw.store(x, tw.ds(0, 4), tw.load(x, tw.ds(0, 4)) * 2.0)

    with pytest.raises(tw.errors.ConfigError, match="backend='c', which has no launch on a GPU; compile it with"):
        tw.gpu.load(tw.compile(double, tw.Tensor((4,))), LocalHeap(1, "cpu"))
    with pytest.raises(GroupError, match="compiled for world_size=1, but this heap has 2 ranks"):
        tw.gpu.load(tw.compile(double, tw.Tensor((4,)), backend="triton"), LocalHeap(2, "cpu"))


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A job of one process on a GPU that is made up; its memory is the host's."""
    monkeypatch.setattr(heaps, "require_gpu", lambda index=None: Gpu(0, "a GPU", "sm_90", 132, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(uuid="a"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_job_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heaps, "require_gpu", lambda index=None: Gpu(0, "a GPU", "sm_90", 132, 0))
    with pytest.raises(GroupError, match="a torch heap needs the processes of a job; start them with torchrun"):
        TorchHeap()


def test_torch_symmetric_memory(one_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers' addresses follow from where a tensor lies in the block that the peers map."""
    import torch.distributed._symmetric_memory as symmetric

    blocks = []

    def empty(nbytes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        blocks.append(torch.ones(nbytes + 64, dtype=dtype))
        return blocks[-1][64:]

    def rendezvous(part: torch.Tensor, group: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(buffer_ptrs=[blocks[-1].data_ptr()])

    monkeypatch.setattr(symmetric, "empty", empty)
    monkeypatch.setattr(symmetric, "rendezvous", rendezvous)
    heap = TorchHeap()
    allocation = heap.allocate("box", 100)
    assert allocation.addresses == (blocks[0].data_ptr() + 64,)
    assert allocation.part(0).shape == (100,)
    assert not allocation.part(0).any()
    assert (heap.count, heap.device) == (1, torch.device("cuda", 0))

    def refuse(part: torch.Tensor, group: str) -> None:
        raise RuntimeError("no peer access")

    monkeypatch.setattr(symmetric, "rendezvous", refuse)
    with pytest.raises(DeviceError, match="cannot map each other's memory: no peer access; use GPUs that"):
        heap.allocate("box", 100)


def test_nvshmem(one_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that nvshmem4py is given, in order."""
    calls: list[Any] = []
    core, memory, bindings = (types.ModuleType(n) for n in ("nvshmem.core", "nvshmem.core.interop", "nvshmem"))
    core.get_unique_id = lambda: "id"  # type: ignore[attr-defined]
    core.init = lambda **given: calls.append(("init", given["uid"], given["rank"], given["nranks"]))  # type: ignore[attr-defined]
    core.finalize = lambda: calls.append("finalize")  # type: ignore[attr-defined]
    core.interop = memory  # type: ignore[attr-defined]
    memory.torch = types.SimpleNamespace(  # type: ignore[attr-defined]
        bytetensor=lambda shape, dtype: torch.ones(shape, dtype=dtype),
        free_tensor=lambda part: calls.append(("free", len(part))),
    )
    bindings.bindings = types.SimpleNamespace(ptr=lambda address, rank: address + rank)  # type: ignore[attr-defined]
    bindings.core = core  # type: ignore[attr-defined]
    cuda = types.ModuleType("cuda.core")
    cuda.Device = lambda index: types.SimpleNamespace(set_current=lambda: calls.append(("device", index)))  # type: ignore[attr-defined]
    named = {"nvshmem": bindings, "nvshmem.core": core, "nvshmem.core.interop": memory, "cuda.core": cuda}
    for name, module in named.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(heaps, "require_nvshmem", lambda: None)
    heap = NvshmemHeap()
    allocation = heap.allocate("box", 100)
    assert allocation.addresses == (allocation.part(0).data_ptr(),)
    assert not allocation.part(0).any()
    heap.close()
    heap.close()
    assert calls == [("device", 0), ("init", "id", 0, 1), ("free", 100), "finalize"]


def test_arguments_lie_on_the_device_at_multiples_of_16_bytes() -> None:
    memory = tw.Tensor(("n",), name="x")
    with pytest.raises(ArgumentError, match=r"argument 'x' is on device cpu; pass x.to\('cuda:0'\)"):
        check_array(memory, torch.zeros(8), written=False, device="cuda:0")
    check_array(memory, torch.zeros(8), written=False)
    values = torch.zeros(8)
    assert values.data_ptr() % 16 == 0
    assert aligned_address(memory, values[4:], "cuda:0") == values.data_ptr() + 16
    with pytest.raises(ArgumentError, match="argument 'x' begins at an address that is no multiple of 16 bytes; pass"):
        aligned_address(memory, values[1:], "cuda:0")
    assert aligned_address(memory, values[1:], "cpu") == values.data_ptr() + 4
