/* One request of an engine, collected by callgrind: through which source files it passes.
 * Usage: trips put|get|evict DIRECTORY. trips.py builds it, runs it and counts. */
#include <kvtier/kvtier.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <valgrind/callgrind.h>

enum { LAYERS = 2, CHUNK = 32, RUN = 256, CELL = CHUNK * RUN, MANY = 40 };

static kvt_error_t *err;
#define MUST(call) must(call, #call)
static void must(kvt_status_t got, const char *call) {
    if (got == KVT_OK) return;
    fprintf(stderr, "%s: %s: %s\n", call, kvt_status_name(got), err ? kvt_error_message(err) : "");
    exit(1);
}

typedef struct { kvt_runtime_t *runtime; kvt_store_t *store; kvt_namespace_t *space; } cache_t;

static cache_t open_cache(const char *spec) {
    cache_t cache = {0};
    MUST(kvt_runtime_open(NULL, &cache.runtime, &err));
    kvt_store_opts_t opts = KVT_STORE_OPTS_INIT;
    opts.spec = spec, opts.spec_bytes = strlen(spec);
    MUST(kvt_store_open(cache.runtime, NULL, &opts, &cache.store, &err));
    kvt_identity_t identity = KVT_IDENTITY_INIT;
    identity.model = "trips", identity.model_bytes = 5;
    static const uint16_t layers[LAYERS] = {0, 1};
    kvt_group_t gqa = {.rule = KVT_RULE_FULL, .dtype = KVT_DTYPE_F16, .kv_heads = 1, .layers = layers};
    gqa.k_bytes = gqa.v_bytes = RUN, gqa.layer_count = LAYERS;
    kvt_layout_t layout = KVT_LAYOUT_INIT;
    layout.chunk_tokens = CHUNK, layout.groups = &gqa, layout.group_count = 1;
    layout.stride_bytes = sizeof gqa;
    MUST(kvt_namespace_open(cache.store, &identity, &layout, 0, &cache.space, &err));
    return cache;
}

static void close_cache(cache_t *cache) {
    MUST(kvt_namespace_close(&cache->space));
    MUST(kvt_store_close(&cache->store, 0, &err));
    MUST(kvt_runtime_close(&cache->runtime, 0, NULL, &err));
}

static uint8_t memory[2 * LAYERS][CELL];

static kvt_session_t *session_of(const cache_t *cache, uint32_t number) {
    uint32_t tokens[CHUNK];
    for (uint32_t i = 0; i < CHUNK; i++) tokens[i] = number * CHUNK + i;
    kvt_session_t *session = NULL;
    MUST(kvt_session_open(cache->space, NULL, &session, &err));
    MUST(kvt_session_append(session, tokens, CHUNK, &err));
    return session;
}

/* Puts or gets the one chunk of a session. */
static void transfer(kvt_session_t *session, int is_put, uint32_t level, int collect) {
    kvt_view_t views[2 * LAYERS];
    memset(views, 0, sizeof views);
    for (int i = 0; i < 2 * LAYERS; i++) {
        views[i].address = memory[i], views[i].tokens = CHUNK, views[i].heads = 1;
        views[i].run_bytes = RUN;
    }
    kvt_transfer_t move = KVT_TRANSFER_INIT;
    move.tokens = CHUNK, move.layers = LAYERS, move.level = level;
    move.k = views, move.v = views + LAYERS, move.stride_bytes = sizeof views[0];
    kvt_op_t *op = NULL;
    if (collect) CALLGRIND_START_INSTRUMENTATION;
    must((is_put ? kvt_session_put : kvt_session_get)(session, &move, NULL, &op, &err), "submit");
    MUST(kvt_op_wait(op, KVT_OP_RELEASED, 0));
    if (collect) CALLGRIND_STOP_INSTRUMENTATION;
    kvt_op_info_t info = KVT_OP_INFO_INIT;
    MUST(kvt_op_info(op, &info));
    must(info.status, "the transfer");
    MUST(kvt_op_free(&op));
}

/* Nothing is under way any more. */
static void rest(void) {
    const struct timespec nap = {0, 300000000};
    nanosleep(&nap, NULL);
}

int main(int argc, char **argv) {
    if (argc != 3) return fprintf(stderr, "usage: trips put|get|evict DIRECTORY\n"), 2;
    const int is_put = strcmp(argv[1], "put") == 0, is_get = strcmp(argv[1], "get") == 0;
    char spec[4096];
    snprintf(spec, sizeof spec, "store(host=%s,disk=disk(path=\"%s\",bytes=64MiB,segment=1MiB))",
             is_put || is_get ? "16MiB" : "256KiB", argv[2]);
    cache_t cache = open_cache(spec);
    for (uint32_t number = 0; number < MANY; number++) {
        kvt_session_t *session = session_of(&cache, number);
        transfer(session, 1, KVT_LEVEL_DURABLE, 0);
        MUST(kvt_session_close(&session));
    }
    rest();
    if (is_get) {
        close_cache(&cache);
        cache = open_cache(spec); /* all of it is on disk alone */
        rest();
    }
    kvt_session_t *session = session_of(&cache, is_get ? 7 : MANY);
    /* With evict, memory is full: trips.py collects what the choice of a victim passes through. */
    transfer(session, !is_get, is_put ? KVT_LEVEL_DURABLE : KVT_LEVEL_RAM, 1);
    MUST(kvt_session_close(&session));
    close_cache(&cache);
    return 0;
}
