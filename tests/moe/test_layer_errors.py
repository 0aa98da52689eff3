"""What does not fit is refused on every rank before anything runs, and the group goes on."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch

from tests.moe.layers import LIMITS, Inputs, random_inputs, reference, relative_error
from tests.moe.test_layer_values import PLAIN
from tileweave.compiler.config import Config
from tileweave.compiler.topology import Topology
from tileweave.errors import ArgumentError, GroupError, PeerError
from tileweave.moe.config import MoEConfig
from tileweave.moe.layer import MoELayer, compile_layer
from tileweave.moe.routing import Placement, plan_routing
from tileweave.primitives.group import Group
from tileweave.primitives.launch import VirtualGroup, spawn

Virtual: TypeAlias = Callable[[int], VirtualGroup]
Arguments: TypeAlias = tuple[Any, ...]

NUM_TOKENS = 9
WORLD_SIZE = 3
CULPRIT = 1


def good() -> Inputs:
    return random_inputs(PLAIN, NUM_TOKENS)


def outcome(call: Callable[[], object]) -> str:
    """Type and text of what `call` raises."""
    try:
        call()
    except (ArgumentError, PeerError, GroupError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def all_ranks(ranks: VirtualGroup, make: Callable[[Group], MoELayer], culprits: Arguments) -> list[str]:
    """What a forward does on each rank, when `CULPRIT` passes `culprits`; then the layer must still work."""
    inputs = good()

    def rank(group: Group) -> tuple[str, float]:
        layer = make(group)
        arguments = culprits if group.rank == CULPRIT else (inputs.x, inputs.topk_idx, inputs.topk_weights)
        text = outcome(lambda: layer(*arguments))
        got = layer(inputs.x, inputs.topk_idx, inputs.topk_weights)
        return text, relative_error(got, reference(PLAIN, inputs))

    texts, errors = zip(*ranks.run(rank), strict=True)
    assert max(errors) <= LIMITS[torch.float32]
    return list(texts)


def changed(x: Any = None, topk_idx: Any = None, topk_weights: Any = None) -> Arguments:
    inputs = good()
    return (
        inputs.x if x is None else x,
        inputs.topk_idx if topk_idx is None else topk_idx,
        inputs.topk_weights if topk_weights is None else topk_weights,
    )


def with_entry(tensor: torch.Tensor, row: int, column: int, value: float) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[row, column] = value
    return tensor


X, INDEX, WEIGHTS = good().x, good().topk_idx, good().topk_weights
WRONG_SHAPE = "needs shape [num_tokens=9, num_topk=3], got"
CASES: dict[str, tuple[Arguments, str]] = {
    "x width": (changed(x=torch.zeros(9, 35)), "x needs shape [num_tokens, hidden=36], got [9, 35]"),
    "x scalar": (changed(x=torch.tensor(1.0)), "x needs shape [num_tokens, hidden=36], got []"),
    "x dtype": (changed(x=X.double()), "x needs dtype torch.float32, got torch.float64"),
    "x bfloat16": (changed(x=X.bfloat16()), "x needs dtype torch.float32, got torch.bfloat16"),
    "x strides": (changed(x=X.T.contiguous().T), "x is not contiguous; pass x.contiguous()"),
    "x device": (changed(x=X.to("meta")), "x is on device meta; the C engine needs CPU memory: pass x.cpu()"),
    "x array": (changed(x=X.numpy()), "x needs to be a torch tensor, got ndarray"),
    "x None": ((None,), "x needs to be a torch tensor, got NoneType"),
    "x has more rows": (changed(x=torch.zeros(10, 36)), "topk_idx needs shape [num_tokens=10, num_topk=3], got [9, 3]"),
    "index shape": (changed(topk_idx=INDEX[:, :2]), f"topk_idx {WRONG_SHAPE} [9, 2]"),
    "index rank": (changed(topk_idx=INDEX[0]), f"topk_idx {WRONG_SHAPE} [3]"),
    "index dtype": (
        changed(topk_idx=INDEX.float()),
        "topk_idx needs integers of shape [num_tokens, num_topk], got float32 [9, 3]",
    ),
    "index bool": (
        changed(topk_idx=INDEX.bool()),
        "topk_idx needs integers of shape [num_tokens, num_topk], got bool [9, 3]",
    ),
    "index bfloat16": (
        changed(topk_idx=INDEX.bfloat16()),
        "topk_idx cannot be read as an array: Got unsupported ScalarType BFloat16",
    ),
    "index device": (changed(topk_idx=INDEX.to("meta")), "topk_idx is on device meta; the C engine needs CPU memory"),
    "index list": (changed(topk_idx=INDEX.tolist()), "topk_idx needs to be a torch tensor, got list"),
    "expert too high": (
        changed(topk_idx=with_entry(INDEX, 4, 2, 6)),
        "topk_idx[4, 2] = 6: expected -1 (unused) or 0 to 5",
    ),
    "expert too low": (
        changed(topk_idx=with_entry(INDEX, 8, 0, -2)),
        "topk_idx[8, 0] = -2: expected -1 (unused) or 0 to 5",
    ),
    "no weights": ((X, INDEX), "topk_weights is needed with topk_idx"),
    "no index": (
        (X, None, WEIGHTS),
        "topk_weights is given without topk_idx; pass both, or neither to use the router",
    ),
    "weights shape": (changed(topk_weights=WEIGHTS[:8]), f"topk_weights {WRONG_SHAPE} [8, 3]"),
    "weights dtype": (
        changed(topk_weights=WEIGHTS.bfloat16()),
        "topk_weights needs dtype torch.float32, got torch.bfloat16",
    ),
    "weights device": (
        changed(topk_weights=WEIGHTS.to("meta")),
        "topk_weights is on device meta; the C engine needs CPU memory",
    ),
    "NaN weight": (
        changed(topk_weights=with_entry(WEIGHTS, 3, 1, float("nan"))),
        "topk_weights[3, 1] is nan; expected a finite number",
    ),
    "infinite weight": (
        changed(topk_weights=with_entry(WEIGHTS, 0, 2, float("-inf"))),
        "topk_weights[0, 2] is -inf; expected a finite number",
    ),
    "router meets NaN": (
        (torch.full_like(X, float("nan")),),
        "topk_weights[0, 0] is nan; expected a finite number",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_reaches_every_rank_and_the_group_goes_on(virtual: Virtual, name: str) -> None:
    arguments, text = CASES[name]
    got = all_ranks(virtual(WORLD_SIZE), lambda group: MoELayer(PLAIN, group, run=Config()), arguments)
    assert got == [f"PeerError: rank 1: {text}", f"ArgumentError: {text}", f"PeerError: rank 1: {text}"]


def test_two_refusals(virtual: Virtual) -> None:
    def rank(group: Group) -> str:
        layer = MoELayer(PLAIN, group, run=Config())
        x = X if group.rank == 1 else torch.zeros(group.rank + 1, 5)
        return outcome(lambda: layer(x))

    own = [f"x needs shape [num_tokens, hidden=36], got [{rows}, 5]" for rows in (1, 3)]
    both = f"PeerError: rank 0: {own[0]}; rank 2: {own[1]}"
    assert virtual(3).run(rank) == [f"ArgumentError: {own[0]}", both, f"ArgumentError: {own[1]}"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_of_unused_slots_may_be_anything(virtual: Virtual, value: float) -> None:
    arguments = changed(topk_idx=with_entry(INDEX, 3, 1, -1), topk_weights=with_entry(WEIGHTS, 3, 1, value))
    make: Callable[[Group], MoELayer] = lambda group: MoELayer(PLAIN, group, run=Config())  # noqa: E731
    assert all_ranks(virtual(WORLD_SIZE), make, arguments) == ["fine"] * 3


def test_weights_that_no_longer_fit(virtual: Virtual) -> None:
    def rank(group: Group) -> list[str]:
        layer = MoELayer(PLAIN, group, run=Config())
        kept = layer.gate_up
        texts = []
        for wrong in (kept.bfloat16(), kept.mT.contiguous().mT, kept[:, :-1].contiguous(), kept[:1].contiguous()):
            if group.rank == CULPRIT:
                layer.gate_up = torch.nn.Parameter(wrong, requires_grad=False)
            texts.append(outcome(lambda: layer(X, INDEX, WEIGHTS)))
        layer.gate_up = kept
        return [*texts, outcome(lambda: layer(X, INDEX, WEIGHTS))]

    texts = [
        "ExpertWeights.gate_up has dtype torch.bfloat16; expected torch.float32",
        "ExpertWeights.gate_up is not contiguous; pass gate_up.contiguous()",
        "ExpertWeights.gate_up has shape [2, 39, 36]; expected [2, 40, 36]",
        "ExpertWeights.gate_up has shape [1, 40, 36]; expected [2, 40, 36]",
    ]
    peers, own = [f"PeerError: rank 1: {text}" for text in texts], [f"ArgumentError: {text}" for text in texts]
    assert virtual(3).run(rank) == [[*peers, "fine"], [*own, "fine"], [*peers, "fine"]]


def test_weights_of_all_experts_are_checked_when_they_are_loaded(virtual: Virtual) -> None:
    layer = MoELayer(PLAIN, virtual(1).groups[0], run=Config())
    weights = layer.weights
    assert outcome(lambda: layer.load_experts(weights)) == "fine"
    assert outcome(lambda: layer.load_experts(weights.select(range(5)))) == (
        "ArgumentError: ExpertWeights.gate_up has shape [5, 40, 36]; expected [6, 40, 36]"
    )


def test_capacity_too_small(virtual: Virtual) -> None:
    everything_to_rank_2 = torch.full_like(INDEX, 5)
    index = [everything_to_rank_2, everything_to_rank_2, INDEX]

    def rank(group: Group) -> tuple[str, str]:
        layer = MoELayer(PLAIN, group, run=Config(), capacity=54)
        fits = everything_to_rank_2 if group.rank else torch.full_like(INDEX, -1)
        return (
            outcome(lambda: layer(X, index[group.rank], WEIGHTS)),
            outcome(lambda: layer(X, fits, WEIGHTS)),
        )

    received = sum(int((i >= 4).sum()) for i in index)
    text = (
        f"ArgumentError: rank 2 would receive {received} rows, but the layer's capacity is 54; raise capacity, or "
        "leave it out so that memory grows as needed"
    )
    assert virtual(3).run(rank) == [(text, "fine")] * 3
    assert outcome(lambda: MoELayer(PLAIN, virtual(1).groups[0], capacity=0)) == (
        "ArgumentError: capacity is 0; expected at least 1 row, or None to grow memory as needed"
    )


DIFFERENT: dict[str, tuple[MoEConfig, Config, dict[str, Any]]] = {
    "hidden": (replace(PLAIN, hidden=40), Config(), {}),
    "experts": (replace(PLAIN, num_experts=7), Config(), {}),
    "activation": (replace(PLAIN, activation="relu"), Config(), {}),
    "order": (PLAIN, Config(order="program"), {}),
    "workers": (PLAIN, Config(workers=2), {}),
    "capacity": (PLAIN, Config(), {"capacity": 100}),
    "router": (PLAIN, Config(), {"renormalize": False}),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_made_different_layers(virtual: Virtual, name: str) -> None:
    config, run, options = DIFFERENT[name]

    def rank(group: Group) -> tuple[str, str]:
        mine = group.rank == CULPRIT
        layer = MoELayer(config, group, run=run, **options) if mine else MoELayer(PLAIN, group, run=Config())
        return outcome(lambda: layer(torch.zeros(4, layer.config.hidden))), outcome(
            lambda: MoELayer(PLAIN, group, run=Config())(X)
        )

    def text(config: MoEConfig, run: Config, renormalize: bool = True, capacity: int | None = None) -> str:
        return f"{config}, {run}, {Topology.one_node(3)}, renormalize={renormalize}, capacity={capacity}"

    expected = (
        "ArgumentError: the ranks made different layers; every rank must pass the same arguments\n"
        f"  rank 0: {text(PLAIN, Config())}\n  rank 1: {text(config, run, **options)}"
    )
    assert virtual(3).run(rank) == [(expected, "fine")] * 3


def test_ranks_that_call_different_layers(virtual: Virtual) -> None:
    """Layers that all ranks have made alike and used before, now in another order on one rank."""

    def rank(group: Group) -> list[str]:
        layers = [MoELayer(PLAIN, group, run=Config(order=order)) for order in ("program", "expert_ascending")]
        before = [outcome(lambda layer=layer: layer(X)) for layer in layers]  # type: ignore[misc]
        mixed = outcome(lambda: layers[group.rank == CULPRIT](X))
        return [*before, mixed, outcome(lambda: layers[0](X))]

    text = "ArgumentError: the ranks call different layers; every rank must call the same layers in the same order"
    assert virtual(3).run(rank) == [["fine", "fine", text, "fine"]] * 3


def test_kernel_of_another_world_size(virtual: Virtual) -> None:
    def rank(group: Group) -> str:
        shape = MoELayer(PLAIN, group, run=Config())._shape()
        return outcome(lambda: compile_layer(PLAIN, 4, shape, Config()).run((), group))

    text = (
        "GroupError: kernel 'moe_layer' was compiled for world_size=4, but this group has 2 ranks; compile it with "
        "world_size=2"
    )
    assert virtual(2).run(rank) == [text] * 2


def process_rank(group: Group) -> tuple[str, str]:
    """One bad call, one good."""
    layer = MoELayer(PLAIN, group, run=Config())
    arguments = changed(topk_idx=with_entry(INDEX, 4, 2, 6)) if group.rank == CULPRIT else (X, INDEX, WEIGHTS)
    return outcome(lambda: layer(*arguments)), outcome(lambda: layer(X, INDEX, WEIGHTS))


def test_ranks_that_are_processes() -> None:
    text = CASES["expert too high"][1]
    assert spawn(process_rank, 2) == [(f"PeerError: rank 1: {text}", "fine"), (f"ArgumentError: {text}", "fine")]


@pytest.mark.parametrize("bad", [np.array([[0, 6]]), torch.tensor([[-2, 0]]), [[0.5, 1.0]], [[0], [1, 2]], [1, 2]])
def test_plan_routing(virtual: Virtual, bad: Any) -> None:
    placement = Placement.contiguous(6, WORLD_SIZE)

    def rank(group: Group) -> tuple[str, str]:
        index = bad if group.rank == CULPRIT else np.array([[1, 2]])
        text = outcome(lambda: plan_routing(index, placement, group))
        return text, outcome(lambda: plan_routing(np.array([[1, 2]]), placement, group))

    (first, fine), (own, _), (last, _) = virtual(WORLD_SIZE).run(rank)
    assert own.startswith("ArgumentError: topk_idx")
    assert first == last == f"PeerError: rank 1: {own.removeprefix('ArgumentError: ')}"
    assert fine == "fine"


def test_a_copy_of_a_layer_shares_its_group_and_not_its_weights(virtual: Virtual) -> None:
    inputs = good()

    def rank(group: Group) -> tuple[float, float]:
        layer = MoELayer(PLAIN, group)
        arguments = inputs.x, inputs.topk_idx, inputs.topk_weights
        before = layer(*arguments)
        twin = copy.deepcopy(layer)
        assert twin.group is group
        for parameter in layer.parameters():
            parameter.data.zero_()
        return float((twin(*arguments) - before).abs().max()), float(layer(*arguments).abs().max())

    assert virtual(2).run(rank) == [(0.0, 0.0)] * 2


def test_a_layer_does_not_pickle_and_says_what_does(virtual: Virtual) -> None:
    def rank(group: Group) -> str:
        layer = MoELayer(PLAIN, group)
        pickle.dumps(layer.state_dict())
        pickle.dumps(layer.run_config)
        return outcome(lambda: pickle.dumps(layer))

    (text,) = virtual(1).run(rank)
    assert text.startswith(
        "GroupError: a Group belongs to its process and cannot be pickled; of a layer, save state_dict"
    )


def test_misaligned_tokens_are_refused(virtual: Virtual) -> None:
    size = NUM_TOKENS * PLAIN.hidden
    x = torch.frombuffer(bytearray(4 * size + 4), dtype=torch.float32, offset=1, count=size).reshape(NUM_TOKENS, -1)
    given = good()
    texts = all_ranks(
        virtual(WORLD_SIZE), lambda group: MoELayer(PLAIN, group), (x, given.topk_idx, given.topk_weights)
    )
    assert "argument 'x' begins at an address that is no multiple of its 4-byte elements; pass a copy" in texts[CULPRIT]
    assert [text.partition(":")[0] for text in texts] == ["PeerError", "ArgumentError", "PeerError"]
