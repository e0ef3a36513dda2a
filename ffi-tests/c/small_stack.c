/* Engines call from threads with small stacks: the FFI of Node.js has 128 KiB. A store must open,
 * list and close on such a thread. */

#include "check.h"

static void *on_a_small_stack(void *arg) {
    const char spec[] = "store(host=16MiB,chunks=8192)";
    kvt_runtime_t *runtime = open_runtime(1, NULL);
    kvt_store_opts_t opts = KVT_STORE_OPTS_INIT;
    opts.spec = spec;
    opts.spec_bytes = strlen(spec);
    kvt_store_t *store = NULL;
    CHECK_OK(kvt_store_open(runtime, NULL, &opts, &store, NULL));
    kvt_store_stats_t stats = KVT_STORE_STATS_INIT;
    CHECK_OK(kvt_store_stats(store, &stats));
    CHECK_OK(kvt_store_close(&store, 0, NULL));
    CHECK_OK(kvt_runtime_close(&runtime, 0, NULL, NULL));
    return arg;
}

int main(void) {
    check_begin();
    pthread_attr_t attributes;
    pthread_t thread;
    CHECK_EQ(pthread_attr_init(&attributes), 0);
    CHECK_EQ(pthread_attr_setstacksize(&attributes, 128 << 10), 0);
    CHECK_EQ(pthread_create(&thread, &attributes, on_a_small_stack, NULL), 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(pthread_attr_destroy(&attributes), 0);
    return 0;
}
