/* A client written from the header alone. It tests what users of the library stumbled over, and
 * shares no code with the other programs here.
 *
 *   outsider [TOPIC...]     default: all topics */
#define _GNU_SOURCE
#include <dirent.h>
#include <ftw.h>
#include <kvtier/kvtier.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { LAYERS = 2, CHUNK = 16, TOKEN_BYTES = 512, MAX_TOKENS = 1024 };

static kvt_error_t *err;

static void fail_at(int line, const char *text) {
    fprintf(stderr, "outsider.c:%d: %s: %s\n", line, text, err ? kvt_error_message(err) : "");
    exit(1);
}
#define EXPECT(what)                                                                           \
    do {                                                                                       \
        if (!(what)) fail_at(__LINE__, #what);                                                 \
    } while (0)
#define MUST(call) EXPECT((call) == KVT_OK)

/* The call must fail with this status, and the message must contain this word. */
static void refused_at(int line, kvt_status_t got, kvt_status_t want, const char *word) {
    if (got != want || err == NULL || strstr(kvt_error_message(err), word) == NULL) {
        fprintf(stderr, "outsider.c:%d: %s, expected %s with '%s': %s\n", line,
                kvt_status_name(got), kvt_status_name(want), word, err ? kvt_error_message(err) : "no message");
        exit(1);
    }
    kvt_error_free(&err);
}
#define REFUSED(call, want, word) refused_at(__LINE__, (call), (want), (word))

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* The objects of an engine: a runtime, a store, a namespace. */
typedef struct {
    char path[64];
    kvt_runtime_t *runtime;
    kvt_store_t *store;
    kvt_namespace_t *ns;
} rig_t;

static kvt_status_t open_store(rig_t *rig, const char *spec) {
    kvt_store_opts_t opts = KVT_STORE_OPTS_INIT;
    opts.spec = spec;
    opts.spec_bytes = KVT_NUL_TERMINATED;
    if (rig->path[0] != 0) {
        opts.disk_path = rig->path;
        opts.disk_path_bytes = KVT_NUL_TERMINATED;
    }
    return kvt_store_open(rig->runtime, NULL, &opts, &rig->store, &err);
}

/* Opens a namespace; `recipe` may be NULL. */
static kvt_status_t open_namespace(const rig_t *rig, const char *recipe, kvt_namespace_t **out) {
    static const uint16_t layers[LAYERS] = {0, 1};
    kvt_group_t group = {0};
    group.rule = KVT_RULE_FULL;
    group.dtype = KVT_DTYPE_F16;
    group.kv_heads = 2;
    group.k_bytes = group.v_bytes = TOKEN_BYTES;
    group.layers = layers;
    group.layer_count = LAYERS;
    kvt_layout_t layout = KVT_LAYOUT_INIT;
    layout.chunk_tokens = CHUNK;
    layout.groups = &group;
    layout.group_count = 1;
    layout.stride_bytes = sizeof group;
    kvt_identity_t identity = KVT_IDENTITY_INIT;
    identity.model = "outsider";
    identity.model_bytes = KVT_NUL_TERMINATED;
    if (recipe != NULL) {
        identity.recipe = recipe;
        identity.recipe_bytes = KVT_NUL_TERMINATED;
    }
    return kvt_namespace_open(rig->store, &identity, &layout, 0, out, &err);
}

static void open_default_namespace(rig_t *rig) { MUST(open_namespace(rig, NULL, &rig->ns)); }

static void begin(rig_t *rig, const char *spec, int has_disk) {
    memset(rig, 0, sizeof *rig);
    if (has_disk) {
        snprintf(rig->path, sizeof rig->path, "outsider-XXXXXX");
        EXPECT(mkdtemp(rig->path) != NULL);
    }
    MUST(kvt_runtime_open(NULL, &rig->runtime, &err));
    MUST(open_store(rig, spec));
    open_default_namespace(rig);
}

static int remove_entry(const char *path, const struct stat *facts, int type, struct FTW *walk) {
    return (void)facts, (void)type, (void)walk, remove(path);
}

static void end(rig_t *rig) {
    MUST(kvt_namespace_close(&rig->ns));
    MUST(kvt_store_close(&rig->store, 0, &err));
    MUST(kvt_runtime_close(&rig->runtime, 0, NULL, &err));
    if (rig->path[0] != 0) nftw(rig->path, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
}

/* A session whose tokens no other number shares. */
static kvt_session_t *session_of(const rig_t *rig, uint32_t number, uint32_t tokens) {
    uint32_t ids[MAX_TOKENS];
    for (uint32_t i = 0; i < tokens; i++) ids[i] = number * 131071u + i;
    kvt_session_t *session = NULL;
    MUST(kvt_session_open(rig->ns, NULL, &session, &err));
    MUST(kvt_session_append(session, ids, tokens, &err));
    return session;
}

/* Puts or gets all layers with one tensor. `room`: tokens of its views. */
static kvt_status_t transfer_all(const kvt_session_t *session, int is_put, void *tensor,
                                 uint64_t tokens, uint32_t room) {
    kvt_view_t k[LAYERS] = {0}, v[LAYERS];
    for (int i = 0; i < LAYERS; i++) {
        k[i].address = tensor;
        k[i].tokens = room;
        k[i].run_bytes = TOKEN_BYTES;
        v[i] = k[i];
    }
    kvt_transfer_t move = KVT_TRANSFER_INIT;
    move.tokens = tokens;
    move.k = k;
    move.v = v;
    move.stride_bytes = sizeof k[0];
    kvt_op_t *op = NULL;
    const kvt_status_t begun =
        (is_put ? kvt_session_put : kvt_session_get)(session, &move, NULL, &op, &err);
    if (begun != KVT_OK) return begun;
    MUST(kvt_op_wait(op, KVT_OP_RELEASED, 0));
    kvt_op_info_t info = KVT_OP_INFO_INIT;
    MUST(kvt_op_info(op, &info));
    MUST(kvt_op_free(&op));
    return info.status;
}

static uint8_t tensor[MAX_TOKENS * TOKEN_BYTES];

static void store_sessions(const rig_t *rig, uint32_t first, uint32_t count, uint32_t tokens) {
    for (uint32_t i = first; i < first + count; i++) {
        kvt_session_t *session = session_of(rig, i, tokens);
        EXPECT(transfer_all(session, 1, tensor, tokens, tokens) == KVT_OK);
        MUST(kvt_session_close(&session));
    }
}

/* A text without a length is refused. */
static void texts(void) {
    rig_t rig;
    begin(&rig, "store(host=16MiB)", 0);
    kvt_store_opts_t opts = KVT_STORE_OPTS_INIT;
    kvt_store_t *store = NULL;
    opts.spec = "store(host=16MiB)";
    REFUSED(kvt_store_open(rig.runtime, NULL, &opts, &store, &err), KVT_E_INVALID, "spec");
    opts.spec_bytes = KVT_NUL_TERMINATED;
    opts.policy = "lru";
    REFUSED(kvt_store_open(rig.runtime, NULL, &opts, &store, &err), KVT_E_INVALID, "policy");
    opts.policy_bytes = KVT_NUL_TERMINATED;
    MUST(kvt_store_open(rig.runtime, NULL, &opts, &store, &err));
    REFUSED(kvt_store_set_policy(store, KVT_TIER_HOST, "lru", 0, &err), KVT_E_INVALID, "spec");
    MUST(kvt_store_set_policy(store, KVT_TIER_HOST, "arc", KVT_NUL_TERMINATED, &err));
    MUST(kvt_store_close(&store, 0, &err));
    kvt_session_opts_t named = KVT_SESSION_OPTS_INIT;
    kvt_session_t *session = NULL;
    named.name = "x";
    REFUSED(kvt_session_open(rig.ns, &named, &session, &err), KVT_E_INVALID, "name");
    named.name_bytes = KVT_NUL_TERMINATED;
    MUST(kvt_session_open(rig.ns, &named, &session, &err));
    MUST(kvt_session_close(&session));
    const char half[] = {(char)0xff, 0};
    named.name = half;
    REFUSED(kvt_session_open(rig.ns, &named, &session, &err), KVT_E_INVALID, "UTF-8");
    end(&rig);
}

/* Close and clear continue where an earlier call timed out. So repeated calls with short deadlines
 * end, and none starts anew. */
static void polls(void) {
    rig_t rig;
    const uint64_t periods_ns[] = {1, 100000, 10000000};
    for (int i = 0; i < 3; i++) {
        begin(&rig, "store(host=16MiB, disk=disk(bytes=256MiB, segment=4MiB))", 1);
        store_sessions(&rig, 0, 100, 2 * CHUNK);
        kvt_clear_report_t report = KVT_CLEAR_REPORT_INIT;
        kvt_status_t status = KVT_E_TIMEOUT;
        while (status == KVT_E_TIMEOUT) {
            status = kvt_namespace_clear(rig.ns, now() + periods_ns[i], &report, &err);
            if (status == KVT_E_TIMEOUT) kvt_error_free(&err);
        }
        MUST(status);
        EXPECT(report.removed_chunks == 200);
        store_sessions(&rig, 100, 100, 2 * CHUNK);
        MUST(kvt_namespace_close(&rig.ns));
        status = KVT_E_BUSY;
        while (status == KVT_E_BUSY) {
            status = kvt_store_close(&rig.store, now() + periods_ns[i], &err);
            if (status == KVT_E_BUSY) kvt_error_free(&err);
        }
        MUST(status);
        /* Closing has written back what was only in memory. */
        MUST(open_store(&rig, "store(host=16MiB, disk=disk(bytes=256MiB, segment=4MiB))"));
        open_default_namespace(&rig);
        kvt_session_t *session = session_of(&rig, 150, 2 * CHUNK);
        EXPECT(transfer_all(session, 0, tensor, 2 * CHUNK, 2 * CHUNK) == KVT_OK);
        MUST(kvt_session_close(&session));
        end(&rig);
    }
}

/* A transfer "to the end" of a session that grows meanwhile: the end is the one at submission,
 * and no byte behind the views is touched. */
enum { APPENDS = 4000, PIECE = 3 };
static int has_ended;

static void *append_all(void *arg) {
    uint32_t ids[PIECE];
    for (uint32_t i = 0; i < APPENDS; i++) {
        for (uint32_t k = 0; k < PIECE; k++) ids[k] = i * PIECE + k;
        kvt_error_t *own = NULL;
        if (kvt_session_append(arg, ids, PIECE, &own) != KVT_OK) abort();
    }
    __atomic_store_n(&has_ended, 1, __ATOMIC_RELEASE);
    return NULL;
}

static void appends(void) {
    rig_t rig;
    begin(&rig, "store(host=64MiB)", 0);
    kvt_session_t *session = NULL;
    MUST(kvt_session_open(rig.ns, NULL, &session, &err));
    REFUSED(transfer_all(session, 1, tensor, 0, MAX_TOKENS), KVT_E_INVALID, "append");
    /* An access behind the tensor faults. */
    const size_t bytes = MAX_TOKENS * TOKEN_BYTES, page = (size_t)sysconf(_SC_PAGESIZE);
    uint8_t *own = mmap(NULL, bytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT(own != MAP_FAILED && mprotect(own + bytes, page, PROT_NONE) == 0);
    pthread_t thread;
    EXPECT(pthread_create(&thread, NULL, append_all, session) == 0);
    uint64_t fits = 0, too_long = 0;
    do {
        /* Views without a token count could be overrun, so they are refused. */
        const kvt_status_t unbounded = transfer_all(session, 1, own, 0, 0);
        EXPECT(unbounded == KVT_E_INVALID);
        kvt_error_free(&err);
        const kvt_status_t status = transfer_all(session, 1, own, 0, MAX_TOKENS);
        EXPECT(status == KVT_OK || status == KVT_E_INVALID);
        kvt_error_free(&err);
        *(status == KVT_OK ? &fits : &too_long) += 1;
    } while (!__atomic_load_n(&has_ended, __ATOMIC_ACQUIRE));
    EXPECT(pthread_join(thread, NULL) == 0);
    REFUSED(transfer_all(session, 1, own, 0, MAX_TOKENS), KVT_E_INVALID, "1024");
    MUST(kvt_session_truncate(session, MAX_TOKENS, &err));
    MUST(transfer_all(session, 1, own, 0, MAX_TOKENS));
    MUST(kvt_session_close(&session));
    EXPECT(munmap(own, bytes + page) == 0);
    end(&rig);
    printf("appends: %d transfers fit, %d were too long\n", (int)fits, (int)too_long);
}

/* Counts open descriptors. A disk needs few, however many segments it has. */
static unsigned open_descriptors(void) {
    unsigned count = 0;
    DIR *all = opendir("/proc/self/fd");
    EXPECT(all != NULL);
    while (readdir(all) != NULL) count++;
    closedir(all);
    return count;
}

static void descriptors(void) {
    rig_t rig;
    const unsigned before = open_descriptors();
    /* 256 segments of 1 MiB. */
    begin(&rig, "store(host=8MiB, write=through, disk=disk(bytes=256MiB, segment=1MiB))", 1);
    kvt_store_stats_t stats = KVT_STORE_STATS_INIT;
    for (uint32_t i = 0; i < 300; i++) {
        store_sessions(&rig, i * 8, 8, 16 * CHUNK);
        const unsigned more = open_descriptors() - before;
        if (more > 64) fprintf(stderr, "%u descriptors\n", more);
        EXPECT(more <= 64);
    }
    MUST(kvt_store_stats(rig.store, &stats));
    EXPECT(stats.disk_used_bytes > (UINT64_C(128) << 20));
    end(&rig);
}

/* A failed open leaves no file behind. */
static void budgets(void) {
    rig_t rig;
    nftw("outsider-budgets", remove_entry, 8, FTW_DEPTH | FTW_PHYS); /* of a killed run */
    nftw("outsider-more", remove_entry, 8, FTW_DEPTH | FTW_PHYS);
    begin(&rig, "store(host=1MiB)", 0);
    kvt_budget_opts_t limits = KVT_BUDGET_OPTS_INIT;
    limits.host_bytes = UINT64_C(256) << 20;
    limits.disk_bytes = UINT64_C(64) << 20;
    kvt_budget_t *budget = NULL;
    MUST(kvt_budget_open(rig.runtime, &limits, &budget, &err));
    kvt_store_opts_t opts = KVT_STORE_OPTS_INIT;
    kvt_store_t *store = NULL;
    opts.spec = "store(host=8MiB, chunks=4096, disk=disk(path=\"outsider-budgets\", bytes=65MiB, segment=4MiB))";
    opts.spec_bytes = KVT_NUL_TERMINATED;
    REFUSED(kvt_store_open(rig.runtime, budget, &opts, &store, &err), KVT_E_BUDGET, "disk_bytes");
    EXPECT(access("outsider-budgets", F_OK) != 0);
    /* The open fails after the disk was opened. */
    opts.spec = "store(host=8MiB, disk=disk(path=\"outsider-budgets\", bytes=64MiB, segment=4MiB),"
                "remote=dir(path=\"outsider-none/none\"))";
    EXPECT(kvt_store_open(rig.runtime, budget, &opts, &store, &err) != KVT_OK);
    kvt_error_free(&err);
    EXPECT(access("outsider-budgets", F_OK) != 0);
    /* Files of others in the directory stay. */
    EXPECT(mkdir("outsider-budgets", 0700) == 0);
    FILE *note = fopen("outsider-budgets/note.txt", "w");
    EXPECT(note != NULL && fclose(note) == 0);
    EXPECT(kvt_store_open(rig.runtime, budget, &opts, &store, &err) != KVT_OK);
    kvt_error_free(&err);
    EXPECT(access("outsider-budgets/note.txt", F_OK) == 0);
    EXPECT(access("outsider-budgets/store.kvt", F_OK) != 0);
    EXPECT(unlink("outsider-budgets/note.txt") == 0);
    nftw("outsider-budgets", remove_entry, 8, FTW_DEPTH | FTW_PHYS);
    EXPECT(access("outsider-budgets", F_OK) != 0);
    opts.spec = "store(host=8MiB, chunks=4096, disk=disk(path=\"outsider-budgets\", bytes=64MiB, segment=4MiB))";
    MUST(kvt_store_open(rig.runtime, budget, &opts, &store, &err));
    kvt_store_t *other = NULL;
    opts.spec = "store(host=8MiB, chunks=4096, disk=disk(path=\"outsider-more\", bytes=16MiB, segment=4MiB))";
    REFUSED(kvt_store_open(rig.runtime, budget, &opts, &other, &err), KVT_E_BUDGET, "disk_bytes");
    EXPECT(access("outsider-more", F_OK) != 0);
    MUST(kvt_store_close(&store, 0, &err));
    MUST(kvt_store_open(rig.runtime, budget, &opts, &other, &err));
    MUST(kvt_store_close(&other, 0, &err));
    MUST(kvt_budget_close(&budget, &err));
    nftw("outsider-budgets", remove_entry, 8, FTW_DEPTH | FTW_PHYS);
    nftw("outsider-more", remove_entry, 8, FTW_DEPTH | FTW_PHYS);
    end(&rig);
}

enum { SESSIONS = 6 };

/* Child process: stores with the default options, waits for the write-behind, and kills itself. */
static void restart_child(const char *path) {
    rig_t rig;
    memset(&rig, 0, sizeof rig);
    snprintf(rig.path, sizeof rig.path, "%s", path);
    MUST(kvt_runtime_open(NULL, &rig.runtime, &err));
    MUST(open_store(&rig, "store(host=16MiB, disk=disk(bytes=256MiB))"));
    open_default_namespace(&rig);
    memset(tensor, 0x5a, sizeof tensor);
    store_sessions(&rig, 0, SESSIONS, 4 * CHUNK);
    kvt_store_stats_t stats = KVT_STORE_STATS_INIT;
    do { /* the alarm limits it */
        usleep(1000);
        MUST(kvt_store_stats(rig.store, &stats));
    } while (stats.written_cells < SESSIONS * 4 * LAYERS);
    EXPECT(stats.unwritten_bytes == 0);
    raise(SIGKILL);
}

/* Chunks that were written behind survive a SIGKILL. */
static void restart(void) {
    char path[] = "outsider-XXXXXX", program[4096];
    const ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    EXPECT(length > 0 && mkdtemp(path) != NULL);
    program[length] = 0;
    const pid_t child = fork();
    if (child == 0) {
        execl(program, program, "restart-child", path, (char *)NULL);
        _exit(127);
    }
    int how = 0;
    EXPECT(child > 0 && waitpid(child, &how, 0) == child);
    EXPECT(WIFSIGNALED(how) && WTERMSIG(how) == SIGKILL);
    rig_t rig;
    memset(&rig, 0, sizeof rig);
    memcpy(rig.path, path, sizeof path);
    MUST(kvt_runtime_open(NULL, &rig.runtime, &err));
    MUST(open_store(&rig, "store(host=16MiB, disk=disk(bytes=256MiB))"));
    open_default_namespace(&rig);
    for (uint32_t i = 0; i < SESSIONS; i++) {
        kvt_session_t *session = session_of(&rig, i, 4 * CHUNK);
        memset(tensor, 0, sizeof tensor);
        EXPECT(transfer_all(session, 0, tensor, 4 * CHUNK, 4 * CHUNK) == KVT_OK);
        for (size_t at = 0; at < 4 * CHUNK * TOKEN_BYTES; at++) EXPECT(tensor[at] == 0x5a);
        MUST(kvt_session_close(&session));
    }
    end(&rig);
}

/* A store reopens with smaller limits. */
static void limits(void) {
    rig_t rig;
    begin(&rig, "store(host=16MiB, write=through, disk=disk(bytes=128MiB))", 1);
    store_sessions(&rig, 0, 40, 16 * CHUNK);
    MUST(kvt_namespace_close(&rig.ns));
    MUST(kvt_store_close(&rig.store, 0, &err));
    const char *fewer = "store(host=16MiB, chunks=100, disk=disk(bytes=128MiB))";
    REFUSED(open_store(&rig, fewer), KVT_E_LIMIT, "forget=true");
    MUST(open_store(&rig, "store(host=16MiB, chunks=100, forget=true, disk=disk(bytes=128MiB))"));
    open_default_namespace(&rig);
    kvt_store_stats_t stats = KVT_STORE_STATS_INIT;
    MUST(kvt_store_stats(rig.store, &stats));
    EXPECT(stats.recovered_chunks == 100);
    /* A smaller disk: segments are deleted until it fits, even without writes. */
    store_sessions(&rig, 100, 40, 16 * CHUNK);
    MUST(kvt_namespace_close(&rig.ns));
    MUST(kvt_store_close(&rig.store, 0, &err));
    MUST(open_store(&rig, "store(host=16MiB, chunks=100, forget=true, disk=disk(bytes=32MiB))"));
    open_default_namespace(&rig);
    do { /* the alarm limits it */
        usleep(1000);
        MUST(kvt_store_stats(rig.store, &stats));
    } while (stats.disk_used_bytes > stats.disk_limit_bytes);
    end(&rig);
}

/* Resident bytes of this process, as the kernel counts them. */
static uint64_t resident(void) {
    unsigned long long kib = 0;
    char line[256];
    FILE *file = fopen("/proc/self/smaps_rollup", "r");
    EXPECT(file != NULL);
    while (fgets(line, sizeof line, file) != NULL) {
        if (sscanf(line, "Rss: %llu", &kib) == 1) break;
    }
    EXPECT(fclose(file) == 0 && kib > 0);
    return kib * 1024;
}

/* The resident memory of a store stays within what its budget has committed. */
static void memory(void) {
    rig_t rig;
    memset(&rig, 0, sizeof rig);
    MUST(kvt_runtime_open(NULL, &rig.runtime, &err));
    kvt_budget_opts_t limits = KVT_BUDGET_OPTS_INIT;
    limits.host_bytes = UINT64_C(128) << 20;
    kvt_budget_t *budget = NULL;
    MUST(kvt_budget_open(rig.runtime, &limits, &budget, &err));
    memset(tensor, 1, sizeof tensor);
    const uint64_t before = resident();
    kvt_store_opts_t opts = KVT_STORE_OPTS_INIT;
    opts.spec = "store(host=64MiB)";
    opts.spec_bytes = KVT_NUL_TERMINATED;
    MUST(kvt_store_open(rig.runtime, budget, &opts, &rig.store, &err));
    open_default_namespace(&rig);
    for (uint32_t round = 0; round < 10; round++) {
        store_sessions(&rig, round * 40, 40, 64 * CHUNK); /* 80 MiB */
        kvt_tier_report_t tier = KVT_TIER_REPORT_INIT;
        MUST(kvt_budget_tier(budget, KVT_TIER_HOST, &tier));
        const uint64_t most = tier.committed_bytes + tier.committed_bytes / 50 + (16u << 20);
        const uint64_t now_bytes = resident();
        EXPECT(tier.committed_bytes <= limits.host_bytes);
        EXPECT(now_bytes < before + most);
    }
    MUST(kvt_namespace_close(&rig.ns));
    MUST(kvt_store_close(&rig.store, 0, &err));
    MUST(kvt_budget_close(&budget, &err));
    MUST(kvt_runtime_close(&rig.runtime, 0, NULL, &err));
}

/* Chunks on disk can be read while sessions' chunks fill host memory. */
static void disk_reads(void) {
    enum { HELD = 200, OLD = 8 };
    rig_t rig;
    begin(&rig, "store(host=1MiB, write=through, disk=disk(bytes=64MiB))", 1);
    store_sessions(&rig, 1000, OLD, 2 * CHUNK);
    kvt_session_t *held[HELD];
    int count = 0;
    while (count < HELD) { /* until memory is full */
        held[count] = session_of(&rig, (uint32_t)count, 2 * CHUNK);
        const kvt_status_t put = transfer_all(held[count], 1, tensor, 2 * CHUNK, 2 * CHUNK);
        EXPECT(put == KVT_OK || put == KVT_E_BUDGET);
        count++;
        if (put != KVT_OK) break;
    }
    for (uint32_t i = 0; i < OLD; i++) {
        kvt_session_t *session = session_of(&rig, 1000 + i, 2 * CHUNK);
        EXPECT(transfer_all(session, 0, tensor, 2 * CHUNK, 2 * CHUNK) == KVT_OK);
        MUST(kvt_session_close(&session));
    }
    for (int i = 0; i < count; i++) MUST(kvt_session_close(&held[i]));
    end(&rig);
}

/* Evictions from disk are counted in chunks, even with granularity=cell. */
static void evictions(void) {
    enum { CHUNKS = 1200 };
    rig_t rig;
    begin(&rig, "store(host=1MiB, granularity=cell, drop=cell, write=through, disk=disk(bytes=16MiB, segment=1MiB))", 1);
    store_sessions(&rig, 0, CHUNKS / 4, 4 * CHUNK);
    kvt_store_stats_t stats = KVT_STORE_STATS_INIT;
    MUST(kvt_store_stats(rig.store, &stats));
    EXPECT(stats.evicted_chunks > 0 && stats.evicted_chunks < CHUNKS);
    end(&rig);
}

/* Impossible observations are refused; one outlier among ten good ones changes little. */
static void observations(void) {
    rig_t rig;
    begin(&rig, "store(host=1MiB)", 0);
    REFUSED(kvt_namespace_observe_prefill(rig.ns, 0, UINT64_MAX, 5, &err), KVT_E_INVALID, "tokens");
    REFUSED(kvt_namespace_observe_prefill(rig.ns, 0, 1000, 5, &err), KVT_E_INVALID, "ns");
    for (int i = 0; i < 10; i++) {
        MUST(kvt_namespace_observe_prefill(rig.ns, 0, 1000, 1000 * 100000, &err));
    }
    MUST(kvt_namespace_observe_prefill(rig.ns, 0, 1000, 1000 * 50, &err));
    kvt_prefill_cost_t cost = KVT_PREFILL_COST_INIT;
    MUST(kvt_namespace_prefill_cost(rig.ns, &cost));
    EXPECT(cost.observed == 11 && cost.beta_ns > 50000 && cost.beta_ns < 150000);
    end(&rig);
}

/* Error messages say what was wrong and what is accepted. */
static void messages(void) {
    rig_t rig;
    begin(&rig, "store(host=1MiB)", 0);
    kvt_store_t *store = NULL;
    kvt_store_opts_t opts = KVT_STORE_OPTS_INIT;
    static const struct {
        const char *spec;
        kvt_status_t status;
        const char *word;
    } wrong[] = {
        {"store(host=1KiB)", KVT_E_INVALID, "65536"},
        {"store(hots=1MiB)", KVT_E_SPEC, "did you mean 'host'"},
        {"store(host=1MiB", KVT_E_SPEC, "offset"},
        {"store(host=1MiB, policy=lruu)", KVT_E_SPEC, "'lru'"},
        {"store(host=1MiB, codec=zstd)", KVT_E_SPEC, "lz4"},
        {"store(host=1MiB, disk=disk(path=\"outsider-w\", bytes=1MiB, segment=1MiB))", KVT_E_INVALID, "segment"},
        {"store(host=1MiB, remote=dir(path=\"outsider-none/none\"))", KVT_E_NOT_FOUND, "outsider-none"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        opts.spec = wrong[i].spec;
        opts.spec_bytes = KVT_NUL_TERMINATED;
        const kvt_status_t got = kvt_store_open(rig.runtime, NULL, &opts, &store, &err);
        if (got != wrong[i].status || err == NULL || strstr(kvt_error_message(err), wrong[i].word) == NULL) {
            fprintf(stderr, "%s: %s: %s\n", wrong[i].spec, kvt_status_name(got),
                    err ? kvt_error_message(err) : "no message");
            exit(1);
        }
        kvt_error_free(&err);
    }
    /* A malformed recipe is refused; otherwise KV would be stored with another encoding. */
    kvt_namespace_t *ns = NULL;
    REFUSED(open_namespace(&rig, "kv(codec=int8", &ns), KVT_E_SPEC, ")");
    /* Transfers of missing tokens, with a short view, without a tensor. */
    kvt_session_t *session = NULL;
    MUST(kvt_session_open(rig.ns, NULL, &session, &err));
    REFUSED(transfer_all(session, 1, tensor, CHUNK, CHUNK), KVT_E_INVALID, "append");
    MUST(kvt_session_close(&session));
    session = session_of(&rig, 1, 2 * CHUNK);
    REFUSED(transfer_all(session, 1, tensor, 2 * CHUNK, CHUNK), KVT_E_INVALID, "view");
    REFUSED(transfer_all(session, 1, NULL, 2 * CHUNK, 2 * CHUNK), KVT_E_INVALID, "address");
    MUST(kvt_session_close(&session));
    end(&rig);
}

static const struct {
    const char *name;
    void (*run)(void);
} topics[] = {{"texts", texts}, {"polls", polls}, {"appends", appends},
              {"descriptors", descriptors}, {"budgets", budgets}, {"restart", restart},
              {"limits", limits}, {"memory", memory}, {"disk_reads", disk_reads},
              {"evictions", evictions}, {"observations", observations}, {"messages", messages}};

int main(int argc, char **argv) {
    alarm(600);
    if (argc == 3 && strcmp(argv[1], "restart-child") == 0) restart_child(argv[2]);
    for (size_t i = 0; i < sizeof topics / sizeof *topics; i++) {
        int is_wanted = argc < 2;
        for (int k = 1; k < argc; k++) is_wanted |= strcmp(argv[k], topics[i].name) == 0;
        if (!is_wanted) continue;
        topics[i].run();
        printf("%s: passed\n", topics[i].name);
    }
    return 0;
}
