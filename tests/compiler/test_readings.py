"""Every op has every reading, and every table has nothing else."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tileweave.codegen.c.functions import C_FUNCTIONS
from tileweave.codegen.c.ops import EMIT
from tileweave.codegen.c.scalars import BINARY
from tileweave.codegen.reference.ops import MEANING
from tileweave.compiler.bounds import INTERVALS
from tileweave.compiler.cost import COSTS
from tileweave.compiler.printer import PRINTED
from tileweave.primitives import ops
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
}


@pytest.mark.parametrize("reading", sorted(OP_READINGS))
def test_every_op_has_the_reading(reading: str) -> None:
    assert set(OP_READINGS[reading]) == ALL_OPS


def test_op_classes_are_all_ops() -> None:
    assert set(op_classes()) == ALL_OPS


@pytest.mark.parametrize("table", [BINARY, INTERVALS], ids=["c", "intervals"])
def test_every_operator_has_the_reading(table: Mapping[str, object]) -> None:
    assert set(table) == set(OPERATORS)


def test_every_function_has_c_text() -> None:
    assert set(C_FUNCTIONS) == set(FUNCTIONS)
    for name, function in FUNCTIONS.items():
        assert C_FUNCTIONS[name].count("{}") == function.arity
