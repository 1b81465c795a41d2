/* Arguments of pdserve_store_kv. Strides count floats; last dimensions are contiguous. */
#ifndef PDSERVE_STORE_KV_H
#define PDSERVE_STORE_KV_H

#include <stdint.h>

#include "status.h"

typedef struct {
    const float *keys;    /* [num_tokens, num_heads, k_dim] */
    const float *values;  /* [num_tokens, num_heads, v_dim] */
    float *key_pages;     /* [num_pages, num_heads, page_size, k_dim] */
    float *value_pages;   /* [num_pages, num_heads, page_size, v_dim] */
    const int64_t *slots; /* [num_tokens]; -1: not stored */
    int64_t num_tokens, num_pages, num_heads, k_dim, v_dim, page_size;
    int64_t k_stride_token, k_stride_head, v_stride_token, v_stride_head;
    int64_t key_page_stride, key_page_stride_head, key_page_stride_token;
    int64_t value_page_stride, value_page_stride_head, value_page_stride_token;
} StoreKV;

/* Returns 0 or BAD_INDEX. */
EXPORT int pdserve_store_kv(const StoreKV *s);

#endif
