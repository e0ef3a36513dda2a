/* hello_kv: KV that survives a restart. Run it twice: the first run stores the KV of a prompt, the second one loads it.
 *     cc hello_kv.c $(pkg-config --cflags --libs kvtier) -o hello_kv && ./hello_kv && ./hello_kv */
#include <kvtier/kvtier.h>
#include <stdio.h>

enum { LAYERS = 4, KV_HEADS = 2, HEAD_DIM = 64, TOKENS = 96, CHUNK = 32 }; /* a chunk is the unit of sharing */
static uint16_t k[LAYERS][TOKENS][KV_HEADS][HEAD_DIM], v[LAYERS][TOKENS][KV_HEADS][HEAD_DIM];

int main(void) {
    kvt_error_t *err = NULL;
    kvt_store_t *store = NULL;
    kvt_namespace_t *ns = NULL;
    kvt_session_t *session = NULL;
    uint32_t prompt[TOKENS]; /* token ids: they name the KV */
    for (uint32_t i = 0; i < TOKENS; i++) prompt[i] = 1000 + i;
    kvt_view_t views[2][LAYERS]; /* the engine's tensors of each layer: K, then V */
    for (uint32_t i = 0; i < 2 * LAYERS; i++)
        views[i / LAYERS][i % LAYERS] = (kvt_view_t){.address = i < LAYERS ? k[i] : v[i - LAYERS], .tokens = TOKENS,
                                                     .heads = KV_HEADS, .run_bytes = HEAD_DIM * sizeof(uint16_t)};
    kvt_transfer_t all = {sizeof all, .k = views[0], .v = views[1], .stride_bytes = sizeof(kvt_view_t)};
    kvt_identity_t model = {sizeof model, .model = "hello", .model_bytes = 5};
    kvt_layout_t layout = KVT_LAYOUT_INIT;
    if (kvt_open("store(host=64MiB,disk=disk(path=\"hello-kv\",bytes=256MiB))", KVT_NUL_TERMINATED, &store, &err) ||
        kvt_layout_gqa(&layout, LAYERS, KV_HEADS, HEAD_DIM, KVT_DTYPE_F16, CHUNK, &err) ||
        kvt_namespace_open(store, &model, &layout, 0, &ns, &err) || kvt_session_open(ns, NULL, &session, &err) ||
        kvt_session_append(session, prompt, TOKENS, &err)) goto failed;
    if (kvt_session_get_wait(session, &all, NULL, NULL) == KVT_OK) {
        printf("loaded %d tokens; the last number of V is %d\n", TOKENS, v[LAYERS - 1][TOKENS - 1][1][HEAD_DIM - 1]);
    } else { /* a miss, or a failure: the engine computes the prompt, and stores its KV */
        for (size_t i = 0; i < sizeof v / sizeof(uint16_t); i++) (&v[0][0][0][0])[i] = (uint16_t)(i * 31 >> 3);
        all.level = KVT_LEVEL_DURABLE; /* returns when the KV survives power loss */
        if (kvt_session_put_wait(session, &all, NULL, &err)) goto failed;
        printf("stored %d tokens; the last number of V is %d\n", TOKENS, v[LAYERS - 1][TOKENS - 1][1][HEAD_DIM - 1]);
    }
    if (kvt_session_close(&session) || kvt_namespace_close(&ns) || kvt_store_close(&store, 0, &err)) goto failed;
    return 0;
failed:
    return fprintf(stderr, "hello_kv: %s\n", kvt_error_message(err)), kvt_error_free(&err), 1;
}
