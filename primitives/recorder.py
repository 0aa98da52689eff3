"""What a kernel has recorded so far, while it is being traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from tileweave.errors import SourceLocation, TraceError
from tileweave.primitives.dtypes import DType
from tileweave.primitives.escapes import refuse_early_exits
from tileweave.primitives.expr import Expr, Index, LoopIndex, ScalarLike, as_expr
from tileweave.primitives.memory import Memory
from tileweave.primitives.ops import GridDim, Op, Role, Task, Value
from tileweave.primitives.source import caller_location

M = TypeVar("M", bound=Memory)
MAX_GRID_DIMS = 4  # of a queue entry


@dataclass
class Block:
    """A body under construction and the values that it defines."""

    ops: list[Op] = field(default_factory=list)
    values: set[int] = field(default_factory=set)


@dataclass
class Recorder:
    """Collects the memories and tasks that one kernel declares."""

    world_size: int
    memories: dict[str, Memory] = field(default_factory=dict)
    tasks: list[Task] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    unfinished: list[SourceLocation | None] = field(default_factory=list)
    next_value: int = 0
    next_loop: int = 0

    def declare(self, memory: M) -> M:
        """Add a memory under its name.

        Raises:
            TraceError: the name is taken.
        """
        if memory.name in self.memories:
            raise TraceError(
                f"the kernel declares '{memory.name}' twice; give each memory its own name", caller_location()
            )
        self.memories[memory.name] = memory
        return memory

    def emit(self, op: Op) -> None:
        """Append `op` to the body under construction.

        Raises:
            TraceError: no task is being recorded.
        """
        self.current_block(type(op).__name__).ops.append(op)

    def current_block(self, what: str) -> Block:
        """The innermost body under construction."""
        if not self.blocks:
            raise TraceError(f"{what} outside a task; put it in a function under @tw.task", caller_location())
        return self.blocks[-1]

    def new_value(self, shape: Sequence[int], extents: Sequence[Expr], dtype: DType, *, mutable: bool = False) -> Value:
        """A fresh value defined by the body under construction."""
        block = self.current_block("a tile op")
        value = Value(self.next_value, tuple(shape), tuple(extents), dtype, mutable)
        self.next_value += 1
        block.values.add(value.id)
        return value

    def check_visible(self, value: Value) -> None:
        """Refuse a value whose defining loop, guard or task has ended."""
        if not any(value.id in block.values for block in self.blocks):
            raise TraceError(
                f"tile {value} was made inside a tw.range, tw.when or task that has ended; to carry a value "
                "out of a loop, make an accumulator with tw.zeros before it and update it with += or tw.dot",
                caller_location(),
            )

    @contextmanager
    def nested_block(self) -> Iterator[Block]:
        """Record into a new inner body."""
        block = Block()
        self.blocks.append(block)
        try:
            yield block
        finally:
            self.blocks.pop()

    def new_loop_index(self) -> LoopIndex:
        """A fresh loop variable."""
        self.next_loop += 1
        return LoopIndex(self.next_loop - 1)

    def record_task(
        self, function: Callable[..., None], grid: Mapping[str, ScalarLike | Callable[..., ScalarLike]], role: Role
    ) -> Task:
        """Run `function` once with symbolic grid indices and keep what it records."""
        location = caller_location()
        if self.blocks:
            raise TraceError("a task inside a task; declare tasks side by side in the kernel", location)
        name = function.__name__
        if any(task.name == name for task in self.tasks):
            raise TraceError(f"the kernel declares task '{name}' twice; give each task its own name", location)
        dims = _grid_dims(grid)
        wanted = list(function.__code__.co_varnames[: function.__code__.co_argcount])
        if sorted(wanted) != sorted(grid):
            raise TraceError(
                f"task '{name}' takes ({', '.join(wanted)}), but its grid has the dimensions ({', '.join(grid)}); "
                "name its parameters after them",
                location,
            )
        indices = {dim.name: Index(dim.name) for dim in dims}
        refuse_early_exits(function)
        with self.nested_block() as block:
            function(**indices)
        if self.unfinished:
            raise TraceError(
                "this tw.range loop was left by break or return, so its body would be lost; "
                "guard ops with tw.when(condition) instead",
                self.unfinished[-1],
            )
        task = Task(name, dims, role, tuple(block.ops), location)
        self.tasks.append(task)
        return task


def _grid_dims(grid: Mapping[str, ScalarLike | Callable[..., ScalarLike]]) -> tuple[GridDim, ...]:
    if not isinstance(grid, Mapping) or not all(isinstance(name, str) for name in grid):
        raise TraceError(
            f'a grid is a dictionary of names and extents, as in {{"m": 4}}, got {grid!r}', caller_location()
        )
    if len(grid) > MAX_GRID_DIMS:
        raise TraceError(
            f"a grid has at most {MAX_GRID_DIMS} dimensions, got {len(grid)} ({', '.join(grid)}); join two into one "
            "and take them apart with // and %",
            caller_location(),
        )
    dims: list[GridDim] = []
    for name, extent in grid.items():
        if callable(extent):
            outer = [d.name for d in dims]
            wanted = _parameters(extent)
            unknown = [w for w in wanted if w not in outer]
            if unknown:
                raise TraceError(
                    f"the extent of grid dimension '{name}' asks for '{unknown[0]}', which is not a dimension to its "
                    f"left ({', '.join(outer) or 'none'})",
                    caller_location(),
                )
            dims.append(GridDim(name, as_expr(extent(**{w: Index(w) for w in wanted}))))
        else:
            dims.append(GridDim(name, as_expr(extent)))
    return tuple(dims)


def _parameters(extent: Callable[..., ScalarLike]) -> tuple[str, ...]:
    code = getattr(extent, "__code__", None)
    if code is None:
        raise TraceError(f"an extent is a scalar or a function of dimensions, got {extent!r}", caller_location())
    names: tuple[str, ...] = code.co_varnames[: code.co_argcount]
    return names


_CURRENT: ContextVar[Recorder | None] = ContextVar("tileweave_recorder", default=None)


def current() -> Recorder:
    """The recorder of the kernel being traced.

    Raises:
        TraceError: no kernel is being traced.
    """
    recorder = _CURRENT.get()
    if recorder is None:
        raise TraceError(
            "tile ops record a kernel and do nothing outside one; call them in a function under @tw.kernel",
            caller_location(),
        )
    return recorder


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Make `recorder` the current one."""
    token = _CURRENT.set(recorder)
    try:
        yield recorder
    finally:
        _CURRENT.reset(token)
