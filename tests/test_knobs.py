"""docs/knobs.md is what `tileweave/knobs.py` says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tileweave import knobs
from tileweave.errors import ConfigError

PAGE = Path(__file__).parents[1] / "docs" / "knobs.md"


def test_page_is_up_to_date(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-goldens"):
        PAGE.write_text(knobs.as_markdown())
    assert PAGE.read_text() == knobs.as_markdown(), f"run pytest {Path(__file__).name} --update-goldens"


def test_page_names_every_knob() -> None:
    page = knobs.as_markdown()
    assert all(knob.name in page and knob.doc in page for knob in knobs.ALL)


def test_a_value_that_does_not_parse_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWEAVE_TIMEOUT_S", "0")
    with pytest.raises(ConfigError, match=r"TILEWEAVE_TIMEOUT_S='0' is not valid: expected a number above 0"):
        knobs.timeout_s.get()
