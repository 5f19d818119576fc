/* Reducing vectors in the order of a tree: the one place that adds what came from several processes or shards. */
#ifndef EVENSTEP_REDUCE_H
#define EVENSTEP_REDUCE_H

#include <stddef.h>
#include <stdint.h>

enum {
    ES_F32 = 0,
    ES_F64,
    ES_BF16,
    ES_F16,
    ES_U8,
    ES_I8,
    ES_I16,
    ES_I32,
    ES_I64,
    ES_U16,
    ES_U32,
    ES_U64,
    ES_NUM_TYPES,
};

/* The bitwise ones are for integers only. MIN and MAX pass a NaN on. Integers wrap around. */
enum { ES_SUM = 0, ES_PRODUCT, ES_MIN, ES_MAX, ES_BAND, ES_BOR, ES_BXOR, ES_NUM_OPS };

enum { ES_MAX_INPUTS = 256 };

/* Bytes of one item, or 0 for an unknown type. */
size_t es_item_bytes(int dtype);

/* out = the inputs combined in stack order: input i is pushed, then the two topmost entries are combined merges[i]
 * times. Every partial result is rounded to the type, so the result is that of combining whole vectors one pair at a
 * time. out may be one of the inputs. Returns 0, or -1 for an unknown pair of type and op or a malformed program. */
int es_tree_reduce(int dtype, int op, const void *const *inputs, const uint8_t *merges, uint32_t num_inputs, void *out,
                   size_t count);

#endif
