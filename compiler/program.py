"""A traced kernel: frozen and printable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tileweave.errors import SourceLocation
from tileweave.primitives.expr import Dim, walk
from tileweave.primitives.memory import Memory, Signal, Symmetric, Table, Tensor, Workspace
from tileweave.primitives.ops import Task


@dataclass(frozen=True)
class Program:
    """Memories and tasks of one kernel for one world size, in declaration order."""

    name: str
    world_size: int
    memories: tuple[Memory, ...]
    tasks: tuple[Task, ...]
    location: SourceLocation | None

    @cached_property
    def by_name(self) -> Mapping[str, Memory]:
        """Memories by name."""
        return {m.name: m for m in self.memories}

    @cached_property
    def arguments(self) -> tuple[Tensor | Table, ...]:
        """Tensors and tables that a launch passes, in order."""
        return tuple(m for m in self.memories if isinstance(m, (Tensor, Table)))

    @cached_property
    def symmetric(self) -> tuple[Symmetric, ...]:
        """Symmetric memories."""
        return tuple(m for m in self.memories if isinstance(m, Symmetric))

    @cached_property
    def workspaces(self) -> tuple[Workspace, ...]:
        """Local scratch memories."""
        return tuple(m for m in self.memories if isinstance(m, Workspace))

    @cached_property
    def signals(self) -> tuple[Signal, ...]:
        """Counter arrays."""
        return tuple(m for m in self.memories if isinstance(m, Signal))

    @cached_property
    def dims(self) -> tuple[str, ...]:
        """Dynamic dimensions, in order of first use; each is the size of some argument."""
        names = (e.name for m in self.memories for d in m.dims for e in walk(d) if isinstance(e, Dim))
        return tuple(dict.fromkeys(names))
