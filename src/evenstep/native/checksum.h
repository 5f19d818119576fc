/* A 64-bit checksum of memory, at the speed of memory: it detects accidents, not attacks.
 *
 * Any change of one 8-byte word certainly changes it; so do changes of several words, except one in 2^64. It depends
 * on the order of the words and on nothing else: not on alignment, processor or build. It is a sum over all words, each
 * mixed with its place, so it can be added up in any order, and has the same value on every device.
 */
#ifndef ES_CHECKSUM_H
#define ES_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

uint64_t es_checksum(const void *data, size_t num_bytes);

#endif
