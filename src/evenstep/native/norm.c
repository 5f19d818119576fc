#include "norm.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "parallel.h"

#if defined(__x86_64__) && defined(__gnu_linux__)
#define FAST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FAST
#endif

/* Into every clone, before it is vectorized. */
#define INLINE inline __attribute__((always_inline))

enum { BLOCK = 2048, ROWS = 32, TILE = 1024 };

/* Work is cut into parts of about this many elements; rows to be summed into at most this many parts. */
enum { PART = 1 << 15, MAX_PARTS = 16 };

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

static INLINE double element(es_vector v, size_t c, double otherwise) {
    if (!v.at) return otherwise;
    switch (v.type) {
        case ES_NORM_F32: return ((const float *)v.at)[c];
        case ES_NORM_F64: return ((const double *)v.at)[c];
        default: return from_bf16(((const uint16_t *)v.at)[c]);
    }
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

/* A pass over some channels (sums of planes), rows (of channels) or runs (planes, element by element). */
typedef void kernel(const es_norm *n, size_t first, size_t end, void *out);

#define KERNELS(pass)                         \
    {                                         \
        {f32_planes_##pass, f32_rows_##pass}, \
        {f64_planes_##pass, f64_rows_##pass}, \
        {bf16_planes_##pass, bf16_rows_##pass} \
    }

typedef struct {
    const es_norm *n;
    kernel *run;
    size_t num_parts, size;
    char *out;
    size_t out_bytes; /* how far apart the parts write */
} division;

static void run_part(void *argument, size_t part) {
    const division *d = argument;
    d->run(d->n, d->size * part / d->num_parts, d->size * (part + 1) / d->num_parts, d->out + part * d->out_bytes);
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

FAST static void add_rows(size_t num_rows, size_t width, double *rows) {
    for (size_t r = 1; r < num_rows; ++r)
        for (size_t i = 0; i < width; ++i) rows[i] += rows[r * width + i];
}

static size_t parts_of(const es_norm *n, size_t at_most) {
    size_t wanted = n->outer * n->channels * n->inner / PART + 1;
    return wanted < at_most ? wanted : at_most;
}

/* Sums of planes are shared by channel. Rows are cut into parts, by the shape only; `join` makes one row of theirs. */
static int sum_up(const es_norm *n, kernel *const kernels[2], size_t width,
                  void join(size_t num_rows, size_t size, double *rows), size_t size) {
    if (n->inner > 1) {
        division d = {n, kernels[0], parts_of(n, n->channels), n->channels, n->out, 0};
        es_parallel(n->num_threads, d.num_parts, run_part, &d);
        return 0;
    }
    size_t num_parts = parts_of(n, (n->outer + ROWS - 1) / ROWS);
    if (num_parts > MAX_PARTS) num_parts = MAX_PARTS;
    if (num_parts == 1) {
        kernels[1](n, 0, n->outer, n->out);
        return 0;
    }
    double *sums = malloc(num_parts * width * sizeof(double));
    if (!sums) return -1;
    division d = {n, kernels[1], num_parts, n->outer, (char *)sums, width * sizeof(double)};
    es_parallel(n->num_threads, num_parts, run_part, &d);
    join(num_parts, size, sums);
    memcpy(n->out, sums, width * sizeof(double));
    free(sums);
    return 0;
}

static void run_part_from_the_end(void *argument, size_t part) {
    const division *d = argument;
    run_part(argument, d->num_parts - 1 - part);
}

/* The end of x comes first: the previous pass read it last, so it may still be in the cache. */
static void each_element(const es_norm *n, kernel *const kernels[2]) {
    size_t size = n->inner > 1 ? n->outer * n->channels : n->outer;
    division d = {n, kernels[n->inner == 1], parts_of(n, size), size, n->out, 0};
    es_parallel(n->num_threads, d.num_parts, run_part_from_the_end, &d);
}

int es_norm_statistics(const es_norm *n) {
    static kernel *const kernels[][2] = KERNELS(statistics);
    *(double *)n->out = (double)n->outer * (double)n->inner;
    return sum_up(n, kernels[n->type], 1 + 2 * n->channels, es_norm_merge, n->channels);
}

int es_norm_reduce(const es_norm *n) {
    static kernel *const kernels[][2] = KERNELS(reduce);
    return sum_up(n, kernels[n->type], 2 * n->channels, add_rows, 2 * n->channels);
}

void es_norm_apply(const es_norm *n) {
    static kernel *const kernels[][2] = KERNELS(apply);
    each_element(n, kernels[n->type]);
}

void es_norm_backward(const es_norm *n) {
    static kernel *const kernels[][2] = KERNELS(backward);
    each_element(n, kernels[n->type]);
}

static void move(size_t channels, const double *value, double divisor, double factor, es_vector running) {
    for (size_t c = 0; running.at && c < channels; ++c) {
        double old = element(running, c, 0), wanted = value[c] / divisor, way = wanted - old;
        double moved = factor < 0.5 ? old + way * factor : wanted - way * (1 - factor);
        switch (running.type) {
            case ES_NORM_F32: ((float *)running.at)[c] = (float)moved; break;
            case ES_NORM_F64: ((double *)running.at)[c] = moved; break;
            case ES_NORM_BF16: ((uint16_t *)running.at)[c] = to_bf16((float)moved); break;
        }
    }
}

void es_norm_move(size_t channels, const double *mean, const double *m2, double count, double factor,
                  es_vector running_mean, es_vector running_var) {
    move(channels, mean, 1, factor, running_mean);
    move(channels, m2, count - 1, factor, running_var);
}
