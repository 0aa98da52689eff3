"""Every exception that Tileweave raises, in one small hierarchy.

Compile-time errors carry the source location of the user's line and draw a
caret under it.  Run-time errors name rank, worker, task, tile and signal.
"""

from __future__ import annotations

import linecache
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """A place in the user's kernel source. `column` is 0-based; `end_column` is exclusive."""

    file: str
    line: int
    function: str = ""
    column: int | None = None
    end_column: int | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def text(self) -> str:
        """The source line without its newline, or '' when the file cannot be read."""
        return linecache.getline(self.file, self.line).rstrip("\n")

    def excerpt(self) -> str:
        """The source line with a caret line below it, or '' when the file cannot be read."""
        text = self.text
        if not text.strip():
            return ""
        start = self.column if self.column is not None else len(text) - len(text.lstrip())
        end = self.end_column if self.end_column is not None and self.end_column > start else len(text)
        margin = " " * len(str(self.line))
        return f"{margin} |\n{self.line} | {text}\n{margin} | {' ' * start}{'^' * max(1, end - start)}"


class TileweaveError(Exception):
    """Base of all errors raised by Tileweave."""


class CompileError(TileweaveError):
    """A kernel that cannot be compiled; `location` is the user's line when it is known."""

    def __init__(self, message: str, location: SourceLocation | None = None) -> None:
        self.message = message
        self.location = location
        super().__init__(message)

    def __str__(self) -> str:
        if self.location is None:
            return self.message
        excerpt = self.location.excerpt()
        return f"{self.location}: {self.message}" + (f"\n{excerpt}" if excerpt else "")


class TraceError(CompileError):
    """The kernel function did something that cannot be recorded."""


class ShapeError(TraceError):
    """Tile shapes or index ranks do not fit together."""


class DTypeError(TraceError):
    """An operand has a dtype that the op does not take."""


class VerifyError(CompileError):
    """The recorded program breaks a rule of the IR."""


class BoundsError(CompileError):
    """A tile access leaves its buffer for some tile of some rank."""


class SyncError(CompileError):
    """Signals and waits of the program do not fit together."""


class SignalMismatchError(SyncError):
    """A wait's target differs from the sum of the signals that can reach it."""


class RaceError(SyncError):
    """Two tiles touch the same elements, one of them writing, and no signal orders them."""


class DeadlockError(SyncError):
    """Dependences and queue orders contain a cycle."""


class ConfigError(TileweaveError, ValueError):
    """A configuration value is out of range or does not fit the kernel."""


class BuildError(TileweaveError):
    """The machine's C compiler is missing or refused the generated source."""


class DeviceError(TileweaveError):
    """The machine lacks the GPU, driver or package that was asked for, or the GPU cannot hold what was asked of it."""


class GroupError(TileweaveError):
    """Joining or using a group of ranks failed."""


class ArgumentError(TileweaveError, ValueError):
    """An argument was refused before anything was launched."""


class LaunchError(TileweaveError):
    """A launch ended before its work was done."""


class PeerError(LaunchError):
    """Another rank refused its arguments; nothing was launched on any rank."""


class HangError(LaunchError):
    """A wait passed its time limit."""


class RankDiedError(LaunchError):
    """A rank of the group ended while others waited for it."""
