#include "permutation.h"

#define WORDS 624 /* of the Mersenne twister MT19937 */
#define APART 397

static inline uint32_t twisted(uint32_t word, uint32_t next) {
    return ((word & 0x80000000u) | (next & 0x7FFFFFFFu)) >> 1 ^ (next & 1 ? 0x9908B0DFu : 0);
}

/* The next words of all; in three loops, of which the compiler makes wide ones. */
static void advance(uint32_t *words) {
    size_t n = 0;
    for (; n < WORDS - APART; n++) words[n] = words[n + APART] ^ twisted(words[n], words[n + 1]);
    for (; n < WORDS - 1; n++) words[n] = words[n + APART - WORDS] ^ twisted(words[n], words[n + 1]);
    words[n] = words[APART - 1] ^ twisted(words[n], words[0]);
}

static inline uint32_t tempered(uint32_t word) {
    word ^= word >> 11;
    word ^= word << 7 & 0x9D2C5680u;
    word ^= word << 15 & 0xEFC60000u;
    return word ^ word >> 18;
}

void es_permutation(int64_t *target, size_t count, uint32_t seed) {
    uint32_t words[WORDS] = {seed};
    int64_t *other[WORDS];
    for (uint32_t n = 1; n < WORDS; n++) words[n] = 1812433253u * (words[n - 1] ^ words[n - 1] >> 30) + n;
    for (size_t n = 0; n < count; n++) target[n] = (int64_t)n;
    for (size_t some; count; target += some) {
        some = count < WORDS ? count : WORDS;
        advance(words);
        for (size_t n = 0; n < some; n++, count--) {
            other[n] = target + n + tempered(words[n]) % (uint32_t)count;
            __builtin_prefetch(other[n], 1); /* memory answers slowly, but many at once */
        }
        for (size_t n = 0; n < some; n++) {
            int64_t held = target[n];
            target[n] = *other[n];
            *other[n] = held;
        }
    }
}
