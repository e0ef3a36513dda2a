/* Tests of custom devices: a table of callbacks makes the simulated accelerator of accelerator.h a
 * device. It must pass the conformance suite; then a store and a streamer copy through it. */

#include "accelerator.h"

static void on_check(void *data, const char *name, uint64_t name_bytes, uint32_t verdict,
                  const char *why, uint64_t why_bytes) {
    ++*(int *)data;
    if (verdict == KVT_VERDICT_FAILED)
        fprintf(stderr, "%.*s: %.*s\n", (int)name_bytes, name, (int)why_bytes, why);
}

static void conforms(kvt_device_t *device, uint64_t seed) {
    kvt_conformance_opts_t opts = KVT_CONFORMANCE_OPTS_INIT;
    kvt_conformance_report_t result = KVT_CONFORMANCE_REPORT_INIT;
    int names = 0;
    opts.seed = seed;
    opts.rounds = 4;
    opts.flags = KVT_CONFORMANCE_CLOSES;
    CHECK_OK(kvt_device_conformance(device, &opts, on_check, &names, &result, NULL));
    CHECK_EQ(result.failed, 0);
    CHECK_EQ(result.passed + result.skipped, (uint64_t)names);
    CHECK(result.passed >= 14);
}

static void check_tables(void) {
    accelerator_t accelerator;
    start(&accelerator);
    kvt_device_opts_t opts = KVT_DEVICE_OPTS_INIT;
    kvt_device_t *device = NULL;
    kvt_error_t *error = NULL;
    const kvt_device_custom_t good = table_of(&accelerator);
    kvt_device_custom_t table = good;
    opts.kind = KVT_DEVICE_KIND_CUSTOM;
    CHECK_IS(kvt_device_open(runtime, &opts, &device, NULL), KVT_E_INVALID);
    opts.custom = &table;
    for (int wrong = 0; wrong < 8; wrong++) {
        table = good;
        if (wrong == 0) table.submit = NULL;
        if (wrong == 1) table.query = NULL;
        if (wrong == 2) table.allocate = NULL;
        if (wrong == 3) table.streams = 65;
        if (wrong == 4) table.launch = NULL;
        if (wrong == 5) table.flags = 1u << 20;
        if (wrong == 6) table.streams = 0;
        if (wrong == 7) table.signal_event = NULL;
        CHECK_IS(kvt_device_open(runtime, &opts, &device, &error), KVT_E_INVALID);
        CHECK(strlen(kvt_error_message(error)) > 5);
    }
    opts.seed = 1;
    table = good;
    CHECK_IS(kvt_device_open(runtime, &opts, &device, NULL), KVT_E_INVALID);
    opts.seed = 0;
    opts.kind = 9;
    CHECK_IS(kvt_device_open(runtime, &opts, &device, NULL), KVT_E_INVALID);
    CHECK(device == NULL && accelerator.destroyed == 0);

    opts.kind = KVT_DEVICE_KIND_CUDA;
    opts.custom = NULL;
    opts.library = "/nowhere/libcuda.so";
    opts.library_bytes = strlen(opts.library);
    CHECK_IS(kvt_device_open(runtime, &opts, &device, &error), KVT_E_UNAVAILABLE);
    CHECK(strstr(kvt_error_message(error), "no CUDA driver") != NULL);
    CHECK_OK(kvt_error_free(&error));

    /* `wait` and the memory callbacks are optional. */
    table = good;
    table.wait = NULL;
    table.allocate = NULL;
    table.free = NULL;
    table.import_event = NULL;
    table.stream_wait = NULL;
    table.create_event = NULL;
    table.signal_event = NULL;
    table.flags = 0;
    table.kernels = 0;
    table.launch = NULL;
    device = open_custom(&table);
    kvt_device_memory_t memory = KVT_DEVICE_MEMORY_INIT;
    uint64_t event = 0;
    CHECK_IS(kvt_device_alloc(device, 100, &memory, NULL), KVT_E_UNSUPPORTED);
    CHECK_IS(kvt_device_import_event(device, 1, &event, NULL), KVT_E_UNSUPPORTED);
    CHECK_IS(kvt_device_create_event(device, &event, NULL), KVT_E_UNSUPPORTED);
    CHECK_OK(kvt_device_copy(device, 0, 0, NULL, 0, sizeof(kvt_copy_t), &event, NULL));
    CHECK_IS(kvt_device_stream_wait(device, 1, event, NULL), KVT_E_UNSUPPORTED);
    CHECK_OK(kvt_device_wait(device, event, hang_guard(), NULL));
    CHECK_OK(kvt_device_release(device, &event, 1, NULL));
    conforms(device, 3);
    CHECK_OK(kvt_device_close(&device, hang_guard(), NULL));
    stop(&accelerator);
}

/* Copies without a store: memory, events, the engine's own work before and after. */
static void check_copies(kvt_device_t *device, accelerator_t *accelerator) {
    enum { TOKENS = 40, HEADS = 3, RUN = 32, BYTES = TOKENS * HEADS * RUN };
    kvt_device_info_t info = KVT_DEVICE_INFO_INIT;
    CHECK_OK(kvt_device_info(device, &info));
    CHECK_EQ(info.kind, KVT_DEVICE_KIND_CUSTOM);
    CHECK_EQ(info.flags, KVT_DEVICE_ASYNCHRONOUS | KVT_DEVICE_HAS_MEMORY);
    CHECK_EQ(info.streams, STREAMS);
    CHECK_EQ(info.free_bytes, UINT64_C(1) << 30);
    char words[64];
    uint64_t words_bytes = 0;
    CHECK_OK(kvt_device_describe(device, words, sizeof words, &words_bytes));
    CHECK(words_bytes == 6 && memcmp(words, "custom", 6) == 0);

    kvt_device_memory_t memory = KVT_DEVICE_MEMORY_INIT;
    CHECK_OK(kvt_device_alloc(device, 2 * BYTES, &memory, NULL));
    CHECK(memory.memory == KVT_MEMORY_DEVICE && memory.address >= DEVICE_OFFSET);
    uint8_t address[BYTES], back[BYTES];
    uint64_t seed = 5;
    for (int i = 0; i < BYTES; i++) address[i] = (uint8_t)next_random(&seed);
    /* [heads, tokens, run] on the device, canonical in host memory. */
    kvt_copy_t copy;
    memset(&copy, 0, sizeof copy);
    copy.view.address = (void *)(uintptr_t)memory.address;
    copy.view.tokens = TOKENS;
    copy.view.heads = HEADS;
    copy.view.memory = KVT_MEMORY_DEVICE;
    copy.view.run_bytes = RUN;
    copy.view.token_stride_bytes = RUN;
    copy.view.head_stride_bytes = TOKENS * RUN;
    copy.plane = address;
    copy.direction = KVT_COPY_SCATTER;
    uint64_t up = 0, down = 0, own = 0, adopted = 0;
    CHECK_OK(kvt_device_copy(device, 1, 0, &copy, 1, sizeof copy, &up, NULL));
    copy.plane = back;
    copy.direction = KVT_COPY_GATHER;
    CHECK_OK(kvt_device_copy(device, 2, up, &copy, 1, sizeof copy, &down, NULL));
    CHECK_OK(kvt_device_wait(device, down, hang_guard(), NULL));
    CHECK_OK(kvt_device_query(device, down));
    CHECK(memcmp(address, back, BYTES) == 0);
    const uint8_t *raw = cpu_address(memory.address, KVT_MEMORY_DEVICE);
    for (int t = 0; t < TOKENS; t++)
        for (int h = 0; h < HEADS; h++)
            CHECK(memcmp(raw + (h * TOKENS + t) * RUN, address + (t * HEADS + h) * RUN, RUN) == 0);

    /* The engine computes on its own stream. The library's copy waits for the engine, and the
     * engine waits for the copy. */
    kvt_copy_rows_t rows = {0};
    rows.from = memory.address;
    rows.to = memory.address + BYTES;
    rows.run_bytes = rows.from_stride_bytes = rows.to_stride_bytes = BYTES;
    rows.runs = 1;
    rows.from_memory = rows.to_memory = KVT_MEMORY_DEVICE;
    CHECK_OK(submit_copies(accelerator, 0, 0, &rows, 1, sizeof rows, &own));
    CHECK_OK(kvt_device_import_event(device, own, &adopted, NULL));
    copy.view.address = (void *)(uintptr_t)(memory.address + BYTES);
    copy.view.heads = 1;
    copy.view.run_bytes = copy.view.token_stride_bytes = HEADS * RUN;
    copy.view.head_stride_bytes = 0;
    uint64_t behind = 0;
    CHECK_OK(kvt_device_copy(device, 1, adopted, &copy, 1, sizeof copy, &behind, NULL));
    CHECK_OK(kvt_device_stream_wait(device, 0, behind, NULL));
    CHECK_OK(kvt_device_wait(device, behind, hang_guard(), NULL));
    CHECK(memcmp(back, raw, BYTES) == 0);

    uint64_t ended[8], count = 0;
    CHECK_OK(kvt_device_poll(device, ended, 8, &count));
    CHECK_EQ(count, 4);
    CHECK_OK(kvt_device_poll(device, ended + 4, 4, &count));
    CHECK_EQ(count, 0);
    const uint64_t events[] = {up, down, adopted, behind};
    CHECK_OK(kvt_device_release(device, events, 4, NULL));
    CHECK_IS(kvt_device_release(device, events, 1, NULL), KVT_E_HANDLE);
    CHECK_IS(kvt_device_query(device, up), KVT_E_HANDLE);
    release(accelerator, own);

    /* Invalid calls. */
    kvt_error_t *error = NULL;
    copy.plane = NULL;
    CHECK_IS(kvt_device_copy(device, 1, 0, &copy, 1, sizeof copy, &up, &error), KVT_E_INVALID);
    copy.plane = back;
    copy.direction = 2;
    CHECK_IS(kvt_device_copy(device, 1, 0, &copy, 1, sizeof copy, &up, &error), KVT_E_INVALID);
    copy.direction = KVT_COPY_GATHER;
    copy.plane_memory = 7;
    CHECK_IS(kvt_device_copy(device, 1, 0, &copy, 1, sizeof copy, &up, &error), KVT_E_INVALID);
    copy.plane_memory = KVT_MEMORY_HOST;
    CHECK_IS(kvt_device_copy(device, STREAMS, 0, &copy, 1, sizeof copy, &up, NULL),
             KVT_E_INVALID);
    CHECK_IS(kvt_device_copy(device, 0, 77, &copy, 1, sizeof copy, &up, NULL), KVT_E_HANDLE);
    CHECK_IS(kvt_device_copy(device, 0, 0, &copy, 1, 12, &up, NULL), KVT_E_INVALID);
    kvt_kernel_t kernel;
    memset(&kernel, 0, sizeof kernel);
    kernel.kind = KVT_DEVICE_KERNEL_SUM;
    CHECK_IS(kvt_device_launch(device, 0, 0, &kernel, 1, sizeof kernel, &up, NULL),
             KVT_E_UNSUPPORTED);
    CHECK_IS(kvt_device_register_host(device, NULL, 5, NULL), KVT_E_INVALID);
    CHECK_OK(kvt_device_register_host(device, back, sizeof back, NULL));
    CHECK_OK(kvt_device_unregister_host(device, back, NULL));
    CHECK_OK(kvt_device_free(device, &memory, NULL));
    CHECK_IS(kvt_device_free(device, &memory, NULL), KVT_E_HANDLE);
    CHECK_OK(kvt_error_free(&error));
}

/* An index with columns and diagonals for one head and all keys for the other, laid out for
 * KVT_DEVICE_KERNEL_PREFILL. */
static void check_index(void) {
    kvt_index_head_t heads[2] = {{KVT_INDEX_LINES, 0, 2, 0, 0, UINT32_MAX},
                                 {KVT_INDEX_DENSE, 0, 0, 0, 0, UINT32_MAX}};
    uint32_t starts[] = {0, 3, 5}, items[] = {0, 1, 900, 0, 64};
    kvt_index_t index = KVT_INDEX_INIT;
    index.heads = heads;
    index.head_count = 2;
    index.starts = starts;
    index.start_count = 3;
    index.items = items;
    index.item_count = 5;
    kvt_kernel_t kernel;
    memset(&kernel, 0, sizeof kernel);
    kernel.kind = KVT_DEVICE_KERNEL_PREFILL;
    kernel.query_count = 40;
    kernel.first = 1000;
    kernel.tokens = 1040;
    kernel.query_heads = 2;
    kernel.key_heads = 1;
    const kvt_kernel_t before = kernel;
    const uint64_t at = UINT64_C(0x7000000100);
    uint8_t bytes[80];
    uint64_t need = 0;
    CHECK_IS(kvt_kernel_pack_index(&index, &kernel, at, NULL, 0, &need, NULL), KVT_E_TOO_SMALL);
    CHECK_EQ(need, sizeof bytes);
    CHECK_IS(kvt_kernel_pack_index(&index, &kernel, at, bytes, 79, &need, NULL), KVT_E_TOO_SMALL);
    CHECK(memcmp(&kernel, &before, sizeof kernel) == 0);
    CHECK_OK(kvt_kernel_pack_index(&index, &kernel, at, bytes, sizeof bytes, &need, NULL));
    CHECK_EQ(need, sizeof heads + sizeof starts + sizeof items);
    CHECK(memcmp(bytes, heads, sizeof heads) == 0);
    CHECK(memcmp(bytes + 48, starts, sizeof starts) == 0);
    CHECK(memcmp(bytes + 60, items, sizeof items) == 0);
    CHECK_EQ(kernel.count, 2);
    CHECK_EQ(kernel.numbers, at);
    CHECK_EQ(kernel.counts, at + 48);
    CHECK_EQ(kernel.index, at + 60);
    /* By docs/internals/kernels.md: 12 bytes for each head and 32 positions, and 8 words more. */
    CHECK_EQ(kernel.scratch_bytes, 12 * 2 * (1040 / 32 + 8));

    /* Invalid indices are refused: a missing list, numbers that do not ascend. */
    heads[0].lists = 3;
    CHECK_IS(kvt_kernel_pack_index(&index, &kernel, at, bytes, 80, &need, NULL), KVT_E_INVALID);
    heads[0].lists = 2;
    items[1] = 0;
    CHECK_IS(kvt_kernel_pack_index(&index, &kernel, at, bytes, 80, &need, NULL), KVT_E_INVALID);
    items[1] = 1;
    CHECK_IS(kvt_kernel_pack_index(&index, &kernel, at + 2, bytes, 80, &need, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_kernel_pack_index(&index, &kernel, 0, bytes, 80, &need, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_kernel_pack_index(&index, NULL, at, bytes, 80, &need, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_kernel_pack_index(&index, &kernel, at, bytes, 80, NULL, NULL), KVT_E_INVALID);
    /* Without an index: all keys. */
    CHECK_OK(kvt_kernel_pack_index(NULL, &kernel, 0, NULL, 0, &need, NULL));
    CHECK(need == 0 && memcmp(&kernel, &before, sizeof kernel) == 0);
}

/* An engine whose KV is in device memory: put into the store, then get to another address. */
enum { LAYERS = 4, CHUNK = 16, TOKENS = 6 * CHUNK, TOKEN_BYTES = 128 };

typedef struct {
    kvt_device_memory_t memory;
    kvt_view_t k[LAYERS], v[LAYERS];
} engine_t;

static void open_engine(kvt_device_t *device, engine_t *engine, uint64_t seed) {
    const uint64_t plane = (uint64_t)TOKENS * TOKEN_BYTES;
    memset(engine, 0, sizeof *engine);
    engine->memory.struct_size = sizeof engine->memory;
    CHECK_OK(kvt_device_alloc(device, 2 * LAYERS * plane, &engine->memory, NULL));
    uint8_t *raw = cpu_address(engine->memory.address, KVT_MEMORY_DEVICE);
    for (uint64_t i = 0; i < 2 * LAYERS * plane; i++)
        raw[i] = seed == 0 ? 0 : (uint8_t)next_random(&seed);
    for (int layer = 0; layer < LAYERS; layer++) {
        kvt_view_t view;
        memset(&view, 0, sizeof view);
        view.tokens = TOKENS;
        view.run_bytes = TOKEN_BYTES;
        view.memory = KVT_MEMORY_DEVICE;
        view.address = (void *)(uintptr_t)(engine->memory.address + 2 * (uint64_t)layer * plane);
        engine->k[layer] = view;
        view.address = (void *)(uintptr_t)((uint64_t)(uintptr_t)view.address + plane);
        engine->v[layer] = view;
    }
}

static kvt_transfer_t transfer_of(const engine_t *engine) {
    kvt_transfer_t transfer = KVT_TRANSFER_INIT;
    transfer.tokens = TOKENS;
    transfer.k = engine->k;
    transfer.v = engine->v;
    transfer.stride_bytes = sizeof *engine->k;
    return transfer;
}

static kvt_copy_rows_t all_of(uint64_t from, uint32_t from_memory, uint64_t to, uint32_t to_memory,
                              uint64_t bytes) {
    kvt_copy_rows_t rows = {0};
    rows.from = from;
    rows.to = to;
    rows.run_bytes = rows.from_stride_bytes = rows.to_stride_bytes = bytes;
    rows.runs = 1;
    rows.from_memory = from_memory;
    rows.to_memory = to_memory;
    return rows;
}

/* Kernels before and after transfers, all submitted before any runs. A put waits for the kernel
 * that fills the tensors. A get waits for a kernel that reads the old contents. A third kernel
 * waits for the get. No thread waits in between. */
static void check_order(kvt_device_t *device, accelerator_t *accelerator, kvt_namespace_t *ns,
                        const engine_t *tensors) {
    enum { BYTES = 2 * LAYERS * TOKENS * TOKEN_BYTES };
    static uint8_t fresh[BYTES], before[BYTES], back[BYTES];
    uint64_t seed = 23;
    for (int i = 0; i < BYTES; i++) fresh[i] = (uint8_t)next_random(&seed);
    uint32_t tokens[TOKENS];
    for (uint32_t i = 0; i < TOKENS; i++) tokens[i] = 1000000 + i;
    kvt_session_t *session = NULL;
    CHECK_OK(kvt_session_open(ns, NULL, &session, NULL));
    CHECK_OK(kvt_session_append(session, tokens, TOKENS, NULL));
    const uint64_t address = tensors->memory.address;
    uint8_t *raw = cpu_address(address, KVT_MEMORY_DEVICE);
    memset(raw, 0, BYTES);

    /* Each kernel waits for an event that the engine signals later. */
    uint64_t gate = 0, second_gate = 0, kernel = 0, filled = 0, reader = 0, last = 0;
    CHECK_OK(create_event(accelerator, &gate));
    kvt_copy_rows_t rows = all_of((uint64_t)(uintptr_t)fresh, KVT_MEMORY_HOST, address,
                                  KVT_MEMORY_DEVICE, BYTES);
    CHECK_OK(submit_copies(accelerator, 0, gate, &rows, 1, sizeof rows, &kernel));
    CHECK_OK(kvt_device_import_event(device, kernel, &filled, NULL));
    kvt_op_t *put = NULL, *get = NULL;
    kvt_transfer_t transfer = transfer_of(tensors);
    transfer.after = filled;
    CHECK_OK(kvt_session_put(session, &transfer, NULL, &put, NULL));
    CHECK_IS(kvt_op_wait(put, KVT_OP_RELEASED, in_ms(20)), KVT_E_TIMEOUT);
    CHECK_OK(signal_event(accelerator, gate));
    CHECK_OK(finish_op(&put));
    CHECK(memcmp(raw, fresh, BYTES) == 0);

    /* The second kernel reads the current contents, then the tensors are overwritten. */
    memset(raw, 0x3C, BYTES);
    CHECK_OK(kvt_device_create_event(device, &second_gate, NULL));
    CHECK_OK(kvt_device_stream_wait(device, 0, second_gate, NULL));
    rows = all_of(address, KVT_MEMORY_DEVICE, (uint64_t)(uintptr_t)before, KVT_MEMORY_HOST, BYTES);
    CHECK_OK(submit_copies(accelerator, 0, 0, &rows, 1, sizeof rows, &reader));
    uint64_t read = 0;
    CHECK_OK(kvt_device_import_event(device, reader, &read, NULL));
    transfer.after = read;
    CHECK_OK(kvt_session_get(session, &transfer, NULL, &get, NULL));
    CHECK_OK(kvt_device_stream_wait_op(device, 0, get, NULL));
    rows = all_of(address, KVT_MEMORY_DEVICE, (uint64_t)(uintptr_t)back, KVT_MEMORY_HOST, BYTES);
    CHECK_OK(submit_copies(accelerator, 0, 0, &rows, 1, sizeof rows, &last));
    CHECK_IS(kvt_op_wait(get, KVT_OP_RELEASED, in_ms(20)), KVT_E_TIMEOUT);
    CHECK(raw[0] == 0x3C && raw[BYTES - 1] == 0x3C);
    CHECK_IS(query(accelerator, last), KVT_E_AGAIN);
    CHECK_OK(kvt_device_signal_event(device, second_gate, NULL));
    CHECK_OK(wait_for(accelerator, last, hang_guard()));
    CHECK_OK(query(accelerator, last));
    for (int i = 0; i < BYTES; i++) CHECK(before[i] == 0x3C);
    CHECK(memcmp(back, fresh, BYTES) == 0);
    /* The op is released, so the stream does not wait. */
    CHECK_OK(kvt_device_stream_wait_op(device, 0, get, NULL));
    CHECK_OK(finish_op(&get));
    CHECK_IS(kvt_device_stream_wait_op(device, 0, get, NULL), KVT_E_HANDLE);

    /* Invalid calls. */
    CHECK_IS(kvt_device_signal_event(device, read, NULL), KVT_E_HANDLE);
    CHECK_OK(kvt_device_signal_event(device, second_gate, NULL));
    const uint64_t events[] = {filled, read, second_gate};
    CHECK_OK(kvt_device_release(device, events, 3, NULL));
    CHECK_IS(kvt_session_put(session, &transfer, NULL, &put, NULL), KVT_E_HANDLE);
    transfer.k = transfer.v = NULL;
    CHECK_IS(kvt_session_prefetch(session, &transfer, NULL, &put, NULL), KVT_E_INVALID);
    const uint64_t own[] = {gate, kernel, reader, last};
    for (int i = 0; i < 4; i++) release(accelerator, own[i]);
    CHECK_OK(kvt_session_close(&session));
}

static void check_store(kvt_device_t *device, accelerator_t *accelerator) {
    kvt_store_opts_t opts = KVT_STORE_OPTS_INIT;
    opts.host_bytes = UINT64_C(16) << 20;
    opts.device = device;
    opts.spec = "store(device=device(capacity=4MiB))";
    opts.spec_bytes = strlen(opts.spec);
    kvt_store_t *store = NULL;
    CHECK_OK(kvt_store_open(runtime, NULL, &opts, &store, NULL));
    kvt_device_t *busy = device;
    CHECK_IS(kvt_device_close(&busy, 0, NULL), KVT_E_BUSY);
    const uint16_t numbers[LAYERS] = {0, 1, 2, 3};
    kvt_group_t group;
    memset(&group, 0, sizeof group);
    group.layers = numbers;
    group.layer_count = LAYERS;
    group.k_bytes = group.v_bytes = TOKEN_BYTES;
    kvt_layout_t layout = KVT_LAYOUT_INIT;
    layout.chunk_tokens = CHUNK;
    layout.groups = &group;
    layout.group_count = 1;
    layout.stride_bytes = sizeof group;
    kvt_namespace_t *ns = NULL;
    CHECK_OK(kvt_namespace_open(store, NULL, &layout, 0, &ns, NULL));
    uint32_t tokens[TOKENS];
    for (uint32_t i = 0; i < TOKENS; i++) tokens[i] = i * i;
    kvt_session_t *session = NULL;
    CHECK_OK(kvt_session_open(ns, NULL, &session, NULL));
    CHECK_OK(kvt_session_append(session, tokens, TOKENS, NULL));

    engine_t from, to;
    open_engine(device, &from, 7);
    open_engine(device, &to, 0);
    kvt_op_t *op = NULL;
    kvt_transfer_t transfer = transfer_of(&from);
    CHECK_OK(kvt_session_put(session, &transfer, NULL, &op, NULL));
    CHECK_OK(finish_op(&op));
    transfer = transfer_of(&to);
    CHECK_OK(kvt_session_get(session, &transfer, NULL, &op, NULL));
    CHECK_OK(finish_op(&op));
    CHECK(memcmp(cpu_address(from.memory.address, KVT_MEMORY_DEVICE),
                 cpu_address(to.memory.address, KVT_MEMORY_DEVICE),
                 (size_t)from.memory.bytes) == 0);

    /* Chunks put from the device have device replicas, and a get reads those without a transfer
     * from the host. */
    kvt_store_stats_t stats = KVT_STORE_STATS_INIT;
    CHECK_OK(kvt_store_stats(store, &stats));
    CHECK_EQ(stats.device_hit_cells, LAYERS * TOKENS / CHUNK);
    kvt_plan_step_t segment;
    kvt_plan_terms_t terms = KVT_PLAN_TERMS_INIT;
    terms.flags = KVT_PLAN_COST;
    terms.beta_ns = 1e9;
    uint64_t segments = 0;
    CHECK_OK(kvt_session_plan(session, &terms, &segment, 1, sizeof segment, &segments, NULL, NULL));
    CHECK(segments == 1 && segment.kind == KVT_PLAN_LOAD && segment.tier == KVT_TIER_DEVICE);
    CHECK_EQ(segment.device_bytes, (uint64_t)2 * LAYERS * TOKENS * TOKEN_BYTES);
    CHECK_EQ(segment.host_bytes + segment.disk_bytes + segment.remote_bytes, 0);
    CHECK_EQ(stats.device_cells, LAYERS * TOKENS / CHUNK);
    CHECK_EQ(stats.host_hit_cells, 0);
    CHECK(stats.device_used_bytes > 0 && stats.device_used_bytes <= stats.device_limit_bytes);
    check_order(device, accelerator, ns, &to);

    CHECK_OK(kvt_session_close(&session));
    CHECK_OK(kvt_namespace_close(&ns));
    CHECK_OK(kvt_store_close(&store, hang_guard(), NULL));
    CHECK_OK(kvt_device_free(device, &from.memory, NULL));
    CHECK_OK(kvt_device_free(device, &to.memory, NULL));

    /* A store without a device refuses device memory. */
    opts.device = NULL;
    kvt_error_t *error = NULL;
    CHECK(kvt_store_open(runtime, NULL, &opts, &store, NULL) < 0);
    opts.spec = NULL;
    opts.spec_bytes = 0;
    CHECK_OK(kvt_store_open(runtime, NULL, &opts, &store, NULL));
    CHECK_OK(kvt_namespace_open(store, NULL, &layout, 0, &ns, NULL));
    CHECK_OK(kvt_session_open(ns, NULL, &session, NULL));
    CHECK_OK(kvt_session_append(session, tokens, TOKENS, NULL));
    CHECK_IS(kvt_session_get(session, &transfer, NULL, &op, &error), KVT_E_UNAVAILABLE);
    CHECK(strstr(kvt_error_message(error), "no device") != NULL);
    transfer.after = 1;
    CHECK_IS(kvt_session_get(session, &transfer, NULL, &op, &error), KVT_E_UNAVAILABLE);
    CHECK_OK(kvt_error_free(&error));
    CHECK_OK(kvt_session_close(&session));
    CHECK_OK(kvt_namespace_close(&ns));
    CHECK_OK(kvt_store_close(&store, hang_guard(), NULL));
}

/* Weights that are streamed to device memory. */
enum { UNITS = 8, WEIGHTS = 70000 };

static void check_stream(kvt_device_t *device, accelerator_t *accelerator) {
    char path[] = "/tmp/kvt-device-XXXXXX", header[4096];
    size_t length = (size_t)snprintf(header, sizeof header, "{");
    for (int i = 0; i < UNITS; i++)
        length += (size_t)snprintf(header + length, sizeof header - length,
                                   "%s\"model.layers.%d.weight\":{\"dtype\":\"U8\",\"shape\":[%d],"
                                   "\"data_offsets\":[%d,%d]}",
                                   i > 0 ? "," : "", i, WEIGHTS, i * WEIGHTS, (i + 1) * WEIGHTS);
    header[length++] = '}';
    const int fd = mkstemp(path);
    CHECK(fd >= 0);
    const uint64_t prefix = length;
    static uint8_t weights[UNITS * WEIGHTS];
    uint64_t seed = 11;
    for (size_t i = 0; i < sizeof weights; i++) weights[i] = (uint8_t)next_random(&seed);
    CHECK(write(fd, &prefix, 8) == 8 && write(fd, header, length) == (ssize_t)length);
    CHECK(write(fd, weights, sizeof weights) == (ssize_t)sizeof weights && close(fd) == 0);
    char final_path[64];
    snprintf(final_path, sizeof final_path, "%s.safetensors", path);
    CHECK(rename(path, final_path) == 0);
    const kvt_str_t text = {final_path, strlen(final_path)};
    kvt_model_t *model = NULL;
    CHECK_OK(kvt_model_open(&text, 1, sizeof text, &model, NULL));

    kvt_stream_terms_t terms = KVT_STREAM_TERMS_INIT;
    terms.flags = KVT_TERMS_HOST_RESERVE | KVT_TERMS_KV | KVT_TERMS_HOST_CEILING |
                  KVT_TERMS_DEVICE_CEILING | KVT_TERMS_DEVICE_SAFETY;
    terms.device_ceiling_bytes = UNITS * WEIGHTS / 2;
    /* includes a staging buffer of 2 MiB */
    terms.host_ceiling_bytes = (2u << 20) + UNITS * WEIGHTS / 3;
    terms.chunk_bytes = 16384;
    kvt_stream_opts_t opts = KVT_STREAM_OPTS_INIT;
    opts.model = model;
    opts.terms = &terms;
    opts.device = device;
    kvt_stream_t *stream = NULL;
    kvt_error_t *error = NULL;
    /* Its table cannot map memory at fixed addresses. */
    opts.flags = KVT_STREAM_IN_PLACE;
    CHECK_IS(kvt_stream_open(runtime, &opts, &stream, &error), KVT_E_UNSUPPORTED);
    CHECK(strstr(kvt_error_message(error), "in place") != NULL);
    opts.flags = 0;
    const kvt_status_t status = kvt_stream_open(runtime, &opts, &stream, &error);
    if (status != KVT_OK) fprintf(stderr, "open: %s\n", kvt_error_message(error));
    CHECK_OK(status);
    for (int pass = 0; pass < 3; pass++) {
        CHECK_OK(kvt_stream_pass_begin(stream, NULL));
        for (uint32_t layer = 0; layer < UNITS; layer++) {
            uint32_t unit = 0;
            CHECK_OK(kvt_model_find_unit(model, layer, KVT_NONE, &unit));
            kvt_part_t part;
            uint64_t parts = 0;
            CHECK_OK(kvt_model_unit_parts(model, unit, &part, 1, sizeof part, &parts));
            CHECK_EQ(part.bytes, WEIGHTS);
            kvt_unit_lease_t held = KVT_UNIT_LEASE_INIT;
            CHECK_OK(kvt_stream_acquire(stream, unit, KVT_ACQUIRE_SUBMITTED, hang_guard(), &held,
                                        NULL));
            CHECK_EQ(held.memory, KVT_MEMORY_DEVICE);
            /* The engine's kernel on its own stream: here it copies the unit. */
            static uint8_t seen[WEIGHTS];
            memset(seen, 0, sizeof seen);
            if (held.event != 0) CHECK_OK(kvt_device_stream_wait(device, 2, held.event, NULL));
            kvt_copy_rows_t rows = {0};
            rows.from = (uint64_t)(uintptr_t)held.address + part.at;
            rows.to = (uint64_t)(uintptr_t)seen;
            rows.run_bytes = rows.from_stride_bytes = rows.to_stride_bytes = WEIGHTS;
            rows.runs = 1;
            rows.from_memory = KVT_MEMORY_DEVICE;
            uint64_t computed = 0, after = 0;
            CHECK_OK(submit_copies(accelerator, 2, 0, &rows, 1, sizeof rows, &computed));
            CHECK_OK(kvt_device_import_event(device, computed, &after, NULL));
            CHECK_OK(kvt_stream_release(stream, &held, after, NULL));
            CHECK_OK(wait_for(accelerator, computed, hang_guard()));
            CHECK(memcmp(seen, weights + (size_t)layer * WEIGHTS, WEIGHTS) == 0);
            release(accelerator, computed);
        }
        CHECK_OK(kvt_stream_pass_end(stream, NULL));
    }
    CHECK_OK(kvt_stream_close(&stream, hang_guard(), NULL));
    CHECK_OK(kvt_model_close(&model));
    CHECK_OK(kvt_error_free(&error));
    CHECK(unlink(final_path) == 0);
}

/* A lost device: all work in progress fails, and no call hangs. */
static void check_loss(kvt_device_t *device, accelerator_t *accelerator) {
    uint64_t event = 0, late = 0;
    CHECK_OK(kvt_device_copy(device, 0, 0, NULL, 0, sizeof(kvt_copy_t), &event, NULL));
    accelerator->lost = 1;
    kvt_error_t *error = NULL;
    CHECK_IS(kvt_device_wait(device, event, hang_guard(), &error), KVT_E_UNAVAILABLE);
    CHECK_IS(kvt_device_copy(device, 0, 0, NULL, 0, sizeof(kvt_copy_t), &late, &error),
             KVT_E_UNAVAILABLE);
    CHECK(strstr(kvt_error_message(error), "lost") != NULL);
    CHECK_OK(kvt_device_release(device, &event, 1, NULL));
    CHECK_OK(kvt_error_free(&error));
}

/* A device with checksums: sums of its memory, available once the event is signaled. */
static void check_sums(void) {
    kvt_device_opts_t opts = KVT_DEVICE_OPTS_INIT;
    kvt_device_t *device = NULL;
    opts.kind = KVT_DEVICE_KIND_HOST;
    opts.flags = KVT_DEVICE_VERIFY;
    CHECK_IS(kvt_device_open(runtime, &opts, &device, NULL), KVT_E_INVALID);
    opts.kind = KVT_DEVICE_KIND_SIMULATED;
    const uint32_t peer = 1;
    opts.peers = &peer;
    opts.peer_count = 1;
    CHECK_IS(kvt_device_open(runtime, &opts, &device, NULL), KVT_E_INVALID);
    opts.peer_count = 0;
    CHECK_OK(kvt_device_open(runtime, &opts, &device, NULL));
    kvt_device_info_t info = KVT_DEVICE_INFO_INIT;
    CHECK_OK(kvt_device_info(device, &info));
    CHECK(info.flags & KVT_DEVICE_CHECKSUMS);
    kvt_device_memory_t memory = KVT_DEVICE_MEMORY_INIT;
    CHECK_OK(kvt_device_alloc(device, 5000, &memory, NULL));
    static uint8_t from[5000];
    for (int i = 0; i < 5000; i++) from[i] = (uint8_t)(i * 7);
    kvt_copy_t copies[2];
    memset(copies, 0, sizeof copies);
    for (int i = 0; i < 2; i++) {
        copies[i].view.address = (void *)(uintptr_t)(memory.address + (uint64_t)i * 2500);
        copies[i].view.tokens = copies[i].view.heads = 1;
        copies[i].view.memory = memory.memory;
        copies[i].view.run_bytes = 2500;
        copies[i].plane = from + i * 2500;
        copies[i].direction = KVT_COPY_SCATTER;
    }
    copies[1].flags = KVT_COPY_CHECKSUM;
    uint64_t event = 0, before = 0, sums[2] = {1, 1}, count = 7, want = 0;
    CHECK_OK(kvt_device_create_event(device, &before, NULL)); /* the copy waits for it */
    CHECK_OK(kvt_device_copy(device, 0, before, copies, 2, sizeof copies[0], &event, NULL));
    CHECK_IS(kvt_device_checksums(device, event, sums, 2, &count, NULL), KVT_E_BUSY);
    CHECK_OK(kvt_device_signal_event(device, before, NULL));
    CHECK_OK(kvt_device_wait(device, event, hang_guard(), NULL));
    CHECK_IS(kvt_device_checksums(device, event, NULL, 2, &count, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_device_checksums(device, event, sums, 2, NULL, NULL), KVT_E_INVALID);
    CHECK_EQ(count, 7);
    CHECK_OK(kvt_device_checksums(device, event, sums, 2, &count, NULL));
    CHECK_OK(kvt_checksum(from + 2500, 2500, &want));
    CHECK(count == 1 && sums[0] == want && sums[1] == 1);
    CHECK_OK(kvt_device_release(device, &before, 1, NULL));
    CHECK_OK(kvt_device_release(device, &event, 1, NULL));
    CHECK_IS(kvt_device_checksums(device, event, sums, 2, &count, NULL), KVT_E_HANDLE);
    CHECK_OK(kvt_device_close(&device, hang_guard(), NULL));
}

/* A runtime that closes signals the pending events of its devices, so no stream waits for ever. */
static void check_runtime_end(void) {
    accelerator_t accelerator;
    start(&accelerator);
    kvt_runtime_t *const first = runtime;
    runtime = open_runtime(1, NULL);
    const kvt_device_custom_t table = table_of(&accelerator);
    kvt_device_t *device = open_custom(&table);
    uint64_t events[2] = {0, 0};
    CHECK_OK(kvt_device_create_event(device, &events[0], NULL));
    CHECK_OK(kvt_device_copy(device, 1, events[0], NULL, 0, sizeof(kvt_copy_t), &events[1], NULL));
    CHECK_IS(kvt_device_wait(device, events[1], in_ms(5), NULL), KVT_E_TIMEOUT);
    kvt_close_report_t report = KVT_CLOSE_REPORT_INIT;
    CHECK_OK(kvt_runtime_close(&runtime, hang_guard(), &report, NULL));
    CHECK_EQ(report.devices, 1);
    runtime = first;
    CHECK_OK(kvt_device_wait(device, events[1], hang_guard(), NULL));
    CHECK_IS(kvt_device_create_event(device, &events[0], NULL), KVT_E_CLOSED);
    CHECK_OK(kvt_device_release(device, events, 2, NULL));
    CHECK_OK(kvt_device_close(&device, hang_guard(), NULL));
    stop(&accelerator);
}

int main(void) {
    check_begin();
    runtime = open_runtime(1, NULL);
    check_tables();
    check_index();

    accelerator_t accelerator;
    start(&accelerator);
    kvt_device_custom_t table = table_of(&accelerator);
    kvt_device_t *device = open_custom(&table);
    check_copies(device, &accelerator);
    check_store(device, &accelerator);
    check_stream(device, &accelerator);
    conforms(device, 1);
    kvt_device_t *const stale = device;
    CHECK_OK(kvt_device_close(&device, hang_guard(), NULL));
    kvt_device_info_t info = KVT_DEVICE_INFO_INIT;
    CHECK_IS(kvt_device_info(stale, &info), KVT_E_HANDLE);
    stop(&accelerator);

    start(&accelerator);
    table = table_of(&accelerator);
    device = open_custom(&table);
    check_loss(device, &accelerator);
    CHECK_OK(kvt_device_close(&device, hang_guard(), NULL));
    stop(&accelerator);

    check_runtime_end();
    const uint32_t others[] = {KVT_DEVICE_KIND_HOST, KVT_DEVICE_KIND_SIMULATED};
    for (int i = 0; i < 2; i++) {
        kvt_device_opts_t opts = KVT_DEVICE_OPTS_INIT;
        opts.kind = others[i];
        CHECK_OK(kvt_device_open(runtime, &opts, &device, NULL));
        conforms(device, 2);
        CHECK_OK(kvt_device_close(&device, hang_guard(), NULL));
    }
    check_sums();
    close_runtime(&runtime);
    return check_end("device_engine");
}
