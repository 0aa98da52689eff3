"""What every engine is given for one launch of one rank, and what it offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tileweave.codegen.trace import TraceEvent
from tileweave.primitives.group import NO_KERNEL, Group, LaunchKey


@dataclass(frozen=True)
class Launch:
    """Arguments by name, their addresses in `Program.arguments` order, and the dynamic dimensions.

    `refusal` is why this rank cannot launch; then no rank does. `key` tells the kernel from others.
    """

    addresses: Sequence[int]
    dims: Sequence[int]
    traced: bool = False
    refusal: str | None = None
    arrays: Mapping[str, Any] = field(default_factory=dict)
    key: LaunchKey = NO_KERNEL


class Engine(Protocol):
    """A kernel loaded for one rank of a group."""

    @property
    def group(self) -> Group: ...

    def launch(self, launch: Launch) -> list[TraceEvent]:
        """Run with all ranks of the group; collective. Returns events if traced."""
        ...
