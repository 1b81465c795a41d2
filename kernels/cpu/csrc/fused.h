/* Elementwise kernels of the lean path; see fused.c. */
#ifndef PDSERVE_FUSED_H
#define PDSERVE_FUSED_H

#include <stdint.h>

#include "status.h"

/* residual may be NULL; output may be x. */
EXPORT void pdserve_rms_norm(const float *x, const float *weight, float *output, float *residual, int64_t num_rows,
                             int64_t columns, int64_t x_stride, int64_t output_stride, int64_t residual_stride,
                             float epsilon);

/* Returns 0 or BAD_INDEX. */
EXPORT int pdserve_rotate(float *x, const int64_t *positions, const float *table, int64_t num_tokens,
                          int64_t num_heads, int64_t half, int64_t stride_token, int64_t stride_head,
                          int64_t table_rows, int64_t table_stride);

EXPORT void pdserve_silu_mul(const float *gate_up, float *output, int64_t num_rows, int64_t columns,
                             int64_t gate_up_stride, int64_t output_stride);

#endif
