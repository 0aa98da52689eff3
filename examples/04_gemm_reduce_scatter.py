"""GEMM + reduce-scatter in one kernel, with a sum whose order never changes.

Tensor parallelism, row-parallel layer: each rank holds a part of the inner dimension, so its
product is a partial sum of all rows, and each rank keeps the total of its own rows. Unfused, the
reduce-scatter starts when the last tile has been multiplied. Here `gemm` pushes each finished tile to
the rank that keeps its rows, into a slot of its own, and `reduce` adds the slots of a tile when all
have come:

* a slot per source, `[world, rows, width]`, instead of atomic adds: the sum is taken in rank order,
  so its bits depend neither on which rank was faster nor on the schedule;
* `gemm` begins with the rows of the next rank and ends with its own, which need no link.

    python examples/04_gemm_reduce_scatter.py
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

import tileweave as tw
from tileweave.compiler.order import ORDERS

Array = npt.NDArray[np.float32]


@tw.kernel
def gemm_reduce_scatter(
    a: tw.Tensor,
    weight: tw.Tensor,
    offsets: tw.Table,
    out: tw.Tensor,
    most_rows: int,
    *,
    rows: int = 32,
    columns: int = 64,
    depth: int = 256,
) -> None:
    """out [own_rows, width] = this rank's rows of the sum over ranks of a · weightᵀ.

    a [all_rows, part of the inner dimension], weight [width, the same part]; offsets [world + 1], the
    first of the rows that each rank keeps, then their number; most_rows: most rows that a rank keeps.
    """
    _, part = a.shape
    own_rows, width = out.shape
    world = tw.world_size()
    column_tiles = tw.ceildiv(width, columns)
    slots = tw.symmetric("slots", (world, most_rows, width))
    arrived = tw.signals("arrived", (tw.ceildiv(most_rows, rows), column_tiles))

    def owner_of(step: tw.Expr) -> tw.Expr:
        return (tw.rank() + 1 + step) % world

    def num_tiles(step: tw.Expr) -> tw.Expr:
        return tw.ceildiv(offsets[owner_of(step) + 1] - offsets[owner_of(step)], rows)

    @tw.task(grid={"step": world, "m": num_tiles, "n": column_tiles})
    def gemm(step: tw.Expr, m: tw.Expr, n: tw.Expr) -> None:
        owner = owner_of(step)
        first, end = offsets[owner], offsets[owner + 1]
        row = tw.ds(first + m * rows, rows, stop=end)
        column = tw.ds(n * columns, columns, stop=width)
        total = tw.zeros((rows, columns))
        for k in tw.range(0, part, depth):
            inner = tw.ds(k, depth, stop=part)
            tw.dot(tw.load(a, (row, inner)), tw.load(weight, (column, inner)).T, total)
        place = tw.ds(m * rows, rows, stop=end - first)
        tw.remote_store(slots, (tw.rank(), place, column), total, owner)
        tw.signal(arrived, (m, n), 1, owner)

    @tw.task(grid={"m": tw.ceildiv(own_rows, rows), "n": column_tiles}, role="reduce")
    def reduce(m: tw.Expr, n: tw.Expr) -> None:
        place = tw.ds(m * rows, rows, stop=own_rows)
        column = tw.ds(n * columns, columns, stop=width)
        tw.wait(arrived, (m, n), world)
        total = tw.zeros((rows, columns))
        for source in tw.range(world):
            total += tw.load(slots, (source, place, column))
        tw.store(out, (place, column), total)


ROWS, INNER, WIDTH = 300, 1000, 150  # no tile divides them


def splits(total: int, world_size: int) -> list[int]:
    """Bounds of `world_size` parts of `total`, of sizes that differ by at most one, as offsets."""
    return [total * rank // world_size for rank in range(world_size + 1)]


def problem(world_size: int) -> tuple[tuple[object, ...], list[dict[str, npt.NDArray[Any]]]]:
    """Specs of the arguments, and the arrays of every rank."""
    random = np.random.default_rng(0)
    a = random.standard_normal((ROWS, INNER), dtype=np.float32)
    weight = random.standard_normal((WIDTH, INNER), dtype=np.float32)
    rows, inner = splits(ROWS, world_size), splits(INNER, world_size)
    specs = (
        tw.Tensor((ROWS, "part")),
        tw.Tensor((WIDTH, "part")),
        tw.Table((world_size + 1,)),
        tw.Tensor(("own_rows", WIDTH)),
        max(np.diff(rows).tolist()),
    )
    arguments = [
        {
            "a": np.ascontiguousarray(a[:, inner[rank] : inner[rank + 1]]),
            "weight": np.ascontiguousarray(weight[:, inner[rank] : inner[rank + 1]]),
            "offsets": np.array(rows, np.int32),
            "out": np.empty((rows[rank + 1] - rows[rank], WIDTH), np.float32),
        }
        for rank in range(world_size)
    ]
    return specs, arguments


def cases(world_size: int = 2) -> list[tw.Case]:
    """Two workers that share all tasks: pushing is the end of a GEMM tile here, not a task of its own."""
    specs, arguments = problem(world_size)
    return [tw.Case(gemm_reduce_scatter, specs, arguments, tw.Config(workers=2))]


def run(world_size: int, config: tw.Config) -> Array:
    """The rows that the ranks keep, one rank's below the other's."""
    specs, arguments = problem(world_size)
    kernel = tw.compile(gemm_reduce_scatter, *specs, world_size=world_size, config=config)
    kernel.check(arguments)

    def launch(group: tw.Group) -> Array:
        given = arguments[group.rank]
        kernel(*given.values())
        return np.asarray(given["out"], np.float32)

    with tw.VirtualGroup(world_size) as ranks:
        return np.concatenate(ranks.run(launch))


def main() -> None:
    """Compare with NumPy on 1, 2 and 4 ranks; compare the bits of different schedules."""
    for world_size in (1, 2, 4):
        _, arguments = problem(world_size)
        a, weight = (
            np.concatenate([given[name] for given in arguments], axis=1).astype(np.float64) for name in ("a", "weight")
        )
        out = run(world_size, tw.Config(workers=2))
        expected = a @ weight.T
        error = np.abs(out - expected).max() / np.abs(expected).max()
        print(f"{world_size} ranks, inner dimension {INNER} split {world_size} ways: error against fp64 {error:.1e}")
        assert error < 1e-5
    for order, workers in itertools.product(ORDERS, (1, 3)):
        other = run(4, tw.Config(workers=workers, order=order, queue="dynamic"))
        assert (out == other).all(), f"{order}, {workers} workers"
    print(f"the same bits on 4 ranks under the orders {', '.join(ORDERS)} and 1 to 3 workers")


if __name__ == "__main__":
    main()
