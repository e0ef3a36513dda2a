/* Four producers, two consumers, one queue: every accepted op completes exactly once, even if
 * ops are cancelled meanwhile.
 *
 *   stress [OPS]     default: 1000000 */

#include "check.h"

#include <sched.h>
#include <stdatomic.h>

enum { PRODUCERS = 4, CONSUMERS = 2, BATCH = 16 };

static kvt_runtime_t *runtime;
static kvt_queue_t *queue;
static kvt_buffer_t *buffer;
static uint64_t total;
static _Atomic uint64_t next_tag, completed, cancelled, refused;
static _Atomic uint8_t *seen; /* a bit for each tag */

static void *producer(void *data) {
    uint64_t state = 77 + (uint64_t)(uintptr_t)data;
    kvt_buffer_item_t items[BATCH];
    for (int i = 0; i < BATCH; i++) {
        items[i] = sum_item(buffer, 64);
        items[i].src_offset = (uint64_t)i * 64;
    }
    for (;;) {
        uint64_t n = 1 + next_random(&state) % BATCH;
        const uint64_t first = atomic_fetch_add(&next_tag, n);
        if (first >= total) return NULL;
        if (first + n > total) n = total - first;
        for (uint64_t i = 0; i < n; i++) items[i].tag = first + i;
        kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
        opts.queue = queue;
        opts.flags = KVT_SUBMIT_EACH;
        opts.priority = (uint32_t)(next_random(&state) % 3);
        const uint64_t dice = next_random(&state) % 8;
        if (dice == 0) opts.deadline_ns = now_ns() + next_random(&state) % 200000;
        /* Some ops are detached; the producer cancels some of the others. */
        kvt_op_t *ops[BATCH];
        const int keeps = dice > 3;
        kvt_status_t status;
        do {
            status = kvt_buffer_submit(runtime, &opts, items, n, sizeof *items,
                                       keeps ? ops : NULL, NULL);
            if (status == KVT_E_AGAIN) {
                atomic_fetch_add(&refused, 1);
                sched_yield();
            }
        } while (status == KVT_E_AGAIN);
        CHECK_OK(status);
        if (keeps && dice < 6)
            for (uint64_t i = 0; i < n; i++) {
                /* The handle is stale if a consumer has freed the op. */
                const kvt_status_t cancel = kvt_op_cancel(ops[i]);
                CHECK(cancel == KVT_OK || cancel == KVT_E_HANDLE);
            }
    }
}

static void *consumer(void *data) {
    (void)data;
    for (;;) {
        kvt_completion_t entries[48];
        uint64_t count = 0;
        const kvt_status_t status =
            kvt_queue_wait(queue, in_ms(20), entries, 48, sizeof *entries, &count);
        if (status == KVT_E_TIMEOUT) {
            if (atomic_load(&completed) == total) return NULL;
            continue;
        }
        CHECK_OK(status);
        CHECK(count >= 1 && count <= 48);
        for (uint64_t i = 0; i < count; i++) {
            const uint64_t tag = entries[i].tag;
            CHECK(tag < total);
            const uint8_t bit = (uint8_t)(1u << (tag % 8));
            CHECK((atomic_fetch_or(&seen[tag / 8], bit) & bit) == 0);
            CHECK_EQ(entries[i].events, KVT_OP_RELEASED);
            if (entries[i].status == KVT_OK) {
                CHECK_EQ(entries[i].bytes_done, 64);
                CHECK_EQ(entries[i].items_failed, 0);
            } else {
                CHECK(entries[i].status == KVT_E_CANCELLED || entries[i].status == KVT_E_TIMEOUT);
                atomic_fetch_add(&cancelled, 1);
            }
            if (entries[i].op != NULL) CHECK_OK(kvt_op_free(&entries[i].op));
        }
        atomic_fetch_add(&completed, count);
    }
}

int main(int argc, char **argv) {
    check_begin();
    total = count_arg(argc, argv, 1000000);
    seen = calloc(total / 8 + 1, 1);
    CHECK(seen != NULL);
    kvt_runtime_opts_t opts = KVT_RUNTIME_OPTS_INIT;
    opts.workers = 2;
    opts.max_ops = 4096;
    CHECK_OK(kvt_runtime_open(&opts, &runtime, NULL));
    queue = open_queue(runtime, 2048);
    buffer = open_buffer(runtime, 64 * BATCH, NULL);
    pthread_t threads[PRODUCERS + CONSUMERS];
    for (int i = 0; i < CONSUMERS; i++) threads[i] = start_thread(consumer, NULL);
    for (int i = 0; i < PRODUCERS; i++)
        threads[CONSUMERS + i] = start_thread(producer, (void *)(uintptr_t)(i * 1234567));
    for (int i = CONSUMERS + PRODUCERS; i-- > 0;) join_thread(threads[i]);

    CHECK_EQ(atomic_load(&completed), total);
    for (uint64_t tag = 0; tag < total; tag++) CHECK((seen[tag / 8] >> (tag % 8) & 1) == 1);
    kvt_queue_stats_t stats = KVT_QUEUE_STATS_INIT;
    CHECK_OK(kvt_queue_stats(queue, &stats));
    CHECK_EQ(stats.posted, total);
    CHECK_EQ(stats.pending + stats.reserved, 0);
    CHECK(stats.peak <= stats.capacity);
    kvt_runtime_stats_t counters = KVT_RUNTIME_STATS_INIT;
    CHECK_OK(kvt_runtime_stats(runtime, &counters));
    CHECK_EQ(counters.ops_submitted, total);
    wait_no_ops(runtime);
    CHECK_EQ(counters.poisoned, 0);
    free_buffer(&buffer);
    close_queue(&queue);
    close_runtime(&runtime);
    printf("stress: %" PRIu64 " ops, %" PRIu64 " ended early, %" PRIu64 " refusals\n", total,
           atomic_load(&cancelled), atomic_load(&refused));
    free((void *)seen);
    return check_end("stress");
}
