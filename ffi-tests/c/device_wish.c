/* What an engine does that has an accelerator of its own: a table of callbacks makes it a device,
 * the library says whether it is a good one, and then a store and a streamer copy by way of it.
 *
 * The accelerator here: a thread for each stream, events that a thread signals, and memory whose
 * addresses the processor cannot follow, so that whoever reads them without the device is found
 * out at once. */

#include "check.h"

#define STREAMS 3
#define MOST_EVENTS 4096
#define FAR (UINT64_C(1) << 52)

/* ---- the accelerator ------------------------------------------------------ */

typedef struct work {
    struct work *next;
    uint64_t after, event, count;
    /* Copies, or kernels. */
    kvt_kernel_t *kernels;
    kvt_copy_rows_t rows[];
} work_t;

typedef struct {
    pthread_t thread;
    struct accelerator *home;
    work_t *first, **last;
} lane_t;

typedef struct accelerator {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    lane_t lanes[STREAMS];
    /* 0 = free, 1 = open, 2 = it has come. */
    uint8_t events[MOST_EVENTS];
    uint64_t next_event, live_events, live_bytes, destroyed;
    int stop, lost;
} accelerator_t;

static uint8_t *near(uint64_t address, uint32_t memory) {
    return (uint8_t *)(uintptr_t)(memory == KVT_MEMORY_DEVICE ? address - FAR : address);
}

static void copy_rows(const kvt_copy_rows_t *rows) {
    uint8_t *to = near(rows->to, rows->to_memory);
    const uint8_t *from = near(rows->from, rows->from_memory);
    for (uint64_t run = 0; run < rows->runs; run++)
        memcpy(to + run * rows->to_stride_bytes, from + run * rows->from_stride_bytes,
               rows->run_bytes);
}

/* What KVT_LAUNCH_MOVE has in its table. */
typedef struct {
    uint64_t from, to;
    int64_t from_stride, to_stride;
    uint32_t run_bytes, runs;
} piece_t;

/* The one kernel that it has. What kernels name is anywhere: what is far is the accelerator's. */
static void run_kernel(const kvt_kernel_t *kernel) {
    const uint32_t far = KVT_MEMORY_DEVICE, host = KVT_MEMORY_HOST;
    CHECK_EQ(kernel->kind, KVT_LAUNCH_MOVE);
    for (uint32_t i = 0; i < kernel->count; i++) {
        piece_t piece;
        const uint8_t *table = near(kernel->table, kernel->table >= FAR ? far : host);
        memcpy(&piece, table + i * sizeof piece, sizeof piece);
        uint8_t *to = near(piece.to, piece.to >= FAR ? far : host);
        const uint8_t *from = near(piece.from, piece.from >= FAR ? far : host);
        for (int64_t run = 0; run < (int64_t)piece.runs; run++)
            memcpy(to + run * piece.to_stride, from + run * piece.from_stride, piece.run_bytes);
    }
}

static void *serve(void *data) {
    lane_t *lane = data;
    accelerator_t *home = lane->home;
    pthread_mutex_lock(&home->lock);
    for (;;) {
        work_t *work = lane->first;
        if (work == NULL) {
            if (home->stop) break;
            pthread_cond_wait(&home->changed, &home->lock);
            continue;
        }
        while (work->after != 0 && home->events[work->after % MOST_EVENTS] == 1)
            pthread_cond_wait(&home->changed, &home->lock);
        pthread_mutex_unlock(&home->lock);
        for (uint64_t i = 0; i < work->count; i++) {
            if (work->kernels != NULL) run_kernel(&work->kernels[i]);
            else copy_rows(&work->rows[i]);
        }
        pthread_mutex_lock(&home->lock);
        home->events[work->event % MOST_EVENTS] = 2;
        lane->first = work->next;
        if (lane->first == NULL) lane->last = &lane->first;
        free(work->kernels);
        free(work);
        pthread_cond_broadcast(&home->changed);
    }
    pthread_mutex_unlock(&home->lock);
    return NULL;
}

/* With the lock held. */
static uint64_t make_event(accelerator_t *home, uint8_t state) {
    if (home->live_events == MOST_EVENTS - 1) return 0;
    do home->next_event++;
    while (home->events[home->next_event % MOST_EVENTS] != 0 ||
           home->next_event % MOST_EVENTS == 0);
    home->events[home->next_event % MOST_EVENTS] = state;
    home->live_events++;
    return home->next_event;
}

/* Puts work on a stream, which has it from then on. */
static kvt_status_t enqueue(accelerator_t *home, uint32_t stream, uint64_t after, work_t *work,
                            uint64_t *event_out) {
    work->after = after;
    pthread_mutex_lock(&home->lock);
    work->event = make_event(home, 1);
    if (work->event == 0) {
        pthread_mutex_unlock(&home->lock);
        free(work->kernels);
        free(work);
        return KVT_E_AGAIN;
    }
    *event_out = work->event;
    *home->lanes[stream].last = work;
    home->lanes[stream].last = &work->next;
    pthread_cond_broadcast(&home->changed);
    pthread_mutex_unlock(&home->lock);
    return KVT_OK;
}

static kvt_status_t put_work(void *data, uint32_t stream, uint64_t after,
                             const kvt_copy_rows_t *copies, uint64_t count,
                             uint64_t stride_bytes, uint64_t *event_out) {
    accelerator_t *home = data;
    if (home->lost) return KVT_E_UNAVAILABLE;
    CHECK(stream < STREAMS && stride_bytes >= sizeof *copies);
    work_t *work = calloc(1, sizeof *work + count * sizeof *copies);
    if (work == NULL) return KVT_E_NOMEM;
    for (uint64_t i = 0; i < count; i++)
        work->rows[i] =
            *(const kvt_copy_rows_t *)(const void *)((const char *)copies + i * stride_bytes);
    work->count = count;
    return enqueue(home, stream, after, work, event_out);
}

static kvt_status_t launch(void *data, uint32_t stream, uint64_t after,
                           const kvt_kernel_t *kernels, uint64_t count, uint64_t stride_bytes,
                           uint64_t *event_out) {
    accelerator_t *home = data;
    if (home->lost) return KVT_E_UNAVAILABLE;
    CHECK(stream < STREAMS && stride_bytes >= sizeof *kernels);
    work_t *work = calloc(1, sizeof *work);
    if (work == NULL) return KVT_E_NOMEM;
    work->kernels = calloc(count + 1, sizeof *kernels);
    if (work->kernels == NULL) {
        free(work);
        return KVT_E_NOMEM;
    }
    for (uint64_t i = 0; i < count; i++)
        work->kernels[i] =
            *(const kvt_kernel_t *)(const void *)((const char *)kernels + i * stride_bytes);
    work->count = count;
    return enqueue(home, stream, after, work, event_out);
}

static kvt_status_t query(void *data, uint64_t event) {
    accelerator_t *home = data;
    if (home->lost) return KVT_E_UNAVAILABLE;
    pthread_mutex_lock(&home->lock);
    const uint8_t state = home->events[event % MOST_EVENTS];
    pthread_mutex_unlock(&home->lock);
    CHECK(state != 0);
    return state == 1 ? KVT_E_AGAIN : KVT_OK;
}

static kvt_status_t wait_for(void *data, uint64_t event, uint64_t deadline_ns) {
    accelerator_t *home = data;
    kvt_status_t status = KVT_OK;
    pthread_mutex_lock(&home->lock);
    while (home->events[event % MOST_EVENTS] == 1 && status == KVT_OK) {
        const struct timespec until = {(time_t)(deadline_ns / SECOND_NS),
                                       (long)(deadline_ns % SECOND_NS)};
        if (deadline_ns == 0) pthread_cond_wait(&home->changed, &home->lock);
        else if (pthread_cond_timedwait(&home->changed, &home->lock, &until) != 0)
            status = KVT_E_TIMEOUT;
    }
    pthread_mutex_unlock(&home->lock);
    return status;
}

static void release(void *data, uint64_t event) {
    accelerator_t *home = data;
    pthread_mutex_lock(&home->lock);
    home->events[event % MOST_EVENTS] = 0;
    home->live_events--;
    pthread_mutex_unlock(&home->lock);
}

static kvt_status_t allocate(void *data, uint64_t bytes, uint64_t *address_out) {
    accelerator_t *home = data;
    if (bytes > UINT64_C(1) << 30) return KVT_E_NOMEM;
    void *memory = NULL;
    if (posix_memalign(&memory, 256, bytes) != 0) return KVT_E_NOMEM;
    *address_out = (uint64_t)(uintptr_t)memory + FAR;
    pthread_mutex_lock(&home->lock);
    home->live_bytes += bytes;
    pthread_mutex_unlock(&home->lock);
    return KVT_OK;
}

static void give_back(void *data, uint64_t address, uint64_t bytes) {
    accelerator_t *home = data;
    free(near(address, KVT_MEMORY_DEVICE));
    pthread_mutex_lock(&home->lock);
    home->live_bytes -= bytes;
    pthread_mutex_unlock(&home->lock);
}

static kvt_status_t free_bytes(void *data, uint64_t *bytes_out) {
    (void)data;
    *bytes_out = UINT64_C(1) << 30;
    return KVT_OK;
}

/* Its own events are the same: those of work that the engine gave it past the library. */
static kvt_status_t adopt(void *data, uint64_t raw, uint64_t *event_out) {
    return put_work(data, 0, raw, NULL, 0, sizeof(kvt_copy_rows_t), event_out);
}

static kvt_status_t hold(void *data, uint64_t raw_stream, uint64_t event) {
    uint64_t mark = 0;
    const kvt_status_t status =
        put_work(data, (uint32_t)raw_stream, event, NULL, 0, sizeof(kvt_copy_rows_t), &mark);
    /* Nobody asks for the mark: it goes once it has come. */
    if (status == KVT_OK) {
        CHECK_OK(wait_for(data, mark, 0));
        release(data, mark);
    }
    return status;
}

static void destroyed(void *data) { ((accelerator_t *)data)->destroyed++; }

static void start(accelerator_t *home) {
    memset(home, 0, sizeof *home);
    CHECK(pthread_mutex_init(&home->lock, NULL) == 0);
    pthread_condattr_t attributes;
    CHECK(pthread_condattr_init(&attributes) == 0);
    CHECK(pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0);
    CHECK(pthread_cond_init(&home->changed, &attributes) == 0);
    CHECK(pthread_condattr_destroy(&attributes) == 0);
    for (int i = 0; i < STREAMS; i++) {
        home->lanes[i].home = home;
        home->lanes[i].last = &home->lanes[i].first;
        CHECK(pthread_create(&home->lanes[i].thread, NULL, serve, &home->lanes[i]) == 0);
    }
}

/* All that it gave has come back. */
static void stop(accelerator_t *home) {
    pthread_mutex_lock(&home->lock);
    home->stop = 1;
    pthread_cond_broadcast(&home->changed);
    pthread_mutex_unlock(&home->lock);
    for (int i = 0; i < STREAMS; i++) CHECK(pthread_join(home->lanes[i].thread, NULL) == 0);
    CHECK_EQ(home->live_events, 0);
    CHECK_EQ(home->live_bytes, 0);
    CHECK_EQ(home->destroyed, 1);
    CHECK(pthread_cond_destroy(&home->changed) == 0);
    CHECK(pthread_mutex_destroy(&home->lock) == 0);
}

static kvt_device_custom_t table_of(accelerator_t *home) {
    kvt_device_custom_t table = KVT_DEVICE_CUSTOM_INIT;
    table.flags = KVT_DEVICE_HAS_MEMORY;
    table.streams = STREAMS;
    table.submit = put_work;
    table.query = query;
    table.wait = wait_for;
    table.release = release;
    table.allocate = allocate;
    table.free = give_back;
    table.free_bytes = free_bytes;
    table.adopt = adopt;
    table.hold = hold;
    table.kernels = UINT64_C(1) << KVT_LAUNCH_MOVE;
    table.launch = launch;
    table.user_data = home;
    table.destroy = destroyed;
    return table;
}

/* ---- what the engine does ------------------------------------------------- */

static kvt_runtime_t *runtime;

static kvt_device_t *open_custom(const kvt_device_custom_t *table) {
    kvt_device_opts_t opts = KVT_DEVICE_OPTS_INIT;
    opts.kind = KVT_DEVICE_CUSTOM;
    opts.custom = table;
    kvt_device_t *device = NULL;
    CHECK_OK(kvt_device_open(runtime, &opts, &device, NULL));
    return device;
}

static void heard(void *data, const char *name, uint64_t name_bytes, uint32_t verdict,
                  const char *why, uint64_t why_bytes) {
    ++*(int *)data;
    if (verdict == KVT_VERDICT_FAILED)
        fprintf(stderr, "%.*s: %.*s\n", (int)name_bytes, name, (int)why_bytes, why);
}

static void conforms(kvt_device_t *device, uint64_t seed) {
    kvt_conformance_opts_t opts = KVT_CONFORMANCE_OPTS_INIT;
    kvt_conformance_t result = KVT_CONFORMANCE_INIT;
    int names = 0;
    opts.seed = seed;
    opts.rounds = 4;
    opts.flags = KVT_CONFORMANCE_CLOSES;
    CHECK_OK(kvt_device_conformance(device, &opts, heard, &names, &result, NULL));
    CHECK_EQ(result.failed, 0);
    CHECK_EQ(result.passed + result.skipped, (uint64_t)names);
    CHECK(result.passed >= 14);
}

static void check_tables(void) {
    accelerator_t home;
    start(&home);
    kvt_device_opts_t opts = KVT_DEVICE_OPTS_INIT;
    kvt_device_t *device = NULL;
    kvt_error_t *error = NULL;
    const kvt_device_custom_t good = table_of(&home);
    kvt_device_custom_t table = good;
    opts.kind = KVT_DEVICE_CUSTOM;
    CHECK_IS(kvt_device_open(runtime, &opts, &device, NULL), KVT_E_INVALID);
    opts.custom = &table;
    for (int wrong = 0; wrong < 7; wrong++) {
        table = good;
        if (wrong == 0) table.submit = NULL;
        if (wrong == 1) table.query = NULL;
        if (wrong == 2) table.allocate = NULL;
        if (wrong == 3) table.streams = 65;
        if (wrong == 4) table.launch = NULL;
        if (wrong == 5) table.flags = 1u << 20;
        if (wrong == 6) table.streams = 0;
        CHECK_IS(kvt_device_open(runtime, &opts, &device, &error), KVT_E_INVALID);
        CHECK(strlen(kvt_error_message(error)) > 5);
    }
    opts.seed = 1;
    table = good;
    CHECK_IS(kvt_device_open(runtime, &opts, &device, NULL), KVT_E_INVALID);
    opts.seed = 0;
    opts.kind = 9;
    CHECK_IS(kvt_device_open(runtime, &opts, &device, NULL), KVT_E_INVALID);
    CHECK(device == NULL && home.destroyed == 0);

    opts.kind = KVT_DEVICE_CUDA;
    opts.custom = NULL;
    opts.library = "/nowhere/libcuda.so";
    opts.library_bytes = strlen(opts.library);
    CHECK_IS(kvt_device_open(runtime, &opts, &device, &error), KVT_E_UNAVAILABLE);
    CHECK(strstr(kvt_error_message(error), "no CUDA driver") != NULL);
    CHECK_OK(kvt_error_free(&error));

    /* A device that has no waiting and gives nothing is one, too. */
    table = good;
    table.wait = NULL;
    table.allocate = NULL;
    table.free = NULL;
    table.adopt = NULL;
    table.hold = NULL;
    table.flags = 0;
    table.kernels = 0;
    table.launch = NULL;
    device = open_custom(&table);
    kvt_device_memory_t memory = KVT_DEVICE_MEMORY_INIT;
    uint64_t event = 0;
    CHECK_IS(kvt_device_alloc(device, 100, &memory, NULL), KVT_E_UNSUPPORTED);
    CHECK_IS(kvt_device_adopt(device, 1, &event, NULL), KVT_E_UNSUPPORTED);
    CHECK_OK(kvt_device_copy(device, 0, 0, NULL, 0, sizeof(kvt_copy_t), &event, NULL));
    CHECK_IS(kvt_device_hold(device, 1, event, NULL), KVT_E_UNSUPPORTED);
    CHECK_OK(kvt_device_wait(device, event, in_ms(60000), NULL));
    CHECK_OK(kvt_device_release(device, &event, 1, NULL));
    conforms(device, 3);
    CHECK_OK(kvt_device_close(&device, in_ms(60000), NULL));
    stop(&home);
}

/* Copies by hand: memory, events, the engine's own work before and after. */
static void check_copies(kvt_device_t *device, accelerator_t *home) {
    enum { TOKENS = 40, HEADS = 3, RUN = 32, BYTES = TOKENS * HEADS * RUN };
    kvt_device_info_t info = KVT_DEVICE_INFO_INIT;
    CHECK_OK(kvt_device_info(device, &info));
    CHECK_EQ(info.kind, KVT_DEVICE_CUSTOM);
    CHECK_EQ(info.flags, KVT_DEVICE_ASYNCHRONOUS | KVT_DEVICE_HAS_MEMORY);
    CHECK_EQ(info.streams, STREAMS);
    CHECK_EQ(info.free_bytes, UINT64_C(1) << 30);
    char words[64];
    uint64_t words_bytes = 0;
    CHECK_OK(kvt_device_words(device, words, sizeof words, &words_bytes));
    CHECK(words_bytes == 6 && memcmp(words, "custom", 6) == 0);

    kvt_device_memory_t memory = KVT_DEVICE_MEMORY_INIT;
    CHECK_OK(kvt_device_alloc(device, 2 * BYTES, &memory, NULL));
    CHECK(memory.memory == KVT_MEMORY_DEVICE && memory.address >= FAR);
    uint8_t there[BYTES], back[BYTES];
    uint64_t seed = 5;
    for (int i = 0; i < BYTES; i++) there[i] = (uint8_t)next_random(&seed);
    /* [heads, tokens, run] on the device, canonical in host memory. */
    kvt_copy_t copy;
    memset(&copy, 0, sizeof copy);
    copy.view.address = (void *)(uintptr_t)memory.address;
    copy.view.tokens = TOKENS;
    copy.view.heads = HEADS;
    copy.view.memory = KVT_MEMORY_DEVICE;
    copy.view.run_bytes = RUN;
    copy.view.token_stride_bytes = RUN;
    copy.view.head_stride_bytes = TOKENS * RUN;
    copy.plane = there;
    copy.way = KVT_COPY_SCATTER;
    uint64_t up = 0, down = 0, own = 0, adopted = 0;
    CHECK_OK(kvt_device_copy(device, 1, 0, &copy, 1, sizeof copy, &up, NULL));
    copy.plane = back;
    copy.way = KVT_COPY_GATHER;
    CHECK_OK(kvt_device_copy(device, 2, up, &copy, 1, sizeof copy, &down, NULL));
    CHECK_OK(kvt_device_wait(device, down, in_ms(60000), NULL));
    CHECK_OK(kvt_device_query(device, down));
    CHECK(memcmp(there, back, BYTES) == 0);
    const uint8_t *raw = near(memory.address, KVT_MEMORY_DEVICE);
    for (int t = 0; t < TOKENS; t++)
        for (int h = 0; h < HEADS; h++)
            CHECK(memcmp(raw + (h * TOKENS + t) * RUN, there + (t * HEADS + h) * RUN, RUN) == 0);

    /* The engine computes on its own stream: the library waits for that, and the engine for it. */
    kvt_copy_rows_t rows = {0};
    rows.from = memory.address;
    rows.to = memory.address + BYTES;
    rows.run_bytes = rows.from_stride_bytes = rows.to_stride_bytes = BYTES;
    rows.runs = 1;
    rows.from_memory = rows.to_memory = KVT_MEMORY_DEVICE;
    CHECK_OK(put_work(home, 0, 0, &rows, 1, sizeof rows, &own));
    CHECK_OK(kvt_device_adopt(device, own, &adopted, NULL));
    copy.view.address = (void *)(uintptr_t)(memory.address + BYTES);
    copy.view.heads = 1;
    copy.view.run_bytes = copy.view.token_stride_bytes = HEADS * RUN;
    copy.view.head_stride_bytes = 0;
    uint64_t behind = 0;
    CHECK_OK(kvt_device_copy(device, 1, adopted, &copy, 1, sizeof copy, &behind, NULL));
    CHECK_OK(kvt_device_hold(device, 0, behind, NULL));
    CHECK_OK(kvt_device_wait(device, behind, in_ms(60000), NULL));
    CHECK(memcmp(back, raw, BYTES) == 0);

    uint64_t ended[8], count = 0;
    CHECK_OK(kvt_device_poll(device, ended, 8, &count));
    CHECK_EQ(count, 4);
    CHECK_OK(kvt_device_poll(device, ended + 4, 4, &count));
    CHECK_EQ(count, 0);
    const uint64_t events[] = {up, down, adopted, behind};
    CHECK_OK(kvt_device_release(device, events, 4, NULL));
    CHECK_IS(kvt_device_release(device, events, 1, NULL), KVT_E_HANDLE);
    CHECK_IS(kvt_device_query(device, up), KVT_E_HANDLE);
    release(home, own);

    /* What cannot be. */
    kvt_error_t *error = NULL;
    copy.plane = NULL;
    CHECK_IS(kvt_device_copy(device, 1, 0, &copy, 1, sizeof copy, &up, &error), KVT_E_INVALID);
    copy.plane = back;
    copy.way = 2;
    CHECK_IS(kvt_device_copy(device, 1, 0, &copy, 1, sizeof copy, &up, &error), KVT_E_INVALID);
    copy.way = KVT_COPY_GATHER;
    copy.plane_memory = 7;
    CHECK_IS(kvt_device_copy(device, 1, 0, &copy, 1, sizeof copy, &up, &error), KVT_E_INVALID);
    copy.plane_memory = KVT_MEMORY_HOST;
    CHECK_IS(kvt_device_copy(device, STREAMS, 0, &copy, 1, sizeof copy, &up, NULL),
             KVT_E_INVALID);
    CHECK_IS(kvt_device_copy(device, 0, 77, &copy, 1, sizeof copy, &up, NULL), KVT_E_HANDLE);
    CHECK_IS(kvt_device_copy(device, 0, 0, &copy, 1, 12, &up, NULL), KVT_E_INVALID);
    kvt_kernel_t kernel;
    memset(&kernel, 0, sizeof kernel);
    kernel.kind = KVT_LAUNCH_SUM;
    CHECK_IS(kvt_device_launch(device, 0, 0, &kernel, 1, sizeof kernel, &up, NULL),
             KVT_E_UNSUPPORTED);
    CHECK_IS(kvt_device_know_host(device, NULL, 5, NULL), KVT_E_INVALID);
    CHECK_OK(kvt_device_know_host(device, back, sizeof back, NULL));
    CHECK_OK(kvt_device_forget_host(device, back, NULL));
    CHECK_OK(kvt_device_free(device, &memory, NULL));
    CHECK_IS(kvt_device_free(device, &memory, NULL), KVT_E_HANDLE);
    CHECK_OK(kvt_error_free(&error));
}

/* Two lists of columns and diagonals for one head of two, all keys for the other, laid out as
 * KVT_LAUNCH_PREFILL reads them. */
static void check_index(void) {
    kvt_index_head_t heads[2] = {{KVT_INDEX_LINES, 0, 2, 0, 0, UINT32_MAX},
                                 {KVT_INDEX_DENSE, 0, 0, 0, 0, UINT32_MAX}};
    uint32_t starts[] = {0, 3, 5}, items[] = {0, 1, 900, 0, 64};
    kvt_index_t index = KVT_INDEX_INIT;
    index.heads = heads;
    index.head_count = 2;
    index.starts = starts;
    index.start_count = 3;
    index.items = items;
    index.item_count = 5;
    kvt_kernel_t kernel;
    memset(&kernel, 0, sizeof kernel);
    kernel.kind = KVT_LAUNCH_PREFILL;
    kernel.query_count = 40;
    kernel.first = 1000;
    kernel.tokens = 1040;
    kernel.query_heads = 2;
    kernel.key_heads = 1;
    const kvt_kernel_t before = kernel;
    const uint64_t at = UINT64_C(0x7000000100);
    uint8_t bytes[80];
    uint64_t need = 0;
    CHECK_IS(kvt_launch_index(&index, &kernel, at, NULL, 0, &need, NULL), KVT_E_TOO_SMALL);
    CHECK_EQ(need, sizeof bytes);
    CHECK_IS(kvt_launch_index(&index, &kernel, at, bytes, 79, &need, NULL), KVT_E_TOO_SMALL);
    CHECK(memcmp(&kernel, &before, sizeof kernel) == 0);
    CHECK_OK(kvt_launch_index(&index, &kernel, at, bytes, sizeof bytes, &need, NULL));
    CHECK_EQ(need, sizeof heads + sizeof starts + sizeof items);
    CHECK(memcmp(bytes, heads, sizeof heads) == 0);
    CHECK(memcmp(bytes + 48, starts, sizeof starts) == 0);
    CHECK(memcmp(bytes + 60, items, sizeof items) == 0);
    CHECK_EQ(kernel.count, 2);
    CHECK_EQ(kernel.numbers, at);
    CHECK_EQ(kernel.counts, at + 48);
    CHECK_EQ(kernel.index, at + 60);
    /* As docs/kernels.md says: 12 bytes a head and 32 positions, and 8 more. */
    CHECK_EQ(kernel.scratch_bytes, 12 * 2 * (1040 / 32 + 8));

    /* What is not sound is refused: one that is not there, numbers that do not ascend. */
    heads[0].lists = 3;
    CHECK_IS(kvt_launch_index(&index, &kernel, at, bytes, 80, &need, NULL), KVT_E_INVALID);
    heads[0].lists = 2;
    items[1] = 0;
    CHECK_IS(kvt_launch_index(&index, &kernel, at, bytes, 80, &need, NULL), KVT_E_INVALID);
    items[1] = 1;
    CHECK_IS(kvt_launch_index(&index, &kernel, at + 2, bytes, 80, &need, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_launch_index(&index, &kernel, 0, bytes, 80, &need, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_launch_index(&index, NULL, at, bytes, 80, &need, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_launch_index(&index, &kernel, at, bytes, 80, NULL, NULL), KVT_E_INVALID);
    /* No index: all keys. */
    CHECK_OK(kvt_launch_index(NULL, &kernel, 0, NULL, 0, &need, NULL));
    CHECK(need == 0 && memcmp(&kernel, &before, sizeof kernel) == 0);
}

/* KV of an engine that has it on the accelerator: into the store, and back to another place. */
enum { LAYERS = 4, CHUNK = 16, TOKENS = 6 * CHUNK, TOKEN_BYTES = 128 };

typedef struct {
    kvt_device_memory_t memory;
    kvt_view_t k[LAYERS], v[LAYERS];
} engine_t;

static void open_engine(kvt_device_t *device, engine_t *engine, uint64_t seed) {
    const uint64_t plane = (uint64_t)TOKENS * TOKEN_BYTES;
    memset(engine, 0, sizeof *engine);
    engine->memory.struct_size = sizeof engine->memory;
    CHECK_OK(kvt_device_alloc(device, 2 * LAYERS * plane, &engine->memory, NULL));
    uint8_t *raw = near(engine->memory.address, KVT_MEMORY_DEVICE);
    for (uint64_t i = 0; i < 2 * LAYERS * plane; i++)
        raw[i] = seed == 0 ? 0 : (uint8_t)next_random(&seed);
    for (int layer = 0; layer < LAYERS; layer++) {
        kvt_view_t view;
        memset(&view, 0, sizeof view);
        view.tokens = TOKENS;
        view.run_bytes = TOKEN_BYTES;
        view.memory = KVT_MEMORY_DEVICE;
        view.address = (void *)(uintptr_t)(engine->memory.address + 2 * (uint64_t)layer * plane);
        engine->k[layer] = view;
        view.address = (void *)(uintptr_t)((uint64_t)(uintptr_t)view.address + plane);
        engine->v[layer] = view;
    }
}

static kvt_move_t move_of(const engine_t *engine) {
    kvt_move_t move = KVT_MOVE_INIT;
    move.tokens = TOKENS;
    move.k = engine->k;
    move.v = engine->v;
    move.stride_bytes = sizeof *engine->k;
    return move;
}

static void check_store(kvt_device_t *device) {
    kvt_store_opts_t opts = KVT_STORE_OPTS_INIT;
    opts.host_bytes = UINT64_C(16) << 20;
    opts.device = device;
    opts.spec = "store(device=device(capacity=4MiB))";
    opts.spec_bytes = strlen(opts.spec);
    kvt_store_t *store = NULL;
    CHECK_OK(kvt_store_open(runtime, NULL, &opts, &store, NULL));
    kvt_device_t *busy = device;
    CHECK_IS(kvt_device_close(&busy, 0, NULL), KVT_E_BUSY);
    const uint16_t numbers[LAYERS] = {0, 1, 2, 3};
    kvt_group_t group;
    memset(&group, 0, sizeof group);
    group.layers = numbers;
    group.layer_count = LAYERS;
    group.k_bytes = group.v_bytes = TOKEN_BYTES;
    kvt_layout_t layout = KVT_LAYOUT_INIT;
    layout.chunk_tokens = CHUNK;
    layout.groups = &group;
    layout.group_count = 1;
    layout.stride_bytes = sizeof group;
    kvt_namespace_t *space = NULL;
    CHECK_OK(kvt_namespace_open(store, NULL, &layout, 0, &space, NULL));
    uint32_t tokens[TOKENS];
    for (uint32_t i = 0; i < TOKENS; i++) tokens[i] = i * i;
    kvt_session_t *session = NULL;
    CHECK_OK(kvt_session_open(space, NULL, &session, NULL));
    CHECK_OK(kvt_session_append(session, tokens, TOKENS, NULL));

    engine_t from, to;
    open_engine(device, &from, 7);
    open_engine(device, &to, 0);
    kvt_op_t *op = NULL;
    kvt_move_t move = move_of(&from);
    CHECK_OK(kvt_session_put(session, &move, NULL, &op, NULL));
    CHECK_OK(finish_op(&op));
    move = move_of(&to);
    CHECK_OK(kvt_session_get(session, &move, NULL, &op, NULL));
    CHECK_OK(finish_op(&op));
    CHECK(memcmp(near(from.memory.address, KVT_MEMORY_DEVICE),
                 near(to.memory.address, KVT_MEMORY_DEVICE), (size_t)from.memory.bytes) == 0);

    /* What was put from the accelerator stays there, too, and comes back without the link. */
    kvt_store_stats_t stats = KVT_STORE_STATS_INIT;
    CHECK_OK(kvt_store_stats(store, &stats));
    CHECK_EQ(stats.device_hit_cells, LAYERS * TOKENS / CHUNK);
    kvt_plan_segment_t segment;
    kvt_plan_terms_t terms = KVT_PLAN_TERMS_INIT;
    terms.flags = KVT_PLAN_COST;
    terms.beta_ns = 1e9;
    uint64_t segments = 0;
    CHECK_OK(kvt_session_plan(session, &terms, &segment, 1, sizeof segment, &segments, NULL, NULL));
    CHECK(segments == 1 && segment.deed == KVT_PLAN_LOAD && segment.tier == KVT_TIER_DEVICE);
    CHECK_EQ(segment.device_bytes, (uint64_t)2 * LAYERS * TOKENS * TOKEN_BYTES);
    CHECK_EQ(segment.host_bytes + segment.disk_bytes + segment.remote_bytes, 0);
    CHECK_EQ(stats.device_cells, LAYERS * TOKENS / CHUNK);
    CHECK_EQ(stats.host_hit_cells, 0);
    CHECK(stats.device_used_bytes > 0 && stats.device_used_bytes <= stats.device_limit_bytes);

    CHECK_OK(kvt_session_close(&session));
    CHECK_OK(kvt_namespace_close(&space));
    CHECK_OK(kvt_store_close(&store, in_ms(60000), NULL));
    CHECK_OK(kvt_device_free(device, &from.memory, NULL));
    CHECK_OK(kvt_device_free(device, &to.memory, NULL));

    /* A store that has no device refuses what it cannot reach. */
    opts.device = NULL;
    kvt_error_t *error = NULL;
    CHECK(kvt_store_open(runtime, NULL, &opts, &store, NULL) < 0);
    opts.spec = NULL;
    opts.spec_bytes = 0;
    CHECK_OK(kvt_store_open(runtime, NULL, &opts, &store, NULL));
    CHECK_OK(kvt_namespace_open(store, NULL, &layout, 0, &space, NULL));
    CHECK_OK(kvt_session_open(space, NULL, &session, NULL));
    CHECK_OK(kvt_session_append(session, tokens, TOKENS, NULL));
    CHECK_IS(kvt_session_get(session, &move, NULL, &op, &error), KVT_E_UNAVAILABLE);
    CHECK(strstr(kvt_error_message(error), "no device") != NULL);
    CHECK_OK(kvt_error_free(&error));
    CHECK_OK(kvt_session_close(&session));
    CHECK_OK(kvt_namespace_close(&space));
    CHECK_OK(kvt_store_close(&store, in_ms(60000), NULL));
}

/* Weights that pass through memory of the accelerator. */
enum { UNITS = 8, WEIGHTS = 70000 };

static void check_stream(kvt_device_t *device, accelerator_t *home) {
    char path[] = "/tmp/kvt-device-XXXXXX", header[4096];
    size_t length = (size_t)snprintf(header, sizeof header, "{");
    for (int i = 0; i < UNITS; i++)
        length += (size_t)snprintf(header + length, sizeof header - length,
                                   "%s\"model.layers.%d.weight\":{\"dtype\":\"U8\",\"shape\":[%d],"
                                   "\"data_offsets\":[%d,%d]}",
                                   i > 0 ? "," : "", i, WEIGHTS, i * WEIGHTS, (i + 1) * WEIGHTS);
    header[length++] = '}';
    const int fd = mkstemp(path);
    CHECK(fd >= 0);
    const uint64_t prefix = length;
    static uint8_t weights[UNITS * WEIGHTS];
    uint64_t seed = 11;
    for (size_t i = 0; i < sizeof weights; i++) weights[i] = (uint8_t)next_random(&seed);
    CHECK(write(fd, &prefix, 8) == 8 && write(fd, header, length) == (ssize_t)length);
    CHECK(write(fd, weights, sizeof weights) == (ssize_t)sizeof weights && close(fd) == 0);
    char final_path[64];
    snprintf(final_path, sizeof final_path, "%s.safetensors", path);
    CHECK(rename(path, final_path) == 0);
    const kvt_text_t text = {final_path, strlen(final_path)};
    kvt_model_t *model = NULL;
    CHECK_OK(kvt_model_open(&text, 1, sizeof text, &model, NULL));

    kvt_stream_terms_t terms = KVT_STREAM_TERMS_INIT;
    terms.flags = KVT_TERMS_HOST_RESERVE | KVT_TERMS_KV | KVT_TERMS_HOST_CEILING |
                  KVT_TERMS_DEVICE_CEILING | KVT_TERMS_DEVICE_SAFETY;
    terms.device_ceiling_bytes = UNITS * WEIGHTS / 2;
    terms.host_ceiling_bytes = (2u << 20) + UNITS * WEIGHTS / 3; /* with 2 MiB to read to */
    terms.chunk_bytes = 16384;
    kvt_stream_opts_t opts = KVT_STREAM_OPTS_INIT;
    opts.model = model;
    opts.terms = &terms;
    opts.device = device;
    kvt_stream_t *stream = NULL;
    kvt_error_t *error = NULL;
    const kvt_status_t status = kvt_stream_open(runtime, &opts, &stream, &error);
    if (status != KVT_OK) fprintf(stderr, "open: %s\n", kvt_error_message(error));
    CHECK_OK(status);
    for (int pass = 0; pass < 3; pass++) {
        CHECK_OK(kvt_stream_pass_begin(stream, NULL));
        for (uint32_t layer = 0; layer < UNITS; layer++) {
            uint32_t unit = 0;
            CHECK_OK(kvt_model_layer(model, layer, KVT_NONE, &unit));
            kvt_part_t part;
            uint64_t parts = 0;
            CHECK_OK(kvt_model_unit_parts(model, unit, &part, 1, sizeof part, &parts));
            CHECK_EQ(part.bytes, WEIGHTS);
            kvt_held_t held = KVT_HELD_INIT;
            CHECK_OK(kvt_stream_acquire(stream, unit, KVT_ACQUIRE_EARLY, in_ms(60000), &held,
                                        NULL));
            CHECK_EQ(held.memory, KVT_MEMORY_DEVICE);
            /* The engine's own stream computes: here it copies what it sees. */
            static uint8_t seen[WEIGHTS];
            memset(seen, 0, sizeof seen);
            if (held.event != 0) CHECK_OK(kvt_device_hold(device, 2, held.event, NULL));
            kvt_copy_rows_t rows = {0};
            rows.from = (uint64_t)(uintptr_t)held.address + part.at;
            rows.to = (uint64_t)(uintptr_t)seen;
            rows.run_bytes = rows.from_stride_bytes = rows.to_stride_bytes = WEIGHTS;
            rows.runs = 1;
            rows.from_memory = KVT_MEMORY_DEVICE;
            uint64_t computed = 0, after = 0;
            CHECK_OK(put_work(home, 2, 0, &rows, 1, sizeof rows, &computed));
            CHECK_OK(kvt_device_adopt(device, computed, &after, NULL));
            CHECK_OK(kvt_stream_release(stream, &held, after, NULL));
            CHECK_OK(wait_for(home, computed, in_ms(60000)));
            CHECK(memcmp(seen, weights + (size_t)layer * WEIGHTS, WEIGHTS) == 0);
            release(home, computed);
        }
        CHECK_OK(kvt_stream_pass_end(stream, NULL));
    }
    CHECK_OK(kvt_stream_close(&stream, in_ms(60000), NULL));
    CHECK_OK(kvt_model_close(&model));
    CHECK_OK(kvt_error_free(&error));
    CHECK(unlink(final_path) == 0);
}

/* It is lost: all that is under way fails, and nothing hangs. */
static void check_loss(kvt_device_t *device, accelerator_t *home) {
    uint64_t event = 0, late = 0;
    CHECK_OK(kvt_device_copy(device, 0, 0, NULL, 0, sizeof(kvt_copy_t), &event, NULL));
    home->lost = 1;
    kvt_error_t *error = NULL;
    CHECK_IS(kvt_device_wait(device, event, in_ms(60000), &error), KVT_E_UNAVAILABLE);
    CHECK_IS(kvt_device_copy(device, 0, 0, NULL, 0, sizeof(kvt_copy_t), &late, &error),
             KVT_E_UNAVAILABLE);
    CHECK(strstr(kvt_error_message(error), "lost") != NULL);
    CHECK_OK(kvt_device_release(device, &event, 1, NULL));
    CHECK_OK(kvt_error_free(&error));
}

int main(void) {
    check_begin();
    runtime = open_runtime(1, NULL);
    check_tables();
    check_index();

    accelerator_t home;
    start(&home);
    kvt_device_custom_t table = table_of(&home);
    kvt_device_t *device = open_custom(&table);
    check_copies(device, &home);
    check_store(device);
    check_stream(device, &home);
    conforms(device, 1);
    kvt_device_t *const stale = device;
    CHECK_OK(kvt_device_close(&device, in_ms(60000), NULL));
    kvt_device_info_t info = KVT_DEVICE_INFO_INIT;
    CHECK_IS(kvt_device_info(stale, &info), KVT_E_HANDLE);
    stop(&home);

    start(&home);
    table = table_of(&home);
    device = open_custom(&table);
    check_loss(device, &home);
    CHECK_OK(kvt_device_close(&device, in_ms(60000), NULL));
    stop(&home);

    const uint32_t others[] = {KVT_DEVICE_HOST, KVT_DEVICE_SIMULATED};
    for (int i = 0; i < 2; i++) {
        kvt_device_opts_t opts = KVT_DEVICE_OPTS_INIT;
        opts.kind = others[i];
        CHECK_OK(kvt_device_open(runtime, &opts, &device, NULL));
        conforms(device, 2);
        CHECK_OK(kvt_device_close(&device, in_ms(60000), NULL));
    }
    close_runtime(&runtime);
    return check_end("device_wish");
}
