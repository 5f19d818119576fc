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
    uint64_t length, until; /* of a list, and how many levels come before the next one begins */
    uint64_t begins; /* the bits of a word in which lists begin, if one does in the first */
} lists;

/* Whether this many levels of one value come next. */
static inline int take_run(lists *next, unsigned value, uint64_t count) {
    if (value > 1 || (value ? count > next->until : next->until || (count > 1 && next->length > 1))) return 0;
    next->until = value ? next->until - count : next->length - 1;
    return 1;
}

/* Whether up to 64 levels of a bit each come next. */
static inline int take_bits(lists *next, uint64_t levels, unsigned count) {
    uint64_t zeros = next->until < 64 ? next->begins << next->until : 0;
    while (next->until < count) next->until += next->length;
    next->until -= count;
    return (levels ^ ~zeros) << (64 - count) == 0;
}

static inline int all_are(unsigned top, uint64_t packed, unsigned bits, unsigned count) {
    for (; count; count--, packed >>= bits)
        if ((packed & ((1u << bits) - 1)) != top) return 0;
    return 1;
}

int es_levels_are(const void *data, size_t num_bytes, unsigned bits, uint64_t count, unsigned top, uint64_t length) {
    const uint8_t *at = data, *end = at + num_bytes;
    lists next = {length, 0, 1};
    for (uint64_t n = length; n && n < 64; n += length) next.begins |= 1ull << n;
    if (length && (bits != 1 || top != 1)) return 0;
    while (count) {
        uint64_t header = 0;
        unsigned shift = 0;
        do {
            if (at == end || shift > 56) return 0;
            header |= (uint64_t)(*at & 127) << shift;
            shift += 7;
        } while (*at++ & 128);
        if (header & 1) {
            for (uint64_t groups = header >> 1, some; groups && count; groups -= some) { /* of eight levels */
                some = !length ? 1 : groups < 8 ? groups : 8;
                unsigned levels = (unsigned)(count < 8 * some ? count : 8 * some);
                if (8 * (size_t)(end - at) < levels * bits) return 0;
                uint64_t packed = 0;
                memcpy(&packed, at, end - at < 8 ? (size_t)(end - at) : 8);
                if (!(length ? take_bits(&next, packed, levels) : all_are(top, packed, bits, levels))) return 0;
                at += some * bits;
                count -= levels;
            }
        } else {
            uint64_t run = header >> 1 < count ? header >> 1 : count;
            if (at == end || !run || !(length ? take_run(&next, *at, run) : *at == top)) return 0;
            at++;
            count -= run;
        }
    }
    return 1;
}
