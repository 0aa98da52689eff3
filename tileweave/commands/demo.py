"""`tileweave demo`: one MoE layer on real input, with everything that can be said about its run."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.markup import escape

import tileweave as tw
from tileweave.codegen.c.engine import build
from tileweave.codegen.compiled import CompiledKernel
from tileweave.codegen.overlap import DEFINITION, RankOverlap, cores_computing, measure_overlap
from tileweave.codegen.timeline import draw_timeline
from tileweave.codegen.trace import TraceEvent, launch_ns, task_roles, write_perfetto
from tileweave.commands.layers import layer_arguments, layer_kernel
from tileweave.commands.output import bytes_text, console, facts, histogram, skew, write_json
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
from tileweave.errors import ConfigError, TileweaveError
from tileweave.moe.baselines import GlooMoE, reference_moe
from tileweave.moe.config import ExpertWeights, MoEConfig
from tileweave.moe.corpus import byte_embeddings
from tileweave.moe.floor import usable_cores
from tileweave.moe.layer import MoELayer
from tileweave.moe.routing import Placement, count_experts
from tileweave.primitives.group import Group

_TIMED_S = 4.0
_MOST_REPEATS = 21


@dataclass(frozen=True)
class DemoSize:
    """What the demo runs. `tokens` is a rank's; `workers` are a rank's; `repeats` 0 = as many as a few seconds allow.

    Raises:
        ConfigError: a token cannot go to more experts than there are.
    """

    ranks: int = 4
    tokens: int = 512
    hidden: int = 1024
    intermediate: int = 512
    experts: int = 32
    topk: int = 4
    workers: int = 1
    dtype: str = "fp32"
    repeats: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.topk > self.experts:
            raise ConfigError(f"--topk {self.topk} is more than --experts {self.experts}")

    @property
    def layer(self) -> MoEConfig:
        """The layer's configuration."""
        return MoEConfig(self.hidden, self.intermediate, self.experts, self.topk, dtype=dtype_of(self.dtype))

    def tokens_of(self, first: int, count: int) -> torch.Tensor:
        """Embeddings of `count` bytes of the text from byte `first` on."""
        return byte_embeddings(count, self.hidden, self.seed, offset=first).to(dtype_of(self.dtype))


@dataclass(frozen=True)
class Alone:
    """The run on 1 rank with 1 worker, and what belongs to it."""

    x: torch.Tensor
    out: torch.Tensor
    topk_idx: npt.NDArray[np.int64]
    weights: ExpertWeights
    router_weight: torch.Tensor


@dataclass(frozen=True)
class RankRun:
    """What one rank brings home."""

    out: torch.Tensor
    topk_idx: npt.NDArray[np.int64]
    events: list[TraceEvent]
    times: Times
    heap_bytes: int


def run_demo(size: DemoSize, out: Path, json_path: Path | None) -> dict[str, Any]:
    """Run it, print the report, write the files; the figures.

    Raises:
        ConfigError: the sizes do not fit each other.
        TileweaveError: a folder cannot be written, or the run failed.
    """
    show = console()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TileweaveError(f"cannot make the folder {out}: {error.strerror}; give --out a folder you own") from None
    config, step = size.layer, _steps(show)
    text = f"{size.ranks} × {size.tokens} bytes of Python's standard library"
    show.print(
        f"[bold]tileweave demo[/]: {text}, hidden {size.hidden}, intermediate {size.intermediate}, {size.experts} "
        f"experts, top-{size.topk}, {size.dtype}; {size.ranks} ranks with {size.workers} worker(s) each "
        f"on {usable_cores()} cores\n"
    )
    with step("run on 1 rank with 1 worker, the bits to compare with"), tw.VirtualGroup(1) as one:
        alone = one.run(_run_alone, size)[0]
    index = list(alone.topk_idx.reshape(size.ranks, size.tokens, size.topk))
    with step("compile the layer for all ranks"):
        kernel, compile_s, cold = _compile(config, index, tw.Config(workers=size.workers))
    with step("derive and check the tile graph"):
        begin = time.perf_counter()
        analysis = kernel.analyse(layer_arguments(kernel, index, size.experts))
        analyse_s = time.perf_counter() - begin
    with scratch_folder() as folder:
        ticks = Ticks(folder / "ticks")
        with step(f"run on {size.ranks} ranks, turn by turn with torch.distributed (gloo)") as status:
            label = f"run on {size.ranks} ranks, turn by turn with torch.distributed (gloo): repetition"
            with followed(ticks, lambda count: status.update(f"{label} {count}") if count else None):
                ranks = tw.spawn(_run_rank, size.ranks, size, folder / "gloo", ticks)
    with step("compare with fp64"):
        difference, moved = _error_fp64(torch.cat([r.out for r in ranks]), alone, config)
    roles = task_roles(kernel.program)
    events = [event for rank in ranks for event in rank.events]
    trace, picture = out / "demo_trace.json", out / "demo_timeline.png"
    with step("write the trace and the timeline"):
        write_perfetto(events, trace, roles)
        draw_timeline(events, roles, picture, f"{kernel.program.name}: {text}, top-{size.topk} of {size.experts}")

    counts = count_experts(alone.topk_idx, size.experts)
    per_rank = Placement.contiguous(size.experts, size.ranks).by_place(counts.astype(np.int64)).sum(axis=1)
    tileweave_ms = median_ms(seconds_of([r.times for r in ranks], "tileweave"))
    gloo_ms = median_ms(seconds_of([r.times for r in ranks], "gloo"))
    overlap = measure_overlap(events, roles)
    equal = torch.equal(torch.cat([r.out for r in ranks]), alone.out) and all(
        np.array_equal(r.topk_idx, i) for r, i in zip(ranks, index, strict=True)
    )
    tiles = [[len(t) for _, t in analysis.queues.workers(rank)] for rank in range(size.ranks)]
    figures: dict[str, Any] = {
        "size": asdict(size),
        "routing": {
            "rows": int(counts.sum()),
            "rows_per_expert": counts.tolist(),
            "rows_per_rank": per_rank.tolist(),
            "expert_skew": skew(counts.tolist()),
            "rank_skew": skew(per_rank.tolist()),
        },
        "memory": {"symmetric_bytes": kernel.symmetric_bytes, "formula": kernel.memory().splitlines(),
                   "heap_bytes": [r.heap_bytes for r in ranks]},
        "compile": {"seconds": compile_s, "cold": cold, "analyse_seconds": analyse_s},
        "graph": {
            "tiles": analysis.regions.num_tiles,
            "segments": analysis.graph.num_segments,
            "hubs": analysis.graph.num_hubs,
            "edges": len(analysis.graph.edges.source),
        },
        "schedule": {"order": kernel.plan.order, "queue": kernel.plan.queue, "tiles_per_worker": tiles},
        "time": {
            "repeats": len(ranks[0].times["tileweave"]),
            "tileweave_ms": tileweave_ms,
            "gloo_ms": gloo_ms,
            "speedup": gloo_ms / tileweave_ms,
            "traced_launch_ms": launch_ns(events) / 1e6,
        },
        "overlap": {"definition": DEFINITION, "hidden_share": _hidden_share(overlap),
                    "cores_computing": cores_computing(events, roles, usable_cores()),
                    "ranks": [asdict(o) | {"hidden_share": o.hidden_share} for o in overlap]},
        "values": {"error_fp64": difference, "tokens_routed_otherwise_in_fp64": moved, "bit_equal_to_one_rank": equal},
        "files": {"trace": str(trace), "timeline": str(picture)},
    }  # fmt: skip
    _print(show, size, figures, overlap)
    write_json(json_path, "demo", figures)
    return figures


def _steps(show: Console) -> Callable[[str], AbstractContextManager[Any]]:
    return lambda text: show.status(text, spinner="dots")


# ------------------------------------------------------------------ on ranks


def _run_alone(group: Group, size: DemoSize) -> Alone:
    layer = MoELayer(size.layer, group, run=tw.Config(workers=1), seed=size.seed)
    assert layer.router is not None
    x = size.tokens_of(0, size.ranks * size.tokens)
    topk_idx, _ = layer.router(x)
    return Alone(x, layer(x), topk_idx.numpy(), layer.weights, layer.router.weight.detach())


def _run_rank(group: Group, size: DemoSize, store: Path, ticks: Ticks) -> RankRun:
    torch.set_num_threads(1)
    layer = MoELayer(size.layer, group, run=tw.Config(workers=size.workers), seed=size.seed)
    router = layer.router
    assert router is not None
    x = size.tokens_of(group.rank * size.tokens, size.tokens)
    weight = router.weight.detach().t()
    with gloo(group, store):
        baseline = GlooMoE(size.layer, layer.weights)

        def forward_gloo() -> torch.Tensor:
            scores = torch.softmax((x @ weight).float(), dim=-1)
            values, index = torch.topk(scores, size.topk, dim=-1)
            return baseline(x, index, values / values.sum(dim=-1, keepdim=True))

        work: dict[str, Callable[[], object]] = {"tileweave": lambda: layer(x), "gloo": forward_gloo}
        layer(x)
        fitting = repetitions(group, list(work.values()), _TIMED_S, _MOST_REPEATS)
        times = alternate(group, work, size.repeats or fitting, ticks)
        out, events = layer.traced(x)
    return RankRun(out, router(x)[0].numpy(), events, times, group.heap.total_bytes)


# ------------------------------------------------------------------ in the parent


def _compile(
    config: MoEConfig, index: list[npt.NDArray[np.int64]], run: tw.Config
) -> tuple[CompiledKernel, float, bool]:
    """The ranks' kernel, the seconds from nothing to a library, and whether the C compiler had to run."""
    started, begin = time.time(), time.perf_counter()
    kernel = layer_kernel(config, index, run)
    library = build(kernel.lowered)
    return kernel, time.perf_counter() - begin, library.stat().st_mtime >= started - 0.01


@torch.inference_mode()
def _error_fp64(out: torch.Tensor, alone: Alone, config: MoEConfig) -> tuple[float, int]:
    """‖out − reference‖ / ‖reference‖ with router and experts in fp64, and the tokens whose experts differ in fp64.

    The reference weighs the experts that the layer chose, so a tie that rounding broke does not count as error.
    """
    index = torch.from_numpy(alone.topk_idx)
    scores = torch.softmax(alone.x.double() @ alone.router_weight.double().t(), dim=-1)
    chosen = scores.gather(1, index)
    best = scores.topk(config.num_topk, dim=-1).indices
    moved = int((best.sort(dim=-1).values != index.sort(dim=-1).values).any(dim=-1).sum())
    reference = reference_moe(alone.x, index, chosen / chosen.sum(dim=-1, keepdim=True), alone.weights, config)
    difference = torch.linalg.norm(out.double() - reference) / torch.linalg.norm(reference)
    return float(difference), moved


def _hidden_share(overlap: list[RankOverlap]) -> float:
    whole = sum(o.communication_ns for o in overlap)
    return sum(o.hidden_ns for o in overlap) / whole if whole else 1.0


def _print(show: Console, size: DemoSize, figures: dict[str, Any], overlap: list[RankOverlap]) -> None:
    routing, times, values = figures["routing"], figures["time"], figures["values"]
    memory, graph, compiled = figures["memory"], figures["graph"], figures["compile"]
    tiles = [n for rank in figures["schedule"]["tiles_per_worker"] for n in rank]
    equal = "[green]yes, every bit[/]" if values["bit_equal_to_one_rank"] else "[bold red]NO[/]"
    hidden = ", ".join(f"{o.hidden_share:.0%}" for o in overlap)
    rows: list[tuple[str, str]] = []

    def tell(name: str, *parts: str) -> None:
        rows.append((name, "".join(parts)))

    tell("routing", f"{routing['rows']:,} rows; busiest expert {routing['expert_skew']:.2f} × the mean, ",
         f"busiest rank {routing['rank_skew']:.2f} ×")  # fmt: skip
    experts = routing["rows_per_expert"]
    tell("  rows an expert", f"{histogram(experts)}  {min(experts)} to {max(experts)}")
    tell("  rows a rank", f"{histogram(routing['rows_per_rank'])}  {' '.join(map(str, routing['rows_per_rank']))}")
    tell("symmetric memory", f"{bytes_text(memory['symmetric_bytes'])} a rank")
    for line in memory["formula"]:
        tell("", line)
    tell("compile", f"{compiled['seconds']:.2f} s {'cold' if compiled['cold'] else 'from cache'}; ",
         f"graph and checks {compiled['analyse_seconds']:.2f} s")  # fmt: skip
    tell("graph", f"{graph['tiles']:,} tiles, {graph['segments']:,} segments, {graph['hubs']:,} hubs, ",
         f"{graph['edges']:,} edges; all checks passed")  # fmt: skip
    tell("schedule", f"order {figures['schedule']['order']}, {figures['schedule']['queue']} queues, ",
         f"{len(tiles)} workers, {min(tiles)} to {max(tiles)} tiles each")  # fmt: skip
    tell("time", f"[bold]{times['tileweave_ms']:.1f} ms[/], torch.distributed (gloo) {times['gloo_ms']:.1f} ms: ",
         f"[bold]{times['speedup']:.2f} ×[/] as fast; router included, medians of {times['repeats']}")  # fmt: skip
    tell("communication", f"{figures['overlap']['hidden_share']:.0%} hidden (by rank: {hidden}); ",
         f"the cores computed {figures['overlap']['cores_computing']:.0%} of the launch")  # fmt: skip
    tell("", f"[dim]{DEFINITION}[/]")
    if size.ranks * size.workers > usable_cores():
        tell("", f"[dim]{_crowded(size)}[/]")
    tell("error to fp64", f"{values['error_fp64']:.1e} (‖out − ref‖ / ‖ref‖); ",
         f"{values['tokens_routed_otherwise_in_fp64']} tokens that fp64 would route otherwise")  # fmt: skip
    tell("same as 1 rank", f"{equal} (1 rank, 1 worker, same tokens)")
    tell("files", f"{escape(figures['files']['trace'])} (open at ui.perfetto.dev), ",
         escape(figures["files"]["timeline"]))  # fmt: skip
    show.print(facts(rows))


def _crowded(size: DemoSize) -> str:
    return (
        f"{size.ranks * size.workers} workers share {usable_cores()} cores here: a rank that waits gives its core to "
        "another, so a wait costs the job little, and a tile's time includes its thread's turns off the core"
    )
