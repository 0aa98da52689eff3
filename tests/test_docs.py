"""The Python in the documentation runs, and prints what the page shows.

A block opened by ```` ```python run ```` is executed, all blocks of a page in one namespace. A block right
after it whose opening line ends in `output`, such as ```` ```text output ````, must equal what it printed;
`pytest --update-goldens` rewrites these blocks in place. Source lines in errors are those of the block.
Of a ```` ```c output ```` only the comments that quote the kernel must be equal: how C is worded may change.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if page.exists()]
BLOCK = re.compile(r"^```(?P<info>[^\n`]+)\n(?P<text>.*?)^```\n", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block at `text[start:end]` of a page."""

    info: str
    text: str
    start: int
    end: int


def blocks(page: str) -> list[Block]:
    return [Block(m["info"].strip(), m["text"], m.start("text"), m.end("text")) for m in BLOCK.finditer(page)]


def runnable(page: str) -> Iterator[tuple[Block, Block | None]]:
    """Blocks to run, each with the output block that follows it with nothing but blank lines between."""
    every = blocks(page)
    for number, block in enumerate(every):
        if block.info != "python run":
            continue
        following = every[number + 1] if number + 1 < len(every) else None
        if following is not None and following.info.endswith(" output"):
            between = page[block.end : following.start].removeprefix("```").removesuffix(f"```{following.info}\n")
            if not between.strip():
                yield block, following
                continue
        yield block, None


def execute(code: str, name: str, namespace: dict[str, Any]) -> str:
    """Run `code` as the file `name`, which errors can quote; what it printed."""
    lines = code.splitlines(keepends=True)
    linecache.cache[name] = (len(code), None, lines, name)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, name, "exec"), namespace)
    return "".join(f"{line.rstrip()}\n" for line in printed.getvalue().rstrip("\n").splitlines())


def comparable(text: str, info: str) -> str:
    """What must be equal. Python before 3.11 knows lines but not columns, so carets may differ."""
    if info == "c output":
        return "\n".join(re.findall(r"/\* \S+\.py:\d+: .*", text))
    return re.sub(r"^( *\| ) *\^+$", r"\1^", text, flags=re.MULTILINE)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_page(path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # pages load examples by their path in the repository
    page = path.read_text(encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": f"docs.{path.stem}"}
    results: list[tuple[Block, str]] = []
    for number, (block, shown) in enumerate(runnable(page), 1):
        printed = execute(block.text, f"{path.stem}-{number}.py", namespace)
        if shown is None:
            assert not printed, f"block {number} of {path.name} prints, but no output block follows it:\n{printed}"
        else:
            results.append((shown, printed))
    if request.config.getoption("--update-goldens"):
        for shown, printed in reversed(results):
            page = page[: shown.start] + printed + page[shown.end :]
        path.write_text(page, encoding="utf-8")
        return
    for shown, printed in results:
        assert comparable(shown.text, shown.info) == comparable(printed, shown.info), (
            f"{path.name} shows other output than its code prints; if that is meant, run pytest --update-goldens"
        )


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_relative_links(path: Path) -> None:
    prose = BLOCK.sub("", path.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)[^)]*\)", prose):
        assert (path.parent / target).exists(), f"{path.name} links to {target}, which does not exist"
