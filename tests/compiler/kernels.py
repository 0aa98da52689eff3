"""Small kernels that the compiler's tests share; line numbers below appear in golden files."""

from __future__ import annotations

import numpy as np

import tileweave as tw
from tileweave.primitives.expr import Expr


@tw.kernel
def exchange(x: tw.Tensor, rows: tw.Table, out: tw.Tensor, *, block: int = 4) -> None:
    """Each rank sends its rows to the next; `rows[expert]` of them are reduced by expert."""
    num_experts = int(rows.shape[0])
    width = int(x.shape[1])
    inbox = tw.symmetric("inbox", (num_experts, 8, width))
    ready = tw.signals("ready", (num_experts,))
    following = (tw.rank() + 1) % tw.world_size()

    @tw.task(grid={"expert": num_experts}, role="comm")
    def send(expert: Expr) -> None:
        tile = tw.load(x, (tw.ds(expert * 8, 8, stop=expert * 8 + rows[expert]), tw.ds(0, width)))
        tw.remote_store(inbox, (expert, tw.ds(0, 8, stop=rows[expert]), tw.ds(0, width)), tile, following)
        tw.signal(ready, expert, rows[expert], following)

    @tw.task(grid={"expert": num_experts, "m": lambda expert: tw.ceildiv(rows[expert], block)})
    def reduce(expert: Expr, m: Expr) -> None:
        tw.wait(ready, expert, rows[expert])
        tile = tw.load(inbox, (expert, tw.ds(m * block, block, stop=rows[expert]), tw.ds(0, width)))
        where = tw.ds(expert * 8 + m * block, block, stop=expert * 8 + rows[expert])
        tw.store(out, (where, tw.ds(0, width)), tw.sigmoid(tile) * 2.0)


def exchange_case(
    world_size: int = 2, config: tw.Config | None = None
) -> tuple[tw.CompiledKernel, list[dict[str, object]]]:
    """`exchange` of 3 experts with 8, 0 and 5 rows, compiled, and the arguments of every rank."""
    specs = (tw.Tensor((24, 16)), tw.Table((3,)), tw.Tensor((24, 16)))
    compiled = tw.compile(exchange, *specs, world_size=world_size, config=config)
    given: dict[str, object] = {"x": (24, 16), "rows": np.array([8, 0, 5], dtype=np.int32), "out": (24, 16)}
    return compiled, [given] * world_size
