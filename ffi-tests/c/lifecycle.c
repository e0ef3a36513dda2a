/* Tests of opening and closing runtimes: options, the thread hook, reports, deadlines, stale
 * handles, and closing while other threads work. */

#include "gate.h"

#include <stdatomic.h>

static void invalid_options_are_refused(void) {
    kvt_error_t *err = NULL;
    kvt_runtime_t *const untouched = (kvt_runtime_t *)(uintptr_t)0x55;
    kvt_runtime_t *runtime = untouched;
    kvt_runtime_opts_t opts = KVT_RUNTIME_OPTS_INIT;
    opts.workers = 257;
    CHECK_IS(kvt_runtime_open(&opts, &runtime, &err), KVT_E_LIMIT);
    opts.workers = 1;
    opts.max_ops = 524289;
    CHECK_IS(kvt_runtime_open(&opts, &runtime, &err), KVT_E_LIMIT);
    opts.max_ops = 0;
    opts.flags = 1;
    CHECK_IS(kvt_runtime_open(&opts, &runtime, &err), KVT_E_INVALID);
    opts.flags = 0;
    opts.name = "elevenbytes";
    opts.name_bytes = 11;
    CHECK_IS(kvt_runtime_open(&opts, &runtime, &err), KVT_E_INVALID);
    opts.name = "a\0b";
    opts.name_bytes = 3;
    CHECK_IS(kvt_runtime_open(&opts, &runtime, &err), KVT_E_INVALID);
    opts.name = NULL;
    CHECK_IS(kvt_runtime_open(&opts, &runtime, &err), KVT_E_INVALID);
    opts.name_bytes = 0;
    opts.faults = "faults(wroker=at(panic=1))";
    opts.faults_bytes = strlen(opts.faults);
    CHECK_IS(kvt_runtime_open(&opts, &runtime, &err), KVT_E_SPEC);
    kvt_error_info_t info = KVT_ERROR_INFO_INIT;
    CHECK_OK(kvt_error_info(err, &info));
    CHECK_EQ(info.offset, 7);
    CHECK_EQ(info.status, KVT_E_SPEC);
    CHECK_EQ(info.message_bytes, strlen(info.message));
    CHECK(strstr(info.message, "worker") != NULL);
    CHECK_OK(kvt_error_free(&err));
    CHECK(runtime == untouched);
    CHECK_IS(kvt_runtime_open(NULL, NULL, &err), KVT_E_INVALID);
    CHECK_OK(kvt_error_free(&err));
    CHECK_OK(kvt_error_free(&err)); /* a null handle */
    CHECK_OK(kvt_error_free(NULL));

    opts.faults = NULL;
    opts.faults_bytes = 0;
    opts.workers = 3;
    opts.name = "tenbytes..";
    opts.name_bytes = 10;
    CHECK_OK(kvt_runtime_open(&opts, &runtime, &err));
    CHECK(err == NULL);
    kvt_runtime_stats_t stats = KVT_RUNTIME_STATS_INIT;
    CHECK_OK(kvt_runtime_stats(runtime, &stats));
    CHECK_EQ(stats.workers, 3);
    CHECK_EQ(stats.poisoned, 0);
    uint64_t clock = 0;
    const uint64_t before = now_ns();
    CHECK_OK(kvt_runtime_now(runtime, &clock));
    CHECK(clock >= before && clock <= now_ns());
    close_runtime(&runtime);
    CHECK_OK(kvt_runtime_close(&runtime, 0, NULL, NULL)); /* a null handle */
    CHECK_OK(kvt_runtime_close(NULL, 0, NULL, NULL));
}

struct hook {
    atomic_uint workers, notifiers, stores, indices, destroyed;
};

static void on_thread(void *data, uint32_t role, uint32_t index) {
    struct hook *hook = data;
    CHECK(atomic_load(&hook->destroyed) == 0);
    if (role == KVT_THREAD_WORKER) {
        atomic_fetch_or(&hook->indices, 1u << index);
        atomic_fetch_add(&hook->workers, 1);
    } else if (role == KVT_THREAD_STORE) {
        atomic_fetch_or(&hook->stores, 1u << index);
    } else {
        CHECK_EQ(role, KVT_THREAD_NOTIFIER);
        atomic_fetch_add(&hook->notifiers, 1);
    }
}

static void on_destroy(void *data) { atomic_fetch_add(&((struct hook *)data)->destroyed, 1); }

static void thread_hook_runs_on_every_thread(void) {
    struct hook hook;
    memset(&hook, 0, sizeof hook);
    kvt_runtime_opts_t opts = KVT_RUNTIME_OPTS_INIT;
    opts.workers = 4;
    opts.on_thread = on_thread;
    opts.user_data = &hook;
    opts.destroy = on_destroy;
    kvt_runtime_t *runtime = NULL;
    CHECK_OK(kvt_runtime_open(&opts, &runtime, NULL));
    kvt_store_opts_t store_opts = KVT_STORE_OPTS_INIT;
    store_opts.host_bytes = 1 << 20;
    kvt_store_t *store = NULL;
    CHECK_OK(kvt_store_open(runtime, NULL, &store_opts, &store, NULL));
    CHECK_OK(kvt_store_close(&store, 0, NULL));
    CHECK_EQ(atomic_load(&hook.destroyed), 0);
    close_runtime(&runtime);
    CHECK_EQ(atomic_load(&hook.workers), 4);
    CHECK_EQ(atomic_load(&hook.indices), 15);
    CHECK_EQ(atomic_load(&hook.notifiers), 1);
    CHECK(atomic_load(&hook.stores) & 1); /* indices begin at 0 */
    CHECK_EQ(atomic_load(&hook.destroyed), 1);

    /* A failed open releases everything, at whatever step it failed. */
    for (int at = 1; at <= 5; at++) {
        char faults[64];
        snprintf(faults, sizeof faults, "faults(thread=at(fail=%d))", at);
        opts.faults = faults;
        opts.faults_bytes = strlen(faults);
        runtime = NULL;
        atomic_store(&hook.destroyed, 0);
        kvt_error_t *err = NULL;
        CHECK_IS(kvt_runtime_open(&opts, &runtime, &err), KVT_E_IO);
        CHECK(runtime == NULL && err != NULL);
        CHECK_OK(kvt_error_free(&err));
        CHECK_EQ(atomic_load(&hook.destroyed), 0);
    }
}

static void stale_copies_are_refused(void) {
    kvt_runtime_t *runtime = open_runtime(1, NULL);
    kvt_queue_t *queue = open_queue(runtime, 0), *queue_copy = queue;
    kvt_buffer_t *buffer = open_buffer(runtime, 1, NULL), *buffer_copy = buffer;
    kvt_budget_t *budget = open_budget(runtime, 1), *budget_copy = budget;
    kvt_account_t *account = open_account(budget), *account_copy = account;
    const kvt_buffer_item_t item = sum_item(buffer, 1);
    kvt_op_t *op = submit(runtime, NULL, &item, 1), *op_copy = op;
    kvt_runtime_t *runtime_copy = runtime;
    CHECK_OK(finish_op(&op));
    CHECK_IS(kvt_op_free(&op_copy), KVT_E_HANDLE);
    close_queue(&queue);
    CHECK_IS(kvt_queue_close(&queue_copy, 0, NULL), KVT_E_HANDLE);
    free_buffer(&buffer);
    CHECK_IS(kvt_buffer_free(&buffer_copy), KVT_E_HANDLE);
    CHECK_OK(kvt_account_close(&account, NULL));
    CHECK_IS(kvt_account_close(&account_copy, NULL), KVT_E_HANDLE);
    CHECK_OK(kvt_budget_close(&budget, NULL));
    CHECK_IS(kvt_budget_close(&budget_copy, NULL), KVT_E_HANDLE);
    close_runtime(&runtime);
    CHECK_IS(kvt_runtime_close(&runtime_copy, 0, NULL, NULL), KVT_E_HANDLE);
    CHECK(runtime_copy != NULL && op_copy != NULL); /* a failed call does not clear the handle */
}

static void close_reports_what_is_left_open(void) {
    kvt_runtime_t *runtime = open_runtime(2, NULL);
    kvt_runtime_t *other = open_runtime(1, NULL); /* its objects are not counted */
    kvt_buffer_t *elsewhere = open_buffer(other, 1, NULL);
    kvt_queue_t *queue = open_queue(runtime, 0);
    uint8_t *bytes = NULL;
    kvt_buffer_t *buffers[2] = {open_buffer(runtime, 4096, &bytes), open_buffer(runtime, 1, NULL)};
    kvt_budget_t *budget = open_budget(runtime, 10);
    kvt_account_t *account = open_account(budget);
    CHECK_OK(kvt_account_reserve(account, KVT_TIER_DISK, 10, NULL));
    kvt_op_t *waiting = reserve_later(account, 1, NULL);
    const kvt_buffer_item_t item = sum_item(buffers[0], 4096);
    kvt_op_t *done = submit(runtime, NULL, &item, 1);
    CHECK_OK(kvt_op_wait(done, KVT_OP_RELEASED, hang_guard()));
    kvt_close_report_t left = KVT_CLOSE_REPORT_INIT;
    CHECK_OK(kvt_runtime_close(&runtime, hang_guard(), &left, NULL));
    CHECK_EQ(left.queues, 1);
    CHECK_EQ(left.buffers, 2);
    CHECK_EQ(left.budgets, 1);
    CHECK_EQ(left.accounts, 1);
    CHECK_EQ(left.ops, 2);

    /* Remaining objects stay usable as far as possible, and can be freed. */
    CHECK_EQ(info_of(waiting).status, KVT_E_CANCELLED);
    CHECK_EQ(info_of(done).status, KVT_OK);
    CHECK_OK(kvt_op_free(&waiting));
    CHECK_OK(kvt_op_free(&done));
    bytes[4095] = 1;
    free_buffer(&buffers[0]);
    free_buffer(&buffers[1]);
    kvt_completion_t entry;
    uint64_t count = 7;
    CHECK_OK(kvt_queue_poll(queue, &entry, 1, sizeof entry, &count));
    CHECK_EQ(count, 0);
    close_queue(&queue);
    unreserve(account, 10);
    CHECK_OK(kvt_account_close(&account, NULL));
    CHECK_OK(kvt_budget_close(&budget, NULL));
    free_buffer(&elsewhere);
    close_runtime(&other);
}

static void close_waits_for_running_work(void) {
    kvt_runtime_t *runtime = open_runtime(1, NULL);
    gate_t *gate = make_gate(runtime);
    const kvt_buffer_item_t item = gate_item(gate);
    kvt_op_t *running = submit(runtime, NULL, &item, 1);
    kvt_op_t *queued = submit(runtime, NULL, &item, 1);
    wait_entered(gate);
    kvt_error_t *err = NULL;
    kvt_close_report_t left = KVT_CLOSE_REPORT_INIT;
    CHECK_IS(kvt_runtime_close(&runtime, in_ms(5), &left, &err), KVT_E_BUSY);
    CHECK(runtime != NULL);
    CHECK_EQ(left.buffers + left.ops, 0); /* not written */
    CHECK(strlen(kvt_error_message(err)) > 0);
    CHECK_OK(kvt_error_free(&err));

    /* While closing, new work is refused and queries are allowed. */
    kvt_op_t *op = NULL;
    kvt_queue_t *queue = NULL;
    kvt_budget_t *budget = NULL;
    kvt_buffer_t *more = NULL;
    kvt_buffer_opts_t opts = KVT_BUFFER_OPTS_INIT;
    opts.bytes = 1;
    char own[8];
    CHECK_IS(kvt_buffer_submit(runtime, NULL, &item, 1, sizeof item, &op, NULL), KVT_E_CLOSED);
    CHECK_IS(kvt_queue_open(runtime, NULL, &queue, NULL), KVT_E_CLOSED);
    CHECK_IS(kvt_budget_open(runtime, NULL, &budget, NULL), KVT_E_CLOSED);
    CHECK_IS(kvt_buffer_alloc(runtime, &opts, &more, NULL), KVT_E_CLOSED);
    CHECK_IS(kvt_buffer_wrap(runtime, own, 8, NULL, NULL, &more, NULL), KVT_E_CLOSED);
    CHECK(op == NULL && queue == NULL && budget == NULL && more == NULL);
    kvt_runtime_stats_t stats = KVT_RUNTIME_STATS_INIT;
    CHECK_OK(kvt_runtime_stats(runtime, &stats));
    CHECK_EQ(stats.ops_live, 2);
    CHECK_EQ(info_of(queued).status, KVT_E_CANCELLED);

    open_gate(gate);
    CHECK_OK(kvt_runtime_close(&runtime, 0, &left, NULL));
    CHECK_EQ(left.ops, 2);
    CHECK_OK(finish_op(&running)); /* its only item had started, so it was executed */
    CHECK_EQ(finish_op(&queued), KVT_E_CANCELLED);
    free_gate(gate);
}

static void *close_runtime_once(void *data) {
    kvt_runtime_t *copy = data;
    const kvt_status_t status = kvt_runtime_close(&copy, hang_guard(), NULL, NULL);
    return (void *)(uintptr_t)(uint32_t)status;
}

static void one_of_three_closers_succeeds(uint64_t rounds) {
    for (uint64_t i = 0; i < rounds; i++) {
        kvt_runtime_t *runtime = open_runtime(2, NULL);
        pthread_t threads[3];
        for (int t = 0; t < 3; t++) threads[t] = start_thread(close_runtime_once, runtime);
        int closed = 0;
        for (int t = 0; t < 3; t++) {
            void *result = NULL;
            CHECK(pthread_join(threads[t], &result) == 0);
            const kvt_status_t status = (kvt_status_t)(uint32_t)(uintptr_t)result;
            if (status == KVT_OK) closed++;
            else CHECK_IS(status, KVT_E_HANDLE);
        }
        CHECK_EQ(closed, 1);
    }
}

struct race {
    kvt_runtime_t *runtime;
    kvt_account_t *account;
    kvt_buffer_t *buffer;
    kvt_op_t *ops[20000];
    uint64_t made;
    atomic_bool started;
    int reserve;
};

/* Submits until the runtime refuses. */
static void *submitter(void *data) {
    struct race *race = data;
    const kvt_buffer_item_t item = sum_item(race->buffer, 64);
    while (race->made < sizeof race->ops / sizeof *race->ops) {
        kvt_op_t **op = &race->ops[race->made];
        const kvt_status_t status =
            race->reserve
                ? kvt_account_reserve_later(race->account, KVT_TIER_DISK, 1, NULL, op, NULL)
                : kvt_buffer_submit(race->runtime, NULL, &item, 1, sizeof item, op, NULL);
        if (status == KVT_E_AGAIN) { /* 4096 reservations are waiting already */
            short_pause();
            continue;
        }
        if (status != KVT_OK) {
            CHECK(status == KVT_E_CLOSED || status == KVT_E_HANDLE);
            break;
        }
        race->made++;
        atomic_store(&race->started, 1);
    }
    return NULL;
}

/* An accepted op completes, even if the runtime closes meanwhile. */
static void accepted_ops_end_when_closing(uint64_t rounds, int reserve) {
    static struct race race;
    for (uint64_t i = 0; i < rounds; i++) {
        memset(&race, 0, sizeof race);
        race.reserve = reserve;
        race.runtime = open_runtime(2, NULL);
        race.buffer = open_buffer(race.runtime, 64, NULL);
        kvt_budget_t *budget = open_budget(race.runtime, 10);
        race.account = open_account(budget);
        CHECK_OK(kvt_account_reserve(race.account, KVT_TIER_DISK, 10, NULL));
        pthread_t thread = start_thread(submitter, &race);
        while (!atomic_load(&race.started)) short_pause();
        kvt_runtime_t *runtime = race.runtime;
        CHECK_OK(kvt_runtime_close(&runtime, hang_guard(), NULL, NULL));
        join_thread(thread);
        for (uint64_t k = 0; k < race.made; k++) {
            CHECK_OK(kvt_op_wait(race.ops[k], KVT_OP_RELEASED, hang_guard()));
            CHECK_OK(kvt_op_free(&race.ops[k]));
        }
        unreserve(race.account, 10);
        CHECK_OK(kvt_account_close(&race.account, NULL));
        CHECK_OK(kvt_budget_close(&budget, NULL));
        free_buffer(&race.buffer);
    }
}

static void count_completions(void *data, const kvt_completion_t *batch, uint64_t count,
                              uint64_t stride) {
    CHECK_EQ(stride, sizeof *batch);
    atomic_fetch_add((atomic_uint *)data, (unsigned)count);
}

/* The callback receives a completion for every op, even if runtime and queue close concurrently. */
static void callbacks_get_every_op_when_closing(uint64_t rounds) {
    for (uint64_t i = 0; i < rounds; i++) {
        kvt_runtime_t *runtime = open_runtime(2, NULL);
        kvt_buffer_t *buffer = open_buffer(runtime, 64, NULL);
        atomic_uint seen = 0;
        kvt_queue_opts_t queue_opts = KVT_QUEUE_OPTS_INIT;
        queue_opts.callback = count_completions;
        queue_opts.user_data = &seen;
        kvt_queue_t *queue = NULL;
        CHECK_OK(kvt_queue_open(runtime, &queue_opts, &queue, NULL));
        kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
        opts.queue = queue;
        const kvt_buffer_item_t item = sum_item(buffer, 64);
        const unsigned n = 1 + (unsigned)(i % 7);
        for (unsigned k = 0; k < n; k++)
            CHECK_OK(kvt_buffer_submit(runtime, &opts, &item, 1, sizeof item, NULL, NULL));
        CHECK_OK(kvt_runtime_close(&runtime, hang_guard(), NULL, NULL));
        CHECK_OK(kvt_queue_close(&queue, hang_guard(), NULL));
        CHECK_EQ(atomic_load(&seen), n);
        free_buffer(&buffer);
    }
}

int main(int argc, char **argv) {
    check_begin();
    const uint64_t rounds = count_arg(argc, argv, 300);
    invalid_options_are_refused();
    thread_hook_runs_on_every_thread();
    stale_copies_are_refused();
    close_reports_what_is_left_open();
    close_waits_for_running_work();
    one_of_three_closers_succeeds(rounds / 5 + 1);
    accepted_ops_end_when_closing(rounds / 10 + 1, 0);
    accepted_ops_end_when_closing(rounds / 10 + 1, 1);
    callbacks_get_every_op_when_closing(rounds);
    return check_end("lifecycle");
}
