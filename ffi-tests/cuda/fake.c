/* A CUDA driver without a device, for tests: loaded in place of the real one.
 *
 * Work waits in queues, one a stream, and goes on when somebody asks how far it is: a step here, a
 * step there, as a seed says, so across streams nothing has an order that no event gave it. Between
 * the first step of a copy and its second its target is poisoned. Calls in no context, with
 * handles that are none or were given back, are counted as wrong; what was taken and not given back
 * is counted too. Any call can be made to fail. Device memory is memory of this process.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int code_t;
typedef uint64_t pointer_t;

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, INVALID_HANDLE = 400,
       NOT_READY = 600, CAPTURE_FORBIDS = 900 };
enum { POISON = 0xDB, RELAXED = 2, MOST = 4096, DEEP = 64, HOST = 1, DEVICE = 2 };
enum { MAGIC_STREAM = 0x53545245, MAGIC_EVENT = 0x4556454e, GONE = 0x474f4e45 };

typedef struct {
    size_t from_x, from_y;
    unsigned from_kind;
    const void *from_host;
    pointer_t from_device;
    void *from_array;
    size_t from_pitch;
    size_t to_x, to_y;
    unsigned to_kind;
    void *to_host;
    pointer_t to_device;
    void *to_array;
    size_t to_pitch;
    size_t width, height;
} rows_t;

typedef struct event event_t;
typedef struct op {
    enum { COPY, RECORD, WAIT } what;
    unsigned char *to;
    const unsigned char *from;
    size_t to_pitch, from_pitch, width, height;
    int begun;
    event_t *event;
    uint64_t turn; /* of the event */
    struct op *next;
} op_t;

typedef struct stream {
    unsigned magic;
    op_t *first, **last;
    int capturing;
    struct stream *next;
} stream_t;

struct event {
    unsigned magic;
    uint64_t recorded, done; /* how often it was put on a stream, and how often that came */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static stream_t *streams;
static uint64_t seed = 1;
static long wrong, live_streams, live_events, live_bytes, retained, allocations, max_bytes = 1l << 30;
static int somebody_captures, context_is_there, sticky, version = 12040, devices = 1;
static char wrong_text[256];
static struct { pointer_t at; size_t bytes; } given[MOST];
static struct { char call[64]; long nth; code_t code; } planted[16];
static __thread void *contexts[DEEP];
static __thread int deep;
static __thread unsigned capture_mode;
static char the_context;

static uint64_t chance(void) {
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return seed >> 11;
}

static void complain(const char *call, const char *why) {
    if (wrong++ == 0) snprintf(wrong_text, sizeof wrong_text, "%s: %s", call, why);
}

/* A device that is lost touches no memory any more. */
static void lose(code_t code) {
    sticky = code;
    for (stream_t *s = streams; s; s = s->next) {
        while (s->first) {
            op_t *op = s->first;
            s->first = op->next;
            free(op);
        }
        s->last = &s->first;
    }
}

/* Whether a call is to fail, and with what. */
static code_t planned(const char *call) {
    for (int i = 0; i < 16; i++)
        if (planted[i].nth > 0 && !strcmp(planted[i].call, call) && --planted[i].nth == 0) {
            if (planted[i].code >= 700 && planted[i].code < 720) lose(planted[i].code);
            return planted[i].code;
        }
    return sticky;
}

#define BEGIN(call)                                                                              \
    pthread_mutex_lock(&lock);                                                                   \
    code_t told = planned(call);                                                                 \
    if (told != OK) { pthread_mutex_unlock(&lock); return told; }
#define BEGIN_IN(call)                                                                           \
    BEGIN(call)                                                                                  \
    if (deep == 0 || contexts[deep - 1] != &the_context || !context_is_there) {                  \
        complain(call, "in no context");                                                         \
        END(INVALID_CONTEXT)                                                                     \
    }
#define END(code) { code_t ended = (code); pthread_mutex_unlock(&lock); return ended; }
#define NEED(what, call, why, code) if (!(what)) { complain(call, why); END(code) }

static int is_stream(const stream_t *stream) {
    for (const stream_t *s = streams; s; s = s->next) if (s == stream) return 1;
    return 0;
}

static int is_event(const event_t *event) { return event && event->magic == MAGIC_EVENT; }

static void copy(const op_t *op) {
    for (size_t row = 0; row < op->height; row++)
        memcpy(op->to + row * op->to_pitch, op->from + row * op->from_pitch, op->width);
}

static void poison(const op_t *op) {
    for (size_t row = 0; row < op->height; row++)
        memset(op->to + row * op->to_pitch, POISON, op->width);
}

/* One step of a stream; false: it has nothing to do, or has to wait. */
static int step(stream_t *stream) {
    op_t *op = stream->first;
    if (!op) return 0;
    if (op->what == WAIT && op->event->done < op->turn) return 0;
    if (op->what == COPY && !op->begun) {
        op->begun = 1;
        poison(op);
        return 1;
    }
    if (op->what == COPY) copy(op);
    if (op->what == RECORD && op->event->done < op->turn) op->event->done = op->turn;
    stream->first = op->next;
    if (!stream->first) stream->last = &stream->first;
    free(op);
    return 1;
}

/* Some steps of any streams; false: nothing moved. */
static int progress(uint64_t steps) {
    int moved = 0, count = 0;
    for (stream_t *s = streams; s; s = s->next) count++;
    for (uint64_t i = 0; i < steps && count; i++) {
        stream_t *s = streams;
        for (uint64_t skip = chance() % count; skip; skip--) s = s->next;
        moved |= step(s);
    }
    return moved;
}

static int all_steps(void) {
    int moved = 0;
    for (stream_t *s = streams; s; s = s->next) moved |= step(s);
    return moved;
}

static op_t *enqueue(stream_t *stream) {
    op_t *op = calloc(1, sizeof *op);
    *stream->last = op;
    stream->last = &op->next;
    return op;
}

code_t cuInit(unsigned flags) {
    (void)flags;
    BEGIN("cuInit")
    END(OK)
}

code_t cuDriverGetVersion(int *to) {
    BEGIN("cuDriverGetVersion")
    *to = version;
    END(OK)
}

code_t cuGetErrorName(code_t code, const char **to) {
    *to = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OF_THE_FAKE";
    return OK;
}

code_t cuGetErrorString(code_t code, const char **to) {
    *to = code == OUT_OF_MEMORY ? "out of memory" : "planted";
    return OK;
}

code_t cuDeviceGetCount(int *to) {
    BEGIN("cuDeviceGetCount")
    *to = devices;
    END(OK)
}

code_t cuDeviceGetName(char *to, int most, int ordinal) {
    BEGIN("cuDeviceGetName")
    snprintf(to, (size_t)most, "fake %d", ordinal);
    END(OK)
}

code_t cuDeviceGetAttribute(int *to, int which, int ordinal) {
    (void)ordinal;
    BEGIN("cuDeviceGetAttribute")
    *to = which == 11 ? 1 << 20 : which == 75 ? 9 : 0;
    END(OK)
}

code_t cuDevicePrimaryCtxRetain(void **to, int ordinal) {
    BEGIN("cuDevicePrimaryCtxRetain")
    NEED(ordinal >= 0 && ordinal < devices, "cuDevicePrimaryCtxRetain", "no such device", INVALID_VALUE)
    retained++, context_is_there = 1;
    *to = &the_context;
    END(OK)
}

code_t cuDevicePrimaryCtxRelease_v2(int ordinal) {
    (void)ordinal;
    BEGIN("cuDevicePrimaryCtxRelease")
    NEED(retained > 0, "cuDevicePrimaryCtxRelease", "not retained", INVALID_CONTEXT)
    if (--retained == 0) context_is_there = 0;
    END(OK)
}

code_t cuCtxPushCurrent_v2(void *context) {
    BEGIN("cuCtxPushCurrent")
    NEED(context == &the_context && deep < DEEP, "cuCtxPushCurrent", "no context", INVALID_CONTEXT)
    contexts[deep++] = context;
    END(OK)
}

code_t cuCtxPopCurrent_v2(void **to) {
    pthread_mutex_lock(&lock);
    NEED(deep > 0, "cuCtxPopCurrent", "nothing was pushed", INVALID_CONTEXT)
    *to = contexts[--deep];
    END(OK)
}

code_t cuThreadExchangeStreamCaptureMode(unsigned *mode) {
    unsigned before = capture_mode;
    capture_mode = *mode, *mode = before;
    return OK;
}

code_t cuCtxGetDevice(int *to) {
    BEGIN_IN("cuCtxGetDevice")
    *to = 0;
    END(OK)
}

code_t cuMemGetInfo_v2(size_t *free_bytes, size_t *all) {
    BEGIN_IN("cuMemGetInfo")
    *free_bytes = (size_t)(max_bytes - live_bytes), *all = (size_t)max_bytes;
    END(OK)
}

/* What no thread may do while a graph is made, unless it has said that it does not matter. */
static int is_forbidden(void) { return somebody_captures && capture_mode != RELAXED; }

code_t cuMemAlloc_v2(pointer_t *to, size_t bytes) {
    BEGIN_IN("cuMemAlloc")
    NEED(!is_forbidden(), "cuMemAlloc", "while a graph is made", CAPTURE_FORBIDS)
    if (!bytes) END(INVALID_VALUE)
    if (bytes > (size_t)(max_bytes - live_bytes)) END(OUT_OF_MEMORY)
    for (int i = 0; i < MOST; i++) {
        if (given[i].at) continue;
        void *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
        if (!memory) END(OUT_OF_MEMORY)
        memset(memory, POISON, bytes);
        given[i].at = *to = (pointer_t)(uintptr_t)memory, given[i].bytes = bytes;
        live_bytes += (long)bytes, allocations++;
        END(OK)
    }
    END(OUT_OF_MEMORY)
}

code_t cuMemFree_v2(pointer_t at) {
    BEGIN_IN("cuMemFree")
    NEED(!is_forbidden(), "cuMemFree", "while a graph is made", CAPTURE_FORBIDS)
    for (int i = 0; i < MOST; i++) {
        if (given[i].at != at) continue;
        for (stream_t *s = streams; s; s = s->next)
            for (op_t *op = s->first; op; op = op->next)
                if (op->what == COPY && ((pointer_t)(uintptr_t)op->to - at < given[i].bytes ||
                                         (pointer_t)(uintptr_t)op->from - at < given[i].bytes))
                    complain("cuMemFree", "memory that work under way uses");
        memset((void *)(uintptr_t)at, POISON, given[i].bytes);
        live_bytes -= (long)given[i].bytes, allocations--;
        given[i].at = 0;
        free((void *)(uintptr_t)at);
        END(OK)
    }
    complain("cuMemFree", "memory that is not given");
    END(INVALID_VALUE)
}

static int is_device(pointer_t at, size_t bytes) {
    for (int i = 0; i < MOST; i++)
        if (given[i].at && at >= given[i].at && at + bytes <= given[i].at + given[i].bytes) return 1;
    return 0;
}

static code_t put(stream_t *stream, op_t with) {
    op_t *op = enqueue(stream);
    op_t *next = op->next;
    *op = with;
    op->next = next;
    return OK;
}

code_t cuMemcpyHtoDAsync_v2(pointer_t to, const void *from, size_t bytes, stream_t *stream) {
    BEGIN_IN("cuMemcpyHtoDAsync")
    NEED(is_stream(stream), "cuMemcpyHtoDAsync", "no stream", INVALID_HANDLE)
    NEED(!stream->capturing, "cuMemcpyHtoDAsync", "into a graph", CAPTURE_FORBIDS)
    if (!is_device(to, bytes)) END(INVALID_VALUE)
    END(put(stream, (op_t){.what = COPY, .to = (unsigned char *)(uintptr_t)to, .from = from,
                           .width = bytes, .height = 1}))
}

code_t cuMemcpyDtoHAsync_v2(void *to, pointer_t from, size_t bytes, stream_t *stream) {
    BEGIN_IN("cuMemcpyDtoHAsync")
    NEED(is_stream(stream), "cuMemcpyDtoHAsync", "no stream", INVALID_HANDLE)
    NEED(!stream->capturing, "cuMemcpyDtoHAsync", "into a graph", CAPTURE_FORBIDS)
    if (!is_device(from, bytes)) END(INVALID_VALUE)
    END(put(stream, (op_t){.what = COPY, .to = to, .from = (const unsigned char *)(uintptr_t)from,
                           .width = bytes, .height = 1}))
}

code_t cuMemcpy2DAsync_v2(const rows_t *rows, stream_t *stream) {
    BEGIN_IN("cuMemcpy2DAsync")
    NEED(is_stream(stream), "cuMemcpy2DAsync", "no stream", INVALID_HANDLE)
    NEED(!stream->capturing, "cuMemcpy2DAsync", "into a graph", CAPTURE_FORBIDS)
    int from_fits = rows->width <= rows->from_pitch, to_fits = rows->width <= rows->to_pitch;
    if (!rows->height || !rows->width || !from_fits || !to_fits || rows->from_pitch > 1 << 20 ||
        rows->to_pitch > 1 << 20)
        END(INVALID_VALUE)
    const void *from = rows->from_kind == DEVICE ? (const void *)(uintptr_t)rows->from_device : rows->from_host;
    void *to = rows->to_kind == DEVICE ? (void *)(uintptr_t)rows->to_device : rows->to_host;
    size_t from_reach = (rows->height - 1) * rows->from_pitch + rows->width;
    size_t to_reach = (rows->height - 1) * rows->to_pitch + rows->width;
    if ((rows->from_kind == DEVICE && !is_device(rows->from_device, from_reach)) ||
        (rows->to_kind == DEVICE && !is_device(rows->to_device, to_reach)))
        END(INVALID_VALUE)
    END(put(stream, (op_t){.what = COPY, .to = to, .from = from, .to_pitch = rows->to_pitch,
                           .from_pitch = rows->from_pitch, .width = rows->width, .height = rows->height}))
}

code_t cuStreamCreate(stream_t **to, unsigned flags) {
    BEGIN_IN("cuStreamCreate")
    NEED(flags == 1, "cuStreamCreate", "it would wait for the default stream", INVALID_VALUE)
    stream_t *stream = calloc(1, sizeof *stream);
    stream->magic = MAGIC_STREAM, stream->last = &stream->first, stream->next = streams;
    streams = *to = stream;
    live_streams++;
    END(OK)
}

code_t cuStreamDestroy_v2(stream_t *stream) {
    BEGIN_IN("cuStreamDestroy")
    NEED(is_stream(stream), "cuStreamDestroy", "no stream", INVALID_HANDLE)
    NEED(!stream->first, "cuStreamDestroy", "it has work", INVALID_HANDLE)
    for (stream_t **at = &streams; *at; at = &(*at)->next)
        if (*at == stream) {
            *at = stream->next;
            break;
        }
    stream->magic = GONE;
    free(stream);
    live_streams--;
    END(OK)
}

code_t cuStreamSynchronize(stream_t *stream) {
    BEGIN_IN("cuStreamSynchronize")
    NEED(is_stream(stream), "cuStreamSynchronize", "no stream: the default one is everybody's", INVALID_HANDLE)
    while (stream->first && all_steps()) {}
    NEED(!stream->first, "cuStreamSynchronize", "it would wait for ever", INVALID_HANDLE)
    END(OK)
}

code_t cuStreamWaitEvent(stream_t *stream, event_t *event, unsigned flags) {
    BEGIN_IN("cuStreamWaitEvent")
    NEED(flags == 0 && is_stream(stream), "cuStreamWaitEvent", "no stream", INVALID_HANDLE)
    NEED(is_event(event), "cuStreamWaitEvent", "no event", INVALID_HANDLE)
    END(put(stream, (op_t){.what = WAIT, .event = event, .turn = event->recorded}))
}

code_t cuStreamIsCapturing(stream_t *stream, int *to) {
    BEGIN_IN("cuStreamIsCapturing")
    NEED(is_stream(stream), "cuStreamIsCapturing", "no stream", INVALID_HANDLE)
    *to = stream->capturing;
    END(OK)
}

code_t cuEventCreate(event_t **to, unsigned flags) {
    BEGIN_IN("cuEventCreate")
    NEED(flags == 3, "cuEventCreate", "one that measures times or is waited for busily", INVALID_VALUE)
    *to = calloc(1, sizeof **to);
    (*to)->magic = MAGIC_EVENT;
    live_events++;
    END(OK)
}

code_t cuEventDestroy_v2(event_t *event) {
    BEGIN_IN("cuEventDestroy")
    NEED(is_event(event), "cuEventDestroy", "no event", INVALID_HANDLE)
    event->magic = GONE; /* and stays, so that who uses it is found out */
    live_events--;
    END(OK)
}

code_t cuEventRecord(event_t *event, stream_t *stream) {
    BEGIN_IN("cuEventRecord")
    NEED(is_stream(stream), "cuEventRecord", "no stream", INVALID_HANDLE)
    NEED(is_event(event), "cuEventRecord", "no event", INVALID_HANDLE)
    END(put(stream, (op_t){.what = RECORD, .event = event, .turn = ++event->recorded}))
}

code_t cuEventQuery(event_t *event) {
    BEGIN_IN("cuEventQuery")
    NEED(is_event(event), "cuEventQuery", "no event", INVALID_HANDLE)
    progress(chance() % 4);
    END(event->done == event->recorded ? OK : NOT_READY)
}

code_t cuEventSynchronize(event_t *event) {
    BEGIN_IN("cuEventSynchronize")
    NEED(is_event(event), "cuEventSynchronize", "no event", INVALID_HANDLE)
    while (event->done < event->recorded && (progress(1 + chance() % 4) || all_steps())) {}
    NEED(event->done == event->recorded, "cuEventSynchronize", "it would wait for ever", INVALID_HANDLE)
    END(OK)
}

/* What tests tell it, and ask of it. */

void fake_begin(uint64_t with) {
    pthread_mutex_lock(&lock);
    seed = with * 2 + 1, wrong = 0, sticky = 0, somebody_captures = 0, version = 12040, devices = 1;
    max_bytes = 1l << 30, wrong_text[0] = 0;
    memset(planted, 0, sizeof planted);
    pthread_mutex_unlock(&lock);
}

void fake_fail(const char *call, long nth, code_t code) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 16; i++)
        if (planted[i].nth == 0) {
            snprintf(planted[i].call, sizeof planted[i].call, "%s", call);
            planted[i].nth = nth, planted[i].code = code;
            break;
        }
    pthread_mutex_unlock(&lock);
}

void fake_set(int of_version, int of_devices, long of_bytes, int captures) {
    pthread_mutex_lock(&lock);
    version = of_version, devices = of_devices, max_bytes = of_bytes, somebody_captures = captures;
    pthread_mutex_unlock(&lock);
}

void fake_capture(stream_t *stream, int is) { stream->capturing = is; }

/* What is taken and was not given back: streams, events, allocations, contexts. */
long fake_live(void) { return live_streams + live_events + allocations + retained; }

long fake_wrong(void) { return wrong; }

const char *fake_words(void) { return wrong_text; }
