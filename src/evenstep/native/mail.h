/* Messages between two ranks of a team: fragments in a ring for each pair. */
#ifndef EVENSTEP_MAIL_H
#define EVENSTEP_MAIL_H

#include "core.h"

/* A message from one rank to another, of which `fragments` have been moved so far. */
typedef struct {
    uint64_t tag;
    uint64_t bytes;
    uint64_t dtype;
    uint64_t number; /* of the sender's operation */
} es_message;

size_t es_mail_bytes(uint32_t num_ranks);
uint64_t es_mail_fragments(uint64_t bytes);
/* A mark that moves whenever a message to `rank` comes, or one that it sent is taken. */
es_mark *es_mail_mark(void *mail, uint32_t rank);
/* Sends fragments as long as there is room; returns how many of the message have been sent in all. */
uint64_t es_mail_push(void *mail, uint32_t num_ranks, uint32_t from, uint32_t to, const es_message *message,
                      const void *data, uint64_t fragments);
/* 1 if a fragment is there to be taken; then `message` says what it belongs to. */
int es_mail_head(void *mail, uint32_t num_ranks, uint32_t from, uint32_t to, es_message *message);
/* Takes fragments of the message at the head as long as they are there; returns how many of it have been taken in all. */
uint64_t es_mail_pull(void *mail, uint32_t num_ranks, uint32_t from, uint32_t to, uint64_t bytes, void *data,
                      uint64_t fragments);

#endif
