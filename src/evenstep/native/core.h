/* The small C core: waiting on shared memory, posting and collecting vectors.
 *
 * It knows nothing of Python or torch. All state lies in one shared segment that starts with an es_header,
 * followed by one es_worker for every worker and one more for the supervisor, whose number is num_workers. Each
 * es_worker has a single writer (its process); everyone else only reads it, apart from `bell` and `waiting`, which are
 * plain atomic counters. There is no lock, so a process that dies can keep nothing. Correct on weakly ordered
 * processors: data is written before `seq` is released, and read after `seq` was acquired.
 */
#ifndef EVENSTEP_CORE_H
#define EVENSTEP_CORE_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

enum {
    ES_OK = 0,
    ES_AGAIN = 1,    /* the time slice is over (or a signal came): check for failures, then wait again */
    ES_ABORTED = 2,  /* somebody called es_abort */
    ES_MISMATCH = 3, /* the peer is at another exchange */
};

enum { ES_TAG_BYTES = 224, ES_ERROR_BYTES = 65536, ES_NUM_SLOTS = 4 };

/* A number that one process or thread raises and others await: what every wait in the project waits on. It may lie in
 * shared memory, and starts as zeros. */
typedef struct {
    _Atomic uint64_t seq;
    _Atomic uint32_t bell;    /* the futex: rung after every raise and by an abort */
    _Atomic uint32_t waiting; /* how many sleep on the bell; one that died there only costs a needless wake */
} es_mark;

void es_raise(es_mark *mark, uint64_t seq);
/* For a mark that several processes raise: by one. */
void es_bump(es_mark *mark);
/* The one way to wait: spin a little, then sleep on the bell, up to timeout_ns, until the mark has reached `seq`;
 * ES_ABORTED once `*aborted` is not 0 (`aborted` may be NULL). */
int es_await(es_mark *mark, uint64_t seq, const _Atomic uint32_t *aborted, uint32_t spin, int64_t timeout_ns);
/* Looks this often whether the mark has reached `seq`, without giving the core away; stops when `*aborted` is not 0. */
int es_spin(const es_mark *mark, uint64_t seq, const _Atomic uint32_t *aborted, uint32_t looks);
/* The word that becomes nonzero when somebody calls es_abort. */
const _Atomic uint32_t *es_abort_word(const void *base);
int64_t es_now_ns(void);

/* How many bytes the control part of a segment needs. */
size_t es_control_bytes(uint32_t num_workers, size_t slot_bytes);
void es_init(void *base, uint32_t num_workers, size_t slot_bytes);
/* 0 if base is a control part that this build understands, else -1. */
int es_check(const void *base);
uint32_t es_num_workers(const void *base);
size_t es_slot_bytes(const void *base);

/* Writes tag and data into this worker's slot for `seq`, then publishes it. */
void es_post(void *base, uint32_t worker, uint64_t seq, const char *tag, const void *data, size_t bytes);
/* Waits up to timeout_ns until `worker` has posted `seq`, then copies its data to out. Tags and sizes must agree.
 * A wait for the supervisor's word goes on when the workers have aborted: that word is what ends it. */
int es_collect(void *base, uint32_t worker, uint64_t seq, const char *tag, void *out, size_t bytes, uint32_t spin,
               int64_t timeout_ns);
/* What `worker` posted last: the tag, and the number and the bytes that came with it. */
void es_last_post(const void *base, uint32_t worker, uint64_t *seq, uint64_t *number, uint64_t *bytes,
                  char tag[ES_TAG_BYTES]);

/* The parts of a post and of a collect, for data that are written and read in place. */
es_mark *es_posted(void *base, uint32_t worker);
void *es_slot_data(void *base, uint32_t worker, uint64_t seq);
/* `at` says where the data are if not in the slot, for readers that know what it means. */
void es_publish(void *base, uint32_t worker, uint64_t seq, const char *tag, uint64_t tag_hash, uint64_t number,
                size_t bytes, uint64_t at);
/* Whether `worker` was on another core than this thread is now when it last published something. */
int es_elsewhere(const void *base, uint32_t worker);
uint64_t es_posted_at(void *base, uint32_t worker, uint64_t seq);
uint64_t es_hash_tag(const char *tag);
/* The number of bytes in the slot of `worker` for a `seq` that it has posted. */
size_t es_posted_bytes(void *base, uint32_t worker, uint64_t seq);
/* Whether the slot of `worker` for a `seq` has what was posted under that, and nothing later. */
int es_holds(void *base, uint32_t worker, uint64_t seq);
/* The tag of what is in a slot, and the hash of the whole tag, which may be longer. */
void es_posted_tag(void *base, uint32_t worker, uint64_t seq, uint64_t *tag_hash, char tag[ES_TAG_BYTES]);
/* Whether the slot of `worker` for a `seq` that it has posted has this tag. */
int es_matches(void *base, uint32_t worker, uint64_t seq, uint64_t tag_hash);

/* `author` (a worker, or num_workers for the supervisor) says that `culprit` failed, and why. The first caller wins and
 * leaves its text; every waiting thread is woken. Returns 1 if this was the first. Author and culprit are kept apart
 * because several survivors may report one death at once, and each may write its own text only. */
int es_abort(void *base, uint32_t author, uint32_t culprit, const char *text, size_t bytes);
/* 0 while nobody has aborted, else 1 + the culprit. */
uint32_t es_aborted(const void *base);
/* Copies the text that came with the first abort; returns its length. */
size_t es_abort_text(const void *base, char out[ES_ERROR_BYTES]);

/* Forgets the abort. For the supervisor, when everyone concerned has stopped waiting. */
void es_clear_abort(void *base);

void es_set_pid(void *base, uint32_t worker, uint32_t pid);
uint32_t es_pid(const void *base, uint32_t worker);

uint64_t es_load(const void *word);
void es_store(void *word, uint64_t value);

#endif
