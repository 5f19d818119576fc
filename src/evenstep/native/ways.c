#include "ways.h"

enum { TRIALS = 6, EVERY = 16 }; /* each way three times at first, the slower one once in so many after that */

int es_ways_next(const es_ways *ways) {
    if (ways->count < TRIALS) return ways->count & 1;
    return ways->count % EVERY ? ways->faster : !ways->faster;
}

void es_ways_learn(es_ways *ways, int way, int64_t taken_ns) {
    int64_t known_ns = ways->cost_ns[way] + ways->cost_ns[way] / 8; /* what was true once may be so no longer */
    ways->cost_ns[way] = !known_ns || taken_ns < known_ns ? taken_ns : known_ns;
    ways->count += 1;
}

int es_ways_faster(const es_ways *ways) { return ways->cost_ns[1] < ways->cost_ns[0]; }
