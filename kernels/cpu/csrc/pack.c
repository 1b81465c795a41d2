/* Packs weights for pdserve_linear: panels of 16 outputs, see linear.c and linear_int8.c. */
#include <float.h>
#include <math.h>

#include "linear.h"
#include "pool.h"
#include "sizes.h"
#include "vec.h"

typedef struct {
    const float *weight; /* [out, in] */
    void *panels;
    float *scales; /* of int8 panels; NULL: fp32 */
    int64_t out, in, stride;
} Pack;

/* to[depth][16] := inputs [first, first + depth) of a panel; zeros where there is no input or no output. */
static void transpose(const Pack *p, int64_t panel, int64_t first, int64_t depth, float *to) {
    const float *from = p->weight + panel * PANEL * p->stride + first;
    int64_t columns = min_of(PANEL, p->out - panel * PANEL), rows = min_of(depth, p->in - first);
    for (int64_t k = 0; k < rows; k++)
        for (int64_t c = 0; c < PANEL; c++) to[k * PANEL + c] = c < columns ? from[c * p->stride + k] : 0;
    for (int64_t i = rows * PANEL; i < depth * PANEL; i++) to[i] = 0;
}

static void pack_floats(void *context, int64_t panel) {
    const Pack *p = context;
    transpose(p, panel, 0, p->in, (float *)p->panels + panel * p->in * PANEL);
}

/* A group with a weight that is not finite has a scale that is not either: it must not turn into an ordinary number. */
AVX2 static void pack_int8(void *context, int64_t panel) {
    const Pack *p = context;
    int64_t groups = ceil_div(p->in, GROUP);
    float block[GROUP * PANEL], largest[PANEL], poison[PANEL];
    for (int64_t g = 0; g < groups; g++) {
        int64_t at = panel * groups + g;
        float *scales = p->scales + at * PANEL;
        int8_t *to = (int8_t *)p->panels + at * GROUP * PANEL;
        transpose(p, panel, g * GROUP, GROUP, block);
        for (int64_t c = 0; c < PANEL; c++) largest[c] = FLT_MIN, poison[c] = 0;
        for (int64_t k = 0; k < GROUP; k++)
            for (int64_t c = 0; c < PANEL; c++) {
                float v = fabsf(block[k * PANEL + c]);
                largest[c] = v > largest[c] ? v : largest[c];
                poison[c] += v * 0;
            }
        for (int64_t c = 0; c < PANEL; c++) scales[c] = largest[c] / 127 + poison[c];
        for (int64_t k = 0; k < GROUP; k++)
            for (int64_t c = 0; c < PANEL; c++) {
                float v = rintf(block[k * PANEL + c] / scales[c]);
                v = v > 127 ? 127 : v >= -127 ? v : -127;
                to[((k / 2) * PANEL + c) * 2 + k % 2] = (int8_t)v;
            }
    }
}

/* Weights [out, in], `stride` floats from row to row, become panels: fp32 [out / 16, in, 16], or with scales
 * [out / 16, in / 64, 16] int8 [out / 16, in / 2, 16, 2], `in` then padded to whole groups. */
EXPORT void pdserve_pack(const float *weight, int64_t out, int64_t in, int64_t stride, void *panels, float *scales) {
    Pack p = {weight, panels, scales, out, in, stride};
    pool_run(scales ? pack_int8 : pack_floats, &p, ceil_div(out, PANEL));
}
