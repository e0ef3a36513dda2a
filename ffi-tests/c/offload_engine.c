/* Tests of offload: a prompt in parts, decode in passes over all layers, policies that select and
 * evict, truncation, forks, and sequences that resume after a restart. Every loaded row is compared
 * with the one that was put. */

#include "check.h"

#include <math.h>

#define LAYERS 3
#define QUERY_HEADS 4
#define HEADS 2
#define KEY_DIM 8
#define VALUE_DIM 6
#define BLOCK 16
#define MAX_TOKENS 512
#define K_ROW (HEADS * KEY_DIM)
#define V_ROW (HEADS * VALUE_DIM)
#define QUERY (QUERY_HEADS * KEY_DIM)

static kvt_runtime_t *runtime;
static char folder[] = "/tmp/kvt-offload-XXXXXX";
static kvt_budget_t *store_budget;
static uint64_t seed = 77;

/* The objects of an engine, and a copy of all KV that it has put. */
typedef struct {
    kvt_store_t *store;
    kvt_namespace_t *ns;
    kvt_session_t *session;
    kvt_offload_t *offload;
    uint32_t heads, latent, appended, next_token;
    uint32_t tokens[LAYERS];
    float k[LAYERS][MAX_TOKENS * K_ROW], v[LAYERS][MAX_TOKENS * V_ROW];
} engine_t;

static engine_t engine, other;

typedef enum { PLAIN, PADDED, BY_HEAD, FLAT, PAGES_16, PAGES_8, PAGES_3, FORMS } form_t;

/* A tensor of the engine in one of the forms. */
typedef struct {
    float *memory;
    void *pages[MAX_TOKENS];
    kvt_view_t view;
} plane_t;

static float number(void) {
    return (float)(next_random(&seed) >> 40) / (float)(1 << 23) - 1.0f;
}

static void lay_out(plane_t *plane, const float *rows, uint32_t tokens, uint32_t heads, uint32_t dim,
                form_t form) {
    const uint32_t page = form == PAGES_16 ? 16 : form == PAGES_8 ? 8 : form == PAGES_3 ? 3 : tokens;
    const uint32_t pages = (tokens + page - 1) / page;
    const size_t head = form == BY_HEAD ? (size_t)tokens * dim : dim;
    const size_t token = form == BY_HEAD ? dim : (size_t)heads * dim + (form == PADDED ? 5 : 0);
    const size_t size = (size_t)pages * page * ((size_t)heads * dim + 5);
    memset(plane, 0, sizeof *plane);
    plane->memory = malloc(size * sizeof(float));
    CHECK(plane->memory != NULL);
    for (size_t i = 0; i < size; i++) plane->memory[i] = NAN;
    kvt_view_t *view = &plane->view;
    if (form >= PAGES_16) {
        /* The last page first. */
        for (uint32_t i = 0; i < pages; i++)
            plane->pages[i] = plane->memory + (size_t)(pages - 1 - i) * page * token;
        view->pages = plane->pages;
        view->page_count = pages;
        view->page_tokens = page;
    } else {
        plane->pages[0] = view->address = plane->memory;
    }
    for (uint32_t t = 0; t < tokens; t++)
        for (uint32_t h = 0; h < heads; h++)
            memcpy((float *)plane->pages[t / page] + t % page * token + h * head,
                   rows + ((size_t)t * heads + h) * dim, dim * sizeof(float));
    view->heads = form == FLAT ? 1 : heads;
    view->run_bytes = (form == FLAT ? heads : 1) * dim * sizeof(float);
    if (form == PADDED) view->token_stride_bytes = token * sizeof(float);
    if (form == BY_HEAD) {
        view->token_stride_bytes = token * sizeof(float);
        view->head_stride_bytes = head * sizeof(float);
    }
}

static kvt_attention_t attention(int latent) {
    kvt_attention_t a = KVT_ATTENTION_INIT;
    a.layers = LAYERS;
    a.query_heads = QUERY_HEADS;
    a.key_heads = latent ? 1 : HEADS;
    a.key_dim = KEY_DIM;
    a.value_dim = VALUE_DIM;
    a.kind = latent ? KVT_ATTENTION_LATENT : KVT_ATTENTION_SPLIT;
    a.block_tokens = BLOCK;
    a.max_tokens = MAX_TOKENS;
    return a;
}

static void open_store(const char *spec) {
    kvt_store_opts_t opts = KVT_STORE_OPTS_INIT;
    opts.spec = spec;
    opts.spec_bytes = strlen(spec);
    CHECK_OK(kvt_store_open(runtime, store_budget, &opts, &engine.store, NULL));
    const uint16_t layers[LAYERS] = {0, 1, 2};
    kvt_group_t group;
    memset(&group, 0, sizeof group);
    group.dtype = KVT_DTYPE_F32;
    group.k_bytes = engine.heads * KEY_DIM * sizeof(float);
    group.v_bytes = engine.latent ? 0 : engine.heads * VALUE_DIM * sizeof(float);
    group.layers = layers;
    group.layer_count = LAYERS;
    kvt_layout_t layout = KVT_LAYOUT_INIT;
    layout.chunk_tokens = BLOCK;
    layout.groups = &group;
    layout.group_count = 1;
    layout.stride_bytes = sizeof group;
    kvt_session_opts_t session = KVT_SESSION_OPTS_INIT;
    CHECK_OK(kvt_namespace_open(engine.store, NULL, &layout, 0, &engine.ns, NULL));
    CHECK_OK(kvt_session_open(engine.ns, &session, &engine.session, NULL));
}

static kvt_offload_opts_t opts_of(const kvt_attention_t *shape, const char *prefill,
                                  const char *decode) {
    kvt_offload_opts_t opts = KVT_OFFLOAD_OPTS_INIT;
    opts.session = engine.session;
    opts.attention = shape;
    opts.dtype = KVT_DTYPE_F32;
    opts.buffers = 2;
    opts.buffer_tokens = MAX_TOKENS / 2;
    opts.prefill = prefill;
    opts.prefill_bytes = prefill != NULL ? strlen(prefill) : 0;
    opts.decode = decode;
    opts.decode_bytes = decode != NULL ? strlen(decode) : 0;
    return opts;
}

static void open_offload(const char *prefill, const char *decode) {
    const kvt_attention_t shape = attention(engine.latent);
    const kvt_offload_opts_t opts = opts_of(&shape, prefill, decode);
    kvt_error_t *err = NULL;
    const kvt_status_t status = kvt_offload_open(&opts, &engine.offload, &err);
    if (status != KVT_OK) fprintf(stderr, "%s\n", kvt_error_message(err));
    CHECK_OK(status);
    CHECK(engine.offload != NULL);
}

static void open_engine(const char *spec, int latent, const char *prefill, const char *decode) {
    memset(&engine, 0, sizeof engine);
    engine.latent = latent != 0;
    engine.heads = latent ? 1 : HEADS;
    open_store(spec);
    open_offload(prefill, decode);
}

static void close_store(void) {
    CHECK_OK(kvt_session_close(&engine.session));
    CHECK_OK(kvt_namespace_close(&engine.ns));
    CHECK_OK(kvt_store_close(&engine.store, hang_guard(), NULL));
}

static void close_engine(void) {
    CHECK_OK(kvt_offload_close(&engine.offload));
    CHECK(engine.offload == NULL);
    close_store();
}

static void append(uint32_t tokens) {
    uint32_t ids[MAX_TOKENS];
    /* Ids are unique, because equal tokens would have equal KV. */
    for (uint32_t i = 0; i < tokens; i++) ids[i] = engine.next_token++;
    CHECK_OK(kvt_session_append(engine.session, ids, tokens, NULL));
    engine.appended += tokens;
}

/* Computes KV of tokens of a layer into the copy only. */
static void compute(uint32_t layer, uint32_t tokens) {
    const size_t from = engine.tokens[layer];
    CHECK(from + tokens <= MAX_TOKENS);
    const size_t k = engine.heads * KEY_DIM, v = engine.heads * VALUE_DIM;
    for (size_t i = from * k; i < (from + tokens) * k; i++) engine.k[layer][i] = number();
    for (size_t i = from * v; i < (from + tokens) * v; i++) engine.v[layer][i] = number();
}

/* Puts the computed KV; `had_op` says whether the put returned an op. */
static kvt_status_t put_computed(uint32_t layer, uint32_t tokens, form_t form, int *had_op,
                                 kvt_error_t **err) {
    static plane_t k, v;
    const uint32_t first = engine.tokens[layer];
    lay_out(&k, engine.k[layer] + (size_t)first * engine.heads * KEY_DIM, tokens, engine.heads,
        KEY_DIM, form);
    lay_out(&v, engine.v[layer] + (size_t)first * engine.heads * VALUE_DIM, tokens, engine.heads,
        VALUE_DIM, form);
    kvt_op_t *op = (kvt_op_t *)&engine;
    const kvt_status_t status =
        kvt_offload_put(engine.offload, layer, first, tokens, &k.view,
                        engine.latent ? NULL : &v.view, NULL, &op, err);
    if (status != KVT_OK) CHECK(op == (kvt_op_t *)&engine);
    if (status == KVT_OK) {
        if (had_op != NULL) *had_op = op != NULL;
        if (op != NULL) CHECK_OK(finish_op(&op));
        engine.tokens[layer] += tokens;
    }
    free(k.memory);
    free(v.memory);
    return status;
}

static int put(uint32_t layer, uint32_t tokens, form_t form) {
    int had_op = 0;
    kvt_error_t *err = NULL;
    compute(layer, tokens);
    const kvt_status_t status = put_computed(layer, tokens, form, &had_op, &err);
    if (status != KVT_OK) fprintf(stderr, "%s\n", kvt_error_message(err));
    CHECK_OK(status);
    return had_op;
}

static void put_all(uint32_t tokens) {
    append(tokens);
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        put(layer, tokens, (form_t)(next_random(&seed) >> 20) % FORMS);
}

static kvt_sparse_context_t context(int is_prefill, uint32_t first_query, uint32_t tokens) {
    kvt_sparse_context_t c = KVT_SPARSE_CONTEXT_INIT;
    c.is_prefill = is_prefill != 0;
    c.first_query = first_query;
    c.tokens = tokens;
    return c;
}

static kvt_rows_t rows_of(float *numbers, uint32_t tokens, uint32_t heads, uint32_t dim) {
    kvt_rows_t rows = KVT_ROWS_INIT;
    rows.dtype = KVT_DTYPE_F32;
    rows.view.address = numbers;
    rows.view.tokens = tokens;
    rows.view.heads = heads;
    rows.view.run_bytes = dim * sizeof(float);
    return rows;
}

static kvt_rows_t query_of(float numbers[QUERY]) {
    for (int i = 0; i < QUERY; i++) numbers[i] = number();
    return rows_of(numbers, 1, QUERY_HEADS, KEY_DIM);
}

/* Checks that every row of a buffer is the one that was put, and that positions map to rows. */
static void check_kv(uint32_t layer, const kvt_offload_kv_t *kv) {
    uint32_t blocks[MAX_TOKENS / BLOCK], at[MAX_TOKENS], positions[MAX_TOKENS], rows[MAX_TOKENS];
    uint64_t count = 0;
    CHECK_EQ(kv->struct_size, sizeof *kv);
    CHECK_OK(kvt_offload_blocks(engine.offload, kv->buffer, blocks, MAX_TOKENS / BLOCK, &count));
    CHECK_EQ(count, kv->blocks);
    CHECK_EQ(kv->tokens, kv->blocks * BLOCK + kv->tail_tokens);
    for (uint32_t i = 0; i < kv->blocks * BLOCK; i++) at[i] = blocks[i / BLOCK] * BLOCK + i % BLOCK;
    for (uint32_t i = 0; i < kv->tail_tokens; i++)
        at[kv->blocks * BLOCK + i] = engine.tokens[layer] - kv->tail_tokens + i;
    const size_t k_row = engine.heads * KEY_DIM, v_row = engine.heads * VALUE_DIM;
    for (uint32_t i = 0; i < kv->tokens; i++) {
        CHECK(at[i] < engine.tokens[layer]);
        CHECK(memcmp((const float *)kv->k + i * k_row, engine.k[layer] + at[i] * k_row,
                     k_row * sizeof(float)) == 0);
        if (!engine.latent)
            CHECK(memcmp((const float *)kv->v + i * v_row, engine.v[layer] + at[i] * v_row,
                         v_row * sizeof(float)) == 0);
    }
    if (engine.latent) CHECK(kv->v == kv->k);
    uint32_t n = 0, found = 0;
    for (uint32_t position = 0; position < engine.tokens[layer]; position += 3)
        positions[n++] = position;
    CHECK_OK(kvt_offload_rows(engine.offload, kv->buffer, positions, n, rows, &count));
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t row = 0; row < kv->tokens; row++)
            if (at[row] == positions[i]) CHECK_EQ(rows[found++], row);
    CHECK_EQ(found, count);
    CHECK_OK(kvt_offload_rows(engine.offload, kv->buffer, positions, n, positions, &count));
    CHECK_EQ(found, count);
    CHECK(memcmp(positions, rows, found * sizeof *rows) == 0);
}

static kvt_offload_stats_t stats(void) {
    kvt_offload_stats_t s = KVT_OFFLOAD_STATS_INIT;
    CHECK_OK(kvt_offload_stats(engine.offload, &s));
    CHECK_EQ(s.struct_size, sizeof s);
    return s;
}

static void check_tokens(void) {
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        uint32_t stored = 0, tail = 0;
        CHECK_OK(kvt_offload_tokens(engine.offload, layer, &stored, &tail));
        CHECK_EQ(stored + tail, engine.tokens[layer]);
        CHECK_EQ(stored % BLOCK, 0);
    }
}

/* Loads all blocks of a layer into a buffer. */
static kvt_offload_kv_t load_all(uint32_t layer) {
    const kvt_sparse_context_t where = context(0, engine.tokens[layer] - 1, engine.tokens[layer]);
    kvt_offload_kv_t kv = KVT_OFFLOAD_KV_INIT;
    CHECK_OK(kvt_offload_load(engine.offload, 1, layer, NULL, 0, 0, NULL, &where, NULL, NULL));
    CHECK_OK(kvt_offload_wait(engine.offload, 1, &kv, NULL));
    check_kv(layer, &kv);
    CHECK_OK(kvt_offload_release(engine.offload, 1, NULL));
    return kv;
}

static void compare_all(void) {
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        CHECK_EQ(load_all(layer).tokens, engine.tokens[layer]);
}

/* Decodes one token: each layer puts its KV, submits its query, and takes the loaded buffer. */
static void decode(void) {
    append(1);
    const kvt_sparse_context_t where = context(0, engine.tokens[0], engine.tokens[0] + 1);
    CHECK_OK(kvt_offload_begin(engine.offload, &where, NULL));
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        float numbers[QUERY];
        const kvt_rows_t query = query_of(numbers);
        kvt_offload_kv_t kv = KVT_OFFLOAD_KV_INIT;
        put(layer, 1, PLAIN);
        kvt_error_t *err = NULL;
        const kvt_status_t status =
            kvt_offload_take(engine.offload, layer, &query, &kv, &err);
        if (status != KVT_OK) fprintf(stderr, "%s\n", kvt_error_message(err));
        CHECK_OK(status);
        CHECK(kv.tail_tokens > 0);
        check_kv(layer, &kv);
        CHECK_OK(kvt_offload_give_back(engine.offload, layer, NULL));
    }
}

/* The program of the manual: a prompt in parts, whose earlier blocks return through the ring two
 * at a time, then decode. */
static void prefill_in_parts_then_decode(int latent, const char *policy) {
    open_engine("store(host=4MiB)", latent, NULL, policy);
    for (uint32_t part = 0; part < 4; part++) {
        append(40);
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            put(layer, 40, (form_t)((part + 2 * layer + (latent ? 3 : 0)) % FORMS));
            uint32_t stored = 0;
            CHECK_OK(kvt_offload_tokens(engine.offload, layer, &stored, NULL));
            kvt_sparse_context_t where =
                context(1, engine.tokens[layer] - 40, engine.tokens[layer]);
            where.part = part;
            where.parts = 4;
            uint32_t pairs[MAX_TOKENS / BLOCK], count = 0;
            const uint32_t all = stored / BLOCK;
            for (uint32_t i = 0; i < all; i++) pairs[i] = i;
            /* The engine computes with one pair while the next one loads. */
            for (uint32_t at = 0; at < all + 2; at += 2) {
                if (at < all) {
                    const uint32_t n = all - at < 2 ? all - at : 2;
                    CHECK_OK(kvt_offload_load(engine.offload, at / 2 % 2, layer, pairs + at, n,
                                              0, NULL, &where, &count, NULL));
                    CHECK_EQ(count, n);
                }
                if (at == 0) continue;
                kvt_offload_kv_t kv = KVT_OFFLOAD_KV_INIT;
                const uint32_t buffer = (at / 2 - 1) % 2;
                CHECK_OK(kvt_offload_wait(engine.offload, buffer, &kv, NULL));
                CHECK_EQ(kv.tail_tokens, 0);
                CHECK_EQ(kv.buffer, buffer);
                check_kv(layer, &kv);
                CHECK_OK(kvt_offload_release(engine.offload, buffer, NULL));
            }
        }
    }
    for (int i = 0; i < 40; i++) decode();
    check_tokens();
    const kvt_offload_stats_t s = stats();
    CHECK_EQ(s.failed_loads, 0);
    CHECK(s.put_bytes > 0 && s.tail_bytes > 0 && s.loaded_bytes > 0);
    if (policy != NULL) {
        CHECK(s.selections > 0);
        CHECK(s.saved_bytes > 0);
        CHECK(s.policy_bytes > 0);
    } else {
        CHECK_EQ(s.selections + s.saved_bytes + s.policy_bytes, 0);
    }
    compare_all();
    close_engine();
}

/* Puts from tensors of every form; the completion of a put. */
static void puts_work_from_every_form(void) {
    for (int latent = 0; latent < 2; latent++) {
        for (int form = PLAIN; form < FORMS; form++) {
            open_engine("store(host=4MiB)", latent, NULL, NULL);
            append(100);
            for (uint32_t layer = 0; layer < LAYERS; layer++) {
                CHECK_EQ(put(layer, 3, (form_t)form), 0);  /* into the tail only */
                CHECK_EQ(put(layer, 13, (form_t)form), 0); /* fills the tail */
                put(layer, 70, (form_t)form);
                put(layer, 14, (form_t)form);
            }
            check_tokens();
            compare_all();
            close_engine();
        }
    }
    open_engine("store(host=4MiB)", 0, NULL, NULL);
    append(64);
    compute(0, 64);
    plane_t k, v;
    lay_out(&k, engine.k[0], 64, HEADS, KEY_DIM, PLAIN);
    lay_out(&v, engine.v[0], 64, HEADS, VALUE_DIM, PLAIN);
    kvt_queue_t *queue = open_queue(runtime, 4);
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    opts.queue = queue;
    opts.tag = 4711;
    kvt_op_t *op = NULL;
    CHECK_OK(kvt_offload_put(engine.offload, 0, 0, 48, &k.view, &v.view, &opts, &op, NULL));
    CHECK(op != NULL);
    CHECK_OK(finish_op(&op));
    kvt_completion_t done[4];
    uint64_t count = 0;
    CHECK_OK(kvt_queue_wait(queue, hang_guard(), done, 4, sizeof *done, &count));
    CHECK_EQ(count, 1);
    CHECK_EQ(done[0].tag, 4711);
    CHECK_OK(done[0].status);
    engine.tokens[0] = 48;
    load_all(0);
    close_queue(&queue);
    free(k.memory);
    free(v.memory);
    close_engine();
}

static void truncate_to(uint32_t tokens) {
    CHECK_OK(kvt_offload_truncate(engine.offload, tokens, NULL));
    CHECK_OK(kvt_session_truncate(engine.session, tokens, NULL));
    for (uint32_t layer = 0; layer < LAYERS; layer++) engine.tokens[layer] = tokens;
    engine.appended = tokens;
}

/* Truncation within the tail, within a block, at the start of a block, and to zero. */
static void truncated_tokens_can_be_put_again(void) {
    open_engine("store(host=4MiB)", 0, NULL, "quest(budget=48,page=16,dense=1)");
    put_all(90);
    const uint32_t ends[] = {88, 80, 75, 75, 48, 33, 16, 1, 0};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        truncate_to(ends[i]);
        check_tokens();
        if (ends[i] > 0) compare_all();
        put_all(5);
        compare_all();
        decode();
        truncate_to(ends[i]);
    }
    CHECK_OK(kvt_offload_truncate(engine.offload, 400, NULL)); /* behind the end: no effect */
    put_all(31);
    compare_all();

    /* A few tokens need no op: the call copies them. */
    append(2);
    compute(0, 2);
    plane_t k, v;
    lay_out(&k, engine.k[0] + (size_t)engine.tokens[0] * K_ROW, 2, HEADS, KEY_DIM, PLAIN);
    lay_out(&v, engine.v[0] + (size_t)engine.tokens[0] * V_ROW, 2, HEADS, VALUE_DIM, PLAIN);
    CHECK_OK(kvt_offload_put(engine.offload, 0, engine.tokens[0], 2, &k.view, &v.view, NULL, NULL,
                             NULL));
    free(k.memory);
    free(v.memory);
    engine.tokens[0] += 2;
    load_all(0);
    truncate_to(31);

    /* A load in progress does not belong to the layer after a truncation. */
    const kvt_sparse_context_t where = context(0, 30, 31);
    kvt_offload_kv_t kv = KVT_OFFLOAD_KV_INIT;
    CHECK_OK(kvt_offload_load(engine.offload, 0, 1, NULL, 0, 0, NULL, &where, NULL, NULL));
    truncate_to(0);
    put_all(31);
    CHECK_IS(kvt_offload_wait(engine.offload, 0, &kv, NULL), KVT_E_STATE);
    CHECK_OK(kvt_offload_load(engine.offload, 0, 1, NULL, 0, 0, NULL, &where, NULL, NULL));
    CHECK_OK(kvt_offload_wait(engine.offload, 0, &kv, NULL));
    check_kv(1, &kv);
    CHECK_OK(kvt_offload_release(engine.offload, 0, NULL));
    close_engine();
}

/* A sequence resumes after the store was reopened. */
static void sequences_resume_after_a_restart(void) {
    char spec[256];
    snprintf(spec, sizeof spec,
             "store(host=4MiB, disk=disk(path=\"%s/store\", bytes=16MiB, segment=1MiB, "
             "buffered=true), write=through)",
             folder);
    open_engine(spec, 0, NULL, NULL);
    put_all(70);
    kvt_error_t *err = NULL;
    CHECK_IS(kvt_offload_resume(engine.offload, 64, &err), KVT_E_BUSY);
    CHECK(strstr(kvt_error_message(err), "already") != NULL);
    close_engine();

    open_store(spec);
    engine.next_token = 0;
    engine.appended = 0;
    for (uint32_t layer = 0; layer < LAYERS; layer++) engine.tokens[layer] = 64;
    open_offload(NULL, "quest(budget=48,page=16,dense=1)");
    /* the session has no tokens yet */
    CHECK_IS(kvt_offload_resume(engine.offload, 64, &err), KVT_E_INVALID);
    append(64);
    CHECK_IS(kvt_offload_resume(engine.offload, 63, &err), KVT_E_INVALID);
    CHECK(strstr(kvt_error_message(err), "63") != NULL);
    CHECK_IS(kvt_offload_resume(engine.offload, 80, &err), KVT_E_INVALID);
    CHECK_IS(kvt_offload_resume(engine.offload, UINT32_MAX - 15, &err), KVT_E_INVALID);
    CHECK_OK(kvt_offload_resume(engine.offload, 64, &err));
    CHECK_IS(kvt_offload_resume(engine.offload, 64, &err), KVT_E_BUSY);
    compare_all();
    for (int i = 0; i < 20; i++) decode();
    truncate_to(21); /* within a block from disk */
    compare_all();
    put_all(20);
    compare_all();
    close_engine();

    /* Tokens that were never stored. */
    open_store(spec);
    engine.next_token = 5000;
    engine.appended = 0;
    open_offload(NULL, "knorm(budget=24)");
    append(35);
    /* the policy needs the keys */
    CHECK_IS(kvt_offload_resume(engine.offload, 32, &err), KVT_E_NOT_FOUND);
    for (uint32_t layer = 0; layer < LAYERS; layer++) engine.tokens[layer] = 0;
    check_tokens();
    CHECK_OK(kvt_offload_close(&engine.offload));
    open_offload(NULL, NULL);
    CHECK_OK(kvt_offload_resume(engine.offload, 32, NULL));
    for (uint32_t layer = 0; layer < LAYERS; layer++) engine.tokens[layer] = 32;
    const kvt_sparse_context_t where = context(0, 31, 32);
    CHECK_OK(kvt_offload_load(engine.offload, 0, 0, NULL, 0, 0, NULL, &where, NULL, NULL));
    CHECK_IS(kvt_offload_wait(engine.offload, 0, NULL, &err), KVT_E_NOT_FOUND);
    CHECK_EQ(stats().failed_loads, 1);
    CHECK_IS(kvt_offload_wait(engine.offload, 0, NULL, &err), KVT_E_STATE);
    CHECK_IS(kvt_offload_truncate(engine.offload, 20, &err), KVT_E_NOT_FOUND);
    check_tokens(); /* no layer was truncated */
    CHECK_OK(kvt_offload_truncate(engine.offload, 16, NULL));
    CHECK_OK(kvt_error_free(&err));
    close_engine();
}

/* Heavy hitters: observed sums decide which tokens are evicted; blocks without tokens are not
 * loaded. */
static void evicted_tokens_are_not_loaded(void) {
    open_engine("store(host=4MiB)", 0, NULL, "h2o(sink=4,recent=20,budget=8,heads=all)");
    put_all(150);
    uint64_t count = 9;
    uint32_t lists = 9, evicted = 9, kept[MAX_TOKENS];
    CHECK_OK(kvt_offload_retained(engine.offload, 0, 0, kept, MAX_TOKENS, &count, &lists));
    CHECK_EQ(count + lists, 0); /* no token is evicted */
    float sums[150];
    for (uint32_t i = 0; i < 150; i++) sums[i] = i >= 40 && i < 48 ? 9.0f : 0.01f;
    const kvt_sparse_context_t where = context(1, 0, 150);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        CHECK_OK(kvt_offload_observe(engine.offload, layer, 150, sums, 150, 150, NULL));
        CHECK_OK(kvt_offload_evict(engine.offload, layer, &where, &evicted, NULL));
        CHECK_EQ(evicted, 1);
        CHECK_IS(kvt_offload_retained(engine.offload, layer, 0, kept, 31, &count, &lists),
                 KVT_E_TOO_SMALL);
        CHECK_OK(kvt_offload_retained(engine.offload, layer, 0, NULL, 0, &count, NULL));
        CHECK_EQ(count, 32);
        CHECK_OK(kvt_offload_retained(engine.offload, layer, 0, kept, 32, &count, &lists));
        CHECK_EQ(lists, 1);
        for (uint32_t i = 0; i < 32; i++)
            CHECK_EQ(kept[i], i < 4 ? i : i < 12 ? 36 + i : 118 + i);
        CHECK_IS(kvt_offload_retained(engine.offload, layer, 1, kept, 32, &count, &lists),
                 KVT_E_INVALID);
    }
    CHECK_EQ(stats().evicted_tokens, LAYERS * (150 - 32));
    put_all(3);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        const kvt_offload_kv_t kv = load_all(layer);
        uint32_t blocks[8] = {0};
        CHECK_OK(kvt_offload_blocks(engine.offload, kv.buffer, blocks, 8, &count));
        CHECK_EQ(count, 3);
        CHECK(blocks[0] == 0 && blocks[1] == 2 && blocks[2] == 8);
        CHECK_OK(kvt_offload_retained(engine.offload, layer, 0, kept, MAX_TOKENS, &count, NULL));
        CHECK_EQ(count, 35);
        CHECK_EQ(kept[34], 152);
    }
    truncate_to(45);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        CHECK_OK(kvt_offload_retained(engine.offload, layer, 0, kept, MAX_TOKENS, &count, NULL));
        CHECK_EQ(count, 9);
        CHECK_EQ(kept[8], 44);
    }
    close_engine();
}

/* Policies that evict by keys see all keys, in prefill and decode. */
static void key_policies_see_all_keys(void) {
    const char *specs[] = {"knorm(budget=24)", "keydiff(budget=24)"};
    for (int i = 0; i < 2; i++) {
        open_engine("store(host=4MiB)", 0, NULL, specs[i]);
        put_all(70);
        put_all(7);
        uint32_t evicted = 0, lists = 0, kept[MAX_TOKENS];
        uint64_t count = 0;
        const kvt_sparse_context_t where = context(1, 0, 77);
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            CHECK_OK(kvt_offload_evict(engine.offload, layer, &where, &evicted, NULL));
            CHECK_EQ(evicted, 1);
            CHECK_OK(kvt_offload_retained(engine.offload, layer, 1, kept, MAX_TOKENS, &count, &lists));
            CHECK_EQ(count, 24);
            CHECK_EQ(lists, HEADS);
        }
        if (i == 0) {
            /* knorm keeps the keys with the smallest norms. */
            for (uint32_t head = 0; head < HEADS; head++) {
                float norms[77], most = 0, least = INFINITY;
                CHECK_OK(kvt_offload_retained(engine.offload, 0, head, kept, MAX_TOKENS, &count,
                                          NULL));
                for (uint32_t t = 0, at = 0; t < 77; t++) {
                    norms[t] = 0;
                    for (int d = 0; d < KEY_DIM; d++) {
                        const float x = engine.k[0][t * K_ROW + head * KEY_DIM + d];
                        norms[t] += x * x;
                    }
                    const int is_kept = at < count && kept[at] == t;
                    if (is_kept) at++;
                    if (is_kept && norms[t] > most) most = norms[t];
                    if (!is_kept && norms[t] < least) least = norms[t];
                }
                CHECK(most <= least * 1.001f);
            }
        }
        close_engine();
    }
}

/* Blocks are selected by an earlier layer's query, by an indexer's rows, or by the engine's
 * scores. */
static void blocks_are_selected_by_query_indexer_or_scores(void) {
    open_engine("store(host=4MiB)", 0, NULL, "predict(of=quest(budget=48,page=16,dense=1))");
    put_all(120);
    for (int i = 0; i < 20; i++) decode();
    CHECK(stats().saved_bytes > 0);
    close_engine();

    open_engine("store(host=4MiB)", 0, NULL, "dsa(topk=20,heads=2,dim=4,load=true,state=f32)");
    append(96);
    float own[LAYERS][96 * 4], weights[2] = {1, 1}, positions[2 * 4] = {1, 0, 0, 0, 1, 0, 0, 0};
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        /* Only block 3 matches the query. */
        for (int i = 0; i < 96 * 4; i++) own[layer][i] = i % 4 == 0 && i / 64 == 3 ? 1 : -0.1f;
        const kvt_rows_t keys = rows_of(own[layer], 96, 1, 4);
        CHECK_OK(kvt_offload_append_keys(engine.offload, layer, 0, &keys, NULL));
        put(layer, 96, PLAIN);
    }
    const kvt_rows_t query = rows_of(positions, 1, 2, 4);
    kvt_sparse_context_t where = context(0, 95, 96);
    kvt_offload_kv_t kv = KVT_OFFLOAD_KV_INIT;
    uint32_t blocks[8] = {0};
    uint64_t count = 0;
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        CHECK_OK(kvt_offload_score(engine.offload, layer, 0, weights, 2, NULL));
        CHECK_OK(kvt_offload_load(engine.offload, 0, layer, NULL, 0, 0, &query, &where, NULL,
                                  NULL));
        CHECK_OK(kvt_offload_wait(engine.offload, 0, &kv, NULL));
        check_kv(layer, &kv);
        CHECK_OK(kvt_offload_blocks(engine.offload, 0, blocks, 8, &count));
        CHECK(count < 6);
        int has = 0;
        for (uint64_t i = 0; i < count; i++) has |= blocks[i] == 3;
        CHECK(has);
        CHECK_OK(kvt_offload_release(engine.offload, 0, NULL));
    }
    close_engine();

    open_engine("store(host=4MiB)", 0, NULL, "external(topk=2)");
    put_all(100);
    float numbers[QUERY], scores[6] = {0, 5, 1, 0, 7, 2};
    const kvt_rows_t any = query_of(numbers);
    where = context(0, 99, 100);
    CHECK_OK(kvt_offload_score(engine.offload, 1, 0, scores, 6, NULL));
    CHECK_OK(kvt_offload_load(engine.offload, 0, 1, NULL, 0, 0, &any, &where, NULL, NULL));
    CHECK_OK(kvt_offload_wait(engine.offload, 0, &kv, NULL));
    check_kv(1, &kv);
    CHECK_EQ(kv.tail_tokens, 4);
    CHECK_OK(kvt_offload_blocks(engine.offload, 0, blocks, 8, &count));
    CHECK_EQ(count, 2);
    CHECK(blocks[0] == 1 && blocks[1] == 4);
    close_engine();
}

/* Blocks that the engine chose are loaded with the tail, regardless of the policy. Their list
 * can be read as soon as the load has started. */
static void chosen_blocks_are_loaded_with_the_tail(void) {
    open_engine("store(host=4MiB)", 0, NULL, "quest(budget=48,page=16,dense=1)");
    put_all(107);
    const kvt_sparse_context_t where = context(0, 106, 107);
    const uint32_t ids[] = {1, 2, 5};
    float numbers[QUERY];
    const kvt_rows_t query = query_of(numbers);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        /* With and without a query; some, one and no blocks. */
        for (uint32_t n = 0; n < 4; n++) {
            uint32_t count = 9, blocks[8] = {0};
            uint64_t listed = 0;
            kvt_offload_kv_t kv = KVT_OFFLOAD_KV_INIT;
            CHECK_OK(kvt_offload_load(engine.offload, 0, layer, n > 0 ? ids : NULL, n,
                                      KVT_OFFLOAD_LOAD_CHOSEN, n % 2 ? &query : NULL, &where, &count,
                                      NULL));
            CHECK_EQ(count, n);
            CHECK_OK(kvt_offload_blocks(engine.offload, 0, blocks, 8, &listed));
            CHECK_EQ(listed, n);
            CHECK(memcmp(blocks, ids, n * sizeof *ids) == 0);
            CHECK_OK(kvt_offload_wait(engine.offload, 0, &kv, NULL));
            CHECK_EQ(kv.tail_tokens, 11);
            CHECK_EQ(kv.tokens, n * BLOCK + 11);
            check_kv(layer, &kv);
            CHECK_OK(kvt_offload_release(engine.offload, 0, NULL));
        }
    }
    CHECK_EQ(stats().selections, 0);
    kvt_error_t *err = NULL;
    const uint32_t falling[] = {2, 1};
    CHECK_IS(kvt_offload_load(engine.offload, 0, 0, falling, 2, KVT_OFFLOAD_LOAD_CHOSEN, NULL, &where,
                              NULL, &err),
             KVT_E_INVALID);
    CHECK_IS(kvt_offload_load(engine.offload, 0, 0, ids, 3, 2, NULL, &where, NULL, &err),
             KVT_E_INVALID);
    CHECK_OK(kvt_error_free(&err));
    close_engine();
}

/* Switches between the two sequences of a fork. */
static void swap_engines(void) {
    static engine_t between;
    between = engine;
    engine = other;
    other = between;
}

static void fork_engine(void) {
    other = engine;
    CHECK_OK(kvt_session_fork(engine.session, NULL, &other.session, NULL));
    kvt_error_t *err = NULL;
    other.offload = NULL;
    const kvt_status_t status =
        kvt_offload_fork(engine.offload, other.session, &other.offload, &err);
    if (status != KVT_OK) fprintf(stderr, "%s\n", kvt_error_message(err));
    CHECK_OK(status);
    other.next_token += 100000;
}

static void forks_continue_independently(int latent, const char *policy) {
    open_engine("store(host=8MiB)", latent, NULL, policy);
    put_all(90);
    for (int i = 0; i < 3; i++) decode();
    fork_engine();
    swap_engines();
    CHECK_EQ(stats().put_blocks + stats().loads + stats().selections, 0);
    check_tokens();
    compare_all();
    for (uint32_t turn = 0; turn < 12; turn++) {
        swap_engines();
        if (turn % 5 == 4) {
            truncate_to(engine.tokens[0] - 7 - turn);
            compare_all();
        }
        put_all(1 + turn * 5 % 17);
        decode();
        compare_all();
        check_tokens();
    }
    /* After the first sequence closes, the shared blocks stay. */
    CHECK_OK(kvt_offload_close(&other.offload));
    CHECK_OK(kvt_session_close(&other.session));
    compare_all();
    for (int i = 0; i < 20; i++) decode();
    truncate_to(41);
    put_all(30);
    compare_all();
    close_engine();
}

static void invalid_forks_are_refused(void) {
    open_engine("store(host=8MiB)", 0, NULL, "quest(budget=48,page=16,dense=1)");
    put_all(90);
    kvt_session_t *fork = NULL;
    kvt_offload_t *out = NULL;
    kvt_error_t *err = NULL;
    CHECK_OK(kvt_session_fork(engine.session, NULL, &fork, NULL));
    CHECK_IS(kvt_offload_fork(NULL, fork, &out, &err), KVT_E_HANDLE);
    CHECK_IS(kvt_offload_fork((const kvt_offload_t *)fork, fork, &out, &err), KVT_E_HANDLE);
    CHECK_IS(kvt_offload_fork(engine.offload, NULL, &out, &err), KVT_E_HANDLE);
    CHECK_IS(kvt_offload_fork(engine.offload, fork, NULL, &err), KVT_E_INVALID);
    CHECK_IS(kvt_offload_fork(engine.offload, engine.session, &out, &err), KVT_E_INVALID);
    CHECK(strstr(kvt_error_message(err), "another session") != NULL);
    CHECK_OK(kvt_session_truncate(fork, 89, NULL));
    CHECK_IS(kvt_offload_fork(engine.offload, fork, &out, &err), KVT_E_INVALID);
    CHECK(strstr(kvt_error_message(err), "90 tokens") != NULL);
    const uint32_t token = 77777;
    CHECK_OK(kvt_session_append(fork, &token, 1, NULL));
    CHECK_IS(kvt_offload_fork(engine.offload, fork, &out, &err), KVT_E_INVALID);
    CHECK_OK(kvt_session_close(&fork));
    const kvt_session_t *stale = engine.session;
    CHECK_OK(kvt_session_fork(engine.session, NULL, &fork, NULL));
    CHECK_OK(kvt_session_close(&engine.session));
    CHECK_IS(kvt_offload_fork(engine.offload, stale, &out, &err), KVT_E_HANDLE);
    CHECK(out == NULL);
    /* An offload can be forked after its session's handle was closed. */
    CHECK_OK(kvt_offload_fork(engine.offload, fork, &out, NULL));
    CHECK_OK(kvt_offload_close(&engine.offload));
    engine.offload = out;
    engine.session = fork;
    compare_all();
    CHECK_OK(kvt_error_free(&err));
    close_engine();
}

/* Audits count how many of the blocks with the most attention were loaded. */
static void audits_compare_loaded_with_wanted_blocks(void) {
    open_engine("store(host=4MiB)", 0, NULL, NULL);
    CHECK_OK(kvt_offload_close(&engine.offload));
    const kvt_attention_t shape = attention(0);
    kvt_offload_opts_t opts = opts_of(&shape, NULL, "quest(budget=48,page=16,dense=1)");
    kvt_error_t *err = NULL;
    opts.reserved = 1;
    CHECK_IS(kvt_offload_open(&opts, &engine.offload, &err), KVT_E_INVALID);
    CHECK_OK(kvt_error_free(&err));
    opts.reserved = 0;
    opts.audit_every = 1;
    CHECK_OK(kvt_offload_open(&opts, &engine.offload, NULL));

    /* Only the keys of block 3 match the query, in all heads. */
    append(100);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        compute(layer, 100);
        for (uint32_t i = 48 * K_ROW; i < 64 * K_ROW; i++) engine.k[layer][i] = 40;
        CHECK_OK(put_computed(layer, 100, PLAIN, NULL, NULL));
    }
    float numbers[QUERY];
    for (int i = 0; i < QUERY; i++) numbers[i] = 1;
    const kvt_rows_t query = rows_of(numbers, 1, QUERY_HEADS, KEY_DIM);
    const kvt_sparse_context_t where = context(0, 99, 100);
    const struct {
        uint32_t ids[2], count, found, ppm;
    } choices[] = {{{3, 0}, 1, 1, 1000000}, {{2, 0}, 1, 0, 0}, {{2, 3}, 2, 1, 1000000}};
    for (size_t i = 0; i < sizeof choices / sizeof *choices; i++) {
        const kvt_offload_stats_t before = stats();
        CHECK_OK(kvt_offload_load(engine.offload, 0, 1, choices[i].ids, choices[i].count,
                                  KVT_OFFLOAD_LOAD_CHOSEN, &query, &where, NULL, NULL));
        CHECK_OK(kvt_offload_release(engine.offload, 0, NULL));
        const kvt_offload_stats_t after = stats();
        CHECK_EQ(after.audited - before.audited, 1);
        CHECK_EQ(after.wanted - before.wanted, choices[i].count);
        /* The second of two wanted blocks may be any. */
        CHECK(after.found - before.found >= choices[i].found);
        CHECK_EQ(after.found_ppm - before.found_ppm, choices[i].ppm);
        CHECK_EQ(after.loaded_blocks - before.loaded_blocks, choices[i].count);
    }
    CHECK_EQ(stats().audited, 3);
    for (int i = 0; i < 20; i++) decode();
    const kvt_offload_stats_t s = stats();
    CHECK(s.audited > 3 && s.wanted >= s.found && s.found > 0);
    CHECK(s.found_ppm <= s.audited * 1000000);
    CHECK(s.select_waits > 0 && s.select_wait_ns > 0);
    compare_all();
    CHECK_EQ(s.cut_waits, 0);
    truncate_to(41);
    CHECK_EQ(stats().cut_waits, 1);
    CHECK(stats().cut_wait_ns > 0);
    compare_all();
    close_engine();
}

/* The call must return this status, and its message must contain this text. */
#define REFUSED(call, status, says)                                                          \
    do {                                                                                     \
        CHECK_IS(call, status);                                                              \
        if (strstr(kvt_error_message(err), says) == NULL) {                                  \
            fprintf(stderr, "%s:%d: '%s' does not contain '%s'\n", __FILE__, __LINE__,           \
                    kvt_error_message(err), says);                                           \
            exit(1);                                                                         \
        }                                                                                    \
    } while (0)

static void invalid_options_are_refused(void) {
    open_engine("store(host=4MiB)", 0, NULL, NULL);
    CHECK_OK(kvt_offload_close(&engine.offload));
    kvt_offload_t *out = NULL;
    kvt_error_t *err = NULL;
    const kvt_attention_t right = attention(0);
    kvt_attention_t shape;
    kvt_offload_opts_t opts;
#define BAD_SHAPE(change, says)                                                              \
    do {                                                                                     \
        shape = right;                                                                       \
        change;                                                                              \
        opts = opts_of(&shape, NULL, NULL);                                                  \
        REFUSED(kvt_offload_open(&opts, &out, &err), KVT_E_INVALID, says);                   \
        CHECK(out == NULL);                                                                  \
    } while (0)
#define BAD_OPTS(change, status, says)                                                       \
    do {                                                                                     \
        opts = opts_of(&right, NULL, NULL);                                                  \
        change;                                                                              \
        REFUSED(kvt_offload_open(&opts, &out, &err), status, says);                          \
        CHECK(out == NULL);                                                                  \
    } while (0)
#define BAD_SPEC(given, status, says)                                                        \
    do {                                                                                     \
        opts = opts_of(&right, NULL, given);                                                 \
        REFUSED(kvt_offload_open(&opts, &out, &err), status, says);                          \
        CHECK(out == NULL);                                                                  \
    } while (0)
    BAD_SHAPE(shape.layers = 4, "4 layers");
    BAD_SHAPE(shape.layers = 0, "");
    BAD_SHAPE(shape.query_heads = 3, "");
    BAD_SHAPE(shape.key_heads = 4, "");
    BAD_SHAPE(shape.key_heads = 0, "");
    BAD_SHAPE(shape.key_dim = 16, "bytes");
    BAD_SHAPE(shape.key_dim = UINT32_MAX, "");
    BAD_SHAPE(shape.value_dim = 8, "bytes");
    BAD_SHAPE(shape.block_tokens = 32, "blocks of 32");
    BAD_SHAPE(shape.block_tokens = 0, "");
    BAD_SHAPE(shape.max_tokens = 0, "");
    BAD_SHAPE(shape.max_tokens = UINT32_MAX, "");
    BAD_SHAPE(shape.kind = 2, "KVT_ATTENTION");
    BAD_SHAPE(shape.kind = KVT_ATTENTION_LATENT, "");
    BAD_SHAPE(shape.scale = NAN, "");
    BAD_SHAPE(shape.reserved = 1, "reserved");
    BAD_SHAPE(shape.struct_size = 0, "");
    BAD_OPTS(opts.session = NULL, KVT_E_HANDLE, "");
    BAD_OPTS(opts.session = (const kvt_session_t *)engine.ns, KVT_E_HANDLE, "");
    BAD_OPTS(opts.attention = NULL, KVT_E_INVALID, "attention is null");
    BAD_OPTS(opts.dtype = 99, KVT_E_INVALID, "dtype");
    BAD_OPTS(opts.dtype = KVT_DTYPE_F16, KVT_E_INVALID, "f16");
    BAD_OPTS(opts.dtype = KVT_DTYPE_I4, KVT_E_INVALID, "");
    BAD_OPTS(opts.buffers = 0, KVT_E_INVALID, "buffers");
    BAD_OPTS(opts.buffers = 257, KVT_E_INVALID, "257");
    BAD_OPTS(opts.buffer_tokens = 0, KVT_E_INVALID, "buffer_tokens");
    BAD_OPTS(opts.buffer_tokens = MAX_TOKENS + 1, KVT_E_INVALID, "buffer_tokens");
    BAD_OPTS(opts.level = 4, KVT_E_INVALID, "level");
    BAD_OPTS(opts.flags = 1u << 20, KVT_E_INVALID, "");
    BAD_OPTS(opts.flags = KVT_OFFLOAD_ON_DEVICE, KVT_E_UNAVAILABLE, "device");
    BAD_OPTS(opts.struct_size = 3, KVT_E_INVALID, "");
    BAD_SPEC("quest(budget=0)", KVT_E_SPEC, "decode");
    BAD_SPEC("questt", KVT_E_SPEC, "quest");
    BAD_SPEC("quest(bugdet=3)", KVT_E_SPEC, "budget");
    BAD_SPEC("quest(", KVT_E_SPEC, "");
    BAD_SPEC("h2o(budget=0)", KVT_E_SPEC, "");
    BAD_SPEC("minference", KVT_E_UNSUPPORTED, "decode");
    opts = opts_of(&right, "quest", NULL);
    REFUSED(kvt_offload_open(&opts, &out, &err), KVT_E_UNSUPPORTED, "prefill");
    opts = opts_of(&right, "\xff", NULL);
    CHECK(kvt_offload_open(&opts, &out, &err) != KVT_OK);
    CHECK_IS(kvt_offload_open(NULL, &out, &err), KVT_E_HANDLE);
    opts = opts_of(&right, NULL, NULL);
    CHECK_IS(kvt_offload_open(&opts, NULL, &err), KVT_E_INVALID);
    CHECK(out == NULL);
    CHECK_OK(kvt_error_free(&err));
    open_offload(NULL, NULL);
    close_engine();
}

/* Every call with an invalid handle. */
static void invalid_handles_are_refused(const kvt_offload_t *bad) {
    const kvt_sparse_context_t where = context(0, 1, 2);
    kvt_error_t *err = NULL;
    kvt_offload_kv_t kv = KVT_OFFLOAD_KV_INIT;
    kvt_offload_stats_t s = KVT_OFFLOAD_STATS_INIT;
    float numbers[QUERY] = {0};
    const kvt_rows_t rows = rows_of(numbers, 1, QUERY_HEADS, KEY_DIM);
    uint32_t a = 7, b = 7;
    uint64_t count = 7;
    kvt_op_t *op = NULL;
    CHECK_IS(kvt_offload_tokens(bad, 0, &a, &b), KVT_E_HANDLE);
    CHECK_IS(kvt_offload_stats(bad, &s), KVT_E_HANDLE);
    CHECK_IS(kvt_offload_truncate(bad, 0, &err), KVT_E_HANDLE);
    CHECK_IS(kvt_offload_resume(bad, 0, &err), KVT_E_HANDLE);
    CHECK_IS(kvt_offload_put(bad, 0, 0, 1, &rows.view, &rows.view, NULL, &op, &err), KVT_E_HANDLE);
    CHECK_IS(kvt_offload_load(bad, 0, 0, NULL, 0, 0, NULL, &where, &a, &err), KVT_E_HANDLE);
    CHECK_IS(kvt_offload_wait(bad, 0, &kv, &err), KVT_E_HANDLE);
    CHECK_IS(kvt_offload_release(bad, 0, &err), KVT_E_HANDLE);
    CHECK_IS(kvt_offload_begin(bad, &where, &err), KVT_E_HANDLE);
    CHECK_IS(kvt_offload_take(bad, 0, NULL, &kv, &err), KVT_E_HANDLE);
    CHECK_IS(kvt_offload_give_back(bad, 0, &err), KVT_E_HANDLE);
    CHECK_IS(kvt_offload_blocks(bad, 0, &a, 1, &count), KVT_E_HANDLE);
    CHECK_IS(kvt_offload_rows(bad, 0, &a, 1, &b, &count), KVT_E_HANDLE);
    CHECK_IS(kvt_offload_observe(bad, 0, 1, numbers, 1, 1, &err), KVT_E_HANDLE);
    CHECK_IS(kvt_offload_evict(bad, 0, &where, &a, &err), KVT_E_HANDLE);
    CHECK_IS(kvt_offload_retained(bad, 0, 0, &a, 1, &count, &b), KVT_E_HANDLE);
    CHECK_IS(kvt_offload_append_keys(bad, 0, 0, &rows, &err), KVT_E_HANDLE);
    CHECK_IS(kvt_offload_score(bad, 0, 0, numbers, 1, &err), KVT_E_HANDLE);
    CHECK(a == 7 && b == 7 && count == 7 && op == NULL);
    CHECK_OK(kvt_error_free(&err));
}

static void invalid_calls_are_refused(void) {
    open_engine("store(host=4MiB)", 0, NULL, "quest(budget=48,page=16,dense=1)");
    put_all(40);
    invalid_handles_are_refused(NULL);
    invalid_handles_are_refused((const kvt_offload_t *)engine.session);
    invalid_handles_are_refused((const kvt_offload_t *)engine.store);
    kvt_offload_t *wrong = (kvt_offload_t *)engine.session;
    CHECK_IS(kvt_offload_close(&wrong), KVT_E_HANDLE);
    const kvt_offload_stats_t before = stats();
    kvt_error_t *err = NULL;
    const kvt_sparse_context_t right = context(0, 39, 40);
    kvt_sparse_context_t where;
    kvt_offload_kv_t kv = KVT_OFFLOAD_KV_INIT;
    uint32_t count = 0, evicted = 0, list[64] = {0};
    uint64_t n = 0;
    float numbers[4 * QUERY];
    kvt_rows_t query = query_of(numbers);
#define LOAD(buffer, layer, blocks, count_of, rows, given)                                   \
    kvt_offload_load(engine.offload, buffer, layer, blocks, count_of, 0, rows, given, &count,    \
                     &err)
    const uint32_t falling[] = {1, 0}, twice[] = {0, 0}, unknown[] = {0, 2}, both[] = {0, 1};
    REFUSED(LOAD(2, 0, NULL, 0, NULL, &right), KVT_E_INVALID, "buffer 2");
    REFUSED(LOAD(0, 3, NULL, 0, NULL, &right), KVT_E_INVALID, "layer 3");
    REFUSED(LOAD(0, 0, falling, 2, NULL, &right), KVT_E_INVALID, "ascend");
    REFUSED(LOAD(0, 0, twice, 2, NULL, &right), KVT_E_INVALID, "ascend");
    REFUSED(LOAD(0, 0, unknown, 2, NULL, &right), KVT_E_INVALID, "below");
    REFUSED(LOAD(0, 0, both, UINT64_MAX, NULL, &right), KVT_E_LIMIT, "");
    REFUSED(LOAD(0, 0, (const uint32_t *)((const char *)both + 1), 1, NULL, &right), KVT_E_INVALID,
            "aligned");
#define BAD_WHERE(change)                                                                    \
    where = right;                                                                           \
    change;                                                                                  \
    CHECK_IS(LOAD(0, 0, NULL, 0, NULL, &where), KVT_E_INVALID);                              \
    CHECK_IS(kvt_offload_begin(engine.offload, &where, &err), KVT_E_INVALID);                \
    CHECK_IS(kvt_offload_evict(engine.offload, 0, &where, &evicted, &err), KVT_E_INVALID)
    BAD_WHERE(where.is_prefill = 2);
    BAD_WHERE(where.reserved = 1);
    BAD_WHERE(where.part = 1);
    BAD_WHERE(where.first_query = 41);
    BAD_WHERE(where.struct_size = 7);
    kvt_rows_t few = rows_of(numbers, 1, 2, 2 * KEY_DIM);
    REFUSED(LOAD(0, 2, NULL, 0, &few, &right), KVT_E_INVALID, "queries");
    few = rows_of(numbers, 1, QUERY_HEADS, KEY_DIM / 2);
    REFUSED(LOAD(0, 2, NULL, 0, &few, &right), KVT_E_INVALID, "queries");
    few = query;
    few.dtype = KVT_DTYPE_I4;
    REFUSED(LOAD(0, 2, NULL, 0, &few, &right), KVT_E_UNSUPPORTED, "queries");
    few.dtype = 99;
    REFUSED(LOAD(0, 2, NULL, 0, &few, &right), KVT_E_INVALID, "dtype 99");
    few = query;
    few.view.address = NULL;
    REFUSED(LOAD(0, 2, NULL, 0, &few, &right), KVT_E_INVALID, "queries");
    few = query;
    few.view.tokens = 0;
    REFUSED(LOAD(0, 2, NULL, 0, &few, &right), KVT_E_INVALID, "queries");
    few = query;
    few.view.memory = KVT_MEMORY_DEVICE;
    CHECK(LOAD(0, 2, NULL, 0, &few, &right) != KVT_OK);
    few = query;
    few.scaling = 9;
    REFUSED(LOAD(0, 2, NULL, 0, &few, &right), KVT_E_INVALID, "scaling 9");
    few = query;
    few.scaling = KVT_SCALES_TOKEN;
    REFUSED(LOAD(0, 2, NULL, 0, &few, &right), KVT_E_INVALID, "queries");
    numbers[3] = NAN;
    REFUSED(LOAD(0, 2, NULL, 0, &query, &right), KVT_E_INVALID, "queries");
    numbers[3] = 0;
    CHECK_EQ(count, 0);
    REFUSED(kvt_offload_wait(engine.offload, 0, &kv, &err), KVT_E_STATE, "no load to wait for");
    REFUSED(kvt_offload_wait(engine.offload, 2, &kv, &err), KVT_E_INVALID, "buffer 2");
    REFUSED(kvt_offload_release(engine.offload, 2, &err), KVT_E_INVALID, "buffer 2");
    CHECK_IS(kvt_offload_blocks(engine.offload, 2, list, 64, &n), KVT_E_INVALID);
    CHECK_IS(kvt_offload_rows(engine.offload, 2, list, 1, list, &n), KVT_E_INVALID);
    CHECK_IS(kvt_offload_rows(engine.offload, 0, falling, 2, list, &n), KVT_E_INVALID);
    CHECK_IS(kvt_offload_rows(engine.offload, 0, NULL, 2, list, &n), KVT_E_INVALID);
    CHECK_IS(kvt_offload_rows(engine.offload, 0, both, 2, NULL, &n), KVT_E_INVALID);
    CHECK_IS(kvt_offload_tokens(engine.offload, 3, list, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_offload_tokens(engine.offload, 0, NULL, list), KVT_E_INVALID);
    CHECK_IS(kvt_offload_stats(engine.offload, NULL), KVT_E_INVALID);

    /* Calls of a pass in the wrong order. */
    REFUSED(kvt_offload_take(engine.offload, 0, NULL, &kv, &err), KVT_E_STATE, "no pass");
    REFUSED(kvt_offload_give_back(engine.offload, 0, &err), KVT_E_STATE, "not taken");
    CHECK_OK(kvt_offload_begin(engine.offload, &right, NULL));
    REFUSED(kvt_offload_take(engine.offload, 1, &query, &kv, &err), KVT_E_STATE, "layer 1");
    REFUSED(kvt_offload_give_back(engine.offload, 0, &err), KVT_E_STATE, "not taken");
    CHECK_IS(kvt_offload_take(engine.offload, 0, &query, NULL, &err), KVT_E_INVALID);
    kv.struct_size = 1;
    CHECK_IS(kvt_offload_take(engine.offload, 0, &query, &kv, &err), KVT_E_INVALID);
    kv.struct_size = sizeof kv;
    CHECK_OK(kvt_offload_take(engine.offload, 0, &query, &kv, NULL));
    REFUSED(kvt_offload_take(engine.offload, 0, &query, &kv, &err), KVT_E_STATE, "given back");
    REFUSED(LOAD(kv.buffer, 1, NULL, 0, NULL, &right), KVT_E_BUSY, "in use");
    check_kv(0, &kv);
    CHECK_OK(kvt_offload_give_back(engine.offload, 0, NULL));
    numbers[0] = INFINITY;
    REFUSED(kvt_offload_take(engine.offload, 1, &query, &kv, &err), KVT_E_INVALID, "queries");
    numbers[0] = 0;
    for (uint32_t layer = 1; layer < LAYERS; layer++) {
        CHECK_OK(kvt_offload_take(engine.offload, layer, &query, &kv, NULL));
        check_kv(layer, &kv);
        CHECK_OK(kvt_offload_give_back(engine.offload, layer, NULL));
    }
    CHECK_IS(kvt_offload_take(engine.offload, LAYERS, &query, &kv, &err), KVT_E_INVALID);

    /* After the engine loads into a buffer of a pass, the pass has lost the buffer. */
    CHECK_OK(kvt_offload_begin(engine.offload, &right, NULL));
    CHECK_OK(kvt_offload_release(engine.offload, 0, NULL));
    CHECK_OK(LOAD(0, 2, both, 1, NULL, &right));
    REFUSED(kvt_offload_take(engine.offload, 0, &query, &kv, &err), KVT_E_BUSY, "buffer 0");
    CHECK_OK(kvt_offload_release(engine.offload, 0, NULL));
    CHECK_OK(kvt_offload_take(engine.offload, 0, &query, &kv, NULL));
    check_kv(0, &kv);
    CHECK_OK(kvt_offload_give_back(engine.offload, 0, NULL));

    /* Puts. */
    plane_t k, v;
    kvt_view_t bad;
    kvt_op_t *op = NULL;
#define PUT(layer, first, tokens, k_view, v_view)                                            \
    kvt_offload_put(engine.offload, layer, first, tokens, k_view, v_view, NULL, &op, &err)
    lay_out(&k, engine.k[0], 40, HEADS, KEY_DIM, PLAIN);
    lay_out(&v, engine.v[0], 40, HEADS, VALUE_DIM, PLAIN);
    REFUSED(PUT(0, 40, 4, &k.view, &v.view), KVT_E_INVALID, "append them first");
    append(20);
    engine.appended -= 20;
    REFUSED(PUT(3, 40, 4, &k.view, &v.view), KVT_E_INVALID, "layer 3");
    REFUSED(PUT(0, 39, 4, &k.view, &v.view), KVT_E_INVALID, "layer 0 has 40");
    REFUSED(PUT(0, 41, 4, &k.view, &v.view), KVT_E_INVALID, "layer 0 has 40");
    REFUSED(PUT(0, 40, 0, &k.view, &v.view), KVT_E_INVALID, "");
    REFUSED(PUT(0, 40, UINT32_MAX, &k.view, &v.view), KVT_E_LIMIT, "");
    REFUSED(PUT(0, 40, MAX_TOKENS, &k.view, &v.view), KVT_E_LIMIT, "");
    REFUSED(PUT(0, 40, 4, NULL, &v.view), KVT_E_INVALID, "k is null");
    REFUSED(PUT(0, 40, 4, &k.view, NULL), KVT_E_INVALID, "V is missing");
    REFUSED(PUT(0, 40, 4, &v.view, &v.view), KVT_E_INVALID, "K");
    REFUSED(PUT(0, 40, 4, &k.view, &k.view), KVT_E_INVALID, "V");
#define BAD_VIEW(change, says)                                                               \
    bad = k.view;                                                                            \
    change;                                                                                  \
    REFUSED(PUT(0, 40, 4, &bad, &v.view), KVT_E_INVALID, says)
    BAD_VIEW(bad.tokens = 3, "3 tokens");
    BAD_VIEW(bad.heads = 4, "heads");
    BAD_VIEW(bad.run_bytes = 4, "");
    BAD_VIEW(bad.run_bytes = UINT64_MAX, "");
    BAD_VIEW(bad.memory = 2, "");
    BAD_VIEW(bad.pages = k.pages, "");
    BAD_VIEW(bad.address = NULL, "");
    bad = k.view;
    bad.memory = KVT_MEMORY_DEVICE;
    REFUSED(PUT(0, 40, 4, &bad, &v.view), KVT_E_UNAVAILABLE, "K");
    k.memory[5] = NAN;
    REFUSED(PUT(0, 40, 4, &k.view, &v.view), KVT_E_INVALID, "keys");
    kvt_submit_opts_t submit_opts = KVT_SUBMIT_OPTS_INIT;
    submit_opts.priority = 77;
    CHECK_IS(kvt_offload_put(engine.offload, 0, 40, 4, &k.view, &v.view, &submit_opts, &op, &err),
             KVT_E_INVALID);
    submit_opts.priority = 0;
    submit_opts.flags = KVT_SUBMIT_EACH;
    CHECK_IS(kvt_offload_put(engine.offload, 0, 40, 4, &k.view, &v.view, &submit_opts, &op, &err),
             KVT_E_INVALID);
    submit_opts.flags = 0;
    submit_opts.queue = (const kvt_queue_t *)engine.store;
    CHECK_IS(kvt_offload_put(engine.offload, 0, 40, 4, &k.view, &v.view, &submit_opts, &op, &err),
             KVT_E_HANDLE);
    k.memory[5] = 0;
    const kvt_status_t unreported =
        kvt_offload_put(engine.offload, 0, 40, 20, &k.view, &v.view, NULL, NULL, &err);
    REFUSED(unreported, KVT_E_INVALID, "out_op is null");
    check_tokens();
    CHECK(op == NULL);
    free(k.memory);
    free(v.memory);

    /* Inputs that quest does not need, and functions that it does not support. */
    float sums[40] = {0};
    REFUSED(kvt_offload_score(engine.offload, 0, 1, sums, 1, &err), KVT_E_UNSUPPORTED, "");
    CHECK_IS(kvt_offload_score(engine.offload, 0, 0, sums, 1, &err), KVT_E_UNSUPPORTED);
    CHECK_IS(kvt_offload_score(engine.offload, 0, 2, sums, 1, &err), KVT_E_INVALID);
    CHECK_IS(kvt_offload_score(engine.offload, 0, 0, NULL, 1, &err), KVT_E_INVALID);
    CHECK_IS(kvt_offload_score(engine.offload, 9, 0, sums, 1, &err), KVT_E_INVALID);
    CHECK_IS(kvt_offload_append_keys(engine.offload, 0, 0, NULL, &err), KVT_E_INVALID);
    CHECK_IS(kvt_offload_append_keys(engine.offload, 9, 0, &query, &err), KVT_E_INVALID);
    CHECK_IS(kvt_offload_observe(engine.offload, 9, 1, sums, 40, 40, &err), KVT_E_INVALID);
    CHECK_IS(kvt_offload_observe(engine.offload, 0, 1, NULL, 40, 40, &err), KVT_E_INVALID);
    CHECK_IS(kvt_offload_observe(engine.offload, 0, 1, sums, UINT64_MAX, 40, &err), KVT_E_LIMIT);
    CHECK_IS(kvt_offload_evict(engine.offload, 9, &right, &evicted, &err), KVT_E_INVALID);
    evicted = 9;
    CHECK_OK(kvt_offload_evict(engine.offload, 0, &right, &evicted, NULL));
    CHECK_EQ(evicted, 0);
    CHECK_IS(kvt_offload_retained(engine.offload, 3, 0, list, 64, &n, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_offload_retained(engine.offload, 0, 1, list, 64, &n, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_offload_retained(engine.offload, 0, 0, list, 64, NULL, NULL), KVT_E_INVALID);
    CHECK_OK(kvt_error_free(&err));
    check_tokens();
    const kvt_offload_stats_t after = stats();
    CHECK_EQ(after.put_bytes + after.tail_bytes - before.put_bytes - before.tail_bytes,
             4 * 8 * (K_ROW + V_ROW) * sizeof(float)); /* tails of the taken buffers */
    CHECK_EQ(after.failed_loads + after.evicted_tokens, 0);
    for (uint32_t layer = 0; layer < LAYERS; layer++) put(layer, 20, PLAIN);
    compare_all();
    kvt_offload_t *stale = engine.offload;
    close_engine();
    invalid_handles_are_refused(stale);
    CHECK_IS(kvt_offload_close(&stale), KVT_E_HANDLE);
    stale = NULL;
    CHECK_OK(kvt_offload_close(&stale));
    CHECK_OK(kvt_offload_close(NULL));

    /* More blocks than a buffer can hold, and invalid sums. */
    open_engine("store(host=4MiB)", 0, NULL, "h2o(sink=4,recent=20,budget=8,heads=all)");
    put_all(300);
    where = context(0, 299, 300);
    REFUSED(LOAD(0, 0, NULL, 0, NULL, &where), KVT_E_LIMIT, "in parts");
    CHECK_OK(kvt_offload_begin(engine.offload, &where, NULL));
    REFUSED(kvt_offload_take(engine.offload, 0, NULL, &kv, &err), KVT_E_LIMIT, "in parts");
    float weights[300] = {0};
    weights[7] = -1;
    CHECK_IS(kvt_offload_observe(engine.offload, 0, 1, weights, 300, 300, &err), KVT_E_INVALID);
    weights[7] = NAN;
    CHECK_IS(kvt_offload_observe(engine.offload, 0, 1, weights, 300, 300, &err), KVT_E_INVALID);
    weights[7] = 0;
    CHECK_IS(kvt_offload_observe(engine.offload, 0, 1, weights, 299, 300, &err), KVT_E_INVALID);
    CHECK_EQ(stats().evicted_tokens, 0);
    CHECK_OK(kvt_error_free(&err));
    close_engine();
}

/* A put to a full queue has no effect, and succeeds later. */
static void full_queue_refuses_a_put(void) {
    open_engine("store(host=4MiB)", 0, NULL, "quest(budget=48,page=16,dense=1)");
    append(64);
    compute(1, 64);
    plane_t k, v;
    lay_out(&k, engine.k[1], 64, HEADS, KEY_DIM, PLAIN);
    lay_out(&v, engine.v[1], 64, HEADS, VALUE_DIM, PLAIN);
    kvt_queue_t *queue = open_queue(runtime, 1);
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    opts.queue = queue;
    kvt_op_t *op = NULL;
    CHECK_OK(kvt_offload_put(engine.offload, 1, 0, 32, &k.view, &v.view, &opts, NULL, NULL));
    engine.tokens[1] = 32;
    k.view.address = k.memory + 32 * K_ROW;
    v.view.address = v.memory + 32 * V_ROW;
    CHECK_IS(kvt_offload_put(engine.offload, 1, 32, 32, &k.view, &v.view, &opts, &op, NULL),
             KVT_E_AGAIN);
    CHECK(op == NULL);
    check_tokens();
    kvt_completion_t done;
    uint64_t count = 0;
    CHECK_OK(kvt_queue_wait(queue, hang_guard(), &done, 1, sizeof done, &count));
    CHECK(done.op == NULL);
    CHECK_OK(kvt_offload_put(engine.offload, 1, 32, 32, &k.view, &v.view, &opts, NULL, NULL));
    engine.tokens[1] = 64;
    CHECK_OK(kvt_queue_wait(queue, hang_guard(), &done, 1, sizeof done, &count));
    check_tokens();
    load_all(1);
    close_queue(&queue);
    free(k.memory);
    free(v.memory);
    close_engine();
}

/* Objects may be closed in any order. */
static void objects_close_in_any_order(void) {
    const kvt_sparse_context_t where = context(0, 89, 90);
    for (int i = 0; i < 20; i++) {
        open_engine("store(host=4MiB)", 0, NULL, NULL);
        put_all(90);
        CHECK_OK(kvt_offload_begin(engine.offload, &where, NULL)); /* loads are in progress */
        close_engine();
    }

    /* The session's handle is closed first: the offload keeps the session. */
    open_engine("store(host=4MiB)", 0, NULL, NULL);
    put_all(90);
    const kvt_session_t *stale = engine.session;
    CHECK_OK(kvt_session_close(&engine.session));
    compare_all();
    CHECK_IS(kvt_session_truncate(stale, 0, NULL), KVT_E_HANDLE);
    CHECK_OK(kvt_offload_close(&engine.offload));
    CHECK_OK(kvt_namespace_close(&engine.ns));
    CHECK_OK(kvt_store_close(&engine.store, hang_guard(), NULL));

    /* The store is closed first. */
    open_engine("store(host=4MiB)", 0, NULL, "quest(budget=48,page=16,dense=1)");
    put_all(90);
    CHECK_OK(kvt_offload_load(engine.offload, 0, 0, NULL, 0, 0, NULL, &where, NULL, NULL));
    CHECK_OK(kvt_store_close(&engine.store, hang_guard(), NULL));
    kvt_offload_kv_t kv = KVT_OFFLOAD_KV_INIT;
    kvt_error_t *err = NULL;
    const kvt_status_t came = kvt_offload_wait(engine.offload, 0, &kv, &err);
    if (came == KVT_OK) check_kv(0, &kv);
    CHECK_IS(kvt_offload_load(engine.offload, 1, 1, NULL, 0, 0, NULL, &where, NULL, &err),
             KVT_E_CLOSED);
    CHECK_OK(kvt_offload_begin(engine.offload, &where, NULL));
    CHECK_IS(kvt_offload_take(engine.offload, 0, NULL, &kv, &err), KVT_E_CLOSED);
    compute(0, 1);
    CHECK_IS(put_computed(0, 1, PLAIN, NULL, &err), KVT_E_CLOSED);
    CHECK_IS(kvt_offload_truncate(engine.offload, 40, &err), KVT_E_CLOSED);
    CHECK(stats().put_blocks > 0);
    CHECK_OK(kvt_error_free(&err));
    CHECK_OK(kvt_offload_close(&engine.offload));
    CHECK_OK(kvt_session_close(&engine.session));
    CHECK_OK(kvt_namespace_close(&engine.ns));
}

/* An offload that exceeds the store's account is refused. */
static void memory_is_charged_to_the_store(void) {
    kvt_budget_opts_t opts = KVT_BUDGET_OPTS_INIT;
    opts.host_bytes = 8 << 20;
    kvt_budget_t *budget = NULL;
    CHECK_OK(kvt_budget_open(runtime, &opts, &budget, NULL));
    store_budget = budget;
    open_engine("store(host=4MiB)", 0, NULL, NULL);
    CHECK_OK(kvt_offload_close(&engine.offload));
    const kvt_attention_t shape = attention(0);
    kvt_offload_opts_t many = opts_of(&shape, NULL, NULL);
    many.buffers = 256;
    many.buffer_tokens = MAX_TOKENS;
    kvt_error_t *err = NULL;
    CHECK_IS(kvt_offload_open(&many, &engine.offload, &err), KVT_E_BUDGET);
    CHECK(engine.offload == NULL);
    CHECK_OK(kvt_error_free(&err));

    /* As many forks as the budget allows, twice: a refused fork keeps no memory. */
    many.buffers = 8;
    many.audit_every = 1;
    CHECK_OK(kvt_offload_open(&many, &engine.offload, NULL));
    put_all(40);
    int fits[2] = {0, 0};
    for (int turn = 0; turn < 2; turn++) {
        kvt_session_t *sessions[64] = {NULL};
        kvt_offload_t *forks[64] = {NULL};
        for (int i = 0; i < 64; i++) {
            CHECK_OK(kvt_session_fork(engine.session, NULL, &sessions[i], NULL));
            const kvt_status_t status =
                kvt_offload_fork(engine.offload, sessions[i], &forks[i], &err);
            if (status == KVT_OK) {
                fits[turn]++;
                continue;
            }
            CHECK_EQ(status, KVT_E_BUDGET);
            CHECK(forks[i] == NULL);
            break;
        }
        for (int i = 0; i < 64; i++) {
            CHECK_OK(kvt_offload_close(&forks[i]));
            CHECK_OK(kvt_session_close(&sessions[i]));
        }
    }
    CHECK(fits[0] > 0 && fits[0] < 64);
    CHECK_EQ(fits[0], fits[1]);
    CHECK_OK(kvt_error_free(&err));
    CHECK_OK(kvt_offload_close(&engine.offload));
    open_offload(NULL, NULL);
    CHECK_OK(kvt_offload_resume(engine.offload, 32, NULL));
    for (uint32_t layer = 0; layer < LAYERS; layer++) engine.tokens[layer] = 32;
    compare_all();
    close_engine();
    store_budget = NULL;
    CHECK_OK(kvt_budget_close(&budget, NULL));
}

/* The runtime is closed first. */
static void offload_outlives_its_runtime(void) {
    kvt_runtime_t *before = runtime; /* its objects are not counted */
    const kvt_sparse_context_t where = context(0, 89, 90);
    runtime = open_runtime(1, NULL);
    open_engine("store(host=4MiB)", 0, NULL, NULL);
    put_all(90);
    CHECK_OK(kvt_offload_begin(engine.offload, &where, NULL));
    kvt_close_report_t left = KVT_CLOSE_REPORT_INIT;
    CHECK_OK(kvt_runtime_close(&runtime, hang_guard(), &left, NULL));
    CHECK_EQ(left.offloads, 1);
    CHECK_EQ(left.sessions, 1);
    runtime = before;
    for (uint32_t buffer = 0; buffer < 2; buffer++)
        CHECK_OK(kvt_offload_release(engine.offload, buffer, NULL));
    CHECK_IS(kvt_offload_load(engine.offload, 1, 1, NULL, 0, 0, NULL, &where, NULL, NULL),
             KVT_E_CLOSED);
    CHECK_OK(kvt_offload_close(&engine.offload));
    CHECK_OK(kvt_session_close(&engine.session));
    CHECK_OK(kvt_namespace_close(&engine.ns));
    CHECK_OK(kvt_store_close(&engine.store, hang_guard(), NULL));
}

/* Loads blocks; two threads call concurrently, and the library serializes them. */
static void *load_repeatedly(void *data) {
    const uint32_t buffer = *(const uint32_t *)data;
    const kvt_sparse_context_t where = context(0, 89, 90);
    for (uint32_t i = 0; i < 60; i++) {
        kvt_offload_kv_t kv = KVT_OFFLOAD_KV_INIT;
        CHECK_OK(kvt_offload_load(engine.offload, buffer, i % LAYERS, NULL, 0, 0, NULL, &where,
                                  NULL, NULL));
        CHECK_OK(kvt_offload_wait(engine.offload, buffer, &kv, NULL));
        check_kv(i % LAYERS, &kv);
        CHECK_OK(kvt_offload_release(engine.offload, buffer, NULL));
    }
    return NULL;
}

static void two_threads_share_an_offload(void) {
    open_engine("store(host=4MiB)", 0, NULL, NULL);
    put_all(90);
    uint32_t buffers[2] = {0, 1};
    const pthread_t thread = start_thread(load_repeatedly, &buffers[1]);
    load_repeatedly(&buffers[0]);
    join_thread(thread);
    CHECK_EQ(stats().loads, 120);
    close_engine();
}

/* A custom policy that selects every second block, and counts its callbacks. */
typedef struct {
    uint32_t alone, together, selects, freed;
} own_t;

static kvt_status_t own_prefill_hook(void *data, uint32_t block, uint32_t layer, uint32_t first,
                                     const kvt_rows_t *keys) {
    CHECK_EQ(first, block * BLOCK);
    CHECK_EQ(keys->view.tokens, BLOCK);
    for (uint32_t t = 0; t < BLOCK; t++)
        CHECK(memcmp((const char *)keys->view.address + t * keys->view.token_stride_bytes,
                     engine.k[layer] + (first + t) * K_ROW, K_ROW * sizeof(float)) == 0);
    ((own_t *)data)->alone++;
    return KVT_OK;
}

static kvt_status_t own_decode_hook(void *data, uint32_t block, uint32_t first,
                                    const kvt_rows_t *keys, uint32_t layers) {
    CHECK_EQ(layers, LAYERS);
    CHECK_EQ(first, block * BLOCK);
    for (uint32_t layer = 0; layer < layers; layer++)
        CHECK(memcmp(keys[layer].view.address, engine.k[layer] + first * K_ROW,
                     BLOCK * K_ROW * sizeof(float)) == 0);
    ((own_t *)data)->together++;
    /* Inside a callback the offload is in use. */
    uint32_t stored = 0;
    CHECK_IS(kvt_offload_tokens(engine.offload, 0, &stored, NULL), KVT_E_REENTRANT);
    return KVT_OK;
}

static kvt_status_t own_select(void *data, uint32_t layer, const kvt_rows_t *query,
                               const uint32_t *candidates, uint64_t count,
                               const kvt_sparse_context_t *where, uint32_t *ids,
                               uint64_t *count_out) {
    CHECK(query != NULL && layer < LAYERS && where->is_prefill == 0);
    *count_out = 0;
    for (uint64_t i = 0; i < count; i++)
        if (candidates[i] % 2 == 0) ids[(*count_out)++] = candidates[i];
    ((own_t *)data)->selects++;
    return KVT_OK;
}

static void own_free(void *data) { ((own_t *)data)->freed++; }

static void put_plain(uint32_t tokens) {
    append(tokens);
    for (uint32_t layer = 0; layer < LAYERS; layer++) put(layer, tokens, PLAIN);
}

static void custom_policy_is_called(void) {
    own_t own = {0, 0, 0, 0};
    kvt_sparse_traits_t traits = KVT_SPARSE_TRAITS_INIT;
    traits.caps = KVT_SPARSE_LOAD_DECODE;
    traits.needs = KVT_NEEDS_QUERIES | KVT_NEEDS_KEYS;
    traits.scope = KVT_SCOPE_LAYER;
    traits.granularity = KVT_GRANULARITY_BLOCK;
    traits.flags = KVT_SPARSE_SELECTS;
    kvt_sparse_custom_t custom = KVT_SPARSE_CUSTOM_INIT;
    custom.traits = &traits;
    custom.on_prefill_offload = own_prefill_hook;
    custom.on_decode_offload = own_decode_hook;
    custom.select_blocks = own_select;
    custom.user_data = &own;
    custom.destroy = own_free;
    memset(&engine, 0, sizeof engine);
    engine.heads = HEADS;
    open_store("store(host=4MiB)");
    const kvt_attention_t shape = attention(0);
    kvt_offload_opts_t opts = opts_of(&shape, NULL, "full");
    opts.decode_custom = &custom;
    CHECK_IS(kvt_offload_open(&opts, &engine.offload, NULL), KVT_E_INVALID);
    opts = opts_of(&shape, NULL, NULL);
    opts.decode_custom = &custom;
    kvt_error_t *err = NULL;
    const kvt_status_t status = kvt_offload_open(&opts, &engine.offload, &err);
    if (status != KVT_OK) fprintf(stderr, "%s\n", kvt_error_message(err));
    CHECK_OK(status);
    put_plain(40);
    CHECK_EQ(own.alone, 2 * LAYERS);
    for (int i = 0; i < 8; i++) decode();
    CHECK_EQ(own.alone, 2 * LAYERS);
    CHECK_EQ(own.together, 1);
    CHECK_EQ(own.selects, 8 * LAYERS);
    /* A block within a part of a prompt, and a block that becomes complete layer by layer. */
    put_plain(20);
    put_plain(14);
    CHECK_EQ(own.alone, 4 * LAYERS);
    CHECK_EQ(own.together, 1);
    compare_all();
    /* Blocks that are truncated and put again are reported again. */
    truncate_to(44);
    for (int i = 0; i < 4; i++) decode();
    CHECK_EQ(own.together, 2);
    CHECK_EQ(own.alone, 4 * LAYERS);
    compare_all();
    kvt_session_t *forked = NULL;
    kvt_offload_t *copy = NULL;
    CHECK_OK(kvt_session_fork(engine.session, NULL, &forked, NULL));
    CHECK_IS(kvt_offload_fork(engine.offload, forked, &copy, NULL), KVT_E_UNSUPPORTED);
    CHECK_OK(kvt_session_close(&forked));
    CHECK_EQ(own.freed, 0);
    close_engine();
    CHECK_EQ(own.freed, 1);
}

static void remove_folder(void) {
    char command[600];
    snprintf(command, sizeof command, "rm -r '%s'", folder);
    CHECK(system(command) == 0);
}

int main(void) {
    check_begin();
    CHECK(mkdtemp(folder) != NULL);
    runtime = open_runtime(1, NULL);
    prefill_in_parts_then_decode(0, NULL);
    prefill_in_parts_then_decode(0, "quest(budget=48,page=16,dense=1)");
    prefill_in_parts_then_decode(1, NULL);
    prefill_in_parts_then_decode(1, "quest(budget=48,page=16,dense=1)");
    puts_work_from_every_form();
    truncated_tokens_can_be_put_again();
    sequences_resume_after_a_restart();
    evicted_tokens_are_not_loaded();
    key_policies_see_all_keys();
    blocks_are_selected_by_query_indexer_or_scores();
    chosen_blocks_are_loaded_with_the_tail();
    forks_continue_independently(0, NULL);
    forks_continue_independently(0, "quest(budget=48,page=16,dense=1)");
    forks_continue_independently(1, "quest(budget=48,page=16,dense=1)");
    invalid_forks_are_refused();
    audits_compare_loaded_with_wanted_blocks();
    custom_policy_is_called();
    invalid_options_are_refused();
    invalid_calls_are_refused();
    full_queue_refuses_a_put();
    objects_close_in_any_order();
    offload_outlives_its_runtime();
    memory_is_charged_to_the_store();
    two_threads_share_an_offload();
    close_runtime(&runtime);
    remove_folder();
    return check_end("offload_engine");
}
