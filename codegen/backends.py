"""The backends by name: how each writes a kernel, and how it loads one for a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tileweave.codegen.c.emit import emit_unit
from tileweave.codegen.c.engine import Executable
from tileweave.codegen.launch import Engine
from tileweave.codegen.lower import Lowered
from tileweave.compiler.config import Config
from tileweave.primitives.group import Group


@dataclass(frozen=True)
class Backend:
    """`source` gives a kernel's text; `load` makes it ready on a rank, which is collective."""

    source: Callable[[Lowered, Config], str]
    load: Callable[[Lowered, Config, Group], Engine]


# GPU backends are imported when they are used: `import tileweave` needs neither torch nor Triton.


def _triton_source(lowered: Lowered, config: Config) -> str:
    from tileweave.codegen.triton.emit import emit_module

    return emit_module(lowered, config.gpu)


def _triton_load(lowered: Lowered, config: Config, group: Group) -> Engine:
    from tileweave.codegen.triton.ranks import TritonExecutable

    return TritonExecutable(lowered, config.gpu, group)


def _tilelang_source(lowered: Lowered, config: Config) -> str:
    from tileweave.codegen.tilelang.emit import emit_module
    from tileweave.codegen.tilelang.target import target_of

    return emit_module(lowered, target_of(lowered.program), config.gpu)


def _tilelang_load(lowered: Lowered, _: Config, group: Group) -> Engine:
    from tileweave.codegen.tilelang.engine import TileLangExecutable

    return TileLangExecutable(lowered, group)


BACKENDS: Mapping[str, Backend] = {
    "c": Backend(lambda lowered, _: emit_unit(lowered), lambda lowered, _, group: Executable(lowered, group)),
    "triton": Backend(_triton_source, _triton_load),
    "tilelang": Backend(_tilelang_source, _tilelang_load),
}
