/* Tests of the store besides plain transfers: lookups, plans, events, dropping and clearing,
 * transfers that wait for a ready event, and a runtime that closes before its store. */

#include "check.h"

#include <sys/wait.h>

#define LAYERS 2
#define CHUNK 4
#define K 48
#define V 32
#define MAX_TOKENS 64
#define PLANE (MAX_TOKENS * (K + V))
#define POISON 0xA5

static kvt_runtime_t *runtime;
static char folder[] = "/tmp/kvt-plan-XXXXXX";

/* The engine's tensors: for each layer the K of all tokens, then the V. */
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
        engine->k[layer].run_bytes = K;
        engine->v[layer].address = engine->memory + layer * PLANE + MAX_TOKENS * K;
        engine->v[layer].run_bytes = V;
        engine->k[layer].tokens = engine->v[layer].tokens = MAX_TOKENS;
    }
}

static int is_same(const engine_t *a, const engine_t *b, uint32_t tokens) {
    for (int layer = 0; layer < LAYERS; layer++) {
        const size_t k = (size_t)layer * PLANE, v = k + MAX_TOKENS * K;
        if (memcmp(a->memory + k, b->memory + k, tokens * K) != 0) return 0;
        if (memcmp(a->memory + v, b->memory + v, tokens * V) != 0) return 0;
    }
    return 1;
}

static int is_untouched(const engine_t *engine) {
    for (size_t i = 0; i < sizeof engine->memory; i++)
        if (engine->memory[i] != POISON) return 0;
    return 1;
}

static kvt_store_t *open_store_on(const kvt_runtime_t *on, const char *spec) {
    kvt_store_opts_t opts = KVT_STORE_OPTS_INIT;
    opts.spec = spec;
    opts.spec_bytes = strlen(spec);
    kvt_store_t *store = NULL;
    CHECK_OK(kvt_store_open(on, NULL, &opts, &store, NULL));
    return store;
}

static kvt_store_t *open_disk_on(const kvt_runtime_t *on, const char *name, const char *more) {
    char spec[256];
    snprintf(spec, sizeof spec,
             "store(host=4MiB, disk=disk(path=\"%s/%s\", bytes=16MiB, segment=1MiB, "
             "buffered=true)%s%s)",
             folder, name, more, write_option(more));
    return open_store_on(on, spec);
}

static kvt_store_t *open_disk(const char *name, const char *more) {
    return open_disk_on(runtime, name, more);
}

static void close_store(kvt_store_t **store) {
    CHECK_OK(kvt_store_close(store, hang_guard(), NULL));
    CHECK(*store == NULL);
}

static kvt_namespace_t *open_namespace(const kvt_store_t *store, const char *salt) {
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
    kvt_identity_t identity = KVT_IDENTITY_INIT;
    identity.salt = salt;
    identity.salt_bytes = strlen(salt);
    kvt_namespace_t *ns = NULL;
    CHECK_OK(kvt_namespace_open(store, &identity, &layout, 0, &ns, NULL));
    return ns;
}

static uint32_t tokens_of_all[MAX_TOKENS];

static kvt_session_t *open_session(const kvt_namespace_t *ns, uint32_t tokens) {
    kvt_session_t *session = NULL;
    CHECK_OK(kvt_session_open(ns, NULL, &session, NULL));
    CHECK_OK(kvt_session_append(session, tokens_of_all, tokens, NULL));
    return session;
}

static kvt_transfer_t transfer_of(const engine_t *engine, uint32_t tokens) {
    kvt_transfer_t transfer = KVT_TRANSFER_INIT;
    transfer.tokens = tokens;
    transfer.k = engine->k;
    transfer.v = engine->v;
    transfer.stride_bytes = sizeof *engine->k;
    return transfer;
}

static void put(const kvt_session_t *session, const engine_t *engine, uint32_t tokens,
                uint32_t level) {
    kvt_transfer_t transfer = transfer_of(engine, tokens);
    transfer.level = level;
    kvt_op_t *op = NULL;
    CHECK_OK(kvt_session_put(session, &transfer, NULL, &op, NULL));
    CHECK_OK(finish_op(&op));
}

static kvt_lookup_t lookup_sum(const kvt_namespace_t *ns, uint32_t tokens) {
    kvt_lookup_t sum = KVT_LOOKUP_INIT;
    CHECK_OK(kvt_namespace_lookup(ns, tokens_of_all, tokens, NULL, 0, 0, NULL, &sum, NULL));
    CHECK_EQ(sum.struct_size, sizeof sum);
    CHECK_EQ(sum.tokens, tokens);
    return sum;
}

static kvt_store_stats_t stats_of(const kvt_store_t *store) {
    kvt_store_stats_t stats = KVT_STORE_STATS_INIT;
    CHECK_OK(kvt_store_stats(store, &stats));
    return stats;
}

/* Reads keys from the store's events: chunk i of the sequence that was put first. */
static void keys_of(const kvt_store_t *store, uint8_t *keys, uint32_t chunks) {
    kvt_store_event_t events[64];
    uint64_t cursor = 0, count = 0, missed = 9;
    CHECK_OK(kvt_store_events(store, &cursor, events, 64, sizeof *events, &count, &missed));
    CHECK_EQ(missed, 0);
    CHECK_EQ(cursor, count);
    uint32_t found = 0;
    for (uint64_t i = 0; i < count; i++) {
        CHECK_EQ(events[i].number, i);
        if (events[i].kind != KVT_STORE_EVENT_STORED || events[i].tier != KVT_TIER_HOST) continue;
        CHECK(events[i].position < chunks && events[i].tokens == CHUNK && events[i].at_ns > 0);
        memcpy(keys + events[i].position * KVT_KEY_BYTES, events[i].key, KVT_KEY_BYTES);
        found++;
    }
    CHECK_EQ(found, chunks);
}

static void lookups_count_reusable_tokens(void) {
    kvt_store_t *store = open_disk("look", ", write=never");
    kvt_namespace_t *ns = open_namespace(store, "a");
    kvt_session_t *session = open_session(ns, 40);
    engine_t engine;
    open_engine(&engine, 1);
    CHECK_EQ(lookup_sum(ns, 48).reusable_tokens, 0);
    put(session, &engine, 40, KVT_LEVEL_RAM);

    kvt_lookup_t sum = lookup_sum(ns, 48);
    CHECK_EQ(sum.reusable_tokens, 40);
    CHECK_EQ(sum.reusable_soon_tokens, 40);
    CHECK_EQ(sum.host_bytes, 40 * LAYERS * (K + V));
    CHECK_EQ(sum.disk_bytes + sum.remote_bytes + sum.device_bytes + sum.pending_bytes, 0);
    CHECK(sum.load_ns > 0);

    kvt_range_t ranges[3];
    uint64_t count = 0;
    CHECK_OK(kvt_namespace_lookup(ns, tokens_of_all, 48, NULL, 0, 0, &count, NULL, NULL));
    CHECK_EQ(count, 2);
    count = 0;
    memset(ranges, 0xEE, sizeof ranges);
    CHECK_IS(kvt_namespace_lookup(ns, tokens_of_all, 48, ranges, 1, sizeof *ranges, &count,
                                  &sum, NULL),
             KVT_E_TOO_SMALL);
    CHECK_EQ(count, 2);
    CHECK_EQ(ranges[0].tokens, UINT64_C(0xEEEEEEEEEEEEEEEE));
    CHECK_OK(kvt_namespace_lookup(ns, tokens_of_all, 48, ranges, 3, sizeof *ranges, &count,
                                  &sum, NULL));
    CHECK_EQ(ranges[0].first_token, 0);
    CHECK_EQ(ranges[0].tokens, 40);
    CHECK_EQ(ranges[0].state, KVT_RANGE_HIT);
    CHECK_EQ(ranges[0].tier, KVT_TIER_HOST);
    CHECK_EQ(ranges[0].host_bytes, sum.host_bytes);
    CHECK_EQ(ranges[1].first_token, 40);
    CHECK_EQ(ranges[1].tokens, 8);
    CHECK_EQ(ranges[1].state, KVT_RANGE_MISS);
    CHECK_EQ(ranges[1].tier, KVT_TIER_NONE);
    /* The entries of an older program are shorter. */
    CHECK_OK(kvt_namespace_lookup(ns, tokens_of_all, 48, ranges, 6, 24, &count, NULL, NULL));
    CHECK_EQ(((uint64_t *)ranges)[3], 40);
    CHECK_EQ(((uint64_t *)ranges)[4], 8);

    /* The same by keys; another namespace and a wrong count are detected. */
    enum { CHUNKS = 10 };
    uint8_t keys[(CHUNKS + 1) * KVT_KEY_BYTES], found[CHUNKS + 1];
    memset(keys, 7, sizeof keys);
    keys_of(store, keys, CHUNKS);
    CHECK_OK(kvt_namespace_lookup_keys(ns, keys, CHUNKS, 41, NULL, 0, 0, &count, &sum, NULL));
    CHECK_EQ(sum.reusable_tokens, 40);
    kvt_error_t *err = NULL;
    CHECK_IS(kvt_namespace_lookup_keys(ns, keys, CHUNKS, 44, NULL, 0, 0, NULL, NULL, &err),
             KVT_E_INVALID);
    CHECK(strstr(kvt_error_message(err), "10 keys") != NULL);
    memset(found, 9, sizeof found);
    CHECK_OK(kvt_namespace_exists(ns, keys, CHUNKS + 1, found));
    for (int i = 0; i < CHUNKS; i++) CHECK_EQ(found[i], KVT_EXISTS_WHOLE | 1 << KVT_TIER_HOST);
    CHECK_EQ(found[CHUNKS], 0);
    kvt_namespace_t *other = open_namespace(store, "b");
    CHECK_OK(kvt_namespace_exists(other, keys, CHUNKS, found));
    for (int i = 0; i < CHUNKS; i++) CHECK_EQ(found[i], 0);
    CHECK_OK(kvt_namespace_lookup_keys(other, keys, CHUNKS, 40, NULL, 0, 0, NULL, &sum, NULL));
    CHECK_EQ(sum.reusable_tokens, 0);
    CHECK_OK(kvt_namespace_close(&other));

    /* Two chunks are on disk as well. */
    put(session, &engine, 8, KVT_LEVEL_DURABLE);
    CHECK_OK(kvt_namespace_exists(ns, keys, 3, found));
    CHECK_EQ(found[1], KVT_EXISTS_WHOLE | 1 << KVT_TIER_HOST | 1 << KVT_TIER_DISK);
    CHECK_EQ(found[2], KVT_EXISTS_WHOLE | 1 << KVT_TIER_HOST);

    CHECK_IS(kvt_namespace_lookup(NULL, NULL, 0, NULL, 0, 0, NULL, NULL, &err), KVT_E_HANDLE);
    CHECK_IS(kvt_namespace_lookup(ns, NULL, 1, NULL, 0, 0, NULL, NULL, &err), KVT_E_INVALID);
    CHECK_IS(kvt_namespace_lookup(ns, tokens_of_all, UINT64_MAX, NULL, 0, 0, NULL, NULL, &err),
             KVT_E_LIMIT);
    CHECK_IS(kvt_namespace_lookup(ns, tokens_of_all, 8, ranges, 3, 7, &count, NULL, &err),
             KVT_E_INVALID);
    CHECK_IS(kvt_namespace_lookup(ns, tokens_of_all, 8, NULL, 3, 24, &count, NULL, &err),
             KVT_E_INVALID);
    sum.struct_size = 3;
    CHECK_IS(kvt_namespace_lookup(ns, tokens_of_all, 8, NULL, 0, 0, NULL, &sum, &err),
             KVT_E_INVALID);
    CHECK_IS(kvt_namespace_exists(ns, keys, UINT64_MAX, found), KVT_E_LIMIT);
    CHECK_IS(kvt_namespace_exists(ns, NULL, 1, found), KVT_E_INVALID);
    CHECK_IS(kvt_namespace_exists(ns, keys, 1, NULL), KVT_E_INVALID);
    CHECK_OK(kvt_namespace_exists(ns, NULL, 0, NULL));
    CHECK_OK(kvt_error_free(&err));
    CHECK_OK(kvt_session_close(&session));
    close_store(&store);
    CHECK_IS(kvt_namespace_exists(ns, keys, 1, found), KVT_E_CLOSED);
    CHECK_IS(kvt_namespace_lookup(ns, tokens_of_all, 8, NULL, 0, 0, NULL, NULL, NULL),
             KVT_E_CLOSED);
    CHECK_OK(kvt_namespace_close(&ns));
}

static void plans_follow_the_prefill_cost(void) {
    kvt_store_t *store = open_store_on(runtime, "store(host=4MiB)");
    kvt_namespace_t *ns = open_namespace(store, "");
    kvt_session_t *session = open_session(ns, 50);
    engine_t engine;
    open_engine(&engine, 2);
    put(session, &engine, 40, KVT_LEVEL_RAM);

    kvt_plan_terms_t terms = KVT_PLAN_TERMS_INIT;
    terms.flags = KVT_PLAN_COST;
    terms.beta_ns = 1e9; /* a second per token: every stored chunk is loaded */
    kvt_plan_step_t steps[4];
    kvt_plan_t plan = KVT_PLAN_INIT;
    uint64_t count = 0;
    CHECK_OK(kvt_session_plan(session, &terms, steps, 4, sizeof *steps, &count, &plan, NULL));
    CHECK_EQ(count, 2);
    CHECK_EQ(steps[0].kind, KVT_PLAN_LOAD);
    CHECK_EQ(steps[0].tier, KVT_TIER_HOST);
    CHECK_EQ(steps[0].tokens, 40);
    CHECK_EQ(steps[0].host_bytes, 40 * LAYERS * (K + V));
    CHECK(steps[0].predicted_ns > 0);
    CHECK_EQ(steps[1].kind, KVT_PLAN_RECOMPUTE);
    CHECK_EQ(steps[1].tier, KVT_TIER_NONE);
    CHECK_EQ(steps[1].first_token, 40);
    CHECK_EQ(steps[1].tokens, 10);
    CHECK_EQ(steps[1].predicted_ns, UINT64_C(10000000000));
    CHECK_EQ(plan.struct_size, sizeof plan);
    CHECK_EQ(plan.tokens, 50);
    CHECK_EQ(plan.load_tokens, 40);
    CHECK_EQ(plan.recompute_tokens, 10);
    CHECK_EQ(plan.resident_tokens, 0);
    CHECK_EQ(plan.without_ns, UINT64_C(50000000000));
    CHECK_EQ(plan.compute_ns, UINT64_C(10000000000));
    CHECK(plan.load_ns > 0 && plan.total_ns >= plan.compute_ns && plan.total_ns < plan.without_ns);

    terms.beta_ns = 0; /* recomputing is free */
    CHECK_OK(kvt_session_plan(session, &terms, steps, 4, sizeof *steps, &count, &plan, NULL));
    CHECK_EQ(count, 1);
    CHECK_EQ(plan.recompute_tokens, 50);
    CHECK_EQ(plan.total_ns + plan.without_ns, 0);

    /* Without a cost the plan uses the fixed or the observed cost. */
    kvt_prefill_cost_t cost = KVT_PREFILL_COST_INIT;
    CHECK_OK(kvt_namespace_prefill_cost(ns, &cost));
    CHECK(cost.observed == 0 && cost.fixed == 0 && cost.beta_ns > 0);
    cost.alpha_ns = 0;
    cost.beta_ns = 2e9;
    CHECK_OK(kvt_namespace_set_prefill_cost(ns, &cost, NULL));
    for (int i = 0; i < 50; i++)
        CHECK_OK(kvt_namespace_observe_prefill(ns, 0, 100, 100000, NULL));
    CHECK_OK(kvt_namespace_prefill_cost(ns, &cost));
    CHECK(cost.observed == 50 && cost.fixed == 1 && cost.beta_ns > 1.9e9);
    CHECK_OK(kvt_session_plan(session, NULL, NULL, 0, 0, &count, &plan, NULL));
    CHECK_EQ(count, 2);
    CHECK_EQ(plan.without_ns, UINT64_C(100000000000));
    CHECK_OK(kvt_namespace_set_prefill_cost(ns, NULL, NULL));
    CHECK_OK(kvt_namespace_prefill_cost(ns, &cost));
    CHECK(cost.fixed == 0 && cost.beta_ns < 1500);

    count = 0;
    terms.beta_ns = cost.beta_ns = 1e9;
    CHECK_OK(kvt_namespace_set_prefill_cost(ns, &cost, NULL));
    CHECK_IS(kvt_session_plan(session, NULL, steps, 1, sizeof *steps, &count, &plan, NULL),
             KVT_E_TOO_SMALL);
    CHECK_EQ(count, 2);

    kvt_error_t *err = NULL;
#define WRONG(change, status)                                                                 \
    do {                                                                                      \
        kvt_plan_terms_t good = terms;                                                        \
        change;                                                                               \
        CHECK_IS(kvt_session_plan(session, &terms, NULL, 0, 0, NULL, &plan, &err), status);   \
        terms = good;                                                                         \
    } while (0)
    WRONG(terms.flags = 8, KVT_E_INVALID);
    WRONG(terms.flags = 0, KVT_E_INVALID);
    WRONG(terms.priority = 3, KVT_E_INVALID);
    WRONG(terms.reserved = 1, KVT_E_INVALID);
    WRONG(terms.alpha_ns = -1, KVT_E_INVALID);
    WRONG(terms.beta_ns = 1e16, KVT_E_INVALID);
    WRONG(terms.struct_size = 9, KVT_E_INVALID);
    CHECK_IS(kvt_namespace_observe_prefill(ns, 0, 0, 1, &err), KVT_E_INVALID);
    CHECK_IS(kvt_namespace_observe_prefill(ns, 0, 1, UINT64_MAX, &err), KVT_E_INVALID);
    cost.beta_ns = -1;
    CHECK_IS(kvt_namespace_set_prefill_cost(ns, &cost, &err), KVT_E_INVALID);
    CHECK_IS(kvt_namespace_prefill_cost(ns, NULL), KVT_E_INVALID);
    CHECK_OK(kvt_error_free(&err));

    kvt_session_t *empty = open_session(ns, 0);
    CHECK_OK(kvt_session_plan(empty, NULL, steps, 4, sizeof *steps, &count, &plan, NULL));
    CHECK_EQ(count + plan.tokens + plan.total_ns, 0);
    CHECK_OK(kvt_session_close(&empty));
    CHECK_IS(kvt_session_plan(empty, NULL, NULL, 0, 0, NULL, NULL, NULL), KVT_E_HANDLE);
    CHECK_OK(kvt_session_close(&session));
    CHECK_OK(kvt_namespace_close(&ns));
    close_store(&store);
}

static void events_report_changes(void) {
    kvt_store_t *store = open_store_on(runtime, "store(host=4MiB, events=16)");
    kvt_namespace_t *ns = open_namespace(store, "");
    kvt_session_t *session = open_session(ns, 16);
    uint8_t name[KVT_KEY_BYTES];
    CHECK_OK(kvt_namespace_key(ns, name));
    engine_t engine;
    open_engine(&engine, 3);
    uint64_t cursor = 0, count = 9, missed = 9, later = UINT64_MAX;
    kvt_store_event_t events[20];
    uint8_t keys[4][KVT_KEY_BYTES];
    kvt_op_t *ops[3];
    CHECK_OK(kvt_store_watch(store, 0, NULL, &ops[0], NULL));
    CHECK_OK(kvt_store_watch(store, UINT64_MAX, NULL, &ops[1], NULL));
    CHECK_OK(kvt_store_watch(store, 1000, NULL, &ops[2], NULL));
    CHECK_IS(kvt_store_watch(store, 0, NULL, NULL, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_store_watch(NULL, 0, NULL, &ops[0], NULL), KVT_E_HANDLE);
    CHECK_OK(kvt_store_events(store, &cursor, events, 20, sizeof *events, &count, &missed));
    CHECK_EQ(cursor + count + missed, 0);
    put(session, &engine, 16, KVT_LEVEL_RAM);
    CHECK_OK(kvt_store_events(store, &later, NULL, 0, 0, &count, NULL));
    CHECK_EQ(later, 4);
    CHECK_OK(kvt_store_events(store, &cursor, events, 3, sizeof *events, &count, NULL));
    CHECK_EQ(count, 3);
    CHECK_EQ(cursor, 3);
    CHECK_OK(kvt_store_events(store, &cursor, events + 3, 9, sizeof *events, &count, NULL));
    CHECK_EQ(count, 1);
    CHECK(memcmp(events[0].parent, name, sizeof name) == 0);
    for (int i = 0; i < 2; i++) {
        CHECK_OK(kvt_op_wait(ops[i], KVT_OP_RELEASED, hang_guard()));
        kvt_op_info_t info = KVT_OP_INFO_INIT;
        CHECK_OK(kvt_op_info(ops[i], &info));
        CHECK(info.status == KVT_OK && info.value >= 1 && info.value <= 4);
        CHECK_OK(kvt_op_free(&ops[i]));
    }
    kvt_sequence_t sequence = KVT_SEQUENCE_INIT;
    sequence.tokens = tokens_of_all;
    sequence.token_count = 16;
    CHECK_OK(kvt_namespace_chunk_keys(ns, &sequence, NULL, 0, &count, NULL));
    CHECK_EQ(count, 4);
    count = 0;
    CHECK_IS(kvt_namespace_chunk_keys(ns, &sequence, keys[0], 3, &count, NULL),
             KVT_E_TOO_SMALL);
    CHECK_EQ(count, 4);
    CHECK_OK(kvt_namespace_chunk_keys(ns, &sequence, keys[0], 4, &count, NULL));
    CHECK_IS(kvt_namespace_chunk_keys(ns, &sequence, NULL, 4, &count, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_namespace_chunk_keys(ns, &sequence, keys[0], 4, NULL, NULL), KVT_E_INVALID);
    for (int i = 0; i < 4; i++) {
        CHECK(memcmp(events[i].key, keys[i], sizeof name) == 0);
        CHECK_EQ(events[i].kind, KVT_STORE_EVENT_STORED);
        CHECK_EQ(events[i].tier, KVT_TIER_HOST);
        CHECK_EQ(events[i].position, i);
        CHECK(memcmp(events[i].namespace_key, name, sizeof name) == 0);
        if (i > 0) CHECK(memcmp(events[i].parent, events[i - 1].key, sizeof name) == 0);
    }

    /* What is resident, in pages of three. */
    uint64_t at = 0, seen = 0;
    while (at != UINT64_MAX) {
        CHECK_OK(kvt_store_residents(store, &at, events + 10, 3, sizeof *events, &count));
        for (uint64_t i = 10; i < 10 + count; i++, seen++) {
            uint32_t place = events[i].position;
            CHECK(memcmp(events[i].key, keys[place], sizeof name) == 0);
            CHECK(memcmp(events[i].parent, events[place].parent, sizeof name) == 0);
            CHECK(events[i].tier == KVT_TIER_HOST && events[i].kind == KVT_STORE_EVENT_STORED);
            CHECK_EQ(events[i].number, 4);
        }
    }
    CHECK_EQ(seen, 4);
    CHECK_OK(kvt_store_residents(store, &at, events, 3, sizeof *events, &count));
    CHECK_EQ(count, 0);
    at = 0;
    CHECK_OK(kvt_store_residents(store, &at, NULL, 0, 0, &count));
    CHECK_EQ(at + count, 0);
    CHECK_IS(kvt_store_residents(store, NULL, events, 3, sizeof *events, &count), KVT_E_INVALID);
    CHECK_IS(kvt_store_residents(store, &at, NULL, 3, sizeof *events, &count), KVT_E_INVALID);
    CHECK_IS(kvt_store_residents(store, &at, events, 3, 4, &count), KVT_E_INVALID);
    CHECK_IS(kvt_store_residents(store, &at, events, 3, sizeof *events, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_store_residents(NULL, &at, events, 3, sizeof *events, &count), KVT_E_HANDLE);

    /* Sixteen events are kept. A slow reader gets the number of lost events, and sees the cleared
     * namespace. */
    CHECK_OK(kvt_session_close(&session));
    for (int turn = 0; turn < 3; turn++) {
        session = open_session(ns, 16);
        put(session, &engine, 16, KVT_LEVEL_RAM);
        CHECK_OK(kvt_session_close(&session));
        kvt_clear_report_t report = KVT_CLEAR_REPORT_INIT;
        CHECK_OK(kvt_namespace_clear(ns, hang_guard(), &report, NULL));
        CHECK_EQ(report.struct_size, sizeof report);
        CHECK_EQ(report.removed_chunks, 4);
        CHECK_EQ(report.referenced_chunks + report.transferring_chunks, 0);
    }
    CHECK_EQ(stats_of(store).chunks, 0);
    CHECK_OK(kvt_store_events(store, &cursor, events, 20, sizeof *events, &count, &missed));
    CHECK_EQ(count, 16);
    CHECK_EQ(missed, 5 + 9 + 9 - 16);
    CHECK_EQ(events[15].kind, KVT_STORE_EVENT_CLEARED);
    CHECK(memcmp(events[15].namespace_key, name, sizeof name) == 0);
    CHECK_EQ(events[14].kind, KVT_STORE_EVENT_REMOVED);
    CHECK_OK(kvt_store_events(store, &cursor, events, 20, sizeof *events, &count, &missed));
    CHECK_EQ(count + missed, 0);

    CHECK_IS(kvt_store_events(store, NULL, events, 20, sizeof *events, &count, NULL),
             KVT_E_INVALID);
    CHECK_IS(kvt_store_events(store, &cursor, events, 20, sizeof *events, NULL, NULL),
             KVT_E_INVALID);
    CHECK_IS(kvt_store_events(store, &cursor, NULL, 20, sizeof *events, &count, NULL),
             KVT_E_INVALID);
    CHECK_IS(kvt_store_events(store, &cursor, events, 20, 4, &count, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_store_events(NULL, &cursor, events, 20, sizeof *events, &count, NULL),
             KVT_E_HANDLE);
    CHECK_OK(kvt_namespace_close(&ns));
    close_store(&store);
    CHECK_OK(kvt_op_wait(ops[2], KVT_OP_RELEASED, hang_guard()));
    kvt_op_info_t ended = KVT_OP_INFO_INIT;
    CHECK_OK(kvt_op_info(ops[2], &ended));
    CHECK_EQ(ended.status, KVT_E_CANCELLED);
    CHECK_OK(kvt_op_free(&ops[2]));
}

/* Child process: clears a namespace, keeps another, and exits without closing the store. */
static void clear_and_exit(void) {
    kvt_runtime_t *own = open_runtime(1, NULL);
    kvt_store_t *store = open_disk_on(own, "clear", "");
    kvt_namespace_t *ns = open_namespace(store, "gone"), *kept = open_namespace(store, "kept");
    engine_t engine;
    open_engine(&engine, 4);
    kvt_session_t *session = open_session(ns, 30), *other = open_session(kept, 30);
    put(session, &engine, 30, KVT_LEVEL_DURABLE);
    put(other, &engine, 30, KVT_LEVEL_DURABLE);
    kvt_clear_report_t report = KVT_CLEAR_REPORT_INIT;
    CHECK_OK(kvt_session_truncate(session, 8, NULL));
    CHECK_OK(kvt_session_pin(session, 0, 4, 1, 0, NULL));
    CHECK_OK(kvt_namespace_clear(ns, hang_guard(), &report, NULL));
    CHECK_EQ(report.referenced_chunks, 2);
    CHECK_OK(kvt_session_close(&session));
    CHECK_OK(kvt_namespace_clear(ns, hang_guard(), &report, NULL));
    CHECK_EQ(report.referenced_chunks, 1); /* the pin */
    session = open_session(ns, 4);
    CHECK_OK(kvt_session_unpin(session, 0, 0, NULL));
    CHECK_OK(kvt_session_unpin(session, 0, 4, NULL));
    CHECK_OK(kvt_session_close(&session));
    CHECK_OK(kvt_namespace_clear(ns, 0, &report, NULL));
    CHECK_EQ(report.removed_chunks, 1);
    CHECK_EQ(lookup_sum(ns, 30).reusable_tokens, 0);
    CHECK_EQ(lookup_sum(kept, 30).reusable_tokens, 28);
    _exit(0);
}

static int child_has_run;

static void start_child(void) {
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) clear_and_exit();
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    child_has_run = 1;
}

static void cleared_chunks_stay_cleared_after_a_crash(void) {
    kvt_store_t *store = open_disk("clear", "");
    kvt_namespace_t *ns = open_namespace(store, "gone"), *kept = open_namespace(store, "kept");
    if (child_has_run) {
        CHECK_EQ(lookup_sum(ns, 30).reusable_tokens, 0);
        CHECK_EQ(lookup_sum(kept, 30).reusable_tokens, 28);
    }

    /* Drops parts of a session. */
    engine_t engine, back;
    open_engine(&engine, 5);
    open_engine(&back, 0);
    kvt_session_t *session = open_session(ns, 30);
    put(session, &engine, 30, KVT_LEVEL_DISK);
    kvt_session_t *other = open_session(ns, 12);
    kvt_clear_report_t report = KVT_CLEAR_REPORT_INIT;
    CHECK_OK(kvt_session_drop(session, 8, 0, &report, NULL));
    CHECK_EQ(report.removed_chunks, 5); /* including the tail */
    CHECK_EQ(report.referenced_chunks, 1); /* the other session's third */
    CHECK_EQ(lookup_sum(ns, 30).reusable_tokens, 12);
    kvt_transfer_t transfer = transfer_of(&back, 30);
    kvt_op_t *op = NULL;
    CHECK_OK(kvt_session_get(session, &transfer, NULL, &op, NULL));
    CHECK_OK(kvt_op_wait(op, KVT_OP_RELEASED, hang_guard()));
    CHECK_EQ(info_of(op).value, 12);
    CHECK_IS(finish_op(&op), KVT_E_NOT_FOUND);
    CHECK(is_same(&engine, &back, 12));
    put(session, &engine, 30, KVT_LEVEL_RAM);
    CHECK_OK(kvt_session_get(session, &transfer, NULL, &op, NULL));
    CHECK_OK(finish_op(&op));
    CHECK(is_same(&engine, &back, 30));
    CHECK_OK(kvt_session_drop(session, 16, 4, NULL, NULL)); /* later chunks continue it */
    CHECK_EQ(lookup_sum(ns, 30).reusable_tokens, 28);

    kvt_error_t *err = NULL;
    CHECK_IS(kvt_session_drop(session, 3, 0, &report, &err), KVT_E_INVALID);
    CHECK_IS(kvt_session_drop(session, 32, 0, &report, &err), KVT_E_INVALID);
    CHECK_IS(kvt_session_unpin(session, 3, 0, &err), KVT_E_INVALID);
    CHECK_IS(kvt_session_unpin(NULL, 0, 0, &err), KVT_E_HANDLE);
    CHECK_IS(kvt_namespace_clear(NULL, 0, NULL, &err), KVT_E_HANDLE);
    report.struct_size = 1;
    CHECK_IS(kvt_namespace_clear(ns, 0, &report, &err), KVT_E_INVALID);
    CHECK_IS(kvt_session_drop(session, 0, 0, &report, &err), KVT_E_INVALID);
    CHECK_OK(kvt_error_free(&err));
    CHECK_OK(kvt_session_close(&session));
    CHECK_OK(kvt_session_close(&other));
    CHECK_OK(kvt_namespace_close(&kept));
    close_store(&store);
    CHECK_IS(kvt_namespace_clear(ns, 0, NULL, NULL), KVT_E_CLOSED);
    CHECK_OK(kvt_namespace_close(&ns));
}

static kvt_ready_event_t *open_event(void) {
    kvt_ready_event_t *event = NULL;
    CHECK_OK(kvt_ready_event_open(0, &event, NULL));
    CHECK(event != NULL);
    return event;
}

static uint32_t state_of(const kvt_ready_event_t *event) {
    uint32_t state = 9;
    CHECK_OK(kvt_ready_event_query(event, &state));
    return state;
}

static void *signal_event(void *data) {
    CHECK_OK(kvt_ready_event_signal((kvt_ready_event_t *)data));
    return NULL;
}

static void transfers_wait_for_the_ready_event(void) {
    kvt_store_t *store = open_store_on(runtime, "store(host=4MiB, transfers=4)");
    kvt_namespace_t *ns = open_namespace(store, "");
    kvt_session_t *session = open_session(ns, 32);
    engine_t engine, first, second;
    open_engine(&engine, 0);
    open_engine(&first, 0);
    open_engine(&second, 0);

    /* The source is written after the submission and before the event. */
    kvt_ready_event_t *event = open_event();
    CHECK_EQ(state_of(event), KVT_READY_EVENT_PENDING);
    kvt_transfer_t transfer = transfer_of(&engine, 32);
    transfer.ready = event;
    kvt_op_t *op = NULL, *next = NULL;
    CHECK_OK(kvt_session_put(session, &transfer, NULL, &op, NULL));
    /* Another transfer of the same cells completes meanwhile; the first one has not started. */
    transfer = transfer_of(&first, 32);
    CHECK_OK(kvt_session_get(session, &transfer, NULL, &next, NULL));
    CHECK_IS(finish_op(&next), KVT_E_NOT_FOUND);
    CHECK((info_of(op).state & KVT_OP_RESOLVED) == 0);
    uint64_t seed = 77;
    for (size_t i = 0; i < sizeof engine.memory; i++)
        engine.memory[i] = (uint8_t)next_random(&seed);
    CHECK_OK(kvt_ready_event_signal(event));
    CHECK_OK(kvt_ready_event_signal(event));
    CHECK_EQ(state_of(event), KVT_READY_EVENT_SIGNALLED);
    CHECK_OK(finish_op(&op));

    /* A target is untouched before the event, which another thread signals. An event that was
     * signaled before does not delay. */
    kvt_ready_event_t *second_event = open_event();
    transfer = transfer_of(&first, 32);
    transfer.ready = second_event;
    CHECK_OK(kvt_session_get(session, &transfer, NULL, &op, NULL));
    transfer = transfer_of(&second, 32);
    transfer.ready = event;
    CHECK_OK(kvt_session_get(session, &transfer, NULL, &next, NULL));
    CHECK_OK(finish_op(&next));
    CHECK(is_same(&engine, &second, 32) && is_untouched(&first));
    CHECK((info_of(op).state & KVT_OP_RESOLVED) == 0);
    join_thread(start_thread(signal_event, second_event));
    CHECK_OK(finish_op(&op));
    CHECK(is_same(&engine, &first, 32));
    CHECK_OK(kvt_ready_event_close(&event));
    CHECK_OK(kvt_ready_event_close(&second_event));
    CHECK_OK(kvt_ready_event_close(&second_event));

    /* Deadlines and cancels end waiting transfers, and so does closing an event without a
     * signal. */
    open_engine(&first, 0);
    event = open_event();
    transfer = transfer_of(&first, 32);
    transfer.ready = event;
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    opts.deadline_ns = in_ms(5);
    CHECK_OK(kvt_session_get(session, &transfer, &opts, &op, NULL));
    CHECK_IS(finish_op(&op), KVT_E_TIMEOUT);
    CHECK_OK(kvt_session_get(session, &transfer, NULL, &op, NULL));
    CHECK_OK(kvt_op_cancel(op));
    CHECK_IS(finish_op(&op), KVT_E_CANCELLED);
    kvt_op_t *ops[4];
    for (int i = 0; i < 4; i++) CHECK_OK(kvt_session_get(session, &transfer, NULL, &ops[i], NULL));
    CHECK_IS(kvt_session_get(session, &transfer, NULL, &op, NULL), KVT_E_AGAIN); /* transfers=4 */
    CHECK_EQ(stats_of(store).transfers, 4);
    CHECK_OK(kvt_ready_event_close(&event));
    for (int i = 0; i < 4; i++) CHECK_IS(finish_op(&ops[i]), KVT_E_CANCELLED);
    CHECK(is_untouched(&first));
    CHECK_EQ(stats_of(store).transfers, 0);

    /* One op per layer; a prefetch may wait, too. */
    event = open_event();
    transfer = transfer_of(&first, 32);
    transfer.ready = event;
    transfer.flags = KVT_TRANSFER_EACH_LAYER;
    CHECK_OK(kvt_session_get(session, &transfer, NULL, ops, NULL));
    kvt_transfer_t ahead = KVT_TRANSFER_INIT;
    ahead.ready = event;
    CHECK_OK(kvt_session_prefetch(session, &ahead, NULL, &op, NULL));
    CHECK_OK(kvt_ready_event_signal(event));
    for (int i = 0; i < LAYERS; i++) CHECK_OK(finish_op(&ops[i]));
    CHECK_OK(finish_op(&op));
    CHECK(is_same(&engine, &first, 32));
    kvt_ready_event_t *stale = event;
    CHECK_OK(kvt_ready_event_close(&event));
    transfer.ready = stale;
    CHECK_IS(kvt_session_get(session, &transfer, NULL, ops, NULL), KVT_E_HANDLE);
    CHECK_IS(kvt_ready_event_signal(stale), KVT_E_HANDLE);
    uint32_t state = 0;
    CHECK_IS(kvt_ready_event_query(stale, &state), KVT_E_HANDLE);
    CHECK_IS(kvt_ready_event_query(NULL, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_ready_event_open(1, &event, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_ready_event_open(0, NULL, NULL), KVT_E_INVALID);

    /* Closing a store does not wait for events. */
    event = open_event();
    open_engine(&first, 0);
    transfer = transfer_of(&first, 32);
    transfer.ready = event;
    CHECK_OK(kvt_session_get(session, &transfer, NULL, &op, NULL));
    close_store(&store);
    CHECK_IS(finish_op(&op), KVT_E_CANCELLED);
    CHECK_OK(kvt_ready_event_signal(event));
    CHECK(is_untouched(&first));
    CHECK_OK(kvt_ready_event_close(&event));
    CHECK_OK(kvt_session_close(&session));
    CHECK_OK(kvt_namespace_close(&ns));
}

/* A runtime that closes before its store ends the transfers. The store stays until it is closed,
 * and then writes back what it has. */
static void store_outlives_its_runtime(void) {
    kvt_runtime_t *own = open_runtime(1, NULL);
    kvt_store_t *store = open_disk_on(own, "outlive", "");
    kvt_namespace_t *ns = open_namespace(store, "");
    kvt_session_t *session = open_session(ns, 64);
    engine_t engine, back;
    open_engine(&engine, 6);
    open_engine(&back, 0);
    put(session, &engine, 64, KVT_LEVEL_RAM);
    kvt_ready_event_t *event = open_event();
    kvt_transfer_t transfer = transfer_of(&back, 64);
    transfer.ready = event;
    kvt_op_t *waits = NULL, *runs = NULL;
    CHECK_OK(kvt_session_get(session, &transfer, NULL, &waits, NULL));
    transfer.ready = NULL;
    CHECK_OK(kvt_session_get(session, &transfer, NULL, &runs, NULL));
    kvt_close_report_t report = KVT_CLOSE_REPORT_INIT;
    CHECK_OK(kvt_runtime_close(&own, hang_guard(), &report, NULL));
    CHECK_EQ(report.stores, 1);
    CHECK_EQ(report.namespaces, 1);
    CHECK_EQ(report.sessions, 1);
    CHECK((info_of(waits).state & KVT_OP_RELEASED) != 0);
    CHECK_IS(finish_op(&waits), KVT_E_CANCELLED);
    const kvt_status_t status = finish_op(&runs);
    CHECK(status == KVT_OK || status == KVT_E_CANCELLED);
    if (status == KVT_OK) CHECK(is_same(&engine, &back, 64));
    CHECK_OK(kvt_ready_event_signal(event));
    CHECK_IS(kvt_session_get(session, &transfer, NULL, &runs, NULL), KVT_E_CLOSED);
    CHECK_IS(kvt_namespace_clear(ns, 0, NULL, NULL), KVT_E_CLOSED);
    uint64_t cursor = 0, count = 0;
    CHECK_OK(kvt_store_events(store, &cursor, NULL, 0, 0, &count, NULL));
    CHECK_EQ(stats_of(store).sessions, 1);
    CHECK_OK(kvt_session_close(&session));
    CHECK_OK(kvt_namespace_close(&ns));
    close_store(&store);
    CHECK_OK(kvt_ready_event_close(&event));
    store = open_disk("outlive", "");
    ns = open_namespace(store, "");
    CHECK_EQ(lookup_sum(ns, 64).reusable_tokens, 64);
    CHECK_OK(kvt_namespace_close(&ns));
    close_store(&store);
}

static void on_completion(void *user_data, const kvt_completion_t *batch, uint64_t count,
                          uint64_t stride_bytes) {
    (void)batch;
    (void)count;
    (void)stride_bytes;
    CHECK_IS(kvt_namespace_clear((kvt_namespace_t *)user_data, 0, NULL, NULL), KVT_E_REENTRANT);
}

static void waiting_calls_are_refused_in_callbacks(void) {
    kvt_store_t *store = open_store_on(runtime, "store(host=4MiB)");
    kvt_namespace_t *ns = open_namespace(store, "");
    kvt_session_t *session = open_session(ns, 8);
    kvt_queue_opts_t queue_opts = KVT_QUEUE_OPTS_INIT;
    queue_opts.callback = on_completion;
    queue_opts.user_data = ns;
    kvt_queue_t *queue = NULL;
    CHECK_OK(kvt_queue_open(runtime, &queue_opts, &queue, NULL));
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    opts.queue = queue;
    engine_t engine;
    open_engine(&engine, 8);
    const kvt_transfer_t transfer = transfer_of(&engine, 8);
    kvt_op_t *op = NULL;
    CHECK_OK(kvt_session_put(session, &transfer, &opts, &op, NULL));
    CHECK_OK(finish_op(&op));
    close_queue(&queue);
    CHECK_OK(kvt_session_close(&session));
    CHECK_OK(kvt_namespace_close(&ns));
    close_store(&store);
}

static void calls_in_a_forked_child_are_refused(void) {
    kvt_store_t *store = open_store_on(runtime, "store(host=4MiB)");
    kvt_namespace_t *ns = open_namespace(store, "");
    kvt_session_t *session = open_session(ns, 8);
    kvt_ready_event_t *event = open_event();
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        uint64_t number = 0;
        uint32_t state = 0;
        uint8_t byte = 0;
        kvt_prefill_cost_t cost = KVT_PREFILL_COST_INIT;
        kvt_ready_event_t *another = NULL;
#define FORKED(call) CHECK_IS(call, KVT_E_FORKED)
        FORKED(kvt_namespace_lookup(ns, NULL, 0, NULL, 0, 0, NULL, NULL, NULL));
        FORKED(kvt_namespace_lookup_keys(ns, NULL, 0, 0, NULL, 0, 0, NULL, NULL, NULL));
        FORKED(kvt_namespace_exists(ns, NULL, 0, &byte));
        FORKED(kvt_namespace_observe_prefill(ns, 0, 1, 1, NULL));
        FORKED(kvt_namespace_set_prefill_cost(ns, NULL, NULL));
        FORKED(kvt_namespace_prefill_cost(ns, &cost));
        FORKED(kvt_namespace_clear(ns, 0, NULL, NULL));
        FORKED(kvt_session_plan(session, NULL, NULL, 0, 0, NULL, NULL, NULL));
        FORKED(kvt_session_drop(session, 0, 0, NULL, NULL));
        FORKED(kvt_session_unpin(session, 0, 0, NULL));
        FORKED(kvt_store_events(store, &number, NULL, 0, 0, &number, NULL));
        FORKED(kvt_store_residents(store, &number, NULL, 0, 0, &number));
        FORKED(kvt_ready_event_open(0, &another, NULL));
        FORKED(kvt_ready_event_signal(event));
        FORKED(kvt_ready_event_query(event, &state));
        FORKED(kvt_ready_event_close(&event));
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK_OK(kvt_ready_event_close(&event));
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
    if (argc == 1) start_child(); /* before this process opens a runtime: the child opens its own */
    runtime = open_runtime(1, NULL);
    lookups_count_reusable_tokens();
    plans_follow_the_prefill_cost();
    events_report_changes();
    cleared_chunks_stay_cleared_after_a_crash();
    transfers_wait_for_the_ready_event();
    store_outlives_its_runtime();
    waiting_calls_are_refused_in_callbacks();
    /* not under sanitizers: they report the parent's threads in the child */
    if (argc == 1) calls_in_a_forked_child_are_refused();
    close_runtime(&runtime);
    remove_folder();
    return check_end("store_plan");
}
