/* Batch norm on the CPU: four passes, each reading its input once from memory, with all that is done per channel.
 *
 * A tensor is dense: `outer` blocks of `channels` runs of `inner` elements. Planes [N, C, L] are (N, C, L), rows of
 * channels [R, C] are (R, C, 1). Threads share the work; what is summed together in which order depends on the shape
 * only, so no bit depends on them.
 *
 * Vectors per channel are double. Within a block that fits the L1 cache sums are kept in many lanes of the arithmetic
 * type (double for double, else float), between blocks in double, always in the same order, so the bits do not depend
 * on the instruction set either.
 */
#ifndef EVENSTEP_NORM_H
#define EVENSTEP_NORM_H

#include <stddef.h>

typedef enum { ES_NORM_F32 = 0, ES_NORM_F64 = 1, ES_NORM_BF16 = 2 } es_norm_type;

/* A parameter per channel; NULL where there is none. */
typedef struct {
    es_norm_type type;
    void *at;
} es_vector;

/* The arguments of a pass, of which each uses those that its formula names. */
typedef struct {
    es_norm_type type; /* of dy, x and out */
    size_t outer, channels, inner;
    unsigned num_threads;
    const void *dy, *x;
    const double *mean, *invstd;
    es_vector weight, bias;
    const double *sum_dy, *sum_dy_xmu; /* over all shards */
    double count;                      /* over all shards */
    void *out;                         /* shaped as x, or the sums as doubles */
} es_norm;

/* out = count, mean[channels], m2[channels]: the mean and the sum of squared deviations from it. The first block is
 * read twice and centred at its own mean, the others at the mean of those before; the remaining offset is measured and
 * corrected. So hardly a bit cancels, however large the mean. Returns 0, or -1 if there was no memory. */
int es_norm_statistics(const es_norm *n);
/* Merges rows as es_norm_statistics gives them, one for each shard, level by level: the fixed tree over shards.
 * The rows are overwritten; the first becomes the result. A row with count 0 leaves its sibling as it is. */
void es_norm_merge(size_t num_rows, size_t channels, double *rows);
/* out = (x - mean) * invstd * weight + bias */
void es_norm_apply(const es_norm *n);
/* out = sum(dy)[channels], sum(dy * (x - mean))[channels]. Returns as es_norm_statistics does. */
int es_norm_reduce(const es_norm *n);
/* out = (dy - sum_dy / count - (x - mean) * invstd^2 * sum_dy_xmu / count) * invstd * weight */
void es_norm_backward(const es_norm *n);

/* Moves the running mean and the running (unbiased) variance towards those of a row of statistics, each where there is
 * one: running * (1 - factor) + value * factor, as torch.lerp computes it. */
void es_norm_move(size_t channels, const double *mean, const double *m2, double count, double factor,
                  es_vector running_mean, es_vector running_var);

#endif
