"""Mistakes of kernel authors, with the exact text and the line they are shown at."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import tileweave as tw
from tileweave.errors import ConfigError, DTypeError, ShapeError, TraceError
from tileweave.primitives.expr import Expr


def trace(body: Callable[[tw.Tensor, tw.Table, Expr], object]) -> None:
    """Trace a kernel of one task over `m < 4`."""

    @tw.kernel
    def wrong(x: tw.Tensor, table: tw.Table) -> None:
        @tw.task(grid={"m": 4})
        def only(m: Expr) -> None:
            body(x, table, m)

    tw.compile(wrong, tw.Tensor(("n", 64)), tw.Table((5,)))


def row(x: tw.Tensor, m: Expr) -> tw.Tile:
    return tw.load(x, (tw.ds(m * 4, 4), tw.ds(0, 64)))


def branch(x: tw.Tensor, table: tw.Table, m: Expr) -> object:
    return 1 if m < 2 else 2


def loop_value_escapes(x: tw.Tensor, table: tw.Table, m: Expr) -> None:
    for i in tw.range(3):
        tile = tw.load(x, (i, tw.ds(0, 64)))
    tw.store(x, (m, tw.ds(0, 64)), tile)


def left_early(x: tw.Tensor, table: tw.Table, m: Expr) -> None:
    for _ in tw.range(3):
        row(x, m)
        break


MISTAKES: list[tuple[str, Callable[[tw.Tensor, tw.Table, Expr], object], type[Exception], str]] = [
    (
        "branch on a symbol", branch, TraceError,
        "the value of `m < 2` is known only at run time, so Python cannot branch on it; "
        "use tw.when(condition) for a guard, or tw.range(n) for a loop",
    ),
    (
        "symbol as integer", lambda x, t, m: list(range(m)), TraceError,  # type: ignore[call-overload]
        "`m` is known only at run time and cannot be used as a Python integer; "
        "use tw.range(n) to loop over it, or make it a keyword-only parameter of the kernel",
    ),
    (
        "value used after its loop", loop_value_escapes, TraceError,
        "tile %0 was made inside a tw.range, tw.when or task that has ended; to carry a value "
        "out of a loop, make an accumulator with tw.zeros before it and update it with += or tw.dot",
    ),
    (
        "break in a loop", left_early, TraceError,
        "this tw.range loop was left by break or return, so its body would be lost; "
        "guard ops with tw.when(condition) instead",
    ),
    (
        "too few indices", lambda x, t, m: tw.load(x, m), ShapeError,
        "'x' has 2 dimensions [n, 64], but tw.load gives 1 indices",
    ),
    (
        "store of another shape", lambda x, t, m: tw.store(x, (tw.ds(0, 2), tw.ds(0, 64)), row(x, m)), ShapeError,
        "tw.store of a tile of shape [4, 64] to [2, 64] elements of 'x'",
    ),
    (
        "sizes differ", lambda x, t, m: row(x, m) + tw.load(x, (tw.ds(0, 2), tw.ds(0, 64))), ShapeError,
        "tw.add of tiles whose sizes differ in dimension 0: float32[4, 64], float32[2, 64]",
    ),
    (
        "dimensions differ", lambda x, t, m: row(x, m) * tw.load(x, (m, tw.ds(0, 64))), ShapeError,
        "tw.multiply of tiles with different numbers of dimensions: float32[4, 64], float32[64]; "
        "add one with tile[:, None]",
    ),
    (
        "dot of unfit tiles", lambda x, t, m: tw.dot(row(x, m), row(x, m)), ShapeError,
        "tw.dot of float32[4, 64] with float32[4, 64]: need [M, K] and [K, N]",
    ),
    (
        "peer of local memory", lambda x, t, m: tw.remote_store(x, (tw.ds(0, 4), tw.ds(0, 64)), row(x, m), 0),
        TraceError,
        "tw.remote_store with a peer needs symmetric memory, but 'x' is tensor; declare it with tw.symmetric",
    ),
    (
        "truth of a tile", lambda x, t, m: 1 if row(x, m) else 2, ShapeError,
        "a tile has no single truth value; use tw.select(condition, a, b) to choose element by element",
    ),
    (
        "slice of a tile", lambda x, t, m: row(x, m)[0:2], ShapeError,
        "a tile is indexed only to add one dimension, as in tile[:, None]; to read a part of memory, "
        "load it with tw.ds",
    ),
    (
        "scalar as tile", lambda x, t, m: row(x, m) * m, DTypeError,
        "tw.multiply got the scalar `m` as a tile operand; scalars form addresses only",
    ),
    (
        "slice of dynamic size", lambda x, t, m: tw.ds(0, m), ShapeError,
        "tw.ds needs a static size above 0, got Index(name='m')",
    ),
    (
        "table of another rank", lambda x, t, m: t[m, 0], ShapeError,
        "table 'table' has 1 dimensions, but 2 indices were given",
    ),
    (
        "update of a value", lambda x, t, m: tw.assign(row(x, m), row(x, m)), DTypeError,
        "%0 is not an accumulator; make it with tw.zeros or tw.full",
    ),
    (
        "comparison with a number", lambda x, t, m: 1 if m == 0 else 2, TraceError,
        "`m == 0` is known only at run time, so Python cannot compare it; use (m).equals(0) as a recorded condition",
    ),
    (
        "arithmetic of int32", lambda x, t, m: tw.load(tw.workspace("n", (4,), "int32"), tw.ds(0, 4)) * 2, DTypeError,
        "tw.multiply of int32: int32 tiles are only moved from memory to memory; keep numbers in float32",
    ),
    (
        "unknown dtype", lambda x, t, m: row(x, m).cast("fp8"), DTypeError,
        "dtype fp8 is not supported; use one of float32, bfloat16, float8_e4m3fn, int32",
    ),
    (
        "cast to int32", lambda x, t, m: row(x, m).cast("int32"), DTypeError,
        "tw.cast to int32: tiles of numbers are float32, bfloat16 or float8_e4m3fn",
    ),
    (
        "dot of int32", lambda x, t, m: tw.dot(
            *[tw.load(tw.workspace("n", (4, 4), "int32"), (tw.ds(0, 4), tw.ds(0, 4)))] * 2
        ),
        DTypeError, "tw.dot takes tiles of float32, bfloat16 or float8_e4m3fn, got int32",
    ),
    (
        "copy to e4m3", lambda x, t, m: tw.put(
            tw.symmetric("s", (4,), "float8_e4m3fn"), tw.ds(0, 4), tw.workspace("w", (4,)), tw.ds(0, 4), 0
        ), DTypeError, "tw.put copies float32 to float8_e4m3fn; it does not cast",
    ),
    (
        "int32 memory of e4m3", lambda x, t, m: tw.store(
            tw.workspace("n", (4, 64), "int32"), (tw.ds(0, 4), tw.ds(0, 64)), row(x, m).cast("float8_e4m3fn")
        ), DTypeError, "tw.store of a float8_e4m3fn tile to int32 memory 'n'",
    ),
    (
        "signal outside the world", lambda x, t, m: tw.signal(tw.signals("done", (1,)), 0, peer=7), TraceError,
        "peer 7 is outside the world of 1 ranks",
    ),
    (
        "division by zero", lambda x, t, m: m // 0 + (m - m) + 1 // (m * 0), TraceError,
        "division by zero in `1 // 0`",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("body", "kind", "text"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_mistake(body: Callable[[tw.Tensor, tw.Table, Expr], object], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        trace(body)
    error = caught.value
    assert isinstance(error, TraceError)
    assert error.message == text
    assert error.location is not None
    assert error.location.file == __file__


def test_error_draws_a_caret() -> None:
    with pytest.raises(TraceError) as caught:
        trace(branch)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"{__file__}:")
    source, caret = lines[-2].split("| ", 1)[1], lines[-1].split("| ", 1)[1]
    assert source.strip() == "return 1 if m < 2 else 2"
    assert source[caret.index("^") : caret.rindex("^") + 1] == "m < 2"


def test_outside_a_kernel() -> None:
    with pytest.raises(TraceError, match=r"call them in a function under @tw\.kernel"):
        tw.zeros((4, 4))


def test_kernel_is_not_called() -> None:
    @tw.kernel
    def empty(x: tw.Tensor) -> None:
        pass

    with pytest.raises(TraceError, match=r"kernel 'empty' is compiled before it is called: tw.compile\(empty, …\)"):
        empty(1)


def test_unknown_tunable() -> None:
    @tw.kernel
    def tuned(x: tw.Tensor, *, block: int = 4) -> None:
        pass

    with pytest.raises(ConfigError) as caught:
        tw.compile(tuned, tw.Tensor((4,)), config=tw.Config(tunables={"blok": 1}))
    assert str(caught.value) == "kernel 'tuned' has no tunable 'blok'; it has block"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"workers": 0}, "Config.workers=0: expected 1 to 1024"),
        (
            {"workers": 2, "comm_workers": 2},
            "Config.comm_workers=2 of workers=2: expected 0 to 1, so that at least one worker computes",
        ),
        ({"queue": "both"}, "Config.queue='both': expected 'static' or 'dynamic'"),
    ],
)
def test_config(values: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tw.Config(**values)  # type: ignore[arg-type]
    assert str(caught.value) == text
