"""Remote stores and signals on a ring of ranks, and what the compiler says when they are wrong.

Symmetric memory exists on every rank under one name, and any rank may write to a peer's.
Two rules make that safe, and the compiler checks both against the real tiles of all ranks
before anything runs:

* a rank that writes for another tells it, by adding to a counter there (`tw.signal`, which
  releases all that was written before), and the other waits for the count (`tw.wait`, which
  acquires it). The count must be met *exactly*;
* waits, data and the order of the queues must not form a circle.

`MISTAKES` break one rule each.

    python examples/02_ring_exchange.py
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

import tileweave as tw
from tileweave.errors import DeadlockError, SignalMismatchError

WIDTH, PART = 1000, 256
Mistake = Literal["none", "forgotten", "miscounted", "circle"]


@tw.kernel
def ring(x: tw.Tensor, out: tw.Tensor, mistake: Mistake) -> None:
    """out = x + the left neighbour's x, both [WIDTH]; `mistake` is a plain value, so tracing specialises on it."""
    right = (tw.rank() + 1) % tw.world_size()
    parts = tw.ceildiv(WIDTH, PART)
    inbox = tw.symmetric("inbox", (WIDTH,))
    arrived = tw.signals("arrived", (parts,))

    @tw.task(grid={"part": parts}, role="comm")
    def send(part: tw.Expr) -> None:
        here = tw.ds(part * PART, PART, stop=WIDTH)
        if mistake == "circle":
            tw.wait(arrived, part, 1)  # politely lets the neighbour go first, who does the same
        tw.remote_store(inbox, here, tw.load(x, here), right)
        if mistake != "forgotten":
            tw.signal(arrived, part, 1, right)

    @tw.task(grid={"part": parts})
    def add(part: tw.Expr) -> None:
        here = tw.ds(part * PART, PART, stop=WIDTH)
        tw.wait(arrived, part, 2 if mistake == "miscounted" else 1)
        tw.store(out, here, tw.load(x, here) + tw.load(inbox, here))


MISTAKES: dict[Mistake, type[Exception]] = {
    "forgotten": SignalMismatchError,
    "miscounted": SignalMismatchError,
    "circle": DeadlockError,
}
SHAPES = {"x": (WIDTH,), "out": (WIDTH,)}


def specs(mistake: Mistake) -> tuple[object, ...]:
    """Argument specs of `ring`."""
    return (tw.Tensor((WIDTH,)), tw.Tensor((WIDTH,)), mistake)


def cases(world_size: int = 2) -> list[tw.Case]:
    """The kernel without a mistake."""
    return [tw.Case(ring, specs("none"), [SHAPES] * world_size)]


def main(world_size: int = 2) -> None:
    """Run the right kernel; have the wrong ones refused."""
    kernel = tw.compile(ring, *specs("none"), world_size=world_size)
    kernel.check([SHAPES] * world_size)
    print(kernel.memory())

    def run(group: tw.Group) -> npt.NDArray[np.float32]:
        x, out = np.full(WIDTH, 10.0**group.rank, np.float32), np.empty(WIDTH, np.float32)
        kernel(x, out)
        return out

    with tw.VirtualGroup(world_size) as ranks:  # each rank is a thread of this process
        outs = ranks.run(run)
    for rank, out in enumerate(outs):
        expected = 10.0**rank + 10.0 ** ((rank - 1) % world_size)
        print(f"rank {rank}: x + left neighbour's x = {out[0]:g}")
        assert (out == expected).all(), f"rank {rank}: expected {expected}, got {out}"

    for mistake, error_class in MISTAKES.items():
        broken = tw.compile(ring, *specs(mistake), world_size=world_size)
        try:
            broken.check([SHAPES] * world_size)
        except error_class as error:
            print(f"\n{mistake} — {error_class.__name__}:\n{error}")
        else:
            raise AssertionError(f"the compiler let '{mistake}' pass")


if __name__ == "__main__":
    main()
