"""Every op has every reading, and every table has nothing else."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tileweave.codegen.c.functions import C_FUNCTIONS
from tileweave.codegen.c.ops import EMIT
from tileweave.codegen.c.scalars import BINARY
from tileweave.codegen.c.writer import C_TYPES, ROUND
from tileweave.codegen.listing import TORCH_OPERATORS
from tileweave.codegen.reference.ops import MEANING
from tileweave.codegen.reference.storage import STORAGE, UNWRITTEN
from tileweave.codegen.tilelang.functions import TILELANG_FUNCTIONS
from tileweave.codegen.tilelang.ops import EMIT as TILELANG_EMIT
from tileweave.codegen.tilelang.scalars import BINARY as TILELANG_BINARY
from tileweave.codegen.triton.functions import TRITON_FUNCTIONS
from tileweave.codegen.triton.ops import EMIT as TRITON_EMIT
from tileweave.codegen.triton.scalars import BINARY as TRITON_BINARY
from tileweave.codegen.triton.writer import ROUND as TRITON_ROUND
from tileweave.codegen.triton.writer import TRITON_TYPES, WIDEN
from tileweave.compiler.bounds import INTERVALS
from tileweave.compiler.cost import COSTS
from tileweave.compiler.printer import PRINTED
from tileweave.primitives import dtypes, ops
from tileweave.primitives.expr import OPERATORS
from tileweave.primitives.functions import FUNCTIONS
from tileweave.primitives.ops import ACCESSES, TILE_OPERANDS, Op, op_classes

ALL_OPS = {c for c in vars(ops).values() if isinstance(c, type) and issubclass(c, Op) and c is not Op}

OP_READINGS: Mapping[str, Mapping[type[Op], object]] = {
    "accesses": ACCESSES,
    "operands": TILE_OPERANDS,
    "cost": COSTS,
    "printed": PRINTED,
    "reference": MEANING,
    "c": EMIT,
    "triton": TRITON_EMIT,
    "tilelang": TILELANG_EMIT,
}


@pytest.mark.parametrize("reading", sorted(OP_READINGS))
def test_every_op_has_the_reading(reading: str) -> None:
    assert set(OP_READINGS[reading]) == ALL_OPS


def test_op_classes_are_all_ops() -> None:
    assert set(op_classes()) == ALL_OPS


OPERATOR_READINGS: Mapping[str, Mapping[str, object]] = {
    "intervals": INTERVALS,
    "torch": TORCH_OPERATORS,
    "c": BINARY,
    "triton": TRITON_BINARY,
    "tilelang": TILELANG_BINARY,
}


@pytest.mark.parametrize("reading", sorted(OPERATOR_READINGS))
def test_every_operator_has_the_reading(reading: str) -> None:
    assert set(OPERATOR_READINGS[reading]) == set(OPERATORS)


@pytest.mark.parametrize("texts", [C_FUNCTIONS, TRITON_FUNCTIONS, TILELANG_FUNCTIONS], ids=["c", "triton", "tilelang"])
def test_every_function_has_the_text(texts: Mapping[str, str]) -> None:
    assert set(texts) == set(FUNCTIONS)
    for name, function in FUNCTIONS.items():
        assert texts[name].count("{}") == function.arity


@pytest.mark.parametrize("table", [C_TYPES, STORAGE, UNWRITTEN, TRITON_TYPES])
def test_every_dtype_is_stored(table: Mapping[dtypes.DType, object]) -> None:
    assert set(table) == set(dtypes.ALL.values())


@pytest.mark.parametrize("table", [ROUND, TRITON_ROUND, WIDEN])
def test_every_type_of_numbers_is_rounded_to(table: Mapping[dtypes.DType, object]) -> None:
    assert set(table) == set(dtypes.FLOATS)
