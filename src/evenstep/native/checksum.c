#include "checksum.h"

#include <string.h>

#define LANES 8  /* independent chains, so that a multiplication does not wait for the one before it */
#define ODD 0x9E3779B97F4A7C15ull

/* A bijection of `sum` for every word, and of the word for every sum: no change can be lost on the way. */
static inline uint64_t take(uint64_t sum, uint64_t word) {
    sum = (sum ^ word) * ODD;
    return sum ^ sum >> 29;
}

uint64_t es_checksum(const void *data, size_t num_bytes) {
    const unsigned char *from = data;
    uint64_t lanes[LANES], word, sum = num_bytes;
    size_t at = 0;
    for (unsigned n = 0; n < LANES; n++) lanes[n] = n + 1;
    for (; at + sizeof lanes <= num_bytes; at += sizeof lanes)
        for (unsigned n = 0; n < LANES; n++) {
            memcpy(&word, from + at + n * sizeof word, sizeof word);
            lanes[n] = take(lanes[n], word);
        }
    for (unsigned n = 0; n < LANES; n++) sum = take(sum, lanes[n]);
    for (; at < num_bytes; at += sizeof word) {
        size_t left = num_bytes - at < sizeof word ? num_bytes - at : sizeof word;
        word = 0;
        memcpy(&word, from + at, left);
        sum = take(sum, word);
    }
    return take(sum, sum >> 32);
}
