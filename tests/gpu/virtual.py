"""Virtual ranks of one device in one launch, in Triton's interpreter with programs that take turns.

Not collected by itself: `test_virtual.py` runs it where TRITON_INTERPRET=1 is set before Triton is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

import tileweave as tw
from benchmarks.gpu_check import Setup, compare_kernel, compare_layer
from tests.gpu.no_host_reads import NoHostReads
from tests.triton.interleaved import interleave
from tileweave.codegen.triton import engine
from tileweave.gpu import GpuKernel, LocalHeap, load
from tileweave.moe import ExpertWeights, GpuMoELayer, random_weights
from tileweave.moe.baselines import reference_moe
from tileweave.moe.cases import CONFIG, layer_case, routed_case
from tileweave.moe.cases import cases as moe_cases
from tileweave.moe.config import MoEConfig, local_experts
from tileweave.moe.kernels import Tiles

NOTHING = routed_case([np.full((3, 2), -1), np.zeros((0, 2), np.int64)])
CASES = [*moe_cases(2), NOTHING, layer_case(3)]


@pytest.fixture(autouse=True)
def _turns() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        interleave(patch)
        yield


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{c.kernel.name}-{c.world_size}" for c in CASES])
def test_values(number: int) -> None:
    """As `benchmarks/gpu_check.py` compares kernels on a GPU."""
    case = CASES[number]
    config = replace(case.config, workers=2, comm_workers=number % 2, queue=("static", "dynamic")[number // 2 % 2])
    checks = compare_kernel(case, "cpu", config)
    assert {check.what.partition(": ")[2] for check in checks} == set(case.arguments[0])
    assert not [check for check in checks if not check.passed]


@pytest.mark.parametrize("ranks", [1, 3])
def test_layers(ranks: int) -> None:
    config = MoEConfig(hidden=64, intermediate=32, num_experts=5, num_topk=3, bias=True, dtype=torch.bfloat16)
    check = compare_layer(config, Setup(ranks, "cpu", run=RUN))
    assert check.passed, check


RUN = tw.Config(workers=2, tunables={"tiles": Tiles(16, 64, 128, 16, 128)})


@pytest.fixture(scope="module")
def weights() -> ExpertWeights:
    return random_weights(CONFIG, range(CONFIG.num_experts), seed=3)


def make_layer(weights: ExpertWeights, capacity: int | None = None) -> GpuMoELayer:
    own = [weights.select(local_experts(CONFIG.num_experts, 2, rank)) for rank in range(2)]
    return GpuMoELayer(CONFIG, LocalHeap(2, "cpu"), own, num_tokens=12, capacity=capacity, run=RUN)


def inputs(tokens: tuple[int, ...], seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    random = torch.Generator().manual_seed(seed)
    shapes = [(count, CONFIG.num_topk) for count in tokens]
    x = [torch.randn(count, CONFIG.hidden, generator=random) for count in tokens]
    index = [torch.randint(-1, CONFIG.num_experts, shape, generator=random) for shape in shapes]
    scale = [
        torch.rand(shape, generator=random).masked_fill(i < 0, torch.nan)
        for i, shape in zip(index, shapes, strict=True)
    ]
    return x, index, scale


def test_the_layer_follows_the_routing_of_each_call(weights: ExpertWeights) -> None:
    layer = make_layer(weights)
    for seed, tokens in enumerate([(12, 5), (0, 7)]):
        x, index, scale = inputs(tokens, seed)
        outs = layer(x, index, scale)
        layer.check()
        for rank in range(2):
            want = reference_moe(x[rank], index[rank], scale[rank].nan_to_num(), weights, CONFIG)
            torch.testing.assert_close(outs[rank].double(), want, atol=2e-5, rtol=0)


def test_what_the_device_finds_is_told_by_check(weights: ExpertWeights) -> None:
    layer = make_layer(weights, capacity=8)
    x, index, scale = inputs((2, 2), 0)
    index[0][0, 0], scale[0][0, 0] = 5, 1.0
    layer(x, index, scale)
    with pytest.raises(tw.errors.ArgumentError, match=r"had 1 entries that are neither -1 \(unused\) nor 0 to 4"):
        layer.check()
    index = [torch.zeros_like(i) for i in index]
    layer(x, index, [torch.ones_like(s) for s in scale])
    layer.check()
    scale[1][1, 1] = torch.inf
    layer(x, index, [s.nan_to_num(1.0, posinf=torch.inf) for s in scale])
    with pytest.raises(tw.errors.ArgumentError, match="had 1 entries that are not finite"):
        layer.check()
    layer(*inputs((12, 12), 1))
    with pytest.raises(tw.errors.ArgumentError, match=r"would have received \d+ rows, but the layer's capacity is 8"):
        layer.check()


class NoKernel:
    """In place of the Triton kernel: takes a launch, and does nothing."""

    launches = 0

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*arguments: object, **options: object) -> None:
            self.launches += 1

        return launch


def test_a_call_reads_nothing_back(weights: ExpertWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan, listing and launch, from the first call on and with new tensors."""
    layer, kernel = make_layer(weights), NoKernel()
    monkeypatch.setattr(layer._kernel._kernel, "_kernel", kernel)
    batches = [inputs((12, 5), seed) for seed in range(2)]
    with NoHostReads() as mode:
        for batch in batches:
            layer(*batch)
    assert kernel.launches == 2
    assert mode.calls > 100


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        torch.nonzero,
        lambda x: torch.tensor([1, 2]),
        lambda x: bool((x > 0).any()),
    ],
)
def test_a_read_would_be_seen(read: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(AssertionError), NoHostReads():
        read(torch.ones(3))


@tw.kernel
def listed(x: tw.Tensor, count: tw.Table) -> None:
    """Twice as many tiles as the table says."""

    @tw.task(grid={"i": 2, "j": lambda i: count[0]})
    def double(i: tw.Expr, j: tw.Expr) -> None:
        at = tw.ds(i * 600 + j, 1)
        tw.store(x, at, tw.load(x, at) * 2.0)


def load_listed(room: int | None = None) -> GpuKernel:
    compiled = tw.compile(listed, tw.Tensor(("n",)), tw.Table((1,)), backend="triton")
    return load(compiled, LocalHeap(1, "cpu"), room)


def launch_listed(kernel: GpuKernel, count: int) -> float:
    x = torch.ones(1200)
    kernel.launch((x, torch.tensor([count], dtype=torch.int32)))
    return float(x.sum()) - 1200


def test_room_is_found_at_the_first_launch_with_a_margin() -> None:
    kernel = load_listed()
    assert launch_listed(kernel, 150) == 300  # more than the first guess
    assert launch_listed(kernel, 300) == 600
    kernel.check()
    assert launch_listed(kernel, 600) == 0  # nothing runs, and check says why
    text = r"rank 0 has 1200 tiles or more in a launch, but its queues have room for 1024; load .* with room=2048 or"
    with pytest.raises(tw.errors.LaunchError, match=text):
        kernel.check()


def test_room_as_given() -> None:
    kernel = load_listed(room=8)
    assert launch_listed(kernel, 4) == 8
    assert launch_listed(kernel, 5) == 0
    with pytest.raises(tw.errors.LaunchError, match="rank 0 has 10 tiles"):
        kernel.check()
    with pytest.raises(tw.errors.ConfigError, match="room=0: expected at least 1 tile"):
        load_listed(room=0)


def test_a_capture_before_the_first_launch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.TritonKernel, "_capturing", lambda self: True)
    with pytest.raises(tw.errors.ConfigError, match="launch it once before, or pass room"):
        launch_listed(load_listed(), 3)
    assert launch_listed(load_listed(room=8), 3) == 6


def test_arguments_are_refused_by_name() -> None:
    kernel = load_listed(room=8)
    count = torch.ones(1, dtype=torch.int32)
    with pytest.raises(tw.errors.ArgumentError, match="runs 1 ranks in this process, but got arguments of 2"):
        kernel.launch((torch.ones(1200), count), (torch.ones(1200), count))
    with pytest.raises(tw.errors.ArgumentError, match="argument 'x' needs dtype float32, got float64"):
        kernel.launch((torch.ones(1200).double(), count))
