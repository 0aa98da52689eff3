"""What an interpreted launch acts on: memories and counters of all ranks, and one frame a running tile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from tileweave.codegen.reference.scalars import Scalars
from tileweave.codegen.reference.storage import PATTERNS, STORAGE, UNWRITTEN
from tileweave.compiler.binding import Routing
from tileweave.compiler.program import Program
from tileweave.errors import ArgumentError
from tileweave.primitives.expr import IntArray
from tileweave.primitives.memory import Memory, Table, Tensor
from tileweave.primitives.ops import Op

Array: TypeAlias = npt.NDArray[Any]

TouchKind: TypeAlias = Literal["read", "write", "signal", "wait"]


@dataclass(frozen=True, slots=True)
class Touch:
    """One access of one executed op, for observers.

    `tile` is the global tile number of `Regions`. `places` is `[n, 2]`: owning rank and
    linear index of each element, or of the counter; `amount` is that of a signal, or the
    target of a wait.
    """

    tile: int
    op: Op
    kind: TouchKind
    memory: str
    places: IntArray
    amount: int = 0


Observer: TypeAlias = Callable[[Touch], None]


@dataclass(frozen=True)
class World:
    """All ranks of a launch. `memories` and `counters` hold one array a rank, by name."""

    program: Program
    dims: tuple[Mapping[str, int], ...]
    tables: tuple[Mapping[str, IntArray], ...]
    memories: Mapping[str, tuple[Array, ...]]
    counters: Mapping[str, tuple[IntArray, ...]]
    scalars: Scalars
    observer: Observer | None


@dataclass(frozen=True)
class Frame:
    """A tile that runs: its grid indices by name and loop variables by number, and its values so far."""

    world: World
    rank: int
    tile: int
    symbols: dict[str | int, int]
    values: dict[int, Array] = field(default_factory=dict)

    @property
    def dims(self) -> Mapping[str, int]:
        """Dynamic dimensions of this rank."""
        return self.world.dims[self.rank]

    @property
    def tables(self) -> Mapping[str, IntArray]:
        """Tables of this rank."""
        return self.world.tables[self.rank]


def make_world(
    program: Program, routing: Routing, arguments: Sequence[Mapping[str, Array]], observer: Observer | None
) -> World:
    """Take the arguments as they are and allocate everything else, unwritten, with counters at zero.

    Raises:
        ArgumentError: a tensor is not a NumPy array of its storage dtype.
    """
    ranks = range(program.world_size)
    tensors = [m for m in program.arguments if isinstance(m, Tensor)]
    tables = [m for m in program.arguments if isinstance(m, Table)]
    scratch = (*program.symmetric, *program.workspaces)
    return World(
        program,
        tuple({name: int(routing.dims[name][rank]) for name in program.dims} for rank in ranks),
        tuple({m.name: np.asarray(arguments[rank][m.name], dtype=np.int64) for m in tables} for rank in ranks),
        {m.name: tuple(_checked(m, arguments[rank][m.name]) for rank in ranks) for m in tensors}
        | {m.name: tuple(_unwritten(m) for _ in ranks) for m in scratch},
        {m.name: tuple(np.zeros(_static(m), dtype=np.int64) for _ in ranks) for m in program.signals},
        Scalars(),
        observer,
    )


def _checked(memory: Memory, given: object) -> Array:
    want = np.dtype(STORAGE[memory.dtype])
    if not isinstance(given, np.ndarray) or given.dtype != want:
        have = given.dtype if isinstance(given, np.ndarray) else type(given).__name__
        hint = f" of {memory.dtype} bit patterns" if memory.dtype in PATTERNS else ""
        raise ArgumentError(f"argument '{memory.name}' needs a NumPy array of {want}{hint}, got {have}")
    return given


def _unwritten(memory: Memory) -> Array:
    return np.full(_static(memory), UNWRITTEN[memory.dtype], dtype=STORAGE[memory.dtype])


def _static(memory: Memory) -> tuple[int, ...]:
    """The shape of a memory that the verifier has found to be static."""
    return tuple(int(size) for size in memory.shape)
