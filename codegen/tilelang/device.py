"""What emitted TileLang calls: signals, waits and fences as inline device functions of `device_text.py`.

`launch` stands for `(address of the rank's state, worker, queue position, spin limit)`.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T  # noqa: N812  (as TileLang's own examples have it)

Launch = tuple[Any, Any, Any, Any]


def _call(function: str, *arguments: Any) -> Any:
    return T.call_extern("int32", function, *arguments)


def _int64(value: Any) -> Any:
    return T.cast(value, "int64")


def signal(counter: Any, amount: Any, order: str, scope: str) -> None:
    """Add to the counter at an address, after everything that all threads of this worker did before."""
    T.evaluate(_call(f"tw_signal_{order}_{scope}", counter, _int64(amount)))


def wait(counter: Any, target: Any, launch: Launch, site: int, index: Any, order: str, scope: str) -> None:
    """Spin until the counter at an address reaches `target`, or the limit is reached; then record who waited."""
    state, worker, position, limit = launch
    place = (_int64(worker), _int64(position), _int64(site), _int64(index))
    T.evaluate(_call(f"tw_wait_{order}_{scope}", counter, _int64(target), state, limit, *place))


def feed_wait(counter: Any, target: Any, launch: Launch, site: int, index: Any, order: str, scope: str) -> None:
    """`wait` for the threads that feed the matrix products."""
    state, worker, position, limit = launch
    place = (_int64(worker), _int64(position), _int64(site), _int64(index))
    T.evaluate(_call(f"tw_feed_wait_{order}_{scope}", counter, _int64(target), state, limit, *place))


def fence(order: str, scope: str) -> None:
    """Order this worker's accesses before and after it."""
    T.evaluate(_call(f"tw_fence_{order}_{scope}"))


def take(cursor: Any) -> Any:
    """The next position of a dynamic queue."""
    return _call("tw_take", T.address_of(cursor))


def failed(state: Any) -> Any:
    """Whether some wait of this rank has given up, as 0 or 1."""
    return _call("tw_failed", T.address_of(state[0]))


def clear(address: Any, words: int) -> None:
    """Zero counters."""
    T.evaluate(_call("tw_clear", address, words))


def announce(address: Any) -> None:
    """Add 1 to the counter at an address, for all ranks to see; by the calling thread alone."""
    T.evaluate(_call("tw_announce", address))


def enter(counter: Any, target: Any, launch: Launch) -> None:
    """All threads of a worker wait until every rank has entered the launch."""
    state, worker, _, limit = launch
    T.evaluate(_call("tw_enter", counter, _int64(target), state, limit, _int64(worker)))


def next_of(position: Any, count: Any, state: Any, turn: Any) -> Any:
    """The position that all threads of this worker run at its `turn`: `position`, or -1 at the end."""
    return _call("tw_next", position, count, T.address_of(state[0]), turn)


def next_from(cursor: Any, count: Any, state: Any, turn: Any) -> Any:
    """The position that all threads of this worker run at its `turn`, from a dynamic queue; -1 at the end."""
    return _call("tw_next_from", T.address_of(cursor), count, T.address_of(state[0]), turn)


def mark(task: int) -> None:
    """Say in the text that what follows belongs to a task; -1 ends it."""
    T.evaluate(_call("tw_task", task))
