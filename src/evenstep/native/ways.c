#include "ways.h"

enum {
    TRIALS = 6,   /* at first each way is taken three times */
    EVERY = 16,   /* after that, the slower one is taken once in this many times, */
    SELDOM = 256, /* or in this many, if it is clearly slower */
    LOOKS = 4,    /* and once in this many times it is timed */
};

int es_ways_next(const es_ways *ways) {
    if (ways->count < TRIALS) return ways->count & 1;
    return ways->count % (ways->clearly ? SELDOM : EVERY) ? ways->faster : !ways->faster;
}

int es_ways_looks(const es_ways *ways) { return ways->count < TRIALS || ways->count % LOOKS == 0; }

void es_ways_learn(es_ways *ways, int way, int64_t taken_ns) {
    ways->count += 1;
    if (taken_ns < 0) return;
    int64_t known_ns = ways->cost_ns[way] + ways->cost_ns[way] / 8; /* what was true once may no longer be */
    ways->cost_ns[way] = !known_ns || taken_ns < known_ns ? taken_ns : known_ns;
}

unsigned es_ways_verdict(const es_ways *ways) {
    unsigned faster = ways->cost_ns[1] < ways->cost_ns[0];
    return faster + 2 * (ways->cost_ns[!faster] >= 2 * ways->cost_ns[faster]);
}

void es_ways_settle(es_ways *ways, unsigned verdict) {
    ways->faster = verdict % 2;
    ways->clearly = verdict / 2;
}
