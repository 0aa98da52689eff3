"""A kernel of one signal and one wait, and what its PTX shows of their orders, whichever backend wrote it."""

from __future__ import annotations

import re
from collections.abc import Callable

import tileweave as tw
from tileweave.primitives.ops import Order, Scope


def handshake(
    release: Order = Order.RELEASE, acquire: Order = Order.ACQUIRE, scope: Scope = Scope.SYSTEM
) -> tw.CompiledKernel:
    """One rank sends a row, tells its peer, and the peer waits."""

    @tw.kernel
    def exchange(x: tw.Tensor, out: tw.Tensor) -> None:
        box, full = tw.symmetric("box", (64,)), tw.signals("full", (1,))

        @tw.task(grid={}, role="comm")
        def send() -> None:
            tw.remote_store(box, tw.ds(0, 64), tw.load(x, tw.ds(0, 64)), 1 - tw.rank())
            tw.signal(full, 0, 1, 1 - tw.rank(), order=release, scope=scope)

        @tw.task(grid={})
        def receive() -> None:
            tw.wait(full, 0, 1, order=acquire, scope=scope)
            tw.store(out, tw.ds(0, 64), tw.load(box, tw.ds(0, 64)))

    return tw.compile(exchange, tw.Tensor((64,)), tw.Tensor((64,)), world_size=2)


def count(text: str, *words: str) -> int:
    """Instructions whose dotted name holds all of `words`."""
    names = [word.split(".") for word in re.findall(r"\b(?:red|ld|atom)\.[\w.:]+", text)]
    return sum(set(words) <= set(name) for name in names)


def check_orders(ptx: Callable[..., str]) -> None:
    """`ptx(release=…, acquire=…)` is that of `handshake`.

    The entry of a launch signals and waits too: so it is the difference that counts.
    """
    strong, weak_signal, weak_wait = ptx(), ptx(release=Order.RELAXED), ptx(acquire=Order.RELAXED)
    assert count(strong, "release", "sys") == count(weak_signal, "release", "sys") + 1
    assert count(strong, "acquire", "sys") == count(weak_signal, "acquire", "sys")
    assert count(strong, "acquire", "sys") > count(weak_wait, "acquire", "sys")
    assert count(strong, "release", "sys") == count(weak_wait, "release", "sys")


def check_scopes(ptx: Callable[..., str]) -> None:
    """`ptx(scope=…)` is that of `handshake`."""
    wide, narrow = ptx(), ptx(scope=Scope.GPU)
    assert count(wide, "release", "gpu") == 0
    assert count(narrow, "release", "gpu") == 1
    assert count(narrow, "release", "sys") == count(wide, "release", "sys") - 1
    assert count(narrow, "acquire", "gpu") > count(wide, "acquire", "gpu")
