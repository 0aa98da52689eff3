"""The choices that change how a kernel runs, but never what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from tileweave.errors import ConfigError

QueueKind = Literal["static", "dynamic"]
MAX_WORKERS = 1024  # programs of one launch on the largest devices; an engine may allow fewer
MAX_STAGES = 8
MAX_REGISTERS = 255


class Tunables(dict[str, Any]):
    """Values of a kernel's keyword-only parameters; hashable, and not to be changed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items(), key=lambda item: item[0])))

    def __setitem__(self, key: str, value: object) -> None:
        raise TypeError("tunables of a Config do not change; make a new Config")

    def __reduce__(self) -> tuple[object, ...]:
        return Tunables, (dict(self),)  # a copy is made whole, as its items cannot be set


@dataclass(frozen=True)
class GpuConfig:
    """How GPU backends compile a kernel.

    Args:
        warps: warps of a worker.
        stages: tiles that the main loop of a matrix product holds in flight.
        loads: how main loops bring their tiles: `pointers` (asynchronous copies, cp.async) or
            `tma` (the tensor memory accelerator, sm_90 and later).
        registers: most registers of a thread, None = as the assembler likes. Its choice may spill where
            a limit of 255 does not, and the other way round.

    Raises:
        ConfigError: a value is out of range.
    """

    warps: int = 8
    stages: int = 3
    loads: Literal["pointers", "tma"] = "pointers"
    registers: int | None = None

    def __post_init__(self) -> None:
        if self.warps not in (1, 2, 4, 8, 16):
            raise ConfigError(f"GpuConfig.warps={self.warps}: expected 1, 2, 4, 8 or 16")
        for name, value in (("stages", self.stages), ("registers", self.registers)):
            if not isinstance(value, (int, np.integer)) and not (name == "registers" and value is None):
                raise ConfigError(f"GpuConfig.{name}={value!r}: expected a whole number")
        if not 1 <= self.stages <= MAX_STAGES:
            raise ConfigError(f"GpuConfig.stages={self.stages}: expected 1 to {MAX_STAGES}")
        if self.registers is not None and not 32 <= self.registers <= MAX_REGISTERS:
            raise ConfigError(f"GpuConfig.registers={self.registers}: expected 32 to {MAX_REGISTERS}, or None")
        if self.loads not in ("pointers", "tma"):
            raise ConfigError(f"GpuConfig.loads={self.loads!r}: expected 'pointers' or 'tma'")


@dataclass(frozen=True)
class Config:
    """One point of the design space.

    Args:
        workers: workers (threads, SMs) a rank.
        comm_workers: how many of them run only `comm` and `relay` tasks; 0 = all run everything.
        companion_workers: further workers a rank for sends to other nodes, where there are any.
        order: name of an order of `compiler/order.py`.
        queue: `static` deals tiles to workers before the launch, `dynamic` lets workers take
            the next tile from one atomic counter a lane.
        gpu: how GPU backends compile.
        tunables: values for keyword-only parameters of the kernel.

    Raises:
        ConfigError: a value is out of range.
    """

    workers: int = 1
    comm_workers: int = 0
    companion_workers: int = 4
    order: str = "sends_first"
    queue: QueueKind = "static"
    gpu: GpuConfig = GpuConfig()
    tunables: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("workers", "comm_workers", "companion_workers"):
            value = getattr(self, name)
            if not isinstance(value, (int, np.integer)):
                raise ConfigError(f"Config.{name}={value!r}: expected a whole number")
        if not isinstance(self.tunables, Mapping):
            raise ConfigError(f"Config.tunables={self.tunables!r}: expected a mapping of names to values")
        if not 1 <= self.workers <= MAX_WORKERS:
            raise ConfigError(f"Config.workers={self.workers}: expected 1 to {MAX_WORKERS}")
        if not 0 <= self.comm_workers < self.workers:
            raise ConfigError(
                f"Config.comm_workers={self.comm_workers} of workers={self.workers}: expected 0 to "
                f"{self.workers - 1}, so that at least one worker computes"
            )
        if not 1 <= self.companion_workers <= MAX_WORKERS:
            raise ConfigError(f"Config.companion_workers={self.companion_workers}: expected 1 to {MAX_WORKERS}")
        if self.queue not in ("static", "dynamic"):
            raise ConfigError(f"Config.queue={self.queue!r}: expected 'static' or 'dynamic'")
        object.__setattr__(self, "tunables", Tunables(self.tunables))
