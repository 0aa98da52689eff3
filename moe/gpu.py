"""Tile sizes with which the shipped kernels fit a GPU: no spilled register at the layers that `docs/gpu.md` lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tileweave.compiler.config import GpuConfig
from tileweave.errors import ConfigError
from tileweave.moe.kernels import Tiles


@dataclass(frozen=True)
class GpuDefaults:
    """Tile sizes and the way they are compiled."""

    tiles: Tiles
    gpu: GpuConfig


# Gate and up each have `columns`, so the first product holds twice as many accumulators as the second.
DEFAULTS: Mapping[str, GpuDefaults] = {
    "sm_90": GpuDefaults(Tiles(128, 128, 64, 16, 64), GpuConfig(warps=8, stages=4, loads="tma")),
    "sm_100": GpuDefaults(Tiles(128, 64, 64, 16, 64), GpuConfig(warps=8, stages=4, loads="pointers", registers=255)),
}


def gpu_defaults(arch: str) -> GpuDefaults:
    """What to compile the shipped kernels with for `arch`.

    Raises:
        ConfigError: the architecture is unknown.
    """
    if arch not in DEFAULTS:
        raise ConfigError(f"arch={arch!r}: expected one of {', '.join(DEFAULTS)}")
    return DEFAULTS[arch]
