"""The whole MoE layer on the NumPy interpreter against float64 NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.special import erf

from tests.codegen.reference_helpers import Array
from tileweave.codegen.reference import bf16
from tileweave.codegen.reference.interpret import interpret
from tileweave.compiler.config import Config
from tileweave.compiler.order import ORDERS
from tileweave.compiler.passes import analyse, compile_program
from tileweave.compiler.trace import flatten
from tileweave.moe.activations import ACTIVATIONS
from tileweave.moe.kernels import LayerShape, Tiles, WeightSpecs, dispatch_gemm, gemm_combine, moe_layer
from tileweave.moe.routing import Placement, count_experts, plan_all, plan_specs, received_rows
from tileweave.primitives.memory import Tensor

Float64 = npt.NDArray[np.float64]

TILES = Tiles(rows=8, columns=16, depth=32, tokens=4, copy=32)

EXACT: dict[str, Callable[[Float64], Float64]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + erf(x / np.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "identity": lambda x: x,
}


@dataclass(frozen=True)
class Case:
    """A layer and the tokens of each rank; 1 in `unused` slots is −1."""

    num_tokens: tuple[int, ...]
    num_experts: int = 6
    num_topk: int = 2
    hidden: int = 40
    intermediate: int = 24
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    shared: bool = False
    unused: int = 5
    dtype: str = "float32"


CASES = {
    "one rank": Case((13,)),
    "two ranks": Case((9, 21)),
    "three ranks": Case((5, 17, 8), num_experts=9),
    "a rank without tokens": Case((11, 0, 6)),
    "no tokens": Case((0, 0)),
    "experts are no multiple of ranks": Case((7, 12, 9), num_experts=7, num_topk=3),
    "a rank without experts": Case((6, 5, 4), num_experts=2),
    "one expert": Case((10, 10), num_experts=1, num_topk=1),
    "every slot unused": Case((4, 6), unused=1),
    "bias": Case((9, 4), bias=True),
    "shared expert": Case((9, 14), shared=True),
    "not gated": Case((9, 4), gated=False, activation="gelu"),
    "not gated with all": Case((9, 4, 10), gated=False, activation="relu", bias=True, shared=True),
    "ragged widths": Case((9, 4), hidden=33, intermediate=17, bias=True, shared=True),
    "bfloat16": Case((9, 14), dtype="bfloat16", bias=True, shared=True),
    **{activation: Case((6, 9), activation=activation, num_topk=1) for activation in ACTIVATIONS},
}


@dataclass(frozen=True)
class Weights:
    """Arrays named as the fields of `WeightSpecs`."""

    gate_up: Array
    down: Array
    gate_up_bias: Array | None
    down_bias: Array | None
    shared_gate_up: Array | None
    shared_down: Array | None


@dataclass(frozen=True)
class Data:
    """Inputs of all ranks, in fp32 with values that the case's dtype holds; weights by global expert."""

    x: list[Array]
    topk_idx: list[Array]
    topk_weights: list[Array]
    weights: Weights


def make_data(case: Case, seed: int = 0) -> Data:
    random = np.random.default_rng(seed)
    wide = case.intermediate * (2 if case.gated else 1)

    def draw(*shape: int) -> Array:
        values = (random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        return bf16.widen(bf16.narrow(values)) if case.dtype == "bfloat16" else values

    def route(tokens: int) -> Array:
        chosen = [random.permutation(case.num_experts)[: case.num_topk] for _ in range(tokens)]
        index = np.array(chosen, dtype=np.int64).reshape(tokens, case.num_topk)
        return np.where(random.integers(case.unused, size=index.shape) == 0, -1, index)

    experts = case.num_experts
    return Data(
        [draw(n, case.hidden) * 4 for n in case.num_tokens],
        [route(n) for n in case.num_tokens],
        [random.random((n, case.num_topk), dtype=np.float32) for n in case.num_tokens],
        Weights(
            gate_up=draw(experts, wide, case.hidden),
            down=draw(experts, case.hidden, case.intermediate),
            gate_up_bias=draw(experts, wide) if case.bias else None,
            down_bias=draw(experts, case.hidden) if case.bias else None,
            shared_gate_up=draw(wide, case.hidden) if case.shared else None,
            shared_down=draw(case.hidden, case.intermediate) if case.shared else None,
        ),
    )


def mlp(case: Case, x: Array, gate_up: Array, down: Array, biases: Sequence[Array | None] = (None, None)) -> Float64:
    """One expert in float64, `x` `[hidden]`."""
    middle = gate_up.astype(np.float64) @ x + (0 if biases[0] is None else biases[0])
    gate, up = (middle[: case.intermediate], middle[case.intermediate :]) if case.gated else (middle, 1.0)
    result: Float64 = down.astype(np.float64) @ (EXACT[case.activation](gate) * up)
    return result + (0 if biases[1] is None else biases[1])


def expected(case: Case, data: Data) -> list[Float64]:
    """The layer's output on every rank, token by token."""
    w = data.weights
    outs = []
    for x, index, weights in zip(data.x, data.topk_idx, data.topk_weights, strict=True):
        out = np.zeros(x.shape, dtype=np.float64)
        for token, slot in np.argwhere(index >= 0):
            e = index[token, slot]
            biases = [None if b is None else b[e] for b in (w.gate_up_bias, w.down_bias)]
            out[token] += weights[token, slot] * mlp(case, x[token], w.gate_up[e], w.down[e], biases)
        if w.shared_gate_up is not None and w.shared_down is not None:
            for token in range(len(x)):
                out[token] += mlp(case, x[token], w.shared_gate_up, w.shared_down)
        outs.append(out)
    return outs


def stored(case: Case, values: Array) -> Array:
    return bf16.narrow(values) if case.dtype == "bfloat16" else values


def local_weights(case: Case, weights: Weights, placement: Placement, rank: int) -> Weights:
    """The experts of `rank`, padded with NaN to the most that any rank has."""

    def pick(name: str) -> Array | None:
        value = getattr(weights, name)
        if value is None or name.startswith("shared"):
            return None if value is None else stored(case, value)
        own = np.full((placement.max_local, *value.shape[1:]), np.nan, dtype=np.float32)
        mine = placement.owner == rank
        own[placement.local[mine]] = value[mine]
        return stored(case, own)

    return Weights(**{f.name: pick(f.name) for f in fields(Weights)})


def make_launch(case: Case, data: Data) -> tuple[tuple[object, ...], list[dict[str, Array]]]:
    """Specs of `moe_layer` and the arguments of each rank."""
    placement = Placement.contiguous(case.num_experts, len(case.num_tokens))
    counts = np.stack([count_experts(i, case.num_experts) for i in data.topk_idx]).astype(np.int64)
    capacity = max(1, int(received_rows(counts, placement).max()))
    shape = LayerShape(placement.max_local, capacity, max(1, *case.num_tokens), case.activation, case.gated)
    local = [local_weights(case, data.weights, placement, rank) for rank in range(placement.world_size)]
    present = {name: value for name, value in vars(local[0]).items() if value is not None}
    weight_specs = WeightSpecs(**{name: Tensor(value.shape, case.dtype) for name, value in present.items()})
    specs = (
        Tensor(("num_tokens", case.hidden), case.dtype),
        Tensor(("num_tokens", case.num_topk)),
        weight_specs,
        plan_specs(placement, case.num_topk),
        Tensor(("num_tokens", case.hidden)),
        shape,
    )
    arguments = []
    for rank, plan in enumerate(plan_all(data.topk_idx, placement)):
        x, topk_weights = data.x[rank], data.topk_weights[rank]
        out = np.full(x.shape, np.nan, dtype=np.float32)
        values: tuple[Any, ...] = (stored(case, x), topk_weights, local[rank], plan, out, shape)
        arguments.append(dict(flatten(moe_layer.parameters, specs, values)))
    return specs, arguments


def launch(case: Case, data: Data, config: Config, seed: int | None = None) -> list[Array]:
    specs, arguments = make_launch(case, data)
    program, schedule = compile_program(moe_layer, specs, len(case.num_tokens), config)
    analyse(program, schedule, arguments)
    interpret(program, schedule, arguments, seed=seed)
    return [given["out"] for given in arguments]


@pytest.mark.parametrize("name", CASES)
def test_layer_is_what_float64_says(name: str) -> None:
    case = CASES[name]
    data = make_data(case)
    tolerance = 3e-2 if case.dtype == "bfloat16" else 2e-5
    outs = launch(case, data, Config(workers=2, comm_workers=1, tunables={"tiles": TILES}))
    for out, want in zip(outs, expected(case, data), strict=True):
        np.testing.assert_allclose(out, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", [None, 0])
def test_no_schedule_changes_the_bits(order: str, seed: int | None) -> None:
    case = Case((9, 4, 14), num_experts=5, shared=True)
    data = make_data(case)
    plain = launch(case, data, Config(tunables={"tiles": TILES}))
    for config in (
        Config(workers=3, comm_workers=1, order=order, tunables={"tiles": TILES}),
        Config(workers=2, queue="dynamic", order=order, tunables={"tiles": TILES}),
    ):
        for out, same in zip(launch(case, data, config, seed), plain, strict=True):
            np.testing.assert_array_equal(out, same)


@pytest.mark.parametrize("seed", range(6))
def test_random_layers(seed: int) -> None:
    random = np.random.default_rng(seed)
    case = Case(
        tuple(random.integers(0, 25, size=random.integers(1, 4)).tolist()),
        num_experts=int(random.integers(3, 11)),
        num_topk=int(random.integers(1, 4)),
        hidden=int(random.integers(1, 70)),
        intermediate=int(random.integers(1, 50)),
        gated=bool(random.integers(2)),
        bias=bool(random.integers(2)),
        shared=bool(random.integers(2)),
    )
    data = make_data(case, seed)
    outs = launch(case, data, Config(workers=3, queue="dynamic", tunables={"tiles": TILES}), seed)
    for out, want in zip(outs, expected(case, data), strict=True):
        np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["one rank", "a rank without tokens", "no tokens", "not gated with all"])
def test_two_halves_are_the_layer(name: str) -> None:
    case = replace(CASES[name], shared=False)
    data = make_data(case)
    config = Config(workers=2, tunables={"tiles": TILES})
    (x, topk_weights, weights, plan, out, shape), arguments = make_launch(case, data)
    world = len(arguments)
    middle = Tensor(("num_rows", case.intermediate))
    first, second = [], []
    for given in arguments:
        num_rows = int(given["plan.expert_offsets"][-1])
        activations = np.full((num_rows, case.intermediate), np.nan, dtype=np.float32)
        first.append({**{n: v for n, v in given.items() if n != "topk_weights"}, "out": activations})
        second.append({**{n: v for n, v in given.items() if n != "x"}, "activations": activations})
    program, schedule = compile_program(dispatch_gemm, (x, weights, plan, middle, shape), world, config)
    interpret(program, schedule, first)
    program, schedule = compile_program(gemm_combine, (middle, topk_weights, weights, plan, out, shape), world, config)
    interpret(program, schedule, second)
    for given, whole in zip(second, launch(case, data, config), strict=True):
        np.testing.assert_array_equal(given["out"], whole)
