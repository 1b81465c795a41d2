/* The process's compute threads. */
#ifndef PDSERVE_POOL_H
#define PDSERVE_POOL_H

#include <stdint.h>

#include "status.h"

/* Calls fn(context, i) once for each i in [0, count), on any threads in any order; returns when all have returned. The
 * caller takes part. A call while another one runs computes alone. */
void pool_run(void (*fn)(void *context, int64_t index), void *context, int64_t count);

/* Threads that take part, the caller included. */
int pool_threads(void);

enum { MAX_THREADS = 256 };

/* Sets the number of threads, 1 at first. Returns 0, or -1: the number is not between 1 and MAX_THREADS (nothing has
 * changed), or the system starts no more (fewer serve). */
EXPORT int pdserve_set_threads(int count);

#endif
