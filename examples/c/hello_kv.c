/* hello_kv: KV that survives a restart.
 *
 *   cc hello_kv.c $(pkg-config --cflags --libs kvtier) -o hello_kv && ./hello_kv [DIRECTORY]
 *
 * A small model (4 layers, 2 KV heads of 64 numbers in f16) has computed a prompt. Its KV goes to a
 * store with memory and a disk; the store is closed and opened again; the same prompt is found there
 * and comes back layer by layer, as an engine would load it. Run it twice: the second run finds the
 * KV of the first. */
#include <kvtier/kvtier.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 4, HEADS = 2, HEAD_DIM = 64, TOKENS = 96, CHUNK = 16 };
typedef uint16_t f16;
/* The engine's own tensors: K and V of each layer, token by token. */
typedef struct { f16 k[LAYERS][TOKENS][HEADS][HEAD_DIM], v[LAYERS][TOKENS][HEADS][HEAD_DIM]; } kv_t;

static kvt_error_t *err; /* the library explains every failure in words */
#define MUST(call) must(call, #call)
static void must(kvt_status_t status, const char *call) {
    if (status == KVT_OK) return;
    fprintf(stderr, "%s: %s %s\n", call, kvt_status_name(status), err ? kvt_error_message(err) : "");
    exit(1);
}

/* What an engine has once: threads, a store, and the namespace of its model and layout. */
typedef struct { kvt_runtime_t *runtime; kvt_store_t *store; kvt_namespace_t *space; } cache_t;

static cache_t open_cache(const char *directory) {
    cache_t cache = {0};
    MUST(kvt_runtime_open(NULL, &cache.runtime, &err));
    char spec[4096];
    snprintf(spec, sizeof spec, "store(host=64MiB,disk=disk(path=\"%s\",bytes=512MiB,segment=4MiB))", directory);
    kvt_store_opts_t opts = KVT_STORE_OPTS_INIT;
    opts.spec = spec, opts.spec_bytes = strlen(spec);
    MUST(kvt_store_open(cache.runtime, NULL, &opts, &cache.store, &err));

    /* KV is shared by whoever has the same identity and layout, and by nobody else. */
    kvt_identity_t identity = KVT_IDENTITY_INIT;
    identity.model = "hello", identity.model_bytes = strlen("hello");
    identity.weights = "v1", identity.weights_bytes = strlen("v1"); /* a digest of the weights */
    static const uint16_t layers[LAYERS] = {0, 1, 2, 3};
    kvt_group_t gqa = {.rule = KVT_RULE_FULL, .dtype = KVT_DTYPE_F16, .kv_heads = HEADS, .layers = layers};
    gqa.k_bytes = gqa.v_bytes = HEADS * HEAD_DIM * sizeof(f16); /* of one token in one layer */
    gqa.layer_count = LAYERS;
    kvt_layout_t layout = KVT_LAYOUT_INIT;
    layout.chunk_tokens = CHUNK;
    layout.groups = &gqa, layout.group_count = 1, layout.stride_bytes = sizeof gqa;
    MUST(kvt_namespace_open(cache.store, &identity, &layout, 0, &cache.space, &err));
    return cache;
}

static void close_cache(cache_t *cache) {
    MUST(kvt_namespace_close(&cache->space));
    MUST(kvt_store_close(&cache->store, 0, &err)); /* writes back what is in memory only */
    MUST(kvt_runtime_close(&cache->runtime, 0, NULL, &err)); /* no thread is left */
}

static kvt_view_t view_of(f16 *tensor) {
    kvt_view_t view = {0};
    view.address = tensor;
    view.tokens = TOKENS, view.heads = HEADS, view.run_bytes = HEAD_DIM * sizeof(f16);
    return view; /* strides are those of a contiguous tensor unless they are set */
}

/* Puts or gets the KV of some layers, and waits. */
typedef kvt_status_t transfer_t(const kvt_session_t *, const kvt_move_t *, const kvt_submit_opts_t *,
                                kvt_op_t **, kvt_error_t **);
static void transfer(transfer_t *way, kvt_session_t *session, kv_t *kv, uint32_t first, uint32_t count) {
    kvt_view_t k[LAYERS], v[LAYERS];
    for (uint32_t i = 0; i < count; i++) {
        k[i] = view_of(kv->k[first + i][0][0]);
        v[i] = view_of(kv->v[first + i][0][0]);
    }
    kvt_move_t move = KVT_MOVE_INIT;
    move.tokens = TOKENS, move.first_layer = first, move.layers = count;
    move.k = k, move.v = v, move.stride_bytes = sizeof k[0];
    move.level = way == kvt_session_put ? KVT_LEVEL_DURABLE : 0; /* survives kill -9 and power loss */
    kvt_op_t *op = NULL;
    MUST(way(session, &move, NULL, &op, &err)); /* never waits: an engine computes meanwhile */
    MUST(kvt_op_wait(op, KVT_OP_RELEASED, 0));
    kvt_op_info_t info = KVT_OP_INFO_INIT;
    MUST(kvt_op_info(op, &info));
    MUST(info.status);
    MUST(kvt_op_free(&op));
}

int main(int argc, char **argv) {
    const char *directory = argc > 1 ? argv[1] : "hello-kv-store"; /* made if it is not there */
    static kv_t computed, loaded;
    uint32_t prompt[TOKENS];
    for (uint32_t i = 0; i < TOKENS; i++) prompt[i] = 1000 + i;
    for (size_t i = 0; i < sizeof computed; i++) ((uint8_t *)&computed)[i] = (uint8_t)(i * 31 >> 3);

    cache_t cache = open_cache(directory);
    kvt_session_t *session = NULL;
    MUST(kvt_session_open(cache.space, NULL, &session, &err));
    MUST(kvt_session_append(session, prompt, TOKENS, &err));
    transfer(kvt_session_put, session, &computed, 0, LAYERS);
    MUST(kvt_session_close(&session));
    close_cache(&cache);
    printf("stored %d tokens of %d layers in %s\n", TOKENS, LAYERS, directory);

    cache = open_cache(directory); /* as after a restart */
    kvt_lookup_t found = KVT_LOOKUP_INIT;
    MUST(kvt_namespace_lookup(cache.space, prompt, TOKENS, NULL, 0, sizeof(kvt_range_t), NULL, &found, &err));
    printf("opened again: %llu of %d tokens are there\n", (unsigned long long)found.reusable_tokens, TOKENS);
    MUST(kvt_session_open(cache.space, NULL, &session, &err));
    MUST(kvt_session_append(session, prompt, TOKENS, &err));
    for (uint32_t layer = 0; layer < LAYERS; layer++) transfer(kvt_session_get, session, &loaded, layer, 1);
    MUST(kvt_session_close(&session));
    close_cache(&cache);
    const int same = memcmp(&computed, &loaded, sizeof loaded) == 0 && found.reusable_tokens == TOKENS;
    puts(same ? "read back layer by layer: every byte is the same" : "WRONG: the bytes differ");
    return same ? 0 : 1;
}
