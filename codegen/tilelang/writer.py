"""Text of one task under construction: lines, names that are in scope, and the values it keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from tileweave.codegen.gemm import grid_intervals
from tileweave.codegen.lower import Lowered
from tileweave.codegen.tilelang.scalars import Scalars, identifier
from tileweave.codegen.tilelang.target import Target
from tileweave.compiler.bounds import Interval
from tileweave.compiler.printer import place
from tileweave.errors import CompileError
from tileweave.primitives.dtypes import DType, bfloat16, float32, int32
from tileweave.primitives.expr import Expr
from tileweave.primitives.memory import Memory
from tileweave.primitives.ops import Op, Operand, Task, Value, result, walk

TILELANG_TYPES: Mapping[DType, str] = {float32: '"float32"', bfloat16: '"bfloat16"', int32: '"int32"'}


@dataclass
class TaskWriter:
    """Text of one task under construction.

    `kept` are values that live in an array of their own; all others are computed where they are read.
    `helpers` stands before the names of the waits of the threads that run the text.
    `threads` is how many threads share the elements of a tile, and `width` how many neighbours along its last axis
    one of them takes at a time; both are 1 for the `c` target. `fragments` are values in the registers of all
    consumer threads, as wgmma leaves them, and `main_loops` the loops that are written as a whole, by identity.
    """

    lowered: Lowered
    task: Task
    target: Target
    kept: frozenset[int]
    scalar: Scalars
    helpers: str = ""
    threads: int = 1
    width: int = 1
    fragments: Mapping[int, str] = field(default_factory=dict)
    main_loops: Mapping[int, Callable[[TaskWriter], None]] = field(default_factory=dict)
    arrays: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    names: int = 0
    scopes: list[dict[str, str]] = field(default_factory=lambda: [{}])

    @cached_property
    def known(self) -> Mapping[Expr, Interval]:
        """Where the grid indices lie."""
        return grid_intervals(self.task)

    @cached_property
    def definitions(self) -> Mapping[int, Op]:
        """The op that makes each value."""
        return {value.id: op for op in walk(self.task.body) if (value := result(op)) is not None}

    def line(self, text: str) -> None:
        """Append a line at the present depth."""
        self.lines.append("    " * self.depth + text)

    def note(self, op: Op) -> None:
        """A comment that names the user's line, unless the comment before names the same one."""
        text = f"{place(op.location)}: {op.location.text.strip()}" if op.location is not None else ""
        comment = "    " * self.depth + f"# {text}"
        last = next((line for line in reversed(self.lines) if line.lstrip().startswith("#")), "")
        if text and last != comment:
            self.lines.append(comment)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """An indented block, with names of its own."""
        self.line(head)
        self.depth += 1
        self.scopes.append({})
        start = len(self.lines)
        yield
        if not any(line.strip() and not line.lstrip().startswith("#") for line in self.lines[start:]):
            self.line("pass")
        self.scopes.pop()
        self.depth -= 1

    @contextmanager
    def blocks(self, heads: tuple[str, ...]) -> Iterator[None]:
        """Blocks one inside the other."""
        if not heads:
            yield
            return
        with self.block(heads[0]), self.blocks(heads[1:]):
            yield

    def fresh(self, stem: str) -> str:
        """A name that is new in this task."""
        self.names += 1
        return f"{stem}{self.names}"

    def named(self, stem: str, text: str) -> str:
        """A name for `text`; the same one where it is in scope already."""
        for scope in self.scopes:
            if text in scope:
                return scope[text]
        name = self.fresh(stem)
        self.line(f"{name} = {text}")
        self.scopes[-1][text] = name
        return name

    def array(self, stem: str, shape: tuple[int, ...], dtype: str) -> str:
        """A new array of this thread, declared at the head of the task."""
        name = self.fresh(stem)
        self.arrays.append(f"{name} = T.alloc_local(({', '.join(map(str, shape))},), {dtype})")
        return name

    def tensor(self, memory: Memory, peer: Expr | str | None) -> str:
        """Name of a memory as a tensor, on this rank or on a peer."""
        if peer is None:
            return identifier(memory.name)
        rank = self.scalar(peer) if isinstance(peer, Expr) else peer
        address = f"heap[{rank}] + {self.lowered.segment.offset_bytes[memory.name]}"
        shape = ", ".join(self.scalar(size) for size in memory.dims)
        return self.named("p", f"T.make_tensor_from_addr({address}, ({shape},), {TILELANG_TYPES[memory.dtype]})")

    def refuse(self, op: Op, problem: str) -> CompileError:
        """An error at the user's line."""
        return CompileError(f"TileLang, target '{self.target}', task '{self.task.name}': {problem}", op.location)


def literal(operand: Operand) -> str:
    """A float constant."""
    assert not isinstance(operand, Value)
    if math.isfinite(operand):
        return f"T.float32({float(operand)!r})"
    return f'T.float32(float("{operand}"))'
