/* Tests of ops: copied bytes and checksums, results per item, cancellation, deadlines, the order
 * of an op's events, priorities, limits. */

#include "gate.h"
#include "xxh3.h"

static void fill(uint8_t *at, uint64_t bytes, uint64_t seed) {
    for (uint64_t i = 0; i < bytes; i++) at[i] = (uint8_t)(next_random(&seed) >> 32);
}

static void checksums_match_the_reference(kvt_runtime_t *runtime) {
    const uint64_t room = 4096 * 200 + 77;
    uint8_t *bytes = NULL;
    kvt_buffer_t *buffer = open_buffer(runtime, room, &bytes);
    fill(bytes, room, 42);
    uint64_t lengths[] = {0,   1,   2,   3,    4,    5,    8,    9,    16,     17,         64,
                          128, 129, 240, 241,  256,  512,  1024, 1025, 2048,   4095,       4096,
                          4097, 8192, 9000, 4096 * 30, 4096 * 31 - 1, 4096 * 65, 4096 * 130 + 1, room};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        const uint64_t n = lengths[i];
        const uint64_t from = n < room ? (i * 13) % (room - n < 4096 ? room - n : 4096) : 0;
        const uint64_t want = reference_checksum(bytes + from, n);
        uint64_t direct = 0;
        CHECK_OK(kvt_checksum(bytes + from, n, &direct));
        CHECK_EQ(direct, want);
        kvt_buffer_item_t item = sum_item(buffer, n);
        item.src_offset = from;
        kvt_op_t *op = submit(runtime, NULL, &item, 1);
        CHECK_OK(kvt_op_wait(op, KVT_OP_RELEASED, 0));
        kvt_op_item_t result;
        uint64_t count = 0;
        CHECK_OK(kvt_op_items(op, 0, &result, 1, sizeof result, &count));
        CHECK_EQ(count, 1);
        CHECK_EQ(result.value, want);
        CHECK_EQ(result.done, 1);
        CHECK_EQ(result.status, KVT_OK);
        CHECK_EQ(info_of(op).bytes_done, n);
        CHECK_OK(finish_op(&op));
    }
    uint64_t sum = 0;
    CHECK_OK(kvt_checksum(NULL, 0, &sum));
    CHECK_EQ(sum, UINT64_C(0x2d06800538d394c2)); /* XXH3-64 of no bytes, as published */
    sum = 5;
    CHECK_IS(kvt_checksum(NULL, 1, &sum), KVT_E_INVALID);
    CHECK_IS(kvt_checksum(bytes, UINT64_MAX, &sum), KVT_E_INVALID);
    CHECK_IS(kvt_checksum(bytes, 1, NULL), KVT_E_INVALID);
    CHECK_EQ(sum, 5);
    free_buffer(&buffer);
}

/* Copies between and inside buffers equal memmove on a model. */
static void copies_match_memmove(kvt_runtime_t *runtime, uint64_t rounds) {
    const uint64_t room = 60000;
    uint8_t *a = NULL, *b = NULL;
    kvt_buffer_t *buffers[2] = {open_buffer(runtime, room, &a), open_buffer(runtime, room, &b)};
    uint8_t *real[2] = {a, b};
    uint8_t *model[2] = {malloc(room), malloc(room)};
    CHECK(model[0] != NULL && model[1] != NULL);
    for (int i = 0; i < 2; i++) {
        fill(real[i], room, 7 + (uint64_t)i);
        memcpy(model[i], real[i], room);
    }
    uint64_t state = 99;
    for (uint64_t i = 0; i < rounds; i++) {
        const uint64_t r = next_random(&state);
        const int from = r & 1, to = r >> 1 & 1;
        const uint64_t n = next_random(&state) % room;
        kvt_buffer_item_t item = copy_item(buffers[to], buffers[from], n);
        item.src_offset = next_random(&state) % (room - n + 1);
        item.dst_offset = next_random(&state) % (room - n + 1);
        const uint8_t *source = model[from] + item.src_offset;
        const uint64_t sum = reference_checksum(source, n);
        item.kind |= r >> 2 & (KVT_ITEM_CHECKSUM | KVT_ITEM_VERIFY);
        const int wrong = (item.kind & KVT_ITEM_VERIFY) != 0 && (r >> 8 & 3) == 0;
        item.expect = wrong ? sum + 1 : sum;
        kvt_op_t *op = submit(runtime, NULL, &item, 1);
        CHECK_OK(kvt_op_wait(op, KVT_OP_RELEASED, 0));
        kvt_op_item_t result;
        uint64_t count = 0;
        CHECK_OK(kvt_op_items(op, 0, &result, 1, sizeof result, &count));
        if (item.kind != KVT_ITEM_COPY) CHECK_EQ(result.value, sum);
        CHECK_IS(finish_op(&op), wrong ? KVT_E_CORRUPT : KVT_OK);
        memmove(model[to] + item.dst_offset, source, n); /* also copied if the checksum is wrong */
        CHECK(memcmp(model[to], real[to], room) == 0);
    }
    for (int i = 0; i < 2; i++) {
        CHECK(memcmp(model[i], real[i], room) == 0);
        free(model[i]);
        free_buffer(&buffers[i]);
    }
}

static void prefault_touches_pages(kvt_runtime_t *runtime) {
    uint8_t *bytes = NULL;
    kvt_buffer_t *buffer = open_buffer(runtime, 100000, &bytes);
    fill(bytes, 100000, 3);
    const uint64_t before = reference_checksum(bytes, 100000);
    kvt_buffer_item_t item;
    memset(&item, 0, sizeof item);
    item.kind = KVT_ITEM_PREFAULT;
    item.dst = buffer;
    const uint64_t ranges[][2] = {{0, 100000}, {1, 1}, {4095, 2}, {99999, 1}, {100000, 0}, {0, 0}};
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        item.dst_offset = ranges[i][0];
        item.bytes = ranges[i][1];
        kvt_op_t *op = submit(runtime, NULL, &item, 1);
        CHECK_OK(finish_op(&op));
    }
    CHECK_EQ(reference_checksum(bytes, 100000), before);
    free_buffer(&buffer);
}

static void is_refused(kvt_runtime_t *runtime, const kvt_buffer_item_t *item) {
    kvt_op_t *op = NULL;
    kvt_error_t *err = NULL;
    CHECK_IS(kvt_buffer_submit(runtime, NULL, item, 1, sizeof *item, &op, &err), KVT_E_INVALID);
    CHECK(op == NULL && strlen(kvt_error_message(err)) > 0);
    CHECK_OK(kvt_error_free(&err));
}

static void invalid_items_are_refused(kvt_runtime_t *runtime) {
    uint8_t *bytes = NULL;
    kvt_buffer_t *buffer = open_buffer(runtime, 100, &bytes);
    const uint64_t bad[][2] = {{0, 101},          {1, 100},
                               {100, 1},          {101, 0},
                               {UINT64_MAX, 1},   {1, UINT64_MAX},
                               {UINT64_MAX, UINT64_MAX}, {UINT64_C(1) << 63, UINT64_C(1) << 63},
                               {UINT64_MAX - 50, 100},   {0, UINT64_C(1) << 63}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        kvt_buffer_item_t item = sum_item(buffer, bad[i][1]);
        item.src_offset = bad[i][0];
        is_refused(runtime, &item);
        item = copy_item(buffer, buffer, bad[i][1]);
        item.dst_offset = bad[i][0];
        is_refused(runtime, &item);
    }
    for (uint32_t kind = 0; kind < 64; kind++) {
        if (kind >= 1 && kind <= KVT_ITEM_PREFAULT) continue;
        kvt_buffer_item_t item = copy_item(buffer, buffer, 1);
        item.kind = kind;
        is_refused(runtime, &item);
    }
    kvt_buffer_item_t item = copy_item(buffer, buffer, 1);
    item.kind = KVT_ITEM_CHECKSUM; /* writes nothing, so a target is invalid */
    is_refused(runtime, &item);
    item.kind = KVT_ITEM_PREFAULT; /* reads nothing, so a source is invalid */
    is_refused(runtime, &item);
    item.kind = UINT32_MAX;
    is_refused(runtime, &item);
    CHECK_EQ(bytes[0], 0);
    free_buffer(&buffer);
}

/* Every item of an op has its own status; the op has the first error. */
static void each_item_has_its_own_status(kvt_runtime_t *runtime) {
    enum { N = 300 };
    uint8_t *bytes = NULL;
    kvt_buffer_t *buffer = open_buffer(runtime, N * 16, &bytes);
    fill(bytes, N * 16, 11);
    kvt_buffer_item_t items[N];
    for (int i = 0; i < N; i++) {
        items[i] = sum_item(buffer, 16);
        items[i].src_offset = 16 * (uint64_t)i;
        items[i].kind = KVT_ITEM_VERIFY;
        items[i].expect = reference_checksum(bytes + 16 * i, 16) + (i % 10 == 7);
    }
    kvt_op_t *op = submit(runtime, NULL, items, N);
    CHECK_OK(kvt_op_wait(op, KVT_OP_ISSUED | KVT_OP_RESOLVED | KVT_OP_RELEASED, 0));
    const kvt_op_info_t info = info_of(op);
    CHECK_EQ(info.status, KVT_E_CORRUPT);
    CHECK_EQ(info.items, N);
    CHECK_EQ(info.items_done, N);
    CHECK_EQ(info.items_failed, N / 10);
    CHECK_EQ(info.bytes_done, 16 * (N - N / 10));
    CHECK_EQ(info.state, KVT_OP_ISSUED | KVT_OP_RESOLVED | KVT_OP_RELEASED);
    kvt_op_item_t results[N];
    uint64_t count = 0, seen = 0;
    while (seen < N) {
        CHECK_OK(kvt_op_items(op, seen, results + seen, 77, sizeof *results, &count));
        CHECK(count > 0);
        seen += count;
    }
    CHECK_EQ(seen, N);
    CHECK_OK(kvt_op_items(op, N, results, 1, sizeof *results, &count));
    CHECK_EQ(count, 0);
    for (int i = 0; i < N; i++) {
        CHECK_EQ(results[i].status, i % 10 == 7 ? KVT_E_CORRUPT : KVT_OK);
        CHECK_EQ(results[i].value, items[i].expect - (i % 10 == 7));
    }
    kvt_error_t *err = NULL;
    CHECK_OK(kvt_op_error(op, &err));
    kvt_error_info_t text = KVT_ERROR_INFO_INIT;
    CHECK_OK(kvt_error_info(err, &text));
    CHECK_EQ(text.status, KVT_E_CORRUPT);
    CHECK_OK(kvt_error_free(&err));
    CHECK_OK(kvt_op_free(&op));
    op = submit(runtime, NULL, items, 1);
    CHECK_OK(kvt_op_wait(op, KVT_OP_RELEASED, 0));
    CHECK_IS(kvt_op_error(op, &err), KVT_E_NOT_FOUND);
    CHECK_IS(kvt_op_error(op, NULL), KVT_E_INVALID);
    CHECK(err == NULL);
    CHECK_OK(kvt_op_free(&op));
    free_buffer(&buffer);
}

/* A call with one invalid item has no effect. */
static void one_invalid_item_refuses_the_call(kvt_runtime_t *runtime) {
    uint8_t *bytes = NULL;
    kvt_buffer_t *buffer = open_buffer(runtime, 64, &bytes);
    bytes[0] = 1;
    kvt_buffer_item_t items[3];
    for (int i = 0; i < 3; i++) {
        items[i] = copy_item(buffer, buffer, 1);
        items[i].dst_offset = 10 + (uint64_t)i;
    }
    items[2].bytes = 65;
    kvt_op_t *ops[3] = {NULL, NULL, NULL};
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    for (opts.flags = 0; opts.flags <= KVT_SUBMIT_EACH; opts.flags++)
        CHECK_IS(kvt_buffer_submit(runtime, &opts, items, 3, sizeof *items, ops, NULL),
                 KVT_E_INVALID);
    CHECK(ops[0] == NULL && ops[1] == NULL && ops[2] == NULL);
    kvt_buffer_info_t info = KVT_BUFFER_INFO_INIT;
    CHECK_OK(kvt_buffer_info(buffer, &info));
    CHECK_EQ(info.in_flight, 0);
    CHECK(bytes[10] == 0 && bytes[11] == 0);
    opts.flags = 0; /* without op and queue nothing reports the completion */
    CHECK_IS(kvt_buffer_submit(runtime, &opts, items, 1, sizeof *items, NULL, NULL), KVT_E_INVALID);
    free_buffer(&buffer);
}

/* Cancelling queued, running and completed ops; the first result counts. */
static void cancel_keeps_the_first_result(void) {
    kvt_runtime_t *runtime = open_runtime(1, NULL);
    gate_t *gate = make_gate(runtime);
    kvt_buffer_t *buffer = open_buffer(runtime, 64, NULL);
    kvt_buffer_item_t items[8];
    for (int i = 0; i < 8; i++) items[i] = sum_item(buffer, 8);
    kvt_op_t *queued = NULL, *running = NULL;
    items[0] = gate_item(gate);
    running = submit(runtime, NULL, items, 8);
    items[0] = sum_item(buffer, 8);
    queued = submit(runtime, NULL, items, 8);
    wait_entered(gate);
    CHECK((info_of(running).state & KVT_OP_ISSUED) != 0);
    CHECK_IS(kvt_op_free(&running), KVT_E_BUSY);
    CHECK_IS(kvt_op_free(&queued), KVT_E_BUSY);
    kvt_op_t *both[2] = {queued, running};
    CHECK_IS(kvt_op_free_many(both, 2), KVT_E_BUSY);
    CHECK(running != NULL && queued != NULL && both[0] == queued);
    CHECK_IS(kvt_buffer_free(&buffer), KVT_E_BUSY);
    kvt_error_t *err = NULL;
    CHECK_IS(kvt_op_error(running, &err), KVT_E_STATE);
    CHECK_IS(kvt_op_wait(running, KVT_OP_RELEASED, in_ms(1)), KVT_E_TIMEOUT);
    CHECK_IS(kvt_op_wait(running, KVT_OP_RELEASED, 1), KVT_E_TIMEOUT); /* the deadline has passed */

    CHECK_OK(kvt_op_cancel(queued));
    kvt_op_info_t info = info_of(queued); /* ended at once */
    CHECK_EQ(info.state,
             KVT_OP_ISSUED | KVT_OP_RESOLVED | KVT_OP_RELEASED | KVT_OP_CANCEL);
    CHECK_EQ(info.status, KVT_E_CANCELLED);
    CHECK_EQ(info.items_done, 8);
    CHECK_EQ(info.items_failed, 8);
    CHECK_EQ(info.bytes_done, 0);

    CHECK_OK(kvt_op_cancel(running));
    CHECK_OK(kvt_op_cancel(running)); /* a second cancel is valid */
    CHECK_EQ(info_of(running).state & KVT_OP_RELEASED, 0); /* the worker still reads the memory */
    open_gate(gate);
    CHECK_OK(kvt_op_wait(running, KVT_OP_RELEASED, hang_guard()));
    info = info_of(running);
    CHECK_EQ(info.status, KVT_E_CANCELLED);
    CHECK_EQ(info.items_done, 8);
    CHECK_EQ(info.items_failed, 7); /* the item that had started was executed */
    CHECK_EQ(info.bytes_done, 8 * (8 - info.items_failed));
    CHECK_OK(kvt_op_free_many(both, 2));
    CHECK(both[0] == NULL && both[1] == NULL);

    kvt_op_t *done = submit(runtime, NULL, items, 1);
    CHECK_OK(kvt_op_wait(done, KVT_OP_RELEASED, 0));
    CHECK_OK(kvt_op_cancel(done)); /* too late */
    CHECK_OK(finish_op(&done));
    free_gate(gate);
    free_buffer(&buffer);
    close_runtime(&runtime);
}

static void *open_after_a_pause(void *gate) {
    for (int i = 0; i < 100; i++) short_pause();
    open_gate(gate);
    return NULL;
}

/* A wait for ISSUED returns when the op starts. The op cannot end before that, because a gate
 * blocks its only item. */
static void wait_for_issued_returns_at_the_start(void) {
    kvt_runtime_t *runtime = open_runtime(1, NULL);
    gate_t *before = make_gate(runtime), *inside = make_gate(runtime);
    const kvt_buffer_item_t items[2] = {gate_item(before), gate_item(inside)};
    kvt_op_t *first = submit(runtime, NULL, &items[0], 1);
    kvt_op_t *op = submit(runtime, NULL, &items[1], 1);
    wait_entered(before);
    CHECK_EQ(info_of(op).state, 0);
    /* The pause lets the wait below start first. If it is too short, the wait returns at once. */
    pthread_t opener = start_thread(open_after_a_pause, before);
    CHECK_OK(kvt_op_wait(op, KVT_OP_ISSUED, hang_guard()));
    CHECK_EQ(info_of(op).state & (KVT_OP_RESOLVED | KVT_OP_RELEASED), 0);
    join_thread(opener);
    open_gate(inside);
    CHECK_OK(finish_op(&first));
    CHECK_OK(finish_op(&op));
    free_gate(before);
    free_gate(inside);
    close_runtime(&runtime);
}

/* A deadline resolves a running op; the release follows, and the queue reports both in order.
 * Returns 0 if the deadline passed before a worker started the op; the caller then tries a later
 * one. */
static int deadline_resolves_a_running_op(kvt_runtime_t *runtime, kvt_queue_t *queue, uint64_t ms) {
    gate_t *gate = make_gate(runtime);
    const kvt_buffer_item_t items[2] = {gate_item(gate), gate_item(gate)};
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    opts.queue = queue;
    opts.tag = 5;
    opts.notify = KVT_OP_ISSUED | KVT_OP_RESOLVED | KVT_OP_RELEASED;
    opts.deadline_ns = in_ms(ms);
    kvt_op_t *op = submit(runtime, &opts, items, 2);
    opts.tag = 6;
    kvt_op_t *queued = submit(runtime, &opts, items, 2);
    CHECK_OK(kvt_op_wait(op, KVT_OP_RESOLVED, hang_guard()));
    CHECK_EQ(info_of(op).status, KVT_E_TIMEOUT);
    const int is_running = is_entered(gate);
    if (is_running) CHECK_IS(kvt_op_free(&op), KVT_E_BUSY);
    /* Released before the gate opens: no worker had started it. */
    CHECK_OK(kvt_op_wait(queued, KVT_OP_RELEASED, hang_guard()));
    open_gate(gate);
    CHECK_OK(kvt_op_wait(op, KVT_OP_RELEASED, hang_guard()));
    const kvt_op_info_t late = info_of(op);
    CHECK_EQ(late.status, KVT_E_TIMEOUT); /* the first result stays */
    CHECK_EQ(late.items_done, 2);
    CHECK_EQ(info_of(queued).status, KVT_E_TIMEOUT);
    CHECK_EQ(info_of(queued).items_failed, 2);

    uint32_t reported[2] = {0, 0};
    const uint32_t all = KVT_OP_ISSUED | KVT_OP_RESOLVED | KVT_OP_RELEASED;
    while (reported[0] != all || reported[1] != all) {
        kvt_completion_t entry;
        uint64_t count = 0;
        CHECK_OK(kvt_queue_wait(queue, hang_guard(), &entry, 1, sizeof entry, &count));
        CHECK(entry.tag == 5 || entry.tag == 6);
        uint32_t *own = &reported[entry.tag - 5];
        CHECK_EQ(*own & entry.events, 0); /* each event once */
        CHECK(entry.events > *own);       /* and in order */
        CHECK(entry.op == (entry.tag == 5 ? op : queued));
        if (entry.events & (KVT_OP_RESOLVED | KVT_OP_RELEASED))
            CHECK_EQ(entry.status, KVT_E_TIMEOUT);
        else
            CHECK_EQ(entry.status, KVT_OK);
        *own |= entry.events;
    }
    kvt_queue_stats_t stats = KVT_QUEUE_STATS_INIT;
    CHECK_OK(kvt_queue_stats(queue, &stats));
    CHECK_EQ(stats.reserved + stats.pending, 0);
    CHECK_OK(kvt_op_free(&op));
    CHECK_OK(kvt_op_free(&queued));
    free_gate(gate);
    return is_running;
}

static void deadlines_end_ops(void) {
    kvt_runtime_t *runtime = open_runtime(1, NULL);
    kvt_queue_t *queue = open_queue(runtime, 16);
    uint64_t ms = 40;
    while (!deadline_resolves_a_running_op(runtime, queue, ms)) ms *= 2; /* the alarm limits it */

    /* A deadline in the past is accepted: the op times out, even if a worker started it. */
    gate_t *gate = make_gate(runtime);
    kvt_buffer_t *buffer = open_buffer(runtime, 64, NULL);
    const kvt_buffer_item_t blocked = gate_item(gate), item = sum_item(buffer, 8);
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    opts.queue = queue;
    opts.deadline_ns = 1;
    kvt_op_t *op = submit(runtime, &opts, &blocked, 1);
    CHECK_OK(kvt_op_wait(op, KVT_OP_RESOLVED, hang_guard()));
    open_gate(gate);
    CHECK_EQ(finish_op(&op), KVT_E_TIMEOUT);
    free_gate(gate);
    /* A distant deadline has no effect. */
    opts.deadline_ns = UINT64_MAX;
    op = submit(runtime, &opts, &item, 1);
    CHECK_OK(finish_op(&op));
    close_queue(&queue);
    free_buffer(&buffer);
    close_runtime(&runtime);
}

/* Every subset of events, for ops that run and ops that end before they start: each requested event
 * is reported once, and no place in the queue stays reserved. */
static void every_requested_event_is_reported_once(void) {
    kvt_runtime_t *runtime = open_runtime(1, NULL);
    kvt_budget_t *budget = open_budget(runtime, 10);
    kvt_account_t *account = open_account(budget);
    kvt_buffer_t *buffer = open_buffer(runtime, 64, NULL);
    const kvt_buffer_item_t item = sum_item(buffer, 8);
    for (int how = 0; how < 4; how++) {
        for (uint32_t notify = 1; notify < 8; notify++) {
            kvt_queue_t *queue = open_queue(runtime, 3);
            kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
            opts.queue = queue;
            opts.notify = notify;
            kvt_op_t *op = NULL;
            if (how == 0) {
                op = submit(runtime, &opts, &item, 1);
            } else if (how == 1) { /* granted immediately */
                op = reserve_later(account, 10, &opts);
            } else { /* ended while waiting: by a cancel or its deadline */
                CHECK_OK(kvt_account_reserve(account, KVT_TIER_DISK, 10, NULL));
                if (how == 3) opts.deadline_ns = in_ms(2);
                op = reserve_later(account, 10, &opts);
                if (how == 2) CHECK_OK(kvt_op_cancel(op));
            }
            CHECK_OK(kvt_op_wait(op, KVT_OP_RELEASED, hang_guard()));
            uint32_t reported = 0;
            while (reported != notify) {
                kvt_completion_t entry;
                uint64_t count = 0;
                CHECK_OK(kvt_queue_wait(queue, hang_guard(), &entry, 1, sizeof entry, &count));
                CHECK_EQ(entry.events & reported, 0);
                CHECK_EQ(entry.events & ~notify, 0);
                reported |= entry.events;
            }
            kvt_queue_stats_t stats = KVT_QUEUE_STATS_INIT;
            CHECK_OK(kvt_queue_stats(queue, &stats));
            CHECK_EQ(stats.reserved, 0);
            const kvt_status_t want[] = {KVT_OK, KVT_OK, KVT_E_CANCELLED, KVT_E_TIMEOUT};
            CHECK_IS(finish_op(&op), want[how]);
            if (how > 0) unreserve(account, 10);
            close_queue(&queue);
        }
    }
    free_buffer(&buffer);
    CHECK_OK(kvt_account_close(&account, NULL));
    CHECK_OK(kvt_budget_close(&budget, NULL));
    close_runtime(&runtime);
}

static void submit_each_makes_one_op_per_item(kvt_runtime_t *runtime) {
    enum { N = 200 };
    uint8_t *bytes = NULL;
    kvt_buffer_t *buffer = open_buffer(runtime, N * 8, &bytes);
    fill(bytes, N * 8, 5);
    kvt_queue_t *queue = open_queue(runtime, N);
    kvt_buffer_item_t items[N];
    for (int i = 0; i < N; i++) {
        items[i] = sum_item(buffer, 8);
        items[i].src_offset = 8 * (uint64_t)i;
        items[i].tag = 1000 + (uint64_t)i;
        if (i % 50 == 3) {
            items[i].kind = KVT_ITEM_VERIFY;
            items[i].expect = 1;
        }
    }
    for (int detached = 0; detached < 2; detached++) {
        kvt_op_t *ops[N];
        memset(ops, 0, sizeof ops);
        kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
        opts.queue = queue;
        opts.tag = 7; /* ignored: items have their own tags */
        opts.flags = KVT_SUBMIT_EACH;
        CHECK_OK(kvt_buffer_submit(runtime, &opts, items, N, sizeof *items,
                                   detached ? NULL : ops, NULL));
        uint8_t seen[N] = {0};
        for (int got = 0; got < N;) {
            kvt_completion_t entries[16];
            uint64_t count = 0;
            CHECK_OK(kvt_queue_wait(queue, hang_guard(), entries, 16, sizeof *entries, &count));
            for (uint64_t k = 0; k < count; k++, got++) {
                const uint64_t i = entries[k].tag - 1000;
                CHECK(i < N && !seen[i]);
                seen[i] = 1;
                CHECK(entries[k].op == (detached ? NULL : ops[i]));
                CHECK_EQ(entries[k].value, reference_checksum(bytes + 8 * i, 8));
                CHECK_EQ(entries[k].status, i % 50 == 3 ? KVT_E_CORRUPT : KVT_OK);
                CHECK_EQ(entries[k].items_failed, i % 50 == 3);
                CHECK_EQ(entries[k].events, KVT_OP_RELEASED);
                CHECK_EQ(entries[k].bytes_done, i % 50 == 3 ? 0 : 8);
            }
        }
        CHECK_OK(kvt_op_free_many(ops, N));
    }
    close_queue(&queue);
    free_buffer(&buffer);
}

static void full_runtime_and_queue_refuse_ops(void) {
    kvt_runtime_opts_t runtime_opts = KVT_RUNTIME_OPTS_INIT;
    runtime_opts.workers = 1;
    runtime_opts.max_ops = 4;
    kvt_runtime_t *runtime = NULL;
    CHECK_OK(kvt_runtime_open(&runtime_opts, &runtime, NULL));
    kvt_buffer_t *buffer = open_buffer(runtime, 8, NULL);
    kvt_buffer_item_t items[5];
    for (int i = 0; i < 5; i++) items[i] = sum_item(buffer, 8);
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    opts.flags = KVT_SUBMIT_EACH;
    kvt_op_t *ops[5] = {NULL, NULL, NULL, NULL, NULL};
    CHECK_IS(kvt_buffer_submit(runtime, &opts, items, 5, sizeof *items, ops, NULL), KVT_E_AGAIN);
    CHECK(ops[0] == NULL);
    CHECK_OK(kvt_buffer_submit(runtime, &opts, items, 4, sizeof *items, ops, NULL));
    for (int i = 0; i < 4; i++) CHECK_OK(kvt_op_wait(ops[i], KVT_OP_RELEASED, 0));
    /* A completed op counts until it is freed. */
    CHECK_IS(kvt_buffer_submit(runtime, NULL, items, 1, sizeof *items, &ops[4], NULL),
             KVT_E_AGAIN);
    CHECK_OK(kvt_op_free(&ops[2]));
    CHECK_OK(kvt_buffer_submit(runtime, NULL, items, 1, sizeof *items, &ops[4], NULL));
    CHECK_IS(kvt_buffer_submit(runtime, NULL, items, 1, sizeof *items, &ops[2], NULL),
             KVT_E_AGAIN);
    kvt_runtime_stats_t stats = KVT_RUNTIME_STATS_INIT;
    CHECK_OK(kvt_runtime_stats(runtime, &stats));
    CHECK_EQ(stats.ops_rejected, 3);
    CHECK_EQ(stats.ops_live, 4);
    CHECK_OK(kvt_op_wait(ops[4], KVT_OP_RELEASED, 0));
    CHECK_OK(kvt_op_free_many(ops, 5));

    /* A full queue: an op is refused if the queue has no place for its completions. */
    kvt_queue_t *queue = open_queue(runtime, 2);
    opts.flags = 0;
    opts.queue = queue;
    CHECK_OK(kvt_buffer_submit(runtime, &opts, items, 1, sizeof *items, NULL, NULL));
    opts.notify = KVT_OP_ISSUED | KVT_OP_RELEASED; /* may need two places */
    CHECK_IS(kvt_buffer_submit(runtime, &opts, items, 1, sizeof *items, NULL, NULL), KVT_E_AGAIN);
    opts.notify = 0;
    CHECK_OK(kvt_buffer_submit(runtime, &opts, items, 1, sizeof *items, NULL, NULL));
    CHECK_IS(kvt_buffer_submit(runtime, &opts, items, 1, sizeof *items, NULL, NULL), KVT_E_AGAIN);
    for (int got = 0; got < 2;) {
        kvt_completion_t entries[2];
        uint64_t count = 0;
        CHECK_OK(kvt_queue_wait(queue, 0, entries, 2, sizeof *entries, &count));
        got += (int)count;
    }
    CHECK_OK(kvt_buffer_submit(runtime, &opts, items, 1, sizeof *items, NULL, NULL));
    kvt_queue_stats_t queue_stats = KVT_QUEUE_STATS_INIT;
    CHECK_OK(kvt_queue_stats(queue, &queue_stats));
    CHECK_EQ(queue_stats.refused, 2);
    CHECK_EQ(queue_stats.capacity, 2);
    CHECK_EQ(queue_stats.peak, 2);
    close_queue(&queue);
    free_buffer(&buffer);
    close_runtime(&runtime);
}

/* Waiting ops start in the order of their priority. */
static void ops_start_by_priority(void) {
    kvt_runtime_t *runtime = open_runtime(1, NULL);
    gate_t *gate = make_gate(runtime);
    kvt_queue_t *queue = open_queue(runtime, 64);
    kvt_buffer_t *buffer = open_buffer(runtime, 64, NULL);
    const kvt_buffer_item_t item = sum_item(buffer, 8), blocked = gate_item(gate);
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    kvt_op_t *blocker = submit(runtime, &opts, &blocked, 1);
    wait_entered(gate);
    opts.queue = queue;
    const uint32_t order[] = {KVT_PRIORITY_BACKGROUND, KVT_PRIORITY_PREFETCH, KVT_PRIORITY_DEMAND,
                              KVT_PRIORITY_DEMAND, KVT_PRIORITY_PREFETCH};
    for (int i = 0; i < 5; i++) {
        opts.priority = order[i];
        opts.tag = order[i];
        CHECK_OK(kvt_buffer_submit(runtime, &opts, &item, 1, sizeof item, NULL, NULL));
    }
    open_gate(gate); /* all five wait by now */
    uint64_t before = 0;
    for (int got = 0; got < 5;) {
        kvt_completion_t entries[8];
        uint64_t count = 0;
        CHECK_OK(kvt_queue_wait(queue, hang_guard(), entries, 8, sizeof *entries, &count));
        for (uint64_t k = 0; k < count; k++, got++) {
            CHECK(entries[k].tag >= before);
            before = entries[k].tag;
        }
    }
    CHECK_OK(finish_op(&blocker));
    free_gate(gate);
    close_queue(&queue);
    free_buffer(&buffer);
    close_runtime(&runtime);
}

int main(int argc, char **argv) {
    check_begin();
    const uint64_t rounds = count_arg(argc, argv, 2000);
    kvt_runtime_t *runtime = open_runtime(3, NULL);
    checksums_match_the_reference(runtime);
    copies_match_memmove(runtime, rounds);
    prefault_touches_pages(runtime);
    invalid_items_are_refused(runtime);
    each_item_has_its_own_status(runtime);
    one_invalid_item_refuses_the_call(runtime);
    submit_each_makes_one_op_per_item(runtime);
    close_runtime(&runtime);
    full_runtime_and_queue_refuse_ops();
    ops_start_by_priority();
    cancel_keeps_the_first_result();
    deadlines_end_ops();
    wait_for_issued_returns_at_the_start();
    every_requested_event_is_reported_once();
    return check_end("ops");
}
