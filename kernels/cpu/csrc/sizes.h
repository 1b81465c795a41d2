/* Arithmetic of sizes. */
#ifndef PDSERVE_SIZES_H
#define PDSERVE_SIZES_H

#include <stdint.h>

static inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

#endif
