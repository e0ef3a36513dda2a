/* layerwise: KV moves while the model computes.
 *
 *   layerwise [SPEC OF A STORE]
 *
 * Prefill: each layer has a put that waits for a ready event. The engine signals the event when it
 * has computed the layer, and computes the next layer while the store copies this one.
 * Next turn: one get has an op for each layer. The engine computes a layer as soon as its op has
 * completed, while later layers are still loading. */
#include "must.h"

enum { LAYERS = 8, KV_HEADS = 2, HEAD_DIM = 64, CHUNK = 32, TOKENS = 64 * CHUNK, ROW = KV_HEADS * HEAD_DIM };
typedef struct { float k[LAYERS][TOKENS][ROW], v[LAYERS][TOKENS][ROW]; } tensors_t;
static tensors_t computed, loaded;
static float hidden[TOKENS]; /* what a layer passes to the next one */

/* A stand-in for a layer: K and V of each token from its hidden state. */
static void compute_kv(tensors_t *kv, int layer) {
    for (int t = 0; t < TOKENS; t++)
        for (int i = 0; i < ROW; i++) {
            kv->k[layer][t][i] = hidden[t] * (float)(i % 7 - 3);
            kv->v[layer][t][i] = hidden[t] + (float)(i * layer) * 0.25f;
        }
}
/* ... and its attention, which reads all K and V of the layer. */
static void attend(const tensors_t *kv, int layer) {
    float sum = 0;
    for (int t = 0; t < TOKENS; t++) {
        for (int i = 0; i < ROW; i++) sum += kv->k[layer][t][i] * kv->v[layer][t][i];
        hidden[t] = sum / (float)((t + 1) * ROW) + (float)layer;
    }
}
static void begin(void) {
    for (int t = 0; t < TOKENS; t++) hidden[t] = (float)(t % 13) * 0.5f;
}

static kvt_view_t view_of(float *rows) {
    kvt_view_t view;
    memset(&view, 0, sizeof view); /* strides of 0: no gaps */
    view.address = rows, view.tokens = TOKENS, view.heads = KV_HEADS, view.run_bytes = HEAD_DIM * sizeof(float);
    return view;
}

/* Takes completions until the op with this tag has one. The tag is the layer. */
static void wait_for_layer(const kvt_queue_t *queue, int layer, int arrived[LAYERS]) {
    while (!arrived[layer]) {
        kvt_completion_t done[LAYERS];
        uint64_t count = 0;
        MUST(kvt_queue_wait(queue, 0, done, LAYERS, sizeof *done, &count));
        for (uint64_t i = 0; i < count; i++) {
            if (done[i].status != KVT_OK) kvt_op_error(done[i].op, &err);
            must(done[i].status, "layer");
            arrived[done[i].tag] = 1;
        }
    }
}

static void prefill(const kvt_session_t *session, const kvt_queue_t *queue) {
    kvt_op_t *ops[LAYERS] = {NULL};
    kvt_ready_event_t *ready[LAYERS] = {NULL};
    int arrived[LAYERS] = {0};
    for (uint32_t layer = 0; layer < LAYERS; layer++) { /* submitted before anything is computed */
        MUST(kvt_ready_event_open(0, &ready[layer], &err));
        const kvt_view_t k = view_of(computed.k[layer][0]), v = view_of(computed.v[layer][0]);
        kvt_transfer_t transfer = KVT_TRANSFER_INIT;
        transfer.tokens = TOKENS, transfer.first_layer = layer, transfer.layers = 1;
        transfer.k = &k, transfer.v = &v, transfer.stride_bytes = sizeof k;
        transfer.ready = ready[layer];
        kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
        opts.queue = queue, opts.tag = layer;
        MUST(kvt_session_put(session, &transfer, &opts, &ops[layer], &err));
    }
    begin();
    for (int layer = 0; layer < LAYERS; layer++) {
        compute_kv(&computed, layer);
        MUST(kvt_ready_event_signal(ready[layer])); /* never waits; the copy runs beside the next lines */
        attend(&computed, layer);
    }
    int left = 0;
    for (int layer = 0; layer < LAYERS; layer++) {
        kvt_op_info_t info = KVT_OP_INFO_INIT;
        MUST(kvt_op_info(ops[layer], &info));
        left += !(info.state & KVT_OP_RELEASED);
    }
    printf("prefill: %d of %d puts were still running when the last layer was computed\n", left, LAYERS);
    /* The tensors must not change before the ops are released, so wait before they are reused. */
    for (int layer = 0; layer < LAYERS; layer++) wait_for_layer(queue, layer, arrived);
    for (int layer = 0; layer < LAYERS; layer++) MUST(kvt_ready_event_close(&ready[layer]));
    MUST(kvt_op_free_many(ops, LAYERS));
}

static void next_turn(const kvt_session_t *session, const kvt_queue_t *queue) {
    kvt_op_t *ops[LAYERS] = {NULL};
    kvt_view_t k[LAYERS], v[LAYERS];
    int arrived[LAYERS] = {0}, begun_with = 0;
    for (int layer = 0; layer < LAYERS; layer++)
        k[layer] = view_of(loaded.k[layer][0]), v[layer] = view_of(loaded.v[layer][0]);
    kvt_transfer_t transfer = KVT_TRANSFER_INIT;
    transfer.flags = KVT_TRANSFER_EACH_LAYER; /* the i-th layer's op has the tag opts.tag + i */
    transfer.tokens = TOKENS;
    transfer.k = k, transfer.v = v, transfer.stride_bytes = sizeof *k;
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    opts.queue = queue;
    MUST(kvt_session_get(session, &transfer, &opts, ops, &err));
    begin();
    for (int layer = 0; layer < LAYERS; layer++) {
        wait_for_layer(queue, layer, arrived);
        for (int other = 0; layer == 0 && other < LAYERS; other++) begun_with += arrived[other];
        attend(&loaded, layer);
    }
    MUST(kvt_op_free_many(ops, LAYERS));
    printf("next turn: computing began when %d of %d layers had arrived\n", begun_with, LAYERS);
}

int main(int argc, char **argv) {
    kvt_store_t *store = NULL;
    kvt_runtime_t *runtime = NULL;
    kvt_queue_t *queue = NULL;
    kvt_namespace_t *ns = NULL;
    kvt_session_t *session = NULL;
    kvt_layout_t layout = KVT_LAYOUT_INIT;
    uint32_t prompt[TOKENS];
    for (uint32_t i = 0; i < TOKENS; i++) prompt[i] = 1000 + i;

    MUST(kvt_open(argc > 1 ? argv[1] : "store(host=64MiB)", KVT_NUL_TERMINATED, &store, &err));
    MUST(kvt_store_runtime(store, &runtime)); /* the store's own: not closed here */
    MUST(kvt_queue_open(runtime, NULL, &queue, &err));
    MUST(kvt_layout_gqa(&layout, LAYERS, KV_HEADS, HEAD_DIM, KVT_DTYPE_F32, CHUNK, &err));
    MUST(kvt_namespace_open(store, NULL, &layout, 0, &ns, &err));
    MUST(kvt_session_open(ns, NULL, &session, &err));
    MUST(kvt_session_append(session, prompt, TOKENS, &err));

    static float want[TOKENS];
    prefill(session, queue);
    memcpy(want, hidden, sizeof want);
    next_turn(session, queue);
    CHECK(memcmp(&computed, &loaded, sizeof loaded) == 0 && memcmp(want, hidden, sizeof want) == 0);
    printf("both computed the same output\n");

    MUST(kvt_session_close(&session));
    MUST(kvt_namespace_close(&ns));
    MUST(kvt_queue_close(&queue, 0, &err));
    MUST(kvt_store_close(&store, 0, &err));
    return 0;
}
