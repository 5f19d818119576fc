#include "norm.h"

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__gnu_linux__)
#define FAST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FAST
#endif

/* Into every clone, before it is vectorized. */
#define INLINE inline __attribute__((always_inline))

enum { BLOCK = 2048, ROWS = 32, TILE = 256 };

typedef struct {
    double count, mean, m2;
} moments;

static INLINE void merge(moments *into, double count, double mean, double m2) {
    double share = count / (into->count + count), delta = mean - into->mean;
    into->mean += delta * share;
    into->m2 += m2 + delta * delta * (into->count * share);
    into->count += count;
}

static INLINE float from_bf16(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float out;
    memcpy(&out, &bits, sizeof out);
    return out;
}

static INLINE uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#define T float
#define A float
#define LANES 64
#define READ(v) (v)
#define WRITE(v) (v)
#define NAME(x) f32_##x
#include "norm_passes.h"

#define T double
#define A double
#define LANES 32
#define READ(v) (v)
#define WRITE(v) (v)
#define NAME(x) f64_##x
#include "norm_passes.h"

#define T uint16_t
#define A float
#define LANES 64
#define READ(v) from_bf16(v)
#define WRITE(v) to_bf16(v)
#define NAME(x) bf16_##x
#include "norm_passes.h"

/* Calls the pass for the type and for planes or rows. */
#define DISPATCH(pass, ...)                                                                              \
    switch (type) {                                                                                      \
        case ES_NORM_F32: (shape.inner == 1 ? f32_rows_##pass : f32_planes_##pass)(shape, __VA_ARGS__); break;   \
        case ES_NORM_F64: (shape.inner == 1 ? f64_rows_##pass : f64_planes_##pass)(shape, __VA_ARGS__); break;   \
        case ES_NORM_BF16: (shape.inner == 1 ? bf16_rows_##pass : bf16_planes_##pass)(shape, __VA_ARGS__); break; \
    }

void es_norm_statistics(es_norm_type type, es_shape shape, const void *x, double *mean, double *m2) {
    DISPATCH(statistics, x, mean, m2)
}

FAST static void merge_rows(size_t channels, double *restrict a, const double *restrict b) {
    double all = a[0] + b[0], share = b[0] / all, weight = a[0] * share;
    double *mean = a + 1, *m2 = mean + channels;
    const double *other_mean = b + 1, *other_m2 = other_mean + channels;
    for (size_t c = 0; c < channels; ++c) {
        double delta = other_mean[c] - mean[c];
        mean[c] += delta * share;
        m2[c] += other_m2[c] + delta * delta * weight;
    }
    a[0] = all;
}

void es_norm_merge(size_t num_rows, size_t channels, double *rows) {
    size_t width = 1 + 2 * channels;
    for (size_t step = 1; step < num_rows; step *= 2)
        for (size_t i = 0; i + step < num_rows; i += 2 * step) {
            double *left = rows + i * width, *right = rows + (i + step) * width;
            if (left[0] == 0)
                memcpy(left, right, width * sizeof(double));
            else if (right[0] != 0)
                merge_rows(channels, left, right);
        }
}

void es_norm_apply(es_norm_type type, es_shape shape, const void *x, const double *mean, const double *scale,
                   const double *bias, void *y) {
    DISPATCH(apply, x, mean, scale, bias, y)
}

void es_norm_reduce(es_norm_type type, es_shape shape, const void *dy, const void *x, const double *mean,
                    double *sum_dy, double *sum_dy_xmu) {
    DISPATCH(reduce, dy, x, mean, sum_dy, sum_dy_xmu)
}

void es_norm_backward(es_norm_type type, es_shape shape, const void *dy, const void *x, const double *mean,
                      const double *shift, const double *slope, const double *scale, void *dx) {
    DISPATCH(backward, dy, x, mean, shift, slope, scale, dx)
}
