/* custom_remote: a remote tier over a transport of the engine's own. One engine puts, another gets.
 *
 *   custom_remote [SPEC OF A STORE WITH remote=custom(...)]
 *
 * The remote is a table in memory under a lock. Its callbacks receive batches of names with pieces
 * of memory, as an RDMA library or an object cache wants them. Stores verify every object: after a
 * miss, a timeout or a wrong byte the engine computes the KV itself. */
#include "must.h"
#include <pthread.h>

enum { LAYERS = 2, KV_HEADS = 2, HEAD_DIM = 64, CHUNK = 32, TOKENS = 6 * CHUNK, OBJECTS = 64 };
typedef struct { char name[160]; uint64_t name_bytes, bytes; uint8_t *data; } object_t;
typedef struct {
    pthread_mutex_t lock;
    object_t objects[OBJECTS];
    uint32_t count, gets, puts, lookups;
} table_t;

static object_t *find(table_t *table, const kvt_remote_item_t *item) {
    for (uint32_t i = 0; i < table->count; i++)
        if (table->objects[i].name_bytes == item->name_bytes &&
            memcmp(table->objects[i].name, item->name, item->name_bytes) == 0)
            return &table->objects[i];
    return NULL;
}

/* Each callback handles a batch and sets the status of each item. Several threads call it at once;
 * it must return by the deadline (CLOCK_MONOTONIC). The next item is `stride` bytes further. */
static kvt_remote_item_t *next(kvt_remote_item_t *item, uint64_t stride) { return (void *)((char *)item + stride); }

static kvt_status_t get(void *user_data, kvt_remote_item_t *item, uint64_t count, uint64_t stride, uint64_t deadline) {
    table_t *table = user_data;
    (void)deadline;
    pthread_mutex_lock(&table->lock);
    for (; count > 0; count--, item = next(item, stride)) {
        const object_t *object = find(table, item);
        table->gets++;
        item->status = object != NULL ? KVT_OK : KVT_E_NOT_FOUND, item->bytes = 0;
        uint64_t at = item->offset; /* a part of the object may be wanted */
        for (uint64_t i = 0; object != NULL && i < item->part_count && at < object->bytes; i++) {
            const uint64_t left = object->bytes - at;
            const uint64_t bytes = item->parts[i].bytes < left ? item->parts[i].bytes : left;
            memcpy(item->parts[i].address, object->data + at, bytes);
            at += bytes, item->bytes += bytes; /* out: what was read */
        }
    }
    pthread_mutex_unlock(&table->lock);
    return KVT_OK;
}

static kvt_status_t put(void *user_data, kvt_remote_item_t *item, uint64_t count, uint64_t stride, uint64_t deadline) {
    table_t *table = user_data;
    (void)deadline;
    pthread_mutex_lock(&table->lock);
    for (; count > 0; count--, item = next(item, stride)) {
        object_t *object = find(table, item);
        table->puts++;
        item->bytes = object != NULL; /* out: 1 = it existed already; the first writer wins */
        item->status = KVT_OK;
        if (object != NULL) continue;
        uint64_t bytes = 0;
        for (uint64_t i = 0; i < item->part_count; i++) bytes += item->parts[i].bytes;
        const int has_place = table->count < OBJECTS && item->name_bytes <= sizeof object->name;
        uint8_t *to = has_place ? malloc(bytes) : NULL;
        if (to == NULL) { item->status = KVT_E_BUDGET; continue; } /* full; a callback never ends the process */
        object = &table->objects[table->count++];
        memcpy(object->name, item->name, item->name_bytes), object->name_bytes = item->name_bytes;
        object->data = to, object->bytes = bytes;
        for (uint64_t i = 0; i < item->part_count; to += item->parts[i++].bytes)
            memcpy(to, item->parts[i].address, item->parts[i].bytes);
    }
    pthread_mutex_unlock(&table->lock);
    return KVT_OK;
}

static kvt_status_t exists(void *user_data, kvt_remote_item_t *item, uint64_t count, uint64_t stride,
                           uint64_t deadline) {
    table_t *table = user_data;
    (void)deadline;
    pthread_mutex_lock(&table->lock);
    for (; count > 0; count--, item = next(item, stride)) {
        const object_t *object = find(table, item);
        table->lookups++;
        item->status = object != NULL ? KVT_OK : KVT_E_NOT_FOUND;
        item->bytes = object != NULL ? object->bytes : 0; /* out: its length */
    }
    pthread_mutex_unlock(&table->lock);
    return KVT_OK;
}

/* An engine: looks up the prompt, gets what the remote has, or computes KV and puts it there. */
static uint64_t serve(const char *spec, table_t *table, int8_t kv[2][LAYERS][TOKENS][KV_HEADS * HEAD_DIM]) {
    kvt_remote_custom_t custom = KVT_REMOTE_CUSTOM_INIT;
    custom.flags = KVT_REMOTE_FIRST_WINS;
    custom.get = get, custom.put = put, custom.exists = exists, custom.user_data = table;
    kvt_store_opts_t opts = KVT_STORE_OPTS_INIT;
    opts.spec = spec, opts.spec_bytes = KVT_NUL_TERMINATED, opts.remote = &custom;
    kvt_runtime_t *runtime = NULL;
    kvt_store_t *store = NULL;
    kvt_namespace_t *ns = NULL;
    kvt_session_t *session = NULL;
    kvt_layout_t layout = KVT_LAYOUT_INIT;
    uint32_t prompt[TOKENS];
    for (uint32_t i = 0; i < TOKENS; i++) prompt[i] = 1000 + i;
    MUST(kvt_runtime_open(NULL, &runtime, &err));
    MUST(kvt_store_open(runtime, NULL, &opts, &store, &err));
    MUST(kvt_layout_gqa(&layout, LAYERS, KV_HEADS, HEAD_DIM, KVT_DTYPE_I8, CHUNK, &err));
    MUST(kvt_namespace_open(store, NULL, &layout, 0, &ns, &err));
    MUST(kvt_session_open(ns, NULL, &session, &err));
    MUST(kvt_session_append(session, prompt, TOKENS, &err)); /* starts a lookup at the remote */

    kvt_op_t *op = NULL;
    kvt_op_info_t info = KVT_OP_INFO_INIT;
    MUST(kvt_session_remote_lookup(session, NULL, &op, &err)); /* completes with its answer */
    MUST(kvt_op_finish(&op, 0, &info, &err));
    const uint64_t reusable = info.value;

    kvt_view_t views[2][LAYERS];
    memset(views, 0, sizeof views);
    for (int plane = 0; plane < 2; plane++)
        for (int layer = 0; layer < LAYERS; layer++) {
            views[plane][layer].address = kv[plane][layer];
            views[plane][layer].heads = KV_HEADS, views[plane][layer].run_bytes = HEAD_DIM;
        }
    kvt_transfer_t transfer = KVT_TRANSFER_INIT;
    transfer.tokens = TOKENS, transfer.k = views[0], transfer.v = views[1], transfer.stride_bytes = sizeof(kvt_view_t);
    transfer.level = reusable < TOKENS ? KVT_LEVEL_REMOTE : 0; /* a put completes when the remote has confirmed it */
    MUST((reusable < TOKENS ? kvt_session_put_wait : kvt_session_get_wait)(session, &transfer, NULL, &err));
    MUST(kvt_session_close(&session));
    MUST(kvt_namespace_close(&ns));
    MUST(kvt_store_close(&store, 0, &err));
    MUST(kvt_runtime_close(&runtime, 0, NULL, &err));
    return reusable;
}

int main(int argc, char **argv) {
    static table_t table = {.lock = PTHREAD_MUTEX_INITIALIZER};
    static int8_t computed[2][LAYERS][TOKENS][KV_HEADS * HEAD_DIM], loaded[2][LAYERS][TOKENS][KV_HEADS * HEAD_DIM];
    const char *spec = argc > 1 ? argv[1] : "store(host=16MiB, remote=custom(timeout=60000))"; /* ms; default: 250 */
    for (size_t i = 0; i < sizeof computed; i++) ((int8_t *)computed)[i] = (int8_t)(i * 7 >> 2);
    const uint64_t first = serve(spec, &table, computed);
    printf("engine 1: found %u tokens, put %d into %u objects\n", (unsigned)first, TOKENS, table.count);
    const uint64_t second = serve(spec, &table, loaded);
    CHECK(first == 0 && second == TOKENS && memcmp(computed, loaded, sizeof loaded) == 0);
    printf("engine 2: found %u tokens at the remote; every byte is right\n", (unsigned)second);
    printf("the remote served %u gets, %u puts and %u lookups\n", table.gets, table.puts, table.lookups);
    for (uint32_t i = 0; i < table.count; i++) free(table.objects[i].data);
    return 0;
}
