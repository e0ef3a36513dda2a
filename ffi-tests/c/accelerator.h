/* An accelerator of an engine's own, for programs that make it a device: a thread for each stream,
 * events that a thread signals, and memory whose addresses the processor cannot follow, so that
 * whoever reads them without the device is found out at once. */

#ifndef ACCELERATOR_H
#define ACCELERATOR_H

#include "check.h"

#define STREAMS 3
#define MOST_EVENTS 4096
#define FAR (UINT64_C(1) << 52)

typedef struct work {
    struct work *next;
    uint64_t after, event, count;
    /* Copies, or kernels. */
    kvt_kernel_t *kernels;
    int orphan; /* nobody asks for its event */
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

/* What KVT_DEVICE_KERNEL_MOVE has in its table. */
typedef struct {
    uint64_t from, to;
    int64_t from_stride, to_stride;
    uint32_t run_bytes, runs;
} piece_t;

/* The one kernel that it has. What kernels name is anywhere: what is far is the accelerator's. */
static void run_kernel(const kvt_kernel_t *kernel) {
    const uint32_t far = KVT_MEMORY_DEVICE, host = KVT_MEMORY_HOST;
    CHECK_EQ(kernel->kind, KVT_DEVICE_KERNEL_MOVE);
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
        home->events[work->event % MOST_EVENTS] = work->orphan ? 0 : 2;
        home->live_events -= (uint64_t)work->orphan;
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

static kvt_status_t put_any(accelerator_t *home, uint32_t stream, uint64_t after,
                            const kvt_copy_rows_t *copies, uint64_t count, uint64_t stride_bytes,
                            int orphan, uint64_t *event_out) {
    if (home->lost) return KVT_E_UNAVAILABLE;
    CHECK(stream < STREAMS && stride_bytes >= sizeof *copies);
    work_t *work = calloc(1, sizeof *work + count * sizeof *copies);
    if (work == NULL) return KVT_E_NOMEM;
    for (uint64_t i = 0; i < count; i++)
        work->rows[i] =
            *(const kvt_copy_rows_t *)(const void *)((const char *)copies + i * stride_bytes);
    work->count = count;
    work->orphan = orphan;
    return enqueue(home, stream, after, work, event_out);
}

static kvt_status_t put_work(void *data, uint32_t stream, uint64_t after,
                             const kvt_copy_rows_t *copies, uint64_t count,
                             uint64_t stride_bytes, uint64_t *event_out) {
    return put_any(data, stream, after, copies, count, stride_bytes, 0, event_out);
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
    return put_any(data, (uint32_t)raw_stream, event, NULL, 0, sizeof(kvt_copy_rows_t), 1, &mark);
}

/* An event of no stream: it comes when it is told to. */
static kvt_status_t promise(void *data, uint64_t *event_out) {
    accelerator_t *home = data;
    pthread_mutex_lock(&home->lock);
    *event_out = make_event(home, 1);
    pthread_mutex_unlock(&home->lock);
    return *event_out == 0 ? KVT_E_AGAIN : KVT_OK;
}

static kvt_status_t keep(void *data, uint64_t event) {
    accelerator_t *home = data;
    pthread_mutex_lock(&home->lock);
    CHECK(home->events[event % MOST_EVENTS] != 0);
    home->events[event % MOST_EVENTS] = 2;
    pthread_cond_broadcast(&home->changed);
    pthread_mutex_unlock(&home->lock);
    return KVT_OK;
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
    table.import_event = adopt;
    table.stream_wait = hold;
    table.kernels = UINT64_C(1) << KVT_DEVICE_KERNEL_MOVE;
    table.launch = launch;
    table.create_event = promise;
    table.signal_event = keep;
    table.user_data = home;
    table.destroy = destroyed;
    return table;
}

static kvt_runtime_t *runtime;

static kvt_device_t *open_custom(const kvt_device_custom_t *table) {
    kvt_device_opts_t opts = KVT_DEVICE_OPTS_INIT;
    opts.kind = KVT_DEVICE_KIND_CUSTOM;
    opts.custom = table;
    kvt_device_t *device = NULL;
    CHECK_OK(kvt_device_open(runtime, &opts, &device, NULL));
    return device;
}

#endif
