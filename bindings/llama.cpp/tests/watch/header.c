/* The header compiles as C99, and null arguments are refused with a message. */
#include <kvtier/llama_watch.h>

#include <stdio.h>

int main(void) {
    kvt_llama_watch_t *watch = NULL;
    kvt_llama_watch_opts_t opts = KVT_LLAMA_WATCH_OPTS_INIT;
    kvt_llama_sparse_opts_t sparse = KVT_LLAMA_SPARSE_OPTS_INIT;
    kvt_llama_watch_stats_t stats;
    kvt_llama_why_t why;
    if (kvt_llama_watch_open(NULL, &opts, &watch, &why) != KVT_E_INVALID || !why.text[0]) {
        return 1;
    }
    if (kvt_llama_watch_policy(watch, 0, &sparse, &why) != KVT_E_INVALID ||
        kvt_llama_watch_stats(watch, &stats) != KVT_E_INVALID) {
        return 1;
    }
    printf("%s\n", why.text);
    return kvt_llama_watch_close(&watch) == KVT_OK ? 0 : 1;
}
