#include "mail.h"

#include <string.h>

enum { FRAGMENT_BYTES = 1 << 16, ROOM = 4 };

typedef struct {
    es_message message;
    char padding[32];
    char data[FRAGMENT_BYTES];
} fragment;

typedef struct {
    _Atomic uint64_t sent; /* fragments so far, written by the sender */
    char padding[56];
    _Atomic uint64_t taken; /* likewise, by the receiver */
    char more_padding[56];
    fragment ring[ROOM];
} channel;

typedef struct {
    es_mark mark;
    char padding[48];
} mailbox;

static channel *channel_at(void *mail, uint32_t num_ranks, uint32_t from, uint32_t to) {
    return (channel *)((mailbox *)mail + num_ranks) + ((size_t)from * num_ranks + to);
}

/* How many bytes of a message are in the fragment that begins at `at`. */
static size_t length_at(size_t at, uint64_t bytes) { return bytes - at < FRAGMENT_BYTES ? bytes - at : FRAGMENT_BYTES; }

size_t es_mail_bytes(uint32_t num_ranks) {
    return num_ranks * sizeof(mailbox) + (size_t)num_ranks * num_ranks * sizeof(channel);
}

uint64_t es_mail_fragments(uint64_t bytes) { return bytes ? (bytes + FRAGMENT_BYTES - 1) / FRAGMENT_BYTES : 1; }

es_mark *es_mail_mark(void *mail, uint32_t rank) { return &((mailbox *)mail)[rank].mark; }

uint64_t es_mail_push(void *mail, uint32_t num_ranks, uint32_t from, uint32_t to, const es_message *message,
                      const void *data, uint64_t fragments) {
    channel *way = channel_at(mail, num_ranks, from, to);
    uint64_t sent = atomic_load(&way->sent), all = es_mail_fragments(message->bytes);
    while (fragments < all && sent < atomic_load(&way->taken) + ROOM) {
        fragment *next = &way->ring[sent % ROOM];
        size_t at = fragments * FRAGMENT_BYTES;
        next->message = *message;
        if (message->bytes) memcpy(next->data, (const char *)data + at, length_at(at, message->bytes));
        atomic_store(&way->sent, ++sent);
        es_bump(es_mail_mark(mail, to));
        ++fragments;
    }
    return fragments;
}

int es_mail_head(void *mail, uint32_t num_ranks, uint32_t from, uint32_t to, es_message *message) {
    channel *way = channel_at(mail, num_ranks, from, to);
    uint64_t taken = atomic_load(&way->taken);
    if (taken >= atomic_load(&way->sent)) return 0;
    *message = way->ring[taken % ROOM].message;
    return 1;
}

uint64_t es_mail_pull(void *mail, uint32_t num_ranks, uint32_t from, uint32_t to, uint64_t bytes, void *data,
                      uint64_t fragments) {
    channel *way = channel_at(mail, num_ranks, from, to);
    uint64_t taken = atomic_load(&way->taken), all = es_mail_fragments(bytes);
    while (fragments < all && taken < atomic_load(&way->sent)) {
        size_t at = fragments * FRAGMENT_BYTES;
        if (bytes) memcpy((char *)data + at, way->ring[taken % ROOM].data, length_at(at, bytes));
        atomic_store(&way->taken, ++taken);
        es_bump(es_mail_mark(mail, from));
        ++fragments;
    }
    return fragments;
}
