/* Several threads hand work to the helpers at once, forked children too; exits with 0 if every part was done once. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "parallel.h"

enum { PARTS = 37, ROUNDS = 2000, CALLERS = 3 };

static void count(void *argument, size_t part) {
    for (volatile int i = 0; i < 300; ++i) continue; /* long enough for a helper to come */
    ++((int *)argument)[part];                       /* plain, so that a race is seen */
}

static void *call(void *unused) {
    int done[PARTS] = {0};
    for (int round = 0; round < ROUNDS; ++round) {
        es_parallel(2 + round % 3, 1 + round % PARTS, count, done);
        for (int part = 0; part <= round % PARTS; ++part) {
            if (done[part] != 1) exit(printf("part %d of round %d was done %d times\n", part, round, done[part]));
            done[part] = 0;
        }
    }
    return unused;
}

static void call_from_several(void) {
    pthread_t callers[CALLERS];
    for (int i = 0; i < CALLERS; ++i) pthread_create(&callers[i], NULL, call, NULL);
    for (int i = 0; i < CALLERS; ++i) pthread_join(callers[i], NULL);
}

int main(void) {
    int status = 0;
    call_from_several();
    for (int child = 0; child < 2; ++child) {
        pid_t pid = fork();
        if (!pid) {
            call(NULL);
            _exit(0);
        }
        call_from_several();
        if (waitpid(pid, &status, 0) != pid || status) return 2;
    }
    return 0;
}
