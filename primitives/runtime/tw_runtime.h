/* Tileweave run time: what ranks share, and how they wait for each other.
 *
 * Header only, C11 with GNU extensions, Linux.  Included by group.c (collectives of
 * the host) and by every generated kernel.  All functions are static; names that start
 * with tw__ are internal.
 *
 * One tw_control lies in memory that all ranks of a group map (anonymous memory for
 * thread ranks, a memfd for processes).  It holds no pointers, so it may be mapped at a
 * different address in each process.
 *
 * Every field that one thread writes while another may read it is _Atomic, so that
 * ThreadSanitizer sees no race; relaxed accesses compile to plain moves.  Texts are
 * plain bytes, ordered by the release/acquire pair of the word that announces them.
 */
#ifndef TW_RUNTIME_H
#define TW_RUNTIME_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define TW_LAYOUT 2u                     /* raise when the shared layout changes */
#define TW_MAGIC 0x7477636f6e74726fu     /* "twcontro" */
#define TW_MAX_RANKS 1024
#define TW_MAX_WORKERS 64
#define TW_HOST TW_MAX_WORKERS           /* record of the rank's host thread */
#define TW_TEXT_BYTES 1024               /* UTF-8, NUL-terminated */

/* Results of waits and of tw_enter.  0 means go on; anything else means leave the kernel. */
enum { TW_OK = 0, TW_ABORTED = 1, TW_REFUSED = 2, TW_INTERRUPTED = 3, TW_MISMATCH = 4, TW_GROW = 5 };

/* Why a group stopped; low byte of the abort word. */
enum { TW_ABORT_NONE = 0, TW_ABORT_TIMEOUT = 1, TW_ABORT_RANK_DIED = 2, TW_ABORT_FAILED = 3 };

/* What a worker does; tw_record.state. */
enum { TW_IDLE = 0, TW_RUNNING = 1, TW_WAITING = 2, TW_DONE = 3 };

/* Wait sites.  Generated kernels number theirs from 0. */
enum { TW_SITE_NONE = -1, TW_SITE_ENTER = -2, TW_SITE_GATHER = -3 };

/* What one worker does right now, for the text of an error.  Written by that worker only. */
typedef struct tw_record {
    alignas(64) _Atomic uint32_t state;  /* TW_IDLE … TW_DONE */
    _Atomic int32_t task;                /* task kind, -1 for none */
    _Atomic int32_t tile[4];             /* grid indices of the tile */
    _Atomic int32_t site;                /* wait site, TW_SITE_NONE when not waiting */
    _Atomic int32_t signal;              /* signal array, -1 for none */
    _Atomic int64_t signal_index;        /* linear index in the array; for host sites the awaited rank */
    _Atomic uint64_t expected;           /* counter value waited for */
    _Atomic uint64_t observed;           /* counter value last seen */
    _Atomic uint64_t epoch;              /* launch */
} tw_record;

typedef struct tw_rank {
    alignas(64) _Atomic int64_t pid;     /* 0 until the rank has joined */
    _Atomic uint64_t start_time;         /* of the process, in clock ticks since boot; 0: unknown */
    _Atomic uint32_t left;               /* 1: the rank needs nothing more and may be gone */

    alignas(64) _Atomic uint64_t entered;   /* launch epoch the rank has come to */
    _Atomic uint64_t refused[2];         /* by epoch parity: the epoch that the rank refused */
    _Atomic uint64_t kernel[2];          /* by epoch parity: digest of the kernel that the rank launches */
    _Atomic uint64_t entered_ns;         /* clock when it entered; private to the rank */

    alignas(64) _Atomic uint64_t posted; /* number of the last gather the rank has posted */
    _Atomic uint64_t posted_bytes[2];    /* by gather parity: payload size */

    alignas(64) char refusal[2][TW_TEXT_BYTES];  /* by epoch parity, announced by `entered` */
    char failure[TW_TEXT_BYTES];         /* announced by the abort word */

    tw_record records[TW_MAX_WORKERS + 1];
} tw_rank;

typedef struct tw_control {
    uint64_t magic;                      /* these are written once, before any rank joins */
    uint32_t layout;
    uint32_t world_size;
    uint64_t bytes;                      /* of the whole segment */
    uint64_t slots;                      /* offset of the gather slots from the control's start */
    uint64_t slot_bytes;                 /* per rank and parity */
    uint32_t spins;                      /* default spin budget of a wait */

    alignas(64) _Atomic uint64_t abort;  /* kind | (rank + 1) << 8 | (worker + 1) << 32 ; 0: none */

    alignas(64) char failure[TW_TEXT_BYTES];  /* text of an abort that comes from outside the ranks */

    tw_rank ranks[];                     /* world_size of them; gather slots follow, page aligned */
} tw_control;

/* One thread's handle on the group.  Private to the thread; never shared. */
typedef struct tw_worker {
    tw_control *control;
    tw_record *record;
    int32_t rank, worker;
    uint64_t timeout_ns;                 /* how long one wait may last */
    uint64_t epoch;                      /* current launch, written into records */
    uint64_t waited_ns;                  /* time spent in waits that were not satisfied at once */
    uint64_t waits;                      /* number of such waits */
    uint32_t spins;                      /* pause instructions before the first yield */
    uint32_t next_peer;                  /* where the next look at the peers starts */
    int32_t interruptible;               /* 1: give TW_INTERRUPTED on a Unix signal or after 0.1 s */
} tw_worker;

#define TW__INLINE static inline __attribute__((unused))
#define TW__COLD static __attribute__((unused, noinline, cold))

#define TW__YIELD_NS 100000u             /* yield for this long before sleeping */
#define TW__SLEEP_MIN_NS 20000u
#define TW__SLEEP_MAX_NS 1000000u
#define TW__LOOK_NS 20000000u            /* look after the peers every 20 ms */
#define TW__LOOK_RANKS 32u               /* at this many peers each time */
#define TW__SLICE_NS 100000000u          /* interruptible waits return this often */

/* Monotonic clock, nanoseconds. */
TW__INLINE uint64_t tw_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

TW__INLINE void tw_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

/* ------------------------------------------------------------------ signals */

/* Adds `amount` to a counter with the given memory order, e.g. memory_order_acq_rel. */
#define tw_signal_order(counter, amount, order) \
    ((void)atomic_fetch_add_explicit((_Atomic uint64_t *)(counter), (uint64_t)(amount), (order)))

/* Adds with release: all this thread wrote before is visible to who sees the new value. */
#define tw_signal(counter, amount) tw_signal_order((counter), (amount), memory_order_release)

/* ------------------------------------------------------------------ abort */

/* The abort word; TW_ABORT_NONE (0) while all is well. */
TW__INLINE uint64_t tw_aborted(const tw_control *control) {
    return atomic_load_explicit(&control->abort, memory_order_acquire);
}

/* Stops the group.  The first caller wins; returns 1 to it and 0 to later ones.
 * `rank` is the rank at fault, -1 for none; `worker` the worker, TW_HOST or -1. */
TW__COLD int tw_abort(tw_control *control, int kind, int rank, int worker) {
    uint64_t none = 0;
    uint64_t word = (uint64_t)(kind & 0xff) | ((uint64_t)(uint32_t)(rank + 1) & 0xffffffu) << 8 |
                    (uint64_t)(uint32_t)(worker + 1) << 32;
    return atomic_compare_exchange_strong_explicit(&control->abort, &none, word, memory_order_acq_rel,
                                                   memory_order_acquire);
}

/* ------------------------------------------------------------------ records */

#define tw__set(field, value) atomic_store_explicit(&(field), (value), memory_order_relaxed)
#define tw__get(field) atomic_load_explicit(&(field), memory_order_relaxed)

/* Makes `worker` ready and clears its record.  `index` is 0 … TW_MAX_WORKERS-1, or TW_HOST. */
TW__INLINE void tw_worker_init(tw_worker *worker, tw_control *control, int rank, int index, uint64_t timeout_ns,
                               uint64_t epoch) {
    tw_record *record = &control->ranks[rank].records[index];
    *worker = (tw_worker){.control = control, .record = record, .rank = rank, .worker = index,
                          .timeout_ns = timeout_ns, .epoch = epoch, .spins = control->spins,
                          .next_peer = (uint32_t)rank + 1u};
    tw__set(record->state, TW_IDLE);
    tw__set(record->task, -1);
    for (int i = 0; i < 4; i++) tw__set(record->tile[i], 0);
    tw__set(record->site, TW_SITE_NONE);
    tw__set(record->signal, -1);
    tw__set(record->signal_index, 0);
    tw__set(record->expected, 0);
    tw__set(record->observed, 0);
    tw__set(record->epoch, epoch);
}

/* Notes that the worker begins a tile. */
TW__INLINE void tw_record_tile(tw_worker *worker, int task, int i0, int i1, int i2, int i3) {
    tw_record *record = worker->record;
    tw__set(record->task, task);
    tw__set(record->tile[0], i0);
    tw__set(record->tile[1], i1);
    tw__set(record->tile[2], i2);
    tw__set(record->tile[3], i3);
    tw__set(record->state, TW_RUNNING);
}

/* Notes that the worker is TW_IDLE, TW_RUNNING or TW_DONE. */
TW__INLINE void tw_record_state(tw_worker *worker, uint32_t state) { tw__set(worker->record->state, state); }

/* ------------------------------------------------------------------ peers */

/* Reads state letter and start time from /proc/<pid>/stat.  Returns 0, or the errno of the failure. */
TW__COLD int tw__process(int64_t pid, char *state, uint64_t *start_time) {
    char path[40], text[1024];
    snprintf(path, sizeof path, "/proc/%lld/stat", (long long)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return errno;
    ssize_t got = read(fd, text, sizeof text - 1);
    int error = got < 0 ? errno : 0;
    close(fd);
    if (error) return error;
    text[got] = 0;
    char *at = strrchr(text, ')');       /* the command name may contain anything but this is its end */
    if (!at || at[1] != ' ') return EIO;
    at += 2;
    *state = *at;
    for (int field = 3; field < 22; field++) {
        at = strchr(at, ' ');
        if (!at) return EIO;
        at++;
    }
    *start_time = strtoull(at, NULL, 10);
    return 0;
}

/* 1 when the rank's process is gone and had not left in good order. */
TW__COLD int tw__dead(const tw_control *control, int rank) {
    const tw_rank *peer = &control->ranks[rank];
    int64_t pid = atomic_load_explicit(&peer->pid, memory_order_acquire);
    if (pid == 0 || pid == (int64_t)getpid()) return 0;  /* not here yet, or a thread of this process */
    if (atomic_load_explicit(&peer->left, memory_order_acquire)) return 0;
    int dead = kill((pid_t)pid, 0) != 0 && errno == ESRCH;
    uint64_t known = tw__get(peer->start_time), start = 0;
    if (!dead && known) {
        char state = '?';
        int error = tw__process(pid, &state, &start);
        dead = error == ENOENT || error == ESRCH || (!error && (state == 'Z' || state == 'X' || start != known));
    }
    /* It may have left and ended between the first look at `left` and now. */
    return dead && !atomic_load_explicit(&peer->left, memory_order_acquire);
}

/* Looks at some peers, in turn; aborts the group when one is dead. */
TW__COLD void tw__look_after_peers(tw_worker *worker) {
    tw_control *control = worker->control;
    uint32_t world = control->world_size, count = world < TW__LOOK_RANKS ? world : TW__LOOK_RANKS;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t rank = worker->next_peer++ % world;
        if ((int)rank != worker->rank && tw__dead(control, (int)rank)) {
            tw_abort(control, TW_ABORT_RANK_DIED, (int)rank, -1);
            return;
        }
    }
}

/* ------------------------------------------------------------------ waiting */

#define tw__reached(counter, target) (atomic_load_explicit((counter), memory_order_acquire) >= (target))

/* The slow part of a wait: spin, then yield, then sleep.  `peer` is the one rank that
 * can raise the counter, or -1; `since` is when the wait began (it may be resumed). */
TW__COLD int tw__wait_slow(tw_worker *worker, const _Atomic uint64_t *counter, uint64_t target, int peer,
                           uint64_t since) {
    tw_control *control = worker->control;
    for (uint32_t i = 0; i < worker->spins; i++) {
        tw_pause();
        if (tw__reached(counter, target)) return TW_OK;
    }
    uint64_t began = tw_now_ns(), now = began;
    while (now - began < TW__YIELD_NS) {
        sched_yield();
        if (tw__reached(counter, target)) return TW_OK;
        if (tw_aborted(control)) return TW_ABORTED;
        now = tw_now_ns();
    }
    uint64_t sleep_ns = TW__SLEEP_MIN_NS, look = now + TW__LOOK_NS;
    for (;;) {
        struct timespec pause = {0, (long)sleep_ns};
        int interrupted = nanosleep(&pause, NULL) != 0;
        if (tw__reached(counter, target)) return TW_OK;
        if (tw_aborted(control)) return TW_ABORTED;
        if (peer >= 0 && atomic_load_explicit(&control->ranks[peer].left, memory_order_acquire)) {
            if (tw__reached(counter, target)) return TW_OK;  /* it came before it left */
            tw_abort(control, TW_ABORT_RANK_DIED, peer, -1);
            return TW_ABORTED;
        }
        now = tw_now_ns();
        if (now >= since && now - since >= worker->timeout_ns) {
            tw__set(worker->record->observed, atomic_load_explicit(counter, memory_order_relaxed));
            tw_abort(control, TW_ABORT_TIMEOUT, worker->rank, worker->worker);
            return TW_ABORTED;
        }
        if (now >= look) {
            tw__set(worker->record->observed, atomic_load_explicit(counter, memory_order_relaxed));
            tw__look_after_peers(worker);
            look = now + TW__LOOK_NS;
        }
        if (worker->interruptible && (interrupted || now - began >= TW__SLICE_NS)) return TW_INTERRUPTED;
        sleep_ns += sleep_ns / 2;
        if (sleep_ns > TW__SLEEP_MAX_NS) sleep_ns = TW__SLEEP_MAX_NS;
    }
}

/* Fills the record, waits, restores it.  After an abort the record stays as it is: it
 * says who waited for what. */
TW__COLD int tw__wait_recorded(tw_worker *worker, const _Atomic uint64_t *counter, uint64_t target, int site,
                               int signal_id, int64_t signal_index, int peer, uint64_t since) {
    tw_record *record = worker->record;
    uint32_t state = tw__get(record->state);
    uint64_t began = tw_now_ns();
    tw__set(record->site, site);
    tw__set(record->signal, signal_id);
    tw__set(record->signal_index, signal_index);
    tw__set(record->expected, target);
    tw__set(record->observed, atomic_load_explicit(counter, memory_order_relaxed));
    tw__set(record->epoch, worker->epoch);
    tw__set(record->state, TW_WAITING);
    int result = tw__wait_slow(worker, counter, target, peer, since ? since : began);
    worker->waited_ns += tw_now_ns() - began;
    worker->waits++;
    if (result != TW_ABORTED) {
        tw__set(record->state, state);
        tw__set(record->site, TW_SITE_NONE);
        tw__set(record->signal, -1);
    }
    return result;
}

/* Waits with acquire until *counter >= target.  Returns TW_OK, or TW_ABORTED when the
 * group has stopped (time limit, dead rank, failure elsewhere); the caller must then end
 * its kernel.  Satisfied already: one load. */
TW__INLINE int tw_wait(tw_worker *worker, const _Atomic uint64_t *counter, uint64_t target, int site, int signal_id,
                       int64_t signal_index) {
    if (__builtin_expect(tw__reached(counter, target), 1)) return TW_OK;
    return tw__wait_recorded(worker, counter, target, site, signal_id, signal_index, -1, 0);
}

/* Entry barrier of a launch.  Call it once a rank (or again after TW_INTERRUPTED), with
 * epochs that grow by one.  `ok` = 0 refuses the launch; write the reason to
 * ranks[rank].refusal[epoch & 1] first.  ranks[rank].kernel[epoch & 1] says what the rank is
 * about to run.  Returns TW_OK when all ranks are here, willing and about to run the same;
 * TW_REFUSED on all ranks alike when not, and the next epoch may go on; TW_ABORTED.  Slots by parity suffice: a rank rewrites the slot of n at n+2, and it gets
 * there only after all ranks have entered n+1, which they do after reading n. */
TW__INLINE int tw_enter(tw_worker *worker, uint64_t epoch, int ok) {
    tw_control *control = worker->control;
    tw_rank *self = &control->ranks[worker->rank];
    uint32_t world = control->world_size;
    if (tw_aborted(control)) return TW_ABORTED;
    worker->epoch = epoch;
    if (tw__get(self->entered) < epoch) {
        if (!ok) tw__set(self->refused[epoch & 1], epoch);
        tw__set(self->entered_ns, tw_now_ns());
        atomic_store_explicit(&self->entered, epoch, memory_order_release);
    }
    int refused = 0;
    uint64_t kernel = tw__get(self->kernel[epoch & 1]);
    for (uint32_t i = 0; i < world; i++) {
        uint32_t peer = (uint32_t)worker->rank + i;
        if (peer >= world) peer -= world;
        tw_rank *other = &control->ranks[peer];
        if (!tw__reached(&other->entered, epoch)) {
            int result = tw__wait_recorded(worker, &other->entered, epoch, TW_SITE_ENTER, -1, (int64_t)peer,
                                           (int)peer, tw__get(self->entered_ns));
            if (result != TW_OK) return result;
        }
        refused |= tw__get(other->refused[epoch & 1]) == epoch || tw__get(other->kernel[epoch & 1]) != kernel;
    }
    return refused ? TW_REFUSED : TW_OK;
}

#endif
