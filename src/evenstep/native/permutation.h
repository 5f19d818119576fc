/* The order of the samples of an epoch. */
#ifndef EVENSTEP_PERMUTATION_H
#define EVENSTEP_PERMUTATION_H

#include <stddef.h>
#include <stdint.h>

/* Writes the numbers below count in the order that torch.randperm gives them on a CPU after manual_seed, of which only
 * the low 32 bits count. Only for counts below 2^32 / 20: of more, torch draws 64 bits each. */
void es_permutation(int64_t *target, size_t count, uint32_t seed);

#endif
