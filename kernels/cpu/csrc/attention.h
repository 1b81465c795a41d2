/* Causal fp32 attention over KV pages read in place. See kernels/reference.py for the meaning of each argument.
 *
 * A sequence's tokens are divided at multiples of PART: a part's softmax is computed whole, then merged into the rows'
 * running state, parts in order. So a row's bits depend on its own sequence alone, and on whether it is that one's only
 * new token; not on other sequences, the number of threads or which thread did what. Tokens of a page outside of the
 * sequence are never read.
 */
#ifndef PDSERVE_ATTENTION_H
#define PDSERVE_ATTENTION_H

#include <stdint.h>

#include "sizes.h"
#include "status.h"

enum { PART = 128 };

/* Strides count floats; the last dimension of every tensor is contiguous. */
typedef struct {
    const float *query;         /* [num_tokens, num_heads, k_dim] */
    const float *key_pages;     /* [num_pages, num_kv_heads, page_size, k_dim] */
    const float *value_pages;   /* [num_pages, num_kv_heads, page_size, v_dim] */
    const int64_t *page_tables; /* [num_seqs, max_pages] */
    const int64_t *query_starts; /* [num_seqs + 1] */
    const int64_t *kv_lens;     /* [num_seqs] */
    const float *sinks;         /* [num_heads] or NULL */
    float *output;              /* [num_tokens, num_heads, v_dim], contiguous */
    int64_t num_tokens, num_seqs, max_pages, num_pages;
    int64_t num_heads, num_kv_heads, k_dim, v_dim, page_size;
    int64_t q_stride_token, q_stride_head;
    int64_t k_stride_page, k_stride_head, k_stride_token;
    int64_t v_stride_page, v_stride_head, v_stride_token;
    int64_t table_stride;
    int64_t window; /* 0: none */
    float scale, softcap; /* softcap 0: none */
} Attention;

/* Consecutive tokens of one page. */
typedef struct {
    const float *keys, *values;
    int64_t num_tokens;
} Segment;

/* The tokens from `position` to the end of their page, not past `end`. */
static inline Segment segment_at(const Attention *a, int64_t seq, int64_t kv_head, int64_t position, int64_t end) {
    int64_t page = a->page_tables[seq * a->table_stride + position / a->page_size];
    int64_t offset = position % a->page_size;
    int64_t in_page = a->page_size - offset;
    Segment s = {
        a->key_pages + page * a->k_stride_page + kv_head * a->k_stride_head + offset * a->k_stride_token,
        a->value_pages + page * a->v_stride_page + kv_head * a->v_stride_head + offset * a->v_stride_token,
        in_page < end - position ? in_page : end - position,
    };
    return s;
}

/* The first token that the query at `position` sees. */
static inline int64_t first_seen(const Attention *a, int64_t position) {
    return a->window ? max_of(0, position - a->window + 1) : 0;
}

/* Softmax state of some rows: largest score, sum of weights, weighted sum of values [rows, v_dim]. */
typedef struct {
    float *top, *total, *values;
} State;

/* All of it. Returns 0, NO_MEMORY or BAD_INDEX. */
EXPORT int pdserve_paged_attention(const Attention *a);

/* Decode: the one new token of a sequence. State of tokens [begin, end), at most PART, for a head group's rows. */
void attend_part(const Attention *a, int64_t seq, int64_t kv_head, int64_t begin, int64_t end, State state);
/* into := into merged with the state of the part after it. */
void merge_part(const Attention *a, State into, State part);
/* Writes the output rows of a head group's token. */
void finish_decode(const Attention *a, int64_t seq, int64_t kv_head, State state);

/* Prefill: output of the new tokens [first, last) of a sequence for one head group. Returns 0 or NO_MEMORY. */
int attend_tile(const Attention *a, int64_t seq, int64_t kv_head, int64_t first, int64_t last);

#endif
