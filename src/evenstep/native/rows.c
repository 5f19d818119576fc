#include "rows.h"

#include <string.h>

#define AT_ONCE 256 /* rows that are asked for before the first is copied: memory answers slowly, but many at once */

static inline size_t piece_of(const es_pieces *in, int64_t row) {
    size_t found = in->starts[row >> in->shift];
    while (in->firsts[found + 1] <= row) found++;
    return found;
}

static inline __attribute__((always_inline)) int gather(char *to, const es_pieces *in, size_t row_bytes,
                                                        const int64_t *rows, size_t count) {
    const char *from[AT_ONCE];
    for (size_t begin = 0; begin < count; begin += AT_ONCE) {
        size_t some = count - begin < AT_ONCE ? count - begin : AT_ONCE;
        for (size_t n = 0; n < some; n++) {
            if ((uint64_t)rows[begin + n] >= in->num_rows) return 0;
            size_t piece = piece_of(in, rows[begin + n]);
            from[n] = (const char *)(uintptr_t)(in->bases[piece] + (uint64_t)rows[begin + n] * row_bytes);
            __builtin_prefetch(from[n]);
            __builtin_prefetch(from[n] + row_bytes - 1); /* rows begin anywhere in a line */
        }
        for (size_t n = 0; n < some; n++, to += row_bytes) memcpy(to, from[n], row_bytes);
    }
    return 1;
}

int es_gather(void *target, const es_pieces *pieces, const int64_t *rows, size_t count) {
    switch (pieces->row_bytes) { /* a copy of a size that the compiler knows is a few moves */
    case 4: return gather(target, pieces, 4, rows, count);
    case 8: return gather(target, pieces, 8, rows, count);
    case 16: return gather(target, pieces, 16, rows, count);
    case 32: return gather(target, pieces, 32, rows, count);
    default: return gather(target, pieces, pieces->row_bytes, rows, count);
    }
}

typedef struct {
    unsigned top;
    uint64_t length, place; /* of a list, and in it */
} expected;

/* Whether this many levels of one value are expected next. */
static inline int takes(expected *next, unsigned value, uint64_t count) {
    if (!next->length) return value == next->top;
    for (; count; count--) {
        if (value != (next->place ? next->top : 0)) return 0;
        next->place = next->place + 1 == next->length ? 0 : next->place + 1;
    }
    return 1;
}

/* Whether eight levels of a bit each are expected next, in lists of eight or more. */
static inline int takes_byte(expected *next, unsigned byte) {
    uint64_t until = next->place ? next->length - next->place : 0; /* the next zero */
    next->place = (next->place + 8) % next->length;
    return byte == (until < 8 ? 0xFFu & ~(1u << until) : 0xFFu);
}

int es_levels_are(const void *data, size_t num_bytes, unsigned bits, uint64_t count, unsigned top, uint64_t length) {
    const uint8_t *at = data, *end = at + num_bytes;
    expected next = {top, length, 0};
    while (count) {
        uint64_t header = 0;
        unsigned shift = 0;
        do {
            if (at == end || shift > 56) return 0;
            header |= (uint64_t)(*at & 127) << shift;
            shift += 7;
        } while (*at++ & 128);
        if (header & 1) {
            for (uint64_t groups = header >> 1; groups && count; groups--, at += bits) {
                if ((size_t)(end - at) < bits) return 0;
                if (bits == 1 && top == 1 && length >= 8 && count >= 8) {
                    if (!takes_byte(&next, *at)) return 0;
                    count -= 8;
                    continue;
                }
                uint64_t packed = 0;
                memcpy(&packed, at, bits);
                for (unsigned n = 0; n < 8 && count; n++, count--)
                    if (!takes(&next, packed >> n * bits & ((1u << bits) - 1), 1)) return 0;
            }
        } else {
            uint64_t run = header >> 1 < count ? header >> 1 : count;
            if (at == end || !run || !takes(&next, *at++, run)) return 0;
            count -= run;
        }
    }
    return 1;
}
