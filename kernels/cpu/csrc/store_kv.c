/* Copies the KV of new tokens into their slots; see kernels/reference.py. It waits for memory: one thread does it. */
#include "store_kv.h"

#include <string.h>

EXPORT int pdserve_store_kv(const StoreKV *s) {
    for (int64_t token = 0; token < s->num_tokens; token++)
        if (s->slots[token] < -1 || s->slots[token] >= s->num_pages * s->page_size) return BAD_INDEX;
    for (int64_t token = 0; token < s->num_tokens; token++) {
        if (s->slots[token] < 0) continue; /* a padded row */
        int64_t page = s->slots[token] / s->page_size, offset = s->slots[token] % s->page_size;
        const float *key = s->keys + token * s->k_stride_token, *value = s->values + token * s->v_stride_token;
        float *key_to = s->key_pages + page * s->key_page_stride + offset * s->key_page_stride_token;
        float *value_to = s->value_pages + page * s->value_page_stride + offset * s->value_page_stride_token;
        for (int64_t head = 0; head < s->num_heads; head++) {
            memcpy(key_to + head * s->key_page_stride_head, key + head * s->k_stride_head,
                   sizeof(float) * (size_t)s->k_dim);
            memcpy(value_to + head * s->value_page_stride_head, value + head * s->v_stride_head,
                   sizeof(float) * (size_t)s->v_dim);
        }
    }
    return DONE;
}
