/* The product for one type and one kind of vector. Included by product.c once for each, with
 *   T       the type of an element,                V       a vector of them,        LANES  how many it holds,
 *   ROWS    how many rows a tile has,              TARGET  the instructions,        NAME(x) the name of a function,
 *   FMA(a, b, c), SPREAD(x), LOAD(p), STORE(p, v)  the operations on vectors (p is not aligned),
 *   TURN(from, stride, into, width)                a square of LANES x LANES, transposed.
 * A tile is ROWS rows of two vectors (or one, if no more are wanted), all in registers.
 */
#define WIDTH (2 * LANES)

/* One block along k of one tile: into = alpha * sum + into, or without `into` if it is the first. Meanwhile what lies
 * `ahead` comes nearer: of each of up to 16 rows, 16 lines of the cache. */
static TARGET INLINE void NAME(tile)(const int rows, const int vectors, const int packed, size_t depth, const T *a,
                                     ptrdiff_t row, ptrdiff_t column, const T *b, T alpha, T *into, ptrdiff_t stride,
                                     int first, const char *ahead, ptrdiff_t ahead_row) {
    V sum[ROWS][2];
    const ptrdiff_t r = packed ? 1 : row, s = packed ? ROWS : column;
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; ++v) sum[i][v] = SPREAD(0);
    for (size_t rest = depth, some; rest; rest -= some, ahead += ahead_row) {
        some = rest < 16 ? rest : 16;
        for (size_t p = 0; p < some; ++p, a += s, b += WIDTH) {
            V right[2];
            __builtin_prefetch(ahead + 64 * p, 0, 2);
#pragma GCC unroll 2
            for (int v = 0; v < vectors; ++v) right[v] = LOAD(b + v * LANES);
#pragma GCC unroll 16
            for (int i = 0; i < rows; ++i) {
                V left = SPREAD(a[i * r]);
#pragma GCC unroll 2
                for (int v = 0; v < vectors; ++v) sum[i][v] = FMA(left, right[v], sum[i][v]);
            }
        }
    }
    V scale = SPREAD(alpha);
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; ++v) {
            T *at = into + i * stride + v * LANES;
            V total = first ? (V)(sum[i][v] * scale) : (V)FMA(scale, sum[i][v], LOAD(at));
            STORE(at, total);
        }
}

typedef void (*NAME(tile_fn))(size_t, const T *, ptrdiff_t, ptrdiff_t, const T *, T, T *, ptrdiff_t, int, const char *,
                              ptrdiff_t);

#define TILE(rows, vectors, packed)                                                                              \
    static TARGET void NAME(tile_##rows##_##vectors##_##packed)(                                                 \
        size_t depth, const T *a, ptrdiff_t row, ptrdiff_t column, const T *b, T alpha, T *into, ptrdiff_t stride, \
        int first, const char *ahead, ptrdiff_t ahead_row) {                                                     \
        NAME(tile)(rows, vectors, packed, depth, a, row, column, b, alpha, into, stride, first, ahead, ahead_row); \
    }
#define TILES(rows) TILE(rows, 1, 0) TILE(rows, 1, 1) TILE(rows, 2, 0) TILE(rows, 2, 1)
#define NAMES(rows)                                                                                 \
    {                                                                                               \
        {NAME(tile_##rows##_1_0), NAME(tile_##rows##_1_1)}, { NAME(tile_##rows##_2_0), NAME(tile_##rows##_2_1) } \
    }
TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6)
#if ROWS > 6
TILES(7) TILES(8) TILES(9) TILES(10) TILES(11) TILES(12)
#endif
static const NAME(tile_fn) NAME(tiles)[ROWS][2][2] = {
    NAMES(1), NAMES(2), NAMES(3), NAMES(4), NAMES(5), NAMES(6),
#if ROWS > 6
    NAMES(7), NAMES(8), NAMES(9), NAMES(10), NAMES(11), NAMES(12),
#endif
};

/* Panels of WIDTH columns of b, [depth][WIDTH] each, filled up with zeros. */
static TARGET void NAME(pack_columns)(size_t depth, size_t columns, const T *b, ptrdiff_t row, ptrdiff_t column,
                                      T *into) {
    size_t whole = columns / WIDTH * WIDTH, turned = row == 1 && column != 1 ? depth / LANES * LANES : 0;
    if (column == 1) /* row by row as they lie in memory, but no more at once than one set of the cache holds */
        for (size_t group = 0; group < whole; group += GROUP)
            for (size_t p = 0; p < depth; ++p)
                for (size_t j = group; j < whole && j < group + GROUP; j += LANES)
                    STORE(into + j / WIDTH * WIDTH * depth + p * WIDTH + j % WIDTH, LOAD(b + (ptrdiff_t)p * row + j));
    for (size_t j = column == 1 ? whole : 0; j < columns; j += WIDTH) {
        size_t width = columns - j < WIDTH ? columns - j : WIDTH, p = 0;
        const T *from = b + (ptrdiff_t)j * column;
        T *to = into + j * depth;
        if (width < WIDTH)
            memset(to, 0, depth * WIDTH * sizeof(T));
        else
            for (; p < turned; p += LANES)
                for (int v = 0; v < 2; ++v) TURN(from + p + v * LANES * column, column, to + p * WIDTH + v * LANES, WIDTH);
        for (; p < depth; ++p)
            for (size_t i = 0; i < width; ++i) to[p * WIDTH + i] = from[(ptrdiff_t)p * row + (ptrdiff_t)i * column];
    }
}

/* Strips of ROWS rows of a, [depth][ROWS] each. */
static TARGET void NAME(pack_rows)(size_t rows, size_t depth, const T *a, ptrdiff_t row, ptrdiff_t column, T *into) {
    for (size_t i = 0; i < rows; i += ROWS) {
        size_t height = rows - i < ROWS ? rows - i : ROWS;
        const T *from = a + (ptrdiff_t)i * row;
        T *to = into + i * depth;
        if (height == ROWS && row == 1)
            for (size_t p = 0; p < depth; ++p) memcpy(to + p * ROWS, from + (ptrdiff_t)p * column, ROWS * sizeof(T));
        else
            for (size_t p = 0; p < depth; ++p)
                for (size_t r = 0; r < height; ++r)
                    to[p * ROWS + r] = from[(ptrdiff_t)p * column + (ptrdiff_t)r * row];
    }
}

/* One panel of b with some rows of a. `next` is the next block of b if it will have to be copied, else NULL. */
static TARGET void NAME(panel)(size_t rows, size_t width, size_t depth, T alpha, const T *a, ptrdiff_t row,
                               ptrdiff_t column, int packed, const T *b, T *c, ptrdiff_t stride, int first,
                               const char **next, ptrdiff_t next_row) {
    T edge[ROWS * WIDTH];
    int vectors = width > LANES ? 2 : 1, whole = width == WIDTH || width == LANES;
    for (size_t i = 0; i < rows; i += ROWS) {
        size_t height = rows - i < ROWS ? rows - i : ROWS;
        const T *from = packed ? a + i * depth : a + (ptrdiff_t)i * row;
        T *to = c + (ptrdiff_t)i * stride;
        NAME(tile_fn) tile = NAME(tiles)[height - 1][vectors - 1][packed];
        const char *ahead = *next ? *next : (const char *)b;
        ptrdiff_t ahead_row = *next ? next_row : 0;
        if (*next) *next += 16 * next_row;
        if (whole) {
            tile(depth, from, row, column, b, alpha, to, stride, first, ahead, ahead_row);
            continue;
        }
        if (!first)
            for (size_t r = 0; r < height; ++r) memcpy(edge + r * WIDTH, to + (ptrdiff_t)r * stride, width * sizeof(T));
        tile(depth, from, row, column, b, alpha, edge, WIDTH, first, ahead, ahead_row);
        for (size_t r = 0; r < height; ++r) memcpy(to + (ptrdiff_t)r * stride, edge + r * WIDTH, width * sizeof(T));
    }
}

/* c = alpha * a b + (first ? 0 : c), where c has rows that are contiguous. */
static TARGET void NAME(product)(size_t m, size_t n, size_t k, T alpha, es_matrix a, es_matrix b, T *c,
                                 ptrdiff_t stride, int keep, T *space) {
    const int packed = a.column != 1;
    const size_t columns = m <= BLOCK_ROWS ? NARROW_COLUMNS : BLOCK_COLUMNS;
    T *panels = space, *strips = space + DEPTH * BLOCK_COLUMNS;
    for (size_t j = 0; j < n; j += columns)
        for (size_t p = 0; p < k; p += DEPTH) {
            size_t width = n - j < columns ? n - j : columns, depth = k - p < DEPTH ? k - p : DEPTH;
            const T *right = (const T *)b.at + (ptrdiff_t)p * b.row + (ptrdiff_t)j * b.column;
            NAME(pack_columns)(depth, width, right, b.row, b.column, panels);
            const char *next = b.column == 1 && m <= BLOCK_ROWS ? (const char *)(right + DEPTH * b.row) : NULL;
            for (size_t i = 0; i < m; i += BLOCK_ROWS) {
                size_t rows = m - i < BLOCK_ROWS ? m - i : BLOCK_ROWS;
                const T *left = (const T *)a.at + (ptrdiff_t)i * a.row + (ptrdiff_t)p * a.column;
                if (packed) {
                    NAME(pack_rows)(rows, depth, left, a.row, a.column, strips);
                    left = strips;
                }
                for (size_t w = 0; w < width; w += WIDTH)
                    NAME(panel)(rows, width - w < WIDTH ? width - w : WIDTH, depth, alpha, left, a.row, a.column,
                                packed, panels + w * depth, c + (ptrdiff_t)i * stride + j + w, stride,
                                !keep && p == 0, &next, b.row * (ptrdiff_t)sizeof(T));
            }
        }
}

#undef NAMES
#undef TILES
#undef TILE
#undef WIDTH
#undef T
#undef V
#undef LANES
#undef ROWS
#undef TARGET
#undef NAME
#undef FMA
#undef SPREAD
#undef LOAD
#undef STORE
#undef TURN
