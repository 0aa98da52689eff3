"""Launching an emitted kernel on the ranks of a device: what backends do alike.

A launch on a GPU enqueues work and reads nothing back, so that a CUDA graph can capture it:
tiles are listed on the device into buffers of a fixed size, addresses are written by fills,
and what goes wrong is recorded on the device for `check`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tileweave.codegen import state
from tileweave.codegen.gpu.machine import require_gpu
from tileweave.codegen.hang import describe_record
from tileweave.codegen.layout import num_elements
from tileweave.codegen.listing import ENTRY_WORDS, Bound, Listing, list_tiles
from tileweave.codegen.lower import Lowered
from tileweave.codegen.room import tile_room
from tileweave.errors import ConfigError, HangError, LaunchError
from tileweave.primitives.control import WorkerRecord
from tileweave.primitives.memory import Table

GPU_SPINS_A_SECOND = 2_000_000  # of a wait; its limit is counted, not timed
_FIRST_CAPACITY = 256
# In `state[FAILED]`, beside the 1 of a wait that gave up: more tiles than the queues hold.
_OVERFLOW = 2

Arguments = Sequence[Mapping[str, torch.Tensor]]
Dims = Sequence[Mapping[str, int]]


@dataclass(frozen=True)
class Ranks:
    """The ranks whose workers one launch runs, and how this device sees every rank's symmetric segment.

    `parts` are the segments of the ranks here as uint8 tensors, where the backend needs them.
    """

    first: int
    count: int
    heap_addresses: Sequence[int]
    device: torch.device
    parts: Sequence[torch.Tensor] = ()


@dataclass(frozen=True)
class Queues:
    """What the kernel takes its tiles from, for queues of one capacity; every launch fills it anew.

    entries int32 `[ranks, lanes, capacity, 5]`, counts and cursor int32 `[ranks, lanes]`.
    """

    capacity: int
    entries: torch.Tensor
    counts: torch.Tensor
    cursor: torch.Tensor


class QueuedKernel(ABC):
    """A kernel with its local memory for the ranks of one device.

    Symmetric segments (`Lowered.gpu_bytes` each, zeroed) belong to the caller. Launches must be
    enqueued on one stream, or be ordered by the caller.
    """

    def __init__(self, lowered: Lowered, ranks: Ranks, room: int | None = None) -> None:
        """Allocate.

        Args:
            lowered: the kernel.
            ranks: those of this device.
            room: tiles of a lane, and of any task's grid, that a launch can have. By default as the bounds of the
                grids say or, where these depend on tables, twice what the first launch with the same dimensions has,
                which reads a number back.

        Raises:
            ConfigError: ranks on several nodes, or `room` below 1.
            DeviceError: the GPU is missing.
        """
        if lowered.companion is not None:
            raise ConfigError(
                f"kernel '{lowered.program.name}' sends between nodes (topology '{lowered.schedule.topology.name}'), "
                "which this version compiles for GPUs but does not launch; use backend='c' on CPU ranks"
            )
        if room is not None and room < 1:
            raise ConfigError(f"room={room}: expected at least 1 tile, or None to find it out")
        if ranks.device.type == "cuda":
            require_gpu(ranks.device.index)
        self.lowered, self.ranks = lowered, ranks
        self._local = [self._workspaces() for _ in range(ranks.count)]
        self.heap = torch.tensor(ranks.heap_addresses, dtype=torch.int64, device=ranks.device)
        self.state = torch.zeros((ranks.count, state.STATE_WORDS), dtype=torch.int64, device=ranks.device)
        self._room = room
        self._rooms: dict[tuple[tuple[int, ...], ...], int] = {}
        self._queues: dict[int, Queues] = {}
        self._last: Queues | None = None

    @abstractmethod
    def launch(self, arguments: Arguments, dims: Dims, timeout_s: float) -> None:
        """Enqueue one launch on the current stream: `arguments[i]`, `dims[i]` are those of rank `first + i`, by name.

        Raises:
            ConfigError: a graph is being captured, but the room for tiles is not known yet.
        """

    def _next_queues(self, arguments: Arguments, dims: Dims) -> Queues:
        """Begin a launch: a new epoch, and the queues with its tiles."""
        queues = self._fill(self._list(arguments, dims, self._capacity(arguments, dims)))
        self.state[:, state.EPOCH] += 1
        self._last = queues
        return queues

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

    def _fill(self, listings: Sequence[Listing]) -> Queues:
        """The listings in the buffers that the kernel reads. Where they overflow, no rank here runs a tile."""
        capacity = listings[0].entries.shape[1]
        queues = self._queues.get(capacity)
        if queues is None:
            shape, device = (self.ranks.count, len(self.lowered.schedule.lanes)), self.ranks.device
            entries = torch.zeros((*shape, capacity, ENTRY_WORDS), dtype=torch.int32, device=device)
            counts, cursor = (torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(2))
            queues = self._queues[capacity] = Queues(capacity, entries, counts, cursor)
        torch.stack([listing.entries for listing in listings], out=queues.entries)
        torch.stack([listing.counts for listing in listings], out=queues.counts)
        queues.cursor.zero_()
        self._record_overflow(torch.stack([listing.most for listing in listings]), capacity)
        return queues

    def _record_overflow(self, most: torch.Tensor, capacity: int) -> None:
        """Set `state` where a rank has more tiles than fit; `most` is int64 `[ranks]`, on the device."""
        failed = self.state[:, state.FAILED]
        new = (failed == 0) & (most.amax() > capacity)
        for word, value in ((state.EXPECTED, most), (state.OBSERVED, torch.full_like(most, capacity))):
            self.state[:, word] = torch.where(new, value, self.state[:, word])
        self.state[:, state.FAILED] = torch.where(new, _OVERFLOW, failed)

    def check(self, timeout_s: float) -> None:
        """Read the failure records; waits for all launches so far to end. After a failure nothing runs any more.

        Raises:
            LaunchError: a launch had more tiles than its queues hold.
            HangError: a wait gave up; with who waited for what.
        """
        rows = self.state.tolist()
        self._check_overflow(rows)
        for place, row in enumerate(rows):
            if row[state.FAILED]:
                raise HangError(self._describe(place, row, timeout_s))

    def _check_overflow(self, rows: Sequence[Sequence[int]]) -> None:
        over = {i: row[state.EXPECTED] for i, row in enumerate(rows) if row[state.FAILED] == _OVERFLOW}
        if over:
            place = max(over, key=lambda i: over[i])
            raise LaunchError(
                f"kernel '{self.lowered.program.name}' stopped: rank {self.ranks.first + place} has {over[place]} "
                f"tiles or more in a launch, but its queues have room for {rows[place][state.OBSERVED]}; load the "
                f"kernel again with room={1 << (over[place] - 1).bit_length()} or more"
            )

    def _describe(self, place: int, row: Sequence[int], timeout_s: float) -> str:
        rank = self.ranks.first + place
        worker, position, site, index, expected, observed = (row[word] for word in state.RECORD)
        head = f"kernel '{self.lowered.program.name}' stopped: rank {rank} waited longer than {timeout_s:g} s "
        head += "(TILEWEAVE_TIMEOUT_S)"
        if site == state.ENTRY_SITE:
            what = f"waits for all ranks to enter the launch: expected {expected} entries so far, observed {observed}"
            return f"{head}\n  rank {rank} worker {worker}: {what}"
        assert self._last is not None
        queue = self._last.entries[place]
        lane = next(n for n, each in enumerate(self.lowered.schedule.lanes) if worker in each.workers)
        task, *tile = queue[lane, position, :ENTRY_WORDS].tolist()
        record = WorkerRecord(rank, worker, "waiting", task, tuple(tile), site, -1, index, expected, observed, -1)
        return f"{head}\n  {describe_record(self.lowered, record)}"
