#include "posts.h"

#include <string.h>

typedef struct {
    uint64_t worker;
    uint64_t seq;
    uint64_t bytes;
    uint64_t tag_hash; /* of the whole tag, of which a slot keeps the beginning */
    char tag[ES_TAG_BYTES];
} es_post_head;

size_t es_pack_posts(void *base, uint64_t seq, const uint32_t *workers, uint32_t count, void *out, size_t capacity) {
    es_posts_head head = {sizeof head, count};
    for (uint32_t i = 0; i < count; ++i) {
        if (!es_holds(base, workers[i], seq)) return 0;
        head.bytes += sizeof(es_post_head) + es_posted_bytes(base, workers[i], seq);
    }
    if (head.bytes > capacity) return head.bytes;
    char *at = out;
    memcpy(at, &head, sizeof head);
    at += sizeof head;
    for (uint32_t i = 0; i < count; ++i) {
        es_post_head post = {workers[i], seq, es_posted_bytes(base, workers[i], seq), 0, ""};
        es_posted_tag(base, workers[i], seq, &post.tag_hash, post.tag);
        memcpy(at, &post, sizeof post);
        memcpy(at + sizeof post, es_slot_data(base, workers[i], seq), post.bytes);
        at += sizeof post + post.bytes;
    }
    return head.bytes;
}

int es_take_posts(void *base, const void *message, size_t bytes) {
    es_posts_head head;
    if (bytes < sizeof head) return -1;
    memcpy(&head, message, sizeof head);
    if (head.bytes > bytes) return -1;
    const char *at = (const char *)message + sizeof head, *end = (const char *)message + head.bytes;
    for (uint64_t i = 0; i < head.count; ++i) {
        es_post_head post;
        if ((size_t)(end - at) < sizeof post) return -1;
        memcpy(&post, at, sizeof post);
        at += sizeof post;
        if (post.worker >= es_num_workers(base) || post.bytes > es_slot_bytes(base) || post.bytes > (size_t)(end - at))
            return -1;
        post.tag[ES_TAG_BYTES - 1] = 0;
        memcpy(es_slot_data(base, (uint32_t)post.worker, post.seq), at, post.bytes);
        es_publish(base, (uint32_t)post.worker, post.seq, post.tag, post.tag_hash, 0, post.bytes, 0);
        at += post.bytes;
    }
    return 0;
}
