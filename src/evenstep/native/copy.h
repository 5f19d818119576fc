/* A copy that the copying core will not read soon.
 *
 * For data that another process is waiting for: stores go past the caches, so lines are not fetched from the core that
 * had them last, only to be overwritten.
 */
#ifndef EVENSTEP_COPY_H
#define EVENSTEP_COPY_H

#include <stddef.h>

/* As memcpy. All stores are visible to other processes before it returns. */
void es_copy(void *target, const void *source, size_t num_bytes);

#endif
