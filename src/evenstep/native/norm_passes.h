/* The four passes for one element type. Included by norm.c once for each, with
 *   T     the type of an element,           A       the type of the arithmetic,
 *   LANES how many sums run side by side,   READ(v) an element as A,    WRITE(v) an A as an element,
 *   NAME(x) the name of a function for this type.
 */

static INLINE double NAME(total)(const A *lanes) {
    double sums[8] = {0};
    for (int i = 0; i < LANES; i += 8)
        for (int j = 0; j < 8; ++j) sums[j] += lanes[i + j];
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

/* A mean as what A can hold of it and the rest, so that x - mean loses nothing where the mean is large. */
static INLINE A NAME(head)(double value, double *rest) {
    A head = (A)value;
    *rest = value - head;
    return head;
}

/* Some runs of one channel that together fit the L1 cache. Element i of a run goes to lane i % LANES. */
static INLINE void NAME(block_moments)(const T *x, size_t runs, size_t stride, size_t length, moments *into) {
    double count = (double)runs * (double)length;
    A pivot = READ(x[0]), sum[LANES] = {0}, square[LANES] = {0};
    for (size_t r = 0; r < runs; ++r) {
        const T *run = x + r * stride;
        size_t i = 0;
        for (; i + LANES <= length; i += LANES)
            for (int j = 0; j < LANES; ++j) sum[j] += READ(run[i + j]) - pivot;
        for (int j = 0; i < length; ++i, ++j) sum[j] += READ(run[i]) - pivot;
    }
    A centre = pivot + (A)(NAME(total)(sum) / count); /* the mean but for a rounding, which the second pass measures */
    memset(sum, 0, sizeof sum);
    for (size_t r = 0; r < runs; ++r) {
        const T *run = x + r * stride;
        size_t i = 0;
        for (; i + LANES <= length; i += LANES)
            for (int j = 0; j < LANES; ++j) {
                A d = READ(run[i + j]) - centre;
                sum[j] += d;
                square[j] += d * d;
            }
        for (int j = 0; i < length; ++i, ++j) {
            A d = READ(run[i]) - centre;
            sum[j] += d;
            square[j] += d * d;
        }
    }
    double off = NAME(total)(sum) / count;
    merge(into, count, centre + off, NAME(total)(square) - off * off * count);
}

FAST static void NAME(planes_statistics)(es_shape s, const T *x, double *mean, double *m2) {
    size_t length = s.inner < BLOCK ? s.inner : BLOCK;
    size_t together = BLOCK / length; /* short runs of several samples make one block */
    for (size_t c = 0; c < s.channels; ++c) {
        moments all = {0, 0, 0};
        for (size_t n = 0; n < s.outer; n += together) {
            size_t runs = s.outer - n < together ? s.outer - n : together;
            const T *first = x + n * s.stride + c * s.inner;
            for (size_t i = 0; i < s.inner; i += length) {
                size_t here = s.inner - i < length ? s.inner - i : length;
                NAME(block_moments)(first + i, runs, s.stride, here, &all);
            }
        }
        mean[c] = all.mean;
        m2[c] = all.m2;
    }
}

FAST static void NAME(planes_apply)(es_shape s, const T *x, const double *mean, const double *scale, const double *bias,
                                    T *y) {
    for (size_t n = 0; n < s.outer; ++n)
        for (size_t c = 0; c < s.channels; ++c) {
            const T *v = x + n * s.stride + c * s.inner;
            T *out = y + n * s.stride + c * s.inner;
            double rest;
            A m = NAME(head)(mean[c], &rest), a = (A)scale[c], b = (A)(bias[c] - rest * scale[c]);
            for (size_t i = 0; i < s.inner; ++i) out[i] = WRITE((READ(v[i]) - m) * a + b);
        }
}

FAST static void NAME(planes_reduce)(es_shape s, const T *dy, const T *x, const double *mean, double *sum_dy,
                                     double *sum_dy_xmu) {
    for (size_t c = 0; c < s.channels; ++c) {
        double plain = 0, weighted = 0, rest;
        A m = NAME(head)(mean[c], &rest);
        A sum[LANES] = {0}, product[LANES] = {0};
        size_t pending = 0;
        for (size_t n = 0; n < s.outer; ++n) {
            const T *g = dy + n * s.stride + c * s.inner, *v = x + n * s.stride + c * s.inner;
            size_t i = 0;
            for (; i + LANES <= s.inner; i += LANES) {
                for (int j = 0; j < LANES; ++j) {
                    sum[j] += READ(g[i + j]);
                    product[j] += READ(g[i + j]) * (READ(v[i + j]) - m);
                }
                if ((pending += LANES) >= BLOCK) {
                    plain += NAME(total)(sum);
                    weighted += NAME(total)(product);
                    memset(sum, 0, sizeof sum);
                    memset(product, 0, sizeof product);
                    pending = 0;
                }
            }
            for (int j = 0; i < s.inner; ++i, ++j) {
                sum[j] += READ(g[i]);
                product[j] += READ(g[i]) * (READ(v[i]) - m);
            }
            pending += LANES;
        }
        sum_dy[c] = plain + NAME(total)(sum);
        sum_dy_xmu[c] = weighted + NAME(total)(product) - rest * sum_dy[c];
    }
}

FAST static void NAME(planes_backward)(es_shape s, const T *dy, const T *x, const double *mean, const double *shift,
                                       const double *slope, const double *scale, T *dx) {
    for (size_t n = 0; n < s.outer; ++n)
        for (size_t c = 0; c < s.channels; ++c) {
            size_t at = n * s.stride + c * s.inner;
            double rest;
            A m = NAME(head)(mean[c], &rest), k = (A)slope[c], b = (A)(shift[c] - rest * slope[c]), a = (A)scale[c];
            for (size_t i = 0; i < s.inner; ++i)
                dx[at + i] = WRITE((READ(dy[at + i]) - b - (READ(x[at + i]) - m) * k) * a);
        }
}

/* The same for rows: the channels lie side by side, so they are the lanes. They go in tiles whose vectors stay in L1. */

FAST static void NAME(rows_statistics)(es_shape s, const T *x, double *mean, double *m2) {
    for (size_t tile = 0; tile < s.channels; tile += TILE) {
        size_t c, width = s.channels - tile < TILE ? s.channels - tile : TILE;
        double all_mean[TILE] = {0}, all_m2[TILE] = {0};
        for (size_t first = 0; first < s.outer; first += ROWS) {
            size_t rows = s.outer - first < ROWS ? s.outer - first : ROWS;
            const T *block = x + first * s.stride + tile;
            A sum[TILE] = {0}, square[TILE] = {0}, centre[TILE];
            for (size_t r = 0; r < rows; ++r)
                for (c = 0; c < width; ++c) sum[c] += READ(block[r * s.stride + c]) - READ(block[c]);
            for (c = 0; c < width; ++c) {
                centre[c] = READ(block[c]) + sum[c] / (A)rows;
                sum[c] = 0;
            }
            for (size_t r = 0; r < rows; ++r)
                for (c = 0; c < width; ++c) {
                    A d = READ(block[r * s.stride + c]) - centre[c];
                    sum[c] += d;
                    square[c] += d * d;
                }
            double before = (double)first, count = (double)rows, share = count / (before + count);
            for (c = 0; c < width; ++c) {
                double off = sum[c] / count, delta = centre[c] + off - all_mean[c];
                all_m2[c] += square[c] - off * off * count + delta * delta * (before * share);
                all_mean[c] += delta * share;
            }
        }
        memcpy(mean + tile, all_mean, width * sizeof(double));
        memcpy(m2 + tile, all_m2, width * sizeof(double));
    }
}

FAST static void NAME(rows_apply)(es_shape s, const T *x, const double *mean, const double *scale, const double *bias,
                                  T *y) {
    for (size_t tile = 0; tile < s.channels; tile += TILE) {
        size_t c, width = s.channels - tile < TILE ? s.channels - tile : TILE;
        A m[TILE], a[TILE], b[TILE];
        for (c = 0; c < width; ++c) {
            double rest;
            m[c] = NAME(head)(mean[tile + c], &rest);
            a[c] = (A)scale[tile + c];
            b[c] = (A)(bias[tile + c] - rest * scale[tile + c]);
        }
        for (size_t r = 0; r < s.outer; ++r) {
            const T *v = x + r * s.stride + tile;
            T *out = y + r * s.stride + tile;
            for (c = 0; c < width; ++c) out[c] = WRITE((READ(v[c]) - m[c]) * a[c] + b[c]);
        }
    }
}

FAST static void NAME(rows_reduce)(es_shape s, const T *dy, const T *x, const double *mean, double *sum_dy,
                                   double *sum_dy_xmu) {
    for (size_t tile = 0; tile < s.channels; tile += TILE) {
        size_t c, width = s.channels - tile < TILE ? s.channels - tile : TILE;
        double plain[TILE] = {0}, weighted[TILE] = {0}, rest[TILE];
        A m[TILE];
        for (c = 0; c < width; ++c) m[c] = NAME(head)(mean[tile + c], &rest[c]);
        for (size_t first = 0; first < s.outer; first += ROWS) {
            size_t end = s.outer - first < ROWS ? s.outer : first + ROWS;
            A sum[TILE] = {0}, product[TILE] = {0};
            for (size_t r = first; r < end; ++r) {
                const T *g = dy + r * s.stride + tile, *v = x + r * s.stride + tile;
                for (c = 0; c < width; ++c) {
                    sum[c] += READ(g[c]);
                    product[c] += READ(g[c]) * (READ(v[c]) - m[c]);
                }
            }
            for (c = 0; c < width; ++c) {
                plain[c] += sum[c];
                weighted[c] += product[c];
            }
        }
        for (c = 0; c < width; ++c) {
            sum_dy[tile + c] = plain[c];
            sum_dy_xmu[tile + c] = weighted[c] - rest[c] * plain[c];
        }
    }
}

FAST static void NAME(rows_backward)(es_shape s, const T *dy, const T *x, const double *mean, const double *shift,
                                     const double *slope, const double *scale, T *dx) {
    for (size_t tile = 0; tile < s.channels; tile += TILE) {
        size_t c, width = s.channels - tile < TILE ? s.channels - tile : TILE;
        A m[TILE], b[TILE], k[TILE], a[TILE];
        for (c = 0; c < width; ++c) {
            double rest;
            m[c] = NAME(head)(mean[tile + c], &rest);
            k[c] = (A)slope[tile + c];
            b[c] = (A)(shift[tile + c] - rest * slope[tile + c]);
            a[c] = (A)scale[tile + c];
        }
        for (size_t r = 0; r < s.outer; ++r) {
            size_t at = r * s.stride + tile;
            for (c = 0; c < width; ++c)
                dx[at + c] = WRITE((READ(dy[at + c]) - b[c] - (READ(x[at + c]) - m[c]) * k[c]) * a[c]);
        }
    }
}

#undef T
#undef A
#undef LANES
#undef READ
#undef WRITE
#undef NAME
