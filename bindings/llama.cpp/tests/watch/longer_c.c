/* The header compiles as C99, and calls without a bound context are refused with a message. */
#include <kvtier/llama_longer.h>

#include <stdio.h>
#include <string.h>

static int failures;

static void check(int ok, const char *what, int line) {
    if (!ok) {
        fprintf(stderr, "longer_c.c:%d: %s\n", line, what);
        failures++;
    }
}

#define CHECK(expression) check((expression) != 0, #expression, __LINE__)

int main(void) {
    kvt_llama_longer_opts_t opts = KVT_LLAMA_LONGER_OPTS_INIT;
    struct llama_context_params params = llama_context_default_params();
    kvt_llama_longer_t *longer = NULL;
    kvt_llama_longer_stats_t stats;
    kvt_llama_why_t why;
    size_t count = 7;
    const llama_token token = 1;
    opts.host_bytes = 32u << 20;
    CHECK(kvt_llama_longer_open(&opts, &params, &longer, &why) == KVT_OK && longer != NULL);
    CHECK(params.cb_eval != NULL && params.kv_unified && params.n_seq_max >= 2);
    CHECK(kvt_llama_longer_stats(longer, &stats) == KVT_OK && stats.tokens == 0);
    CHECK(kvt_llama_longer_stats(longer, NULL) == KVT_E_INVALID);
    CHECK(kvt_llama_longer_bind(longer, NULL, &why) == KVT_E_INVALID);
    CHECK(kvt_llama_longer_decode(longer, &token, 1, &why) == KVT_E_STATE);
    CHECK(strstr(why.text, "not bound") != NULL);
    CHECK(kvt_llama_longer_truncate(longer, 0, &why) == KVT_E_STATE);
    CHECK(kvt_llama_longer_save(longer, NULL) == KVT_E_STATE);
    CHECK(kvt_llama_longer_resume(longer, &token, 1, &count, &why) == KVT_E_STATE && count == 7);
    CHECK(kvt_llama_longer_chosen(longer, 0, NULL, 0, &count) == KVT_E_INVALID);
    CHECK(kvt_llama_longer_close(&longer, &why) == KVT_OK && longer == NULL);
    return failures != 0;
}
