"""`tileweave doctor`: what is installed, which engines can run here and why not, and the knobs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

import tileweave
from tileweave import knobs, native
from tileweave.commands.output import bytes_text, console, facts, machine, write_json
from tileweave.errors import BuildError

_PACKAGES = ("numpy", "scipy", "networkx", "torch", "triton", "tilelang", "nvshmem4py-cu13", "transformers")
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
        engines = find_engines(compiler)
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
    values = Table("knob", "value", "", "what it does", box=None, header_style="bold")
    for knob in knobs.ALL:
        values.add_row(knob.name, escape(str(knob.get())), "set" if knob.name in os.environ else "default", knob.doc)
    show.print(values)
    figures = {
        "packages": {"tileweave": tileweave.__version__, "python": platform.python_version(), **packages},
        "compiler": compiler,
        "engines": [asdict(engine) for engine in engines],
        "memory_bytes": about["memory_bytes"],
        "cache": {"folder": str(folder), "files": count, "bytes": size},
        "knobs": {knob.name: {"value": str(knob.get()), "set": knob.name in os.environ} for knob in knobs.ALL},
    }
    write_json(json_path, "doctor", figures)
    return figures


def find_engines(compiler: str | None) -> list[Engine]:
    """Every engine that there is or will be."""
    return [_c_engine(compiler), *(_gpu_engine(name) for name in ("triton", "tilelang"))]


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


def _gpu_engine(name: str) -> Engine:
    device = gpu_name()
    found = f"GPU: {device}" if device else "no NVIDIA GPU"
    package = "installed" if importlib.util.find_spec(name) is not None else "not installed"
    return Engine(
        f"{name} (GPU)", False, f"arrives with the GPU backends, which this version lacks; {found}; {name} {package}"
    )


def gpu_name() -> str | None:
    """The first NVIDIA GPU that the driver lists."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return run.stdout.splitlines()[0].strip() if run.returncode == 0 and run.stdout.strip() else None


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
