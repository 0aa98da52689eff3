"""Pass 2, verify: the rules that every recorded program obeys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tileweave.compiler.program import Program
from tileweave.errors import SourceLocation, VerifyError
from tileweave.primitives import expr
from tileweave.primitives.expr import Binary, Const, Dim, Expr, Index, LoopIndex, Rank, TableRead
from tileweave.primitives.memory import IndexItem, Rows, Slice, Symmetric
from tileweave.primitives.ops import Copy, For, Op, Order, SignalOp, Task, WaitOp, When, accesses, walk

COPIES_APART = (
    "a bulk copy moves rows in no promised order, so its source and target must not overlap on one rank; load the tile "
    "and store it, or copy by way of other memory"
)


def verify(program: Program) -> Program:
    """Return `program` unchanged if it obeys every rule of `RULES`.

    Raises:
        VerifyError: naming the rule's violation at the user's line.
    """
    for rule in RULES:
        rule(program)
    return program


def has_tasks(program: Program) -> None:
    """A kernel declares at least one task, and each task does something."""
    if not program.tasks:
        raise VerifyError(f"kernel '{program.name}' declares no task; add one with @tw.task", program.location)
    for task in program.tasks:
        if not task.body:
            raise VerifyError(f"task '{task.name}' records no op", task.location)


def names_are_plain(program: Program) -> None:
    """Names of memories, dimensions and grid indices are identifiers, and stay apart when dots become underscores."""
    named = [("memory", m.name) for m in program.memories] + [("dynamic dimension", d) for d in program.dims]
    for task in program.tasks:
        _check_names([*named, *(("grid dimension", d) for d in task.dims)], task.location)
    _check_names(named, program.location)


def dims_are_bound(program: Program) -> None:
    """Each dynamic dimension is the size of an argument, so that a launch knows its value."""
    for memory in program.arguments:
        for size in memory.dims:
            if not isinstance(size, (Const, Dim)):
                raise VerifyError(
                    f"argument '{memory.name}' has size `{size}`; give a number, or the name of a dynamic dimension",
                    program.location,
                )
    bound = {d.name for m in program.arguments for d in m.dims if isinstance(d, Dim)}
    for name in program.dims:
        if name not in bound:
            raise VerifyError(
                f"dynamic dimension '{name}' is the size of no tensor or table, so no launch could know it",
                program.location,
            )


def symmetric_shapes_are_static(program: Program) -> None:
    """Symmetric memory and signals have one shape on all ranks, so their sizes are plain numbers."""
    for memory in (*program.symmetric, *program.signals, *program.workspaces):
        for size in memory.dims:
            if not isinstance(size, Const):
                raise VerifyError(
                    f"{memory.space} memory '{memory.name}' has size `{size}`, which is known only at launch; "
                    "give a static capacity",
                    program.location,
                )
            if size.value <= 0:
                raise VerifyError(f"{memory.space} memory '{memory.name}' has size {size.value}", program.location)


def symbols_are_in_scope(program: Program) -> None:
    """Scalars of a task use only its own grid indices and the loops around them."""
    for task in program.tasks:
        known: set[Expr] = set()
        for dim in task.grid:
            _check_symbols(dim.extent, known, task.location, task)
            known.add(Index(dim.name))
        _check_body(task.body, known, task)


def orders_make_sense(program: Program) -> None:
    """A signal releases and a wait acquires, or either is relaxed."""
    for task in program.tasks:
        for op in walk(task.body):
            if isinstance(op, SignalOp) and op.order is Order.ACQUIRE:
                raise VerifyError("a signal publishes: its order is RELEASE, ACQ_REL or RELAXED", op.location)
            if isinstance(op, WaitOp) and op.order in (Order.RELEASE, Order.ACQ_REL):
                raise VerifyError("a wait observes: its order is ACQUIRE or RELAXED", op.location)


def peers_have_symmetric_memory(program: Program) -> None:
    """Only symmetric memory is addressed on a peer."""
    for task in program.tasks:
        for op in walk(task.body):
            for access in accesses(op):
                if access.peer is not None and not isinstance(access.memory, Symmetric):
                    raise VerifyError(f"'{access.memory.name}' is not symmetric and has no peers", op.location)


def copies_stay_apart(program: Program) -> None:
    """A bulk copy does not write what it reads, as far as that is plain; the regions of a routing tell the rest."""
    for task in program.tasks:
        for op in walk(task.body):
            if not isinstance(op, Copy) or op.source.name != op.target.name:
                continue
            here = program.world_size == 1 or all(p in (None, Rank()) for p in (op.source_peer, op.target_peer))
            if here and all(map(_surely_overlap, op.source_index, op.target_index)):
                raise VerifyError(f"this copies '{op.source.name}' onto itself: {COPIES_APART}", op.location)


RULES: tuple[Callable[[Program], None], ...] = (
    has_tasks,
    names_are_plain,
    dims_are_bound,
    symmetric_shapes_are_static,
    symbols_are_in_scope,
    orders_make_sense,
    peers_have_symmetric_memory,
    copies_stay_apart,
)


def _surely_overlap(a: IndexItem, b: IndexItem) -> bool:
    """Whether two items share a position, whatever the values of symbols."""
    if isinstance(a, Rows) or isinstance(b, Rows):
        return False
    if any(isinstance(item, Slice) and item.stop is not None for item in (a, b)):
        return False  # either may be empty
    (base_a, low_a), (base_b, low_b) = (_base_and_offset(i.start if isinstance(i, Slice) else i) for i in (a, b))
    size_a, size_b = (item.size if isinstance(item, Slice) else 1 for item in (a, b))
    return base_a == base_b and low_a < low_b + size_b and low_b < low_a + size_a


def _base_and_offset(scalar: Expr) -> tuple[Expr, int]:
    """`i * 4 + 3` as (`i * 4`, 3)."""
    if isinstance(scalar, Const):
        return Const(0), scalar.value
    if isinstance(scalar, Binary) and scalar.op in ("add", "sub") and isinstance(scalar.rhs, Const):
        base, offset = _base_and_offset(scalar.lhs)
        return base, offset + (scalar.rhs.value if scalar.op == "add" else -scalar.rhs.value)
    return scalar, 0


def _check_names(named: Sequence[tuple[str, str]], location: SourceLocation | None) -> None:
    seen: dict[str, str] = {}
    for what, name in named:
        if not name.isascii() or not all(part.isidentifier() for part in name.split(".")):
            raise VerifyError(f"{what} {name!r} needs a name of letters, digits and underscores", location)
        plain = name.replace(".", "_")
        if plain in seen:
            raise VerifyError(f"{what} '{name}' and {seen[plain]} have the same name in generated code", location)
        seen[plain] = f"{what} '{name}'"


def _check_body(body: tuple[Op, ...], known: set[Expr], task: Task) -> None:
    for op in body:
        for scalar in scalars(op):
            _check_symbols(scalar, known, op.location, task)
        if isinstance(op, For):
            _check_body(op.body, known | {op.index}, task)
        elif isinstance(op, When):
            _check_body(op.body, known, task)


def _check_symbols(scalar: Expr, known: set[Expr], location: SourceLocation | None, task: Task) -> None:
    for part in expr.walk(scalar):
        if isinstance(part, (Index, LoopIndex)) and part not in known:
            raise VerifyError(
                f"task '{task.name}' uses `{part}` outside its grid or loop",
                location,
            )
        if isinstance(part, TableRead) and not part.indices:
            raise VerifyError(f"table '{part.table}' is read without an index", task.location)


def scalars(op: Op) -> Iterator[Expr]:
    """The scalar expressions that `op` itself evaluates."""
    for access in accesses(op):
        for item in (*access.index, access.peer):
            yield from _item_scalars(item)
    if isinstance(op, SignalOp):
        yield from (*op.index, op.amount)
        if op.peer is not None:
            yield op.peer
    elif isinstance(op, WaitOp):
        yield from (*op.index, op.target)
    elif isinstance(op, For):
        yield from (op.start, op.stop)
    elif isinstance(op, When):
        yield op.condition


def _item_scalars(item: object) -> Iterator[Expr]:
    if isinstance(item, Slice):
        yield from (item.start,) if item.stop is None else (item.start, item.stop)
    elif isinstance(item, Rows):
        for inner in item.index:
            yield from _item_scalars(inner)
    elif isinstance(item, Expr):
        yield item
