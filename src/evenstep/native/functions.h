/* Functions of numbers that do not depend on the processor or on the system's mathematical library.
 *
 * Roots are correctly rounded. A function of a float is the one of a double, rounded: libraries differ in the last bits
 * of a float's tangent, but hardly ever by so much in a double's that it shows in a float.
 */
#ifndef EVENSTEP_FUNCTIONS_H
#define EVENSTEP_FUNCTIONS_H

#include <stdint.h>

/* As MKL's functions of vectors; the mode says nothing that would change the result. */
void es_vector_sqrtf(int count, const float *x, float *y, int64_t mode);
void es_vector_sqrt(int count, const double *x, double *y, int64_t mode);
void es_vector_atanf(int count, const float *x, float *y, int64_t mode);
void es_vector_atan(int count, const double *x, double *y, int64_t mode);

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
