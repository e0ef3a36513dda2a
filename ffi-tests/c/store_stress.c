/* Many threads use one store: puts, gets, lookups, appends, forks, cancels, closes. The main
 * thread changes policies and budgets and reads all statistics. Bytes must be right, every op
 * must end, and finally the store closes while the threads work.
 *
 *   store_stress [MILLISECONDS]     default: 6000
 *
 * It runs longer on a slow machine, until complete and early ended transfers were both seen. */

#include "check.h"

#include <stdatomic.h>

#define WORKERS 4
#define LAYERS 2
#define CHUNK 4
#define K 48
#define V 32
#define MAX_TOKENS 64
#define PLANE (MAX_TOKENS * (K + V))
#define DOCUMENTS 48

static kvt_runtime_t *runtime;
static kvt_store_t *store;
static kvt_namespace_t *ns;
static char folder[] = "/tmp/kvt-stress-XXXXXX";
static uint64_t until_ns;
static _Atomic uint64_t transfers, complete, missed, ended_early, changes;

typedef struct {
    uint8_t memory[LAYERS * PLANE];
    kvt_view_t k[LAYERS], v[LAYERS];
} engine_t;

static void open_engine(engine_t *engine) {
    memset(engine, 0, sizeof *engine);
    for (int layer = 0; layer < LAYERS; layer++) {
        engine->k[layer].address = engine->memory + layer * PLANE;
        engine->k[layer].run_bytes = K;
        engine->v[layer].address = engine->memory + layer * PLANE + MAX_TOKENS * K;
        engine->v[layer].run_bytes = V;
        engine->k[layer].tokens = engine->v[layer].tokens = MAX_TOKENS;
    }
}

/* Documents of one kind share the first 16 tokens. A mark is a hash of the tokens up to a
 * position. */
static uint32_t token_of(uint32_t document, uint32_t at) {
    return at < 16 ? document % 3 * 1000 + at : document * 1000 + at;
}

static uint64_t mark_of(uint32_t document, uint32_t at) {
    return (at < 16 ? document % 3 : 100 + document) * UINT64_C(0x9E3779B97F4A7C15) + at * 7919;
}

/* Writes or checks the KV of the first tokens of a document; with `chunks`, of the first tokens of
 * these chunks. */
static void each_byte(engine_t *engine, uint32_t document, uint64_t tokens, int is_check,
                      const uint32_t *chunks) {
    for (uint32_t at = 0; at < tokens; at++)
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            uint8_t *start = engine->memory + layer * PLANE;
            uint8_t *planes[2] = {start + at * K, start + MAX_TOKENS * K + at * V};
            const uint32_t token = chunks == NULL ? at : chunks[at / CHUNK] * CHUNK + at % CHUNK;
            for (uint32_t plane = 0; plane < 2; plane++)
                for (uint32_t i = 0; i < (plane == 0 ? K : V); i++) {
                    const uint64_t x = mark_of(document, token) + layer * 131 + plane * 17 + i;
                    const uint8_t want = (uint8_t)(x ^ x >> 23 ^ x >> 47);
                    if (!is_check) planes[plane][i] = want;
                    else CHECK_EQ(planes[plane][i], want);
                }
        }
}

/* State of a worker thread. */
typedef struct {
    uint64_t random;
    engine_t engine;
    int is_closed; /* the store was closed */
} worker_t;

static uint64_t dice(worker_t *worker, uint64_t sides) {
    return next_random(&worker->random) % sides;
}

/* Whether a call succeeded. */
static int succeeded(worker_t *worker, kvt_status_t status) {
    if (status == KVT_E_CLOSED) worker->is_closed = 1;
    CHECK(status == KVT_OK || status == KVT_E_CLOSED || status == KVT_E_AGAIN);
    return status == KVT_OK;
}

typedef kvt_status_t (*call_t)(const kvt_session_t *, const kvt_transfer_t *,
                               const kvt_submit_opts_t *, kvt_op_t **, kvt_error_t **);

/* Picks some of a session's chunks; false if there is none. */
static int pick_chunks(worker_t *worker, const kvt_session_t *session, uint32_t *chunks,
                       uint64_t *count) {
    kvt_session_info_t info = KVT_SESSION_INFO_INIT;
    if (!succeeded(worker, kvt_session_info(session, &info))) return 0;
    for (uint32_t i = 0; i * CHUNK < info.tokens; i++)
        if (dice(worker, 2) == 0) chunks[(*count)++] = i;
    return *count > 0;
}

/* Transfers a session or a part of it. Some transfers are cancelled, some sessions closed
 * meanwhile. */
static void transfer(worker_t *worker, kvt_session_t **session, call_t call, uint32_t document) {
    kvt_transfer_t request = KVT_TRANSFER_INIT;
    if (call != kvt_session_prefetch) {
        request.k = worker->engine.k;
        request.v = worker->engine.v;
        request.stride_bytes = sizeof *request.k;
    }
    if (call == kvt_session_put && dice(worker, 8) == 0) request.level = KVT_LEVEL_DISK;
    uint32_t chunks[MAX_TOKENS / CHUNK];
    if (call != kvt_session_put) {
        const uint64_t kind = dice(worker, 4);
        if (kind == 0) request.flags = KVT_TRANSFER_NEEDED_ONLY;
        if (kind == 1 && pick_chunks(worker, *session, chunks, &request.chunk_count))
            request.chunks = chunks;
    }
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    opts.priority = (uint32_t)dice(worker, 3);
    if (dice(worker, 16) == 0) opts.deadline_ns = now_ns() + dice(worker, 200000);
    kvt_op_t *op = NULL;
    if (!succeeded(worker, call(*session, &request, &opts, &op, NULL))) return;
    atomic_fetch_add(&transfers, 1);
    if (dice(worker, 6) == 0) CHECK_OK(kvt_op_cancel(op));
    if (dice(worker, 6) == 0) CHECK_OK(kvt_session_close(session));
    CHECK_OK(kvt_op_wait(op, KVT_OP_RELEASED, hang_guard()));
    const uint64_t value = info_of(op).value;
    const kvt_status_t status = finish_op(&op);
    switch (status) {
    case KVT_OK:
    case KVT_E_NOT_FOUND:
    case KVT_E_BUDGET: /* memory may have shrunk below what sessions reference */
        if (call == kvt_session_get)
            each_byte(&worker->engine, document, value, 1, request.chunks);
        atomic_fetch_add(status == KVT_OK ? &complete : &missed, 1);
        break;
    default:
        CHECK(status == KVT_E_CANCELLED || status == KVT_E_TIMEOUT || status == KVT_E_CLOSED);
        atomic_fetch_add(&ended_early, 1);
    }
}

static void lookup(worker_t *worker, const uint32_t *tokens, uint32_t count) {
    kvt_lookup_t sum = KVT_LOOKUP_INIT;
    const kvt_status_t status =
        kvt_namespace_lookup(ns, tokens, count, NULL, 0, 0, NULL, &sum, NULL);
    if (!succeeded(worker, status)) return;
    CHECK(sum.reusable_tokens <= sum.reusable_soon_tokens && sum.reusable_soon_tokens <= count);
}

/* Calls a random function besides transfers and lookups. */
static void other_call(worker_t *worker, const kvt_session_t *session) {
    kvt_policy_hint_t hint = KVT_POLICY_HINT_INIT;
    hint.stop = KVT_STOP_TOOL_USE;
    kvt_plan_t plan = KVT_PLAN_INIT;
    switch (dice(worker, 6)) {
    case 0: succeeded(worker, kvt_session_demote(session, 0, 0, NULL, NULL)); break;
    case 1: succeeded(worker, kvt_session_drop(session, 0, 0, NULL, NULL)); break;
    case 2: succeeded(worker, kvt_session_pin(session, 0, 0, 3, in_ms(2), NULL)); break;
    case 3: succeeded(worker, kvt_session_unpin(session, 0, 0, NULL)); break;
    case 4: succeeded(worker, kvt_session_hint(session, &hint, NULL)); break;
    default: succeeded(worker, kvt_session_plan(session, NULL, NULL, 0, 0, NULL, &plan, NULL));
    }
}

static void step(worker_t *worker) {
    uint32_t tokens[MAX_TOKENS];
    const uint32_t document = (uint32_t)dice(worker, DOCUMENTS);
    const uint32_t count = 1 + (uint32_t)dice(worker, MAX_TOKENS);
    for (uint32_t at = 0; at < count; at++) tokens[at] = token_of(document, at);
    kvt_session_opts_t session_opts = KVT_SESSION_OPTS_INIT;
    session_opts.tenant = document;
    kvt_session_t *session = NULL, *fork = NULL;
    if (!succeeded(worker, kvt_session_open(ns, &session_opts, &session, NULL))) return;
    const uint32_t half = (uint32_t)dice(worker, count);
    succeeded(worker, kvt_session_append(session, tokens, half, NULL));
    succeeded(worker, kvt_session_append(session, tokens + half, count - half, NULL));
    switch (worker->is_closed ? 99 : dice(worker, 10)) {
    case 0:
    case 1:
    case 2:
    case 3:
        each_byte(&worker->engine, document, count, 0, NULL);
        transfer(worker, &session, kvt_session_put, document);
        break;
    case 4:
    case 5:
    case 6: transfer(worker, &session, kvt_session_get, document); break;
    case 7: transfer(worker, &session, kvt_session_prefetch, document); break;
    case 8:
        other_call(worker, session);
        lookup(worker, tokens, count);
        break;
    case 9: /* a fork that is truncated and extended again */
        if (succeeded(worker, kvt_session_fork(session, NULL, &fork, NULL)) &&
            succeeded(worker, kvt_session_truncate(fork, half, NULL)) &&
            succeeded(worker, kvt_session_append(fork, tokens + half, count - half, NULL)))
            transfer(worker, &fork, kvt_session_get, document);
        break;
    default: break;
    }
    if (session != NULL) CHECK_OK(kvt_session_close(&session));
    if (fork != NULL) CHECK_OK(kvt_session_close(&fork));
}

static void *run_worker(void *data) {
    worker_t *worker = calloc(1, sizeof *worker);
    CHECK(worker != NULL);
    worker->random = 77 + (uint64_t)(uintptr_t)data * UINT64_C(1234567);
    open_engine(&worker->engine);
    while (!worker->is_closed) step(worker);
    free(worker);
    return NULL;
}

static kvt_store_stats_t stats_of(void) {
    kvt_store_stats_t stats = KVT_STORE_STATS_INIT;
    CHECK_OK(kvt_store_stats(store, &stats));
    return stats;
}

static void change(uint64_t round) {
    static const char *const policies[] = {"lru", "horizon", "s3fifo", "arc", "slru(segments=3)"};
    static const char *const below[] = {"lru", "gdsf", "s3fifo"};
    const char *host = policies[round % 5], *disk = below[round % 3];
    CHECK_OK(kvt_store_set_policy(store, KVT_TIER_HOST, host, strlen(host), NULL));
    if (round % 4 == 0)
        CHECK_OK(kvt_store_set_policy(store, KVT_TIER_DISK, disk, strlen(disk), NULL));
    if (round % 6 == 1) {
        const uint64_t share = 1 + round / 6 % 4;
        CHECK_OK(kvt_store_set_limit(store, KVT_TIER_HOST, share * (256 << 10), NULL));
        CHECK_OK(kvt_store_set_limit(store, KVT_TIER_DISK, (8 + share) << 20, NULL));
    }
    if (round % 64 == 63) {
        const kvt_status_t status = kvt_namespace_clear(ns, in_ms(500), NULL, NULL);
        CHECK(status == KVT_OK || status == KVT_E_TIMEOUT || status == KVT_E_BUDGET);
    }
    atomic_fetch_add(&changes, 1);
}

static void read_all(uint64_t *cursor) {
    static char text[1 << 18];
    kvt_policy_log_entry_t entries[32];
    kvt_tenant_t tenants[DOCUMENTS];
    kvt_store_event_t events[32];
    uint64_t count = 0, missing = 0, bytes = 0, put_bytes = 0;
    CHECK_OK(kvt_store_evictions(store, KVT_TIER_HOST, entries, 32, sizeof *entries, &count));
    for (uint64_t i = 1; i < count; i++) CHECK_EQ(entries[i].number, entries[i - 1].number + 1);
    CHECK_OK(kvt_store_tenants(store, tenants, DOCUMENTS, sizeof *tenants, &count));
    for (uint64_t i = 0; i < count; i++) {
        CHECK(tenants[i].tenant < DOCUMENTS && tenants[i].is_rest == 0);
        put_bytes += tenants[i].put_bytes;
    }
    const kvt_store_stats_t stats = stats_of();
    CHECK(put_bytes == 0 || stats.stored_cells > 0);
    CHECK_EQ(stats.corrupt_cells + stats.failed_reads, 0);
    const uint64_t before = *cursor;
    CHECK_OK(kvt_store_events(store, cursor, events, 32, sizeof *events, &count, &missing));
    CHECK_EQ(*cursor, before + count + missing);
    CHECK_OK(kvt_store_metrics(store, text, sizeof text, &bytes));
}

/* Whether some transfers were complete and others ended early. */
static int has_seen_all(void) {
    return atomic_load(&complete) > 0 && atomic_load(&ended_early) > 0;
}

static kvt_store_t *open_store(void) {
    char spec[256];
    snprintf(spec, sizeof spec,
             "store(host=512KiB, disk=disk(path=\"%s/kv\", bytes=12MiB, segment=1MiB, "
             "buffered=true), chunks=4096, sessions=64, transfers=32, cells=512, events=256)",
             folder);
    kvt_store_opts_t opts = KVT_STORE_OPTS_INIT;
    opts.spec = spec;
    opts.spec_bytes = strlen(spec);
    kvt_store_t *opened = NULL;
    CHECK_OK(kvt_store_open(runtime, NULL, &opts, &opened, NULL));
    return opened;
}

static kvt_namespace_t *open_namespace(void) {
    const uint16_t layers[LAYERS] = {0, 1};
    kvt_group_t group;
    memset(&group, 0, sizeof group);
    group.k_bytes = K;
    group.v_bytes = V;
    group.layers = layers;
    group.layer_count = LAYERS;
    kvt_layout_t layout = KVT_LAYOUT_INIT;
    layout.chunk_tokens = CHUNK;
    layout.groups = &group;
    layout.group_count = 1;
    layout.stride_bytes = sizeof group;
    kvt_namespace_t *opened = NULL;
    CHECK_OK(kvt_namespace_open(store, NULL, &layout, 0, &opened, NULL));
    return opened;
}

int main(int argc, char **argv) {
    check_begin();
    CHECK(mkdtemp(folder) != NULL);
    until_ns = in_ms(count_arg(argc, argv, 6000));
    runtime = open_runtime(1, NULL);
    store = open_store();
    ns = open_namespace();
    pthread_t threads[WORKERS];
    for (int i = 0; i < WORKERS; i++)
        threads[i] = start_thread(run_worker, (void *)(uintptr_t)(i + 1));
    uint64_t cursor = 0;
    for (uint64_t round = 0; now_ns() < until_ns || !has_seen_all(); round++) {
        change(round);
        read_all(&cursor);
        short_pause();
    }
    const kvt_store_stats_t stats = stats_of();

    /* Close while all workers use the store. */
    kvt_store_t *closing = store;
    CHECK_OK(kvt_store_close(&closing, hang_guard(), NULL));
    for (int i = 0; i < WORKERS; i++) join_thread(threads[i]);
    CHECK_OK(kvt_namespace_close(&ns));

    /* The chunks found after the restart are right. */
    store = open_store();
    ns = open_namespace();
    worker_t *worker = calloc(1, sizeof *worker);
    CHECK(worker != NULL);
    worker->random = 5;
    open_engine(&worker->engine);
    for (uint32_t document = 0; document < DOCUMENTS; document++) {
        uint32_t tokens[MAX_TOKENS];
        for (uint32_t at = 0; at < MAX_TOKENS; at++) tokens[at] = token_of(document, at);
        kvt_session_t *session = NULL;
        CHECK_OK(kvt_session_open(ns, NULL, &session, NULL));
        CHECK_OK(kvt_session_append(session, tokens, MAX_TOKENS, NULL));
        transfer(worker, &session, kvt_session_get, document);
        if (session != NULL) CHECK_OK(kvt_session_close(&session));
    }
    free(worker);
    CHECK_EQ(stats_of().corrupt_cells + stats_of().failed_reads, 0);
    CHECK_EQ(stats_of().transfers + stats_of().sessions + stats_of().transfer_cells, 0);
    CHECK_OK(kvt_namespace_close(&ns));
    CHECK_OK(kvt_store_close(&store, hang_guard(), NULL));
    close_runtime(&runtime);
    char command[600];
    snprintf(command, sizeof command, "rm -r '%s'", folder);
    CHECK(system(command) == 0);
    printf("store_stress: %" PRIu64 " transfers: %" PRIu64 " complete, %" PRIu64
           " incomplete, %" PRIu64 " ended early; %" PRIu64 " changes, %" PRIu64
           " chunks demoted, %" PRIu64 " evicted from disk\n",
           atomic_load(&transfers), atomic_load(&complete), atomic_load(&missed),
           atomic_load(&ended_early), atomic_load(&changes), stats.demoted_chunks,
           stats.evicted_chunks);
    CHECK(atomic_load(&complete) > 0 && atomic_load(&ended_early) > 0 && atomic_load(&changes) > 0);
    return check_end("store_stress");
}
