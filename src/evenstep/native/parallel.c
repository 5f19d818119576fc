#define _GNU_SOURCE
#include "parallel.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>

#include "core.h"

enum { MAX_HELPERS = 15, SPIN = 1000 };

static struct {
    _Atomic uint32_t taken; /* by the one caller that may use everything below */
    uint32_t num_helpers;
    uint64_t num_jobs;
    void (*work)(void *argument, size_t part);
    void *argument;
    uint32_t num_parts;
    _Atomic uint64_t open; /* number of the job << 32 | how many of its parts are not begun */
    es_mark finished;      /* counts the parts of all jobs */
    struct {
        _Alignas(64) es_mark job; /* the number of the last job that this helper was called to */
    } helpers[MAX_HELPERS];
} team;

/* A thread that has begun a part may read the job: it stays until that part is finished. */
static void work_on_parts(void) {
    uint64_t open = atomic_load(&team.open);
    while ((uint32_t)open)
        if (atomic_compare_exchange_weak(&team.open, &open, open - 1)) {
            team.work(team.argument, team.num_parts - (uint32_t)open);
            es_bump(&team.finished);
            open = atomic_load(&team.open);
        }
}

static void wait_until(es_mark *mark, uint64_t seq) {
    while (es_await(mark, seq, NULL, SPIN, INT64_C(3600000000000)) != ES_OK) continue;
}

static void *help(void *job) {
    for (;;) {
        uint64_t number = atomic_load(&((es_mark *)job)->seq);
        work_on_parts();
        wait_until(job, number + 1);
    }
    return NULL;
}

static void forget(void) { memset(&team, 0, sizeof team); } /* the threads stayed with the parent */

static int start_helper(void) {
    static int forgets;
    if (!forgets && pthread_atfork(NULL, NULL, forget)) return 0;
    forgets = 1;
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all); /* signals are for the threads of the program */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(&thread, NULL, help, &team.helpers[team.num_helpers].job);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc) return 0;
    pthread_detach(thread);
    ++team.num_helpers;
    return 1;
}

void es_parallel(unsigned num_threads, size_t num_parts, void (*work)(void *argument, size_t part), void *argument) {
    if (num_threads > num_parts) num_threads = (unsigned)num_parts;
    if (num_threads > MAX_HELPERS + 1) num_threads = MAX_HELPERS + 1;
    if (num_threads <= 1 || num_parts > UINT32_MAX || atomic_exchange(&team.taken, 1)) {
        for (size_t part = 0; part < num_parts; ++part) work(argument, part);
        return;
    }
    while (team.num_helpers < num_threads - 1 && start_helper()) continue;
    team.work = work;
    team.argument = argument;
    team.num_parts = (uint32_t)num_parts;
    uint64_t number = ++team.num_jobs, until = atomic_load(&team.finished.seq) + num_parts;
    atomic_store(&team.open, number << 32 | num_parts);
    for (uint32_t i = 0; i < num_threads - 1 && i < team.num_helpers; ++i) es_raise(&team.helpers[i].job, number);
    work_on_parts();
    wait_until(&team.finished, until);
    atomic_store(&team.taken, 0);
}
