#include "blas.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "product.h"

enum { BY_ROWS = 101, PLAIN = 111 }; /* cblas */

#if defined(__x86_64__)
#include <immintrin.h>
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

void es_spotrf(const char *uplo, const int *n, float *a, const int *lda, int *info) {
    const int one = 1, size = *n;
    ptrdiff_t row = (*uplo | 32) == 'l' ? 1 : *lda, column = (*uplo | 32) == 'l' ? *lda : 1;
    double *l = malloc(((size_t)size * size + 1) * sizeof *l);
    if (!l) abort();
    *info = 0;
    for (int i = 0; i < size && !*info; ++i) {
        double *mine = l + (ptrdiff_t)i * size;
        for (int j = 0; j <= i; ++j) {
            const double *theirs = l + (ptrdiff_t)j * size;
            double rest = a[i * row + j * column] - es_ddot(&j, mine, &one, theirs, &one);
            mine[j] = j < i ? rest / theirs[j] : sqrt(rest);
            if (j == i && !(rest > 0)) *info = i + 1;
        }
        for (int j = 0; j <= i; ++j) a[i * row + j * column] = (float)mine[j];
    }
    free(l);
}

#if defined(__x86_64__)
static inline float widened_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

static inline __attribute__((target("f16c"))) float widened_f16(uint16_t x) { return _cvtsh_ss(x); }

#define HALVES(half, TARGET)                                                                                          \
    /* The columns, one after another. */                                                                             \
    TARGET static void half##_widen(const uint16_t *from, int rows, int columns, int ld, float *into) {               \
        for (int j = 0; j < columns; ++j)                                                                             \
            for (int i = 0; i < rows; ++i) into[(size_t)j * rows + i] = widened_##half(from[(size_t)j * ld + i]);     \
    }                                                                                                                 \
                                                                                                                      \
    void es_gemm_##half(int layout, int transa, int transb, int m, int n, int k, float alpha, const uint16_t *a,      \
                        int lda, const uint16_t *b, int ldb, float beta, float *c, int ldc) {                         \
        int rows = layout == BY_ROWS, turn_a = (transa != PLAIN) ^ rows, turn_b = (transb != PLAIN) ^ rows;           \
        float *left = malloc(((size_t)m * k + (size_t)k * n + 1) * sizeof *left), *right = left + (size_t)m * k;      \
        if (!left) abort();                                                                                           \
        half##_widen(a, turn_a ? k : m, turn_a ? m : k, lda, left);                                                   \
        half##_widen(b, turn_b ? n : k, turn_b ? k : n, ldb, right);                                                  \
        es_product_f32(m, n, k, alpha, s_matrix(left, turn_a ? k : m, turn_a), s_matrix(right, turn_b ? n : k, turn_b), \
                       beta, s_matrix(c, ldc, rows));                                                                 \
        free(left);                                                                                                   \
    }

HALVES(bf16, FUSED)
HALVES(f16, __attribute__((target("avx2,f16c"))))
#endif
