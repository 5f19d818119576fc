/* What workers of one machine have posted, as one message for another machine. */
#ifndef EVENSTEP_POSTS_H
#define EVENSTEP_POSTS_H

#include "core.h"

/* A message: this head, then for each post an es_post_head and its data. */
typedef struct {
    uint64_t bytes; /* of the whole message */
    uint64_t count; /* of posts; 0: it is something else */
} es_posts_head;

/* Writes what `count` workers have posted under `seq` to out, if it does not take more than `capacity`; returns how many
 * bytes it takes, or 0 if a slot has something else by now. */
size_t es_pack_posts(void *base, uint64_t seq, const uint32_t *workers, uint32_t count, void *out, size_t capacity);
/* Posts what a message brings in the slots of its workers here; -1 if it is not such a message; nothing after the
 * mistake is posted. */
int es_take_posts(void *base, const void *message, size_t bytes);

#endif
