"""The targets, and the one error of a machine without TileLang."""

from __future__ import annotations

import importlib.util
from typing import Literal, TypeAlias

from tileweave.codegen.missing import MISSING
from tileweave.compiler.program import Program
from tileweave.errors import BuildError
from tileweave.primitives.dtypes import bfloat16

Target: TypeAlias = Literal["c", "cuda"]
"""`c` runs on CPU ranks, in fp32; `cuda` is for sm_90a, in bfloat16."""


def target_of(program: Program) -> Target:
    """The target whose text is shown of a program: `cuda` of one in bfloat16, `c` of any other."""
    return "cuda" if any(memory.dtype == bfloat16 for memory in program.memories) else "c"


def require_tilelang() -> None:
    """Raise unless TileLang can be imported.

    Raises:
        BuildError: it is not installed.
    """
    if importlib.util.find_spec("tilelang") is None:
        raise BuildError(MISSING["tilelang"])
