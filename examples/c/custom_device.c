/* custom_device: an accelerator that the library does not know, as a device of a store.
 *
 *   custom_device [SPEC OF A STORE]
 *
 * The accelerator is a thread that copies, and plain memory that counts as the device's: a real one
 * has its driver's copies and events instead. The library's conformance suite tests the device; then
 * a store copies from and to tensors in device memory. */
#include "must.h"
#include <pthread.h>

/* One stream: work runs in order, so event n has completed once `done` has reached n. */
typedef struct work { struct work *next; uint64_t count; kvt_copy_rows_t rows[]; } work_t;
typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    work_t *first, **last;
    uint64_t submitted, done;
    int is_stopping;
} accelerator_t;

static void *serve(void *data) {
    accelerator_t *a = data;
    pthread_mutex_lock(&a->lock);
    for (;;) {
        while (a->first == NULL && !a->is_stopping) pthread_cond_wait(&a->changed, &a->lock);
        work_t *work = a->first;
        if (work == NULL) break;
        if ((a->first = work->next) == NULL) a->last = &a->first;
        pthread_mutex_unlock(&a->lock);
        for (uint64_t i = 0; i < work->count; i++) {
            const kvt_copy_rows_t *rows = &work->rows[i]; /* from_memory, to_memory: whose addresses they are */
            for (uint64_t run = 0; run < rows->runs; run++)
                memcpy((char *)(uintptr_t)(rows->to + run * rows->to_stride_bytes),
                       (const char *)(uintptr_t)(rows->from + run * rows->from_stride_bytes), rows->run_bytes);
        }
        free(work);
        pthread_mutex_lock(&a->lock);
        a->done++;
    }
    pthread_mutex_unlock(&a->lock);
    return NULL;
}

/* The callbacks. They are called from any thread, several at once. */
static kvt_status_t submit(void *user_data, uint32_t stream, uint64_t after, const kvt_copy_rows_t *copies,
                           uint64_t count, uint64_t stride_bytes, uint64_t *out_event) {
    accelerator_t *a = user_data;
    (void)stream, (void)after; /* events of the only stream: earlier work has ended when this begins */
    work_t *work = malloc(sizeof *work + count * sizeof *copies);
    if (work == NULL) return KVT_E_NOMEM;
    work->next = NULL, work->count = count;
    for (uint64_t i = 0; i < count; i++) /* copied: `copies` is borrowed for the call */
        memcpy(&work->rows[i], (const char *)copies + i * stride_bytes, sizeof *copies);
    pthread_mutex_lock(&a->lock);
    *a->last = work, a->last = &work->next;
    *out_event = ++a->submitted; /* not 0 */
    pthread_cond_signal(&a->changed);
    pthread_mutex_unlock(&a->lock);
    return KVT_OK;
}
static kvt_status_t query(void *user_data, uint64_t event) {
    accelerator_t *a = user_data;
    pthread_mutex_lock(&a->lock);
    const int is_done = event <= a->done;
    pthread_mutex_unlock(&a->lock);
    return is_done ? KVT_OK : KVT_E_AGAIN;
}
static kvt_status_t allocate(void *user_data, uint64_t bytes, uint64_t *out_address) {
    void *memory = NULL;
    if ((void)user_data, bytes > 1 << 30 || posix_memalign(&memory, 256, bytes) != 0) return KVT_E_NOMEM;
    *out_address = (uint64_t)(uintptr_t)memory;
    return KVT_OK;
}
static void free_memory(void *user_data, uint64_t address, uint64_t bytes) {
    (void)user_data, (void)bytes, free((void *)(uintptr_t)address);
}
static void destroy(void *user_data) { /* after the last of the other calls */
    accelerator_t *a = user_data;
    pthread_mutex_lock(&a->lock);
    a->is_stopping = 1;
    pthread_cond_signal(&a->changed);
    pthread_mutex_unlock(&a->lock);
    pthread_join(a->thread, NULL);
}
static void report(void *user_data, const char *name, uint64_t name_bytes, uint32_t verdict, const char *why,
                   uint64_t why_bytes) {
    if (verdict != KVT_VERDICT_FAILED) return;
    fprintf(user_data, "%.*s: %.*s\n", (int)name_bytes, name, (int)why_bytes, why);
}

int main(int argc, char **argv) {
    accelerator_t accelerator = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    accelerator.last = &accelerator.first;
    CHECK(pthread_create(&accelerator.thread, NULL, serve, &accelerator) == 0);
    kvt_device_custom_t table = KVT_DEVICE_CUSTOM_INIT;
    table.flags = KVT_DEVICE_HAS_MEMORY, table.streams = 1;
    table.submit = submit, table.query = query, table.allocate = allocate, table.free = free_memory;
    table.user_data = &accelerator, table.destroy = destroy;
    kvt_device_opts_t opts = KVT_DEVICE_OPTS_INIT;
    opts.kind = KVT_DEVICE_KIND_CUSTOM, opts.custom = &table;
    kvt_runtime_t *runtime = NULL; /* kvt_open would make one; here the device comes before the store */
    kvt_device_t *device = NULL;
    MUST(kvt_runtime_open(NULL, &runtime, &err));
    MUST(kvt_device_open(runtime, &opts, &device, &err));

    kvt_conformance_opts_t how = KVT_CONFORMANCE_OPTS_INIT;
    kvt_conformance_report_t sum = KVT_CONFORMANCE_REPORT_INIT;
    how.rounds = 4; /* the default is 40 */
    MUST(kvt_device_conformance(device, &how, report, stderr, &sum, &err));
    printf("conformance: %u checks passed, %u do not apply, %u failed\n", sum.passed, sum.skipped, sum.failed);
    CHECK(sum.failed == 0 && sum.passed > 0);
    enum { KV_HEADS = 2, HEAD_DIM = 64, CHUNK = 16, TOKENS = 8 * CHUNK, PLANE = TOKENS * KV_HEADS * HEAD_DIM };
    kvt_store_opts_t store_opts = KVT_STORE_OPTS_INIT;
    store_opts.spec = argc > 1 ? argv[1] : "store(host=16MiB)", store_opts.spec_bytes = KVT_NUL_TERMINATED;
    store_opts.device = device; /* the store copies through it, and accepts views of its memory */
    kvt_store_t *store = NULL;
    kvt_namespace_t *ns = NULL;
    kvt_session_t *session = NULL;
    kvt_layout_t layout = KVT_LAYOUT_INIT;
    const uint32_t tokens[TOKENS] = {1, 2, 3};
    MUST(kvt_store_open(runtime, NULL, &store_opts, &store, &err));
    MUST(kvt_layout_gqa(&layout, 1, KV_HEADS, HEAD_DIM, KVT_DTYPE_I8, CHUNK, &err));
    MUST(kvt_namespace_open(store, NULL, &layout, 0, &ns, &err));
    MUST(kvt_session_open(ns, NULL, &session, &err));
    MUST(kvt_session_append(session, tokens, TOKENS, &err));
    kvt_device_memory_t memory = KVT_DEVICE_MEMORY_INIT; /* K and V computed, K and V loaded */
    MUST(kvt_device_alloc(device, 4 * PLANE, &memory, &err));
    uint8_t *const bytes = (uint8_t *)(uintptr_t)memory.address; /* readable here only because it is plain memory */
    for (int i = 0; i < 4 * PLANE; i++) bytes[i] = i < 2 * PLANE ? (uint8_t)(i * 7 >> 2) : 0; /* a kernel computes KV */
    for (int is_get = 0; is_get < 2; is_get++) {
        kvt_view_t k, v;
        memset(&k, 0, sizeof k);
        k.memory = KVT_MEMORY_DEVICE, k.heads = KV_HEADS, k.run_bytes = HEAD_DIM;
        v = k;
        k.address = bytes + is_get * 2 * PLANE, v.address = bytes + is_get * 2 * PLANE + PLANE;
        kvt_transfer_t transfer = KVT_TRANSFER_INIT;
        transfer.tokens = TOKENS, transfer.k = &k, transfer.v = &v, transfer.stride_bytes = sizeof k;
        MUST((is_get ? kvt_session_get_wait : kvt_session_put_wait)(session, &transfer, NULL, &err));
    }
    CHECK(memcmp(bytes, bytes + 2 * PLANE, 2 * PLANE) == 0);
    printf("%d KiB went from device memory to the store and back; every byte is right\n", 2 * PLANE >> 10);
    MUST(kvt_device_free(device, &memory, &err));
    MUST(kvt_session_close(&session));
    MUST(kvt_namespace_close(&ns));
    MUST(kvt_store_close(&store, 0, &err));
    MUST(kvt_device_close(&device, 0, &err));
    MUST(kvt_runtime_close(&runtime, 0, NULL, &err)); /* `destroy` has stopped the thread */
    return 0;
}
