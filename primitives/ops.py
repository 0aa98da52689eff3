"""The ops of a tile task: one definition each.

An op is a frozen dataclass that names its result, operands and attributes.  Everything
else that a pass wants to know of it is a *reading*, kept in a table keyed by the op's
class: the memory it touches (`accesses` here), its cost (`compiler/cost.py`), its
printed form (`compiler/printer.py`), its meaning (`codegen/reference`) and its text in
each backend.  A test walks ops × readings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeAlias

from tileweave.errors import SourceLocation
from tileweave.primitives.dtypes import DType
from tileweave.primitives.expr import Const, Expr, LoopIndex, minimum
from tileweave.primitives.memory import IndexItem, Memory, Rows, Signal

Index: TypeAlias = tuple[IndexItem, ...]
Peer: TypeAlias = Expr | Rows | None
Operand: TypeAlias = "Value | float"


@dataclass(frozen=True, slots=True)
class Value:
    """A tile: a static `shape`, and for each dimension the extent of its valid part.

    What lies outside the extents is undefined: loads skip it, stores do not write it,
    dots and reductions do not read it. `mutable` values are accumulators.
    """

    id: int
    shape: tuple[int, ...]
    extents: tuple[Expr, ...] = field(compare=False)
    dtype: DType = field(compare=False)
    mutable: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return f"%{self.id}"

    @property
    def type_text(self) -> str:
        """`float32[<=128, 64]`, where `<=` marks a dimension that may be ragged."""
        sizes = [
            str(size) if extent == Const(size) else f"<={size}"
            for size, extent in zip(self.shape, self.extents, strict=True)
        ]
        return f"{self.dtype}[{', '.join(sizes)}]"


class Scope(Enum):
    """Who must see the effect: workers of this rank, or those of every rank."""

    GPU = "gpu"
    SYSTEM = "sys"


class Order(Enum):
    """Memory ordering of a signal, wait or fence."""

    RELAXED = "relaxed"
    ACQUIRE = "acquire"
    RELEASE = "release"
    ACQ_REL = "acq_rel"


@dataclass(frozen=True, slots=True)
class Op:
    """Base of all ops; `location` is the user's line."""

    location: SourceLocation | None


@dataclass(frozen=True, slots=True)
class Load(Op):
    """`result` = the tile at `index` of `memory`, on rank `peer` or here; rows that a table masks are zero."""

    result: Value
    memory: Memory
    index: Index
    peer: Peer


@dataclass(frozen=True, slots=True)
class Store(Op):
    """Write `value`, rounded to the memory's dtype, to `index` of `memory`, on rank `peer` or here."""

    memory: Memory
    index: Index
    value: Value
    peer: Peer


@dataclass(frozen=True, slots=True)
class Copy(Op):
    """Bulk copy of equal shape between memories, without a tile: `put` (to a peer) and `get` (from one)."""

    target: Memory
    target_index: Index
    target_peer: Peer
    source: Memory
    source_index: Index
    source_peer: Peer


@dataclass(frozen=True, slots=True)
class Fill(Op):
    """`result` = an accumulator with every element `value`."""

    result: Value
    value: float


@dataclass(frozen=True, slots=True)
class Dot(Op):
    """`accumulator` += `a` [M, K] times `b` [K, N], accumulated in fp32 in ascending chunks of K."""

    accumulator: Value
    a: Value
    b: Value


@dataclass(frozen=True, slots=True)
class Elementwise(Op):
    """`result` = `function` of the operands, element by element, in fp32; size-1 dimensions broadcast."""

    result: Value
    function: str
    operands: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Cast(Op):
    """`result` = `value` rounded to the nearest of the result's dtype, ties to even.

    What is beyond the range of float8_e4m3fn, infinity too, becomes its largest number, ±448; NaN stays NaN.
    """

    result: Value
    value: Value


@dataclass(frozen=True, slots=True)
class Expand(Op):
    """`result` = `value` with a new dimension of size 1 at `axis`."""

    result: Value
    value: Value
    axis: int


@dataclass(frozen=True, slots=True)
class Transpose(Op):
    """`result` [N, M] = `value` [M, N] transposed."""

    result: Value
    value: Value


@dataclass(frozen=True, slots=True)
class Reduce(Op):
    """`result` = sum or maximum of `value` over the extent of `axis`, in ascending index order; keeps the axis."""

    result: Value
    function: Literal["sum", "max"]
    value: Value
    axis: int


@dataclass(frozen=True, slots=True)
class Update(Op):
    """The accumulator `target` = `value`."""

    target: Value
    value: Value


@dataclass(frozen=True, slots=True)
class SignalOp(Op):
    """Add `amount` to one counter on rank `peer` or here, ordered after what the task did before."""

    signal: Signal
    index: tuple[Expr, ...]
    amount: Expr
    peer: Expr | None
    order: Order
    scope: Scope


@dataclass(frozen=True, slots=True)
class WaitOp(Op):
    """Block until this rank's counter reaches `target`, ordered before what the task does after."""

    signal: Signal
    index: tuple[Expr, ...]
    target: Expr
    order: Order
    scope: Scope


@dataclass(frozen=True, slots=True)
class Fence(Op):
    """Order memory accesses of this task before and after it."""

    order: Order
    scope: Scope


@dataclass(frozen=True, slots=True)
class For(Op):
    """Run `body` for `index` = start, start + step, … below stop."""

    index: LoopIndex
    start: Expr
    stop: Expr
    step: int
    body: tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class When(Op):
    """Run `body` if `condition` holds."""

    condition: Expr
    body: tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class GridDim:
    """One named dimension of a task's grid; its extent may use the dimensions to its left."""

    name: str
    extent: Expr


Role: TypeAlias = Literal["comm", "relay", "compute", "reduce"]
ROLES: tuple[Role, ...] = ("comm", "relay", "compute", "reduce")


@dataclass(frozen=True, slots=True)
class Task:
    """A tile task: for each point of `grid`, run `body`."""

    name: str
    grid: tuple[GridDim, ...]
    role: Role
    body: tuple[Op, ...]
    location: SourceLocation | None

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of the grid dimensions."""
        return tuple(d.name for d in self.grid)


def narrow(a: Expr, b: Expr, size: int) -> Expr:
    """The smaller of two extents of an axis of `size`, without a `min` where one is the whole axis."""
    if a == b or b == Const(size):
        return a
    return b if a == Const(size) else minimum(a, b)


def stored_extents(op: Store) -> tuple[Expr, ...]:
    """What a store writes: the valid part of both its value and its place, per axis of the value."""
    sliced = [i for i in op.index if not isinstance(i, Expr)]
    return tuple(narrow(i.extent, extent, i.size) for i, extent in zip(sliced, op.value.extents, strict=True))


def copied_extents(op: Copy) -> tuple[Expr, ...]:
    """What a bulk copy moves: the valid part of both its ends."""
    target = [i for i in op.target_index if not isinstance(i, Expr)]
    source = [i for i in op.source_index if not isinstance(i, Expr)]
    return tuple(narrow(a.extent, b.extent, a.size) for a, b in zip(target, source, strict=True))


AccessKind: TypeAlias = Literal["read", "write"]


@dataclass(frozen=True, slots=True)
class Access:
    """One tile of memory that an op reads or writes; `extents` is its valid part, one a sliced dimension."""

    kind: AccessKind
    memory: Memory
    index: Index
    peer: Peer
    extents: tuple[Expr, ...]


ACCESSES: dict[type[Op], Callable[..., tuple[Access, ...]]] = {
    Load: lambda op: (Access("read", op.memory, op.index, op.peer, op.result.extents),),
    Store: lambda op: (Access("write", op.memory, op.index, op.peer, stored_extents(op)),),
    Copy: lambda op: (
        Access("read", op.source, op.source_index, op.source_peer, copied_extents(op)),
        Access("write", op.target, op.target_index, op.target_peer, copied_extents(op)),
    ),
    **dict.fromkeys(
        (Fill, Dot, Elementwise, Cast, Expand, Transpose, Reduce, Update, SignalOp, WaitOp, Fence, For, When),
        lambda op: (),
    ),
}

TILE_OPERANDS: dict[type[Op], Callable[..., tuple[Value, ...]]] = {
    Load: lambda op: (),
    Store: lambda op: (op.value,),
    Copy: lambda op: (),
    Fill: lambda op: (),
    Dot: lambda op: (op.accumulator, op.a, op.b),
    Elementwise: lambda op: tuple(o for o in op.operands if isinstance(o, Value)),
    Cast: lambda op: (op.value,),
    Expand: lambda op: (op.value,),
    Transpose: lambda op: (op.value,),
    Reduce: lambda op: (op.value,),
    Update: lambda op: (op.target, op.value),
    SignalOp: lambda op: (),
    WaitOp: lambda op: (),
    Fence: lambda op: (),
    For: lambda op: (),
    When: lambda op: (),
}


def accesses(op: Op) -> tuple[Access, ...]:
    """The memory that `op` itself touches; a loop or guard touches none, its body does."""
    return ACCESSES[type(op)](op)


def operands(op: Op) -> tuple[Value, ...]:
    """The tiles that `op` itself reads, in order."""
    return TILE_OPERANDS[type(op)](op)


def result(op: Op) -> Value | None:
    """The tile that `op` defines."""
    return getattr(op, "result", None)


def nested(op: Op) -> tuple[Op, ...]:
    """The body of a loop or guard."""
    return op.body if isinstance(op, (For, When)) else ()


def walk(body: tuple[Op, ...]) -> Iterator[Op]:
    """All ops of `body`, outer before inner, in order."""
    for op in body:
        yield op
        yield from walk(nested(op))


def op_classes() -> tuple[type[Op], ...]:
    """Every op class."""
    return tuple(ACCESSES)
