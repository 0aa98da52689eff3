"""Values that are known while a kernel is traced act as plain ones; NumPy's numbers as well as Python's."""

from __future__ import annotations

import numpy as np

import tileweave as tw


def test_folded_scalars_specialise() -> None:
    seen: list[str] = []

    @tw.kernel
    def folded(x: tw.Tensor, out: tw.Tensor) -> None:
        parts = tw.ceildiv(10, 4)
        if tw.maximum(parts, 2) > 2:
            seen.append("branch")
        seen.extend("part" for _ in range(parts))

        @tw.task(grid={})
        def task() -> None:
            part = tw.ds(0, parts)
            tw.store(out, part, tw.load(x, part) + tw.full((parts,), 1.0))

    compiled = tw.compile(folded, tw.Tensor((3,)), tw.Tensor((3,)))
    assert seen == ["branch", "part", "part", "part"]
    assert "store out[0 +: 3] = %2" in str(compiled)


def test_numpy_numbers() -> None:
    @tw.kernel
    def scaled(x: tw.Tensor, out: tw.Tensor, size: int, factor: np.float32) -> None:
        @tw.task(grid={})
        def task() -> None:
            part = tw.ds(np.int64(0), size)
            tw.store(out, part, tw.load(x, part) * factor + np.int64(1))

    out = np.zeros(4, np.float32)
    size, factor = np.int64(4), np.float32(2.5)
    tw.compile(scaled, tw.Tensor((4,)), tw.Tensor((4,)), size, factor)(np.ones(4, np.float32), out)
    assert out.tolist() == [3.5] * 4
