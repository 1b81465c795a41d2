/* y = x W' + b with W packed once, in panels of 16 columns: [out / 16, in, 16], the last panel padded with zeros.
 *
 * Every product is summed along `in` in blocks of DEPTH, in order, whatever the number of rows: a row's bits do not
 * depend on the others.
 * Weights are read from memory once for up to ROWS rows, one after the other; a block of DEPTH x 16 stays in the first
 * cache while the rows pass it, six at most at a time in registers. Each pass asks for the next block, or memory would
 * rest while all rows but the first six are computed. One or two rows wait for memory only: asking just costs them.
 *
 * Int8 weights: linear_int8.c.
 */
#include "linear.h"

#include "pool.h"
#include "sizes.h"
#include "vec.h"

enum { MR = 6, NR = PANEL, DEPTH = 256, ITEMS_PER_THREAD = 6, FLOATS_PER_ITEM = 1 << 13 };
enum { AHEAD = DEPTH * NR, ASKING_ROWS = 3 };

typedef struct {
    const Linear *l;
    void (*run_panel)(const Linear *l, int64_t panel, int64_t first, int64_t num_rows);
    int64_t panels_per_item, items_per_block; /* an item: so many panels, for one block of rows */
} Plan;

/* y[rows][16] := (y, or start) + x[rows][depth] weights[depth][16]; of y only the lanes low and high are touched. */
AVX2_INLINE void multiply(const int rows, const int is_whole, const float *x, int64_t x_stride, const float *weights,
                          int64_t depth, int64_t ahead, const float *start, float *y, int64_t y_stride, __m256i low,
                          __m256i high) {
    __m256 sum[MR][2];
    const float *x3 = x + 3 * x_stride;
    UNROLL
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
    for (int64_t k = 0; k < depth; k++, x++, x3++, weights += NR) {
        _mm_prefetch((const char *)(weights + ahead), _MM_HINT_T0);
        __m256 w0 = _mm256_loadu_ps(weights), w1 = _mm256_loadu_ps(weights + 8);
        UNROLL
        for (int r = 0; r < rows; r++) {
            __m256 v = _mm256_broadcast_ss(r < 3 ? x + r * x_stride : x3 + (r - 3) * x_stride);
            sum[r][0] = _mm256_fmadd_ps(v, w0, sum[r][0]);
            sum[r][1] = _mm256_fmadd_ps(v, w1, sum[r][1]);
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
        float *to = y + r * y_stride;
        const float *from = start ? start : to;
        if (is_whole) {
            _mm256_storeu_ps(to, _mm256_add_ps(_mm256_loadu_ps(from), sum[r][0]));
            _mm256_storeu_ps(to + 8, _mm256_add_ps(_mm256_loadu_ps(from + 8), sum[r][1]));
        } else {
            _mm256_maskstore_ps(to, low, _mm256_add_ps(_mm256_maskload_ps(from, low), sum[r][0]));
            _mm256_maskstore_ps(to + 8, high, _mm256_add_ps(_mm256_maskload_ps(from + 8, high), sum[r][1]));
        }
    }
}

AVX2 static void multiply_tile(int64_t rows, const float *x, int64_t x_stride, const float *weights, int64_t depth,
                               int64_t ahead, const float *start, float *y, int64_t y_stride, int64_t columns) {
    __m256i low = first_lanes(min_of(columns, 8)), high = first_lanes(max_of(columns - 8, 0));
#define CASE(r)                                                                            \
    case r:                                                                                \
        if (columns >= NR)                                                                 \
            multiply(r, 1, x, x_stride, weights, depth, ahead, start, y, y_stride, low, high);\
        else                                                                               \
            multiply(r, 0, x, x_stride, weights, depth, ahead, start, y, y_stride, low, high);\
        break;
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
}

static void float_panel(const Linear *l, int64_t panel, int64_t first, int64_t num_rows) {
    static const float zeros[NR];
    int64_t ahead = num_rows >= ASKING_ROWS ? AHEAD : 0; /* 0: what is read next anyway, which costs nothing */
    int64_t tiles = ceil_div(num_rows, MR), column = panel * NR;
    float start[NR];
    for (int64_t i = 0; i < NR; i++) start[i] = l->bias && column + i < l->out ? l->bias[column + i] : zeros[i];
    for (int64_t k = 0; k < l->in; k += DEPTH) {
        int64_t depth = min_of(DEPTH, l->in - k), at = (panel * l->in + k) * NR;
        const float *weights = (const float *)l->weights + at;
        for (int64_t t = 0; t < tiles; t++) {
            int64_t row = first + num_rows * t / tiles, end = first + num_rows * (t + 1) / tiles;
            multiply_tile(end - row, l->x + row * l->x_stride + k, l->x_stride, weights, depth, ahead, k ? 0 : start,
                          l->y + row * l->y_stride + column, l->y_stride, l->out - column);
        }
    }
}

static void run_item(void *context, int64_t item) {
    const Plan *plan = context;
    const Linear *l = plan->l;
    int64_t first = item / plan->items_per_block * ROWS, num_rows = min_of(ROWS, l->num_rows - first);
    int64_t panel = item % plan->items_per_block * plan->panels_per_item;
    int64_t end = min_of(panel + plan->panels_per_item, ceil_div(l->out, NR));
    for (; panel < end; panel++) plan->run_panel(l, panel, first, num_rows);
}

void pdserve_linear(const Linear *l) {
    if (l->scales) int8_rows(l);
    int64_t panels = ceil_div(l->out, NR), wanted = ITEMS_PER_THREAD * pool_threads();
    int64_t least = ceil_div(FLOATS_PER_ITEM, l->in * NR);
    Plan plan = {.l = l, .run_panel = l->scales ? int8_panel : float_panel};
    plan.panels_per_item = max_of(ceil_div(panels, wanted), least);
    plan.items_per_block = ceil_div(panels, plan.panels_per_item);
    pool_run(run_item, &plan, plan.items_per_block * ceil_div(l->num_rows, ROWS));
}
