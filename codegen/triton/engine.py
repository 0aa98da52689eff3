"""Launching an emitted Triton kernel: on a GPU, or on CPU ranks in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tileweave.codegen.hang import describe_record
from tileweave.codegen.layout import num_elements
from tileweave.codegen.listing import ENTRY_WORDS, Bound, Listing, list_tiles
from tileweave.codegen.lower import Lowered
from tileweave.codegen.triton.build import compile_options
from tileweave.codegen.triton.source import load_kernel
from tileweave.compiler.config import GpuConfig
from tileweave.errors import BuildError, ConfigError, HangError
from tileweave.primitives.control import WorkerRecord
from tileweave.primitives.memory import Table

_FIRST_CAPACITY = 256
_INTERPRETED_SPINS_A_SECOND = 4000  # of a wait in the interpreter; its limit is counted, not timed
_GPU_SPINS_A_SECOND = 2_000_000


@dataclass(frozen=True)
class Ranks:
    """The ranks whose workers one launch runs, and how this device sees every rank's symmetric segment."""

    first: int
    count: int
    heap_addresses: Sequence[int]
    device: torch.device


class TritonKernel:
    """A kernel with its local memory for the ranks of one device.

    Symmetric segments (`Segment.gpu_bytes` each, zeroed) belong to the caller.
    """

    def __init__(self, lowered: Lowered, ranks: Ranks, gpu: GpuConfig) -> None:
        """Load the kernel.

        Raises:
            BuildError: no Triton, or the ranks are on the CPU and Triton is not in its interpreter.
            ConfigError: more workers than the interpreter can run side by side, or ranks on several nodes.
        """
        if lowered.companion is not None:
            raise ConfigError(
                f"kernel '{lowered.program.name}' sends between nodes (topology '{lowered.schedule.topology.name}'), "
                "which this version compiles for Triton but does not launch; use backend='c' on CPU ranks"
            )
        self.lowered, self.ranks, self.gpu = lowered, ranks, gpu
        self._kernel = load_kernel(lowered, gpu)
        if ranks.device.type == "cpu":
            _require_interpreter(lowered, ranks)
        from tileweave.codegen.triton import device

        self._words = device.STATE_WORDS
        self._entry_site = device.ENTRY_SITE
        self._record = device.WORKER, device.ENTRY, device.SITE, device.INDEX, device.EXPECTED, device.OBSERVED
        self._failed = device.FAILED
        self._local = [self._workspaces() for _ in range(ranks.count)]
        self._heap = self._int64(ranks.heap_addresses)
        self._state = torch.zeros((ranks.count, self._words), dtype=torch.int64, device=ranks.device)
        self._capacity = _FIRST_CAPACITY
        self._kept: list[torch.Tensor] = []

    def _workspaces(self) -> dict[str, torch.Tensor]:
        return {
            m.name: torch.empty(
                max(num_elements(m) * m.dtype.itemsize_bytes, 16), dtype=torch.uint8, device=self.ranks.device
            )
            for m in self.lowered.program.workspaces
        }

    def _int64(self, values: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.ranks.device)

    def workspace(self, rank: int, name: str) -> torch.Tensor:
        """Bytes of a workspace of one rank, for looking at it after a launch."""
        return self._local[rank - self.ranks.first][name]

    def launch(
        self, arguments: Sequence[Mapping[str, torch.Tensor]], dims: Sequence[Mapping[str, int]], timeout_s: float
    ) -> None:
        """Enqueue one launch: `arguments[i]`, `dims[i]` are those of rank `first + i`, by name."""
        program = self.lowered.program
        memory = self._int64([self._addresses(i, given) for i, given in enumerate(arguments)])
        sizes = self._int64([[d[name] for name in program.dims] or [0] for d in dims])
        listings = self._list(arguments, dims)
        queue = torch.stack([listing.entries for listing in listings])
        counts = torch.stack([listing.counts for listing in listings])
        cursor = torch.zeros_like(counts)
        self._state[:, 0] += 1
        on_cpu = self.ranks.device.type == "cpu"
        limit = int(timeout_s * (_INTERPRETED_SPINS_A_SECOND if on_cpu else _GPU_SPINS_A_SECOND))
        grid = (self.lowered.schedule.num_workers * self.ranks.count,)
        self._kernel[grid](
            memory, sizes, self._heap, queue, counts, cursor, self._state, self.ranks.first, self._capacity, limit, 0,
            **compile_options(self.gpu),
        )  # fmt: skip
        self._kept = [memory, sizes, queue, counts, cursor]  # what the device still reads

    def _addresses(self, place: int, given: Mapping[str, torch.Tensor]) -> list[int]:
        everything = {**self._local[place], **given}
        return [everything[m.name].data_ptr() if m.name in everything else 0 for m in self.lowered.program.memories]

    def _list(self, arguments: Sequence[Mapping[str, Any]], dims: Sequence[Mapping[str, int]]) -> list[Listing]:
        """Tiles of every rank here. The capacity grows until they fit, which reads one number back."""
        tables = [m.name for m in self.lowered.program.memories if isinstance(m, Table)]
        while True:
            listings = [
                list_tiles(
                    self.lowered,
                    Bound(self.ranks.first + i, dims[i], {name: given[name] for name in tables}, self.ranks.device),
                    self._capacity,
                )
                for i, given in enumerate(arguments)
            ]
            most = max(int(listing.most) for listing in listings)
            if most <= self._capacity:
                return listings
            self._capacity = 1 << (most - 1).bit_length()

    def check(self, timeout_s: float) -> None:
        """Read the failure records; waits for the launch to end.

        Raises:
            HangError: a wait gave up; with who waited for what.
        """
        for place, state in enumerate(self._state.tolist()):
            if state[self._failed]:
                raise HangError(self._describe(place, state, timeout_s))

    def _describe(self, place: int, state: Sequence[int], timeout_s: float) -> str:
        rank = self.ranks.first + place
        worker, position, site, index, expected, observed = (state[word] for word in self._record)
        head = f"kernel '{self.lowered.program.name}' stopped: rank {rank} waited longer than {timeout_s:g} s "
        head += "(TILEWEAVE_TIMEOUT_S)"
        if site == self._entry_site:
            what = f"waits for all ranks to enter the launch: expected {expected} entries so far, observed {observed}"
            return f"{head}\n  rank {rank} worker {worker}: {what}"
        queue = self._kept[2][place]
        lane = next(n for n, each in enumerate(self.lowered.schedule.lanes) if worker in each.workers)
        task, *tile = queue[lane, position, :ENTRY_WORDS].tolist()
        record = WorkerRecord(rank, worker, "waiting", task, tuple(tile), site, -1, index, expected, observed, -1)
        return f"{head}\n  {describe_record(self.lowered, record)}"


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
