"""Kernels and layers on the GPU of this machine: right values, capture in a CUDA graph, and times.

    python benchmarks/gpu_check.py [--model NAME]... [--through BACKEND]... [--ranks 1]... [--tokens 4096]
                                   [--json FILE] [--write-docs]

Ranks are virtual ones on one GPU. Values are those of the C engine on the CPU, or of an fp64 layer, within rounding.
Times are medians of runs that alternate with plain torch, in the same process. `--write-docs` puts them into
docs/gpu.md. Without a GPU it says so and exits with 2; with a wrong value, with 1.
"""

from __future__ import annotations

import argparse
import copy
import datetime as dt
import itertools
import json
import runpy
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

import tileweave as tw
from tileweave.codegen.gpu.machine import Seen, gpu_problem, require_gpu, versions
from tileweave.codegen.triton.build import build
from tileweave.errors import BuildError
from tileweave.moe.baselines import grouped_moe, reference_moe
from tileweave.moe.cases import cases as moe_cases
from tileweave.moe.cases import routed_case
from tileweave.moe.config import ExpertWeights, MoEConfig, local_experts
from tileweave.moe.gpu_layer import GpuMoELayer
from tileweave.moe.models import MODELS, model

ROOT = Path(__file__).resolve().parents[1]
HEADING = "## Measured on a GPU"
# Largest error beside the largest value: sums in another order in fp32, and roundings of three stages in bf16.
BOUNDS = {torch.float32: 5e-6, torch.bfloat16: 1e-2}
WORLD_SIZES = (1, 2, 4)
DEVICE = "cuda:0"
SMALL = MoEConfig(hidden=512, intermediate=256, num_experts=16, num_topk=4, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Check:
    """One comparison: largest error, as a share of the largest value, and what it may be."""

    what: str
    world_size: int
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """False for NaN too."""
        return self.error <= self.bound


@dataclass(frozen=True)
class Setup:
    """Virtual ranks on a device, and the backend of their layer; `run` as for `GpuMoELayer`."""

    ranks: int
    device: str = DEVICE
    backend: Literal["triton", "tilelang"] = "triton"
    run: tw.Config | None = None


@dataclass(frozen=True)
class Times:
    """Median milliseconds of a forward of one model's layer; graph: replayed from a CUDA graph, None if torch's
    implementation cannot be captured."""

    model: str
    backend: str
    ranks: int
    tokens: int
    routing: str
    tileweave_ms: float
    torch_ms: float
    tileweave_graph_ms: float
    torch_graph_ms: float | None

    @property
    def speedup(self) -> float:
        """Torch's time over Tileweave's, the better of eager and graph for each."""
        theirs = self.torch_ms if self.torch_graph_ms is None else min(self.torch_ms, self.torch_graph_ms)
        return theirs / min(self.tileweave_ms, self.tileweave_graph_ms)


@dataclass(frozen=True)
class Results:
    """All of one run, and where it was."""

    date: str
    gpu: str
    versions: dict[str, str | None]
    repeats: int
    checks: list[Check]
    times: list[Times]


def error_of(want: torch.Tensor, got: torch.Tensor) -> float:
    """Largest difference as a share of the largest wanted value; NaN where there is one."""
    if not want.numel():
        return 0.0
    wanted = want.double().cpu()
    difference = (got.double().cpu() - wanted).abs().max()
    return float(difference / wanted.abs().max().clamp(min=1e-30))


# ---------------------------------------------------------------------- values


def every_case(world_size: int) -> Iterator[tw.Case]:
    """The kernels of `moe/` on uneven, skewed and empty routings, and those of the examples."""
    yield from moe_cases(world_size)
    yield routed_case([np.full((5, 2), 0) for _ in range(world_size)])
    yield routed_case([np.full((3, 2), -1)] * (world_size - 1) + [np.zeros((0, 2), np.int64)])
    for path in sorted((ROOT / "examples").glob("[0-9][0-9]_*.py")):
        found = runpy.run_path(str(path))["cases"](world_size)
        yield from (case for case in found if case.world_size == world_size)


def arguments_of(case: tw.Case, compiled: tw.CompiledKernel, rank: int) -> dict[str, torch.Tensor]:
    """Arguments of one rank by name; where a case gives a shape alone, random numbers."""
    random = np.random.default_rng(rank)
    made = {}
    for memory in compiled.program.arguments:
        array = case.arguments[rank][memory.name]
        if isinstance(array, tuple):
            array = random.standard_normal(array).astype(np.float32)
        tensor = torch.from_numpy(np.array(array))
        made[memory.name] = tensor.to(torch.bfloat16) if memory.dtype.name == "bfloat16" else tensor
    return made


def run_on_cpu(case: tw.Case, arguments: Sequence[dict[str, torch.Tensor]], launches: int) -> None:
    """On the C engine, in place."""
    compiled = case.compile()

    def rank_main(group: tw.Group) -> None:
        for _ in range(launches):
            compiled.load(group).launch(compiled.bind(arguments[group.rank]))

    with tw.VirtualGroup(case.world_size) as ranks:
        ranks.run(rank_main)


def compare_kernel(case: tw.Case, device: str, config: tw.Config, launches: int = 2) -> list[Check]:
    """Virtual ranks on `device` against the C engine; the second launch meets the buffers of the first."""
    compiled = tw.compile(case.kernel, *case.specs, world_size=case.world_size, backend="triton", config=config)
    want = [arguments_of(case, compiled, rank) for rank in range(case.world_size)]
    got = [{name: tensor.to(device, copy=True) for name, tensor in each.items()} for each in want]
    untouched = copy.deepcopy(want)
    run_on_cpu(case, want, launches)
    heap = tw.gpu.LocalHeap(case.world_size, device)
    kernel = tw.gpu.load(compiled, heap)
    for _ in range(launches):
        kernel.launch_named(*got)
    kernel.check()
    checks = []
    for name in compiled.program.by_name:
        if name not in want[0]:
            continue
        expected = want if name in compiled.written else untouched
        bound = BOUNDS.get(want[0][name].dtype, 0.0) if name in compiled.written else 0.0
        error = max(error_of(e[name], g[name]) for e, g in zip(expected, got, strict=True))
        checks.append(Check(f"{case.kernel.name}: {name}", case.world_size, error, bound))
    heap.close()
    return checks


def check_values(arch: str) -> Iterator[Check]:
    """Every kernel at every world size on the GPU, with static and dynamic queues by turns."""
    for world_size in WORLD_SIZES:
        for number, case in enumerate(every_case(world_size)):
            config = replace(case.config, workers=2, comm_workers=number % 2, queue=("static", "dynamic")[number % 2])
            yield from compare_kernel(case, DEVICE, fitting(case, config, arch))


def fitting(case: tw.Case, config: tw.Config, arch: str) -> tw.Config:
    """`config` with as many stages as shared memory holds: some examples have the tiles of a CPU.

    Raises:
        BuildError: not even one fits.
    """
    for stages in range(config.gpu.stages, 0, -1):
        chosen = replace(config, gpu=replace(config.gpu, stages=stages))
        compiled = tw.compile(case.kernel, *case.specs, world_size=case.world_size, backend="triton", config=chosen)
        try:
            build(compiled.lowered, chosen.gpu, arch)
        except BuildError:
            if stages == 1:
                raise
        else:
            break
    return chosen


# ---------------------------------------------------------------------- layers


def random_layer(config: MoEConfig, experts: range, device: str) -> ExpertWeights:
    """Weights of some experts, made on the device; their values depend on the experts' numbers."""
    width = config.projection_width(config.intermediate)

    def made(part: int, *shape: int, std: float) -> torch.Tensor:
        values = torch.empty((len(experts), *shape), dtype=config.dtype, device=device)
        for at, expert in enumerate(experts):
            generator = torch.Generator(device).manual_seed(8 * expert + part)
            values[at].normal_(0.0, std, generator=generator)
        return values

    return ExpertWeights(
        gate_up=made(0, width, config.hidden, std=config.hidden**-0.5),
        down=made(1, config.hidden, config.intermediate, std=config.intermediate**-0.5),
        gate_up_bias=made(2, width, std=0.1) if config.bias else None,
        down_bias=made(3, config.hidden, std=0.1) if config.bias else None,
    )


@dataclass(frozen=True)
class Batch:
    """Tokens of every rank and their routing."""

    x: list[torch.Tensor]
    index: list[torch.Tensor]
    scale: list[torch.Tensor]

    def joined(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Those of all ranks together."""
        return torch.cat(self.x), torch.cat(self.index), torch.cat(self.scale)


def random_batch(config: MoEConfig, tokens: Sequence[int], routing: str, device: str, seed: int = 0) -> Batch:
    """`tokens[r]` tokens of rank r. `uniform`: experts are equally likely; `skewed`: expert e as 1 / (e + 1).

    No token names an expert twice.
    """
    generator = torch.Generator(device).manual_seed(seed)
    weights = torch.ones(config.num_experts, device=device)
    if routing == "skewed":
        weights = 1.0 / torch.arange(1, config.num_experts + 1, device=device)
    x, index, scale = [], [], []
    for count in tokens:
        x.append(torch.randn(count, config.hidden, generator=generator, device=device).to(config.dtype))
        chosen = torch.zeros((0, config.num_topk), dtype=torch.int64, device=device)
        if count:
            chosen = torch.multinomial(weights.expand(count, -1), config.num_topk, generator=generator)
        index.append(chosen)
        scale.append(torch.rand(chosen.shape, generator=generator, device=device))
    return Batch(x, index, scale)


def make_layer(config: MoEConfig, tokens: int, setup: Setup) -> GpuMoELayer:
    """A layer for virtual ranks that share `tokens`."""
    ranks = setup.ranks
    experts = [local_experts(config.num_experts, ranks, rank) for rank in range(ranks)]
    weights = [random_layer(config, each, setup.device) for each in experts]
    heap = tw.gpu.LocalHeap(ranks, setup.device)
    most = -(-tokens // ranks)
    return GpuMoELayer(config, heap, weights, num_tokens=most, run=setup.run, backend=setup.backend)


def compare_layer(config: MoEConfig, setup: Setup) -> Check:
    """A small layer with uneven ranks against fp64."""
    ranks, device = setup.ranks, setup.device
    tokens = [48] * (ranks - 1) + [17]
    layer = make_layer(config, 48 * ranks, setup)
    batch = random_batch(config, tokens, "skewed", device)
    got = torch.cat(layer(batch.x, batch.index, batch.scale))
    layer.check()
    want = reference_moe(*batch.joined(), random_layer(config, range(config.num_experts), device), config)
    layer.heap.close()
    return Check(f"GpuMoELayer ({setup.backend}) against fp64", ranks, error_of(want, got), BOUNDS[config.dtype])


# ---------------------------------------------------------------------- on a GPU alone


def capture(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """`call` as a graph, and what it returned; it is run a few times before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def check_capture(config: MoEConfig, setup: Setup) -> Check:
    """A captured layer follows new tokens and a new routing, to the bit."""
    ranks, device = setup.ranks, setup.device
    layer = make_layer(config, 48 * ranks, setup)
    still = random_batch(config, [48] * ranks, "uniform", device)
    graph, outs = capture(lambda: layer(still.x, still.index, still.scale))
    error = 0.0
    for seed in (1, 2, 3):
        batch = random_batch(config, [48] * ranks, "skewed", device, seed)
        for name in ("x", "index", "scale"):
            for held, new in zip(getattr(still, name), getattr(batch, name), strict=True):
                held.copy_(new)
        graph.replay()
        replayed = torch.cat(outs).clone()
        error = max(error, error_of(torch.cat(layer(batch.x, batch.index, batch.scale)), replayed))
    layer.check()
    layer.heap.close()
    return Check(f"GpuMoELayer ({setup.backend}) replayed from a CUDA graph against eager", ranks, error, 0.0)


def median_ms(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median time of each call by CUDA events, taking turns so that a drift of the clocks meets all alike."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(repeats + 3):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            if round_number >= 3:
                found[name].append(begin.elapsed_time(end))
    return {name: statistics.median(times) for name, times in found.items()}


def time_layer(name: str, tokens: int, setup: Setup, routing: str, repeats: int) -> Times:
    """One model's layer on virtual ranks, and plain torch for all of their tokens."""
    config, device, ranks = model(name), setup.device, setup.ranks
    layer = make_layer(config, tokens, setup)
    batch = random_batch(config, [tokens // ranks] * ranks, routing, device)
    joined = batch.joined()
    every = random_layer(config, range(config.num_experts), device)

    def ours() -> Any:
        return layer(batch.x, batch.index, batch.scale)

    def theirs() -> Any:
        return grouped_moe(config, every, *joined)

    calls: dict[str, Callable[[], Any]] = {"ours": ours, "theirs": theirs, "our graph": capture(ours)[0].replay}
    if hasattr(F, "grouped_mm") or hasattr(torch, "_grouped_mm"):
        calls["their graph"] = capture(theirs)[0].replay
    found = median_ms(calls, repeats)
    layer.check()
    layer.heap.close()
    ours_ms, theirs_ms, our_graph_ms = (found[each] for each in ("ours", "theirs", "our graph"))
    return Times(
        name, setup.backend, ranks, tokens, routing, ours_ms, theirs_ms, our_graph_ms, found.get("their graph")
    )


# ---------------------------------------------------------------------- text


def section(results: Results) -> str:
    """The text below the heading of docs/gpu.md."""
    found = {name: version for name, version in results.versions.items() if version is not None}
    worst = {}
    for check in results.checks:
        what = check.what.partition(":")[0]
        worst[what] = max(worst.get(what, 0.0), check.error)
    stack = ", ".join(f"{name} {version}" for name, version in found.items())
    lines = [
        f"`python benchmarks/gpu_check.py --write-docs` on {results.date}, {results.gpu}; {stack}.",
        "",
        "Largest error as a share of the largest value, over ranks, routings and queues:",
        "",
        "| what | error |",
        "| --- | --- |",
        *(f"| {what} | {error:.1e} |" for what, error in worst.items()),
        "",
        f"Forward of one layer in bf16, virtual ranks on one GPU; median of {results.repeats} runs, in ms.",
        "Torch is its grouped product for all tokens at once; the last column is its time over Tileweave's.",
        "",
        "| layer | backend | ranks | tokens | routing | Tileweave | graph | torch | graph | torch / Tileweave |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_row(each) for each in results.times),
    ]
    return "\n".join(lines) + "\n"


def _row(times: Times) -> str:
    graph = "-" if times.torch_graph_ms is None else f"{times.torch_graph_ms:.3f}"
    return (
        f"| {times.model} | {times.backend} | {times.ranks} | {times.tokens:,} | {times.routing} | "
        f"{times.tileweave_ms:.3f} | {times.tileweave_graph_ms:.3f} | {times.torch_ms:.3f} | {graph} | "
        f"{times.speedup:.2f} |"
    )


def with_section(page: str, text: str) -> str:
    """`page` with `text` in place of what stands below the heading.

    Raises:
        ValueError: the page has no such heading, or several.
    """
    if page.count(f"{HEADING}\n") != 1:
        raise ValueError(f"expected one line {HEADING!r}, found {page.count(HEADING)}")
    before, after = page.split(f"{HEADING}\n")
    rest = after.find("\n## ")
    return f"{before}{HEADING}\n\n{text}" + ("" if rest < 0 else after[rest:])


def as_json(results: Results) -> str:
    """All figures."""
    found = asdict(results)
    found["times"] = [asdict(each) | {"torch_over_tileweave": each.speedup} for each in results.times]
    return json.dumps(found, indent=2) + "\n"


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line; models and ranks default to all models on 1 and 8 ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=sorted(MODELS), help="a model; may be given again")
    parser.add_argument("--through", action="append", choices=("triton", "tilelang"), help="a backend; by default both")
    parser.add_argument("--ranks", action="append", type=int, help="virtual ranks; may be given again")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of all ranks together")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write all figures to a file")
    parser.add_argument("--write-docs", action="store_true", help="write the section of docs/gpu.md")
    given = parser.parse_args(words)
    given.model, given.ranks = given.model or list(MODELS), given.ranks or [1, 8]
    given.through = given.through or ["triton", "tilelang"]
    for ranks in given.ranks:
        if ranks < 1 or given.tokens < 1 or given.tokens % ranks or given.repeats < 1:
            parser.error(
                f"tokens={given.tokens}, ranks={ranks}, repeats={given.repeats}: expected whole shares above 0"
            )
    return given


def run_all(given: argparse.Namespace) -> Results:
    """Checks first, then times; figures are printed as they come."""
    gpu, checks = require_gpu(), []
    for check in (
        *check_values(gpu.arch),
        *(compare_layer(SMALL, Setup(ranks, backend=name)) for name in given.through for ranks in WORLD_SIZES),
        *(check_capture(SMALL, Setup(ranks, backend=name)) for name in given.through for ranks in WORLD_SIZES),
    ):
        checks.append(check)
        print(f"{'ok   ' if check.passed else 'WRONG'} {check.what}, {check.world_size} ranks: {check.error:.1e}")
    times = []
    if all(check.passed for check in checks):
        for name, through, ranks in itertools.product(given.model, given.through, given.ranks):
            for routing in ("uniform", "skewed"):
                setup = Setup(ranks, backend=through)
                times.append(time_layer(name, given.tokens, setup, routing, given.repeats))
                print(_row(times[-1]))
                torch.cuda.empty_cache()
    date = dt.datetime.now(dt.timezone.utc).date().isoformat()
    return Results(date, f"{gpu.name} ({gpu.arch}, {gpu.num_sms} SMs)", dict(versions()), given.repeats, checks, times)


def main(words: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 with a wrong value, 2 without a GPU."""
    given = parse(words)
    problem = gpu_problem(Seen.now())
    if problem is not None:
        print(problem, file=sys.stderr)
        return 2
    results = run_all(given)
    if given.json is not None:
        given.json.write_text(as_json(results))
    if not all(check.passed for check in results.checks):
        return 1
    if given.write_docs:
        page = ROOT / "docs" / "gpu.md"
        page.write_text(with_section(page.read_text(), section(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
