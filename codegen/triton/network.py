"""The Triton text of sends to other nodes, for the companion kernel."""

from __future__ import annotations

from tileweave.codegen.layout import COUNTER_BYTES
from tileweave.codegen.lower import Companion
from tileweave.codegen.puts import put_of, signal_of_put
from tileweave.codegen.triton.scalars import identifier
from tileweave.codegen.triton.writer import TRITON_TYPES, Network, TaskWriter
from tileweave.primitives.expr import Const, Expr
from tileweave.primitives.memory import IndexItem, Memory, Rows, Slice
from tileweave.primitives.ops import Copy, For, Index, SignalOp, Task, walk


def network_of(companion: Companion, task: Task) -> Network:
    """How `task`, one of the companion's, sends."""
    loops = [op for op in walk(task.body) if isinstance(op, For)]
    repeated = frozenset(id(op) for loop in loops for op in walk(loop.body) if isinstance(op, Copy))
    return Network(companion.stage_offset_bytes, signal_of_put(task.body), repeated)


def stage_bindings(companion: Companion, task: Task) -> list[str]:
    """Pointers to the stages of this worker that `task` writes; a stage can be written once its last put is done."""
    used = {op.source.name for op in walk(task.body) if isinstance(op, Copy)}
    lines = [
        f"{name} = pointer(stage, {TRITON_TYPES[memory.dtype]}) + "
        f"{companion.stage_offset_bytes[name] // memory.dtype.itemsize_bytes}"
        for name, memory in companion.stages.items()
        if name in used
    ]
    return [*lines, "quiet()"] if lines else []


def emit_put(writer: TaskWriter, network: Network, op: Copy) -> None:
    """A put of whole rows at once, or row by row."""
    writer.note(op)
    put, peer = put_of(op), op.target_peer
    assert isinstance(peer, Expr)
    size = op.target.dtype.itemsize_bytes
    width = f"tl.cast({writer.scalar(put.columns)}, tl.int64) * {size}"
    function = "put_now" if id(op) in network.repeated else "put"
    if put.contiguous:
        rows = "" if put.rows == Const(1) else f" * {writer.scalar(put.rows)}"
        given = [_place(writer, network, *end, "0") for end in _ends(op)] + [f"{width}{rows}", writer.scalar(peer)]
        if network.together is not None and network.together[0] is op:
            function, signal = "put_signal", network.together[1]
            given += [counter_of(writer, signal), writer.scalar(signal.amount)]
        writer.line(f"{function}({', '.join(given)})")
        return
    writer.names += 1
    row = f"r{writer.names}"
    listed = [item for item in op.target_index if isinstance(item, Rows)]
    with writer.block(f"for {row} in tl.range({writer.scalar(put.rows)}):"):
        given = [_place(writer, network, *end, row) for end in _ends(op)] + [width, writer.scalar(peer)]
        call = f"{function}({', '.join(given)})"
        if not listed:
            writer.line(call)
            return
        with writer.block(f"if {_position(writer, listed[0], row)} >= 0:"):
            writer.line(call)


def emit_signal(writer: TaskWriter, network: Network, op: SignalOp) -> None:
    """A signal to a peer, unless it has gone with the data before it."""
    if network.together is not None and network.together[1] is op:
        return
    assert op.peer is not None
    writer.note(op)
    amount, peer = writer.scalar(op.amount), writer.scalar(op.peer)
    writer.line(f"signal_peer({counter_of(writer, op)}, {amount}, {peer})")


def counter_of(writer: TaskWriter, op: SignalOp) -> str:
    """A counter in this rank's segment."""
    offset = writer.lowered.segment.offset_bytes[op.signal.name] // COUNTER_BYTES
    at = writer.scalar.linear(op.index, op.signal.dims)
    return f"pointer(address(heap, rank), tl.int64) + counters + {offset} + {at}"


def _ends(op: Copy) -> tuple[tuple[Memory, Index], tuple[Memory, Index]]:
    return (op.target, op.target_index), (op.source, op.source_index)


def _place(writer: TaskWriter, network: Network, memory: Memory, index: Index, row: str) -> str:
    """Address, in this rank's segment, of a row of a block."""
    size = memory.dtype.itemsize_bytes
    if memory.name in network.stage_offset_bytes:
        base = f"stage + {network.stage_offset_bytes[memory.name]}"
    else:
        base = f"address(heap, rank) + {writer.lowered.segment.offset_bytes[memory.name]}"
    parts = [base]
    for axis, item in enumerate(index):
        at = _position(writer, item, row if axis < len(index) - 1 else "0")
        if at != "0":
            parts.append(f"tl.cast({at}, tl.int64) * ({writer.scalar.stride(memory.dims, axis)} * {size})")
    return " + ".join(parts)


def _position(writer: TaskWriter, item: IndexItem, row: str) -> str:
    """Where a block's row stands along one axis."""
    if isinstance(item, Expr):
        return writer.scalar(item)
    if isinstance(item, Slice):
        parts = [part for part in (writer.scalar(item.start), row) if part != "0"]
        return " + ".join(parts) or "0"
    at = [_position(writer, inner, row) for inner in item.index]
    text = at[0]
    for position, dim in zip(at[1:], item.table.dims[1:], strict=True):
        text = f"({text}) * {writer.scalar(dim)} + {position}"
    return f"tl.load({identifier(item.table.name)} + {text})"
