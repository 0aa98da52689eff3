/* What every generated kernel stands on: the launch record, lanes, workers and traces.
 *
 * A generated file defines TW_LANES, TW_KEYS and TW_SCRATCH_FLOATS, includes this header,
 * then defines tw_run_tile and tw_list_tiles, and calls TW_DEFINE_LAUNCH.
 */
#ifndef TW_KERNEL_H
#define TW_KERNEL_H

#include "tw_runtime.h"
#include "tw_math.h"
#include "tw_dot.h"

#include <pthread.h>

/* One tile in a lane: sort key, its place before sorting, task and grid indices. */
typedef struct {
    int64_t key[TW_KEYS];
    int32_t place, task, tile[4];
} tw_entry;

/* One executed tile. Clock in nanoseconds; `waited_ns` of it was spent waiting. */
typedef struct {
    int64_t begin_ns, end_ns, waited_ns;
    int32_t worker, task, tile[4];
} tw_event;

/* Everything that one launch binds; written by the host. Mirrored in engine.py. */
typedef struct {
    tw_control *control;
    void *const *memory;         /* arguments and workspaces by memory number */
    const int64_t *dims;         /* dynamic dimensions */
    char *const *heap;           /* every rank's symmetric segment */
    float *scratch;              /* TW_WORKER_FLOATS a worker, 64-byte aligned */
    uint64_t epoch, timeout_ns;
    int64_t counters;            /* offset of this launch's counter set in the segment, relative to the first set */
    int64_t stale_counters;      /* offset in the segment of the set to clear, and its size */
    int64_t counter_bytes;
    int32_t rank, ok, dynamic, traced;
    int32_t workers[TW_LANES];   /* workers of each lane */
    tw_event *events;            /* out: events of all workers if traced; freed by tw_free_events */
    int64_t num_events;
} tw_launch;

typedef struct {
    tw_entry *entries;
    int64_t count, capacity;
    _Atomic int64_t next;        /* dynamic queues: the next tile to take */
} tw_lane;

typedef struct {
    tw_worker base;
    tw_launch *launch;
    tw_lane *lane;
    float *scratch;
    tw_event *events;
    int64_t num_events;
    int32_t place, peers;        /* this worker's place among the `peers` workers of its lane */
    int32_t result;
} tw_lane_worker;

#define TW_WORKER_FLOATS (TW_SCRATCH_FLOATS + TW_DOT_SCRATCH + 16)

static int tw_run_tile(tw_lane_worker *worker, const tw_entry *entry);
static void tw_list_tiles(const tw_launch *launch, tw_lane *lanes);

/* A counter array at `offset` of the segment of `rank`, in the set of this launch. */
TW_FN _Atomic uint64_t *tw_counter(const tw_launch *launch, int64_t rank, int64_t offset) {
    return (_Atomic uint64_t *)(launch->heap[rank] + offset + launch->counters);
}

static __attribute__((unused)) tw_entry *tw_append(tw_lane *lane) {
    if (lane->count == lane->capacity) {
        lane->capacity = lane->capacity ? lane->capacity * 2 : 1024;
        lane->entries = realloc(lane->entries, (size_t)lane->capacity * sizeof(tw_entry));
        if (!lane->entries) abort();
    }
    tw_entry *entry = &lane->entries[lane->count];
    entry->place = (int32_t)lane->count++;
    return entry;
}

static int tw_compare(const void *a, const void *b) {
    const tw_entry *x = a, *y = b;
    for (int i = 0; i < TW_KEYS; i++)
        if (x->key[i] != y->key[i]) return x->key[i] < y->key[i] ? -1 : 1;
    return x->place < y->place ? -1 : 1;
}

static void *tw_work(void *argument) {
    tw_lane_worker *worker = argument;
    tw_lane *lane = worker->lane;
    const int dynamic = worker->launch->dynamic;
    int64_t at = dynamic ? atomic_fetch_add_explicit(&lane->next, 1, memory_order_relaxed) : worker->place;
    while (at < lane->count && worker->result == 0) {
        const tw_entry *entry = &lane->entries[at];
        const int32_t *tile = entry->tile;
        tw_record_tile(&worker->base, entry->task, tile[0], tile[1], tile[2], tile[3]);
        if (worker->events) {
            tw_event *event = &worker->events[worker->num_events++];
            *event = (tw_event){.worker = worker->base.worker, .task = entry->task};
            memcpy(event->tile, tile, sizeof event->tile);
            const uint64_t waited = worker->base.waited_ns;
            event->begin_ns = (int64_t)tw_now_ns();
            worker->result = tw_run_tile(worker, entry);
            event->end_ns = (int64_t)tw_now_ns();
            event->waited_ns = (int64_t)(worker->base.waited_ns - waited);
        } else {
            worker->result = tw_run_tile(worker, entry);
        }
        at = dynamic ? atomic_fetch_add_explicit(&lane->next, 1, memory_order_relaxed) : at + worker->peers;
    }
    /* After an abort the record stays as it is: it says who waited for what. */
    if (worker->result == 0) tw_record_state(&worker->base, TW_DONE);
    return NULL;
}

static int tw_start_workers(tw_launch *launch, tw_lane *lanes) {
    tw_lane_worker *workers = NULL;
    pthread_t threads[TW_MAX_WORKERS];
    int count = 0, started = 1, result = 0;
    int64_t tiles = 0;
    for (int i = 0; i < TW_LANES; i++) count += launch->workers[i], tiles += lanes[i].count;
    workers = calloc((size_t)count, sizeof *workers);
    tw_event *events = launch->traced ? calloc((size_t)(tiles * count + 1), sizeof *events) : NULL;
    if (!workers) abort();
    for (int i = 0, n = 0; i < TW_LANES; i++) {
        for (int place = 0; place < launch->workers[i]; place++, n++) {
            tw_lane_worker *worker = &workers[n];
            tw_worker_init(&worker->base, launch->control, launch->rank, n, launch->timeout_ns, launch->epoch);
            worker->launch = launch;
            worker->lane = &lanes[i];
            worker->scratch = launch->scratch + (int64_t)n * TW_WORKER_FLOATS;
            worker->events = events ? events + n * tiles : NULL;
            worker->place = place;
            worker->peers = launch->workers[i];
        }
    }
    for (int n = 1; n < count; n++, started++)
        if (pthread_create(&threads[n], NULL, tw_work, &workers[n]) != 0) abort();
    tw_work(&workers[0]);
    for (int n = 1; n < count; n++) pthread_join(threads[n], NULL);
    for (int n = 0; n < count; n++) {
        if (workers[n].result) result = TW_ABORTED;
        if (!events) continue;
        memmove(events + launch->num_events, workers[n].events, (size_t)workers[n].num_events * sizeof *events);
        launch->num_events += workers[n].num_events;
    }
    launch->events = events;
    free(workers);
    return result;
}

/* Enter with all ranks, list and sort this rank's tiles, run them on all workers. */
static int tw_run_launch(tw_launch *launch) {
    tw_worker host;
    tw_lane lanes[TW_LANES];
    memset(lanes, 0, sizeof lanes);
    launch->events = NULL;
    launch->num_events = 0;
    tw_worker_init(&host, launch->control, launch->rank, TW_HOST, launch->timeout_ns, launch->epoch);
    int result = tw_enter(&host, launch->epoch, launch->ok);
    if (result) return result;
    /* All ranks have left the launch before, so nobody adds to its counters any more, and
     * nobody adds for the launch after this one before this rank has entered it. */
    memset(launch->heap[launch->rank] + launch->stale_counters, 0, (size_t)launch->counter_bytes);
    tw_list_tiles(launch, lanes);
    for (int i = 0; i < TW_LANES; i++)
        if (lanes[i].count) qsort(lanes[i].entries, (size_t)lanes[i].count, sizeof(tw_entry), tw_compare);
    result = tw_start_workers(launch, lanes);
    for (int i = 0; i < TW_LANES; i++) free(lanes[i].entries);
    return result;
}

#define TW_DEFINE_LAUNCH                                                  \
    int tw_launch_kernel(tw_launch *launch) { return tw_run_launch(launch); } \
    void tw_free_events(tw_event *events) { free(events); }               \
    int64_t tw_worker_floats(void) { return TW_WORKER_FLOATS; }

#endif
