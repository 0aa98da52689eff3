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


def fence(order: str, scope: str) -> None:
    """Order this worker's accesses before and after it."""
    T.evaluate(_call(f"tw_fence_{order}_{scope}"))


def proxy_fence() -> None:
    """Order this thread's plain accesses of global memory with those of the tensor memory accelerator."""
    T.evaluate(_call("tw_proxy_fence"))


def take(cursor: Any) -> Any:
    """The next position of a dynamic queue."""
    return _call("tw_take", T.address_of(cursor))


def failed(state: Any) -> Any:
    """Whether some wait of this rank has given up, as 0 or 1."""
    return _call("tw_failed", T.address_of(state[0]))


def clear(address: Any, words: int) -> None:
    """Zero counters."""
    T.evaluate(_call("tw_clear", address, words))
