/* Elementwise kernels of the lean path, fp32; see kernels/reference_fused.py for their meaning. Each row or token is
 * computed in one order, whatever the batch. */
#include "fused.h"

#include <math.h>

#include "pool.h"
#include "sizes.h"
#include "vec.h"

enum { FLOATS_PER_ITEM = 1 << 14 }; /* what is worth another thread */

/* Runs `num_rows` rows of `floats` each, several to an item of the pool. */
typedef struct {
    void (*rows)(const void *arguments, int64_t first, int64_t last);
    const void *arguments;
    int64_t num_rows, rows_per_item;
} Split;

static void run_split(void *context, int64_t item) {
    const Split *s = context;
    int64_t first = item * s->rows_per_item;
    s->rows(s->arguments, first, min_of(first + s->rows_per_item, s->num_rows));
}

static void for_rows(void (*rows)(const void *, int64_t, int64_t), const void *arguments, int64_t num_rows,
                     int64_t floats) {
    if (floats == 0) return;
    int64_t per_item = FLOATS_PER_ITEM / floats + 1;
    if (num_rows <= per_item) {
        rows(arguments, 0, num_rows);
        return;
    }
    Split s = {rows, arguments, num_rows, per_item};
    pool_run(run_split, &s, ceil_div(num_rows, per_item));
}

typedef struct {
    const float *x, *weight;
    float *output, *residual;
    int64_t columns, x_stride, output_stride, residual_stride;
    float epsilon;
} Norm;

AVX2 static void norm_rows(const void *arguments, int64_t first, int64_t last) {
    const Norm *n = arguments;
    int64_t whole = n->columns & ~(int64_t)7;
    __m256i tail = first_lanes(n->columns - whole);
    for (int64_t row = first; row < last; row++) {
        const float *x = n->x + row * n->x_stride;
        float *out = n->output + row * n->output_stride;
        __m256 squares = _mm256_setzero_ps();
        if (n->residual) {
            float *sum = n->residual + row * n->residual_stride;
            for (int64_t i = 0; i < whole; i += 8) {
                __m256 v = _mm256_add_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(sum + i));
                _mm256_storeu_ps(sum + i, v);
                squares = _mm256_fmadd_ps(v, v, squares);
            }
            if (whole < n->columns) {
                __m256 v = _mm256_add_ps(_mm256_maskload_ps(x + whole, tail), _mm256_maskload_ps(sum + whole, tail));
                _mm256_maskstore_ps(sum + whole, tail, v);
                squares = _mm256_fmadd_ps(v, v, squares);
            }
            x = sum;
        } else {
            for (int64_t i = 0; i < whole; i += 8) {
                __m256 v = _mm256_loadu_ps(x + i);
                squares = _mm256_fmadd_ps(v, v, squares);
            }
            if (whole < n->columns) {
                __m256 v = _mm256_maskload_ps(x + whole, tail);
                squares = _mm256_fmadd_ps(v, v, squares);
            }
        }
        __m256 factor = _mm256_set1_ps(1 / sqrtf(sum_lanes(squares) / (float)n->columns + n->epsilon));
        for (int64_t i = 0; i < whole; i += 8) {
            __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + i), factor);
            _mm256_storeu_ps(out + i, _mm256_mul_ps(v, _mm256_loadu_ps(n->weight + i)));
        }
        if (whole < n->columns) {
            __m256 v = _mm256_mul_ps(_mm256_maskload_ps(x + whole, tail), factor);
            _mm256_maskstore_ps(out + whole, tail, _mm256_mul_ps(v, _mm256_maskload_ps(n->weight + whole, tail)));
        }
    }
}

EXPORT void pdserve_rms_norm(const float *x, const float *weight, float *output, float *residual, int64_t num_rows,
                             int64_t columns, int64_t x_stride, int64_t output_stride, int64_t residual_stride,
                             float epsilon) {
    Norm n = {x, weight, output, residual, columns, x_stride, output_stride, residual_stride, epsilon};
    for_rows(norm_rows, &n, num_rows, columns);
}

typedef struct {
    float *x;
    const int64_t *positions;
    const float *table;
    int64_t num_heads, half, stride_token, stride_head, table_stride;
} Rotation;

AVX2 static void rotate_tokens(const void *arguments, int64_t first, int64_t last) {
    const Rotation *r = arguments;
    int64_t half = r->half, whole = half & ~(int64_t)7;
    for (int64_t token = first; token < last; token++) {
        const float *cosine = r->table + r->positions[token] * r->table_stride, *sine = cosine + half;
        for (int64_t head = 0; head < r->num_heads; head++) {
            float *a = r->x + token * r->stride_token + head * r->stride_head, *b = a + half;
            for (int64_t i = 0; i < whole; i += 8) {
                __m256 c = _mm256_loadu_ps(cosine + i), s = _mm256_loadu_ps(sine + i);
                __m256 u = _mm256_loadu_ps(a + i), v = _mm256_loadu_ps(b + i);
                _mm256_storeu_ps(a + i, _mm256_fmsub_ps(u, c, _mm256_mul_ps(v, s)));
                _mm256_storeu_ps(b + i, _mm256_fmadd_ps(v, c, _mm256_mul_ps(u, s)));
            }
            for (int64_t i = whole; i < half; i++) {
                float u = a[i], v = b[i];
                a[i] = u * cosine[i] - v * sine[i];
                b[i] = v * cosine[i] + u * sine[i];
            }
        }
    }
}

EXPORT int pdserve_rotate(float *x, const int64_t *positions, const float *table, int64_t num_tokens,
                          int64_t num_heads, int64_t half, int64_t stride_token, int64_t stride_head,
                          int64_t table_rows, int64_t table_stride) {
    for (int64_t i = 0; i < num_tokens; i++)
        if (positions[i] < 0 || positions[i] >= table_rows) return BAD_INDEX;
    Rotation r = {x, positions, table, num_heads, half, stride_token, stride_head, table_stride};
    for_rows(rotate_tokens, &r, num_tokens, 2 * half * num_heads);
    return DONE;
}

typedef struct {
    const float *gate_up;
    float *output;
    int64_t columns, gate_up_stride, output_stride;
} Gating;

/* gate / (1 + e^-gate) * up; NaN stays NaN. Below -88 e^-gate is infinite: else what gate is divided by would stop
 * growing with it, and a large one would count. */
AVX2_INLINE __m256 gated(__m256 gate, __m256 up) {
    const __m256 most = _mm256_set1_ps(88.0f);
    __m256 size = _mm256_xor_ps(gate, _mm256_set1_ps(-0.0f));
    __m256 e = _mm256_blendv_ps(exp8(_mm256_min_ps(most, size)), _mm256_set1_ps(INFINITY),
                                _mm256_cmp_ps(size, most, _CMP_GT_OQ));
    return _mm256_mul_ps(_mm256_div_ps(gate, _mm256_add_ps(e, _mm256_set1_ps(1.0f))), up);
}

AVX2 static void gate_rows(const void *arguments, int64_t first, int64_t last) {
    const Gating *g = arguments;
    int64_t whole = g->columns & ~(int64_t)7;
    __m256i tail = first_lanes(g->columns - whole);
    for (int64_t row = first; row < last; row++) {
        const float *gate = g->gate_up + row * g->gate_up_stride, *up = gate + g->columns;
        float *out = g->output + row * g->output_stride;
        for (int64_t i = 0; i < whole; i += 8)
            _mm256_storeu_ps(out + i, gated(_mm256_loadu_ps(gate + i), _mm256_loadu_ps(up + i)));
        if (whole < g->columns)
            _mm256_maskstore_ps(out + whole, tail,
                                gated(_mm256_maskload_ps(gate + whole, tail), _mm256_maskload_ps(up + whole, tail)));
    }
}

EXPORT void pdserve_silu_mul(const float *gate_up, float *output, int64_t num_rows, int64_t columns,
                             int64_t gate_up_stride, int64_t output_stride) {
    Gating g = {gate_up, output, columns, gate_up_stride, output_stride};
    for_rows(gate_rows, &g, num_rows, 2 * columns);
}
