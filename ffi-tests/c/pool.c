/* An engine with its own block pool and tables. Sequences share the blocks of common prefixes by
 * reference counts. When blocks run out, the engine asks the policy for victims, frees them, and
 * tries again. The policy only knows the uses that the engine records. */

#include "check.h"

enum { BLOCKS = 512, SEQUENCES = 64, LONGEST = 24, PREFIXES = 4, PREFIX_BLOCKS = 6 };

struct sequence {
    uint64_t id; /* 0: the slot is free */
    uint64_t blocks[LONGEST];
    uint64_t count;
    int64_t created_ns;
    int64_t last_ns;
    uint8_t running; /* never preempted while it runs */
};

struct pool {
    uint32_t refs[BLOCKS];
    uint64_t free[BLOCKS];
    uint64_t free_count;
    struct sequence sequences[SEQUENCES];
    uint64_t prefixes[PREFIXES][PREFIX_BLOCKS];
    uint8_t has_prefix[PREFIXES];
    kvt_policy_t *policy;
    int64_t now_ns;
    uint64_t selections, evicted, tails, shortfalls;
};

static uint64_t take_block(struct pool *pool) {
    CHECK(pool->free_count > 0);
    const uint64_t block = pool->free[--pool->free_count];
    CHECK_EQ(pool->refs[block], 0);
    pool->refs[block] = 1;
    return block;
}

static int drop_block(struct pool *pool, uint64_t block) {
    CHECK(pool->refs[block] > 0);
    if (--pool->refs[block] > 0) return 0;
    pool->free[pool->free_count++] = block;
    return 1;
}

/* The tables as columns: ids, times, pins, and the blocks of every sequence. */
struct table {
    uint64_t ids[SEQUENCES];
    int64_t created_ns[SEQUENCES], last_ns[SEQUENCES];
    uint8_t pinned[SEQUENCES];
    uint64_t offsets[SEQUENCES + 1];
    uint64_t blocks[SEQUENCES * LONGEST];
    uint32_t refs[SEQUENCES * LONGEST];
    struct sequence *of[SEQUENCES];
    uint64_t rows;
};

static void tabulate(struct pool *pool, struct table *table) {
    uint64_t at = 0;
    table->rows = 0;
    for (int i = 0; i < SEQUENCES; i++) {
        struct sequence *s = &pool->sequences[i];
        if (s->id == 0) continue;
        const uint64_t row = table->rows++;
        table->ids[row] = s->id;
        table->created_ns[row] = s->created_ns;
        table->last_ns[row] = s->last_ns;
        table->pinned[row] = s->running;
        table->of[row] = s;
        table->offsets[row] = at;
        for (uint64_t k = 0; k < s->count; k++, at++) {
            table->blocks[at] = s->blocks[k];
            table->refs[at] = pool->refs[s->blocks[k]];
        }
    }
    table->offsets[table->rows] = at;
}

/* Evicts the victims that the policy chose. The reported numbers must equal the freed blocks. */
static uint64_t evict(struct pool *pool, uint64_t required, uint64_t flags) {
    static struct table table;
    tabulate(pool, &table);
    kvt_policy_columns_t columns = KVT_POLICY_COLUMNS_INIT;
    columns.rows = table.rows;
    columns.ids = table.ids;
    columns.created_ns = table.created_ns;
    columns.last_access_ns = table.last_ns;
    columns.pinned = table.pinned;
    columns.block_offsets = table.offsets;
    columns.block_ids = table.blocks;
    columns.block_refs = table.refs;
    columns.block_entries = table.offsets[table.rows];
    kvt_policy_pick_t picks[SEQUENCES];
    uint64_t freed_ids[BLOCKS];
    kvt_policy_selection_t chosen = KVT_POLICY_SELECTION_INIT;
    chosen.victims = picks;
    chosen.victim_capacity = SEQUENCES;
    chosen.stride_bytes = sizeof *picks;
    chosen.block_ids = freed_ids;
    chosen.block_capacity = BLOCKS;
    CHECK_OK(kvt_policy_select(pool->policy, pool->now_ns, &columns, required, flags, &chosen,
                               NULL));
    pool->selections++;
    uint64_t freed = 0;
    for (uint64_t v = 0; v < chosen.victim_count; v++) {
        struct sequence *s = table.of[picks[v].row];
        CHECK(s->id == picks[v].id && !s->running);
        uint64_t own = 0;
        while (s->count > picks[v].kept_blocks) own += drop_block(pool, s->blocks[--s->count]);
        CHECK_EQ(own, picks[v].freed_blocks);
        freed += own;
        pool->tails += picks[v].kept_blocks > 0;
        if (s->count == 0) {
            CHECK_OK(kvt_policy_report_evicted(pool->policy, pool->now_ns, &s->id, 1, NULL));
            s->id = 0;
            pool->evicted++;
        }
    }
    CHECK_EQ(freed, chosen.freed_blocks);
    CHECK_EQ(freed, chosen.block_count);
    for (uint64_t i = 0; i < chosen.block_count; i++) CHECK_EQ(pool->refs[freed_ids[i]], 0);
    CHECK(freed >= required ? chosen.shortfall_blocks == 0
                            : chosen.shortfall_blocks == required - freed);
    CHECK((flags & KVT_SELECT_TAIL) == 0 || freed <= required);
    pool->shortfalls += chosen.shortfall_blocks > 0;
    return freed;
}

/* Allocates blocks for a sequence, and evicts if necessary. Returns 0 if that is not possible. */
static int allocate(struct pool *pool, struct sequence *s, uint64_t n, uint64_t flags) {
    if (pool->free_count < n) (void)evict(pool, n - pool->free_count, flags);
    if (pool->free_count < n) return 0;
    while (n-- > 0) s->blocks[s->count++] = take_block(pool);
    return 1;
}

static void release(struct pool *pool, struct sequence *s) {
    while (s->count > 0) (void)drop_block(pool, s->blocks[--s->count]);
    if (s->id != 0) {
        CHECK_OK(kvt_policy_remove(pool->policy, pool->now_ns, &s->id, 1, NULL));
    }
    memset(s, 0, sizeof *s);
}

/* Starts a sequence on a prefix whose blocks may exist already. */
static void admit(struct pool *pool, struct sequence *s, uint64_t id, uint64_t random) {
    release(pool, s);
    const uint64_t prefix = random % PREFIXES, tail = 1 + random / 7 % (LONGEST - PREFIX_BLOCKS);
    s->created_ns = s->last_ns = pool->now_ns;
    s->running = 1;
    if (pool->has_prefix[prefix]) {
        for (int k = 0; k < PREFIX_BLOCKS; k++) {
            const uint64_t block = pool->prefixes[prefix][k];
            pool->refs[block]++;
            s->blocks[s->count++] = block;
        }
    } else {
        if (!allocate(pool, s, PREFIX_BLOCKS, 0)) return;
        memcpy(pool->prefixes[prefix], s->blocks, sizeof pool->prefixes[prefix]);
        pool->has_prefix[prefix] = 1;
        /* The pool references every second prefix, so its blocks are never evicted. */
        for (int k = 0; prefix % 2 == 0 && k < PREFIX_BLOCKS; k++) pool->refs[s->blocks[k]]++;
    }
    if (!allocate(pool, s, tail, random % 3 == 0 ? KVT_SELECT_TAIL : 0)) {
        while (s->count > 0) (void)drop_block(pool, s->blocks[--s->count]);
        memset(s, 0, sizeof *s);
        return;
    }
    s->id = id;
    CHECK_OK(kvt_policy_record(pool->policy, pool->now_ns, NULL, &s->id, NULL, 1, NULL, NULL));
}

/* Forgets prefixes whose blocks were freed. */
static void forget_prefixes(struct pool *pool) {
    for (int p = 0; p < PREFIXES; p++) {
        for (int k = 0; pool->has_prefix[p] && k < PREFIX_BLOCKS; k++) {
            if (pool->refs[pool->prefixes[p][k]] == 0) pool->has_prefix[p] = 0;
        }
    }
}

/* Checks the reference counts. */
static void audit(const struct pool *pool) {
    uint32_t refs[BLOCKS] = {0};
    for (int i = 0; i < SEQUENCES; i++) {
        const struct sequence *s = &pool->sequences[i];
        for (uint64_t k = 0; k < s->count; k++) refs[s->blocks[k]]++;
    }
    for (int p = 0; p < PREFIXES; p += 2) {
        for (int k = 0; pool->has_prefix[p] && k < PREFIX_BLOCKS; k++) {
            refs[pool->prefixes[p][k]]++;
        }
    }
    uint64_t idle = 0;
    for (int b = 0; b < BLOCKS; b++) {
        CHECK_EQ(refs[b], pool->refs[b]);
        idle += refs[b] == 0;
    }
    CHECK_EQ(idle, pool->free_count);
}

static void run(const char *spec, uint64_t steps) {
    static struct pool pool;
    memset(&pool, 0, sizeof pool);
    for (uint64_t b = 0; b < BLOCKS; b++) pool.free[pool.free_count++] = b;
    kvt_policy_opts_t opts = KVT_POLICY_OPTS_INIT;
    opts.spec = spec;
    opts.spec_bytes = strlen(spec);
    opts.max_objects = 2 * SEQUENCES;
    opts.remember = 4 * SEQUENCES;
    CHECK_OK(kvt_policy_open(&opts, &pool.policy, NULL));
    uint64_t state = 20240229;
    for (uint64_t step = 1; step <= steps; step++) {
        pool.now_ns = (int64_t)(step * MS_NS);
        const uint64_t random = next_random(&state);
        struct sequence *s = &pool.sequences[random % SEQUENCES];
        if (s->id == 0) {
            admit(&pool, s, step, random >> 8);
        } else if (random >> 8 & 1) {
            s->running = random >> 9 & 1;
            s->last_ns = pool.now_ns;
            CHECK_OK(kvt_policy_record(pool.policy, pool.now_ns, NULL, &s->id, NULL, 1, NULL,
                                       NULL));
        } else if (s->running && s->count > 0 && s->count < LONGEST) {
            (void)allocate(&pool, s, 1, 0); /* a decoded block */
        } else if (random >> 8 & 4) {
            release(&pool, s);
        }
        forget_prefixes(&pool);
        if (step % 64 == 0) audit(&pool);
    }
    audit(&pool);
    kvt_policy_stats_t stats = KVT_POLICY_STATS_INIT;
    CHECK_OK(kvt_policy_stats(pool.policy, &stats));
    CHECK_EQ(stats.decisions, pool.selections);
    CHECK_EQ(stats.shortfalls, pool.shortfalls);
    CHECK(steps < 5000 || (pool.evicted > 100 && pool.tails > 0));
    printf("%s: %" PRIu64 " selections, %" PRIu64 " evicted, %" PRIu64 " tails, %" PRIu64
           " shortfalls\n",
           spec, pool.selections, pool.evicted, pool.tails, pool.shortfalls);
    CHECK_OK(kvt_policy_close(&pool.policy));
}

int main(int argc, char **argv) {
    check_begin();
    const uint64_t steps = count_arg(argc, argv, 20000);
    run("lru", steps);
    run("fifo", steps);
    return check_end("pool");
}
