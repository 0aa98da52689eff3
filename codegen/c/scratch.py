"""Which values of a task the C engine keeps in a worker's scratch, and which it computes where they are used.

C has no tile values: a value that is read once is spelled out in the loop that reads it,
and any other is an array in scratch.  How much of each accumulator is ever read is
found here too, so that no more of it is filled and computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tileweave.errors import CompileError
from tileweave.primitives.dtypes import DType, bfloat16, float32
from tileweave.primitives.expr import Binary, Const, Expr, LoopIndex, TableRead, walk
from tileweave.primitives.memory import Rows
from tileweave.primitives.ops import (
    Cast,
    Copy,
    Dot,
    Elementwise,
    Expand,
    Fence,
    Load,
    Op,
    Reduce,
    SignalOp,
    Store,
    Task,
    Transpose,
    Update,
    Value,
    WaitOp,
    nested,
    operands,
    result,
    stored_extents,
)

PURE = (Load, Elementwise, Cast, Expand, Transpose)
# What was loaded before one of these is read before it: a peer that is told so may overwrite it.
CLOBBERS = (Store, Copy, SignalOp, WaitOp, Fence)
DOT_TYPES: Mapping[DType, str] = {float32: "TW_F32", bfloat16: "TW_BF16"}
"""What dots read where it lies."""


@dataclass(frozen=True)
class Scratch:
    """Where the values of one task live.

    `offset[id]` is the place, in floats, of a value kept in the worker's scratch; values that
    are not in it are computed where they are used. `filled[id]` are the extents of an
    accumulator that are ever read. `floats` is the size of all.
    """

    offset: Mapping[int, int]
    filled: Mapping[int, tuple[Expr, ...]]
    floats: int


def plan_scratch(task: Task) -> Scratch:
    """Decide for all values of `task`.

    Raises:
        CompileError: an int32 tile would have to be kept.
    """
    uses = _Uses.of(task)
    offset: dict[int, int] = {}
    at = 0
    for value in uses.values:
        if value.id in uses.kept:
            if not value.dtype.is_float:
                raise CompileError(
                    "this int32 tile is stored after something that may change its source; store it at once",
                    uses.definitions[value.id].location,
                )
            offset[value.id] = at
            at += _padded_floats(value)
    return Scratch(offset, {v.id: _filled(v, uses) for v in uses.values if v.mutable}, at)


def _padded_floats(value: Value) -> int:
    count = 1
    for size in value.shape:
        count *= size
    return -(-count // 16) * 16


@dataclass(frozen=True)
class _Place:
    """An op at a position of the flattened body, in a block."""

    op: Op
    block: int
    position: int


class _Uses:
    """Where the values of one task are defined and used, and which must be kept in scratch."""

    def __init__(self, places: Sequence[_Place]) -> None:
        self.places = places
        self.values = [v for p in places if (v := result(p.op)) is not None]
        self.defined = {v.id: p for p in places if (v := result(p.op)) is not None}
        self.definitions = {number: place.op for number, place in self.defined.items()}
        self.users: dict[int, list[_Place]] = {v.id: [] for v in self.values}
        for place in places:
            for operand in operands(place.op):
                self.users[operand.id].append(place)
        self.kept: set[int] = set()
        self.roots: dict[int, list[_Place]] = {}
        # Users come after definitions, so backwards every user is decided before its operands.
        for value in reversed(self.values):
            self.roots[value.id] = self._roots(value)
            if self._must_keep(value):
                self.kept.add(value.id)

    @staticmethod
    def of(task: Task) -> _Uses:
        """Uses of all values of `task`."""
        return _Uses(list(_flatten(task.body)))

    def _roots(self, value: Value) -> list[_Place]:
        """The ops that read memory or scratch for `value`: its users, seen through those computed in place."""
        found: dict[int, _Place] = {}
        for user in self.users[value.id]:
            target = result(user.op) if isinstance(user.op, PURE) else None
            for place in [user] if target is None or target.id in self.kept else self.roots[target.id]:
                found[place.position] = place
        return list(found.values())

    def _must_keep(self, value: Value) -> bool:
        place = self.defined[value.id]
        if not isinstance(place.op, PURE):
            return True
        roots = self.roots[value.id]
        if any(root.block != place.block for root in roots):
            return True
        if self._feeds_dot(value) and not _is_view(place.op):
            return True
        if isinstance(place.op, Transpose) and any(self._rewrites(root, place.op.value) for root in roots):
            return True
        if isinstance(place.op, Load):
            return any(self._memory_changes(place, root) for root in roots)
        if isinstance(place.op, (Elementwise, Cast)) and len(roots) > 1:
            return True
        return any(self._accumulator_changes(operand, place, root) for operand in operands(place.op) for root in roots)

    @staticmethod
    def _rewrites(root: _Place, transposed: Value) -> bool:
        """Whether the root writes an accumulator while it reads it, or what is made from it, at other places."""
        if isinstance(root.op, Dot):
            return root.op.accumulator.id == transposed.id
        return isinstance(root.op, Update)

    def _feeds_dot(self, value: Value) -> bool:
        for user in self.users[value.id]:
            if isinstance(user.op, Dot):
                return True
            if isinstance(user.op, Transpose) and self._feeds_dot(user.op.result):
                return True
        return False

    def _memory_changes(self, place: _Place, root: _Place) -> bool:
        assert isinstance(place.op, Load)
        if isinstance(root.op, Store) and root.op.memory.name == place.op.memory.name:
            return True
        between = self.places[place.position + 1 : root.position]
        return any(isinstance(p.op, CLOBBERS) for p in between)

    def _accumulator_changes(self, operand: Value, place: _Place, root: _Place) -> bool:
        if not operand.mutable:
            return False
        between = self.places[place.position + 1 : root.position]
        return any(
            (isinstance(p.op, Dot) and p.op.accumulator.id == operand.id)
            or (isinstance(p.op, Update) and p.op.target.id == operand.id)
            for p in between
        )

    def read_elsewhere(self, value: Value) -> bool:
        """Whether an accumulator is read in another block than the one that makes it; its own updates do not count."""
        return any(
            root.block != self.defined[value.id].block
            for root in self.roots[value.id]
            if not (isinstance(root.op, Dot) and root.op.accumulator.id == value.id)
            and not (isinstance(root.op, Update) and root.op.target.id == value.id)
        )

    def extents_read(self, value: Value) -> Iterator[tuple[Expr, ...] | None]:
        """What each root reads of `value`; None for a root whose axes do not line up with it."""
        for user in self.users[value.id]:
            if isinstance(user.op, Dot):
                if user.op.accumulator.id != value.id:
                    yield value.extents
                continue
            if isinstance(user.op, Update) and user.op.target.id == value.id:
                continue
            yield from self._read_by(user, value)

    def _read_by(self, user: _Place, value: Value) -> Iterator[tuple[Expr, ...] | None]:
        target = result(user.op)
        if isinstance(user.op, Store):
            yield stored_extents(user.op)
        elif isinstance(user.op, Update):
            # An update of the accumulator by itself reads no more than is read of it elsewhere.
            if user.op.target.id != value.id:
                yield user.op.target.extents
        elif target is None or isinstance(user.op, (Expand, Transpose, Reduce)) or target.shape != value.shape:
            yield None
        elif target.id in self.kept:
            yield target.extents
        else:
            for next_user in self.users[target.id]:
                if not isinstance(next_user.op, Dot):
                    yield from self._read_by(next_user, value)
                else:
                    yield target.extents


def _flatten(body: tuple[Op, ...]) -> Iterator[_Place]:
    counter, blocks = [0], [0]

    def visit(ops: tuple[Op, ...], block: int) -> Iterator[_Place]:
        for op in ops:
            yield _Place(op, block, counter[0])
            counter[0] += 1
            if nested(op):
                blocks[0] += 1
                yield from visit(nested(op), blocks[0])

    yield from visit(body, 0)


def _is_view(op: Op) -> bool:
    """Whether a dot can read the value where it lies: a load whose inner axis is contiguous, or its transpose.

    `tw_dot.h` reads fp32 and bf16; anything else is widened to fp32 in scratch, once a tile.
    """
    if isinstance(op, Transpose):
        return True
    if not isinstance(op, Load) or any(isinstance(i, Rows) for i in (*op.index, op.peer)):
        return False
    return op.memory.dtype in DOT_TYPES and len(op.result.shape) == 2 and not isinstance(op.index[-1], Expr)


def _always_exists(extent: Expr) -> bool:
    """Whether an extent can be evaluated outside the guard or loop that reads it."""
    return not any(
        isinstance(e, TableRead) or (isinstance(e, Binary) and e.op in ("floordiv", "mod")) for e in walk(extent)
    )


def _filled(value: Value, uses: _Uses) -> tuple[Expr, ...]:
    """For each axis the one extent that every reader uses, or the whole axis."""
    reads = list(uses.extents_read(value))
    whole = tuple(Const(size) for size in value.shape)
    if not reads or any(r is None for r in reads):
        return whole
    guarded = uses.read_elsewhere(value)
    filled: list[Expr] = []
    for axis, size in enumerate(whole):
        extents = {r[axis] for r in reads if r is not None}
        only = extents.pop()
        loops = any(isinstance(e, LoopIndex) for e in walk(only))
        filled.append(size if extents or loops or (guarded and not _always_exists(only)) else only)
    return tuple(filled)
