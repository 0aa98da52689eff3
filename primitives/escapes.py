"""Guards that are left early: what tracing cannot see, read off the source of a task."""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from collections.abc import Callable, Iterator

from tileweave.errors import SourceLocation, TraceError

_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


# CPython up to 3.11 keeps the parser's recursion depth in one place for all threads, and rank threads trace
# at once.
_parsing = threading.Lock()


def refuse_early_exits(function: Callable[..., object]) -> None:
    """Refuse `return`, `break` or `continue` that leaves a `with tw.when(…)`.

    A task is traced once, as if every guard held, so such a statement would drop all that
    follows it for every tile.

    Raises:
        TraceError: at the statement.
    """
    try:
        lines, first = inspect.getsourcelines(function)
        with _parsing:
            tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return  # no source to read, as in an interactive session
    for guard in ast.walk(tree):
        if isinstance(guard, ast.With) and any(_is_when(item.context_expr) for item in guard.items):
            for statement in _exits(guard.body, in_loop=False):
                word = type(statement).__name__.lower()
                raise TraceError(
                    f"`{word}` under tw.when would drop what follows for every tile, since a task is traced once; "
                    "guard the rest with a tw.when of its own",
                    SourceLocation(function.__code__.co_filename, first + statement.lineno - 1, function.__name__),
                )


def _is_when(expression: ast.expr) -> bool:
    if not isinstance(expression, ast.Call):
        return False
    name = expression.func
    return getattr(name, "attr", getattr(name, "id", "")) == "when"


def _exits(body: list[ast.stmt], *, in_loop: bool) -> Iterator[ast.stmt]:
    """Statements of `body` that leave it; a loop inside keeps its own `break` and `continue`."""
    for statement in body:
        if isinstance(statement, ast.Return) or (isinstance(statement, (ast.Break, ast.Continue)) and not in_loop):
            yield statement
        if isinstance(statement, _FUNCTIONS):
            continue
        inside = in_loop or isinstance(statement, _LOOPS)
        for field in ("body", "orelse", "finalbody"):
            yield from _exits(getattr(statement, field, []), in_loop=inside)
