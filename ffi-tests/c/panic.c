/* Fault injection. A panic inside the library ends ops with KVT_E_PANIC and poisons the runtime,
 * which can still be drained and closed. System failures are returned as statuses. The library
 * prints nothing: the test captures standard error and checks that. */

#include "gate.h"

#include <fcntl.h>
#include <stdatomic.h>

static int saved_stderr;
static int capture;

static void begin_capture(void) {
    char path[] = "/tmp/kvt-panic-XXXXXX";
    capture = mkstemp(path);
    CHECK(capture >= 0);
    unlink(path);
    fflush(stderr);
    saved_stderr = dup(2);
    CHECK(saved_stderr >= 0 && dup2(capture, 2) == 2);
}

static void end_capture(void) {
    CHECK(dup2(saved_stderr, 2) == 2);
    close(saved_stderr);
    char text[256] = "";
    const ssize_t n = pread(capture, text, sizeof text - 1, 0);
    if (n != 0) fprintf(stderr, "the library printed to standard error: %s\n", text);
    CHECK(n == 0);
    close(capture);
}

/* Prints the message of a check that failed while standard error was captured. */
static void show_on_exit(void) {
    if (capture > 0) {
        char text[512];
        ssize_t n = pread(capture, text, sizeof text, 0);
        if (n > 0 && write(saved_stderr, text, (size_t)n) != n) return;
    }
}

static atomic_uint logged;

static void on_log(void *data, uint32_t level, const char *target, uint64_t target_bytes,
                   const char *message, uint64_t message_bytes) {
    (void)data, (void)target, (void)target_bytes, (void)message, (void)message_bytes;
    if (level == KVT_LOG_ERROR) atomic_fetch_add(&logged, 1);
}

static void is_poisoned(kvt_runtime_t *runtime) {
    kvt_runtime_stats_t stats = KVT_RUNTIME_STATS_INIT;
    CHECK_OK(kvt_runtime_stats(runtime, &stats));
    CHECK_EQ(stats.poisoned, 1);
    kvt_queue_t *queue = NULL;
    kvt_budget_t *budget = NULL;
    kvt_buffer_t *buffer = NULL;
    kvt_buffer_opts_t opts = KVT_BUFFER_OPTS_INIT;
    opts.bytes = 1;
    CHECK_IS(kvt_queue_open(runtime, NULL, &queue, NULL), KVT_E_PANIC);
    CHECK_IS(kvt_budget_open(runtime, NULL, &budget, NULL), KVT_E_PANIC);
    CHECK_IS(kvt_buffer_alloc(runtime, &opts, &buffer, NULL), KVT_E_PANIC);
}

static void worker_panic_ends_all_ops(void) {
    kvt_runtime_t *runtime = open_runtime(1, "faults(worker=at(panic=3))");
    gate_t *gate = make_gate(runtime); /* no panic before both ops are submitted */
    kvt_queue_t *queue = open_queue(runtime, 16);
    kvt_budget_t *budget = open_budget(runtime, 10);
    kvt_account_t *account = open_account(budget);
    CHECK_OK(kvt_account_reserve(account, KVT_TIER_DISK, 10, NULL));
    kvt_op_t *waiting = reserve_later(account, 5, NULL);
    kvt_buffer_t *buffer = open_buffer(runtime, 64, NULL);
    const kvt_buffer_item_t items[5] = {gate_item(gate), sum_item(buffer, 8),
                                        sum_item(buffer, 8), sum_item(buffer, 8),
                                        sum_item(buffer, 8)};
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    opts.queue = queue;
    kvt_op_t *op = submit(runtime, &opts, items, 5);
    kvt_op_t *later = submit(runtime, &opts, items, 5);
    open_gate(gate);
    CHECK_OK(kvt_op_wait(op, KVT_OP_RELEASED, hang_guard()));
    kvt_op_item_t results[5];
    uint64_t count = 0;
    CHECK_OK(kvt_op_items(op, 0, results, 5, sizeof *results, &count));
    CHECK_EQ(results[0].status, KVT_OK);
    CHECK_EQ(results[1].status, KVT_OK);
    for (int i = 2; i < 5; i++) CHECK_EQ(results[i].status, KVT_E_PANIC);
    CHECK_EQ(info_of(op).status, KVT_E_PANIC);
    CHECK_EQ(info_of(op).items_failed, 3);
    CHECK_OK(kvt_op_wait(later, KVT_OP_RELEASED, hang_guard()));
    CHECK_EQ(info_of(later).status, KVT_E_PANIC);
    is_poisoned(runtime);
    kvt_op_t *refused = NULL;
    CHECK_IS(kvt_buffer_submit(runtime, NULL, items, 1, sizeof *items, &refused, NULL),
             KVT_E_PANIC);
    CHECK_IS(kvt_account_reserve_later(account, KVT_TIER_DISK, 1, NULL, &refused, NULL),
             KVT_E_PANIC);

    /* Waiting ops end, too. */
    CHECK_OK(kvt_op_wait(waiting, KVT_OP_RELEASED, hang_guard()));
    CHECK_EQ(finish_op(&waiting), KVT_E_PANIC);

    /* Draining, releasing, freeing and closing work. */
    for (int got = 0; got < 2;) {
        kvt_completion_t entries[4];
        CHECK_OK(kvt_queue_wait(queue, hang_guard(), entries, 4, sizeof *entries, &count));
        for (uint64_t i = 0; i < count; i++, got++) CHECK_EQ(entries[i].status, KVT_E_PANIC);
    }
    CHECK_EQ(finish_op(&op), KVT_E_PANIC);
    CHECK_EQ(finish_op(&later), KVT_E_PANIC);
    unreserve(account, 10);
    free_gate(gate);
    free_buffer(&buffer); /* the library leaks its memory: a worker may still write there */
    close_queue(&queue);
    CHECK_OK(kvt_account_close(&account, NULL));
    CHECK_OK(kvt_budget_close(&budget, NULL));
    close_runtime(&runtime);
}

static void count_up(void *data, const kvt_completion_t *batch, uint64_t count, uint64_t stride) {
    (void)batch, (void)stride;
    atomic_fetch_add((atomic_uint *)data, (unsigned)count);
}

static void notifier_panic_still_delivers(void) {
    kvt_runtime_t *runtime = open_runtime(1, "faults(notifier=at(panic=1))");
    atomic_uint seen = 0;
    kvt_queue_opts_t opts = KVT_QUEUE_OPTS_INIT;
    opts.callback = count_up;
    opts.user_data = &seen;
    kvt_queue_t *queue = NULL;
    CHECK_OK(kvt_queue_open(runtime, &opts, &queue, NULL));
    kvt_buffer_t *buffer = open_buffer(runtime, 64, NULL);
    const kvt_buffer_item_t item = sum_item(buffer, 8);
    kvt_submit_opts_t submit_opts = KVT_SUBMIT_OPTS_INIT;
    submit_opts.queue = queue;
    kvt_op_t *op = submit(runtime, &submit_opts, &item, 1);
    const uint64_t until = hang_guard();
    while (atomic_load(&seen) == 0) { /* the completion is delivered anyway */
        CHECK(now_ns() < until);
        short_pause();
    }
    is_poisoned(runtime);
    finish_op(&op);
    free_buffer(&buffer);
    close_queue(&queue);
    CHECK_EQ(atomic_load(&seen), 1);
    close_runtime(&runtime);
}

/* A panic in a call returns KVT_E_PANIC, and the calling thread survives. */
static void caller_panic_is_a_status(void) {
    const char *const faults[] = {"faults(map=at(panic=1))", "faults(pin=at(panic=1))"};
    for (int i = 0; i < 2; i++) {
        kvt_runtime_t *runtime = open_runtime(1, faults[i]);
        kvt_buffer_opts_t opts = KVT_BUFFER_OPTS_INIT;
        opts.bytes = 1;
        opts.flags = KVT_BUFFER_PIN;
        kvt_buffer_t *buffer = NULL;
        kvt_error_t *err = NULL;
        CHECK_IS(kvt_buffer_alloc(runtime, &opts, &buffer, &err), KVT_E_PANIC);
        CHECK(buffer == NULL && strstr(kvt_error_message(err), "injected") != NULL);
        CHECK_OK(kvt_error_free(&err));
        is_poisoned(runtime);
        close_runtime(&runtime);
    }
    kvt_runtime_opts_t opts = KVT_RUNTIME_OPTS_INIT;
    opts.faults = "faults(thread=at(panic=2))";
    opts.faults_bytes = strlen(opts.faults);
    kvt_runtime_t *runtime = NULL;
    CHECK_IS(kvt_runtime_open(&opts, &runtime, NULL), KVT_E_PANIC);
    CHECK(runtime == NULL);
}

static void system_failures_are_statuses(void) {
    kvt_runtime_t *runtime = open_runtime(1, "faults(map=at(fail=1),pin=at(fail=1))");
    kvt_budget_opts_t budget_opts = KVT_BUDGET_OPTS_INIT;
    budget_opts.host_bytes = 1 << 20;
    kvt_budget_t *budget = NULL;
    CHECK_OK(kvt_budget_open(runtime, &budget_opts, &budget, NULL));
    kvt_account_t *account = open_account(budget);
    kvt_buffer_opts_t opts = KVT_BUFFER_OPTS_INIT;
    opts.bytes = 1;
    opts.account = account;
    kvt_buffer_t *buffer = NULL;
    kvt_error_t *err = NULL;
    CHECK_IS(kvt_buffer_alloc(runtime, &opts, &buffer, &err), KVT_E_IO);
    CHECK(strstr(kvt_error_message(err), "injected") != NULL);
    opts.flags = KVT_BUFFER_PIN;
    CHECK_IS(kvt_buffer_alloc(runtime, &opts, &buffer, &err), KVT_E_PIN_QUOTA);
    CHECK_OK(kvt_error_free(&err));
    uint64_t used = 1;
    CHECK_OK(kvt_account_held(account, KVT_TIER_HOST, NULL, &used));
    CHECK_EQ(used, 0);
    CHECK_OK(kvt_account_held(account, KVT_TIER_PINNED, NULL, &used));
    CHECK_EQ(used, 0);
    opts.flags = 0;
    CHECK_OK(kvt_buffer_alloc(runtime, &opts, &buffer, NULL)); /* only the first call fails */
    free_buffer(&buffer);
    CHECK_OK(kvt_account_close(&account, NULL));
    CHECK_OK(kvt_budget_close(&budget, NULL));
    close_runtime(&runtime);

    runtime = open_runtime(1, "faults(worker=at(fail=2),notifier=at(fail=1))");
    buffer = open_buffer(runtime, 8, NULL);
    const kvt_buffer_item_t items[3] = {sum_item(buffer, 8), sum_item(buffer, 8),
                                        sum_item(buffer, 8)};
    kvt_op_t *op = submit(runtime, NULL, items, 3);
    CHECK_OK(kvt_op_wait(op, KVT_OP_RELEASED, hang_guard()));
    CHECK_EQ(info_of(op).items_failed, 1);
    CHECK_OK(kvt_op_error(op, &err));
    CHECK(strstr(kvt_error_message(err), "injected") != NULL);
    CHECK_OK(kvt_error_free(&err));
    CHECK_EQ(finish_op(&op), KVT_E_IO);
    kvt_runtime_stats_t stats = KVT_RUNTIME_STATS_INIT;
    CHECK_OK(kvt_runtime_stats(runtime, &stats));
    CHECK_EQ(stats.poisoned, 0); /* a system failure does not poison */
    free_buffer(&buffer);
    close_runtime(&runtime);
}

static void injected_stalls_delay_items(void) {
    kvt_runtime_t *runtime = open_runtime(1, "faults(worker=at(stall=300ms))");
    kvt_buffer_t *buffer = open_buffer(runtime, 8, NULL);
    const kvt_buffer_item_t items[3] = {sum_item(buffer, 8), sum_item(buffer, 8),
                                        sum_item(buffer, 8)};
    const uint64_t before = now_ns();
    kvt_op_t *op = submit(runtime, NULL, items, 3);
    CHECK_OK(finish_op(&op));
    CHECK(now_ns() - before >= 60 * MS_NS);
    free_buffer(&buffer);
    close_runtime(&runtime);
}

int main(void) {
    check_begin();
    begin_capture();
    atexit(show_on_exit);
    worker_panic_ends_all_ops(); /* first without a log sink */
    CHECK_OK(kvt_log_set(KVT_LOG_TRACE, on_log, NULL, NULL, NULL));
    notifier_panic_still_delivers();
    CHECK(atomic_load(&logged) > 0);
    CHECK_OK(kvt_log_set(KVT_LOG_OFF, NULL, NULL, NULL, NULL));
    caller_panic_is_a_status();
    system_failures_are_statuses();
    injected_stalls_delay_items();
    end_capture();
    capture = 0;
    return check_end("panic");
}
