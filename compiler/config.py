"""The choices that change how a kernel runs, but never what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tileweave.errors import ConfigError

QueueKind = Literal["static", "dynamic"]
MAX_WORKERS = 64


class Tunables(dict[str, Any]):
    """Values of a kernel's keyword-only parameters; hashable, and not to be changed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items(), key=lambda item: item[0])))

    def __setitem__(self, key: str, value: object) -> None:
        raise TypeError("tunables of a Config do not change; make a new Config")


@dataclass(frozen=True)
class Config:
    """One point of the design space.

    Args:
        workers: workers (threads, SMs) a rank.
        comm_workers: how many of them run only `comm` and `relay` tasks; 0 = all run everything.
        order: name of an order of `compiler/order.py`.
        queue: `static` deals tiles to workers before the launch, `dynamic` lets workers take
            the next tile from one atomic counter a lane.
        tunables: values for keyword-only parameters of the kernel.

    Raises:
        ConfigError: a value is out of range.
    """

    workers: int = 1
    comm_workers: int = 0
    order: str = "sends_first"
    queue: QueueKind = "static"
    tunables: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MAX_WORKERS:
            raise ConfigError(f"Config.workers={self.workers}: expected 1 to {MAX_WORKERS}")
        if not 0 <= self.comm_workers < self.workers:
            raise ConfigError(
                f"Config.comm_workers={self.comm_workers} of workers={self.workers}: expected 0 to "
                f"{self.workers - 1}, so that at least one worker computes"
            )
        if self.queue not in ("static", "dynamic"):
            raise ConfigError(f"Config.queue={self.queue!r}: expected 'static' or 'dynamic'")
        object.__setattr__(self, "tunables", Tunables(self.tunables))
