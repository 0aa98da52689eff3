"""Launching an emitted Triton kernel: on a GPU, or on CPU ranks in Triton's interpreter."""

from __future__ import annotations

import contextvars
from collections.abc import Mapping, Sequence

import torch

from tileweave import knobs
from tileweave.codegen.gpu.machine import require_gpu
from tileweave.codegen.gpu.queued import GPU_SPINS_A_SECOND, Arguments, Dims, QueuedKernel, Ranks
from tileweave.codegen.gpu.residency import Occupancy, check_resident
from tileweave.codegen.gpu_text import workers_per_sm
from tileweave.codegen.lower import Lowered
from tileweave.codegen.triton.build import build, compile_options
from tileweave.codegen.triton.source import load_kernel
from tileweave.compiler.config import GpuConfig
from tileweave.errors import BuildError, ConfigError

_INTERPRETED_SPINS_A_SECOND = 4000  # of a wait in the interpreter
_MOST_KEPT = 256  # address tables; a model has one for each of its layers


class TritonKernel(QueuedKernel):
    """A Triton kernel with its local memory for the ranks of one device."""

    def __init__(self, lowered: Lowered, ranks: Ranks, gpu: GpuConfig, room: int | None = None) -> None:
        """Load the kernel, compiled as `gpu` says; the rest as for `QueuedKernel`.

        Raises:
            BuildError: no Triton, or the ranks are on the CPU and Triton is not in its interpreter.
            ConfigError: more workers than can run side by side, ranks on several nodes, or `room` below 1.
            DeviceError: the GPU is missing or too old.
        """
        super().__init__(lowered, ranks, room)
        self.gpu = gpu
        self._kernel = load_kernel(lowered, gpu)
        if ranks.device.type == "cpu":
            _require_interpreter(lowered, ranks)
        else:
            _check_gpu(lowered, ranks, gpu)
        self._numbers: dict[tuple[tuple[int, ...], ...], torch.Tensor] = {}
        self._captured: list[torch.Tensor] = []  # what graphs read for as long as they are replayed

    def launch(self, arguments: Arguments, dims: Dims, timeout_s: float) -> None:
        """As `QueuedKernel.launch`."""
        on_cpu = self.ranks.device.type == "cpu"
        limit = int(timeout_s * (_INTERPRETED_SPINS_A_SECOND if on_cpu else GPU_SPINS_A_SECOND))
        if on_cpu:
            self._enqueue(arguments, dims, limit)
            return
        with torch.cuda.device(self.ranks.device):
            # In a context of its own, so that Triton's allocator is set for this launch alone.
            contextvars.copy_context().run(self._enqueue_on_gpu, arguments, dims, limit)

    def _enqueue_on_gpu(self, arguments: Arguments, dims: Dims, limit: int) -> None:
        import triton

        triton.set_allocator(_scratch)  # for the descriptors that kernels make on the device
        self._enqueue(arguments, dims, limit)

    def _enqueue(self, arguments: Arguments, dims: Dims, limit: int) -> None:
        memory = self._on_device([self._addresses(i, given) for i, given in enumerate(arguments)])
        sizes = self._on_device([[d[name] for name in self.lowered.program.dims] or [0] for d in dims])
        queues = self._next_queues(arguments, dims)
        grid = (self.lowered.schedule.num_workers * self.ranks.count,)
        self._kernel[grid](
            memory, sizes, self.heap, queues.entries, queues.counts, queues.cursor, self.state, self.ranks.first,
            queues.capacity, limit, 0, **compile_options(self.gpu),
        )  # fmt: skip

    def _addresses(self, place: int, given: Mapping[str, torch.Tensor]) -> list[int]:
        everything = {**self._local[place], **given}
        return [everything[m.name].data_ptr() if m.name in everything else 0 for m in self.lowered.program.memories]

    def _on_device(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """`rows` as int64 `[ranks, n]`. Fills carry the numbers: a copy from the host would wait, and break a graph."""
        key = tuple(tuple(row) for row in rows)
        kept = self._numbers.get(key)
        if kept is not None:
            if self._capturing():
                self._captured.append(kept)
            return kept
        table = torch.zeros((len(rows), len(rows[0])), dtype=torch.int64, device=self.ranks.device)
        for place, row in enumerate(rows):
            for column, number in enumerate(row):
                if number:
                    table[place, column].fill_(number)
        if not self._capturing():  # a graph's own memory holds nothing before its first replay
            if len(self._numbers) >= _MOST_KEPT:
                self._numbers.clear()
            self._numbers[key] = table
        return table


def _require_interpreter(lowered: Lowered, ranks: Ranks) -> None:
    import triton

    if not triton.knobs.runtime.interpret:
        raise BuildError(
            "Triton code runs on CPU ranks only in Triton's interpreter, which must be chosen before Triton is "
            "imported; set TRITON_INTERPRET=1 in the environment, or use backend='c'"
        )
    workers = lowered.schedule.num_workers * ranks.count
    if workers > 1:
        raise ConfigError(
            f"Triton's interpreter runs the {workers} workers of a launch one after the other, so that one may wait "
            "for ever for the next; use Config(workers=1) and one process a rank"
        )


def _check_gpu(lowered: Lowered, ranks: Ranks, gpu: GpuConfig) -> None:
    """Refuse a GPU that cannot hold all workers at once, by what the compiler says of the kernel."""
    import triton

    if triton.knobs.runtime.interpret:
        raise BuildError("Triton launches nothing while it interprets; unset TRITON_INTERPRET and start again")
    found = require_gpu(ranks.device.index)
    resident = workers_per_sm(build(lowered, gpu, found.arch).report(), gpu.warps)
    occupancy = Occupancy(lowered.program.name, resident, found.num_sms, knobs.gpu_sms.get())
    check_resident(occupancy, lowered.schedule.num_workers, ranks.count)


def _scratch(size: int, _alignment: int, _stream: int | None) -> torch.Tensor:
    """Device memory for Triton; torch hands it to others only after the launch, in the order of the stream."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
