/* Which of two ways to do the same thing is faster here and now, found by trying both.
 *
 * Whether what one core writes for another should stay in the writer's cache or go past it depends on how far apart they
 * are, which changes when a process moves. So the faster way is taken, and now and then the other one: seldom, where that
 * takes much longer. All ranks take the same way at the same time, or none could tell what its own way costs: they count
 * alike, and one decides.
 */
#ifndef EVENSTEP_WAYS_H
#define EVENSTEP_WAYS_H

#include <stdint.h>

typedef struct {
    uint64_t count;
    int64_t cost_ns[2]; /* the recent minimum: one that was held up by something else says nothing */
    int faster;         /* the way that was decided on, */
    int clearly;        /* and whether the other one takes at least twice as long */
} es_ways;

/* The way to take next: 0 or 1. */
int es_ways_next(const es_ways *ways);
/* Whether the next one is to be timed: timing each would slow down short ones a lot. */
int es_ways_looks(const es_ways *ways);
/* Notes what it took, or -1 if it was not timed. Call it before asking for the next. */
void es_ways_learn(es_ways *ways, int way, int64_t taken_ns);
enum { ES_VERDICTS = 4 };
/* The way that is faster, and whether clearly so, as far as this rank knows: less than ES_VERDICTS. */
unsigned es_ways_verdict(const es_ways *ways);
/* Takes this decision. */
void es_ways_settle(es_ways *ways, unsigned verdict);

#endif
