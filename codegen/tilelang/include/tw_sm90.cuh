/* What emitted kernels call on sm_90a. The first TW_FEEDERS threads of a worker bring the tiles of matrix products
 * to shared memory; the TW_CONSUMERS threads behind them do everything else. */
#pragma once

#include <stdint.h>

#define TW_DEVICE static __device__ __forceinline__
#define TW_FEEDERS 128
#define TW_THREADS (TW_FEEDERS + TW_CONSUMERS)
/* Barriers of the hardware; TileLang takes them from 0 up. */
#define TW_BAR_CONSUMERS 14
#define TW_BAR_FEEDERS 15
#define TW_FAILED 1

/* The desk where the first thread lays the position that a worker runs next, for all its threads. */
struct tw_desk_t {
  uint64_t laid[2], read[2];
  int32_t position[2];
};

TW_DEVICE tw_desk_t &tw_desk() {
  __shared__ tw_desk_t desk;
  return desk;
}

TW_DEVICE uint32_t tw_shared(const void *place) { return (uint32_t)__cvta_generic_to_shared(place); }

TW_DEVICE void tw_mbarrier_wait(uint64_t *barrier, uint32_t parity) {
  asm volatile("{\n.reg .pred done;\nAGAIN:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra AGAIN;\n}" ::"r"(tw_shared(barrier)), "r"(parity) : "memory");
}

TW_DEVICE void tw_mbarrier_arrive(uint64_t *barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(tw_shared(barrier)) : "memory");
}

TW_DEVICE void tw_mbarrier_init(uint64_t *barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(tw_shared(barrier)), "r"(count) : "memory");
}

TW_DEVICE int32_t tw_failed(const int64_t *state) { return ((volatile const int64_t *)state)[TW_FAILED] != 0; }

/* The position that this worker runs next, -1 at the end: `next`, which its first thread knows. */
TW_DEVICE int32_t tw_next(int32_t next, int32_t count, int64_t *state, int32_t turn) {
  tw_desk_t &desk = tw_desk();
  const int32_t side = turn & 1, parity = turn >> 1 & 1;
  if (threadIdx.x == 0) {
    tw_mbarrier_wait(&desk.read[side], parity ^ 1);
    desk.position[side] = next < count && !tw_failed(state) ? next : -1;
    tw_mbarrier_arrive(&desk.laid[side]);
  }
  __syncwarp();
  tw_mbarrier_wait(&desk.laid[side], parity);
  const int32_t position = *(volatile int32_t *)&desk.position[side];
  tw_mbarrier_arrive(&desk.read[side]);
  return position;
}

TW_DEVICE int32_t tw_next_from(int32_t *cursor, int32_t count, int64_t *state, int32_t turn) {
  return tw_next(threadIdx.x == 0 ? atomicAdd(cursor, 1) : 0, count, state, turn);
}

/* A wait by one thread; the first wait of a rank that gives up leaves its record. */
TW_DEVICE void tw_give_up(int64_t *state, int64_t worker, int64_t position, int64_t site, int64_t index,
                          int64_t target, int64_t seen) {
  if (atomicCAS((unsigned long long *)&state[TW_FAILED], 0ull, 1ull) != 0) return;
  state[2] = worker, state[3] = position, state[4] = site, state[5] = index, state[6] = target, state[7] = seen;
}

/* Plain accesses of global memory before this, and accesses by the tensor memory accelerator after it. */
TW_DEVICE void tw_proxy_fence() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

TW_DEVICE void tw_consumers_meet() {
  asm volatile("bar.sync %0, %1;" ::"n"(TW_BAR_CONSUMERS), "n"(TW_CONSUMERS) : "memory");
}

TW_DEVICE void tw_feeders_meet() {
  asm volatile("bar.sync %0, %1;" ::"n"(TW_BAR_FEEDERS), "n"(TW_FEEDERS) : "memory");
}

/* All threads of a worker share this. */
TW_DEVICE int32_t tw_clear(int64_t address, int32_t words) {
  for (int32_t n = threadIdx.x; n < words; n += TW_THREADS) ((volatile int64_t *)address)[n] = 0;
  return 0;
}

/* One thread calls this. */
TW_DEVICE int32_t tw_announce(int64_t counter) {
  asm volatile("red.release.sys.global.add.u64 [%0], 1;" ::"l"(counter) : "memory");
  return 0;
}

/* A mark in the text: what follows belongs to a task. */
TW_DEVICE int32_t tw_task(int32_t) { return 0; }
