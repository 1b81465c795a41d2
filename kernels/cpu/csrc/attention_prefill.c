/* Prefill attention: bound by arithmetic. A tile of query rows (tokens times the heads of a group) meets the keys part
 * by part: keys and values are packed once per part and tile, then products of 6 x 16 are made in registers. */
#include "attention.h"

#include <stdlib.h>
#include <string.h>

#include "softmax.h"
#include "vec.h"

enum { MR = 6, NR = 16, BLOCK = 24 }; /* the register tile; rows whose scores are held at a time */

typedef struct {
    int64_t num_rows;
    int64_t v_width;     /* v_dim, padded to NR */
    int64_t begin, end;  /* of the part */
    float *query;        /* [num_rows, k_dim], rows padded to MR */
    float *keys;         /* [PART / NR, k_dim, NR] */
    float *values;       /* [v_width / NR, PART, NR] */
    float *sums;         /* [num_rows, v_width], rows padded to MR */
    float *top, *total;  /* [num_rows] */
} Tile;

AVX2_INLINE void transpose8(const float *from[8], int64_t d, float *to) {
    __m256 r0 = _mm256_loadu_ps(from[0] + d), r1 = _mm256_loadu_ps(from[1] + d);
    __m256 r2 = _mm256_loadu_ps(from[2] + d), r3 = _mm256_loadu_ps(from[3] + d);
    __m256 r4 = _mm256_loadu_ps(from[4] + d), r5 = _mm256_loadu_ps(from[5] + d);
    __m256 r6 = _mm256_loadu_ps(from[6] + d), r7 = _mm256_loadu_ps(from[7] + d);
    __m256 a0 = _mm256_unpacklo_ps(r0, r1), a1 = _mm256_unpackhi_ps(r0, r1);
    __m256 a2 = _mm256_unpacklo_ps(r2, r3), a3 = _mm256_unpackhi_ps(r2, r3);
    __m256 a4 = _mm256_unpacklo_ps(r4, r5), a5 = _mm256_unpackhi_ps(r4, r5);
    __m256 a6 = _mm256_unpacklo_ps(r6, r7), a7 = _mm256_unpackhi_ps(r6, r7);
    __m256 b0 = _mm256_shuffle_ps(a0, a2, 0x44), b1 = _mm256_shuffle_ps(a0, a2, 0xEE);
    __m256 b2 = _mm256_shuffle_ps(a1, a3, 0x44), b3 = _mm256_shuffle_ps(a1, a3, 0xEE);
    __m256 b4 = _mm256_shuffle_ps(a4, a6, 0x44), b5 = _mm256_shuffle_ps(a4, a6, 0xEE);
    __m256 b6 = _mm256_shuffle_ps(a5, a7, 0x44), b7 = _mm256_shuffle_ps(a5, a7, 0xEE);
    _mm256_storeu_ps(to + 0 * NR, _mm256_permute2f128_ps(b0, b4, 0x20));
    _mm256_storeu_ps(to + 1 * NR, _mm256_permute2f128_ps(b1, b5, 0x20));
    _mm256_storeu_ps(to + 2 * NR, _mm256_permute2f128_ps(b2, b6, 0x20));
    _mm256_storeu_ps(to + 3 * NR, _mm256_permute2f128_ps(b3, b7, 0x20));
    _mm256_storeu_ps(to + 4 * NR, _mm256_permute2f128_ps(b0, b4, 0x31));
    _mm256_storeu_ps(to + 5 * NR, _mm256_permute2f128_ps(b1, b5, 0x31));
    _mm256_storeu_ps(to + 6 * NR, _mm256_permute2f128_ps(b2, b6, 0x31));
    _mm256_storeu_ps(to + 7 * NR, _mm256_permute2f128_ps(b3, b7, 0x31));
}

/* Copies the part's tokens from `seen` on into panels; the others become zeros. */
AVX2 static void pack(const Attention *a, int64_t seq, int64_t kv_head, int64_t seen, Tile *tile) {
    const float *keys[PART], *values[PART];
    int64_t k_dim = a->k_dim, v_dim = a->v_dim, n = ceil_div(tile->end - tile->begin, NR) * NR;
    for (int64_t i = 0; i < n; i++) keys[i] = values[i] = NULL;
    for (int64_t at = seen; at < tile->end;) {
        Segment s = segment_at(a, seq, kv_head, at, tile->end);
        for (int64_t i = 0; i < s.num_tokens; i++) {
            keys[at - tile->begin + i] = s.keys + i * a->k_stride_token;
            values[at - tile->begin + i] = s.values + i * a->v_stride_token;
        }
        at += s.num_tokens;
    }
    for (int64_t i = 0; i < n; i += 8) {
        float *panel = tile->keys + i / NR * NR * k_dim + i % NR;
        int is_whole = 1;
        for (int j = 0; j < 8; j++) is_whole &= keys[i + j] != NULL;
        int64_t d = 0;
        if (is_whole)
            for (; d + 8 <= k_dim; d += 8) transpose8(keys + i, d, panel + d * NR);
        for (; d < k_dim; d++)
            for (int j = 0; j < 8; j++) panel[d * NR + j] = keys[i + j] ? keys[i + j][d] : 0;
    }
    for (int64_t i = 0; i < n; i++)
        for (int64_t d = 0; d < tile->v_width; d += NR) {
            float *to = tile->values + d * PART + i * NR;
            if (values[i] && d + NR <= v_dim)
                memcpy(to, values[i] + d, sizeof(float) * NR);
            else
                for (int64_t j = 0; j < NR; j++) to[j] = values[i] && d + j < v_dim ? values[i][d + j] : 0;
        }
}

/* c[MR][NR] = sum over `depth` of a[i][.] * b[.][NR]; a's rows lie a_stride apart. */
AVX2_INLINE void multiply(const float *a, int64_t a_stride, const float *b, int64_t depth, __m256 c[MR][2]) {
    const float *a3 = a + 3 * a_stride;
    UNROLL
    for (int i = 0; i < MR; i++) c[i][0] = c[i][1] = _mm256_setzero_ps();
    for (int64_t k = 0; k < depth; k++, a++, a3++, b += NR) {
        __m256 b0 = _mm256_loadu_ps(b), b1 = _mm256_loadu_ps(b + 8);
        UNROLL
        for (int i = 0; i < 3; i++) {
            __m256 x = _mm256_broadcast_ss(a + i * a_stride), y = _mm256_broadcast_ss(a3 + i * a_stride);
            c[i][0] = _mm256_fmadd_ps(x, b0, c[i][0]);
            c[i][1] = _mm256_fmadd_ps(x, b1, c[i][1]);
            c[i + 3][0] = _mm256_fmadd_ps(y, b0, c[i + 3][0]);
            c[i + 3][1] = _mm256_fmadd_ps(y, b1, c[i + 3][1]);
        }
    }
}

AVX2 static void multiply_keys(const float *query, int64_t k_dim, const float *panel, float *scores) {
    __m256 c[MR][2];
    multiply(query, k_dim, panel, k_dim, c);
    for (int i = 0; i < MR; i++) {
        _mm256_storeu_ps(scores + i * PART, c[i][0]);
        _mm256_storeu_ps(scores + i * PART + 8, c[i][1]);
    }
}

AVX2 static void multiply_values(const float *weights, int64_t depth, const float *strip, const float *fade,
                                 float *sums, int64_t width) {
    __m256 c[MR][2];
    multiply(weights, PART, strip, depth, c);
    for (int i = 0; i < MR; i++) {
        __m256 f = _mm256_broadcast_ss(fade + i);
        float *to = sums + i * width;
        _mm256_storeu_ps(to, _mm256_fmadd_ps(_mm256_loadu_ps(to), f, c[i][0]));
        _mm256_storeu_ps(to + 8, _mm256_fmadd_ps(_mm256_loadu_ps(to + 8), f, c[i][1]));
    }
}

/* What a query sees of a part, relative to the part's begin; nothing where lo >= hi. */
typedef struct {
    int64_t lo, hi;
} Range;

static inline Range seen_by(const Attention *a, const Tile *tile, int64_t position) {
    int64_t lo = max_of(first_seen(a, position), tile->begin), hi = min_of(position + 1, tile->end);
    return (Range){lo - tile->begin, hi - tile->begin};
}

/* One row's products with the panels become weights. Returns the factor on what the row has summed so far. */
AVX2_INLINE float update_row(const Attention *a, Tile *tile, int64_t row, float *scores, Range panels, Range seen) {
    int64_t n = panels.hi - panels.lo;
    if (seen.lo >= seen.hi) {
        memset(scores, 0, sizeof(float) * (size_t)n);
        return 1;
    }
    float before = tile->top[row], top = scale_row(a, scores, n, seen.lo - panels.lo, seen.hi - panels.lo);
    if (before > top) top = before;
    float fade = exp1(before - top);
    tile->total[row] = tile->total[row] * fade + weigh_row(scores, n, top);
    tile->top[row] = top;
    return fade;
}

/* Rows meet the packed part, BLOCK at a time, so that a panel is read into the first cache once for several of them.
 * `position` is that of the tile's first token. */
AVX2 static void attend_packed(const Attention *a, Tile *tile, int64_t group, int64_t position) {
    float scores[BLOCK * PART], fade[BLOCK];
    for (int64_t row = 0; row < tile->num_rows; row += BLOCK) {
        int64_t end = min_of(row + BLOCK, tile->num_rows), padded = ceil_div(end - row, MR) * MR;
        Range early = seen_by(a, tile, position + row / group), late = seen_by(a, tile, position + (end - 1) / group);
        Range panels = {early.lo / NR * NR, ceil_div(late.hi, NR) * NR};
        if (late.hi <= early.lo) continue;
        for (int64_t at = panels.lo; at < panels.hi; at += NR)
            for (int64_t r = 0; r < padded; r += MR)
                multiply_keys(tile->query + (row + r) * a->k_dim, a->k_dim, tile->keys + at * a->k_dim,
                              scores + r * PART + at - panels.lo);
        for (int64_t r = 0; r < padded; r++) {
            Range seen = seen_by(a, tile, position + (row + r) / group);
            fade[r] = row + r < end ? update_row(a, tile, row + r, scores + r * PART, panels, seen) : 1;
        }
        for (int64_t d = 0; d < tile->v_width; d += NR)
            for (int64_t r = 0; r < padded; r += MR)
                multiply_values(scores + r * PART, panels.hi - panels.lo, tile->values + d * PART + panels.lo * NR,
                                fade + r, tile->sums + (row + r) * tile->v_width + d, tile->v_width);
    }
}

/* Buffers of a tile, 64-byte aligned, in one allocation; NULL: no memory. */
static float *allocate(Tile *tile, int64_t k_dim) {
    int64_t padded = ceil_div(tile->num_rows, MR) * MR, aligned = ceil_div(padded, NR) * NR;
    size_t floats = (size_t)(aligned * (k_dim + tile->v_width + 2) + PART * (k_dim + tile->v_width));
    float *memory = aligned_alloc(64, floats * sizeof(float));
    if (!memory) return NULL;
    tile->keys = memory;
    tile->values = tile->keys + PART * k_dim;
    tile->query = tile->values + PART * tile->v_width;
    tile->sums = tile->query + aligned * k_dim;
    tile->top = tile->sums + aligned * tile->v_width;
    tile->total = tile->top + aligned;
    memset(tile->query, 0, sizeof(float) * (size_t)(aligned * (k_dim + tile->v_width)));
    for (int64_t r = 0; r < padded; r++) tile->top[r] = -INFINITY, tile->total[r] = 0;
    return memory;
}

AVX2 int attend_tile(const Attention *a, int64_t seq, int64_t kv_head, int64_t first, int64_t last) {
    int64_t group = a->num_heads / a->num_kv_heads, start = a->query_starts[seq];
    int64_t position = a->kv_lens[seq] - (a->query_starts[seq + 1] - start) + first;
    Tile tile = {.num_rows = (last - first) * group, .v_width = ceil_div(a->v_dim, NR) * NR};
    float *memory = allocate(&tile, a->k_dim);
    if (!memory) return NO_MEMORY;
    for (int64_t r = 0; r < tile.num_rows; r++) {
        int64_t token = start + first + r / group, head = kv_head * group + r % group;
        memcpy(tile.query + r * a->k_dim, a->query + token * a->q_stride_token + head * a->q_stride_head,
               sizeof(float) * (size_t)a->k_dim);
    }
    int64_t seen = first_seen(a, position), end = position + last - first;
    for (tile.begin = seen / PART * PART; tile.begin < end; tile.begin += PART) {
        tile.end = min_of(tile.begin + PART, end);
        pack(a, seq, kv_head, max_of(seen, tile.begin), &tile);
        attend_packed(a, &tile, group, position);
    }
    for (int64_t r = 0; r < tile.num_rows; r++) {
        int64_t head = kv_head * group + r % group;
        float factor = output_factor(a, head, tile.top[r], tile.total[r]);
        float *out = a->output + ((start + first + r / group) * a->num_heads + head) * a->v_dim;
        for (int64_t d = 0; d < a->v_dim; d++) out[d] = tile.sums[r * tile.v_width + d] * factor;
    }
    free(memory);
    return DONE;
}
