/* Two stores share a remote, here a directory. One fetches what the other has uploaded, byte by
 * byte. A damaged object is a miss. */

#include "check.h"

#include <dirent.h>
#include <sys/stat.h>

#define LAYERS 2
#define CHUNK 16
#define TOKENS 50
#define FULL 48
#define ROW 256

static kvt_runtime_t *runtime;
static char folder[] = "/tmp/kvt-remote-XXXXXX";

typedef struct {
    kvt_store_t *store;
    kvt_namespace_t *ns;
    kvt_session_t *session;
    uint8_t rows[LAYERS][TOKENS * ROW];
    kvt_view_t views[LAYERS];
} engine_t;

static engine_t one, other;

static kvt_store_t *open_store(const char *remote) {
    char spec[400];
    snprintf(spec, sizeof spec, "store(host=4MiB, remote=%s)", remote);
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

static void open_engine(engine_t *engine, uint64_t tenant) {
    char remote[300];
    snprintf(remote, sizeof remote, "dir(path=\"%s\", object=8KiB, timeout=600000)", folder);
    memset(engine, 0, sizeof *engine);
    engine->store = open_store(remote);
    const uint16_t layers[LAYERS] = {0, 1};
    kvt_group_t group;
    memset(&group, 0, sizeof group);
    group.dtype = KVT_DTYPE_BYTES;
    group.k_bytes = ROW;
    group.layers = layers;
    group.layer_count = LAYERS;
    kvt_layout_t layout = KVT_LAYOUT_INIT;
    layout.chunk_tokens = CHUNK;
    layout.groups = &group;
    layout.group_count = 1;
    layout.stride_bytes = sizeof group;
    kvt_identity_t who = KVT_IDENTITY_INIT;
    who.model = "a model";
    who.model_bytes = 7;
    who.remote_tenant = tenant;
    CHECK_OK(kvt_namespace_open(engine->store, &who, &layout, 0, &engine->ns, NULL));
    kvt_session_opts_t opts = KVT_SESSION_OPTS_INIT;
    CHECK_OK(kvt_session_open(engine->ns, &opts, &engine->session, NULL));
    uint32_t tokens[TOKENS];
    for (uint32_t i = 0; i < TOKENS; i++) tokens[i] = 7 * i;
    CHECK_OK(kvt_session_append(engine->session, tokens, TOKENS, NULL));
    for (int layer = 0; layer < LAYERS; layer++) {
        engine->views[layer].address = engine->rows[layer];
        engine->views[layer].heads = 1;
        engine->views[layer].run_bytes = ROW;
        engine->views[layer].tokens = TOKENS;
    }
}

static void close_engine(engine_t *engine) {
    CHECK_OK(kvt_session_close(&engine->session));
    CHECK_OK(kvt_namespace_close(&engine->ns));
    CHECK_OK(kvt_store_close(&engine->store, hang_guard(), NULL));
}

static void compute(engine_t *engine) {
    for (int layer = 0; layer < LAYERS; layer++)
        for (int i = 0; i < TOKENS * ROW; i++)
            engine->rows[layer][i] = (uint8_t)(i * 31 + layer * 7 + i / 251);
}

static kvt_transfer_t transfer_of(engine_t *engine, uint32_t level, uint64_t tokens) {
    kvt_transfer_t transfer = KVT_TRANSFER_INIT;
    transfer.tokens = tokens;
    transfer.layers = LAYERS;
    transfer.level = level;
    transfer.k = engine->views;
    transfer.stride_bytes = sizeof engine->views[0];
    return transfer;
}

/* Waits for an op, writes its value and returns its status. */
static kvt_status_t finish(kvt_op_t *op, uint64_t *value) {
    CHECK_OK(kvt_op_wait(op, KVT_OP_RELEASED, hang_guard()));
    *value = info_of(op).value;
    return finish_op(&op);
}

static uint64_t locate(engine_t *engine) {
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    opts.deadline_ns = hang_guard();
    kvt_op_t *op = NULL;
    uint64_t tokens = 0;
    CHECK_OK(kvt_session_remote_lookup(engine->session, &opts, &op, NULL));
    CHECK_OK(finish(op, &tokens));
    return tokens;
}

static kvt_status_t put(engine_t *engine, uint32_t level) {
    const kvt_transfer_t transfer = transfer_of(engine, level, TOKENS);
    kvt_op_t *op = NULL;
    uint64_t tokens = 0;
    CHECK_OK(kvt_session_put(engine->session, &transfer, NULL, &op, NULL));
    return finish(op, &tokens);
}

static kvt_status_t get(engine_t *engine) {
    const kvt_transfer_t transfer = transfer_of(engine, 0, FULL);
    kvt_op_t *op = NULL;
    uint64_t tokens = 0;
    CHECK_OK(kvt_session_get(engine->session, &transfer, NULL, &op, NULL));
    return finish(op, &tokens);
}

static kvt_remote_stats_t stats(const engine_t *engine) {
    kvt_remote_stats_t s = KVT_REMOTE_STATS_INIT;
    CHECK_OK(kvt_store_remote_stats(engine->store, &s));
    CHECK_EQ(s.struct_size, sizeof s);
    return s;
}

/* Changes the last byte of every file below a folder; returns the number of files. */
static int damage(const char *path) {
    DIR *entries = opendir(path);
    CHECK(entries != NULL);
    int count = 0;
    for (struct dirent *entry; (entry = readdir(entries)) != NULL;) {
        if (entry->d_name[0] == '.') continue;
        char inner[1024];
        struct stat about;
        snprintf(inner, sizeof inner, "%s/%s", path, entry->d_name);
        CHECK(stat(inner, &about) == 0);
        if (S_ISDIR(about.st_mode)) {
            count += damage(inner);
            continue;
        }
        FILE *file = fopen(inner, "r+b");
        CHECK(file != NULL && fseek(file, -1, SEEK_END) == 0);
        const int last = fgetc(file);
        CHECK(fseek(file, -1, SEEK_END) == 0 && fputc(last ^ 1, file) != EOF);
        CHECK(fclose(file) == 0);
        count++;
    }
    closedir(entries);
    return count;
}

static void other_store_fetches_what_one_uploaded(void) {
    open_engine(&one, 0);
    open_engine(&other, 0);
    CHECK_EQ(locate(&one), 0);
    compute(&one);
    CHECK_OK(put(&one, KVT_LEVEL_REMOTE));
    kvt_remote_stats_t s = stats(&one);
    CHECK_EQ(s.uploaded_objects, FULL / CHUNK);
    CHECK_EQ(s.read_circuit, KVT_REMOTE_CIRCUIT_CLOSED);
    CHECK_EQ(s.write_circuit, KVT_REMOTE_CIRCUIT_CLOSED);
    CHECK_EQ(s.failed_uploads + s.rejected_chunks + s.late_requests, 0);

    /* Reopen: its earlier lookup found nothing, and that answer is cached for some seconds. */
    close_engine(&other);
    open_engine(&other, 0);
    CHECK_EQ(locate(&other), FULL);
    kvt_lookup_t found = KVT_LOOKUP_INIT;
    kvt_range_t ranges[4];
    uint64_t count = 0;
    uint32_t tokens[TOKENS];
    for (uint32_t i = 0; i < TOKENS; i++) tokens[i] = 7 * i;
    CHECK_OK(kvt_namespace_lookup(other.ns, tokens, TOKENS, ranges, 4, sizeof ranges[0], &count,
                                  &found, NULL));
    CHECK_EQ(found.reusable_tokens, FULL);
    CHECK_OK(get(&other));
    compute(&one);
    for (int layer = 0; layer < LAYERS; layer++)
        CHECK(memcmp(one.rows[layer], other.rows[layer], FULL * ROW) == 0);
    s = stats(&other);
    CHECK_EQ(s.fetched_objects, FULL / CHUNK);
    CHECK_EQ(s.fetched_bytes, (uint64_t)FULL * ROW * LAYERS);
    CHECK_EQ(s.corrupt_objects + s.absent_objects, 0);
    close_engine(&other);

    /* Another tenant has other names. */
    open_engine(&other, 42);
    CHECK_EQ(locate(&other), 0);
    close_engine(&other);
    close_engine(&one);
}

/* Blocks of CHUNK rows each, from the engine's first row on. */
static kvt_blocks_t blocks_of(engine_t *engine, const kvt_block_names_t *names, uint32_t level) {
    kvt_blocks_t blocks = KVT_BLOCKS_INIT;
    blocks.names = names;
    blocks.k = engine->views;
    blocks.stride_bytes = sizeof engine->views[0];
    blocks.level = level;
    return blocks;
}

static kvt_status_t finish_blocks(kvt_op_t *op, uint64_t *value, kvt_status_t *each,
                                  uint64_t count) {
    CHECK_OK(kvt_op_wait(op, KVT_OP_RELEASED, hang_guard()));
    kvt_op_item_t items[4];
    memset(items, 0, sizeof items);
    uint64_t written = 0;
    CHECK_OK(kvt_op_items(op, 0, items, 4, sizeof items[0], &written));
    CHECK_EQ(written, count);
    for (uint64_t i = 0; i < count; i++) each[i] = items[i].status;
    *value = info_of(op).value;
    return finish_op(&op);
}

static void blocks_are_found_after_a_remote_lookup(void) {
    open_engine(&one, 0);
    open_engine(&other, 0);
    compute(&one);
    kvt_block_names_t names = KVT_BLOCK_NAMES_INIT;
    names.bytes = (const uint8_t *)"abc";
    names.each_bytes = 1;
    names.count = 3;
    kvt_status_t each[4];
    uint64_t tokens = 0;
    kvt_op_t *op = NULL;
    kvt_blocks_t blocks = blocks_of(&one, &names, KVT_LEVEL_REMOTE);
    CHECK_OK(kvt_session_put_blocks(one.session, &blocks, NULL, &op, NULL));
    CHECK_OK(finish_blocks(op, &tokens, each, 3));
    /* They are unknown before a remote lookup. */
    uint8_t found[4];
    CHECK_OK(kvt_namespace_blocks_exist(other.ns, &names, found, NULL));
    CHECK_EQ(found[0] + found[1] + found[2], 0);
    names.bytes = (const uint8_t *)"caxc";
    names.count = 4;
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    opts.deadline_ns = hang_guard();
    CHECK_OK(kvt_session_remote_lookup_blocks(other.session, &names, &opts, &op, NULL));
    CHECK_IS(finish_blocks(op, &tokens, each, 4), KVT_E_NOT_FOUND);
    CHECK_EQ(tokens, 2 * CHUNK);
    CHECK(each[0] == KVT_OK && each[1] == KVT_OK && each[3] == KVT_OK);
    CHECK_IS(each[2], KVT_E_NOT_FOUND);
    CHECK_OK(kvt_namespace_blocks_exist(other.ns, &names, found, NULL));
    CHECK_EQ(found[0], 1 << KVT_TIER_REMOTE);
    CHECK_EQ(found[2], 0);
    names.count = 2;
    blocks = blocks_of(&other, &names, 0);
    CHECK_OK(kvt_session_get_blocks(other.session, &blocks, NULL, &op, NULL));
    CHECK_OK(finish_blocks(op, &tokens, each, 2));
    for (int layer = 0; layer < LAYERS; layer++) {
        CHECK(memcmp(other.rows[layer], one.rows[layer] + 2 * CHUNK * ROW, CHUNK * ROW) == 0);
        CHECK(memcmp(other.rows[layer] + CHUNK * ROW, one.rows[layer], CHUNK * ROW) == 0);
    }
    CHECK_OK(kvt_namespace_blocks_exist(other.ns, &names, found, NULL));
    CHECK(found[0] & KVT_EXISTS_WHOLE && found[0] & 1 << KVT_TIER_REMOTE);
    CHECK_IS(kvt_session_remote_lookup_blocks(other.session, NULL, NULL, &op, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_session_remote_lookup_blocks(other.session, &names, NULL, NULL, NULL), KVT_E_INVALID);
    names.count = 0;
    CHECK_IS(kvt_session_remote_lookup_blocks(other.session, &names, NULL, &op, NULL), KVT_E_LIMIT);
    /* Dropping removes the objects from the remote, too. */
    names.count = 4;
    CHECK_OK(kvt_session_drop_blocks(one.session, &names, NULL, NULL));
    names.bytes = (const uint8_t *)"b";
    names.count = 1;
    CHECK_OK(kvt_session_drop_blocks(one.session, &names, NULL, NULL));
    close_engine(&other);
    close_engine(&one);
}

static void damaged_objects_are_misses(void) {
    CHECK_EQ(damage(folder), FULL / CHUNK);
    open_engine(&other, 0);
    CHECK_EQ(locate(&other), FULL);
    CHECK_EQ(get(&other), KVT_E_NOT_FOUND);
    CHECK_EQ(stats(&other).corrupt_objects, FULL / CHUNK);
    close_engine(&other);
}

static void invalid_remotes_are_refused(void) {
    kvt_store_opts_t opts = KVT_STORE_OPTS_INIT;
    kvt_store_t *store = NULL;
    kvt_error_t *err = NULL;
    const struct { const char *spec; kvt_status_t status; } bad[] = {
        {"store(remote=redis(url=\"redis://user:hunter2@127.0.0.1\"))", KVT_E_SPEC},
        {"store(remote=redis())", KVT_E_SPEC},
        {"store(remote=redos(url=\"redis://127.0.0.1\"))", KVT_E_SPEC},
        {"store(remote=redis(url=\"redis://127.0.0.1:1\", connect=200, require=true))",
         KVT_E_UNAVAILABLE},
        {"store(remote=dir(path=\"/nowhere/at/all\"))", KVT_E_NOT_FOUND},
        {"store(remote=custom())", KVT_E_INVALID},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        opts.spec = bad[i].spec;
        opts.spec_bytes = strlen(bad[i].spec);
        CHECK_IS(kvt_store_open(runtime, NULL, &opts, &store, &err), bad[i].status);
        CHECK(store == NULL && strstr(kvt_error_message(err), "hunter2") == NULL);
        CHECK_OK(kvt_error_free(&err));
    }
    /* Without require=true the remote may be unreachable. */
    store = open_store("redis(url=\"redis://127.0.0.1:1\", connect=200)");
    CHECK_OK(kvt_store_close(&store, hang_guard(), NULL));

    kvt_secret_t secrets[2];
    memset(secrets, 0, sizeof secrets);
    secrets[0].name = secrets[1].name = "password";
    secrets[0].name_bytes = secrets[1].name_bytes = 8;
    secrets[0].secret = secrets[1].secret = "hunter2";
    secrets[0].secret_bytes = secrets[1].secret_bytes = 7;
    opts.spec = "store";
    opts.spec_bytes = 5;
    opts.secrets = secrets;
    opts.secret_count = 2;
    opts.secret_stride_bytes = sizeof secrets[0];
    CHECK_IS(kvt_store_open(runtime, NULL, &opts, &store, NULL), KVT_E_INVALID);
    opts.secret_count = 1;
    secrets[0].name = "passwort";
    CHECK_IS(kvt_store_open(runtime, NULL, &opts, &store, NULL), KVT_E_INVALID);
    secrets[0].name = "password";
    CHECK_OK(kvt_store_open(runtime, NULL, &opts, &store, NULL));
    kvt_remote_stats_t s = KVT_REMOTE_STATS_INIT;
    CHECK_OK(kvt_store_remote_stats(store, &s));
    CHECK_EQ(s.read_circuit + s.write_circuit + s.looked_up_names, 0);
    CHECK_IS(kvt_store_remote_stats(store, NULL), KVT_E_INVALID);
    CHECK_OK(kvt_store_close(&store, hang_guard(), NULL));
}

int main(void) {
    check_begin();
    CHECK(mkdtemp(folder) != NULL);
    runtime = open_runtime(1, NULL);
    other_store_fetches_what_one_uploaded();
    damaged_objects_are_misses();
    blocks_are_found_after_a_remote_lookup();
    invalid_remotes_are_refused();
    close_runtime(&runtime);
    char command[600];
    snprintf(command, sizeof command, "rm -r '%s'", folder);
    CHECK(system(command) == 0);
    return check_end("remote");
}
