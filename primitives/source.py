"""Where in the user's source an op was written."""

from __future__ import annotations

import contextlib
import sys
import traceback
from pathlib import Path
from types import FrameType

from tileweave.errors import SourceLocation

_HERE = Path(__file__).parent
_OWN_FOLDERS = tuple(f"{folder}/" for folder in {_HERE.absolute(), _HERE.resolve()})
_OWN_FILES = (contextlib.__file__,)  # the frame of @contextmanager stands between tw.when and its user


def caller_location() -> SourceLocation | None:
    """The innermost frame outside `primitives/`, with columns where Python knows them (3.11 and later)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_own(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None
    column, end_column = _columns(frame)
    return SourceLocation(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, column, end_column)


def error_location(error: BaseException) -> SourceLocation | None:
    """The innermost line outside `primitives/` that led to `error`."""
    steps = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    outside = [step for step in steps if not _is_own(step[0].f_code.co_filename)]
    if not outside:
        return None
    frame, line = outside[-1]
    return SourceLocation(frame.f_code.co_filename, line, frame.f_code.co_name)


def _is_own(file: str) -> bool:
    return file.startswith(_OWN_FOLDERS) or file in _OWN_FILES


def _columns(frame: FrameType) -> tuple[int | None, int | None]:
    positions = getattr(frame.f_code, "co_positions", None)
    if positions is None:
        return None, None
    for index, (line, end_line, column, end_column) in enumerate(positions()):
        if index == frame.f_lasti // 2:
            return (column, end_column) if line == end_line else (column, None)
    return None, None
