/* Tests of an offload on a device: the ring, the tails, K and V are in device memory. Kernels
 * (here copies on the engine's stream) write K and V after the put, and read buffers after they
 * were given back; events order them. Every loaded row is compared with the computed one. */

#include "accelerator.h"

enum { LAYERS = 3, HEADS = 2, KEY_DIM = 8, VALUE_DIM = 6, BLOCK = 16, MAX_TOKENS = 320 };
enum { K_ROW = HEADS * KEY_DIM, V_ROW = HEADS * VALUE_DIM, QUERY_HEADS = 4, ENGINE = 1 };

typedef struct {
    accelerator_t accelerator;
    kvt_device_t *device;
    kvt_store_t *store;
    kvt_namespace_t *ns;
    kvt_session_t *session;
    kvt_offload_t *offload;
    /* Output of the kernels, and the ring if the engine provides it. */
    kvt_device_memory_t scratch, ring;
    uint64_t seed;
    uint32_t tokens, next_id;
    /* Events of this step: the engine's, and the imported ones. */
    uint64_t own[256], imported[256];
    uint32_t events;
    float k[LAYERS][MAX_TOKENS * K_ROW], v[LAYERS][MAX_TOKENS * V_ROW];
} engine_t;

static engine_t engine;

static float number(void) {
    return (float)(next_random(&engine.seed) >> 40) / (float)(1 << 23) - 1.0f;
}

/* Submits a kernel to the engine's stream; later copies wait for it. */
static void run_rows(uint64_t from, uint32_t from_memory, uint64_t to, uint32_t to_memory,
                   uint64_t bytes) {
    kvt_copy_rows_t rows = {0};
    rows.from = from;
    rows.to = to;
    rows.run_bytes = rows.from_stride_bytes = rows.to_stride_bytes = bytes;
    rows.runs = 1;
    rows.from_memory = from_memory;
    rows.to_memory = to_memory;
    CHECK(engine.events < 256);
    uint64_t *own = &engine.own[engine.events], *imported = &engine.imported[engine.events];
    engine.events++;
    CHECK_OK(submit_copies(&engine.accelerator, ENGINE, 0, &rows, 1, sizeof rows, own));
    CHECK_OK(kvt_device_import_event(engine.device, *own, imported, NULL));
    CHECK_OK(kvt_offload_set_ready_event(engine.offload, *imported, NULL));
}

/* Waits for all kernels of a step, and releases their events. */
static void finish_kernels(void) {
    CHECK_OK(kvt_offload_set_ready_event(engine.offload, 0, NULL));
    for (uint32_t i = 0; i < engine.events; i++) {
        CHECK_OK(kvt_device_wait(engine.device, engine.imported[i], hang_guard(), NULL));
        CHECK_OK(kvt_device_release(engine.device, &engine.imported[i], 1, NULL));
        release(&engine.accelerator, engine.own[i]);
    }
    engine.events = 0;
}

static kvt_attention_t attention(void) {
    kvt_attention_t a = KVT_ATTENTION_INIT;
    a.layers = LAYERS;
    a.query_heads = QUERY_HEADS;
    a.key_heads = HEADS;
    a.key_dim = KEY_DIM;
    a.value_dim = VALUE_DIM;
    a.block_tokens = BLOCK;
    a.max_tokens = MAX_TOKENS;
    return a;
}

static kvt_offload_opts_t opts_of(const kvt_attention_t *shape, const char *decode) {
    kvt_offload_opts_t opts = KVT_OFFLOAD_OPTS_INIT;
    opts.flags = KVT_OFFLOAD_ON_DEVICE;
    opts.session = engine.session;
    opts.attention = shape;
    opts.dtype = KVT_DTYPE_F32;
    opts.buffers = 2;
    opts.buffer_tokens = MAX_TOKENS;
    opts.decode = decode;
    opts.decode_bytes = decode != NULL ? strlen(decode) : 0;
    return opts;
}

static void open_store(kvt_device_t *device) {
    kvt_store_opts_t opts = KVT_STORE_OPTS_INIT;
    opts.host_bytes = UINT64_C(8) << 20;
    opts.device = device;
    CHECK_OK(kvt_store_open(runtime, NULL, &opts, &engine.store, NULL));
    const uint16_t layers[LAYERS] = {0, 1, 2};
    kvt_group_t group;
    memset(&group, 0, sizeof group);
    group.dtype = KVT_DTYPE_F32;
    group.k_bytes = K_ROW * sizeof(float);
    group.v_bytes = V_ROW * sizeof(float);
    group.layers = layers;
    group.layer_count = LAYERS;
    kvt_layout_t layout = KVT_LAYOUT_INIT;
    layout.chunk_tokens = BLOCK;
    layout.groups = &group;
    layout.group_count = 1;
    layout.stride_bytes = sizeof group;
    CHECK_OK(kvt_namespace_open(engine.store, NULL, &layout, 0, &engine.ns, NULL));
    CHECK_OK(kvt_session_open(engine.ns, NULL, &engine.session, NULL));
}

static void open_engine(const char *decode, int provides_ring) {
    memset(&engine, 0, sizeof engine);
    engine.seed = 5;
    start(&engine.accelerator);
    const kvt_device_custom_t table = table_of(&engine.accelerator);
    engine.device = open_custom(&table);
    open_store(engine.device);
    const kvt_attention_t shape = attention();
    kvt_offload_opts_t opts = opts_of(&shape, decode);
    uint64_t bytes = 0;
    CHECK_OK(kvt_offload_memory_bytes(&opts, &bytes, NULL));
    /* Two buffers, and two tails per layer. */
    const uint64_t rows = 2 * (MAX_TOKENS + BLOCK) + 2 * LAYERS * BLOCK;
    CHECK_EQ(bytes, rows * (K_ROW + V_ROW) * sizeof(float));
    engine.ring.struct_size = engine.scratch.struct_size = sizeof engine.ring;
    if (provides_ring) {
        CHECK_OK(kvt_device_alloc(engine.device, bytes, &engine.ring, NULL));
        opts.memory = engine.ring.address;
        opts.memory_bytes = bytes;
    }
    const uint64_t before = engine.accelerator.live_bytes;
    CHECK_OK(kvt_offload_open(&opts, &engine.offload, NULL));
    CHECK_EQ(engine.accelerator.live_bytes - before, provides_ring ? 0 : bytes);
    const uint64_t scratch = 2 * MAX_TOKENS * (K_ROW + V_ROW) * sizeof(float);
    CHECK_OK(kvt_device_alloc(engine.device, scratch, &engine.scratch, NULL));
}

static void close_engine(void) {
    finish_kernels();
    CHECK_OK(kvt_offload_close(&engine.offload));
    CHECK_OK(kvt_session_close(&engine.session));
    CHECK_OK(kvt_namespace_close(&engine.ns));
    CHECK_OK(kvt_store_close(&engine.store, hang_guard(), NULL));
    CHECK_OK(kvt_device_free(engine.device, &engine.scratch, NULL));
    if (engine.ring.address != 0) CHECK_OK(kvt_device_free(engine.device, &engine.ring, NULL));
    CHECK_OK(kvt_device_close(&engine.device, hang_guard(), NULL));
    stop(&engine.accelerator);
}

/* Puts KV of tokens while the kernel that computes it still runs. */
static void put(uint32_t layer, uint32_t count) {
    const uint32_t first = engine.tokens - count;
    float *k = &engine.k[layer][first * K_ROW], *v = &engine.v[layer][first * V_ROW];
    for (uint32_t i = 0; i < count * K_ROW; i++) k[i] = number();
    for (uint32_t i = 0; i < count * V_ROW; i++) v[i] = number();
    const uint64_t k_address = engine.scratch.address;
    const uint64_t v_address = k_address + MAX_TOKENS * K_ROW * sizeof(float);
    run_rows((uint64_t)(uintptr_t)k, KVT_MEMORY_HOST, k_address, KVT_MEMORY_DEVICE,
           count * K_ROW * sizeof(float));
    run_rows((uint64_t)(uintptr_t)v, KVT_MEMORY_HOST, v_address, KVT_MEMORY_DEVICE,
           count * V_ROW * sizeof(float));
    kvt_view_t views[2];
    memset(views, 0, sizeof views);
    views[0].address = (void *)(uintptr_t)k_address;
    views[1].address = (void *)(uintptr_t)v_address;
    views[0].run_bytes = KEY_DIM * sizeof(float);
    views[1].run_bytes = VALUE_DIM * sizeof(float);
    for (int i = 0; i < 2; i++) {
        views[i].heads = HEADS;
        views[i].memory = KVT_MEMORY_DEVICE;
    }
    kvt_op_t *op = NULL;
    CHECK_OK(kvt_offload_put(engine.offload, layer, first, count, &views[0], &views[1], NULL, &op,
                             NULL));
    CHECK((op != NULL) == (count >= BLOCK));
    if (op != NULL) CHECK_OK(finish_op(&op));
}

static void append(uint32_t count) {
    uint32_t ids[MAX_TOKENS];
    /* Ids are unique, because equal tokens would have equal KV. */
    for (uint32_t i = 0; i < count; i++) ids[i] = engine.next_id++;
    CHECK_OK(kvt_session_append(engine.session, ids, count, NULL));
    engine.tokens += count;
}

/* The contents of a buffer as a kernel reads them, and the expected positions. */
typedef struct {
    uint32_t layer, rows, positions[MAX_TOKENS];
    float k[MAX_TOKENS * K_ROW], v[MAX_TOKENS * V_ROW];
} seen_t;

/* Submits kernels that read a buffer; returns before they end. */
static void read_buffer(seen_t *seen, uint32_t layer, const kvt_offload_kv_t *kv) {
    CHECK_EQ(kv->memory, KVT_MEMORY_DEVICE);
    CHECK((uint64_t)(uintptr_t)kv->k >= DEVICE_OFFSET);
    uint32_t blocks[MAX_TOKENS / BLOCK];
    uint64_t count = 0;
    CHECK_OK(kvt_offload_blocks(engine.offload, kv->buffer, blocks, MAX_TOKENS / BLOCK, &count));
    CHECK_EQ(count, kv->blocks);
    seen->layer = layer;
    seen->rows = kv->tokens;
    for (uint32_t i = 0; i < kv->blocks * BLOCK; i++)
        seen->positions[i] = blocks[i / BLOCK] * BLOCK + i % BLOCK;
    for (uint32_t i = 0; i < kv->tail_tokens; i++)
        seen->positions[kv->blocks * BLOCK + i] = engine.tokens - kv->tail_tokens + i;
    run_rows((uint64_t)(uintptr_t)kv->k, KVT_MEMORY_DEVICE, (uint64_t)(uintptr_t)seen->k,
           KVT_MEMORY_HOST, kv->tokens * K_ROW * sizeof(float));
    run_rows((uint64_t)(uintptr_t)kv->v, KVT_MEMORY_DEVICE, (uint64_t)(uintptr_t)seen->v,
           KVT_MEMORY_HOST, kv->tokens * V_ROW * sizeof(float));
}

static void compare(const seen_t *seen) {
    for (uint32_t row = 0; row < seen->rows; row++) {
        const uint32_t at = seen->positions[row];
        CHECK(memcmp(&seen->k[row * K_ROW], &engine.k[seen->layer][at * K_ROW],
                     K_ROW * sizeof(float)) == 0);
        CHECK(memcmp(&seen->v[row * V_ROW], &engine.v[seen->layer][at * V_ROW],
                     V_ROW * sizeof(float)) == 0);
    }
}

static kvt_sparse_context_t context(void) {
    kvt_sparse_context_t at = KVT_SPARSE_CONTEXT_INIT;
    at.first_query = engine.tokens - 1;
    at.tokens = engine.tokens;
    return at;
}

/* One token through all layers. Buffers are given back while kernels still read them. */
static void step(int has_policy) {
    static seen_t seen[LAYERS];
    append(1);
    const kvt_sparse_context_t at = context();
    CHECK_OK(kvt_offload_begin(engine.offload, &at, NULL));
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        put(layer, 1);
        float numbers[QUERY_HEADS * KEY_DIM];
        for (int i = 0; i < QUERY_HEADS * KEY_DIM; i++) numbers[i] = number();
        kvt_rows_t query = KVT_ROWS_INIT;
        query.view.address = numbers;
        query.view.tokens = 1;
        query.view.heads = QUERY_HEADS;
        query.view.run_bytes = KEY_DIM * sizeof(float);
        query.dtype = KVT_DTYPE_F32;
        kvt_offload_kv_t kv = KVT_OFFLOAD_KV_INIT;
        CHECK_OK(kvt_offload_take(engine.offload, layer, has_policy ? &query : NULL, &kv, NULL));
        if (!has_policy) CHECK_EQ(kv.tokens, engine.tokens);
        read_buffer(&seen[layer], layer, &kv);
        CHECK_OK(kvt_offload_give_back(engine.offload, layer, NULL));
    }
    finish_kernels();
    for (uint32_t layer = 0; layer < LAYERS; layer++) compare(&seen[layer]);
}

static void check_layers(void) {
    static seen_t seen;
    const kvt_sparse_context_t at = context();
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        kvt_offload_kv_t kv = KVT_OFFLOAD_KV_INIT;
        CHECK_OK(kvt_offload_load(engine.offload, 0, layer, NULL, 0, 0, NULL, &at, NULL, NULL));
        CHECK_OK(kvt_offload_wait(engine.offload, 0, &kv, NULL));
        CHECK_EQ(kv.tokens, engine.tokens);
        read_buffer(&seen, layer, &kv);
        CHECK_OK(kvt_offload_release(engine.offload, 0, NULL));
        finish_kernels();
        compare(&seen);
    }
}

static kvt_offload_stats_t stats_now(void) {
    kvt_offload_stats_t stats = KVT_OFFLOAD_STATS_INIT;
    CHECK_OK(kvt_offload_stats(engine.offload, &stats));
    return stats;
}

static void check_sequence(const char *decode, int provides_ring) {
    open_engine(decode, provides_ring);
    append(100);
    for (uint32_t layer = 0; layer < LAYERS; layer++) put(layer, 100);
    finish_kernels();
    for (int i = 0; i < 40; i++) step(decode != NULL);
    check_layers();
    const kvt_offload_stats_t stats = stats_now();
    CHECK((stats.key_bytes > 0) == (decode != NULL));
    CHECK((stats.saved_bytes > 0) == (decode != NULL));

    /* Truncation of a rejected guess, within a stored block. */
    CHECK_OK(kvt_offload_truncate(engine.offload, 53, NULL));
    CHECK_OK(kvt_session_truncate(engine.session, 53, NULL));
    engine.tokens = 53;
    check_layers();
    for (int i = 0; i < 5; i++) step(decode != NULL);

    /* A fork continues; it allocates its own ring instead of sharing the engine's. */
    kvt_session_t *forked = NULL, *first_session = engine.session;
    kvt_offload_t *first = engine.offload;
    CHECK_OK(kvt_session_fork(engine.session, NULL, &forked, NULL));
    const uint64_t before = engine.accelerator.live_bytes;
    CHECK_OK(kvt_offload_fork(first, forked, &engine.offload, NULL));
    CHECK(engine.accelerator.live_bytes > before);
    engine.session = forked;
    for (int i = 0; i < 8; i++) step(decode != NULL);
    check_layers();
    CHECK_OK(kvt_offload_close(&first));
    CHECK_OK(kvt_session_close(&first_session));
    check_layers();
    close_engine();
}

/* Invalid options, and a lost device. */
static void check_wrong(void) {
    open_engine(NULL, 0);
    const kvt_attention_t shape = attention();
    kvt_offload_t *other = NULL;
    kvt_error_t *error = NULL;
    kvt_offload_opts_t opts = opts_of(&shape, NULL);
    uint64_t bytes = 0;
    CHECK_OK(kvt_offload_memory_bytes(&opts, &bytes, NULL));
    CHECK_OK(kvt_device_alloc(engine.device, bytes, &engine.ring, NULL));
    opts.memory_bytes = 1;
    CHECK_IS(kvt_offload_open(&opts, &other, &error), KVT_E_INVALID);
    opts.memory = engine.ring.address;
    opts.memory_bytes = bytes - 1;
    CHECK_IS(kvt_offload_open(&opts, &other, &error), KVT_E_TOO_SMALL);
    CHECK(strstr(kvt_error_message(error), "are needed") != NULL);
    opts.memory_bytes = bytes;
    opts.memory += 8;
    CHECK_IS(kvt_offload_open(&opts, &other, &error), KVT_E_INVALID);
    opts.memory = engine.ring.address;
    opts.flags = 0;
    CHECK_IS(kvt_offload_open(&opts, &other, &error), KVT_E_INVALID);
    opts.flags = 2;
    CHECK_IS(kvt_offload_open(&opts, &other, &error), KVT_E_INVALID);
    CHECK_IS(kvt_offload_memory_bytes(&opts, &bytes, &error), KVT_E_INVALID);
    CHECK_IS(kvt_offload_memory_bytes(&opts, NULL, &error), KVT_E_INVALID);
    CHECK(other == NULL);
    CHECK_IS(kvt_offload_set_ready_event(engine.offload, UINT64_C(1) << 60, &error), KVT_E_HANDLE);
    CHECK_IS(kvt_device_close(&engine.device, 0, &error), KVT_E_BUSY);

    append(20);
    for (uint32_t layer = 0; layer < LAYERS; layer++) put(layer, 20);
    check_layers();
    engine.accelerator.lost = 1;
    append(1);
    float row[K_ROW] = {0};
    kvt_view_t view;
    memset(&view, 0, sizeof view);
    view.address = row;
    view.run_bytes = sizeof row;
    kvt_view_t v = view;
    v.run_bytes = V_ROW * sizeof(float);
    CHECK_IS(kvt_offload_put(engine.offload, 0, 20, 1, &view, &v, NULL, NULL, &error),
             KVT_E_UNAVAILABLE);
    uint32_t stored = 0, tail = 0;
    CHECK_OK(kvt_offload_tokens(engine.offload, 0, &stored, &tail));
    CHECK(stored == 16 && tail == 4);
    CHECK_IS(kvt_offload_truncate(engine.offload, 9, &error), KVT_E_UNAVAILABLE);
    CHECK_OK(kvt_error_free(&error));
    close_engine();

    /* A store without a device. */
    memset(&engine, 0, sizeof engine);
    open_store(NULL);
    opts = opts_of(&shape, NULL);
    CHECK_IS(kvt_offload_open(&opts, &other, &error), KVT_E_UNAVAILABLE);
    CHECK(strstr(kvt_error_message(error), "no device") != NULL);
    opts.flags = 0;
    CHECK_OK(kvt_offload_open(&opts, &other, NULL));
    append(1);
    view.memory = KVT_MEMORY_DEVICE;
    CHECK_IS(kvt_offload_put(other, 0, 0, 1, &view, &v, NULL, NULL, &error), KVT_E_UNAVAILABLE);
    CHECK_OK(kvt_error_free(&error));
    CHECK_OK(kvt_offload_close(&other));
    CHECK_OK(kvt_session_close(&engine.session));
    CHECK_OK(kvt_namespace_close(&engine.ns));
    CHECK_OK(kvt_store_close(&engine.store, hang_guard(), NULL));
}

int main(void) {
    check_begin();
    runtime = open_runtime(1, NULL);
    for (int provides_ring = 0; provides_ring < 2; provides_ring++) {
        check_sequence(NULL, provides_ring);
        check_sequence("quest(budget=32,page=8,dense=0)", provides_ring);
    }
    check_wrong();
    close_runtime(&runtime);
    return check_end("offload_device_engine");
}
