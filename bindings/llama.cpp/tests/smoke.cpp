// A short run of all adapters on the smallest model, in one program. The test smoke_valgrind runs it under
// valgrind.
#include "tier/fixture.hpp"

#include <kvtier/llama_longer.h>
#include <kvtier/llama_watch.h>
#ifdef KVTIER_SMOKE_WEIGHTS
#include <kvtier/llama_weights.h>
#endif

using namespace tier_test;

namespace {

context_config smoke_config() {
    context_config config;
    config.n_ctx = 256;
    config.n_batch = 32;
    return config;
}

/// Saves a prompt, closes everything, and restores the prompt from the reopened store.
void run_tier(llama_model *model, const std::string &path, const std::string &folder) {
    const tokens_t tokens = prompt(model, 1, 80);
    logits_t first;
    for (int round = 0; round < 2; round++) {
        llama_context_params params = params_of(smoke_config());
        llama_context *ctx = llama_init_from_model(model, params);
        CHECK(ctx != nullptr);
        kvt_llama_tier_opts_t opts = KVT_LLAMA_TIER_OPTS_INIT;
        opts.model_path = path.c_str();
        opts.disk_path = folder.c_str();
        opts.disk_bytes = uint64_t(256) << 20;
        opts.host_bytes = uint64_t(32) << 20;
        opts.params = &params;
        kvt_llama_tier_t *tier = nullptr;
        CHECK_OK(kvt_llama_tier_open(ctx, &opts, &tier, &why));
        kvt_llama_attached_t got{};
        CHECK_OK(kvt_llama_attach(tier, 0, tokens.data(), tokens.size(), &got, &why));
        CHECK(got.reused_tokens == (round == 0 ? 0u : 64u));
        CHECK_OK(kvt_llama_prefill(tier, 0, tokens.data(), tokens.size(), got.reused_tokens, &why));
        const float *row = llama_get_logits_ith(ctx, -1);
        const logits_t now(row, row + llama_vocab_n_tokens(llama_model_get_vocab(model)));
        CHECK(round == 0 || now == first);
        first = now;
        CHECK_OK(kvt_llama_commit(tier, 0, tokens.data(), tokens.size(), &why));
        CHECK_OK(kvt_llama_flush(tier, in_seconds(600), &why));
        CHECK_OK(kvt_llama_tier_close(&tier, &why));
        llama_free(ctx);
    }
}

void run_watch(llama_model *model, const char *spec) {
    kvt_llama_watch_t *watch = nullptr;
    context_config config = smoke_config();
    config.flash = false;
    llama_context_params params = params_of(config);
    CHECK_OK(kvt_llama_watch_open(model, nullptr, &watch, &why));
    CHECK_OK(kvt_llama_watch_params(watch, &params, &why));
    llama_context *ctx = llama_init_from_model(model, params);
    CHECK(ctx != nullptr);
    CHECK_OK(kvt_llama_watch_attach(watch, ctx, &why));
    kvt_llama_sparse_opts_t sparse = KVT_LLAMA_SPARSE_OPTS_INIT;
    sparse.spec = spec;
    CHECK_OK(kvt_llama_watch_policy(watch, 0, &sparse, &why));
    tokens_t tokens = prompt(model, 2, 100);
    for (size_t at = 0; at < tokens.size();) {
        const size_t count = at < 96 ? 32 : 1;
        int32_t status = 1;
        const llama_batch batch = llama_batch_get_one(&tokens[at], int32_t(count));
        CHECK_OK(kvt_llama_watch_decode(watch, batch, &status, &why));
        CHECK(status == 0);
        at += count;
    }
    kvt_llama_watch_stats_t stats{};
    CHECK_OK(kvt_llama_watch_stats(watch, &stats));
    CHECK(stats.evicted_tokens + stats.masked_cells != 0 && stats.ended == 0);
    llama_free(ctx);
    CHECK_OK(kvt_llama_watch_close(&watch));
}

void run_longer(llama_model *model) {
    context_config config = smoke_config();
    config.n_ctx = 128; // rounded up to 256 by the engine; half of them become slots
    llama_context_params params = params_of(config);
    kvt_llama_longer_opts_t opts = KVT_LLAMA_LONGER_OPTS_INIT;
    opts.host_bytes = uint64_t(64) << 20;
    kvt_llama_longer_t *longer = nullptr;
    CHECK_OK(kvt_llama_longer_open(&opts, &params, &longer, &why));
    llama_context *ctx = llama_init_from_model(model, params);
    CHECK(ctx != nullptr);
    CHECK_OK(kvt_llama_longer_bind(longer, ctx, &why));
    const tokens_t tokens = prompt(model, 3, llama_n_ctx(ctx) + 40);
    CHECK_OK(kvt_llama_longer_decode(longer, tokens.data(), tokens.size(), &why));
    kvt_llama_longer_stats_t stats{};
    CHECK_OK(kvt_llama_longer_stats(longer, &stats));
    CHECK(stats.tokens == tokens.size() && stats.sparse_tokens != 0 && stats.failed_parts == 0);
    llama_free(ctx);
    CHECK_OK(kvt_llama_longer_close(&longer, &why));
}

#ifdef KVTIER_SMOKE_WEIGHTS
void run_weights(const std::string &path) {
    kvt_llama_weights_opts_t opts = KVT_LLAMA_WEIGHTS_OPTS_INIT;
    opts.model_path = path.c_str();
    opts.budget_bytes = uint64_t(32) << 20;
    kvt_llama_weights_t *weights = nullptr;
    CHECK_OK(kvt_llama_weights_open(&opts, &weights, &why));
    llama_model_params model_params = llama_model_default_params();
    llama_model *model = nullptr;
    CHECK_OK(kvt_llama_weights_load(weights, &model_params, &model, &why));
    llama_context_params params = params_of(smoke_config());
    CHECK_OK(kvt_llama_weights_context(weights, &params, &why));
    llama_context *ctx = llama_init_from_model(model, params);
    CHECK(ctx != nullptr);
    CHECK(decode(ctx, 0, prompt(model, 4, 20), 0, 20, 16) == 0);
    llama_free(ctx);
    llama_model_free(model);
    CHECK_OK(kvt_llama_weights_close(&weights, &why));
}
#endif

} // namespace

int main(int argc, char **argv) {
    const std::string path = model_path("tiny-llama-f16");
    const std::string folder =
        std::filesystem::temp_directory_path() / ("kvtier-smoke-" + std::to_string(now_ns()));
    const std::string only = argc > 1 ? argv[1] : "";
    llama_model *model = load(path);
    if (only.empty() || only == "tier") run_tier(model, path, folder);
    if (only.empty() || only == "watch") {
        run_watch(model, "h2o(budget=16, recent=16)");
        run_watch(model, "quest(budget=32, share=bound, dense=0)");
    }
    if (only.empty() || only == "longer") run_longer(model);
    llama_model_free(model);
#ifdef KVTIER_SMOKE_WEIGHTS
    if (only.empty() || only == "weights") run_weights(path);
#endif
    llama_backend_free();
    std::filesystem::remove_all(folder);
    return 0;
}
