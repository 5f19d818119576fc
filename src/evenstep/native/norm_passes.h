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

/* A mean rounded to A, and the rest, so that x - mean loses nothing if the mean is large. */
static INLINE A NAME(head)(double value, double *rest) {
    A head = (A)value;
    *rest = value - head;
    return head;
}

/* y = (x - m) * a + b, with what A cannot hold of the mean in b. */
static INLINE void NAME(forward_of)(const es_norm *n, size_t c, A *m, A *a, A *b) {
    double rest, scale = n->invstd[c] * element(n->weight, c, 1);
    *m = NAME(head)(n->mean[c], &rest);
    *a = (A)scale;
    *b = (A)(element(n->bias, c, 0) - rest * scale);
}

/* dx = (dy - b - (x - m) * k) * a */
static INLINE void NAME(backward_of)(const es_norm *n, size_t c, double share, A *m, A *a, A *b, A *k) {
    double rest, slope = n->invstd[c] * n->invstd[c] * n->sum_dy_xmu[c] * share;
    *m = NAME(head)(n->mean[c], &rest);
    *a = (A)(n->invstd[c] * element(n->weight, c, 1));
    *b = (A)(n->sum_dy[c] * share - rest * slope);
    *k = (A)slope;
}

/* Some runs of one channel that together fit the L1 cache. Element i of a run goes to lane i % LANES. */
static INLINE void NAME(block_moments)(const T *x, size_t runs, size_t stride, size_t length, moments *into) {
    double count = (double)runs * (double)length;
    A centre = (A)into->mean, sum[LANES] = {0}, square[LANES] = {0};
    if (into->count == 0) {
        A pivot = READ(x[0]);
        for (size_t r = 0; r < runs; ++r) {
            const T *run = x + r * stride;
            size_t i = 0;
            for (; i + LANES <= length; i += LANES)
                for (int j = 0; j < LANES; ++j) sum[j] += READ(run[i + j]) - pivot;
            for (int j = 0; i < length; ++i, ++j) sum[j] += READ(run[i]) - pivot;
        }
        centre = pivot + (A)(NAME(total)(sum) / count);
        memset(sum, 0, sizeof sum);
    }
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

FAST static void NAME(planes_statistics)(const es_norm *n, size_t first, size_t end, void *out) {
    double *mean = (double *)out + 1, *m2 = mean + n->channels;
    size_t stride = n->channels * n->inner, length = n->inner < BLOCK ? n->inner : BLOCK;
    size_t together = BLOCK / length; /* short runs of several samples make one block */
    for (size_t c = first; c < end; ++c) {
        moments all = {0, 0, 0};
        for (size_t sample = 0; sample < n->outer; sample += together) {
            size_t runs = n->outer - sample < together ? n->outer - sample : together;
            const T *x = (const T *)n->x + sample * stride + c * n->inner;
            for (size_t i = 0; i < n->inner; i += length) {
                size_t here = n->inner - i < length ? n->inner - i : length;
                NAME(block_moments)(x + i, runs, stride, here, &all);
            }
        }
        mean[c] = all.mean;
        m2[c] = all.m2;
    }
}

FAST static void NAME(planes_apply)(const es_norm *n, size_t first, size_t end, void *out) {
    for (size_t run = first; run < end; ++run) {
        const T *x = (const T *)n->x + run * n->inner;
        T *y = (T *)out + run * n->inner;
        A m, a, b;
        NAME(forward_of)(n, run % n->channels, &m, &a, &b);
        for (size_t i = 0; i < n->inner; ++i) y[i] = WRITE((READ(x[i]) - m) * a + b);
    }
}

FAST static void NAME(planes_reduce)(const es_norm *n, size_t first, size_t end, void *out) {
    double *sum_dy = out, *sum_dy_xmu = sum_dy + n->channels;
    for (size_t c = first; c < end; ++c) {
        double plain = 0, weighted = 0, rest;
        A m = NAME(head)(n->mean[c], &rest);
        A sum[LANES] = {0}, product[LANES] = {0};
        size_t pending = 0;
        for (size_t sample = 0; sample < n->outer; ++sample) {
            size_t at = (sample * n->channels + c) * n->inner, i = 0;
            const T *dy = (const T *)n->dy + at, *x = (const T *)n->x + at;
            for (; i + LANES <= n->inner; i += LANES) {
                for (int j = 0; j < LANES; ++j) {
                    sum[j] += READ(dy[i + j]);
                    product[j] += READ(dy[i + j]) * (READ(x[i + j]) - m);
                }
                if ((pending += LANES) >= BLOCK) {
                    plain += NAME(total)(sum);
                    weighted += NAME(total)(product);
                    memset(sum, 0, sizeof sum);
                    memset(product, 0, sizeof product);
                    pending = 0;
                }
            }
            for (int j = 0; i < n->inner; ++i, ++j) {
                sum[j] += READ(dy[i]);
                product[j] += READ(dy[i]) * (READ(x[i]) - m);
            }
            pending += LANES;
        }
        sum_dy[c] = plain + NAME(total)(sum);
        sum_dy_xmu[c] = weighted + NAME(total)(product) - rest * sum_dy[c];
    }
}

FAST static void NAME(planes_backward)(const es_norm *n, size_t first, size_t end, void *out) {
    double share = 1 / n->count;
    for (size_t run = first; run < end; ++run) {
        const T *dy = (const T *)n->dy + run * n->inner, *x = (const T *)n->x + run * n->inner;
        T *dx = (T *)out + run * n->inner;
        A m, a, b, k;
        NAME(backward_of)(n, run % n->channels, share, &m, &a, &b, &k);
        for (size_t i = 0; i < n->inner; ++i) dx[i] = WRITE((READ(dy[i]) - b - (READ(x[i]) - m) * k) * a);
    }
}

/* The same for rows: the channels lie side by side, so they are the lanes. They go in tiles whose vectors stay in L1,
 * and four rows at a time, so that a sum is fetched and put back once for all of them. */

static INLINE void NAME(rows_centre)(const T *x, size_t rows, size_t stride, size_t width, A *centre) {
    A sum[TILE];
    size_t r, c;
    for (c = 0; c < width; ++c) sum[c] = 0;
    for (r = 0; r + 4 <= rows; r += 4) {
        const T *p = x + r * stride, *q = p + stride, *s = q + stride, *t = s + stride;
        for (c = 0; c < width; ++c)
            sum[c] += ((READ(p[c]) - READ(x[c])) + (READ(q[c]) - READ(x[c]))) +
                      ((READ(s[c]) - READ(x[c])) + (READ(t[c]) - READ(x[c])));
    }
    for (; r < rows; ++r)
        for (c = 0; c < width; ++c) sum[c] += READ(x[r * stride + c]) - READ(x[c]);
    for (c = 0; c < width; ++c) centre[c] = READ(x[c]) + sum[c] / (A)rows;
}

FAST static void NAME(rows_statistics)(const es_norm *n, size_t first, size_t end, void *out) {
    double *mean = (double *)out + 1, *m2 = mean + n->channels;
    size_t stride = n->channels;
    *(double *)out = (double)(end - first);
    for (size_t tile = 0; tile < n->channels; tile += TILE) {
        size_t c, width = n->channels - tile < TILE ? n->channels - tile : TILE;
        double all_mean[TILE], all_m2[TILE];
        A sum[TILE], square[TILE], centre[TILE];
        for (c = 0; c < width; ++c) all_mean[c] = all_m2[c] = 0;
        for (size_t start = first; start < end; start += ROWS) {
            size_t r, rows = end - start < ROWS ? end - start : ROWS;
            const T *x = (const T *)n->x + start * stride + tile;
            if (start == first)
                NAME(rows_centre)(x, rows, stride, width, centre);
            else
                for (c = 0; c < width; ++c) centre[c] = (A)all_mean[c];
            for (c = 0; c < width; ++c) sum[c] = square[c] = 0;
            for (r = 0; r + 4 <= rows; r += 4) {
                const T *p = x + r * stride, *q = p + stride, *s = q + stride, *t = s + stride;
                for (c = 0; c < width; ++c) {
                    A d = READ(p[c]) - centre[c], e = READ(q[c]) - centre[c];
                    A f = READ(s[c]) - centre[c], g = READ(t[c]) - centre[c];
                    sum[c] += (d + e) + (f + g);
                    square[c] += (d * d + e * e) + (f * f + g * g);
                }
            }
            for (; r < rows; ++r)
                for (c = 0; c < width; ++c) {
                    A d = READ(x[r * stride + c]) - centre[c];
                    sum[c] += d;
                    square[c] += d * d;
                }
            double before = (double)(start - first), count = (double)rows, share = count / (before + count);
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

FAST static void NAME(rows_apply)(const es_norm *n, size_t first, size_t end, void *out) {
    for (size_t tile = 0; tile < n->channels; tile += TILE) {
        size_t c, width = n->channels - tile < TILE ? n->channels - tile : TILE;
        A m[TILE], a[TILE], b[TILE];
        for (c = 0; c < width; ++c) NAME(forward_of)(n, tile + c, m + c, a + c, b + c);
        for (size_t r = first; r < end; ++r) {
            const T *x = (const T *)n->x + r * n->channels + tile;
            T *y = (T *)out + r * n->channels + tile;
            for (c = 0; c < width; ++c) y[c] = WRITE((READ(x[c]) - m[c]) * a[c] + b[c]);
        }
    }
}

FAST static void NAME(rows_reduce)(const es_norm *n, size_t first, size_t end, void *out) {
    double *sum_dy = out, *sum_dy_xmu = sum_dy + n->channels;
    size_t stride = n->channels;
    for (size_t tile = 0; tile < n->channels; tile += TILE) {
        size_t c, width = n->channels - tile < TILE ? n->channels - tile : TILE;
        double plain[TILE], weighted[TILE], rest[TILE];
        A m[TILE], sum[TILE], product[TILE];
        for (c = 0; c < width; ++c) {
            m[c] = NAME(head)(n->mean[tile + c], &rest[c]);
            plain[c] = weighted[c] = 0;
            sum[c] = product[c] = 0;
        }
        for (size_t start = first; start < end; start += ROWS) {
            size_t r, rows = end - start < ROWS ? end - start : ROWS;
            const T *dy = (const T *)n->dy + start * stride + tile, *x = (const T *)n->x + start * stride + tile;
            for (r = 0; r + 4 <= rows; r += 4) {
                const T *p = dy + r * stride, *q = p + stride, *s = q + stride, *t = s + stride;
                const T *e = x + r * stride, *f = e + stride, *g = f + stride, *h = g + stride;
                for (c = 0; c < width; ++c) {
                    sum[c] += (READ(p[c]) + READ(q[c])) + (READ(s[c]) + READ(t[c]));
                    product[c] += (READ(p[c]) * (READ(e[c]) - m[c]) + READ(q[c]) * (READ(f[c]) - m[c])) +
                                  (READ(s[c]) * (READ(g[c]) - m[c]) + READ(t[c]) * (READ(h[c]) - m[c]));
                }
            }
            for (; r < rows; ++r)
                for (c = 0; c < width; ++c) {
                    sum[c] += READ(dy[r * stride + c]);
                    product[c] += READ(dy[r * stride + c]) * (READ(x[r * stride + c]) - m[c]);
                }
            for (c = 0; c < width; ++c) {
                plain[c] += sum[c];
                weighted[c] += product[c];
                sum[c] = product[c] = 0;
            }
        }
        for (c = 0; c < width; ++c) {
            sum_dy[tile + c] = plain[c];
            sum_dy_xmu[tile + c] = weighted[c] - rest[c] * plain[c];
        }
    }
}

FAST static void NAME(rows_backward)(const es_norm *n, size_t first, size_t end, void *out) {
    double share = 1 / n->count;
    for (size_t tile = 0; tile < n->channels; tile += TILE) {
        size_t c, width = n->channels - tile < TILE ? n->channels - tile : TILE;
        A m[TILE], a[TILE], b[TILE], k[TILE];
        for (c = 0; c < width; ++c) NAME(backward_of)(n, tile + c, share, m + c, a + c, b + c, k + c);
        for (size_t r = first; r < end; ++r) {
            size_t at = r * n->channels + tile;
            const T *dy = (const T *)n->dy + at, *x = (const T *)n->x + at;
            T *dx = (T *)out + at;
            for (c = 0; c < width; ++c) dx[c] = WRITE((READ(dy[c]) - b[c] - (READ(x[c]) - m[c]) * k[c]) * a[c]);
        }
    }
}

#undef T
#undef A
#undef LANES
#undef READ
#undef WRITE
#undef NAME
