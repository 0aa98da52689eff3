"""Sends between nodes as bulk puts: what a network moves is a block of symmetric memory, not a tile of registers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from tileweave.codegen.copies import expand_copies
from tileweave.errors import CompileError
from tileweave.primitives.expr import Const, Expr, Rank, walk
from tileweave.primitives.memory import IndexItem, Memory, Slice, Symmetric
from tileweave.primitives.ops import (
    Copy,
    Fence,
    For,
    Index,
    Op,
    SignalOp,
    Store,
    Task,
    WaitOp,
    When,
    copied_extents,
    stored_extents,
)
from tileweave.primitives.ops import walk as walk_ops


@dataclass(frozen=True)
class Sends:
    """A task whose sends are puts, and the memory, one of its own for each worker, in which it stages them."""

    task: Task
    stages: tuple[Symmetric, ...]


def with_puts(task: Task) -> Sends:
    """Send from symmetric memory: what comes from elsewhere is staged there first, whole rows at a time if it can be.

    Before: `for i in 0 .. 7168 step 64: store received[r +: 128, i +: 64 < 7168] @ peer = %0`
    After:  `for i in 0 .. 7168 step 64: store stage0[0 +: 128, i +: 64 < 7168] = %0`
            `copy received[r +: 128, 0 +: 7168] @ peer = stage0[0 +: 128, 0 +: 7168]`

    Raises:
        CompileError: a block to send is not made of rows.
    """
    expanded = expand_copies(task, keep=lambda op: is_put(op) and isinstance(op.source, Symmetric))
    stages: list[Symmetric] = []
    body = tuple(_staged(expanded.body, f"stage_{task.name}_", stages))
    for op in walk_ops(body):
        if isinstance(op, Copy):
            put_of(op)
    return Sends(replace(expanded, body=body), tuple(stages))


def is_put(op: Op) -> bool:
    """Whether `op` is a bulk copy to a peer."""
    return isinstance(op, Copy) and op.target_peer not in (None, Rank())


def _is_send(op: Op) -> bool:
    return isinstance(op, Store) and op.peer not in (None, Rank())


def _staged(body: tuple[Op, ...], name: str, stages: list[Symmetric]) -> Iterator[Op]:
    for op in body:
        if isinstance(op, Store) and _is_send(op):
            yield from _stage(op, None, name, stages)
        elif isinstance(op, For) and (send := _row_loop(op)) is not None:
            *before, put = _stage(send, op, name, stages)
            yield replace(op, body=tuple(before[0] if inner is send else inner for inner in op.body))
            yield put
        elif isinstance(op, (For, When)):
            yield replace(op, body=tuple(_staged(op.body, name, stages)))
        else:
            yield op


def _row_loop(op: For) -> Store | None:
    """The send of a loop that goes along whole rows of its target and does nothing else that a peer can see."""
    sends = [inner for inner in walk_ops(op.body) if _is_send(inner)]
    if len(sends) != 1 or sends[0] not in op.body:
        return None
    if any(isinstance(inner, (SignalOp, WaitOp, Fence)) for inner in walk_ops(op.body)):
        return None
    send = sends[0]
    assert isinstance(send, Store)
    along = send.index[-1]
    if not isinstance(along, Slice) or send.memory.dims[-1] != op.stop or op.start != Const(0) or op.step != along.size:
        return None
    whole = along.start == op.index and along.stop == op.stop
    whole = whole and send.value.extents[-1] in (along.extent, Const(along.size))
    fixed = [send.peer, *_scalars(send.index[:-1]), *send.value.extents[:-1]]
    return send if whole and not any(isinstance(e, Expr) and op.index in walk(e) for e in fixed) else None


def _scalars(index: Index) -> Iterator[Expr]:
    for item in index:
        if isinstance(item, Expr):
            yield item
        elif isinstance(item, Slice):
            yield from (item.start, item.extent)
        else:
            yield from _scalars(item.index)


def _stage(send: Store, loop: For | None, name: str, stages: list[Symmetric]) -> tuple[Op, Op]:
    """Store to a stage, and the put from it; with `loop` the put is of whole rows."""
    items = [item for item in send.index if not isinstance(item, Expr)]
    extents = list(stored_extents(send))
    sizes = [item.size for item in items]
    local: list[IndexItem] = [Slice(Const(0), item.size, item.extent) for item in items]
    target = send.index
    if loop is not None:
        whole = send.memory.dims[-1]
        assert isinstance(whole, Const)
        sizes[-1], extents[-1] = whole.value, whole
        local[-1] = items[-1]
        target = (*send.index[:-1], Slice(Const(0), whole.value, None))
    stage = Symmetric(sizes, send.memory.dtype, f"{name}{len(stages)}")
    stages.append(stage)
    source = tuple(
        Slice(Const(0), size, None if extent == Const(size) else extent)
        for size, extent in zip(sizes, extents, strict=True)
    )
    store = Store(send.location, stage, tuple(local), send.value, None)
    return store, Copy(send.location, send.memory, target, send.peer, stage, source, None)


@dataclass(frozen=True)
class Put:
    """A put as `rows` rows of `columns` elements; `contiguous` if they follow one another at both ends."""

    rows: Expr
    columns: Expr
    contiguous: bool


def put_of(op: Copy) -> Put:
    """The rows that a bulk copy moves.

    Raises:
        CompileError: it moves something else than rows.
    """
    if not isinstance(op.target_index[-1], Slice) or not isinstance(op.source_index[-1], Slice):
        raise _not_rows(op)
    *leading, columns = copied_extents(op)
    if len(leading) > 1:
        raise _not_rows(op)
    if not leading:
        return Put(Const(1), columns, contiguous=True)
    ends = ((op.target, op.target_index), (op.source, op.source_index))
    return Put(leading[0], columns, all(_whole_rows(memory, index) for memory, index in ends))


def _not_rows(op: Copy) -> CompileError:
    return CompileError(
        f"a send to another node needs rows, slices of the last dimension of '{op.target.name}' and at most one more; "
        "loop over the other dimensions",
        op.location,
    )


def _whole_rows(memory: Memory, index: Index) -> bool:
    """Whether consecutive rows of a block lie end to end."""
    rows, columns = index[-2], index[-1]
    assert isinstance(columns, Slice)
    full = (
        columns.start == Const(0) and memory.dims[-1] == Const(columns.size) and columns.extent == Const(columns.size)
    )
    return isinstance(rows, Slice) and full


def signal_of_put(body: tuple[Op, ...]) -> tuple[Copy, SignalOp] | None:
    """A put and the signal right behind it, if a network may deliver the signal with the put's data.

    It may if there is nothing else that the signal has to come after: the put is the only one, and runs once.
    """
    if sum(is_put(op) for op in walk_ops(body)) != 1:
        return None
    for op, following in pairwise((*body, None)):
        if isinstance(op, When) and (found := signal_of_put(op.body)) is not None:
            return found
        if isinstance(op, Copy) and is_put(op) and isinstance(following, SignalOp):
            together = following.peer == op.target_peer and put_of(op).contiguous
            return (op, following) if together else None
    return None
