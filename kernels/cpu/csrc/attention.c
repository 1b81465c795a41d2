/* Divides a batch into items for the pool: tiles of new tokens, and decodes, in pieces where they are few. */
#include "attention.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "pool.h"

enum {
    TILE_ROWS = 192,         /* query rows of a tile, at most (or one token's) */
    LEAST_ROWS = 48,         /* fewer do not pay for packing the keys once more */
    ITEMS_PER_THREAD = 4,    /* enough for an even load */
    SERIAL_FLOATS = 1 << 14, /* of KV; less is done before another thread wakes */
};

/* How one sequence is divided; its items are numbered after those of the sequences before it. */
typedef struct {
    int64_t first_item, num_items;
    int64_t tile_tokens;           /* tokens of a tile; 0: decode */
    int64_t first_part, num_parts; /* decode: parts that the token sees */
    float *states;                 /* decode in pieces: [num_kv_heads, num_parts] states; NULL: whole */
} Share;

typedef struct {
    const Attention *a;
    Share *shares; /* [num_seqs] */
    int64_t parts_per_item;
    atomic_int failed;
} Plan;

static int64_t state_floats(const Attention *a) { return a->num_heads / a->num_kv_heads * (a->v_dim + 2); }

static State state_at(const Attention *a, float *memory) {
    int64_t group = a->num_heads / a->num_kv_heads;
    State s = {memory, memory + group, memory + 2 * group};
    return s;
}

static void attend_numbered(const Attention *a, int64_t seq, int64_t kv_head, int64_t part, State state) {
    int64_t kv_len = a->kv_lens[seq], seen = first_seen(a, kv_len - 1);
    attend_part(a, seq, kv_head, max_of(part * PART, seen), min_of((part + 1) * PART, kv_len), state);
}

static int decode_whole(const Attention *a, int64_t seq, const Share *share, int64_t kv_head) {
    float *memory = malloc(sizeof(float) * (size_t)(2 * state_floats(a)));
    if (!memory) return NO_MEMORY;
    State state = state_at(a, memory), part = state_at(a, memory + state_floats(a));
    attend_numbered(a, seq, kv_head, share->first_part, state);
    for (int64_t i = 1; i < share->num_parts; i++) {
        attend_numbered(a, seq, kv_head, share->first_part + i, part);
        merge_part(a, state, part);
    }
    finish_decode(a, seq, kv_head, state);
    free(memory);
    return DONE;
}

static void decode_piece(const Plan *plan, int64_t seq, const Share *share, int64_t index) {
    const Attention *a = plan->a;
    int64_t pieces = share->num_items / a->num_kv_heads, kv_head = index / pieces;
    int64_t first = index % pieces * plan->parts_per_item;
    int64_t last = min_of(first + plan->parts_per_item, share->num_parts);
    for (int64_t i = first; i < last; i++)
        attend_numbered(a, seq, kv_head, share->first_part + i,
                        state_at(a, share->states + (kv_head * share->num_parts + i) * state_floats(a)));
}

static void merge_pieces(const Plan *plan, int64_t seq, const Share *share) {
    const Attention *a = plan->a;
    for (int64_t kv_head = 0; kv_head < a->num_kv_heads; kv_head++) {
        float *first = share->states + kv_head * share->num_parts * state_floats(a);
        State state = state_at(a, first);
        for (int64_t i = 1; i < share->num_parts; i++) merge_part(a, state, state_at(a, first + i * state_floats(a)));
        finish_decode(a, seq, kv_head, state);
    }
}

static void run_item(void *context, int64_t item) {
    Plan *plan = context;
    const Attention *a = plan->a;
    int64_t low = 0, high = a->num_seqs; /* the sequence of the item lies in [low, high) */
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (plan->shares[middle].first_item <= item)
            low = middle;
        else
            high = middle;
    }
    const Share *share = &plan->shares[low];
    int64_t index = item - share->first_item;
    if (share->states) {
        decode_piece(plan, low, share, index);
        return;
    }
    int result;
    if (share->tile_tokens == 0) {
        result = decode_whole(a, low, share, index);
    } else {
        /* The last tile sees most keys: it comes first. */
        int64_t num_new = a->query_starts[low + 1] - a->query_starts[low];
        int64_t tiles = share->num_items / a->num_kv_heads;
        int64_t first = (tiles - 1 - index / a->num_kv_heads) * share->tile_tokens;
        result = attend_tile(a, low, index % a->num_kv_heads, first, min_of(first + share->tile_tokens, num_new));
    }
    if (result) atomic_store(&plan->failed, 1);
}

/* Tokens of a tile: large ones pack the keys less often, small ones keep all threads busy. */
static int64_t choose_tile(const Attention *a, int64_t num_new, int64_t num_threads) {
    int64_t group = a->num_heads / a->num_kv_heads;
    int64_t tiles = ceil_div(ITEMS_PER_THREAD * num_threads, a->num_kv_heads);
    int64_t tokens = max_of(ceil_div(num_new, tiles), ceil_div(LEAST_ROWS, group));
    return max_of(1, min_of(tokens, TILE_ROWS / group));
}

/* Fills the shares. Returns the number of items, or NO_MEMORY. */
static int64_t divide(Plan *plan, int64_t num_threads, float **states) {
    const Attention *a = plan->a;
    int64_t num_items = 0, decode_parts = 0, most_parts = 0;
    for (int64_t i = 0; i < a->num_seqs; i++) {
        Share *share = &plan->shares[i];
        int64_t num_new = a->query_starts[i + 1] - a->query_starts[i];
        *share = (Share){0};
        if (num_new == 1) {
            share->first_part = first_seen(a, a->kv_lens[i] - 1) / PART;
            share->num_parts = ceil_div(a->kv_lens[i], PART) - share->first_part;
            share->num_items = a->num_kv_heads;
            decode_parts += share->num_parts * a->num_kv_heads;
            most_parts = max_of(most_parts, share->num_parts);
        } else if (num_new > 1) {
            share->tile_tokens = choose_tile(a, num_new, num_threads);
            share->num_items = ceil_div(num_new, share->tile_tokens) * a->num_kv_heads;
        }
        num_items += share->num_items;
    }
    *states = NULL;
    if (decode_parts && num_threads > 1 && num_items < ITEMS_PER_THREAD * num_threads && most_parts > 1) {
        plan->parts_per_item = ceil_div(decode_parts, ITEMS_PER_THREAD * num_threads);
        *states = malloc(sizeof(float) * (size_t)(decode_parts * state_floats(a)));
        if (!*states) return NO_MEMORY;
    }
    num_items = 0;
    float *next = *states;
    for (int64_t i = 0; i < a->num_seqs; i++) {
        Share *share = &plan->shares[i];
        if (next && share->num_parts) {
            share->states = next;
            share->num_items = a->num_kv_heads * ceil_div(share->num_parts, plan->parts_per_item);
            next += a->num_kv_heads * share->num_parts * state_floats(a);
        }
        share->first_item = num_items;
        num_items += share->num_items;
    }
    return num_items;
}

/* Floats of KV that the batch reads: whether other threads are worth waking. */
static int64_t num_floats(const Attention *a) {
    int64_t tokens = 0;
    for (int64_t i = 0; i < a->num_seqs; i++)
        tokens += min_of(a->kv_lens[i], a->window ? a->window : a->kv_lens[i])
                  * (a->query_starts[i + 1] - a->query_starts[i]);
    return tokens * a->num_kv_heads * (a->k_dim + a->v_dim);
}

/* Whether the sequences are all of the new tokens, lengths fit together and every page that is read exists. */
static int is_sound(const Attention *a) {
    if (a->query_starts[0] != 0 || a->query_starts[a->num_seqs] != a->num_tokens) return 0;
    for (int64_t i = 0; i < a->num_seqs; i++) {
        int64_t num_new = a->query_starts[i + 1] - a->query_starts[i], kv_len = a->kv_lens[i];
        if (num_new < 0 || num_new > kv_len || kv_len > a->max_pages * a->page_size) return 0;
        if (num_new == 0) continue;
        const int64_t *table = a->page_tables + i * a->table_stride;
        for (int64_t j = first_seen(a, kv_len - num_new) / a->page_size; j < ceil_div(kv_len, a->page_size); j++)
            if (table[j] < 0 || table[j] >= a->num_pages) return 0;
    }
    return 1;
}

EXPORT int pdserve_paged_attention(const Attention *a) {
    Plan plan = {.a = a};
    float *states = NULL;
    if (!is_sound(a)) return BAD_INDEX;
    if (a->num_seqs == 0) return DONE;
    plan.shares = malloc(sizeof(Share) * (size_t)a->num_seqs);
    if (!plan.shares) return NO_MEMORY;
    int64_t threads = num_floats(a) < SERIAL_FLOATS ? 1 : pool_threads();
    int64_t num_items = divide(&plan, threads, &states);
    if (num_items >= 0) {
        if (threads > 1)
            pool_run(run_item, &plan, num_items);
        else
            for (int64_t i = 0; i < num_items; i++) run_item(&plan, i);
        for (int64_t i = 0; states && i < a->num_seqs; i++)
            if (plan.shares[i].states) merge_pieces(&plan, i, &plan.shares[i]);
    }
    free(states);
    free(plan.shares);
    return num_items < 0 || atomic_load(&plan.failed) ? NO_MEMORY : DONE;
}
