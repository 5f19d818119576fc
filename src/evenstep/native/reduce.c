#include "reduce.h"

#include <string.h>

enum { BLOCK = 2048, MAX_DEPTH = 16 };

#if defined(__x86_64__) && defined(__gnu_linux__)
#define FAST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FAST
#endif

static float from_bf16(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float out;
    memcpy(&out, &bits, sizeof out);
    return out;
}

static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t rounded = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    return value != value ? 0x7fc0 : rounded;
}

/* By hand, because gcc has _Float16 on x86-64 only since version 12. */
static float from_f16(uint16_t value) {
    uint32_t rest = value & 0x7fff, bits;
    float out = (float)rest * 0x1p-24f; /* right for zero and denormals, which are multiples of 2^-24 */
    memcpy(&bits, &out, sizeof bits);
    if (rest >= 0x7c00) bits = 0x7f800000 | (rest & 0x3ff) << 13;
    else if (rest >= 0x400) bits = (rest << 13) + (112u << 23);
    bits |= (uint32_t)(value & 0x8000) << 16;
    memcpy(&out, &bits, sizeof out);
    return out;
}

static uint16_t to_f16(float value) {
    uint32_t bits, small;
    memcpy(&bits, &value, sizeof bits);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00 | (uint16_t)(bits >> 13 & 0x3ff);
    if (bits >= 0x477ff000) return sign | 0x7c00; /* 65520 and above round to infinity */
    if (bits >= 0x38800000) return sign | (uint16_t)((bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13);
    float shifted = (value < 0 ? -value : value) + 0.5f; /* a denormal: the floats above 0.5 are 2^-24 apart too */
    memcpy(&small, &shifted, sizeof small);
    return sign | (uint16_t)(small - 0x3f000000);
}

/* One loop for each type and operation; T is the type that is stored, the expression is of a and b. */
#define LOOP(name, T, load, store, expression)                                  \
    static void name(const void *left, const void *right, void *to, size_t n) { \
        const T *x = left, *y = right;                                          \
        T *out = to;                                                            \
        for (size_t i = 0; i < n; ++i) {                                        \
            __typeof__(load(x[0])) a = load(x[i]), b = load(y[i]);              \
            out[i] = store(expression);                                         \
        }                                                                       \
    }
#define SAME(value) (value)
#define WRAPPED(a, sign, b) ((uint64_t)(a)sign(uint64_t)(b)) /* signed overflow is undefined, this is not */

#define FLOAT_LOOPS(name, T, load, store)                         \
    FAST LOOP(name##_sum, T, load, store, a + b)                  \
    LOOP(name##_product, T, load, store, a *b)                    \
    LOOP(name##_min, T, load, store, (a < b || a != a) ? a : b)   \
    LOOP(name##_max, T, load, store, (a > b || a != a) ? a : b)
#define INT_LOOPS(name, T)                                  \
    LOOP(name##_sum, T, SAME, (T), WRAPPED(a, +, b))        \
    LOOP(name##_product, T, SAME, (T), WRAPPED(a, *, b))    \
    LOOP(name##_min, T, SAME, SAME, a < b ? a : b)          \
    LOOP(name##_max, T, SAME, SAME, a > b ? a : b)          \
    LOOP(name##_band, T, SAME, (T), a &b)                   \
    LOOP(name##_bor, T, SAME, (T), a | b)                   \
    LOOP(name##_bxor, T, SAME, (T), a ^ b)

FLOAT_LOOPS(f32, float, SAME, SAME)
FLOAT_LOOPS(f64, double, SAME, SAME)
FLOAT_LOOPS(bf16, uint16_t, from_bf16, to_bf16)
FLOAT_LOOPS(f16, uint16_t, from_f16, to_f16)
INT_LOOPS(u8, uint8_t)
INT_LOOPS(i8, int8_t)
INT_LOOPS(i16, int16_t)
INT_LOOPS(i32, int32_t)
INT_LOOPS(i64, int64_t)
INT_LOOPS(u16, uint16_t)
INT_LOOPS(u32, uint32_t)
INT_LOOPS(u64, uint64_t)

typedef void (*combine)(const void *left, const void *right, void *to, size_t n);

#define FLOAT_ROW(name) {name##_sum, name##_product, name##_min, name##_max, NULL, NULL, NULL}
#define INT_ROW(name) {name##_sum, name##_product, name##_min, name##_max, name##_band, name##_bor, name##_bxor}

static const combine COMBINE[ES_NUM_TYPES][ES_NUM_OPS] = {
    FLOAT_ROW(f32), FLOAT_ROW(f64), FLOAT_ROW(bf16), FLOAT_ROW(f16), INT_ROW(u8),  INT_ROW(i8),
    INT_ROW(i16),   INT_ROW(i32),   INT_ROW(i64),    INT_ROW(u16),   INT_ROW(u32), INT_ROW(u64),
};

size_t es_item_bytes(int dtype) {
    static const size_t item_bytes[ES_NUM_TYPES] = {4, 8, 2, 2, 1, 1, 2, 4, 8, 2, 4, 8};
    return dtype < 0 || dtype >= ES_NUM_TYPES ? 0 : item_bytes[dtype];
}

/* Whether the program leaves exactly one entry and never runs short of two; also bounds the depth. */
static int well_formed(const uint8_t *merges, uint32_t num_inputs) {
    uint32_t depth = 0;
    for (uint32_t i = 0; i < num_inputs; ++i) {
        if (++depth > MAX_DEPTH || merges[i] >= depth) return 0;
        depth -= merges[i];
    }
    return depth == 1;
}

int es_tree_reduce(int dtype, int op, const void *const *inputs, const uint8_t *merges, uint32_t num_inputs, void *out,
                   size_t count) {
    size_t item = es_item_bytes(dtype);
    if (!item || op < 0 || op >= ES_NUM_OPS || !COMBINE[dtype][op]) return -1;
    if (num_inputs > ES_MAX_INPUTS || !well_formed(merges, num_inputs)) return -1;
    combine pair = COMBINE[dtype][op];
    _Alignas(64) char scratch[MAX_DEPTH][BLOCK * 8];
    for (size_t start = 0; start < count; start += BLOCK) {
        size_t n = count - start < BLOCK ? count - start : BLOCK;
        const void *stack[MAX_DEPTH];
        uint32_t depth = 0;
        for (uint32_t i = 0; i < num_inputs; ++i) {
            stack[depth++] = (const char *)inputs[i] + start * item;
            for (uint8_t m = 0; m < merges[i]; ++m, --depth) {
                int last = i + 1 == num_inputs && m + 1 == merges[i];
                void *to = last ? (void *)((char *)out + start * item) : (void *)scratch[depth - 2];
                pair(stack[depth - 2], stack[depth - 1], to, n);
                stack[depth - 2] = to;
            }
        }
        if (num_inputs == 1 && inputs[0] != out) memcpy((char *)out + start * item, stack[0], n * item);
    }
    return 0;
}
