/* hello_kv: KV that survives a restart.
 *
 *   cc hello_kv.c $(pkg-config --cflags --libs kvtier) -o hello_kv && ./hello_kv [DIRECTORY]
 *
 * A small GQA model has computed a prompt. The program puts its KV into a store with a host tier
 * and a disk tier, closes everything, opens the store again, finds the prefix by its tokens, and
 * gets it back layer by layer. Without DIRECTORY it uses a new one and removes it at the end. */
#define _XOPEN_SOURCE 700 /* mkdtemp, nftw */
#include <kvtier/kvtier.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 4, KV_HEADS = 2, HEAD_DIM = 64, CHUNK = 32, TOKENS = 3 * CHUNK };
typedef uint16_t f16;
/* The engine's tensors: K and V of each layer, contiguous. */
typedef struct { f16 k[LAYERS][TOKENS][KV_HEADS][HEAD_DIM], v[LAYERS][TOKENS][KV_HEADS][HEAD_DIM]; } tensors_t;

static kvt_error_t *err; /* the library's message for the last failed call */
#define MUST(call) must(call, #call)
static void must(kvt_status_t got, const char *call) {
    if (got == KVT_OK) return;
    fprintf(stderr, "%s: %s: %s\n", call, kvt_status_name(got), err ? kvt_error_message(err) : kvt_status_str(got));
    exit(1);
}

/* An engine has these once: threads, a store, and a namespace for its model and layout. */
typedef struct { kvt_runtime_t *runtime; kvt_store_t *store; kvt_namespace_t *space; } cache_t;

static cache_t open_cache(const char *directory) {
    cache_t cache = {0};
    MUST(kvt_runtime_open(NULL, &cache.runtime, &err));
    char spec[4096];
    snprintf(spec, sizeof spec, "store(host=64MiB,disk=disk(path=\"%s\",bytes=512MiB,segment=4MiB))", directory);
    kvt_store_opts_t opts = KVT_STORE_OPTS_INIT;
    opts.spec = spec, opts.spec_bytes = strlen(spec);
    MUST(kvt_store_open(cache.runtime, NULL, &opts, &cache.store, &err));
    /* Sessions share KV if identity and layout are equal. Set a salt to isolate tenants. */
    kvt_identity_t identity = KVT_IDENTITY_INIT;
    identity.model = "hello", identity.model_bytes = strlen("hello");
    identity.weights = "v1", identity.weights_bytes = strlen("v1"); /* a digest of the weights */
    static const uint16_t layers[LAYERS] = {0, 1, 2, 3};
    kvt_group_t gqa = {.rule = KVT_RULE_FULL, .dtype = KVT_DTYPE_F16, .kv_heads = KV_HEADS, .layers = layers};
    gqa.k_bytes = gqa.v_bytes = KV_HEADS * HEAD_DIM * sizeof(f16); /* of one token in one layer */
    gqa.layer_count = LAYERS;
    kvt_layout_t layout = KVT_LAYOUT_INIT;
    layout.chunk_tokens = CHUNK; /* the unit of sharing and eviction */
    layout.groups = &gqa, layout.group_count = 1, layout.stride_bytes = sizeof gqa;
    MUST(kvt_namespace_open(cache.store, &identity, &layout, 0, &cache.space, &err));
    return cache;
}

static void close_cache(cache_t *cache) {
    MUST(kvt_namespace_close(&cache->space));
    MUST(kvt_store_close(&cache->store, 0, &err));
    MUST(kvt_runtime_close(&cache->runtime, 0, NULL, &err)); /* joins all threads */
}

static kvt_view_t view_of(f16 *tensor) {
    kvt_view_t view = {0}; /* strides of 0: contiguous */
    view.address = tensor;
    view.tokens = TOKENS, view.heads = KV_HEADS, view.run_bytes = HEAD_DIM * sizeof(f16);
    return view;
}

/* Puts or gets the KV of some layers, and waits. */
static void transfer(kvt_session_t *session, int is_put, tensors_t *kv, uint32_t first, uint32_t count) {
    kvt_view_t k[LAYERS], v[LAYERS];
    for (uint32_t i = 0; i < count; i++)
        k[i] = view_of(kv->k[first + i][0][0]), v[i] = view_of(kv->v[first + i][0][0]);
    kvt_transfer_t request = KVT_TRANSFER_INIT;
    request.tokens = TOKENS, request.first_layer = first, request.layers = count;
    request.k = k, request.v = v, request.stride_bytes = sizeof k[0];
    if (is_put) request.level = KVT_LEVEL_DURABLE; /* survives kill -9 and power loss */
    kvt_op_t *op = NULL;
    must((is_put ? kvt_session_put : kvt_session_get)(session, &request, NULL, &op, &err), "submitting");
    MUST(kvt_op_wait(op, KVT_OP_RELEASED, 0)); /* submitting returned at once: an engine computes meanwhile */
    kvt_op_info_t info = KVT_OP_INFO_INIT;
    MUST(kvt_op_info(op, &info));
    if (info.status != KVT_OK) kvt_op_error(op, &err); /* the message of the transfer itself */
    must(info.status, is_put ? "put" : "get");
    MUST(kvt_op_free(&op));
}

static int remove_entry(const char *path, const struct stat *facts, int type, struct FTW *walk) {
    return (void)facts, (void)type, (void)walk, remove(path);
}

int main(int argc, char **argv) {
    char made[] = "hello-kv-XXXXXX", *directory = argc > 1 ? argv[1] : mkdtemp(made);
    if (directory == NULL) return perror("mkdtemp"), 1;
    static tensors_t computed, loaded;
    uint32_t prompt[TOKENS]; /* token ids */
    for (uint32_t i = 0; i < TOKENS; i++) prompt[i] = 1000 + i;
    for (size_t i = 0; i < sizeof computed; i++) ((uint8_t *)&computed)[i] = (uint8_t)(i * 31 >> 3);

    cache_t cache = open_cache(directory);
    kvt_session_t *session = NULL;
    MUST(kvt_session_open(cache.space, NULL, &session, &err));
    MUST(kvt_session_append(session, prompt, TOKENS, &err)); /* tokens name the KV */
    transfer(session, 1, &computed, 0, LAYERS);
    MUST(kvt_session_close(&session));
    close_cache(&cache);
    printf("stored %d tokens of %d layers in %d chunks\n", TOKENS, LAYERS, TOKENS / CHUNK);

    cache = open_cache(directory); /* as after a restart */
    kvt_lookup_t found = KVT_LOOKUP_INIT;
    MUST(kvt_namespace_lookup(cache.space, prompt, TOKENS, NULL, 0, sizeof(kvt_range_t), NULL, &found, &err));
    printf("opened again: a prefix of %d tokens is reusable\n", (int)found.reusable_tokens);
    MUST(kvt_session_open(cache.space, NULL, &session, &err));
    MUST(kvt_session_append(session, prompt, TOKENS, &err));
    for (uint32_t layer = 0; layer < LAYERS; layer++) transfer(session, 0, &loaded, layer, 1);
    MUST(kvt_session_close(&session));
    close_cache(&cache);
    const int equal = memcmp(&computed, &loaded, sizeof loaded) == 0 && found.reusable_tokens == TOKENS;
    printf("read back %d layers, one by one: %s\n", LAYERS, equal ? "every byte is equal" : "WRONG: bytes differ");
    if (argc < 2 && nftw(directory, remove_entry, 8, FTW_DEPTH | FTW_PHYS) != 0) return perror(directory), 1;
    return equal ? 0 : 1;
}
