/* The product for one type: which kernel computes it, and from which side. Included by product.c once for each, with
 *   T  the type of an element,   NAME(x)  the name of a function for this type.
 */

/* c = alpha * a b + (keep ? c : 0), where c has rows that are contiguous. */
static void NAME(rows)(size_t m, size_t n, size_t k, T alpha, es_matrix a, es_matrix b, T *c, ptrdiff_t stride,
                       int keep) {
    int wide = n > 8 && es_product_bits() == 512;
    (wide ? NAME(512_product) : NAME(256_product))(m, n, k, alpha, a, b, c, stride, keep, room());
}

/* The same as the transposed product, piece by piece. */
static void NAME(turned)(size_t m, size_t n, size_t k, T alpha, es_matrix a, es_matrix b, T *c, ptrdiff_t stride,
                         int keep) {
    T *piece = (T *)room() + SPACE - PIECE;
    for (size_t j = 0, width; j < n; j += width) {
        width = n - j < PIECE / FEW_ROWS ? n - j : PIECE / FEW_ROWS;
        es_matrix left = {(const T *)b.at + (ptrdiff_t)j * b.column, b.column, b.row};
        for (size_t i = 0; i < m && keep; ++i)
            for (size_t w = 0; w < width; ++w) piece[w * m + i] = c[(ptrdiff_t)i * stride + j + w];
        NAME(rows)(width, m, k, alpha, left, transposed(a), piece, (ptrdiff_t)m, keep);
        for (size_t i = 0; i < m; ++i)
            for (size_t w = 0; w < width; ++w) c[(ptrdiff_t)i * stride + j + w] = piece[w * m + i];
    }
}

static void NAME(product)(size_t m, size_t n, size_t k, T alpha, es_matrix a, es_matrix b, T beta, es_matrix c) {
    if (c.column != 1) {
        NAME(product)(n, m, k, alpha, transposed(b), transposed(a), beta, transposed(c));
        return;
    }
    T *to = (T *)c.at;
    for (size_t i = 0; i < m && beta != 1 && (beta != 0 || k == 0); ++i)
        for (size_t j = 0; j < n; ++j) {
            T *at = to + (ptrdiff_t)i * c.row + j;
            *at = beta == 0 ? 0 : *at * beta;
        }
    int turn = b.row == 1 && n * k >= MANY_ELEMENTS && fills_vectors(m);
    (turn ? NAME(turned) : NAME(rows))(m, n, k, alpha, a, b, to, c.row, beta != 0);
}

#undef T
#undef NAME
