"""The inline device functions of emitted kernels, as C and as CUDA.

Both give the same names. `state` is a row of the record in `codegen/state.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tileweave.primitives.ops import Order, Scope

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

_CUDA_SPIN = """\
TW_DEVICE void tw_spin_{order}_{scope}(int64_t counter, int64_t target, int64_t *state, int64_t limit,
                                       int64_t worker, int64_t position, int64_t site, int64_t index) {{
  int64_t seen;
  for (int64_t spins = 0;; spins++) {{
    asm volatile("ld.{order}.{scope}.global.s64 %0, [%1];" : "=l"(seen) : "l"(counter) : "memory");
    if (seen >= target) return;
    if (spins >= limit || tw_failed(state)) break;
  }}
  tw_give_up(state, worker, position, site, index, target, seen);
}}

TW_DEVICE int32_t tw_wait_{order}_{scope}(int64_t counter, int64_t target, int64_t *state, int64_t limit,
                                          int64_t worker, int64_t position, int64_t site, int64_t index) {{
  if (threadIdx.x == TW_FEEDERS)
    tw_spin_{order}_{scope}(counter, target, state, limit, worker, position, site, index);
  tw_consumers_meet();
  return 0;
}}

TW_DEVICE int32_t tw_feed_wait_{order}_{scope}(int64_t counter, int64_t target, int64_t *state, int64_t limit,
                                               int64_t worker, int64_t position, int64_t site, int64_t index) {{
  if (threadIdx.x == 0)
    tw_spin_{order}_{scope}(counter, target, state, limit, worker, position, site, index);
  tw_feeders_meet();
  tw_proxy_fence();
  return 0;
}}
"""

# What the tensor memory accelerator of another worker reads has to pass a fence between the two ways to memory.
_CUDA_SIGNAL = """\
TW_DEVICE int32_t tw_signal_{order}_{scope}(int64_t counter, int64_t amount) {{
  tw_proxy_fence();
  tw_consumers_meet();
  if (threadIdx.x == TW_FEEDERS)
    asm volatile("red.{order}.{scope}.global.add.u64 [%0], %1;" ::"l"(counter), "l"(amount) : "memory");
  return 0;
}}
"""

_CUDA_RELAXED_SIGNAL = """\
TW_DEVICE int32_t tw_signal_relaxed_{scope}(int64_t counter, int64_t amount) {{
  if (threadIdx.x == TW_FEEDERS)
    asm volatile("red.relaxed.{scope}.global.add.u64 [%0], %1;" ::"l"(counter), "l"(amount) : "memory");
  return 0;
}}
"""

_CUDA_FENCE = """\
TW_DEVICE int32_t tw_fence_acq_rel_{scope}(void) {{
  tw_consumers_meet();
  asm volatile("fence.acq_rel.{scope};" ::: "memory");
  tw_consumers_meet();
  return 0;
}}

TW_DEVICE int32_t tw_signal_acq_rel_{scope}(int64_t counter, int64_t amount) {{
  tw_signal_release_{scope}(counter, amount);
  return tw_fence_acq_rel_{scope}();
}}
"""

_CUDA_ENTER = """\
TW_DEVICE int32_t tw_enter(int64_t counter, int64_t target, int64_t *state, int64_t limit, int64_t worker) {
  if (threadIdx.x == 0) {
    tw_desk_t &desk = tw_desk();
    for (int32_t side = 0; side < 2; side++) {
      tw_mbarrier_init(&desk.laid[side], 1);
      tw_mbarrier_init(&desk.read[side], TW_THREADS);
    }
    tw_spin_acquire_sys(counter, target, state, limit, worker, -1, -1, 0);
  }
  __syncthreads();
  return 0;
}
"""

SIGNAL_ORDERS = (Order.RELAXED, Order.RELEASE, Order.ACQ_REL)
WAIT_ORDERS = (Order.RELAXED, Order.ACQUIRE)
_HEADER = Path(__file__).parent / "include" / "tw_sm90.cuh"


def c_text() -> str:
    """All inline device functions of target `c`."""
    return "\n".join([_C, *_c_functions()])


def cuda_text(consumers: int) -> str:
    """All inline device functions of target `cuda`, for workers of that many consumer threads."""
    return "\n".join([f"#define TW_CONSUMERS {consumers}", _HEADER.read_text(), *_cuda_functions(), _CUDA_ENTER])


def _c_functions() -> Iterator[str]:
    for scope in Scope:
        for template, orders in ((_C_SIGNAL, SIGNAL_ORDERS), (_C_WAIT, WAIT_ORDERS), (_C_FENCE, (Order.ACQ_REL,))):
            for order in orders:
                names = {"order": order.value, "scope": scope.value, "memory_order": order.value.upper()}
                yield template.format(**names)


def _cuda_functions() -> Iterator[str]:
    for scope in Scope:
        for order in WAIT_ORDERS:
            yield _CUDA_SPIN.format(order=order.value, scope=scope.value)
        yield _CUDA_RELAXED_SIGNAL.format(scope=scope.value)
        yield _CUDA_SIGNAL.format(order="release", scope=scope.value)
        yield _CUDA_FENCE.format(scope=scope.value)
