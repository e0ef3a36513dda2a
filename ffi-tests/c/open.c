/* The short way: kvt_open, layouts in one call, transfers that wait. */

#include "check.h"

#include <ftw.h>

enum { LAYERS = 6, HEADS = 2, DIM = 32, CHUNK = 16, TOKENS = 3 * CHUNK, CELL = HEADS * DIM * 2 };

static uint8_t k[LAYERS][TOKENS][CELL], v[LAYERS][TOKENS][CELL];
static kvt_view_t views[2][LAYERS];
static kvt_error_t *err;

static int remove_entry(const char *path, const struct stat *facts, int type, struct FTW *walk) {
    return (void)facts, (void)type, (void)walk, remove(path);
}

/* The call fails with this status, and its message has these words. */
static void fails(kvt_status_t got, kvt_status_t expected, const char *words) {
    CHECK_IS(got, expected);
    if (strstr(kvt_error_message(err), words) == NULL) {
        fprintf(stderr, "no \"%s\" in: %s\n", words, kvt_error_message(err));
        exit(1);
    }
    CHECK_OK(kvt_error_free(&err));
}

static kvt_transfer_t whole(void) {
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        void *planes[2] = {k[layer], v[layer]};
        for (int i = 0; i < 2; i++) {
            memset(&views[i][layer], 0, sizeof views[i][layer]);
            views[i][layer].address = planes[i];
            views[i][layer].tokens = TOKENS;
            views[i][layer].heads = HEADS;
            views[i][layer].run_bytes = CELL / HEADS;
        }
    }
    kvt_transfer_t transfer = KVT_TRANSFER_INIT;
    transfer.k = views[0];
    transfer.v = views[1];
    transfer.stride_bytes = sizeof views[0][0];
    return transfer;
}

static void keys_are_equal(kvt_store_t *store, const kvt_layout_t *a, const kvt_layout_t *b) {
    uint8_t keys[2][KVT_KEY_BYTES];
    const kvt_layout_t *layouts[2] = {a, b};
    for (int i = 0; i < 2; i++) {
        kvt_namespace_t *ns = NULL;
        CHECK_OK(kvt_namespace_open(store, NULL, layouts[i], 0, &ns, &err));
        CHECK_OK(kvt_namespace_key(ns, keys[i]));
        CHECK_OK(kvt_namespace_close(&ns));
    }
    CHECK(memcmp(keys[0], keys[1], KVT_KEY_BYTES) == 0);
}

/* A layout that a call fills equals the one with groups: both give the same namespace. */
static void layouts(kvt_store_t *store) {
    uint16_t layers[LAYERS] = {0, 1, 2, 3, 4, 5}, full[2] = {2, 5}, windowed[4] = {0, 1, 3, 4};
    kvt_group_t groups[2];
    memset(groups, 0, sizeof groups);
    groups[0].dtype = KVT_DTYPE_F16;
    groups[0].kv_heads = HEADS;
    groups[0].k_bytes = groups[0].v_bytes = CELL;
    groups[0].layers = layers;
    groups[0].layer_count = LAYERS;
    kvt_layout_t with_groups = KVT_LAYOUT_INIT, filled = KVT_LAYOUT_INIT;
    with_groups.chunk_tokens = CHUNK;
    with_groups.groups = groups;
    with_groups.group_count = 1;
    with_groups.stride_bytes = sizeof groups[0];
    CHECK_OK(kvt_layout_gqa(&filled, LAYERS, HEADS, DIM, KVT_DTYPE_F16, CHUNK, &err));
    keys_are_equal(store, &filled, &with_groups);

    groups[1] = groups[0];
    groups[0].layers = full;
    groups[0].layer_count = 2;
    groups[1].rule = KVT_RULE_WINDOW;
    groups[1].window_tokens = 20;
    groups[1].layers = windowed;
    groups[1].layer_count = 4;
    with_groups.group_count = 2;
    CHECK_OK(kvt_layout_window(&filled, LAYERS, HEADS, DIM, KVT_DTYPE_F16, CHUNK, 20, 3, &err));
    keys_are_equal(store, &filled, &with_groups);
    groups[1].layers = layers;
    groups[1].layer_count = LAYERS;
    with_groups.groups = &groups[1];
    with_groups.group_count = 1;
    CHECK_OK(kvt_layout_window(&filled, LAYERS, HEADS, DIM, KVT_DTYPE_F16, CHUNK, 20, 0, &err));
    keys_are_equal(store, &filled, &with_groups);

    groups[1].rule = KVT_RULE_FULL;
    groups[1].window_tokens = 0;
    groups[1].dtype = KVT_DTYPE_BF16;
    groups[1].kv_heads = 1;
    groups[1].k_bytes = (512 + 64) * 2;
    groups[1].v_bytes = 0;
    CHECK_OK(kvt_layout_mla(&filled, LAYERS, 512, 64, KVT_DTYPE_BF16, CHUNK, &err));
    keys_are_equal(store, &filled, &with_groups);

    kvt_namespace_t *ns = NULL;
    filled.groups = groups;
    filled.group_count = 1;
    filled.stride_bytes = sizeof groups[0];
    fails(kvt_namespace_open(store, NULL, &filled, 0, &ns, &err), KVT_E_INVALID, "groups");
    fails(kvt_layout_gqa(&filled, 0, HEADS, DIM, KVT_DTYPE_F16, CHUNK, &err), KVT_E_INVALID,
          "groups");
    fails(kvt_layout_gqa(&filled, 70000, HEADS, DIM, KVT_DTYPE_F16, CHUNK, &err), KVT_E_LIMIT,
          "70000");
    fails(kvt_layout_gqa(&filled, 5000, HEADS, DIM, KVT_DTYPE_F16, CHUNK, &err), KVT_E_LIMIT,
          "5000");
    fails(kvt_layout_gqa(&filled, LAYERS, HEADS, 0, KVT_DTYPE_F16, CHUNK, &err), KVT_E_INVALID,
          "whole byte");
    fails(kvt_layout_gqa(&filled, LAYERS, 1, 3, KVT_DTYPE_I4, CHUNK, &err), KVT_E_INVALID,
          "whole byte");
    fails(kvt_layout_mla(&filled, LAYERS, 512, 64, 99, CHUNK, &err), KVT_E_INVALID, "dtype 99");
    fails(kvt_layout_gqa(&filled, LAYERS, HEADS, DIM, KVT_DTYPE_F16, 0, &err), KVT_E_INVALID,
          "chunk");
    fails(kvt_layout_window(&filled, LAYERS, HEADS, DIM, KVT_DTYPE_F16, CHUNK, 0, 3, &err),
          KVT_E_INVALID, "window_tokens");
    filled.struct_size = 3;
    CHECK_IS(kvt_layout_mla(&filled, 1, 1, 0, KVT_DTYPE_F16, 1, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_layout_mla(NULL, 1, 1, 0, KVT_DTYPE_F16, 1, NULL), KVT_E_INVALID);
}

typedef struct {
    kvt_session_t *session;
    kvt_status_t status;
} nested_t;

/* A transfer that waits is refused inside a callback. */
static void in_callback(void *user_data, const kvt_completion_t *batch, uint64_t count,
                        uint64_t stride_bytes) {
    nested_t *nested = user_data;
    (void)batch, (void)count, (void)stride_bytes;
    kvt_transfer_t transfer = whole();
    nested->status = kvt_session_get_wait(nested->session, &transfer, NULL, NULL);
}

static void waits(kvt_store_t *store) {
    kvt_layout_t layout = KVT_LAYOUT_INIT;
    kvt_namespace_t *ns = NULL;
    kvt_session_t *session = NULL;
    uint32_t prompt[TOKENS];
    for (uint32_t i = 0; i < TOKENS; i++) prompt[i] = i * 7;
    CHECK_OK(kvt_layout_gqa(&layout, LAYERS, HEADS, DIM, KVT_DTYPE_F16, CHUNK, &err));
    CHECK_OK(kvt_namespace_open(store, NULL, &layout, 0, &ns, &err));
    CHECK_OK(kvt_session_open(ns, NULL, &session, &err));
    CHECK_OK(kvt_session_append(session, prompt, TOKENS, &err));
    kvt_transfer_t transfer = whole();
    fails(kvt_session_get_wait(session, &transfer, NULL, &err), KVT_E_NOT_FOUND, "");
    for (size_t i = 0; i < sizeof k; i++) (&k[0][0][0])[i] = (uint8_t)(i * 13 >> 2);
    memcpy(v, k, sizeof v);
    transfer.level = KVT_LEVEL_REMOTE;
    fails(kvt_session_put_wait(session, &transfer, NULL, &err), KVT_E_UNAVAILABLE, "remote");
    transfer.level = KVT_LEVEL_RAM;
    CHECK_OK(kvt_session_put_wait(session, &transfer, NULL, &err));
    memset(k, 0, sizeof k);
    CHECK_OK(kvt_session_get_wait(session, &transfer, NULL, &err));
    CHECK(memcmp(k, v, sizeof k) == 0);
    kvt_op_t *op = NULL;
    kvt_op_info_t info = KVT_OP_INFO_INIT;
    CHECK_OK(kvt_session_get(session, &transfer, NULL, &op, &err));
    CHECK_OK(kvt_op_finish(&op, 0, &info, &err));
    CHECK(op == NULL);
    CHECK_EQ(info.bytes_done, sizeof k + sizeof v);
    CHECK_OK(kvt_op_finish(&op, 0, NULL, &err));
    kvt_ready_event_t *never = NULL;
    CHECK_OK(kvt_ready_event_open(0, &never, &err));
    transfer.ready = never;
    CHECK_OK(kvt_session_get(session, &transfer, NULL, &op, &err));
    CHECK_IS(kvt_op_finish(&op, now_ns(), NULL, NULL), KVT_E_TIMEOUT);
    CHECK(op != NULL);
    CHECK_OK(kvt_ready_event_close(&never));
    CHECK_IS(kvt_op_finish(&op, 0, NULL, NULL), KVT_E_CANCELLED);
    CHECK(op == NULL);
    transfer.ready = NULL;
    transfer.flags = KVT_TRANSFER_EACH_LAYER;
    fails(kvt_session_get_wait(session, &transfer, NULL, &err), KVT_E_INVALID, "EACH_LAYER");
    transfer.flags = 0;
    CHECK_IS(kvt_session_get_wait(NULL, &transfer, NULL, NULL), KVT_E_HANDLE);

    kvt_runtime_t *runtime = NULL;
    kvt_queue_t *queue = NULL;
    CHECK_OK(kvt_store_runtime(store, &runtime));
    nested_t nested = {session, KVT_OK};
    kvt_queue_opts_t opts = KVT_QUEUE_OPTS_INIT;
    opts.callback = in_callback;
    opts.user_data = &nested;
    CHECK_OK(kvt_queue_open(runtime, &opts, &queue, &err));
    kvt_submit_opts_t submit = KVT_SUBMIT_OPTS_INIT;
    submit.queue = queue;
    CHECK_OK(kvt_session_get_wait(session, &transfer, &submit, &err));
    CHECK_OK(kvt_queue_close(&queue, in_ms(60000), &err));
    CHECK_IS(nested.status, KVT_E_REENTRANT);

    kvt_runtime_stats_t stats = KVT_RUNTIME_STATS_INIT;
    /* Ops that waited are freed; the notifier may still have the last one. */
    do {
        CHECK_OK(kvt_runtime_stats(runtime, &stats));
    } while (stats.ops_live > 0 && usleep(1000) == 0);
    CHECK_OK(kvt_session_close(&session));
    CHECK_OK(kvt_namespace_close(&ns));
}

int main(void) {
    check_begin();
    kvt_store_t *store = NULL;
    kvt_runtime_t *runtime = NULL;
    fails(kvt_open("stor()", KVT_NUL_TERMINATED, &store, &err), KVT_E_SPEC, "store");
    fails(kvt_open("kvtier(worker=2)", KVT_NUL_TERMINATED, &store, &err), KVT_E_SPEC, "workers");
    fails(kvt_open("store(remote=custom())", KVT_NUL_TERMINATED, &store, &err), KVT_E_INVALID,
          "kvt_store_open");
    fails(kvt_open("store(disk=disk(path=\"/nonesuch/a\",bytes=64MiB))", KVT_NUL_TERMINATED, &store,
                   &err),
          KVT_E_NOT_FOUND, "nonesuch");
    CHECK_IS(kvt_open(NULL, 0, NULL, NULL), KVT_E_INVALID);
    CHECK(store == NULL);

    CHECK_OK(kvt_open(NULL, 0, &store, &err));
    layouts(store);
    waits(store);
    CHECK_OK(kvt_store_runtime(store, &runtime));
    CHECK_OK(kvt_store_close(&store, 0, &err));
    CHECK(store == NULL);
    /* The runtime closed with it. */
    uint64_t ns = 0;
    CHECK_IS(kvt_runtime_now(runtime, &ns), KVT_E_HANDLE);

    char made[] = "/tmp/kvtier-open-XXXXXX", spec[256];
    CHECK(mkdtemp(made) != NULL);
    snprintf(spec, sizeof spec,
             "kvtier(workers=1,name=\"open\",budget=budget(host=64MiB),store=store(host=8MiB,"
             "disk=disk(path=\"%s/kv\",bytes=64MiB)))",
             made);
    for (int round = 0; round < 2; round++) {
        CHECK_OK(kvt_open(spec, KVT_NUL_TERMINATED, &store, &err));
        CHECK_OK(kvt_store_runtime(store, &runtime));
        kvt_runtime_stats_t stats = KVT_RUNTIME_STATS_INIT;
        CHECK_OK(kvt_runtime_stats(runtime, &stats));
        CHECK_EQ(stats.workers, 1);
        CHECK_OK(kvt_store_close(&store, 0, &err));
    }
    fails(kvt_open("kvtier(budget=budget(host=900000GiB,strict=true))", KVT_NUL_TERMINATED, &store,
                   &err),
          KVT_E_BUDGET, "");
    CHECK(nftw(made, remove_entry, 8, FTW_DEPTH | FTW_PHYS) == 0);

    /* A store on a runtime of the caller's leaves it open. */
    CHECK_OK(kvt_runtime_open(NULL, &runtime, &err));
    CHECK_OK(kvt_store_open(runtime, NULL, NULL, &store, &err));
    kvt_runtime_t *same = NULL;
    CHECK_OK(kvt_store_runtime(store, &same));
    CHECK(same == runtime);
    CHECK_OK(kvt_store_close(&store, 0, &err));
    CHECK_OK(kvt_runtime_now(runtime, &ns));
    CHECK_OK(kvt_runtime_close(&runtime, 0, NULL, &err));
    return check_end("open");
}
