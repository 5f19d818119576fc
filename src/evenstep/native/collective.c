#include "collective.h"

#include <string.h>

#include "copy.h"

enum {
    SLICE_NS = 50000000,   /* how long to sleep before looking whether the others are still alive */
    SHORT_BYTES = 1 << 10, /* below, there is only one way to write */
    SMALL_BYTES = 1 << 15, /* of the ring, for what would fit into a slot: a few pages, soon all in use */
    FIRST_BYTES = 1 << 18, /* how much is moved in the first step, before anyone knows what the others want */
};

typedef struct {
    es_team *team;
    const es_call *call;
    int64_t deadline; /* of the current step, once it takes long; until then 0 */
    size_t item;
    size_t step_bytes; /* how much is moved in a step; after the first, what all have agreed on */
    int first;         /* whether the next step is the first of this operation */
    uint64_t at;       /* 0 if the data of the current step are in the slot, else 1 + their place in the ring */
    int past_cache;    /* whether the ring is written past the cache */
    es_ways *ways;     /* what is known of such operations, or NULL */
    int timed;
    int64_t waited_ns; /* for those that came later, if it is timed */
} walk;

#define TRY(expression)             \
    do {                            \
        int rc_ = (expression);     \
        if (rc_ != ES_OK) return rc_; \
    } while (0)

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

static uint64_t seq_of(uint64_t step) { return step << 32; }

/* The items [start, end) of part `index` when `count` items are cut into `parts`, at multiples of 64 of them. */
static size_t cut(size_t count, uint32_t index, uint32_t parts) {
    size_t per = ((count + parts - 1) / parts + 63) / 64 * 64;
    return smaller(count, per * index);
}

static int await_rank(walk *w, uint32_t rank, uint64_t step) {
    es_team *team = w->team;
    es_mark *mark = es_posted(team->base, rank);
    const _Atomic uint32_t *aborted = es_abort_word(team->base);
    /* A rank on another core does not need this one; where others do, having it back can take milliseconds. */
    if (es_elsewhere(team->base, rank) && es_spin(mark, seq_of(step), aborted, w->call->looks)) return ES_OK;
    for (;;) {
        int rc = es_await(mark, seq_of(step), aborted, w->call->spin, SLICE_NS);
        if (rc != ES_AGAIN) return rc;
        for (uint32_t other = 0; other < team->num_ranks; ++other) {
            es_mark *theirs = es_posted(team->base, other);
            if (other == team->rank || atomic_load(&theirs->seq) >= seq_of(step)) continue;
            int found = team->look(team->context, other);
            if (found < 0) return ES_INTERRUPTED;
            if (!found || atomic_load(&theirs->seq) >= seq_of(step)) continue; /* it came, and ended after that */
            team->culprit = other;
            return ES_GONE;
        }
        team->culprit = rank;
        if (!w->deadline) w->deadline = es_now_ns() - SLICE_NS + w->call->timeout_ns;
        if (es_now_ns() > w->deadline) return ES_SILENT;
    }
}

static int await_all(walk *w, uint64_t step) {
    for (uint32_t rank = 0; rank < w->team->num_ranks; ++rank)
        if (rank != w->team->rank) TRY(await_rank(w, rank, step));
    return ES_OK;
}

/* How much can be moved in a step: two steps must not overlap in the ring, wherever they begin. */
static size_t most_bytes(const es_team *team) { return (team->ring_bytes - SMALL_BYTES) / 4; }

static char *place_of(es_team *team, uint32_t rank, uint64_t step, uint64_t at) {
    if (!at) return es_slot_data(team->base, rank, seq_of(step));
    return team->rings + rank * team->ring_bytes + (at - 1);
}

/* Where the next bytes of [begin, end) of the ring are, counted from 1. */
static uint64_t go_round(size_t *at, size_t begin, size_t end, size_t bytes) {
    if (*at < begin || *at + bytes > end) *at = begin;
    size_t found = *at;
    *at += (bytes + 63) / 64 * 64;
    return 1 + found;
}

/* Where this rank may write the bytes that it gives in the next step. */
static int fill(walk *w, size_t bytes, char **place) {
    es_team *team = w->team;
    TRY(await_all(w, team->step)); /* then they have read what is there from the step before that */
    w->at = 0;
    if (bytes > es_slot_bytes(team->base)) w->at = go_round(&team->ring_at, SMALL_BYTES, team->ring_bytes, bytes);
    else if (bytes && w->past_cache) w->at = go_round(&team->small_at, 0, SMALL_BYTES, bytes);
    *place = place_of(team, team->rank, team->step + 1, w->at);
    return ES_OK;
}

static int check(walk *w, uint32_t rank) {
    if (es_matches(w->team->base, rank, seq_of(w->team->step), w->call->tag_hash)) return ES_OK;
    w->team->culprit = rank;
    return ES_MISMATCH;
}

/* Publishes the slot. In the first step of an operation everyone meets everyone, so that all see a mismatch; there they
 * agree on how much to move in a step, and the first rank says which way of writing is faster. */
static int publish(walk *w) {
    es_team *team = w->team;
    team->step += 1;
    w->deadline = 0; /* slow is not silent */
    size_t wish = w->call->step_bytes / ES_VERDICTS * ES_VERDICTS + (w->ways ? es_ways_verdict(w->ways) : 0);
    es_publish(team->base, team->rank, seq_of(team->step), w->call->tag, w->call->tag_hash, w->call->number, wish, w->at);
    if (!w->first) return ES_OK;
    w->first = 0;
    int64_t began = w->timed ? es_now_ns() : 0;
    TRY(await_all(w, team->step));
    if (w->timed) w->waited_ns = es_now_ns() - began;
    for (uint32_t rank = 0; rank < team->num_ranks; ++rank) {
        TRY(check(w, rank));
        wish = es_posted_bytes(team->base, rank, seq_of(team->step));
        if (w->ways && !rank) es_ways_settle(w->ways, wish % ES_VERDICTS);
        wish = wish / ES_VERDICTS * ES_VERDICTS;
        if (wish > w->step_bytes) w->step_bytes = smaller(wish, most_bytes(team));
    }
    return ES_OK;
}

/* What `rank` gave in this step. */
static int read_slot(walk *w, uint32_t rank, const char **slot) {
    es_team *team = w->team;
    if (rank != team->rank) TRY(await_rank(w, rank, team->step));
    TRY(check(w, rank));
    *slot = place_of(team, rank, team->step, es_posted_at(team->base, rank, seq_of(team->step)));
    return ES_OK;
}

static void copy(void *to, const void *from, size_t bytes) {
    if (to != from && bytes) memcpy(to, from, bytes);
}

/* Puts what this rank gives where the others will read it. */
static void give(walk *w, void *to, const void *from, size_t bytes) {
    if (w->past_cache && w->at) es_copy(to, from, bytes);
    else copy(to, from, bytes);
}

/* The operations: each is a loop over steps of fill, publish, read. */

static int barrier(walk *w) {
    char *mine;
    TRY(fill(w, 0, &mine));
    return publish(w);
}

/* Chunk by chunk, everyone reduces everything: one meeting for each chunk. */
static int reduce_at_once(walk *w, char *out) {
    es_team *team = w->team;
    const es_call *call = w->call;
    const char *in = call->in[0], *sources[ES_MAX_INPUTS];
    size_t bytes = call->count * w->item, at = 0;
    do {
        size_t here = smaller(w->step_bytes, bytes - at);
        char *mine;
        TRY(fill(w, here, &mine));
        give(w, mine, in + at, here);
        TRY(publish(w));
        for (uint32_t rank = 0; out && rank < team->num_ranks; ++rank) TRY(read_slot(w, rank, &sources[rank]));
        sources[team->rank] = in + at;
        if (out)
            es_tree_reduce(call->dtype, call->op, (const void *const *)sources, team->merges, team->num_ranks, out + at,
                           here / w->item);
        at += here;
    } while (at < bytes);
    return ES_OK;
}

/* Chunk by chunk, each cut into one part for each rank to reduce. Step t gives the others their parts of chunk t and
 * the reduced own part of chunk t - 1. */
static int reduce_in_parts(walk *w, char *out) {
    es_team *team = w->team;
    const es_call *call = w->call;
    uint32_t me = team->rank, parts = team->num_ranks;
    const char *in = call->in[0], *theirs[ES_MAX_INPUTS], *sources[ES_MAX_INPUTS];
    TRY(barrier(w)); /* all chunks are of one size: agree on it first */
    size_t most = w->step_bytes / w->item; /* for a chunk and one part of it */
    size_t chunk = (most - 64) * parts / (parts + 1) / (64 * parts) * (64 * parts);
    size_t chunks = (call->count + chunk - 1) / chunk;
    chunk = smaller(chunk, ((call->count + chunks - 1) / chunks + 63) / 64 * 64);
    size_t result_at = chunk * w->item;
    for (size_t t = 0; t <= chunks; ++t) {
        size_t here = t * chunk, before = here - chunk; /* items; `before` is of use from t = 1 on */
        size_t count = here < call->count ? smaller(chunk, call->count - here) : 0;
        size_t count_before = t ? smaller(chunk, call->count - before) : 0;
        char *mine;
        TRY(fill(w, result_at + (cut(chunk, 1, parts) + 64) * w->item, &mine));
        if (t) {
            size_t start = cut(count_before, me, parts), end = cut(count_before, me + 1, parts);
            for (uint32_t rank = 0; rank < parts; ++rank)
                sources[rank] = rank == me ? in + (before + start) * w->item : theirs[rank] + start * w->item;
            char *result = out ? out + (before + start) * w->item : mine + result_at;
            es_tree_reduce(call->dtype, call->op, (const void *const *)sources, team->merges, parts, result, end - start);
            if (out) give(w, mine + result_at, result, (end - start) * w->item);
        }
        for (uint32_t rank = 0; rank < parts; ++rank) {
            size_t start = cut(count, rank, parts), end = cut(count, rank + 1, parts);
            if (rank != me) give(w, mine + start * w->item, in + (here + start) * w->item, (end - start) * w->item);
        }
        TRY(publish(w));
        for (uint32_t rank = 0; rank < parts; ++rank) {
            if (rank == me || (t == chunks && !out)) continue;
            TRY(read_slot(w, rank, &theirs[rank]));
            size_t start = cut(count_before, rank, parts), end = cut(count_before, rank + 1, parts);
            if (t && out)
                copy(out + (before + start) * w->item, theirs[rank] + result_at, (end - start) * w->item);
        }
    }
    return ES_OK;
}

static int reduce(walk *w) {
    void *out = w->call->out ? w->call->out[0] : NULL;
    int small = w->call->count * w->item <= w->team->at_once_bytes;
    int many = 64 * ((size_t)w->team->num_ranks + 2) > w->step_bytes / w->item; /* a chunk has no part for each */
    return small || many ? reduce_at_once(w, out) : reduce_in_parts(w, out);
}

static int broadcast(walk *w) {
    const es_call *call = w->call;
    size_t bytes = call->count * w->item, at = 0;
    do {
        size_t here = smaller(w->step_bytes, bytes - at);
        char *mine;
        const char *theirs;
        TRY(fill(w, call->in ? here : 0, &mine));
        if (call->in) give(w, mine, (const char *)call->in[0] + at, here);
        TRY(publish(w));
        if (!call->in) {
            TRY(read_slot(w, call->root, &theirs));
            copy((char *)call->out[0] + at, theirs, here);
        }
        at += here;
    } while (at < bytes);
    return ES_OK;
}

/* One piece from each rank, to those that have an out. */
static int gather(walk *w) {
    const es_call *call = w->call;
    size_t bytes = call->count * w->item, at = 0;
    do {
        size_t here = smaller(w->step_bytes, bytes - at);
        char *mine;
        const char *theirs;
        TRY(fill(w, here, &mine));
        give(w, mine, (const char *)call->in[0] + at, here);
        TRY(publish(w));
        for (uint32_t rank = 0; call->out && rank < w->team->num_ranks; ++rank) {
            TRY(read_slot(w, rank, &theirs));
            if (rank == w->team->rank) theirs = (const char *)call->in[0] + at; /* it may lie in `out` already */
            copy((char *)call->out[rank] + at, theirs, here);
        }
        at += here;
    } while (at < bytes);
    return ES_OK;
}

/* Ranks that have an `in` give one piece to each rank; with an op the pieces that a rank gets from all are reduced. */
static int scatter(walk *w) {
    es_team *team = w->team;
    const es_call *call = w->call;
    int reducing = call->kind == ES_REDUCE_SCATTER;
    size_t bytes = call->count * w->item, at = 0;
    const char *sources[ES_MAX_INPUTS];
    do {
        size_t step = w->step_bytes / team->num_ranks / 64 * 64;
        size_t here = smaller(step, bytes - at);
        char *mine, *to = (char *)call->out[0] + at;
        TRY(fill(w, call->in ? step * team->num_ranks : 0, &mine));
        for (uint32_t rank = 0; call->in && rank < team->num_ranks; ++rank)
            if (rank != team->rank) give(w, mine + rank * step, (const char *)call->in[rank] + at, here);
        TRY(publish(w));
        for (uint32_t rank = 0; rank < team->num_ranks; ++rank) {
            if (!reducing && rank != call->root) continue;
            TRY(read_slot(w, rank, &sources[rank]));
            sources[rank] += team->rank * step;
            if (rank == team->rank) sources[rank] = (const char *)call->in[rank] + at;
        }
        if (reducing)
            es_tree_reduce(call->dtype, call->op, (const void *const *)sources, team->merges, team->num_ranks, to,
                           here / w->item);
        else
            copy(to, sources[call->root], here);
        at += here;
    } while (at < bytes);
    return ES_OK;
}

/* The first step tells everyone all sizes. */
static int all_to_all(walk *w) {
    es_team *team = w->team;
    const es_call *call = w->call;
    uint32_t parts = team->num_ranks, me = team->rank;
    size_t most = 0;
    char *mine;
    const char *theirs;
    TRY(fill(w, parts * sizeof(uint64_t), &mine));
    memcpy(mine, call->in_items, parts * sizeof(uint64_t));
    TRY(publish(w));
    for (uint32_t rank = 0; rank < parts; ++rank) {
        TRY(read_slot(w, rank, &theirs));
        const uint64_t *items = (const uint64_t *)theirs;
        if (items[me] != call->out_items[rank]) {
            team->culprit = rank;
            return ES_MISMATCH;
        }
        for (uint32_t to = 0; to < parts; ++to) most = items[to] > most ? items[to] : most;
    }
    size_t step = w->step_bytes / parts / 64 * 64;
    for (size_t at = 0; at < most * w->item; at += step) {
        TRY(fill(w, step * parts, &mine));
        for (uint32_t rank = 0; rank < parts; ++rank) {
            size_t bytes = call->in_items[rank] * w->item;
            if (at >= bytes) continue;
            const char *from = (const char *)call->in[rank] + at;
            copy(rank == me ? (char *)call->out[me] + at : mine + rank * step, from, smaller(step, bytes - at));
        }
        TRY(publish(w));
        for (uint32_t rank = 0; rank < parts; ++rank) {
            size_t bytes = call->out_items[rank] * w->item;
            if (rank == me || at >= bytes) continue;
            TRY(read_slot(w, rank, &theirs));
            copy((char *)call->out[rank] + at, theirs + me * step, smaller(step, bytes - at));
        }
    }
    return ES_OK;
}

/* What is known of operations like this one, if it is long enough for the way of writing to matter. */
static es_ways *ways_of(es_team *team, const es_call *call, size_t bytes) {
    size_t size = bytes / SHORT_BYTES, index = 0;
    if (!size) return NULL;
    while ((size >>= 1) && index + 1 < ES_NUM_SIZES) ++index;
    return &team->ways[call->kind][index];
}

int es_collective(es_team *team, const es_call *call) {
    static int (*const OPERATIONS[])(walk *) = {barrier, reduce, reduce,  broadcast, gather,
                                                gather,  scatter, scatter, all_to_all};
    if (es_aborted(team->base)) return ES_ABORTED; /* even if the others had come to this one before they gave up */
    size_t item = es_item_bytes(call->dtype);
    walk w = {.team = team, .call = call, .item = item,
              .step_bytes = smaller(FIRST_BYTES, most_bytes(team)), .first = 1,
              .ways = ways_of(team, call, call->count * item)};
    if (!w.ways) return OPERATIONS[call->kind](&w);
    w.past_cache = es_ways_next(w.ways);
    w.timed = es_ways_looks(w.ways);
    int64_t began = w.timed ? es_now_ns() : 0;
    TRY(OPERATIONS[call->kind](&w));
    es_ways_learn(w.ways, w.past_cache, w.timed ? es_now_ns() - began - w.waited_ns : -1);
    return ES_OK;
}
