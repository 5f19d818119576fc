#include "copy.h"

#include <stdint.h>
#include <string.h>

#ifdef __x86_64__
#include <emmintrin.h>

#define LINE 64

void es_copy(void *target, const void *source, size_t num_bytes) {
    char *to = target;
    const char *from = source;
    size_t first = (LINE - (uintptr_t)to % LINE) % LINE;
    if (first > num_bytes) first = num_bytes;
    memcpy(to, from, first);
    size_t at = first;
    for (; at + LINE <= num_bytes; at += LINE) {
        __m128i a = _mm_loadu_si128((const __m128i *)(from + at)), b = _mm_loadu_si128((const __m128i *)(from + at + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + at + 32)), d = _mm_loadu_si128((const __m128i *)(from + at + 48));
        _mm_stream_si128((__m128i *)(to + at), a);
        _mm_stream_si128((__m128i *)(to + at + 16), b);
        _mm_stream_si128((__m128i *)(to + at + 32), c);
        _mm_stream_si128((__m128i *)(to + at + 48), d);
    }
    _mm_sfence();
    memcpy(to + at, from + at, num_bytes - at);
}
#else
void es_copy(void *target, const void *source, size_t num_bytes) { memcpy(target, source, num_bytes); }
#endif
