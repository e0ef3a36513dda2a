/* A simulated accelerator for tests of custom devices: one thread per stream, events that a thread
 * signals, and memory whose addresses are invalid on the CPU. A read without the device crashes at
 * once. */

#ifndef ACCELERATOR_H
#define ACCELERATOR_H

#include "check.h"

#define STREAMS 3
#define MAX_EVENTS 4096
/* Added to addresses of device memory, which makes them invalid on the CPU. */
#define DEVICE_OFFSET (UINT64_C(1) << 52)

typedef struct work {
    struct work *next;
    uint64_t after, event, count;
    /* NULL: the work consists of `rows`. */
    kvt_kernel_t *kernels;
    int orphan; /* no caller waits for its event */
    kvt_copy_rows_t rows[];
} work_t;

typedef struct {
    pthread_t thread;
    struct accelerator *accelerator;
    work_t *first, **last;
} stream_t;

typedef struct accelerator {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    stream_t streams[STREAMS];
    /* 0 = free, 1 = pending, 2 = signaled. */
    uint8_t events[MAX_EVENTS];
    uint64_t next_event, live_events, live_bytes, destroyed;
    int stop, lost;
} accelerator_t;

/* The CPU address of device or host memory. */
static uint8_t *cpu_address(uint64_t address, uint32_t memory) {
    return (uint8_t *)(uintptr_t)(memory == KVT_MEMORY_DEVICE ? address - DEVICE_OFFSET : address);
}

static void copy_rows(const kvt_copy_rows_t *rows) {
    uint8_t *to = cpu_address(rows->to, rows->to_memory);
    const uint8_t *from = cpu_address(rows->from, rows->from_memory);
    for (uint64_t run = 0; run < rows->runs; run++)
        memcpy(to + run * rows->to_stride_bytes, from + run * rows->from_stride_bytes,
               rows->run_bytes);
}

/* A piece in the table of KVT_DEVICE_KERNEL_MOVE. */
typedef struct {
    uint64_t from, to;
    int64_t from_stride, to_stride;
    uint32_t run_bytes, runs;
} piece_t;

/* Runs the only supported kernel. Addresses from DEVICE_OFFSET on are device memory. */
static void run_kernel(const kvt_kernel_t *kernel) {
    const uint32_t device = KVT_MEMORY_DEVICE, host = KVT_MEMORY_HOST;
    CHECK_EQ(kernel->kind, KVT_DEVICE_KERNEL_MOVE);
    for (uint32_t i = 0; i < kernel->count; i++) {
        piece_t piece;
        const uint8_t *table =
            cpu_address(kernel->table, kernel->table >= DEVICE_OFFSET ? device : host);
        memcpy(&piece, table + i * sizeof piece, sizeof piece);
        uint8_t *to = cpu_address(piece.to, piece.to >= DEVICE_OFFSET ? device : host);
        const uint8_t *from = cpu_address(piece.from, piece.from >= DEVICE_OFFSET ? device : host);
        for (int64_t run = 0; run < (int64_t)piece.runs; run++)
            memcpy(to + run * piece.to_stride, from + run * piece.from_stride, piece.run_bytes);
    }
}

static void *serve(void *data) {
    stream_t *stream = data;
    accelerator_t *accelerator = stream->accelerator;
    pthread_mutex_lock(&accelerator->lock);
    for (;;) {
        work_t *work = stream->first;
        if (work == NULL) {
            if (accelerator->stop) break;
            pthread_cond_wait(&accelerator->changed, &accelerator->lock);
            continue;
        }
        while (work->after != 0 && accelerator->events[work->after % MAX_EVENTS] == 1)
            pthread_cond_wait(&accelerator->changed, &accelerator->lock);
        pthread_mutex_unlock(&accelerator->lock);
        for (uint64_t i = 0; i < work->count; i++) {
            if (work->kernels != NULL) run_kernel(&work->kernels[i]);
            else copy_rows(&work->rows[i]);
        }
        pthread_mutex_lock(&accelerator->lock);
        accelerator->events[work->event % MAX_EVENTS] = work->orphan ? 0 : 2;
        accelerator->live_events -= (uint64_t)work->orphan;
        stream->first = work->next;
        if (stream->first == NULL) stream->last = &stream->first;
        free(work->kernels);
        free(work);
        pthread_cond_broadcast(&accelerator->changed);
    }
    pthread_mutex_unlock(&accelerator->lock);
    return NULL;
}

/* Creates an event; the caller holds the lock. */
static uint64_t make_event(accelerator_t *accelerator, uint8_t state) {
    if (accelerator->live_events == MAX_EVENTS - 1) return 0;
    do accelerator->next_event++;
    while (accelerator->events[accelerator->next_event % MAX_EVENTS] != 0 ||
           accelerator->next_event % MAX_EVENTS == 0);
    accelerator->events[accelerator->next_event % MAX_EVENTS] = state;
    accelerator->live_events++;
    return accelerator->next_event;
}

/* Appends work to a stream, which takes ownership. */
static kvt_status_t enqueue(accelerator_t *accelerator, uint32_t stream, uint64_t after,
                            work_t *work, uint64_t *event_out) {
    work->after = after;
    pthread_mutex_lock(&accelerator->lock);
    work->event = make_event(accelerator, 1);
    if (work->event == 0) {
        pthread_mutex_unlock(&accelerator->lock);
        free(work->kernels);
        free(work);
        return KVT_E_AGAIN;
    }
    *event_out = work->event;
    *accelerator->streams[stream].last = work;
    accelerator->streams[stream].last = &work->next;
    pthread_cond_broadcast(&accelerator->changed);
    pthread_mutex_unlock(&accelerator->lock);
    return KVT_OK;
}

static kvt_status_t submit_rows(accelerator_t *accelerator, uint32_t stream, uint64_t after,
                            const kvt_copy_rows_t *copies, uint64_t count, uint64_t stride_bytes,
                            int orphan, uint64_t *event_out) {
    if (accelerator->lost) return KVT_E_UNAVAILABLE;
    CHECK(stream < STREAMS && stride_bytes >= sizeof *copies);
    work_t *work = calloc(1, sizeof *work + count * sizeof *copies);
    if (work == NULL) return KVT_E_NOMEM;
    for (uint64_t i = 0; i < count; i++)
        work->rows[i] =
            *(const kvt_copy_rows_t *)(const void *)((const char *)copies + i * stride_bytes);
    work->count = count;
    work->orphan = orphan;
    return enqueue(accelerator, stream, after, work, event_out);
}

static kvt_status_t submit_copies(void *data, uint32_t stream, uint64_t after,
                             const kvt_copy_rows_t *copies, uint64_t count,
                             uint64_t stride_bytes, uint64_t *event_out) {
    return submit_rows(data, stream, after, copies, count, stride_bytes, 0, event_out);
}

static kvt_status_t launch(void *data, uint32_t stream, uint64_t after,
                           const kvt_kernel_t *kernels, uint64_t count, uint64_t stride_bytes,
                           uint64_t *event_out) {
    accelerator_t *accelerator = data;
    if (accelerator->lost) return KVT_E_UNAVAILABLE;
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
    return enqueue(accelerator, stream, after, work, event_out);
}

static kvt_status_t query(void *data, uint64_t event) {
    accelerator_t *accelerator = data;
    if (accelerator->lost) return KVT_E_UNAVAILABLE;
    pthread_mutex_lock(&accelerator->lock);
    const uint8_t state = accelerator->events[event % MAX_EVENTS];
    pthread_mutex_unlock(&accelerator->lock);
    CHECK(state != 0);
    return state == 1 ? KVT_E_AGAIN : KVT_OK;
}

static kvt_status_t wait_for(void *data, uint64_t event, uint64_t deadline_ns) {
    accelerator_t *accelerator = data;
    kvt_status_t status = KVT_OK;
    pthread_mutex_lock(&accelerator->lock);
    while (accelerator->events[event % MAX_EVENTS] == 1 && status == KVT_OK) {
        const struct timespec until = {(time_t)(deadline_ns / SECOND_NS),
                                       (long)(deadline_ns % SECOND_NS)};
        if (deadline_ns == 0) pthread_cond_wait(&accelerator->changed, &accelerator->lock);
        else if (pthread_cond_timedwait(&accelerator->changed, &accelerator->lock, &until) != 0)
            status = KVT_E_TIMEOUT;
    }
    pthread_mutex_unlock(&accelerator->lock);
    return status;
}

static void release(void *data, uint64_t event) {
    accelerator_t *accelerator = data;
    pthread_mutex_lock(&accelerator->lock);
    accelerator->events[event % MAX_EVENTS] = 0;
    accelerator->live_events--;
    pthread_mutex_unlock(&accelerator->lock);
}

static kvt_status_t allocate(void *data, uint64_t bytes, uint64_t *address_out) {
    accelerator_t *accelerator = data;
    if (bytes > UINT64_C(1) << 30) return KVT_E_NOMEM;
    void *memory = NULL;
    if (posix_memalign(&memory, 256, bytes) != 0) return KVT_E_NOMEM;
    *address_out = (uint64_t)(uintptr_t)memory + DEVICE_OFFSET;
    pthread_mutex_lock(&accelerator->lock);
    accelerator->live_bytes += bytes;
    pthread_mutex_unlock(&accelerator->lock);
    return KVT_OK;
}

static void free_memory(void *data, uint64_t address, uint64_t bytes) {
    accelerator_t *accelerator = data;
    free(cpu_address(address, KVT_MEMORY_DEVICE));
    pthread_mutex_lock(&accelerator->lock);
    accelerator->live_bytes -= bytes;
    pthread_mutex_unlock(&accelerator->lock);
}

static kvt_status_t free_bytes(void *data, uint64_t *bytes_out) {
    (void)data;
    *bytes_out = UINT64_C(1) << 30;
    return KVT_OK;
}

/* Imports an event of work that the engine submitted without the library. Events have one type. */
static kvt_status_t import_event(void *data, uint64_t raw, uint64_t *event_out) {
    return submit_copies(data, 0, raw, NULL, 0, sizeof(kvt_copy_rows_t), event_out);
}

static kvt_status_t stream_wait(void *data, uint64_t raw_stream, uint64_t event) {
    uint64_t mark = 0;
    return submit_rows(data, (uint32_t)raw_stream, event, NULL, 0, sizeof(kvt_copy_rows_t), 1,
                       &mark);
}

/* Creates an event that the host signals. */
static kvt_status_t create_event(void *data, uint64_t *event_out) {
    accelerator_t *accelerator = data;
    pthread_mutex_lock(&accelerator->lock);
    *event_out = make_event(accelerator, 1);
    pthread_mutex_unlock(&accelerator->lock);
    return *event_out == 0 ? KVT_E_AGAIN : KVT_OK;
}

static kvt_status_t signal_event(void *data, uint64_t event) {
    accelerator_t *accelerator = data;
    pthread_mutex_lock(&accelerator->lock);
    CHECK(accelerator->events[event % MAX_EVENTS] != 0);
    accelerator->events[event % MAX_EVENTS] = 2;
    pthread_cond_broadcast(&accelerator->changed);
    pthread_mutex_unlock(&accelerator->lock);
    return KVT_OK;
}

static void destroyed(void *data) { ((accelerator_t *)data)->destroyed++; }

static void start(accelerator_t *accelerator) {
    memset(accelerator, 0, sizeof *accelerator);
    CHECK(pthread_mutex_init(&accelerator->lock, NULL) == 0);
    pthread_condattr_t attributes;
    CHECK(pthread_condattr_init(&attributes) == 0);
    CHECK(pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0);
    CHECK(pthread_cond_init(&accelerator->changed, &attributes) == 0);
    CHECK(pthread_condattr_destroy(&attributes) == 0);
    for (int i = 0; i < STREAMS; i++) {
        accelerator->streams[i].accelerator = accelerator;
        accelerator->streams[i].last = &accelerator->streams[i].first;
        stream_t *stream = &accelerator->streams[i];
        CHECK(pthread_create(&stream->thread, NULL, serve, stream) == 0);
    }
}

/* Stops the streams, and checks that all events and memory were returned. */
static void stop(accelerator_t *accelerator) {
    pthread_mutex_lock(&accelerator->lock);
    accelerator->stop = 1;
    pthread_cond_broadcast(&accelerator->changed);
    pthread_mutex_unlock(&accelerator->lock);
    for (int i = 0; i < STREAMS; i++)
        CHECK(pthread_join(accelerator->streams[i].thread, NULL) == 0);
    CHECK_EQ(accelerator->live_events, 0);
    CHECK_EQ(accelerator->live_bytes, 0);
    CHECK_EQ(accelerator->destroyed, 1);
    CHECK(pthread_cond_destroy(&accelerator->changed) == 0);
    CHECK(pthread_mutex_destroy(&accelerator->lock) == 0);
}

static kvt_device_custom_t table_of(accelerator_t *accelerator) {
    kvt_device_custom_t table = KVT_DEVICE_CUSTOM_INIT;
    table.flags = KVT_DEVICE_HAS_MEMORY;
    table.streams = STREAMS;
    table.submit = submit_copies;
    table.query = query;
    table.wait = wait_for;
    table.release = release;
    table.allocate = allocate;
    table.free = free_memory;
    table.free_bytes = free_bytes;
    table.import_event = import_event;
    table.stream_wait = stream_wait;
    table.kernels = UINT64_C(1) << KVT_DEVICE_KERNEL_MOVE;
    table.launch = launch;
    table.create_event = create_event;
    table.signal_event = signal_event;
    table.user_data = accelerator;
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
