/* Tests of blocks: an engine stores blocks under names that it computes itself. Checks batches in
 * one call, a status for each block, and page tables. */

#include "check.h"

#include <sys/wait.h>

#define LAYERS 3
#define K 96
#define V 32
#define BLOCK (LAYERS * (K + V))
#define POOL 600
#define NAME 24

static kvt_runtime_t *runtime;
static char folder[] = "/tmp/kvt-blocks-XXXXXX";

/* The engine's block pool: a block is contiguous, at any place of the pool. */
typedef struct {
    uint8_t memory[POOL * BLOCK];
    void *places[POOL];
    kvt_view_t k[LAYERS], v[LAYERS];
} pool_t;

static void open_pool(pool_t *pool, uint8_t fill) {
    memset(pool, 0, sizeof *pool);
    memset(pool->memory, fill, sizeof pool->memory);
    for (int layer = 0; layer < LAYERS; layer++) {
        kvt_view_t *views[2] = {pool->k + layer, pool->v + layer};
        for (int v = 0; v < 2; v++) {
            views[v]->pages = pool->places;
            views[v]->page_tokens = 1;
            views[v]->shift_bytes = layer * (K + V) + v * K;
            views[v]->run_bytes = v ? V : K;
        }
    }
}

/* Sets the page table: block i of a call is at place first + i * step. */
static void place(pool_t *pool, uint32_t count, uint32_t first, uint32_t step) {
    for (uint32_t i = 0; i < count; i++)
        pool->places[i] = pool->memory + (size_t)((first + i * step) % POOL) * BLOCK;
    for (int layer = 0; layer < LAYERS; layer++)
        pool->k[layer].page_count = pool->v[layer].page_count = count;
}

static void content(uint32_t number, uint8_t *out) {
    uint64_t seed = number + 1;
    for (int i = 0; i < BLOCK; i++) out[i] = (uint8_t)next_random(&seed);
}

static int has_content(const void *block, uint32_t number) {
    uint8_t want[BLOCK];
    content(number, want);
    return memcmp(block, want, BLOCK) == 0;
}

static int is_filled(const uint8_t *block, uint8_t fill) {
    for (int i = 0; i < BLOCK; i++)
        if (block[i] != fill) return 0;
    return 1;
}

static uint8_t names_of_all[POOL * 2][NAME];

static kvt_block_names_t names_of(uint32_t first, uint32_t count) {
    kvt_block_names_t names = KVT_BLOCK_NAMES_INIT;
    names.bytes = names_of_all[first];
    names.each_bytes = NAME;
    names.count = count;
    return names;
}

static kvt_blocks_t blocks_of(const pool_t *pool, const kvt_block_names_t *names) {
    kvt_blocks_t blocks = KVT_BLOCKS_INIT;
    blocks.names = names;
    if (pool == NULL) return blocks;
    blocks.k = pool->k;
    blocks.v = pool->v;
    blocks.stride_bytes = sizeof *pool->k;
    return blocks;
}

static kvt_store_t *open_store(const char *rest) {
    char spec[256];
    snprintf(spec, sizeof spec, "store(host=4MiB%s)", rest);
    kvt_store_opts_t opts = KVT_STORE_OPTS_INIT;
    opts.spec = spec;
    opts.spec_bytes = strlen(spec);
    kvt_store_t *store = NULL;
    CHECK_OK(kvt_store_open(runtime, NULL, &opts, &store, NULL));
    return store;
}

static kvt_namespace_t *open_namespace(const kvt_store_t *store, const char *salt) {
    const uint16_t layers[LAYERS] = {0, 1, 2};
    kvt_group_t group;
    memset(&group, 0, sizeof group);
    group.k_bytes = K;
    group.v_bytes = V;
    group.layers = layers;
    group.layer_count = LAYERS;
    kvt_layout_t layout = KVT_LAYOUT_INIT;
    layout.chunk_tokens = 1;
    layout.groups = &group;
    layout.group_count = 1;
    layout.stride_bytes = sizeof group;
    kvt_identity_t identity = KVT_IDENTITY_INIT;
    identity.salt = salt;
    identity.salt_bytes = strlen(salt);
    kvt_namespace_t *ns = NULL;
    CHECK_OK(kvt_namespace_open(store, &identity, &layout, KVT_NAMESPACE_HOLES, &ns, NULL));
    return ns;
}

static kvt_session_t *open_session(const kvt_namespace_t *ns) {
    kvt_session_t *session = NULL;
    CHECK_OK(kvt_session_open(ns, NULL, &session, NULL));
    return session;
}

static void close_all(kvt_session_t **session, kvt_namespace_t **ns, kvt_store_t **store) {
    CHECK_OK(kvt_session_close(session));
    CHECK_OK(kvt_namespace_close(ns));
    CHECK_OK(kvt_store_close(store, hang_guard(), NULL));
}

/* Waits for an op of blocks; writes the status of each block to `each`. */
static kvt_status_t finish_blocks(kvt_op_t **op, uint32_t count, kvt_status_t *each) {
    static kvt_op_item_t items[POOL];
    CHECK_OK(kvt_op_wait(*op, KVT_OP_RELEASED, hang_guard()));
    const kvt_op_info_t info = info_of(*op);
    CHECK_EQ(info.items, count);
    CHECK_EQ(info.items_done, count);
    uint64_t got = 0;
    uint32_t failed = 0;
    CHECK_OK(kvt_op_items(*op, 0, items, POOL, sizeof *items, &got));
    CHECK_EQ(got, count);
    for (uint32_t i = 0; i < count; i++) {
        CHECK_EQ(items[i].done, 1);
        each[i] = items[i].status;
        failed += items[i].status != KVT_OK;
    }
    CHECK_EQ(info.items_failed, failed);
    CHECK(failed == 0 || info.status != KVT_OK);
    return finish_op(op);
}

static kvt_status_t put(const kvt_session_t *session, uint32_t first, uint32_t count,
                        uint32_t level, kvt_status_t *each) {
    static pool_t pool;
    open_pool(&pool, 0);
    place(&pool, count, 7, 1);
    for (uint32_t i = 0; i < count; i++) content(first + i, pool.places[i]);
    const kvt_block_names_t names = names_of(first, count);
    kvt_blocks_t blocks = blocks_of(&pool, &names);
    blocks.level = level;
    kvt_op_t *op = NULL;
    CHECK_OK(kvt_session_put_blocks(session, &blocks, NULL, &op, NULL));
    return finish_blocks(&op, count, each);
}

/* Gets blocks and compares every byte. Exactly the blocks below `stored` must be found. */
static void get(const kvt_session_t *session, uint32_t first, uint32_t count, uint32_t stored) {
    static pool_t pool;
    static kvt_status_t each[POOL];
    open_pool(&pool, 0xA5);
    place(&pool, count, 599, 7); /* 7 and the pool's size are coprime */
    const kvt_block_names_t names = names_of(first, count);
    const kvt_blocks_t blocks = blocks_of(&pool, &names);
    kvt_op_t *op = NULL;
    CHECK_OK(kvt_session_get_blocks(session, &blocks, NULL, &op, NULL));
    const int all = first + count <= stored;
    CHECK_IS(finish_blocks(&op, count, each), all ? KVT_OK : KVT_E_NOT_FOUND);
    for (uint32_t i = 0; i < count; i++) {
        const int is_stored = first + i < stored;
        CHECK_IS(each[i], is_stored ? KVT_OK : KVT_E_NOT_FOUND);
        CHECK(is_stored ? has_content(pool.places[i], first + i) : is_filled(pool.places[i], 0xA5));
    }
    for (uint32_t at = count; at < POOL; at++)
        CHECK(is_filled(pool.memory + (size_t)((599 + at * 7) % POOL) * BLOCK, 0xA5));
}

static void blocks_survive_a_restart(void) {
    static kvt_status_t each[POOL];
    char rest[160];
    snprintf(rest, sizeof rest,
             ", write=back, disk=disk(path=\"%s/all\", bytes=16MiB, segment=1MiB, buffered=true)",
             folder);
    for (uint32_t round = 0; round < 2; round++) {
        kvt_store_t *store = open_store(rest);
        kvt_namespace_t *ns = open_namespace(store, "one");
        kvt_session_t *session = open_session(ns);
        if (round == 0) {
            get(session, 0, POOL, 0);
            CHECK_OK(put(session, 0, 500, KVT_LEVEL_DURABLE, each));
            CHECK_OK(put(session, 0, 500, KVT_LEVEL_RAM, each)); /* already stored */
        }
        get(session, 100, POOL, 500);
        get(session, 0, 1, 500);
        static uint8_t found[POOL];
        const kvt_block_names_t names = names_of(0, POOL);
        CHECK_OK(kvt_namespace_blocks_exist(ns, &names, found, NULL));
        for (uint32_t i = 0; i < POOL; i++) {
            CHECK_EQ((found[i] & KVT_EXISTS_WHOLE) != 0, i < 500);
            CHECK_EQ((found[i] & 1u << KVT_TIER_DISK) != 0, i < 500);
        }
        /* Another salt finds none of them under the same names. */
        kvt_namespace_t *other = open_namespace(store, "two");
        CHECK_OK(kvt_namespace_blocks_exist(other, &names, found, NULL));
        for (uint32_t i = 0; i < POOL; i++) CHECK_EQ(found[i], 0);
        CHECK_OK(kvt_namespace_close(&other));
        close_all(&session, &ns, &store);
    }
}

/* Names may have different lengths; an op without a handle reports to its queue only. */
static void names_of_several_lengths_report_to_a_queue(void) {
    kvt_store_t *store = open_store("");
    kvt_namespace_t *ns = open_namespace(store, "");
    kvt_session_t *session = open_session(ns);
    const uint64_t ends[3] = {1, 3, 6};
    kvt_block_names_t names = KVT_BLOCK_NAMES_INIT;
    names.bytes = (const uint8_t *)"abbccc";
    names.ends = ends;
    names.count = 3;
    static pool_t pool;
    open_pool(&pool, 0);
    place(&pool, 3, 0, 1);
    for (uint32_t i = 0; i < 3; i++) content(i, pool.places[i]);
    kvt_queue_t *queue = open_queue(runtime, 4);
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    opts.queue = queue;
    opts.tag = 7;
    kvt_blocks_t blocks = blocks_of(&pool, &names);
    CHECK_OK(kvt_session_put_blocks(session, &blocks, &opts, NULL, NULL));
    kvt_completion_t done;
    uint64_t got = 0;
    CHECK_OK(kvt_queue_wait(queue, hang_guard(), &done, 1, sizeof done, &got));
    CHECK_EQ(done.tag, 7);
    CHECK_OK(done.status);
    CHECK_EQ(done.value, 3);
    CHECK_EQ(done.bytes_done, 3 * BLOCK);
    /* "c" is not stored; the others are found with names of one length per call. */
    const char *queries[4] = {"a", "c", "bb", "ccc"};
    for (int i = 0; i < 4; i++) {
        kvt_block_names_t one = KVT_BLOCK_NAMES_INIT;
        one.bytes = (const uint8_t *)queries[i];
        one.each_bytes = strlen(queries[i]);
        one.count = 1;
        uint8_t found = 9;
        CHECK_OK(kvt_namespace_blocks_exist(ns, &one, &found, NULL));
        CHECK_EQ(found != 0, i != 1);
    }
    names.bytes = (const uint8_t *)"axxccc";
    blocks.names = &names;
    opts.tag = 8;
    CHECK_OK(kvt_session_get_blocks(session, &blocks, &opts, NULL, NULL));
    CHECK_OK(kvt_queue_wait(queue, hang_guard(), &done, 1, sizeof done, &got));
    CHECK_EQ(done.tag, 8);
    CHECK_IS(done.status, KVT_E_NOT_FOUND);
    CHECK_EQ(done.items_failed, 1);
    CHECK_EQ(done.value, 1);
    close_queue(&queue);
    close_all(&session, &ns, &store);
}

/* No memory is read or written before the ready event is signaled. */
static void transfers_wait_for_the_ready_event(void) {
    static kvt_status_t each[POOL];
    kvt_store_t *store = open_store("");
    kvt_namespace_t *ns = open_namespace(store, "");
    kvt_session_t *session = open_session(ns);
    kvt_ready_event_t *event = NULL;
    CHECK_OK(kvt_ready_event_open(0, &event, NULL));
    static pool_t pool;
    open_pool(&pool, 0);
    place(&pool, 20, 0, 1);
    const kvt_block_names_t names = names_of(0, 20);
    kvt_blocks_t blocks = blocks_of(&pool, &names);
    blocks.ready = event;
    kvt_op_t *op = NULL, *cancelled = NULL;
    CHECK_OK(kvt_session_put_blocks(session, &blocks, NULL, &op, NULL));
    const kvt_block_names_t more = names_of(20, 20);
    blocks.names = &more;
    CHECK_OK(kvt_session_put_blocks(session, &blocks, NULL, &cancelled, NULL));
    CHECK_OK(kvt_op_cancel(cancelled));
    CHECK_IS(finish_blocks(&cancelled, 20, each), KVT_E_CANCELLED);
    for (uint32_t i = 0; i < 20; i++) CHECK_IS(each[i], KVT_E_CANCELLED);
    CHECK_EQ(info_of(op).items_done, 0);
    for (uint32_t i = 0; i < 20; i++) content(i, pool.places[i]);
    CHECK_OK(kvt_ready_event_signal(event));
    CHECK_OK(finish_blocks(&op, 20, each));
    get(session, 0, 40, 20);
    CHECK_OK(kvt_ready_event_close(&event));
    close_all(&session, &ns, &store);
}

static void drop_and_clear_remove_blocks(void) {
    static kvt_status_t each[POOL];
    kvt_store_t *store = open_store("");
    kvt_namespace_t *ns = open_namespace(store, "");
    kvt_session_t *session = open_session(ns);
    CHECK_OK(put(session, 0, 50, KVT_LEVEL_RAM, each));
    const kvt_block_names_t names = names_of(30, 40);
    kvt_clear_report_t report = KVT_CLEAR_REPORT_INIT;
    CHECK_OK(kvt_session_drop_blocks(session, &names, &report, NULL));
    CHECK_EQ(report.removed_chunks, 20);
    CHECK_EQ(report.referenced_chunks + report.transferring_chunks, 0);
    get(session, 0, 60, 30);
    /* Clearing a namespace removes its blocks, too. */
    CHECK_OK(kvt_namespace_clear(ns, hang_guard(), &report, NULL));
    CHECK_EQ(report.removed_chunks, 30);
    get(session, 0, 60, 0);
    close_all(&session, &ns, &store);
}

/* A held block stays until it was released as often as it was held. */
static void held_blocks_are_not_removed(void) {
    static kvt_status_t each[POOL];
    kvt_store_t *store = open_store("");
    kvt_namespace_t *ns = open_namespace(store, "");
    kvt_session_t *session = open_session(ns), *other = open_session(ns);
    CHECK_OK(put(session, 0, 50, KVT_LEVEL_RAM, each));
    static uint8_t held[POOL], found[POOL];
    const kvt_block_names_t names = names_of(30, 40), stored = names_of(30, 20), last = names_of(49, 1);
    CHECK_OK(kvt_session_hold_blocks(session, &names, held, NULL));
    CHECK_OK(kvt_namespace_blocks_exist(ns, &names, found, NULL));
    CHECK(memcmp(held, found, 40) == 0);
    for (int i = 0; i < 40; i++) CHECK_EQ((held[i] & KVT_EXISTS_WHOLE) != 0, i < 20);
    CHECK_OK(kvt_session_hold_blocks(other, &last, NULL, NULL));
    kvt_clear_report_t report = KVT_CLEAR_REPORT_INIT;
    CHECK_OK(kvt_session_drop_blocks(session, &names, &report, NULL));
    CHECK_EQ(report.removed_chunks, 0);
    CHECK_EQ(report.referenced_chunks, 20);
    CHECK_OK(kvt_namespace_clear(ns, hang_guard(), &report, NULL));
    CHECK_EQ(report.removed_chunks, 30);
    CHECK_EQ(report.referenced_chunks, 20);
    /* Some of these were never held: the call releases none. */
    kvt_error_t *err = NULL;
    CHECK_IS(kvt_session_release_blocks(session, &names, &err), KVT_E_INVALID);
    CHECK(err != NULL && *kvt_error_message(err) != 0);
    kvt_error_free(&err);
    CHECK_OK(kvt_session_drop_blocks(session, &names, &report, NULL));
    CHECK_EQ(report.referenced_chunks, 20);
    CHECK_OK(kvt_session_release_blocks(session, &stored, NULL));
    CHECK_IS(kvt_session_release_blocks(session, &last, NULL), KVT_E_INVALID);
    CHECK_OK(kvt_session_drop_blocks(session, &names, &report, NULL));
    CHECK_EQ(report.removed_chunks, 19);
    CHECK_EQ(report.referenced_chunks, 1);
    CHECK_OK(kvt_session_close(&other));
    CHECK_OK(kvt_session_drop_blocks(session, &names, &report, NULL));
    CHECK_EQ(report.removed_chunks, 1);
    /* Missing blocks are not held, and a hint about them has no effect. */
    kvt_policy_hint_t hint = KVT_POLICY_HINT_INIT;
    hint.next_use_ns = 1;
    CHECK_OK(kvt_session_hold_blocks(session, &names, held, NULL));
    for (int i = 0; i < 40; i++) CHECK_EQ(held[i], 0);
    CHECK_OK(kvt_session_hint_blocks(session, &names, &hint, NULL));
    close_all(&session, &ns, &store);
}

static void invalid_calls_are_refused(void) {
    static pool_t pool;
    open_pool(&pool, 0);
    place(&pool, 4, 0, 1);
    kvt_store_t *store = open_store("");
    kvt_namespace_t *ns = open_namespace(store, "");
    kvt_session_t *session = open_session(ns);
    const kvt_block_names_t names = names_of(0, 4);
    const kvt_blocks_t good = blocks_of(&pool, &names);
    kvt_op_t *op = NULL;
#define REFUSED(status, change)                                                              \
    do {                                                                                     \
        kvt_blocks_t b = good;                                                               \
        kvt_block_names_t n = names;                                                               \
        b.names = &n;                                                                        \
        change;                                                                              \
        kvt_error_t *err = NULL;                                                             \
        CHECK_IS(kvt_session_put_blocks(session, &b, NULL, &op, &err), status);              \
        CHECK(op == NULL && err != NULL && *kvt_error_message(err) != 0);                    \
        kvt_error_free(&err);                                                                \
    } while (0)
    const uint64_t backwards[4] = {8, 4, 12, 16}, empty[4] = {4, 4, 8, 12};
    const uint64_t overflow[4] = {4, 8, 12, UINT64_MAX};
    REFUSED(KVT_E_INVALID, b.names = NULL);
    REFUSED(KVT_E_INVALID, n.bytes = NULL);
    REFUSED(KVT_E_INVALID, n.each_bytes = 0);
    REFUSED(KVT_E_LIMIT, n.count = 0);
    REFUSED(KVT_E_LIMIT, n.count = (UINT64_C(1) << 22) + 1);
    REFUSED(KVT_E_LIMIT, n.each_bytes = UINT64_MAX);
    REFUSED(KVT_E_INVALID, n.ends = backwards); /* and each_bytes */
    REFUSED(KVT_E_INVALID, (n.ends = backwards, n.each_bytes = 0));
    REFUSED(KVT_E_LIMIT, (n.ends = empty, n.each_bytes = 0));
    REFUSED(KVT_E_INVALID, (n.ends = overflow, n.each_bytes = 0));
    REFUSED(KVT_E_INVALID, n.struct_size = 3);
    REFUSED(KVT_E_INVALID, b.flags = 1);
    REFUSED(KVT_E_INVALID, b.reserved = 1);
    REFUSED(KVT_E_INVALID, b.layers = LAYERS + 1);
    REFUSED(KVT_E_INVALID, b.first_layer = LAYERS);
    REFUSED(KVT_E_INVALID, b.k = NULL);
    REFUSED(KVT_E_INVALID, b.v = NULL);
    REFUSED(KVT_E_INVALID, b.stride_bytes = 3);
    REFUSED(KVT_E_INVALID, b.level = 9);
    REFUSED(KVT_E_UNAVAILABLE, b.level = KVT_LEVEL_DURABLE);
    REFUSED(KVT_E_UNAVAILABLE, b.after = 5);
    REFUSED(KVT_E_INVALID, n.count = 5); /* the page table has four places */
    pool.k[1].memory = KVT_MEMORY_DEVICE;
    REFUSED(KVT_E_UNAVAILABLE, (void)b);
    pool.k[1].memory = KVT_MEMORY_HOST;
    CHECK_IS(kvt_session_prefetch_blocks(session, &good, NULL, &op, NULL), KVT_E_INVALID);
    kvt_blocks_t level = blocks_of(&pool, &names);
    level.level = KVT_LEVEL_DISK;
    CHECK_IS(kvt_session_get_blocks(session, &level, NULL, &op, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_session_put_blocks(session, NULL, NULL, &op, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_session_put_blocks(NULL, &good, NULL, &op, NULL), KVT_E_HANDLE);
    CHECK_IS(kvt_session_drop_blocks(session, NULL, NULL, NULL), KVT_E_INVALID);
    kvt_block_names_t many = names_of(0, 65537);
    static uint8_t zeros[65537];
    many.bytes = zeros;
    many.each_bytes = 1;
    CHECK_IS(kvt_session_hold_blocks(session, &many, NULL, NULL), KVT_E_LIMIT);
    CHECK_IS(kvt_session_release_blocks(session, &many, NULL), KVT_E_LIMIT);
    static uint8_t held[4];
    const kvt_policy_hint_t hint = KVT_POLICY_HINT_INIT;
    kvt_policy_hint_t wrong = hint;
    wrong.confidence = 1.5;
    CHECK_IS(kvt_session_hold_blocks(session, NULL, held, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_session_hold_blocks(NULL, &names, held, NULL), KVT_E_HANDLE);
    CHECK_IS(kvt_session_release_blocks(session, NULL, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_session_release_blocks(NULL, &names, NULL), KVT_E_HANDLE);
    CHECK_IS(kvt_session_hint_blocks(session, NULL, &hint, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_session_hint_blocks(session, &names, &wrong, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_session_hint_blocks(NULL, &names, &hint, NULL), KVT_E_HANDLE);
    CHECK_OK(kvt_session_pin_blocks(session, &names, 255, 1, NULL)); /* there are none */
    CHECK_IS(kvt_session_pin_blocks(session, &names, 256, 1, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_session_pin_blocks(session, &names, 0, 0, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_session_pin_blocks(session, NULL, 0, 1, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_session_pin_blocks(NULL, &names, 0, 1, NULL), KVT_E_HANDLE);
    CHECK_IS(kvt_session_pin_blocks(session, &many, 0, 1, NULL), KVT_E_LIMIT);
    CHECK_OK(kvt_store_set_quota(store, 3, KVT_TIER_HOST, 0, NULL));
    CHECK_IS(kvt_store_set_quota(store, 3, KVT_TIER_DISK, 0, NULL), KVT_E_UNSUPPORTED); /* no disk */
    CHECK_IS(kvt_store_set_quota(store, 0, KVT_TIER_HOST, 1, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_store_set_quota(store, 3, KVT_TIER_REMOTE, 1, NULL), KVT_E_UNSUPPORTED);
    CHECK_IS(kvt_store_set_quota(store, 3, 99, 1, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_store_set_quota(NULL, 3, KVT_TIER_HOST, 1, NULL), KVT_E_HANDLE);
    CHECK_IS(kvt_namespace_blocks_exist(ns, &names, NULL, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_namespace_block_keys(ns, &names, NULL, NULL), KVT_E_INVALID);
    uint8_t found[4];
    CHECK_IS(kvt_namespace_blocks_exist(NULL, &names, found, NULL), KVT_E_HANDLE);
    /* No failed call has changed the store. */
    kvt_store_stats_t stats = KVT_STORE_STATS_INIT;
    CHECK_OK(kvt_store_stats(store, &stats));
    CHECK_EQ(stats.chunks + stats.stored_cells, 0);
    CHECK_OK(kvt_store_close(&store, hang_guard(), NULL));
    CHECK_IS(kvt_session_put_blocks(session, &good, NULL, &op, NULL), KVT_E_CLOSED);
    CHECK_IS(kvt_session_hold_blocks(session, &names, held, NULL), KVT_E_CLOSED);
    CHECK_IS(kvt_session_release_blocks(session, &names, NULL), KVT_E_CLOSED);
    CHECK_IS(kvt_namespace_blocks_exist(ns, &names, found, NULL), KVT_E_CLOSED);
    CHECK_OK(kvt_session_close(&session));
    CHECK_OK(kvt_namespace_close(&ns));
}

/* The example of docs/internals/keys.md, "Examples": a block. */
static void block_key_matches_the_documentation(void) {
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
    kvt_store_t *store = open_store("");
    kvt_namespace_t *ns = NULL;
    CHECK_OK(kvt_namespace_open(store, &identity, &layout, 0, &ns, NULL));
    uint8_t name[32], key[KVT_KEY_BYTES];
    for (int i = 0; i < 32; i++) name[i] = (uint8_t)i;
    kvt_block_names_t names = KVT_BLOCK_NAMES_INIT;
    names.bytes = name;
    names.each_bytes = sizeof name;
    names.count = 1;
    CHECK_OK(kvt_namespace_block_keys(ns, &names, key, NULL));
    const char *want = "f6e19dbf9255ad43af1780f570b526016b0e65bfb063b852ee444df2b4403d24";
    for (int i = 0; i < 32; i++) {
        char digits[3];
        snprintf(digits, sizeof digits, "%02x", key[i]);
        CHECK(memcmp(digits, want + 2 * i, 2) == 0);
    }
    CHECK_OK(kvt_namespace_close(&ns));
    CHECK_OK(kvt_store_close(&store, hang_guard(), NULL));
}

static void calls_in_a_forked_child_are_refused(void) {
    kvt_store_t *store = open_store("");
    kvt_namespace_t *ns = open_namespace(store, "");
    kvt_session_t *session = open_session(ns);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        const kvt_block_names_t names = names_of(0, 1);
        const kvt_blocks_t blocks = blocks_of(NULL, &names);
        uint8_t found[1], key[KVT_KEY_BYTES];
        CHECK_IS(kvt_session_put_blocks(session, &blocks, NULL, NULL, NULL), KVT_E_FORKED);
        CHECK_IS(kvt_session_get_blocks(session, &blocks, NULL, NULL, NULL), KVT_E_FORKED);
        CHECK_IS(kvt_session_prefetch_blocks(session, &blocks, NULL, NULL, NULL), KVT_E_FORKED);
        CHECK_IS(kvt_session_drop_blocks(session, &names, NULL, NULL), KVT_E_FORKED);
        const kvt_policy_hint_t hint = KVT_POLICY_HINT_INIT;
        CHECK_IS(kvt_session_hold_blocks(session, &names, found, NULL), KVT_E_FORKED);
        CHECK_IS(kvt_session_release_blocks(session, &names, NULL), KVT_E_FORKED);
        CHECK_IS(kvt_session_hint_blocks(session, &names, &hint, NULL), KVT_E_FORKED);
        CHECK_IS(kvt_namespace_blocks_exist(ns, &names, found, NULL), KVT_E_FORKED);
        CHECK_IS(kvt_namespace_block_keys(ns, &names, key, NULL), KVT_E_FORKED);
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    close_all(&session, &ns, &store);
}

int main(int argc, char **argv) {
    (void)argv;
    check_begin();
    CHECK(mkdtemp(folder) != NULL);
    for (uint32_t i = 0; i < POOL * 2; i++)
        for (int at = 0; at < NAME; at++) names_of_all[i][at] = (uint8_t)(i >> (at % 4 * 8));
    runtime = open_runtime(1, NULL);
    blocks_survive_a_restart();
    names_of_several_lengths_report_to_a_queue();
    transfers_wait_for_the_ready_event();
    drop_and_clear_remove_blocks();
    held_blocks_are_not_removed();
    invalid_calls_are_refused();
    block_key_matches_the_documentation();
    /* not under sanitizers: they report the parent's threads in the child */
    if (argc == 1) calls_in_a_forked_child_are_refused();
    close_runtime(&runtime);
    char command[64];
    snprintf(command, sizeof command, "rm -r '%s'", folder);
    CHECK(system(command) == 0);
    return check_end("blocks");
}
