"""Text of one task under construction: lines, names that are known, and where tiles lie in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tileweave.codegen.layout import Segment
from tileweave.codegen.lower import Lowered
from tileweave.codegen.triton.scalars import Scalars, identifier
from tileweave.codegen.triton.shapes import Blocks
from tileweave.compiler.bounds import Interval, interval
from tileweave.compiler.printer import place
from tileweave.primitives.dtypes import DType, bfloat16, float8_e4m3fn, float32, int32
from tileweave.primitives.expr import Const, Expr
from tileweave.primitives.memory import Memory, Rows, Slice
from tileweave.primitives.ops import Copy, Index, Op, Operand, Peer, SignalOp, Value

TRITON_TYPES: Mapping[DType, str] = {
    float32: "tl.float32",
    bfloat16: "tl.bfloat16",
    float8_e4m3fn: "tl.float8e4nv",
    int32: "tl.int32",
}
WIDEN: Mapping[DType, str] = {float32: "{}", bfloat16: "{}.to(tl.float32)", float8_e4m3fn: "from_e4m3({})"}
"""A tile in fp32."""
ROUND: Mapping[DType, str] = {float32: "{}", bfloat16: "round_to_bf16({})", float8_e4m3fn: "round_to_e4m3({})"}
"""An fp32 tile in another type."""
_INT32_ELEMENTS = 1 << 31


@dataclass(frozen=True)
class Network:
    """How a task of the companion sends to other nodes.

    stage_offset_bytes: where each stage begins in a worker's. together: a put and the signal that goes with its data.
    repeated: identities of puts in loops, whose stages are written again.
    """

    stage_offset_bytes: Mapping[str, int]
    together: tuple[Copy, SignalOp] | None
    repeated: frozenset[int]


@dataclass
class TaskWriter:
    """Text of one task under construction; with a `network`, of a task of the companion."""

    lowered: Lowered
    blocks: Blocks
    zero_filled: frozenset[int]
    scalar: Scalars
    known: dict[Expr, Interval]
    tma: bool = False
    network: Network | None = None
    descriptors: dict[int, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    names: int = 0
    scopes: list[dict[str, str]] = field(default_factory=lambda: [{}])

    def line(self, text: str) -> None:
        """Append a line at the present depth."""
        self.lines.append("    " * self.depth + text)

    def note(self, op: Op) -> None:
        """A comment that names the user's line, unless the line before stands for the same one."""
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

    def named(self, stem: str, text: str) -> str:
        """A name for `text`; the same one where it is in scope already."""
        for scope in self.scopes:
            if text in scope:
                return scope[text]
        self.names += 1
        name = f"{stem}{self.names}"
        self.line(f"{name} = {text}")
        self.scopes[-1][text] = name
        return name

    def value(self, value: Value) -> str:
        """Name of a tile."""
        return f"v{value.id}"

    def operand(self, operand: Operand) -> str:
        """Text of an fp32 operand."""
        if not isinstance(operand, Value):
            return literal(operand)
        name = self.value(operand)
        return WIDEN[operand.dtype].format(name)

    def rounded(self, value: Value, dtype: DType) -> str:
        """Text of a tile in another element type."""
        name = self.value(value)
        if value.dtype == dtype:
            return name
        return ROUND[dtype].format(self.operand(value))

    def lanes(self, value: Value, axis: int) -> str:
        """Positions along an axis of `value`, shaped to broadcast against it."""
        size = self.blocks.of[value.id][axis]
        return f"tl.arange(0, {size}){spread(axis, len(value.shape))}"

    def inside(self, value: Value, axis: int) -> str | None:
        """Mask of the valid part of an axis, None if all of it is valid."""
        extent = value.extents[axis]
        if extent == Const(self.blocks.of[value.id][axis]):
            return None
        return f"({self.lanes(value, axis)} < {self.scalar(extent)})"


def literal(value: float) -> str:
    """A float constant."""
    if math.isfinite(value):
        return repr(float(value)) if value >= 0 else f"({float(value)!r})"
    return f'float("{value}")'


def spread(axis: int, ndim: int) -> str:
    """Subscript that makes a vector lie along `axis` of `ndim` axes."""
    return "" if ndim < 2 else "[" + ", ".join(":" if a == axis else "None" for a in range(ndim)) + "]"


@dataclass(frozen=True)
class Place:
    """A tile in memory: pointer text and mask text (None: all of it exists)."""

    pointer: str
    mask: str | None

    @property
    def masked(self) -> str:
        """`, mask=…` for a load or store."""
        return "" if self.mask is None else f", mask={self.mask}"


@dataclass(frozen=True)
class Tile:
    """What to address: `index` of `memory` on rank `peer`, for a value with these block sizes."""

    memory: Memory
    index: Index
    peer: Peer
    value: Value


def locate(writer: TaskWriter, tile: Tile, masks: Sequence[str] = ()) -> Place:
    """Pointer and mask of a tile; `masks` are further conditions. Lines that compute them are added to the task."""
    address = _Address(writer, tile)
    for axis, item in enumerate(tile.index):
        address.add(axis, item)
    pointer = " + ".join([address.base(), *address.offsets])
    return Place(pointer, " & ".join([*address.masks, *masks]) or None)


class _Address:
    """Offsets and masks of one tile, axis by axis."""

    def __init__(self, writer: TaskWriter, tile: Tile) -> None:
        self.writer, self.tile = writer, tile
        self.offsets: list[str] = []
        self.masks: list[str] = []
        self.position = 0
        self.rows: tuple[str, str] | None = None
        self.wide = _is_large(tile.memory)

    @property
    def spread(self) -> str:
        return spread(self.position, len(self.tile.value.shape))

    def add(self, axis: int, item: Expr | Slice | Rows) -> None:
        """The offset along one axis of the memory."""
        stride = self.writer.scalar.stride(self.tile.memory.dims, axis)
        if isinstance(item, Expr):
            if item != Const(0):
                self.offsets.append(self._scaled(self.writer.scalar(item), stride))
            return
        block = self.writer.blocks.of[self.tile.value.id][self.position]
        if isinstance(item, Slice):
            name, masks = slice_positions(self.writer, item, block)
        else:
            name, masks = self._listed(item, block)
            self.rows = name, self.spread
        self.offsets.append(self._scaled(name, stride, self.spread))
        self.masks += [f"({mask}){self.spread}" for mask in masks]
        self.position += 1

    def _listed(self, rows: Rows, block: int) -> tuple[str, list[str]]:
        name = entries(self.writer, rows, block, other=-1)
        return name, [f"{name} >= 0"]

    def _scaled(self, text: str, stride: str, spread_text: str = "") -> str:
        wide = f"tl.cast({text}, tl.int64)" if self.wide and stride != "1" else text
        return f"{wide}{spread_text}" + ("" if stride == "1" else f" * {stride}")

    def base(self) -> str:
        """Pointer to the memory's first element, on this rank, on a peer, or on a listed peer for each row."""
        writer, memory = self.writer, self.tile.memory
        peer = self.tile.peer
        if peer is None:
            return identifier(memory.name)
        dtype = TRITON_TYPES[memory.dtype]
        offset = element_offset(writer.lowered.segment, memory)
        if isinstance(peer, Expr):
            return writer.named("p", f"pointer(address(heap, {writer.scalar(peer)}), {dtype}) + {offset}")
        assert self.rows is not None, "peers are listed beside rows"
        rows, along = self.rows
        block = writer.blocks.of[self.tile.value.id][0]
        names = entries(writer, peer, block, other=0)
        bases = writer.named("p", f"tl.load(heap + {names}, mask=({rows} >= 0) & ({names} >= 0), other=0)")
        return writer.named("p", f"pointer({bases}, {dtype}) + {offset}") + along


def element_offset(segment: Segment, memory: Memory) -> int:
    """Where a symmetric memory begins in a segment, in its elements."""
    return segment.offset_bytes[memory.name] // memory.dtype.itemsize_bytes


def slice_positions(writer: TaskWriter, item: Slice, block: int) -> tuple[str, list[str]]:
    """Name of the positions of a slice, and the conditions under which they are valid."""
    start = writer.scalar(item.start)
    name = writer.named("c", f"{start} + tl.arange(0, {block})" if start != "0" else f"tl.arange(0, {block})")
    masks = []
    if block > item.size:
        masks.append(f"tl.arange(0, {block}) < {item.size}")
    if item.stop is not None and not _always_inside(item, writer.known):
        masks.append(f"{name} < {writer.scalar(item.stop)}")
    return name, masks


def _always_inside(item: Slice, known: Mapping[Expr, Interval]) -> bool:
    assert item.stop is not None
    return interval(item.start, known)[1] + item.size <= interval(item.stop, known)[0]


def entries(writer: TaskWriter, rows: Rows, block: int, other: int) -> str:
    """Name of the entries that `rows` lists; `other` where there is none."""
    name, masks = slice_positions(writer, rows.slice, block)
    dims, text = rows.table.dims, ""
    for item, size in zip(rows.index, dims, strict=True):
        at = name if isinstance(item, Slice) else writer.scalar(item)
        text = f"({text}) * {writer.scalar(size)} + {at}" if text else at
    mask = " & ".join(f"({m})" for m in masks)
    masked = f", mask={mask}, other={other}" if mask else ""
    return writer.named("r", f"tl.load({identifier(rows.table.name)} + ({text}){masked})")


def _is_large(memory: Memory) -> bool:
    """Whether an offset may pass 2³¹ elements: so it may where a size is dynamic."""
    sizes = [size.value if isinstance(size, Const) else _INT32_ELEMENTS for size in memory.dims]
    return math.prod(sizes) >= _INT32_ELEMENTS
