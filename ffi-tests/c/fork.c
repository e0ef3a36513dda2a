/* In a forked child every function that takes a handle returns KVT_E_FORKED at once. The parent is
 * not affected. */

#include "check.h"

#include <stdatomic.h>
#include <sys/wait.h>

static kvt_runtime_t *runtime;
static kvt_queue_t *queue;
static kvt_budget_t *budget;
static kvt_account_t *account;
static kvt_buffer_t *buffer;
static kvt_op_t *op;
static kvt_error_t *error;
static kvt_buffer_item_t item;

#define FORKED(call) CHECK_IS(call, KVT_E_FORKED)

static void every_call_is_refused_in_a_child(void) {
    kvt_runtime_t *r = runtime;
    kvt_queue_t *q = queue;
    kvt_budget_t *b = budget;
    kvt_account_t *a = account;
    kvt_buffer_t *f = buffer;
    kvt_op_t *o = op;
    kvt_error_t *err = NULL;
    kvt_completion_t entry;
    kvt_op_item_t result;
    uint64_t n = 0;
    int32_t fd = 0;
    void *address = NULL;
    kvt_buffer_opts_t buffer_opts = KVT_BUFFER_OPTS_INIT;
    buffer_opts.bytes = 1;
    kvt_error_info_t error_info = KVT_ERROR_INFO_INIT;
    kvt_op_info_t op_info = KVT_OP_INFO_INIT;
    kvt_queue_stats_t queue_stats = KVT_QUEUE_STATS_INIT;
    kvt_runtime_stats_t runtime_stats = KVT_RUNTIME_STATS_INIT;
    kvt_budget_report_t report = KVT_BUDGET_REPORT_INIT;
    kvt_tier_report_t tier = KVT_TIER_REPORT_INIT;
    kvt_buffer_info_t buffer_info = KVT_BUFFER_INFO_INIT;

    FORKED(kvt_runtime_open(NULL, &r, &err));
    CHECK(r == runtime);
    FORKED(kvt_runtime_close(&r, 0, NULL, &err));
    FORKED(kvt_runtime_now(r, &n));
    FORKED(kvt_runtime_stats(r, &runtime_stats));
    FORKED(kvt_queue_open(r, NULL, &q, &err));
    FORKED(kvt_queue_close(&q, 0, &err));
    FORKED(kvt_queue_poll(q, &entry, 1, sizeof entry, &n));
    FORKED(kvt_queue_wait(q, 0, &entry, 1, sizeof entry, &n));
    FORKED(kvt_queue_fd(q, &fd));
    FORKED(kvt_queue_stats(q, &queue_stats));
    FORKED(kvt_op_info(o, &op_info));
    FORKED(kvt_op_wait(o, KVT_OP_RELEASED, 0));
    FORKED(kvt_op_cancel(o));
    FORKED(kvt_op_items(o, 0, &result, 1, sizeof result, &n));
    FORKED(kvt_op_error(o, &err));
    FORKED(kvt_op_free(&o));
    FORKED(kvt_op_free_many(&o, 1));
    FORKED(kvt_budget_open(r, NULL, &b, &err));
    FORKED(kvt_budget_close(&b, &err));
    FORKED(kvt_budget_resize(b, KVT_TIER_DISK, 1, &err));
    FORKED(kvt_budget_report(b, &report));
    FORKED(kvt_budget_tier(b, KVT_TIER_DISK, &tier));
    FORKED(kvt_account_open(b, NULL, &a, &err));
    FORKED(kvt_account_reserve(a, KVT_TIER_DISK, 1, &err));
    FORKED(kvt_account_reserve_later(a, KVT_TIER_DISK, 1, NULL, &o, &err));
    FORKED(kvt_account_commit(a, KVT_TIER_DISK, 1, 1, &err));
    FORKED(kvt_account_release(a, KVT_TIER_DISK, 1, &err));
    FORKED(kvt_account_held(a, KVT_TIER_DISK, &n, &n));
    FORKED(kvt_account_close(&a, &err));
    FORKED(kvt_buffer_alloc(r, &buffer_opts, &f, &err));
    FORKED(kvt_buffer_wrap(r, &n, 8, NULL, NULL, &f, &err));
    FORKED(kvt_buffer_free(&f));
    FORKED(kvt_buffer_address(f, &address, &n));
    FORKED(kvt_buffer_info(f, &buffer_info));
    FORKED(kvt_buffer_submit(r, NULL, &item, 1, sizeof item, &o, &err));
    FORKED(kvt_error_info(error, &error_info));
    CHECK(r == runtime && q == queue && b == budget && a == account && f == buffer && o == op);
    CHECK_EQ(n, 0);

    /* Functions without a handle work. */
    CHECK(strcmp(kvt_status_name(KVT_E_FORKED), "KVT_E_FORKED") == 0);
    CHECK(strlen(kvt_version_str()) > 0);
    CHECK_OK(kvt_version(&n));
    CHECK_OK(kvt_checksum("abc", 3, &n));
    CHECK_OK(kvt_op_free(NULL));
    kvt_op_t *none = NULL;
    CHECK_OK(kvt_op_free(&none));
    CHECK(strcmp(kvt_error_message(NULL), "") == 0);
}

/* Runs a function in a forked child. The child's own alarm kills a hang, so the test fails. */
static void in_child(void (*body)(void)) {
    fflush(stdout);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        alarm(HANG_SECONDS);
        body();
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    if (WIFSIGNALED(status)) fprintf(stderr, "signal %d ended the child\n", WTERMSIG(status));
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void submit_and_wait(void) {
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    opts.queue = queue;
    CHECK_OK(kvt_buffer_submit(runtime, &opts, &item, 1, sizeof item, NULL, NULL));
    kvt_completion_t entry;
    uint64_t count = 0;
    CHECK_OK(kvt_queue_wait(queue, hang_guard(), &entry, 1, sizeof entry, &count));
    CHECK_OK(entry.status);
}

static atomic_bool stop;

/* Takes the library's locks all the time, so that a fork may happen while one is held. */
static void *keep_locks_busy(void *data) {
    (void)data;
    while (!atomic_load(&stop)) {
        kvt_error_t *err = NULL;
        CHECK_IS(kvt_abi_check(0, &err), KVT_E_ABI);
        CHECK_OK(kvt_error_free(&err));
        CHECK_OK(kvt_account_reserve(account, KVT_TIER_DISK, 1, NULL));
        unreserve(account, 1);
    }
    return NULL;
}

static void errors_in_child(void) {
    kvt_error_t *err = NULL;
    kvt_runtime_t *r = NULL;
    FORKED(kvt_runtime_open(NULL, &r, &err));
    FORKED(kvt_account_reserve(account, KVT_TIER_DISK, 1, &err));
}

int main(int argc, char **argv) {
    check_begin();
    const uint64_t rounds = count_arg(argc, argv, 300);
    /* Before the first open a fork is harmless. */
    CHECK_IS(kvt_abi_check(0, &error), KVT_E_ABI);
    runtime = open_runtime(2, NULL);
    queue = open_queue(runtime, 16);
    budget = open_budget(runtime, 100);
    account = open_account(budget);
    uint8_t *bytes = NULL;
    buffer = open_buffer(runtime, 64, &bytes);
    item = sum_item(buffer, 8);
    op = submit(runtime, NULL, &item, 1);
    CHECK_OK(kvt_op_wait(op, KVT_OP_RELEASED, 0));
    for (int i = 0; i < 3; i++) {
        in_child(every_call_is_refused_in_a_child);
        submit_and_wait(); /* the parent still works */
    }
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) threads[i] = start_thread(keep_locks_busy, NULL);
    for (uint64_t i = 0; i < rounds; i++) in_child(errors_in_child);
    atomic_store(&stop, 1);
    join_thread(threads[0]);
    join_thread(threads[1]);
    submit_and_wait();
    CHECK_OK(kvt_error_free(&error));
    CHECK_OK(kvt_op_free(&op));
    free_buffer(&buffer);
    CHECK_OK(kvt_account_close(&account, NULL));
    CHECK_OK(kvt_budget_close(&budget, NULL));
    close_queue(&queue);
    close_runtime(&runtime);
    return check_end("fork");
}
