/* Several threads for one piece of work, kept for the next.
 *
 * The helpers are started when first needed, spin a little after a piece of work and then sleep. They take parts as they
 * come, so nobody waits for a helper that the system does not schedule, only for a part that one has begun.
 */
#ifndef EVENSTEP_PARALLEL_H
#define EVENSTEP_PARALLEL_H

#include <stddef.h>

/* Calls work(argument, part) once for each part below num_parts, in any order and in up to num_threads threads (at most
 * 16), and returns when all are done. Where the helpers are busy with the work of another caller, or cannot be started,
 * the caller works alone. A forked child starts helpers of its own. */
void es_parallel(unsigned num_threads, size_t num_parts, void (*work)(void *argument, size_t part), void *argument);

#endif
