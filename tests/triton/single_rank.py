"""Triton's interpreter computes what the NumPy interpreter computes: on random kernels, and on known results.

Not collected by itself: `test_interpreted.py` runs it where TRITON_INTERPRET=1 is set before Triton is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.codegen import reference_helpers, test_e4m3, test_reference
from tests.codegen.reference_helpers import Arguments
from tests.compiler.test_regions import random_arguments, random_kernel
from tests.engine.c_engine import argument
from tests.engine.test_against_interpreter import PROGRAM_ORDER, SPECS
from tileweave.codegen.compiled import compile as compile_kernel
from tileweave.codegen.reference import bf16
from tileweave.codegen.reference.interpret import interpret
from tileweave.compiler.config import Config
from tileweave.compiler.passes import compile_program
from tileweave.compiler.trace import Kernel
from tileweave.primitives.group import current_group
from tileweave.primitives.memory import Memory


def run_on_triton(
    kernel: Kernel, specs: tuple[object, ...], arguments: Sequence[Arguments], config: Config | None = None
) -> None:
    """Launch on one rank; what the kernel does not write holds NaN, as in the interpreter."""
    assert len(arguments) == 1, "ranks are processes; see interpreted.py"
    one = replace(config or Config(), workers=1, comm_workers=0)
    compiled = compile_kernel(kernel, *specs, world_size=1, backend="triton", config=one)
    executable = compiled.load(current_group())
    first_counter = compiled.lowered.segment.counters_offset_bytes
    executable._symmetric.local()[:first_counter] = 0xFF  # type: ignore[attr-defined]
    for tensor in executable._kernel._local[0].values():  # type: ignore[attr-defined]
        tensor.fill_(0xFF)
    taken = [(n, s) for n, s in zip(kernel.parameters, specs, strict=True) if isinstance(s, Memory)]
    compiled(*(argument(spec, arguments[0][name]) for name, spec in taken))


@pytest.mark.parametrize("seed", range(100, 118))
def test_random_kernels(seed: int) -> None:
    kernel = random_kernel(seed)
    want, got = random_arguments(seed, 1), random_arguments(seed, 1)
    interpret(*compile_program(kernel, SPECS, 1, PROGRAM_ORDER), want)
    run_on_triton(kernel, SPECS, got, PROGRAM_ORDER)
    np.testing.assert_array_equal(got[0]["x"], want[0]["x"])
    np.testing.assert_array_equal(bf16.widen(got[0]["y"]), bf16.widen(want[0]["y"]))


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
    run_on_triton(source, specs, arguments, config)


KNOWN: list[tuple[Callable[..., None], tuple[object, ...]]] = [
    (test_reference.test_elementwise_chain, ()),
    *((test_reference.test_functions, (name,)) for name in ("exp", "log", "select", "rsqrt", "tanh", "erf", "sigmoid")),
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
]


@pytest.mark.parametrize(("test", "arguments"), KNOWN, ids=[f"{t.__name__}{a or ''}" for t, a in KNOWN])
def test_kernels_with_known_results(
    monkeypatch: pytest.MonkeyPatch, test: Callable[..., None], arguments: tuple[object, ...]
) -> None:
    """The interpreter's own tests, with Triton in its place."""
    monkeypatch.setattr(reference_helpers, "run", run)
    monkeypatch.setattr(reference_helpers, "SCHEDULES", [(Config(queue="dynamic"), None)])
    test(*arguments)
