/* Copies a buffer through the library, and checks that the bytes arrived. */
#include <kvtier/kvtier.h>
#include <stdio.h>
#include <string.h>

static void must(kvt_status_t status) {
    if (status != KVT_OK) fprintf(stderr, "%s: %s\n", kvt_status_name(status), kvt_status_str(status));
}

int main(void) {
    must(kvt_abi_check(KVT_HEADER_VERSION, NULL));

    kvt_runtime_t *runtime = NULL; /* it owns the threads; null options are the defaults */
    kvt_queue_t *queue = NULL;     /* completions arrive here */
    kvt_buffer_t *from = NULL, *to = NULL;
    kvt_buffer_opts_t size = KVT_BUFFER_OPTS_INIT;
    size.bytes = 1 << 20;
    must(kvt_runtime_open(NULL, &runtime, NULL));
    must(kvt_queue_open(runtime, NULL, &queue, NULL));
    must(kvt_buffer_alloc(runtime, &size, &from, NULL));
    must(kvt_buffer_alloc(runtime, &size, &to, NULL));

    void *source = NULL, *target = NULL;
    must(kvt_buffer_address(from, &source, NULL));
    must(kvt_buffer_address(to, &target, NULL));
    memset(source, 0x5a, size.bytes);

    kvt_buffer_item_t item = {.kind = KVT_DO_COPY | KVT_DO_CHECKSUM, .dst = to, .src = from,
                              .bytes = size.bytes};
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    opts.queue = queue;
    opts.tag = 42; /* comes back with the completion */
    must(kvt_buffer_submit(runtime, &opts, &item, 1, sizeof item, NULL, NULL));

    kvt_completion_t done = {0};
    uint64_t count = 0, sum = 0;
    must(kvt_queue_wait(queue, 0, &done, 1, sizeof done, &count));
    must(done.status);
    must(kvt_checksum(target, size.bytes, &sum));
    const int same = done.tag == 42 && sum == done.value && memcmp(source, target, size.bytes) == 0;

    must(kvt_buffer_free(&from));
    must(kvt_buffer_free(&to));
    must(kvt_queue_close(&queue, 0, NULL));
    must(kvt_runtime_close(&runtime, 0, NULL, NULL));
    puts(same ? "copied and verified" : "the bytes differ");
    return same ? 0 : 1;
}
