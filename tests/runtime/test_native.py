"""The compile cache."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tileweave import native
from tileweave.errors import BuildError

ANSWER = "int answer(void) { return 42; }\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TILEWEAVE_CACHE_DIR", str(folder))
    return folder


def test_builds_loads_and_calls(cache: Path) -> None:
    path = native.build(ANSWER, "answer")
    assert path.parent == cache
    assert path.name.startswith("answer-")
    assert path.with_suffix(".c").read_text() == ANSWER
    assert native.load(path).answer() == 42
    assert native.load(path) is native.load(path)


def test_hit_is_fast_and_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    path = native.build(ANSWER, "answer")

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a hit started a process")

    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    times = []
    for _ in range(5):
        native._cpu.cache_clear()
        begin = time.perf_counter()
        assert native.build(ANSWER, "answer") == path
        times.append(time.perf_counter() - begin)
    assert min(times) < 5e-3


def test_what_the_code_depends_on_is_in_the_name(tmp_path: Path) -> None:
    (tmp_path / "value.h").write_text('#include "inner.h"\n')
    inner = tmp_path / "inner.h"
    inner.write_text("#define VALUE 1\n")
    source = '#include "value.h"\nint value(void) { return VALUE; }\n'
    one = native.build(source, "value", include_dirs=[tmp_path])
    assert native.build(source, "value", include_dirs=[tmp_path]) == one
    inner.write_text("#define VALUE 2\n")
    two = native.build(source, "value", include_dirs=[tmp_path])
    assert native.load(one).value() == 1
    assert native.load(two).value() == 2
    assert native.build(source, "value", include_dirs=[tmp_path], flags=(*native.DEFAULT_FLAGS, "-O1")) != two


def test_refused_source_shows_the_compilers_words() -> None:
    with pytest.raises(BuildError, match="undeclared_thing") as caught:
        native.build("int f(void) { return undeclared_thing; }\n", "bad")
    assert "command:" in str(caught.value)
    with pytest.raises(BuildError, match="undeclared_thing"):  # nothing half done was kept
        native.build("int f(void) { return undeclared_thing; }\n", "bad")


def test_missing_compiler_and_bad_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("TILEWEAVE_CC", "no-such-compiler")
        with pytest.raises(BuildError, match="TILEWEAVE_CC"):
            native.build(ANSWER, "answer")
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("TILEWEAVE_CACHE_DIR", str(blocker / "below"))
    with pytest.raises(BuildError, match="TILEWEAVE_CACHE_DIR"):
        native.build(ANSWER, "answer")
    with pytest.raises(BuildError, match="library name"):
        native.build(ANSWER, "../answer")
    broken = tmp_path / "broken.so"
    broken.write_text("not a library")
    with pytest.raises(BuildError, match="cannot load"):
        native.load(broken)


def test_many_builders_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    log = tmp_path / "log"
    compiler = tmp_path / "slow-cc"
    compiler.write_text(f'#!/bin/sh\necho run >> {log}\nsleep 0.3\nexec cc "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("TILEWEAVE_CC", str(compiler))
    code = f"from tileweave import native; print(native.build({ANSWER!r}, 'answer'))"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(native.build(ANSWER, "answer"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = {process.communicate()[0].strip() for process in processes} | {str(path) for path in paths}
    assert len(names) == 1
    assert log.read_text().count("run") == 1
    assert not list(cache.glob("*.tmp"))
