/* Linears with int8 weights: [out / 16, in / 2, 16, 2], two of the same output side by side, `in` padded with zeros to
 * whole groups, and a scale for each group and output: [out / 16, in / GROUP, 16].
 *
 * Rows become int16, each group of a row with a scale of its own: about 1 / 65000 of its largest value is lost, far less
 * than the weights have lost. A group's products are summed as integers, without overflow (64 * 127 * 32767 < 2^31) and
 * thus exactly; groups are added as floats, in order. So a row's bits do not depend on the others.
 *
 * Two products of 16 bits cost what one of fp32 does. Tiles have four rows: of six, sums left the registers (gcc 12). */
#include "linear.h"
#include "pool.h"
#include "sizes.h"
#include "vec.h"

enum { MR = 4, PAIRS = GROUP / 2, GROUPS = 4 /* stay in the first cache */, PAIR_WIDTH = 2 * PANEL, ROWS_PER_ITEM = 8 };
enum { AHEAD = GROUPS * GROUP * PANEL }; /* the next block, which is asked for while this one is multiplied */

/* The workspace: [num_rows, groups, GROUP] int16, then [num_rows, groups] scales. */
static inline int16_t *integers(const Linear *l) { return l->workspace; }
static inline float *row_scales(const Linear *l) {
    return (float *)(integers(l) + l->num_rows * ceil_div(l->in, GROUP) * GROUP);
}

/* What is not finite makes the scale NaN; a group below 1e-30 counts as zeros. */
AVX2 static float to_integers(const float *x, int16_t *to) {
    __m256 largest = _mm256_setzero_ps(), poison = _mm256_setzero_ps(), sign = _mm256_set1_ps(-0.0f);
    for (int i = 0; i < GROUP; i += 8) {
        __m256 v = _mm256_loadu_ps(x + i);
        largest = _mm256_max_ps(largest, _mm256_andnot_ps(sign, v));
        poison = _mm256_fmadd_ps(v, _mm256_setzero_ps(), poison);
    }
    float most = max_lanes(largest);
    __m256 inverse = _mm256_set1_ps(most < 1e-30f ? 0 : 32767 / most);
    for (int i = 0; i < GROUP; i += 16) {
        __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), inverse));
        __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i + 8), inverse));
        __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
        _mm256_storeu_si256((__m256i *)(to + i), both);
    }
    return (most < 1e-30f ? 0 : most / 32767) + sum_lanes(poison);
}

static void rows_item(void *context, int64_t item) {
    const Linear *l = context;
    int64_t groups = ceil_div(l->in, GROUP), end = min_of((item + 1) * ROWS_PER_ITEM, l->num_rows);
    for (int64_t row = item * ROWS_PER_ITEM; row < end; row++) {
        const float *x = l->x + row * l->x_stride;
        int16_t *to = integers(l) + row * groups * GROUP;
        float *scales = row_scales(l) + row * groups;
        for (int64_t g = 0; g < groups; g++, x += GROUP, to += GROUP) {
            float padded[GROUP] = {0};
            int64_t left = l->in - g * GROUP;
            for (int64_t i = 0; left < GROUP && i < left; i++) padded[i] = x[i];
            scales[g] = to_integers(left < GROUP ? padded : x, to);
        }
    }
}

void int8_rows(const Linear *l) { pool_run(rows_item, (void *)l, ceil_div(l->num_rows, ROWS_PER_ITEM)); }

AVX2_INLINE __m256i widen(const int8_t *from) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
}

/* sums[rows][16] += one group's products. */
AVX2_INLINE void multiply(const int rows, const int16_t *x, int64_t x_stride, const float *x_scales,
                          int64_t scales_stride, const int8_t *weights, const float *scales, float *sums) {
    __m256i sum[MR][2];
    UNROLL
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
    for (int k = 0; k < PAIRS; k++, x += 2) {
        _mm_prefetch((const char *)(weights + k * PAIR_WIDTH + AHEAD), _MM_HINT_T0);
        __m256i w0 = widen(weights + k * PAIR_WIDTH), w1 = widen(weights + k * PAIR_WIDTH + PANEL);
        UNROLL
        for (int r = 0; r < rows; r++) {
            const int16_t *at = x + r * x_stride;
            __m256i v = _mm256_castps_si256(_mm256_broadcast_ss((const float *)(const void *)at));
            sum[r][0] = _mm256_add_epi32(sum[r][0], _mm256_madd_epi16(v, w0));
            sum[r][1] = _mm256_add_epi32(sum[r][1], _mm256_madd_epi16(v, w1));
        }
    }
    __m256 s0 = _mm256_loadu_ps(scales), s1 = _mm256_loadu_ps(scales + 8);
    UNROLL
    for (int r = 0; r < rows; r++) {
        __m256 s = _mm256_broadcast_ss(x_scales + r * scales_stride);
        float *to = sums + r * PANEL;
        __m256 a = _mm256_mul_ps(_mm256_cvtepi32_ps(sum[r][0]), s), b = _mm256_mul_ps(_mm256_cvtepi32_ps(sum[r][1]), s);
        _mm256_storeu_ps(to, _mm256_fmadd_ps(a, s0, _mm256_loadu_ps(to)));
        _mm256_storeu_ps(to + 8, _mm256_fmadd_ps(b, s1, _mm256_loadu_ps(to + 8)));
    }
}

AVX2 static void multiply_tile(int64_t rows, const int16_t *x, int64_t x_stride, const float *x_scales,
                               int64_t scales_stride, const int8_t *weights, const float *scales, float *sums) {
#define CASE(r)                                                                   \
    case r:                                                                       \
        multiply(r, x, x_stride, x_scales, scales_stride, weights, scales, sums); \
        break;
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) }
#undef CASE
}

void int8_panel(const Linear *l, int64_t panel, int64_t first, int64_t num_rows) {
    float sums[ROWS * PANEL] __attribute__((aligned(64)));
    int64_t groups = ceil_div(l->in, GROUP), tiles = ceil_div(num_rows, MR), stride = groups * GROUP;
    int64_t columns = min_of(PANEL, l->out - panel * PANEL);
    const int8_t *weights = (const int8_t *)l->weights + panel * stride * PANEL;
    const float *scales = l->scales + panel * groups * PANEL;
    const float *bias = l->bias ? l->bias + panel * PANEL : 0;
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t i = 0; i < PANEL; i++) sums[row * PANEL + i] = bias && i < columns ? bias[i] : 0;
    for (int64_t block = 0; block < groups; block += GROUPS) {
        int64_t end = min_of(block + GROUPS, groups);
        for (int64_t t = 0; t < tiles; t++) {
            int64_t row = num_rows * t / tiles, rows = num_rows * (t + 1) / tiles - row;
            const int16_t *x = integers(l) + (first + row) * stride;
            for (int64_t g = block; g < end; g++)
                multiply_tile(rows, x + g * GROUP, stride, row_scales(l) + (first + row) * groups + g, groups,
                              weights + g * GROUP * PANEL, scales + g * PANEL, sums + row * PANEL);
        }
    }
    for (int64_t row = 0; row < num_rows; row++) {
        float *y = l->y + (first + row) * l->y_stride + panel * PANEL;
        for (int64_t i = 0; i < columns; i++) y[i] = sums[row * PANEL + i];
    }
}
