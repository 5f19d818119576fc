/* What torch asks of a BLAS (and of a LAPACK, where MKL's rests on approximate roots), by the products of product.h.
 * The names, arguments and meanings are those of the reference BLAS and of cblas, with matrices by columns and 32-bit
 * integers.
 */
#ifndef EVENSTEP_BLAS_H
#define EVENSTEP_BLAS_H

#include <stdint.h>

#define ES_BLAS(T, s)                                                                                                 \
    void es_##s##gemm(const char *transa, const char *transb, const int *m, const int *n, const int *k,               \
                      const T *alpha, const T *a, const int *lda, const T *b, const int *ldb, const T *beta, T *c,    \
                      const int *ldc);                                                                                \
    void es_##s##gemv(const char *trans, const int *m, const int *n, const T *alpha, const T *a, const int *lda,      \
                      const T *x, const int *incx, const T *beta, T *y, const int *incy);                             \
    T es_##s##dot(const int *n, const T *x, const int *incx, const T *y, const int *incy);                            \
    void es_##s##gemm_batch(int layout, const int *transa, const int *transb, const int *m, const int *n,             \
                            const int *k, const T *alpha, const T **a, const int *lda, const T **b, const int *ldb,   \
                            const T *beta, T **c, const int *ldc, int groups, const int *sizes);

ES_BLAS(float, s)
ES_BLAS(double, d)

/* For halves, into floats: they are widened, which is exact, and multiplied as floats. */
#define ES_HALVES(half)                                                                                                \
    void es_gemm_##half(int layout, int transa, int transb, int m, int n, int k, float alpha, const uint16_t *a,       \
                        int lda, const uint16_t *b, int ldb, float beta, float *c, int ldc);

ES_HALVES(bf16)
ES_HALVES(f16)

/* LAPACK's: the triangle L (or its transpose, `uplo` U) with L L' = a, computed in doubles. */
void es_spotrf(const char *uplo, const int *n, float *a, const int *lda, int *info);

#endif
