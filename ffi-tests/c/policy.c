/* Tests of policies: every call, and every invalid use of one. */

#include "check.h"

#include <math.h>

static kvt_policy_t *open_policy(const char *spec, uint64_t max_objects, uint64_t flags) {
    kvt_policy_opts_t opts = KVT_POLICY_OPTS_INIT;
    opts.spec = spec;
    opts.spec_bytes = strlen(spec);
    opts.max_objects = max_objects;
    opts.remember = 1024;
    opts.log_entries = 8;
    opts.flags = flags;
    kvt_policy_t *policy = NULL;
    CHECK_OK(kvt_policy_open(&opts, &policy, NULL));
    CHECK(policy != NULL);
    return policy;
}

static void close_policy(kvt_policy_t **policy) {
    CHECK_OK(kvt_policy_close(policy));
    CHECK(*policy == NULL);
    CHECK_OK(kvt_policy_close(policy));
}

static kvt_policy_stats_t stats_of(const kvt_policy_t *policy) {
    kvt_policy_stats_t stats = KVT_POLICY_STATS_INIT;
    CHECK_OK(kvt_policy_stats(policy, &stats));
    return stats;
}

static int is_text(const char *text, uint64_t bytes, const char *want) {
    return bytes == strlen(want) && memcmp(text, want, (size_t)bytes) == 0;
}

/* Inserts objects first..first + n - 1 of 2 units each; with parents they form one path. */
static void insert_path(const kvt_policy_t *policy, int64_t now, uint64_t first, uint64_t n,
                        int parents) {
    kvt_policy_object_t rows[16];
    memset(rows, 0, sizeof rows);
    CHECK(n <= 16);
    for (uint64_t i = 0; i < n; i++) {
        rows[i].id = first + i;
        rows[i].units = 2;
        rows[i].tokens = 16;
        rows[i].context = (uint32_t)(16 * i);
        if (parents && i > 0) {
            rows[i].parent = first + i - 1;
            rows[i].flags = KVT_OBJECT_HAS_PARENT;
        }
    }
    CHECK_OK(kvt_policy_insert(policy, now, NULL, rows, n, sizeof *rows, NULL));
}

static void policies_open_with_valid_specs_only(void) {
    uint64_t count = 0;
    CHECK_OK(kvt_policy_count(&count));
    CHECK(count >= 2);
    for (uint64_t i = 0; i < count; i++) {
        kvt_policy_info_t info = KVT_POLICY_INFO_INIT;
        CHECK_OK(kvt_policy_info(i, &info));
        CHECK(info.name_bytes > 0 && info.about_bytes > 0);
    }
    kvt_policy_info_t none = KVT_POLICY_INFO_INIT;
    CHECK_IS(kvt_policy_info(count, &none), KVT_E_NOT_FOUND);
    CHECK_IS(kvt_policy_info(0, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_policy_count(NULL), KVT_E_INVALID);

    kvt_policy_t *policy = NULL;
    CHECK_OK(kvt_policy_open(NULL, &policy, NULL));
    kvt_policy_stats_t stats = stats_of(policy);
    CHECK(is_text(stats.name, stats.name_bytes, "lru"));
    CHECK_EQ(stats.max_objects, 1 << 20);
    close_policy(&policy);
    CHECK_IS(kvt_policy_open(NULL, NULL, NULL), KVT_E_INVALID);

    kvt_error_t *err = NULL;
    kvt_policy_opts_t opts = KVT_POLICY_OPTS_INIT;
    opts.spec = "lrv";
    opts.spec_bytes = 3;
    CHECK_IS(kvt_policy_open(&opts, &policy, &err), KVT_E_SPEC);
    CHECK(strstr(kvt_error_message(err), "'lru'") != NULL);
    opts.spec = "lru(x=1)";
    opts.spec_bytes = 8;
    CHECK_IS(kvt_policy_open(&opts, &policy, &err), KVT_E_SPEC);
    kvt_error_info_t info = KVT_ERROR_INFO_INIT;
    CHECK_OK(kvt_error_info(err, &info));
    CHECK_EQ(info.offset, 4);
    opts.spec_bytes = 3;
    opts.max_objects = UINT64_MAX;
    CHECK_IS(kvt_policy_open(&opts, &policy, &err), KVT_E_LIMIT);
    opts.max_objects = 10;
    opts.flags = 1u << 20;
    CHECK_IS(kvt_policy_open(&opts, &policy, &err), KVT_E_INVALID);
    opts.flags = 0;
    opts.alpha = NAN;
    CHECK_IS(kvt_policy_open(&opts, &policy, &err), KVT_E_INVALID);
    opts.alpha = -1;
    CHECK_IS(kvt_policy_open(&opts, &policy, &err), KVT_E_INVALID);
    opts.alpha = 0;
    opts.spec = "custom";
    opts.spec_bytes = 6;
    CHECK_IS(kvt_policy_open(&opts, &policy, &err), KVT_E_INVALID);
    CHECK(policy == NULL);
    CHECK_OK(kvt_error_free(&err));
}

static void evictions_respect_references_and_pins(const char *spec) {
    kvt_policy_t *policy = open_policy(spec, 64, 0);
    insert_path(policy, 10, 1, 4, 1);
    insert_path(policy, 20, 11, 3, 0);
    kvt_policy_context_t context = KVT_POLICY_CONTEXT_INIT;
    context.flags = KVT_CONTEXT_SESSION | KVT_CONTEXT_PRIORITY;
    context.session = 5;
    context.priority = 2;
    context.tokens_each = 16;
    const uint64_t path[] = {1, 2, 3, 99, 4};
    uint8_t found[5];
    uint64_t n = 0;
    CHECK_OK(kvt_policy_lookup(policy, 30, &context, path, 5, found, &n, NULL));
    CHECK_EQ(n, 3);
    CHECK(memcmp(found, "\1\1\1\0\0", 5) == 0);
    CHECK_OK(kvt_policy_touch(policy, 40, NULL, path, 5, &n, NULL));
    CHECK_EQ(n, 4);
    const uint64_t mixed[] = {1, 50, 51};
    const uint64_t sizes[] = {9, 3, 4};
    CHECK_OK(kvt_policy_record(policy, 50, &context, mixed, sizes, 3, &n, NULL));
    CHECK_EQ(n, 2);
    CHECK_OK(kvt_policy_record(policy, 50, &context, mixed, NULL, 3, &n, NULL));
    CHECK_EQ(n, 0);
    kvt_policy_stats_t stats = stats_of(policy);
    CHECK_EQ(stats.objects, 9);
    CHECK_EQ(stats.units, 7 * 2 + 3 + 4);
    CHECK_EQ(stats.references, 5);
    CHECK_EQ(stats.hits, 3);
    CHECK_EQ(stats.sessions, 1);

    CHECK_OK(kvt_policy_acquire(policy, path, 2, NULL));
    CHECK_OK(kvt_policy_pin(policy, mixed + 1, 2, NULL));
    kvt_policy_hint_t hint = KVT_POLICY_HINT_INIT;
    hint.stop = KVT_STOP_TOOL_USE;
    hint.next_use_ns = 1000;
    CHECK_OK(kvt_policy_hint(policy, 60, &context, path, 5, &hint, &n, NULL));
    CHECK_EQ(n, 4);

    /* 1 and 2 are referenced, 50 and 51 pinned: 3, 4, 11, 12, 13 are candidates. */
    kvt_policy_victim_t victims[16];
    kvt_policy_outcome_t out = KVT_POLICY_OUTCOME_INIT;
    CHECK_OK(kvt_policy_preview(policy, 70, 100, victims, 16, sizeof *victims, &out, NULL));
    CHECK_EQ(out.victims, 5);
    CHECK_EQ(out.freed_units, 10);
    CHECK_EQ(out.shortfall_units, 90);
    CHECK_EQ(stats_of(policy).objects, 9);
    CHECK_OK(kvt_policy_evict(policy, 70, 0, NULL, 0, 0, &out, NULL));
    CHECK_EQ(out.victims + out.freed_units + out.shortfall_units, 0);
    CHECK_OK(kvt_policy_evict(policy, 70, 4, victims, 1, sizeof *victims, &out, NULL));
    CHECK_EQ(out.victims, 1);
    CHECK_EQ(out.shortfall_units, 2);
    CHECK_OK(kvt_policy_evict(policy, 70, 5, victims, 16, sizeof *victims, &out, NULL));
    CHECK_EQ(out.victims, 3);
    CHECK_EQ(out.freed_units, 6);
    CHECK(out.decided_by_bytes > 0);
    CHECK_OK(kvt_policy_release(policy, path, 2, NULL));
    CHECK_OK(kvt_policy_unpin(policy, mixed + 1, 2, NULL));
    CHECK_OK(kvt_policy_evict(policy, 71, 1000, victims, 16, sizeof *victims, &out, NULL));
    CHECK_EQ(out.victims, 5);
    stats = stats_of(policy);
    CHECK_EQ(stats.objects, 0);
    CHECK_EQ(stats.evictions, 9);

    /* Lookups of evicted objects count as evicted references. */
    CHECK_OK(kvt_policy_lookup(policy, 80, &context, path, 5, NULL, NULL, NULL));
    stats = stats_of(policy);
    CHECK_EQ(stats.evicted_references, 4);
    CHECK(stats.re_prefill_rate > 0.39 && stats.re_prefill_rate < 0.41);
    CHECK(stats.jain_sessions > 0 && stats.bytes_per_object > 0);

    kvt_policy_log_entry_t log[16];
    CHECK_OK(kvt_policy_log(policy, 0, log, 16, sizeof *log, &n));
    CHECK_EQ(n, 8); /* the first of nine is overwritten */
    CHECK_EQ(log[0].number, 2);
    CHECK_EQ(log[7].number, 9);
    CHECK_OK(kvt_policy_log(policy, 9, log, 16, sizeof *log, &n));
    CHECK_EQ(n, 1);
    kvt_policy_info_t info = KVT_POLICY_INFO_INIT;
    CHECK_OK(kvt_policy_info(log[0].policy, &info));
    CHECK_OK(kvt_policy_log(policy, 0, NULL, 0, 0, &n));
    close_policy(&policy);
}

static void state_survives_a_switch(void) {
    kvt_policy_t *policy = open_policy("lru", 64, KVT_POLICY_HOLES);
    insert_path(policy, 10, 1, 5, 0);
    const uint64_t one = 1;
    CHECK_OK(kvt_policy_touch(policy, 20, NULL, &one, 1, NULL, NULL));
    CHECK_OK(kvt_policy_pin(policy, &one, 1, NULL));
    kvt_error_t *err = NULL;
    CHECK_IS(kvt_policy_switch(policy, "fifa", 4, &err), KVT_E_SPEC);
    CHECK(strstr(kvt_error_message(err), "fifo") != NULL);
    CHECK_IS(kvt_policy_switch(policy, "custom", 6, &err), KVT_E_INVALID);
    CHECK_OK(kvt_policy_switch(policy, "fifo", 4, &err));
    CHECK_OK(kvt_error_free(&err));
    CHECK_OK(kvt_policy_set_capacity(policy, 77));
    char spec[8];
    uint64_t n = 0;
    CHECK_OK(kvt_policy_spec(policy, spec, sizeof spec, &n));
    CHECK(is_text(spec, n, "fifo"));
    CHECK_IS(kvt_policy_spec(policy, spec, 1, &n), KVT_E_TOO_SMALL);
    CHECK_OK(kvt_policy_spec(policy, NULL, 0, &n));
    CHECK_EQ(n, 4);
    CHECK_EQ(stats_of(policy).capacity_units, 77);
    kvt_policy_victim_t victims[8];
    kvt_policy_outcome_t out = KVT_POLICY_OUTCOME_INIT;
    CHECK_OK(kvt_policy_evict(policy, 30, 100, victims, 8, sizeof *victims, &out, NULL));
    CHECK_EQ(out.victims, 4); /* the pin survives the switch */
    CHECK_EQ(victims[0].id, 5); /* within a call, the first object counts as used last */
    double value = 7;
    CHECK_IS(kvt_policy_gauge(policy, "nonsense", 8, &value, &err), KVT_E_NOT_FOUND);
    CHECK(value == 7);
    CHECK_OK(kvt_policy_switch(policy, "arc", 3, &err));
    uint64_t at = 0;
    const char *name = NULL;
    while (kvt_policy_gauge_at(policy, at, &name, &n, &value) == KVT_OK) {
        double named = -1;
        CHECK_OK(kvt_policy_gauge(policy, name, n, &named, &err));
        CHECK(named == value);
        at += 1;
    }
    CHECK(at >= 5);
    CHECK_OK(kvt_policy_gauge_at(policy, 0, NULL, NULL, NULL));
    value = 7;
    CHECK_IS(kvt_policy_gauge_at(policy, at, &name, &n, &value), KVT_E_NOT_FOUND);
    CHECK_IS(kvt_policy_gauge_at(policy, UINT64_MAX, &name, &n, &value), KVT_E_NOT_FOUND);
    CHECK_IS(kvt_policy_gauge_at(NULL, 0, &name, &n, &value), KVT_E_HANDLE);
    CHECK(value == 7);
    CHECK_OK(kvt_error_free(&err));
    close_policy(&policy);
}

static void advice_follows_the_rules(void) {
    kvt_policy_t *policy = open_policy("lru", 64, 0);
    kvt_policy_advice_rules_t rules = KVT_POLICY_ADVICE_RULES_INIT;
    rules.window = 1;
    rules.patience = 1;
    rules.max_batch = 8;
    CHECK_OK(kvt_policy_set_advice(policy, &rules, NULL));
    CHECK_OK(kvt_policy_lookup(policy, 1, NULL, NULL, 0, NULL, NULL, NULL));
    kvt_policy_advice_t advised = KVT_POLICY_ADVICE_INIT;
    CHECK_OK(kvt_policy_advise(policy, 3, &advised));
    CHECK_EQ(advised.batch, 6); /* nothing is evicted */
    rules.shrink_above = NAN;
    CHECK_IS(kvt_policy_set_advice(policy, &rules, NULL), KVT_E_INVALID);
    rules.shrink_above = 0;
    rules.min_batch = 9;
    CHECK_IS(kvt_policy_set_advice(policy, &rules, NULL), KVT_E_INVALID);
    rules.flags = 64;
    CHECK_IS(kvt_policy_set_advice(policy, &rules, NULL), KVT_E_INVALID);
    CHECK_OK(kvt_policy_set_advice(policy, NULL, NULL));
    CHECK_IS(kvt_policy_advise(policy, 3, NULL), KVT_E_INVALID);
    close_policy(&policy);
}

static void invalid_calls_change_nothing(void) {
    kvt_policy_t *policy = open_policy("lru", 4, 0);
    insert_path(policy, 100, 1, 3, 0);
    const uint64_t ids[] = {1, 2, 1};
    uint64_t n = 77;
    /* The clock. */
    CHECK_IS(kvt_policy_touch(policy, 99, NULL, ids, 1, &n, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_policy_touch(policy, INT64_MAX, NULL, ids, 1, &n, NULL), KVT_E_LIMIT);
    CHECK_IS(kvt_policy_touch(policy, INT64_MIN, NULL, ids, 1, &n, NULL), KVT_E_INVALID);
    CHECK_EQ(n, 77);
    /* Arrays. */
    CHECK_IS(kvt_policy_touch(policy, 100, NULL, NULL, 1, &n, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_policy_touch(policy, 100, NULL, ids, UINT64_MAX, &n, NULL), KVT_E_LIMIT);
    CHECK_IS(kvt_policy_touch(policy, 100, NULL, (const uint64_t *)((const char *)ids + 1), 1, &n,
                              NULL),
             KVT_E_INVALID);
    CHECK_OK(kvt_policy_touch(policy, 100, NULL, NULL, 0, &n, NULL));
    CHECK_EQ(n, 0);
    kvt_policy_context_t context = KVT_POLICY_CONTEXT_INIT;
    context.priority = 256;
    CHECK_IS(kvt_policy_touch(policy, 100, &context, ids, 1, &n, NULL), KVT_E_INVALID);
    context.priority = 0;
    context.flags = 1 << 9;
    CHECK_IS(kvt_policy_touch(policy, 100, &context, ids, 1, &n, NULL), KVT_E_INVALID);
    /* Rows: known ids, duplicates, no size, a huge size, too many. No call has an effect. */
    kvt_policy_object_t rows[3];
    memset(rows, 0, sizeof rows);
    rows[0].id = 8;
    rows[0].units = 1;
    rows[1].id = 1;
    rows[1].units = 1;
    CHECK_IS(kvt_policy_insert(policy, 100, NULL, rows, 2, sizeof *rows, NULL), KVT_E_INVALID);
    rows[1].id = 8;
    CHECK_IS(kvt_policy_insert(policy, 100, NULL, rows, 2, sizeof *rows, NULL), KVT_E_INVALID);
    rows[1].id = 9;
    rows[1].units = 0;
    CHECK_IS(kvt_policy_insert(policy, 100, NULL, rows, 2, sizeof *rows, NULL), KVT_E_INVALID);
    rows[1].units = UINT64_MAX;
    CHECK_IS(kvt_policy_insert(policy, 100, NULL, rows, 2, sizeof *rows, NULL), KVT_E_INVALID);
    rows[1].units = 1;
    CHECK_IS(kvt_policy_insert(policy, 100, NULL, rows, 2, sizeof *rows, NULL), KVT_E_LIMIT);
    rows[1].cost = NAN;
    CHECK_IS(kvt_policy_insert(policy, 100, NULL, rows, 2, sizeof *rows, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_policy_insert(policy, 100, NULL, rows, 1, 12, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_policy_insert(policy, 100, NULL, NULL, 1, sizeof *rows, NULL), KVT_E_INVALID);
    const uint64_t many[] = {21, 22};
    CHECK_IS(kvt_policy_record(policy, 100, NULL, many, NULL, 2, &n, NULL), KVT_E_LIMIT);
    const uint64_t zero[] = {0, 1};
    CHECK_IS(kvt_policy_record(policy, 100, NULL, many, zero, 2, &n, NULL), KVT_E_INVALID);
    CHECK_EQ(stats_of(policy).objects, 3);
    /* Unknown ids, duplicate ids, releases without a reference. */
    const uint64_t unknown[] = {1, 404};
    CHECK_IS(kvt_policy_remove(policy, 100, unknown, 2, NULL), KVT_E_NOT_FOUND);
    CHECK_IS(kvt_policy_remove(policy, 100, ids, 3, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_policy_acquire(policy, unknown, 2, NULL), KVT_E_NOT_FOUND);
    CHECK_IS(kvt_policy_release(policy, ids, 1, NULL), KVT_E_STATE);
    CHECK_IS(kvt_policy_pin(policy, unknown, 2, NULL), KVT_E_NOT_FOUND);
    CHECK_IS(kvt_policy_unpin(policy, unknown, 2, NULL), KVT_E_NOT_FOUND);
    CHECK_IS(kvt_policy_resize(policy, unknown, zero + 1, 1, NULL), KVT_OK);
    CHECK_IS(kvt_policy_resize(policy, ids, zero, 2, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_policy_resize(policy, ids, NULL, 2, NULL), KVT_E_INVALID);
    kvt_policy_hint_t hint = KVT_POLICY_HINT_INIT;
    hint.confidence = NAN;
    CHECK_IS(kvt_policy_hint(policy, 100, NULL, ids, 1, &hint, &n, NULL), KVT_E_INVALID);
    hint.confidence = 0;
    hint.stop = 5;
    CHECK_IS(kvt_policy_hint(policy, 100, NULL, ids, 1, &hint, &n, NULL), KVT_E_INVALID);
    /* Outputs. */
    kvt_policy_outcome_t out = KVT_POLICY_OUTCOME_INIT;
    kvt_policy_victim_t victims[4];
    CHECK_IS(kvt_policy_evict(policy, 100, 1, victims, 4, sizeof *victims, NULL, NULL),
             KVT_E_INVALID);
    CHECK_IS(kvt_policy_evict(policy, 100, 1, NULL, 4, sizeof *victims, &out, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_policy_evict(policy, 100, 1, victims, 4, 0, &out, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_policy_evict(policy, 100, 1, victims, UINT64_MAX, 16, &out, NULL), KVT_E_LIMIT);
    CHECK_IS(kvt_policy_evict(policy, 1, 1, victims, 4, 16, &out, NULL), KVT_E_INVALID);
    CHECK_EQ(stats_of(policy).evictions, 0);
    CHECK_IS(kvt_policy_stats(policy, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_policy_log(policy, 0, NULL, 1, 72, &n), KVT_E_INVALID);
    CHECK_OK(kvt_policy_remove(policy, 100, ids, 2, NULL));
    kvt_policy_t *stale = policy;
    close_policy(&policy);
    CHECK_IS(kvt_policy_touch(stale, 100, NULL, ids, 1, &n, NULL), KVT_E_HANDLE);
    CHECK_IS(kvt_policy_close(&stale), KVT_E_HANDLE);
    CHECK_IS(kvt_policy_evict(NULL, 0, 1, victims, 4, 16, &out, NULL), KVT_E_HANDLE);
}

enum { ROWS = 6 };
static const uint64_t row_ids[ROWS] = {60, 50, 40, 30, 20, 10};
static const uint64_t row_blocks[ROWS] = {4, 4, 4, 4, 4, 4};
static const int64_t row_last[ROWS] = {600, 500, 400, 300, 200, 100};

static kvt_policy_columns_t candidates(void) {
    kvt_policy_columns_t columns = KVT_POLICY_COLUMNS_INIT;
    columns.rows = ROWS;
    columns.ids = row_ids;
    columns.blocks = row_blocks;
    columns.last_access_ns = row_last;
    return columns;
}

static void select_returns_victims_of_columns(void) {
    kvt_policy_t *policy = open_policy("lru", 64, 0);
    kvt_policy_columns_t columns = candidates();
    kvt_policy_pick_t picks[ROWS];
    kvt_policy_selection_t out = KVT_POLICY_SELECTION_INIT;
    out.victims = picks;
    out.victim_capacity = ROWS;
    out.stride_bytes = sizeof *picks;
    CHECK_OK(kvt_policy_select(policy, 1000, &columns, 9, 0, &out, NULL));
    CHECK_EQ(out.victim_count, 3);
    CHECK(picks[0].id == 10 && picks[1].id == 20 && picks[2].id == 30 && picks[2].row == 3);
    CHECK_EQ(out.freed_blocks, 12);
    CHECK(is_text(out.decided_by, out.decided_by_bytes, "lru"));
    CHECK_OK(kvt_policy_select(policy, 1000, &columns, 9, KVT_SELECT_TAIL, &out, NULL));
    CHECK_EQ(out.freed_blocks, 9);
    CHECK(picks[2].freed_blocks == 1 && picks[2].kept_blocks == 3);
    CHECK_OK(kvt_policy_select(policy, 1000, &columns, 0, 0, &out, NULL));
    CHECK_EQ(out.victim_count + out.freed_blocks + out.shortfall_blocks, 0);
    /* Recorded uses override the columns: 10 was just used. */
    const uint64_t ten = 10;
    CHECK_OK(kvt_policy_record(policy, 1001, NULL, &ten, NULL, 1, NULL, NULL));
    CHECK_OK(kvt_policy_select(policy, 1001, &columns, 4, 0, &out, NULL));
    CHECK(out.victim_count == 1 && picks[0].id == 20);
    /* Pinned and shared rows are never chosen. Too large a request leaves a shortfall. */
    const uint8_t pinned[ROWS] = {0, 0, 0, 0, 1, 0};
    const uint32_t refs[ROWS] = {1, 1, 1, 2, 0, 1};
    columns.pinned = pinned;
    columns.refs = refs;
    CHECK_OK(kvt_policy_select(policy, 1001, &columns, 1000, 0, &out, NULL));
    CHECK_EQ(out.victim_count, 4);
    CHECK_EQ(out.shortfall_blocks, 1000 - 16);
    /* Too small an output: only the counts are written. */
    out.victim_capacity = 1;
    out.freed_blocks = 99;
    const uint64_t decisions = stats_of(policy).decisions;
    CHECK_IS(kvt_policy_select(policy, 2000, &columns, 1000, 0, &out, NULL), KVT_E_TOO_SMALL);
    CHECK_EQ(stats_of(policy).decisions, decisions); /* time did not advance either */
    CHECK(out.victim_count == 4 && out.freed_blocks == 99);
    out.victim_capacity = ROWS;

    kvt_error_t *err = NULL;
    uint64_t twice[ROWS] = {60, 50, 40, 30, 20, 60};
    columns.ids = twice;
    CHECK_IS(kvt_policy_select(policy, 1001, &columns, 1, 0, &out, &err), KVT_E_INVALID);
    CHECK(strstr(kvt_error_message(err), "60") != NULL);
    CHECK_OK(kvt_error_free(&err));
    columns = candidates();
    const float confidence[ROWS] = {0, 0, NAN, 0, 0, 0};
    columns.confidence = confidence;
    CHECK_IS(kvt_policy_select(policy, 1001, &columns, 1, 0, &out, NULL), KVT_E_INVALID);
    columns = candidates();
    const double cost[ROWS] = {0, 0, 0, 0, 0, -1};
    columns.cost = cost;
    CHECK_IS(kvt_policy_select(policy, 1001, &columns, 1, 0, &out, NULL), KVT_E_INVALID);
    columns = candidates();
    const uint64_t huge[ROWS] = {1, 1, 1, UINT64_MAX, 1, 1};
    columns.blocks = huge;
    CHECK_IS(kvt_policy_select(policy, 1001, &columns, 1, 0, &out, NULL), KVT_E_LIMIT);
    columns = candidates();
    columns.rows = UINT64_MAX;
    CHECK_IS(kvt_policy_select(policy, 1001, &columns, 1, 0, &out, NULL), KVT_E_LIMIT);
    columns.rows = ROWS;
    columns.ids = NULL;
    CHECK_IS(kvt_policy_select(policy, 1001, &columns, 1, 0, &out, NULL), KVT_E_INVALID);
    columns = candidates();
    CHECK_IS(kvt_policy_select(policy, 1001, &columns, 1, 8, &out, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_policy_select(policy, 1, &columns, 1, 0, &out, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_policy_select(policy, 1001, &columns, 1, 0, NULL, NULL), KVT_E_INVALID);
    CHECK_OK(kvt_policy_select(policy, 1001, NULL, 1, 0, &out, NULL));
    CHECK_EQ(out.shortfall_blocks, 1);
    close_policy(&policy);
}

static void shared_blocks_are_freed_once(void) {
    kvt_policy_t *policy = open_policy("lru", 64, 0);
    kvt_policy_columns_t columns = KVT_POLICY_COLUMNS_INIT;
    /* 1 and 2 share blocks 100 and 101; 3 shares block 300 with an unknown sequence. */
    const uint64_t ids[] = {1, 2, 3};
    const int64_t last[] = {10, 20, 5};
    const uint64_t offsets[] = {0, 3, 6, 7};
    const uint64_t blocks[] = {100, 101, 102, 100, 101, 103, 300};
    const uint32_t refs[] = {2, 2, 1, 2, 2, 1, 2};
    columns.rows = 3;
    columns.ids = ids;
    columns.last_access_ns = last;
    columns.block_offsets = offsets;
    columns.block_ids = blocks;
    columns.block_refs = refs;
    columns.block_entries = 7;
    kvt_policy_pick_t picks[3];
    uint64_t freed[8];
    kvt_policy_selection_t out = KVT_POLICY_SELECTION_INIT;
    out.victims = picks;
    out.victim_capacity = 3;
    out.stride_bytes = sizeof *picks;
    out.block_ids = freed;
    out.block_capacity = 8;
    CHECK_OK(kvt_policy_select(policy, 0, &columns, 1, 0, &out, NULL));
    CHECK(out.victim_count == 1 && picks[0].id == 1 && out.block_count == 1 && freed[0] == 102);
    CHECK_OK(kvt_policy_select(policy, 0, &columns, 2, 0, &out, NULL));
    CHECK_EQ(out.victim_count, 2);
    CHECK_EQ(out.freed_blocks, 4); /* the shared ones once */
    CHECK_EQ(picks[1].first_block, 1);
    out.block_capacity = 3;
    CHECK_IS(kvt_policy_select(policy, 0, &columns, 2, 0, &out, NULL), KVT_E_TOO_SMALL);
    CHECK_EQ(out.block_count, 4);
    out.block_ids = NULL;
    CHECK_OK(kvt_policy_select(policy, 0, &columns, 100, 0, &out, NULL));
    CHECK(out.victim_count == 2 && out.shortfall_blocks == 96);
    columns.block_entries = 6;
    CHECK_IS(kvt_policy_select(policy, 0, &columns, 2, 0, &out, NULL), KVT_E_INVALID);
    columns.block_offsets = NULL;
    CHECK_IS(kvt_policy_select(policy, 0, &columns, 2, 0, &out, NULL), KVT_E_INVALID);
    close_policy(&policy);
}

/* A custom policy that evicts the largest id first. Its callback calls the policy. */
struct own {
    const kvt_policy_t *policy;
    uint64_t touch; /* id to touch inside the callback */
    int bad;
    int calls;
    int destroyed;
};

static kvt_status_t score(void *user_data, const kvt_policy_columns_t *columns, int64_t now_ns,
                          double *out_scores) {
    struct own *own = user_data;
    CHECK_EQ(columns->struct_size, sizeof *columns);
    CHECK(now_ns != 0);
    own->calls++;
    for (uint64_t i = 0; i < columns->rows; i++) {
        out_scores[i] = own->bad == 1 ? NAN : -(double)columns->ids[i];
    }
    if (own->touch != 0) {
        CHECK_OK(kvt_policy_touch(own->policy, 0, NULL, &own->touch, 1, NULL, NULL));
    }
    return own->bad == 2 ? KVT_E_UNAVAILABLE : KVT_OK;
}

static uint32_t predict(void *user_data, uint64_t sequence, uint64_t length, uint64_t max_length,
                        double *out_seconds, double *out_confidence) {
    struct own *own = user_data;
    own->calls++;
    CHECK(length <= max_length);
    *out_seconds = (double)sequence;
    *out_confidence = own->bad ? NAN : 1.0;
    return sequence != 7;
}

static void destroy(void *user_data) { ((struct own *)user_data)->destroyed++; }

static void custom_policy_scores_candidates(void) {
    struct own own = {0}, other = {0};
    kvt_policy_custom_t table = KVT_POLICY_CUSTOM_INIT;
    table.score = score;
    table.user_data = &own;
    table.destroy = destroy;
    kvt_policy_predictor_t predictor = KVT_POLICY_PREDICTOR_INIT;
    predictor.predict = predict;
    predictor.user_data = &other;
    predictor.destroy = destroy;
    kvt_policy_opts_t opts = KVT_POLICY_OPTS_INIT;
    opts.spec = "custom";
    opts.spec_bytes = 6;
    opts.max_objects = 64;
    opts.remember = 64;
    opts.custom = &table;
    opts.predictor = &predictor;
    kvt_policy_t *policy = NULL;
    opts.flags = 1u << 30;
    CHECK_IS(kvt_policy_open(&opts, &policy, NULL), KVT_E_INVALID);
    CHECK_EQ(own.destroyed + other.destroyed, 0);
    opts.flags = 0;
    CHECK_OK(kvt_policy_open(&opts, &policy, NULL));
    own.policy = policy;
    insert_path(policy, 0, 1, 6, 0);
    kvt_policy_victim_t victims[8];
    kvt_policy_outcome_t out = KVT_POLICY_OUTCOME_INIT;
    CHECK_OK(kvt_policy_preview(policy, 0, 3, victims, 8, sizeof *victims, &out, NULL));
    CHECK(out.victims == 2 && victims[0].id == 6 && victims[1].id == 5);
    for (own.bad = 1; own.bad <= 2; own.bad++) {
        CHECK_IS(kvt_policy_evict(policy, 0, 3, victims, 8, sizeof *victims, &out, NULL),
                 own.bad == 1 ? KVT_E_INVALID : KVT_E_UNAVAILABLE);
    }
    own.bad = 0;
    CHECK_EQ(stats_of(policy).objects, 6);
    /* 6 is used while it is scored: 5 is evicted instead. */
    own.touch = 6;
    CHECK_OK(kvt_policy_evict(policy, 0, 2, victims, 8, sizeof *victims, &out, NULL));
    CHECK(out.victims == 1 && victims[0].id == 5);
    CHECK(is_text(out.decided_by, out.decided_by_bytes, "custom"));
    own.touch = 0;

    kvt_policy_columns_t columns = candidates();
    kvt_policy_pick_t picks[ROWS];
    kvt_policy_selection_t chosen = KVT_POLICY_SELECTION_INIT;
    chosen.victims = picks;
    chosen.victim_capacity = ROWS;
    chosen.stride_bytes = sizeof *picks;
    own.calls = 0;
    other.calls = 0;
    CHECK_OK(kvt_policy_select(policy, 0, &columns, 5, 0, &chosen, NULL));
    CHECK(chosen.victim_count == 2 && picks[0].id == 60 && picks[1].id == 50);
    CHECK_EQ(own.calls, 1);
    CHECK_EQ(other.calls, ROWS);
    other.bad = 1; /* NaN counts as no prediction */
    CHECK_OK(kvt_policy_select(policy, 0, &columns, 5, 0, &chosen, NULL));
    own.bad = 1;
    CHECK_IS(kvt_policy_select(policy, 0, &columns, 5, 0, &chosen, NULL), KVT_E_INVALID);
    own.bad = 0;
    other.bad = 0;
    kvt_policy_context_t context = KVT_POLICY_CONTEXT_INIT;
    context.flags = KVT_CONTEXT_SESSION;
    context.session = 3;
    const uint64_t one = 1;
    other.calls = 0;
    CHECK_OK(kvt_policy_lookup(policy, 0, &context, &one, 1, NULL, NULL, NULL));
    CHECK_OK(kvt_policy_record(policy, 0, &context, &one, NULL, 1, NULL, NULL));
    CHECK_EQ(other.calls, 2);
    CHECK_OK(kvt_policy_switch(policy, "lru", 3, NULL));
    CHECK_OK(kvt_policy_switch(policy, "custom", 6, NULL));
    close_policy(&policy);
    CHECK(own.destroyed == 1 && other.destroyed == 1);
}

/* Threads on one policy: no object is lost or evicted twice. */
struct worker {
    const kvt_policy_t *policy;
    uint64_t first;
    uint64_t rounds;
    uint64_t evicted;
};

static void *insert_and_evict(void *data) {
    struct worker *worker = data;
    for (uint64_t i = 0; i < worker->rounds; i++) {
        kvt_policy_object_t row;
        memset(&row, 0, sizeof row);
        row.id = worker->first + i;
        row.units = 1;
        CHECK_OK(kvt_policy_insert(worker->policy, 0, NULL, &row, 1, sizeof row, NULL));
        CHECK_OK(kvt_policy_lookup(worker->policy, 0, NULL, &row.id, 1, NULL, NULL, NULL));
        kvt_policy_victim_t victim;
        kvt_policy_outcome_t out = KVT_POLICY_OUTCOME_INIT;
        CHECK_OK(kvt_policy_evict(worker->policy, 0, i % 2, &victim, 1, sizeof victim, &out, NULL));
        worker->evicted += out.victims;
    }
    return NULL;
}

static void threads_evict_each_object_once(uint64_t rounds) {
    kvt_policy_t *policy = open_policy("lru", 4 * rounds, 0);
    struct worker workers[4];
    pthread_t threads[4];
    for (uint64_t i = 0; i < 4; i++) {
        workers[i] = (struct worker){policy, i << 32, rounds, 0};
        threads[i] = start_thread(insert_and_evict, &workers[i]);
    }
    uint64_t evicted = 0;
    for (int i = 0; i < 4; i++) {
        join_thread(threads[i]);
        evicted += workers[i].evicted;
    }
    const kvt_policy_stats_t stats = stats_of(policy);
    CHECK_EQ(stats.evictions, evicted);
    CHECK_EQ(stats.objects + evicted, 4 * rounds);
    close_policy(&policy);
}

int main(int argc, char **argv) {
    check_begin();
    policies_open_with_valid_specs_only();
    evictions_respect_references_and_pins("lru");
    evictions_respect_references_and_pins("fifo");
    state_survives_a_switch();
    advice_follows_the_rules();
    invalid_calls_change_nothing();
    select_returns_victims_of_columns();
    shared_blocks_are_freed_once();
    custom_policy_scores_candidates();
    threads_evict_each_object_once(count_arg(argc, argv, 5000));
    return check_end("policy");
}
