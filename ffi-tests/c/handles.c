/* Every function that takes a handle gets null, garbage, foreign pointers, stale handles, and
 * handles of every other type. Each call must return KVT_E_HANDLE and write no output. */

#include "check.h"

enum handle_type { ERROR, RUNTIME, OP, QUEUE, BUDGET, ACCOUNT, BUFFER, HANDLE_TYPES };

/* Valid objects for the other arguments. */
static kvt_runtime_t *runtime;
static kvt_account_t *account;
static kvt_buffer_t *buffer;

#define UNTOUCHED UINT64_C(0x5a5a5a5a5a5a5a5a)

/* A failed call must not write its outputs. */
static uint64_t out_word = UNTOUCHED;
static void *out_handle = &out_word;

static void outputs_untouched(void) {
    CHECK_EQ(out_word, UNTOUCHED);
    CHECK(out_handle == &out_word);
}

#define SIZED(type, init)                                                                    \
    type out = init;                                                                         \
    type before = out

#define UNCHANGED(status)                                                                    \
    do {                                                                                     \
        if ((status) != KVT_OK) CHECK(memcmp(&out, &before, sizeof out) == 0);               \
        return status;                                                                       \
    } while (0)

static kvt_status_t error_info(void *h) {
    SIZED(kvt_error_info_t, KVT_ERROR_INFO_INIT);
    const kvt_status_t status = kvt_error_info(h, &out);
    UNCHANGED(status);
}

/* Free and close take the address of the handle; on failure they leave the handle unchanged. */
#define TAKES_VARIABLE(name, type, call)                                                     \
    static kvt_status_t name(void *h) {                                                      \
        type *handle = h;                                                                    \
        const kvt_status_t status = call;                                                    \
        CHECK(status == KVT_OK ? handle == NULL : handle == h);                              \
        return status;                                                                       \
    }

TAKES_VARIABLE(error_free, kvt_error_t, kvt_error_free(&handle))
TAKES_VARIABLE(op_free, kvt_op_t, kvt_op_free(&handle))
TAKES_VARIABLE(op_free_many, kvt_op_t, kvt_op_free_many(&handle, 1))
TAKES_VARIABLE(queue_close, kvt_queue_t, kvt_queue_close(&handle, 0, NULL))
TAKES_VARIABLE(budget_close, kvt_budget_t, kvt_budget_close(&handle, NULL))
TAKES_VARIABLE(account_close, kvt_account_t, kvt_account_close(&handle, NULL))
TAKES_VARIABLE(buffer_free, kvt_buffer_t, kvt_buffer_free(&handle))

static kvt_status_t runtime_close(void *h) {
    SIZED(kvt_close_report_t, KVT_CLOSE_REPORT_INIT);
    kvt_runtime_t *handle = h;
    const kvt_status_t status = kvt_runtime_close(&handle, 0, &out, NULL);
    CHECK(status == KVT_OK ? handle == NULL : handle == h);
    UNCHANGED(status);
}

static kvt_status_t op_info(void *h) {
    SIZED(kvt_op_info_t, KVT_OP_INFO_INIT);
    const kvt_status_t status = kvt_op_info(h, &out);
    UNCHANGED(status);
}
static kvt_status_t op_wait(void *h) { return kvt_op_wait(h, KVT_OP_RELEASED, 0); }
static kvt_status_t op_cancel(void *h) { return kvt_op_cancel(h); }
static kvt_status_t op_items(void *h) {
    kvt_op_item_t item;
    return kvt_op_items(h, 0, &item, 1, sizeof item, &out_word);
}
static kvt_status_t op_error(void *h) { return kvt_op_error(h, (kvt_error_t **)&out_handle); }

static kvt_status_t queue_open(void *h) {
    return kvt_queue_open(h, NULL, (kvt_queue_t **)&out_handle, NULL);
}
static kvt_status_t queue_poll(void *h) {
    kvt_completion_t entry;
    return kvt_queue_poll(h, &entry, 1, sizeof entry, &out_word);
}
static kvt_status_t queue_wait(void *h) {
    kvt_completion_t entry;
    return kvt_queue_wait(h, 0, &entry, 1, sizeof entry, &out_word);
}
static kvt_status_t queue_fd(void *h) {
    int32_t fd = -77;
    const kvt_status_t status = kvt_queue_fd(h, &fd);
    CHECK(status == KVT_OK || fd == -77);
    return status;
}
static kvt_status_t queue_stats(void *h) {
    SIZED(kvt_queue_stats_t, KVT_QUEUE_STATS_INIT);
    const kvt_status_t status = kvt_queue_stats(h, &out);
    UNCHANGED(status);
}
static kvt_status_t queue_in_submit(void *h) {
    if (h == NULL) return KVT_E_HANDLE; /* null means no queue there, which is valid */
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    opts.queue = h;
    const kvt_buffer_item_t item = sum_item(buffer, 1);
    return kvt_buffer_submit(runtime, &opts, &item, 1, sizeof item, (kvt_op_t **)&out_handle, NULL);
}
static kvt_status_t queue_in_reserve(void *h) {
    if (h == NULL) return KVT_E_HANDLE;
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    opts.queue = h;
    return kvt_account_reserve_later(account, KVT_TIER_DISK, 1, &opts, (kvt_op_t **)&out_handle,
                                     NULL);
}

static kvt_status_t runtime_now(void *h) { return kvt_runtime_now(h, &out_word); }
static kvt_status_t runtime_stats(void *h) {
    SIZED(kvt_runtime_stats_t, KVT_RUNTIME_STATS_INIT);
    const kvt_status_t status = kvt_runtime_stats(h, &out);
    UNCHANGED(status);
}

static kvt_status_t budget_open(void *h) {
    return kvt_budget_open(h, NULL, (kvt_budget_t **)&out_handle, NULL);
}
static kvt_status_t budget_resize(void *h) { return kvt_budget_resize(h, KVT_TIER_DISK, 0, NULL); }
static kvt_status_t budget_report(void *h) {
    SIZED(kvt_budget_report_t, KVT_BUDGET_REPORT_INIT);
    const kvt_status_t status = kvt_budget_report(h, &out);
    UNCHANGED(status);
}
static kvt_status_t budget_tier(void *h) {
    SIZED(kvt_tier_report_t, KVT_TIER_REPORT_INIT);
    const kvt_status_t status = kvt_budget_tier(h, KVT_TIER_HOST, &out);
    UNCHANGED(status);
}

static kvt_status_t account_open(void *h) {
    return kvt_account_open(h, NULL, (kvt_account_t **)&out_handle, NULL);
}
static kvt_status_t account_reserve(void *h) {
    return kvt_account_reserve(h, KVT_TIER_DISK, 1, NULL);
}
static kvt_status_t account_later(void *h) {
    return kvt_account_reserve_later(h, KVT_TIER_DISK, 1, NULL, (kvt_op_t **)&out_handle, NULL);
}
static kvt_status_t account_commit(void *h) {
    return kvt_account_commit(h, KVT_TIER_DISK, 0, 0, NULL);
}
static kvt_status_t account_release(void *h) {
    return kvt_account_release(h, KVT_TIER_DISK, 0, NULL);
}
static kvt_status_t account_held(void *h) {
    return kvt_account_held(h, KVT_TIER_DISK, &out_word, &out_word);
}
static kvt_status_t account_in_alloc(void *h) {
    if (h == NULL) return KVT_E_HANDLE; /* null means no account there, which is valid */
    kvt_buffer_opts_t opts = KVT_BUFFER_OPTS_INIT;
    opts.bytes = 1;
    opts.account = h;
    return kvt_buffer_alloc(runtime, &opts, (kvt_buffer_t **)&out_handle, NULL);
}

static kvt_status_t buffer_alloc(void *h) {
    kvt_buffer_opts_t opts = KVT_BUFFER_OPTS_INIT;
    opts.bytes = 1;
    return kvt_buffer_alloc(h, &opts, (kvt_buffer_t **)&out_handle, NULL);
}
static kvt_status_t buffer_wrap(void *h) {
    static char own[16];
    return kvt_buffer_wrap(h, own, sizeof own, NULL, NULL, (kvt_buffer_t **)&out_handle, NULL);
}
static kvt_status_t buffer_address(void *h) {
    return kvt_buffer_address(h, &out_handle, &out_word);
}
static kvt_status_t buffer_info(void *h) {
    SIZED(kvt_buffer_info_t, KVT_BUFFER_INFO_INIT);
    const kvt_status_t status = kvt_buffer_info(h, &out);
    UNCHANGED(status);
}
static kvt_status_t buffer_submit(void *h) {
    const kvt_buffer_item_t item = sum_item(buffer, 1);
    return kvt_buffer_submit(h, NULL, &item, 1, sizeof item, (kvt_op_t **)&out_handle, NULL);
}
static kvt_status_t buffer_as_source(void *h) {
    const kvt_buffer_item_t items[2] = {sum_item(buffer, 1), copy_item(buffer, h, 1)};
    return kvt_buffer_submit(runtime, NULL, items, 2, sizeof *items, (kvt_op_t **)&out_handle,
                             NULL);
}
static kvt_status_t buffer_as_target(void *h) {
    const kvt_buffer_item_t items[2] = {sum_item(buffer, 1), copy_item(h, buffer, 1)};
    return kvt_buffer_submit(runtime, NULL, items, 2, sizeof *items, (kvt_op_t **)&out_handle,
                             NULL);
}

static const struct target {
    const char *name;
    enum handle_type handle_type;
    int frees; /* takes the address of the handle: a null handle is valid */
    kvt_status_t (*call)(void *handle);
} targets[] = {
    {"kvt_error_info", ERROR, 0, error_info},
    {"kvt_error_free", ERROR, 1, error_free},
    {"kvt_op_info", OP, 0, op_info},
    {"kvt_op_wait", OP, 0, op_wait},
    {"kvt_op_cancel", OP, 0, op_cancel},
    {"kvt_op_items", OP, 0, op_items},
    {"kvt_op_error", OP, 0, op_error},
    {"kvt_op_free", OP, 1, op_free},
    {"kvt_op_free_many", OP, 1, op_free_many},
    {"kvt_queue_open", RUNTIME, 0, queue_open},
    {"kvt_queue_close", QUEUE, 1, queue_close},
    {"kvt_queue_poll", QUEUE, 0, queue_poll},
    {"kvt_queue_wait", QUEUE, 0, queue_wait},
    {"kvt_queue_fd", QUEUE, 0, queue_fd},
    {"kvt_queue_stats", QUEUE, 0, queue_stats},
    {"kvt_buffer_submit(queue)", QUEUE, 0, queue_in_submit},
    {"kvt_account_reserve_later(queue)", QUEUE, 0, queue_in_reserve},
    {"kvt_runtime_close", RUNTIME, 1, runtime_close},
    {"kvt_runtime_now", RUNTIME, 0, runtime_now},
    {"kvt_runtime_stats", RUNTIME, 0, runtime_stats},
    {"kvt_budget_open", RUNTIME, 0, budget_open},
    {"kvt_budget_close", BUDGET, 1, budget_close},
    {"kvt_budget_resize", BUDGET, 0, budget_resize},
    {"kvt_budget_report", BUDGET, 0, budget_report},
    {"kvt_budget_tier", BUDGET, 0, budget_tier},
    {"kvt_account_open", BUDGET, 0, account_open},
    {"kvt_account_reserve", ACCOUNT, 0, account_reserve},
    {"kvt_account_reserve_later", ACCOUNT, 0, account_later},
    {"kvt_account_commit", ACCOUNT, 0, account_commit},
    {"kvt_account_release", ACCOUNT, 0, account_release},
    {"kvt_account_held", ACCOUNT, 0, account_held},
    {"kvt_account_close", ACCOUNT, 1, account_close},
    {"kvt_buffer_alloc(account)", ACCOUNT, 0, account_in_alloc},
    {"kvt_buffer_alloc", RUNTIME, 0, buffer_alloc},
    {"kvt_buffer_wrap", RUNTIME, 0, buffer_wrap},
    {"kvt_buffer_free", BUFFER, 1, buffer_free},
    {"kvt_buffer_address", BUFFER, 0, buffer_address},
    {"kvt_buffer_info", BUFFER, 0, buffer_info},
    {"kvt_buffer_submit", RUNTIME, 0, buffer_submit},
    {"kvt_buffer_submit(source)", BUFFER, 0, buffer_as_source},
    {"kvt_buffer_submit(target)", BUFFER, 0, buffer_as_target},
};

static void check_refused(const struct target *target, void *handle, const char *what) {
    const kvt_status_t want = handle == NULL && target->frees ? KVT_OK : KVT_E_HANDLE;
    const kvt_status_t got = target->call(handle);
    if (got != want) {
        fprintf(stderr, "%s with %s (%p) returned %s, expected %s\n", target->name, what, handle,
                kvt_status_name(got), kvt_status_name(want));
        exit(1);
    }
    outputs_untouched();
    CHECK(strcmp(kvt_error_message(NULL), "") == 0);
}

static void garbage_is_refused(const struct target *target, const void *live) {
    static const uint64_t fixed[] = {
        1, 7, 8, 0x1000, UINT64_MAX, UINT64_MAX - 1, UINT64_C(1) << 63, UINT64_C(1) << 55,
        UINT64_C(0x8000000000000001), UINT64_C(0xff00000000000000), UINT64_C(0xdeadbeefdeadbeef),
        UINT64_C(0x7fffffffffffffff)};
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
        check_refused(target, (void *)(uintptr_t)fixed[i], "garbage");
    uint64_t state = 0x1234567;
    for (int i = 0; i < 200; i++) {
        /* Half of them have the type bits of a valid handle. */
        uint64_t bits = next_random(&state);
        if (i % 2 == 1)
            bits = (bits & UINT64_C(0x00ffffffffffffff)) |
                   ((uint64_t)(uintptr_t)live & UINT64_C(0xff00000000000000));
        if (bits != (uint64_t)(uintptr_t)live)
            check_refused(target, (void *)(uintptr_t)bits, "noise");
    }
    /* A live handle with one flipped bit must never reach this object. The low bits select the slot
     * and could name another live object, so they are not flipped. */
    for (int bit = 20; bit < 64; bit++) {
        const uint64_t bits = (uint64_t)(uintptr_t)live ^ (UINT64_C(1) << bit);
        check_refused(target, (void *)(uintptr_t)bits, "a flipped bit");
    }
}

static void foreign_pointers_are_refused(const struct target *target) {
    static uint64_t in_data[8];
    uint64_t on_stack[8] = {0};
    uint64_t *on_heap = calloc(8, sizeof *on_heap);
    check_refused(target, in_data, "a pointer to data");
    check_refused(target, on_stack, "a pointer to the stack");
    check_refused(target, on_heap, "a pointer to the heap");
    check_refused(target, (void *)(uintptr_t)&foreign_pointers_are_refused, "a pointer to code");
    free(on_heap);
}

int main(void) {
    check_begin();
    runtime = open_runtime(1, NULL);
    buffer = open_buffer(runtime, 64, NULL);
    kvt_budget_t *budget = open_budget(runtime, 100);
    account = open_account(budget);
    kvt_queue_t *queue = open_queue(runtime, 0);
    const kvt_buffer_item_t item = sum_item(buffer, 1);
    kvt_op_t *op = submit(runtime, NULL, &item, 1);
    CHECK_OK(kvt_op_wait(op, KVT_OP_RELEASED, hang_guard()));
    kvt_error_t *err = NULL;
    CHECK_IS(kvt_abi_check(0, &err), KVT_E_ABI);
    void *const live[HANDLE_TYPES] = {err, runtime, op, queue, budget, account, buffer};

    /* Stale handles: the right type, but freed. Their slots may be in use again. */
    kvt_runtime_t *old_runtime = open_runtime(1, NULL);
    void *stale[HANDLE_TYPES];
    kvt_queue_t *old_queue = open_queue(old_runtime, 0);
    kvt_buffer_t *old_buffer = open_buffer(old_runtime, 1, NULL);
    kvt_budget_t *old_budget = open_budget(old_runtime, 1);
    kvt_account_t *old_account = open_account(old_budget);
    const kvt_buffer_item_t old_item = sum_item(old_buffer, 1);
    kvt_op_t *old_op = submit(old_runtime, NULL, &old_item, 1);
    kvt_error_t *old_err = NULL;
    CHECK_IS(kvt_abi_check(0, &old_err), KVT_E_ABI);
    stale[ERROR] = old_err, stale[RUNTIME] = old_runtime, stale[OP] = old_op;
    stale[QUEUE] = old_queue, stale[BUDGET] = old_budget, stale[ACCOUNT] = old_account;
    stale[BUFFER] = old_buffer;
    CHECK_OK(finish_op(&old_op));
    CHECK_OK(kvt_error_free(&old_err));
    close_queue(&old_queue);
    free_buffer(&old_buffer);
    CHECK_OK(kvt_account_close(&old_account, NULL));
    CHECK_OK(kvt_budget_close(&old_budget, NULL));
    close_runtime(&old_runtime);

    for (size_t t = 0; t < sizeof targets / sizeof *targets; t++) {
        const struct target *target = &targets[t];
        check_refused(target, NULL, "null");
        check_refused(target, stale[target->handle_type], "a stale handle");
        for (int handle_type = 0; handle_type < HANDLE_TYPES; handle_type++) {
            if (handle_type == (int)target->handle_type) continue;
            check_refused(target, live[handle_type], "a handle of another type");
            check_refused(target, stale[handle_type], "a stale handle of another type");
        }
        garbage_is_refused(target, live[target->handle_type]);
        foreign_pointers_are_refused(target);
    }
    /* kvt_error_message returns a string for every argument. */
    CHECK(strcmp(kvt_error_message((kvt_error_t *)stale[ERROR]), "") == 0);
    CHECK(strcmp(kvt_error_message((kvt_error_t *)(uintptr_t)0x1234), "") == 0);

    /* A function that frees accepts a null address. */
    CHECK_OK(kvt_op_free(NULL));
    CHECK_OK(kvt_op_free_many(NULL, 0));
    CHECK_IS(kvt_op_free_many(NULL, 1), KVT_E_INVALID);
    CHECK_OK(kvt_queue_close(NULL, 0, NULL));
    CHECK_OK(kvt_budget_close(NULL, NULL));
    CHECK_OK(kvt_account_close(NULL, NULL));
    CHECK_OK(kvt_buffer_free(NULL));

    /* The valid objects still work. */
    CHECK_OK(kvt_op_free(&op));
    CHECK_OK(kvt_error_free(&err));
    close_queue(&queue);
    free_buffer(&buffer);
    CHECK_OK(kvt_account_close(&account, NULL));
    CHECK_OK(kvt_budget_close(&budget, NULL));
    close_runtime(&runtime);
    return check_end("handles");
}
