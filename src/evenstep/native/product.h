/* Products of matrices whose bits do not depend on the processor.
 *
 * Every element of a product is computed by itself: along k, each 256 terms are summed in order by fused
 * multiply-adds that begin with 0; these sums are multiplied by alpha and added in order, again fused, to beta * c. Which
 * instructions compute it (AVX2 or AVX-512), how the matrices are cut, where they lie and how many elements are
 * computed at once changes none of it.
 */
#ifndef EVENSTEP_PRODUCT_H
#define EVENSTEP_PRODUCT_H

#include <stddef.h>

/* How the processor at hand computes products: 0 not at all (no AVX2 or FMA), 256 or 512 bits at once. */
int es_product_bits(void);

/* Use at most this many bits from now on, in all threads: for tests. */
void es_limit_product_bits(int bits);

/* A matrix: element (i, j) is at[i * row + j * column]. */
typedef struct {
    const void *at;
    ptrdiff_t row, column;
} es_matrix;

/* c = alpha * a b + beta * c, for a of m x k and b of k x n elements. One of c's strides is 1; c is not read where beta
 * is 0, and does not overlap a or b. */
void es_product_f32(size_t m, size_t n, size_t k, float alpha, es_matrix a, es_matrix b, float beta, es_matrix c);
void es_product_f64(size_t m, size_t n, size_t k, double alpha, es_matrix a, es_matrix b, double beta, es_matrix c);

#endif
