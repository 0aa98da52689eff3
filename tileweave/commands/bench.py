"""`tileweave bench cpu`: this layer, a torch.distributed (gloo) layer and the floor, in one run on the same ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import tileweave as tw
from tileweave.codegen.overlap import DEFINITION, cores_computing, measure_overlap
from tileweave.codegen.trace import TraceEvent, launch_ns, sum_by_task, task_roles
from tileweave.commands.layers import layer_kernel
from tileweave.commands.output import console, machine, write_json
from tileweave.commands.ranks import (
    Ticks,
    Times,
    alternate,
    dtype_of,
    followed,
    gloo,
    median_ms,
    repetitions,
    scratch_folder,
    seconds_of,
)
from tileweave.errors import ConfigError
from tileweave.moe.baselines import GlooMoE
from tileweave.moe.config import MoEConfig
from tileweave.moe.floor import MACHINE_WORK, MachineRates, floor_seconds, machine_work, usable_cores
from tileweave.moe.layer import MoELayer
from tileweave.moe.routing import count_experts, plan_routing
from tileweave.primitives.group import Group

_TIMED_S = 6.0
_MOST_REPEATS = 101
_FIELDS = ("tokens", "hidden", "intermediate", "experts", "topk", "ranks")


@dataclass(frozen=True)
class Shape:
    """One layer and its ranks; `tokens` is a rank's."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    topk: int
    ranks: int

    @staticmethod
    def parse(text: str) -> Shape:
        """A shape from `tokens,hidden,intermediate,experts,topk,ranks`.

        Raises:
            ConfigError: not six positive integers, or more experts a token than experts.
        """
        try:
            values = [int(part) for part in text.split(",")]
        except ValueError:
            values = []
        if len(values) != len(_FIELDS) or min(values) < 1:
            raise ConfigError(f"--shape {text!r}: expected six positive integers {','.join(_FIELDS)}")
        shape = Shape(*values)
        if shape.topk > shape.experts:
            raise ConfigError(f"--shape {text!r}: topk {shape.topk} is more than experts {shape.experts}")
        return shape

    def layer(self, dtype: str) -> MoEConfig:
        """The layer's configuration."""
        return MoEConfig(self.hidden, self.intermediate, self.experts, self.topk, dtype=dtype_of(dtype))

    def routing(self, rank: int) -> npt.NDArray[np.int64]:
        """`[tokens, topk]`, uniform, the experts of a token distinct."""
        scores = np.random.default_rng((1, rank)).random((self.tokens, self.experts))
        return np.argsort(scores, axis=1)[:, : self.topk].astype(np.int64)

    def __str__(self) -> str:
        return ",".join(str(getattr(self, name)) for name in _FIELDS)


SHAPES = (
    Shape(16, 2048, 768, 64, 8, 2),
    Shape(128, 1024, 512, 32, 4, 2),
    Shape(1024, 2048, 768, 64, 8, 2),
    Shape(16, 1024, 512, 32, 4, 4),
    Shape(512, 1024, 512, 32, 4, 4),
)


@dataclass(frozen=True)
class RankRun:
    """What one rank brings home. `difference` and `size` are squared norms of (this layer − gloo) and of gloo.

    `machine` are times of the floor's work, taken turn by turn with the layers on as many ranks as there are cores.
    """

    times: Times
    machine: Times
    events: list[TraceEvent]
    difference: float
    size: float


@dataclass(frozen=True)
class Result:
    """One shape in one dtype; medians of `repeats` in milliseconds."""

    shape: Shape
    dtype: str
    repeats: int
    tileweave_ms: float
    gloo_ms: float
    plan_ms: float
    floor_ms: float
    difference: float
    rates: MachineRates

    @property
    def speedup(self) -> float:
        """How many times as fast as gloo."""
        return self.gloo_ms / self.tileweave_ms

    @property
    def over_floor(self) -> float:
        """Time over the floor's."""
        return self.tileweave_ms / self.floor_ms


def run_bench(
    shapes: Sequence[str], dtypes: Sequence[str], repeats: int, profile: bool, json_path: Path | None
) -> dict[str, Any]:
    """Measure, print the tables; the figures.

    Raises:
        ConfigError: a shape does not parse.
    """
    chosen = [Shape.parse(text) for text in shapes] or list(SHAPES)
    show = console()
    about = machine()
    show.print(
        f"[bold]tileweave bench cpu[/]: {about['cpu']}, {about['cores']} cores, load {about['load_average_1min']}; "
        "one thread a rank, medians, implementations turn by turn\n"
    )
    results: list[Result] = []
    profiles: list[dict[str, Any]] = []
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=show, transient=True
    ) as progress:
        whole = progress.add_task("", total=len(dtypes) * len(chosen))
        for dtype in dtypes:
            for shape in chosen:
                label = f"{shape} {dtype}"
                progress.update(whole, description=f"{label}: start")

                def tell(count: int, label: str = label) -> None:
                    progress.update(whole, description=f"{label}: {f'repetition {count}' if count else 'start'}")

                runs = _run(shape, dtype, repeats, tell)
                results.append(_result(shape, dtype, runs))
                if profile:
                    profiles.append(_profile(results[-1], [e for run in runs for e in run.events]))
                progress.advance(whole)
    for dtype in dtypes:
        _print(show, [r for r in results if r.dtype == dtype], dtype)
    for each in profiles:
        _print_profile(show, each)
    if profiles:
        show.print(
            "[dim]busy, waiting: mean over ranks, then the rank with most. Rates: per second of a busy worker; "
            "weights of an expert with rows counted once. A tile's time includes its thread's turns off the core. "
            f"{DEFINITION.capitalize()}.[/]"
        )
    figures: dict[str, Any] = {
        "results": [
            asdict(r) | {"speedup": r.speedup, "over_floor": r.over_floor} for r in results
        ],
        "geometric_mean_speedup": {d: _geometric_mean([r.speedup for r in results if r.dtype == d]) for d in dtypes},
        "profiles": profiles,
    }  # fmt: skip
    write_json(json_path, "bench cpu", figures)
    return figures


def _run(shape: Shape, dtype: str, repeats: int, tell: Callable[[int], None]) -> list[RankRun]:
    with scratch_folder() as folder:
        ticks = Ticks(folder / "ticks")
        with followed(ticks, tell):
            return tw.spawn(_run_rank, shape.ranks, shape, dtype, repeats, folder / "gloo", ticks)


def _run_rank(group: Group, shape: Shape, dtype: str, repeats: int, store: Path, ticks: Ticks) -> RankRun:
    torch.set_num_threads(1)
    config = shape.layer(dtype)
    layer = MoELayer(config, group, run=tw.Config(workers=1))
    index = shape.routing(group.rank)
    topk_idx = torch.from_numpy(index)
    generator = torch.Generator().manual_seed(group.rank)
    x = torch.randn(shape.tokens, shape.hidden, generator=generator).to(config.dtype)
    topk_weights = torch.rand(topk_idx.shape, generator=generator)
    topk_weights /= topk_weights.sum(dim=1, keepdim=True)
    with gloo(group, store):
        baseline = GlooMoE(config, layer.weights)
        work: dict[str, Callable[[], object]] = {
            "tileweave": lambda: layer(x, topk_idx, topk_weights),
            "gloo": lambda: baseline(x, topk_idx, topk_weights),
        }
        # Ranks beyond the cores wait, so that the cores run at the rate that they share.
        measures = machine_work() if group.rank < usable_cores() else ()
        turns = {name: (lambda: None) for name in MACHINE_WORK} | {w.name: w.run for w in measures}
        ours, theirs = layer(x, topk_idx, topk_weights).double(), baseline(x, topk_idx, topk_weights).double()
        fitting = repetitions(group, list(work.values()), _TIMED_S, _MOST_REPEATS)
        times = alternate(group, work | turns, repeats or fitting, ticks)
        # Part of the layer's time; alone it is too short to disturb anybody.
        times |= alternate(group, {"plan": lambda: plan_routing(index, layer.placement, group)}, 21, ticks)
        _, events = layer.traced(x, topk_idx, topk_weights)
    machine = {name: times.pop(name) for name in MACHINE_WORK}
    return RankRun(times, machine, events, float((ours - theirs).square().sum()), float(theirs.square().sum()))


def _rates(shape: Shape, runs: Sequence[RankRun]) -> MachineRates:
    """Medians of the floor's work over the ranks that did it."""
    busy = [run.machine for run in runs[: usable_cores()]]
    seconds = {name: statistics.median(seconds_of(busy, name)) for name in MACHINE_WORK}
    return MachineRates.of(shape.ranks, seconds, machine_work())


def _result(shape: Shape, dtype: str, runs: Sequence[RankRun]) -> Result:
    times = [run.times for run in runs]
    rates = _rates(shape, runs)
    counts = np.sum([count_experts(shape.routing(rank), shape.experts) for rank in range(shape.ranks)], axis=0)
    floor = floor_seconds(rates, shape.layer(dtype), shape.tokens * shape.ranks, counts.tolist())
    return Result(
        shape=shape,
        dtype=dtype,
        repeats=len(times[0]["tileweave"]),
        tileweave_ms=median_ms(seconds_of(times, "tileweave")),
        gloo_ms=median_ms(seconds_of(times, "gloo")),
        plan_ms=median_ms(seconds_of(times, "plan")),
        floor_ms=floor * 1e3,
        rates=rates,
        difference=math.sqrt(sum(r.difference for r in runs) / max(sum(r.size for r in runs), 1e-300)),
    )  # fmt: skip


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _print(show: Console, results: Sequence[Result], dtype: str) -> None:
    table = Table(title=f"{dtype}, milliseconds", title_justify="left", box=None, header_style="bold")
    table.add_column("shape", no_wrap=True)
    for name in ("tileweave", "gloo", "× gloo", "floor", "× floor", "plan", "differs"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        table.add_row(
            str(r.shape), f"{r.tileweave_ms:.2f}", f"{r.gloo_ms:.2f}", f"[bold]{r.speedup:.2f}[/]", f"{r.floor_ms:.2f}",
            f"{r.over_floor:.2f}", f"{r.plan_ms:.2f}", f"{r.difference:.0e}",
        )  # fmt: skip
    show.print(table)
    mean = _geometric_mean([r.speedup for r in results])
    show.print(f"geometric mean: {mean:.2f} × as fast as gloo")
    if dtype == "bf16":
        show.print("[dim]The floor's products run at the fp32 rate: the rate is not measured in bf16.[/]")
    show.print(
        f"[dim]shape: {','.join(_FIELDS)}; tokens are a rank's. × gloo: gloo's time over this layer's; × floor: this "
        "layer's time over max(FLOPs / GEMM rate, bytes / copy rate); plan: plan_routing alone, which the layer's time "
        "includes; differs: ‖ours − gloo‖ / ‖gloo‖. "
        f"{min(r.repeats for r in results)} to {max(r.repeats for r in results)} repetitions.[/]\n"
    )


# ------------------------------------------------------------------ where the time goes


def _profile(result: Result, events: list[TraceEvent]) -> dict[str, Any]:
    """Per task: tiles, busy and waiting time a rank, and the rates that the busy time reached."""
    shape = result.shape
    config = shape.layer(result.dtype)
    index = [shape.routing(rank) for rank in range(shape.ranks)]
    roles = task_roles(layer_kernel(config, index, tw.Config(workers=1)).program)
    counts = np.sum([count_experts(i, shape.experts) for i in index], axis=0)
    # Weights of one expert that each product reads once, and with which it multiplies each of the expert's rows.
    weights = {
        "gate_up": config.projection_width(shape.intermediate) * shape.hidden,
        "down": shape.hidden * shape.intermediate,
    }
    tasks = []
    for time in sum_by_task(events, roles):
        seconds, elements = max(time.busy_ns, 1) / 1e9, weights.get(time.task)
        tasks.append(
            {
                "task": time.task,
                "role": time.role,
                "tiles": time.tiles,
                "busy_ms": time.busy_ns / 1e6 / shape.ranks,
                "busy_ms_most": time.most_busy_ns / 1e6,
                "waiting_ms": time.waited_ns / 1e6 / shape.ranks,
                "waiting_ms_most": time.most_waited_ns / 1e6,
                "gflops": None if elements is None else 2 * elements * int(counts.sum()) / seconds / 1e9,
                "weight_gbytes": None
                if elements is None
                else elements * int((counts > 0).sum()) * config.dtype.itemsize / seconds / 1e9,
            }
        )
    launch = launch_ns(events) / 1e6
    inside = sum(e.end_ns - e.begin_ns for e in events) / 1e6 / shape.ranks
    return {
        "shape": asdict(shape), "dtype": result.dtype, "tileweave_ms": result.tileweave_ms,
        "plan_ms": result.plan_ms, "traced_launch_ms": launch, "between_tiles_ms": launch - inside, "tasks": tasks,
        "cores_computing": cores_computing(events, roles, usable_cores()),
        "hidden_share": [o.hidden_share for o in measure_overlap(events, roles)], "hidden_definition": DEFINITION,
    }  # fmt: skip


def _print_profile(show: Console, profile: dict[str, Any]) -> None:
    shape = Shape(**profile["shape"])
    table = Table(
        title=f"where the time goes: {shape} {profile['dtype']}, ms a rank, one traced launch",
        title_justify="left", box=None, header_style="bold",
    )  # fmt: skip
    table.add_column("task", no_wrap=True)
    table.add_column("role")
    for name in ("tiles", "busy", "most", "waiting", "most", "GFLOP/s", "weights GB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for t in profile["tasks"]:
        table.add_row(
            t["task"], t["role"], str(t["tiles"]), f"{t['busy_ms']:.2f}", f"{t['busy_ms_most']:.2f}",
            f"{t['waiting_ms']:.2f}", f"{t['waiting_ms_most']:.2f}",
            *("" if t[rate] is None else f"{t[rate]:.1f}" for rate in ("gflops", "weight_gbytes")),
        )  # fmt: skip
    show.print(table)
    outside = profile["tileweave_ms"] - profile["traced_launch_ms"]
    hidden = " ".join(f"{share:.0%}" for share in profile["hidden_share"])
    show.print(
        f"launch {profile['traced_launch_ms']:.2f} ms, of which between tiles {profile['between_tiles_ms']:.2f}; "
        f"median of the timed runs {profile['tileweave_ms']:.2f}, {outside:+.2f} to this launch (routing plan "
        f"{profile['plan_ms']:.2f}, entry, listing of tiles); communication hidden by rank: {hidden}; "
        f"the cores computed {profile['cores_computing']:.0%} of the launch\n"
    )
