/* Functions of numbers that do not depend on the processor or on the system's mathematical library.
 *
 * Roots are correctly rounded. A function of a float is the one of a double, rounded: libraries differ in the last bits
 * of a float's tangent, but hardly ever by so much in a double's that it shows in a float.
 */
#ifndef EVENSTEP_FUNCTIONS_H
#define EVENSTEP_FUNCTIONS_H

#include <stdint.h>

/* As MKL's functions of vectors, those whose code rests on the processor's approximate reciprocals and roots (of floats,
 * MKL's logarithm does not); the mode says nothing that would change the result. */
#define ES_VECTOR(F) F(acos, Acos) F(asin, Asin) F(atan, Atan) F(log10, Log10) F(log2, Log2) F(tan, Tan)
#define ES_DECLARE(name, mkl)                                                    \
    void es_vector_##name##f(int count, const float *x, float *y, int64_t mode); \
    void es_vector_##name(int count, const double *x, double *y, int64_t mode);
ES_VECTOR(ES_DECLARE)
ES_DECLARE(sqrt, Sqrt)
#undef ES_DECLARE
void es_vector_log(int count, const double *x, double *y, int64_t mode);

/* As in math.h. */
#define ES_UNARY(F) \
    F(acos) F(acosh) F(asin) F(asinh) F(atan) F(atanh) F(cos) F(cosh) F(erf) F(erfc) F(exp) F(exp2) F(expm1) \
    F(lgamma) F(log) F(log10) F(log1p) F(log2) F(sin) F(sinh) F(tan) F(tanh)
#define ES_BINARY(F) F(atan2) F(hypot) F(pow)

#define ES_DECLARE(name) float es_##name##f(float x);
ES_UNARY(ES_DECLARE)
#undef ES_DECLARE
#define ES_DECLARE(name) float es_##name##f(float x, float y);
ES_BINARY(ES_DECLARE)
#undef ES_DECLARE
void es_sincosf(float x, float *sine, float *cosine);

#endif
