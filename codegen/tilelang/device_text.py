"""The inline device functions of emitted kernels, as C and as CUDA.

Both give the same names. `state` is one row of int64 a rank: epoch, then the record of the first wait that gave up:
failed, worker, position in the queue, site, index, expected, observed.
"""

from __future__ import annotations

from collections.abc import Iterator

from tileweave.codegen.tilelang.target import Target
from tileweave.primitives.ops import Order, Scope

STATE_WORDS = 8
EPOCH, FAILED, WORKER, ENTRY, SITE, INDEX, EXPECTED, OBSERVED = range(STATE_WORDS)
ENTRY_SITE = -1
"""Site number of the wait for all ranks at the start of a launch."""

_C = """\
#include <math.h>
#include <sched.h>
#include <stdint.h>

#define TW_DEVICE static inline __attribute__((unused))

TW_DEVICE int32_t tw_take(int32_t *cursor) { return __atomic_fetch_add(cursor, 1, __ATOMIC_RELAXED); }

TW_DEVICE int32_t tw_failed(int64_t *state) { return __atomic_load_n(&state[1], __ATOMIC_RELAXED) != 0; }

TW_DEVICE int32_t tw_clear(int64_t address, int32_t words) {
  for (int32_t n = 0; n < words; n++) ((volatile int64_t *)address)[n] = 0;
  return 0;
}

TW_DEVICE int32_t tw_proxy_fence(void) { return 0; }

TW_DEVICE int32_t tw_spin(int64_t counter, int64_t target, int64_t *state, int64_t limit, int64_t worker,
                          int64_t position, int64_t site, int64_t index, int order) {
  int64_t seen = __atomic_load_n((int64_t *)counter, __ATOMIC_RELAXED);
  for (int64_t spins = 0; seen < target && spins < limit; spins++) {
    sched_yield();
    seen = __atomic_load_n((int64_t *)counter, __ATOMIC_RELAXED);
  }
  if (order == __ATOMIC_ACQUIRE) __atomic_thread_fence(__ATOMIC_ACQUIRE);
  int64_t none = 0;
  if (seen >= target || !__atomic_compare_exchange_n(&state[1], &none, 1, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
    return 0;
  state[2] = worker, state[3] = position, state[4] = site, state[5] = index, state[6] = target, state[7] = seen;
  return 0;
}
"""

_C_SIGNAL = """\
TW_DEVICE int32_t tw_signal_{order}_{scope}(int64_t counter, int64_t amount) {{
  __atomic_fetch_add((int64_t *)counter, amount, __ATOMIC_{memory_order});
  return 0;
}}
"""

_C_WAIT = """\
TW_DEVICE int32_t tw_wait_{order}_{scope}(int64_t counter, int64_t target, int64_t *state, int64_t limit,
                                          int64_t worker, int64_t position, int64_t site, int64_t index) {{
  return tw_spin(counter, target, state, limit, worker, position, site, index, __ATOMIC_{memory_order});
}}
"""

_C_FENCE = """\
TW_DEVICE int32_t tw_fence_{order}_{scope}(void) {{
  __atomic_thread_fence(__ATOMIC_{memory_order});
  return 0;
}}
"""

SIGNAL_ORDERS = (Order.RELAXED, Order.RELEASE, Order.ACQ_REL)
WAIT_ORDERS = (Order.RELAXED, Order.ACQUIRE)


def device_text(target: Target) -> str:
    """All inline device functions."""
    assert target == "c"
    return "\n".join([_C, *_c_functions()])


def _c_functions() -> Iterator[str]:
    for scope in Scope:
        for template, orders in ((_C_SIGNAL, SIGNAL_ORDERS), (_C_WAIT, WAIT_ORDERS), (_C_FENCE, (Order.ACQ_REL,))):
            for order in orders:
                names = {"order": order.value, "scope": scope.value, "memory_order": order.value.upper()}
                yield template.format(**names)
