"""The C engine computes what the NumPy interpreter computes: on random kernels, and on those with known results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tests.codegen import reference_helpers, test_e4m3, test_reference, test_reference_sync
from tests.codegen.reference_helpers import Arguments
from tests.compiler.test_regions import COLUMNS, ROWS, random_arguments, random_kernel, touched
from tests.engine.c_engine import run_on_c
from tileweave.codegen.reference import bf16
from tileweave.codegen.reference.interpret import interpret
from tileweave.compiler.binding import bind
from tileweave.compiler.config import Config
from tileweave.compiler.passes import compile_program
from tileweave.compiler.regions import regions
from tileweave.compiler.trace import Kernel
from tileweave.primitives.memory import Table, Tensor

SPECS = (
    Tensor((ROWS, COLUMNS)), Tensor((ROWS, COLUMNS), "bfloat16"),
    Table(("experts",)), Table((2, "listed")), Table((2, "owners")),
)  # fmt: skip
PROGRAM_ORDER = Config(order="program")


def ranks_disturb_each_other(seed: int, world_size: int) -> bool:
    """Whether an element that one rank writes is touched by another: random kernels do not synchronise."""
    program, schedule = compile_program(random_kernel(seed), SPECS, world_size, PROGRAM_ORDER)
    found = regions(program, bind(program, random_arguments(seed, world_size)))
    rank_of = {i.first + n: int(i.env.rank[n]) for i in found.instances for n in range(i.count)}
    users: dict[tuple[str, tuple[int, int]], set[int]] = defaultdict(set)
    written = set()
    for tile, accesses in touched(program, schedule, random_arguments(seed, world_size)).items():
        for kind, _, memory, places, _ in accesses:
            for place in places if kind in ("read", "write") else ():
                users[memory, place].add(rank_of[tile])
                if kind == "write":
                    written.add((memory, place))
    return any(len(users[place]) > 1 for place in written)


def compare(seed: int, world_size: int) -> None:
    kernel = random_kernel(seed)
    want, got = random_arguments(seed, world_size), random_arguments(seed, world_size)
    interpret(*compile_program(kernel, SPECS, world_size, PROGRAM_ORDER), want)
    run_on_c(kernel, SPECS, got, PROGRAM_ORDER)
    for rank, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        np.testing.assert_array_equal(ours["x"], theirs["x"], err_msg=f"x of rank {rank}")
        np.testing.assert_array_equal(bf16.widen(ours["y"]), bf16.widen(theirs["y"]), err_msg=f"y of rank {rank}")


@pytest.mark.parametrize("seed", range(100, 118))
def test_random_kernels(seed: int) -> None:
    compare(seed, 1)


@pytest.mark.parametrize("first", range(200, 245, 5))
def test_random_kernels_on_several_ranks(first: int) -> None:
    """The first of five seeds whose ranks keep out of each other's way."""
    world_size = 2 + first // 5 % 2
    compare(next(seed for seed in range(first, 1000) if not ranks_disturb_each_other(seed, world_size)), world_size)


def run(
    source: Kernel,
    specs: tuple[object, ...],
    arguments: Sequence[Arguments],
    config: Config,
    seed: int | None = None,
    *,
    analysed: bool = True,
) -> None:
    """In place of the interpreter."""
    run_on_c(source, specs, arguments, config)


KNOWN: list[tuple[Callable[..., None], tuple[object, ...]]] = [
    (test_reference.test_elementwise_chain, ()),
    *((test_reference.test_functions, (name,)) for name in ("exp", "log", "select", "rsqrt")),
    (test_reference.test_ragged_gemm, (33, 17, 65)),
    (test_reference.test_gather_and_scatter_skip_masked_rows, ()),
    (test_reference.test_when_and_nested_loops, ()),
    (test_reference.test_reductions_run_over_the_extent, (10, 7)),
    (test_reference.test_bfloat16_rounds_where_it_is_stored_or_cast, ()),
    (test_e4m3.test_e4m3_rounds_where_it_is_stored_or_cast, ()),
    (test_e4m3.test_every_code_is_read_and_copied, ()),
    *((test_e4m3.test_ragged_products, (other,)) for other in ("float8_e4m3fn", "bfloat16", "float32")),
    (test_e4m3.test_products_of_tiles_made_in_the_task, ()),
    (test_e4m3.test_accumulators_take_e4m3_and_what_nobody_wrote_is_nan, ()),
    (test_reference.test_values_made_from_an_accumulator_do_not_follow_it, ()),
    (test_reference.test_ragged_update_keeps_the_rest_of_an_accumulator, ()),
    (test_reference.test_what_nobody_wrote_shows_as_nan, ()),
    (test_reference.test_int32_tiles_are_moved_as_they_are, ()),
    (test_reference_sync.test_gather_from_a_peer_a_row, ()),
    (test_reference_sync.test_ring_exchange, ()),
    (test_reference_sync.test_put_get_multicast, ()),
]


@pytest.mark.parametrize(("test", "arguments"), KNOWN, ids=[f"{t.__name__}{a or ''}" for t, a in KNOWN])
def test_kernels_with_known_results(
    monkeypatch: pytest.MonkeyPatch, test: Callable[..., None], arguments: tuple[object, ...]
) -> None:
    """The interpreter's own tests, with the C engine in its place."""
    schedules = [(Config(), None), (Config(workers=3, comm_workers=1, queue="dynamic", order="own_rank_first"), None)]
    monkeypatch.setattr(reference_helpers, "run", run)
    monkeypatch.setattr(reference_helpers, "SCHEDULES", schedules)
    test(*arguments)
