/* Tests of budgets: hard limits, reservations that wait in order, reclaiming from owners, accounts,
 * and buffers that are charged to an account. */

#include "check.h"

#include <stdatomic.h>

static kvt_tier_report_t tier_of(const kvt_budget_t *budget, uint32_t tier) {
    kvt_tier_report_t report = KVT_TIER_REPORT_INIT;
    CHECK_OK(kvt_budget_tier(budget, tier, &report));
    CHECK(report.reserved_bytes + report.committed_bytes <= report.peak_bytes);
    return report;
}

static void expect_held(const kvt_account_t *account, uint32_t tier, uint64_t reserved,
                        uint64_t used) {
    uint64_t out[2] = {99, 99};
    CHECK_OK(kvt_account_held(account, tier, &out[0], &out[1]));
    CHECK_EQ(out[0], reserved);
    CHECK_EQ(out[1], used);
    CHECK_OK(kvt_account_held(account, tier, NULL, NULL));
}

static void reservations_never_exceed_a_limit(kvt_runtime_t *runtime) {
    kvt_budget_opts_t opts = KVT_BUDGET_OPTS_INIT;
    opts.device_bytes = 1000;
    opts.host_bytes = 1 << 20;
    opts.disk_bytes = UINT64_MAX;
    opts.remote_bytes = 0;
    opts.flags = KVT_BUDGET_ZERO_PINNED;
    kvt_budget_t *budget = NULL;
    CHECK_OK(kvt_budget_open(runtime, &opts, &budget, NULL));
    CHECK_EQ(tier_of(budget, KVT_TIER_DEVICE).limit_bytes, 1000);
    CHECK_EQ(tier_of(budget, KVT_TIER_HOST).limit_bytes, 1 << 20);
    CHECK_EQ(tier_of(budget, KVT_TIER_REMOTE).limit_bytes, 0);
    CHECK_EQ(tier_of(budget, KVT_TIER_PINNED).limit_bytes, 0);
    kvt_account_t *account = open_account(budget);
    kvt_error_t *err = NULL;
    CHECK_OK(kvt_account_reserve(account, KVT_TIER_DEVICE, 600, &err));
    CHECK_IS(kvt_account_reserve(account, KVT_TIER_DEVICE, 401, &err), KVT_E_BUDGET);
    CHECK(strstr(kvt_error_message(err), "device") != NULL);
    CHECK_OK(kvt_error_free(&err));
    CHECK_OK(kvt_account_reserve(account, KVT_TIER_DEVICE, 400, &err));
    CHECK_IS(kvt_account_reserve(account, KVT_TIER_DEVICE, UINT64_MAX, NULL), KVT_E_BUDGET);
    CHECK_OK(kvt_account_reserve(account, KVT_TIER_DEVICE, 0, NULL));
    CHECK_IS(kvt_account_reserve(account, KVT_TIER_REMOTE, 1, NULL), KVT_E_BUDGET);
    /* Largest numbers. */
    CHECK_OK(kvt_account_reserve(account, KVT_TIER_DISK, UINT64_MAX, NULL));
    CHECK_IS(kvt_account_reserve(account, KVT_TIER_DISK, 1, NULL), KVT_E_BUDGET);
    CHECK_OK(kvt_account_commit(account, KVT_TIER_DISK, UINT64_MAX, UINT64_MAX, NULL));
    CHECK_IS(kvt_account_reserve(account, KVT_TIER_DISK, UINT64_MAX, NULL), KVT_E_BUDGET);
    CHECK_OK(kvt_account_release(account, KVT_TIER_DISK, UINT64_MAX, NULL));

    CHECK_IS(kvt_account_commit(account, KVT_TIER_DEVICE, 1001, 1, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_account_commit(account, KVT_TIER_DEVICE, 10, 11, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_account_release(account, KVT_TIER_DEVICE, 1, NULL), KVT_E_INVALID);
    expect_held(account, KVT_TIER_DEVICE, 1000, 0);
    CHECK_OK(kvt_account_commit(account, KVT_TIER_DEVICE, 700, 300, NULL));
    expect_held(account, KVT_TIER_DEVICE, 300, 300);
    CHECK_EQ(tier_of(budget, KVT_TIER_DEVICE).free_bytes, 400);
    CHECK_EQ(tier_of(budget, KVT_TIER_DEVICE).peak_bytes, 1000);
    CHECK_IS(kvt_account_close(&account, &err), KVT_E_BUSY);
    CHECK(account != NULL);
    CHECK_OK(kvt_error_free(&err));
    CHECK_OK(kvt_account_release(account, KVT_TIER_DEVICE, 300, NULL));
    CHECK_IS(kvt_account_close(&account, NULL), KVT_E_BUSY);
    CHECK_OK(kvt_account_commit(account, KVT_TIER_DEVICE, 300, 0, NULL));
    kvt_budget_report_t report = KVT_BUDGET_REPORT_INIT;
    CHECK_OK(kvt_budget_report(budget, &report));
    CHECK_EQ(report.accounts, 1);
    CHECK(report.total_bytes > 0 && report.effective_bytes <= report.available_bytes);
    CHECK(report.effective_bytes <= report.cgroup_headroom_bytes);
    for (uint32_t tier = 5; tier < 8; tier++) {
        CHECK_IS(kvt_account_reserve(account, tier, 1, NULL), KVT_E_INVALID);
        CHECK_IS(kvt_account_held(account, tier, NULL, NULL), KVT_E_INVALID);
        CHECK_IS(kvt_budget_resize(budget, tier, 1, NULL), KVT_E_INVALID);
    }
    CHECK_OK(kvt_account_close(&account, NULL));
    CHECK_OK(kvt_budget_close(&budget, NULL));

    /* A limit above the machine's memory is reduced, or refused if strict. */
    kvt_budget_opts_t huge = KVT_BUDGET_OPTS_INIT;
    huge.host_bytes = UINT64_C(1) << 60;
    CHECK_OK(kvt_budget_open(runtime, &huge, &budget, NULL));
    const kvt_tier_report_t host = tier_of(budget, KVT_TIER_HOST);
    CHECK_EQ(host.asked_bytes, huge.host_bytes);
    CHECK(host.limit_bytes < report.total_bytes);
    CHECK_OK(kvt_budget_resize(budget, KVT_TIER_HOST, UINT64_MAX, NULL));
    CHECK(tier_of(budget, KVT_TIER_HOST).limit_bytes < report.total_bytes);
    CHECK_OK(kvt_budget_close(&budget, NULL));
    huge.flags = KVT_BUDGET_STRICT;
    CHECK_IS(kvt_budget_open(runtime, &huge, &budget, &err), KVT_E_BUDGET);
    CHECK(budget == NULL);
    CHECK_OK(kvt_error_free(&err));
    kvt_budget_opts_t zero = KVT_BUDGET_OPTS_INIT;
    zero.flags = KVT_BUDGET_ZERO_HOST;
    CHECK_OK(kvt_budget_open(runtime, &zero, &budget, NULL));
    CHECK_EQ(tier_of(budget, KVT_TIER_HOST).limit_bytes, 0);
    /* pinned memory is part of host memory */
    CHECK_EQ(tier_of(budget, KVT_TIER_PINNED).limit_bytes, 0);
    CHECK_OK(kvt_budget_close(&budget, NULL));
}

/* Threads that reserve and release, and one that reads reports all the time. */
enum { LIMIT = 1000, THREADS = 4 };
static kvt_budget_t *shared;
static _Atomic uint64_t granted; /* the test's own count of granted bytes */
static atomic_bool stop;
static uint64_t rounds;

static void *reserve_and_release(void *data) {
    uint64_t state = 31 + (uint64_t)(uintptr_t)data;
    kvt_account_t *account = open_account(shared);
    for (uint64_t i = 0; i < rounds; i++) {
        const uint64_t bytes = 1 + next_random(&state) % 400;
        if (i % 3 == 0) {
            kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
            if (i % 2 == 0) opts.deadline_ns = now_ns() + next_random(&state) % 300000;
            kvt_op_t *op = reserve_later(account, bytes, &opts);
            if (i % 9 == 0) CHECK_OK(kvt_op_cancel(op));
            const kvt_status_t status = finish_op(&op);
            CHECK(status == KVT_OK || status == KVT_E_CANCELLED || status == KVT_E_TIMEOUT);
            if (status != KVT_OK) continue;
        } else {
            const kvt_status_t status = kvt_account_reserve(account, KVT_TIER_DISK, bytes, NULL);
            if (status == KVT_E_BUDGET) continue;
            CHECK_OK(status);
        }
        CHECK(atomic_fetch_add(&granted, bytes) + bytes <= LIMIT);
        const uint64_t used = next_random(&state) % (bytes + 1);
        expect_held(account, KVT_TIER_DISK, bytes, 0);
        CHECK_OK(kvt_account_commit(account, KVT_TIER_DISK, bytes, bytes, NULL));
        atomic_fetch_sub(&granted, used);
        CHECK_OK(kvt_account_release(account, KVT_TIER_DISK, used, NULL));
        atomic_fetch_sub(&granted, bytes - used);
        CHECK_OK(kvt_account_release(account, KVT_TIER_DISK, bytes - used, NULL));
    }
    expect_held(account, KVT_TIER_DISK, 0, 0);
    CHECK_OK(kvt_account_close(&account, NULL));
    return NULL;
}

static void *watch_reports(void *data) {
    (void)data;
    while (!atomic_load(&stop)) {
        const kvt_tier_report_t report = tier_of(shared, KVT_TIER_DISK);
        CHECK(report.reserved_bytes + report.committed_bytes <= LIMIT);
        CHECK(report.peak_bytes <= LIMIT);
    }
    return NULL;
}

static void limit_holds_under_threads(kvt_runtime_t *runtime) {
    shared = open_budget(runtime, LIMIT);
    atomic_store(&stop, 0);
    pthread_t threads[THREADS];
    pthread_t watching = start_thread(watch_reports, NULL);
    for (int i = 0; i < THREADS; i++)
        threads[i] = start_thread(reserve_and_release, (void *)(uintptr_t)(i * 99991));
    for (int i = 0; i < THREADS; i++) join_thread(threads[i]);
    atomic_store(&stop, 1);
    join_thread(watching);
    const kvt_tier_report_t report = tier_of(shared, KVT_TIER_DISK);
    CHECK_EQ(report.reserved_bytes + report.committed_bytes + report.waiting, 0);
    CHECK_OK(kvt_budget_close(&shared, NULL));
}

static int is_done(const kvt_op_t *op) { return (info_of(op).state & KVT_OP_RELEASED) != 0; }

/* Reservations are granted in order. When the first one is cancelled or expires, the next is
 * granted. */
static void reservations_are_granted_in_order(kvt_runtime_t *runtime) {
    kvt_budget_t *budget = open_budget(runtime, 100);
    kvt_account_t *account = open_account(budget), *other = open_account(budget);
    CHECK_OK(kvt_account_reserve(account, KVT_TIER_DISK, 90, NULL));
    kvt_op_t *first = reserve_later(account, 50, NULL);
    kvt_op_t *second = reserve_later(other, 5, NULL);
    CHECK(!is_done(first) && !is_done(second)); /* it would fit, but came later */
    CHECK_EQ(tier_of(budget, KVT_TIER_DISK).waiting, 2);
    /* overtakes no waiter */
    CHECK_IS(kvt_account_reserve(other, KVT_TIER_DISK, 1, NULL), KVT_E_BUDGET);
    CHECK_IS(kvt_account_close(&other, NULL), KVT_E_BUSY); /* it has a waiting reservation */
    kvt_op_t *third = NULL;
    CHECK_IS(kvt_account_reserve_later(other, KVT_TIER_DISK, 101, NULL, &third, NULL),
             KVT_E_BUDGET); /* can never fit */
    CHECK(third == NULL);
    unreserve(account, 39); /* 49 free: not enough for the first */
    CHECK(!is_done(first) && !is_done(second));
    unreserve(account, 1);
    CHECK_OK(finish_op(&first));
    CHECK(!is_done(second)); /* 50 + 50 are taken */
    unreserve(account, 5);
    CHECK_OK(finish_op(&second));
    expect_held(account, KVT_TIER_DISK, 95, 0);
    expect_held(other, KVT_TIER_DISK, 5, 0);

    /* Cancel, then deadline, of the first waiter. The second waits as long as the first. If the
     * deadline passed before the test saw both waiting, the round is repeated with a later one. */
    uint64_t ms = 30;
    for (int how = 0; how < 2;) {
        kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
        unreserve(account, 10);
        if (how == 1) opts.deadline_ns = in_ms(ms);
        first = reserve_later(account, 50, &opts);
        second = reserve_later(other, 10, NULL);
        const int waited = !is_done(second);
        const int first_waited = !is_done(first);
        if (first_waited) CHECK(waited);
        if (how == 0) CHECK_OK(kvt_op_cancel(first));
        CHECK_EQ(finish_op(&first), how == 0 ? KVT_E_CANCELLED : KVT_E_TIMEOUT);
        CHECK_OK(finish_op(&second));
        unreserve(other, 10);
        CHECK_OK(kvt_account_reserve(account, KVT_TIER_DISK, 10, NULL));
        if (how == 0) CHECK(first_waited);
        if (first_waited) how++;
        else ms *= 2;
    }
    /* A waiter of one tier does not block another tier. */
    first = reserve_later(account, 1, NULL);
    CHECK_OK(kvt_budget_resize(budget, KVT_TIER_REMOTE, 7, NULL));
    CHECK_OK(kvt_account_reserve(other, KVT_TIER_REMOTE, 7, NULL));
    CHECK_OK(kvt_account_commit(other, KVT_TIER_REMOTE, 7, 0, NULL));
    CHECK(!is_done(first));

    /* KVT_SUBMIT_EACH is invalid for reservations. */
    kvt_submit_opts_t each = KVT_SUBMIT_OPTS_INIT;
    each.flags = KVT_SUBMIT_EACH;
    CHECK_IS(kvt_account_reserve_later(other, KVT_TIER_DISK, 1, &each, &third, NULL),
             KVT_E_INVALID);

    /* Closing ends waiting reservations; held bytes can still be released. */
    const kvt_budget_t *copy = budget;
    CHECK_OK(kvt_budget_close(&budget, NULL));
    CHECK_EQ(finish_op(&first), KVT_E_CLOSED);
    CHECK_IS(kvt_account_reserve(account, KVT_TIER_DISK, 1, NULL), KVT_E_CLOSED);
    CHECK_IS(kvt_budget_resize(copy, KVT_TIER_DISK, 5, NULL), KVT_E_HANDLE);
    CHECK_OK(kvt_account_commit(account, KVT_TIER_DISK, 95, 95, NULL));
    CHECK_OK(kvt_account_release(account, KVT_TIER_DISK, 95, NULL));
    unreserve(other, 5);
    CHECK_OK(kvt_account_close(&account, NULL));
    CHECK_OK(kvt_account_close(&other, NULL));
}

/* After a limit was reduced below its use, no reservation is granted until enough is released. */
static void resize_below_use_grants_nothing(kvt_runtime_t *runtime) {
    kvt_budget_t *budget = open_budget(runtime, 100);
    kvt_account_t *account = open_account(budget);
    CHECK_OK(kvt_account_reserve(account, KVT_TIER_DISK, 80, NULL));
    CHECK_OK(kvt_account_commit(account, KVT_TIER_DISK, 80, 80, NULL));
    CHECK_OK(kvt_budget_resize(budget, KVT_TIER_DISK, 50, NULL));
    kvt_tier_report_t report = tier_of(budget, KVT_TIER_DISK);
    CHECK_EQ(report.limit_bytes, 50);
    CHECK_EQ(report.free_bytes, 0);
    CHECK_IS(kvt_account_reserve(account, KVT_TIER_DISK, 1, NULL), KVT_E_BUDGET);
    kvt_op_t *op = reserve_later(account, 20, NULL);
    CHECK_OK(kvt_account_release(account, KVT_TIER_DISK, 49, NULL)); /* 31 of 50 */
    CHECK(!is_done(op));
    CHECK_OK(kvt_account_release(account, KVT_TIER_DISK, 1, NULL));
    CHECK_OK(finish_op(&op));
    op = reserve_later(account, 30, NULL);
    CHECK(!is_done(op));
    CHECK_OK(kvt_budget_resize(budget, KVT_TIER_DISK, 80, NULL)); /* now it fits */
    CHECK_OK(finish_op(&op));
    /* A reservation larger than the new limit can never be granted, and fails. */
    op = reserve_later(account, 60, NULL);
    CHECK_OK(kvt_budget_resize(budget, KVT_TIER_DISK, 50, NULL));
    unreserve(account, 50);
    CHECK_OK(kvt_account_release(account, KVT_TIER_DISK, 30, NULL));
    CHECK_EQ(finish_op(&op), KVT_E_BUDGET);
    CHECK_OK(kvt_account_reserve(account, KVT_TIER_DISK, 50, NULL));
    unreserve(account, 50);
    CHECK_OK(kvt_account_close(&account, NULL));
    CHECK_OK(kvt_budget_close(&budget, NULL));
}

struct owner {
    kvt_account_t *account;
    uint64_t reclaimable; /* bytes that it can release */
    atomic_uint calls, destroyed;
    unsigned turn;
    pthread_t thread;
};

static atomic_uint turn;

static uint64_t reclaim(void *data, uint32_t tier, uint64_t bytes, uint64_t deadline_ns) {
    struct owner *owner = data;
    CHECK_EQ(tier, KVT_TIER_DISK);
    CHECK(bytes > 0);
    CHECK(deadline_ns == 0 || deadline_ns > now_ns() - 60 * SECOND_NS);
    CHECK(!pthread_equal(pthread_self(), owner->thread));
    CHECK_EQ(atomic_load(&owner->destroyed), 0);
    owner->turn = atomic_fetch_add(&turn, 1);
    const uint64_t n = bytes < owner->reclaimable ? bytes : owner->reclaimable;
    owner->reclaimable -= n;
    /* Count before the release: it may end the op that the test waits for. */
    atomic_fetch_add(&owner->calls, 1);
    /* no lock is held */
    if (n > 0) CHECK_OK(kvt_account_release(owner->account, KVT_TIER_DISK, n, NULL));
    return n;
}

static void owner_destroyed(void *data) { atomic_fetch_add(&((struct owner *)data)->destroyed, 1); }

/* Owners reclaim in the order of their priority, and only as much as is needed. */
static void owners_reclaim_by_priority(kvt_runtime_t *runtime) {
    kvt_budget_t *budget = open_budget(runtime, 300);
    static struct owner owners[3];
    memset(owners, 0, sizeof owners);
    atomic_store(&turn, 0);
    const int64_t priorities[3] = {10, -5, 0};
    for (int i = 0; i < 3; i++) {
        kvt_account_opts_t opts = KVT_ACCOUNT_OPTS_INIT;
        opts.name = "owner";
        opts.name_bytes = 5;
        opts.priority = priorities[i];
        opts.reclaim = reclaim;
        opts.user_data = &owners[i];
        opts.destroy = owner_destroyed;
        owners[i].thread = pthread_self();
        owners[i].reclaimable = 100;
        if (i == 0) { /* a failed open does not take over user_data */
            kvt_account_t *account = NULL;
            opts.priority = INT64_MAX;
            CHECK_IS(kvt_account_open(budget, &opts, &account, NULL), KVT_E_INVALID);
            opts.priority = 10;
            opts.name_bytes = 65;
            CHECK_IS(kvt_account_open(budget, &opts, &account, NULL), KVT_E_LIMIT);
            opts.name_bytes = KVT_NUL_TERMINATED;
            CHECK_EQ(atomic_load(&owners[i].destroyed), 0);
        }
        CHECK_OK(kvt_account_open(budget, &opts, &owners[i].account, NULL));
        CHECK_OK(kvt_account_reserve(owners[i].account, KVT_TIER_DISK, 100, NULL));
        CHECK_OK(kvt_account_commit(owners[i].account, KVT_TIER_DISK, 100, 100, NULL));
    }
    kvt_account_t *account = open_account(budget);
    kvt_op_t *op = reserve_later(account, 150, NULL);
    CHECK_OK(finish_op(&op));
    CHECK_EQ(atomic_load(&owners[1].calls), 1); /* priority -5: all it has */
    CHECK_EQ(atomic_load(&owners[2].calls), 1); /* priority 0: the rest */
    CHECK(owners[1].turn < owners[2].turn);
    CHECK_EQ(owners[1].reclaimable, 0);
    CHECK_EQ(owners[2].reclaimable, 50);
    CHECK_EQ(owners[0].reclaimable, 100);
    CHECK_EQ(atomic_load(&owners[0].calls), 0); /* priority 10: spared */
    CHECK_EQ(tier_of(budget, KVT_TIER_DISK).reclaim_requested_bytes, 150 + 50);

    /* Reducing a limit below its use reclaims, too. */
    CHECK_OK(kvt_budget_resize(budget, KVT_TIER_DISK, 200, NULL));
    const uint64_t until = hang_guard();
    while (tier_of(budget, KVT_TIER_DISK).committed_bytes + 150 > 200) {
        CHECK(now_ns() < until);
        short_pause();
    }
    unreserve(account, 150);
    CHECK_OK(kvt_account_close(&account, NULL));
    for (int i = 0; i < 3; i++) {
        uint64_t used = 0;
        CHECK_OK(kvt_account_held(owners[i].account, KVT_TIER_DISK, NULL, &used));
        CHECK_OK(kvt_account_release(owners[i].account, KVT_TIER_DISK, used, NULL));
        CHECK_OK(kvt_account_close(&owners[i].account, NULL));
    }
    CHECK_OK(kvt_budget_close(&budget, NULL));
    for (int i = 0; i < 3; i++) {
        while (atomic_load(&owners[i].destroyed) == 0) {
            CHECK(now_ns() < until);
            short_pause();
        }
        CHECK_EQ(atomic_load(&owners[i].destroyed), 1);
    }
}

/* Buffers are charged in whole pages, and freeing returns all bytes. */
static void buffers_are_charged_in_whole_pages(kvt_runtime_t *runtime) {
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    kvt_budget_opts_t opts = KVT_BUDGET_OPTS_INIT;
    opts.host_bytes = 10 * page;
    kvt_budget_t *budget = NULL;
    CHECK_OK(kvt_budget_open(runtime, &opts, &budget, NULL));
    kvt_account_t *account = open_account(budget);
    kvt_buffer_opts_t request = KVT_BUFFER_OPTS_INIT;
    request.bytes = page + 1;
    request.account = account;
    kvt_buffer_t *buffer = NULL, *more = NULL;
    CHECK_OK(kvt_buffer_alloc(runtime, &request, &buffer, NULL));
    expect_held(account, KVT_TIER_HOST, 0, 2 * page);
    kvt_buffer_info_t info = KVT_BUFFER_INFO_INIT;
    CHECK_OK(kvt_buffer_info(buffer, &info));
    CHECK_EQ(info.bytes, page + 1);
    CHECK_EQ(info.charged_bytes, 2 * page);
    CHECK_EQ(info.pinned, 0);
    CHECK_IS(kvt_account_close(&account, NULL), KVT_E_BUSY);
    request.bytes = 8 * page + 1;
    CHECK_IS(kvt_buffer_alloc(runtime, &request, &more, NULL), KVT_E_BUDGET);
    CHECK(more == NULL);
    expect_held(account, KVT_TIER_HOST, 0, 2 * page);
    request.bytes = 8 * page;
    request.flags = KVT_BUFFER_PREFAULT;
    CHECK_OK(kvt_buffer_alloc(runtime, &request, &more, NULL));
    expect_held(account, KVT_TIER_HOST, 0, 10 * page);
    free_buffer(&more);
    free_buffer(&buffer);
    expect_held(account, KVT_TIER_HOST, 0, 0);

    /* Pinned memory, as far as this machine allows it. */
    const uint64_t lockable = tier_of(budget, KVT_TIER_PINNED).limit_bytes;
    request.bytes = page;
    request.flags = KVT_BUFFER_TRY_PIN;
    CHECK_OK(kvt_buffer_alloc(runtime, &request, &buffer, NULL));
    CHECK_OK(kvt_buffer_info(buffer, &info));
    expect_held(account, KVT_TIER_HOST, 0, page);
    expect_held(account, KVT_TIER_PINNED, 0, info.pinned ? page : 0);
    CHECK(lockable >= page || !info.pinned);
    free_buffer(&buffer);
    expect_held(account, KVT_TIER_PINNED, 0, 0);
    request.flags = KVT_BUFFER_PIN;
    const kvt_status_t status = kvt_buffer_alloc(runtime, &request, &buffer, NULL);
    CHECK(status == KVT_OK || status == KVT_E_PIN_QUOTA || status == KVT_E_BUDGET);
    if (status == KVT_OK) free_buffer(&buffer);
    CHECK_OK(kvt_budget_resize(budget, KVT_TIER_PINNED, 0, NULL));
    CHECK_IS(kvt_buffer_alloc(runtime, &request, &buffer, NULL), KVT_E_BUDGET);
    request.flags = KVT_BUFFER_TRY_PIN;
    CHECK_OK(kvt_buffer_alloc(runtime, &request, &buffer, NULL));
    CHECK_OK(kvt_buffer_info(buffer, &info));
    CHECK_EQ(info.pinned, 0);
    free_buffer(&buffer);
    expect_held(account, KVT_TIER_HOST, 0, 0);
    expect_held(account, KVT_TIER_PINNED, 0, 0);

    /* Invalid sizes and alignments. */
    request.account = NULL;
    request.flags = 0;
    const uint64_t sizes[] = {0, (UINT64_C(1) << 46) + 1, UINT64_MAX, UINT64_MAX - 4095};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        request.bytes = sizes[i];
        CHECK_IS(kvt_buffer_alloc(runtime, &request, &buffer, NULL), KVT_E_INVALID);
    }
    request.bytes = 1;
    const uint64_t aligns[] = {3, 100, 4097, 3 << 12, UINT64_C(1) << 31, UINT64_MAX};
    for (size_t i = 0; i < sizeof aligns / sizeof *aligns; i++) {
        request.align_bytes = aligns[i];
        CHECK_IS(kvt_buffer_alloc(runtime, &request, &buffer, NULL), KVT_E_INVALID);
    }
    CHECK(buffer == NULL);
    for (uint64_t align = 1; align <= UINT64_C(1) << 30; align *= 2) {
        request.align_bytes = align;
        CHECK_OK(kvt_buffer_alloc(runtime, &request, &buffer, NULL));
        CHECK_OK(kvt_buffer_info(buffer, &info));
        CHECK_EQ((uint64_t)(uintptr_t)info.address % align, 0);
        ((uint8_t *)info.address)[0] = 1;
        free_buffer(&buffer);
    }
    CHECK_OK(kvt_account_close(&account, NULL));
    CHECK_OK(kvt_budget_close(&budget, NULL));
}

static void count_destroy(void *data) { atomic_fetch_add((atomic_uint *)data, 1); }

static void wrapped_memory_is_not_charged(kvt_runtime_t *runtime) {
    atomic_uint destroyed = 0;
    uint8_t *own = malloc(1000);
    CHECK(own != NULL);
    memset(own, 7, 1000);
    kvt_buffer_t *buffer = NULL;
    CHECK_IS(kvt_buffer_wrap(runtime, NULL, 1000, &destroyed, count_destroy, &buffer, NULL),
             KVT_E_INVALID);
    CHECK_IS(kvt_buffer_wrap(runtime, own, 0, &destroyed, count_destroy, &buffer, NULL),
             KVT_E_INVALID);
    CHECK_IS(kvt_buffer_wrap(runtime, own, UINT64_MAX, &destroyed, count_destroy, &buffer, NULL),
             KVT_E_INVALID);
    CHECK_IS(kvt_buffer_wrap(runtime, own, 1000, &destroyed, count_destroy, NULL, NULL),
             KVT_E_INVALID);
    CHECK_EQ(atomic_load(&destroyed), 0);
    CHECK_OK(kvt_buffer_wrap(runtime, own, 1000, &destroyed, count_destroy, &buffer, NULL));
    kvt_buffer_info_t info = KVT_BUFFER_INFO_INIT;
    CHECK_OK(kvt_buffer_info(buffer, &info));
    CHECK(info.address == own);
    CHECK_EQ(info.pages, KVT_PAGES_FOREIGN);
    CHECK_EQ(info.charged_bytes, 0);
    kvt_buffer_item_t item = copy_item(buffer, buffer, 500);
    own[0] = 9;
    item.dst_offset = 500;
    kvt_op_t *op = submit(runtime, NULL, &item, 1);
    CHECK_OK(finish_op(&op));
    CHECK(own[500] == 9 && own[501] == 7);
    free_buffer(&buffer);
    const uint64_t until = hang_guard();
    while (atomic_load(&destroyed) == 0) {
        CHECK(now_ns() < until);
        short_pause();
    }
    CHECK_EQ(atomic_load(&destroyed), 1);
    free(own);
}

int main(int argc, char **argv) {
    check_begin();
    rounds = count_arg(argc, argv, 20000);
    kvt_runtime_t *runtime = open_runtime(2, NULL);
    reservations_never_exceed_a_limit(runtime);
    reservations_are_granted_in_order(runtime);
    resize_below_use_grants_nothing(runtime);
    owners_reclaim_by_priority(runtime);
    wrapped_memory_is_not_charged(runtime);
    limit_holds_under_threads(runtime);
    buffers_are_charged_in_whole_pages(runtime);
    close_runtime(&runtime);
    return check_end("budget");
}
