/* policy_alone: a policy of the library evicts for the block manager of an engine, without a store.
 *
 *   policy_alone [SPEC OF A POLICY]...     default: lru horizon
 *
 * The engine has a pool of physical blocks and a prefix tree of logical ones, as vLLM has: the id
 * of a block is a hash of all tokens up to its end. Requests share prefixes, take references on
 * their blocks while they run, and leave them cached. When the pool is empty, the policy chooses
 * which cached blocks to free. The workload is made up: users who chat, and agents who call tools. */
#include "must.h"

enum { BLOCK = 16, POOL = 700, MOST = 128, CHATS = 40, AGENTS = 12, TURNS = 14, SLOTS = 4096 };

/* The engine's own table. The policy knows the blocks by their ids only. */
typedef struct { uint64_t id; uint32_t block; int is_used; } entry_t;
typedef struct {
    entry_t entries[SLOTS]; /* by id, open addressing */
    uint32_t pool[POOL];    /* physical blocks that are free */
    uint32_t pool_count;
    uint64_t looked_up, hits;
    kvt_policy_t *policy;
} manager_t;

static entry_t *find(manager_t *manager, uint64_t id) {
    uint64_t slot = id % SLOTS;
    while (manager->entries[slot].is_used && manager->entries[slot].id != id) slot = (slot + 1) % SLOTS;
    return &manager->entries[slot];
}

static void add(manager_t *manager, uint64_t id) {
    entry_t *entry = find(manager, id);
    CHECK(!entry->is_used && manager->pool_count > 0);
    entry->id = id, entry->is_used = 1, entry->block = manager->pool[--manager->pool_count];
}

static void drop(manager_t *manager, uint64_t id) {
    entry_t *entry = find(manager, id);
    CHECK(entry->is_used);
    manager->pool[manager->pool_count++] = entry->block;
    entry->is_used = 0;
    for (uint64_t slot = (uint64_t)(entry - manager->entries + 1) % SLOTS; manager->entries[slot].is_used;
         slot = (slot + 1) % SLOTS) { /* close the gap */
        const entry_t moved = manager->entries[slot];
        manager->entries[slot].is_used = 0;
        *find(manager, moved.id) = moved;
    }
}

/* Allocates the blocks of a request, reuses the leading ones that are cached, and references them all. */
static void allocate(manager_t *manager, int64_t now_ns, const kvt_policy_context_t *context, const uint64_t *ids,
                     uint64_t count) {
    uint64_t hits = 0;
    MUST(kvt_policy_lookup(manager->policy, now_ns, context, ids, count, NULL, &hits, &err));
    MUST(kvt_policy_acquire(manager->policy, ids, hits, &err)); /* referenced blocks stay */
    for (uint64_t i = 0; i < hits; i++) CHECK(find(manager, ids[i])->is_used);
    manager->looked_up += count, manager->hits += hits;
    const uint64_t missing = count - hits;
    if (missing > manager->pool_count) {
        kvt_policy_victim_t victims[MOST];
        kvt_policy_outcome_t outcome = KVT_POLICY_OUTCOME_INIT;
        MUST(kvt_policy_evict(manager->policy, now_ns, missing - manager->pool_count, victims, MOST, sizeof *victims,
                              &outcome, &err));
        CHECK(outcome.shortfall_units == 0); /* else the engine must preempt a running request */
        for (uint64_t i = 0; i < outcome.victims; i++) drop(manager, victims[i].id);
    }
    kvt_policy_object_t rows[MOST];
    memset(rows, 0, sizeof rows);
    for (uint64_t i = hits; i < count; i++) {
        kvt_policy_object_t *row = &rows[i - hits];
        row->id = ids[i], row->units = 1, row->tokens = BLOCK, row->context = (uint32_t)i * BLOCK;
        if (i > 0) row->parent = ids[i - 1], row->flags = KVT_OBJECT_HAS_PARENT; /* evicted before its parent */
        add(manager, ids[i]);
    }
    MUST(kvt_policy_insert(manager->policy, now_ns, context, rows, missing, sizeof *rows, &err));
    MUST(kvt_policy_acquire(manager->policy, ids + hits, missing, &err));
}

/* Ids of a conversation after some turns: a system prompt that its kind shares, then its own blocks. */
static uint64_t path_of(uint32_t session, uint32_t turn, uint64_t ids[MOST]) {
    const int is_agent = session >= CHATS;
    const uint64_t shared = is_agent ? 20 : 6, count = shared + (is_agent ? 4 : 3) * (uint64_t)(turn + 1);
    uint64_t hash = is_agent ? 0xa9e47 : 0xc4a7;
    for (uint64_t i = 0; i < count; i++) {
        hash = (hash ^ (i < shared ? i : session * 1000 + i)) * 0x9e3779b97f4a7c15u;
        ids[i] = hash ^= hash >> 29;
    }
    return count;
}

static void run(const char *spec) {
    static manager_t manager;
    memset(&manager, 0, sizeof manager);
    for (uint32_t i = 0; i < POOL; i++) manager.pool[manager.pool_count++] = i;
    kvt_policy_opts_t opts = KVT_POLICY_OPTS_INIT;
    opts.spec = spec, opts.spec_bytes = KVT_NUL_TERMINATED;
    opts.capacity_units = POOL, opts.max_objects = POOL + 1, opts.remember = SLOTS;
    MUST(kvt_policy_open(&opts, &manager.policy, &err));

    /* Each session has a time of its next request: a person reads for minutes, a tool takes seconds. */
    int64_t next_ns[CHATS + AGENTS];
    uint32_t turn[CHATS + AGENTS] = {0};
    for (int64_t s = 0; s < CHATS + AGENTS; s++) next_ns[s] = (1 + s * 7) * 1000000000;
    for (uint64_t random = 1;;) {
        uint32_t session = 0;
        for (uint32_t s = 1; s < CHATS + AGENTS; s++)
            if (next_ns[s] < next_ns[session]) session = s;
        if (next_ns[session] == INT64_MAX) break; /* all have ended */
        const int64_t now_ns = next_ns[session];
        uint64_t ids[MOST];
        const uint64_t count = path_of(session, turn[session], ids);
        kvt_policy_context_t context = KVT_POLICY_CONTEXT_INIT;
        context.flags = KVT_CONTEXT_SESSION, context.session = session + 1, context.tokens_each = BLOCK;
        allocate(&manager, now_ns, &context, ids, count);
        /* The model runs here. */
        MUST(kvt_policy_release(manager.policy, ids, count, &err));
        kvt_policy_hint_t hint = KVT_POLICY_HINT_INIT; /* how the request ended; horizon learns from it */
        hint.stop = session < CHATS ? KVT_STOP_END_TURN : KVT_STOP_TOOL_USE;
        if (++turn[session] == TURNS) hint.flags = KVT_HINT_DONE;
        MUST(kvt_policy_hint(manager.policy, now_ns, &context, ids, count, &hint, NULL, &err));
        random = random * 6364136223846793005u + 1442695040888963407u;
        const int64_t pause_s = session < CHATS ? 60 + (int64_t)(random >> 33) % 240 : 2 + (int64_t)(random >> 33) % 8;
        next_ns[session] = turn[session] == TURNS ? INT64_MAX : now_ns + pause_s * 1000000000;
    }
    kvt_policy_stats_t stats = KVT_POLICY_STATS_INIT;
    MUST(kvt_policy_stats(manager.policy, &stats));
    CHECK(stats.references == manager.looked_up && stats.hits == manager.hits);
    CHECK(stats.units == POOL - manager.pool_count);
    printf("%-10s %u requests of %u blocks: %.1f %% of the blocks were cached; %u evictions\n", spec,
           (unsigned)stats.requests, (unsigned)stats.references, 100 * stats.hit_ratio, (unsigned)stats.evictions);
    MUST(kvt_policy_close(&manager.policy));
}

int main(int argc, char **argv) {
    char *both[] = {NULL, "lru", "horizon"};
    if (argc < 2) argc = 3, argv = both;
    for (int i = 1; i < argc; i++) run(argv[i]);
    return 0;
}
