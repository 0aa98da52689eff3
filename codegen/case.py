"""A kernel with arguments to look at it with: what `tileweave compile FILE.py:KERNEL` needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tileweave.codegen.compiled import CompiledKernel
from tileweave.codegen.compiled import compile as compile_kernel
from tileweave.compiler.config import Config
from tileweave.compiler.trace import Kernel


@dataclass(frozen=True)
class Case:
    """One kernel, its argument specs, and for each rank the arguments of one launch.

    A kernel file offers cases by `def cases(world_size: int) -> list[tw.Case]`.

    Attributes:
        kernel: a function under `@tw.kernel`.
        specs: as for `tw.compile`.
        arguments: per rank, dotted argument name → array; a tensor may be given by its shape alone.
        config: workers, order, queue and tunables.
    """

    kernel: Kernel
    specs: tuple[object, ...]
    arguments: Sequence[Mapping[str, Any]]
    config: Config = Config()  # noqa: RUF009  (frozen)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.arguments)

    def compile(self) -> CompiledKernel:
        """The compiled kernel."""
        return compile_kernel(self.kernel, *self.specs, world_size=self.world_size, config=self.config)
