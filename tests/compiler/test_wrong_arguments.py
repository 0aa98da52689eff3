"""Every op, with every wrong kind of argument in every place: an error of Tileweave's at the author's line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import tileweave as tw
from tileweave.compiler.config import GpuConfig

# Names are looked up among what `compile_with` makes; `@text` is the text itself.
CALLS: dict[str, tuple[Any, ...]] = {
    "load": ("x", "at"),
    "remote_load": ("box", "at", 1),
    "gather": ("x", "rows"),
    "store": ("work", "at", "tile"),
    "remote_store": ("box", "at", "tile", 1),
    "scatter": ("work", "rows", "tile"),
    "multicast": ("box", "at", "tile"),
    "put": ("box", "at", "x", "at", 1),
    "get": ("work", "at", "box", "at", 1),
    "zeros": ((4, 4),),
    "full": ((4, 4), 1.0),
    "dot": ("tile", "tile", "total"),
    "cast": ("tile", tw.bfloat16),
    "sum": ("tile", 0),
    "max": ("tile", 1),
    "exp": ("tile",),
    "select": ("tile", "tile", "tile"),
    "maximum": ("tile", "tile"),
    "minimum": ("m", 3),
    "signal": ("done", 0, 1, 1),
    "wait": ("done", 0, 1),
    "fence": (tw.Order.ACQ_REL, tw.Scope.SYSTEM),
    "ds": ("m", 4, 8),
    "ceildiv": ("m", 4),
    "assign": ("total", "tile"),
    "when": ("condition",),
    "range": (0, 4, 1),
}
WRONG: dict[str, Any] = {
    "text": "@nonsense",
    "list": [1.5],
    "object": object(),
    "slice": slice(0, 4),
    "memory of counters": "done",
    "table": "table",
    "complex": 1j,
    "wrong tuple": (None,),
}


def compile_with(use: Callable[[dict[str, Any]], object]) -> tw.CompiledKernel:
    @tw.kernel
    def kernel(x: tw.Tensor, table: tw.Table, out: tw.Tensor) -> None:
        box, work, done = tw.symmetric("box", (8, 8)), tw.workspace("work", (8, 8)), tw.signals("done", (4,))

        @tw.task(grid={"m": 4})
        def body(m: tw.Expr) -> None:
            at = (tw.ds(0, 8), tw.ds(0, 8))
            tile = tw.load(x, at)
            tw.store(out, at, tile)
            rows = (table.rows(tw.ds(0, 8)), tw.ds(0, 8))
            use(
                {"x": x, "table": table, "box": box, "work": work, "done": done, "m": m, "tile": tile, "at": at}
                | {"rows": rows, "total": tw.zeros((8, 8)), "condition": m < 2}
            )

    return tw.compile(kernel, tw.Tensor((8, 8)), tw.Table((8,)), tw.Tensor((8, 8)), world_size=2)


def call(name: str, args: list[Any], names: dict[str, Any]) -> None:
    given = [names.get(a, a.removeprefix("@")) if isinstance(a, str) else a for a in args]
    made = getattr(tw, name)(*given)
    if name == "range":
        for _ in made:
            tw.fence()
    elif name == "when":
        with made:
            tw.fence()


@pytest.mark.parametrize("name", CALLS)
def test_right_arguments(name: str) -> None:
    compile_with(lambda names: call(name, list(CALLS[name]), names))


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize(("name", "place"), [(name, i) for name, args in CALLS.items() for i in range(len(args))])
def test_a_wrong_argument_is_an_error_at_its_line(name: str, place: int, kind: str) -> None:
    args = list(CALLS[name])
    if args[place] == WRONG[kind]:
        return  # right at this place
    args[place] = WRONG[kind]
    with pytest.raises(tw.errors.CompileError) as caught:
        compile_with(lambda names: call(name, args, names))
    assert caught.value.location is not None
    assert caught.value.location.file == __file__


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda n: tw.wait(n["done"], 0, -1), "counters start at 0 and only grow"),
        (lambda n: list(n["table"]), "use tw.range"),
        (lambda n: n["condition"] and n["m"] > 0, "use tw.when"),
        (lambda n: tw.load(n["x"]), "missing 1 required positional argument: 'index'"),  # type: ignore[call-arg]
        (lambda n: n["m"] / 2, "unsupported operand"),
        (lambda n: n["condition"] & "yes", "expected an integer or a recorded scalar"),
        (lambda n: tw.wait(n["done"], 0, 1, order="acquire"), "an order of tw.Order"),  # type: ignore[arg-type]
        (lambda n: tw.ds(0, -4), "static size above 0"),
        (lambda n: tw.zeros((-4, 4)), "static sizes above 0"),
    ],
)
def test_mistakes_are_errors_at_their_line(use: Callable[[dict[str, Any]], object], text: str) -> None:
    with pytest.raises(tw.errors.TraceError, match=text) as caught:
        compile_with(use)
    assert caught.value.location is not None
    assert caught.value.location.file == __file__


@pytest.mark.parametrize("grid", [dict.fromkeys("abcde", 2), 4, {1: 2}, {"a": int}])
def test_wrong_grids(grid: Any) -> None:
    @tw.kernel
    def kernel(x: tw.Tensor) -> None:
        @tw.task(grid=grid)
        def body(a: tw.Expr, b: tw.Expr, c: tw.Expr, d: tw.Expr, e: tw.Expr) -> None:
            tw.store(x, a, tw.load(x, a))

    with pytest.raises(tw.errors.TraceError, match=r"a grid|an extent") as caught:
        tw.compile(kernel, tw.Tensor((2,)))
    assert caught.value.location is not None
    assert caught.value.location.file == __file__


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: tw.Config(workers=1.5), r"Config.workers=1.5: expected a whole number"),
        (lambda: tw.Config(workers="2"), r"Config.workers='2': expected a whole number"),
        (lambda: tw.Config(comm_workers=None), r"Config.comm_workers=None: expected a whole number"),
        (lambda: tw.Config(companion_workers=[]), r"Config.companion_workers=\[\]: expected a whole number"),
        (lambda: tw.Config(tunables=3), r"Config.tunables=3: expected a mapping"),
        (lambda: GpuConfig(stages="3"), r"GpuConfig.stages='3': expected a whole number"),
        (lambda: GpuConfig(registers=1.5), r"GpuConfig.registers=1.5: expected a whole number"),
        (lambda: tw.Config(queue="both"), r"Config.queue='both': expected 'static' or 'dynamic'"),
    ],
)
def test_wrong_configs(make: Callable[[], object], text: str) -> None:
    with pytest.raises(tw.errors.ConfigError, match=text):
        make()


@pytest.mark.parametrize("order", ["soon", None, ["program"]])
def test_unknown_orders(order: Any) -> None:
    @tw.kernel
    def kernel(x: tw.Tensor) -> None:
        @tw.task(grid={"m": 4})
        def body(m: tw.Expr) -> None:
            tw.store(x, m, tw.load(x, m))

    with pytest.raises(tw.errors.ConfigError, match="is unknown; use one of program, sends_first"):
        tw.compile(kernel, tw.Tensor((4,)), config=tw.Config(order=order))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"world_size": "2"}, "world_size='2': expected int, got str"),
        ({"world_size": None}, "world_size=None: expected int"),
        ({"world_size": 1.5}, "world_size=1.5: expected int"),
        ({"world_size": 0}, "world_size=0: expected at least 1"),
        ({"config": 3}, "config=3: expected Config, got int"),
        ({"topology": 3}, "topology=3: expected Topology, got int"),
    ],
)
def test_wrong_requests(given: dict[str, Any], text: str) -> None:
    @tw.kernel
    def kernel(x: tw.Tensor) -> None:
        @tw.task(grid={"m": 4})
        def body(m: tw.Expr) -> None:
            tw.store(x, m, tw.load(x, m))

    with pytest.raises(tw.errors.ConfigError, match=text):
        tw.compile(kernel, tw.Tensor((4,)), **given)


def test_a_function_that_is_no_kernel() -> None:
    with pytest.raises(tw.errors.ConfigError, match=r"expected Kernel, got function; put @tw.kernel on it"):
        tw.compile(lambda x: None, tw.Tensor((4,)))  # type: ignore[arg-type]


@pytest.mark.parametrize("declare", [tw.symmetric, tw.workspace, tw.signals])
@pytest.mark.parametrize(
    "given", [(3, (4,)), (None, (4,)), ("a b", (4,)), ("", (4,)), ("n", 4), ("n", (-1,)), ("n", (2.5,)), ("n", ("x",))]
)
def test_declarations_of_memory(declare: Callable[..., Any], given: tuple[Any, ...]) -> None:
    @tw.kernel
    def declares(x: tw.Tensor) -> None:
        declare(*given)

        @tw.task(grid={})
        def body() -> None:
            tw.store(x, tw.ds(0, 4), tw.load(x, tw.ds(0, 4)))

    with pytest.raises(tw.errors.CompileError) as caught:
        tw.compile(declares, tw.Tensor((4,)))
    assert caught.value.location is not None


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: tw.Tensor((-3,)), "a size is at least 0, got -3 in (-3,)"),
        (lambda: tw.Tensor((3,), "f32"), "dtype f32 is not supported; use one of float32, bfloat16"),
        (lambda: tw.Topology("t", "2", 2), "topology 't' has nodes='2', gpus_per_node=2; both need to be integers"),
        (lambda: tw.VirtualGroup("2"), "world_size is '2'; expected 1 to "),
        (lambda: tw.spawn(print, "2"), "world_size is '2'; expected 1 to "),
        (lambda: tw.spawn(3, 2), "tw.spawn runs a function on every rank, got 3"),
    ],
)
def test_what_is_made_outside_of_kernels(make: Callable[[], object], text: str) -> None:
    with pytest.raises(tw.errors.TileweaveError) as caught:
        make()
    assert text in str(caught.value)
