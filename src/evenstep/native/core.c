#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const char MAGIC[8] = {'e', 'v', 'e', 'n', 's', 't', 'p', '1'};

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
    uint64_t tag_hash;
    char tag[ES_TAG_BYTES];
} es_slot;

typedef struct {
    es_bell posted; /* the exchange that this worker has posted */
    _Atomic uint32_t pid;
    char padding[44];
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
 * among some of them since. Slots 0 and 1 serve the latter, 2 and 3 the former, each pair in turn: whoever posts
 * to a slot again has since met everyone who could still have been reading it. */
static es_slot *slot_for(const void *base, uint32_t worker, uint64_t seq) {
    const es_header *header = base;
    uint32_t among_some = (uint32_t)seq;
    size_t index = among_some ? (among_some & 1) : 2 + ((seq >> 32) & 1);
    return (es_slot *)((char *)worker_at(base, worker) + round_up(sizeof(es_worker), 64) +
                       index * slot_stride(header->slot_bytes));
}

static uint64_t hash_tag(const char *tag) {
    uint64_t hash = 1469598103934665603ull;
    for (; *tag; ++tag) hash = (hash ^ (unsigned char)*tag) * 1099511628211ull;
    return hash;
}

void es_ring(es_bell *bell) {
    atomic_fetch_add(&bell->bell, 1);
    if (atomic_load(&bell->waiting)) syscall(SYS_futex, &bell->bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
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

void es_post(void *base, uint32_t worker, uint64_t seq, const char *tag, const void *data, size_t bytes) {
    es_worker *self = worker_at(base, worker);
    es_slot *slot = slot_for(base, worker, seq);
    slot->seq = seq;
    slot->bytes = bytes;
    slot->tag_hash = hash_tag(tag);
    strncpy(slot->tag, tag, ES_TAG_BYTES - 1);
    memcpy(slot + 1, data, bytes);
    atomic_store(&self->posted.seq, seq); /* sequentially consistent: ordered before the look at `waiting` */
    es_ring(&self->posted);
}

int es_wait(es_bell *bell, uint64_t seq, const _Atomic uint32_t *aborted, uint32_t spin, int64_t timeout_ns) {
    for (uint32_t i = 0; i < spin; ++i) {
        if (atomic_load_explicit(&bell->seq, memory_order_acquire) >= seq) return ES_OK;
        if (atomic_load_explicit(aborted, memory_order_relaxed)) break;
        pause_briefly();
    }
    int64_t deadline = now_ns() + timeout_ns;
    for (;;) {
        uint32_t rung = atomic_load(&bell->bell);
        if (atomic_load(&bell->seq) >= seq) return ES_OK;
        if (atomic_load(aborted)) return ES_ABORTED;
        int64_t left = deadline - now_ns();
        if (left <= 0) return ES_AGAIN;
        struct timespec wait = {left / 1000000000, left % 1000000000};
        atomic_fetch_add(&bell->waiting, 1);
        long rc = syscall(SYS_futex, &bell->bell, FUTEX_WAIT, rung, &wait, NULL, 0);
        int interrupted = rc == -1 && errno == EINTR;
        atomic_fetch_sub(&bell->waiting, 1);
        if (interrupted) return ES_AGAIN;
    }
}

int es_collect(void *base, uint32_t worker, uint64_t seq, const char *tag, void *out, size_t bytes, uint32_t spin,
               int64_t timeout_ns) {
    static const _Atomic uint32_t never = 0;
    es_header *header = base;
    const _Atomic uint32_t *aborted = worker == header->num_workers ? &never : &header->aborted;
    int rc = es_wait(&worker_at(base, worker)->posted, seq, aborted, spin, timeout_ns);
    if (rc != ES_OK) return rc;
    const es_slot *slot = slot_for(base, worker, seq);
    if (slot->seq != seq || slot->bytes != bytes || slot->tag_hash != hash_tag(tag)) return ES_MISMATCH;
    memcpy(out, slot + 1, bytes);
    return ES_OK;
}

void es_last_post(const void *base, uint32_t worker, uint64_t *seq, uint64_t *bytes, char tag[ES_TAG_BYTES]) {
    *seq = atomic_load(&worker_at(base, worker)->posted.seq);
    const es_slot *slot = slot_for(base, worker, *seq);
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
    for (uint32_t i = 0; i < header->num_workers; ++i) es_ring(&worker_at(base, i)->posted);
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

/* ---- the tree sum ---- */

enum { BLOCK = 2048, MAX_DEPTH = 16 };

#if defined(__x86_64__) && defined(__gnu_linux__)
#define FAST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FAST
#endif

FAST static void add_f32(const float *a, const float *b, float *out, size_t n) {
    for (size_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
}

FAST static void add_f64(const double *a, const double *b, double *out, size_t n) {
    for (size_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
}

static float from_bf16(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float out;
    memcpy(&out, &bits, sizeof out);
    return out;
}

static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t rounded = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    return value != value ? 0x7fc0 : rounded;
}

static void add_bf16(const uint16_t *a, const uint16_t *b, uint16_t *out, size_t n) {
    for (size_t i = 0; i < n; ++i) out[i] = to_bf16(from_bf16(a[i]) + from_bf16(b[i]));
}

/* By hand, because gcc has _Float16 on x86-64 only since version 12. */
static float from_f16(uint16_t value) {
    uint32_t rest = value & 0x7fff, bits;
    float out = (float)rest * 0x1p-24f; /* right for zero and denormals, which are multiples of 2^-24 */
    memcpy(&bits, &out, sizeof bits);
    if (rest >= 0x7c00) bits = 0x7f800000 | (rest & 0x3ff) << 13;
    else if (rest >= 0x400) bits = (rest << 13) + (112u << 23);
    bits |= (uint32_t)(value & 0x8000) << 16;
    memcpy(&out, &bits, sizeof out);
    return out;
}

static uint16_t to_f16(float value) {
    uint32_t bits, small;
    memcpy(&bits, &value, sizeof bits);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00 | (uint16_t)(bits >> 13 & 0x3ff);
    if (bits >= 0x477ff000) return sign | 0x7c00; /* 65520 and above round to infinity */
    if (bits >= 0x38800000) return sign | (uint16_t)((bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13);
    float shifted = (value < 0 ? -value : value) + 0.5f; /* a denormal: the floats above 0.5 are 2^-24 apart too */
    memcpy(&small, &shifted, sizeof small);
    return sign | (uint16_t)(small - 0x3f000000);
}

static void add_f16(const uint16_t *a, const uint16_t *b, uint16_t *out, size_t n) {
    for (size_t i = 0; i < n; ++i) out[i] = to_f16(from_f16(a[i]) + from_f16(b[i]));
}

static void add(int dtype, const void *a, const void *b, void *out, size_t n) {
    switch (dtype) {
        case ES_F32: add_f32(a, b, out, n); break;
        case ES_F64: add_f64(a, b, out, n); break;
        case ES_BF16: add_bf16(a, b, out, n); break;
        default: add_f16(a, b, out, n); break;
    }
}

/* Whether the program leaves exactly one entry and never runs short of two; also bounds the depth. */
static int well_formed(const uint8_t *merges, uint32_t num_inputs) {
    uint32_t depth = 0;
    for (uint32_t i = 0; i < num_inputs; ++i) {
        if (++depth > MAX_DEPTH || merges[i] >= depth) return 0;
        depth -= merges[i];
    }
    return depth == 1;
}

int es_tree_sum(int dtype, const void *const *inputs, const uint8_t *merges, uint32_t num_inputs, void *out,
                size_t count) {
    static const size_t item_bytes[] = {4, 8, 2, 2};
    if (dtype < 0 || dtype > ES_F16 || num_inputs > ES_MAX_INPUTS || !well_formed(merges, num_inputs)) return -1;
    size_t item = item_bytes[dtype];
    _Alignas(64) char scratch[MAX_DEPTH][BLOCK * 8];
    for (size_t start = 0; start < count; start += BLOCK) {
        size_t n = count - start < BLOCK ? count - start : BLOCK;
        const void *stack[MAX_DEPTH];
        uint32_t depth = 0;
        for (uint32_t i = 0; i < num_inputs; ++i) {
            stack[depth++] = (const char *)inputs[i] + start * item;
            for (uint8_t m = 0; m < merges[i]; ++m, --depth) {
                int last = i + 1 == num_inputs && m + 1 == merges[i];
                void *to = last ? (void *)((char *)out + start * item) : (void *)scratch[depth - 2];
                add(dtype, stack[depth - 2], stack[depth - 1], to, n);
                stack[depth - 2] = to;
            }
        }
        if (num_inputs == 1 && inputs[0] != out) memcpy((char *)out + start * item, stack[0], n * item);
    }
    return 0;
}
