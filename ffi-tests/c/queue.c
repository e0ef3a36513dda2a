/* Tests of completion queues: polling, waiting, the descriptor, callbacks and the calls that
 * they may make, closing. */

#include "gate.h"

#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>

static kvt_runtime_t *runtime;
static kvt_buffer_t *buffer;

static void post(kvt_queue_t *queue, uint64_t tag) {
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    opts.queue = queue;
    opts.tag = tag;
    const kvt_buffer_item_t item = sum_item(buffer, 8);
    CHECK_OK(kvt_buffer_submit(runtime, &opts, &item, 1, sizeof item, NULL, NULL));
}

static uint64_t pending(kvt_queue_t *queue) {
    kvt_queue_stats_t stats = KVT_QUEUE_STATS_INIT;
    CHECK_OK(kvt_queue_stats(queue, &stats));
    return stats.pending;
}

static void wait_pending(kvt_queue_t *queue, uint64_t n) {
    const uint64_t until = hang_guard();
    while (pending(queue) != n) {
        CHECK(now_ns() < until);
        short_pause();
    }
}

static int readable(int fd, int timeout_ms) {
    struct pollfd p = {fd, POLLIN, 0};
    const int n = poll(&p, 1, timeout_ms);
    CHECK(n >= 0);
    return n == 1 && (p.revents & POLLIN) != 0;
}

static void polls_return_every_completion(void) {
    kvt_queue_t *queue = open_queue(runtime, 0);
    kvt_completion_t entries[8];
    uint64_t count = 9;
    CHECK_OK(kvt_queue_poll(queue, entries, 8, sizeof *entries, &count));
    CHECK_EQ(count, 0);
    count = 9;
    const uint64_t before = now_ns();
    CHECK_IS(kvt_queue_wait(queue, in_ms(20), entries, 8, sizeof *entries, &count), KVT_E_TIMEOUT);
    CHECK(now_ns() - before >= 20 * MS_NS);
    CHECK_IS(kvt_queue_wait(queue, 1, entries, 8, sizeof *entries, &count), KVT_E_TIMEOUT);
    CHECK_EQ(count, 9);

    for (uint64_t tag = 0; tag < 10; tag++) post(queue, tag);
    wait_pending(queue, 10);
    uint8_t seen[10] = {0};
    const uint64_t takes[] = {1, 8, 8};
    const uint64_t gives[] = {1, 8, 1};
    for (int i = 0; i < 3; i++) {
        CHECK_OK(kvt_queue_wait(queue, 1, entries, takes[i], sizeof *entries, &count));
        CHECK_EQ(count, gives[i]);
        for (uint64_t k = 0; k < count; k++) {
            CHECK(entries[k].tag < 10 && !seen[entries[k].tag]);
            seen[entries[k].tag] = 1;
            CHECK(entries[k].op == NULL);
            CHECK_EQ(entries[k].reserved, 0);
        }
    }
    kvt_queue_stats_t stats = KVT_QUEUE_STATS_INIT;
    CHECK_OK(kvt_queue_stats(queue, &stats));
    CHECK_EQ(stats.capacity, 4096);
    CHECK_EQ(stats.posted, 10);
    CHECK_EQ(stats.pending + stats.reserved, 0);
    CHECK_EQ(stats.peak, 10);
    close_queue(&queue);

    kvt_queue_opts_t opts = KVT_QUEUE_OPTS_INIT;
    opts.capacity = 1048577;
    CHECK_IS(kvt_queue_open(runtime, &opts, &queue, NULL), KVT_E_LIMIT);
    opts.capacity = UINT64_MAX;
    CHECK_IS(kvt_queue_open(runtime, &opts, &queue, NULL), KVT_E_LIMIT);
    opts.capacity = (UINT64_C(1) << 32) + 1;
    CHECK_IS(kvt_queue_open(runtime, &opts, &queue, NULL), KVT_E_LIMIT);
    CHECK(queue == NULL);
}

/* The descriptor is readable exactly while completions wait. */
static void descriptor_is_readable_while_completions_wait(void) {
    for (int late = 0; late < 2; late++) {
        kvt_queue_t *queue = open_queue(runtime, 16);
        int32_t fd = -1, again = -1;
        if (late) { /* the descriptor is opened after a completion */
            post(queue, 0);
            post(queue, 1);
            wait_pending(queue, 2);
        }
        CHECK_OK(kvt_queue_fd(queue, &fd));
        CHECK_OK(kvt_queue_fd(queue, &again));
        CHECK(fd >= 0 && fd == again);
        CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
        CHECK((fcntl(fd, F_GETFL) & O_NONBLOCK) != 0);
        if (!late) {
            CHECK(!readable(fd, 0));
            post(queue, 0);
            CHECK(readable(fd, 60000));
            post(queue, 1);
            wait_pending(queue, 2);
        }
        for (uint64_t left = 2; left > 0; left--) {
            CHECK(readable(fd, 0));
            kvt_completion_t entry;
            uint64_t count = 0;
            CHECK_OK(kvt_queue_poll(queue, &entry, 1, sizeof entry, &count));
            CHECK_EQ(count, 1);
        }
        CHECK(!readable(fd, 0));
        post(queue, 2); /* again after it was drained */
        CHECK(readable(fd, 60000));
        close_queue(&queue);
        CHECK(fcntl(fd, F_GETFD) == -1);
    }
    CHECK_IS(kvt_queue_fd(NULL, NULL), KVT_E_INVALID);
}

/* A reader that only uses poll(2) gets every completion of several threads. */
static void *poster(void *queue) {
    for (uint64_t i = 0; i < 2000; i++) {
        kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
        opts.queue = queue;
        const kvt_buffer_item_t item = sum_item(buffer, 8);
        kvt_status_t status;
        do {
            status = kvt_buffer_submit(runtime, &opts, &item, 1, sizeof item, NULL, NULL);
            if (status == KVT_E_AGAIN) short_pause();
        } while (status == KVT_E_AGAIN);
        CHECK_OK(status);
    }
    return NULL;
}

static void event_loop_gets_every_completion(void) {
    kvt_queue_t *queue = open_queue(runtime, 64);
    int32_t fd = -1;
    CHECK_OK(kvt_queue_fd(queue, &fd));
    pthread_t threads[2] = {start_thread(poster, queue), start_thread(poster, queue)};
    for (uint64_t got = 0; got < 4000;) {
        CHECK(readable(fd, 60000));
        kvt_completion_t entries[7];
        uint64_t count = 0;
        CHECK_OK(kvt_queue_poll(queue, entries, 7, sizeof *entries, &count));
        CHECK(count > 0); /* never readable without a completion */
        got += count;
    }
    join_thread(threads[0]);
    join_thread(threads[1]);
    CHECK(!readable(fd, 0));
    close_queue(&queue);
}

struct calls {
    kvt_queue_t *queue;
    kvt_runtime_t *runtime;
    pthread_t thread;
    atomic_uint completions, destroyed, inside, submitted;
    int reenter;
    unsigned opened;
    kvt_queue_t *to_close[16];
};

static void reenter(struct calls *calls, kvt_op_t *op) {
    kvt_queue_t *queue = calls->queue;
    kvt_runtime_t *own = calls->runtime;
    kvt_completion_t entry;
    uint64_t count = 0;
    CHECK_IS(kvt_queue_close(&queue, 0, NULL), KVT_E_REENTRANT);
    CHECK_IS(kvt_runtime_close(&own, 0, NULL, NULL), KVT_E_REENTRANT);
    CHECK(queue == calls->queue && own == calls->runtime);
    CHECK_IS(kvt_op_wait(op, KVT_OP_RELEASED, 1), KVT_E_REENTRANT);
    CHECK_IS(kvt_queue_poll(queue, &entry, 1, sizeof entry, &count), KVT_E_STATE);
    kvt_queue_t *polled = open_queue(own, 1);
    CHECK_IS(kvt_queue_wait(polled, 1, &entry, 1, sizeof entry, &count), KVT_E_REENTRANT);
    CHECK_IS(kvt_queue_close(&polled, 0, NULL), KVT_E_REENTRANT);
    CHECK(polled != NULL);
    CHECK(calls->opened < sizeof calls->to_close / sizeof *calls->to_close);
    calls->to_close[calls->opened++] = polled; /* closed outside of the callback */
    kvt_buffer_opts_t opts = KVT_BUFFER_OPTS_INIT;
    opts.bytes = 8;
    opts.flags = KVT_BUFFER_PREFAULT; /* waits for the workers */
    kvt_buffer_t *more = NULL;
    CHECK_IS(kvt_buffer_alloc(own, &opts, &more, NULL), KVT_E_REENTRANT);
    opts.flags = 0;
    CHECK_OK(kvt_buffer_alloc(own, &opts, &more, NULL));
    CHECK_OK(kvt_buffer_free(&more));
    /* Calls that do not wait are allowed. */
    CHECK_OK(kvt_op_cancel(op));
    CHECK_EQ(info_of(op).status, KVT_OK);
    if (atomic_fetch_add(&calls->submitted, 1) < 3) {
        kvt_submit_opts_t again = KVT_SUBMIT_OPTS_INIT;
        again.queue = queue;
        const kvt_buffer_item_t item = sum_item(buffer, 8);
        kvt_op_t *next = NULL;
        CHECK_OK(kvt_buffer_submit(own, &again, &item, 1, sizeof item, &next, NULL));
    }
}

static void on_completions(void *data, const kvt_completion_t *batch, uint64_t count,
                           uint64_t stride) {
    struct calls *calls = data;
    CHECK_EQ(atomic_fetch_add(&calls->inside, 1), 0); /* never concurrently */
    CHECK_EQ(atomic_load(&calls->destroyed), 0);
    CHECK(!pthread_equal(pthread_self(), calls->thread));
    CHECK(count > 0 && stride >= sizeof *batch);
    for (uint64_t i = 0; i < count; i++) {
        const kvt_completion_t *entry =
            (const kvt_completion_t *)(const void *)((const uint8_t *)batch + i * stride);
        kvt_op_t *op = entry->op;
        if (calls->reenter) reenter(calls, op);
        CHECK_OK(kvt_op_free(&op));
    }
    atomic_fetch_sub(&calls->inside, 1);
    atomic_fetch_add(&calls->completions, (unsigned)count);
}

static void on_destroy(void *data) {
    struct calls *calls = data;
    CHECK_EQ(atomic_load(&calls->inside), 0);
    atomic_fetch_add(&calls->destroyed, 1);
}

static void callback_queue_delivers_every_completion(int reentrant) {
    static struct calls calls;
    memset(&calls, 0, sizeof calls);
    calls.thread = pthread_self();
    calls.runtime = runtime;
    calls.reenter = reentrant;
    kvt_queue_opts_t opts = KVT_QUEUE_OPTS_INIT;
    opts.callback = on_completions;
    opts.user_data = &calls;
    opts.destroy = on_destroy;

    kvt_queue_t *queue = NULL; /* a failed open does not take over user_data */
    opts.capacity = UINT64_MAX;
    CHECK_IS(kvt_queue_open(runtime, &opts, &queue, NULL), KVT_E_LIMIT);
    opts.capacity = 0;
    opts.flags = 1;
    CHECK_IS(kvt_queue_open(runtime, &opts, &queue, NULL), KVT_E_INVALID);
    opts.flags = 0;
    CHECK_IS(kvt_queue_open(NULL, &opts, &queue, NULL), KVT_E_HANDLE);
    CHECK_IS(kvt_queue_open(runtime, &opts, NULL, NULL), KVT_E_INVALID);
    CHECK_EQ(atomic_load(&calls.destroyed), 0);

    CHECK_OK(kvt_queue_open(runtime, &opts, &queue, NULL));
    calls.queue = queue;
    kvt_completion_t entry;
    uint64_t count = 0;
    int32_t fd = -5;
    CHECK_IS(kvt_queue_poll(queue, &entry, 1, sizeof entry, &count), KVT_E_STATE);
    CHECK_IS(kvt_queue_wait(queue, 1, &entry, 1, sizeof entry, &count), KVT_E_STATE);
    CHECK_IS(kvt_queue_fd(queue, &fd), KVT_E_STATE);
    CHECK_EQ(fd, -5);

    const unsigned n = reentrant ? 5 : 1000;
    for (unsigned i = 0; i < n; i++) {
        kvt_submit_opts_t submit_opts = KVT_SUBMIT_OPTS_INIT;
        submit_opts.queue = queue;
        const kvt_buffer_item_t item = sum_item(buffer, 8);
        kvt_op_t *op = NULL; /* freed by the callback */
        CHECK_OK(kvt_buffer_submit(runtime, &submit_opts, &item, 1, sizeof item, &op, NULL));
    }
    const unsigned all = reentrant ? n + 3 : n;
    const uint64_t until = hang_guard();
    while (atomic_load(&calls.completions) < all) {
        CHECK(now_ns() < until);
        short_pause();
    }
    CHECK_EQ(atomic_load(&calls.destroyed), 0);
    close_queue(&queue);
    CHECK_EQ(atomic_load(&calls.destroyed), 1);
    CHECK_EQ(atomic_load(&calls.completions), all);
    for (unsigned i = 0; i < calls.opened; i++) close_queue(&calls.to_close[i]);
}

/* A close cancels the ops that report to the queue, waits for them, and drops completions that were
 * not polled. The ops stay. */
static void close_cancels_ops_of_the_queue(void) {
    kvt_runtime_t *slow = open_runtime(1, NULL);
    gate_t *gate = make_gate(slow);
    kvt_queue_t *queue = open_queue(slow, 16), *other = open_queue(slow, 16);
    const kvt_buffer_item_t item = gate_item(gate);
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    opts.queue = queue;
    kvt_op_t *running = submit(slow, &opts, &item, 1);
    kvt_op_t *queued = submit(slow, &opts, &item, 1);
    opts.queue = other;
    kvt_op_t *elsewhere = submit(slow, &opts, &item, 1);
    wait_entered(gate);
    kvt_error_t *err = NULL;
    CHECK_IS(kvt_queue_close(&queue, in_ms(2), &err), KVT_E_BUSY);
    CHECK(queue != NULL && strlen(kvt_error_message(err)) > 0);
    CHECK_OK(kvt_error_free(&err));
    opts.queue = queue;
    kvt_op_t *refused = NULL;
    CHECK_IS(kvt_buffer_submit(slow, &opts, &item, 1, sizeof item, &refused, NULL), KVT_E_CLOSED);
    CHECK_EQ(info_of(queued).status, KVT_E_CANCELLED);
    CHECK_EQ(info_of(elsewhere).state & KVT_OP_CANCEL, 0);
    open_gate(gate);
    /* Remaining completions can be waited for; only then the wait returns KVT_E_CLOSED. */
    for (int got = 0; got < 2;) {
        kvt_completion_t entries[2];
        uint64_t count = 0;
        CHECK_OK(kvt_queue_wait(queue, hang_guard(), entries, 2, sizeof *entries, &count));
        got += (int)count;
    }
    kvt_completion_t entry;
    uint64_t count = 0;
    CHECK_IS(kvt_queue_wait(queue, hang_guard(), &entry, 1, sizeof entry, &count), KVT_E_CLOSED);
    close_queue(&queue);
    CHECK_OK(finish_op(&running));
    CHECK_EQ(finish_op(&queued), KVT_E_CANCELLED);
    CHECK_OK(finish_op(&elsewhere)); /* its completion is dropped with its queue */
    close_queue(&other);
    free_gate(gate);
    close_runtime(&slow);
}

static void *waiter(void *queue) {
    kvt_completion_t entry;
    uint64_t count = 0;
    const kvt_status_t status = kvt_queue_wait(queue, 0, &entry, 1, sizeof entry, &count);
    /* A wait that started after the close gets KVT_E_HANDLE. */
    CHECK(status == KVT_E_CLOSED || status == KVT_E_HANDLE);
    return NULL;
}

/* Closing a queue wakes its waiters. */
static void close_wakes_waiters(void) {
    for (int i = 0; i < 50; i++) {
        kvt_queue_t *queue = open_queue(runtime, 4);
        pthread_t threads[3];
        for (int t = 0; t < 3; t++) threads[t] = start_thread(waiter, queue);
        for (int t = 0; t < i % 5; t++) short_pause(); /* close before or after the waits begin */
        close_queue(&queue);
        for (int t = 0; t < 3; t++) join_thread(threads[t]);
    }
}

static void queues_of_other_runtimes_are_refused(void) {
    kvt_runtime_t *other = open_runtime(1, NULL);
    kvt_queue_t *queue = open_queue(other, 4);
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    opts.queue = queue;
    const kvt_buffer_item_t item = sum_item(buffer, 8);
    kvt_op_t *op = NULL;
    CHECK_IS(kvt_buffer_submit(runtime, &opts, &item, 1, sizeof item, &op, NULL), KVT_E_INVALID);
    CHECK(op == NULL);
    close_queue(&queue);
    close_runtime(&other);
}

int main(void) {
    check_begin();
    runtime = open_runtime(2, NULL);
    buffer = open_buffer(runtime, 64, NULL);
    polls_return_every_completion();
    descriptor_is_readable_while_completions_wait();
    event_loop_gets_every_completion();
    callback_queue_delivers_every_completion(0);
    callback_queue_delivers_every_completion(1);
    queues_of_other_runtimes_are_refused();
    close_wakes_waiters();
    free_buffer(&buffer);
    close_runtime(&runtime);
    close_cancels_ops_of_the_queue();
    return check_end("queue");
}
