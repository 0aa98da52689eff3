"""Writing one task as C: lines, names, and how an element of a tile value is spelled."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tileweave.codegen.c.functions import C_FUNCTIONS
from tileweave.codegen.c.scalars import Scalars, identifier
from tileweave.codegen.c.scratch import Scratch
from tileweave.codegen.lower import Lowered, LoweredTask
from tileweave.compiler.printer import place
from tileweave.primitives.dtypes import DType, bfloat16, float8_e4m3fn, float32, int32
from tileweave.primitives.expr import Expr
from tileweave.primitives.memory import Memory, Rows, Slice
from tileweave.primitives.ops import Cast, Elementwise, Expand, Index, Load, Op, Operand, Peer, Transpose, Value

C_TYPES: Mapping[DType, str] = {float32: "float", bfloat16: "uint16_t", float8_e4m3fn: "uint8_t", int32: "int32_t"}
ROUND: Mapping[DType, str] = {
    float32: "(float){}",
    bfloat16: "tw_round_bf16({})",
    float8_e4m3fn: "tw_round_e4m3({})",
}
"""A float rounded to a type that tiles may have."""
WIDEN: Mapping[DType, str] = {bfloat16: "tw_from_bf16({})", float8_e4m3fn: "tw_from_e4m3({})"}
NARROW: Mapping[DType, str] = {bfloat16: "tw_to_bf16({})", float8_e4m3fn: "tw_to_e4m3({})"}


@dataclass
class TaskWriter:
    """Text of one task under construction."""

    lowered: Lowered
    task: LoweredTask
    places: Scratch
    scalar: Scalars
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    names: int = 0

    def line(self, text: str) -> None:
        """Append a line at the present depth."""
        self.lines.append("    " * self.depth + text)

    def note(self, op: Op) -> None:
        """A comment that names the user's line."""
        where = place(op.location)
        text = op.location.text.strip() if op.location is not None else ""
        if where:
            self.line(f"/* {where}: {text.replace('*/', '* /')} */" if text else f"/* {where} */")

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """A braced block."""
        self.line(f"{head} {{".lstrip())
        self.depth += 1
        yield
        self.depth -= 1
        self.line("}")

    def fresh(self, stem: str) -> str:
        """A name that is new in this task."""
        self.names += 1
        return f"{stem}{self.names}"

    def base(self, memory: Memory, peer: str | None) -> str:
        """Pointer to the first element of `memory`, on this rank or on rank `peer`."""
        if peer is None:
            return identifier(memory.name)
        offset = self.lowered.segment.offset_bytes[memory.name]
        return f"(({C_TYPES[memory.dtype]} *)(launch->heap[{peer}] + INT64_C({offset})))"

    def scratch(self, value: Value) -> str:
        """Name of the scratch array of a kept value."""
        return f"t{value.id}"

    def kept(self, value: Value) -> bool:
        """Whether `value` lies in scratch."""
        return value.id in self.places.offset


@dataclass
class Loop:
    """The loop nest of one root op: statements for the outer level and for the innermost one."""

    writer: TaskWriter
    indices: tuple[str, ...]
    outer: list[str] = field(default_factory=list)
    inner: list[str] = field(default_factory=list)
    known: dict[tuple[int, tuple[str, ...]], str] = field(default_factory=dict)

    @property
    def last(self) -> str:
        """Index of the innermost loop, '' if there is none."""
        return self.indices[-1] if self.indices else ""

    def operand(self, operand: Operand, indices: Sequence[str]) -> str:
        """Text of `operand` at `indices` of the result; size-1 axes broadcast."""
        if not isinstance(operand, Value):
            return literal(operand)
        at = tuple("0" if size == 1 else i for i, size in zip(indices, operand.shape, strict=True))
        return self.element(operand, at)

    def element(self, value: Value, at: tuple[str, ...]) -> str:
        """Text of one element; statements that compute it are added to the loop once."""
        key = (value.id, at)
        if key not in self.known:
            self.known[key] = self._compute(value, at)
        return self.known[key]

    def _compute(self, value: Value, at: tuple[str, ...]) -> str:
        if self.writer.kept(value):
            return f"{self.writer.scratch(value)}[{_static_linear(at, value.shape)}]"
        op = self.writer.task.definitions[value.id]
        if isinstance(op, Load):
            return self._load(op, at)
        return self.compute(op, at)

    def compute(self, op: Op, at: tuple[str, ...]) -> str:
        """Text of an element of the pure op's result from its operands."""
        if isinstance(op, Load):
            return self._load(op, at)
        if isinstance(op, Expand):
            return self.element(op.value, (*at[: op.axis], *at[op.axis + 1 :]))
        if isinstance(op, Transpose):
            return self.element(op.value, at[::-1])
        if isinstance(op, Cast):
            source = self.element(op.value, at)
            return self._name(ROUND[op.result.dtype].format(source))
        assert isinstance(op, Elementwise)
        operands = [self.operand(o, at) for o in op.operands]
        return self._name(C_FUNCTIONS[op.function].format(*operands))

    def _name(self, text: str) -> str:
        name = self.writer.fresh("v")
        self.inner.append(f"const float {name} = {text};")
        return name

    def _load(self, op: Load, at: tuple[str, ...]) -> str:
        pointer, masks = self.pointer(Access(op.memory, op.index, op.peer, "const "), at)
        text = widen(op.memory.dtype, pointer)
        return text if not masks else self._masked(op.memory.dtype, masks, text)

    def _masked(self, dtype: DType, masks: list[str], text: str) -> str:
        if dtype == int32:
            return f"({' || '.join(f'{m} < 0' for m in masks)} ? 0 : {text})"
        return self._name(f"{' || '.join(f'{m} < 0' for m in masks)} ? 0.0f : {text}")

    def pointer(self, access: Access, at: tuple[str, ...]) -> tuple[str, list[str]]:
        """`p[inner]` for one element, with the part that the inner loop does not change hoisted; and its row masks."""
        parts = _address_parts(self, access, at)
        moving = [p for p in parts.offsets if self.last and self.last in p.split()]
        fixed = [p for p in parts.offsets if p not in moving]
        name = self.writer.fresh("p")
        base = " + ".join([self.writer.base(access.memory, parts.peer), *fixed])
        guard = f"{' || '.join(f'{m} < 0' for m in parts.masks)} ? 0 : " if parts.masks else ""
        target = self.inner if parts.in_inner else self.outer
        c_type = f"{access.const}{C_TYPES[access.memory.dtype]} *"
        cast = f"({c_type})" if guard else ""
        target.append(f"{c_type}const {name} = {guard}{cast}{'(' if guard else ''}{base}{')' if guard else ''};")
        return f"{name}[{' + '.join(moving) or '0'}]", parts.masks


@dataclass(frozen=True)
class Access:
    """A place in memory: `const` is 'const ' for reads."""

    memory: Memory
    index: Index
    peer: Peer
    const: str


@dataclass
class _Address:
    offsets: list[str]
    masks: list[str]
    peer: str | None
    in_inner: bool


def _address_parts(loop: Loop, access: Access, at: tuple[str, ...]) -> _Address:
    """Offset terms of one element, row variables that may be masked, and the peer."""
    memory, positions, scalar = access.memory, iter(at), loop.writer.scalar
    offsets: list[str] = []
    masks: list[str] = []
    in_inner = False
    row_at = "0"
    for axis, item in enumerate(access.index):
        step = scalar.stride(memory.dims, axis)
        if isinstance(item, Expr):
            offsets.append(_scaled(scalar(item), step))
            continue
        index = next(positions)
        if isinstance(item, Slice):
            offsets += [_scaled(scalar(item.start), step), _scaled(index, step)]
            continue
        row_at = index
        in_inner |= bool(loop.last) and index == loop.last
        name = loop.writer.fresh("r")
        (loop.inner if in_inner else loop.outer).append(f"const int64_t {name} = {_row(scalar, item, index)};")
        masks.append(name)
        offsets.append(_scaled(name, step))
    return _Address([o for o in offsets if o != "0"], masks, _peer(loop, access.peer, row_at, in_inner), in_inner)


def _peer(loop: Loop, peer: Peer, row_at: str, in_inner: bool) -> str | None:
    if peer is None:
        return None
    if isinstance(peer, Expr):
        return loop.writer.scalar(peer)
    name = loop.writer.fresh("q")
    (loop.inner if in_inner else loop.outer).append(f"const int64_t {name} = {_row(loop.writer.scalar, peer, row_at)};")
    return name


def _row(scalar: Scalars, rows: Rows, at: str) -> str:
    """Entry `at` of a list of rows."""
    indices = [f"({scalar(i.start)} + {at})" if isinstance(i, Slice) else f"({scalar(i)})" for i in rows.index]
    return f"{identifier(rows.table.name)}[{scalar.linear(indices, rows.table.dims)}]"


def _scaled(text: str, step: str) -> str:
    if text == "0" or step == "1":
        return text
    return f"{text} * {step}"


def _static_linear(at: Sequence[str], shape: tuple[int, ...]) -> str:
    text, factor = "", 1
    for index, size in reversed(list(zip(at, shape, strict=True))):
        if index != "0":
            term = index if factor == 1 else f"{index} * {factor}"
            text = f"{term} + {text}" if text else term
        factor *= size
    return text or "0"


def literal(value: float) -> str:
    """A float constant."""
    if math.isfinite(value):
        return f"{float(value)!r}f"
    if math.isnan(value):
        return '__builtin_nanf("")'
    return "__builtin_inff()" if value > 0 else "(-__builtin_inff())"


def widen(dtype: DType, text: str) -> str:
    """A stored element as a float (int32 stays as it is)."""
    return WIDEN.get(dtype, "{}").format(text)


def narrow_to(dtype: DType, text: str) -> str:
    """A float as a stored element."""
    return NARROW.get(dtype, "{}").format(text)
