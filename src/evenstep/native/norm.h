/* Batch norm on one CPU core: four passes, each reading its input once from memory.
 *
 * A tensor is `outer` blocks, `stride` elements apart, of `channels` runs of `inner` elements: planes [N, C, L] are
 * (N, C, L, C * L), rows of channels [R, C] are (R, C, 1, C). A range of channels is a shape of its own, so several
 * threads can share the work; no bit depends on how they do.
 *
 * Vectors per channel are double. Within a block that fits the L1 cache sums are kept in many lanes of the arithmetic
 * type (double for double, else float), between blocks in double, always in the same order, so the bits do not depend on
 * the instruction set either.
 */
#ifndef EVENSTEP_NORM_H
#define EVENSTEP_NORM_H

#include <stddef.h>

typedef struct {
    size_t outer, channels, inner, stride;
} es_shape;

typedef enum { ES_NORM_F32 = 0, ES_NORM_F64 = 1, ES_NORM_BF16 = 2 } es_norm_type;

/* The mean and the sum of squared deviations from it. Two passes within each block: nothing cancels. */
void es_norm_statistics(es_norm_type type, es_shape shape, const void *x, double *mean, double *m2);
/* Merges rows of (count, mean[channels], m2[channels]), one for each shard, level by level: the fixed tree over shards.
 * The rows are used up; the first becomes the result. A row with count 0 leaves its sibling as it is. */
void es_norm_merge(size_t num_rows, size_t channels, double *rows);
/* y = (x - mean) * scale + bias */
void es_norm_apply(es_norm_type type, es_shape shape, const void *x, const double *mean, const double *scale,
                   const double *bias, void *y);
/* sum(dy) and sum(dy * (x - mean)) */
void es_norm_reduce(es_norm_type type, es_shape shape, const void *dy, const void *x, const double *mean,
                    double *sum_dy, double *sum_dy_xmu);
/* dx = (dy - shift - (x - mean) * slope) * scale */
void es_norm_backward(es_norm_type type, es_shape shape, const void *dy, const void *x, const double *mean,
                      const double *shift, const double *slope, const double *scale, void *dx);

#endif
