/* custom_policy: a function of the engine decides what a store keeps.
 *
 *   custom_policy [SPEC OF A POLICY]...     default: custom lru
 *
 * The engine stores the KV of documents that prompts refer to, and keeps CAPACITY blocks at most.
 * Before it puts a new document, a policy chooses the documents to drop. The policy `custom` calls
 * the function `score` below, which weighs the cost of computing a document again. The store has
 * room for more: its tiers accept policies of the library only. */
#include "must.h"

enum { LAYERS = 2, KV_HEADS = 2, HEAD_DIM = 32, ROW = KV_HEADS * HEAD_DIM, CHUNK = 16, MOST = 8, CAPACITY = 40 };
enum { DOCUMENTS = 24, REQUESTS = 600 };
typedef struct { float k[LAYERS][MOST * CHUNK][ROW], v[LAYERS][MOST * CHUNK][ROW]; } tensors_t;
typedef struct { uint64_t calls, candidates, destroyed; } counters_t;

/* Writes a score for each candidate; the lowest is evicted first. Threads may call it at once; here is one. */
static kvt_status_t score(void *user_data, const kvt_policy_columns_t *columns, int64_t now_ns, double *out_scores) {
    counters_t *counters = user_data;
    counters->calls++, counters->candidates += columns->rows;
    for (uint64_t i = 0; i < columns->rows; i++) {
        const double tokens = (double)columns->tokens[i], idle = (double)(now_ns - columns->last_access_ns[i]) / 1e9;
        const double cost = tokens * (1 + tokens / 64); /* of a prefill: attention grows with the square */
        out_scores[i] = (double)columns->count[i] * cost / (double)columns->blocks[i] / (idle + 1);
    }
    return KVT_OK;
}
static void destroy(void *user_data) { ((counters_t *)user_data)->destroyed++; }

static kvt_policy_t *open_policy(const char *spec, counters_t *counters) {
    kvt_policy_custom_t custom = KVT_POLICY_CUSTOM_INIT;
    custom.score = score, custom.user_data = counters, custom.destroy = destroy;
    kvt_policy_opts_t opts = KVT_POLICY_OPTS_INIT;
    opts.spec = spec, opts.spec_bytes = KVT_NUL_TERMINATED;
    opts.max_objects = DOCUMENTS, opts.capacity_units = CAPACITY;
    opts.custom = &custom; /* other policies ignore it */
    kvt_policy_t *policy = NULL;
    MUST(kvt_policy_open(&opts, &policy, &err));
    return policy;
}

static uint32_t blocks_of(uint64_t document) { return 1 + (uint32_t)(document * 5 % MOST); }

/* Names of the blocks of a document: any bytes that identify the content. */
static kvt_block_names_t names_of(uint64_t document, uint64_t ids[MOST]) {
    kvt_block_names_t names = KVT_BLOCK_NAMES_INIT;
    names.bytes = (const uint8_t *)ids, names.each_bytes = sizeof *ids, names.count = blocks_of(document);
    for (uint64_t i = 0; i < names.count; i++) ids[i] = document << 8 | i;
    return names;
}

/* Puts or gets the KV of a document, and waits. */
static void transfer(const kvt_session_t *session, int is_put, uint64_t document, tensors_t *kv) {
    uint64_t ids[MOST];
    const kvt_block_names_t names = names_of(document, ids);
    kvt_view_t k[LAYERS], v[LAYERS];
    memset(k, 0, sizeof k);
    for (int layer = 0; layer < LAYERS; layer++) {
        k[layer].heads = KV_HEADS, k[layer].run_bytes = HEAD_DIM * sizeof(float);
        v[layer] = k[layer];
        k[layer].address = kv->k[layer], v[layer].address = kv->v[layer];
    }
    kvt_blocks_t blocks = KVT_BLOCKS_INIT;
    blocks.names = &names, blocks.k = k, blocks.v = v, blocks.stride_bytes = sizeof *k;
    kvt_op_t *op = NULL;
    MUST((is_put ? kvt_session_put_blocks : kvt_session_get_blocks)(session, &blocks, NULL, &op, &err));
    must(kvt_op_finish(&op, 0, NULL, &err), is_put ? "put" : "get");
}

/* The model, which the engine wants to run as rarely as possible. */
static void compute(uint64_t document, tensors_t *kv) {
    memset(kv, 0, sizeof *kv);
    for (int layer = 0; layer < LAYERS; layer++)
        for (uint32_t t = 0; t < blocks_of(document) * CHUNK; t++)
            for (uint32_t i = 0; i < ROW; i++) {
                kv->k[layer][t][i] = (float)(document * 31 + t * 7 + i);
                kv->v[layer][t][i] = -kv->k[layer][t][i] - (float)layer;
            }
}

static void run(const char *spec, const kvt_store_t *store, const kvt_session_t *session) {
    static tensors_t computed, loaded;
    counters_t counters = {0, 0, 0};
    kvt_policy_t *policy = open_policy(spec, &counters);
    uint64_t in_use = 0, ids[MOST], random = 88172645463325252u;
    for (int64_t request = 1; request <= REQUESTS; request++) {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        const uint64_t document = (random >> 16) % DOCUMENTS * ((random >> 40) % 8) / 7; /* low numbers are popular */
        const uint32_t blocks = blocks_of(document);
        const int64_t now_ns = request * 1000000000; /* the engine's clock */
        kvt_policy_context_t context = KVT_POLICY_CONTEXT_INIT;
        context.tokens_each = context.length = blocks * CHUNK;
        uint64_t found = 0;
        MUST(kvt_policy_lookup(policy, now_ns, &context, &document, 1, NULL, &found, &err));
        compute(document, &computed); /* on a hit only to compare */
        if (found) {
            memset(&loaded, 0, sizeof loaded);
            transfer(session, 0, document, &loaded);
            CHECK(memcmp(&loaded, &computed, sizeof loaded) == 0);
            continue;
        }
        kvt_policy_victim_t victims[DOCUMENTS];
        kvt_policy_outcome_t outcome = KVT_POLICY_OUTCOME_INIT;
        const uint64_t free_blocks = CAPACITY - in_use, wanted = blocks > free_blocks ? blocks - free_blocks : 0;
        MUST(kvt_policy_evict(policy, now_ns, wanted, victims, DOCUMENTS, sizeof *victims, &outcome, &err));
        for (uint64_t i = 0; i < outcome.victims; i++) {
            const kvt_block_names_t names = names_of(victims[i].id, ids);
            MUST(kvt_session_drop_blocks(session, &names, NULL, &err));
        }
        transfer(session, 1, document, &computed);
        kvt_policy_object_t object = {.id = document, .units = blocks, .tokens = blocks * CHUNK};
        MUST(kvt_policy_insert(policy, now_ns, &context, &object, 1, sizeof object, &err));
        in_use += blocks - outcome.freed_units;
    }
    kvt_policy_stats_t stats = KVT_POLICY_STATS_INIT;
    kvt_store_stats_t held = KVT_STORE_STATS_INIT;
    MUST(kvt_policy_stats(policy, &stats));
    MUST(kvt_store_stats(store, &held));
    CHECK(in_use == stats.units && in_use <= CAPACITY && held.host_cells == in_use * LAYERS);
    MUST(kvt_policy_close(&policy));
    CHECK(counters.destroyed == 1);
    printf("%-8s hits %.1f %%, computing saved %.1f %%; evicted %u documents; the function was called %u times\n", spec,
           100 * stats.hit_ratio, 100 * stats.cost_hit_ratio, (unsigned)stats.evictions, (unsigned)counters.calls);
}

int main(int argc, char **argv) {
    char *both[] = {NULL, "custom", "lru"};
    if (argc < 2) argc = 3, argv = both;
    for (int i = 1; i < argc; i++) {
        kvt_store_t *store = NULL;
        kvt_namespace_t *ns = NULL;
        kvt_session_t *session = NULL;
        kvt_layout_t layout = KVT_LAYOUT_INIT;
        MUST(kvt_open("store(host=64MiB)", KVT_NUL_TERMINATED, &store, &err));
        MUST(kvt_layout_gqa(&layout, LAYERS, KV_HEADS, HEAD_DIM, KVT_DTYPE_F32, CHUNK, &err));
        MUST(kvt_namespace_open(store, NULL, &layout, 0, &ns, &err));
        MUST(kvt_session_open(ns, NULL, &session, &err));
        run(argv[i], store, session);
        MUST(kvt_session_close(&session));
        MUST(kvt_namespace_close(&ns));
        MUST(kvt_store_close(&store, 0, &err));
    }
    return 0;
}
