"""`tileweave compile FILE.py:KERNEL`: a kernel's program, tile graph, schedule, source or machine code."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from tileweave.codegen.backends import BACKENDS
from tileweave.codegen.case import Case
from tileweave.codegen.compiled import CompiledKernel
from tileweave.codegen.compiled import compile as compile_kernel
from tileweave.codegen.gpu_text import GPU_TEXTS, Target, binary_text
from tileweave.commands.output import write_json
from tileweave.compiler.config import Config
from tileweave.compiler.passes import Analysis
from tileweave.compiler.printer import print_program, program_key
from tileweave.errors import ArgumentError, TileweaveError

_HINT = "define `def cases(world_size: int) -> list[tw.Case]` in it; see examples/"


@dataclass(frozen=True)
class Overrides:
    """Fields of the case's config that the command line replaces; None keeps the case's."""

    workers: int | None = None
    comm_workers: int | None = None
    order: str | None = None
    queue: str | None = None
    stages: int | None = None

    def apply(self, config: Config) -> Config:
        """`config` with the given fields replaced.

        Raises:
            ConfigError: the result is out of range.
        """
        given = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        stages = given.pop("stages", config.gpu.stages)
        return dataclasses.replace(config, gpu=dataclasses.replace(config.gpu, stages=stages), **given)


@dataclass(frozen=True)
class Request:
    """What to compile and what to show of it: `target` names a kernel, `model` the layer that it is compiled for.

    `through` is the backend whose machine code is shown, None = Triton's.
    """

    target: str
    emit: str
    arch: str = "sm_90"
    through: str | None = None
    world_size: int | None = None
    model: str | None = None


def run_compile(request: Request, changes: Overrides, json_path: Path | None) -> dict[str, Any]:
    """Print what the request asks for; the figures.

    Raises:
        ArgumentError: `target` names no kernel that has a case.
        TileweaveError: the kernel does not compile, or fails a check.
    """
    if request.through is not None and request.emit not in ("ptx", "sass", "report"):
        raise ArgumentError(f"--through is for --emit ptx, sass and report; --emit {request.emit} is of one backend")
    case = find_case(request.target, request.world_size) if request.model is None else None
    kernel = _for_model(request, changes) if case is None else _of_case(case, changes)
    emit = request.emit
    figures: dict[str, Any] = {
        "kernel": kernel.kernel.name,
        "emit": emit,
        "world_size": kernel.program.world_size,
        "config": {name: getattr(kernel.config, name) for name in ("workers", "comm_workers", "order", "queue")},
        "tunables": {name: repr(value) for name, value in kernel.config.tunables.items()},
        "program_key": program_key(kernel.program),
        "symmetric_bytes": kernel.symmetric_bytes,
        "memory": kernel.memory().splitlines(),
    }
    analysis = None
    if emit in ("graph", "schedule"):
        if case is None:
            raise ArgumentError(f"--emit {emit} needs a routing, which --model does not give; leave --model out")
        with Console(stderr=True).status("derive and check the tile graph"):
            analysis = kernel.analyse(list(case.arguments))
        figures["graph"] = _graph_figures(analysis)
    text = _text(kernel, analysis, request)
    sys.stdout.write(text)  # as it is: no wrapping, so that it can be piped into a file
    write_json(json_path, "compile", {**figures, "text": text})
    return figures


def find_case(target: str, world_size: int | None = None) -> Case:
    """The case of `FILE.py:KERNEL` or `MODULE:KERNEL`.

    Raises:
        ArgumentError: with what is missing and what there is.
    """
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise ArgumentError(f"expected FILE.py:KERNEL or MODULE:KERNEL, got {target!r}")
    module = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    every = _cases_of(module, where, world_size)
    for case in every:
        if case.kernel.name == name:
            return case
    names = ", ".join(dict.fromkeys(case.kernel.name for case in every)) or "none"
    raise ArgumentError(f"cases() of {where} has no kernel {name!r}; it has: {names}")


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ArgumentError(f"there is no file {path}")
    # As `python FILE` would: the file's folder comes first for its own imports.
    sys.path.insert(0, str(path.resolve().parent))
    name = f"tileweave_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    _guarded(str(path), lambda: spec.loader.exec_module(module))  # type: ignore[union-attr]
    return module


def _load_module(name: str) -> ModuleType:
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise ArgumentError(f"there is no module {name!r}; a file's name ends in .py")
    module: ModuleType = _guarded(name, lambda: importlib.import_module(name))
    return module


def _guarded(where: str, action: Callable[[], Any]) -> Any:
    """`action()`; errors of the user's code become one that names the line."""
    try:
        return action()
    except TileweaveError:
        raise
    except SyntaxError as error:
        raise ArgumentError(f"cannot import {where}: {error.msg} at {error.filename}:{error.lineno}") from error
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ArgumentError(
            f"{where} failed: {type(error).__name__}: {error} at {last.filename}:{last.lineno}"
        ) from error


def _cases_of(module: ModuleType, where: str, world_size: int | None) -> list[Case]:
    """Cases of a module; those of a module of a package may stand in the package's module `cases`."""
    make = getattr(module, "cases", None)
    package = module.__package__
    if make is None and package and importlib.util.find_spec(f"{package}.cases") is not None:
        make = getattr(importlib.import_module(f"{package}.cases"), "cases", None)
    if not callable(make):
        raise ArgumentError(f"{where} has no function cases(); {_HINT}")
    takes = "world_size" in inspect.signature(make).parameters
    if world_size is not None and not takes:
        raise ArgumentError(f"--world-size is given, but cases() of {where} takes no world_size")
    given = {"world_size": world_size or 2} if takes else {}
    every: list[Case] = _guarded(f"cases() of {where}", lambda: list(make(**given)))
    for case in every:
        if not isinstance(case, Case):
            raise ArgumentError(f"cases() of {where} returned a {type(case).__name__}; expected a list of tw.Case")
        if not case.arguments:
            raise ArgumentError(
                f"the case of kernel '{case.kernel.name}' in {where} has no arguments; expected a mapping per rank"
            )
    return every


def _graph_figures(analysis: Analysis) -> dict[str, Any]:
    graph = analysis.graph
    return {
        "tiles": analysis.regions.num_tiles,
        "segments": graph.num_segments,
        "hubs": graph.num_hubs,
        "edges": len(graph.edges.source),
        "task_edges": [
            {"source": source, "target": target, "kind": kind, "count": count}
            for (source, target, kind), count in graph.task_edges.items()
        ],
    }


def _of_case(case: Case, changes: Overrides) -> CompiledKernel:
    return compile_kernel(
        case.kernel, *case.specs, world_size=case.world_size, config=changes.apply(case.config)
    )  # fmt: skip


def _for_model(request: Request, changes: Overrides) -> CompiledKernel:
    """A kernel of `tileweave.moe` for the layer of a published model, with the tiles of an architecture."""
    from tileweave.moe.gpu import Deployment, compile_layer
    from tileweave.moe.models import model

    kernels = compile_layer(model(request.model or ""), request.arch, Deployment(request.world_size or 8))
    name = request.target.rpartition(":")[2]
    for kernel in kernels:
        if kernel.kernel.name == name:
            config = changes.apply(kernel.config)
            world_size = kernel.program.world_size
            return compile_kernel(kernel.kernel, *kernel.specs, world_size=world_size, backend="triton", config=config)
    names = ", ".join(kernel.kernel.name for kernel in kernels)
    raise ArgumentError(f"--model compiles {names}; got {request.target!r}")


def _text(kernel: CompiledKernel, analysis: Analysis | None, request: Request) -> str:
    emit = request.emit
    if emit == "program":
        return print_program(kernel.program)
    if emit in BACKENDS:
        return kernel.source(emit)
    if emit in GPU_TEXTS:
        target = Target(kernel.lowered, kernel.config.gpu, request.arch)
        return binary_text(emit, target, request.through or "triton")
    assert analysis is not None
    return str(analysis.graph if emit == "graph" else analysis.queues)
