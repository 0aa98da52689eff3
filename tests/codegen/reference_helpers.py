"""Running kernels on the NumPy interpreter under several schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tileweave.codegen.reference.interpret import interpret
from tileweave.compiler.config import Config
from tileweave.compiler.passes import analyse, compile_program
from tileweave.compiler.trace import Kernel

Array: TypeAlias = npt.NDArray[Any]
Arguments: TypeAlias = dict[str, Array]

SCHEDULES: list[tuple[Config, int | None]] = [
    (Config(), None),
    (Config(workers=3, order="program"), 1),
    (Config(workers=2, queue="dynamic", order="critical_path"), None),
    (Config(workers=3, comm_workers=1, order="own_rank_first"), 2),
    (Config(workers=4, comm_workers=2, queue="dynamic"), 3),
]


def run(
    source: Kernel,
    specs: tuple[object, ...],
    arguments: Sequence[Arguments],
    config: Config,
    seed: int | None = None,
    *,
    analysed: bool = True,
) -> None:
    """Compile, analyse (unless told not to) and interpret."""
    program, schedule = compile_program(source, specs, len(arguments), config)
    if analysed:
        analyse(program, schedule, arguments)
    interpret(program, schedule, arguments, seed=seed)


def check(
    source: Kernel,
    specs: tuple[object, ...],
    make: Callable[[], Sequence[Arguments]],
    want: Sequence[Mapping[str, Array]],
    tolerance: float = 1e-5,
    *,
    analysed: bool = True,
) -> None:
    """Run under every schedule and compare the arguments that `want` names."""
    for config, seed in SCHEDULES:
        arguments = make()
        run(source, specs, arguments, config, seed, analysed=analysed)
        for given, expected in zip(arguments, want, strict=True):
            for name, array in expected.items():
                note = f"{name} {config}"
                np.testing.assert_allclose(given[name], array, rtol=tolerance, atol=tolerance, err_msg=note)


def normal(shape: tuple[int, ...], seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def empty(shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    return np.full(shape, np.nan, dtype=np.float32)


def int32(values: object) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.int32)
