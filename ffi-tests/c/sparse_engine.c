/* Tests of sparse policies and kernels for an engine that keeps KV itself: prefill with an index
 * and jobs on threads, eviction by sums of attention weights, decode with chosen pages, a custom
 * policy. Every result is compared with attention computed here in double, key by key. */

#include "check.h"

#include <math.h>

#define LAYERS 3
#define QUERY_HEADS 4
#define HEADS 2
#define DIM 16
#define VALUES 8
#define BLOCK 16
#define TOKENS 256
#define THREADS 3

static uint64_t seed = 4711;
static float q[TOKENS * QUERY_HEADS * DIM], k[TOKENS * HEADS * DIM], v[TOKENS * HEADS * VALUES];
static float out[TOKENS * QUERY_HEADS * VALUES], lse[TOKENS * QUERY_HEADS];

static kvt_attention_t shape;

static float number(void) {
    return (float)(next_random(&seed) >> 40) / (float)(1 << 23) - 1.0f;
}

static kvt_rows_t rows(const float *at, uint32_t tokens, uint32_t heads, uint32_t dim) {
    kvt_rows_t r = KVT_ROWS_INIT;
    r.view.address = (void *)at;
    r.view.tokens = tokens;
    r.view.heads = heads;
    r.view.run_bytes = dim * sizeof(float);
    r.dtype = KVT_DTYPE_F32;
    return r;
}

static kvt_sparse_t *open_policy(const char *spec, const kvt_account_t *account) {
    kvt_sparse_opts_t opts = KVT_SPARSE_OPTS_INIT;
    opts.attention = &shape;
    opts.spec = spec;
    opts.spec_bytes = strlen(spec);
    opts.account = account;
    kvt_sparse_t *policy = NULL;
    kvt_error_t *err = NULL;
    const kvt_status_t status = kvt_sparse_open(&opts, &policy, &err);
    if (status != KVT_OK) fprintf(stderr, "%s: %s\n", spec, kvt_error_message(err));
    CHECK_OK(status);
    return policy;
}

static kvt_sparse_context_t at(int is_prefill, uint32_t first, uint32_t tokens) {
    kvt_sparse_context_t context = KVT_SPARSE_CONTEXT_INIT;
    context.is_prefill = is_prefill != 0;
    context.first_query = first;
    context.tokens = tokens;
    return context;
}

/* An index with enough capacity for a test. */
typedef struct {
    kvt_index_head_t heads[QUERY_HEADS];
    uint32_t starts[QUERY_HEADS * (TOKENS + 2)], items[QUERY_HEADS * TOKENS * 4];
    kvt_index_t index;
} lists_t;

static void reset_lists(lists_t *lists) {
    const kvt_index_t none = KVT_INDEX_INIT;
    lists->index = none;
    lists->index.heads = lists->heads;
    lists->index.head_capacity = QUERY_HEADS;
    lists->index.starts = lists->starts;
    lists->index.start_capacity = sizeof lists->starts / sizeof lists->starts[0];
    lists->index.items = lists->items;
    lists->index.item_capacity = sizeof lists->items / sizeof lists->items[0];
}

static int has(const kvt_index_t *index, uint32_t list, uint32_t item) {
    for (uint32_t i = index->starts[list]; i < index->starts[list + 1]; i++)
        if (index->items[i] == item) return 1;
    return 0;
}

/* Whether a query at a position sees a key, by the definition in the header. */
static int sees(const kvt_index_t *index, uint32_t head, uint32_t first, uint32_t query,
                uint32_t key) {
    if (key > query) return 0;
    if (index == NULL || index->head_count == 0) return 1;
    const uint64_t n = index->head_count;
    CHECK(n == 1 || n == HEADS || n == QUERY_HEADS);
    const kvt_index_head_t of =
        index->heads[n == 1 ? 0 : n == HEADS ? head / (QUERY_HEADS / HEADS) : head];
    const uint32_t row = of.query_block == 0 ? 0 : (query - first) / of.query_block;
    if (of.kind == KVT_INDEX_DENSE || query >= of.dense_from) return 1;
    if (of.kind == KVT_INDEX_LINES)
        return has(index, of.first, key) || has(index, of.first + 1, query - key);
    if (of.kind == KVT_INDEX_BLOCKS) return has(index, of.first + row, key / of.key_block);
    CHECK_EQ(of.kind, KVT_INDEX_RANGES);
    if (has(index, of.first, key)) return 1;
    const uint32_t list = of.first + 1 + row;
    for (uint32_t i = index->starts[list]; i < index->starts[list + 1]; i += 2)
        if (key >= index->items[i] && key < index->items[i + 1]) return 1;
    return 0;
}

/* Attention of one query and head. Adds the weight of each key to `sums` unless it is NULL. */
static double attend(const kvt_index_t *index, uint32_t first, uint32_t query, uint32_t head,
                     double *result, double *sums) {
    double logits[TOKENS], all = 0, most = -INFINITY;
    const uint32_t of = head / (QUERY_HEADS / HEADS);
    for (uint32_t d = 0; d < VALUES; d++) result[d] = 0;
    for (uint32_t key = 0; key <= query; key++) {
        logits[key] = -INFINITY;
        if (!sees(index, head, first, query, key)) continue;
        double dot = 0;
        for (uint32_t d = 0; d < DIM; d++)
            dot += (double)q[(query * QUERY_HEADS + head) * DIM + d] *
                   k[(key * HEADS + of) * DIM + d];
        logits[key] = dot / sqrt(DIM);
        if (logits[key] > most) most = logits[key];
    }
    for (uint32_t key = 0; key <= query; key++) all += exp(logits[key] - most);
    for (uint32_t key = 0; key <= query; key++) {
        const double share = exp(logits[key] - most) / all;
        for (uint32_t d = 0; d < VALUES; d++)
            result[d] += share * v[(key * HEADS + of) * VALUES + d];
        if (sums != NULL) sums[head * TOKENS + key] += share;
    }
    return most + log(all);
}

static void expect_near(double got, double want) {
    if (!(fabs(got - want) < 2e-5)) {
        fprintf(stderr, "got %.9g, expected %.9g\n", got, want);
        exit(1);
    }
}

/* Compares outputs and log-sum-exps of all queries from `first` on. */
static void compare(const kvt_index_t *index, uint32_t first, uint32_t tokens) {
    for (uint32_t query = first; query < tokens; query++)
        for (uint32_t head = 0; head < QUERY_HEADS; head++) {
            double want[VALUES];
            const uint32_t row = (query - first) * QUERY_HEADS + head;
            expect_near(lse[row], attend(index, first, query, head, want, NULL));
            for (uint32_t d = 0; d < VALUES; d++) expect_near(out[row * VALUES + d], want[d]);
        }
}

/* A worker of the engine: it runs every THREADSth item of a step. */
typedef struct {
    kvt_attention_job_t *job;
    uint32_t step, first, items, scratch_count;
} work_t;

static void *run_items(void *data) {
    const work_t *work = data;
    float *scratch = malloc(work->scratch_count * sizeof(float) + 4);
    CHECK(scratch != NULL);
    for (uint32_t item = work->first; item < work->items; item += THREADS)
        CHECK_OK(kvt_attention_job_run(work->job, work->step, item, 1, scratch, work->scratch_count, NULL));
    free(scratch);
    return NULL;
}

static void run_job(kvt_attention_job_t *job) {
    kvt_attention_job_info_t info = KVT_ATTENTION_JOB_INFO_INIT;
    CHECK_OK(kvt_attention_job_info(job, &info));
    CHECK(info.steps == 1 || info.steps == 2);
    for (uint32_t step = 0; step < info.steps; step++) {
        pthread_t threads[THREADS];
        work_t of[THREADS];
        for (uint32_t i = 0; i < THREADS; i++) {
            const uint32_t items = step == 0 ? info.items : info.last_items;
            const work_t one = {job, step, i, items, (uint32_t)info.scratch_count};
            of[i] = one;
            CHECK(pthread_create(&threads[i], NULL, run_items, &of[i]) == 0);
        }
        for (uint32_t i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    }
    CHECK_IS(kvt_attention_job_run(job, info.steps, 0, 1, NULL, 0, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_attention_job_run(job, 0, info.items + 1, 1, NULL, 0, NULL), KVT_E_INVALID);
}

static kvt_attention_args_t problem_of(const kvt_rows_t *queries, const kvt_rows_t *keys,
                                const kvt_rows_t *values, const kvt_index_t *index,
                                uint32_t first) {
    kvt_attention_args_t problem = KVT_ATTENTION_ARGS_INIT;
    problem.queries = queries;
    problem.keys = keys;
    problem.values = values;
    problem.select = index;
    problem.first_query = first;
    return problem;
}

/* Prefill of the queries from `first` on, by a job on threads. */
static void prefill(const kvt_index_t *index, uint32_t first, uint32_t tokens) {
    const kvt_rows_t queries = rows(q + first * QUERY_HEADS * DIM, tokens - first, QUERY_HEADS, DIM);
    const kvt_rows_t keys = rows(k, tokens, HEADS, DIM), values = rows(v, tokens, HEADS, VALUES);
    const kvt_attention_args_t problem = problem_of(&queries, &keys, &values, index, first);
    kvt_attention_job_t *job = NULL;
    const uint64_t n = (tokens - first) * QUERY_HEADS;
    CHECK_IS(kvt_prefill_open(&problem, out, n * VALUES - 1, lse, n, &job, NULL), KVT_E_TOO_SMALL);
    CHECK(job == NULL);
    CHECK_OK(kvt_prefill_open(&problem, out, n * VALUES, lse, n, &job, NULL));
    run_job(job);
    CHECK_OK(kvt_attention_job_close(&job));
    CHECK(job == NULL);
}

/* Prefill with the keys that a policy's index chooses. */
static void prefill_follows_the_index(const char *spec) {
    static lists_t lists;
    kvt_sparse_t *policy = open_policy(spec, NULL);
    kvt_sparse_traits_t traits = KVT_SPARSE_TRAITS_INIT;
    CHECK_OK(kvt_sparse_traits(policy, &traits));
    CHECK(traits.caps & KVT_SPARSE_INDEX_PREFILL);
    const kvt_rows_t queries = rows(q, TOKENS, QUERY_HEADS, DIM), keys = rows(k, TOKENS, HEADS, DIM);
    const kvt_rows_t values = rows(v, TOKENS, HEADS, VALUES);
    const kvt_sparse_context_t context = at(1, 0, TOKENS);
    const int wants_keys = (traits.needs & KVT_NEEDS_ALL_KEYS) != 0;

    /* First without capacity: the call returns the needed sizes, and keeps the index. */
    kvt_index_t needed = KVT_INDEX_INIT;
    const kvt_status_t status =
        kvt_sparse_index(policy, 1, &queries, wants_keys ? &keys : NULL, &context, &needed, NULL);
    CHECK(status == KVT_OK || status == KVT_E_TOO_SMALL);
    reset_lists(&lists);
    CHECK_OK(kvt_sparse_last_index(policy, &lists.index, NULL));
    CHECK_EQ(lists.index.head_count, needed.head_count);
    CHECK_EQ(lists.index.start_count, needed.start_count);
    CHECK_EQ(lists.index.item_count, needed.item_count);
    CHECK_EQ(status == KVT_OK, needed.item_count == 0);
    prefill(&lists.index, 0, TOKENS);
    compare(&lists.index, 0, TOKENS);

    /* In one call on this thread the result has the same bits. */
    static float again[TOKENS * QUERY_HEADS * VALUES];
    CHECK_OK(kvt_sparse_prefill_attention(policy, 1, &queries, &keys, &values, &context, again,
                                          TOKENS * QUERY_HEADS * VALUES, NULL, 0, NULL));
    CHECK(memcmp(again, out, sizeof out) == 0);
    CHECK_IS(kvt_sparse_prefill_attention(policy, 1, &queries, &keys, &values, &context, again,
                                          TOKENS * QUERY_HEADS * VALUES - 1, NULL, 0, NULL),
             KVT_E_TOO_SMALL);
    CHECK_OK(kvt_sparse_close(&policy));
    CHECK(policy == NULL);
}

/* Merged results over pieces of the keys equal the result over all keys. */
static void merged_pieces_equal_all_keys(void) {
    static float part[TOKENS * QUERY_HEADS * VALUES], part_lse[TOKENS * QUERY_HEADS];
    const uint32_t cuts[] = {0, 50, 53, 192, TOKENS}, rows_of = TOKENS * QUERY_HEADS;
    const kvt_rows_t queries = rows(q, TOKENS, QUERY_HEADS, DIM);
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t first = cuts[i], n = cuts[i + 1] - first;
        const kvt_rows_t keys = rows(k + first * HEADS * DIM, n, HEADS, DIM);
        const kvt_rows_t values = rows(v + first * HEADS * VALUES, n, HEADS, VALUES);
        kvt_attention_args_t problem = problem_of(&queries, &keys, &values, NULL, 0);
        problem.first_key = first;
        kvt_attention_job_t *job = NULL;
        CHECK_OK(kvt_prefill_open(&problem, i == 0 ? out : part, rows_of * VALUES,
                                  i == 0 ? lse : part_lse, rows_of, &job, NULL));
        run_job(job);
        CHECK_OK(kvt_attention_job_close(&job));
        if (i > 0)
            CHECK_OK(kvt_attention_merge(out, lse, part, part_lse, rows_of, VALUES, NULL));
    }
    compare(NULL, 0, TOKENS);
}

static uint64_t held_bytes(const kvt_account_t *account) {
    uint64_t reserved = 0, used = 0;
    CHECK_OK(kvt_account_held(account, KVT_TIER_HOST, &reserved, &used));
    return used;
}

/* The policy keeps the tokens with the largest sums of weights. */
static void tokens_with_large_sums_are_kept(void) {
    static double want[QUERY_HEADS * TOKENS];
    static float sums[QUERY_HEADS * TOKENS];
    kvt_runtime_t *runtime = open_runtime(1, NULL);
    kvt_budget_opts_t limits = KVT_BUDGET_OPTS_INIT;
    limits.host_bytes = 1 << 24;
    kvt_budget_t *budget = NULL;
    kvt_account_t *account = NULL;
    CHECK_OK(kvt_budget_open(runtime, &limits, &budget, NULL));
    CHECK_OK(kvt_account_open(budget, NULL, &account, NULL));
    kvt_sparse_t *policy = open_policy("h2o(sink=2,recent=10,budget=20)", account);
    prefill(NULL, 0, TOKENS);
    const kvt_rows_t queries = rows(q, TOKENS, QUERY_HEADS, DIM), keys = rows(k, TOKENS, HEADS, DIM);
    const kvt_rows_t values = rows(v, TOKENS, HEADS, VALUES);
    const kvt_attention_args_t problem = problem_of(&queries, &keys, &values, NULL, 0);
    kvt_attention_job_t *job = NULL;
    CHECK_OK(kvt_column_sums_open(&problem, lse, TOKENS * QUERY_HEADS, 0, KVT_SUMS_BY_HEAD, sums,
                           QUERY_HEADS * TOKENS, &job, NULL));
    run_job(job);
    CHECK_OK(kvt_attention_job_close(&job));
    for (uint32_t query = 0; query < TOKENS; query++)
        for (uint32_t head = 0; head < QUERY_HEADS; head++) {
            double result[VALUES];
            attend(NULL, 0, query, head, result, want);
        }
    for (uint32_t i = 0; i < QUERY_HEADS * TOKENS; i++) CHECK(fabs(sums[i] - want[i]) < 1e-3);

    CHECK_OK(kvt_sparse_append(policy, 0, 0, &keys, NULL));
    CHECK_OK(kvt_sparse_observe(policy, 0, TOKENS, sums, QUERY_HEADS * TOKENS, TOKENS, NULL));
    CHECK_IS(kvt_sparse_observe(policy, LAYERS, TOKENS, sums, 4, 1, NULL), KVT_E_INVALID);
    kvt_sparse_stats_t stats = KVT_SPARSE_STATS_INIT;
    CHECK_OK(kvt_sparse_stats(policy, &stats));
    CHECK(stats.state_bytes > 0);
    CHECK_EQ(held_bytes(account), stats.state_bytes);

    const kvt_sparse_context_t context = at(1, 0, TOKENS);
    uint32_t starts[HEADS + 1], items[HEADS * TOKENS], evicted = 9;
    kvt_token_lists_t keep = KVT_TOKEN_LISTS_INIT;
    CHECK_IS(kvt_sparse_plan_eviction(policy, 0, &context, &keep, &evicted, NULL), KVT_E_TOO_SMALL);
    CHECK_EQ(keep.start_count, HEADS + 1);
    CHECK_EQ(evicted, 9);
    CHECK_IS(kvt_sparse_last_retained(policy, &keep, NULL), KVT_E_TOO_SMALL);
    keep.starts = starts;
    keep.start_capacity = HEADS + 1;
    keep.items = items;
    keep.item_capacity = HEADS * TOKENS;
    CHECK_OK(kvt_sparse_plan_eviction(policy, 0, &context, &keep, &evicted, NULL));
    CHECK_EQ(evicted, 1);
    CHECK_EQ(keep.item_count, HEADS * 32);
    /* The kept tokens are the heaviest ones by the sums computed here; a group shares its sum. */
    for (uint32_t head = 0; head < HEADS; head++) {
        const uint32_t *list = items + starts[head];
        CHECK_EQ(starts[head + 1] - starts[head], 32);
        double least = INFINITY, most_evicted = 0;
        for (uint32_t key = 0, i = 0; key < TOKENS; key++) {
            const double got = want[(2 * head) * TOKENS + key] + want[(2 * head + 1) * TOKENS + key];
            const int is_kept = i < 32 && list[i] == key;
            i += is_kept != 0;
            if (key < 2 || key >= TOKENS - 10) CHECK(is_kept);
            else if (is_kept && got < least) least = got;
            else if (!is_kept && got > most_evicted) most_evicted = got;
        }
        CHECK(least > most_evicted - 1e-3);
    }
    uint32_t again[HEADS * TOKENS];
    keep.items = again;
    CHECK_OK(kvt_sparse_last_retained(policy, &keep, NULL));
    CHECK(memcmp(again, items, HEADS * 32 * sizeof *items) == 0);
    keep.items = items;
    items[0] = items[1];
    CHECK_IS(kvt_sparse_commit_eviction(policy, 0, &keep, NULL), KVT_E_INVALID);
    items[0] = 0;
    CHECK_OK(kvt_sparse_commit_eviction(policy, 0, &keep, NULL));
    CHECK_OK(kvt_sparse_plan_eviction(policy, 0, &context, &keep, &evicted, NULL));
    CHECK_EQ(evicted, 0);
    CHECK_EQ(keep.start_count, 0);
    CHECK_OK(kvt_sparse_reset(policy));
    CHECK_OK(kvt_sparse_close(&policy));
    CHECK_EQ(held_bytes(account), 0);
    CHECK_OK(kvt_account_close(&account, NULL));
    CHECK_OK(kvt_budget_close(&budget, NULL));
    close_runtime(&runtime);
}

/* The policy selects offloaded blocks for a query, and decode uses their pages. */
static void decode_uses_selected_pages(void) {
    static lists_t lists;
    kvt_sparse_t *policy = open_policy("quest(budget=64,page=16,dense=0)", NULL), *copy = NULL;
    uint32_t candidates[TOKENS / BLOCK], ids[TOKENS / BLOCK + 1];
    for (uint32_t id = 0; id < TOKENS / BLOCK; id++) {
        const kvt_rows_t keys = rows(k + id * BLOCK * HEADS * DIM, BLOCK, HEADS, DIM);
        CHECK_OK(kvt_sparse_add_block(policy, 2, id, id * BLOCK, &keys, NULL));
        candidates[id] = TOKENS / BLOCK - 1 - id;
    }
    const uint32_t last = TOKENS - 1;
    const kvt_rows_t query = rows(q + last * QUERY_HEADS * DIM, 1, QUERY_HEADS, DIM);
    const kvt_sparse_context_t context = at(0, last, TOKENS);
    uint64_t count = 0;
    CHECK_IS(kvt_sparse_select(policy, 2, &query, candidates, TOKENS / BLOCK, &context, ids, 15,
                               &count, NULL),
             KVT_E_TOO_SMALL);
    CHECK_EQ(count, TOKENS / BLOCK);
    CHECK_OK(kvt_sparse_select(policy, 2, &query, candidates, TOKENS / BLOCK, &context, ids,
                               TOKENS / BLOCK + 1, &count, NULL));
    CHECK(count >= 4 && count < TOKENS / BLOCK);
    for (uint64_t i = 0; i < TOKENS / BLOCK + 1; i++)
        CHECK(i < count ? ids[i] < TOKENS / BLOCK && (i == 0 || ids[i] > ids[i - 1])
                        : ids[i] == KVT_SPARSE_NO_ID);
    candidates[0] = candidates[1];
    uint64_t unchanged = 77;
    CHECK_IS(kvt_sparse_select(policy, 2, &query, candidates, TOKENS / BLOCK, &context, ids,
                               TOKENS / BLOCK, &unchanged, NULL),
             KVT_E_INVALID);
    CHECK_EQ(unchanged, 77);

    /* The keys that a query sees are a subset of the loaded blocks. */
    reset_lists(&lists);
    CHECK_OK(kvt_sparse_index(policy, 2, &query, NULL, &context, &lists.index, NULL));
    CHECK_EQ(lists.index.head_count, QUERY_HEADS);
    for (uint32_t head = 0; head < QUERY_HEADS; head++)
        for (uint32_t key = 0; key < TOKENS; key++)
            if (sees(&lists.index, head, last, last, key)) {
                uint64_t i = 0;
                while (i < count && ids[i] != key / BLOCK) i++;
                CHECK(i < count);
            }
    const kvt_rows_t keys = rows(k, TOKENS, HEADS, DIM), values = rows(v, TOKENS, HEADS, VALUES);
    const kvt_attention_args_t problem = problem_of(&query, &keys, &values, &lists.index, last);
    uint64_t need = 0;
    CHECK_OK(kvt_decode_memory(&problem, KVT_DECODE_SCORES, &need, NULL));
    float *memory = malloc(need * sizeof(float));
    CHECK(memory != NULL);
    kvt_attention_job_t *job = NULL;
    CHECK_IS(kvt_decode_open(&problem, KVT_DECODE_SCORES, out, QUERY_HEADS * VALUES, lse,
                             QUERY_HEADS, memory, need - 1, &job, NULL),
             KVT_E_TOO_SMALL);
    CHECK_OK(kvt_decode_open(&problem, KVT_DECODE_SCORES, out, QUERY_HEADS * VALUES, lse,
                             QUERY_HEADS, memory, need, &job, NULL));
    run_job(job);
    compare(&lists.index, last, TOKENS);
    CHECK_OK(kvt_attention_job_close(&job));
    free(memory);

    /* The policy's state of a block can be saved and restored, and a fork copies it. */
    uint8_t saved[4096];
    uint64_t bytes = 0, zero = 1;
    CHECK_OK(kvt_sparse_save(policy, 2, 3, saved, sizeof saved, &bytes, NULL));
    CHECK(bytes > 0);
    CHECK_IS(kvt_sparse_save(policy, 2, 3, saved, bytes - 1, &zero, NULL), KVT_E_TOO_SMALL);
    CHECK_IS(kvt_sparse_save(policy, 1, 3, saved, sizeof saved, &zero, NULL), KVT_E_NOT_FOUND);
    CHECK_OK(kvt_sparse_fork(policy, &copy, NULL));
    CHECK_OK(kvt_sparse_reset(policy));
    CHECK_OK(kvt_sparse_load(policy, 2, 3, 3 * BLOCK, saved, bytes, NULL));
    saved[bytes / 2] ^= 1;
    const kvt_status_t spoilt = kvt_sparse_load(policy, 2, 4, 4 * BLOCK, saved, bytes - 1, NULL);
    CHECK_EQ(spoilt, KVT_E_CORRUPT);
    candidates[0] = 15;
    CHECK_OK(kvt_sparse_select(copy, 2, &query, candidates, TOKENS / BLOCK, &context, ids,
                               TOKENS / BLOCK, &unchanged, NULL));
    CHECK_EQ(unchanged, count);
    CHECK_OK(kvt_sparse_truncate(copy, 100, NULL));
    CHECK_OK(kvt_sparse_close(&copy));
    CHECK_OK(kvt_sparse_close(&policy));

    /* Boxes and scores alone: a page's score bounds every product in it. */
    static float boxes[TOKENS / BLOCK * HEADS * 2 * DIM], scores[QUERY_HEADS * (TOKENS / BLOCK)];
    static float scratch[QUERY_HEADS * (2 * DIM + 96) + 4096];
    CHECK_OK(kvt_pages_extend(boxes, sizeof boxes / sizeof boxes[0], BLOCK, 0, &keys, NULL));
    const kvt_rows_t of = rows(boxes, TOKENS / BLOCK, HEADS, 2 * DIM);
    CHECK_OK(kvt_pages_score(&of, &query, 0, TOKENS / BLOCK, scores, QUERY_HEADS * TOKENS / BLOCK,
                             scratch, sizeof scratch / sizeof scratch[0], NULL));
    for (uint32_t head = 0; head < QUERY_HEADS; head++)
        for (uint32_t key = 0; key < TOKENS; key++) {
            double dot = 0;
            for (uint32_t d = 0; d < DIM; d++)
                dot += (double)q[(last * QUERY_HEADS + head) * DIM + d] *
                       k[(key * HEADS + head / 2) * DIM + d];
            CHECK(scores[head * (TOKENS / BLOCK) + key / BLOCK] > dot - 1e-4);
        }
}

/* A buffer has some blocks followed by the tail. An index of positions becomes an index of the
 * buffer's rows, and sums of rows become sums of positions for an evicting policy. */
static void index_and_sums_are_mapped_to_buffer_rows(void) {
    static lists_t wanted, of_rows;
    static float some_k[TOKENS * HEADS * DIM], some_v[TOKENS * HEADS * VALUES];
    static float sums[QUERY_HEADS * TOKENS], placed[QUERY_HEADS * TOKENS];
    const uint32_t ids[] = {0, 3, 7, 9}, tail = 5, tokens = 165, last = tokens - 1;
    kvt_block_placement_t buffer = KVT_BLOCK_PLACEMENT_INIT;
    buffer.blocks = ids;
    buffer.block_count = 4;
    buffer.block_tokens = BLOCK;
    buffer.tail_first = 160;
    buffer.tail_tokens = tail;
    uint32_t n = 0, position[TOKENS];
    for (uint32_t i = 0; i < 4; i++)
        for (uint32_t t = 0; t < BLOCK; t++) position[n++] = ids[i] * BLOCK + t;
    for (uint32_t t = 0; t < tail; t++) position[n++] = 160 + t;
    for (uint32_t row = 0; row < n; row++) {
        memcpy(some_k + row * HEADS * DIM, k + position[row] * HEADS * DIM, HEADS * DIM * 4);
        memcpy(some_v + row * HEADS * VALUES, v + position[row] * HEADS * VALUES,
               HEADS * VALUES * 4);
    }

    /* The index chooses blocks of 8 tokens for each head; one of them is not in the buffer. */
    uint32_t starts[QUERY_HEADS + 1] = {0}, items[64], count = 0;
    kvt_index_head_t heads[QUERY_HEADS];
    for (uint32_t head = 0; head < QUERY_HEADS; head++) {
        const uint32_t all[] = {0, head < 2 ? 1 : 2, 6, 7, 14 + head % 2, 18, 19, 20};
        const kvt_index_head_t one = {KVT_INDEX_BLOCKS, head, 1, 0, 8, UINT32_MAX};
        heads[head] = one;
        for (uint32_t i = 0; i < 8; i++) items[count++] = all[i];
        starts[head + 1] = count;
    }
    reset_lists(&wanted);
    wanted.index.heads = heads;
    wanted.index.head_count = QUERY_HEADS;
    wanted.index.starts = starts;
    wanted.index.start_count = QUERY_HEADS + 1;
    wanted.index.items = items;
    wanted.index.item_count = count;
    reset_lists(&of_rows);
    uint32_t first = 0;
    CHECK_OK(kvt_index_place(&shape, &buffer, &wanted.index, last, 1, &of_rows.index, &first, NULL));
    CHECK_EQ(first, n - 1);
    for (uint32_t head = 0; head < QUERY_HEADS; head++)
        for (uint32_t row = 0; row < n; row++)
            CHECK_EQ(sees(&of_rows.index, head, first, first, row),
                     sees(&wanted.index, head, last, last, position[row]));

    const kvt_rows_t query = rows(q + last * QUERY_HEADS * DIM, 1, QUERY_HEADS, DIM);
    const kvt_rows_t keys = rows(some_k, n, HEADS, DIM), values = rows(some_v, n, HEADS, VALUES);
    const kvt_attention_args_t problem = problem_of(&query, &keys, &values, &of_rows.index, first);
    kvt_kernel_limits_t limits = KVT_KERNEL_LIMITS_INIT;
    limits.flags = KVT_DECODE_SCORES;
    limits.queries = 2;
    limits.keys = limits.tokens = TOKENS;
    limits.query_heads = QUERY_HEADS;
    limits.key_dim = DIM;
    limits.value_dim = VALUES;
    uint64_t need = 0, most = 0, scratch = 0;
    CHECK_OK(kvt_kernel_workspace(KVT_KERNEL_DECODE, &limits, &most, &scratch, NULL));
    CHECK_OK(kvt_decode_memory(&problem, KVT_DECODE_SCORES, &need, NULL));
    CHECK(need <= most && scratch > 0);
    CHECK_IS(kvt_kernel_workspace(9, &limits, &most, &scratch, NULL), KVT_E_INVALID);
    float *memory = malloc(most * sizeof(float));
    CHECK(memory != NULL);
    kvt_attention_job_t *job = NULL;
    CHECK_OK(kvt_decode_open(&problem, KVT_DECODE_SCORES, out, QUERY_HEADS * VALUES, lse,
                             QUERY_HEADS, memory, most, &job, NULL));
    run_job(job);

    /* Each head has as many sums as the head that sees the most rows. */
    kvt_attention_job_info_t info = KVT_ATTENTION_JOB_INFO_INIT;
    CHECK_OK(kvt_attention_job_info(job, &info));
    uint64_t longest = 0;
    for (uint32_t head = 0; head < QUERY_HEADS; head++) {
        uint64_t seen = 0;
        for (uint32_t row = 0; row < n; row++) seen += sees(&of_rows.index, head, first, first, row);
        if (seen > longest) longest = seen;
    }
    CHECK_EQ(info.sum_keys, longest);
    memset(sums, 0, sizeof sums);
    CHECK_OK(kvt_decode_sums(job, KVT_SUMS_BY_HEAD, sums, QUERY_HEADS * longest, NULL));
    CHECK_OK(kvt_attention_job_close(&job));
    free(memory);
    kvt_resident_tokens_t resident = KVT_RESIDENT_TOKENS_INIT;
    resident.attention = &shape;
    resident.tokens = tokens;
    memset(placed, 0, sizeof placed);
    CHECK_OK(kvt_column_sums_place(&resident, &buffer, &of_rows.index, first, 1, sums, QUERY_HEADS * longest,
                            placed, QUERY_HEADS * tokens, NULL));
    for (uint32_t head = 0; head < QUERY_HEADS; head++) {
        double all = 0, shares[TOKENS] = {0};
        for (uint32_t row = 0; row < n; row++) {
            if (!sees(&of_rows.index, head, first, first, row)) continue;
            double dot = 0;
            for (uint32_t d = 0; d < DIM; d++)
                dot += (double)q[(last * QUERY_HEADS + head) * DIM + d] *
                       k[(position[row] * HEADS + head / 2) * DIM + d];
            all += shares[position[row]] = exp(dot / sqrt(DIM));
        }
        for (uint32_t key = 0; key < tokens; key++)
            expect_near(placed[head * tokens + key], shares[key] / all);
    }
    buffer.tail_first = 100;
    CHECK_IS(kvt_index_place(&shape, &buffer, &wanted.index, last, 1, &of_rows.index, &first, NULL),
             KVT_E_INVALID);
}

/* A custom policy: every fourth block, and a window of keys. */
typedef struct {
    uint32_t sealed, sealed_all, selects, forks, freed, attends;
    kvt_index_head_t head;
    uint32_t starts[3], items[1 + 8];
    kvt_sparse_t *self;
} own_t;

static kvt_status_t on_prefill_offload(void *data, uint32_t block, uint32_t layer, uint32_t first,
                                       const kvt_rows_t *keys) {
    own_t *own = data;
    CHECK_EQ(first, block * BLOCK);
    CHECK_EQ(keys->view.tokens, BLOCK);
    CHECK(memcmp(keys->view.address, k + first * HEADS * DIM, BLOCK * HEADS * DIM * 4) == 0);
    own->sealed += layer + 1;
    return layer == 2 ? KVT_E_LIMIT : KVT_OK;
}

static kvt_status_t on_decode_offload(void *data, uint32_t block, uint32_t first,
                                      const kvt_rows_t *keys, uint32_t layers) {
    own_t *own = data;
    CHECK_EQ(layers, LAYERS);
    for (uint32_t i = 0; i < layers; i++) CHECK_EQ(keys[i].view.tokens, BLOCK);
    own->sealed_all += block + first;
    return KVT_OK;
}

static kvt_status_t select_blocks(void *data, uint32_t layer, const kvt_rows_t *query,
                                  const uint32_t *candidates, uint64_t count,
                                  const kvt_sparse_context_t *context, uint32_t *ids,
                                  uint64_t *count_out) {
    own_t *own = data;
    own->selects++;
    if (query == NULL) return KVT_E_STATE;
    CHECK_EQ(query->view.heads, QUERY_HEADS);
    CHECK_EQ(context->tokens, TOKENS);
    /* Inside a callback the policy is busy. */
    CHECK_IS(kvt_sparse_reset(own->self), KVT_E_BUSY);
    kvt_sparse_traits_t work = KVT_SPARSE_TRAITS_INIT;
    CHECK_OK(kvt_sparse_traits(own->self, &work));
    CHECK_EQ(work.flags, KVT_SPARSE_SELECTS);
    *count_out = 0;
    for (uint64_t i = count; i-- > 0;)
        if (candidates[i] % 4 == 0) ids[(*count_out)++] = candidates[i];
    /* At layer 1 the policy returns an invalid block. */
    if (layer == 1) ids[0] = 1000;
    return KVT_OK;
}

static kvt_status_t window(void *data, uint32_t layer, const kvt_rows_t *queries,
                           const kvt_rows_t *keys, const kvt_sparse_context_t *context,
                           kvt_index_t *answer) {
    own_t *own = data;
    (void)queries, (void)keys, (void)context;
    const kvt_index_head_t head = {KVT_INDEX_LINES, 0, 2, 0, 0, UINT32_MAX};
    own->head = head;
    own->starts[0] = 0, own->starts[1] = 1, own->starts[2] = 9;
    own->items[0] = 0;
    for (uint32_t i = 0; i < 8; i++) own->items[1 + i] = i;
    /* At layer 2 the policy returns a list that does not ascend. */
    if (layer == 2) own->items[3] = 1;
    answer->heads = &own->head;
    answer->head_count = 1;
    answer->starts = own->starts;
    answer->start_count = 3;
    answer->items = own->items;
    answer->item_count = 9;
    return KVT_OK;
}

static kvt_status_t fork_own(void *data, void **copy_out) {
    own_t *own = data;
    own->forks++;
    *copy_out = data;
    return KVT_OK;
}

static void free_own(void *data) {
    own_t *own = data;
    own->freed++;
}

static kvt_status_t own_attention(void *data, uint32_t layer, const kvt_rows_t *queries,
                                  const kvt_rows_t *keys, const kvt_rows_t *values,
                                  const kvt_sparse_context_t *context, float *to, float *logs) {
    own_t *own = data;
    (void)layer, (void)keys, (void)values, (void)context, (void)logs;
    own->attends++;
    if (own->attends > 1) return KVT_E_UNSUPPORTED; /* the library falls back to the index */
    for (uint32_t i = 0; i < queries->view.tokens * QUERY_HEADS * VALUES; i++) to[i] = 7;
    return KVT_OK;
}

static void custom_policy_is_called(void) {
    static lists_t lists;
    static own_t own;
    kvt_sparse_traits_t traits = KVT_SPARSE_TRAITS_INIT;
    traits.caps = KVT_SPARSE_LOAD_DECODE | KVT_SPARSE_INDEX_PREFILL;
    traits.needs = KVT_NEEDS_QUERIES;
    traits.scope = KVT_SCOPE_LAYER;
    traits.granularity = KVT_GRANULARITY_BLOCK;
    traits.flags = KVT_SPARSE_SELECTS;
    kvt_sparse_custom_t custom = KVT_SPARSE_CUSTOM_INIT;
    custom.traits = &traits;
    custom.on_prefill_offload = on_prefill_offload;
    custom.on_decode_offload = on_decode_offload;
    custom.index = window;
    custom.fork = fork_own;
    custom.user_data = &own;
    custom.destroy = free_own;
    kvt_sparse_opts_t opts = KVT_SPARSE_OPTS_INIT;
    opts.attention = &shape;
    opts.custom = &custom;
    kvt_sparse_t *policy = NULL, *copy = NULL;
    CHECK_IS(kvt_sparse_open(&opts, &policy, NULL), KVT_E_INVALID); /* select_blocks is missing */
    custom.select_blocks = select_blocks;
    opts.spec = "full";
    opts.spec_bytes = 4;
    CHECK_IS(kvt_sparse_open(&opts, &policy, NULL), KVT_E_INVALID); /* both a spec and callbacks */
    CHECK_EQ(own.freed, 0);
    opts.spec = NULL;
    opts.spec_bytes = 0;
    CHECK_OK(kvt_sparse_open(&opts, &policy, NULL));
    own.self = policy;

    kvt_rows_t keys[LAYERS];
    for (uint32_t i = 0; i < LAYERS; i++) keys[i] = rows(k + BLOCK * HEADS * DIM, BLOCK, HEADS, DIM);
    CHECK_OK(kvt_sparse_add_block(policy, 1, 1, BLOCK, &keys[0], NULL));
    CHECK_EQ(own.sealed, 2);
    CHECK_IS(kvt_sparse_add_block(policy, 2, 1, BLOCK, &keys[0], NULL), KVT_E_LIMIT);
    CHECK_IS(kvt_sparse_seal_all(policy, 9, 32, keys, LAYERS - 1, sizeof keys[0], NULL),
             KVT_E_INVALID);
    CHECK_OK(kvt_sparse_seal_all(policy, 9, 32, keys, LAYERS, sizeof keys[0], NULL));
    CHECK_EQ(own.sealed_all, 41);

    uint32_t candidates[10], ids[10];
    for (uint32_t i = 0; i < 10; i++) candidates[i] = i;
    const kvt_rows_t query = rows(q, 1, QUERY_HEADS, DIM);
    const kvt_sparse_context_t context = at(0, TOKENS - 1, TOKENS);
    uint64_t count = 0;
    CHECK_OK(kvt_sparse_select(policy, 0, &query, candidates, 10, &context, ids, 10, &count, NULL));
    CHECK_EQ(count, 3);
    CHECK(ids[0] == 0 && ids[1] == 4 && ids[2] == 8 && ids[3] == KVT_SPARSE_NO_ID);
    kvt_error_t *err = NULL;
    CHECK_IS(kvt_sparse_select(policy, 1, &query, candidates, 10, &context, ids, 10, &count, &err),
             KVT_E_INVALID);
    CHECK(strstr(kvt_error_message(err), "1000") != NULL);
    kvt_error_free(&err);
    CHECK_IS(kvt_sparse_select(policy, 0, NULL, candidates, 10, &context, ids, 10, &count, NULL),
             KVT_E_STATE);
    CHECK_EQ(own.selects, 3);

    const kvt_rows_t queries = rows(q, TOKENS, QUERY_HEADS, DIM), all = rows(k, TOKENS, HEADS, DIM);
    const kvt_rows_t values = rows(v, TOKENS, HEADS, VALUES);
    const kvt_sparse_context_t prompt = at(1, 0, TOKENS);
    reset_lists(&lists);
    CHECK_OK(kvt_sparse_index(policy, 0, &queries, NULL, &prompt, &lists.index, NULL));
    CHECK_EQ(lists.index.item_count, 9);
    CHECK_IS(kvt_sparse_index(policy, 2, &queries, NULL, &prompt, &lists.index, NULL),
             KVT_E_INVALID);
    reset_lists(&lists);
    CHECK_OK(kvt_sparse_index(policy, 0, &queries, NULL, &prompt, &lists.index, NULL));
    CHECK_OK(kvt_sparse_prefill_attention(policy, 0, &queries, &all, &values, &prompt, out,
                                          TOKENS * QUERY_HEADS * VALUES, lse, TOKENS * QUERY_HEADS,
                                          NULL));
    compare(&lists.index, 0, TOKENS);

    CHECK_OK(kvt_sparse_fork(policy, &copy, NULL));
    CHECK_EQ(own.forks, 1);
    CHECK_OK(kvt_sparse_close(&policy));
    CHECK_EQ(own.freed, 1);
    CHECK_OK(kvt_sparse_close(&copy));
    CHECK_EQ(own.freed, 2);

    /* With a custom attention kernel. */
    custom.sparse_prefill_attention = own_attention;
    CHECK_OK(kvt_sparse_open(&opts, &policy, NULL));
    CHECK_OK(kvt_sparse_prefill_attention(policy, 0, &queries, &all, &values, &prompt, out,
                                          TOKENS * QUERY_HEADS * VALUES, NULL, 0, NULL));
    CHECK(own.attends == 1 && out[TOKENS * QUERY_HEADS * VALUES - 1] == 7);
    CHECK_OK(kvt_sparse_prefill_attention(policy, 0, &queries, &all, &values, &prompt, out,
                                          TOKENS * QUERY_HEADS * VALUES, lse, TOKENS * QUERY_HEADS,
                                          NULL));
    compare(&lists.index, 0, TOKENS);
    CHECK_OK(kvt_sparse_close(&policy));
    CHECK_EQ(own.freed, 3);
}

/* Every policy opens, declares its traits, and refuses what it does not support. */
static void every_policy_opens(void) {
    uint64_t count = 0;
    CHECK_OK(kvt_sparse_count(&count));
    CHECK(count >= 18);
    const kvt_rows_t query = rows(q, 1, QUERY_HEADS, DIM);
    for (uint64_t i = 0; i < count; i++) {
        kvt_sparse_info_t info = KVT_SPARSE_INFO_INIT;
        CHECK_OK(kvt_sparse_info(i, &info));
        char spec[64];
        snprintf(spec, sizeof spec, "%.*s", (int)info.name_bytes, info.name);
        if (strcmp(spec, "duo") == 0) strcat(spec, "(alpha=\"1 0 1 0 1 0\")");
        if (strcmp(spec, "arkvale") == 0) strcat(spec, "(page=16)");
        kvt_sparse_t *policy = open_policy(spec, NULL);
        kvt_sparse_traits_t traits = KVT_SPARSE_TRAITS_INIT;
        CHECK_OK(kvt_sparse_traits(policy, &traits));
        CHECK(traits.caps > 0 && traits.caps < 64);
        const kvt_sparse_context_t context = at(0, 0, 1);
        const uint32_t id = 0;
        uint32_t chosen = 0;
        uint64_t n = 0;
        if (!(traits.caps & KVT_SPARSE_LOAD_DECODE))
            CHECK_IS(kvt_sparse_select(policy, 0, &query, &id, 1, &context, &chosen, 1, &n, NULL),
                     KVT_E_UNSUPPORTED);
        if (!(traits.caps & KVT_SPARSE_EVICT_DECODE)) {
            kvt_token_lists_t keep = KVT_TOKEN_LISTS_INIT;
            CHECK_IS(kvt_sparse_plan_eviction(policy, 0, &context, &keep, &chosen, NULL),
                     KVT_E_UNSUPPORTED);
        }
        CHECK_OK(kvt_sparse_close(&policy));
    }
    kvt_sparse_info_t info = KVT_SPARSE_INFO_INIT;
    CHECK_IS(kvt_sparse_info(count, &info), KVT_E_NOT_FOUND);
}

static void invalid_calls_are_refused(void) {
    kvt_sparse_opts_t opts = KVT_SPARSE_OPTS_INIT;
    kvt_sparse_t *policy = NULL;
    kvt_error_t *err = NULL;
    opts.attention = &shape;
    CHECK_IS(kvt_sparse_open(&opts, &policy, NULL), KVT_E_INVALID); /* neither spec nor callbacks */
    opts.spec = "qest";
    opts.spec_bytes = 4;
    CHECK_IS(kvt_sparse_open(&opts, &policy, &err), KVT_E_SPEC);
    CHECK(strstr(kvt_error_message(err), "quest") != NULL);
    kvt_error_free(&err);
    CHECK(policy == NULL);
    CHECK_IS(kvt_sparse_reset(NULL), KVT_E_HANDLE);

    const kvt_rows_t queries = rows(q, 1, QUERY_HEADS, DIM), keys = rows(k, TOKENS, HEADS, DIM);
    const kvt_rows_t short_values = rows(v, TOKENS - 1, HEADS, VALUES);
    const kvt_rows_t values = rows(v, TOKENS, HEADS, VALUES);
    kvt_attention_args_t problem = problem_of(&queries, &keys, &short_values, NULL, TOKENS - 1);
    kvt_attention_job_t *job = NULL;
    CHECK_IS(kvt_prefill_open(&problem, out, 1000, lse, 1000, &job, NULL), KVT_E_INVALID);
    problem.values = NULL;
    CHECK_IS(kvt_prefill_open(&problem, out, 1000, lse, 1000, &job, NULL), KVT_E_INVALID);
    problem.values = &values;
    /* An invalid index. */
    kvt_index_head_t head = {9, 0, 0, 0, 0, 0};
    uint32_t starts[3] = {0, 1, 2}, items[2] = {5, 5};
    kvt_index_t index = KVT_INDEX_INIT;
    index.heads = &head;
    index.head_count = 1;
    index.starts = starts;
    index.start_count = 3;
    index.items = items;
    index.item_count = 2;
    problem.select = &index;
    CHECK_IS(kvt_prefill_open(&problem, out, 1000, lse, 1000, &job, NULL), KVT_E_INVALID);
    head.kind = KVT_INDEX_LINES;
    head.lists = 2;
    starts[2] = 3;
    CHECK_IS(kvt_prefill_open(&problem, out, 1000, lse, 1000, &job, NULL), KVT_E_INVALID);
    starts[2] = 2;
    CHECK_OK(kvt_prefill_open(&problem, out, 1000, lse, 1000, &job, NULL));
    CHECK_OK(kvt_attention_job_close(&job));
    CHECK_IS(kvt_attention_job_run(job, 0, 0, 1, NULL, 0, NULL), KVT_E_HANDLE);

    kvt_rows_t bad = rows(k, 1, HEADS, DIM);
    CHECK_OK(kvt_rows_check(&bad, NULL));
    const float kept = k[3];
    k[3] = NAN;
    CHECK_IS(kvt_rows_check(&bad, NULL), KVT_E_INVALID);
    k[3] = kept;
    bad.dtype = 99;
    CHECK_IS(kvt_rows_check(&bad, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_rows_check(NULL, NULL), KVT_E_INVALID);
}

int main(void) {
    check_begin();
    const kvt_attention_t none = KVT_ATTENTION_INIT;
    shape = none;
    shape.layers = LAYERS;
    shape.query_heads = QUERY_HEADS;
    shape.key_heads = HEADS;
    shape.key_dim = DIM;
    shape.value_dim = VALUES;
    shape.block_tokens = BLOCK;
    shape.max_tokens = 4096;
    for (size_t i = 0; i < sizeof q / sizeof q[0]; i++) q[i] = number();
    for (size_t i = 0; i < sizeof k / sizeof k[0]; i++) k[i] = number();
    for (size_t i = 0; i < sizeof v / sizeof v[0]; i++) v[i] = number();
    every_policy_opens();
    prefill(NULL, 0, TOKENS);
    compare(NULL, 0, TOKENS);
    prefill(NULL, 200, TOKENS);
    compare(NULL, 200, TOKENS);
    prefill_follows_the_index("minference(budget=0.2,last_q=16,sinks=4,recent=8)");
    prefill_follows_the_index("minference(type=a_shape,sinks=8,recent=32)");
    prefill_follows_the_index("minference(type=tri_shape,sinks=8,recent=32,dense_rows=20)");
    prefill_follows_the_index("xattention(block=32,stride=4)");
    prefill_follows_the_index("flexprefill(block=32)");
    prefill_follows_the_index("streaming(sinks=4,recent=40)");
    prefill_follows_the_index("full");
    merged_pieces_equal_all_keys();
    tokens_with_large_sums_are_kept();
    decode_uses_selected_pages();
    index_and_sums_are_mapped_to_buffer_rows();
    custom_policy_is_called();
    invalid_calls_are_refused();
    return check_end("sparse_engine");
}
