/* What every companion kernel in CUDA C++ stands on; one block a worker.
 *
 * Addresses are those of this rank's own symmetric segment: NVSHMEM finds the same place on a
 * peer, whose number is its rank. `state` is one row of int64 a rank: epoch, then the record
 * of the first wait that gave up.
 */
#ifndef TW_COMPANION_CUH
#define TW_COMPANION_CUH

#include <stdint.h>

#include <nvshmem.h>
#include <nvshmemx.h>

#define TW_FN static __device__ __forceinline__
#ifndef TW_WARP
#define TW_WARP 32
#endif

enum { TW_EPOCH, TW_FAILED, TW_WORKER, TW_ENTRY, TW_SITE, TW_INDEX, TW_EXPECTED, TW_OBSERVED };

/* A tile's launch: what its rank binds, and who runs it. */
struct tw_companion {
    const int64_t *memory, *dims, *heap;
    int64_t *state;
    int64_t rank, worker, position, limit, counters, stage;
};

TW_FN int64_t tw_min(int64_t a, int64_t b) { return a < b ? a : b; }
TW_FN int64_t tw_max(int64_t a, int64_t b) { return a > b ? a : b; }
TW_FN int64_t tw_floordiv(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a % b < 0) != (b < 0)); }
TW_FN int64_t tw_mod(int64_t a, int64_t b) { return a - tw_floordiv(a, b) * b; }

/* Whether some wait of this rank has given up; the same for all threads. */
TW_FN bool tw_failed(int64_t *state) {
    return __syncthreads_or(threadIdx.x == 0 && *(volatile int64_t *)&state[TW_FAILED] != 0);
}

/* The next place in a dynamic lane, for all threads. */
TW_FN int64_t tw_take(int32_t *cursor) {
    __shared__ int32_t taken;
    __syncthreads();
    if (threadIdx.x == 0) taken = atomicAdd(cursor, 1);
    __syncthreads();
    return taken;
}

/* Spin until a counter reaches `target`, or the limit is reached; then record who waited for what. */
TW_FN void tw_wait(int64_t counter, int64_t target, const tw_companion &at, int64_t site, int64_t index) {
    if (threadIdx.x == 0) {
        int64_t seen = 0, spins = 0;
        do {
            seen = __nv_atomic_load_n((int64_t *)counter, __NV_ATOMIC_ACQUIRE, __NV_THREAD_SCOPE_SYSTEM);
        } while (seen < target && spins++ < at.limit);
        if (seen < target && atomicCAS((unsigned long long *)&at.state[TW_FAILED], 0ull, 1ull) == 0) {
            at.state[TW_WORKER] = at.worker, at.state[TW_ENTRY] = at.position, at.state[TW_SITE] = site;
            at.state[TW_INDEX] = index, at.state[TW_EXPECTED] = target, at.state[TW_OBSERVED] = seen;
        }
    }
    __syncthreads();
}

/* Add to a counter of this rank, after everything that all threads did before. */
TW_FN void tw_signal(int64_t counter, int64_t amount) {
    __syncthreads();
    if (threadIdx.x == 0)
        __nv_atomic_add((uint64_t *)counter, (uint64_t)amount, __NV_ATOMIC_RELEASE, __NV_THREAD_SCOPE_SYSTEM);
}

/* What this block wrote before is seen by the network. */
TW_FN void tw_fence(void) {
    __threadfence_system();
    __syncthreads();
}

/* Wait until all that this worker has put has arrived. */
TW_FN void tw_quiet(void) {
    __syncthreads();
    if (threadIdx.x == 0) nvshmem_quiet();
    __syncthreads();
}

/* Begin to copy bytes to a peer. */
TW_FN void tw_put(int64_t target, int64_t source, int64_t bytes, int64_t peer) {
    tw_fence();
    nvshmemx_putmem_nbi_block((void *)target, (const void *)source, (size_t)bytes, (int)peer);
}

/* As tw_put, but on return the source may be written again. */
TW_FN void tw_put_now(int64_t target, int64_t source, int64_t bytes, int64_t peer) {
    tw_fence();
    nvshmemx_putmem_block((void *)target, (const void *)source, (size_t)bytes, (int)peer);
    __syncthreads();
}

/* As tw_put, and add to a counter of the peer after its data have arrived there. */
TW_FN void tw_put_signal(int64_t target, int64_t source, int64_t bytes, int64_t peer, int64_t counter, int64_t amount) {
    tw_fence();
    nvshmemx_putmem_signal_nbi_block((void *)target, (const void *)source, (size_t)bytes, (uint64_t *)counter,
                                     (uint64_t)amount, NVSHMEM_SIGNAL_ADD, (int)peer);
}

/* Add to a counter of a peer after all that this worker has put anywhere has arrived. */
TW_FN void tw_signal_peer(int64_t counter, int64_t amount, int64_t peer) {
    tw_quiet();
    if (threadIdx.x == 0) nvshmemx_signal_op((uint64_t *)counter, (uint64_t)amount, NVSHMEM_SIGNAL_ADD, (int)peer);
    __syncthreads();
}

/* A warp copies a row of `bytes`, in units of 16 where it can; zeros where there is no source. */
TW_FN void tw_copy_row(int64_t target, int64_t source, int64_t bytes) {
    const int64_t lane = threadIdx.x % TW_WARP;
    if (((target | source | bytes) & 15) == 0) {
        for (int64_t i = lane; i < bytes / 16; i += TW_WARP)
            ((uint4 *)target)[i] = source ? ((const uint4 *)source)[i] : make_uint4(0, 0, 0, 0);
        return;
    }
    for (int64_t i = lane; i < bytes / 2; i += TW_WARP) /* elements are 2 or 4 bytes */
        ((uint16_t *)target)[i] = source ? ((const uint16_t *)source)[i] : 0;
}

#endif
