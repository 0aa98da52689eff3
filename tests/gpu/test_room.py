"""How many tiles a launch can have, known before it: never too few, and close to what the worst routing has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

import tileweave as tw
from tileweave.codegen.listing import Bound, list_tiles
from tileweave.codegen.room import MOST_BOUNDED, tile_room
from tileweave.moe.config import MoEConfig
from tileweave.moe.gpu_layer import compile_on_gpu, layer_room
from tileweave.moe.kernels import LayerShape, Tiles
from tileweave.moe.routing import Placement, plan_all

CONFIG = MoEConfig(hidden=96, intermediate=64, num_experts=5, num_topk=2, shared_intermediate=32)


def tiles_of(compiled: tw.CompiledKernel, index: Sequence[np.ndarray], capacity: int) -> list[int]:
    """Tiles of each rank's fullest lane, as the device counts them."""
    found = []
    for rank, plan in enumerate(plan_all(index, Placement.contiguous(CONFIG.num_experts, len(index)))):
        tables = {f"plan.{name}": torch.from_numpy(table) for name, table in plan.named().items()}
        sizes = {"num_tokens": len(index[rank]), "num_slots_max": index[rank].size, "num_local_experts": 0}
        bound = Bound(rank, sizes, tables, torch.device("cpu"))
        found.append(int(list_tiles(compiled.lowered, bound, capacity).most))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("tiles", [Tiles(16, 32, 64, 8, 96), Tiles(4, 64, 64, 32, 96)])
def test_room_of_a_layer(world_size: int, tiles: Tiles) -> None:
    random, num_tokens = np.random.default_rng(world_size), 40
    placement = Placement.contiguous(CONFIG.num_experts, world_size)
    shape = LayerShape(placement.max_local, world_size * num_tokens * 2, num_tokens, "silu", True)
    run = tw.Config(tunables={"tiles": tiles})
    compiled = compile_on_gpu(CONFIG, world_size, shape, run)
    room = layer_room(CONFIG, world_size, shape, tiles)
    most = 0
    for low, high in ((-1, 5), (0, 1), (0, 2), (3, 5), (-1, 0)):
        for tokens in (num_tokens, 1):
            index = [random.integers(low, high, (tokens, 2)) for _ in range(world_size)]
            most = max(most, *tiles_of(compiled, index, room))
    assert most <= room
    assert room < 2 * most


def test_grids_without_tables_are_bounded() -> None:
    @tw.kernel
    def uneven(x: tw.Tensor, count: tw.Table) -> None:
        rows, _ = x.shape

        @tw.task(grid={"i": tw.ceildiv(rows, 4), "j": lambda i: tw.minimum(i, 3)})
        def first(i: tw.Expr, j: tw.Expr) -> None:
            tw.store(x, (i, tw.ds(0, 4)), tw.load(x, (j, tw.ds(0, 4))))

        @tw.task(grid={"i": 7, "j": lambda i: tw.minimum(count[i], 2), "k": 0})
        def second(i: tw.Expr, j: tw.Expr, k: tw.Expr) -> None:
            tw.store(x, (i, tw.ds(0, 4)), tw.load(x, (j + k, tw.ds(0, 4))))

    lowered = tw.compile(uneven, tw.Tensor(("rows", 4)), tw.Table((7,))).lowered
    assert tile_room(lowered, {"rows": 17}) == 5 * 3 + 7 * 2
    assert tile_room(lowered, {"rows": 4 * MOST_BOUNDED}) is None


def test_a_table_that_says_how_many_gives_no_bound() -> None:
    placement = Placement.contiguous(CONFIG.num_experts, 1)
    shape = LayerShape(placement.max_local, 64, 32, "silu", True)
    lowered = compile_on_gpu(CONFIG, 1, shape, tw.Config()).lowered
    assert tile_room(lowered, dict.fromkeys(lowered.program.dims, 16)) is None


def test_tiles_lost_between_dimensions_are_told() -> None:
    """The outer dimensions of a grid may hold more than the capacity, and the whole grid less."""

    @tw.kernel
    def sparse(x: tw.Tensor, count: tw.Table) -> None:
        @tw.task(grid={"i": 100, "j": lambda i: count[i]})
        def body(i: tw.Expr, j: tw.Expr) -> None:
            tw.store(x, (i, tw.ds(0, 4)), tw.load(x, (j, tw.ds(0, 4))))

    lowered = tw.compile(sparse, tw.Tensor((100, 4)), tw.Table((100,))).lowered
    count = torch.zeros(100, dtype=torch.int32)
    count[99] = 3
    listing = list_tiles(lowered, Bound(0, {}, {"count": count}, torch.device("cpu")), 16)
    assert int(listing.most) == 100
    listing = list_tiles(lowered, Bound(0, {}, {"count": count}, torch.device("cpu")), 100)
    assert (listing.counts.tolist(), int(listing.most)) == ([3], 100)


def test_one_entry_of_a_table_may_rule_a_grid_a_key_or_a_guard() -> None:
    """Scalars that are the same for all tiles, whether they are known on the host or read from a table."""

    @tw.kernel
    def ruled(x: tw.Tensor, count: tw.Table) -> None:
        rows, _ = x.shape

        @tw.task(grid={"i": count[0], "j": 2, "k": lambda i, j: tw.minimum(count[1], rows)})
        def body(i: tw.Expr, j: tw.Expr, k: tw.Expr) -> None:
            tw.store(x, (i, tw.ds(0, 4)), tw.load(x, (j + k, tw.ds(0, 4))))

        @tw.task(grid={})
        def last() -> None:
            tw.store(x, (0, tw.ds(0, 4)), tw.load(x, (1, tw.ds(0, 4))))

    lowered = tw.compile(ruled, tw.Tensor(("rows", 4)), tw.Table((2,)), config=tw.Config(order="program")).lowered
    for first, second in ((3, 2), (0, 5), (4, 0), (1, 9)):
        count = torch.tensor([first, second], dtype=torch.int32)
        listing = list_tiles(lowered, Bound(0, {"rows": 4}, {"count": count}, torch.device("cpu")), 64)
        inner = range(min(second, 4))
        want = [[0, i, j, k, 0] for i in range(first) for j in range(2) for k in inner] + [[1, 0, 0, 0, 0]]
        assert listing.counts.tolist() == [len(want)]
        assert listing.entries[0, : len(want)].tolist() == want
