/* The example of llama_weights.h, as a C program. */
#include <kvtier/llama_weights.h>

#include <stdio.h>
#include <stdlib.h>

static kvt_llama_why_t why;

static int failed(const char *what) {
    fprintf(stderr, "%s: %s\n", what, why.text);
    return 1;
}

int main(int argc, char **argv) {
    const char *models = getenv("KVTIER_LLAMA_MODELS");
    char path[4096];
    snprintf(path, sizeof path, "%s/%s.gguf", models ? models : ".", argc > 1 ? argv[1] : "");
    FILE *file = fopen(path, "rb");
    if (!file) {
        printf("SKIP: no model %s\n", path);
        return 77;
    }
    fclose(file);
    llama_backend_init();

    kvt_llama_weights_opts_t opts = KVT_LLAMA_WEIGHTS_OPTS_INIT;
    opts.model_path = path;
    opts.budget_bytes = 1300 << 10;
    kvt_llama_weights_t *weights = NULL;
    if (kvt_llama_weights_open(&opts, &weights, &why) != KVT_OK) return failed("open");

    struct llama_model_params mp = llama_model_default_params();
    struct llama_model *model = NULL;
    if (kvt_llama_weights_load(weights, &mp, &model, &why) != KVT_OK) return failed("load");

    struct llama_context_params cp = llama_context_default_params();
    cp.n_ctx = 64;
    if (kvt_llama_weights_context(weights, &cp, &why) != KVT_OK) return failed("context");
    struct llama_context *ctx = llama_init_from_model(model, cp);
    if (!ctx) return failed("llama_init_from_model");
    llama_token token = 1;
    for (int i = 0; i < 8; i++) {
        if (llama_decode(ctx, llama_batch_get_one(&token, 1)) != 0) {
            kvt_llama_weights_error(weights, &why);
            return failed("llama_decode");
        }
        const float *logits = llama_get_logits_ith(ctx, -1);
        token = logits[1] > logits[2] ? 1 : 2;
    }
    kvt_llama_weights_stats_t stats;
    if (kvt_llama_weights_stats(weights, &stats) != KVT_OK || stats.peak_bytes > opts.budget_bytes) return 1;
    if (stats.read_bytes < stats.model_bytes || stats.streamed_units == 0) return 1;
    llama_free(ctx);
    llama_model_free(model);
    if (kvt_llama_weights_close(&weights, &why) != KVT_OK) return failed("close");
    llama_backend_free();
    return 0;
}
