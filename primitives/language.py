"""What a kernel author writes with: `import tileweave as tw`, then these names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, TypeAlias, overload

from tileweave.errors import DTypeError, ShapeError, TraceError
from tileweave.primitives import dtypes, expr
from tileweave.primitives.expr import Expr, Rank, ScalarLike, as_expr, ceildiv, simplify, static_size
from tileweave.primitives.memory import IndexItem, Memory, Rows, Signal, Slice, Symmetric, Table, Workspace, ds
from tileweave.primitives.ops import (
    ROLES,
    Copy,
    Dot,
    Fence,
    Fill,
    For,
    Index,
    Load,
    Order,
    Peer,
    Reduce,
    Role,
    Scope,
    SignalOp,
    Store,
    Task,
    WaitOp,
    When,
)
from tileweave.primitives.recorder import current
from tileweave.primitives.source import caller_location
from tileweave.primitives.tile import Tile, TileLike, any_float, assign, elementwise, floats, number, visible

IndexLike: TypeAlias = "ScalarLike | Slice | Rows | tuple[ScalarLike | Slice | Rows, ...]"
PeerLike: TypeAlias = "ScalarLike | Rows | None"
Extent: TypeAlias = "ScalarLike | Callable[..., ScalarLike]"

__all__ = [
    "Extent", "Order", "Scope", "Slice", "Tile", "abs", "assign", "cast", "ceildiv", "dot", "ds", "erf", "exp", "fence",
    "full", "gather", "get", "load", "log", "max", "maximum", "minimum", "multicast", "put", "range", "rank",
    "remote_load", "remote_store", "rsqrt", "scatter", "select", "sigmoid", "signal", "signals", "sqrt", "store",
    "sum", "symmetric", "tanh", "task", "wait", "when", "workspace", "world_size", "zeros",
]  # fmt: skip


# ---------------------------------------------------------------- declarations


def task(*, grid: Mapping[str, Extent] | None = None, role: Role = "compute") -> Callable[[Callable[..., None]], Task]:
    """Declare a tile task: the function below runs once for each point of `grid`.

    Args:
        grid: names and extents of the dimensions, outer first; without one, the task runs once
            a rank. An extent is a number, a scalar read from a table, or a function of
            dimensions to its left, named by its parameters:
            `grid={"expert": n, "m": lambda expert: tw.ceildiv(rows[expert], 128)}`.
        role: `comm`, `relay`, `compute` or `reduce`; the schedule splits workers by it.

    Raises:
        TraceError: outside a kernel, in another task, a name taken, or a role unknown.
    """
    if role not in ROLES:
        raise TraceError(f"role '{role}' is unknown; use one of {', '.join(ROLES)}", caller_location())
    return lambda function: current().record_task(function, grid or {}, role)


def symmetric(name: str, shape: tuple[ScalarLike, ...], dtype: object = dtypes.float32) -> Symmetric:
    """Declare symmetric memory: the same shape on every rank, addressable by all."""
    return current().declare(Symmetric(shape, dtype, name))


def workspace(name: str, shape: tuple[ScalarLike, ...], dtype: object = dtypes.float32) -> Workspace:
    """Declare scratch memory of this rank."""
    return current().declare(Workspace(shape, dtype, name))


def signals(name: str, shape: tuple[ScalarLike, ...]) -> Signal:
    """Declare an array of counters, zero at the start of each launch, that all ranks may add to."""
    return current().declare(Signal(shape, name=name))


def rank() -> Expr:
    """The rank that runs the tile."""
    current()
    return Rank()


def world_size() -> int:
    """The number of ranks; a plain integer, so Python loops over it unroll."""
    return current().world_size


# ---------------------------------------------------------------- control flow


def range(start: ScalarLike, stop: ScalarLike | None = None, step: int = 1) -> Iterator[Expr]:
    """Record a loop; the body below `for i in tw.range(…)` is traced once."""
    recorder = current()
    location = caller_location()
    first, last = (as_expr(0), as_expr(start)) if stop is None else (as_expr(start), as_expr(stop))
    if not isinstance(step, int) or step <= 0:
        raise TraceError(f"tw.range needs a static step above 0, got {step!r}", location)
    index = recorder.new_loop_index()
    recorder.unfinished.append(location)
    with recorder.nested_block() as block:
        yield index
    recorder.unfinished.pop()
    recorder.emit(For(location, index, first, last, step, tuple(block.ops)))


@contextmanager
def when(condition: ScalarLike) -> Iterator[None]:
    """Record a guard: the body under `with tw.when(…)` runs only if `condition` holds."""
    recorder = current()
    location = caller_location()
    with recorder.nested_block() as block:
        yield
    recorder.emit(When(location, as_expr(condition), tuple(block.ops)))


# ---------------------------------------------------------------- memory


def load(memory: Memory, index: IndexLike) -> Tile:
    """The tile at `index` of this rank's `memory`; one `tw.ds` slice (or scalar) a dimension."""
    return _load("load", memory, index, None)


def remote_load(memory: Memory, index: IndexLike, peer: PeerLike) -> Tile:
    """The tile at `index` of `memory` on rank `peer`."""
    return _load("remote_load", memory, index, peer)


def gather(memory: Memory, index: IndexLike, peer: PeerLike = None) -> Tile:
    """As `load`, with `table.rows(…)` in place of a slice; entries below 0 give rows of zeros.

    `peer` may be `table.rows(…)` too: then each row comes from a rank of its own.
    """
    _need_rows("gather", index)
    return _load("gather", memory, index, peer)


def store(memory: Memory, index: IndexLike, value: Tile) -> None:
    """Write `value` to `index` of this rank's `memory`, rounded to its dtype."""
    _store("store", memory, index, value, None)


def remote_store(memory: Memory, index: IndexLike, value: Tile, peer: PeerLike) -> None:
    """Write `value` to `index` of `memory` on rank `peer`."""
    _store("remote_store", memory, index, value, peer)


def scatter(memory: Memory, index: IndexLike, value: Tile, peer: PeerLike = None) -> None:
    """As `store`, with `table.rows(…)` in place of a slice; entries below 0 are skipped."""
    _need_rows("scatter", index)
    _store("scatter", memory, index, value, peer)


def multicast(memory: Memory, index: IndexLike, value: Tile) -> None:
    """Write `value` to `index` of `memory` on every rank."""
    for peer in range(world_size()):
        remote_store(memory, index, value, peer)


def put(target: Memory, target_index: IndexLike, source: Memory, source_index: IndexLike, peer: ScalarLike) -> None:
    """Copy a block of this rank's `source` to `target` on rank `peer`, without a tile in between."""
    _copy("put", (target, target_index, peer), (source, source_index, None))


def get(target: Memory, target_index: IndexLike, source: Memory, source_index: IndexLike, peer: ScalarLike) -> None:
    """Copy a block of `source` on rank `peer` to this rank's `target`."""
    _copy("get", (target, target_index, None), (source, source_index, peer))


def _copy(what: str, target: tuple[Memory, IndexLike, PeerLike], source: tuple[Memory, IndexLike, PeerLike]) -> None:
    target_items, source_items = _index(what, target[0], target[1]), _index(what, source[0], source[1])
    sizes = [[i.size for i in items if not isinstance(i, Expr)] for items in (target_items, source_items)]
    if sizes[0] != sizes[1]:
        raise ShapeError(f"tw.{what} copies {sizes[1]} elements to {sizes[0]}; the sizes must agree", caller_location())
    if target[0].dtype != source[0].dtype:
        raise DTypeError(
            f"tw.{what} copies {source[0].dtype} to {target[0].dtype}; it does not cast", caller_location()
        )
    op = Copy(
        caller_location(),
        target[0], target_items, _peer(what, target[0], target_items, target[2]),
        source[0], source_items, _peer(what, source[0], source_items, source[2]),
    )  # fmt: skip
    current().emit(op)


def _load(what: str, memory: Memory, index: IndexLike, peer: PeerLike) -> Tile:
    items = _index(what, memory, index)
    sliced = [i for i in items if not isinstance(i, Expr)]
    value = current().new_value([i.size for i in sliced], [i.extent for i in sliced], memory.dtype)
    current().emit(Load(caller_location(), value, memory, items, _peer(what, memory, items, peer)))
    return Tile(value)


def _store(what: str, memory: Memory, index: IndexLike, value: Tile, peer: PeerLike) -> None:
    items = _index(what, memory, index)
    source = visible(value)
    if source.dtype.is_float != memory.dtype.is_float:
        raise DTypeError(
            f"tw.{what} of a {source.dtype} tile to {memory.dtype} memory '{memory.name}'", caller_location()
        )
    sizes = tuple(i.size for i in items if not isinstance(i, Expr))
    if sizes != source.shape:
        raise ShapeError(
            f"tw.{what} of a tile of shape {list(source.shape)} to {list(sizes)} elements of '{memory.name}'",
            caller_location(),
        )
    current().emit(Store(caller_location(), memory, items, source, _peer(what, memory, items, peer)))


def _index(what: str, memory: Memory, index: IndexLike) -> Index:
    if not isinstance(memory, Memory) or isinstance(memory, (Table, Signal)):
        raise TraceError(
            f"tw.{what} needs a tensor, workspace or symmetric memory, got {type(memory).__name__}", caller_location()
        )
    items = index if isinstance(index, tuple) else (index,)
    if len(items) != memory.ndim:
        raise ShapeError(
            f"'{memory.name}' has {memory.ndim} dimensions [{', '.join(map(str, memory.dims))}], "
            f"but tw.{what} gives {len(items)} indices",
            caller_location(),
        )
    if len([i for i in items if isinstance(i, Rows)]) > 1:
        raise ShapeError(
            f"tw.{what} of '{memory.name}' lists rows in two dimensions; list them in one and loop over the other",
            caller_location(),
        )
    return tuple(i if isinstance(i, (Slice, Rows)) else as_expr(i) for i in items)


def _peer(what: str, memory: Memory, items: tuple[IndexItem, ...], peer: PeerLike) -> Peer:
    if peer is None:
        return None
    if not isinstance(memory, Symmetric):
        raise TraceError(
            f"tw.{what} with a peer needs symmetric memory, but '{memory.name}' is {memory.space}; "
            "declare it with tw.symmetric",
            caller_location(),
        )
    if isinstance(peer, Rows):
        rows = [i for i in items if isinstance(i, Rows)]
        if not rows or rows[0].size != peer.size:
            raise ShapeError(f"tw.{what} with a peer a row needs rows of the same size", caller_location())
        return peer
    return _rank_in_world(as_expr(peer))


def _rank_in_world(peer: Expr) -> Expr:
    fixed = simplify(peer)
    if isinstance(fixed, int) and not 0 <= fixed < current().world_size:
        raise TraceError(f"peer {fixed} is outside the world of {current().world_size} ranks", caller_location())
    return peer


def _need_rows(what: str, index: IndexLike) -> None:
    if not any(isinstance(i, Rows) for i in (index if isinstance(index, tuple) else (index,))):
        raise ShapeError(f"tw.{what} needs table.rows(…) in its index", caller_location())


# ---------------------------------------------------------------- tiles


def zeros(shape: tuple[ScalarLike, ...]) -> Tile:
    """A float32 accumulator of zeros."""
    return full(shape, 0.0)


def full(shape: tuple[ScalarLike, ...], value: float) -> Tile:
    """A float32 accumulator with every element `value`."""
    if not isinstance(shape, (tuple, list)):
        raise ShapeError(f"a shape is a tuple of sizes, as in (128, 64), got {shape!r}", caller_location())
    sizes = [size for size in map(static_size, shape) if size is not None]
    if len(sizes) != len(shape):
        raise ShapeError(f"a tile needs static sizes above 0, got {shape!r}", caller_location())
    result = current().new_value(sizes, [as_expr(size) for size in sizes], dtypes.float32, mutable=True)
    current().emit(Fill(caller_location(), result, number("full", value)))
    return Tile(result)


def dot(a: Tile, b: Tile, accumulator: Tile | None = None) -> Tile:
    """`accumulator` += `a` [M, K] times `b` [K, N], in place and returned; in fp32, K ascending.

    Without an accumulator a new one is made.
    """
    left, right = visible(a), visible(b)
    if len(left.shape) != 2 or len(right.shape) != 2 or left.shape[1] != right.shape[0]:
        raise ShapeError(
            f"tw.dot of {left.type_text} with {right.type_text}: need [M, K] and [K, N]", caller_location()
        )
    for operand in (left, right):
        if not operand.dtype.is_float:
            raise DTypeError(f"tw.dot takes tiles of {any_float()}, got {operand.dtype}", caller_location())
    shape = (left.shape[0], right.shape[1])
    total = zeros(shape) if accumulator is None else accumulator
    goal = visible(total)
    if not goal.mutable or goal.shape != shape:
        raise ShapeError(f"tw.dot needs an accumulator tw.zeros({shape}), got {goal.type_text}", caller_location())
    if goal in (left, right):
        raise ShapeError("tw.dot reads its own accumulator; accumulate into another one", caller_location())
    current().emit(Dot(caller_location(), goal, left, right))
    return total


def cast(tile: Tile, dtype: object) -> Tile:
    """`tile` rounded to `dtype`, to nearest, ties to even.

    To float8_e4m3fn numbers beyond ±448 saturate, infinities too; NaN stays NaN.
    """
    visible(tile)
    return tile.cast(dtype)


def sum(tile: Tile, axis: int) -> Tile:
    """Sum over the valid part of `axis`, in ascending order; the axis stays, with size 1."""
    return _reduce("sum", tile, axis)


def max(tile: Tile, axis: int) -> Tile:
    """Maximum over the valid part of `axis`; the axis stays, with size 1."""
    return _reduce("max", tile, axis)


def _reduce(function: Literal["sum", "max"], tile: Tile, axis: int) -> Tile:
    value = floats(function, tile)
    if not isinstance(axis, int) or not 0 <= axis < len(value.shape):
        raise ShapeError(f"tw.{function} over axis {axis!r} of {value.type_text}", caller_location())
    shape = [1 if i == axis else size for i, size in enumerate(value.shape)]
    extents = [as_expr(1) if i == axis else e for i, e in enumerate(value.extents)]
    result = current().new_value(shape, extents, dtypes.float32)
    current().emit(Reduce(caller_location(), result, function, value, axis))
    return Tile(result)


def exp(tile: Tile) -> Tile:
    """e to the power of each element."""
    return elementwise("exp", tile)


def log(tile: Tile) -> Tile:
    """Natural logarithm."""
    return elementwise("log", tile)


def sqrt(tile: Tile) -> Tile:
    """Square root."""
    return elementwise("sqrt", tile)


def rsqrt(tile: Tile) -> Tile:
    """One over the square root."""
    return elementwise("rsqrt", tile)


def tanh(tile: Tile) -> Tile:
    """Hyperbolic tangent."""
    return elementwise("tanh", tile)


def erf(tile: Tile) -> Tile:
    """The error function."""
    return elementwise("erf", tile)


def sigmoid(tile: Tile) -> Tile:
    """1 / (1 + exp(-x))."""
    return elementwise("sigmoid", tile)


def abs(tile: Tile) -> Tile:
    """Absolute value."""
    return elementwise("abs", tile)


def select(condition: TileLike, a: TileLike, b: TileLike) -> Tile:
    """`a` where `condition` is not zero, else `b`."""
    return elementwise("select", condition, a, b)


@overload
def maximum(a: Tile, b: TileLike) -> Tile: ...
@overload
def maximum(a: ScalarLike, b: ScalarLike) -> Expr: ...
def maximum(a: Tile | ScalarLike, b: TileLike | ScalarLike) -> Tile | Expr:
    """The larger of two tiles, element by element, or of two scalars."""
    return _extreme("maximum", expr.maximum, a, b)


@overload
def minimum(a: Tile, b: TileLike) -> Tile: ...
@overload
def minimum(a: ScalarLike, b: ScalarLike) -> Expr: ...
def minimum(a: Tile | ScalarLike, b: TileLike | ScalarLike) -> Tile | Expr:
    """The smaller of two tiles, element by element, or of two scalars."""
    return _extreme("minimum", expr.minimum, a, b)


def _extreme(
    name: str,
    scalar: Callable[[ScalarLike, ScalarLike], Expr],
    a: Tile | ScalarLike,
    b: TileLike | ScalarLike,
) -> Tile | Expr:
    if isinstance(a, Tile):
        return elementwise(name, a, b)  # type: ignore[arg-type]  # a scalar operand is refused with a message there
    if isinstance(b, Tile):
        return elementwise(name, b, a)  # type: ignore[arg-type]
    return scalar(a, b)  # type: ignore[arg-type]


# ---------------------------------------------------------------- synchronisation


def signal(
    counters: Signal,
    index: ScalarLike | tuple[ScalarLike, ...],
    amount: ScalarLike = 1,
    peer: ScalarLike | None = None,
    *,
    order: Order = Order.RELEASE,
    scope: Scope = Scope.SYSTEM,
) -> None:
    """Add `amount` to a counter on rank `peer` (this rank by default), after all that the task did before."""
    _check_order("signal", order, scope)
    where = None if peer is None else _rank_in_world(as_expr(peer))
    op = SignalOp(
        caller_location(), counters, _counter("signal", counters, index), as_expr(amount), where, order, scope
    )
    current().emit(op)


def wait(
    counters: Signal,
    index: ScalarLike | tuple[ScalarLike, ...],
    target: ScalarLike,
    *,
    order: Order = Order.ACQUIRE,
    scope: Scope = Scope.SYSTEM,
) -> None:
    """Block until this rank's counter has reached `target` in this launch."""
    _check_order("wait", order, scope)
    fixed = simplify(as_expr(target))
    if isinstance(fixed, int) and fixed < 0:
        raise TraceError(f"tw.wait for {fixed}: counters start at 0 and only grow", caller_location())
    op = WaitOp(caller_location(), counters, _counter("wait", counters, index), as_expr(target), order, scope)
    current().emit(op)


def fence(order: Order = Order.ACQ_REL, scope: Scope = Scope.SYSTEM) -> None:
    """Order the memory accesses of this task before and after this point."""
    _check_order("fence", order, scope)
    current().emit(Fence(caller_location(), order, scope))


def _check_order(what: str, order: Order, scope: Scope) -> None:
    if not isinstance(order, Order) or not isinstance(scope, Scope):
        raise TraceError(
            f"tw.{what} takes an order of tw.Order and a scope of tw.Scope, got {order!r} and {scope!r}",
            caller_location(),
        )


def _counter(what: str, counters: Signal, index: ScalarLike | tuple[ScalarLike, ...]) -> tuple[Expr, ...]:
    if not isinstance(counters, Signal):
        raise TraceError(f"tw.{what} needs counters from tw.signals, got {type(counters).__name__}", caller_location())
    items = index if isinstance(index, tuple) else (index,)
    if len(items) != counters.ndim:
        raise ShapeError(
            f"counters '{counters.name}' have {counters.ndim} dimensions, but tw.{what} gives {len(items)} indices",
            caller_location(),
        )
    return tuple(as_expr(i) for i in items)
