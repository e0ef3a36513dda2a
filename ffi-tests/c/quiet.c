/* The library leaves the process alone: no output, no threads before open or after close, no open
 * descriptors, no signal handlers, no change of the locale, the umask or the signal mask. */

#include "check.h"

#include <dirent.h>
#include <locale.h>
#include <signal.h>
#include <sys/stat.h>

static unsigned entries(const char *path) {
    DIR *dir = opendir(path);
    CHECK(dir != NULL);
    unsigned n = 0;
    while (readdir(dir) != NULL) n++;
    closedir(dir);
    return n - 2;
}

/* Waits for this number of threads: the kernel removes a joined thread from /proc a moment
 * later. */
static void wait_threads(unsigned want) {
    const uint64_t until = hang_guard();
    while (entries("/proc/self/task") != want) {
        CHECK(now_ns() < until);
        short_pause();
    }
}

static void handlers(struct sigaction *out) {
    for (int i = 1; i < 65; i++) {
        memset(&out[i], 0, sizeof out[i]);
        sigaction(i, NULL, &out[i]);
    }
}

static void use_everything(void) {
    kvt_error_t *err = NULL;
    kvt_runtime_t *runtime = open_runtime(3, NULL);
    CHECK_EQ(entries("/proc/self/task"), 1 + 3 + 1);
    kvt_queue_t *queue = open_queue(runtime, 8);
    int32_t fd = -1;
    CHECK_OK(kvt_queue_fd(queue, &fd));
    kvt_budget_t *budget = NULL;
    CHECK_OK(kvt_budget_open(runtime, NULL, &budget, &err));
    kvt_budget_report_t report = KVT_BUDGET_REPORT_INIT;
    CHECK_OK(kvt_budget_report(budget, &report));
    kvt_account_t *account = open_account(budget);
    CHECK_IS(kvt_account_reserve(account, KVT_TIER_REMOTE, 1, &err), KVT_E_BUDGET);
    CHECK_OK(kvt_error_free(&err));
    kvt_buffer_t *buffer = open_buffer(runtime, 1 << 20, NULL);
    kvt_buffer_item_t item = sum_item(buffer, 1 << 20);
    item.kind = KVT_ITEM_VERIFY;
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    opts.queue = queue;
    kvt_op_t *op = submit(runtime, &opts, &item, 1);
    CHECK_EQ(finish_op(&op), KVT_E_CORRUPT);
    uint64_t features = 0;
    CHECK_OK(kvt_feature_count(&features));
    for (uint64_t i = 0; i < features; i++) {
        kvt_feature_t feature = KVT_FEATURE_INIT;
        CHECK_OK(kvt_feature_at(i, &feature));
    }
    free_buffer(&buffer);
    CHECK_OK(kvt_account_close(&account, NULL));
    CHECK_OK(kvt_budget_close(&budget, NULL));
    close_queue(&queue);
    close_runtime(&runtime);
    /* Objects left open are reported to the caller only, never printed. */
    runtime = open_runtime(1, NULL);
    buffer = open_buffer(runtime, 1, NULL);
    CHECK_OK(kvt_runtime_close(&runtime, 0, NULL, NULL));
    free_buffer(&buffer);
    kvt_runtime_opts_t bad = KVT_RUNTIME_OPTS_INIT;
    bad.faults = "nonsense(";
    bad.faults_bytes = 9;
    CHECK_IS(kvt_runtime_open(&bad, &runtime, NULL), KVT_E_SPEC);
    bad.faults = "faults(thread=at(fail=3))";
    bad.faults_bytes = strlen(bad.faults);
    CHECK_IS(kvt_runtime_open(&bad, &runtime, NULL), KVT_E_IO);
}

int main(void) {
    check_begin();
    char path[] = "/tmp/kvt-quiet-XXXXXX";
    const int capture = mkstemp(path);
    CHECK(capture >= 0);
    unlink(path);
    const int saved[2] = {dup(1), dup(2)};
    static struct sigaction before[65], after[65];
    handlers(before);
    sigset_t mask_before, mask_after;
    sigprocmask(SIG_BLOCK, NULL, &mask_before);
    const unsigned fds = entries("/proc/self/fd");
    const unsigned threads = entries("/proc/self/task");
    CHECK_EQ(threads, 1);
    const char *const locale = setlocale(LC_ALL, NULL);
    char locale_before[256];
    snprintf(locale_before, sizeof locale_before, "%s", locale);
    const mode_t mask = umask(0);
    umask(mask);

    CHECK(dup2(capture, 1) == 1 && dup2(capture, 2) == 2);
    for (int i = 0; i < 3; i++) {
        use_everything();
        wait_threads(1);
    }
    fflush(NULL);
    CHECK(dup2(saved[0], 1) == 1 && dup2(saved[1], 2) == 2);

    struct stat stat;
    CHECK(fstat(capture, &stat) == 0);
    CHECK_EQ(stat.st_size, 0);
    CHECK_EQ(entries("/proc/self/fd"), fds);
    handlers(after);
    for (int i = 1; i < 65; i++) {
        CHECK(before[i].sa_handler == after[i].sa_handler);
        CHECK_EQ(before[i].sa_flags, after[i].sa_flags);
    }
    sigprocmask(SIG_BLOCK, NULL, &mask_after);
    for (int i = 1; i < 65; i++)
        CHECK_EQ(sigismember(&mask_before, i), sigismember(&mask_after, i));
    CHECK(strcmp(locale_before, setlocale(LC_ALL, NULL)) == 0);
    CHECK_EQ(umask(mask), mask);
    return check_end("quiet");
}
