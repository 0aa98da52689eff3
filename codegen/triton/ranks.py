"""A Triton kernel on the ranks of a group, one process a rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tileweave.codegen.gpu.queued import Ranks
from tileweave.codegen.launch import Launch
from tileweave.codegen.lower import Lowered
from tileweave.codegen.trace import TraceEvent
from tileweave.codegen.triton.engine import TritonKernel
from tileweave.compiler.config import GpuConfig
from tileweave.errors import ConfigError, HangError
from tileweave.primitives.group import Group


class TritonExecutable:
    """A kernel loaded for one rank of a group, with its symmetric and local memory; making one is collective."""

    def __init__(self, lowered: Lowered, gpu: GpuConfig, group: Group) -> None:
        """Load the kernel and allocate.

        Raises:
            BuildError: no Triton, or it is not in its interpreter.
            ConfigError: more workers than the interpreter can run side by side, or ranks that are threads.
        """
        if group.kind != "processes" and group.world_size > 1:
            raise ConfigError(
                "Triton's interpreter is not safe among threads; start ranks as processes, with tw.spawn or torchrun"
            )
        self.group = group
        allocation = group.heap.allocate(f"{lowered.program.name} in Triton", lowered.segment.gpu_bytes)
        ranks = Ranks(group.rank, 1, allocation.addresses, torch.device("cpu"))
        self._kernel = TritonKernel(lowered, ranks, gpu)
        self._symmetric = allocation

    def launch(self, launch: Launch) -> list[TraceEvent]:
        """Run with all ranks of the group; collective. Records no events.

        Raises:
            PeerError: some rank refused its arguments; nothing ran.
            GroupError: ranks launch different kernels; nothing ran.
            HangError: a wait gave up.
        """
        self.group.enter(self.group.next_epoch(launch.key), launch.refusal)
        lowered, timeout_s = self._kernel.lowered, self.group.timeout_s
        arguments = {name: _tensor(array) for name, array in launch.arrays.items()}
        dims = dict(zip(lowered.program.dims, launch.dims, strict=True))
        self._kernel.launch([arguments], [dims], timeout_s)
        try:
            self._kernel.check(timeout_s)
        except HangError as error:
            self.group.fail(str(error))
            raise
        return []


def _tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else array
