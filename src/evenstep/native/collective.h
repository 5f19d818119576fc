/* Collectives between the ranks of a team, over the slots of one segment.
 *
 * Long operations go in steps. In a step every rank writes what it gives, publishes it under the tag of the operation,
 * and reads what it needs from the others. A rank publishes a step only when it has read all that it wants of the step
 * before, so a rank that sees the marks of all others at step s may overwrite step s - 1, and one wait per step is
 * enough. Small data go through two slots in turn. Larger data go round in a ring that is larger than the cache of a
 * core: writing where another core still caches what it has read is several times slower than where it no longer does.
 * A step moves less than the cache holds, so what one rank copies in is still there when another reads it, unless it is
 * written past the cache (see ways.h), for which there is a part of the ring for small data, too. Where ranks wait
 * beside a computation, and so wait long, steps are larger.
 */
#ifndef EVENSTEP_COLLECTIVE_H
#define EVENSTEP_COLLECTIVE_H

#include "core.h"
#include "reduce.h"
#include "ways.h"

enum {
    ES_GONE = 4,        /* the process of the culprit has ended, or it left the team */
    ES_SILENT = 5,      /* the culprit did not come in time */
    ES_INTERRUPTED = 6, /* `look` said so */
};

enum {
    ES_BARRIER = 0,
    ES_ALL_REDUCE,
    ES_REDUCE,
    ES_BROADCAST,
    ES_ALL_GATHER,
    ES_GATHER,
    ES_SCATTER,
    ES_REDUCE_SCATTER,
    ES_ALL_TO_ALL,
    ES_NUM_KINDS,
};

enum { ES_NUM_SIZES = 15 }; /* sizes of what can be written in two ways, by powers of two */

/* The ranks around a segment, as one of them sees them. One thread at a time may use it. */
typedef struct {
    void *base;
    uint32_t rank;
    uint32_t num_ranks;
    uint8_t merges[ES_MAX_INPUTS]; /* the tree over the ranks */
    size_t at_once_bytes; /* up to here everyone reduces everything; above, each rank reduces a part and shares it */
    uint64_t step;         /* the last one that this rank has published */
    char *rings;           /* for each rank `ring_bytes`, through which its larger data goes round */
    size_t ring_bytes;
    size_t ring_at;        /* where the next begins in the own one, */
    size_t small_at;       /* and where in the part of it for what is small */
    es_ways ways[ES_NUM_KINDS][ES_NUM_SIZES]; /* how to write there */
    uint32_t culprit;      /* after an error: the rank it is about */
    /* Called now and then during a long wait, about each rank that has not come yet: 1 if its process has ended, 0 if
     * not, -1 to stop waiting. */
    int (*look)(void *context, uint32_t rank);
    void *context;
} es_team;

/* One operation, as one rank calls it. */
typedef struct {
    int kind;
    const char *tag; /* what it is; must be the same on all ranks */
    uint64_t tag_hash;
    uint64_t number;
    int dtype, op;  /* of a reduction; else dtype is ES_U8 */
    uint32_t root;  /* where there is one */
    size_t count;   /* items of one piece; a piece is what one rank contributes, or gets, in one `in` or `out` */
    int64_t timeout_ns;       /* how long a rank may take for a step of it */
    uint32_t looks;           /* how often to look before giving the core away to a rank that was on another one, */
    uint32_t spin;            /* and after that before sleeping */
    size_t step_bytes;        /* how much to move in a step; the maximum over the ranks counts */
    const void *const *in;    /* one piece, or one for each rank; NULL where this rank has nothing to give */
    void *const *out;         /* likewise; NULL where it gets nothing */
    const uint64_t *in_items; /* of an all-to-all: the items of each piece, instead of count */
    const uint64_t *out_items;
} es_call;

/* Takes part in an operation; all ranks of the team must call it. Blocks until this rank has what it is to get.
 * Returns ES_OK, ES_ABORTED, ES_MISMATCH, ES_GONE, ES_SILENT or ES_INTERRUPTED; after an error the team is lost. */
int es_collective(es_team *team, const es_call *call);

#endif
