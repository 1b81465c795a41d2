/* All layers of a decoder in one call: what engine/models/lean.py says in Python, with the same kernels in the same
 * order and thus the same bits. Between kernels nothing else runs: a step of one token has 300 of them, and Python takes
 * longer between two than some of them last.
 */
#include "decoder.h"

#include <string.h>

#include "attention.h"
#include "fused.h"
#include "linear.h"
#include "store_kv.h"

static void multiply(const Decoder *d, const Packed *p, const float *x, int64_t num_rows, float *y) {
    Linear l = {x, p->weights, p->scales, d->workspace, p->bias, y, num_rows, p->in, p->out, p->in, p->out};
    pdserve_linear(&l);
}

/* residual := residual + delta (or stays, without), output := its norm. */
static void add_norm(const Decoder *d, float *residual, const float *delta, const float *weight, int64_t num_rows,
                     float *output) {
    int64_t n = d->hidden_size;
    pdserve_rms_norm(delta ? delta : residual, weight, output, delta ? residual : NULL, num_rows, n, n, n, n,
                     d->epsilon);
}

static int attend(const Decoder *d, const Layer *l) {
    int64_t dim = d->head_dim, num_rotated = d->num_heads + d->num_kv_heads;
    int64_t stride = (num_rotated + d->num_kv_heads) * dim;
    float *query = d->heads, *key = query + d->num_heads * dim, *value = query + num_rotated * dim;
    for (int64_t i = 0; l->query_norm && i < d->num_tokens; i++) {
        float *q = query + i * stride, *k = key + i * stride;
        pdserve_rms_norm(q, l->query_norm, q, NULL, d->num_heads, dim, dim, dim, 0, d->epsilon);
        pdserve_rms_norm(k, l->key_norm, k, NULL, d->num_kv_heads, dim, dim, dim, 0, d->epsilon);
    }
    int status = pdserve_rotate(query, d->positions, d->rotation, d->num_tokens, num_rotated, dim / 2, stride, dim,
                                d->num_tokens, dim);
    if (status) return status;
    StoreKV s = {
        .keys = key, .values = value, .key_pages = l->key_pages, .value_pages = l->value_pages, .slots = d->slots,
        .num_tokens = d->num_tokens, .num_pages = d->num_pages, .num_heads = d->num_kv_heads,
        .k_dim = dim, .v_dim = dim, .page_size = d->page_size,
        .k_stride_token = stride, .k_stride_head = dim, .v_stride_token = stride, .v_stride_head = dim,
        .key_page_stride = d->k_stride_page, .key_page_stride_head = d->k_stride_head,
        .key_page_stride_token = d->k_stride_token, .value_page_stride = d->v_stride_page,
        .value_page_stride_head = d->v_stride_head, .value_page_stride_token = d->v_stride_token,
    };
    if ((status = pdserve_store_kv(&s))) return status;
    Attention a = {
        .query = query, .key_pages = l->key_pages, .value_pages = l->value_pages, .page_tables = d->page_tables,
        .query_starts = d->query_starts, .kv_lens = d->kv_lens, .output = d->attended,
        .num_tokens = d->num_tokens, .num_seqs = d->num_seqs, .max_pages = d->max_pages, .num_pages = d->num_pages,
        .num_heads = d->num_heads, .num_kv_heads = d->num_kv_heads, .k_dim = dim, .v_dim = dim,
        .page_size = d->page_size, .q_stride_token = stride, .q_stride_head = dim,
        .k_stride_page = d->k_stride_page, .k_stride_head = d->k_stride_head, .k_stride_token = d->k_stride_token,
        .v_stride_page = d->v_stride_page, .v_stride_head = d->v_stride_head, .v_stride_token = d->v_stride_token,
        .table_stride = d->table_stride, .window = l->window, .scale = d->scale,
    };
    return pdserve_paged_attention(&a);
}

/* to[i] := from[rows[i]] */
static void gather(const Decoder *d, const float *from, int64_t width, float *to) {
    for (int64_t i = 0; i < d->num_rows; i++)
        memcpy(to + i * width, from + d->rows[i] * width, sizeof(float) * (size_t)width);
}

EXPORT int pdserve_decoder(const Decoder *d) {
    int64_t num_rows = d->num_tokens;
    float *hidden = d->hidden, *delta = NULL, *attended = d->attended;
    for (int64_t i = 0; i < d->num_rows; i++)
        if (d->rows[i] < 0 || d->rows[i] >= d->num_tokens) return BAD_INDEX;
    for (int64_t i = 0; i < d->num_layers; i++) {
        const Layer *l = &d->layers[i];
        add_norm(d, hidden, delta, l->attention_norm, num_rows, d->normed);
        multiply(d, &l->qkv, d->normed, num_rows, d->heads);
        int status = attend(d, l);
        if (status) return status;
        if (i == d->num_layers - 1) { /* what follows is asked for in some rows only */
            gather(d, d->attended, d->num_heads * d->head_dim, d->heads); /* heads are stored and read by now */
            gather(d, hidden, d->hidden_size, d->kept);
            num_rows = d->num_rows, hidden = d->kept, attended = d->heads;
        }
        delta = d->delta;
        multiply(d, &l->out, attended, num_rows, delta);
        add_norm(d, hidden, delta, l->mlp_norm, num_rows, d->normed);
        multiply(d, &l->gate_up, d->normed, num_rows, d->gate_up);
        pdserve_silu_mul(d->gate_up, d->gated, num_rows, d->intermediate_size, 2 * d->intermediate_size,
                         d->intermediate_size);
        multiply(d, &l->down, d->gated, num_rows, delta);
    }
    add_norm(d, hidden, delta, d->norm, num_rows, d->answer);
    return DONE;
}
