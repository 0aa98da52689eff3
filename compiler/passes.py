"""The passes, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tileweave.compiler.binding import Routing, bind
from tileweave.compiler.companion import check_nodes, split_off_node
from tileweave.compiler.config import Config
from tileweave.compiler.graph import Graph, build_graph
from tileweave.compiler.program import Program
from tileweave.compiler.races import check_ordered
from tileweave.compiler.regions import Regions, regions
from tileweave.compiler.schedule import Queues, Schedule, build_queues, build_schedule, check_progress
from tileweave.compiler.topology import Topology
from tileweave.compiler.trace import Kernel, trace
from tileweave.compiler.verify import verify
from tileweave.errors import ConfigError


@dataclass(frozen=True)
class Analysis:
    """What the passes find for one routing."""

    regions: Regions
    graph: Graph
    queues: Queues


def compile_program(
    kernel: Kernel, specs: tuple[object, ...], world_size: int, config: Config, topology: Topology | None = None
) -> tuple[Program, Schedule]:
    """The passes that need no routing: trace → verify → schedule keys → companion. One node if no topology is given."""
    _check_request(kernel, world_size, config, topology)
    program = trace(kernel, specs, world_size, config.tunables)
    verify(program)
    nodes = topology or Topology.one_node(world_size)
    nodes.check(world_size)
    return program, split_off_node(build_schedule(program, config), program, nodes, config.companion_workers)


def _check_request(kernel: Kernel, world_size: int, config: Config, topology: Topology | None) -> None:
    wanted = (("kernel", kernel, Kernel), ("world_size", world_size, int), ("config", config, Config))
    for name, value, kind in (*wanted, ("topology", topology or Topology.one_node(1), Topology)):
        if not isinstance(value, kind):
            hint = "; put @tw.kernel on it" if kind is Kernel else ""
            raise ConfigError(f"{name}={value!r}: expected {kind.__name__}, got {type(value).__name__}{hint}")
    if world_size < 1:
        raise ConfigError(f"world_size={world_size}: expected at least 1")


def analyse(program: Program, schedule: Schedule, arguments: Sequence[Mapping[str, Any]] | Routing) -> Analysis:
    """The passes over real tiles: regions → graph (with signals matched) → queues → nodes → progress → races.

    Raises:
        BoundsError, SignalMismatchError, DeadlockError, RaceError: with the tiles at fault.
        CompileError: a tile is in the lane of the wrong kernel.
    """
    routing = arguments if isinstance(arguments, Routing) else bind(program, arguments)
    tiles = regions(program, routing)
    graph = build_graph(tiles)
    queues = build_queues(schedule, tiles)
    check_nodes(queues)
    check_progress(graph, queues)
    check_ordered(graph)
    return Analysis(tiles, graph, queues)
