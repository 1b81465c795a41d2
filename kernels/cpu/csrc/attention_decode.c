/* Decode attention: bound by reading the pages once, for all query heads that share a KV head. */
#include "attention.h"

#include <math.h>
#include <string.h>

#include "softmax.h"
#include "vec.h"

enum { ROWS = 12, STEP = 3 }; /* rows whose scores are held at a time; rows in registers at a time */

/* The sums of four vectors, each with the tree of sum_lanes. */
AVX2_INLINE __m128 sum_four(__m256 a, __m256 b, __m256 c, __m256 d) {
    __m256 ab_lo = _mm256_permute2f128_ps(a, b, 0x20), ab_hi = _mm256_permute2f128_ps(a, b, 0x31);
    __m256 cd_lo = _mm256_permute2f128_ps(c, d, 0x20), cd_hi = _mm256_permute2f128_ps(c, d, 0x31);
    __m256 ab = _mm256_add_ps(ab_lo, ab_hi), cd = _mm256_add_ps(cd_lo, cd_hi); /* halves: a, b and c, d */
    __m256 x = _mm256_shuffle_ps(ab, cd, 0x44), y = _mm256_shuffle_ps(ab, cd, 0xEE); /* 0 1 of each, 2 3 of each */
    __m256 z = _mm256_add_ps(x, y); /* a0 a1 c0 c1 | b0 b1 d0 d1 */
    __m256 even = _mm256_permute_ps(z, 0x08), odd = _mm256_permute_ps(z, 0x0D);
    __m256 s = _mm256_add_ps(even, odd); /* a c . . | b d . . */
    return _mm_unpacklo_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)); /* a b c d */
}

/* scores[r][t] = q_r . k_t of num_rows rows and n tokens. */
AVX2_INLINE void score_rows(const float *q, int64_t q_stride, const int num_rows, const float *k, int64_t k_stride,
                            int64_t n, int64_t dim, float *scores) {
    int64_t whole = dim & ~(int64_t)7;
    __m256i tail = first_lanes(dim - whole);
    for (int64_t t = 0; t < n; t += 4) {
        /* Past the last token the last one is read again. */
        const float *k0 = k + t * k_stride, *k1 = k + min_of(t + 1, n - 1) * k_stride;
        const float *k2 = k + min_of(t + 2, n - 1) * k_stride, *k3 = k + min_of(t + 3, n - 1) * k_stride;
        __m256 sum[STEP][4];
        UNROLL
        for (int r = 0; r < num_rows; r++)
            UNROLL
            for (int i = 0; i < 4; i++) sum[r][i] = _mm256_setzero_ps();
        for (int64_t d = 0; d < whole; d += 8) {
            __m256 x0 = _mm256_loadu_ps(k0 + d), x1 = _mm256_loadu_ps(k1 + d);
            __m256 x2 = _mm256_loadu_ps(k2 + d), x3 = _mm256_loadu_ps(k3 + d);
            UNROLL
            for (int r = 0; r < num_rows; r++) {
                __m256 y = _mm256_loadu_ps(q + r * q_stride + d);
                sum[r][0] = _mm256_fmadd_ps(y, x0, sum[r][0]);
                sum[r][1] = _mm256_fmadd_ps(y, x1, sum[r][1]);
                sum[r][2] = _mm256_fmadd_ps(y, x2, sum[r][2]);
                sum[r][3] = _mm256_fmadd_ps(y, x3, sum[r][3]);
            }
        }
        if (whole < dim) {
            __m256 x0 = _mm256_maskload_ps(k0 + whole, tail), x1 = _mm256_maskload_ps(k1 + whole, tail);
            __m256 x2 = _mm256_maskload_ps(k2 + whole, tail), x3 = _mm256_maskload_ps(k3 + whole, tail);
            UNROLL
            for (int r = 0; r < num_rows; r++) {
                __m256 y = _mm256_maskload_ps(q + r * q_stride + whole, tail);
                sum[r][0] = _mm256_fmadd_ps(y, x0, sum[r][0]);
                sum[r][1] = _mm256_fmadd_ps(y, x1, sum[r][1]);
                sum[r][2] = _mm256_fmadd_ps(y, x2, sum[r][2]);
                sum[r][3] = _mm256_fmadd_ps(y, x3, sum[r][3]);
            }
        }
        UNROLL
        for (int r = 0; r < num_rows; r++) {
            __m128 s = sum_four(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
            float *to = scores + r * PART + t;
            if (n - t >= 4)
                _mm_storeu_ps(to, s);
            else
                _mm_maskstore_ps(to, _mm256_castsi256_si128(first_lanes(n - t)), s);
        }
    }
}

/* values[r][d] += sum over t of weights[r][t] * v_t[d], for `width` vectors of d. */
AVX2_INLINE void weigh_columns(const float *weights, const int num_rows, const float *v, int64_t v_stride, int64_t n,
                               float *values, int64_t value_stride, const int width) {
    __m256 sum[STEP][4];
    UNROLL
    for (int r = 0; r < num_rows; r++)
        UNROLL
        for (int i = 0; i < width; i++) sum[r][i] = _mm256_loadu_ps(values + r * value_stride + 8 * i);
    for (int64_t t = 0; t < n; t++) {
        __m256 x[4];
        UNROLL
        for (int i = 0; i < width; i++) x[i] = _mm256_loadu_ps(v + t * v_stride + 8 * i);
        UNROLL
        for (int r = 0; r < num_rows; r++) {
            __m256 w = _mm256_broadcast_ss(weights + r * PART + t);
            UNROLL
            for (int i = 0; i < width; i++) sum[r][i] = _mm256_fmadd_ps(w, x[i], sum[r][i]);
        }
    }
    UNROLL
    for (int r = 0; r < num_rows; r++)
        UNROLL
        for (int i = 0; i < width; i++) _mm256_storeu_ps(values + r * value_stride + 8 * i, sum[r][i]);
}

AVX2_INLINE void weigh_rows(const float *weights, const int num_rows, const float *v, int64_t v_stride, int64_t n,
                            int64_t dim, float *values) {
    int64_t d = 0;
    for (; d + 32 <= dim; d += 32) weigh_columns(weights, num_rows, v + d, v_stride, n, values + d, dim, 4);
    for (; d + 8 <= dim; d += 8) weigh_columns(weights, num_rows, v + d, v_stride, n, values + d, dim, 1);
    if (d == dim) return;
    __m256i tail = first_lanes(dim - d);
    for (int r = 0; r < num_rows; r++) {
        __m256 sum = _mm256_maskload_ps(values + r * dim + d, tail);
        for (int64_t t = 0; t < n; t++)
            sum = _mm256_fmadd_ps(_mm256_broadcast_ss(weights + r * PART + t),
                                  _mm256_maskload_ps(v + t * v_stride + d, tail), sum);
        _mm256_maskstore_ps(values + r * dim + d, tail, sum);
    }
}

/* Asks for memory that the next segment reads: the pages lie far apart, the hardware does not guess them. */
static inline void prefetch(const float *from, int64_t num_floats) {
    for (int64_t i = 0; i < num_floats; i += 16) __builtin_prefetch(from + i);
}

AVX2 void attend_part(const Attention *a, int64_t seq, int64_t kv_head, int64_t begin, int64_t end, State state) {
    int64_t group = a->num_heads / a->num_kv_heads, k_dim = a->k_dim, v_dim = a->v_dim;
    const float *query = a->query + a->query_starts[seq] * a->q_stride_token + kv_head * group * a->q_stride_head;
    int64_t padded = (end - begin + 7) & ~(int64_t)7;
    float scores[ROWS * PART];
    memset(state.values, 0, sizeof(float) * (size_t)(group * v_dim));
    for (int64_t first = 0; first < group; first += ROWS) {
        int64_t rows = min_of(ROWS, group - first);
        for (int64_t at = begin; at < end;) {
            Segment s = segment_at(a, seq, kv_head, at, end);
            int64_t next = at + s.num_tokens;
            if (first == 0) {
                prefetch(s.values, (s.num_tokens - 1) * a->v_stride_token + v_dim);
                if (next < end) {
                    Segment n = segment_at(a, seq, kv_head, next, end);
                    prefetch(n.keys, (n.num_tokens - 1) * a->k_stride_token + k_dim);
                }
            }
            for (int64_t r = 0; r < rows; r += STEP) {
                const float *q = query + (first + r) * a->q_stride_head;
                float *to = scores + r * PART + at - begin;
                switch (min_of(STEP, rows - r)) {
                case 1: score_rows(q, a->q_stride_head, 1, s.keys, a->k_stride_token, s.num_tokens, k_dim, to); break;
                case 2: score_rows(q, a->q_stride_head, 2, s.keys, a->k_stride_token, s.num_tokens, k_dim, to); break;
                default: score_rows(q, a->q_stride_head, 3, s.keys, a->k_stride_token, s.num_tokens, k_dim, to); break;
                }
            }
            at = next;
        }
        for (int64_t r = 0; r < rows; r++) {
            float *row = scores + r * PART;
            state.top[first + r] = scale_row(a, row, padded, 0, end - begin);
            state.total[first + r] = weigh_row(row, padded, state.top[first + r]);
        }
        for (int64_t at = begin; at < end;) {
            Segment s = segment_at(a, seq, kv_head, at, end);
            for (int64_t r = 0; r < rows; r += STEP) {
                const float *weights = scores + r * PART + at - begin;
                float *to = state.values + (first + r) * v_dim;
                switch (min_of(STEP, rows - r)) {
                case 1: weigh_rows(weights, 1, s.values, a->v_stride_token, s.num_tokens, v_dim, to); break;
                case 2: weigh_rows(weights, 2, s.values, a->v_stride_token, s.num_tokens, v_dim, to); break;
                default: weigh_rows(weights, 3, s.values, a->v_stride_token, s.num_tokens, v_dim, to); break;
                }
            }
            at += s.num_tokens;
        }
    }
}

AVX2 void merge_part(const Attention *a, State into, State part) {
    int64_t group = a->num_heads / a->num_kv_heads, v_dim = a->v_dim;
    for (int64_t r = 0; r < group; r++) {
        float top = into.top[r] > part.top[r] ? into.top[r] : part.top[r];
        float fade = exp1(into.top[r] - top), weight = exp1(part.top[r] - top);
        float *to = into.values + r * v_dim;
        const float *from = part.values + r * v_dim;
        for (int64_t d = 0; d < v_dim; d++) to[d] = to[d] * fade + from[d] * weight;
        into.total[r] = into.total[r] * fade + part.total[r] * weight;
        into.top[r] = top;
    }
}

AVX2 void finish_decode(const Attention *a, int64_t seq, int64_t kv_head, State state) {
    int64_t group = a->num_heads / a->num_kv_heads, v_dim = a->v_dim;
    float *out = a->output + (a->query_starts[seq] * a->num_heads + kv_head * group) * v_dim;
    for (int64_t r = 0; r < group; r++) {
        float factor = output_factor(a, kv_head * group + r, state.top[r], state.total[r]);
        for (int64_t d = 0; d < v_dim; d++) out[r * v_dim + d] = state.values[r * v_dim + d] * factor;
    }
}
