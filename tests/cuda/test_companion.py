"""The companion in CUDA C++: run as C++ on a CPU beside the C engine's results, and linked to a cubin by nvcc."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import tileweave as tw
from tests.moe.layers import random_inputs
from tileweave.codegen.cuda.build import INCLUDE_DIR, build_companion
from tileweave.codegen.cuda.companion import emit_companion
from tileweave.codegen.layout import num_elements
from tileweave.codegen.listing import Bound, list_tiles
from tileweave.codegen.lower import Lowered
from tileweave.codegen.nvshmem import nvshmem_file
from tileweave.codegen.report import report_of_cubin
from tileweave.compiler.config import QueueKind
from tileweave.errors import BuildError, CompileError, ConfigError
from tileweave.moe.config import MoEConfig, random_weights
from tileweave.moe.kernels import LayerShape, Tiles, moe_layer
from tileweave.moe.layer import layer_specs
from tileweave.moe.routing import Placement, plan_all
from tileweave.primitives.expr import Expr
from tileweave.primitives.memory import Table

HOST_DIR = Path(__file__).parent / "host"
TOPOLOGY = tw.Topology("two nodes of two", 2, 2)
CAPACITY, EPOCH, FILL = 256, 3, 0xA5
ENTRY = """
extern "C" void run(int64_t rank, int blocks, const int64_t *heap, const int64_t *memory, const int64_t *dims,
                    const int32_t *queue, const int32_t *counts, int32_t *cursor, int64_t *state, int64_t *puts) {
    host_heap = heap, host_rank = rank;
    for (blockIdx.x = 0; (int)blockIdx.x < blocks; blockIdx.x++)
        NAME_companion(memory, dims, heap, queue, counts, cursor, state, (int32_t)rank, CAPACITY, 1000);
    puts[0] = host_puts, puts[1] = host_put_signals;
}
"""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Launch:
    """A layer's kernel, each rank's arguments, and its symmetric memories after a launch of the C engine."""

    kernel: tw.CompiledKernel
    arguments: list[dict[str, Any]]
    symmetric: list[dict[str, Bytes]]


def run_layer(dtype: torch.dtype, queue: QueueKind, copy: int) -> Launch:
    config = MoEConfig(96, 64, 5, 2, dtype=dtype)
    placement = Placement.contiguous(config.num_experts, 4)
    parts = random_inputs(config, 80, unused=0.2).split([30, 0, 40, 10])
    plans = plan_all([part.topk_idx for part in parts], placement)
    shape = LayerShape(placement.max_local, 160, 40, config.activation, config.gated)
    tiles = Tiles(rows=16, columns=32, depth=64, tokens=8, copy=copy)
    run = tw.Config(workers=2, companion_workers=3, queue=queue, tunables={"tiles": tiles, "returns": "push"})
    kernel = tw.compile(moe_layer, *layer_specs(config, placement), shape, world_size=4, topology=TOPOLOGY, config=run)
    arguments = []
    for rank, (part, plan) in enumerate(zip(parts, plans, strict=True)):
        weights = random_weights(config, placement.experts_of(rank), 0)
        given = (part.x, part.topk_weights.nan_to_num(), weights, plan, torch.empty_like(part.x))
        arguments.append(kernel.named(given))

    def launch(group: tw.Group) -> dict[str, Bytes]:
        engine: Any = kernel.load(group)
        engine.launch(kernel.bind(arguments[group.rank]))
        return {m.name: engine.symmetric(m.name).copy() for m in kernel.program.symmetric}

    with tw.VirtualGroup(4) as ranks:
        return Launch(kernel, arguments, ranks.run(launch))


def compile_for_host(lowered: Lowered, folder: Path) -> ctypes.CDLL:
    assert lowered.companion is not None
    entry = ENTRY.replace("NAME", lowered.program.name).replace("CAPACITY", str(CAPACITY))
    source, library = folder / "companion.cpp", folder / "companion.so"
    source.write_text(emit_companion(lowered, lowered.companion) + entry)
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Werror", "-Wno-unused-function", "-shared", "-fPIC"]
    subprocess.run([*command, f"-I{INCLUDE_DIR}", f"-I{HOST_DIR}", str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def counters(lowered: Lowered, segment: Bytes, name: str) -> npt.NDArray[np.int64]:
    """A counter array of a segment, in the set of the launch."""
    start = lowered.segment.offset_bytes[name] + EPOCH % 2 * lowered.segment.counter_set_bytes
    size = 8 * num_elements(lowered.program.by_name[name])
    return segment[start : start + size].view(np.int64)


def memory(lowered: Lowered, segment: Bytes, name: str) -> Bytes:
    start, known = lowered.segment.offset_bytes[name], lowered.program.by_name[name]
    return segment[start : start + num_elements(known) * known.dtype.itemsize_bytes]


def run_companions(launch: Launch, folder: Path) -> tuple[list[Bytes], npt.NDArray[np.int64]]:
    """Segments of all ranks after their companions have run, one after another, and the puts without and with signal.

    The waits find what the megakernel would have done.
    """
    lowered = launch.kernel.lowered
    assert lowered.companion is not None
    library = compile_for_host(lowered, folder)
    segments = [_place(lowered.gpu_bytes) for _ in range(4)]
    for segment, symmetric in zip(segments, launch.symmetric, strict=True):
        memory(lowered, segment, "results")[:] = symmetric["results"]
        for signals in lowered.program.signals:
            counters(lowered, segment, signals.name)[:] = 0
        counters(lowered, segment, "result_tiles")[:] = 1 << 20
        segment[lowered.segment.entered_offset_bytes :][:8].view(np.int64)[:] = 4 * EPOCH
    heap = np.array([segment.ctypes.data for segment in segments])
    puts = np.zeros(2, np.int64)
    for rank in range(4):
        _run_rank(library, launch, rank, heap, puts)
    return segments, puts


def _place(size: int) -> Bytes:
    """Bytes from a multiple of 64 on, as GPU memory is."""
    whole = np.full(size + 64, FILL, np.uint8)
    start = -whole.ctypes.data % 64
    return whole[start : start + size]


def _run_rank(library: ctypes.CDLL, launch: Launch, rank: int, heap: npt.NDArray[np.int64], puts: Any) -> None:
    lowered, given = launch.kernel.lowered, launch.arguments[rank]
    assert lowered.companion is not None
    dims = dict(zip(lowered.program.dims, launch.kernel.bind(given).dims, strict=True))
    tables = {
        name: torch.from_numpy(a) for name, a in given.items() if isinstance(lowered.program.by_name[name], Table)
    }
    listing = list_tiles(lowered, Bound(rank, dims, tables, torch.device("cpu")), CAPACITY)
    queue, counts = listing.entries.numpy(), listing.counts.numpy()
    addresses = np.zeros(len(lowered.program.memories), np.int64)
    for name, array in given.items():
        held = array if isinstance(array, np.ndarray) else None
        addresses[lowered.number_of[name]] = array.data_ptr() if held is None else held.ctypes.data
    cursor, state, sizes = np.zeros_like(counts), np.zeros(8, np.int64), np.array(list(dims.values()))
    state[0] = EPOCH
    pointers = (each.ctypes.data_as(ctypes.c_void_p) for each in
                (heap, addresses, sizes, queue, counts, cursor, state, puts))  # fmt: skip
    library.run(ctypes.c_int64(rank), len(lowered.companion.workers), *pointers)
    assert state.tolist() == [EPOCH, *[0] * 7], "no wait gave up"


def sent(launch: Launch, name: str) -> Iterator[tuple[int, int, slice]]:
    """Source rank, target rank and bytes of each block that a companion's tile writes to memory `name`."""
    queues = launch.kernel.schedule(launch.arguments)
    boxes, known = queues.regions.boxes[name], launch.kernel.program.by_name[name]
    row_bytes = num_elements(known) // int(known.shape[0]) * known.dtype.itemsize_bytes
    for rank, lanes in enumerate(queues.lanes):
        chosen = np.isin(boxes.tile, lanes[-1]) & boxes.is_write
        for owner, low, high in zip(boxes.owner[chosen], boxes.low[chosen], boxes.high[chosen], strict=True):
            yield rank, int(owner), slice(int(low[0]) * row_bytes, int(high[0]) * row_bytes)


@pytest.mark.parametrize(
    ("dtype", "queue", "copy"),
    [(torch.float32, "static", 96), (torch.bfloat16, "dynamic", 32), (torch.bfloat16, "static", 40)],
    ids=str,
)
def test_the_companion_sends_what_the_c_engine_sends(
    dtype: torch.dtype, queue: QueueKind, copy: int, tmp_path: Path
) -> None:
    launch = run_layer(dtype, queue, copy)
    segments, puts = run_companions(launch, tmp_path)
    lowered, blocks = launch.kernel.lowered, 0
    for name in ("received", "returned"):
        untouched = [np.ones(memory(lowered, segment, name).size, bool) for segment in segments]
        for source, target, where in sent(launch, name):
            assert source // 2 != target // 2
            got = memory(lowered, segments[target], name)
            assert np.array_equal(got[where], launch.symmetric[target][name][where])
            untouched[target][where] = False
            blocks += 1
        assert all((memory(lowered, s, name)[u] == FILL).all() for s, u in zip(segments, untouched, strict=True))
    assert blocks > 10
    tiles = sum(len(lanes[-1]) for lanes in launch.kernel.schedule(launch.arguments).lanes)
    assert puts.tolist() == [0, tiles], "one put a tile, with its signal"
    for rank, segment in enumerate(segments):
        returned = sum((where.stop - where.start) for _, target, where in sent(launch, "returned") if target == rank)
        assert counters(lowered, segment, "returned_rows")[0] * 96 * dtype.itemsize == returned


def test_entry_is_told_to_the_ranks_of_other_nodes(tmp_path: Path) -> None:
    launch = run_layer(torch.float32, "static", 96)
    segments, _ = run_companions(launch, tmp_path)
    at = launch.kernel.lowered.segment.entered_offset_bytes
    assert [int(s[at : at + 8].view(np.int64)[0]) for s in segments] == [4 * EPOCH + 2] * 4


@tw.kernel
def forms(x: tw.Tensor, rows: tw.Table, *, how: str = "moves") -> None:
    """Every form of a send that moves rows, or one that does more."""
    box, wide, ready = tw.symmetric("box", (64, 64)), tw.symmetric("wide", (64, 128)), tw.signals("ready", (4,))
    whole = (tw.ds(0, 64), tw.ds(0, 64))

    @tw.task(grid={"peer": tw.world_size()}, role="comm")
    def columns(peer: Expr) -> None:
        tw.put(wide, whole, box, whole, peer)
        tw.signal(ready, 0, 1, peer)

    @tw.task(grid={"peer": tw.world_size()}, role="comm")
    def listed(peer: Expr) -> None:
        tile = tw.load(x, whole)
        if how == "computes":
            tile = tile * 2.0
        if how == "casts":
            tile = tw.cast(tile, tw.bfloat16)
        if how == "late":
            tw.signal(ready, 3)
        tw.scatter(box, (rows.rows(tw.ds(0, 64)), tw.ds(0, 64)), tile, peer)
        tw.signal(ready, 1, 1, peer)

    @tw.task(grid={"peer": tw.world_size()}, role="relay")
    def loop(peer: Expr) -> None:
        tw.wait(ready, 0, 1)
        for step in tw.range(2):
            with tw.when(step.differs(5)):
                tw.remote_store(wide, (tw.ds(0, 64), tw.ds(step * 64, 64)), tw.load(x, whole), peer)
            tw.fence()
            tw.signal(ready, 2, 1, peer)


def compile_forms(how: str, topology: tw.Topology | None = None) -> tw.CompiledKernel:
    nodes = topology or tw.Topology("two nodes", 2, 1)
    config = tw.Config(queue="dynamic", tunables={"how": how})
    return tw.compile(forms, tw.Tensor((64, 64)), tw.Table((64,)), world_size=2, topology=nodes, config=config)


needs_cuda = pytest.mark.skipif(
    shutil.which("nvcc") is None or importlib.util.find_spec("nvidia") is None, reason="no nvcc, or no NVSHMEM"
)


@needs_cuda
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_every_form_links(arch: str) -> None:
    kernel = compile_forms("moves")
    cubin = build_companion(kernel.lowered, arch)
    report = report_of_cubin(cubin, "forms_companion")
    assert report.instructions.matrix == 0
    assert b"nvshmemi_device_state_d" in cubin


@needs_cuda
def test_the_layer_links() -> None:
    cubin = build_companion(run_layer(torch.bfloat16, "static", 32).kernel.lowered, "sm_90")
    assert report_of_cubin(cubin, "moe_layer_companion").registers <= 255


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("computes", "computes what it sends to another node; here a companion only moves rows"),
        ("casts", "computes what it sends to another node; here a companion only moves rows"),
        ("late", "sends more than rows of 'stage_listed_0' to another node; here a companion only moves rows"),
    ],
)
def test_what_a_companion_does_not_do_is_refused(how: str, problem: str) -> None:
    lowered = compile_forms(how).lowered
    assert lowered.companion is not None
    with pytest.raises(CompileError) as caught:
        emit_companion(lowered, lowered.companion)
    assert caught.value.message.startswith(f"task 'listed' {problem}")
    assert caught.value.location is not None


def test_refusals_of_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = r"kernel 'forms' has no companion: nothing leaves a node of topology 'one node'"
    with pytest.raises(ConfigError, match=nowhere):
        build_companion(compile_forms("moves", tw.Topology("one", 1, 2)).lowered, "sm_90")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BuildError, match="nvcc is not on the PATH; install the CUDA toolkit, 13"):
        build_companion(compile_forms("moves").lowered, "sm_90")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match=r"need NVSHMEM's libnvshmem_device\.a; run: pip install"):
        nvshmem_file("libnvshmem_device.a")
