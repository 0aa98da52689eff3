"""Triton's interpreter with programs that take turns, so that all workers of all ranks of one launch run, as on a GPU.

The interpreter runs the programs of a grid one after the other, and the first wait for another
program would last for ever. Here each program is a thread that hands on at every atomic
operation; one runs at a time, so what happens is the same every time.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest


class _Turns:
    """Whose turn it is among `count` programs."""

    def __init__(self, builder: Any, count: int) -> None:
        self.builder, self.alive = builder, list(range(count))
        self.turn = threading.Condition()
        self.current = 0
        self.error: BaseException | None = None
        self.mine = threading.local()

    def pass_on(self, *, ended: bool = False) -> None:
        """Let the next program run, and return when it is this one's turn again."""
        own = self.mine.number
        with self.turn:
            at = self.alive.index(own)
            if ended:
                self.alive.remove(own)
                self.current = self.alive[at % len(self.alive)] if self.alive else -1
            else:
                self.current = self.alive[(at + 1) % len(self.alive)]
            self.turn.notify_all()
            if not ended:
                self.await_turn(own)

    def await_turn(self, own: int) -> None:
        """Under the condition's lock."""
        self.turn.wait_for(lambda: self.current == own)
        self.builder.grid_idx = (own, 0, 0)

    def program(self, number: int, body: Callable[[], object]) -> None:
        self.mine.number = number
        with self.turn:
            self.await_turn(number)
        try:
            body()
        except BaseException as error:  # noqa: BLE001  (the launch raises it)
            self.error = self.error or error
        finally:
            self.pass_on(ended=True)


def interleave(patch: pytest.MonkeyPatch) -> None:
    """Make launches in this process take turns, and let the engine start several workers."""
    from triton.runtime import interpreter

    from tileweave.codegen.triton import engine

    builder = interpreter.interpreter_builder
    running: list[_Turns] = []

    def launch(self: Any, *args: Any, **options: Any) -> None:
        names = inspect.getfullargspec(self.fn).args
        passed = {k: v for k, v in options.items() if k in names}
        given = inspect.getcallargs(self.fn, *args, **passed)
        scope = interpreter._patch_lang(self.fn)
        try:
            values = {k: v if k in self.constexprs else interpreter._implicit_cvt(v) for k, v in given.items()}
            builder.set_grid_dim(self.grid[0], 1, 1)
            turns = _Turns(builder, self.grid[0])
            running.append(turns)
            threads = [
                threading.Thread(target=turns.program, args=(n, lambda: self.fn(**values))) for n in range(self.grid[0])
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            running.clear()
            scope.restore()
        if turns.error is not None:
            raise turns.error

    def handing_on(operation: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any) -> Any:
            result = operation(*args)
            running[-1].pass_on()
            return result

        return act

    patch.setattr(interpreter.GridExecutor, "__call__", launch)
    for name in ("create_atomic_rmw", "create_atomic_cas"):
        patch.setattr(builder, name, handing_on(getattr(builder, name)))
    patch.setattr(engine, "_require_interpreter", lambda lowered, ranks: None)
