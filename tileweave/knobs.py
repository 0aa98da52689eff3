"""Environment variables, typed, in one place. `docs/knobs.md` is written from this module.

Each knob is read when it is used, so a test can set the variable for a block.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from tileweave.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Knob(Generic[T]):
    """One environment variable: `name`, `default`, how to parse it, what it does, and the default in words."""

    name: str
    default: T
    parse: Callable[[str], T]
    doc: str
    default_text: str = ""

    def get(self) -> T:
        """The parsed value, or the default when the variable is unset.

        Raises:
            ConfigError: the variable is set to something that does not parse.
        """
        text = os.environ.get(self.name)
        if text is None:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ConfigError(f"{self.name}={text!r} is not valid: {error}; unset it or see docs/knobs.md") from None


def _positive_float(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError("expected a number above 0")
    return value


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("expected a whole number above 0")
    return value


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("expected 0 or 1")
    return text == "1"


cache_dir: Knob[Path] = Knob(
    "TILEWEAVE_CACHE_DIR",
    Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tileweave",
    lambda text: Path(text).expanduser().absolute(),
    "Folder of generated sources and compiled kernels.",
    "tileweave in $XDG_CACHE_HOME, or in ~/.cache",
)
cc: Knob[str] = Knob("TILEWEAVE_CC", "cc", str, "C compiler command.")
timeout_s: Knob[float] = Knob(
    "TILEWEAVE_TIMEOUT_S", 60.0, _positive_float, "Seconds a wait may last before the job stops with a HangError."
)
debug: Knob[bool] = Knob(
    "TILEWEAVE_DEBUG",
    False,
    _flag,
    "1 checks the arguments of every launch on all ranks, as `CompiledKernel.check` does, before it runs.",
)
gpu_sms: Knob[int | None] = Knob(
    "TILEWEAVE_GPU_SMS", None, _at_least_one, "Most SMs of a GPU that one launch may take; others stay free.", "all"
)

AnyKnob: TypeAlias = Knob[Path] | Knob[str] | Knob[float] | Knob[bool] | Knob[int | None]
ALL: tuple[AnyKnob, ...] = (cache_dir, cc, timeout_s, debug, gpu_sms)


def as_markdown() -> str:
    """The text of docs/knobs.md."""
    rows = [f"| `{k.name}` | {k.default_text or f'`{_spelled(k.default)}`'} | {k.doc} |" for k in ALL]
    return "\n".join([_HEAD, *rows, ""])


def _spelled(value: object) -> str:
    """A default as one writes it into the variable."""
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


_HEAD = """# Knobs

Environment variables, read when they are used. `tileweave doctor` shows their present values.
This page is written from `tileweave/knobs.py`: `pytest tests/test_knobs.py --update-goldens`.

| variable | default | what it does |
| --- | --- | --- |"""
