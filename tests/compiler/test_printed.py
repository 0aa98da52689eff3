"""Printed forms of program, graph and schedule."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import tileweave as tw
from tests.compiler.kernels import exchange_case
from tileweave.compiler.order import ORDERS
from tileweave.compiler.printer import print_program
from tileweave.compiler.schedule import print_schedule
from tileweave.moe.cases import layer_case

Golden = Callable[[str, str], None]


def test_program(golden: Golden) -> None:
    compiled, _ = exchange_case()
    golden("exchange_program.txt", print_program(compiled.program))


def test_graph(golden: Golden) -> None:
    compiled, given = exchange_case()
    golden("exchange_graph.txt", str(compiled.graph(given)))


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_queues(golden: Golden, order: str) -> None:
    compiled, given = exchange_case(config=tw.Config(workers=2, order=order))
    golden(f"exchange_queues_{order}.txt", str(compiled.schedule(given)))


def test_split_dynamic_queues(golden: Golden) -> None:
    compiled, given = exchange_case(config=tw.Config(workers=3, comm_workers=1, queue="dynamic"))
    golden("exchange_queues_split_dynamic.txt", str(compiled.schedule(given)))


def test_moe_layer(golden: Golden) -> None:
    case = layer_case(world_size=2)
    compiled = tw.compile(case.kernel, *case.specs, world_size=2, config=case.config)
    golden("moe_layer_program.txt", print_program(compiled.program, locations=False))
    golden("moe_layer_graph.txt", str(compiled.graph(case.arguments)))
    golden("moe_layer_schedule.txt", print_schedule(compiled.plan, compiled.program))


def test_locations_do_not_change_the_key() -> None:
    compiled, _ = exchange_case()
    assert "kernels.py" in print_program(compiled.program)
    assert "kernels.py" not in print_program(compiled.program, locations=False)


def test_networkx_levels() -> None:
    compiled, given = exchange_case()
    graph = compiled.graph(given)
    tasks, tiles = graph.to_networkx("task"), graph.to_networkx("tile")
    assert set(tasks.nodes) == {"send", "reduce"}
    assert {(s, t, d["kind"]) for s, t, d in tasks.edges(data=True)} == {
        ("send", "reduce", "raw"),
        ("send", "reduce", "sync"),
    }
    assert tiles.number_of_nodes() == graph.num_nodes
    assert tiles.number_of_edges() == len(graph.edges.source)
