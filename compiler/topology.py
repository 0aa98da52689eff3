"""Where ranks sit: nodes of GPUs, numbered node by node.

Inside a node a rank reaches its peers' memory through pointers (NVLink, or the shared
memory of a host); between nodes it sends over the network.
"""

from __future__ import annotations

from dataclasses import dataclass

from tileweave.errors import ConfigError
from tileweave.primitives.expr import Expr


@dataclass(frozen=True)
class Topology:
    """`nodes` nodes of `gpus_per_node` GPUs each, one rank a GPU; `name` is for people.

    Raises:
        ConfigError: a number is not positive.
    """

    name: str
    nodes: int
    gpus_per_node: int

    def __post_init__(self) -> None:
        if not all(isinstance(count, int) and count >= 1 for count in (self.nodes, self.gpus_per_node)):
            raise ConfigError(
                f"topology '{self.name}' has nodes={self.nodes!r}, gpus_per_node={self.gpus_per_node!r}; both need to "
                "be integers of at least 1"
            )

    @staticmethod
    def one_node(world_size: int) -> Topology:
        """All ranks on one node."""
        return Topology("one node", 1, world_size)

    @property
    def world_size(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.gpus_per_node

    def node_of(self, rank: Expr) -> Expr:
        """The node of a rank, as a scalar expression."""
        return rank // self.gpus_per_node

    def check(self, world_size: int) -> None:
        """Refuse a number of ranks that is not the topology's.

        Raises:
            ConfigError: it is not.
        """
        if world_size != self.world_size:
            raise ConfigError(
                f"topology '{self.name}' has {self.nodes} x {self.gpus_per_node} = {self.world_size} ranks, but "
                f"world_size={world_size}"
            )
