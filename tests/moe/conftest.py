"""Virtual ranks that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tileweave.primitives.launch import VirtualGroup

# Test processes share the cores; torch's threads would spin for each other's.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def virtual() -> Iterator[Callable[[int], VirtualGroup]]:
    """A group of a size, made once; keeps its kernels loaded. Not for tests that break it."""
    made: dict[int, VirtualGroup] = {}

    def group(world_size: int) -> VirtualGroup:
        if world_size not in made:
            made[world_size] = VirtualGroup(world_size)
        return made[world_size]

    yield group
    for each in made.values():
        each.close()
