/* NVSHMEM and the parts of CUDA that a companion kernel uses, for one thread of a CPU and ranks in one process.
 * An address is found on a peer by its distance from the rank's own segment. */
#pragma once

#include <stdint.h>
#include <string.h>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static
#define TW_WARP 1

struct dim { unsigned x; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
static dim threadIdx = {0}, blockIdx = {0}, blockDim = {1};
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
static inline void __syncthreads() {}
static inline int __syncthreads_or(int value) { return value; }
static inline void __threadfence_system() {}
static inline int32_t atomicAdd(int32_t *place, int32_t amount) { return __atomic_fetch_add(place, amount, 5); }
static inline unsigned long long atomicCAS(unsigned long long *place, unsigned long long old, unsigned long long value) {
    __atomic_compare_exchange_n(place, &old, value, 0, 5, 5);
    return old;
}
#define __NV_ATOMIC_ACQUIRE __ATOMIC_ACQUIRE
#define __NV_ATOMIC_RELEASE __ATOMIC_RELEASE
#define __NV_THREAD_SCOPE_SYSTEM 0
#define __nv_atomic_load_n(place, order, scope) __atomic_load_n(place, order)
#define __nv_atomic_add(place, amount, order, scope) (void)__atomic_fetch_add(place, amount, order)

#define NVSHMEM_SIGNAL_ADD 10
static int64_t const *host_heap;
static int64_t host_rank, host_puts, host_put_signals;

static inline char *on_peer(const void *address, int peer) {
    return (char *)((int64_t)address - host_heap[host_rank] + host_heap[peer]);
}
static inline void nvshmem_quiet() {}
static inline void nvshmemx_signal_op(uint64_t *counter, uint64_t amount, int, int peer) {
    *(uint64_t *)on_peer(counter, peer) += amount;
}
static inline void nvshmemx_putmem_block(void *target, const void *source, size_t bytes, int peer) {
    host_puts++;
    memcpy(on_peer(target, peer), source, bytes);
}
static inline void nvshmemx_putmem_nbi_block(void *target, const void *source, size_t bytes, int peer) {
    nvshmemx_putmem_block(target, source, bytes, peer);
}
static inline void nvshmemx_putmem_signal_nbi_block(void *target, const void *source, size_t bytes, uint64_t *counter,
                                                    uint64_t amount, int operation, int peer) {
    host_put_signals++;
    memcpy(on_peer(target, peer), source, bytes);
    nvshmemx_signal_op(counter, amount, operation, peer);
}
