#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const char MAGIC[8] = {'e', 'v', 'e', 'n', 's', 't', 'p', '1'};

enum {
    YIELDS = 64,         /* among the looks before sleeping */
    TAKEN_NS = 500000,   /* a thread that gets its core back later than this gave it to a stranger, */
    CROWDED_WAITS = 64,  /* and keeps it in this many waits from then on: the kernel counts what is given away as used */
};

typedef struct {
    char magic[8];
    uint32_t num_workers;
    _Atomic uint32_t aborted; /* 0, or (1 + author) << 16 | (1 + culprit) of the first abort */
    uint64_t slot_bytes;
    char padding[4096 - 24];
} es_header;

typedef struct {
    uint64_t seq;
    uint64_t bytes;
    uint64_t number;
    uint64_t at;
    uint64_t tag_hash;
    char tag[ES_TAG_BYTES];
} es_slot;

typedef struct {
    es_mark posted; /* the exchange that this worker has posted */
    _Atomic uint32_t pid;
    _Atomic int32_t core; /* that it was on when it last published something */
    char padding[40];
    _Atomic uint64_t error_bytes;
    char error[ES_ERROR_BYTES];
} es_worker;

static size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

static size_t slot_stride(size_t slot_bytes) { return round_up(sizeof(es_slot) + slot_bytes, 64); }

static size_t worker_stride(size_t slot_bytes) {
    return round_up(sizeof(es_worker) + ES_NUM_SLOTS * slot_stride(slot_bytes), 4096);
}

static es_worker *worker_at(const void *base, uint32_t worker) {
    const es_header *header = base;
    return (es_worker *)((char *)base + sizeof(es_header) + worker * worker_stride(header->slot_bytes));
}

/* A sequence number is (round << 32 | n): the low half is 0 for a round of all workers and counts the exchanges
 * among some of them since. Slots 0 and 1 serve the latter, 2 and 3 the former, each pair in turn: before a worker
 * posts to a slot again it has met every worker that could still have been reading it. */
static es_slot *slot_for(const void *base, uint32_t worker, uint64_t seq) {
    const es_header *header = base;
    uint32_t among_some = (uint32_t)seq;
    size_t index = among_some ? (among_some & 1) : 2 + ((seq >> 32) & 1);
    return (es_slot *)((char *)worker_at(base, worker) + round_up(sizeof(es_worker), 64) +
                       index * slot_stride(header->slot_bytes));
}

uint64_t es_hash_tag(const char *tag) {
    uint64_t hash = 1469598103934665603ull;
    for (; *tag; ++tag) hash = (hash ^ (unsigned char)*tag) * 1099511628211ull;
    return hash;
}

/* A thread that is about to sleep says so before its last look, so if nobody waits, nobody need be woken, and the bell,
 * which shares a cache line with what others poll, need not be written. */
static void ring(es_mark *mark) {
    if (!atomic_load(&mark->waiting)) return;
    atomic_fetch_add(&mark->bell, 1);
    syscall(SYS_futex, &mark->bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void es_raise(es_mark *mark, uint64_t seq) {
    atomic_store(&mark->seq, seq); /* sequentially consistent: ordered before the look at `waiting` */
    ring(mark);
}

void es_bump(es_mark *mark) {
    atomic_fetch_add(&mark->seq, 1);
    ring(mark);
}

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

int64_t es_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

size_t es_control_bytes(uint32_t num_workers, size_t slot_bytes) {
    return sizeof(es_header) + ((size_t)num_workers + 1) * worker_stride(slot_bytes);
}

void es_init(void *base, uint32_t num_workers, size_t slot_bytes) {
    es_header *header = base; /* fresh shared memory is zero */
    header->num_workers = num_workers;
    header->slot_bytes = slot_bytes;
    memcpy(header->magic, MAGIC, sizeof MAGIC);
}

int es_check(const void *base) { return memcmp(((const es_header *)base)->magic, MAGIC, sizeof MAGIC) ? -1 : 0; }

uint32_t es_num_workers(const void *base) { return ((const es_header *)base)->num_workers; }

size_t es_slot_bytes(const void *base) { return ((const es_header *)base)->slot_bytes; }

es_mark *es_posted(void *base, uint32_t worker) { return &worker_at(base, worker)->posted; }

void *es_slot_data(void *base, uint32_t worker, uint64_t seq) { return slot_for(base, worker, seq) + 1; }

void es_publish(void *base, uint32_t worker, uint64_t seq, const char *tag, uint64_t tag_hash, uint64_t number,
                size_t bytes, uint64_t at) {
    es_slot *slot = slot_for(base, worker, seq);
    slot->seq = seq;
    slot->bytes = bytes;
    slot->number = number;
    slot->at = at;
    slot->tag_hash = tag_hash;
    strncpy(slot->tag, tag, ES_TAG_BYTES - 1);
    atomic_store_explicit(&worker_at(base, worker)->core, sched_getcpu(), memory_order_relaxed);
    es_raise(es_posted(base, worker), seq);
}

int es_elsewhere(const void *base, uint32_t worker) {
    return atomic_load_explicit(&worker_at(base, worker)->core, memory_order_relaxed) != sched_getcpu();
}

void es_post(void *base, uint32_t worker, uint64_t seq, const char *tag, const void *data, size_t bytes) {
    memcpy(es_slot_data(base, worker, seq), data, bytes);
    es_publish(base, worker, seq, tag, es_hash_tag(tag), 0, bytes, 0);
}

const _Atomic uint32_t *es_abort_word(const void *base) { return &((const es_header *)base)->aborted; }

static int sleep_until(es_mark *mark, uint64_t seq, const _Atomic uint32_t *aborted, int64_t deadline) {
    for (;;) {
        uint32_t bell = atomic_load(&mark->bell);
        if (atomic_load(&mark->seq) >= seq) return ES_OK;
        if (aborted && atomic_load(aborted)) return ES_ABORTED;
        int64_t left = deadline - es_now_ns();
        if (left <= 0) return ES_AGAIN;
        struct timespec wait = {left / 1000000000, left % 1000000000};
        long rc = syscall(SYS_futex, &mark->bell, FUTEX_WAIT, bell, &wait, NULL, 0);
        if (rc == -1 && errno == EINTR) return ES_AGAIN;
    }
}

int es_spin(const es_mark *mark, uint64_t seq, const _Atomic uint32_t *aborted, uint32_t looks) {
    for (; looks && !atomic_load_explicit(aborted, memory_order_relaxed); --looks) {
        if (atomic_load_explicit(&mark->seq, memory_order_acquire) >= seq) return 1;
        pause_briefly();
    }
    return 0;
}

/* Gives the core to another thread that waits for it; returns whether it came back soon. */
static int yield(void) {
    int64_t before = es_now_ns();
    sched_yield();
    return es_now_ns() - before < TAKEN_NS;
}

int es_await(es_mark *mark, uint64_t seq, const _Atomic uint32_t *aborted, uint32_t spin, int64_t timeout_ns) {
    static _Thread_local uint32_t crowded; /* how many waits keep the core */
    if (crowded) --crowded;
    for (uint32_t i = 1; i <= spin; ++i) {
        if (atomic_load_explicit(&mark->seq, memory_order_acquire) >= seq) return ES_OK;
        if (aborted && atomic_load_explicit(aborted, memory_order_relaxed)) break;
        if (crowded || i % (spin / YIELDS + 1)) pause_briefly();
        else if (!yield()) crowded = CROWDED_WAITS; /* the one that is to raise the mark may have waited for this core */
    }
    int64_t deadline = es_now_ns() + timeout_ns;
    atomic_fetch_add(&mark->waiting, 1);
    int rc = sleep_until(mark, seq, aborted, deadline);
    atomic_fetch_sub(&mark->waiting, 1);
    return rc;
}

uint64_t es_posted_at(void *base, uint32_t worker, uint64_t seq) { return slot_for(base, worker, seq)->at; }

size_t es_posted_bytes(void *base, uint32_t worker, uint64_t seq) { return slot_for(base, worker, seq)->bytes; }

int es_holds(void *base, uint32_t worker, uint64_t seq) { return slot_for(base, worker, seq)->seq == seq; }

void es_posted_tag(void *base, uint32_t worker, uint64_t seq, uint64_t *tag_hash, char tag[ES_TAG_BYTES]) {
    const es_slot *slot = slot_for(base, worker, seq);
    *tag_hash = slot->tag_hash;
    memcpy(tag, slot->tag, ES_TAG_BYTES);
}

int es_matches(void *base, uint32_t worker, uint64_t seq, uint64_t tag_hash) {
    const es_slot *slot = slot_for(base, worker, seq);
    return slot->seq == seq && slot->tag_hash == tag_hash;
}

int es_collect(void *base, uint32_t worker, uint64_t seq, const char *tag, void *out, size_t bytes, uint32_t spin,
               int64_t timeout_ns) {
    const _Atomic uint32_t *aborted = worker == es_num_workers(base) ? NULL : es_abort_word(base);
    int rc = es_await(es_posted(base, worker), seq, aborted, spin, timeout_ns);
    if (rc != ES_OK) return rc;
    const es_slot *slot = slot_for(base, worker, seq);
    if (!es_matches(base, worker, seq, es_hash_tag(tag)) || slot->bytes != bytes) return ES_MISMATCH;
    memcpy(out, slot + 1, bytes);
    return ES_OK;
}

void es_last_post(const void *base, uint32_t worker, uint64_t *seq, uint64_t *number, uint64_t *bytes,
                  char tag[ES_TAG_BYTES]) {
    *seq = atomic_load(&worker_at(base, worker)->posted.seq);
    const es_slot *slot = slot_for(base, worker, *seq);
    *number = slot->number;
    *bytes = slot->bytes;
    memcpy(tag, slot->tag, ES_TAG_BYTES);
    tag[ES_TAG_BYTES - 1] = 0;
}

int es_abort(void *base, uint32_t author, uint32_t culprit, const char *text, size_t bytes) {
    es_header *header = base;
    es_worker *self = worker_at(base, author);
    if (atomic_load(&header->aborted)) return 0; /* the text may be ours, and be read right now */
    if (bytes > ES_ERROR_BYTES) bytes = ES_ERROR_BYTES;
    memcpy(self->error, text, bytes);
    atomic_store(&self->error_bytes, bytes);
    uint32_t nobody = 0;
    int first = atomic_compare_exchange_strong(&header->aborted, &nobody, (author + 1) << 16 | (culprit + 1));
    for (uint32_t i = 0; i < header->num_workers; ++i) ring(&worker_at(base, i)->posted);
    return first;
}

uint32_t es_aborted(const void *base) { return atomic_load(&((es_header *)base)->aborted) & 0xffff; }

size_t es_abort_text(const void *base, char out[ES_ERROR_BYTES]) {
    uint32_t author = atomic_load(&((es_header *)base)->aborted) >> 16;
    if (!author) return 0;
    es_worker *found = worker_at(base, author - 1);
    size_t bytes = atomic_load(&found->error_bytes);
    memcpy(out, found->error, bytes);
    return bytes;
}

void es_clear_abort(void *base) { atomic_store(&((es_header *)base)->aborted, 0); }

void es_set_pid(void *base, uint32_t worker, uint32_t pid) { atomic_store(&worker_at(base, worker)->pid, pid); }

uint32_t es_pid(const void *base, uint32_t worker) { return atomic_load(&worker_at(base, worker)->pid); }

uint64_t es_load(const void *word) { return atomic_load_explicit((_Atomic uint64_t *)word, memory_order_acquire); }

void es_store(void *word, uint64_t value) { atomic_store_explicit((_Atomic uint64_t *)word, value, memory_order_release); }
