/* engine: an engine with a paged KV cache that keeps its KV in a store.
 *
 *   engine [DIRECTORY]
 *
 * Turn 1 computes a prompt, and puts the chunks that become full. Turn 2 loads them into other pages. Turn 3 loads them
 * after a restart. Some are evicted between its plan and its get, so it computes from the get's value on. */
#include "must.h"

enum { LAYERS = 4, HEADS = 2, ROW = HEADS * 64, PAGE = 16, PAGES = 64, CHUNK = 32, MOST = 512, REQUESTS = 64 };
static uint16_t cache[LAYERS][PAGES][2][PAGE][ROW]; /* of each layer: K and V of each page */
static uint32_t table[MOST / PAGE];                 /* pages of the sequence */
static uint32_t tokens[MOST], count;                /* the sequence: the engine keeps it, the store does not */
static uint32_t appended, put_end;                  /* tokens that the session knows; end of those that were put */
static uint64_t results[REQUESTS], submitted, in_flight; /* values of transfers by tag; UINT64_MAX = in flight */
static kvt_store_t *store;
static kvt_queue_t *queue;
static kvt_namespace_t *ns;
static kvt_session_t *session;

static void open_store(const char *directory) {
    kvt_runtime_t *runtime = NULL; /* the store's own: not closed here */
    kvt_layout_t layout = KVT_LAYOUT_INIT;
    kvt_identity_t identity = {sizeof identity, .model = "engine", .model_bytes = 6}; /* set weights and salt, too */
    char spec[4200];
    snprintf(spec, sizeof spec, "store(host=64MiB, disk=disk(path=\"%s/kv\", bytes=256MiB))", directory);
    MUST(kvt_open(spec, KVT_NUL_TERMINATED, &store, &err));
    MUST(kvt_store_runtime(store, &runtime));
    MUST(kvt_queue_open(runtime, NULL, &queue, &err));
    MUST(kvt_layout_gqa(&layout, LAYERS, HEADS, ROW / HEADS, KVT_DTYPE_F16, CHUNK, &err));
    MUST(kvt_namespace_open(store, &identity, &layout, 0, &ns, &err));
    MUST(kvt_session_open(ns, NULL, &session, &err));
    MUST(kvt_namespace_observe_prefill(ns, 0, 10, 1000000000, &err)); /* for plans: report each prefill */
}
static void close_store(void) {
    MUST(kvt_session_close(&session));
    MUST(kvt_namespace_close(&ns));
    MUST(kvt_queue_close(&queue, 0, &err));
    MUST(kvt_store_close(&store, 0, &err)); /* writes full chunks to disk: nothing else needs to be saved */
    appended = 0;
}

/* The model: writes KV of tokens into the cache, or counts the numbers there that differ from it. */
static int model(uint32_t first, uint32_t end, int computes) {
    int wrong = 0;
    for (uint32_t t = first; t < end; t++)
        for (int i = 0; i < LAYERS * 2 * ROW; i++) {
            uint16_t *const at = &cache[i / (2 * ROW)][table[t / PAGE]][i / ROW % 2][t % PAGE][i % ROW];
            const uint16_t value = (uint16_t)(tokens[t] * 31 + t * 7 + (uint32_t)i);
            if (computes) *at = value;
            wrong += *at != value;
        }
    return wrong;
}

/* Takes completions; `waits`: until there is one. An engine drains the queue between two steps. */
static void drain(int waits) {
    kvt_completion_t done[8];
    uint64_t n = 0;
    if (waits) MUST(kvt_queue_wait(queue, 0, done, 8, sizeof *done, &n));
    else MUST(kvt_queue_poll(queue, done, 8, sizeof *done, &n));
    for (uint64_t i = 0; i < n; i++, in_flight--) {
        results[done[i].tag] = done[i].value;
        if (done[i].status != KVT_OK) { /* fails no request: the engine computes, or the KV is not stored */
            kvt_error_t *why = NULL;
            kvt_op_error(done[i].op, &why);
            printf("  %s: %s\n", kvt_status_name(done[i].status), kvt_error_message(why));
            MUST(kvt_error_free(&why));
        }
        MUST(kvt_op_free(&done[i].op));
    }
}

/* Submits a transfer of tokens [first, end), both borders of chunks, and returns its tag. */
static uint64_t submit(int is_get, uint32_t first, uint32_t end) {
    void *pages[MOST / PAGE];
    kvt_view_t k[LAYERS], v[LAYERS];
    for (uint32_t t = first; t < end; t += PAGE) pages[(t - first) / PAGE] = cache[0][table[t / PAGE]];
    for (int layer = 0; layer < LAYERS; layer++) { /* one page table serves all layers, K and V */
        k[layer] = (kvt_view_t){.pages = pages, .page_count = (end - first) / PAGE, .page_tokens = PAGE,
                                .heads = HEADS, .run_bytes = ROW / HEADS * sizeof(uint16_t),
                                .shift_bytes = layer * (int64_t)sizeof cache[0]};
        v[layer] = k[layer], v[layer].shift_bytes += (int64_t)sizeof cache[0][0][0];
    }
    const kvt_transfer_t transfer = {sizeof transfer, .first_token = first, .tokens = end - first, .k = k, .v = v,
                                     .stride_bytes = sizeof *k, .flags = is_get ? KVT_TRANSFER_NEEDED_ONLY : 0};
    const kvt_submit_opts_t opts = {sizeof opts, .queue = queue, .tag = submitted++ % REQUESTS};
    results[opts.tag] = UINT64_MAX;
    kvt_op_t *op = NULL; /* comes back in the completion; without it a failure has no message */
    kvt_status_t status;
    while ((status = (is_get ? kvt_session_get : kvt_session_put)(session, &transfer, &opts, &op, &err)) ==
               KVT_E_AGAIN && in_flight > 0) drain(1);
    must(status, is_get ? "get" : "put"); /* an engine would compute, or skip the put */
    in_flight++;
    return opts.tag;
}

static void append(void) {
    MUST(kvt_session_append(session, tokens + appended, count - appended, &err));
    appended = count;
}
/* Puts the chunks that have become full. A put of the tail would be useless after the next token. */
static void put(void) {
    append();
    for (; put_end + CHUNK <= count; put_end += CHUNK) submit(0, put_end, put_end + CHUNK);
}

/* Serves a request, returns how many tokens were loaded. `evicted`: the first token that the store loses; 0 = none. */
static uint32_t turn(uint32_t prompt, uint32_t answer, uint32_t evicted) {
    kvt_plan_step_t steps[16];
    uint64_t n = 0;
    memset(cache, 0xff, sizeof cache);
    for (uint32_t i = 0; i < MOST / PAGE; i++) table[i] = (count + i * 7) % PAGES; /* pages are allocated anew */
    for (uint32_t end = count + prompt; count < end; count++) tokens[count] = 1000 + count;
    append();
    MUST(kvt_session_plan(session, NULL, steps, 16, sizeof *steps, &n, NULL, &err));
    if (evicted > 0) MUST(kvt_session_drop(session, evicted, 0, NULL, &err));
    uint32_t ready = 0; /* leading tokens with KV in the cache */
    for (uint64_t i = 0; i < n && steps[i].kind == KVT_PLAN_LOAD && steps[i].first_token == ready; i++) {
        const uint64_t tag = submit(1, ready, ready + (uint32_t)steps[i].tokens);
        while (results[tag] == UINT64_MAX) drain(1);
        ready += (uint32_t)results[tag]; /* less than the step has, if a cell was missing */
    }
    CHECK(model(0, ready, 0) == 0);
    printf("%u tokens, loaded %u\n", count, ready);
    put_end = ready;
    model(ready < count ? ready : count - 1, count, 1); /* at least the last one: loaded KV gives no logits */
    put();
    for (; answer > 0; answer--) { /* decode */
        tokens[count] = 5000 + count, count++;
        model(count - 1, count, 1);
        if (count % CHUNK == 0) put();
        drain(0);
    }
    const kvt_policy_hint_t hint = {sizeof hint, .stop = KVT_STOP_END_TURN};
    MUST(kvt_session_hint(session, &hint, &err));
    while (in_flight > 0) drain(1); /* the pages may be used for something else then */
    return ready;
}

int main(int argc, char **argv) {
    const char *const directory = work_directory(argc > 1 ? argv[1] : NULL);
    open_store(directory);
    turn(100, 60, 0);
    CHECK(turn(50, 40, 0) >= 160);
    close_store();
    open_store(directory);
    CHECK(turn(30, 20, 192) == 192 || argc > 1); /* a part of the plan; an old directory has more chunks */
    close_store();
    return 0;
}
