/* A parallel for over persistent threads.
 *
 * `turn` counts: odd while a job is open. A worker enters (active + 1), and only then looks whether the job is still
 * open; the caller closes it, and only then waits for active = 0. So a worker that wakes late touches nothing, and
 * nobody waits for it. Idle workers look for `SPINS` rounds, then sleep.
 */
#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { SPINS = 4000 };

static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER; /* held by the one call that uses the workers */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the two conditions */
static pthread_cond_t opened = PTHREAD_COND_INITIALIZER, left = PTHREAD_COND_INITIALIZER;
static atomic_uint turn;
static atomic_int active, sleepers, caller_sleeps;
static atomic_int wanted = 1; /* threads, the caller included; workers from this number on have ended or will */
static int started = 1;       /* guarded by busy */
static pthread_t workers[MAX_THREADS];
static struct {
    void (*fn)(void *, int64_t);
    void *context;
    int64_t count;
    atomic_llong next;
} job;

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

static void work(void) {
    for (int64_t i; (i = atomic_fetch_add(&job.next, 1)) < job.count;) job.fn(job.context, i);
}

static unsigned wait_for_turn(unsigned seen) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load(&turn) != seen) return atomic_load(&turn);
        relax();
    }
    pthread_mutex_lock(&lock);
    atomic_fetch_add(&sleepers, 1);
    while (atomic_load(&turn) == seen) pthread_cond_wait(&opened, &lock);
    atomic_fetch_sub(&sleepers, 1);
    pthread_mutex_unlock(&lock);
    return atomic_load(&turn);
}

static void leave(void) {
    if (atomic_fetch_sub(&active, 1) == 1 && atomic_load(&caller_sleeps)) {
        pthread_mutex_lock(&lock);
        pthread_cond_signal(&left);
        pthread_mutex_unlock(&lock);
    }
}

static void *serve(void *number) {
    unsigned seen = 0;
    while ((int)(intptr_t)number < atomic_load(&wanted)) {
        seen = wait_for_turn(seen);
        atomic_fetch_add(&active, 1);
        if (atomic_load(&turn) & 1) work();
        leave();
    }
    return NULL;
}

static void open_turn(void) {
    atomic_fetch_add(&turn, 1);
    if (atomic_load(&sleepers)) {
        pthread_mutex_lock(&lock);
        pthread_cond_broadcast(&opened);
        pthread_mutex_unlock(&lock);
    }
}

static void close_turn(void) {
    atomic_fetch_add(&turn, 1);
    for (int i = 0; i < SPINS && atomic_load(&active); i++) relax();
    if (!atomic_load(&active)) return;
    pthread_mutex_lock(&lock);
    atomic_store(&caller_sleeps, 1);
    while (atomic_load(&active)) pthread_cond_wait(&left, &lock);
    atomic_store(&caller_sleeps, 0);
    pthread_mutex_unlock(&lock);
}

void pool_run(void (*fn)(void *context, int64_t index), void *context, int64_t count) {
    if (count < 2 || atomic_load(&wanted) == 1 || pthread_mutex_trylock(&busy)) {
        for (int64_t i = 0; i < count; i++) fn(context, i);
        return;
    }
    job.fn = fn, job.context = context, job.count = count;
    atomic_store(&job.next, 0);
    open_turn();
    work();
    close_turn();
    pthread_mutex_unlock(&busy);
}

int pool_threads(void) { return atomic_load(&wanted); }

/* A forked process has none of its parent's workers. */
static void forget(void) {
    pthread_mutex_init(&busy, NULL), pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&opened, NULL), pthread_cond_init(&left, NULL);
    atomic_store(&wanted, 1), atomic_store(&active, 0), atomic_store(&sleepers, 0), atomic_store(&turn, 0);
    atomic_store(&caller_sleeps, 0);
    started = 1;
}

EXPORT int pdserve_set_threads(int count) {
    static int registered;
    if (count < 1 || count > MAX_THREADS) return -1;
    pthread_mutex_lock(&busy);
    if (!registered) registered = !pthread_atfork(NULL, NULL, forget);
    atomic_store(&wanted, count);
    atomic_fetch_add(&turn, 2); /* still even: those that are too many wake, and end */
    pthread_mutex_lock(&lock);
    pthread_cond_broadcast(&opened);
    pthread_mutex_unlock(&lock);
    for (; started > count; started--) pthread_join(workers[started - 1], NULL);
    for (; started < count; started++)
        if (pthread_create(&workers[started], NULL, serve, (void *)(intptr_t)started)) break;
    atomic_store(&wanted, started);
    int result = started == count ? 0 : -1;
    pthread_mutex_unlock(&busy);
    return result;
}
