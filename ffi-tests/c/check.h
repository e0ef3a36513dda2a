/* Helpers of the C test programs: checks that print the line, the expression and the status, and
 * functions that open and close objects. Every program is a standalone main. */

#ifndef KVT_TESTS_CHECK_H
#define KVT_TESTS_CHECK_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <inttypes.h>
#include <kvtier/kvtier.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                                     \
    do {                                                                                     \
        if (!(condition)) {                                                                  \
            fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #condition);    \
            exit(1);                                                                         \
        }                                                                                    \
    } while (0)

#define CHECK_EQ(left, right)                                                                \
    do {                                                                                     \
        const uint64_t left_ = (uint64_t)(left);                                             \
        const uint64_t right_ = (uint64_t)(right);                                           \
        if (left_ != right_) {                                                               \
            fprintf(stderr, "%s:%d: %s is %" PRIu64 ", but %s is %" PRIu64 "\n", __FILE__,   \
                    __LINE__, #left, left_, #right, right_);                                 \
            exit(1);                                                                         \
        }                                                                                    \
    } while (0)

/* The call must return exactly this status. */
#define CHECK_IS(call, expected)                                                             \
    do {                                                                                     \
        const kvt_status_t want_ = (expected);                                               \
        const kvt_status_t got_ = (call);                                                    \
        if (got_ != want_) {                                                                 \
            fprintf(stderr, "%s:%d: %s returned %s (%d), expected %s\n", __FILE__, __LINE__, \
                    #call, kvt_status_name(got_), (int)got_, kvt_status_name(want_));        \
            exit(1);                                                                         \
        }                                                                                    \
    } while (0)

#define CHECK_OK(call) CHECK_IS(call, KVT_OK)

#define SECOND_NS UINT64_C(1000000000)
#define MS_NS UINT64_C(1000000)

/* A longer wait counts as a hang. No test asserts a shorter time, because a loaded machine may be
 * slow. */
#define HANG_SECONDS 600

/* Every program calls this first. An alarm kills a program that hangs, so the test fails.
 * KVT_TEST_SECONDS gives more time under tools that slow a program down. */
static inline void check_begin(void) {
    const char *seconds = getenv("KVT_TEST_SECONDS");
    alarm(seconds != NULL ? (unsigned)atoi(seconds) : HANG_SECONDS);
}

static inline int check_end(const char *name) {
    printf("%s: passed\n", name);
    return 0;
}

static inline uint64_t now_ns(void) {
    struct timespec t;
    CHECK(clock_gettime(CLOCK_MONOTONIC, &t) == 0);
    return (uint64_t)t.tv_sec * SECOND_NS + (uint64_t)t.tv_nsec;
}

static inline uint64_t in_ms(uint64_t ms) { return now_ns() + ms * MS_NS; }

/* The deadline of every wait that must succeed. */
static inline uint64_t hang_guard(void) { return now_ns() + HANG_SECONDS * SECOND_NS; }

/* Pause between two polls of a condition. */
static inline void short_pause(void) {
    const struct timespec t = {0, 200000};
    nanosleep(&t, NULL);
}

/* The first argument, or `fallback`. Runs under a sanitizer or valgrind pass lower counts. */
static inline uint64_t count_arg(int argc, char **argv, uint64_t fallback) {
    return argc > 1 ? strtoull(argv[1], NULL, 10) : fallback;
}

/* A small random generator, so that runs repeat. */
static inline uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* Appends "write=back" to a store spec, unless `more` sets `write`. Chunks are then written back
 * only when memory is needed, so residency does not depend on the time that a test takes. */
static inline const char *write_option(const char *more) {
    return strstr(more, "write=") != NULL ? "" : ", write=back";
}

static inline kvt_runtime_t *open_runtime(uint32_t workers, const char *faults) {
    kvt_runtime_opts_t opts = KVT_RUNTIME_OPTS_INIT;
    opts.workers = workers;
    opts.faults = faults;
    opts.faults_bytes = faults != NULL ? strlen(faults) : 0;
    kvt_runtime_t *runtime = NULL;
    CHECK_OK(kvt_runtime_open(&opts, &runtime, NULL));
    CHECK(runtime != NULL);
    return runtime;
}

/* Waits until the runtime counts no op. The thread that completes an op may count it for a moment
 * after the completion. */
static inline void wait_no_ops(const kvt_runtime_t *runtime) {
    kvt_runtime_stats_t stats = KVT_RUNTIME_STATS_INIT;
    for (;;) {
        CHECK_OK(kvt_runtime_stats(runtime, &stats));
        if (stats.ops_open == 0 && stats.ops_live == 0) return;
        short_pause();
    }
}

/* Closes the runtime and checks that no object was left open. */
static inline void close_runtime(kvt_runtime_t **runtime) {
    kvt_close_report_t report = KVT_CLOSE_REPORT_INIT;
    CHECK_OK(kvt_runtime_close(runtime, hang_guard(), &report, NULL));
    CHECK(*runtime == NULL);
    CHECK_EQ(report.queues + report.buffers + report.budgets + report.accounts + report.ops, 0);
    CHECK_EQ(report.stores + report.namespaces + report.sessions + report.streamers, 0);
    CHECK_EQ(report.devices, 0);
}

static inline kvt_queue_t *open_queue(const kvt_runtime_t *runtime, uint64_t capacity) {
    kvt_queue_opts_t opts = KVT_QUEUE_OPTS_INIT;
    opts.capacity = capacity;
    kvt_queue_t *queue = NULL;
    CHECK_OK(kvt_queue_open(runtime, &opts, &queue, NULL));
    return queue;
}

static inline void close_queue(kvt_queue_t **queue) {
    CHECK_OK(kvt_queue_close(queue, hang_guard(), NULL));
    CHECK(*queue == NULL);
}

static inline kvt_buffer_t *open_buffer(const kvt_runtime_t *runtime, uint64_t bytes,
                                        uint8_t **address) {
    kvt_buffer_opts_t opts = KVT_BUFFER_OPTS_INIT;
    opts.bytes = bytes;
    kvt_buffer_t *buffer = NULL;
    CHECK_OK(kvt_buffer_alloc(runtime, &opts, &buffer, NULL));
    void *start = NULL;
    uint64_t size = 0;
    CHECK_OK(kvt_buffer_address(buffer, &start, &size));
    CHECK(start != NULL);
    CHECK_EQ(size, bytes);
    if (address != NULL) *address = start;
    return buffer;
}

static inline void free_buffer(kvt_buffer_t **buffer) {
    CHECK_OK(kvt_buffer_free(buffer));
    CHECK(*buffer == NULL);
}

static inline kvt_buffer_item_t copy_item(const kvt_buffer_t *dst, const kvt_buffer_t *src,
                                          uint64_t bytes) {
    kvt_buffer_item_t item;
    memset(&item, 0, sizeof item);
    item.kind = KVT_ITEM_COPY;
    item.dst = dst;
    item.src = src;
    item.bytes = bytes;
    return item;
}

static inline kvt_buffer_item_t sum_item(const kvt_buffer_t *src, uint64_t bytes) {
    kvt_buffer_item_t item;
    memset(&item, 0, sizeof item);
    item.kind = KVT_ITEM_CHECKSUM;
    item.src = src;
    item.bytes = bytes;
    return item;
}

static inline kvt_op_t *submit(const kvt_runtime_t *runtime, const kvt_submit_opts_t *opts,
                               const kvt_buffer_item_t *items, uint64_t count) {
    kvt_op_t *op = NULL;
    CHECK_OK(kvt_buffer_submit(runtime, opts, items, count, sizeof *items, &op, NULL));
    CHECK(op != NULL);
    return op;
}

static inline kvt_op_info_t info_of(const kvt_op_t *op) {
    kvt_op_info_t info = KVT_OP_INFO_INIT;
    CHECK_OK(kvt_op_info(op, &info));
    CHECK_EQ(info.reserved, 0);
    return info;
}

/* Polls an op's state, for moments that have no notification. */
static inline void wait_state(const kvt_op_t *op, uint32_t bits) {
    const uint64_t until = hang_guard();
    while ((info_of(op).state & bits) != bits) {
        CHECK(now_ns() < until);
        short_pause();
    }
}

/* Waits until the op is released, frees it and returns its status. */
static inline kvt_status_t finish_op(kvt_op_t **op) {
    CHECK_OK(kvt_op_wait(*op, KVT_OP_RELEASED, hang_guard()));
    const kvt_status_t status = info_of(*op).status;
    CHECK_OK(kvt_op_free(op));
    CHECK(*op == NULL);
    return status;
}

/* A budget whose disk tier has this limit, independent of the machine. */
static inline kvt_budget_t *open_budget(const kvt_runtime_t *runtime, uint64_t disk_bytes) {
    kvt_budget_opts_t opts = KVT_BUDGET_OPTS_INIT;
    opts.disk_bytes = disk_bytes;
    kvt_budget_t *budget = NULL;
    CHECK_OK(kvt_budget_open(runtime, &opts, &budget, NULL));
    return budget;
}

static inline kvt_account_t *open_account(const kvt_budget_t *budget) {
    kvt_account_t *account = NULL;
    CHECK_OK(kvt_account_open(budget, NULL, &account, NULL));
    return account;
}

static inline kvt_op_t *reserve_later(const kvt_account_t *account, uint64_t bytes,
                                      const kvt_submit_opts_t *opts) {
    kvt_op_t *op = NULL;
    CHECK_OK(kvt_account_reserve_later(account, KVT_TIER_DISK, bytes, opts, &op, NULL));
    CHECK(op != NULL);
    return op;
}

/* Gives reserved bytes back. */
static inline void unreserve(const kvt_account_t *account, uint64_t bytes) {
    CHECK_OK(kvt_account_commit(account, KVT_TIER_DISK, bytes, 0, NULL));
}

static inline pthread_t start_thread(void *(*body)(void *), void *data) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, body, data) == 0);
    return thread;
}

static inline void join_thread(pthread_t thread) { CHECK(pthread_join(thread, NULL) == 0); }

#endif
