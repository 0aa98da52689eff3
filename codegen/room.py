"""How many tiles a launch can have, from the bounds of its grids alone: no table is read, and so no device asked."""

from __future__ import annotations

from collections.abc import Mapping

from tileweave.codegen.lower import Lowered
from tileweave.compiler.bounds import interval
from tileweave.primitives.expr import Dim, Expr, Index, Rank
from tileweave.primitives.ops import Task

MOST_BOUNDED = 1 << 16
"""Above this a bound says too little: every launch would sort as many entries as it names."""


def tile_room(lowered: Lowered, dims: Mapping[str, int]) -> int | None:
    """Entries that hold every lane's tiles whatever the tables say, for dynamic dimensions `dims`.

    None where a table could make it more than `MOST_BOUNDED`.
    """
    known: dict[Expr, tuple[int, int]] = {Dim(name): (size, size) for name, size in dims.items()}
    known[Rank()] = (0, lowered.program.world_size - 1)
    total = 0
    for lowered_task in lowered.tasks:
        most = _most_tiles(lowered_task.task, known)
        total += most
        if total > MOST_BOUNDED:
            return None
    return max(total, 1)


def _most_tiles(task: Task, known: Mapping[Expr, tuple[int, int]]) -> int:
    """Tiles of a task, and of every prefix of its grid, whose later extents may be 0."""
    ranges, count, most = dict(known), 1, 1
    for dim in task.grid:
        extent = max(interval(dim.extent, ranges)[1], 0)
        ranges[Index(dim.name)] = (0, max(extent - 1, 0))
        count *= extent
        most = max(most, count)
    return most
