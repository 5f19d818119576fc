/* What torch asks of a BLAS for matrices of floats and doubles, by the products of product.h. The names, arguments and
 * meanings are those of the reference BLAS and of cblas, with matrices by columns and whole numbers of 32 bits.
 */
#ifndef EVENSTEP_BLAS_H
#define EVENSTEP_BLAS_H

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

#endif
