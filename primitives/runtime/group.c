/* Host side of a group of ranks: creating the control block, gathers, and reading back
 * what each worker does.  Called through ctypes, which releases the GIL for the call. */
#include "tw_runtime.h"

/* One rank's handle, private to its process. */
typedef struct twg_group {
    tw_worker host;
    uint64_t gather;        /* number of the current gather */
    uint64_t since_ns;      /* when it was posted */
    uint8_t *slots;         /* slot of rank r and parity p: slots + r * stride + p * capacity */
    uint64_t stride, capacity;
} twg_group;

static uint64_t page_up(uint64_t bytes) { return (bytes + 4095u) & ~(uint64_t)4095u; }

uint64_t twg_control_bytes(uint32_t world_size, uint64_t slot_bytes) {
    return page_up(sizeof(tw_control) + world_size * sizeof(tw_rank)) + page_up(2u * slot_bytes * world_size);
}

/* Fills zeroed memory of twg_control_bytes() bytes; `spins` is the default spin budget. */
void twg_control_init(tw_control *control, uint32_t world_size, uint64_t slot_bytes, uint32_t spins) {
    control->layout = TW_LAYOUT;
    control->world_size = world_size;
    control->bytes = twg_control_bytes(world_size, slot_bytes);
    control->slots = page_up(sizeof(tw_control) + world_size * sizeof(tw_rank));
    control->slot_bytes = slot_bytes;
    control->spins = spins;
    control->magic = TW_MAGIC;
}

/* 0 when `control` is a control block of this layout for `world_size` ranks. */
int twg_control_check(const tw_control *control, uint32_t world_size) {
    return !(control->magic == TW_MAGIC && control->layout == TW_LAYOUT && control->world_size == world_size);
}

/* Joins as `rank`.  NULL when memory is short. */
twg_group *twg_open(tw_control *control, int rank, uint64_t timeout_ns) {
    twg_group *group = calloc(1, sizeof *group);
    if (!group) return NULL;
    tw_worker_init(&group->host, control, rank, TW_HOST, timeout_ns, 0);
    group->host.interruptible = 1;
    group->slots = (uint8_t *)control + control->slots;
    group->capacity = control->slot_bytes;
    group->stride = 2u * control->slot_bytes;
    tw_rank *self = &control->ranks[rank];
    group->gather = tw__get(self->posted);
    char state;
    uint64_t start = 0;
    /* When /proc belongs to another pid namespace this fails or differs; then only kill() is asked. */
    if (tw__process((int64_t)getpid(), &state, &start) != 0) start = 0;
    tw__set(self->start_time, start);
    atomic_store_explicit(&self->pid, (int64_t)getpid(), memory_order_release);
    return group;
}

void twg_free(twg_group *group) { free(group); }

void twg_set_timeout(twg_group *group, uint64_t timeout_ns) { group->host.timeout_ns = timeout_ns; }

/* left = 1: the rank needs nothing more; 0: it is back. */
void twg_set_left(tw_control *control, int rank, int left) {
    atomic_store_explicit(&control->ranks[rank].left, (uint32_t)left, memory_order_release);
}

int twg_left(const tw_control *control, int rank) {
    return (int)atomic_load_explicit(&control->ranks[rank].left, memory_order_acquire);
}

int64_t twg_pid(const tw_control *control, int rank) {
    return atomic_load_explicit(&control->ranks[rank].pid, memory_order_acquire);
}

/* Slots in other memory, after a collective growth. */
void twg_use_slots(twg_group *group, void *slots, uint64_t stride, uint64_t capacity) {
    group->slots = slots;
    group->stride = stride;
    group->capacity = capacity;
}

uint64_t twg_capacity(const twg_group *group) { return group->capacity; }

/* Gathers `bytes` bytes of every rank into out[world_size][bytes].  Returns TW_OK;
 * TW_ABORTED; TW_INTERRUPTED: call again with resume = 1; TW_MISMATCH: sizes differ, on
 * all ranks alike; TW_GROW: too large for the slots, on all ranks alike.
 * Two slots a rank suffice for the reason given at tw_enter. */
int twg_all_gather(twg_group *group, const void *payload, uint64_t bytes, void *out, int resume) {
    tw_control *control = group->host.control;
    uint32_t world = control->world_size, rank = (uint32_t)group->host.rank;
    tw_rank *self = &control->ranks[rank];
    if (tw_aborted(control)) return TW_ABORTED;
    if (!resume) {
        uint64_t next = ++group->gather;
        tw__set(self->posted_bytes[next & 1], bytes);
        if (bytes && bytes <= group->capacity)
            memcpy(group->slots + rank * group->stride + (next & 1) * group->capacity, payload, bytes);
        group->since_ns = 0;
        atomic_store_explicit(&self->posted, next, memory_order_release);
    }
    uint64_t number = group->gather, parity = number & 1;
    int mismatch = 0;
    for (uint32_t i = 0; i < world; i++) {
        uint32_t peer = rank + i;
        if (peer >= world) peer -= world;
        tw_rank *other = &control->ranks[peer];
        if (!tw__reached(&other->posted, number)) {
            if (!group->since_ns) group->since_ns = tw_now_ns();
            int result = tw__wait_recorded(&group->host, &other->posted, number, TW_SITE_GATHER, -1, (int64_t)peer,
                                           (int)peer, group->since_ns);
            if (result != TW_OK) return result;
        }
        mismatch |= tw__get(other->posted_bytes[parity]) != bytes;
    }
    if (mismatch) return TW_MISMATCH;
    if (bytes > group->capacity) return TW_GROW;
    const uint8_t *from = group->slots + parity * group->capacity;
    if (bytes)
        for (uint32_t peer = 0; peer < world; peer++)
            memcpy((uint8_t *)out + peer * bytes, from + peer * group->stride, bytes);
    return TW_OK;
}

/* Payload size of each rank in the current gather, after TW_MISMATCH. */
void twg_gather_sizes(const twg_group *group, uint64_t *sizes) {
    const tw_control *control = group->host.control;
    for (uint32_t rank = 0; rank < control->world_size; rank++)
        sizes[rank] = tw__get(control->ranks[rank].posted_bytes[group->gather & 1]);
}

/* tw_enter for the host thread. */
int twg_enter(twg_group *group, uint64_t epoch, int ok) { return tw_enter(&group->host, epoch, ok); }

static void copy_text(char *to, const char *text) {
    size_t bytes = strnlen(text, TW_TEXT_BYTES - 1);
    memcpy(to, text, bytes);
    to[bytes] = 0;
}

/* What `rank` is about to run in `epoch`; call before entering. */
void twg_set_kernel(tw_control *control, int rank, uint64_t epoch, uint64_t digest) {
    tw__set(control->ranks[rank].kernel[epoch & 1], digest);
}

/* What `rank` wanted to run in `epoch`, after an entry and before the next. */
uint64_t twg_kernel(const tw_control *control, int rank, uint64_t epoch) {
    return tw__get(control->ranks[rank].kernel[epoch & 1]);
}

/* Why `rank` will refuse `epoch`; call before entering. */
void twg_set_refusal(tw_control *control, int rank, uint64_t epoch, const char *text) {
    copy_text(control->ranks[rank].refusal[epoch & 1], text);
}

/* The reason of `rank` for refusing `epoch`, or NULL when it did not. */
const char *twg_refusal(const tw_control *control, int rank, uint64_t epoch) {
    const tw_rank *peer = &control->ranks[rank];
    return tw__get(peer->refused[epoch & 1]) == epoch ? peer->refusal[epoch & 1] : NULL;
}

/* Stops the group; `by` is the rank whose text this is, -1 for a supervisor outside the ranks. */
int twg_abort(tw_control *control, int kind, int rank, int worker, int by, const char *text) {
    if (tw_aborted(control)) return 0;   /* do not overwrite a text that is being read */
    copy_text(by < 0 ? control->failure : control->ranks[by].failure, text);
    return tw_abort(control, kind, rank, worker);
}

uint64_t twg_aborted(const tw_control *control) { return tw_aborted(control); }

/* Text of the supervisor (rank -1) or of a rank; empty when it wrote none. */
const char *twg_failure(const tw_control *control, int rank) {
    return rank < 0 ? control->failure : control->ranks[rank].failure;
}

/* state, task, tile[4], site, signal, signal_index, expected, observed, epoch */
void twg_read_record(const tw_control *control, int rank, int worker, int64_t out[12]) {
    const tw_record *record = &control->ranks[rank].records[worker];
    out[0] = tw__get(record->state);
    out[1] = tw__get(record->task);
    for (int i = 0; i < 4; i++) out[2 + i] = tw__get(record->tile[i]);
    out[6] = tw__get(record->site);
    out[7] = tw__get(record->signal);
    out[8] = tw__get(record->signal_index);
    out[9] = (int64_t)tw__get(record->expected);
    out[10] = (int64_t)tw__get(record->observed);
    out[11] = (int64_t)tw__get(record->epoch);
}
