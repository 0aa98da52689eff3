"""Tiles listed with torch, as a device does it, against the queues that the checker sorts with NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import tileweave as tw
from tileweave.codegen.listing import Bound, list_tiles
from tileweave.compiler.binding import check_shape
from tileweave.compiler.order import ORDERS
from tileweave.moe.cases import layer_case, routed_case
from tileweave.primitives.memory import Table


def bound(compiled: tw.CompiledKernel, case: tw.Case, rank: int) -> Bound:
    dims: dict[str, int] = {}
    tables = {}
    for name, array in case.arguments[rank].items():
        memory = compiled.program.by_name[name]
        check_shape(memory, array if isinstance(array, tuple) else array.shape, dims)
        if isinstance(memory, Table):
            tables[name] = torch.from_numpy(np.asarray(array))
    return Bound(rank, dims, tables, torch.device("cpu"))


def queues(compiled: tw.CompiledKernel, case: tw.Case, rank: int) -> list[list[tuple[int, ...]]]:
    """`(task, grid indices …)` of each lane, from the checker."""
    found = compiled.schedule(case.arguments)
    instances = found.regions.instances
    lanes = []
    for lane in found.lanes[rank]:
        tiles = []
        for tile in lane.tolist():
            instance = next(i for i in instances if i.first <= tile < i.first + i.count)
            symbols = [int(values[tile - instance.first]) for values in instance.env.symbols.values()]
            tiles.append((instance.task, *symbols))
        lanes.append(tiles)
    return lanes


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("comm_workers", [0, 1])
def test_the_checker_and_the_device_agree(order: str, comm_workers: int) -> None:
    nothing = [np.full((3, 2), -1), np.zeros((0, 2), np.int64)]
    for case in (layer_case(2), routed_case(nothing)):
        config = replace(case.config, workers=3, comm_workers=comm_workers, order=order)
        compiled = tw.compile(case.kernel, *case.specs, world_size=2, config=config)
        for rank in range(2):
            listing = list_tiles(compiled.lowered, bound(compiled, case, rank), 256)
            want = queues(compiled, case, rank)
            assert listing.counts.tolist() == [len(tiles) for tiles in want]
            for lane, tiles in enumerate(want):
                padded = [(*tile, *[0] * (5 - len(tile))) for tile in tiles]
                assert [tuple(row) for row in listing.entries[lane][: len(tiles)].tolist()] == padded


def test_what_does_not_fit_is_told() -> None:
    case = layer_case(2)
    compiled = case.compile()
    listing = list_tiles(compiled.lowered, bound(compiled, case, 0), 8)
    assert listing.counts.tolist() == [8]
    assert int(listing.most) > 8
