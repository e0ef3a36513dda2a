/* h2o_rows: an engine keeps KV in memory of its own, and a sparse policy evicts tokens.
 *
 *   h2o_rows [SPEC OF A SPARSE POLICY THAT EVICTS FOR THE WHOLE LAYER]
 *
 * Default: h2o(sink=4,recent=32,budget=60,heads=all). H2O keeps the first tokens, the newest ones,
 * and those in between that received the most attention so far. After the prompt and after each
 * step the engine passes that attention to the policy, and removes the rows that it evicts. There
 * is no store. */
#include "must.h"
#include <math.h>

enum { LAYERS = 2, QUERY_HEADS = 4, KV_HEADS = 2, DIM = 32, PROMPT = 256, STEPS = 128, TOKENS = PROMPT + STEPS };
enum { KV_ROW = KV_HEADS * DIM, QUERY_ROW = QUERY_HEADS * DIM, HEAVY = 3, LIMIT = 4 + 32 + 60 };
typedef struct { float k[TOKENS][KV_ROW], v[TOKENS][KV_ROW]; } rows_t;
static rows_t cache[LAYERS], all[LAYERS];    /* the engine's rows; all rows ever, to compare */
static uint32_t position[LAYERS][TOKENS];    /* of the token in each row of the cache */
static uint32_t used[LAYERS];                /* rows of the cache in use */
static float queries[LAYERS][TOKENS][QUERY_ROW], out[TOKENS * QUERY_ROW], lse[TOKENS * QUERY_HEADS];
static float memory[1 << 16], scratch[1 << 16]; /* kvt_kernel_workspace has the exact sizes */
static const uint32_t heavy[HEAVY] = {37, 90, 171}; /* tokens that all queries attend to */

static float number(void) { /* between -1 and 1 */
    static uint64_t state = 88172645463325252u;
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (float)(state >> 40) / (float)(1 << 23) - 1.0f;
}

/* Computes Q, K and V of a token, and appends K and V to the cache. */
static void compute(uint32_t layer, uint32_t token) {
    rows_t *rows = &all[layer];
    int is_heavy = 0;
    for (int i = 0; i < HEAVY; i++) is_heavy |= token == heavy[i];
    for (int i = 0; i < KV_ROW; i++) {
        rows->k[token][i] = number() + (is_heavy ? 1.2f * (float)(i % 2 ? 1 : -1) : 0.0f);
        rows->v[token][i] = number();
    }
    for (int i = 0; i < QUERY_ROW; i++) queries[layer][token][i] = 0.5f * number() + (i % 2 ? 0.9f : -0.9f);
    const uint32_t row = used[layer]++;
    memcpy(cache[layer].k[row], rows->k[token], sizeof rows->k[0]);
    memcpy(cache[layer].v[row], rows->v[token], sizeof rows->v[0]);
    position[layer][row] = token;
}

static kvt_rows_t rows_of(float *address, uint32_t tokens, uint32_t heads) {
    kvt_rows_t rows = KVT_ROWS_INIT;
    rows.dtype = KVT_DTYPE_F32;
    rows.view.address = address, rows.view.tokens = tokens;
    rows.view.heads = heads, rows.view.run_bytes = DIM * sizeof(float);
    return rows;
}

static void run(kvt_attention_job_t **job) { /* on this thread; others could take a part of the items */
    kvt_attention_job_info_t info = KVT_ATTENTION_JOB_INFO_INIT;
    MUST(kvt_attention_job_info(*job, &info));
    for (uint32_t step = 0; step < info.steps; step++)
        MUST(kvt_attention_job_run(*job, step, 0, UINT32_MAX, scratch, sizeof scratch / sizeof *scratch, &err));
}

/* Attention of the last `count` tokens over rows. Adds the attention that each row received to `sums`. */
static void attend(rows_t *rows, uint32_t row_count, float *of, uint32_t count, float *sums) {
    const kvt_rows_t q = rows_of(of, count, QUERY_HEADS), k = rows_of(rows->k[0], row_count, KV_HEADS);
    const kvt_rows_t v = rows_of(rows->v[0], row_count, KV_HEADS);
    kvt_attention_args_t args = KVT_ATTENTION_ARGS_INIT;
    args.queries = &q, args.keys = &k, args.values = &v, args.first_query = row_count - count;
    kvt_attention_job_t *job = NULL;
    if (count > 1) { /* a prompt: the sums are a job of their own */
        MUST(kvt_prefill_open(&args, out, count * QUERY_ROW, lse, count * QUERY_HEADS, &job, &err));
        run(&job);
        MUST(kvt_attention_job_close(&job));
        MUST(kvt_column_sums_open(&args, lse, count * QUERY_HEADS, 0, 0, sums, row_count, &job, &err));
        run(&job);
    } else { /* a step: the scores are there already */
        MUST(kvt_decode_open(&args, KVT_DECODE_SCORES, out, QUERY_ROW, lse, QUERY_HEADS, memory,
                             sizeof memory / sizeof *memory, &job, &err));
        run(&job);
        MUST(kvt_decode_sums(job, 0, sums, row_count, &err));
    }
    MUST(kvt_attention_job_close(&job));
}

/* Passes attention to the policy, and removes the rows of tokens that do not stay. Returns their number. */
static uint32_t evict(const kvt_sparse_t *policy, uint32_t layer, const kvt_sparse_context_t *context, uint32_t count,
                      const float *sums) {
    uint32_t starts[2], items[TOKENS], is_evicting = 0, to = 0;
    kvt_token_lists_t kept = KVT_TOKEN_LISTS_INIT; /* one list: of the whole layer */
    kept.starts = starts, kept.start_capacity = 2, kept.items = items, kept.item_capacity = TOKENS;
    MUST(kvt_sparse_observe(policy, layer, count, sums, used[layer], used[layer], &err));
    MUST(kvt_sparse_plan_eviction(policy, layer, context, &kept, &is_evicting, &err));
    if (!is_evicting) return 0;
    for (uint32_t row = 0; row < used[layer] && to < kept.item_count; row++) { /* both ascend by position */
        if (position[layer][row] != items[to]) continue;
        memmove(cache[layer].k[to], cache[layer].k[row], sizeof cache[layer].k[0]);
        memmove(cache[layer].v[to], cache[layer].v[row], sizeof cache[layer].v[0]);
        position[layer][to++] = position[layer][row];
    }
    CHECK(to == kept.item_count);
    const uint32_t removed = used[layer] - to;
    used[layer] = to;
    MUST(kvt_sparse_commit_eviction(policy, layer, &kept, &err));
    return removed;
}

int main(int argc, char **argv) {
    kvt_attention_t shape = KVT_ATTENTION_INIT;
    shape.layers = LAYERS, shape.query_heads = QUERY_HEADS, shape.key_heads = KV_HEADS;
    shape.key_dim = shape.value_dim = DIM, shape.block_tokens = 16, shape.max_tokens = TOKENS;
    kvt_sparse_opts_t opts = KVT_SPARSE_OPTS_INIT;
    opts.attention = &shape;
    opts.spec = argc > 1 ? argv[1] : "h2o(sink=4,recent=32,budget=60,heads=all)", opts.spec_bytes = KVT_NUL_TERMINATED;
    kvt_sparse_t *policy = NULL; /* of one sequence */
    MUST(kvt_sparse_open(&opts, &policy, &err));

    uint32_t removed = 0, most = 0;
    double least = 1;
    for (uint32_t n = 0; n < TOKENS; n = n == 0 ? PROMPT : n + 1) { /* the prompt at once, then token by token */
        const uint32_t count = n == 0 ? PROMPT : 1;
        kvt_sparse_context_t context = KVT_SPARSE_CONTEXT_INIT;
        context.is_prefill = n == 0, context.first_query = n, context.tokens = n + count;
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            float sums[TOKENS] = {0}, ignored[TOKENS] = {0}, got[QUERY_ROW];
            for (uint32_t i = 0; i < count; i++) compute(layer, n + i);
            attend(&cache[layer], used[layer], queries[layer][n], count, sums);
            memcpy(got, out + (count - 1) * QUERY_ROW, sizeof got);
            removed += evict(policy, layer, &context, count, sums);
            if (used[layer] > most) most = used[layer];
            if (n == 0) continue;
            attend(&all[layer], n + 1, queries[layer][n], 1, ignored);
            double dot = 0, a = 0, b = 0;
            for (int i = 0; i < QUERY_ROW; i++)
                dot += (double)got[i] * out[i], a += (double)got[i] * got[i], b += (double)out[i] * out[i];
            if (!(dot / sqrt(a * b) >= least)) least = dot / sqrt(a * b);
        }
    }
    int stayed = 0;
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (uint32_t row = 0; row < used[layer]; row++)
            for (int i = 0; i < HEAVY; i++) stayed += position[layer][row] == heavy[i];
    printf("%d tokens: at most %u rows of a layer in use after a step, %u rows removed\n", TOKENS, most, removed);
    printf("%d of %d tokens with much attention stayed; least cosine to full attention: %.4f\n", stayed, HEAVY * LAYERS,
           least);
    CHECK(argc > 1 || (most <= LIMIT && stayed == HEAVY * LAYERS && least > 0.9));
    MUST(kvt_sparse_close(&policy));
    return 0;
}
