"""`tileweave doctor`: what is installed, which engines can run here and why not, and the knobs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

import tileweave
from tileweave import knobs, native
from tileweave.codegen.gpu.machine import Part, gpu_parts
from tileweave.commands.output import bytes_text, console, facts, machine, write_json
from tileweave.errors import BuildError

_PACKAGES = ("numpy", "scipy", "networkx", "torch", "transformers")
# What the GPU backends need besides a GPU, by the names of `gpu_parts`.
_NEEDS = {"triton": ("triton",), "tilelang": ("tilelang", "nvcc")}
_PROBE = "int tw_probe(void) { return 42; }\n"


@dataclass(frozen=True)
class Engine:
    """One way to run a kernel, whether it works here, and why."""

    name: str
    runs: bool
    why: str


def run_doctor(json_path: Path | None) -> dict[str, Any]:
    """Print the report; the figures."""
    show = console()
    with show.status("look at this machine"):
        compiler = compiler_version()
        parts = gpu_parts()
        engines = find_engines(compiler, parts)
        packages = {name: _version(name) for name in _PACKAGES}
        folder = knobs.cache_dir.get()
        count, size = folder_size(folder)
        about = machine() | {"memory_bytes": memory_bytes()}
    show.print(
        facts(
            [
                ("tileweave", tileweave.__version__),
                ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
                ("processor", f"{about['cpu']}, {about['cores']} cores usable, load {about['load_average_1min']}"),
                ("memory", bytes_text(about["memory_bytes"])),
                ("C compiler", compiler or "none found"),
                *((name, version or "not installed") for name, version in packages.items()),
                ("kernel cache", f"{escape(str(folder))}: {count} files, {bytes_text(size)}"),
            ]
        )
    )
    show.print()
    table = Table("engine", "runs here", "why", box=None, header_style="bold")
    for engine in engines:
        table.add_row(engine.name, "[green]yes[/]" if engine.runs else "[yellow]no[/]", escape(engine.why))
    show.print(table)
    show.print()
    needs = Table("for GPUs", "found", "", box=None, header_style="bold")
    for part in parts:
        needs.add_row(part.name, escape(part.found or "none"), escape("" if part.found else part.missing))
    show.print(needs)
    show.print()
    values = Table("knob", "value", "", "what it does", box=None, header_style="bold")
    for knob in knobs.ALL:
        values.add_row(knob.name, escape(knob_value(knob)), "set" if knob.name in os.environ else "default", knob.doc)
    show.print(values)
    figures = {
        "packages": {"tileweave": tileweave.__version__, "python": platform.python_version(), **packages},
        "compiler": compiler,
        "engines": [asdict(engine) for engine in engines],
        "gpu": {part.name: {"found": part.found, "missing": None if part.found else part.missing} for part in parts},
        "memory_bytes": about["memory_bytes"],
        "cache": {"folder": str(folder), "files": count, "bytes": size},
        "knobs": {knob.name: {"value": knob_value(knob), "set": knob.name in os.environ} for knob in knobs.ALL},
    }
    write_json(json_path, "doctor", figures)
    return figures


def find_engines(compiler: str | None, parts: Sequence[Part]) -> list[Engine]:
    """Every engine; `parts` are what of a machine for GPUs is here."""
    return [_c_engine(compiler), *(_gpu_engine(name, parts) for name in _NEEDS)]


def compiler_version() -> str | None:
    """First line of the compiler's `--version`, None when there is none."""
    words = shlex.split(knobs.cc.get())
    if not words or shutil.which(words[0]) is None:
        return None
    run = subprocess.run([*words, "--version"], capture_output=True, text=True, check=False, timeout=30)
    return run.stdout.splitlines()[0] if run.stdout else words[0]


def _c_engine(compiler: str | None) -> Engine:
    try:
        library = native.load(native.build(_PROBE, "doctor"))
    except BuildError as error:
        return Engine("c (CPU)", False, str(error).splitlines()[0])
    answer = library.tw_probe()
    return Engine("c (CPU)", answer == 42, f"{compiler} builds and loads" if answer == 42 else "built code misbehaves")


def _gpu_engine(name: str, parts: Sequence[Part]) -> Engine:
    """Runs where nothing is missing; else why, by the first thing that is."""
    needed = [part for part in parts if part.name in ("GPU", *_NEEDS[name])]
    lacking = [part.missing for part in needed if part.found is None]
    why = lacking[0] if lacking else ", ".join(f"{part.name} {part.found}" for part in needed)
    return Engine(f"{name} (GPU)", not lacking, why)


def knob_value(knob: knobs.AnyKnob) -> str:
    """Its present value in words."""
    value = knob.get()
    return knob.default_text if value is None else str(value)


def folder_size(folder: Path) -> tuple[int, int]:
    """Files below `folder` and their bytes."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    return len(sizes), sum(sizes)


def memory_bytes() -> int:
    """Main memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
