#include "checksum.h"

#include <string.h>

#define ODD 0x9E3779B97F4A7C15ull
#define ALSO_ODD 0xBF58476D1CE4E5B9ull

/* A bijection of the word for every place, so no change can be lost on the way. What is added up in the end must have
 * the high bits of the word in its low ones, or two changed signs would cancel each other. */
static inline uint64_t mixed(uint64_t word, uint64_t place) {
    word ^= place;
    word = (word ^ word >> 32) * ODD;
    word = (word ^ word >> 29) * ALSO_ODD;
    return word ^ word >> 32;
}

static inline __attribute__((always_inline)) uint64_t sum_of(const unsigned char *from, size_t count) {
    uint64_t word, place = 0, sum = 0;
    for (size_t n = 0; n < count; n++) {
        memcpy(&word, from + n * sizeof word, sizeof word);
        sum += mixed(word, place += ODD);
    }
    return sum;
}

/* By hand, because target_clones does not know the multiplications of AVX-512DQ, which are half of the speed. */
#if defined(__x86_64__) && defined(__gnu_linux__)
__attribute__((target("avx512f,avx512dq"))) static uint64_t sum_widest(const unsigned char *from, size_t count) {
    return sum_of(from, count);
}

__attribute__((target("avx2"))) static uint64_t sum_wide(const unsigned char *from, size_t count) {
    return sum_of(from, count);
}

static uint64_t sum(const unsigned char *from, size_t count) {
    if (__builtin_cpu_supports("avx512dq")) return sum_widest(from, count);
    if (__builtin_cpu_supports("avx2")) return sum_wide(from, count);
    return sum_of(from, count);
}
#else
#define sum sum_of
#endif

uint64_t es_checksum(const void *data, size_t num_bytes) {
    uint64_t last = 0, count = num_bytes / sizeof last, found = sum(data, count);
    if (num_bytes % sizeof last) {
        memcpy(&last, (const unsigned char *)data + count * sizeof last, num_bytes % sizeof last);
        found += mixed(last, (count + 1) * ODD);
    }
    return found ^ num_bytes;
}
