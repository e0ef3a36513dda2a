/* Tests of the store: KV of several sessions is put from one tensor shape and read into another,
 * also after a restart; every byte is compared. Then every invalid use of each call. */

#include "check.h"

#include <dirent.h>
#include <sys/wait.h>

/* Layers 0 to 2 have two heads with K and V. Layer 3 has latent rows without V. Layer 4 is a
 * state at the end of each chunk. */
#define LAYERS 5
#define CHUNK 8
#define RUN 32
#define LATENT 96
#define STATE 256
#define MAX_TOKENS 128
#define PAGE 5
#define PAGES 26
#define LAYER_BYTES (PAGES * PAGE * 4 * RUN)
#define POISON 0xA5

static kvt_runtime_t *runtime;
static char folder[] = "/tmp/kvt-store-XXXXXX";

static uint64_t mixed(uint64_t x) {
    x += UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

/* A sequence: its tokens, and for each position a hash of all tokens up to it. */
typedef struct {
    uint32_t tokens[MAX_TOKENS];
    uint64_t marks[MAX_TOKENS];
    uint32_t count;
} text_t;

static void extend(text_t *text, uint32_t token) {
    const uint64_t before = text->count > 0 ? text->marks[text->count - 1] : 7;
    CHECK(text->count < MAX_TOKENS);
    text->tokens[text->count] = token;
    text->marks[text->count] = mixed(before ^ token);
    text->count++;
}

/* All texts have the first `shared` tokens in common. */
static text_t text_of(uint32_t seed, uint32_t shared, uint32_t count) {
    text_t text;
    text.count = 0;
    for (uint32_t i = 0; i < count; i++) extend(&text, i < shared ? i : 1000 * seed + i);
    return text;
}

/* Tensor shapes of engines. */
enum shape { PLAIN, BY_HEAD, TOGETHER, PAGED, SHAPES };

typedef struct {
    enum shape shape;
    uint8_t *memory;
    void *pages[LAYERS][PAGES];
    kvt_view_t k[LAYERS];
    kvt_view_t v[LAYERS];
} engine_t;

static uint32_t heads_of(uint32_t layer) { return layer < 3 ? 2 : 1; }
static uint32_t run_of(uint32_t layer) { return layer < 3 ? RUN : layer == 3 ? LATENT : STATE; }
static uint32_t planes_of(uint32_t layer) { return layer < 3 ? 2 : 1; }

/* Allocates tensors that begin with token `first` of the sequence. */
static void open_engine(engine_t *engine, enum shape shape) {
    memset(engine, 0, sizeof *engine);
    engine->shape = shape;
    engine->memory = malloc((size_t)LAYERS * LAYER_BYTES);
    CHECK(engine->memory != NULL);
    memset(engine->memory, POISON, (size_t)LAYERS * LAYER_BYTES);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        uint8_t *start = engine->memory + (size_t)layer * LAYER_BYTES;
        const uint32_t heads = heads_of(layer), run = run_of(layer);
        const uint64_t token_bytes = (uint64_t)heads * run;
        for (uint32_t plane = 0; plane < planes_of(layer); plane++) {
            kvt_view_t *view = plane == 0 ? &engine->k[layer] : &engine->v[layer];
            view->run_bytes = run;
            view->heads = heads;
            if (layer == 4) { /* states are always contiguous */
                view->address = start;
                view->tokens = (MAX_TOKENS + CHUNK - 1) / CHUNK;
                continue;
            }
            switch (shape) {
            case PLAIN: /* the defaults */
                view->address = start + plane * MAX_TOKENS * token_bytes;
                view->tokens = MAX_TOKENS;
                break;
            case BY_HEAD:
                view->address = start + plane * MAX_TOKENS * token_bytes;
                view->token_stride_bytes = run;
                view->head_stride_bytes = (uint64_t)MAX_TOKENS * run;
                view->tokens = MAX_TOKENS;
                break;
            case TOGETHER:
                view->address = start + plane * token_bytes;
                view->token_stride_bytes = planes_of(layer) * token_bytes;
                view->head_stride_bytes = run;
                view->tokens = MAX_TOKENS;
                break;
            default:
                for (uint32_t page = 0; page < PAGES; page++) {
                    const uint64_t bytes = PAGE * planes_of(layer) * token_bytes;
                    engine->pages[layer][page] = start + (page * 7 % PAGES) * bytes;
                }
                view->pages = engine->pages[layer];
                view->page_count = PAGES;
                view->page_tokens = PAGE;
                view->shift_bytes = (int64_t)(plane * PAGE * token_bytes);
            }
        }
    }
}

static void close_engine(engine_t *engine) { free(engine->memory); }

static uint8_t *byte_at(const engine_t *engine, uint32_t layer, uint32_t plane, uint32_t token,
                        uint32_t head) {
    uint8_t *start = engine->memory + (size_t)layer * LAYER_BYTES;
    const uint64_t run = run_of(layer), all = heads_of(layer) * run;
    if (layer == 4) return start + token * run;
    switch (engine->shape) {
    case PLAIN: return start + (plane * MAX_TOKENS + token) * all + head * run;
    case BY_HEAD: return start + plane * MAX_TOKENS * all + (head * MAX_TOKENS + token) * run;
    case TOGETHER: return start + (token * planes_of(layer) + plane) * all + head * run;
    default: {
        uint8_t *page = engine->pages[layer][token / PAGE];
        return page + plane * PAGE * all + token % PAGE * all + head * run;
    }
    }
}

static uint8_t byte_of(uint64_t mark, uint32_t layer, uint32_t plane, uint32_t head, uint32_t i) {
    return (uint8_t)mixed(mark + layer * 4096 + plane * 2048 + head * 1024 + i);
}

/* Action on the tokens first..end of all layers: write them, check them, check the poison. */
enum action { FILL, CHECK_CONTENT, CHECK_POISON };

static void each_byte(const engine_t *engine, const text_t *text, uint32_t first, uint32_t end,
                      enum action action) {
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        const int is_state = layer == 4;
        const uint32_t n = is_state ? (end - first + CHUNK - 1) / CHUNK : end - first;
        for (uint32_t at = 0; at < n; at++) {
            uint32_t token = first + at;
            if (is_state) {
                token = first + (at + 1) * CHUNK - 1;
                if (token >= end) token = end - 1;
            }
            for (uint32_t plane = 0; plane < planes_of(layer); plane++)
                for (uint32_t head = 0; head < heads_of(layer); head++) {
                    uint8_t *run = byte_at(engine, layer, plane, at, head);
                    for (uint32_t i = 0; i < run_of(layer); i++) {
                        const uint8_t want = byte_of(text->marks[token], layer, plane, head, i);
                        if (action == FILL) run[i] = want;
                        if (action == CHECK_CONTENT) CHECK_EQ(run[i], want);
                        if (action == CHECK_POISON) CHECK_EQ(run[i], POISON);
                    }
                }
        }
    }
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
    CHECK_OK(kvt_store_close(store, 0, NULL));
}

static kvt_store_stats_t stats_of(const kvt_store_t *store) {
    kvt_store_stats_t stats = KVT_STORE_STATS_INIT;
    CHECK_OK(kvt_store_stats(store, &stats));
    CHECK_EQ(stats.struct_size, sizeof stats);
    return stats;
}

/* Groups and layout of the model above. */
typedef struct {
    uint16_t full[3], latent[1], state[1];
    kvt_group_t groups[3];
    kvt_layout_t layout;
} model_t;

static void make_model(model_t *model) {
    memset(model, 0, sizeof *model);
    for (uint16_t i = 0; i < 3; i++) model->full[i] = i;
    model->latent[0] = 3;
    model->state[0] = 4;
    kvt_group_t *g = model->groups;
    g[0].dtype = KVT_DTYPE_BF16;
    g[0].kv_heads = 2;
    g[0].k_bytes = g[0].v_bytes = 2 * RUN;
    g[0].layers = model->full;
    g[0].layer_count = 3;
    g[1].rule = KVT_RULE_WINDOW;
    g[1].window_tokens = 64;
    g[1].k_bytes = LATENT;
    g[1].layers = model->latent;
    g[1].layer_count = 1;
    g[2].rule = KVT_RULE_STATE;
    g[2].dtype = KVT_DTYPE_F32;
    g[2].state_bytes = STATE;
    g[2].layers = model->state;
    g[2].layer_count = 1;
    model->layout.struct_size = sizeof model->layout;
    model->layout.chunk_tokens = CHUNK;
    model->layout.groups = model->groups;
    model->layout.group_count = 3;
    model->layout.stride_bytes = sizeof *model->groups;
}

static kvt_namespace_t *open_namespace(const kvt_store_t *store, const char *salt) {
    model_t model;
    make_model(&model);
    kvt_identity_t identity = KVT_IDENTITY_INIT;
    identity.model = "small";
    identity.model_bytes = 5;
    identity.salt = salt;
    identity.salt_bytes = strlen(salt);
    kvt_namespace_t *ns = NULL;
    CHECK_OK(kvt_namespace_open(store, &identity, &model.layout, 0, &ns, NULL));
    return ns;
}

static kvt_session_t *open_session(const kvt_namespace_t *ns, const text_t *text) {
    kvt_session_opts_t opts = KVT_SESSION_OPTS_INIT;
    opts.name = "someone";
    opts.name_bytes = 7;
    opts.tenant = 3;
    kvt_session_t *session = NULL;
    CHECK_OK(kvt_session_open(ns, &opts, &session, NULL));
    if (text != NULL) {
        /* In two parts, like a prompt and an answer. */
        const uint32_t half = text->count / 2;
        CHECK_OK(kvt_session_append(session, text->tokens, half, NULL));
        CHECK_OK(kvt_session_append(session, text->tokens + half, text->count - half, NULL));
    }
    return session;
}

static void close_session(kvt_session_t **session) {
    CHECK_OK(kvt_session_close(session));
    CHECK(*session == NULL);
    CHECK_OK(kvt_session_close(session));
}

static void close_namespace(kvt_namespace_t **ns) {
    CHECK_OK(kvt_namespace_close(ns));
    CHECK(*ns == NULL);
}

static kvt_transfer_t transfer_of(const engine_t *engine, uint32_t first, uint32_t tokens) {
    kvt_transfer_t transfer = KVT_TRANSFER_INIT;
    transfer.first_token = first;
    transfer.tokens = tokens;
    if (engine != NULL) {
        transfer.k = engine->k;
        transfer.v = engine->v;
        transfer.stride_bytes = sizeof *engine->k;
    }
    return transfer;
}

/* Waits for an op, writes its value and returns its status. */
static kvt_status_t finish(kvt_op_t **op, uint64_t *value) {
    CHECK_OK(kvt_op_wait(*op, KVT_OP_RELEASED, hang_guard()));
    *value = info_of(*op).value;
    return finish_op(op);
}

static void put_all(const kvt_session_t *session, const text_t *text, enum shape shape,
                    uint32_t level) {
    engine_t engine;
    open_engine(&engine, shape);
    each_byte(&engine, text, 0, text->count, FILL);
    kvt_transfer_t transfer = transfer_of(&engine, 0, 0);
    transfer.level = level;
    kvt_op_t *op = NULL;
    uint64_t value = 0;
    CHECK_OK(kvt_session_put(session, &transfer, NULL, &op, NULL));
    CHECK_OK(finish(&op, &value));
    CHECK_EQ(value, text->count);
    close_engine(&engine);
}

static void get_and_compare(const kvt_session_t *session, const text_t *text, enum shape shape,
                            uint32_t first, uint32_t tokens) {
    engine_t engine;
    open_engine(&engine, shape);
    const kvt_transfer_t transfer = transfer_of(&engine, first, tokens);
    kvt_op_t *op = NULL;
    uint64_t value = 0;
    CHECK_OK(kvt_session_get(session, &transfer, NULL, &op, NULL));
    CHECK_OK(finish(&op, &value));
    CHECK_EQ(value, tokens);
    each_byte(&engine, text, first, first + tokens, CHECK_CONTENT);
    close_engine(&engine);
}

/* Several sessions with a common prefix, in little memory, are read again after a restart. The
 * tail of a session is private and is not found again. */
static void sessions_survive_a_restart(void) {
    enum { SESSIONS = 8, SHARED = 32, TOKENS = 99, FULL = TOKENS / CHUNK * CHUNK };
    kvt_store_t *store = open_disk("trip", ", host=256KiB, write=through");
    kvt_namespace_t *ns = open_namespace(store, "salt");
    text_t texts[SESSIONS];
    kvt_session_t *sessions[SESSIONS];
    for (uint32_t i = 0; i < SESSIONS; i++) {
        texts[i] = text_of(i + 1, SHARED, TOKENS);
        sessions[i] = open_session(ns, &texts[i]);
        put_all(sessions[i], &texts[i], i % SHAPES, KVT_LEVEL_DURABLE);
    }
    kvt_store_stats_t stats = stats_of(store);
    CHECK_EQ(stats.puts, SESSIONS);
    CHECK_EQ(stats.sessions, SESSIONS);
    CHECK_EQ(stats.namespaces, 1);
    CHECK_EQ(stats.known_cells, (SESSIONS - 1) * SHARED / CHUNK * LAYERS);
    CHECK_EQ(stats.host_limit_bytes, 256 << 10);
    CHECK(stats.written_cells > 0 && stats.disk_syncs > 0 && stats.disk_live_bytes > 0);
    for (uint32_t i = 0; i < SESSIONS; i++) {
        get_and_compare(sessions[i], &texts[i], (i + 1) % SHAPES, 0, TOKENS);
        get_and_compare(sessions[i], &texts[i], (i + 2) % SHAPES, 2 * CHUNK, 3 * CHUNK);
        CHECK(stats_of(store).host_used_bytes <= 256 << 10);
    }
    for (uint32_t i = 0; i < SESSIONS; i++) close_session(&sessions[i]);
    close_namespace(&ns);
    close_store(&store);

    store = open_disk("trip", ", host=256KiB");
    stats = stats_of(store);
    CHECK_EQ(stats.recovered_chunks, SHARED / CHUNK + SESSIONS * (FULL - SHARED) / CHUNK);
    CHECK_EQ(stats.recovered_cells, stats.recovered_chunks * LAYERS);
    ns = open_namespace(store, "salt");
    for (uint32_t i = 0; i < SESSIONS; i++) {
        sessions[i] = open_session(ns, &texts[i]);
        get_and_compare(sessions[i], &texts[i], i % SHAPES, 0, FULL);
        get_and_compare(sessions[i], &texts[i], PAGED, FULL - CHUNK, CHUNK);
        close_session(&sessions[i]);
    }
    CHECK(stats_of(store).disk_hit_cells > 0);
    CHECK_EQ(stats_of(store).corrupt_cells, 0);

    /* Another salt: nothing is found, and no byte is touched. */
    kvt_namespace_t *other = open_namespace(store, "pepper");
    sessions[0] = open_session(other, &texts[0]);
    engine_t engine;
    open_engine(&engine, PLAIN);
    const kvt_transfer_t transfer = transfer_of(&engine, 0, FULL);
    kvt_op_t *op = NULL;
    uint64_t value = 9;
    CHECK_OK(kvt_session_get(sessions[0], &transfer, NULL, &op, NULL));
    CHECK_IS(finish(&op, &value), KVT_E_NOT_FOUND);
    CHECK_EQ(value, 0);
    each_byte(&engine, &texts[0], 0, FULL, CHECK_POISON);
    close_engine(&engine);
    close_session(&sessions[0]);
    close_namespace(&other);
    close_namespace(&ns);
    close_store(&store);
}

/* One op per layer, a queue with tags, forks and truncation, missing tokens. */
static void transfers_work_by_layer_and_after_forks(void) {
    kvt_store_t *store = open_disk("moving", "");
    kvt_namespace_t *ns = open_namespace(store, "");
    text_t text = text_of(1, 0, 40);
    kvt_session_t *session = open_session(ns, &text);
    close_namespace(&ns); /* the session keeps it open */

    engine_t engine;
    open_engine(&engine, PAGED);
    each_byte(&engine, &text, 0, 40, FILL);
    kvt_queue_t *queue = open_queue(runtime, 0);
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    opts.queue = queue;
    opts.tag = 100;
    kvt_transfer_t transfer = transfer_of(&engine, 0, 40);
    transfer.flags = KVT_TRANSFER_EACH_LAYER;
    CHECK_OK(kvt_session_put(session, &transfer, &opts, NULL, NULL));
    uint32_t seen = 0;
    while (seen != (1u << LAYERS) - 1) {
        kvt_completion_t entries[LAYERS];
        uint64_t count = 0;
        CHECK_OK(kvt_queue_wait(queue, hang_guard(), entries, LAYERS, sizeof *entries, &count));
        for (uint64_t i = 0; i < count; i++) {
            CHECK_OK(entries[i].status);
            CHECK(entries[i].op == NULL && entries[i].tag >= 100 && entries[i].tag < 100 + LAYERS);
            CHECK_EQ(entries[i].value, 40);
            CHECK(entries[i].bytes_done > 0);
            seen |= 1u << (entries[i].tag - 100);
        }
    }
    close_engine(&engine);

    /* One handle per layer, for layers 1 to 3. */
    open_engine(&engine, BY_HEAD);
    transfer = transfer_of(&engine, 0, 0);
    transfer.flags = KVT_TRANSFER_EACH_LAYER;
    transfer.first_layer = 1;
    transfer.layers = 3;
    transfer.k = engine.k + 1;
    transfer.v = engine.v + 1;
    kvt_op_t *ops[3] = {NULL, NULL, NULL};
    uint64_t value = 0;
    CHECK_OK(kvt_session_get(session, &transfer, NULL, ops, NULL));
    for (int i = 0; i < 3; i++) {
        CHECK_OK(finish(&ops[i], &value));
        CHECK_EQ(value, 40);
    }
    transfer = transfer_of(&engine, 0, 0);
    CHECK_OK(kvt_session_get(session, &transfer, NULL, ops, NULL));
    CHECK_OK(finish(&ops[0], &value));
    each_byte(&engine, &text, 0, 40, CHECK_CONTENT);
    close_engine(&engine);

    /* A fork has its own tokens; they are not stored yet. */
    kvt_session_t *fork = NULL;
    CHECK_OK(kvt_session_fork(session, NULL, &fork, NULL));
    CHECK_OK(kvt_session_truncate(fork, 20, NULL));
    text_t other = text_of(1, 0, 20);
    for (uint32_t i = 0; i < 16; i++) {
        extend(&other, 77 + i);
        CHECK_OK(kvt_session_append(fork, &other.tokens[20 + i], 1, NULL));
    }
    kvt_session_info_t info = KVT_SESSION_INFO_INIT;
    CHECK_OK(kvt_session_info(fork, &info));
    CHECK_EQ(info.tokens, 36);
    CHECK_EQ(info.full_chunks, 4);
    CHECK_EQ(info.chunk_tokens, CHUNK);
    CHECK_EQ(info.layers, LAYERS);
    open_engine(&engine, TOGETHER);
    transfer = transfer_of(&engine, 0, 0);
    CHECK_OK(kvt_session_get(fork, &transfer, NULL, ops, NULL));
    CHECK_IS(finish(&ops[0], &value), KVT_E_NOT_FOUND);
    CHECK_EQ(value, 16);
    each_byte(&engine, &other, 0, 16, CHECK_CONTENT);
    close_engine(&engine);
    put_all(fork, &other, TOGETHER, KVT_LEVEL_RAM);
    get_and_compare(fork, &other, PLAIN, 0, 36);
    get_and_compare(session, &text, PLAIN, 0, 40);

    /* A prefetch into host memory, without views. */
    transfer = transfer_of(NULL, 0, 16);
    opts.queue = NULL;
    opts.priority = KVT_PRIORITY_PREFETCH;
    CHECK_OK(kvt_session_prefetch(session, &transfer, &opts, ops, NULL));
    CHECK_OK(finish(&ops[0], &value));
    CHECK_EQ(value, 16);
    CHECK_EQ(stats_of(store).prefetches, 1);

    close_session(&fork);
    close_session(&session);
    close_queue(&queue);
    close_store(&store);
}

/* Expired and cancelled transfers: the bytes that arrived before are right. */
static void cancelled_transfers_leave_right_bytes(void) {
    kvt_store_t *store = open_disk("late", ", host=256KiB, write=through");
    kvt_namespace_t *ns = open_namespace(store, "");
    const text_t text = text_of(5, 0, 120);
    kvt_session_t *session = open_session(ns, &text);
    put_all(session, &text, PLAIN, KVT_LEVEL_DISK);

    engine_t engine;
    open_engine(&engine, PLAIN);
    kvt_transfer_t transfer = transfer_of(&engine, 0, 0);
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    opts.deadline_ns = 1;
    kvt_op_t *op = NULL;
    CHECK_OK(kvt_session_get(session, &transfer, &opts, &op, NULL));
    CHECK_OK(kvt_op_wait(op, KVT_OP_RELEASED, hang_guard()));
    const kvt_status_t late = finish_op(&op);
    CHECK(late == KVT_E_TIMEOUT || late == KVT_OK);

    opts.deadline_ns = 0;
    enum { MANY = 64 };
    kvt_op_t *ops[MANY];
    kvt_transfer_t ahead = transfer_of(NULL, 0, 0);
    for (int i = 0; i < MANY; i++) {
        CHECK_OK(kvt_session_prefetch(session, &ahead, NULL, &ops[i], NULL));
        CHECK_OK(kvt_op_cancel(ops[i]));
    }
    for (int i = 0; i < MANY; i++) {
        const kvt_status_t status = finish_op(&ops[i]);
        CHECK(status == KVT_OK || status == KVT_E_CANCELLED);
    }
    CHECK_OK(kvt_session_get(session, &transfer, &opts, &op, NULL));
    CHECK_OK(finish_op(&op));
    each_byte(&engine, &text, 0, 120, CHECK_CONTENT);
    close_engine(&engine);
    close_session(&session);
    close_namespace(&ns);
    close_store(&store);
}

static void invalid_specs_are_refused(void) {
    kvt_store_t *store = NULL;
    kvt_error_t *err = NULL;
    kvt_store_opts_t opts = KVT_STORE_OPTS_INIT;
    CHECK_IS(kvt_store_open(runtime, NULL, &opts, NULL, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_store_open(NULL, NULL, &opts, &store, NULL), KVT_E_HANDLE);
    const struct {
        const char *spec, *word;
    } bad[] = {{"store(hots=1MiB)", "'host'"},
               {"shop()", "'store'"},
               {"store(policy=lrv)", "'lru'"},
               {"store(write=thru)", "through"},
               {"store(disk=disk(bytes=1GiB))", "path="}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        opts.spec = bad[i].spec;
        opts.spec_bytes = strlen(bad[i].spec);
        CHECK_IS(kvt_store_open(runtime, NULL, &opts, &store, &err), KVT_E_SPEC);
        if (strstr(kvt_error_message(err), bad[i].word) == NULL) {
            fprintf(stderr, "%s: %s\n", bad[i].spec, kvt_error_message(err));
            exit(1);
        }
    }
    opts = (kvt_store_opts_t)KVT_STORE_OPTS_INIT;
    opts.flags = 1;
    CHECK_IS(kvt_store_open(runtime, NULL, &opts, &store, &err), KVT_E_INVALID);
    opts.flags = 0;
    opts.struct_size = 12;
    CHECK_IS(kvt_store_open(runtime, NULL, &opts, &store, &err), KVT_E_INVALID);
    CHECK(store == NULL);

    /* Two stores in one directory are refused, as is a budget of another runtime. */
    store = open_disk("once", "");
    char spec[256];
    snprintf(spec, sizeof spec, "store(disk=disk(path=\"%s/once\", bytes=16MiB))", folder);
    opts = (kvt_store_opts_t)KVT_STORE_OPTS_INIT;
    opts.spec = spec;
    opts.spec_bytes = strlen(spec);
    kvt_store_t *second = NULL;
    CHECK_IS(kvt_store_open(runtime, NULL, &opts, &second, &err), KVT_E_BUSY);
    close_store(&store);
    kvt_runtime_t *elsewhere = open_runtime(1, NULL);
    kvt_budget_t *budget = open_budget(elsewhere, 0);
    CHECK_IS(kvt_store_open(runtime, budget, NULL, &second, &err), KVT_E_INVALID);
    CHECK_OK(kvt_error_free(&err));
    CHECK_OK(kvt_store_open(elsewhere, budget, NULL, &second, NULL));
    close_store(&second);
    CHECK_OK(kvt_budget_close(&budget, NULL));

    /* A runtime reports what was left open, and closes anyway. */
    CHECK_OK(kvt_store_open(elsewhere, NULL, NULL, &second, NULL));
    kvt_namespace_t *ns = open_namespace(second, "");
    kvt_session_t *session = open_session(ns, NULL);
    kvt_close_report_t report = KVT_CLOSE_REPORT_INIT;
    CHECK_OK(kvt_runtime_close(&elsewhere, 0, &report, NULL));
    CHECK_EQ(report.stores, 1);
    CHECK_EQ(report.namespaces, 1);
    CHECK_EQ(report.sessions, 1);
    const uint32_t token = 1;
    CHECK_IS(kvt_session_append(session, &token, 1, NULL), KVT_E_CLOSED);
    close_session(&session);
    close_namespace(&ns);
    CHECK_EQ(stats_of(second).sessions, 0);
    close_store(&second);

    CHECK_IS(kvt_store_stats(NULL, NULL), KVT_E_INVALID);
    kvt_store_stats_t stats = KVT_STORE_STATS_INIT;
    CHECK_IS(kvt_store_stats(NULL, &stats), KVT_E_HANDLE);
    CHECK_OK(kvt_store_close(NULL, 0, NULL));
}

static void namespace_keys_depend_on_identity_and_layout(void) {
    kvt_store_t *store = open_store("store(host=4MiB)");
    kvt_namespace_t *ns = open_namespace(store, "a");
    kvt_namespace_t *same = open_namespace(store, "a");
    kvt_namespace_t *other = open_namespace(store, "b");
    uint8_t keys[3][KVT_KEY_BYTES];
    CHECK_OK(kvt_namespace_key(ns, keys[0]));
    CHECK_OK(kvt_namespace_key(same, keys[1]));
    CHECK_OK(kvt_namespace_key(other, keys[2]));
    CHECK(memcmp(keys[0], keys[1], KVT_KEY_BYTES) == 0);
    CHECK(memcmp(keys[0], keys[2], KVT_KEY_BYTES) != 0);
    CHECK_IS(kvt_namespace_key(ns, NULL), KVT_E_INVALID);
    CHECK_EQ(stats_of(store).namespaces, 2);

    model_t model;
    kvt_error_t *err = NULL;
    kvt_namespace_t *none = NULL;
    make_model(&model);
    CHECK_IS(kvt_namespace_open(store, NULL, NULL, 0, &none, &err), KVT_E_INVALID);
    CHECK_IS(kvt_namespace_open(store, NULL, &model.layout, 0, NULL, &err), KVT_E_INVALID);
    CHECK_IS(kvt_namespace_open(store, NULL, &model.layout, 2, &none, &err), KVT_E_INVALID);
    CHECK_IS(kvt_namespace_open(NULL, NULL, &model.layout, 0, &none, &err), KVT_E_HANDLE);

    /* The layout is part of the key, and an invalid layout is refused. */
    CHECK_OK(kvt_namespace_open(store, NULL, &model.layout, 0, &none, &err));
    CHECK_OK(kvt_namespace_key(none, keys[1]));
    close_namespace(&none);
    model.groups[1].window_tokens = 65;
    CHECK_OK(kvt_namespace_open(store, NULL, &model.layout, KVT_NAMESPACE_HOLES, &none, &err));
    CHECK_OK(kvt_namespace_key(none, keys[2]));
    CHECK(memcmp(keys[1], keys[2], KVT_KEY_BYTES) != 0);
    kvt_namespace_t *twice = NULL;
    CHECK_IS(kvt_namespace_open(store, NULL, &model.layout, 0, &twice, &err), KVT_E_INVALID);
    CHECK(strstr(kvt_error_message(err), "holes") != NULL);
    close_namespace(&none);

    const kvt_group_t sound = model.groups[0];
#define REFUSED(change, status, word)                                                         \
    do {                                                                                      \
        change;                                                                               \
        CHECK_IS(kvt_namespace_open(store, NULL, &model.layout, 0, &none, &err), status);     \
        CHECK(strstr(kvt_error_message(err), word) != NULL);                                  \
        model.groups[0] = sound;                                                              \
    } while (0)
    REFUSED(model.groups[0].rule = 9, KVT_E_INVALID, "group 0: rule 9");
    REFUSED(model.groups[0].dtype = 99, KVT_E_INVALID, "dtype 99");
    REFUSED(model.groups[0].layers = NULL, KVT_E_INVALID, "null");
    REFUSED(model.groups[0].layer_count = UINT64_MAX, KVT_E_LIMIT, "entries");
    REFUSED(model.groups[0].layer_count = 2, KVT_E_INVALID, "layer");
    REFUSED(model.groups[0].k_bytes = UINT64_MAX, KVT_E_LIMIT, "bytes");
    REFUSED(model.groups[0].window_tokens = 1, KVT_E_INVALID, "window");
    REFUSED(model.layout.group_count = 65, KVT_E_LIMIT, "65");
    REFUSED(model.layout.group_count = 0, KVT_E_INVALID, "groups");
    model.layout.group_count = 3;
    REFUSED(model.layout.chunk_tokens = 0, KVT_E_INVALID, "chunk");
    model.layout.chunk_tokens = CHUNK;
    REFUSED(model.layout.stride_bytes = 0, KVT_E_INVALID, "stride_bytes");
    model.layout.stride_bytes = sizeof *model.groups;

    kvt_identity_t identity = KVT_IDENTITY_INIT;
    identity.weights_bytes = 4;
    CHECK_IS(kvt_namespace_open(store, &identity, &model.layout, 0, &none, &err), KVT_E_INVALID);
    CHECK(strstr(kvt_error_message(err), "weights") != NULL);
    identity.weights_bytes = 0;
    identity.shard_index = 2;
    identity.shard_count = 2;
    CHECK_IS(kvt_namespace_open(store, &identity, &model.layout, 0, &none, &err), KVT_E_INVALID);
    identity.shard_count = 3;
    kvt_identity_extra_t extra[2];
    memset(extra, 0, sizeof extra);
    extra[0].tag = extra[1].tag = 0x80000001u;
    identity.extra = extra;
    identity.extra_count = 2;
    identity.extra_stride_bytes = sizeof *extra;
    CHECK_IS(kvt_namespace_open(store, &identity, &model.layout, 0, &none, &err), KVT_E_INVALID);
    extra[1].tag++;
    CHECK_OK(kvt_namespace_open(store, &identity, &model.layout, 0, &none, &err));
    CHECK_OK(kvt_error_free(&err));
    close_namespace(&none);

    kvt_namespace_t *stale = ns;
    close_namespace(&ns);
    CHECK_IS(kvt_namespace_key(stale, keys[0]), KVT_E_HANDLE);
    CHECK_IS(kvt_namespace_close(&stale), KVT_E_HANDLE);
    kvt_namespace_t *wrong = (kvt_namespace_t *)store;
    CHECK_IS(kvt_namespace_close(&wrong), KVT_E_HANDLE);
    close_namespace(&same);
    close_namespace(&other);
    close_store(&store);
}

static void invalid_calls_are_refused(void) {
    kvt_store_t *store = open_store("store(host=4MiB, sessions=2)");
    kvt_namespace_t *ns = open_namespace(store, "");
    const text_t text = text_of(1, 0, 21);
    kvt_session_t *session = open_session(ns, &text);
    kvt_session_t *second = open_session(ns, NULL);
    kvt_session_t *none = NULL;
    kvt_error_t *err = NULL;
    CHECK_IS(kvt_session_open(ns, NULL, &none, &err), KVT_E_AGAIN);
    close_session(&second);
    kvt_session_opts_t session_opts = KVT_SESSION_OPTS_INIT;
    session_opts.priority = 1;
    CHECK_IS(kvt_session_open(ns, &session_opts, &none, &err), KVT_E_INVALID);
    session_opts.flags = KVT_SESSION_PRIORITY;
    session_opts.priority = 256;
    CHECK_IS(kvt_session_open(ns, &session_opts, &none, &err), KVT_E_INVALID);
    session_opts.priority = 0;
    char name[257];
    memset(name, 'x', sizeof name);
    session_opts.name = name;
    session_opts.name_bytes = sizeof name;
    CHECK_IS(kvt_session_open(ns, &session_opts, &none, &err), KVT_E_LIMIT);
    session_opts.name_bytes--;
    CHECK_OK(kvt_session_open(ns, &session_opts, &none, &err));
    close_session(&none);

    CHECK_IS(kvt_session_append(session, NULL, 1, &err), KVT_E_INVALID);
    CHECK_IS(kvt_session_append(session, text.tokens, UINT64_MAX, &err), KVT_E_LIMIT);
    CHECK_OK(kvt_session_append(session, NULL, 0, &err));
    CHECK_IS(kvt_session_truncate(session, 22, &err), KVT_E_INVALID);
    CHECK_OK(kvt_session_pin(session, 8, 8, 7, hang_guard(), &err));
    CHECK_EQ(stats_of(store).pins, 1);
    CHECK_OK(kvt_session_pin(session, 0, 0, 255, 0, &err));
    CHECK_IS(kvt_session_pin(session, 1, 8, 0, 0, &err), KVT_E_INVALID);
    CHECK_IS(kvt_session_pin(session, 0, 8, 256, 0, &err), KVT_E_INVALID);
    kvt_policy_hint_t hint = KVT_POLICY_HINT_INIT;
    hint.stop = KVT_STOP_TOOL_USE;
    hint.next_use_ns = (int64_t)in_ms(1000);
    CHECK_OK(kvt_session_hint(session, &hint, &err));
    hint.stop = 99;
    CHECK_IS(kvt_session_hint(session, &hint, &err), KVT_E_INVALID);

    engine_t engine;
    open_engine(&engine, PAGED);
    kvt_op_t *op = NULL;
    kvt_transfer_t transfer = transfer_of(&engine, 0, 0);
    const kvt_transfer_t good = transfer;
    const kvt_view_t view = engine.k[0];
#define WRONG(change, status, word)                                                           \
    do {                                                                                      \
        change;                                                                               \
        CHECK_IS(kvt_session_put(session, &transfer, NULL, &op, &err), status);                   \
        if (strstr(kvt_error_message(err), word) == NULL) {                                   \
            fprintf(stderr, "%d: %s\n", __LINE__, kvt_error_message(err));                    \
            exit(1);                                                                          \
        }                                                                                     \
        transfer = good;                                                                          \
        engine.k[0] = view;                                                                   \
    } while (0)
    WRONG(transfer.first_token = 3, KVT_E_INVALID, "multiples");
    WRONG(transfer.tokens = 9, KVT_E_INVALID, "multiples");
    WRONG(transfer.tokens = 22, KVT_E_INVALID, "22");
    WRONG(transfer.first_token = 24, KVT_E_INVALID, "24");
    WRONG(transfer.tokens = UINT64_MAX, KVT_E_INVALID, "session");
    WRONG(transfer.layers = LAYERS + 1, KVT_E_INVALID, "layers");
    WRONG(transfer.first_layer = LAYERS, KVT_E_INVALID, "layers");
    WRONG(transfer.layers = UINT32_MAX, KVT_E_INVALID, "layers");
    WRONG(transfer.flags = 4, KVT_E_INVALID, "flags");
    WRONG(transfer.level = 4, KVT_E_INVALID, "level");
    WRONG(transfer.level = KVT_LEVEL_REMOTE, KVT_E_UNAVAILABLE, "remote");
    WRONG(transfer.level = KVT_LEVEL_DURABLE, KVT_E_UNAVAILABLE, "disk");
    WRONG(transfer.k = NULL, KVT_E_INVALID, "k is null");
    WRONG(transfer.v = NULL, KVT_E_INVALID, "V is missing");
    WRONG(transfer.v = engine.k, KVT_E_INVALID, "no V");
    WRONG(transfer.stride_bytes = 4, KVT_E_INVALID, "stride_bytes");
    WRONG(engine.k[0].memory = KVT_MEMORY_DEVICE, KVT_E_UNAVAILABLE, "K of layer 0");
    WRONG(engine.k[0].memory = 7, KVT_E_INVALID, "memory 7");
    WRONG(engine.k[0].address = engine.memory, KVT_E_INVALID, "both");
    WRONG(engine.k[0].pages = NULL, KVT_E_INVALID, "both null");
    WRONG(engine.k[0].page_count = 4, KVT_E_INVALID, "K of layer 0");
    WRONG(engine.k[0].page_count = UINT64_MAX, KVT_E_LIMIT, "entries");
    WRONG(engine.k[0].page_tokens = 0, KVT_E_INVALID, "K of layer 0");
    WRONG(engine.k[0].run_bytes = RUN - 1, KVT_E_INVALID, "layout says");
    WRONG(engine.k[0].heads = UINT32_MAX, KVT_E_INVALID, "layer 0");
    WRONG(engine.k[0].token_stride_bytes = UINT64_MAX, KVT_E_INVALID, "layer 0");
    WRONG(memset(&engine.k[0], 0, sizeof view), KVT_E_INVALID, "empty");
    CHECK_IS(kvt_session_put(session, NULL, NULL, &op, &err), KVT_E_INVALID);
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    opts.flags = KVT_SUBMIT_EACH;
    CHECK_IS(kvt_session_put(session, &transfer, &opts, &op, &err), KVT_E_INVALID);
    CHECK_IS(kvt_session_put(session, &transfer, NULL, NULL, &err), KVT_E_INVALID);
    CHECK_IS(kvt_session_prefetch(session, &transfer, NULL, &op, &err), KVT_E_INVALID);
    /* A target must not overlap with itself. */
    engine.k[0].token_stride_bytes = 1;
    CHECK_IS(kvt_session_get(session, &transfer, NULL, &op, &err), KVT_E_INVALID);
    CHECK(op == NULL);
    CHECK_OK(kvt_error_free(&err));
    close_engine(&engine);
    CHECK_EQ(stats_of(store).puts + stats_of(store).gets, 0);

    kvt_session_t *stale = session;
    close_session(&session);
    CHECK_IS(kvt_session_append(stale, text.tokens, 1, NULL), KVT_E_HANDLE);
    CHECK_IS(kvt_session_close(&stale), KVT_E_HANDLE);
    kvt_session_info_t info = KVT_SESSION_INFO_INIT;
    CHECK_IS(kvt_session_info((kvt_session_t *)ns, &info), KVT_E_HANDLE);
    CHECK_IS(kvt_session_info(stale, NULL), KVT_E_INVALID);
    close_namespace(&ns);
    close_store(&store);
}

static void on_completion(void *user_data, const kvt_completion_t *batch, uint64_t count,
                          uint64_t stride_bytes) {
    (void)batch;
    (void)count;
    (void)stride_bytes;
    kvt_store_t **store = user_data;
    CHECK_IS(kvt_store_close(store, 0, NULL), KVT_E_REENTRANT);
}

/* Handles that outlive their store return KVT_E_CLOSED and release the store's memory. */
static void handles_that_outlive_the_store_are_closed(void) {
    kvt_store_t *store = open_disk("end", "");
    kvt_namespace_t *ns = open_namespace(store, "");
    const text_t text = text_of(9, 0, 64);
    kvt_session_t *session = open_session(ns, &text);
    kvt_queue_opts_t queue_opts = KVT_QUEUE_OPTS_INIT;
    queue_opts.callback = on_completion;
    queue_opts.user_data = &store;
    kvt_queue_t *queue = NULL;
    CHECK_OK(kvt_queue_open(runtime, &queue_opts, &queue, NULL));
    engine_t engine;
    open_engine(&engine, PLAIN);
    each_byte(&engine, &text, 0, 64, FILL);
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    opts.queue = queue;
    kvt_transfer_t transfer = transfer_of(&engine, 0, 0);
    transfer.level = KVT_LEVEL_DURABLE;
    kvt_op_t *op = NULL;
    CHECK_OK(kvt_session_put(session, &transfer, &opts, &op, NULL));
    CHECK_OK(kvt_op_wait(op, KVT_OP_RELEASED, hang_guard()));
    close_queue(&queue);

    static char metrics[1 << 18];
    uint64_t bytes = 0;
    CHECK_OK(kvt_store_metrics(store, NULL, 0, &bytes));
    CHECK(bytes > 100 && bytes < sizeof metrics);
    CHECK_IS(kvt_store_metrics(store, metrics, 10, &bytes), KVT_E_TOO_SMALL);
    CHECK_IS(kvt_store_metrics(store, NULL, 10, &bytes), KVT_E_INVALID);
    CHECK_OK(kvt_store_metrics(store, metrics, sizeof metrics - 1, &bytes));
    metrics[bytes] = 0;
    CHECK(strstr(metrics, "# TYPE kvtier_") != NULL);

    close_store(&store);
    CHECK_IS(kvt_session_append(session, text.tokens, 1, NULL), KVT_E_CLOSED);
    CHECK_IS(kvt_session_put(session, &transfer, NULL, &op, NULL), KVT_E_CLOSED);
    kvt_session_info_t info = KVT_SESSION_INFO_INIT;
    CHECK_IS(kvt_session_info(session, &info), KVT_E_CLOSED);
    kvt_session_t *none = NULL;
    CHECK_IS(kvt_session_open(ns, NULL, &none, NULL), KVT_E_CLOSED);
    uint8_t key[KVT_KEY_BYTES];
    CHECK_OK(kvt_namespace_key(ns, key));

    /* The directory is free, although handles of the old store remain. */
    store = open_disk("end", "");
    kvt_namespace_t *again = open_namespace(store, "");
    kvt_session_t *back = open_session(again, &text);
    get_and_compare(back, &text, PAGED, 0, 64);
    close_session(&back);
    close_namespace(&again);
    close_store(&store);

    CHECK_EQ(info_of(op).value, 64);
    CHECK_OK(finish_op(&op));
    close_session(&session);
    close_namespace(&ns);
    close_engine(&engine);
}

/* In a forked child every call is refused, and the parent is not affected. */
static void calls_in_a_forked_child_are_refused(void) {
    kvt_store_t *store = open_disk("fork", "");
    kvt_namespace_t *ns = open_namespace(store, "");
    const text_t text = text_of(3, 0, 24);
    kvt_session_t *session = open_session(ns, &text);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        model_t model;
        make_model(&model);
        kvt_store_t *s = store;
        kvt_namespace_t *n = ns;
        kvt_session_t *session_opts = session;
        kvt_store_stats_t stats = KVT_STORE_STATS_INIT;
        kvt_session_info_t info = KVT_SESSION_INFO_INIT;
        const kvt_transfer_t transfer = KVT_TRANSFER_INIT;
        kvt_policy_hint_t hint = KVT_POLICY_HINT_INIT;
        uint8_t key[KVT_KEY_BYTES];
        uint64_t bytes = 0;
        kvt_op_t *op = NULL;
#define FORKED(call) CHECK_IS(call, KVT_E_FORKED)
        FORKED(kvt_store_open(runtime, NULL, NULL, &s, NULL));
        FORKED(kvt_store_stats(s, &stats));
        FORKED(kvt_store_metrics(s, NULL, 0, &bytes));
        FORKED(kvt_namespace_open(s, NULL, &model.layout, 0, &n, NULL));
        FORKED(kvt_namespace_key(n, key));
        FORKED(kvt_session_open(n, NULL, &session_opts, NULL));
        FORKED(kvt_session_fork(session_opts, NULL, &session_opts, NULL));
        FORKED(kvt_session_append(session_opts, text.tokens, 1, NULL));
        FORKED(kvt_session_truncate(session_opts, 1, NULL));
        FORKED(kvt_session_pin(session_opts, 0, 0, 0, 0, NULL));
        FORKED(kvt_session_hint(session_opts, &hint, NULL));
        FORKED(kvt_session_info(session_opts, &info));
        FORKED(kvt_session_put(session_opts, &transfer, NULL, &op, NULL));
        FORKED(kvt_session_get(session_opts, &transfer, NULL, &op, NULL));
        FORKED(kvt_session_prefetch(session_opts, &transfer, NULL, &op, NULL));
        FORKED(kvt_session_close(&session_opts));
        FORKED(kvt_namespace_close(&n));
        FORKED(kvt_store_close(&s, 0, NULL));
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    put_all(session, &text, PLAIN, KVT_LEVEL_DURABLE);
    get_and_compare(session, &text, PAGED, 0, 24);
    close_session(&session);
    close_namespace(&ns);
    close_store(&store);
}

static void remove_folder(void) {
    DIR *dir = opendir(folder);
    CHECK(dir != NULL);
    for (struct dirent *sub = readdir(dir); sub != NULL; sub = readdir(dir)) {
        if (sub->d_name[0] == '.') continue;
        char path[600], file[1200];
        snprintf(path, sizeof path, "%s/%s", folder, sub->d_name);
        DIR *inner = opendir(path);
        CHECK(inner != NULL);
        for (struct dirent *f = readdir(inner); f != NULL; f = readdir(inner)) {
            if (strcmp(f->d_name, ".") == 0 || strcmp(f->d_name, "..") == 0) continue;
            snprintf(file, sizeof file, "%s/%s", path, f->d_name);
            CHECK(unlink(file) == 0);
        }
        closedir(inner);
        CHECK(rmdir(path) == 0);
    }
    closedir(dir);
    CHECK(rmdir(folder) == 0);
}

int main(int argc, char **argv) {
    (void)argv;
    check_begin();
    CHECK(mkdtemp(folder) != NULL);
    runtime = open_runtime(1, NULL);
    invalid_specs_are_refused();
    namespace_keys_depend_on_identity_and_layout();
    invalid_calls_are_refused();
    sessions_survive_a_restart();
    transfers_work_by_layer_and_after_forks();
    cancelled_transfers_leave_right_bytes();
    handles_that_outlive_the_store_are_closed();
    /* not under sanitizers: they report the parent's threads in the child */
    if (argc == 1) calls_in_a_forked_child_are_refused();
    close_runtime(&runtime);
    remove_folder();
    return check_end("store");
}
