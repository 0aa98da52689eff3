"""Launching an emitted Triton kernel: on a GPU, or on CPU ranks in Triton's interpreter.

A launch on a GPU enqueues work and reads nothing back, so that a CUDA graph can capture it:
tiles are listed on the device into buffers of a fixed size, addresses are written by fills,
and what goes wrong is recorded on the device for `check`.
"""

from __future__ import annotations

import contextvars
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tileweave import knobs
from tileweave.codegen.gpu.machine import require_gpu
from tileweave.codegen.gpu.residency import Occupancy, check_resident
from tileweave.codegen.gpu_text import workers_per_sm
from tileweave.codegen.hang import describe_record
from tileweave.codegen.layout import num_elements
from tileweave.codegen.listing import ENTRY_WORDS, Bound, Listing, list_tiles
from tileweave.codegen.lower import Lowered
from tileweave.codegen.room import tile_room
from tileweave.codegen.triton.build import build, compile_options
from tileweave.codegen.triton.source import load_kernel
from tileweave.compiler.config import GpuConfig
from tileweave.errors import BuildError, ConfigError, HangError, LaunchError
from tileweave.primitives.control import WorkerRecord
from tileweave.primitives.memory import Table

_FIRST_CAPACITY = 256
_INTERPRETED_SPINS_A_SECOND = 4000  # of a wait in the interpreter; its limit is counted, not timed
_GPU_SPINS_A_SECOND = 2_000_000
_MOST_KEPT = 256  # address tables; a model has one for each of its layers
# In `state[FAILED]`, beside the 1 of a wait that gave up: more tiles than the queues hold.
_OVERFLOW = 2

Arguments = Sequence[Mapping[str, torch.Tensor]]
Dims = Sequence[Mapping[str, int]]


@dataclass(frozen=True)
class Ranks:
    """The ranks whose workers one launch runs, and how this device sees every rank's symmetric segment."""

    first: int
    count: int
    heap_addresses: Sequence[int]
    device: torch.device


@dataclass(frozen=True)
class _Queues:
    """What the kernel takes its tiles from, for queues of one capacity; every launch fills it anew.

    entries int32 `[ranks, lanes, capacity, 5]`, counts and cursor int32 `[ranks, lanes]`.
    """

    capacity: int
    entries: torch.Tensor
    counts: torch.Tensor
    cursor: torch.Tensor


class TritonKernel:
    """A kernel with its local memory for the ranks of one device.

    Symmetric segments (`Segment.gpu_bytes` each, zeroed) belong to the caller. Launches must be
    enqueued on one stream, or be ordered by the caller.
    """

    def __init__(self, lowered: Lowered, ranks: Ranks, gpu: GpuConfig, room: int | None = None) -> None:
        """Load the kernel.

        Args:
            lowered: the kernel.
            ranks: those of this device.
            gpu: how to compile.
            room: tiles of a lane, and of any task's grid, that a launch can have. By default as the bounds of the
                grids say or, where these depend on tables, twice what the first launch with the same dimensions has,
                which reads a number back.

        Raises:
            BuildError: no Triton, or the ranks are on the CPU and Triton is not in its interpreter.
            ConfigError: more workers than can run side by side, ranks on several nodes, or `room` below 1.
            DeviceError: the GPU is missing or too old.
        """
        if lowered.companion is not None:
            raise ConfigError(
                f"kernel '{lowered.program.name}' sends between nodes (topology '{lowered.schedule.topology.name}'), "
                "which this version compiles for Triton but does not launch; use backend='c' on CPU ranks"
            )
        if room is not None and room < 1:
            raise ConfigError(f"room={room}: expected at least 1 tile, or None to find it out")
        self.lowered, self.ranks, self.gpu = lowered, ranks, gpu
        self._kernel = load_kernel(lowered, gpu)
        if ranks.device.type == "cpu":
            _require_interpreter(lowered, ranks)
        else:
            _check_gpu(lowered, ranks, gpu)
        from tileweave.codegen.triton import device

        self._words = device.STATE_WORDS
        self._entry_site = device.ENTRY_SITE
        self._record = device.WORKER, device.ENTRY, device.SITE, device.INDEX, device.EXPECTED, device.OBSERVED
        self._epoch, self._failed = device.EPOCH, device.FAILED
        self._local = [self._workspaces() for _ in range(ranks.count)]
        self._heap = torch.tensor(ranks.heap_addresses, dtype=torch.int64, device=ranks.device)
        self._state = torch.zeros((ranks.count, self._words), dtype=torch.int64, device=ranks.device)
        self._room = room
        self._rooms: dict[tuple[tuple[int, ...], ...], int] = {}
        self._queues: dict[int, _Queues] = {}
        self._numbers: dict[tuple[tuple[int, ...], ...], torch.Tensor] = {}
        self._captured: list[torch.Tensor] = []  # what graphs read for as long as they are replayed
        self._last: _Queues | None = None

    def _workspaces(self) -> dict[str, torch.Tensor]:
        return {
            m.name: torch.empty(
                max(num_elements(m) * m.dtype.itemsize_bytes, 16), dtype=torch.uint8, device=self.ranks.device
            )
            for m in self.lowered.program.workspaces
        }

    def workspace(self, rank: int, name: str) -> torch.Tensor:
        """Bytes of a workspace of one rank, for looking at it after a launch."""
        return self._local[rank - self.ranks.first][name]

    def launch(self, arguments: Arguments, dims: Dims, timeout_s: float) -> None:
        """Enqueue one launch on the current stream: `arguments[i]`, `dims[i]` are those of rank `first + i`, by name.

        Raises:
            ConfigError: a graph is being captured, but the room for tiles is not known yet.
        """
        on_cpu = self.ranks.device.type == "cpu"
        limit = int(timeout_s * (_INTERPRETED_SPINS_A_SECOND if on_cpu else _GPU_SPINS_A_SECOND))
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
        queues = self._fill(self._list(arguments, dims, self._capacity(arguments, dims)))
        self._state[:, self._epoch] += 1
        grid = (self.lowered.schedule.num_workers * self.ranks.count,)
        self._kernel[grid](
            memory, sizes, self._heap, queues.entries, queues.counts, queues.cursor, self._state, self.ranks.first,
            queues.capacity, limit, 0, **compile_options(self.gpu),
        )  # fmt: skip
        self._last = queues

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

    def _capturing(self) -> bool:
        return self.ranks.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _capacity(self, arguments: Arguments, dims: Dims) -> int:
        """Entries a lane: as given, as bounded or, once for these dimensions, as measured."""
        if self._room is not None:
            return self._room
        key = tuple(tuple(d.values()) for d in dims)
        if key not in self._rooms:
            bounds = [tile_room(self.lowered, d) for d in dims]
            known = [bound for bound in bounds if bound is not None]
            self._rooms[key] = max(known) if len(known) == len(bounds) else self._measured(arguments, dims)
        return self._rooms[key]

    def _measured(self, arguments: Arguments, dims: Dims) -> int:
        """Twice the tiles of this launch, to a power of two; reads one number back."""
        if self._capturing():
            raise ConfigError(
                f"kernel '{self.lowered.program.name}': its grids depend on tables, so how many tiles fit its queues "
                "is found at the first launch, which a graph cannot capture; launch it once before, or pass room"
            )
        capacity = _FIRST_CAPACITY
        while True:
            most = max(int(listing.most) for listing in self._list(arguments, dims, capacity))
            if most <= capacity:
                return 1 << (2 * most - 1).bit_length()
            capacity = 1 << (most - 1).bit_length()

    def _list(self, arguments: Arguments, dims: Dims, capacity: int) -> list[Listing]:
        """Tiles of every rank here."""
        tables = [m.name for m in self.lowered.program.memories if isinstance(m, Table)]
        bounds = [
            Bound(self.ranks.first + i, dims[i], {name: given[name] for name in tables}, self.ranks.device)
            for i, given in enumerate(arguments)
        ]
        return [list_tiles(self.lowered, bound, capacity) for bound in bounds]

    def _fill(self, listings: Sequence[Listing]) -> _Queues:
        """The listings in the buffers that the kernel reads. Where they overflow, no rank here runs a tile."""
        capacity = listings[0].entries.shape[1]
        queues = self._queues.get(capacity)
        if queues is None:
            shape, device = (self.ranks.count, len(self.lowered.schedule.lanes)), self.ranks.device
            entries = torch.zeros((*shape, capacity, ENTRY_WORDS), dtype=torch.int32, device=device)
            counts, cursor = (torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(2))
            queues = self._queues[capacity] = _Queues(capacity, entries, counts, cursor)
        torch.stack([listing.entries for listing in listings], out=queues.entries)
        torch.stack([listing.counts for listing in listings], out=queues.counts)
        queues.cursor.zero_()
        self._record_overflow(torch.stack([listing.most for listing in listings]), capacity)
        return queues

    def _record_overflow(self, most: torch.Tensor, capacity: int) -> None:
        """Set `state` where a rank has more tiles than fit; `most` is int64 `[ranks]`, on the device."""
        *_, expected, observed = self._record
        failed = self._state[:, self._failed]
        new = (failed == 0) & (most.amax() > capacity)
        for word, value in ((expected, most), (observed, torch.full_like(most, capacity))):
            self._state[:, word] = torch.where(new, value, self._state[:, word])
        self._state[:, self._failed] = torch.where(new, _OVERFLOW, failed)

    def check(self, timeout_s: float) -> None:
        """Read the failure records; waits for all launches so far to end. After a failure nothing runs any more.

        Raises:
            LaunchError: a launch had more tiles than its queues hold.
            HangError: a wait gave up; with who waited for what.
        """
        states = self._state.tolist()
        self._check_overflow(states)
        for place, state in enumerate(states):
            if state[self._failed]:
                raise HangError(self._describe(place, state, timeout_s))

    def _check_overflow(self, states: Sequence[Sequence[int]]) -> None:
        *_, expected, observed = self._record
        over = {i: state[expected] for i, state in enumerate(states) if state[self._failed] == _OVERFLOW}
        if over:
            place = max(over, key=lambda i: over[i])
            raise LaunchError(
                f"kernel '{self.lowered.program.name}' stopped: rank {self.ranks.first + place} has {over[place]} "
                f"tiles or more in a launch, but its queues have room for {states[place][observed]}; load the kernel "
                f"again with room={1 << (over[place] - 1).bit_length()} or more"
            )

    def _describe(self, place: int, state: Sequence[int], timeout_s: float) -> str:
        rank = self.ranks.first + place
        worker, position, site, index, expected, observed = (state[word] for word in self._record)
        head = f"kernel '{self.lowered.program.name}' stopped: rank {rank} waited longer than {timeout_s:g} s "
        head += "(TILEWEAVE_TIMEOUT_S)"
        if site == self._entry_site:
            what = f"waits for all ranks to enter the launch: expected {expected} entries so far, observed {observed}"
            return f"{head}\n  rank {rank} worker {worker}: {what}"
        assert self._last is not None
        queue = self._last.entries[place]
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
