/* Arguments of pdserve_linear. Strides count floats; last dimensions are contiguous. */
#ifndef PDSERVE_LINEAR_H
#define PDSERVE_LINEAR_H

#include <stdint.h>

#include "status.h"

typedef struct {
    const float *x;             /* [num_rows, in] */
    const float *weights;       /* packed; NULL: int8 */
    const int8_t *int8_weights; /* packed; NULL: fp32 */
    const float *scales;        /* of int8 weights; NULL: fp32 */
    const float *bias;          /* [out] or NULL */
    float *y;                   /* [num_rows, out] */
    int64_t num_rows, in, out, x_stride, y_stride;
} Linear;

EXPORT void pdserve_linear(const Linear *l);

#endif
