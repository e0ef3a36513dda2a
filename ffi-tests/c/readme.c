/* Copies a buffer through the library, and checks that the bytes arrived. */
#include <kvtier/kvtier.h>
#include <stdio.h>
#include <string.h>

#define MUST(call) do { kvt_status_t s = (call); if (s != KVT_OK) { \
    fprintf(stderr, "%s: %s\n", #call, kvt_status_str(s)); return 1; } } while (0)

int main(void) {
    kvt_runtime_t *runtime = NULL; /* owns the threads; NULL options are the defaults */
    kvt_queue_t *queue = NULL;     /* completions arrive here */
    kvt_buffer_t *from = NULL, *to = NULL;
    kvt_buffer_opts_t size = KVT_BUFFER_OPTS_INIT;
    size.bytes = 1 << 20;
    MUST(kvt_abi_check(KVT_HEADER_VERSION, NULL));
    MUST(kvt_runtime_open(NULL, &runtime, NULL));
    MUST(kvt_queue_open(runtime, NULL, &queue, NULL));
    MUST(kvt_buffer_alloc(runtime, &size, &from, NULL));
    MUST(kvt_buffer_alloc(runtime, &size, &to, NULL));
    void *source = NULL, *target = NULL;
    MUST(kvt_buffer_address(from, &source, NULL));
    MUST(kvt_buffer_address(to, &target, NULL));
    memset(source, 0x5a, size.bytes);

    kvt_buffer_item_t copy = {.kind = KVT_DO_COPY | KVT_DO_CHECKSUM, .dst = to, .src = from, .bytes = size.bytes};
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    opts.queue = queue;
    MUST(kvt_buffer_submit(runtime, &opts, &copy, 1, sizeof copy, NULL, NULL)); /* never waits */

    kvt_completion_t done;
    uint64_t count = 0, sum = 0;
    MUST(kvt_queue_wait(queue, 0, &done, 1, sizeof done, &count));
    MUST(done.status);
    MUST(kvt_checksum(target, size.bytes, &sum));
    puts(sum == done.value && memcmp(source, target, size.bytes) == 0 ? "copied and verified" : "the bytes differ");

    MUST(kvt_buffer_free(&from));
    MUST(kvt_buffer_free(&to));
    MUST(kvt_queue_close(&queue, 0, NULL));
    MUST(kvt_runtime_close(&runtime, 0, NULL, NULL)); /* no thread is left */
    return sum == done.value ? 0 : 1;
}
