/* A CUDA driver without a device, for tests: loaded in place of the real one.
 *
 * Work waits in queues, one a stream, and proceeds when a call queries its state: a step here, a
 * step there, as a seed says, so across streams nothing has an order that no event gave it. Between
 * the first step of a copy and its second its target is poisoned. Calls in no context, with
 * handles that are none or were given back, are counted as wrong; what was taken and not given back
 * is counted too. Any call can be made to fail. Device memory is memory of this process, and so is what
 * is mapped into ranges of addresses. Kernels run on the processor, by a library that knows them or,
 * those that move bytes, here.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int code_t;
typedef uint64_t pointer_t;

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, INVALID_HANDLE = 400,
       NOT_FOUND = 500, NOT_READY = 600, ALREADY_REACHED = 704, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713,
       CAPTURE_FORBIDS = 900, CAPTURED_EVENT = 907 };
enum { POISON = 0xDB, RELAXED = 2, MOST = 4096, DEEP = 64, HOST = 1, DEVICE = 2, MOST_DEVICES = 4 };
enum { MAGIC_STREAM = 0x53545245, MAGIC_EVENT = 0x4556454e, GONE = 0x474f4e45 };
enum { CALL_BYTES = 256, PLAIN_SHARED = 48 << 10 };

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
typedef struct function {
    char name[64];
    unsigned shared;
} function_t;

typedef struct op {
    enum { COPY, RECORD, WAIT, LAUNCH, WAIT_VALUE } what;
    unsigned char *to;
    const unsigned char *from;
    size_t to_pitch, from_pitch, width, height;
    int begun;
    event_t *event;
    uint64_t turn; /* of the event, or how large the number has to be */
    const function_t *function;
    unsigned grid[3], block[3], shared;
    unsigned char call[CALL_BYTES];
    struct op *next;
} op_t;

/* A context: one of each device's that all share, and one that is an engine's alone. */
typedef struct context {
    int ordinal, is_shared;
} context_t;

typedef struct stream {
    unsigned magic;
    context_t *context;
    op_t *first, **last;
    int capturing;
    struct stream *next;
} stream_t;

struct event {
    unsigned magic;
    uint64_t recorded, done; /* how often it was put on a stream, and how often that came */
    int is_captured;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static stream_t *streams;
static uint64_t seed = 1;
static long wrong, live_streams, live_events, live_bytes, retained, allocations, max_bytes = 1l << 30;
static long live_hosts, live_modules, live_windows, max_host_bytes = 1l << 40, host_bytes;
static int somebody_captures, sticky, version = 12040, devices = 1, capability = 8, same_addresses = 1;
static int block_shared = 227 << 10;
static char wrong_text[256];
/* Without a context: mapped piece by piece, and there for those alone who were named. */
static struct { pointer_t at; size_t bytes; int ordinal; context_t *context; } given[MOST];
/* Which device can have access to which other's memory, and which context has it to which. */
static int may_reach[MOST_DEVICES][MOST_DEVICES];
static int has_reach[2 * MOST_DEVICES][2 * MOST_DEVICES];
static struct { char *at; size_t bytes; int is_mapped, is_own; } hosts[MOST];
static int (*emulator)(const char *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                       const void *);
static struct { char call[64]; long nth; code_t code; } planted[16];
static long shared_by[MOST_DEVICES];
static __thread context_t *contexts[DEEP];
static __thread int deep;
static __thread unsigned capture_mode;
static context_t shared_contexts[MOST_DEVICES] = {{0, 1}, {1, 1}, {2, 1}, {3, 1}};
static context_t own_contexts[MOST_DEVICES] = {{0, 0}, {1, 0}, {2, 0}, {3, 0}};

/* Steps that a question about an event may bring: few for those who look at each. */
static unsigned pace = 64;

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

/* How often each call was made. */
static struct { const char *call; long count; } counted[96];
static int has_failed;

static void count(const char *call) {
    for (int i = 0; i < 96; i++) {
        if (!counted[i].call) counted[i].call = call;
        if (!strcmp(counted[i].call, call)) {
            counted[i].count++;
            return;
        }
    }
}

/* Whether a call is to fail, and with what. */
static code_t planned(const char *call) {
    count(call);
    for (int i = 0; i < 16; i++)
        if (planted[i].nth && !strcmp(planted[i].call, call) &&
            (planted[i].nth < 0 || --planted[i].nth == 0)) {
            code_t code = planted[i].code;
            has_failed = 1;
            if (code >= 700 && code < 720 && code != 701 && code != 711 && code != ALREADY_REACHED &&
                code != ALREADY_REGISTERED &&
                code != NOT_REGISTERED)
                lose(code);
            return planted[i].code;
        }
    return sticky;
}

/* The context that the thread is in, if it lives. */
static context_t *current(void) {
    context_t *c = deep ? contexts[deep - 1] : NULL;
    return c && (!c->is_shared || shared_by[c->ordinal] > 0) ? c : NULL;
}

#define BEGIN(call)                                                                              \
    pthread_mutex_lock(&lock);                                                                   \
    code_t told = planned(call);                                                                 \
    if (told != OK) { pthread_mutex_unlock(&lock); return told; }
#define BEGIN_IN(call)                                                                           \
    BEGIN(call)                                                                                  \
    if (!current()) {                                                                            \
        complain(call, "in no context");                                                         \
        END(INVALID_CONTEXT)                                                                     \
    }
#define END(code) { code_t ended = (code); pthread_mutex_unlock(&lock); return ended; }
#define NEED(what, call, why, code) if (!(what)) { complain(call, why); END(code) }

static int is_stream(const stream_t *stream) {
    for (const stream_t *s = streams; s; s = s->next) if (s == stream) return 1;
    return 0;
}

/* Whether a stream is one, and of the context that the thread is in. */
static int is_here(const stream_t *stream) { return is_stream(stream) && stream->context == current(); }

static int is_event(const event_t *event) { return event && event->magic == MAGIC_EVENT; }

static void copy(const op_t *op) {
    for (size_t row = 0; row < op->height; row++)
        memcpy(op->to + row * op->to_pitch, op->from + row * op->from_pitch, op->width);
}

/* Whether it is host memory that the driver gave out. */
static int is_own_host(const void *at) {
    for (int i = 0; i < MOST; i++)
        if (hosts[i].is_own && hosts[i].at && (const char *)at >= hosts[i].at &&
            (const char *)at < hosts[i].at + hosts[i].bytes)
            return 1;
    return 0;
}

static int owner(pointer_t at, size_t bytes);

/* A bit that changes on the bus: to the device or from it, of the nth copy from now on, or of all.
 * What a caller of the driver took of it is spared: lists, which lead elsewhere with another bit. */
static long flips[2];

static void flip(void *to, const void *from, size_t bytes) {
    int goes_there = owner((pointer_t)(uintptr_t)to, bytes) >= 0;
    int comes_from = owner((pointer_t)(uintptr_t)from, bytes) >= 0;
    if (goes_there == comes_from || is_own_host(goes_there ? from : to)) return;
    long *nth = &flips[!goes_there];
    if (*nth && (*nth < 0 || --*nth == 0)) ((unsigned char *)to)[bytes / 2] ^= 1;
}

static void poison(const op_t *op) {
    for (size_t row = 0; row < op->height; row++)
        memset(op->to + row * op->to_pitch, POISON, op->width);
}

static int runs(const context_t *context, const op_t *op);

/* One step of a stream; false: it has nothing to do, or has to wait. */
static int step(stream_t *stream) {
    op_t *op = stream->first;
    if (!op) return 0;
    if (op->what == WAIT && op->event->done < op->turn) return 0;
    if (op->what == WAIT_VALUE) {
        uint32_t now = __atomic_load_n((const uint32_t *)(const void *)op->from, __ATOMIC_ACQUIRE);
        if ((int32_t)(now - (uint32_t)op->turn) < 0) return 0;
    }
    if (op->what == COPY && !op->begun) {
        op->begun = 1;
        poison(op);
        return 1;
    }
    if (op->what == LAUNCH && !op->begun) return op->begun = 1;
    if (op->what == COPY) {
        copy(op);
        flip(op->to, op->from, op->width);
    }
    if (op->what == LAUNCH && !runs(stream->context, op)) complain("cuLaunchKernel", "it goes where it may not");
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

code_t cuDeviceGet(int *to, int place) {
    BEGIN("cuDeviceGet")
    NEED(place >= 0 && place < devices, "cuDeviceGet", "no such device", INVALID_VALUE)
    *to = place;
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
    *to = which == 11 ? 1 << 20 : which == 75 ? capability : which == 91 ? same_addresses : 0;
    if (which == 97) *to = block_shared;
    END(OK)
}

code_t cuDevicePrimaryCtxRetain(context_t **to, int ordinal) {
    BEGIN("cuDevicePrimaryCtxRetain")
    NEED(ordinal >= 0 && ordinal < devices, "cuDevicePrimaryCtxRetain", "no such device", INVALID_VALUE)
    retained++, shared_by[ordinal]++;
    *to = &shared_contexts[ordinal];
    END(OK)
}

code_t cuDevicePrimaryCtxRelease_v2(int ordinal) {
    BEGIN("cuDevicePrimaryCtxRelease")
    NEED(shared_by[ordinal] > 0, "cuDevicePrimaryCtxRelease", "not retained", INVALID_CONTEXT)
    retained--, shared_by[ordinal]--;
    END(OK)
}

code_t cuCtxPushCurrent_v2(context_t *context) {
    BEGIN("cuCtxPushCurrent")
    int is_one = (context >= shared_contexts && context < shared_contexts + MOST_DEVICES) ||
                 (context >= own_contexts && context < own_contexts + MOST_DEVICES);
    NEED(is_one && deep < DEEP, "cuCtxPushCurrent", "no context", INVALID_CONTEXT)
    contexts[deep++] = context;
    END(OK)
}

code_t cuCtxPopCurrent_v2(context_t **to) {
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
    *to = current()->ordinal;
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
        size_t on = bytes < 64 << 10 ? 256 : 4096; /* a driver's large pieces begin with a page */
        void *memory = aligned_alloc(on, (bytes + on - 1) / on * on);
        if (!memory) END(OUT_OF_MEMORY)
        memset(memory, POISON, bytes);
        given[i].at = *to = (pointer_t)(uintptr_t)memory, given[i].bytes = bytes;
        given[i].ordinal = current()->ordinal, given[i].context = current();
        live_bytes += (long)bytes, allocations++;
        END(OK)
    }
    END(OUT_OF_MEMORY)
}

/* Whether work under way copies from or to a range. */
static int in_use(pointer_t at, size_t bytes) {
    for (stream_t *s = streams; s; s = s->next)
        for (op_t *op = s->first; op; op = op->next)
            if ((op->what == COPY || op->what == WAIT_VALUE) &&
                ((pointer_t)(uintptr_t)op->to - at < bytes ||
                 (pointer_t)(uintptr_t)op->from - at < bytes))
                return 1;
    return 0;
}

code_t cuMemFree_v2(pointer_t at) {
    BEGIN_IN("cuMemFree")
    NEED(!is_forbidden(), "cuMemFree", "while a graph is made", CAPTURE_FORBIDS)
    for (int i = 0; i < MOST; i++) {
        if (given[i].at != at) continue;
        if (in_use(at, given[i].bytes)) complain("cuMemFree", "memory that work under way uses");
        memset((void *)(uintptr_t)at, POISON, given[i].bytes);
        live_bytes -= (long)given[i].bytes, allocations--;
        given[i].at = 0;
        free((void *)(uintptr_t)at);
        END(OK)
    }
    complain("cuMemFree", "memory that is not given");
    END(INVALID_VALUE)
}

/* Whose device a range of memory is: a number, or -1 = none's. It may go over several that touch. */
static int owner(pointer_t at, size_t bytes) {
    for (int i = 0; i < MOST; i++) {
        if (!given[i].at || at < given[i].at || at >= given[i].at + given[i].bytes) continue;
        size_t left = given[i].at + given[i].bytes - at;
        int rest = bytes <= left ? given[i].ordinal : owner(at + left, bytes - left);
        return rest == given[i].ordinal ? rest : -1;
    }
    return -1;
}

static int number_of(const context_t *c) { return c->ordinal + (c->is_shared ? 0 : MOST_DEVICES); }

/* Whether a context's work goes to memory of a device as it is. */
static int reaches(const context_t *from, pointer_t at, size_t bytes) {
    int ordinal = owner(at, bytes);
    if (ordinal == from->ordinal) return 1;
    for (int i = 0; ordinal >= 0 && i < MOST; i++)
        if (given[i].at && at >= given[i].at && at < given[i].at + given[i].bytes)
            return given[i].context && has_reach[number_of(from)][number_of(given[i].context)];
    return 0;
}

static int is_device(pointer_t at, size_t bytes) {
    int is = reaches(current(), at, bytes);
    if (!is && owner(at, bytes) >= 0) complain("a copy", "of another device's memory, as if it were here");
    return is;
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
    NEED(is_here(stream), "cuMemcpyHtoDAsync", "no stream", INVALID_HANDLE)
    NEED(!stream->capturing, "cuMemcpyHtoDAsync", "into a graph", CAPTURE_FORBIDS)
    if (!is_device(to, bytes)) END(INVALID_VALUE)
    END(put(stream, (op_t){.what = COPY, .to = (unsigned char *)(uintptr_t)to, .from = from,
                           .width = bytes, .height = 1}))
}

code_t cuMemcpyDtoHAsync_v2(void *to, pointer_t from, size_t bytes, stream_t *stream) {
    BEGIN_IN("cuMemcpyDtoHAsync")
    NEED(is_here(stream), "cuMemcpyDtoHAsync", "no stream", INVALID_HANDLE)
    NEED(!stream->capturing, "cuMemcpyDtoHAsync", "into a graph", CAPTURE_FORBIDS)
    if (!is_device(from, bytes)) END(INVALID_VALUE)
    END(put(stream, (op_t){.what = COPY, .to = to, .from = (const unsigned char *)(uintptr_t)from,
                           .width = bytes, .height = 1}))
}

code_t cuMemcpyDtoDAsync_v2(pointer_t to, pointer_t from, size_t bytes, stream_t *stream) {
    BEGIN_IN("cuMemcpyDtoDAsync")
    NEED(is_here(stream), "cuMemcpyDtoDAsync", "no stream", INVALID_HANDLE)
    NEED(!stream->capturing, "cuMemcpyDtoDAsync", "into a graph", CAPTURE_FORBIDS)
    if (!is_device(from, bytes) || !is_device(to, bytes)) END(INVALID_VALUE)
    END(put(stream, (op_t){.what = COPY, .to = (unsigned char *)(uintptr_t)to,
                           .from = (const unsigned char *)(uintptr_t)from, .width = bytes, .height = 1}))
}

code_t cuMemcpyPeerAsync(pointer_t to, context_t *to_context, pointer_t from, context_t *from_context,
                         size_t bytes, stream_t *stream) {
    const char *call = "cuMemcpyPeerAsync";
    BEGIN_IN(call)
    NEED(is_here(stream), call, "no stream", INVALID_HANDLE)
    NEED(!stream->capturing, call, "into a graph", CAPTURE_FORBIDS)
    NEED(to_context && owner(to, bytes) == to_context->ordinal, call, "a target of another device", INVALID_VALUE)
    NEED(from_context && owner(from, bytes) == from_context->ordinal, call, "a source of another", INVALID_VALUE)
    END(put(stream, (op_t){.what = COPY, .to = (unsigned char *)(uintptr_t)to,
                           .from = (const unsigned char *)(uintptr_t)from, .width = bytes, .height = 1}))
}

code_t cuDeviceCanAccessPeer(int *to, int from, int other) {
    BEGIN("cuDeviceCanAccessPeer")
    NEED(from >= 0 && from < devices && other >= 0 && other < devices && from != other,
         "cuDeviceCanAccessPeer", "no such devices", INVALID_VALUE)
    *to = may_reach[from][other];
    END(OK)
}

code_t cuCtxEnablePeerAccess(context_t *other, unsigned flags) {
    const char *call = "cuCtxEnablePeerAccess";
    BEGIN_IN(call)
    NEED(other && flags == 0 && other->ordinal != current()->ordinal, call, "to whom?", INVALID_VALUE)
    NEED(may_reach[current()->ordinal][other->ordinal], call, "where there is no way", 217)
    int *has = &has_reach[number_of(current())][number_of(other)];
    if (*has) END(ALREADY_REACHED)
    *has = 1;
    END(OK)
}

code_t cuMemcpyAsync(pointer_t to, pointer_t from, size_t bytes, stream_t *stream) {
    BEGIN_IN("cuMemcpyAsync")
    NEED(is_here(stream), "cuMemcpyAsync", "no stream", INVALID_HANDLE)
    NEED(!stream->capturing, "cuMemcpyAsync", "into a graph", CAPTURE_FORBIDS)
    END(put(stream, (op_t){.what = COPY, .to = (unsigned char *)(uintptr_t)to,
                           .from = (const unsigned char *)(uintptr_t)from, .width = bytes, .height = 1}))
}

code_t cuMemcpy2DAsync_v2(const rows_t *rows, stream_t *stream) {
    BEGIN_IN("cuMemcpy2DAsync")
    NEED(is_here(stream), "cuMemcpy2DAsync", "no stream", INVALID_HANDLE)
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
    stream->context = current();
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
    NEED(!stream->capturing, "cuStreamWaitEvent", "into a graph", CAPTURE_FORBIDS)
    NEED(!event->is_captured, "cuStreamWaitEvent", "the stream becomes part of a graph", CAPTURE_FORBIDS)
    END(put(stream, (op_t){.what = WAIT, .event = event, .turn = event->recorded}))
}

code_t cuStreamIsCapturing(stream_t *stream, int *to) {
    BEGIN_IN("cuStreamIsCapturing")
    NEED(is_stream(stream), "cuStreamIsCapturing", "no stream", INVALID_HANDLE)
    *to = stream->capturing;
    END(OK)
}

code_t cuStreamGetCtx(stream_t *stream, context_t **to) {
    BEGIN_IN("cuStreamGetCtx")
    NEED(is_stream(stream), "cuStreamGetCtx", "no stream", INVALID_HANDLE)
    *to = stream->context;
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
    NEED(is_here(stream), "cuEventRecord", "no stream", INVALID_HANDLE)
    NEED(is_event(event), "cuEventRecord", "no event", INVALID_HANDLE)
    END(put(stream, (op_t){.what = RECORD, .event = event, .turn = ++event->recorded}))
}

code_t cuEventQuery(event_t *event) {
    BEGIN_IN("cuEventQuery")
    NEED(is_event(event), "cuEventQuery", "no event", INVALID_HANDLE)
    if (event->is_captured) END(CAPTURED_EVENT)
    progress(chance() % pace);
    END(event->done == event->recorded ? OK : NOT_READY)
}

code_t cuEventSynchronize(event_t *event) {
    BEGIN_IN("cuEventSynchronize")
    NEED(is_event(event), "cuEventSynchronize", "no event", INVALID_HANDLE)
    while (event->done < event->recorded && (progress(1 + chance() % 4) || all_steps())) {}
    NEED(event->done == event->recorded, "cuEventSynchronize", "it would wait for ever", INVALID_HANDLE)
    END(OK)
}

#include "fake_memory.h"
#include "fake_kernels.h"

/* What tests tell it, and ask of it. */

void fake_begin(uint64_t with) {
    pthread_mutex_lock(&lock);
    pace = 4;
    seed = with * 2 + 1, wrong = 0, sticky = 0, somebody_captures = 0, version = 12040, devices = 1;
    max_bytes = 1l << 30, max_host_bytes = 1l << 40, emulator = NULL, wrong_text[0] = 0, has_failed = 0, capability = 8, same_addresses = 1;
    block_shared = 227 << 10;
    for (int i = 0; i < MOST_DEVICES; i++) own_contexts[i].ordinal = shared_contexts[i].ordinal = i;
    memset(planted, 0, sizeof planted), flips[0] = flips[1] = 0;
    memset(has_reach, 0, sizeof has_reach), memset(may_reach, 0, sizeof may_reach);
    pthread_mutex_unlock(&lock);
}

/* Forgets the state of a lost device. No caller may use any of its handles or memory any more. */
void fake_forget(void) {
    pthread_mutex_lock(&lock);
    lose(OK);
    for (stream_t *s = streams, *next; s; s = next) next = s->next, free(s);
    for (int i = 0; i < MOST; i++) {
        int is_mapped = 0;
        for (int m = 0; m < MOST_WINDOWS; m++)
            is_mapped |= mapped[m].at && (pointer_t)(uintptr_t)mapped[m].at == given[i].at;
        if (given[i].at && !is_mapped) free((void *)(uintptr_t)given[i].at);
        if (hosts[i].at && hosts[i].is_own) free(hosts[i].at);
        given[i].at = 0, hosts[i].at = NULL;
    }
    for (int m = 0; m < MOST_WINDOWS; m++) {
        if (windows[m].at) munmap(windows[m].raw, windows[m].bytes + GRAIN);
        if (pieces[m].bytes) close(pieces[m].fd);
        windows[m].at = mapped[m].at = NULL, pieces[m].bytes = 0;
    }
    streams = NULL, live_streams = live_events = live_bytes = allocations = retained = 0;
    live_hosts = live_modules = live_windows = host_bytes = 0;
    memset(shared_by, 0, sizeof shared_by);
    pthread_mutex_unlock(&lock);
}

/* The nth call from now on fails, or all do (-1). */
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

void fake_no_more_failures(void) {
    pthread_mutex_lock(&lock);
    memset(planted, 0, sizeof planted);
    pthread_mutex_unlock(&lock);
}

/* Whether a device can have access to another's memory. */
void fake_reach(int from, int to, int can) { may_reach[from][to] = can; }

/* How many steps a question about an event may bring. */
void fake_pace(unsigned steps) { pace = steps; }

/* A bit of each KiB of all devices' memory changes. */
void fake_rot(void) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST; i++)
        for (size_t at = 512; given[i].at && at < given[i].bytes; at += 1024)
            ((unsigned char *)(uintptr_t)given[i].at)[at] ^= 1;
    pthread_mutex_unlock(&lock);
}

/* The nth copy over the bus from now on comes with another bit, or all do (-1); 0 = none. */
void fake_flip(int from_device, long nth) {
    pthread_mutex_lock(&lock);
    flips[from_device] = nth;
    pthread_mutex_unlock(&lock);
}

void fake_set(int of_version, int of_devices, long of_bytes, int captures) {
    pthread_mutex_lock(&lock);
    version = of_version, devices = of_devices, max_bytes = of_bytes, somebody_captures = captures;
    pthread_mutex_unlock(&lock);
}

void fake_capture(stream_t *stream, int is) { stream->capturing = is; }

void fake_capture_event(event_t *event, int is) { event->is_captured = is; }

/* As if the event were on a stream that stands still; then it comes. */
void fake_hold_back(event_t *event, int is) {
    if (is) event->recorded++;
    else event->done = event->recorded;
}

/* An engine's own context of a device. */
context_t *fake_context(int ordinal) { return &own_contexts[ordinal]; }

/* What devices are capable of. */
void fake_capability(int major) { capability = major; }

/* Whether devices find registered host memory where the processor does. */
void fake_same_addresses(int is) { same_addresses = is; }

/* How often a call was made. */
long fake_calls(const char *call) {
    long found = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 96 && counted[i].call; i++)
        if (!strcmp(counted[i].call, call)) found = counted[i].count;
    pthread_mutex_unlock(&lock);
    return found;
}

/* Whether a call that was to fail has been made. */
int fake_has_failed(void) { return has_failed; }

/* How much host memory may be registered. */
void fake_lockable(long bytes) { max_host_bytes = bytes; }

/* What runs kernels: `emu_launch` of the library that has them. */
/* How much shared memory a block of threads can have. */
void fake_block_shared(int bytes) { block_shared = bytes; }

void fake_emulator(void *launches) { *(void **)&emulator = launches; }

/* For programs that do not know that this is no driver: the environment names the kernels, and how
 * many devices there are, which all reach each other. */
__attribute__((constructor)) static void find_emulator(void) {
    const char *path = getenv("KVTIER_FAKE_KERNELS");
    void *library = path ? dlopen(path, RTLD_NOW) : NULL;
    if (library) fake_emulator(dlsym(library, "emu_launch"));
    const char *count = getenv("KVTIER_FAKE_DEVICES");
    if (!count) return;
    devices = atoi(count);
    for (int i = 0; i < MOST_DEVICES; i++)
        for (int other = 0; other < MOST_DEVICES; other++) may_reach[i][other] = 1;
}

/* Work of an event's stream goes on until it comes, or nothing moves. */
void fake_run(void) {
    pthread_mutex_lock(&lock);
    while (all_steps()) {}
    pthread_mutex_unlock(&lock);
}

/* Whether a range is memory of the context's device that no work under way copies from or to. */
int fake_is_idle(pointer_t at, size_t bytes) {
    pthread_mutex_lock(&lock);
    int is = current() && owner(at, bytes) == current()->ordinal && !in_use(at, bytes);
    pthread_mutex_unlock(&lock);
    return is;
}

/* What is taken and was not given back: streams, events, memory, contexts, modules. */
long fake_live(void) {
    return live_streams + live_events + allocations + retained + live_hosts + live_modules + live_windows;
}

long fake_wrong(void) { return wrong; }

const char *fake_words(void) { return wrong_text; }

/* What was wrong so far, if anything; then nothing is. */
const char *fake_take_words(void) {
    int was = wrong > 0;
    wrong = 0;
    return was ? wrong_text : NULL;
}
