"""Golden files: printed forms kept under tests/golden, rewritten by `pytest --update-goldens`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

# Before anybody imports torch: with the tests' own processes on every core, OpenMP threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="rewrite golden files with today's output")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests first, so that no process is left with one at the end."""
    items.sort(key=lambda item: not {"triton", "tilelang", "gpu"} & set(item.path.parts))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` compares `text` with the file tests/golden/<name>."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-goldens"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} is missing; run pytest --update-goldens and look at it"
        assert text == path.read_text(), f"output differs from {path}; if that is meant, run pytest --update-goldens"

    return check
