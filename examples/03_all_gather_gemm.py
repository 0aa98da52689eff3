"""All-gather + GEMM in one kernel: rows are multiplied as they arrive.

Tensor parallelism, column-parallel layer: each rank holds a shard of the rows of A and of
the columns of the weight, and needs the product of *all* rows with its columns. Unfused, the
GEMM starts when the last row has been gathered. Here `push` sends tiles of rows to every rank and
counts each in there, and a GEMM tile waits for just its own rows:

* tiles are cut per source rank, so a tile waits for one counter and one source;
* both tasks go round the ranks starting with this one: its own rows are there at once, and no
  rank is everybody's first target.

Shards may differ in size, down to none: `offsets` tells where each begins.

    python examples/03_all_gather_gemm.py
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
def all_gather_gemm(
    a: tw.Tensor,
    weight: tw.Tensor,
    offsets: tw.Table,
    out: tw.Tensor,
    *,
    rows: int = 32,
    columns: int = 64,
    depth: int = 256,
) -> None:
    """out [all_rows, columns of this rank] = all ranks' a · weightᵀ.

    a [own_rows, hidden], weight [columns of this rank, hidden]; offsets [world + 1], the first row
    of each rank's shard among all rows, then their number.
    """
    own_rows, hidden = a.shape
    all_rows, width = out.shape
    world = tw.world_size()
    gathered = tw.symmetric("gathered", (all_rows, hidden), a.dtype)
    arrived = tw.signals("arrived", (world, tw.ceildiv(all_rows, rows)))

    @tw.task(grid={"step": world, "m": tw.ceildiv(own_rows, rows)}, role="comm")
    def push(step: tw.Expr, m: tw.Expr) -> None:
        peer = (tw.rank() + step) % world
        first, end = offsets[tw.rank()], offsets[tw.rank() + 1]
        source = tw.ds(m * rows, rows, stop=own_rows)
        target = tw.ds(first + m * rows, rows, stop=end)
        whole = tw.ds(0, hidden)
        tw.put(gathered, (target, whole), a, (source, whole), peer)
        tw.signal(arrived, (tw.rank(), m), 1, peer)

    def source_of(step: tw.Expr) -> tw.Expr:
        return (tw.rank() + step) % world

    def num_tiles(step: tw.Expr) -> tw.Expr:
        return tw.ceildiv(offsets[source_of(step) + 1] - offsets[source_of(step)], rows)

    @tw.task(grid={"step": world, "m": num_tiles, "n": tw.ceildiv(width, columns)})
    def gemm(step: tw.Expr, m: tw.Expr, n: tw.Expr) -> None:
        source = source_of(step)
        row = tw.ds(offsets[source] + m * rows, rows, stop=offsets[source + 1])
        column = tw.ds(n * columns, columns, stop=width)
        tw.wait(arrived, (source, m), 1)
        total = tw.zeros((rows, columns))
        for k in tw.range(0, hidden, depth):
            inner = tw.ds(k, depth, stop=hidden)
            tw.dot(tw.load(gathered, (row, inner)), tw.load(weight, (column, inner)).T, total)
        tw.store(out, (row, column), total)


HIDDEN, WIDTH = 500, 150  # no tile divides them


def shards(world_size: int) -> list[int]:
    """Rows of each rank: 300 in all, split unevenly; with more than two ranks, one has none."""
    return {1: [300], 2: [200, 100], 3: [200, 0, 100], 4: [133, 0, 117, 50]}[world_size]


def problem(world_size: int) -> tuple[tuple[object, ...], list[dict[str, npt.NDArray[Any]]]]:
    """Specs of the arguments, and the arguments of every rank."""
    random = np.random.default_rng(0)
    sizes = shards(world_size)
    total = sum(sizes)
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    a = random.standard_normal((total, HIDDEN), dtype=np.float32)
    weight = random.standard_normal((world_size, WIDTH, HIDDEN), dtype=np.float32)
    specs = (
        tw.Tensor(("own_rows", HIDDEN)),
        tw.Tensor((WIDTH, HIDDEN)),
        tw.Table((world_size + 1,)),
        tw.Tensor((total, WIDTH)),
    )
    arguments = [
        {
            "a": np.ascontiguousarray(a[offsets[rank] : offsets[rank + 1]]),
            "weight": weight[rank],
            "offsets": offsets,
            "out": np.empty((total, WIDTH), np.float32),
        }
        for rank in range(world_size)
    ]
    return specs, arguments


def cases(world_size: int = 2) -> list[tw.Case]:
    """One worker for communication, one for the GEMM."""
    specs, arguments = problem(world_size)
    return [tw.Case(all_gather_gemm, specs, arguments, tw.Config(workers=2, comm_workers=1))]


def run(world_size: int, config: tw.Config) -> list[Array]:
    """`out` of every rank."""
    specs, arguments = problem(world_size)
    kernel = tw.compile(all_gather_gemm, *specs, world_size=world_size, config=config)
    kernel.check(arguments)

    def launch(group: tw.Group) -> Array:
        given = arguments[group.rank]
        kernel(*given.values())
        return np.asarray(given["out"], np.float32)

    with tw.VirtualGroup(world_size) as ranks:
        return ranks.run(launch)


def main() -> None:
    """Compare with NumPy on 1, 2 and 4 ranks; compare the bits of different schedules."""
    for world_size in (1, 2, 4):
        _, arguments = problem(world_size)
        a = np.concatenate([given["a"] for given in arguments]).astype(np.float64)
        outs = run(world_size, tw.Config(workers=2, comm_workers=1))
        for rank, out in enumerate(outs):
            expected = a @ arguments[rank]["weight"].T.astype(np.float64)
            error = np.abs(out - expected).max() / np.abs(expected).max()
            assert error < 1e-5, f"rank {rank} of {world_size} is off by {error}"
        print(f"{world_size} ranks with {shards(world_size)} rows: largest error against fp64 {error:.1e}")
    for order, workers in itertools.product(ORDERS, (1, 3)):
        other = run(4, tw.Config(workers=workers, order=order, queue="dynamic"))
        assert all((one == two).all() for one, two in zip(outs, other, strict=True)), f"{order}, {workers} workers"
    print(f"the same bits on 4 ranks under the orders {', '.join(ORDERS)} and 1 to 3 workers")


if __name__ == "__main__":
    main()
