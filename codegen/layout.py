"""Where memories lie in a rank's symmetric segment, and how many bytes that takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tileweave.compiler.program import Program
from tileweave.primitives.expr import Const
from tileweave.primitives.memory import Memory

ALIGNMENT_BYTES = 64
COUNTER_BYTES = 8
COUNTER_SETS = 2
"""Counters exist twice: a launch uses one set, and clears the other, which the launch before used."""


@dataclass(frozen=True)
class Segment:
    """Byte offsets of symmetric memories and of counter arrays (in the first set) in a rank's segment."""

    offset_bytes: Mapping[str, int]
    counters_offset_bytes: int
    counter_set_bytes: int
    total_bytes: int
    lines: tuple[str, ...]

    @property
    def entered_offset_bytes(self) -> int:
        """Where GPU backends, which have no control block, count the ranks that have entered a launch."""
        return self.total_bytes

    @property
    def gpu_bytes(self) -> int:
        """Bytes of a rank's segment on a GPU."""
        return self.total_bytes + ALIGNMENT_BYTES

    def __str__(self) -> str:
        return "\n".join([*self.lines, f"total {self.total_bytes:,} bytes a rank"])


def num_elements(memory: Memory) -> int:
    """Elements of a memory of static shape."""
    count = 1
    for size in memory.dims:
        assert isinstance(size, Const), f"'{memory.name}' has no static shape"
        count *= size.value
    return count


def symmetric_segment(program: Program) -> Segment:
    """Lay out the symmetric memories and counters of `program`, each on a 64-byte boundary."""
    offsets: dict[str, int] = {}
    lines: list[str] = []
    at = used = 0
    for memory in program.symmetric:
        size = num_elements(memory) * memory.dtype.itemsize_bytes
        offsets[memory.name] = at
        lines.append(f"{memory.name} {_times(memory)} x {memory.dtype.itemsize_bytes} = {size:,}")
        used += size
        at = aligned(at + size)
    first = at
    for counters in program.signals:
        size = num_elements(counters) * COUNTER_BYTES
        offsets[counters.name] = at
        lines.append(f"{counters.name} {_times(counters)} x {COUNTER_BYTES} x {COUNTER_SETS} = {COUNTER_SETS * size:,}")
        used += COUNTER_SETS * size
        at = aligned(at + size)
    one_set = at - first
    total = max(first + COUNTER_SETS * one_set, ALIGNMENT_BYTES)
    if total > used:
        lines.append(f"alignment to {ALIGNMENT_BYTES} = {total - used:,}")
    return Segment(offsets, first, one_set, total, tuple(lines))


def _times(memory: Memory) -> str:
    return " x ".join(str(size) for size in memory.shape)


def aligned(size_bytes: int) -> int:
    """`size_bytes` rounded up to the alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
