/* User data that is never released: the queue is closed, but its data has no destroy callback. */

#include "../c/check.h"

static void ignore(void *data, const kvt_completion_t *batch, uint64_t count, uint64_t stride) {
    (void)data, (void)batch, (void)count, (void)stride;
}

int main(int argc, char **argv) {
    check_begin();
    kvt_runtime_t *runtime = open_runtime(1, NULL);
    kvt_queue_opts_t opts = KVT_QUEUE_OPTS_INIT;
    opts.callback = ignore;
    opts.user_data = malloc(77);
    CHECK(opts.user_data != NULL);
    if (argc > 1 && strcmp(argv[1], "clean") == 0) opts.destroy = free;
    kvt_queue_t *queue = NULL;
    CHECK_OK(kvt_queue_open(runtime, &opts, &queue, NULL));
    memset(&opts, 0, sizeof opts); /* the last pointer to it */
    close_queue(&queue);
    close_runtime(&runtime);
    return 0;
}
