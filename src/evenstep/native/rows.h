/* Rows of tables in files that are mapped into memory. */
#ifndef EVENSTEP_ROWS_H
#define EVENSTEP_ROWS_H

#include <stddef.h>
#include <stdint.h>

/* Rows that lie in pieces, one after the other in each: piece p begins with row firsts[p], and
 * row 0 would lie at bases[p] if the piece had all rows. */
typedef struct {
    const uint64_t *bases;
    const int64_t *firsts; /* ascending, from 0 on; after the last one, num_rows */
    const uint32_t *starts; /* the piece of every row whose number is a multiple of 1 << shift */
    unsigned shift;
    size_t row_bytes;
    uint64_t num_rows;
} es_pieces;

/* Copies the given rows, one after the other, to target; whether all of them are there. */
int es_gather(void *target, const es_pieces *pieces, const int64_t *rows, size_t count);

/* Whether levels of a Parquet page (runs, and bits packed between them) are what lists of one length without nulls have:
 * 0 at every multiple of length, and top elsewhere, which must be 1; with length 0, top everywhere. */
int es_levels_are(const void *data, size_t num_bytes, unsigned bits, uint64_t count, unsigned top, uint64_t length);

#endif
