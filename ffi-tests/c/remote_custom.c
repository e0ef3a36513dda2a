/* A custom remote: a table in memory under a lock. Its callbacks get batches of names with
 * pieces of memory, as Mooncake, NIXL or InfiniStore would. Two stores share it; then it returns
 * wrong bytes and becomes unavailable. */

#include "check.h"

#define LAYERS 2
#define CHUNK 16
#define TOKENS 64
#define ROW 256
#define MOST 64

typedef struct {
    char name[160];
    uint8_t *bytes;
    uint64_t size;
} object_t;

typedef struct {
    pthread_mutex_t lock;
    object_t objects[MOST];
    uint32_t count, gets, puts, asks, removals, destroyed;
    int is_unavailable, returns_wrong_bytes;
} table_t;

static table_t table;
static kvt_runtime_t *runtime;

static object_t *find(table_t *t, const kvt_remote_item_t *item) {
    for (uint32_t i = 0; i < t->count; i++)
        if (strlen(t->objects[i].name) == item->name_bytes &&
            memcmp(t->objects[i].name, item->name, item->name_bytes) == 0)
            return &t->objects[i];
    return NULL;
}

static kvt_remote_item_t *item_at(kvt_remote_item_t *items, uint64_t stride, uint64_t at) {
    return (kvt_remote_item_t *)((char *)items + at * stride);
}

static kvt_status_t get(void *data, kvt_remote_item_t *items, uint64_t count, uint64_t stride,
                        uint64_t deadline_ns) {
    table_t *t = data;
    CHECK(deadline_ns > now_ns());
    pthread_mutex_lock(&t->lock);
    const int away = t->is_unavailable;
    for (uint64_t i = 0; i < count && !away; i++) {
        kvt_remote_item_t *item = item_at(items, stride, i);
        const object_t *object = find(t, item);
        t->gets++;
        item->status = object != NULL ? KVT_OK : KVT_E_NOT_FOUND;
        if (object == NULL) continue;
        uint64_t at = item->offset;
        for (uint64_t p = 0; p < item->part_count && at < object->size; p++) {
            const uint64_t left = object->size - at;
            const uint64_t n = item->parts[p].bytes < left ? item->parts[p].bytes : left;
            memcpy(item->parts[p].address, object->bytes + at, n);
            at += n;
            item->bytes += n;
        }
        if (t->returns_wrong_bytes && item->part_count > 1)
            *(uint8_t *)item->parts[1].address ^= 0x10;
    }
    pthread_mutex_unlock(&t->lock);
    return away ? KVT_E_UNAVAILABLE : KVT_OK;
}

static kvt_status_t put(void *data, kvt_remote_item_t *items, uint64_t count, uint64_t stride,
                        uint64_t deadline_ns) {
    table_t *t = data;
    (void)deadline_ns;
    pthread_mutex_lock(&t->lock);
    const int away = t->is_unavailable;
    for (uint64_t i = 0; i < count && !away; i++) {
        kvt_remote_item_t *item = item_at(items, stride, i);
        t->puts++;
        item->status = KVT_OK;
        item->bytes = find(t, item) != NULL;
        if (item->bytes != 0) continue;
        CHECK(t->count < MOST && item->name_bytes < sizeof t->objects[0].name);
        object_t *object = &t->objects[t->count++];
        memcpy(object->name, item->name, item->name_bytes);
        object->name[item->name_bytes] = 0;
        for (uint64_t p = 0; p < item->part_count; p++) object->size += item->parts[p].bytes;
        object->bytes = malloc(object->size);
        CHECK(object->bytes != NULL);
        uint64_t at = 0;
        for (uint64_t p = 0; p < item->part_count; at += item->parts[p++].bytes)
            memcpy(object->bytes + at, item->parts[p].address, item->parts[p].bytes);
    }
    pthread_mutex_unlock(&t->lock);
    return away ? KVT_E_UNAVAILABLE : KVT_OK;
}

static kvt_status_t exists(void *data, kvt_remote_item_t *items, uint64_t count, uint64_t stride,
                           uint64_t deadline_ns) {
    table_t *t = data;
    (void)deadline_ns;
    pthread_mutex_lock(&t->lock);
    const int away = t->is_unavailable;
    for (uint64_t i = 0; i < count && !away; i++) {
        kvt_remote_item_t *item = item_at(items, stride, i);
        const object_t *object = find(t, item);
        t->asks++;
        item->status = object != NULL ? KVT_OK : KVT_E_NOT_FOUND;
        item->bytes = object != NULL ? object->size : 0;
    }
    pthread_mutex_unlock(&t->lock);
    return away ? KVT_E_UNAVAILABLE : KVT_OK;
}

static kvt_status_t remove_objects(void *data, kvt_remote_item_t *items, uint64_t count,
                             uint64_t stride, uint64_t deadline_ns) {
    table_t *t = data;
    (void)deadline_ns;
    pthread_mutex_lock(&t->lock);
    for (uint64_t i = 0; i < count; i++) {
        kvt_remote_item_t *item = item_at(items, stride, i);
        object_t *object = find(t, item);
        item->status = KVT_OK;
        if (object == NULL) continue;
        free(object->bytes);
        *object = t->objects[--t->count];
        memset(&t->objects[t->count], 0, sizeof *object);
        t->removals++;
    }
    pthread_mutex_unlock(&t->lock);
    return KVT_OK;
}

static void destroyed(void *data) { ((table_t *)data)->destroyed++; }

typedef struct {
    kvt_store_t *store;
    kvt_namespace_t *ns;
    kvt_session_t *session;
    uint8_t rows[LAYERS][TOKENS * ROW];
    kvt_view_t views[LAYERS];
} engine_t;

static engine_t one, other;

static kvt_remote_custom_t custom_of(void) {
    kvt_remote_custom_t custom = KVT_REMOTE_CUSTOM_INIT;
    custom.flags = KVT_REMOTE_FIRST_WINS;
    custom.preferred_bytes = 16384;
    custom.get = get;
    custom.put = put;
    custom.exists = exists;
    custom.remove = remove_objects;
    custom.user_data = &table;
    custom.destroy = destroyed;
    return custom;
}

static void open_engine(engine_t *engine) {
    const char *spec = "store(host=4MiB, remote=custom(prefix=\"mine\", timeout=600000))";
    const kvt_remote_custom_t custom = custom_of();
    memset(engine, 0, sizeof *engine);
    kvt_store_opts_t opts = KVT_STORE_OPTS_INIT;
    opts.spec = spec;
    opts.spec_bytes = strlen(spec);
    opts.remote = &custom;
    CHECK_OK(kvt_store_open(runtime, NULL, &opts, &engine->store, NULL));
    const uint16_t layers[LAYERS] = {0, 1};
    kvt_group_t group;
    memset(&group, 0, sizeof group);
    group.dtype = KVT_DTYPE_BYTES;
    group.k_bytes = ROW;
    group.layers = layers;
    group.layer_count = LAYERS;
    kvt_layout_t layout = KVT_LAYOUT_INIT;
    layout.chunk_tokens = CHUNK;
    layout.groups = &group;
    layout.group_count = 1;
    layout.stride_bytes = sizeof group;
    CHECK_OK(kvt_namespace_open(engine->store, NULL, &layout, 0, &engine->ns, NULL));
    kvt_session_opts_t session = KVT_SESSION_OPTS_INIT;
    CHECK_OK(kvt_session_open(engine->ns, &session, &engine->session, NULL));
    uint32_t tokens[TOKENS];
    for (uint32_t i = 0; i < TOKENS; i++) tokens[i] = 11 * i;
    CHECK_OK(kvt_session_append(engine->session, tokens, TOKENS, NULL));
    for (int layer = 0; layer < LAYERS; layer++) {
        engine->views[layer].address = engine->rows[layer];
        engine->views[layer].heads = 1;
        engine->views[layer].run_bytes = ROW;
        engine->views[layer].tokens = TOKENS;
    }
}

static void close_engine(engine_t *engine) {
    CHECK_OK(kvt_session_close(&engine->session));
    CHECK_OK(kvt_namespace_close(&engine->ns));
    CHECK_OK(kvt_store_close(&engine->store, hang_guard(), NULL));
}

static kvt_status_t transfer_all(engine_t *engine, int is_put, uint64_t *tokens) {
    kvt_transfer_t transfer = KVT_TRANSFER_INIT;
    transfer.layers = LAYERS;
    transfer.level = is_put ? KVT_LEVEL_REMOTE : 0;
    transfer.k = engine->views;
    transfer.stride_bytes = sizeof engine->views[0];
    kvt_op_t *op = NULL;
    CHECK_OK((is_put ? kvt_session_put : kvt_session_get)(engine->session, &transfer, NULL, &op,
                                                          NULL));
    CHECK_OK(kvt_op_wait(op, KVT_OP_RELEASED, hang_guard()));
    *tokens = info_of(op).value;
    return finish_op(&op);
}

static uint64_t locate(engine_t *engine) {
    kvt_op_t *op = NULL;
    CHECK_OK(kvt_session_remote_lookup(engine->session, NULL, &op, NULL));
    CHECK_OK(kvt_op_wait(op, KVT_OP_RELEASED, hang_guard()));
    const uint64_t tokens = info_of(op).value;
    CHECK_OK(finish_op(&op));
    return tokens;
}

int main(void) {
    check_begin();
    pthread_mutex_init(&table.lock, NULL);
    runtime = open_runtime(1, NULL);
    uint64_t tokens = 0;

    open_engine(&one);
    for (int layer = 0; layer < LAYERS; layer++)
        for (int i = 0; i < TOKENS * ROW; i++) one.rows[layer][i] = (uint8_t)(i * 13 + layer);
    CHECK_OK(transfer_all(&one, 1, &tokens));
    CHECK_EQ(tokens, TOKENS);
    CHECK_EQ(table.count, TOKENS / CHUNK);
    CHECK(strncmp(table.objects[0].name, "mine/v1/", 8) == 0);

    open_engine(&other);
    CHECK_EQ(locate(&other), TOKENS);
    CHECK_OK(transfer_all(&other, 0, &tokens));
    CHECK_EQ(tokens, TOKENS);
    for (int layer = 0; layer < LAYERS; layer++)
        CHECK(memcmp(one.rows[layer], other.rows[layer], TOKENS * ROW) == 0);
    close_engine(&other);

    /* Wrong bytes are a miss, and the objects are removed. */
    table.returns_wrong_bytes = 1;
    open_engine(&other);
    CHECK_EQ(locate(&other), TOKENS);
    CHECK_IS(transfer_all(&other, 0, &tokens), KVT_E_NOT_FOUND);
    CHECK_EQ(tokens, 0);
    close_engine(&other);
    CHECK_EQ(table.removals, TOKENS / CHUNK);
    CHECK_EQ(table.count, 0);
    table.returns_wrong_bytes = 0;

    /* An unavailable remote: uploads fail, and chunks in host memory are still found. */
    table.is_unavailable = 1;
    CHECK_IS(transfer_all(&one, 1, &tokens), KVT_E_UNAVAILABLE);
    CHECK_EQ(locate(&one), TOKENS);
    CHECK_OK(transfer_all(&one, 0, &tokens));
    table.is_unavailable = 0;
    close_engine(&one);
    CHECK_EQ(table.destroyed, 3);

    /* An invalid table is refused, and the library does not take over user_data. */
    kvt_remote_custom_t custom = custom_of();
    kvt_store_opts_t opts = KVT_STORE_OPTS_INIT;
    kvt_store_t *store = NULL;
    opts.remote = &custom;
    CHECK_IS(kvt_store_open(runtime, NULL, &opts, &store, NULL), KVT_E_INVALID);
    opts.spec = "store(remote=custom())";
    opts.spec_bytes = strlen(opts.spec);
    custom.get = NULL;
    CHECK_IS(kvt_store_open(runtime, NULL, &opts, &store, NULL), KVT_E_INVALID);
    CHECK_EQ(table.destroyed, 3);
    close_runtime(&runtime);
    return check_end("remote_custom");
}
