/* Tests of the log sink: levels; setting, replacing and removing a sink while other threads log.
 * `destroy` is called exactly once, after the last message, and never if setting the sink
 * failed. */

#include "check.h"

#include <sched.h>
#include <stdatomic.h>

struct sink {
    uint32_t level;
    atomic_uint calls, inside, destroyed;
};

static void on_log(void *data, uint32_t level, const char *target, uint64_t target_bytes,
                   const char *message, uint64_t message_bytes) {
    struct sink *sink = data;
    atomic_fetch_add(&sink->inside, 1);
    CHECK_EQ(atomic_load(&sink->destroyed), 0);
    CHECK(level >= KVT_LOG_ERROR && level <= KVT_LOG_TRACE);
    CHECK(target_bytes > 0 && message_bytes > 0 && message_bytes <= 2048);
    CHECK(memchr(message, '\0', message_bytes) == NULL && target[0] != '\0');
    atomic_fetch_add(&sink->calls, 1);
    atomic_fetch_sub(&sink->inside, 1);
}

static void on_destroy(void *data) {
    struct sink *sink = data;
    CHECK_EQ(atomic_load(&sink->inside), 0);
    CHECK_EQ(atomic_fetch_add(&sink->destroyed, 1), 0);
}

/* Causes a warning: a budget larger than the machine's memory. */
static void cause_warning(const kvt_runtime_t *runtime) {
    kvt_budget_opts_t opts = KVT_BUDGET_OPTS_INIT;
    opts.host_bytes = UINT64_C(1) << 60;
    kvt_budget_t *budget = NULL;
    CHECK_OK(kvt_budget_open(runtime, &opts, &budget, NULL));
    CHECK_OK(kvt_budget_close(&budget, NULL));
}

static void set(struct sink *sink, uint32_t level) {
    sink->level = level;
    CHECK_OK(kvt_log_set(level, on_log, sink, on_destroy, NULL));
}

static void sinks_get_messages_of_their_level(const kvt_runtime_t *runtime) {
    static struct sink sinks[4];
    kvt_error_t *err = NULL;
    CHECK_IS(kvt_log_set(6, on_log, &sinks[0], on_destroy, &err), KVT_E_INVALID);
    CHECK_IS(kvt_log_set(UINT32_MAX, on_log, &sinks[0], on_destroy, &err), KVT_E_INVALID);
    CHECK_EQ(atomic_load(&sinks[0].destroyed), 0);
    CHECK_OK(kvt_error_free(&err));
    set(&sinks[0], KVT_LOG_WARN);
    cause_warning(runtime);
    CHECK(atomic_load(&sinks[0].calls) > 0);
    set(&sinks[1], KVT_LOG_ERROR); /* replaces the sink; warnings are below its level */
    CHECK_EQ(atomic_load(&sinks[0].destroyed), 1);
    cause_warning(runtime);
    CHECK_EQ(atomic_load(&sinks[1].calls), 0);
    set(&sinks[2], KVT_LOG_OFF);
    cause_warning(runtime);
    CHECK_EQ(atomic_load(&sinks[2].calls), 0);
    set(&sinks[3], KVT_LOG_TRACE);
    cause_warning(runtime);
    CHECK(atomic_load(&sinks[3].calls) > 0);
    CHECK_OK(kvt_log_set(KVT_LOG_TRACE, NULL, NULL, NULL, NULL));
    const unsigned calls = atomic_load(&sinks[3].calls);
    cause_warning(runtime);
    CHECK_EQ(atomic_load(&sinks[3].calls), calls);
    CHECK_OK(kvt_log_set(KVT_LOG_OFF, NULL, NULL, NULL, NULL)); /* nothing to remove */
    for (int i = 0; i < 4; i++) CHECK_EQ(atomic_load(&sinks[i].destroyed), 1);
}

static atomic_bool stop;
static _Atomic uint64_t warnings;

static void *warn_repeatedly(void *runtime) {
    while (!atomic_load(&stop)) {
        cause_warning(runtime);
        atomic_fetch_add(&warnings, 1);
    }
    return NULL;
}

static struct sink *sinks;
static uint64_t rounds;

static void *set_sinks(void *data) {
    const uint64_t first = (uint64_t)(uintptr_t)data;
    for (uint64_t i = 0; i < rounds; i++) {
        set(&sinks[first + i], KVT_LOG_WARN);
        if (i % 5 == 0) CHECK_OK(kvt_log_set(KVT_LOG_OFF, NULL, NULL, NULL, NULL));
        if (i % 8 == 0) sched_yield();
    }
    return NULL;
}

static void sinks_change_while_others_log(kvt_runtime_t *runtime) {
    sinks = calloc(2 * rounds, sizeof *sinks);
    CHECK(sinks != NULL);
    pthread_t loggers[2];
    for (int i = 0; i < 2; i++) loggers[i] = start_thread(warn_repeatedly, runtime);
    while (atomic_load(&warnings) < 4) short_pause();
    pthread_t setters[2] = {start_thread(set_sinks, (void *)0),
                            start_thread(set_sinks, (void *)(uintptr_t)rounds)};
    join_thread(setters[0]);
    join_thread(setters[1]);
    CHECK_OK(kvt_log_set(KVT_LOG_OFF, NULL, NULL, NULL, NULL));
    atomic_store(&stop, 1);
    join_thread(loggers[0]);
    join_thread(loggers[1]);
    uint64_t calls = 0;
    for (uint64_t i = 0; i < 2 * rounds; i++) {
        CHECK_EQ(atomic_load(&sinks[i].destroyed), 1);
        calls += atomic_load(&sinks[i].calls);
    }
    free(sinks);
    printf("log: %" PRIu64 " messages through %" PRIu64 " sinks\n", calls, 2 * rounds);
}

static kvt_runtime_t *shared;

/* A sink may call the library and set another sink. */
static void replaces_itself(void *data, uint32_t level, const char *target, uint64_t target_bytes,
                            const char *message, uint64_t message_bytes) {
    (void)level, (void)target, (void)target_bytes, (void)message, (void)message_bytes;
    kvt_runtime_t *copy = shared;
    CHECK_IS(kvt_runtime_close(&copy, 0, NULL, NULL), KVT_E_REENTRANT);
    CHECK_OK(kvt_log_set(KVT_LOG_OFF, NULL, NULL, NULL, NULL));
    CHECK_EQ(atomic_load(&((struct sink *)data)->destroyed), 0); /* this sink is still in use */
    atomic_fetch_add(&((struct sink *)data)->calls, 1);
}

int main(int argc, char **argv) {
    check_begin();
    rounds = count_arg(argc, argv, 2000);
    shared = open_runtime(1, NULL);
    sinks_get_messages_of_their_level(shared);
    sinks_change_while_others_log(shared);
    static struct sink sink;
    CHECK_OK(kvt_log_set(KVT_LOG_WARN, replaces_itself, &sink, on_destroy, NULL));
    cause_warning(shared);
    CHECK_EQ(atomic_load(&sink.calls), 1);
    CHECK_EQ(atomic_load(&sink.destroyed), 1);
    close_runtime(&shared);
    return check_end("log");
}
