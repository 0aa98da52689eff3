"""Several ranks failed: which exception to raise, and how to show the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from tileweave.errors import GroupError, LaunchError
from tileweave.primitives.control import AbortInfo, AbortKind

# Longest single wait of a main thread. A signal that another thread receives does not end a wait of the main
# thread, so Ctrl-C is seen between two waits.
SIGNAL_CHECK_S = 0.1


class RankTracebackError(Exception):
    """Cause of an exception that came from another process or thread; its text is the traceback there."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


def _is_secondary(error: BaseException) -> bool:
    """Whether it may be only the echo of another rank's failure."""
    return isinstance(error, (LaunchError, GroupError))


def _first_cause(errors: Mapping[int, BaseException], info: AbortInfo | None) -> int:
    """The rank whose exception tells most about why the job failed."""
    at_fault = None if info is None else info.rank
    if info is not None and at_fault is not None and at_fault in errors and info.kind is not AbortKind.FAILED:
        return at_fault
    return min(errors, key=lambda rank: (_is_secondary(errors[rank]), rank != at_fault, rank))


def _summary(errors: Mapping[int, BaseException], chosen: int) -> str:
    """The errors of the other ranks, one line for each different one."""
    ranks: dict[str, list[str]] = {}
    for rank, error in sorted(errors.items()):
        if rank != chosen:
            ranks.setdefault(reason_of(error), []).append(str(rank))
    lines = [f"  rank {', '.join(who)}: {text}" for text, who in ranks.items()]
    return "Other ranks that failed:\n" + "\n".join(lines) if lines else ""


def raise_first_cause(
    errors: Mapping[int, BaseException], info: AbortInfo | None, traces: Mapping[int, str] | None = None
) -> NoReturn:
    """Raise the most telling exception; the others are listed below its traceback (or in its cause)."""
    rank = _first_cause(errors, info)
    error, summary = errors[rank], _summary(errors, rank)
    if traces is not None and rank in traces:
        error.__cause__ = RankTracebackError(f"in rank {rank}:\n{traces[rank]}{summary}")
    elif summary and hasattr(error, "add_note"):
        error.add_note(f"Raised in rank {rank}. {summary}")
    elif summary and error.__cause__ is None:
        error.__cause__ = RankTracebackError(f"raised in rank {rank}. {summary}")
    raise error


def reason_of(error: BaseException) -> str:
    """Type and text in one line."""
    return f"{type(error).__name__}: {error}"
