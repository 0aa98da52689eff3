"""A picture of a traced launch: a lane per worker, a colour per kind of task, waits hatched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tileweave.codegen.overlap import COMMUNICATION_ROLES
from tileweave.codegen.trace import TraceEvent

# Communication is warm and stands out, computation is cool. Chosen to differ in lightness too.
_WARM = ("#d1495b", "#edae49", "#f4845f", "#b5179e")
_COOL = ("#1f5fa8", "#5aa9e6", "#2a9d8f", "#6a4c93", "#8ab17d", "#33658a")
_WAIT, _HATCH = "#e4e4e4", "#9a9a9a"
_LANE = 0.8


def draw_timeline(events: Sequence[TraceEvent], roles: Mapping[str, str], path: Path, title: str = "") -> None:
    """Write a PNG of `events`; time in milliseconds from the first one.

    The waiting part of a tile is drawn at its begin, where nearly all tiles wait.
    """
    # Here, because it takes a second, and ranks that import this module draw nothing.
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    start = min((e.begin_ns for e in events), default=0)
    end_ms = (max((e.end_ns for e in events), default=0) - start) / 1e6
    lanes = sorted({(e.rank, e.worker) for e in events})
    colours = task_colours(roles)
    figure = Figure(figsize=(13, 1.6 + 0.55 * max(len(lanes), 2)), dpi=140, layout="constrained")
    axes = figure.add_subplot()
    for row, lane in enumerate(lanes):
        own = [e for e in events if (e.rank, e.worker) == lane]
        bottom = (row - _LANE / 2, _LANE)
        waits = [((e.begin_ns - start) / 1e6, e.waited_ns / 1e6) for e in own if e.waited_ns]
        axes.broken_barh(waits, bottom, facecolor=_WAIT, edgecolor=_HATCH, hatch="////", linewidth=0)
        for task, colour in colours.items():
            bars = [((e.begin_ns + e.waited_ns - start) / 1e6, e.busy_ns / 1e6) for e in own if e.task == task]
            # Lines between tiles show how many there are, where tiles are wide enough not to drown in them.
            lines = [0.4 if width > end_ms / 400 else 0.0 for _, width in bars]
            axes.broken_barh(bars, bottom, facecolor=colour, edgecolor="white", linewidth=lines)
    axes.set_yticks(range(len(lanes)), [_lane_name(lane, lanes) for lane in lanes])
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(0, end_ms or 1)
    axes.set_xlabel("time, ms")
    if title:
        axes.set_title(title, loc="left", fontsize=11)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    present = {e.task for e in events}
    legend = [Patch(facecolor=c, label=f"{t} ({roles[t]})") for t, c in colours.items() if t in present]
    legend.append(Patch(facecolor=_WAIT, edgecolor=_HATCH, hatch="////", linewidth=0, label="waiting"))
    figure.legend(handles=legend, loc="outside lower center", ncols=min(len(legend), 6), frameon=False)
    figure.savefig(path, metadata={"Software": None})


def task_colours(roles: Mapping[str, str]) -> dict[str, str]:
    """A colour for each task, by role, in the order of `roles`."""
    warm = [task for task, role in roles.items() if role in COMMUNICATION_ROLES]
    cool = [task for task in roles if task not in warm]
    chosen = {task: _WARM[n % len(_WARM)] for n, task in enumerate(warm)}
    chosen |= {task: _COOL[n % len(_COOL)] for n, task in enumerate(cool)}
    return {task: chosen[task] for task in roles}


def _lane_name(lane: tuple[int, int], lanes: Sequence[tuple[int, int]]) -> str:
    rank, worker = lane
    alone = sum(1 for r, _ in lanes if r == rank) == 1
    return f"rank {rank}" if alone else f"rank {rank} worker {worker}"
