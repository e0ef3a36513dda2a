/* Tests of traces and their replay: every call, and every invalid use of one. */

#include "check.h"

#include <math.h>
#include <sys/wait.h>

static const char *const kinds[] = {"chat", "agent", "batch", "multitenant", "burst"};
static const char *const formats[] = {"kvtier", "mooncake", "weka", "sharegpt",
                                      "azure",  "oracle",   "csv",  ""};

static kvt_trace_opts_t opts_of(const char *kind) {
    kvt_trace_opts_t opts = KVT_TRACE_OPTS_INIT;
    opts.kind = kind[0] != 0 ? kind : NULL;
    opts.kind_bytes = strlen(kind);
    return opts;
}

static kvt_trace_t *generate(const char *kind, uint64_t seconds, double rate) {
    kvt_trace_opts_t opts = opts_of(kind);
    opts.duration_ns = seconds * SECOND_NS;
    opts.rate = rate;
    kvt_trace_t *trace = NULL;
    CHECK_OK(kvt_trace_generate(&opts, &trace, NULL));
    CHECK(trace != NULL);
    return trace;
}

static void free_trace(kvt_trace_t **trace) {
    CHECK_OK(kvt_trace_free(trace));
    CHECK(*trace == NULL);
    CHECK_OK(kvt_trace_free(trace));
}

static kvt_trace_info_t trace_info(const kvt_trace_t *trace) {
    kvt_trace_info_t info = KVT_TRACE_INFO_INIT;
    CHECK_OK(kvt_trace_info(trace, &info));
    return info;
}

static kvt_replay_opts_t replay_opts(const char *spec, uint64_t blocks) {
    kvt_replay_opts_t opts = KVT_REPLAY_OPTS_INIT;
    opts.spec = spec;
    opts.spec_bytes = strlen(spec);
    opts.capacity_blocks = blocks;
    return opts;
}

/* The path of a file in tests/data, relative to this source file. */
static const char *data_path(const char *name) {
    static char path[4096];
    const char *slash = strrchr(__FILE__, '/');
    const int n = slash != NULL ? (int)(slash - __FILE__) : 1;
    const char *dir = slash != NULL ? __FILE__ : ".";
    CHECK(snprintf(path, sizeof path, "%.*s/../../tests/data/%s", n, dir, name) > 0);
    return path;
}

static kvt_status_t open_path(const char *path, const char *format, kvt_trace_t **out) {
    kvt_trace_opts_t opts = opts_of(format);
    opts.path = path;
    opts.path_bytes = strlen(path);
    kvt_error_t *err = NULL;
    const kvt_status_t status = kvt_trace_open(&opts, out, &err);
    CHECK((status == KVT_OK) == (err == NULL));
    CHECK((status == KVT_OK) == (*out != NULL));
    CHECK(status == KVT_OK || strlen(kvt_error_message(err)) > 0);
    CHECK_OK(kvt_error_free(&err));
    return status;
}

/* --- generating ------------------------------------------------------------ */

static void generated_traces_are_consistent(void) {
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        kvt_trace_t *trace = generate(kinds[i], 600, 0.05);
        const kvt_trace_info_t info = trace_info(trace);
        CHECK(info.references >= info.blocks && info.tokens >= info.known_tokens);
        CHECK(info.block_tokens == 512 && info.sessions <= info.requests);
        CHECK(info.duration_ns <= 600 * SECOND_NS);
        free_trace(&trace);
    }
    kvt_trace_opts_t opts = opts_of("chat");
    opts.flags = KVT_TRACE_FLAT;
    opts.duration_ns = 600 * SECOND_NS;
    opts.rate = 0.05;
    kvt_trace_t *flat = NULL;
    CHECK_OK(kvt_trace_generate(&opts, &flat, NULL));
    const kvt_trace_info_t info = trace_info(flat);
    CHECK_EQ(info.requests, info.references);
    free_trace(&flat);
}

static void invalid_generators_are_refused(void) {
    kvt_trace_t *trace = NULL;
    kvt_error_t *err = NULL;
    CHECK_IS(kvt_trace_generate(NULL, NULL, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_trace_generate(NULL, &trace, NULL), KVT_E_SPEC); /* no kind */
    kvt_trace_opts_t opts = opts_of("chta");
    CHECK_IS(kvt_trace_generate(&opts, &trace, &err), KVT_E_SPEC);
    CHECK(strstr(kvt_error_message(err), "'chat'") != NULL);
    opts = opts_of("mooncake"); /* a file format, not a generator */
    CHECK_IS(kvt_trace_generate(&opts, &trace, &err), KVT_E_SPEC);
    opts = opts_of("chat");
    opts.kind = NULL;
    CHECK_IS(kvt_trace_generate(&opts, &trace, &err), KVT_E_INVALID);
    opts.kind = "\xff\xfe\xff\xfe";
    CHECK_IS(kvt_trace_generate(&opts, &trace, &err), KVT_E_INVALID);
    opts.kind = "chat";
    opts.kind_bytes = UINT64_MAX - 1;
    CHECK_IS(kvt_trace_generate(&opts, &trace, &err), KVT_E_LIMIT);
    opts = opts_of("chat");
    opts.flags = 2;
    CHECK_IS(kvt_trace_generate(&opts, &trace, &err), KVT_E_INVALID);
    opts.flags = 0;
    const double bad_rates[] = {NAN, -1, INFINITY, -INFINITY, 1e300, 1e-320};
    const kvt_status_t means[] = {KVT_E_INVALID, KVT_E_INVALID, KVT_E_INVALID,
                                  KVT_E_INVALID, KVT_E_LIMIT,   KVT_OK};
    for (int i = 0; i < 6; i++) {
        opts.rate = bad_rates[i];
        CHECK_IS(kvt_trace_generate(&opts, &trace, &err), means[i]);
    }
    CHECK(trace != NULL); /* so short that it has no session */
    kvt_replay_opts_t once = replay_opts("lru", 1);
    kvt_replay_report_t report = KVT_REPLAY_REPORT_INIT;
    CHECK_OK(kvt_trace_replay(trace, &once, &report, &err));
    free_trace(&trace);
    opts.rate = 0;
    opts.duration_ns = UINT64_MAX;
    CHECK_IS(kvt_trace_generate(&opts, &trace, &err), KVT_E_INVALID);
    opts.duration_ns = INT64_MAX;
    CHECK_IS(kvt_trace_generate(&opts, &trace, &err), KVT_E_LIMIT);
    opts.duration_ns = SECOND_NS;
    opts.gap_ns = UINT64_MAX;
    CHECK_IS(kvt_trace_generate(&opts, &trace, &err), KVT_E_INVALID);
    opts.gap_ns = 0;
    opts.block_tokens = UINT64_MAX;
    CHECK_IS(kvt_trace_generate(&opts, &trace, &err), KVT_E_INVALID);
    opts.block_tokens = UINT32_MAX;
    CHECK_IS(kvt_trace_generate(&opts, &trace, &err), KVT_E_LIMIT);
    opts.block_tokens = 0;
    opts.struct_size = 4;
    CHECK_IS(kvt_trace_generate(&opts, &trace, &err), KVT_E_INVALID);
    CHECK(trace == NULL);
    CHECK_OK(kvt_error_free(&err));
}

/* --- reading --------------------------------------------------------------- */

struct bytes {
    uint8_t *at;
    size_t n;
};

static struct bytes read_file(const char *path) {
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL);
    struct bytes all = {malloc(1 << 20), 0};
    CHECK(all.at != NULL);
    all.n = fread(all.at, 1, 1 << 20, file);
    CHECK(fclose(file) == 0 && all.n > 100);
    return all;
}

static char scratch[64] = "/tmp/kvt-trace-XXXXXX";

static void write_file(const void *data, size_t n) {
    FILE *file = fopen(scratch, "wb");
    CHECK(file != NULL);
    CHECK(fwrite(data, 1, n, file) == n && fclose(file) == 0);
}

static void files_of_every_format_are_read(void) {
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        char name[64];
        snprintf(name, sizeof name, "%s.kvtrace", kinds[i]);
        kvt_trace_t *trace = NULL, *named = NULL;
        CHECK_OK(open_path(data_path(name), "", &trace));
        CHECK_OK(open_path(data_path(name), "kvtier", &named));
        const kvt_trace_info_t a = trace_info(trace), b = trace_info(named);
        CHECK(a.requests > 0 && a.blocks > 0 && a.known_tokens <= a.tokens);
        CHECK(memcmp(&a, &b, sizeof a) == 0);
        free_trace(&trace);
        free_trace(&named);
    }
    static const char csv[] = "0,10,16\n1,11,16\n2,10,16\n";
    write_file(csv, sizeof csv - 1);
    kvt_trace_t *trace = NULL;
    CHECK_OK(open_path(scratch, "csv", &trace));
    CHECK_EQ(trace_info(trace).references, 3);
    CHECK_EQ(trace_info(trace).blocks, 2);
    free_trace(&trace);
}

static void invalid_paths_and_formats_are_refused(void) {
    kvt_trace_t *trace = NULL;
    kvt_error_t *err = NULL;
    CHECK_IS(kvt_trace_open(NULL, NULL, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_trace_open(NULL, &trace, &err), KVT_E_INVALID); /* no path */
    kvt_trace_opts_t opts = opts_of("moncake");
    opts.path = "/nonexistent/trace";
    opts.path_bytes = 18;
    CHECK_IS(kvt_trace_open(&opts, &trace, &err), KVT_E_SPEC);
    CHECK(strstr(kvt_error_message(err), "'mooncake'") != NULL);
    opts.kind = NULL;
    opts.kind_bytes = 0;
    CHECK_IS(kvt_trace_open(&opts, &trace, &err), KVT_E_NOT_FOUND);
    opts.flags = UINT64_MAX;
    CHECK_IS(kvt_trace_open(&opts, &trace, &err), KVT_E_INVALID);
    opts.flags = 0;
    opts.path = "/nonexist\0nt/trace";
    CHECK(kvt_trace_open(&opts, &trace, &err) < 0);
    opts.path = "/nonexist\xffnt/trace";
    CHECK_IS(kvt_trace_open(&opts, &trace, &err), KVT_E_INVALID);
    opts.path = NULL;
    CHECK_IS(kvt_trace_open(&opts, &trace, &err), KVT_E_INVALID);
    opts.path = "/tmp";
    opts.path_bytes = UINT64_MAX / 2;
    CHECK_IS(kvt_trace_open(&opts, &trace, &err), KVT_E_LIMIT);
    opts.path_bytes = 4; /* a directory */
    CHECK(kvt_trace_open(&opts, &trace, &err) < 0);
    CHECK(trace == NULL);
    CHECK_OK(kvt_error_free(&err));
}

/* A file in kvtier's format with a valid checksum. */
static void write_summed(const uint8_t *body, size_t n) {
    uint8_t all[256];
    CHECK(n + 8 <= sizeof all);
    memcpy(all, body, n);
    uint64_t sum = 0;
    CHECK_OK(kvt_checksum(body, n, &sum));
    for (int i = 0; i < 8; i++) all[n + (size_t)i] = (uint8_t)(sum >> (8 * i));
    write_file(all, n + 8);
}

static void damaged_files_are_refused(uint64_t rounds) {
    kvt_trace_t *trace = NULL;
    write_file("", 0);
    CHECK(open_path(scratch, "", &trace) < 0);
    write_file("words\n", 6);
    CHECK_IS(open_path(scratch, "", &trace), KVT_E_INVALID);

    /* A truncated file, and one with a flipped bit, are always refused. */
    struct bytes good = read_file(data_path("batch.kvtrace"));
    uint64_t random = 88172645463325252u;
    for (uint64_t i = 0; i < rounds; i++) {
        write_file(good.at, next_random(&random) % good.n);
        CHECK(open_path(scratch, "", &trace) < 0);
        CHECK(open_path(scratch, "kvtier", &trace) < 0);
        const size_t at = next_random(&random) % good.n;
        good.at[at] ^= (uint8_t)(1u << (next_random(&random) % 8));
        write_file(good.at, good.n);
        CHECK(open_path(scratch, "kvtier", &trace) < 0);
        good = (free(good.at), read_file(data_path("batch.kvtrace")));
    }
    free(good.at);

    /* Valid checksums over invalid headers. */
    static const uint8_t newer[] = "KVTTRACE\x02";
    write_summed(newer, 9);
    CHECK_IS(open_path(scratch, "", &trace), KVT_E_TOO_NEW);
    static const uint8_t huge[] = "KVTTRACE\x01\x80\x04\xff\xff\xff\xff\x0f\x01\x01";
    write_summed(huge, sizeof huge - 1);
    CHECK(open_path(scratch, "", &trace) < 0);
    static const uint8_t endless[] = "KVTTRACE\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff";
    write_summed(endless, sizeof endless - 1);
    CHECK(open_path(scratch, "", &trace) < 0);
    static const uint8_t none[] = "KVTTRACE\x01\x80\x04\x05\x05\x05";
    write_summed(none, sizeof none - 1);
    CHECK(open_path(scratch, "", &trace) < 0);
    for (uint64_t i = 0; i < rounds; i++) {
        uint8_t body[200] = "KVTTRACE\x01\x80\x04";
        for (size_t j = 11; j < sizeof body; j++) body[j] = (uint8_t)(next_random(&random) >> 24);
        for (size_t j = 11; j < 14; j++) body[j] &= 0x0f;
        write_summed(body, 14 + i % 180);
        if (open_path(scratch, "kvtier", &trace) == KVT_OK) free_trace(&trace);
    }

    /* Any text in any format: the call returns a status, and an accepted trace can be replayed. */
    static const char *const texts[] = {
        "{\"timestamp\": 0, \"input_length\": -1, \"output_length\": 1e999, \"hash_ids\": [0]}\n",
        "{\"timestamp\": 0, \"hash_ids\": [18446744073709551616]}\n",
        "{\"requests\": [{}]}\n",
        "[{\"conversations\": [{\"from\": \"human\", \"value\": \"\\ud800\"}]}]\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n9999-99-99 99:99:99,x,y\n",
        "1,2,3\n4,5\n",
        "\xef\xbb\xbf\x00\xff\xff\xff\xff\n",
    };
    char deep[4096];
    memset(deep, '[', sizeof deep);
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
        for (size_t t = 0; t <= sizeof texts / sizeof *texts; t++) {
            const int is_deep = t == sizeof texts / sizeof *texts;
            write_file(is_deep ? deep : texts[t], is_deep ? sizeof deep : strlen(texts[t]));
            if (open_path(scratch, formats[f], &trace) != KVT_OK) continue;
            kvt_replay_opts_t opts = replay_opts("lru", 2);
            kvt_replay_report_t report = KVT_REPLAY_REPORT_INIT;
            CHECK_OK(kvt_trace_replay(trace, &opts, &report, NULL));
            free_trace(&trace);
        }
    }
}

/* --- replaying ------------------------------------------------------------- */

static kvt_replay_report_t replay(const kvt_trace_t *trace, const kvt_replay_opts_t *opts) {
    kvt_replay_report_t report = KVT_REPLAY_REPORT_INIT;
    CHECK_OK(kvt_trace_replay(trace, opts, &report, NULL));
    return report;
}

static void same_outcome(kvt_replay_report_t a, kvt_replay_report_t b) {
    a.decision_p50_ns = b.decision_p50_ns = 0;
    a.decision_p99_ns = b.decision_p99_ns = 0;
    a.decision_max_ns = b.decision_max_ns = 0;
    a.run_ns = b.run_ns = 0;
    CHECK(memcmp(&a, &b, sizeof a) == 0);
}

static void replays_are_deterministic(const kvt_trace_t *trace) {
    const kvt_trace_info_t info = trace_info(trace);
    const char *const specs[] = {"lru", "horizon", "belady", "auto"};
    for (int s = 0; s < 4; s++) {
        for (int part = 1; part <= 8; part *= 2) {
            const uint64_t blocks = info.blocks / 64 * (uint64_t)part + 1;
            kvt_replay_opts_t opts = replay_opts(specs[s], blocks);
            const kvt_replay_report_t got = replay(trace, &opts);
            CHECK_EQ(got.requests, info.requests);
            CHECK_EQ(got.references, info.references);
            CHECK_EQ(got.tokens, info.tokens);
            CHECK(got.hits <= got.references && got.hit_tokens <= info.known_tokens);
            CHECK(got.hit_cost >= 0 && got.hit_cost <= got.cost);
            CHECK(got.inserts <= got.references - got.hits);
            CHECK(got.evictions <= got.inserts && got.inserts - got.evictions <= blocks);
            CHECK(got.re_prefill_rate >= 0 && got.re_prefill_rate <= 1);
            CHECK(got.jain_sessions > 0 && got.jain_sessions <= 1.0000001);
            CHECK(got.jain_tenants > 0 && got.jain_tenants <= 1.0000001);
            CHECK(got.utilisation >= 0 && got.utilisation <= 1);
            CHECK(got.decision_p50_ns <= got.decision_p99_ns);
            same_outcome(got, replay(trace, &opts));
            opts.flags = KVT_REPLAY_UNTIMED;
            const kvt_replay_report_t untimed = replay(trace, &opts);
            same_outcome(got, untimed);
            CHECK_EQ(untimed.decision_max_ns, 0);
        }
    }
    /* If everything fits, nothing is evicted, and every known block is a hit. */
    kvt_replay_opts_t opts = replay_opts("lru", info.blocks);
    kvt_replay_report_t got = replay(trace, &opts);
    CHECK_EQ(got.evictions, 0);
    CHECK_EQ(got.inserts, info.blocks);
    CHECK_EQ(got.hit_tokens, info.known_tokens);
    opts.layers = 2;
    opts.flags = KVT_REPLAY_HOLES;
    opts.hints = KVT_HINTS_THINK;
    opts.alpha = 0.001;
    got = replay(trace, &opts);
    CHECK_EQ(got.hit_tokens, info.known_tokens);
    opts = replay_opts("lru", 100);
    opts.warm_up = info.requests - 1;
    CHECK_EQ(replay(trace, &opts).requests, 1);
    opts.warm_up = UINT64_MAX;
    CHECK_EQ(replay(trace, &opts).requests, 0);
}

static void invalid_replays_are_refused(const kvt_trace_t *trace) {
    kvt_replay_report_t out, before;
    memset(&out, 0x5a, sizeof out);
    out.struct_size = sizeof out;
    before = out;
    kvt_error_t *err = NULL;
    kvt_replay_opts_t opts = replay_opts("lru", 100);
    CHECK_IS(kvt_trace_replay(trace, &opts, NULL, &err), KVT_E_INVALID);
    CHECK_IS(kvt_trace_replay(NULL, &opts, &out, &err), KVT_E_HANDLE);
    CHECK_IS(kvt_trace_replay((const kvt_trace_t *)0x1234567, &opts, &out, &err), KVT_E_HANDLE);
    kvt_policy_t *policy = NULL;
    CHECK_OK(kvt_policy_open(NULL, &policy, NULL));
    CHECK_IS(kvt_trace_replay((const kvt_trace_t *)policy, &opts, &out, &err), KVT_E_HANDLE);
    CHECK_IS(kvt_trace_info((const kvt_trace_t *)policy, NULL), KVT_E_INVALID);
    CHECK_OK(kvt_policy_close(&policy));
    CHECK_IS(kvt_trace_replay(trace, NULL, &out, &err), KVT_E_SPEC); /* no policy */
    opts.capacity_blocks = 0;
    CHECK_IS(kvt_trace_replay(trace, &opts, &out, &err), KVT_E_LIMIT);
    opts.capacity_blocks = UINT64_MAX;
    CHECK_IS(kvt_trace_replay(trace, &opts, &out, &err), KVT_E_LIMIT);
    opts.capacity_blocks = 100;
    opts.layers = UINT32_MAX;
    CHECK_IS(kvt_trace_replay(trace, &opts, &out, &err), KVT_E_LIMIT);
    opts.layers = 0;
    opts.hints = 3;
    CHECK_IS(kvt_trace_replay(trace, &opts, &out, &err), KVT_E_INVALID);
    opts.hints = 0;
    opts.flags = 4;
    CHECK_IS(kvt_trace_replay(trace, &opts, &out, &err), KVT_E_INVALID);
    opts.flags = 0;
    const double alphas[] = {NAN, -1, INFINITY, 1e13};
    for (int i = 0; i < 4; i++) {
        opts.alpha = alphas[i];
        CHECK_IS(kvt_trace_replay(trace, &opts, &out, &err), KVT_E_INVALID);
    }
    opts = replay_opts("horizn", 100);
    CHECK_IS(kvt_trace_replay(trace, &opts, &out, &err), KVT_E_SPEC);
    CHECK(strstr(kvt_error_message(err), "'horizon'") != NULL);
    opts = replay_opts("lru(", 100);
    CHECK_IS(kvt_trace_replay(trace, &opts, &out, &err), KVT_E_SPEC);
    opts = replay_opts("custom", 100); /* no callback for scores */
    CHECK_IS(kvt_trace_replay(trace, &opts, &out, &err), KVT_E_INVALID);
    opts = replay_opts("", 100);
    CHECK_IS(kvt_trace_replay(trace, &opts, &out, &err), KVT_E_INVALID);
    opts.spec_bytes = KVT_NUL_TERMINATED;
    CHECK_IS(kvt_trace_replay(trace, &opts, &out, &err), KVT_E_SPEC);
    opts.spec = NULL;
    opts.spec_bytes = 3;
    CHECK_IS(kvt_trace_replay(trace, &opts, &out, &err), KVT_E_INVALID);
    CHECK(memcmp(&out, &before, sizeof out) == 0);
    CHECK_OK(kvt_error_free(&err));

    kvt_trace_info_t info = KVT_TRACE_INFO_INIT;
    CHECK_IS(kvt_trace_info(trace, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_trace_info(NULL, &info), KVT_E_HANDLE);
    CHECK_OK(kvt_trace_free(NULL));
    kvt_trace_t *foreign = (kvt_trace_t *)0x1234567;
    CHECK_IS(kvt_trace_free(&foreign), KVT_E_HANDLE);
    CHECK(foreign != NULL);
}

/* --- progress -------------------------------------------------------------- */

struct watcher {
    kvt_trace_t *trace;
    uint64_t calls, last, total;
    uint64_t stop_after;
    int frees, nests;
};

static int32_t on_progress(void *user_data, uint64_t done, uint64_t total) {
    struct watcher *w = user_data;
    CHECK(done >= w->last && done <= total);
    w->calls += 1;
    w->last = done;
    w->total = total;
    if (w->nests) {
        kvt_replay_opts_t opts = replay_opts("lru", 10);
        kvt_replay_report_t report = KVT_REPLAY_REPORT_INIT;
        CHECK_IS(kvt_trace_replay(w->trace, &opts, &report, NULL), KVT_E_REENTRANT);
        CHECK_EQ(trace_info(w->trace).requests, total); /* queries are allowed */
    }
    if (w->frees) CHECK_OK(kvt_trace_free(&w->trace));
    return w->stop_after == 0 || w->calls < w->stop_after;
}

static void progress_can_cancel_and_free(uint64_t seconds) {
    kvt_trace_t *trace = generate("chat", seconds, 1);
    const uint64_t requests = trace_info(trace).requests;
    CHECK(requests > 600);
    struct watcher w = {0};
    kvt_replay_opts_t opts = replay_opts("lru", 1000);
    opts.progress = on_progress;
    opts.user_data = &w;
    const kvt_replay_report_t whole = replay(trace, &opts);
    CHECK_EQ(w.last, requests);
    CHECK_EQ(w.total, requests);
    CHECK(w.calls >= 3);

    kvt_replay_report_t out, before;
    memset(&out, 0x5a, sizeof out);
    out.struct_size = sizeof out;
    before = out;
    kvt_error_t *err = NULL;
    for (uint64_t after = 1; after <= 2; after++) {
        w = (struct watcher){.stop_after = after};
        CHECK_IS(kvt_trace_replay(trace, &opts, &out, &err), KVT_E_CANCELLED);
        CHECK_EQ(w.calls, after);
        CHECK(w.last < requests && kvt_error_message(err) != NULL);
        CHECK(memcmp(&out, &before, sizeof out) == 0);
    }
    CHECK_OK(kvt_error_free(&err));

    w = (struct watcher){.trace = trace, .nests = 1};
    same_outcome(whole, replay(trace, &opts));

    /* The callback frees the trace: the replay still runs to its end. */
    const kvt_trace_t *stale = trace;
    w = (struct watcher){.trace = trace, .frees = 1};
    same_outcome(whole, replay(trace, &opts));
    CHECK(w.trace == NULL && w.last == requests);
    kvt_trace_info_t info = KVT_TRACE_INFO_INIT;
    CHECK_IS(kvt_trace_info(stale, &info), KVT_E_HANDLE);
    CHECK_IS(kvt_trace_replay(stale, &opts, &out, NULL), KVT_E_HANDLE);
    CHECK_IS(kvt_trace_free(&trace), KVT_E_HANDLE);
}

/* --- from several threads -------------------------------------------------- */

static const kvt_trace_t *shared_trace;
static pthread_barrier_t started;

static int32_t arrive(void *user_data, uint64_t done, uint64_t total) {
    (void)done, (void)total;
    int *first = user_data;
    if (*first) pthread_barrier_wait(&started);
    *first = 0;
    return 1;
}

static void *replayer(void *data) {
    int first = 1;
    kvt_replay_opts_t opts = replay_opts("horizon", 500);
    opts.progress = arrive;
    opts.user_data = &first;
    *(kvt_replay_report_t *)data = replay(shared_trace, &opts);
    return NULL;
}

static void threads_replay_a_freed_trace(uint64_t seconds) {
    kvt_trace_t *trace = generate("burst", seconds, 0.5);
    shared_trace = trace;
    kvt_replay_report_t reports[3];
    pthread_t ids[3];
    CHECK(pthread_barrier_init(&started, NULL, 4) == 0);
    for (int i = 0; i < 3; i++) ids[i] = start_thread(replayer, &reports[i]);
    pthread_barrier_wait(&started); /* all three are running */
    free_trace(&trace);
    for (int i = 0; i < 3; i++) join_thread(ids[i]);
    CHECK(pthread_barrier_destroy(&started) == 0);
    same_outcome(reports[0], reports[1]);
    same_outcome(reports[0], reports[2]);
}

/* A fork is detected even if the process opened nothing but a trace. */
static void calls_in_a_forked_child_are_refused(void) {
    kvt_trace_t *trace = generate("chat", 60, 0.1);
    fflush(stdout);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        alarm(HANG_SECONDS);
        kvt_trace_t *other = NULL;
        kvt_trace_opts_t chat = opts_of("chat"), file = opts_of("");
        kvt_trace_info_t info = KVT_TRACE_INFO_INIT;
        kvt_replay_opts_t opts = replay_opts("lru", 10);
        kvt_replay_report_t report = KVT_REPLAY_REPORT_INIT;
        CHECK_IS(kvt_trace_generate(&chat, &other, NULL), KVT_E_FORKED);
        CHECK_IS(kvt_trace_open(&file, &other, NULL), KVT_E_FORKED);
        CHECK_IS(kvt_trace_info(trace, &info), KVT_E_FORKED);
        CHECK_IS(kvt_trace_replay(trace, &opts, &report, NULL), KVT_E_FORKED);
        CHECK_IS(kvt_trace_free(&trace), KVT_E_FORKED);
        CHECK(other == NULL && trace != NULL);
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    free_trace(&trace);
}

int main(int argc, char **argv) {
    check_begin();
    const uint64_t seconds = count_arg(argc, argv, 1800);
    const int fd = mkstemp(scratch);
    CHECK(fd >= 0 && close(fd) == 0);
    calls_in_a_forked_child_are_refused();
    generated_traces_are_consistent();
    invalid_generators_are_refused();
    files_of_every_format_are_read();
    invalid_paths_and_formats_are_refused();
    damaged_files_are_refused(seconds / 20);
    kvt_trace_t *trace = generate("chat", seconds, 0.5);
    replays_are_deterministic(trace);
    invalid_replays_are_refused(trace);
    free_trace(&trace);
    progress_can_cancel_and_free(seconds < 600 ? 600 : seconds);
    threads_replay_a_freed_trace(seconds);
    CHECK(unlink(scratch) == 0);
    return check_end("trace");
}
