/* Structs may grow in later versions. Every struct is passed too short, exact, longer with a
 * zero tail, longer with a nonzero tail, and with invalid sizes. Each ends at a guard page, so
 * an access beyond its size faults. */

#include "check.h"

#include <stddef.h>
#include <sys/mman.h>

#define PAGE 4096
#define MAX_BYTES 4096

static uint8_t *page_end; /* the first byte that faults */

static void guard_page(void) {
    uint8_t *start =
        mmap(NULL, 3 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(start != MAP_FAILED);
    CHECK(mprotect(start + 2 * PAGE, PAGE, PROT_NONE) == 0);
    page_end = start + 2 * PAGE;
}

/* `bytes` bytes that end at the guard page: `model`, then zeros. */
static void *placed(const void *model, uint64_t model_bytes, uint64_t bytes, uint64_t size) {
    uint8_t *at = page_end - bytes;
    memset(at, 0, bytes);
    memcpy(at, model, bytes < model_bytes ? bytes : model_bytes);
    memcpy(at, &size, sizeof size);
    return at;
}

static kvt_runtime_t *runtime;
static kvt_queue_t *queue;
static kvt_budget_t *budget;
static kvt_account_t *account;
static kvt_buffer_t *buffer;
static kvt_op_t *op;
static kvt_error_t *err;

/* Input structs; each call frees what it created. */
static kvt_status_t in_runtime(void *s) {
    kvt_runtime_t *out = NULL;
    const kvt_status_t status = kvt_runtime_open(s, &out, NULL);
    CHECK_OK(kvt_runtime_close(&out, 0, NULL, NULL));
    return status;
}
static kvt_status_t in_queue(void *s) {
    kvt_queue_t *out = NULL;
    const kvt_status_t status = kvt_queue_open(runtime, s, &out, NULL);
    CHECK_OK(kvt_queue_close(&out, 0, NULL));
    return status;
}
static kvt_status_t in_budget(void *s) {
    kvt_budget_t *out = NULL;
    const kvt_status_t status = kvt_budget_open(runtime, s, &out, NULL);
    CHECK_OK(kvt_budget_close(&out, NULL));
    return status;
}
static kvt_status_t in_account(void *s) {
    kvt_account_t *out = NULL;
    const kvt_status_t status = kvt_account_open(budget, s, &out, NULL);
    CHECK_OK(kvt_account_close(&out, NULL));
    return status;
}
static kvt_status_t in_buffer(void *s) {
    kvt_buffer_t *out = NULL;
    const kvt_status_t status = kvt_buffer_alloc(runtime, s, &out, NULL);
    CHECK_OK(kvt_buffer_free(&out));
    return status;
}
static kvt_status_t in_submit(void *s) {
    kvt_op_t *out = NULL;
    const kvt_buffer_item_t item = sum_item(buffer, 64);
    const kvt_status_t status = kvt_buffer_submit(runtime, s, &item, 1, sizeof item, &out, NULL);
    if (status == KVT_OK) CHECK_OK(finish_op(&out));
    return status;
}
static kvt_status_t in_later(void *s) {
    kvt_op_t *out = NULL;
    const kvt_status_t status =
        kvt_account_reserve_later(account, KVT_TIER_DISK, 1, s, &out, NULL);
    if (status == KVT_OK) {
        CHECK_OK(finish_op(&out));
        unreserve(account, 1);
    }
    return status;
}

static void input(const char *name, kvt_status_t (*call)(void *), const void *model,
                  uint64_t bytes, uint64_t least_bytes) {
    for (uint64_t n = least_bytes; n <= bytes; n++)
        CHECK_IS(call(placed(model, bytes, n, n)), n % 8 == 0 ? KVT_OK : KVT_E_INVALID);
    CHECK_EQ(bytes % 8, 0); /* structs grow by whole words */
    CHECK_IS(call(placed(model, bytes, bytes + 4, bytes + 4)), KVT_E_INVALID);
    const uint64_t longer[] = {bytes + 8, bytes + 16, bytes + 64, MAX_BYTES};
    for (size_t i = 0; i < sizeof longer / sizeof *longer; i++) {
        const uint64_t n = longer[i];
        CHECK_OK(call(placed(model, bytes, n, n)));
        uint8_t *at = placed(model, bytes, n, n);
        at[n - 1] = 1;
        CHECK_IS(call(at), KVT_E_TOO_NEW);
        at[n - 1] = 0;
        at[bytes] = 0x80;
        CHECK_IS(call(at), KVT_E_TOO_NEW);
    }
    const uint64_t none[] = {0, 1, 7, MAX_BYTES + 1, UINT64_C(1) << 32, UINT64_MAX};
    for (size_t i = 0; i < sizeof none / sizeof *none; i++)
        CHECK_IS(call(placed(model, bytes, 8, none[i])), KVT_E_INVALID);
    printf("  %s\n", name);
}

/* Output structs. */
static kvt_status_t out_error(void *s) { return kvt_error_info(err, s); }
static kvt_status_t out_feature(void *s) { return kvt_feature_at(0, s); }
static kvt_status_t out_found(void *s) { return kvt_feature_find("cuda", 4, s, NULL); }
static kvt_status_t out_stats(void *s) { return kvt_runtime_stats(runtime, s); }
static kvt_status_t out_op(void *s) { return kvt_op_info(op, s); }
static kvt_status_t out_queue(void *s) { return kvt_queue_stats(queue, s); }
static kvt_status_t out_budget(void *s) { return kvt_budget_report(budget, s); }
static kvt_status_t out_tier(void *s) { return kvt_budget_tier(budget, KVT_TIER_DISK, s); }
static kvt_status_t out_buffer(void *s) { return kvt_buffer_info(buffer, s); }
static kvt_status_t out_close(void *s) {
    kvt_runtime_t *own = open_runtime(1, NULL);
    const kvt_status_t status = kvt_runtime_close(&own, 0, s, NULL);
    if (status != KVT_OK) close_runtime(&own);
    return status;
}

static void output(const char *name, kvt_status_t (*call)(void *), uint64_t bytes) {
    static uint8_t whole[MAX_BYTES];
    uint8_t *at = page_end - bytes;
    memset(at, 0xa5, bytes);
    memcpy(at, &bytes, 8);
    CHECK_OK(call(at));
    memcpy(whole, at, bytes);
    uint64_t size = 0;
    memcpy(&size, at, 8);
    CHECK_EQ(size, bytes);

    for (uint64_t n = 8; n < bytes; n += 8) {
        at = page_end - n;
        memset(at - 8, 0xa5, n + 8);
        memcpy(at, &n, 8);
        CHECK_OK(call(at)); /* one byte more would fault */
        memcpy(&size, at, 8);
        CHECK_EQ(size, bytes); /* the library reports its own size */
        CHECK(at[-1] == 0xa5);
    }
    const uint64_t longer = bytes + 40;
    at = page_end - longer;
    memset(at, 0xa5, longer);
    memcpy(at, &longer, 8);
    CHECK_OK(call(at));
    memcpy(&size, at, 8);
    CHECK_EQ(size, bytes);
    for (uint64_t i = bytes; i < longer; i++) CHECK_EQ(at[i], 0xa5);

    const uint64_t none[] = {0, 7, 12, bytes + 4, MAX_BYTES + 8, UINT64_MAX};
    for (size_t i = 0; i < sizeof none / sizeof *none; i++) {
        at = page_end - bytes;
        memset(at, 0xa5, bytes);
        memcpy(at, &none[i], 8);
        CHECK_IS(call(at), KVT_E_INVALID);
        CHECK(at[8] == 0xa5 && at[bytes - 1] == 0xa5);
        CHECK(memcmp(at, &none[i], 8) == 0);
    }
    printf("  %s\n", name);
}

static void unknown_flags_are_refused(void) {
    for (int bit = 0; bit < 64; bit++) {
        const uint64_t flag = UINT64_C(1) << bit;
        kvt_runtime_opts_t r = KVT_RUNTIME_OPTS_INIT;
        r.flags = flag;
        CHECK_IS(in_runtime(&r), KVT_E_INVALID);
        kvt_queue_opts_t q = KVT_QUEUE_OPTS_INIT;
        q.flags = flag;
        CHECK_IS(in_queue(&q), KVT_E_INVALID);
        kvt_account_opts_t a = KVT_ACCOUNT_OPTS_INIT;
        a.flags = flag;
        CHECK_IS(in_account(&a), KVT_E_INVALID);
        if (flag > KVT_BUDGET_ZERO_RESERVE) {
            kvt_budget_opts_t b = KVT_BUDGET_OPTS_INIT;
            b.flags = flag;
            CHECK_IS(in_budget(&b), KVT_E_INVALID);
        }
        if (flag > KVT_BUFFER_PREFAULT) {
            kvt_buffer_opts_t b = KVT_BUFFER_OPTS_INIT;
            b.bytes = 1;
            b.flags = flag;
            CHECK_IS(in_buffer(&b), KVT_E_INVALID);
        }
        if (flag > KVT_SUBMIT_EACH) {
            kvt_submit_opts_t s = KVT_SUBMIT_OPTS_INIT;
            s.flags = flag;
            CHECK_IS(in_submit(&s), KVT_E_INVALID);
            CHECK_IS(in_later(&s), KVT_E_INVALID);
        }
        if (bit < 32) {
            kvt_buffer_item_t item = sum_item(buffer, 1);
            item.flags = (uint32_t)flag;
            kvt_op_t *out = NULL;
            CHECK_IS(kvt_buffer_submit(runtime, NULL, &item, 1, sizeof item, &out, NULL),
                     KVT_E_INVALID);
            kvt_submit_opts_t s = KVT_SUBMIT_OPTS_INIT;
            if (flag > KVT_OP_RELEASED) {
                s.notify = (uint32_t)flag;
                CHECK_IS(in_submit(&s), KVT_E_INVALID);
                CHECK_IS(kvt_op_wait(op, (uint32_t)flag, 0), KVT_E_INVALID);
            }
            s.notify = 0;
            s.priority = (uint32_t)flag;
            if (flag > KVT_PRIORITY_BACKGROUND) CHECK_IS(in_submit(&s), KVT_E_INVALID);
            if (flag > KVT_TIER_PINNED)
                CHECK_IS(kvt_account_reserve(account, (uint32_t)flag, 0, NULL), KVT_E_INVALID);
        }
    }
    CHECK_IS(kvt_op_wait(op, 0, 0), KVT_E_INVALID);
}

/* Array entries follow the same rule; their stride is common. */
static void item_strides_may_differ(void) {
    const uint64_t bytes = sizeof(kvt_buffer_item_t);
    const uint64_t full[] = {bytes, bytes + 8, bytes + 64, MAX_BYTES / 2};
    const kvt_buffer_item_t item = sum_item(buffer, 64);
    kvt_op_t *out = NULL;
    for (size_t i = 0; i < sizeof full / sizeof *full; i++) {
        const uint64_t stride = full[i];
        uint8_t *at = page_end - 2 * stride;
        memset(at, 0, 2 * stride);
        memcpy(at, &item, bytes);
        memcpy(at + stride, &item, bytes);
        CHECK_OK(kvt_buffer_submit(runtime, NULL, (void *)at, 2, stride, &out, NULL));
        CHECK_EQ(info_of(out).items, 2);
        CHECK_OK(finish_op(&out));
        if (stride == bytes) continue;
        at[2 * stride - 1] = 1;
        CHECK_IS(kvt_buffer_submit(runtime, NULL, (void *)at, 2, stride, &out, NULL),
                 KVT_E_TOO_NEW);
        CHECK(out == NULL);
    }
    /* A shorter entry ends before fields that a checksum does not need. */
    const uint64_t shorter = offsetof(kvt_buffer_item_t, expect);
    uint8_t *at = page_end - 2 * shorter;
    memcpy(at, &item, shorter);
    memcpy(at + shorter, &item, shorter);
    CHECK_OK(kvt_buffer_submit(runtime, NULL, (void *)at, 2, shorter, &out, NULL));
    CHECK_OK(finish_op(&out));
    const uint64_t none[] = {0, 1, 7, bytes + 4, MAX_BYTES + 8, UINT64_MAX};
    for (size_t i = 0; i < sizeof none / sizeof *none; i++)
        CHECK_IS(kvt_buffer_submit(runtime, NULL, &item, 1, none[i], &out, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_buffer_submit(runtime, NULL, &item, 0, bytes, &out, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_buffer_submit(runtime, NULL, NULL, 1, bytes, &out, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_buffer_submit(runtime, NULL, &item, 65537, bytes, &out, NULL), KVT_E_LIMIT);
    CHECK_IS(kvt_buffer_submit(runtime, NULL, &item, UINT64_MAX, bytes, &out, NULL), KVT_E_LIMIT);
}

static void one_completion(void) {
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    opts.queue = queue;
    opts.tag = 99;
    const kvt_buffer_item_t item = sum_item(buffer, 64);
    CHECK_OK(kvt_buffer_submit(runtime, &opts, &item, 1, sizeof item, NULL, NULL));
}

static void completion_strides_may_differ(void) {
    const uint64_t bytes = sizeof(kvt_completion_t);
    const uint64_t strides[] = {8, 16, bytes - 8, bytes, bytes + 24, 104};
    for (size_t i = 0; i < sizeof strides / sizeof *strides; i++) {
        const uint64_t stride = strides[i];
        uint8_t *at = page_end - 2 * stride;
        memset(at, 0xa5, 2 * stride);
        one_completion();
        uint64_t count = 0;
        CHECK_OK(kvt_queue_wait(queue, hang_guard(), (void *)at, 1, stride, &count));
        CHECK_EQ(count, 1);
        for (uint64_t k = bytes; k < 2 * stride; k++) CHECK_EQ(at[k], 0xa5);
        for (uint64_t k = stride; k < 2 * stride; k++) CHECK_EQ(at[k], 0xa5);
        if (stride >= 16) {
            uint64_t tag = 0;
            memcpy(&tag, at + offsetof(kvt_completion_t, tag), 8);
            CHECK_EQ(tag, 99);
        }
    }
    kvt_completion_t entry;
    uint64_t count = 55;
    CHECK_IS(kvt_queue_poll(queue, &entry, 1, 0, &count), KVT_E_INVALID);
    CHECK_IS(kvt_queue_poll(queue, &entry, 1, bytes + 4, &count), KVT_E_INVALID);
    CHECK_IS(kvt_queue_poll(queue, &entry, 1, 4104, &count), KVT_E_INVALID);
    CHECK_IS(kvt_queue_poll(queue, NULL, 1, bytes, &count), KVT_E_INVALID);
    CHECK_IS(kvt_queue_poll(queue, &entry, 1, bytes, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_queue_poll(queue, &entry, 1048577, bytes, &count), KVT_E_LIMIT);
    CHECK_IS(kvt_queue_wait(queue, 1, &entry, 0, bytes, &count), KVT_E_INVALID);
    CHECK_EQ(count, 55);
    CHECK_OK(kvt_queue_poll(queue, NULL, 0, bytes, &count));
    CHECK_EQ(count, 0);
}

static void op_item_strides_may_differ(void) {
    const uint64_t bytes = sizeof(kvt_op_item_t);
    const uint64_t strides[] = {8, bytes, bytes + 8};
    for (size_t i = 0; i < sizeof strides / sizeof *strides; i++) {
        const uint64_t stride = strides[i];
        uint8_t *at = page_end - stride;
        memset(at, 0xa5, stride);
        uint64_t count = 0;
        CHECK_OK(kvt_op_items(op, 0, (void *)at, 1, stride, &count));
        CHECK_EQ(count, 1);
        for (uint64_t k = bytes; k < stride; k++) CHECK_EQ(at[k], 0xa5);
    }
    kvt_op_item_t item;
    uint64_t count = 55;
    CHECK_IS(kvt_op_items(op, 0, &item, 1, 0, &count), KVT_E_INVALID);
    CHECK_IS(kvt_op_items(op, 2, &item, 1, bytes, &count), KVT_E_INVALID);
    CHECK_IS(kvt_op_items(op, UINT64_MAX, &item, 1, bytes, &count), KVT_E_INVALID);
    CHECK_IS(kvt_op_items(op, 0, &item, 65537, bytes, &count), KVT_E_LIMIT);
    CHECK_IS(kvt_op_items(op, 0, &item, 1, bytes, NULL), KVT_E_INVALID);
    CHECK_EQ(count, 55);
    CHECK_OK(kvt_op_items(op, 0, NULL, 0, bytes, &count));
    CHECK_EQ(count, 0);
}

int main(void) {
    check_begin();
    guard_page();
    runtime = open_runtime(1, NULL);
    queue = open_queue(runtime, 16);
    budget = open_budget(runtime, 100);
    account = open_account(budget);
    buffer = open_buffer(runtime, 64, NULL);
    const kvt_buffer_item_t item = sum_item(buffer, 64);
    op = submit(runtime, NULL, &item, 1);
    CHECK_OK(kvt_op_wait(op, KVT_OP_RELEASED, hang_guard()));
    CHECK_IS(kvt_abi_check(0, &err), KVT_E_ABI);

    kvt_runtime_opts_t r = KVT_RUNTIME_OPTS_INIT;
    kvt_queue_opts_t q = KVT_QUEUE_OPTS_INIT;
    kvt_budget_opts_t b = KVT_BUDGET_OPTS_INIT;
    kvt_account_opts_t a = KVT_ACCOUNT_OPTS_INIT;
    kvt_buffer_opts_t f = KVT_BUFFER_OPTS_INIT;
    kvt_submit_opts_t s = KVT_SUBMIT_OPTS_INIT;
    r.workers = 1;
    f.bytes = 64;
    input("kvt_runtime_opts_t", in_runtime, &r, sizeof r, 8);
    input("kvt_queue_opts_t", in_queue, &q, sizeof q, 8);
    input("kvt_budget_opts_t", in_budget, &b, sizeof b, 8);
    input("kvt_account_opts_t", in_account, &a, sizeof a, 8);
    /* `bytes` has no default, so a struct that ends before it is refused. */
    input("kvt_buffer_opts_t", in_buffer, &f, sizeof f, 24);
    CHECK_IS(in_buffer(placed(&f, sizeof f, 16, 16)), KVT_E_INVALID);
    CHECK_IS(in_buffer(NULL), KVT_E_INVALID);
    input("kvt_submit_opts_t", in_submit, &s, sizeof s, 8);
    input("kvt_submit_opts_t, reserving", in_later, &s, sizeof s, 8);

    output("kvt_error_info_t", out_error, sizeof(kvt_error_info_t));
    output("kvt_feature_t", out_feature, sizeof(kvt_feature_t));
    output("kvt_feature_t, by name", out_found, sizeof(kvt_feature_t));
    output("kvt_runtime_stats_t", out_stats, sizeof(kvt_runtime_stats_t));
    output("kvt_op_info_t", out_op, sizeof(kvt_op_info_t));
    output("kvt_queue_stats_t", out_queue, sizeof(kvt_queue_stats_t));
    output("kvt_budget_report_t", out_budget, sizeof(kvt_budget_report_t));
    output("kvt_tier_report_t", out_tier, sizeof(kvt_tier_report_t));
    output("kvt_buffer_info_t", out_buffer, sizeof(kvt_buffer_info_t));
    output("kvt_close_report_t", out_close, sizeof(kvt_close_report_t));
    CHECK_IS(kvt_op_info(op, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_runtime_stats(runtime, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_error_info(err, NULL), KVT_E_INVALID);

    unknown_flags_are_refused();
    item_strides_may_differ();
    completion_strides_may_differ();
    op_item_strides_may_differ();

    CHECK_OK(kvt_error_free(&err));
    CHECK_OK(kvt_op_free(&op));
    free_buffer(&buffer);
    CHECK_OK(kvt_account_close(&account, NULL));
    CHECK_OK(kvt_budget_close(&budget, NULL));
    close_queue(&queue);
    close_runtime(&runtime);
    return check_end("structs");
}
