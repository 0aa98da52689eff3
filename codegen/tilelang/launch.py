"""Launching an emitted TileLang kernel on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tileweave import knobs
from tileweave.codegen.gpu.machine import require_gpu
from tileweave.codegen.gpu.queued import GPU_SPINS_A_SECOND, Arguments, Dims, QueuedKernel, Queues, Ranks
from tileweave.codegen.gpu.residency import Occupancy, check_resident
from tileweave.codegen.gpu_text import workers_per_sm
from tileweave.codegen.layout import num_elements
from tileweave.codegen.lower import Lowered
from tileweave.codegen.tilelang.build import build_for_gpu, load_for_gpu
from tileweave.codegen.tilelang.scalars import identifier
from tileweave.compiler.config import GpuConfig
from tileweave.primitives.dtypes import DType, bfloat16, float32, int32
from tileweave.primitives.memory import Memory, Signal

_TORCH_TYPES: Mapping[DType, torch.dtype] = {float32: torch.float32, bfloat16: torch.bfloat16, int32: torch.int32}


class TileLangKernel(QueuedKernel):
    """A TileLang kernel with its local memory for the ranks of one GPU.

    A launch is of one rank, whose memories are the kernel's parameters, as TMA wants it; those of
    virtual ranks run side by side on streams of their own, which the current stream waits for.
    """

    def __init__(self, lowered: Lowered, ranks: Ranks, gpu: GpuConfig, room: int | None = None) -> None:
        """Load the kernel, compiled as `gpu` says; the rest as for `QueuedKernel`.

        Raises:
            BuildError: no TileLang or no nvcc, or one of them refuses the kernel.
            CompileError: the target has no text for the kernel.
            ConfigError: more workers than can run side by side, ranks on several nodes, or `room` below 1.
            DeviceError: the GPU is missing or too old.
        """
        super().__init__(lowered, ranks, room)
        found = require_gpu(ranks.device.index)
        binary = build_for_gpu(lowered, gpu, found.arch)
        resident = workers_per_sm(binary.report(), binary.warps)
        occupancy = Occupancy(lowered.program.name, resident, found.num_sms, knobs.gpu_sms.get())
        check_resident(occupancy, lowered.schedule.num_workers, ranks.count)
        self._function, self._parameters = load_for_gpu(lowered, gpu)
        new_stream: Callable[[torch.device], Any] = torch.cuda.Stream
        self._streams = [new_stream(ranks.device) for _ in range(ranks.count)]

    def launch(self, arguments: Arguments, dims: Dims, timeout_s: float) -> None:
        """As `QueuedKernel.launch`."""
        with torch.cuda.device(self.ranks.device):
            queues = self._next_queues(arguments, dims)
            current = torch.cuda.current_stream()
            for stream in self._streams:
                stream.wait_stream(current)
            for place, (given, stream) in enumerate(zip(arguments, self._streams, strict=True)):
                named = parameters_of_rank(self, place, given, queues)
                named["limit"] = int(timeout_s * GPU_SPINS_A_SECOND)
                with torch.cuda.stream(stream):
                    self._function(*(named[name] for name in self._parameters))
            for stream in self._streams:
                current.wait_stream(stream)


def parameters_of_rank(kernel: QueuedKernel, place: int, given: Mapping[str, torch.Tensor], queues: Queues) -> Any:
    """Values of the emitted kernel's parameters by name, but for the limit, of the rank at `place` of those here."""
    program, segment = kernel.lowered.program, kernel.lowered.segment
    parts = {
        memory.name: kernel.ranks.parts[place][segment.offset_bytes[memory.name] :] for memory in program.symmetric
    }
    parts |= {memory.name: kernel.workspace(kernel.ranks.first + place, memory.name) for memory in program.workspaces}
    known = {memory.name: memory for memory in program.memories if not isinstance(memory, Signal)}
    views = {name: _view(known[name], part) for name, part in parts.items() if name in known}
    whole = {name: _not_empty(tensor) for name, tensor in given.items()}
    return {
        **{identifier(name): tensor for name, tensor in {**views, **whole}.items()},
        "heap": kernel.heap,
        "queue": queues.entries[place],
        "counts": queues.counts[place],
        "cursor": queues.cursor[place],
        "state": kernel.state[place],
        "rank": kernel.ranks.first + place,
    }


def _view(memory: Memory, part: torch.Tensor) -> torch.Tensor:
    """The bytes of a memory as a tensor of its shape."""
    nbytes = num_elements(memory) * memory.dtype.itemsize_bytes
    return part[:nbytes].view(_TORCH_TYPES[memory.dtype]).view(memory.static_shape)


def _not_empty(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or one row of zeros where it has none: TMA refuses empty memory, and no tile reads it."""
    if tensor.numel():
        return tensor
    return torch.zeros([max(size, 1) for size in tensor.shape], dtype=tensor.dtype, device=tensor.device)
