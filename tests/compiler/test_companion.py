"""Sends between nodes get a lane of a companion kernel: how it prints, what is refused, and that mistakes are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tileweave as tw
from tileweave.codegen.case import Case
from tileweave.codegen.listing import Bound, list_tiles
from tileweave.codegen.lower import lower
from tileweave.compiler.order import ORDERS
from tileweave.compiler.passes import analyse
from tileweave.compiler.schedule import Schedule, print_schedule
from tileweave.errors import CompileError, ConfigError
from tileweave.moe.cases import half_cases, layer_case
from tileweave.primitives.expr import Const, Expr, Index, Rank
from tileweave.primitives.memory import Table

TWO_BY_TWO = tw.Topology("two nodes of two", 2, 2)


def compiled(case: Case, topology: tw.Topology = TWO_BY_TWO, **changes: object) -> tw.CompiledKernel:
    """A case with results pushed, across nodes."""
    tunables = dict(case.config.tunables)
    if "returns" in case.kernel.tunables:
        tunables["returns"] = "push"
    config = replace(case.config, tunables=tunables, companion_workers=2, **changes)  # type: ignore[arg-type]
    return tw.compile(case.kernel, *case.specs, world_size=case.world_size, topology=topology, config=config)


def test_printed(golden: Callable[[str, str], None]) -> None:
    kernel = compiled(layer_case(4), comm_workers=1)
    golden("moe_layer_two_nodes_schedule.txt", print_schedule(kernel.plan, kernel.program))


@pytest.mark.parametrize("order", sorted(ORDERS))
@pytest.mark.parametrize("topology", [TWO_BY_TWO, tw.Topology("four nodes", 4, 1)], ids=lambda t: t.name)
def test_checks_pass_under_every_order(topology: tw.Topology, order: str) -> None:
    for case in (layer_case(4), *half_cases(4)):
        compiled(case, topology, order=order, comm_workers=1).check(case.arguments)


def test_one_node_has_no_companion() -> None:
    case = layer_case(2)
    kernel = tw.compile(case.kernel, *case.specs, world_size=2, topology=tw.Topology.one_node(2), config=case.config)
    assert kernel.plan == case.compile().plan
    assert [lane.kernel for lane in kernel.plan.lanes] == ["megakernel"]


def test_tiles_are_split_by_the_node_of_their_peer() -> None:
    case = layer_case(4)
    kernel = compiled(case)
    queues = kernel.schedule(case.arguments)
    for rank, (_, companion) in enumerate(queues.lanes):
        assert len(companion)
        for tile in companion.tolist():
            text = queues.regions.describe(tile)
            peer = int(text.split("peer=")[1].split(",")[0])
            assert text.startswith(("dispatch", "send_results"))
            assert peer // 2 != rank // 2


def test_a_device_lists_the_tiles_that_the_checker_sees() -> None:
    case = layer_case(4)
    kernel = compiled(case, order="critical_path")
    queues = kernel.schedule(case.arguments)
    lowered = lower(kernel.program, kernel.plan)
    for rank, given in enumerate(case.arguments):
        tables = {m.name: torch.from_numpy(given[m.name]) for m in kernel.program.arguments if isinstance(m, Table)}
        dims = {"num_tokens": given["x"][0], "num_slots_max": 2 * given["x"][0], "num_local_experts": 1}
        listing = list_tiles(lowered, Bound(rank, dims, tables, torch.device("cpu")), 512)
        assert int(listing.most) <= 512
        for lane, tiles in enumerate(queues.lanes[rank]):
            names = [queues.regions.describe(t).rpartition(" on ")[0] for t in tiles.tolist()]
            entries = listing.entries[lane, : int(listing.counts[lane])].tolist()
            assert [_described(kernel, *entry) for entry in entries] == names


def _described(kernel: tw.CompiledKernel, task: int, *indices: int) -> str:
    known = kernel.program.tasks[task]
    grid = zip(known.dims, indices, strict=False)
    return f"{known.name}[" + ", ".join(f"{d}={i}" for d, i in grid) + "]"


MUTANTS: dict[str, tuple[Expr, str]] = {
    "none is sent by the companion": (Const(0), "reaches another node, but its lane is the megakernel's"),
    "all are": (Const(1), "reaches a peer on its own node, but its lane is the companion's"),
    "nodes of one": (Index("peer").differs(Rank()), "reaches a peer on its own node, but its lane is the companion's"),
    "the other way round": ((Index("peer") // 2).equals(Rank() // 2), "but its lane is the"),
    "a node further": ((Index("peer") // 2).differs((Rank() + 1) // 2), "but its lane is the"),
}


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.parametrize("task", ["dispatch", "send_results"])
def test_a_misrouted_tile_is_found(name: str, task: str) -> None:
    condition, problem = MUTANTS[name]
    case = layer_case(4)
    kernel = compiled(case)
    names = [t.name for t in kernel.program.tasks]
    off_node = list(kernel.plan.off_node)
    off_node[names.index(task)] = condition
    schedule: Schedule = replace(kernel.plan, off_node=tuple(off_node))
    with pytest.raises(CompileError, match=problem) as caught:
        analyse(kernel.program, schedule, case.arguments)
    assert caught.value.location is not None
    assert f"{task}[" in caught.value.message


X = tw.Tensor((4, 8))


@tw.kernel
def reaching(x: tw.Tensor, peers: tw.Table, *, how: str = "send") -> None:
    box = tw.symmetric("box", (4, 8))
    ready = tw.signals("ready", (1,))
    whole = (tw.ds(0, 4), tw.ds(0, 8))

    @tw.task(grid={"peer": tw.world_size()}, role="compute" if how == "compute" else "comm")
    def reach(peer: Expr) -> None:
        if how == "load":
            tw.store(x, whole, tw.remote_load(box, whole, peer))
        elif how == "rows":
            tw.scatter(box, (peers.rows(tw.ds(0, 4), 0), tw.ds(0, 8)), tw.load(x, whole), peers.rows(tw.ds(0, 4), 1))
        elif how == "loop":
            for each in tw.range(tw.world_size()):
                tw.signal(ready, 0, 1, each)
        elif how == "two":
            tw.remote_store(box, whole, tw.load(x, whole), peer)
            tw.signal(ready, 0, 1, 1 - peer)
        else:
            tw.remote_store(box, whole, tw.load(x, whole), peer)


REFUSED = {
    "load": "reads from a peer; let the peer send instead (the MoE kernels do with returns='push')",
    "rows": "sends each row to the peer that a table names; use a grid dimension for the peer",
    "loop": "reaches peers in a loop; use a grid dimension for the peer",
    "two": "sends to two peers, peer and 1 - peer; use one task for each, or a grid dimension for the peer",
    "compute": ("sends to a peer, but has role 'compute'; store here, and send from there in a task of role 'comm'"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_cannot_cross_nodes_is_refused(how: str) -> None:
    config = tw.Config(tunables={"how": how})
    specs = (X, tw.Table((4, 2)))
    tw.compile(reaching, *specs, world_size=2, config=config)
    with pytest.raises(CompileError) as caught:
        tw.compile(reaching, *specs, world_size=2, topology=tw.Topology("two nodes", 2, 1), config=config)
    assert caught.value.message == f"task 'reach' cannot run between nodes: it {REFUSED[how]}"
    assert caught.value.location is not None
    assert Path(caught.value.location.file).name == "test_companion.py"


def test_pulled_results_are_refused_with_advice() -> None:
    case = layer_case(2)
    with pytest.raises(CompileError, match="task 'down' cannot run between nodes: it reaches peers in a loop"):
        tw.compile(case.kernel, *case.specs, world_size=2, topology=tw.Topology("two nodes", 2, 1), config=case.config)


def test_topologies_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"topology 'none' has nodes=0, gpus_per_node=2; both need to be integers"):
        tw.Topology("none", 0, 2)
    case = layer_case(2)
    with pytest.raises(ConfigError, match=r"topology 'two nodes of two' has 2 x 2 = 4 ranks, but world_size=2"):
        compiled(case)
    with pytest.raises(ConfigError, match=r"Config.companion_workers=0: expected 1 to 1024"):
        tw.Config(companion_workers=0)
