"""A first kernel: two tile tasks that overlap, on one rank.

A kernel is a Python function that declares *tasks*. A task runs once for each point of its
grid, on a tile. Tasks of one kernel run at the same time, so one that needs what another
writes waits for a counter: `gemm` adds one to `done[m]` for each finished tile of row tile
`m`, and `normalise` may start on that row tile at the count of all its column tiles, even
while another worker is still busy with the rows below.

    python examples/01_first_kernel.py
"""

from __future__ import annotations

import numpy as np

import tileweave as tw


@tw.kernel
def linear_norm(x: tw.Tensor, weight: tw.Tensor, bias: tw.Tensor, out: tw.Tensor, *, rows: int = 64) -> None:
    """out [num_tokens, width] = rms_norm(relu(x [num_tokens, hidden] · weightᵀ [hidden, width] + bias [width]))."""
    num_tokens, hidden = x.shape
    width, _ = weight.shape
    columns, depth = 128, 256
    row_tiles, column_tiles = tw.ceildiv(num_tokens, rows), tw.ceildiv(width, columns)
    done = tw.signals("done", (row_tiles,))

    @tw.task(grid={"m": row_tiles, "n": column_tiles})
    def gemm(m: tw.Expr, n: tw.Expr) -> None:
        row = tw.ds(m * rows, rows, stop=num_tokens)  # the last row tile may be partial
        column = tw.ds(n * columns, columns, stop=width)
        total = tw.zeros((rows, columns))
        for k in tw.range(0, hidden, depth):
            inner = tw.ds(k, depth, stop=hidden)
            tw.dot(tw.load(x, (row, inner)), tw.load(weight, (column, inner)).T, total)
        tw.store(out, (row, column), tw.maximum(total + tw.load(bias, column)[None, :], 0.0))
        tw.signal(done, m)

    @tw.task(grid={"m": row_tiles}, role="reduce")
    def normalise(m: tw.Expr) -> None:
        whole = (tw.ds(m * rows, rows, stop=num_tokens), tw.ds(0, width))
        tw.wait(done, m, column_tiles)
        tile = tw.load(out, whole)
        mean_square = tw.sum(tile * tile, axis=1) * (1.0 / int(width))
        tw.store(out, whole, tile * tw.rsqrt(mean_square + 1e-6))


NUM_TOKENS, HIDDEN, WIDTH = 200, 500, 300  # no tile divides any of them
SPECS = (
    tw.Tensor((NUM_TOKENS, HIDDEN)),
    tw.Tensor((WIDTH, HIDDEN)),
    tw.Tensor((WIDTH,)),
    tw.Tensor((NUM_TOKENS, WIDTH)),
)


def cases(world_size: int = 2) -> list[tw.Case]:  # noqa: ARG001  (this kernel has no peers)
    """The kernel with shapes to look at, for `tileweave compile examples/01_first_kernel.py:linear_norm`."""
    shapes = dict(zip(("x", "weight", "bias", "out"), (spec.static_shape for spec in SPECS), strict=True))
    return [tw.Case(linear_norm, SPECS, [shapes], tw.Config(workers=2))]


def main() -> None:
    """Compile, look, run, compare."""
    (case,) = cases()
    kernel = case.compile()  # the same as tw.compile(linear_norm, *SPECS, config=…)
    kernel.check(case.arguments)  # in bounds, counts exact, no circle of waits
    print(kernel)  # what was recorded, with the source line of each op
    print(kernel.graph(case.arguments))  # who depends on whom: derived, nobody wrote it down
    print(kernel.schedule(case.arguments))  # which worker runs which tile, in order

    random = np.random.default_rng(0)
    x, weight, bias = (random.standard_normal(spec.static_shape, dtype=np.float32) for spec in SPECS[:3])
    out = np.empty((NUM_TOKENS, WIDTH), np.float32)
    kernel(x, weight, bias, out)  # builds one C kernel at the first call, and runs it

    linear = np.maximum(x.astype(np.float64) @ weight.T.astype(np.float64) + bias, 0.0)
    expected = linear / np.sqrt((linear**2).mean(axis=1, keepdims=True) + 1e-6)
    error = np.abs(out - expected).max() / np.abs(expected).max()
    print(f"largest error against NumPy in fp64: {error:.1e} of the largest value")
    assert error < 1e-5


if __name__ == "__main__":
    main()
