/* sparse_decode: a long context in the store; each token that is written loads a few pages of it.
 *
 *   sparse_decode [SPEC OF A SPARSE POLICY]     default: quest(budget=96,page=16,dense=0)
 *
 * An offload keeps the KV of a session in a store. For each layer of a decode step the policy
 * selects, by the layer's query, the blocks to load, and the engine computes attention with them.
 * The program compares each output with attention over all keys, and prints what was saved. */
#include "must.h"
#include <math.h>

enum { LAYERS = 2, QUERY_HEADS = 4, KV_HEADS = 2, DIM = 64, BLOCK = 32, PROMPT = 2048, STEPS = 24, MOST = 4096 };
enum { KV_ROW = KV_HEADS * DIM, QUERY_ROW = QUERY_HEADS * DIM };
static float k[LAYERS][MOST][KV_ROW], v[LAYERS][MOST][KV_ROW]; /* the engine's own copy, to compare */

static float number(void) { /* between -1 and 1 */
    static uint64_t state = 88172645463325252u;
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (float)(state >> 40) / (float)(1 << 23) - 1.0f;
}

/* KV of a token, as the engine computes it. As in trained models, keys of neighbours are similar. */
static void compute_kv(int layer, int token) {
    static float topic[LAYERS][KV_ROW];
    for (int i = 0; i < KV_ROW; i++) {
        if (token % 24 == 0) topic[layer][i] = number();
        k[layer][token][i] = topic[layer][i] + 0.3f * number(), v[layer][token][i] = number();
    }
}
/* A query that resembles the keys of two earlier places. */
static void compute_query(int layer, int tokens, float query[QUERY_ROW]) {
    const int places[2] = {(tokens * 37 + layer * 911) % (PROMPT - 8), (tokens * 101 + 500) % (PROMPT - 8)};
    for (int i = 0; i < QUERY_ROW; i++) {
        const int of = i / DIM / (QUERY_HEADS / KV_HEADS) * DIM + i % DIM; /* the key head of this query head */
        query[i] = 0.3f * number();
        for (int p = 0; p < 2; p++) query[i] += 4.0f * k[layer][places[p]][of];
    }
}

static kvt_view_t view_of(float *rows, uint32_t tokens) {
    kvt_view_t view;
    memset(&view, 0, sizeof view);
    view.address = rows, view.tokens = tokens, view.heads = KV_HEADS, view.run_bytes = DIM * sizeof(float);
    return view;
}
static kvt_rows_t rows_of(const float *rows, uint32_t tokens, uint32_t heads) {
    kvt_rows_t of = KVT_ROWS_INIT;
    of.view = view_of((float *)rows, tokens); /* only read */
    of.view.heads = heads, of.dtype = KVT_DTYPE_F32;
    return of;
}

/* Attention of one query over rows of K and V, on this thread. Threads may share the items of a step. */
static void attend(const float *query, const float *keys, const float *values, uint32_t tokens, float out[QUERY_ROW]) {
    static float memory[1 << 16], scratch[1 << 16], lse[QUERY_HEADS]; /* kvt_kernel_workspace has the exact sizes */
    const kvt_rows_t q = rows_of(query, 1, QUERY_HEADS), all_k = rows_of(keys, tokens, KV_HEADS);
    const kvt_rows_t all_v = rows_of(values, tokens, KV_HEADS);
    kvt_attention_args_t args = KVT_ATTENTION_ARGS_INIT;
    args.queries = &q, args.keys = &all_k, args.values = &all_v;
    args.first_query = tokens - 1; /* sees all rows: positions are encoded in the keys already */
    kvt_attention_job_t *job = NULL;
    kvt_attention_job_info_t info = KVT_ATTENTION_JOB_INFO_INIT;
    MUST(kvt_decode_open(&args, 0, out, QUERY_ROW, lse, QUERY_HEADS, memory, 1 << 16, &job, &err));
    MUST(kvt_attention_job_info(job, &info));
    for (uint32_t step = 0; step < info.steps; step++)
        MUST(kvt_attention_job_run(job, step, 0, UINT32_MAX, scratch, 1 << 16, &err));
    MUST(kvt_attention_job_close(&job));
}

/* Computes the KV of the next tokens of a layer, and puts it. */
static void put_layer(const kvt_offload_t *offload, uint32_t layer, uint32_t first, uint32_t tokens) {
    for (uint32_t t = first; t < first + tokens; t++) compute_kv((int)layer, (int)t);
    const kvt_view_t keys = view_of(k[layer][first], tokens), values = view_of(v[layer][first], tokens);
    kvt_op_t *op = NULL; /* stays null if the tokens only went to the tail */
    MUST(kvt_offload_put(offload, layer, first, tokens, &keys, &values, NULL, &op, &err));
    MUST(kvt_op_finish(&op, 0, NULL, &err)); /* null is OK */
}

int main(int argc, char **argv) {
    kvt_store_t *store = NULL;
    kvt_namespace_t *ns = NULL;
    kvt_session_t *session = NULL;
    kvt_offload_t *offload = NULL;
    kvt_layout_t layout = KVT_LAYOUT_INIT;
    MUST(kvt_open("store(host=64MiB)", KVT_NUL_TERMINATED, &store, &err));
    MUST(kvt_layout_gqa(&layout, LAYERS, KV_HEADS, DIM, KVT_DTYPE_F32, BLOCK, &err));
    MUST(kvt_namespace_open(store, NULL, &layout, 0, &ns, &err));
    MUST(kvt_session_open(ns, NULL, &session, &err));

    kvt_attention_t shape = KVT_ATTENTION_INIT;
    shape.layers = LAYERS, shape.query_heads = QUERY_HEADS, shape.key_heads = KV_HEADS;
    shape.key_dim = shape.value_dim = DIM, shape.block_tokens = BLOCK, shape.max_tokens = MOST;
    kvt_offload_opts_t opts = KVT_OFFLOAD_OPTS_INIT;
    opts.session = session, opts.attention = &shape, opts.dtype = KVT_DTYPE_F32;
    opts.buffers = 2, opts.buffer_tokens = MOST;
    opts.decode = argc > 1 ? argv[1] : "quest(budget=96,page=16,dense=0)", opts.decode_bytes = KVT_NUL_TERMINATED;
    opts.audit_every = 1; /* measures the recall; costs more than the policy saves */
    MUST(kvt_offload_open(&opts, &offload, &err));

    uint32_t tokens[MOST];
    for (uint32_t i = 0; i < MOST; i++) tokens[i] = 1000 + i;
    MUST(kvt_session_append(session, tokens, PROMPT, &err));
    for (uint32_t layer = 0; layer < LAYERS; layer++) put_layer(offload, layer, 0, PROMPT);

    double cosine_least = 1, used = 0;
    for (uint32_t n = PROMPT; n < PROMPT + STEPS; n++) { /* n tokens are known, one is added */
        MUST(kvt_session_append(session, tokens + n, 1, &err));
        kvt_sparse_context_t context = KVT_SPARSE_CONTEXT_INIT;
        context.first_query = n, context.tokens = n + 1;
        MUST(kvt_offload_begin(offload, &context, &err));
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            float query[QUERY_ROW], sparse[QUERY_ROW], full[QUERY_ROW];
            put_layer(offload, layer, n, 1);
            compute_query((int)layer, (int)n, query);
            const kvt_rows_t q = rows_of(query, 1, QUERY_HEADS);
            kvt_offload_kv_t kv = KVT_OFFLOAD_KV_INIT;
            MUST(kvt_offload_take(offload, layer, &q, &kv, &err)); /* selects, loads, appends the tail */
            attend(query, kv.k, kv.v, kv.tokens, sparse);
            MUST(kvt_offload_give_back(offload, layer, &err));
            attend(query, k[layer][0], v[layer][0], n + 1, full);
            double dot = 0, a = 0, b = 0;
            for (int i = 0; i < QUERY_ROW; i++)
                dot += (double)sparse[i] * full[i], a += (double)sparse[i] * sparse[i], b += (double)full[i] * full[i];
            if (!(dot / sqrt(a * b) >= cosine_least)) cosine_least = dot / sqrt(a * b);
            used += (double)kv.tokens / (n + 1);
        }
    }
    kvt_offload_stats_t stats = KVT_OFFLOAD_STATS_INIT;
    MUST(kvt_offload_stats(offload, &stats));
    const double mib = 1 << 20;
    printf("%d steps after %d tokens: %.1f %% of the rows were read; %.1f MiB were loaded, %.1f MiB were not\n", STEPS,
           PROMPT, 100 * used / STEPS / LAYERS, (double)stats.loaded_bytes / mib, (double)stats.saved_bytes / mib);
    if (stats.audited > 0)
        printf("recall of the selections %.3f, share of the attention that they cover %.4f\n",
               (double)stats.found / (double)stats.wanted, (double)stats.found_ppm / (double)stats.audited / 1e6);
    printf("least cosine of the outputs and those of full attention: %.5f\n", cosine_least);
    CHECK(argc > 1 || cosine_least > 0.99);
    MUST(kvt_offload_close(&offload));
    MUST(kvt_session_close(&session));
    MUST(kvt_namespace_close(&ns));
    MUST(kvt_store_close(&store, 0, &err));
    return 0;
}
