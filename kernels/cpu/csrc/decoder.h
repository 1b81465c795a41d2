/* Arguments of pdserve_decoder: all layers of a decoder in one call. Tensors are contiguous but for the pages. */
#ifndef PDSERVE_DECODER_H
#define PDSERVE_DECODER_H

#include <stdint.h>

#include "status.h"

/* A linear: see linear.h. */
typedef struct {
    const void *weights;
    const float *scales, *bias;
    int64_t in, out;
} Packed;

typedef struct {
    const float *attention_norm, *query_norm, *key_norm, *mlp_norm; /* query_norm and key_norm: both or none */
    float *key_pages, *value_pages;
    int64_t window; /* 0: none */
    Packed qkv, out, gate_up, down;
} Layer;

typedef struct {
    const Layer *layers;
    const float *norm;     /* the last one's weight */
    const float *rotation; /* [num_tokens, head_dim], cosines and sines */
    const int64_t *positions; /* [num_tokens], rows of `rotation` */
    const int64_t *page_tables, *query_starts, *kv_lens, *slots; /* see attention.h and store_kv.h */
    const int64_t *rows;   /* [num_rows], the tokens whose answer is wanted */
    float *hidden;         /* [num_tokens, hidden_size]: embeddings, overwritten */
    float *answer;         /* [num_rows, hidden_size]: normed */
    /* Memory to work in, each for max(num_tokens, num_rows) rows. */
    float *normed, *kept, *delta;  /* hidden_size */
    float *heads;          /* (num_heads + 2 num_kv_heads) head_dim */
    float *attended;       /* num_heads head_dim */
    float *gate_up, *gated; /* 2 intermediate_size and intermediate_size */
    void *workspace;       /* of int8 linears: enough for each */
    int64_t num_layers, num_tokens, num_rows, num_seqs, max_pages, table_stride, num_pages, page_size;
    int64_t num_heads, num_kv_heads, head_dim, hidden_size, intermediate_size;
    int64_t k_stride_page, k_stride_head, k_stride_token, v_stride_page, v_stride_head, v_stride_token;
    float epsilon, scale;
} Decoder;

/* Returns 0, NO_MEMORY or BAD_INDEX. */
EXPORT int pdserve_decoder(const Decoder *d);

#endif
