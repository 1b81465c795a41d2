/* Arguments of pdserve_linear. Strides count floats; last dimensions are contiguous. */
#ifndef PDSERVE_LINEAR_H
#define PDSERVE_LINEAR_H

#include <stdint.h>

#include "status.h"

typedef struct {
    const float *x;             /* [num_rows, in] */
    const void *weights;        /* packed: float, or int8_t where there are scales */
    const float *scales;        /* of int8 weights; NULL: fp32 */
    void *workspace;            /* of int8 weights: num_rows * ceil(in / GROUP) * (2 GROUP + 4) bytes */
    const float *bias;          /* [out] or NULL */
    float *y;                   /* [num_rows, out] */
    int64_t num_rows, in, out, x_stride, y_stride;
} Linear;

/* Outputs of a panel; rows for which weights are read once; inputs that share a scale, where weights are int8. */
enum { PANEL = 16, ROWS = 192, GROUP = 64 };

EXPORT void pdserve_linear(const Linear *l);

/* Int8 weights: rows become integers in the workspace; then rows [first, first + num_rows) (ROWS at most) of a panel. */
void int8_rows(const Linear *l);
void int8_panel(const Linear *l, int64_t panel, int64_t first, int64_t num_rows);

#endif
