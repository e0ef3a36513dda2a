/* Tests of what an engine requests from a store besides complete transfers: demotion, changes of
 * policies and budgets, eviction logs, statistics by tenant, media in sequences, gets of only the
 * needed or picked chunks, and options as fields instead of a spec. */

#include "check.h"

#include <sys/wait.h>

#define LAYERS 5
#define CHUNK 8
#define WINDOW 20
#define K 48
#define V 32
#define STATE 64
#define MAX_TOKENS 64
#define PLANE (MAX_TOKENS * (K + V))
#define POISON 0xA5

static kvt_runtime_t *runtime;
static char folder[] = "/tmp/kvt-store-engine-XXXXXX";
static uint32_t tokens_of_all[MAX_TOKENS];

/* Layers 0 and 1 need all tokens, 2 and 3 the last WINDOW, 4 is a state. */
typedef struct {
    uint8_t memory[LAYERS * PLANE];
    kvt_view_t k[LAYERS], v[LAYERS];
} engine_t;

static void open_engine(engine_t *engine, uint64_t seed) {
    memset(engine, 0, sizeof *engine);
    memset(engine->memory, POISON, sizeof engine->memory);
    for (size_t i = 0; seed != 0 && i < sizeof engine->memory; i++)
        engine->memory[i] = (uint8_t)next_random(&seed);
    for (int layer = 0; layer < LAYERS; layer++) {
        engine->k[layer].address = engine->memory + layer * PLANE;
        engine->k[layer].run_bytes = layer == 4 ? STATE : K;
        engine->k[layer].tokens = layer == 4 ? (MAX_TOKENS + CHUNK - 1) / CHUNK : MAX_TOKENS;
        if (layer == 4) continue;
        engine->v[layer].address = engine->memory + layer * PLANE + MAX_TOKENS * K;
        engine->v[layer].run_bytes = V;
        engine->v[layer].tokens = MAX_TOKENS;
    }
}

/* Whether the tokens first..end of a layer (a state: their chunks) equal those of `from`; with
 * NULL, whether they are untouched. */
static int has(const engine_t *engine, const engine_t *from, int layer, uint32_t first,
               uint32_t end) {
    const size_t start = (size_t)layer * PLANE, run = layer == 4 ? STATE : K;
    if (layer == 4) {
        first /= CHUNK;
        end /= CHUNK;
    }
    for (size_t i = first * run; i < end * run; i++)
        if (engine->memory[start + i] != (from != NULL ? from->memory[start + i] : POISON))
            return 0;
    for (size_t i = first * V; layer != 4 && i < end * V; i++) {
        const size_t at = start + MAX_TOKENS * K + i;
        if (engine->memory[at] != (from != NULL ? from->memory[at] : POISON)) return 0;
    }
    return 1;
}

static int has_all(const engine_t *engine, const engine_t *from, uint32_t tokens) {
    for (int layer = 0; layer < LAYERS; layer++)
        if (!has(engine, from, layer, 0, tokens)) return 0;
    return 1;
}

static kvt_store_t *open_store(const char *spec) {
    kvt_store_opts_t opts = KVT_STORE_OPTS_INIT;
    opts.spec = spec;
    opts.spec_bytes = strlen(spec);
    kvt_store_t *store = NULL;
    kvt_error_t *err = NULL;
    const kvt_status_t status = kvt_store_open(runtime, NULL, &opts, &store, &err);
    if (status != KVT_OK) fprintf(stderr, "%s\n", kvt_error_message(err));
    CHECK_OK(status);
    return store;
}

static kvt_store_t *open_disk(const char *name, const char *more) {
    char spec[256];
    snprintf(spec, sizeof spec,
             "store(disk=disk(path=\"%s/%s\", bytes=16MiB, segment=1MiB, buffered=true)%s%s)",
             folder, name, more, write_option(more));
    return open_store(spec);
}

static void close_store(kvt_store_t **store) {
    CHECK_OK(kvt_store_close(store, hang_guard(), NULL));
    CHECK(*store == NULL);
}

static kvt_namespace_t *open_namespace(const kvt_store_t *store) {
    const uint16_t layers[LAYERS] = {0, 1, 2, 3, 4};
    kvt_group_t groups[3];
    memset(groups, 0, sizeof groups);
    groups[0].k_bytes = groups[1].k_bytes = K;
    groups[0].v_bytes = groups[1].v_bytes = V;
    groups[0].layers = layers;
    groups[1].layers = layers + 2;
    groups[2].layers = layers + 4;
    groups[0].layer_count = groups[1].layer_count = 2;
    groups[2].layer_count = 1;
    groups[1].rule = KVT_RULE_WINDOW;
    groups[1].window_tokens = WINDOW;
    groups[2].rule = KVT_RULE_STATE;
    groups[2].state_bytes = STATE;
    kvt_layout_t layout = KVT_LAYOUT_INIT;
    layout.chunk_tokens = CHUNK;
    layout.groups = groups;
    layout.group_count = 3;
    layout.stride_bytes = sizeof *groups;
    kvt_namespace_t *ns = NULL;
    CHECK_OK(kvt_namespace_open(store, NULL, &layout, 0, &ns, NULL));
    return ns;
}

static kvt_session_t *open_session(const kvt_namespace_t *ns, uint32_t tenant,
                                   const uint32_t *tokens, uint32_t count) {
    kvt_session_opts_t opts = KVT_SESSION_OPTS_INIT;
    opts.tenant = tenant;
    kvt_session_t *session = NULL;
    CHECK_OK(kvt_session_open(ns, &opts, &session, NULL));
    CHECK_OK(kvt_session_append(session, tokens, count, NULL));
    return session;
}

/* A transfer of some layers and tokens; its views begin with token `first`. */
static kvt_transfer_t transfer_of(engine_t *views, const engine_t *engine, uint32_t first,
                          uint32_t tokens, uint32_t first_layer, uint32_t layers) {
    *views = *engine;
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        uint8_t *start = (uint8_t *)engine->memory + layer * PLANE;
        const uint32_t at = layer == 4 ? first / CHUNK : first;
        views->k[layer].address = start + at * views->k[layer].run_bytes;
        if (layer != 4) views->v[layer].address = start + MAX_TOKENS * K + at * V;
    }
    kvt_transfer_t transfer = KVT_TRANSFER_INIT;
    transfer.first_token = first;
    transfer.tokens = tokens;
    transfer.first_layer = first_layer;
    transfer.layers = layers;
    transfer.k = views->k + first_layer;
    transfer.v = views->v + first_layer;
    transfer.stride_bytes = sizeof *views->k;
    return transfer;
}

static void put(const kvt_session_t *session, const engine_t *engine, uint32_t first,
                uint32_t tokens, uint32_t first_layer, uint32_t layers) {
    engine_t views;
    const kvt_transfer_t transfer = transfer_of(&views, engine, first, tokens, first_layer, layers);
    kvt_op_t *op = NULL;
    CHECK_OK(kvt_session_put(session, &transfer, NULL, &op, NULL));
    CHECK_OK(finish_op(&op));
}

static kvt_status_t get(const kvt_session_t *session, engine_t *engine, uint32_t tokens,
                        uint64_t flags, uint64_t *value) {
    engine_t views;
    kvt_transfer_t transfer = transfer_of(&views, engine, 0, tokens, 0, LAYERS);
    transfer.flags = flags;
    kvt_op_t *op = NULL;
    CHECK_OK(kvt_session_get(session, &transfer, NULL, &op, NULL));
    CHECK_OK(kvt_op_wait(op, KVT_OP_RELEASED, hang_guard()));
    *value = info_of(op).value;
    return finish_op(&op);
}

static kvt_store_stats_t stats_of(const kvt_store_t *store) {
    kvt_store_stats_t stats = KVT_STORE_STATS_INIT;
    CHECK_OK(kvt_store_stats(store, &stats));
    CHECK_EQ(stats.struct_size, sizeof stats);
    return stats;
}

static kvt_demote_report_t demote(const kvt_session_t *session, uint64_t first, uint64_t tokens) {
    kvt_demote_report_t report = KVT_DEMOTE_REPORT_INIT;
    CHECK_OK(kvt_session_demote(session, first, tokens, &report, NULL));
    CHECK_EQ(report.struct_size, sizeof report);
    return report;
}

static void wait_for_host_cells(const kvt_store_t *store, uint64_t cells) {
    const uint64_t until = hang_guard();
    while (stats_of(store).host_cells != cells) {
        CHECK(now_ns() < until);
        short_pause();
    }
}

static void demoted_chunks_are_read_from_disk(void) {
    /* An explicit demotion works even if nothing is admitted or written by the store itself. */
    kvt_store_t *store = open_disk("demote", ", host=4MiB, write=never, admission=none");
    kvt_namespace_t *ns = open_namespace(store);
    kvt_session_t *session = open_session(ns, 0, tokens_of_all, 60);
    engine_t engine, back;
    uint64_t value = 0;
    open_engine(&engine, 1);
    put(session, &engine, 0, 60, 0, LAYERS);
    const uint64_t chunks = 8; /* the last one is not full */
    CHECK_EQ(stats_of(store).host_cells, chunks * LAYERS);

    CHECK_OK(kvt_session_pin(session, 8, 8, 9, 0, NULL));
    kvt_demote_report_t report = demote(session, 8, 24);
    CHECK_EQ(report.pending_chunks, 3);
    CHECK_EQ(report.freed_chunks + report.kept_chunks, 0);
    wait_for_host_cells(store, (chunks - 3) * LAYERS);
    CHECK_EQ(stats_of(store).disk_cells, 3 * LAYERS);
    CHECK_EQ(stats_of(store).demoted_chunks, 3);
    CHECK_EQ(stats_of(store).pins, 1);
    report = demote(session, 8, 24);
    CHECK_EQ(report.pending_chunks + report.freed_chunks + report.kept_chunks, 0);
    report = demote(session, 0, 0);
    CHECK_EQ(report.pending_chunks, chunks - 3);
    wait_for_host_cells(store, 0);

    /* The bytes return unchanged. Chunks in both tiers leave host memory without another write. */
    open_engine(&back, 0);
    CHECK_OK(get(session, &back, 60, 0, &value));
    CHECK_EQ(value, 60);
    CHECK(has_all(&back, &engine, 56));
    CHECK_EQ(stats_of(store).host_cells, chunks * LAYERS);
    report = demote(session, 0, 16);
    CHECK_EQ(report.freed_chunks, 2);
    CHECK_EQ(report.pending_chunks, 0);
    CHECK_EQ(stats_of(store).host_cells, (chunks - 2) * LAYERS);
    CHECK_OK(kvt_session_demote(session, 0, 0, NULL, NULL));
    CHECK_EQ(stats_of(store).host_cells, 0);

    kvt_error_t *err = NULL;
    CHECK_IS(kvt_session_demote(session, 3, 0, &report, &err), KVT_E_INVALID);
    CHECK(strstr(kvt_error_message(err), "multiples") != NULL);
    CHECK_IS(kvt_session_demote(session, 0, 99, &report, &err), KVT_E_INVALID);
    CHECK_IS(kvt_session_demote(NULL, 0, 0, &report, &err), KVT_E_HANDLE);
    report.struct_size = 1;
    CHECK_IS(kvt_session_demote(session, 0, 0, &report, &err), KVT_E_INVALID);
    CHECK_OK(kvt_error_free(&err));
    CHECK_OK(kvt_session_close(&session));
    CHECK_OK(kvt_namespace_close(&ns));
    close_store(&store);

    store = open_store("store(host=4MiB)");
    ns = open_namespace(store);
    session = open_session(ns, 0, tokens_of_all, 16);
    CHECK_EQ(demote(session, 0, 0).kept_chunks, 0); /* nothing is stored yet */
    put(session, &engine, 0, 16, 0, LAYERS);
    CHECK_EQ(demote(session, 0, 0).kept_chunks, 2);
    CHECK_EQ(stats_of(store).host_cells, 2 * LAYERS);
    CHECK_OK(kvt_session_close(&session));
    CHECK_OK(kvt_namespace_close(&ns));
    close_store(&store);
    CHECK_IS(kvt_session_demote(session, 0, 0, NULL, NULL), KVT_E_HANDLE);
}

/* KVT_TRANSFER_NEEDED_ONLY loads only the KV that the next token needs. */
static void reuse_loads_windows_and_states_only(void) {
    kvt_store_t *store = open_store("store(host=4MiB)");
    kvt_namespace_t *ns = open_namespace(store);
    kvt_session_t *session = open_session(ns, 0, tokens_of_all, 64);
    engine_t engine, back;
    uint64_t value = 0;
    open_engine(&engine, 2);
    put(session, &engine, 0, 64, 0, 2);
    put(session, &engine, 40, 24, 2, 2); /* includes token 44, the first of the window */
    put(session, &engine, 56, 8, 4, 1);

    kvt_plan_terms_t terms = KVT_PLAN_TERMS_INIT;
    terms.flags = KVT_PLAN_COST;
    terms.beta_ns = 1e9;
    kvt_plan_step_t segments[4];
    uint64_t count = 0;
    CHECK_OK(kvt_session_plan(session, &terms, segments, 4, sizeof *segments, &count, NULL, NULL));
    uint64_t loads = 0;
    for (uint64_t i = 0; i < count; i++) {
        CHECK_EQ(segments[i].kind, KVT_PLAN_LOAD);
        loads += segments[i].tokens;
    }
    CHECK_EQ(loads, 64);

    open_engine(&back, 0);
    CHECK_OK(get(session, &back, 64, KVT_TRANSFER_NEEDED_ONLY, &value));
    CHECK_EQ(value, 64);
    for (int layer = 0; layer < LAYERS; layer++) {
        const uint32_t from = layer < 2 ? 0 : layer < 4 ? 40 : 56;
        CHECK(has(&back, NULL, layer, 0, from));
        CHECK(has(&back, &engine, layer, from, 64));
    }
    CHECK_EQ(stats_of(store).missed_cells, 0);
    CHECK_IS(get(session, &back, 64, 0, &value), KVT_E_NOT_FOUND);
    CHECK_EQ(value, 0);
    /* After 48 tokens the window begins with 28, and the state is that of the sixth chunk. */
    CHECK_IS(get(session, &back, 48, KVT_TRANSFER_NEEDED_ONLY, &value), KVT_E_NOT_FOUND);
    kvt_transfer_t ahead = KVT_TRANSFER_INIT;
    ahead.flags = KVT_TRANSFER_NEEDED_ONLY;
    kvt_op_t *op = NULL, *ops[LAYERS];
    CHECK_OK(kvt_session_prefetch(session, &ahead, NULL, &op, NULL));
    CHECK_OK(finish_op(&op));
    engine_t views;
    kvt_transfer_t transfer = transfer_of(&views, &back, 0, 64, 0, LAYERS);
    transfer.flags = KVT_TRANSFER_NEEDED_ONLY | KVT_TRANSFER_EACH_LAYER;
    CHECK_OK(kvt_session_get(session, &transfer, NULL, ops, NULL));
    for (int layer = 0; layer < LAYERS; layer++) CHECK_OK(finish_op(&ops[layer]));
    kvt_error_t *err = NULL;
    CHECK_IS(kvt_session_put(session, &transfer, NULL, ops, &err), KVT_E_INVALID);
    CHECK(strstr(kvt_error_message(err), "KVT_TRANSFER_NEEDED_ONLY") != NULL);
    CHECK_OK(kvt_error_free(&err));
    CHECK_OK(kvt_session_close(&session));
    CHECK_OK(kvt_namespace_close(&ns));
    close_store(&store);
}

#define PAGE 3 /* a chunk ends within one */
#define PAGES (MAX_TOKENS / PAGE)

/* The place of a token or state in a target. */
static size_t place_of(int paged, size_t at) {
    return paged ? (PAGES - 1 - at / PAGE) * PAGE + at % PAGE : at;
}

/* Lays out the planes of a target in pages, the last page first. */
static void lay_pages(engine_t *engine, void *pages[2 * LAYERS][PAGES]) {
    for (int i = 0; i < 2 * LAYERS; i++) {
        kvt_view_t *view = i < LAYERS ? &engine->k[i] : &engine->v[i - LAYERS];
        for (size_t page = 0; page < PAGES && view->address != NULL; page++)
            pages[i][page] = (uint8_t *)view->address + place_of(1, page * PAGE) * view->run_bytes;
        if (view->address == NULL) continue;
        view->address = NULL;
        view->pages = pages[i];
        view->page_count = PAGES;
        view->page_tokens = PAGE;
        view->tokens = 0; /* as many as the pages hold */
    }
}

static uint32_t length_of(uint32_t chunk, uint32_t tokens) {
    const uint32_t left = tokens - chunk * CHUNK;
    return left < CHUNK ? left : CHUNK;
}

/* Copies a chunk to where a get writes it behind `before` other chunks; returns its bytes. */
static uint64_t copy_chunk(engine_t *to, const engine_t *from, uint32_t layer, uint32_t chunk,
                      uint32_t length, size_t before, int paged) {
    uint8_t *start = to->memory + (size_t)layer * PLANE;
    const uint8_t *source = from->memory + (size_t)layer * PLANE;
    if (layer == 4) {
        memcpy(start + place_of(paged, before) * STATE, source + (size_t)chunk * STATE, STATE);
        return STATE;
    }
    for (uint32_t i = 0; i < length; i++) {
        const size_t at = place_of(paged, before * CHUNK + i), token = (size_t)chunk * CHUNK + i;
        memcpy(start + at * K, source + token * K, K);
        memcpy(start + MAX_TOKENS * K + at * V, source + MAX_TOKENS * K + token * V, V);
    }
    return (uint64_t)length * (K + V);
}

/* Expected result of an op. */
typedef struct {
    uint64_t value, bytes;
    kvt_status_t status;
} outcome_t;

/* Gets chunks of a session of `tokens` tokens. Exactly the stored chunks of each layer (one bit per
 * chunk) must be written, one behind the other. */
static void pick(const kvt_session_t *session, uint32_t tokens, const engine_t *from,
                 const uint8_t *stored, kvt_transfer_t transfer, int paged) {
    static engine_t back, want;
    static void *pages[2 * LAYERS][PAGES];
    outcome_t expected[LAYERS] = {{0, 0, KVT_OK}};
    open_engine(&back, 0);
    open_engine(&want, 0);
    if (paged) lay_pages(&back, pages);
    const uint32_t first = (uint32_t)(transfer.first_token / CHUNK);
    const int each = (transfer.flags & KVT_TRANSFER_EACH_LAYER) != 0;
    for (uint32_t i = 0; i < transfer.layers; i++) {
        const uint32_t layer = transfer.first_layer + i;
        outcome_t *one = &expected[each ? i : 0];
        uint64_t whole = 0, missed = 0;
        for (uint64_t at = 0; at < transfer.chunk_count; at++) {
            const uint32_t chunk = first + transfer.chunks[at], length = length_of(chunk, tokens);
            if (stored[layer] >> chunk & 1)
                one->bytes += copy_chunk(&want, from, layer, chunk, length, at, paged);
            else missed++;
            if (missed == 0) whole += length;
        }
        if (missed > 0) one->status = KVT_E_NOT_FOUND;
        if (each || i == 0 || whole < one->value) one->value = whole;
    }
    transfer.k = back.k + transfer.first_layer;
    transfer.v = back.v + transfer.first_layer;
    transfer.stride_bytes = sizeof *back.k;
    kvt_op_t *ops[LAYERS] = {NULL};
    CHECK_OK(kvt_session_get(session, &transfer, NULL, ops, NULL));
    for (uint32_t i = 0; i < (each ? transfer.layers : 1); i++) {
        CHECK_OK(kvt_op_wait(ops[i], KVT_OP_RELEASED, hang_guard()));
        CHECK_EQ(info_of(ops[i]).value, expected[i].value);
        CHECK_EQ(info_of(ops[i]).bytes_done, expected[i].bytes);
        CHECK_IS(finish_op(&ops[i]), expected[i].status);
    }
    CHECK(memcmp(back.memory, want.memory, sizeof back.memory) == 0);
}

static kvt_transfer_t some(const uint32_t *chunks, uint64_t count) {
    kvt_transfer_t transfer = KVT_TRANSFER_INIT;
    transfer.layers = LAYERS;
    transfer.chunks = chunks;
    transfer.chunk_count = count;
    return transfer;
}

/* A get and a prefetch that must be refused; no byte is written. */
static void refuse_picks(const kvt_session_t *session, const kvt_transfer_t *what,
                         kvt_status_t status, const char *word) {
    engine_t back;
    open_engine(&back, 0);
    kvt_transfer_t transfer = *what;
    kvt_error_t *err = NULL;
    kvt_op_t *ops[LAYERS] = {NULL};
    for (int turn = 0; turn < 2; turn++) {
        CHECK_IS((turn == 0 ? kvt_session_prefetch : kvt_session_get)(session, &transfer, NULL, ops,
                                                                      &err),
                 status);
        if (strstr(kvt_error_message(err), word) == NULL) {
            fprintf(stderr, "no %s: %s\n", word, kvt_error_message(err));
            exit(1);
        }
        CHECK(ops[0] == NULL);
        transfer.k = back.k + transfer.first_layer;
        transfer.v = back.v + transfer.first_layer;
        transfer.stride_bytes = sizeof *back.k;
    }
    CHECK(has_all(&back, NULL, MAX_TOKENS));
    CHECK_OK(kvt_error_free(&err));
}

/* Invalid lists of chunks. */
static void invalid_chunk_lists_are_refused(const kvt_store_t *store, const kvt_session_t *session,
                            const engine_t *engine) {
    const uint32_t descending[] = {2, 1}, twice[] = {1, 1};
    const uint32_t behind[] = {0, 8}, huge[] = {UINT32_MAX};
    const uint32_t good[] = {0, 1, 2};
    const uint64_t begun = stats_of(store).host_hit_cells + stats_of(store).missed_cells;
    kvt_transfer_t transfer = some(descending, 2);
    refuse_picks(session, &transfer, KVT_E_INVALID, "ascending");
    transfer.chunks = twice;
    refuse_picks(session, &transfer, KVT_E_INVALID, "each once");
    transfer.chunks = behind;
    refuse_picks(session, &transfer, KVT_E_INVALID, "below the 8");
    transfer = some(huge, 1);
    refuse_picks(session, &transfer, KVT_E_INVALID, "below the 8");
    transfer = some(good, 3); /* of a part of the session, by the session's chunks */
    transfer.first_token = 16;
    transfer.tokens = 16;
    refuse_picks(session, &transfer, KVT_E_INVALID, "below the 2");
    transfer = some(good, 0);
    refuse_picks(session, &transfer, KVT_E_INVALID, "chunk_count is 0");
    transfer = some(NULL, 3);
    refuse_picks(session, &transfer, KVT_E_INVALID, "null");
    transfer = some((const uint32_t *)((const char *)good + 1), 1);
    refuse_picks(session, &transfer, KVT_E_INVALID, "aligned");
    transfer = some(good, UINT64_MAX);
    refuse_picks(session, &transfer, KVT_E_LIMIT, "at most");
    transfer = some(good, 3);
    transfer.flags = KVT_TRANSFER_NEEDED_ONLY;
    refuse_picks(session, &transfer, KVT_E_INVALID, "KVT_TRANSFER_NEEDED_ONLY");
    CHECK_EQ(stats_of(store).host_hit_cells + stats_of(store).missed_cells, begun);

    /* A put ignores the list, even an invalid one. */
    engine_t views;
    kvt_error_t *err = NULL;
    kvt_op_t *op = NULL;
    const uint64_t stored = stats_of(store).stored_cells;
    for (uint64_t count = 0; count < 6; count++) {
        transfer = transfer_of(&views, engine, 0, 60, 0, LAYERS);
        transfer.chunks = count < 4 ? good : NULL;
        transfer.chunk_count = count;
        CHECK_IS(kvt_session_put(session, &transfer, NULL, &op, &err), KVT_E_INVALID);
        CHECK(strstr(kvt_error_message(err), count < 4 ? "chunk" : "null") != NULL && op == NULL);
    }
    CHECK_EQ(stats_of(store).stored_cells, stored);

    /* A view needs as many tokens as were picked, and a state view one per chunk. */
    const uint32_t last[] = {3, 7};
    static engine_t back;
    for (uint32_t layer = 0; layer < LAYERS; layer += 2) {
        open_engine(&back, 0);
        const uint32_t room = layer == 4 ? 2 : 12;
        transfer = some(last, 2);
        transfer.first_layer = layer;
        transfer.layers = 1;
        transfer.k = back.k + layer;
        transfer.v = back.v + layer;
        transfer.stride_bytes = sizeof *back.k;
        back.k[layer].tokens = room - 1;
        CHECK_IS(kvt_session_get(session, &transfer, NULL, &op, &err), KVT_E_INVALID);
        CHECK(has(&back, NULL, (int)layer, 0, MAX_TOKENS) && op == NULL);
        back.k[layer].tokens = room;
        if (layer != 4) back.v[layer].tokens = room;
        CHECK_OK(kvt_session_get(session, &transfer, NULL, &op, &err));
        CHECK_OK(finish_op(&op));
    }
    CHECK_OK(kvt_error_free(&err));
}

/* A get of some chunks, as a sparse policy selects them, writes no others. */
static void only_picked_chunks_are_written(void) {
    kvt_store_t *store = open_disk("pick", ", host=4MiB");
    kvt_namespace_t *ns = open_namespace(store);
    kvt_session_t *session = open_session(ns, 0, tokens_of_all, 60);
    const uint8_t all[LAYERS] = {255, 255, 255, 255, 255};
    const uint32_t middle[] = {2, 3, 5}, ends[] = {0, 7}, last[] = {7}, late[] = {4, 6, 7};
    const uint32_t every[] = {0, 1, 2, 3, 4, 5, 6, 7}, two[] = {0, 2};
    engine_t engine;
    open_engine(&engine, 9);
    put(session, &engine, 0, 60, 0, LAYERS); /* the last chunk has 4 tokens */
    for (int paged = 0; paged < 2; paged++) {
        pick(session, 60, &engine, all, some(middle, 3), paged);
        pick(session, 60, &engine, all, some(ends, 2), paged);
        pick(session, 60, &engine, all, some(ends, 1), paged);
        pick(session, 60, &engine, all, some(last, 1), paged);
        pick(session, 60, &engine, all, some(late, 3), paged);
        pick(session, 60, &engine, all, some(every, 8), paged);
        kvt_transfer_t transfer = some(two, 2); /* chunks 3 and 5 of a window and the state */
        transfer.flags = KVT_TRANSFER_EACH_LAYER;
        transfer.first_token = 24;
        transfer.tokens = 24;
        transfer.first_layer = 3;
        transfer.layers = 2;
        pick(session, 60, &engine, all, transfer, paged);
    }
    CHECK_EQ(stats_of(store).missed_cells, 0);
    invalid_chunk_lists_are_refused(store, session, &engine);

    /* The list is copied, so it may change while the transfer waits. A shorter struct without the
     * list transfers all chunks. */
    engine_t back;
    kvt_ready_event_t *event = NULL;
    kvt_op_t *op = NULL;
    uint32_t list[] = {1, 7};
    open_engine(&back, 0);
    kvt_transfer_t transfer = some(list, 2);
    CHECK_OK(kvt_ready_event_open(0, &event, NULL));
    transfer.ready = event;
    transfer.k = back.k;
    transfer.v = back.v;
    transfer.stride_bytes = sizeof *back.k;
    CHECK_OK(kvt_session_get(session, &transfer, NULL, &op, NULL));
    list[0] = 99;
    list[1] = 0;
    CHECK_OK(kvt_ready_event_signal(event));
    CHECK_OK(finish_op(&op));
    CHECK_OK(kvt_ready_event_close(&event));
    for (uint32_t layer = 0; layer < 4; layer++) {
        const uint8_t *start = back.memory + layer * PLANE, *from = engine.memory + layer * PLANE;
        CHECK(memcmp(start, from + 8 * K, 8 * K) == 0);
        CHECK(memcmp(start + 8 * K, from + 56 * K, 4 * K) == 0);
        CHECK(has(&back, NULL, (int)layer, 12, MAX_TOKENS));
    }
    CHECK_EQ(transfer.struct_size, 104);
    transfer.struct_size = 80;
    transfer.ready = NULL;
    CHECK_OK(kvt_session_get(session, &transfer, NULL, &op, NULL));
    CHECK_OK(finish_op(&op));
    CHECK(has_all(&back, &engine, 56));

    /* From disk only these are read, in all layers: windows do not shorten the list. */
    demote(session, 0, 0);
    wait_for_host_cells(store, 0);
    transfer = some(late, 3);
    CHECK_OK(kvt_session_prefetch(session, &transfer, NULL, &op, NULL));
    CHECK_OK(kvt_op_wait(op, KVT_OP_RELEASED, hang_guard()));
    CHECK_EQ(info_of(op).value, 20);
    CHECK_OK(finish_op(&op));
    CHECK_EQ(stats_of(store).host_cells, 3 * LAYERS);
    pick(session, 60, &engine, all, some(late, 3), 0);
    CHECK_EQ(stats_of(store).host_cells, 3 * LAYERS);
    pick(session, 60, &engine, all, some(middle, 3), 1);
    CHECK_EQ(stats_of(store).host_cells, 6 * LAYERS);
    CHECK_OK(kvt_session_close(&session));
    CHECK_OK(kvt_namespace_close(&ns));
    close_store(&store);
}

/* The same with missing chunks, for random layers, tokens and lists. */
static void missing_picked_chunks_are_skipped(void) {
    uint64_t seed = 4242;
    kvt_store_t *store = open_disk("gaps", ", host=4MiB");
    kvt_namespace_t *ns = open_namespace(store);
    engine_t engine;
    open_engine(&engine, 10);
    /* Nothing is stored behind the third chunk, so the other chunks are unknown. */
    uint8_t stored[LAYERS] = {7, 7, 7, 7, 7};
    const uint32_t reusable[] = {1, 2, 5}, tail[] = {2, 7}, none[] = {5, 6};
    kvt_session_t *session = open_session(ns, 0, tokens_of_all, 60);
    put(session, &engine, 0, 24, 0, LAYERS);
    pick(session, 60, &engine, stored, some(reusable, 3), 0);
    pick(session, 60, &engine, stored, some(tail, 2), 1);
    CHECK_EQ(stats_of(store).missed_cells, 2 * LAYERS);
    pick(session, 60, &engine, stored, some(none, 2), 0);
    kvt_op_t *op = NULL;
    kvt_transfer_t transfer = some(reusable, 3);
    CHECK_OK(kvt_session_prefetch(session, &transfer, NULL, &op, NULL));
    CHECK_OK(kvt_op_wait(op, KVT_OP_RELEASED, hang_guard()));
    CHECK_EQ(info_of(op).value, 16);
    CHECK_IS(finish_op(&op), KVT_E_NOT_FOUND);
    CHECK_OK(kvt_session_close(&session));

    for (uint32_t round = 0; round < 60; round++) {
        uint32_t tokens[MAX_TOKENS];
        for (uint32_t i = 0; i < MAX_TOKENS; i++) tokens[i] = (round + 7) * 1000 + i;
        const uint32_t count = 1 + (uint32_t)(next_random(&seed) % (PAGES * PAGE));
        const uint32_t chunks = (count + CHUNK - 1) / CHUNK;
        memset(stored, 0, sizeof stored);
        session = open_session(ns, round, tokens, count);
        for (uint32_t turn = 0; turn < 8; turn++) {
            uint32_t list[MAX_TOKENS / CHUNK], picked = 0;
            const uint32_t first = (uint32_t)(next_random(&seed) % chunks);
            const uint32_t end = first + 1 + (uint32_t)(next_random(&seed) % (chunks - first));
            const uint32_t layer = (uint32_t)(next_random(&seed) % LAYERS);
            const uint32_t layers = 1 + (uint32_t)(next_random(&seed) % (LAYERS - layer));
            const uint32_t reach = end == chunks ? count : end * CHUNK;
            if (turn % 2 == 0) {
                put(session, &engine, first * CHUNK, reach - first * CHUNK, layer, layers);
                for (uint32_t i = layer; i < layer + layers; i++)
                    stored[i] |= (uint8_t)((1u << end) - (1u << first));
            }
            if (turn % 4 == 1) demote(session, 0, 0); /* read from host memory or disk */
            while (picked == 0)
                for (uint32_t i = 0; i < end - first; i++)
                    if (next_random(&seed) % 2 == 0) list[picked++] = i;
            transfer = some(list, picked);
            transfer.first_token = first * CHUNK;
            transfer.tokens = reach - first * CHUNK;
            transfer.first_layer = layer;
            transfer.layers = layers;
            if (next_random(&seed) % 2 == 0) transfer.flags = KVT_TRANSFER_EACH_LAYER;
            pick(session, count, &engine, stored, transfer, next_random(&seed) % 2 == 0);
        }
        CHECK_OK(kvt_session_close(&session));
    }
    CHECK_EQ(stats_of(store).corrupt_cells + stats_of(store).failed_reads, 0);
    CHECK_OK(kvt_namespace_close(&ns));
    close_store(&store);
}

static void expect_metric(const kvt_store_t *store, const char *word, int is_there) {
    static char text[1 << 18];
    uint64_t bytes = 0;
    CHECK_OK(kvt_store_metrics(store, text, sizeof text - 1, &bytes));
    text[bytes] = 0;
    if ((strstr(text, word) != NULL) != is_there) {
        fprintf(stderr, "%s in:\n%s\n", word, text);
        exit(1);
    }
}

/* Policies and budgets change; the eviction log shows the victims. */
static void policies_and_budgets_can_change(void) {
    kvt_store_t *store = open_disk("change", ", host=8MiB, policy=lru, disk_policy=lru");
    kvt_namespace_t *ns = open_namespace(store);
    const char policy[] = "slru(segments=3)";
    expect_metric(store, "tier=\"host\",policy=\"lru\"", 1);
    CHECK_OK(kvt_store_set_policy(store, KVT_TIER_HOST, policy, strlen(policy), NULL));
    expect_metric(store, "tier=\"host\",policy=\"slru\"", 1);
    expect_metric(store, "tier=\"host\",policy=\"lru\"", 0);
    CHECK_OK(kvt_store_set_policy(store, KVT_TIER_DISK, "arc", 3, NULL));
    expect_metric(store, "tier=\"disk\",policy=\"arc\"", 1);
    kvt_error_t *err = NULL;
    CHECK_IS(kvt_store_set_policy(store, KVT_TIER_HOST, "lrv", 3, &err), KVT_E_SPEC);
    CHECK(strstr(kvt_error_message(err), "'lru'") != NULL);
    CHECK_IS(kvt_store_set_policy(store, KVT_TIER_HOST, NULL, 0, &err), KVT_E_SPEC);
    CHECK_IS(kvt_store_set_policy(store, KVT_TIER_REMOTE, "lru", 3, &err), KVT_E_UNSUPPORTED);
    CHECK_IS(kvt_store_set_policy(store, 99, "lru", 3, &err), KVT_E_INVALID);
    CHECK_IS(kvt_store_set_policy(NULL, KVT_TIER_HOST, "lru", 3, &err), KVT_E_HANDLE);
    expect_metric(store, "tier=\"host\",policy=\"slru\"", 1);

    CHECK_OK(kvt_store_set_limit(store, KVT_TIER_DISK, 24 << 20, NULL));
    CHECK_EQ(stats_of(store).disk_limit_bytes, 24 << 20);
    CHECK_OK(kvt_store_set_limit(store, KVT_TIER_HOST, 512 << 10, NULL));
    CHECK_EQ(stats_of(store).host_limit_bytes, 512 << 10);
    CHECK_IS(kvt_store_set_limit(store, KVT_TIER_HOST, 1000, &err), KVT_E_INVALID);
    CHECK_IS(kvt_store_set_limit(store, KVT_TIER_DEVICE, 1 << 20, &err), KVT_E_UNSUPPORTED);
    CHECK_IS(kvt_store_set_limit(store, 99, 1 << 20, &err), KVT_E_INVALID);
    CHECK_IS(kvt_store_set_limit(NULL, KVT_TIER_HOST, 1 << 20, &err), KVT_E_HANDLE);
    CHECK_EQ(stats_of(store).host_limit_bytes, 512 << 10);

    kvt_policy_log_entry_t entries[64];
    uint64_t count = 9;
    CHECK_OK(kvt_store_evictions(store, KVT_TIER_HOST, entries, 64, sizeof *entries, &count));
    CHECK_EQ(count, 0);
    engine_t engine;
    open_engine(&engine, 3);
    for (uint32_t i = 0; i < 60; i++) {
        uint32_t tokens[MAX_TOKENS];
        for (uint32_t t = 0; t < MAX_TOKENS; t++) tokens[t] = i * 1000 + t;
        kvt_session_t *session = open_session(ns, i % 2 == 0 ? 3 : 7, tokens, 64);
        put(session, &engine, 0, 64, 0, LAYERS);
        CHECK_OK(kvt_session_close(&session));
    }
    kvt_store_stats_t stats = stats_of(store);
    CHECK(stats.host_used_bytes <= 512 << 10);
    CHECK(stats.admitted_chunks > 0 && stats.admitted_bytes > 0);
    CHECK_EQ(stats.rejected_never + stats.rejected_wear, 0);
    CHECK_OK(kvt_store_evictions(store, KVT_TIER_HOST, entries, 64, sizeof *entries, &count));
    CHECK_EQ(count, 64);
    for (uint64_t i = 0; i < count; i++) {
        CHECK(i == 0 || entries[i].number == entries[i - 1].number + 1);
        CHECK(entries[i].at_ns > 0 && entries[i].id != 0 && entries[i].units > 0);
    }
    const uint64_t last = entries[63].number;
    CHECK_OK(kvt_store_evictions(store, KVT_TIER_HOST, entries, 2, sizeof *entries, &count));
    CHECK_EQ(count, 2);
    CHECK(entries[1].number >= last); /* the newest entries */
    CHECK_OK(kvt_store_evictions(store, KVT_TIER_DISK, NULL, 0, 0, &count));
    CHECK_EQ(count, 0);
    CHECK_IS(kvt_store_evictions(store, KVT_TIER_HOST, entries, 2, sizeof *entries, NULL),
             KVT_E_INVALID);
    CHECK_IS(kvt_store_evictions(store, KVT_TIER_HOST, NULL, 2, sizeof *entries, &count),
             KVT_E_INVALID);
    CHECK_IS(kvt_store_evictions(store, KVT_TIER_HOST, entries, 2, 7, &count), KVT_E_INVALID);
    CHECK_IS(kvt_store_evictions(store, KVT_TIER_REMOTE, entries, 2, sizeof *entries, &count),
             KVT_E_UNSUPPORTED);
    CHECK_IS(kvt_store_evictions(store, 99, entries, 2, sizeof *entries, &count), KVT_E_INVALID);
    CHECK_IS(kvt_store_evictions(NULL, KVT_TIER_HOST, entries, 2, sizeof *entries, &count),
             KVT_E_HANDLE);
    CHECK_OK(kvt_error_free(&err));
    CHECK_OK(kvt_namespace_close(&ns));
    close_store(&store);

    store = open_store("store(host=1MiB)");
    CHECK_IS(kvt_store_set_policy(store, KVT_TIER_DISK, "lru", 3, NULL), KVT_E_NOT_FOUND);
    CHECK_IS(kvt_store_set_limit(store, KVT_TIER_DISK, 1 << 30, NULL), KVT_E_NOT_FOUND);
    CHECK_IS(kvt_store_evictions(store, KVT_TIER_DISK, entries, 2, sizeof *entries, &count),
             KVT_E_NOT_FOUND);
    CHECK_EQ(stats_of(store).disk_engine, KVT_IO_NONE);
    close_store(&store);
    CHECK_IS(kvt_store_set_policy(store, KVT_TIER_HOST, "lru", 3, NULL), KVT_E_HANDLE);
}

/* Statistics say why nothing was written to disk, and which I/O path is used. */
static void statistics_say_why_nothing_is_written(void) {
    kvt_store_t *store = open_disk("refuse", ", host=256KiB, admission=none");
    kvt_namespace_t *ns = open_namespace(store);
    engine_t engine;
    open_engine(&engine, 4);
    for (uint32_t i = 0; i < 40; i++) {
        uint32_t tokens[MAX_TOKENS];
        for (uint32_t t = 0; t < MAX_TOKENS; t++) tokens[t] = i * 1000 + t;
        kvt_session_t *session = open_session(ns, 1, tokens, 64);
        put(session, &engine, 0, 64, 0, LAYERS);
        CHECK_OK(kvt_session_close(&session));
    }
    const kvt_store_stats_t stats = stats_of(store);
    CHECK(stats.rejected_never > 0);
    CHECK_EQ(stats.rejected_hits + stats.rejected_priority, 0);
    CHECK_EQ(stats.rejected_size + stats.rejected_wear, 0);
    CHECK(stats.disk_engine == KVT_IO_URING || stats.disk_engine == KVT_IO_THREADS);
    CHECK_EQ(stats.disk_direct, 0);
    expect_metric(store, "kvtier_disk_engine_info{engine=\"", 1);
    expect_metric(store, "kvtier_rejected_never_total", 1);
    CHECK_OK(kvt_namespace_close(&ns));
    close_store(&store);
    char spec[256];
    snprintf(spec, sizeof spec,
             "store(disk=disk(path=\"%s/plain\", bytes=16MiB, segment=1MiB, uring=false))", folder);
    store = open_store(spec);
    CHECK_EQ(stats_of(store).disk_engine, KVT_IO_THREADS);
    expect_metric(store, "engine=\"threads, ", 1);
    close_store(&store);
}

static void statistics_count_by_tenant(void) {
    enum { TENANTS = 1030, MOST = 1024 };
    kvt_store_t *store = open_store("store(host=64MiB)");
    kvt_namespace_t *ns = open_namespace(store);
    engine_t engine, back;
    uint64_t value = 0, count = 9;
    open_engine(&engine, 5);
    open_engine(&back, 0);
    static kvt_tenant_t rows[TENANTS];
    CHECK_OK(kvt_store_tenants(store, rows, TENANTS, sizeof *rows, &count));
    CHECK_EQ(count, 0);
    const uint64_t bytes = 8 * 4 * (K + V) + STATE; /* one chunk */
    for (uint32_t i = 0; i < TENANTS; i++) {
        const uint32_t tokens[CHUNK] = {i, 1, 2, 3, 4, 5, 6, 7};
        kvt_session_t *session = open_session(ns, 2 * i, tokens, CHUNK);
        if (i == 7) CHECK_IS(get(session, &back, 8, 0, &value), KVT_E_NOT_FOUND);
        put(session, &engine, 0, CHUNK, 0, LAYERS);
        if (i == 5) CHECK_OK(get(session, &back, 8, 0, &value));
        CHECK_OK(kvt_session_close(&session));
        if (i == 0) {
            CHECK_OK(kvt_store_tenants(store, rows, 1, sizeof *rows, &count));
            CHECK_EQ(count, 1);
            CHECK_EQ(rows[0].is_rest, 0);
        }
    }
    CHECK_OK(kvt_store_tenants(store, NULL, 0, 0, &count));
    CHECK_EQ(count, MOST + 1);
    CHECK_IS(kvt_store_tenants(store, rows, MOST, sizeof *rows, &count), KVT_E_TOO_SMALL);
    CHECK_OK(kvt_store_tenants(store, rows, TENANTS, sizeof *rows, &count));
    CHECK_EQ(count, MOST + 1);
    for (uint32_t i = 0; i < MOST; i++) {
        CHECK_EQ(rows[i].tenant, 2 * i);
        CHECK_EQ(rows[i].put_bytes, bytes);
        CHECK_EQ(rows[i].got_bytes, i == 5 ? bytes : 0);
        CHECK_EQ(rows[i].hit_cells, i == 5 ? LAYERS : 0);
        CHECK_EQ(rows[i].missed_cells, i == 7 ? LAYERS : 0);
        CHECK_EQ(rows[i].is_rest, 0);
    }
    CHECK_EQ(rows[MOST].is_rest, 1);
    CHECK_EQ(rows[MOST].put_bytes, (TENANTS - MOST) * bytes);
    /* Complete transfers are timed: all puts and one get; the other get missed. */
    kvt_latency_t times[16];
    CHECK_OK(kvt_store_latencies(store, NULL, 0, 0, &count));
    CHECK_EQ(count, KVT_LATENCY_LOOKUP_BATCH);
    CHECK_IS(kvt_store_latencies(store, times, 3, sizeof *times, &count), KVT_E_TOO_SMALL);
    CHECK_OK(kvt_store_latencies(store, times, 16, sizeof *times, &count));
    for (uint32_t i = 0; i < count; i++) CHECK_EQ(times[i].kind, i + 1);
    CHECK_EQ(times[KVT_LATENCY_PUT_RAM - 1].count, TENANTS);
    CHECK_EQ(times[KVT_LATENCY_GET_HOST - 1].count, 1);
    CHECK_EQ(times[KVT_LATENCY_GET_DISK - 1].count, 0);
    const kvt_latency_t *puts = &times[KVT_LATENCY_PUT_RAM - 1];
    CHECK_EQ(puts->mean_ns > 0 && puts->max_ns >= puts->mean_ns, 1);
    CHECK_EQ(puts->p50_ns <= puts->p99_ns, 1);
    CHECK_IS(kvt_store_latencies(store, times, 1, 9, &count), KVT_E_INVALID);
    CHECK_IS(kvt_store_latencies(NULL, times, 16, sizeof *times, &count), KVT_E_HANDLE);
    CHECK_IS(kvt_store_tenants(store, NULL, 1, sizeof *rows, &count), KVT_E_INVALID);
    CHECK_IS(kvt_store_tenants(store, rows, 1, 9, &count), KVT_E_INVALID);
    CHECK_IS(kvt_store_tenants(NULL, rows, 1, sizeof *rows, &count), KVT_E_HANDLE);
    CHECK_OK(kvt_namespace_close(&ns));
    close_store(&store);
}

static kvt_status_t open_with(const kvt_store_opts_t *opts, const char *word) {
    kvt_store_t *store = NULL;
    kvt_error_t *err = NULL;
    const kvt_status_t status = kvt_store_open(runtime, NULL, opts, &store, &err);
    CHECK(status != KVT_OK && store == NULL);
    if (strstr(kvt_error_message(err), word) == NULL) {
        fprintf(stderr, "no %s: %s\n", word, kvt_error_message(err));
        exit(1);
    }
    CHECK_OK(kvt_error_free(&err));
    return status;
}

/* Option fields replace a spec, and override one. */
static void fields_override_the_spec(void) {
    char path[64];
    snprintf(path, sizeof path, "%s/a \"b\"", folder);
    kvt_store_opts_t opts = KVT_STORE_OPTS_INIT;
    opts.host_bytes = (1 << 20) + 4096;
    opts.disk_bytes = UINT64_C(208) << 20; /* three segments of the usual size */
    opts.disk_path = path;
    opts.disk_path_bytes = strlen(path);
    opts.policy = "slru(segments=3)";
    opts.policy_bytes = strlen(opts.policy);
    opts.disk_policy = "arc";
    opts.disk_policy_bytes = 3;
    opts.write = KVT_WRITE_NEVER;
    const char spec[] = "store(host=7MiB, policy=lru, write=through, sessions=3)";
    for (int turn = 0; turn < 2; turn++) {
        if (turn == 1) {
            opts.spec = spec;
            opts.spec_bytes = strlen(spec);
        }
        kvt_store_t *store = NULL;
        CHECK_OK(kvt_store_open(runtime, NULL, &opts, &store, NULL));
        CHECK_EQ(stats_of(store).host_limit_bytes, opts.host_bytes);
        CHECK_EQ(stats_of(store).disk_limit_bytes, opts.disk_bytes);
        expect_metric(store, "tier=\"host\",policy=\"slru\"", 1);
        expect_metric(store, "tier=\"disk\",policy=\"arc\"", 1);
        kvt_namespace_t *ns = open_namespace(store);
        kvt_session_t *session = open_session(ns, 0, tokens_of_all, 64);
        engine_t engine;
        open_engine(&engine, 6);
        put(session, &engine, 0, 64, 0, LAYERS);
        CHECK_OK(kvt_session_close(&session));
        CHECK_OK(kvt_namespace_close(&ns));
        close_store(&store);
        CHECK_OK(kvt_store_open(runtime, NULL, &opts, &store, NULL));
        CHECK_EQ(stats_of(store).recovered_cells, 0); /* write=never */
        close_store(&store);
    }
    CHECK(access(path, F_OK) == 0);
    const kvt_store_opts_t good = opts;
#define WRONG(change, status, word)                                                           \
    do {                                                                                      \
        change;                                                                               \
        CHECK_IS(open_with(&opts, word), status);                                             \
        opts = good;                                                                          \
    } while (0)
    WRONG(opts.write = 5, KVT_E_INVALID, "write is 5");
    WRONG(opts.reserved = 1, KVT_E_INVALID, "reserved");
    WRONG(opts.policy_bytes--, KVT_E_SPEC, "policy");
    WRONG(opts.policy = "lrv"; opts.policy_bytes = 3, KVT_E_SPEC, "'lru'");
    WRONG(opts.disk_policy = NULL, KVT_E_INVALID, "null");
    WRONG(opts.disk_path_bytes = 0, KVT_E_INVALID, "disk_path");
    WRONG(opts.disk_path = NULL; opts.disk_path_bytes = 0, KVT_E_SPEC, "path=");
    WRONG(opts.disk_bytes = 0, KVT_E_SPEC, "bytes=");
    WRONG(opts.host_bytes = UINT64_MAX, KVT_E_SPEC, "'host'");
    WRONG(opts.spec = "store(hots=1)"; opts.spec_bytes = 13, KVT_E_SPEC, "'host'");
    /* The struct of an older program ends before these fields. */
    opts.struct_size = 32;
    opts.spec = "store(host=2MiB)";
    opts.spec_bytes = strlen(opts.spec);
    kvt_store_t *store = NULL;
    CHECK_OK(kvt_store_open(runtime, NULL, &opts, &store, NULL));
    CHECK_EQ(stats_of(store).host_limit_bytes, 2 << 20);
    CHECK_EQ(stats_of(store).disk_limit_bytes, 0);
    close_store(&store);
}

static kvt_media_t image(uint64_t token, uint8_t fill) {
    kvt_media_t media;
    media.token = token;
    memset(media.digest, fill, sizeof media.digest);
    return media;
}

static kvt_sequence_t sequence_of(const uint32_t *tokens, uint64_t count,
                                  const kvt_media_t *media, uint64_t media_count) {
    kvt_sequence_t sequence = KVT_SEQUENCE_INIT;
    sequence.tokens = tokens;
    sequence.token_count = count;
    sequence.media = media;
    sequence.media_count = media_count;
    sequence.media_stride_bytes = sizeof *media;
    return sequence;
}

/* Reusable tokens of the same 64 tokens with these media. */
static uint64_t reusable(const kvt_namespace_t *ns, const kvt_media_t *media, uint64_t count) {
    const kvt_sequence_t sequence = sequence_of(tokens_of_all, 64, media, count);
    kvt_lookup_t sum = KVT_LOOKUP_INIT;
    CHECK_OK(kvt_namespace_lookup_media(ns, &sequence, NULL, 0, 0, NULL, &sum, NULL));
    CHECK_EQ(sum.tokens, 64);
    return sum.reusable_tokens;
}

static kvt_session_t *open_media(const kvt_namespace_t *ns, const kvt_media_t *media,
                                 uint64_t count) {
    kvt_session_t *session = NULL;
    CHECK_OK(kvt_session_open(ns, NULL, &session, NULL));
    const kvt_sequence_t sequence = sequence_of(tokens_of_all, 64, media, count);
    CHECK_OK(kvt_session_append_media(session, &sequence, NULL));
    return session;
}

static void media_distinguish_sequences(void) {
    kvt_store_t *store = open_store("store(host=8MiB)");
    kvt_namespace_t *ns = open_namespace(store);
    const kvt_media_t cat[] = {image(20, 1)}, dog[] = {image(20, 2)}, late[] = {image(40, 1)};
    engine_t first, second, back;
    uint64_t value = 0;
    open_engine(&first, 7);
    open_engine(&second, 8);
    open_engine(&back, 0);
    kvt_session_t *one = open_media(ns, cat, 1), *two = open_media(ns, dog, 1);
    put(one, &first, 0, 64, 0, LAYERS);
    CHECK_EQ(reusable(ns, cat, 1), 64);
    CHECK_IS(get(two, &back, 64, 0, &value), KVT_E_NOT_FOUND);
    CHECK_EQ(value, 16); /* the chunks before the image */
    put(two, &second, 0, 64, 0, LAYERS);
    CHECK_OK(get(two, &back, 64, 0, &value));
    CHECK(has(&back, &second, 0, 16, 64) && has(&back, &first, 0, 0, 16));
    CHECK_OK(get(one, &back, 64, 0, &value));
    CHECK(has_all(&back, &first, 64));
    /* Sequences that match only before the first image: one without an image, one with a later
     * image. With a state and a window the rest is reusable completely or not at all. */
    CHECK_EQ(reusable(ns, NULL, 0), 16);
    CHECK_EQ(reusable(ns, late, 1), 16);
    CHECK_EQ(reusable(ns, dog, 1), 64);

    /* Appended in pieces, with positions relative to each. The image begins in one piece, and its
     * chunk ends in another. */
    kvt_session_t *pieces = NULL;
    CHECK_OK(kvt_session_open(ns, NULL, &pieces, NULL));
    CHECK_OK(kvt_session_append(pieces, tokens_of_all, 19, NULL));
    const kvt_media_t near[] = {image(1, 1)};
    kvt_sequence_t part = sequence_of(tokens_of_all + 19, 3, near, 1);
    CHECK_OK(kvt_session_append_media(pieces, &part, NULL));
    CHECK_OK(kvt_session_append(pieces, tokens_of_all + 22, 42, NULL));
    CHECK_OK(get(pieces, &back, 64, 0, &value));
    CHECK_EQ(value, 64);
    CHECK(has_all(&back, &first, 64));

    /* A fork inherits media. After truncation before the image it has none, behind it still has. */
    kvt_session_t *fork = NULL;
    CHECK_OK(kvt_session_fork(pieces, NULL, &fork, NULL));
    CHECK_OK(kvt_session_truncate(fork, 22, NULL));
    CHECK_OK(kvt_session_append(fork, tokens_of_all + 22, 42, NULL));
    open_engine(&back, 0);
    CHECK_OK(get(fork, &back, 64, 0, &value));
    CHECK(has_all(&back, &first, 64));
    CHECK_OK(kvt_session_truncate(fork, 20, NULL));
    CHECK_OK(kvt_session_append(fork, tokens_of_all + 20, 44, NULL));
    CHECK_IS(get(fork, &back, 64, 0, &value), KVT_E_NOT_FOUND);
    CHECK_EQ(value, 16);
    CHECK_OK(kvt_session_truncate(fork, 20, NULL));
    const kvt_media_t again[] = {image(0, 2)};
    part = sequence_of(tokens_of_all + 20, 44, again, 1);
    CHECK_OK(kvt_session_append_media(fork, &part, NULL));
    CHECK_OK(get(fork, &back, 64, 0, &value));
    CHECK(has(&back, &second, 0, 16, 64));
    CHECK_OK(kvt_session_close(&fork));

    /* Positions of several images in one chunk count. An image changes the tail, too. */
    const kvt_media_t pair[] = {image(1, 1), image(2, 2)}, shifted[] = {image(1, 1), image(3, 2)};
    kvt_session_t *both = open_media(ns, pair, 2);
    put(both, &second, 0, 64, 0, LAYERS);
    CHECK_EQ(reusable(ns, pair, 2), 64);
    CHECK_EQ(reusable(ns, shifted, 2), 0);
    CHECK_EQ(reusable(ns, pair, 1), 0);
    CHECK_OK(kvt_session_truncate(both, 62, NULL));
    CHECK_OK(kvt_session_close(&both));

    kvt_error_t *err = NULL;
    kvt_session_info_t info = KVT_SESSION_INFO_INIT;
    const kvt_media_t twice[] = {image(3, 1), image(3, 2)}, back_to[] = {image(3, 1), image(2, 2)};
    const kvt_media_t huge[] = {image(8, 1)}, farthest[] = {image(UINT64_MAX, 1)};
    const kvt_media_t *bad[] = {twice, back_to, huge, farthest};
    for (int i = 0; i < 4; i++) {
        part = sequence_of(tokens_of_all, 8, bad[i], i < 2 ? 2 : 1);
        CHECK_IS(kvt_session_append_media(pieces, &part, &err), KVT_E_INVALID);
        CHECK(strstr(kvt_error_message(err), "media") != NULL);
        CHECK_IS(kvt_namespace_lookup_media(ns, &part, NULL, 0, 0, NULL, NULL, &err),
                 KVT_E_INVALID);
    }
    part = sequence_of(tokens_of_all, 8, NULL, 1);
    CHECK_IS(kvt_session_append_media(pieces, &part, &err), KVT_E_INVALID);
    part = sequence_of(tokens_of_all, 8, huge, UINT64_MAX);
    CHECK_IS(kvt_session_append_media(pieces, &part, &err), KVT_E_LIMIT);
    part = sequence_of(tokens_of_all, 8, huge, 1);
    part.media_stride_bytes = 12;
    CHECK_IS(kvt_session_append_media(pieces, &part, &err), KVT_E_INVALID);
    part = sequence_of(NULL, 8, NULL, 0);
    CHECK_IS(kvt_session_append_media(pieces, &part, &err), KVT_E_INVALID);
    part.struct_size = 9;
    CHECK_IS(kvt_session_append_media(pieces, &part, &err), KVT_E_INVALID);
    CHECK_OK(kvt_session_append_media(pieces, NULL, &err)); /* nothing is added */
    CHECK_IS(kvt_session_append_media(NULL, NULL, &err), KVT_E_HANDLE);
    CHECK_IS(kvt_namespace_lookup_media(NULL, NULL, NULL, 0, 0, NULL, NULL, &err), KVT_E_HANDLE);
    CHECK_OK(kvt_session_info(pieces, &info));
    CHECK_EQ(info.tokens, 64);
    CHECK_OK(kvt_error_free(&err));
    CHECK_OK(kvt_session_close(&one));
    CHECK_OK(kvt_session_close(&two));
    CHECK_OK(kvt_session_close(&pieces));
    CHECK_OK(kvt_namespace_close(&ns));
    close_store(&store);
}

static void from_hex(const char *hex, uint8_t *key) {
    for (int i = 0; i < KVT_KEY_BYTES; i++) {
        unsigned byte = 0;
        CHECK(sscanf(hex + 2 * i, "%2x", &byte) == 1);
        key[i] = (uint8_t)byte;
    }
}

/* The examples of docs/internals/keys.md, computed by an independent program. */
static void media_keys_match_the_documentation(void) {
    static uint8_t memory[2 * 4 * 32 * 2048];
    const uint16_t layers[4] = {0, 1, 2, 3};
    kvt_group_t groups[2];
    memset(groups, 0, sizeof groups);
    for (int i = 0; i < 2; i++) {
        groups[i].dtype = KVT_DTYPE_BF16;
        groups[i].kv_heads = 8;
        groups[i].k_bytes = groups[i].v_bytes = 2048;
        groups[i].layers = layers + 3 * i;
        groups[i].layer_count = i == 0 ? 3 : 1;
    }
    groups[0].rule = KVT_RULE_WINDOW;
    groups[0].window_tokens = 1024;
    kvt_layout_t layout = KVT_LAYOUT_INIT;
    layout.chunk_tokens = 16;
    layout.groups = groups;
    layout.group_count = 2;
    layout.stride_bytes = sizeof *groups;
    kvt_identity_t identity = KVT_IDENTITY_INIT;
    identity.model = "org/model-8b";
    identity.model_bytes = strlen(identity.model);
    identity.salt = "tenant-1";
    identity.salt_bytes = strlen(identity.salt);
    identity.shard_count = 2;
    kvt_store_t *store = open_store("store(host=8MiB)");
    kvt_namespace_t *ns = NULL;
    CHECK_OK(kvt_namespace_open(store, &identity, &layout, 0, &ns, NULL));
    uint8_t key[KVT_KEY_BYTES], want[KVT_KEY_BYTES], keys[4][KVT_KEY_BYTES], stored[4];
    CHECK_OK(kvt_namespace_key(ns, key));
    from_hex("8af24fbea4097766b4be5e5d55fe60e3991b327d6a2ea0964ddebb8dcac9133f", want);
    CHECK(memcmp(key, want, sizeof key) == 0);

    uint32_t tokens[40];
    for (uint32_t i = 0; i < 40; i++) tokens[i] = i + 1;
    const kvt_media_t media[] = {image(19, 0xAA)}; /* at any position in the chunk */
    kvt_view_t views[8];
    memset(views, 0, sizeof views);
    for (int i = 0; i < 8; i++) {
        views[i].address = memory + (size_t)i * 32 * 2048;
        views[i].heads = 8;
        views[i].run_bytes = 256;
    }
    for (uint64_t count = 0; count < 2; count++) {
        kvt_session_t *session = NULL;
        CHECK_OK(kvt_session_open(ns, NULL, &session, NULL));
        const kvt_sequence_t sequence = sequence_of(tokens, 40, media, count);
        CHECK_OK(kvt_session_append_media(session, &sequence, NULL));
        kvt_transfer_t transfer = KVT_TRANSFER_INIT;
        transfer.tokens = 32;
        transfer.k = views;
        transfer.v = views + 4;
        transfer.stride_bytes = sizeof *views;
        kvt_op_t *op = NULL;
        CHECK_OK(kvt_session_put(session, &transfer, NULL, &op, NULL));
        CHECK_OK(finish_op(&op));
        CHECK_OK(kvt_session_close(&session));
        from_hex("d13c46358cc11f4c258b04d870c77747b654e5a18b23e538abaa4af40c846dc1", keys[0]);
        from_hex("01df113726e18d2893d228863c3f991132ed1ebadfc69d5ca513ef033d36e4d8", keys[1]);
        from_hex("afe48d78ecf87181e6367cc94c5703a56cbf4877b455267ef8c018344dc3a701", keys[2]);
        from_hex("05258137f6ca1f949d7e0bb992e7ec79f6a5fedee97bab5bd798262818bb9887", keys[3]);
        CHECK_OK(kvt_namespace_exists(ns, keys[0], 4, stored));
        const uint8_t whole = KVT_EXISTS_WHOLE | 1 << KVT_TIER_HOST;
        CHECK_EQ(stored[0], whole);
        CHECK_EQ(stored[1], whole);
        CHECK_EQ(stored[2], count == 1 ? whole : 0);
        CHECK_EQ(stored[3], 0);
    }
    CHECK_OK(kvt_namespace_close(&ns));
    close_store(&store);
}

static void calls_in_a_forked_child_are_refused(void) {
    kvt_store_t *store = open_store("store(host=4MiB)");
    kvt_namespace_t *ns = open_namespace(store);
    kvt_session_t *session = open_session(ns, 0, tokens_of_all, 8);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        uint64_t count = 0;
#define FORKED(call) CHECK_IS(call, KVT_E_FORKED)
        FORKED(kvt_session_demote(session, 0, 0, NULL, NULL));
        FORKED(kvt_session_append_media(session, NULL, NULL));
        FORKED(kvt_namespace_lookup_media(ns, NULL, NULL, 0, 0, NULL, NULL, NULL));
        FORKED(kvt_store_set_policy(store, KVT_TIER_HOST, "lru", 3, NULL));
        FORKED(kvt_store_set_limit(store, KVT_TIER_HOST, 1 << 20, NULL));
        FORKED(kvt_store_evictions(store, KVT_TIER_HOST, NULL, 0, 0, &count));
        FORKED(kvt_store_tenants(store, NULL, 0, 0, &count));
        FORKED(kvt_store_latencies(store, NULL, 0, 0, &count));
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK_OK(kvt_session_close(&session));
    CHECK_OK(kvt_namespace_close(&ns));
    close_store(&store);
}

static void remove_folder(void) {
    char command[600];
    snprintf(command, sizeof command, "rm -r '%s'", folder);
    CHECK(system(command) == 0);
}

int main(int argc, char **argv) {
    (void)argv;
    check_begin();
    CHECK(mkdtemp(folder) != NULL);
    for (uint32_t i = 0; i < MAX_TOKENS; i++) tokens_of_all[i] = 100 + i;
    runtime = open_runtime(1, NULL);
    demoted_chunks_are_read_from_disk();
    reuse_loads_windows_and_states_only();
    only_picked_chunks_are_written();
    missing_picked_chunks_are_skipped();
    policies_and_budgets_can_change();
    statistics_say_why_nothing_is_written();
    statistics_count_by_tenant();
    fields_override_the_spec();
    media_distinguish_sequences();
    media_keys_match_the_documentation();
    /* not under sanitizers: they report the parent's threads in the child */
    if (argc == 1) calls_in_a_forked_child_are_refused();
    close_runtime(&runtime);
    remove_folder();
    return check_end("store_engine");
}
