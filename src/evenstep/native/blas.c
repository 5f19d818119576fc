#include "blas.h"

#include <math.h>

#include "product.h"

enum { BY_ROWS = 101, PLAIN = 111 }; /* cblas */

#if defined(__x86_64__)
#define FUSED __attribute__((target("avx2,fma")))
#else
#define FUSED
#endif

/* Where the elements of a vector begin: with a negative step, at its end. */
#define BEGIN(at, count, step) ((at) - ((step) < 0 ? (ptrdiff_t)((count) - 1) * (step) : 0))

#define BLAS(T, s, bits, FMA)                                                                                         \
    static es_matrix s##_matrix(const T *at, int ld, int transposed) {                                                \
        return transposed ? (es_matrix){at, ld, 1} : (es_matrix){at, 1, ld};                                          \
    }                                                                                                                 \
                                                                                                                      \
    void es_##s##gemm(const char *transa, const char *transb, const int *m, const int *n, const int *k,               \
                      const T *alpha, const T *a, const int *lda, const T *b, const int *ldb, const T *beta, T *c,    \
                      const int *ldc) {                                                                               \
        es_product_##bits(*m, *n, *k, *alpha, s##_matrix(a, *lda, (*transa | 32) != 'n'),                             \
                          s##_matrix(b, *ldb, (*transb | 32) != 'n'), *beta, s##_matrix(c, *ldc, 0));                 \
    }                                                                                                                 \
                                                                                                                      \
    void es_##s##gemv(const char *trans, const int *m, const int *n, const T *alpha, const T *a, const int *lda,      \
                      const T *x, const int *incx, const T *beta, T *y, const int *incy) {                            \
        int transposed = (*trans | 32) != 'n', rows = transposed ? *n : *m, terms = transposed ? *m : *n;             \
        es_matrix c = *incy == 1 ? (es_matrix){y, 1, rows} : (es_matrix){BEGIN(y, rows, *incy), *incy, 1};            \
        es_product_##bits(rows, 1, terms, *alpha, s##_matrix(a, *lda, transposed),                                    \
                          (es_matrix){BEGIN(x, terms, *incx), *incx, 1}, *beta, c);                                   \
    }                                                                                                                 \
                                                                                                                      \
    /* Term i goes to lane i % 32; the lanes are added as a tree. */                                                  \
    FUSED T es_##s##dot(const int *n, const T *x, const int *incx, const T *y, const int *incy) {                     \
        T lanes[32] = {0};                                                                                            \
        int i = 0;                                                                                                    \
        x = BEGIN(x, *n, *incx), y = BEGIN(y, *n, *incy);                                                             \
        for (; *incx == 1 && *incy == 1 && i + 32 <= *n; i += 32)                                                     \
            for (int j = 0; j < 32; ++j) lanes[j] = FMA(x[i + j], y[i + j], lanes[j]);                                \
        for (; i < *n; ++i)                                                                                           \
            lanes[i % 32] = FMA(x[(ptrdiff_t)i * *incx], y[(ptrdiff_t)i * *incy], lanes[i % 32]);                     \
        for (int width = 16; width; width /= 2)                                                                       \
            for (int j = 0; j < width; ++j) lanes[j] += lanes[j + width];                                             \
        return lanes[0];                                                                                              \
    }                                                                                                                 \
                                                                                                                      \
    void es_##s##gemm_batch(int layout, const int *transa, const int *transb, const int *m, const int *n,             \
                            const int *k, const T *alpha, const T **a, const int *lda, const T **b, const int *ldb,   \
                            const T *beta, T **c, const int *ldc, int groups, const int *sizes) {                     \
        int rows = layout == BY_ROWS;                                                                                 \
        for (int g = 0; g < groups; ++g)                                                                              \
            for (int i = 0; i < sizes[g]; ++i, ++a, ++b, ++c)                                                         \
                es_product_##bits(m[g], n[g], k[g], alpha[g], s##_matrix(*a, lda[g], (transa[g] != PLAIN) ^ rows),    \
                                  s##_matrix(*b, ldb[g], (transb[g] != PLAIN) ^ rows), beta[g],                       \
                                  s##_matrix(*c, ldc[g], rows));                                                      \
    }

BLAS(float, s, f32, fmaf)
BLAS(double, d, f64, fma)
