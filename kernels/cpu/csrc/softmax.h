/* Softmax of rows of scores, PART at most; what a row does not see is -inf. */
#ifndef PDSERVE_SOFTMAX_H
#define PDSERVE_SOFTMAX_H

#include <math.h>

#include "attention.h"
#include "vec.h"

/* row[0, n) := scores of products, n a multiple of 8; -inf outside of [lo, hi). Returns the largest. */
AVX2_INLINE float scale_row(const Attention *a, float *row, int64_t n, int64_t lo, int64_t hi) {
    if (a->softcap == 0) {
        __m256 scale = _mm256_set1_ps(a->scale);
        for (int64_t i = 0; i < n; i += 8) _mm256_storeu_ps(row + i, _mm256_mul_ps(_mm256_loadu_ps(row + i), scale));
    } else {
        __m256 cap = _mm256_set1_ps(a->softcap), scale = _mm256_set1_ps(a->scale / a->softcap);
        for (int64_t i = 0; i < n; i += 8)
            _mm256_storeu_ps(row + i, _mm256_mul_ps(tanh8(_mm256_mul_ps(_mm256_loadu_ps(row + i), scale)), cap));
    }
    for (int64_t i = 0; i < lo; i++) row[i] = -INFINITY;
    for (int64_t i = hi; i < n; i++) row[i] = -INFINITY;
    __m256 top = _mm256_set1_ps(-INFINITY);
    for (int64_t i = 0; i < n; i += 8) top = _mm256_max_ps(top, _mm256_loadu_ps(row + i));
    return max_lanes(top);
}

/* row := e^(row - top). Returns the sum. */
AVX2_INLINE float weigh_row(float *row, int64_t n, float top) {
    __m256 base = _mm256_set1_ps(top), sum = _mm256_setzero_ps();
    for (int64_t i = 0; i < n; i += 8) {
        __m256 x = exp8(_mm256_sub_ps(_mm256_loadu_ps(row + i), base));
        _mm256_storeu_ps(row + i, x);
        sum = _mm256_add_ps(sum, x);
    }
    return sum_lanes(sum);
}

/* By what a head's weighted sum of values is multiplied; a sink takes its share of the weights here. */
AVX2_INLINE float output_factor(const Attention *a, int64_t head, float top, float total) {
    if (!a->sinks) return 1 / total;
    float sink = a->sinks[head], most = sink > top ? sink : top;
    float fade = exp1(top - most);
    return fade / (total * fade + exp1(sink - most));
}

#endif
