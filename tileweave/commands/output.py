"""What the commands share: the console, JSON files, errors as one line, and a few words about the machine."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import tileweave
from tileweave.errors import TileweaveError

_WIDTH = 120
_BARS = "▁▂▃▄▅▆▇█"


def console() -> Console:
    """A console on the present standard output; wide enough for the tables where that is no terminal."""
    show = Console(highlight=False)
    return show if show.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=_WIDTH)


@contextmanager
def reported_errors() -> Iterator[None]:
    """End the command with status 1 and the error's text, instead of a traceback, for errors meant for users."""
    try:
        yield
    except TileweaveError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(error))}")
        raise typer.Exit(1) from error


def write_json(path: Path | None, command: str, figures: Mapping[str, Any]) -> None:
    """Write `figures` with what is needed to read them later: command, version, machine."""
    if path is None:
        return
    whole = {"command": command, "version": tileweave.__version__, "machine": machine(), **figures}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(whole, indent=2) + "\n")
    except OSError as error:
        raise TileweaveError(f"cannot write {path}: {error.strerror}; give --json a file in a folder you own") from None


def machine() -> dict[str, Any]:
    """Processor, cores and load, which decide what a timing means."""
    from tileweave.moe.floor import usable_cores

    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def cpu_name() -> str:
    """The processor's name where the system tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def facts(rows: Sequence[tuple[str, str]]) -> Table:
    """A table of names and values without lines."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def histogram(counts: Sequence[int]) -> str:
    """A bar a count, as high as the count is against the largest."""
    most = max(counts, default=0) or 1
    return "".join(_BARS[min(len(_BARS) - 1, count * len(_BARS) // most)] if count else " " for count in counts)


def skew(counts: Sequence[int]) -> float:
    """The largest count over the mean; 1 is balanced."""
    mean = statistics.fmean(counts) if counts else 0.0
    return max(counts) / mean if mean else 1.0


def bytes_text(count: int) -> str:
    """A byte count with a unit."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:,.0f} {unit}" if unit == "bytes" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} GiB"
