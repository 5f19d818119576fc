#define _GNU_SOURCE
#include "product.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>

#define INLINE inline __attribute__((always_inline))

/* DEPTH is how many terms are summed before they are added to the rest: part of the arithmetic. The others are only how
 * a product is cut for the caches: a panel of b stays in the first, a block of a (or a narrow one of b) in the second.
 * GROUP columns are copied at once: the panels that they go to lie where the first cache has only few places. */
enum { DEPTH = 256, BLOCK_ROWS = 144, BLOCK_COLUMNS = 1024, NARROW_COLUMNS = 256, GROUP = 128 };

#define AVX2 __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx512f,avx2,fma")))

/* into[p][i] = from[i][p] for 8 x 8 floats. */
static AVX2 INLINE void turn_f32(const float *from, ptrdiff_t stride, float *into, ptrdiff_t width) {
    __m256 r[8], s[8];
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(from + i * stride)),
                                    _mm_loadu_ps(from + (i + 4) * stride), 1);
        r[i + 4] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(from + i * stride + 4)),
                                        _mm_loadu_ps(from + (i + 4) * stride + 4), 1);
    }
    for (int i = 0; i < 8; i += 4) {
        s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
        s[i + 2] = _mm256_unpacklo_ps(r[i + 2], r[i + 3]);
        s[i + 3] = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
        _mm256_storeu_ps(into + i * width, _mm256_shuffle_ps(s[i], s[i + 2], 0x44));
        _mm256_storeu_ps(into + (i + 1) * width, _mm256_shuffle_ps(s[i], s[i + 2], 0xee));
        _mm256_storeu_ps(into + (i + 2) * width, _mm256_shuffle_ps(s[i + 1], s[i + 3], 0x44));
        _mm256_storeu_ps(into + (i + 3) * width, _mm256_shuffle_ps(s[i + 1], s[i + 3], 0xee));
    }
}

/* The same for 4 x 4 doubles. */
static AVX2 INLINE void turn_f64(const double *from, ptrdiff_t stride, double *into, ptrdiff_t width) {
    for (int i = 0; i < 4; i += 2) {
        __m256d even = _mm256_insertf128_pd(_mm256_castpd128_pd256(_mm_loadu_pd(from + i)),
                                            _mm_loadu_pd(from + 2 * stride + i), 1);
        __m256d odd = _mm256_insertf128_pd(_mm256_castpd128_pd256(_mm_loadu_pd(from + stride + i)),
                                           _mm_loadu_pd(from + 3 * stride + i), 1);
        _mm256_storeu_pd(into + i * width, _mm256_unpacklo_pd(even, odd));
        _mm256_storeu_pd(into + (i + 1) * width, _mm256_unpackhi_pd(even, odd));
    }
}

#define FOUR(turn, from, stride, into, width, half)                           \
    do {                                                                      \
        for (int i_ = 0; i_ < 2; ++i_)                                        \
            for (int p_ = 0; p_ < 2; ++p_)                                    \
                turn((from) + i_ * (half) * (stride) + p_ * (half), (stride), \
                     (into) + p_ * (half) * (width) + i_ * (half), (width));  \
    } while (0)

#define ROWS 6
#define TARGET AVX2
#define T float
#define V __m256
#define LANES 8
#define NAME(x) f32_256_##x
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define SPREAD(x) _mm256_set1_ps(x)
#define LOAD(p) _mm256_loadu_ps(p)
#define STORE(p, v) _mm256_storeu_ps(p, v)
#define TURN(from, stride, into, width) turn_f32(from, stride, into, width)
#include "product_kernel.h"

#define ROWS 6
#define TARGET AVX2
#define T double
#define V __m256d
#define LANES 4
#define NAME(x) f64_256_##x
#define FMA(a, b, c) _mm256_fmadd_pd(a, b, c)
#define SPREAD(x) _mm256_set1_pd(x)
#define LOAD(p) _mm256_loadu_pd(p)
#define STORE(p, v) _mm256_storeu_pd(p, v)
#define TURN(from, stride, into, width) turn_f64(from, stride, into, width)
#include "product_kernel.h"

#define ROWS 12
#define TARGET AVX512
#define T float
#define V __m512
#define LANES 16
#define NAME(x) f32_512_##x
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define SPREAD(x) _mm512_set1_ps(x)
#define LOAD(p) _mm512_loadu_ps(p)
#define STORE(p, v) _mm512_storeu_ps(p, v)
#define TURN(from, stride, into, width) FOUR(turn_f32, from, stride, into, width, 8)
#include "product_kernel.h"

#define ROWS 12
#define TARGET AVX512
#define T double
#define V __m512d
#define LANES 8
#define NAME(x) f64_512_##x
#define FMA(a, b, c) _mm512_fmadd_pd(a, b, c)
#define SPREAD(x) _mm512_set1_pd(x)
#define LOAD(p) _mm512_loadu_pd(p)
#define STORE(p, v) _mm512_storeu_pd(p, v)
#define TURN(from, stride, into, width) FOUR(turn_f64, from, stride, into, width, 4)
#include "product_kernel.h"

static int limit = 512;

int es_product_bits(void) {
    if (limit < 256 || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    return limit >= 512 && __builtin_cpu_supports("avx512f") ? 512 : 256;
}

void es_limit_product_bits(int bits) { limit = bits; }

/* If all of a large b would have to be transposed for the sake of few rows, the product is computed from the other side. */
enum { FEW_ROWS = 64, MANY_ELEMENTS = 1 << 19, PIECE = 512 * FEW_ROWS };

/* Room for a block of b, a block of a, and a piece of a transposed product. One for each thread, until it ends. */
enum { SPACE = DEPTH * (BLOCK_COLUMNS + BLOCK_ROWS) + PIECE };

static pthread_key_t key;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static __thread void *space;

static void make_key(void) {
    if (pthread_key_create(&key, free)) abort();
}

static void *room(void) {
    if (!space) {
        pthread_once(&once, make_key);
        if (posix_memalign(&space, 64, SPACE * sizeof(double)) || pthread_setspecific(key, space)) abort();
    }
    return space;
}

static es_matrix transposed(es_matrix x) { return (es_matrix){x.at, x.column, x.row}; }

/* Whether this many rows are worth making the columns of the transposed product: few vectors would be half empty. */
static int fills_vectors(size_t rows) {
    size_t whole = rows <= 8 ? 8 : (rows + 15) / 16 * 16;
    return rows <= FEW_ROWS && whole - rows <= rows / 8;
}

#define T float
#define NAME(x) f32_##x
#include "product_type.h"

#define T double
#define NAME(x) f64_##x
#include "product_type.h"

void es_product_f32(size_t m, size_t n, size_t k, float alpha, es_matrix a, es_matrix b, float beta, es_matrix c) {
    f32_product(m, n, k, alpha, a, b, beta, c);
}

void es_product_f64(size_t m, size_t n, size_t k, double alpha, es_matrix a, es_matrix b, double beta, es_matrix c) {
    f64_product(m, n, k, alpha, a, b, beta, c);
}

#else
int es_product_bits(void) { return 0; }

void es_limit_product_bits(int bits) { (void)bits; }

/* Never called where there are no bits. */
#define PRODUCT(T, name)                                                                                           \
    void es_product_##name(size_t m, size_t n, size_t k, T alpha, es_matrix a, es_matrix b, T beta, es_matrix c) { \
        (void)m, (void)n, (void)k, (void)alpha, (void)a, (void)b, (void)beta, (void)c;                             \
        abort();                                                                                                   \
    }
PRODUCT(float, f32)
PRODUCT(double, f64)
#endif
