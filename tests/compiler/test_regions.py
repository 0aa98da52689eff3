"""The boxes that regions derive are the elements that a run touches, tile by tile and op by op.

The two share no evaluation: regions evaluate scalars vectorised over all tiles, the
interpreter one tile at a time with Python integers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from tests.codegen.test_reference_moe import CASES, TILES, make_data, make_launch
from tileweave.codegen.reference.interpret import interpret
from tileweave.codegen.reference.machine import Touch
from tileweave.compiler.binding import bind
from tileweave.compiler.boxes import Boxes, Counts
from tileweave.compiler.config import Config
from tileweave.compiler.passes import compile_program
from tileweave.compiler.program import Program
from tileweave.compiler.regions import Regions, regions
from tileweave.compiler.schedule import Schedule
from tileweave.compiler.trace import Kernel, kernel
from tileweave.errors import BoundsError
from tileweave.moe.kernels import moe_layer
from tileweave.primitives import language as tw
from tileweave.primitives.expr import Expr, ScalarLike, as_expr
from tileweave.primitives.memory import Memory, Rows, Slice, Table, Tensor

Array: TypeAlias = npt.NDArray[Any]

# (kind, op, memory, places, amount) of one access, in the program order of its tile.
Access: TypeAlias = tuple[str, int, str, frozenset[tuple[int, int]], int]
History: TypeAlias = dict[int, list[Access]]

ROWS, COLUMNS = 13, 9


def touched(program: Program, schedule: Schedule, arguments: list[dict[str, Array]]) -> History:
    """What a run touches, by tile; accesses that touch nothing are left out."""
    history: History = {}

    def observe(touch: Touch) -> None:
        places = frozenset((int(owner), int(element)) for owner, element in touch.places)
        if places:
            entry = (touch.kind, id(touch.op), touch.memory, places, touch.amount)
            history.setdefault(touch.tile, []).append(entry)

    interpret(program, schedule, arguments, observer=observe)
    return history


def derived(found: Regions) -> History:
    """What regions say, in the same form: boxes of one step and op together, in order of steps."""
    entries: dict[tuple[int, int, int, str, str, int], set[tuple[int, int]]] = {}

    def add(row: Boxes | Counts, i: int, kind: str, memory: str, amount: int, places: set[tuple[int, int]]) -> None:
        # At one step a copy reads before it writes, as "read" sorts before "write".
        key = (int(row.tile[i]), int(row.step[i]), int(row.op[i]), kind, memory, amount)
        entries.setdefault(key, set()).update(places)

    for name, boxes in found.boxes.items():
        for i in range(len(boxes.tile)):
            owner = int(boxes.owner[i])
            shape = [
                d if isinstance(d, int) else int(found.routing.dims[str(d)][owner])
                for d in found.program.by_name[name].shape
            ]
            spans = [range(a, b) for a, b in zip(boxes.low[i].tolist(), boxes.high[i].tolist(), strict=True)]
            places = {(owner, int(np.ravel_multi_index(at, shape))) for at in itertools.product(*spans)}
            add(boxes, i, "write" if boxes.is_write[i] else "read", name, 0, places)
    for kind, table in (("signal", found.signals), ("wait", found.waits)):
        for name, counts in table.items():
            for i in range(len(counts.tile)):
                place = (int(counts.owner[i]), int(counts.counter[i]))
                add(counts, i, kind, name, int(counts.amount[i]), {place})
    history: History = {}
    for (tile, _, op, kind, memory, amount), places in sorted(entries.items()):
        entry = (kind, id(found.ops[op]), memory, frozenset(places), amount)
        history.setdefault(tile, []).append(entry)
    return history


def compare(program: Program, schedule: Schedule, arguments: list[dict[str, Array]]) -> History:
    found = regions(program, bind(program, arguments))
    want, got = derived(found), touched(program, schedule, arguments)
    for tile in range(found.num_tiles):
        assert got.get(tile, []) == want.get(tile, []), found.describe(tile)
    assert set(got) <= set(range(found.num_tiles))
    return got


class _Author:
    """Writes random, valid kernels; every address stays inside its memory, every wait is open."""

    def __init__(self, random: Random, tables: Mapping[str, Table], memories: list[Memory]) -> None:
        self.random = random
        self.tables = tables
        self.memories = memories
        self.scalars: list[Expr] = []

    def scalar(self, depth: int = 2) -> Expr:
        """Any scalar; may be negative."""
        pick = self.random.randrange(8) if depth else self.random.randrange(3)
        if pick < 2 and self.scalars:
            return self.random.choice(self.scalars)
        if pick < 3:
            return self.random.choice([as_expr(self.random.randint(0, 5)), tw.rank(), self.tables["sizes"].dims[0]])
        if pick == 3:
            sizes = self.tables["sizes"]
            return sizes[self.scalar(depth - 1) % sizes.shape[0]]
        a, b = self.scalar(depth - 1), self.scalar(depth - 1)
        return self.random.choice(
            [a + b, a - b, a * 2, a // 3, tw.minimum(a, b), tw.maximum(a, b), a % 4, (a < b) + b, a.equals(b) | (b > 1)]
        )

    def within(self, size: ScalarLike) -> Expr:
        return self.scalar() % size

    def slice(self, limit: int) -> Slice:
        """A slice inside `[0, limit)`, masked by a stop in half of the cases."""
        size = self.random.randint(1, min(limit, 5))
        if self.random.random() < 0.5:
            return tw.ds(self.within(limit - size + 1), size)
        return tw.ds(self.within(limit), size, stop=tw.minimum(self.scalar(), limit))

    def part(self, size: int, limit: ScalarLike) -> Slice:
        """A slice of `size` that ends before `limit`."""
        return tw.ds(self.within(limit), size, stop=tw.minimum(self.scalar() + 3, limit))

    def access(self, memory: Memory, sizes: tuple[int, ...] | None = None) -> tuple[tuple[Any, ...], Rows | None]:
        """An index of `memory`, and rows of peers if each row has one; `sizes` are those of a tile to store."""
        row: Any = self.slice(ROWS) if sizes is None else self.part(sizes[0], ROWS)
        column: Any = self.slice(COLUMNS) if sizes is None else self.part(sizes[1], COLUMNS)
        peers = None
        if self.random.random() < 0.4:
            entries, size = self.tables["rows"], row.size
            part, line = self.part(size, entries.shape[1]), self.within(2)
            row = entries.rows(line, part)
            if memory.space == "symmetric" and self.random.random() < 0.7:
                peers = self.tables["peers"].rows(line, tw.ds(part.start, size))
        elif sizes is None and self.random.random() < 0.3:
            column = self.within(COLUMNS)
        return (row, column), peers

    def peer(self, memory: Memory, peers: Rows | None) -> Any:
        if peers is not None:
            return peers
        remote = memory.space == "symmetric" and self.random.random() < 0.7
        return self.within(tw.world_size()) if remote else None

    def load(self) -> tw.Tile:
        memory = self.random.choice(self.memories)
        index, peers = self.access(memory)
        peer = self.peer(memory, peers)
        return tw.load(memory, index) if peer is None else tw.remote_load(memory, index, peer)

    def store(self) -> None:
        tile = self.load()
        if len(tile.shape) == 1:
            tile = tile[:, None]
        memory = self.random.choice(self.memories)
        index, peers = self.access(memory, tile.shape)
        peer = self.peer(memory, peers)
        if peer is None:
            tw.store(memory, index, tile * 0.5)
        else:
            tw.remote_store(memory, index, tile, peer)

    def copy(self) -> None:
        far = [m for m in self.memories if m.space == "symmetric"]
        sizes = (self.random.randint(1, 5), self.random.randint(1, 5))
        one = self.random.choice(far)
        near = [m for m in self.memories if m.dtype == one.dtype and m is not one]  # it must not overlap itself
        other = self.random.choice(near)
        verb = self.random.choice([tw.put, tw.get])
        target, source = (one, other) if verb is tw.put else (other, one)
        verb(target, self.access(target, sizes)[0], source, self.access(source, sizes)[0], self.within(tw.world_size()))

    def statement(self, counters: Any, depth: int) -> None:
        pick = self.random.randrange(9)
        if pick < 3:
            self.store()
        elif pick == 3:
            self.copy()
        elif pick == 4:
            where = (self.within(4), self.within(3))
            peer = self.random.choice([None, self.within(tw.world_size())])
            tw.signal(counters, where, self.within(7), peer)
        elif pick == 5:
            tw.wait(counters, (self.within(4), self.within(3)), tw.minimum(self.scalar(), 0))
        elif depth and pick < 8:
            stop = tw.minimum(self.scalar(), 4)
            for i in tw.range(self.within(3), stop, self.random.randint(1, 2)):
                self.scalars.append(i)
                self.block(counters, depth - 1)
                self.scalars.pop()
        elif depth:
            with tw.when(self.scalar() > self.scalar()):
                self.block(counters, depth - 1)
        else:
            self.load()

    def block(self, counters: Any, depth: int) -> None:
        for _ in range(self.random.randint(1, 3)):
            self.statement(counters, depth)


def random_kernel(seed: int) -> Kernel:
    @kernel
    def generated(x: Tensor, y: Tensor, sizes: Table, rows: Table, peers: Table) -> None:
        random = Random(seed)
        memories = [
            x, y, tw.workspace("near", (ROWS, COLUMNS)), tw.symmetric("far", (ROWS, COLUMNS)),
            tw.symmetric("wide", (ROWS + 2, COLUMNS + 1)),
        ]  # fmt: skip
        counters = tw.signals("counters", (4, 3))
        author = _Author(random, {"sizes": sizes, "rows": rows, "peers": peers}, memories)
        for number in range(random.randint(1, 3)):
            inner = random.choice([lambda a: sizes[a], lambda a: sizes[a] - a, 2])
            grid: dict[str, tw.Extent] = {"a": random.choice([2, sizes.shape[0]]), "b": inner}
            tw.task(grid=grid, role=random.choice(["comm", "compute"]))(random_task(author, counters, f"task{number}"))

    return generated


def random_task(author: _Author, counters: Any, name: str) -> Callable[..., None]:
    def body(a: Expr, b: Expr) -> None:
        author.scalars = [a, b]
        author.block(counters, 2)

    body.__name__ = name
    return body


def random_arguments(seed: int, world: int) -> list[dict[str, Array]]:
    random = np.random.default_rng(seed)
    arguments = []
    for _ in range(world):
        listed = int(random.integers(1, 12))
        arguments.append({
            "x": random.standard_normal((ROWS, COLUMNS)).astype(np.float32),
            "y": random.integers(0, 1 << 15, size=(ROWS, COLUMNS)).astype(np.uint16),
            "sizes": random.integers(0, 4, size=random.integers(2, 5)).astype(np.int32),
            "rows": np.maximum(random.integers(-4, ROWS, size=(2, listed)), -2).astype(np.int32),
            "peers": random.integers(0, world, size=(2, listed + 5)).astype(np.int32),
        })  # fmt: skip
    return arguments


@pytest.mark.parametrize("seed", range(60))
def test_random_kernels(seed: int) -> None:
    world = 1 + seed % 3
    specs = (
        Tensor((ROWS, COLUMNS)), Tensor((ROWS, COLUMNS), "bfloat16"),
        Table(("experts",)), Table((2, "listed")), Table((2, "owners")),
    )  # fmt: skip
    program, schedule = compile_program(random_kernel(seed), specs, world, Config(order="program"))
    compare(program, schedule, random_arguments(seed, world))


@pytest.mark.parametrize("name", ["three ranks", "a rank without tokens", "not gated with all", "ragged widths"])
def test_moe_layers(name: str) -> None:
    specs, arguments = make_launch(CASES[name], make_data(CASES[name]))
    config = Config(workers=2, comm_workers=1, tunables={"tiles": TILES})
    program, schedule = compile_program(moe_layer, specs, len(arguments), config)
    assert compare(program, schedule, arguments)


def test_what_leaves_its_memory_is_refused_at_its_line() -> None:
    @kernel
    def over(x: Tensor) -> None:
        @tw.task(grid={"i": 3})
        def body(i: Expr) -> None:
            tw.load(x, tw.ds(i * 4, 4))

    program, _ = compile_program(over, (Tensor(("n",)),), 2, Config())
    regions(program, bind(program, [{"x": (12,)}, {"x": (12,)}]))
    with pytest.raises(BoundsError) as caught:
        regions(program, bind(program, [{"x": (12,)}, {"x": (11,)}]))
    assert caught.value.message == (
        "body[i=2] on rank 1 reads x at 8 … 12 in dimension 0, which has size 11 on rank 1; "
        "limit the slice with tw.ds(…, stop=…)"
    )
    assert caught.value.location is not None
    assert caught.value.location.text.strip() == "tw.load(x, tw.ds(i * 4, 4))"
