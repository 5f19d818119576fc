#define _GNU_SOURCE
#include "functions.h"

#include <math.h>

#if defined(__x86_64__) && defined(__GLIBC__)
__asm__(".symver hypot,hypot@GLIBC_2.2.5"); /* glibc 2.35 has a new one with the same bits: wheels need not be so new */
#endif

#define VECTOR(name, mkl)                                                         \
    void es_vector_##name##f(int count, const float *x, float *y, int64_t mode) { \
        (void)mode;                                                               \
        for (int i = 0; i < count; ++i) y[i] = (float)name(x[i]);                 \
    }                                                                             \
    void es_vector_##name(int count, const double *x, double *y, int64_t mode) {  \
        (void)mode;                                                               \
        for (int i = 0; i < count; ++i) y[i] = name(x[i]);                        \
    }
ES_VECTOR(VECTOR)

#if defined(__x86_64__)
#include <immintrin.h>

void es_vector_sqrtf(int count, const float *x, float *y, int64_t mode) {
    (void)mode;
    int i = 0;
    for (; i + 4 <= count; i += 4) _mm_storeu_ps(y + i, _mm_sqrt_ps(_mm_loadu_ps(x + i)));
    for (; i < count; ++i) y[i] = _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x[i])));
}

void es_vector_sqrt(int count, const double *x, double *y, int64_t mode) {
    (void)mode;
    int i = 0;
    for (; i + 2 <= count; i += 2) _mm_storeu_pd(y + i, _mm_sqrt_pd(_mm_loadu_pd(x + i)));
    if (i < count) y[i] = _mm_cvtsd_f64(_mm_sqrt_sd(_mm_setzero_pd(), _mm_set_sd(x[i])));
}
#else
VECTOR(sqrt, Sqrt)
#endif

void es_vector_log(int count, const double *x, double *y, int64_t mode) {
    (void)mode;
    for (int i = 0; i < count; ++i) y[i] = log(x[i]);
}

#define UNARY(name) \
    float es_##name##f(float x) { return (float)name(x); }
#define BINARY(name) \
    float es_##name##f(float x, float y) { return (float)name(x, y); }
ES_UNARY(UNARY)
ES_BINARY(BINARY)

void es_sincosf(float x, float *sine, float *cosine) {
    *sine = (float)sin(x);
    *cosine = (float)cos(x);
}
