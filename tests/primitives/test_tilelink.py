"""The nine TileLink primitives: what they record, and their values on two ranks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

import tileweave as tw
from tileweave.errors import TraceError
from tileweave.primitives import tilelink as tl

WIDTH, TILES = 12, 3
PART = WIDTH // TILES


@tw.kernel
def every_primitive(x: tw.Tensor, squared: tw.Tensor, pulled: tw.Tensor, pushed: tw.Tensor, copied: tw.Tensor) -> None:
    """Each rank offers x² `[WIDTH]` tile by tile, pushes x + 1 to its peer, and copies rank-wide blocks both ways."""
    peer = 1 - tw.rank()
    whole = tw.ds(0, WIDTH)
    offer, inbox = tw.symmetric("offer", (WIDTH,)), tw.symmetric("inbox", (WIDTH,))
    mail, mirror = tw.symmetric("mail", (WIDTH,)), tw.symmetric("mirror", (WIDTH,))
    offered = tw.signals("offered", (TILES,))
    local = tw.signals("local", (TILES,))
    sent = tw.signals("sent", (2, TILES))
    mailed = tw.signals("mailed", (2,))

    @tw.task(grid={"i": TILES}, role="comm")
    def produce(i: tw.Expr) -> None:
        part = tw.ds(i * PART, PART)
        value = tw.load(x, part)
        tw.store(offer, part, value * value)
        tl.producer_tile_notify(offered, i, "broadcast")
        tl.producer_tile_notify(local, i, amount=PART)
        tl.tile_push_data(inbox, part, value + 1.0, peer)
        tl.peer_tile_notify(sent, i, peer, amount=2)

    @tw.task(grid={"once": 1}, role="comm")
    def mail_all(once: tw.Expr) -> None:
        tl.rank_copy_data(mail, whole, x, whole, push_to=peer)
        tl.rank_notify(mailed, peer)

    @tw.task(grid={"i": TILES})
    def consume(i: tw.Expr) -> None:
        part = tw.ds(i * PART, PART)
        tl.consumer_tile_wait(local, i, PART, scope=tw.Scope.GPU)
        tw.store(squared, part, tw.load(offer, part))
        tl.consumer_tile_wait(offered, i, tw.world_size())
        tw.store(pulled, part, tl.tile_pull_data(offer, part, peer))
        tl.peer_tile_wait(sent, i, peer, 2)
        tw.store(pushed, part, tw.load(inbox, part))

    @tw.task(grid={"once": 1})
    def collect(once: tw.Expr) -> None:
        tl.rank_wait(mailed, peer)
        tl.rank_copy_data(mirror, whole, mail, whole, push_to=tw.rank())
        tl.rank_copy_data(copied, whole, mirror, whole, pull_from=tw.rank())


SPECS = tuple(tw.Tensor((WIDTH,)) for _ in range(5))


def compiled(config: tw.Config) -> tw.CompiledKernel:
    return tw.compile(every_primitive, *SPECS, world_size=2, config=config)


@pytest.mark.parametrize(
    "config", [tw.Config(), tw.Config(workers=2, comm_workers=1), tw.Config(workers=2, queue="dynamic")]
)
def test_values_on_two_ranks(config: tw.Config) -> None:
    kernel = compiled(config)
    xs = [np.random.default_rng(rank).standard_normal(WIDTH).astype(np.float32) for rank in range(2)]

    def launch(group: tw.Group) -> list[npt.NDArray[np.float32]]:
        outs = [np.full(WIDTH, np.nan, np.float32) for _ in range(4)]
        kernel(xs[group.rank], *outs)
        return outs

    with tw.VirtualGroup(2) as ranks:
        for _ in range(3):  # counters start at zero in each launch
            results = ranks.run(launch)
    for rank, (squared, pulled, pushed, copied) in enumerate(results):
        own, other = xs[rank], xs[1 - rank]
        np.testing.assert_array_equal(squared, own * own)
        np.testing.assert_array_equal(pulled, other * other)
        np.testing.assert_array_equal(pushed, other + np.float32(1))
        np.testing.assert_array_equal(copied, other)


def test_passes_the_checks() -> None:
    shapes = dict.fromkeys(("x", "squared", "pulled", "pushed", "copied"), (WIDTH,))
    compiled(tw.Config(workers=2)).check([shapes, shapes])


def test_recorded_counters_orders_and_scopes() -> None:
    lines = [line.split("  # ")[0].strip() for line in str(compiled(tw.Config())).splitlines()]
    synchronisation = [line for line in lines if line.startswith(("signal ", "wait ", "for ", "copy "))]
    assert synchronisation == [
        "for i0 in 0 .. 2 step 1:",
        "signal offered[i] @ i0 += 1 (release, sys)",
        "signal local[i] += 4 (release, gpu)",
        "signal sent[rank, i] @ 1 - rank += 2 (release, sys)",
        "copy mail[0 +: 12] @ 1 - rank = x[0 +: 12]",
        "signal mailed[rank] @ 1 - rank += 1 (release, sys)",
        "wait local[i] >= 4 (acquire, gpu)",
        "wait offered[i] >= 2 (acquire, sys)",
        "wait sent[1 - rank, i] >= 2 (acquire, sys)",
        "wait mailed[1 - rank] >= 1 (acquire, sys)",
        "copy mirror[0 +: 12] @ rank = mail[0 +: 12]",
        "copy copied[0 +: 12] = mirror[0 +: 12] @ rank",
    ]


def test_locations_are_the_users_lines() -> None:
    printed = str(compiled(tw.Config()))
    assert "tilelink.py" not in printed.replace("test_tilelink.py", "")


def test_bad_arguments() -> None:
    @tw.kernel
    def bad_mode(x: tw.Tensor) -> None:
        done = tw.signals("done", (1,))

        @tw.task(grid={"i": 1})
        def task(i: tw.Expr) -> None:
            tl.producer_tile_notify(done, 0, "everyone")  # type: ignore[arg-type]

    @tw.kernel
    def bad_copy(x: tw.Tensor) -> None:
        memory = tw.symmetric("memory", (4,))

        @tw.task(grid={"i": 1})
        def task(i: tw.Expr) -> None:
            tl.rank_copy_data(memory, tw.ds(0, 4), x, tw.ds(0, 4))

    with pytest.raises(TraceError, match="modes 'p2p' and 'broadcast', got 'everyone'"):
        tw.compile(bad_mode, tw.Tensor((4,)))
    with pytest.raises(TraceError, match="one of push_to=rank and pull_from=rank"):
        tw.compile(bad_copy, tw.Tensor((4,)))
