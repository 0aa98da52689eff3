"""Layers across nodes on CPU ranks: the companion's lane runs beside the others, and changes no bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import pytest
import torch

from tests.moe.layers import Inputs, even, random_inputs, run_layer
from tests.moe.test_layer_bits import same_bits
from tests.moe.test_layer_values import FULL
from tileweave.compiler.config import Config, QueueKind
from tileweave.compiler.topology import Topology
from tileweave.errors import ConfigError
from tileweave.moe.layer import MoELayer
from tileweave.primitives.group import Group
from tileweave.primitives.launch import VirtualGroup

Virtual: TypeAlias = Callable[[int], VirtualGroup]
TOPOLOGIES = [Topology("two nodes of one", 2, 1), Topology("two nodes of two", 2, 2), Topology("three of one", 3, 1)]


def forward(group: Group, topology: Topology, run: Config, parts: Sequence[Inputs]) -> tuple[torch.Tensor, set[int]]:
    """The layer's output, twice computed, and the workers that ran a `dispatch` or `send_results` tile."""
    layer, part = MoELayer(FULL, group, run=run, topology=topology), parts[group.rank]
    first = layer(part.x, part.topk_idx, part.topk_weights)
    again, events = layer.traced(part.x, part.topk_idx, part.topk_weights)
    assert same_bits(again, first)
    return again, {e.worker for e in events if e.task in ("dispatch", "send_results")}


@pytest.mark.parametrize("queue", ["static", "dynamic"])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: t.name)
def test_bits_and_values_across_nodes(virtual: Virtual, topology: Topology, queue: QueueKind) -> None:
    world_size, inputs = topology.world_size, random_inputs(FULL, 150, unused=0.2)
    want = run_layer(virtual(1), FULL, [inputs], Config())
    run = Config(workers=2, companion_workers=2, queue=queue)
    for counts in (even(150, world_size), [150, *[0] * (world_size - 1)]):
        results = virtual(world_size).run(forward, topology, run, inputs.split(counts))
        assert same_bits(torch.cat([out for out, _ in results]), want)
        workers = set().union(*(workers for _, workers in results))
        assert workers & {2, 3}, "the companion's workers send"
        assert workers & {0, 1} or topology.gpus_per_node == 1, "and those of the megakernel send on the node"


def test_the_number_of_ranks_is_checked() -> None:
    wrong = r"topology 'big' has 2 x 2 = 4 ranks, but world_size=2"
    with VirtualGroup(2) as ranks, pytest.raises(ConfigError, match=wrong):
        ranks.run(lambda group: MoELayer(FULL, group, topology=Topology("big", 2, 2)))
