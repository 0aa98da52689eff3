"""The loops over the elements of one op, and the text of an element.

Three kinds, one for each place where a tile may live. `c`: plain loops, one element at a time. Threads: each
thread takes `width` neighbours along the last axis, which it loads and stores at once. Fragments: a parallel loop
over a tile that lies in the registers of the consumer warps, as wgmma leaves it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tileweave.codegen.tilelang.functions import TILELANG_FUNCTIONS
from tileweave.codegen.tilelang.writer import TILELANG_TYPES, TaskWriter, literal
from tileweave.compiler.bounds import interval
from tileweave.primitives.dtypes import bfloat16, float32
from tileweave.primitives.expr import Expr
from tileweave.primitives.memory import Memory, Rows, Slice
from tileweave.primitives.ops import (
    Cast,
    Elementwise,
    Expand,
    Index,
    Load,
    Op,
    Operand,
    Peer,
    Transpose,
    Value,
    operands,
)


@dataclass(frozen=True)
class Spot:
    """One element (or vector of them) in memory: tensor, index texts, and the rows that must not be masked."""

    tensor: str
    indices: tuple[str, ...]
    masks: tuple[str, ...]

    def text(self, lane: str = "") -> str:
        """`tensor[…]`, with `lane` added to the last index."""
        last = f"{self.indices[-1]} + {lane}" if lane else self.indices[-1]
        return f"{self.tensor}[{', '.join((*self.indices[:-1], last))}]"

    @property
    def condition(self) -> str | None:
        """That the element exists, None if it always does."""
        return _all([f"{mask} >= 0" for mask in self.masks])


@dataclass
class Nest:
    """The inside of the loops: where an element of the root's shape is, and what was computed for it.

    `at` names the position along each axis; with `width` above 1 it names the first of `width` positions along the
    last axis, and `inner` collects the lines that run for each of them.
    """

    writer: TaskWriter
    at: tuple[str, ...]
    width: int = 1
    item: str = ""
    inner: list[str] = field(default_factory=list)
    known: dict[tuple[int, tuple[str, ...]], str] = field(default_factory=dict)

    @property
    def vector(self) -> str:
        """Name of the axis along which `width` elements lie, '' if there is but one."""
        return self.at[-1] if self.width > 1 else ""

    def operand(self, operand: Operand, at: Sequence[str]) -> str:
        """Text of an fp32 operand at a position of the result; axes of size 1 broadcast."""
        if not isinstance(operand, Value):
            return literal(operand)
        where = tuple("0" if size == 1 else i for i, size in zip(at, operand.shape, strict=True))
        text = self.element(operand, where)
        return text if operand.dtype == float32 else f'T.cast({text}, "float32")'

    def element(self, value: Value, at: tuple[str, ...]) -> str:
        """Text of one element; the lines that it needs are added once."""
        key = value.id, at
        if key not in self.known:
            self.known[key] = self._element(value, at)
        return self.known[key]

    def _element(self, value: Value, at: tuple[str, ...]) -> str:
        if value.id in self.writer.fragments or value.id in self.writer.kept:
            return self.kept(value, at)
        return self.compute(self.writer.definitions[value.id], at)

    def kept(self, value: Value, at: tuple[str, ...]) -> str:
        """Text of an element of a value that has an array."""
        if value.id in self.writer.fragments:
            return f"{self.writer.fragments[value.id]}[{', '.join(at)}]"
        if self.writer.threads == 1:
            return f"t{value.id}[{', '.join(at or ('0',))}]"
        if not self.item or at != self.at:
            op = self.writer.definitions[value.id]
            raise self.writer.refuse(
                op, "each thread keeps its own elements of this tile, but others are read with it later; "
                "load or compute it where it is used, or use the Triton backend",
            )  # fmt: skip
        return f"t{value.id}[{self.item}, e]" if self.width > 1 else f"t{value.id}[{self.item}, 0]"

    def compute(self, op: Op, at: tuple[str, ...]) -> str:
        """Text of an element of the op's result, from its operands."""
        if isinstance(op, Load):
            return self._load(op, at)
        if isinstance(op, Expand):
            return self.element(op.value, (*at[: op.axis], *at[op.axis + 1 :]))
        if isinstance(op, Transpose):
            return self.element(op.value, at[::-1])
        if isinstance(op, Cast):
            return self._cast(op, at)
        assert isinstance(op, Elementwise)
        operands = [self.operand(o, at) for o in op.operands]
        return self._let(TILELANG_FUNCTIONS[op.function].format(*operands))

    def _cast(self, op: Cast, at: tuple[str, ...]) -> str:
        source = self.element(op.value, at)
        if self.writer.target == "c" and op.result.dtype == bfloat16:
            raise self.writer.refuse(op, "this target computes in fp32 and cannot round to bfloat16; use target 'cuda'")
        return f"T.cast({source}, {TILELANG_TYPES[op.result.dtype]})"

    def _let(self, text: str) -> str:
        name = self.writer.fresh("v")
        self.inner.append(f"{name} = {text}")
        return name

    def flush(self) -> None:
        """Write the lines collected so far: those that compute one element."""
        for line in self.inner:
            self.writer.line(line)
        self.inner.clear()

    def _load(self, op: Load, at: tuple[str, ...]) -> str:
        spot = self.spot(op.memory, op.index, op.peer, at)
        if self.width > 1:
            return self._vector_load(op, spot, at)
        text = spot.text()
        return text if spot.condition is None else f"T.if_then_else({spot.condition}, {text}, {_zero(op)})"

    def _vector_load(self, op: Load, spot: Spot, at: tuple[str, ...]) -> str:
        """Load before anything is computed: `width` elements at once, or one that all share."""
        writer, dtype = self.writer, TILELANG_TYPES[op.memory.dtype]
        along = self.vector in at
        name = writer.array("l", (self.width if along else 1,), dtype)
        if along:
            self._move(op, spot, f"{name}[e]", spot.text("e"))
            return f"{name}[e]"
        self._move(op, spot, f"{name}[0]", spot.text())
        return f"{name}[0]"

    def copy(self, op: Load, at: tuple[str, ...], target: Spot) -> None:
        """Load and store: with nothing in between the compiler keeps both `width` elements wide."""
        spot = self.spot(op.memory, op.index, op.peer, at)
        self._move(op, spot, target.text("e"), spot.text("e"))

    def _move(self, op: Load, spot: Spot, place: str, text: str) -> None:
        """`place = text`, for a vector if it names one, and zero where the row is masked."""
        writer = self.writer
        lanes = (f"for e in T.vectorized({self.width}):",) if place.endswith("e]") else ()
        if spot.condition is None:
            with writer.blocks(lanes):
                writer.line(f"{place} = {text}")
            return
        with writer.block(f"if {spot.condition}:"), writer.blocks(lanes):
            writer.line(f"{place} = {text}")
        with writer.block("else:"), writer.blocks(lanes):
            writer.line(f"{place} = {_zero(op)}")

    def spot(self, memory: Memory, index: Index, peer: Peer, at: tuple[str, ...]) -> Spot:
        """Where the element at `at` of a tile lies; lines that look up listed rows and peers are added."""
        writer, scalar = self.writer, self.writer.scalar
        positions, texts, masks, row_at = iter(at), [], [], "0"
        for item in index:
            if isinstance(item, Expr):
                texts.append(scalar(item))
            elif isinstance(item, Slice):
                texts.append(_plus(scalar(item.start), next(positions)))
            else:
                row_at = next(positions)
                row = writer.named("r", self._entry(item, row_at))
                masks.append(row)
                texts.append(row)
        if not isinstance(peer, Rows):
            return Spot(writer.tensor(memory, peer), tuple(texts), tuple(masks))
        rank = writer.named("q", f"T.max({self._entry(peer, row_at)}, 0)")
        return Spot(writer.tensor(memory, rank), tuple(texts), tuple(masks))

    def _entry(self, rows: Rows, at: str) -> str:
        """The entry of a table that lists the row at position `at`."""
        scalar = self.writer.scalar
        texts = [_plus(scalar(i.start), at) if isinstance(i, Slice) else scalar(i) for i in rows.index]
        return f"{self.writer.tensor(rows.table, None)}[{', '.join(texts)}]"


@contextmanager
def elements(writer: TaskWriter, value: Value, extents: Sequence[Expr]) -> Iterator[Nest]:
    """Loops over the first `extents` of a tile, where the writer's target keeps it."""
    loops = _serial_loops
    if writer.threads > 1:
        loops = _fragment_loops if in_fragments(writer, value) else _thread_loops
    with loops(writer, value.shape, extents) as nest:
        yield nest


def in_fragments(writer: TaskWriter, value: Value) -> bool:
    """Whether a value lies in fragments, or is computed from one that does."""
    if value.id in writer.fragments:
        return True
    return value.id not in writer.kept and any(in_fragments(writer, o) for o in operands(writer.definitions[value.id]))


@contextmanager
def _fragment_loops(writer: TaskWriter, shape: tuple[int, ...], extents: Sequence[Expr]) -> Iterator[Nest]:
    """One parallel loop, which TileLang deals to threads as the fragments lie."""
    names = tuple(writer.fresh("i") for _ in shape)
    pairs = zip(names, shape, extents, strict=True)
    condition = _all([f"{name} < {writer.scalar(e)}" for name, size, e in pairs if not _fills(writer, e, size)])
    head = f"for {', '.join(names)} in T.Parallel({', '.join(map(str, shape))}):"
    with writer.blocks((head, f"if {condition}:") if condition else (head,)):
        yield Nest(writer, names)


def _fills(writer: TaskWriter, extent: Expr, size: int) -> bool:
    """Whether an extent is always the whole `size`."""
    return interval(extent, writer.known)[0] >= size


@contextmanager
def _serial_loops(writer: TaskWriter, shape: tuple[int, ...], extents: Sequence[Expr]) -> Iterator[Nest]:
    names = tuple(writer.fresh("i") for _ in shape)
    heads = tuple(
        f"for {name} in T.serial({writer.scalar(extent)}):" for name, extent in zip(names, extents, strict=True)
    )
    with writer.blocks(heads):
        yield Nest(writer, names)


@contextmanager
def _thread_loops(writer: TaskWriter, shape: tuple[int, ...], extents: Sequence[Expr]) -> Iterator[Nest]:
    """Vectors are dealt to threads in row-major order, so that neighbours lie in neighbouring threads."""
    width = writer.width if shape and shape[-1] % writer.width == 0 else 1
    vectors = math.prod(shape) // width
    item = writer.fresh("i")
    names = tuple(writer.fresh("i") for _ in shape)
    with writer.block(f"for {item} in T.unroll({items(writer, shape)}):"):
        flat = writer.fresh("i")
        writer.line(f"{flat} = {item} * {writer.threads} + thread")
        conditions = [f"{flat} < {vectors}"] if vectors % writer.threads else []
        span = vectors
        for axis, (name, size, extent) in enumerate(zip(names, shape, extents, strict=True)):
            last = axis == len(shape) - 1
            step = width if last else 1
            count = size // step
            span //= count
            quotient = flat if span == 1 else f"{flat} // {span}"
            inner = quotient if axis == 0 else f"{quotient} % {count}"
            writer.line(f"{name} = {inner}" + (f" * {step}" if step > 1 else ""))
            if not _fills(writer, extent, size):
                conditions.append(f"{name} < {writer.scalar(extent)}")
        condition = _all(conditions)
        with writer.blocks((f"if {condition}:",) if condition else ()):
            yield Nest(writer, names, width, item)


def items(writer: TaskWriter, shape: tuple[int, ...]) -> int:
    """Vectors of a tile of `shape` that one thread takes."""
    width = writer.width if shape and shape[-1] % writer.width == 0 else 1
    return -(-math.prod(shape) // width // writer.threads)


def _plus(start: str, position: str) -> str:
    if start == "0":
        return position
    return start if position == "0" else f"{start} + {position}"


def _all(conditions: Sequence[str]) -> str | None:
    """The conditions joined."""
    if not conditions:
        return None
    text = conditions[0]
    for condition in conditions[1:]:
        text = f"T.And({text}, {condition})"
    return text


def _zero(op: Load) -> str:
    return f"T.cast(0, {TILELANG_TYPES[op.memory.dtype]})"
