// Shared by the tests of the KV tier: models, contexts, prompts, logits, checks.
#pragma once

#include <kvtier/llama.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

namespace tier_test {

using tokens_t = std::vector<llama_token>;
using logits_t = std::vector<float>;

constexpr int skipped = 77;

#define CHECK(what)                                                                                          \
    do {                                                                                                     \
        if (!(what)) {                                                                                       \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what);                                  \
            std::exit(1);                                                                                    \
        }                                                                                                    \
    } while (0)

#define CHECK_OK(call)                                                                                       \
    do {                                                                                                     \
        const kvt_status_t status_ = (call);                                                                 \
        if (status_ != KVT_OK) {                                                                             \
            std::fprintf(stderr, "%s:%d: %s: %s (%s)\n", __FILE__, __LINE__, #call,                          \
                         kvt_status_name(status_), tier_test::why.text);                                     \
            std::exit(1);                                                                                    \
        }                                                                                                    \
    } while (0)

inline thread_local kvt_llama_why_t why{};

inline uint64_t now_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return uint64_t(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

inline uint64_t in_seconds(uint64_t seconds) { return now_ns() + seconds * 1000000000; }

inline void log_errors(ggml_log_level level, const char *text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR && std::getenv("KVTIER_TEST_LOUD")) {
        std::fputs(text, stderr);
    }
}

/// The path of a model. Exits with the skip status if the file is absent.
inline std::string model_path(const std::string &name) {
    const char *folder = std::getenv("KVTIER_LLAMA_MODELS");
    const std::string path = std::string(folder ? folder : ".") + "/" + name + ".gguf";
    if (!std::filesystem::exists(path)) {
        std::printf("SKIP: no model %s\n", path.c_str());
        std::exit(skipped);
    }
    return path;
}

inline llama_model *load(const std::string &path) {
    llama_log_set(log_errors, nullptr);
    llama_backend_init();
    llama_model *model = llama_model_load_from_file(path.c_str(), llama_model_default_params());
    CHECK(model != nullptr);
    return model;
}

struct context_config {
    uint32_t n_ctx = 2048;
    uint32_t n_seq = 4;
    bool flash = true;
    ggml_type kv = GGML_TYPE_F16;
    bool unified = true;
    uint32_t n_batch = 256;
    int32_t threads = 1;
};

inline llama_context_params params_of(const context_config &config) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = config.n_ctx;
    params.n_batch = params.n_ubatch = config.n_batch;
    params.n_seq_max = config.n_seq;
    params.n_threads = params.n_threads_batch = config.threads;
    params.flash_attn_type = config.flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.type_k = config.kv;
    params.type_v = config.flash ? config.kv : GGML_TYPE_F16;
    params.kv_unified = config.unified;
    params.swa_full = false;
    return params;
}

/// A context that tests of eviction and damage fill quickly.
inline context_config small_context() {
    context_config config;
    config.n_ctx = 1024;
    config.n_batch = 128;
    return config;
}

inline llama_context *context(llama_model *model, const context_config &config = context_config{}) {
    llama_context *ctx = llama_init_from_model(model, params_of(config));
    CHECK(ctx != nullptr);
    return ctx;
}

/// Pseudorandom tokens, equal in every run for an equal `text`.
inline tokens_t prompt(const llama_model *model, uint32_t text, size_t count) {
    const int32_t vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    tokens_t tokens;
    uint32_t x = text * 2654435761u + 12345;
    for (size_t i = 0; i < count; i++) {
        x = x * 1103515245u + 12345u;
        tokens.push_back(llama_token(3 + (x >> 8) % uint32_t(std::min(vocabulary - 4, 30000))));
    }
    return tokens;
}

inline tokens_t concat(tokens_t first, const tokens_t &then) {
    first.insert(first.end(), then.begin(), then.end());
    return first;
}

/// Decodes tokens [first, end) in batches of `batch`, with logits of the last token.
inline int decode(llama_context *ctx, llama_seq_id seq, const tokens_t &tokens, size_t first, size_t end,
                  size_t batch) {
    llama_batch of = llama_batch_init(int32_t(batch), 0, 1);
    int status = 0;
    for (size_t at = first; at < end && status == 0;) {
        const size_t count = std::min(batch, end - at);
        of.n_tokens = int32_t(count);
        for (size_t i = 0; i < count; i++) {
            of.token[i] = tokens[at + i];
            of.pos[i] = llama_pos(at + i);
            of.n_seq_id[i] = 1;
            of.seq_id[i][0] = seq;
            of.logits[i] = at + i + 1 == end;
        }
        status = llama_decode(ctx, of);
        at += count;
    }
    llama_batch_free(of);
    return status;
}

inline logits_t logits(llama_context *ctx) {
    const int32_t count = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    const float *all = llama_get_logits_ith(ctx, -1);
    CHECK(all != nullptr);
    return logits_t(all, all + count);
}

inline bool bitwise_equal(const logits_t &a, const logits_t &b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0;
}

inline double distance(const logits_t &a, const logits_t &b) {
    double most = 0;
    for (size_t i = 0; i < a.size(); i++) {
        most = std::max(most, double(std::fabs(a[i] - b[i])));
    }
    return most;
}

/// The distance as a share of the range of the expected logits.
inline double relative_distance(const logits_t &with, const logits_t &without) {
    const auto [low, high] = std::minmax_element(without.begin(), without.end());
    return distance(with, without) / double(*high - *low);
}

/// Limit of relative_distance. Earlier requests move cells, which changes the order of sums.
constexpr double tolerance = 0.02;

inline size_t argmax(const logits_t &a) { return size_t(std::max_element(a.begin(), a.end()) - a.begin()); }

/// Logits after `tokens` in a new context without a tier. Batches also end at each position in `cuts`.
inline logits_t run_without_tier(llama_model *model, const context_config &config, const tokens_t &tokens,
                           const std::vector<size_t> &cuts = {}) {
    llama_context *ctx = context(model, config);
    size_t at = 0;
    for (size_t cut : cuts) {
        if (cut > at && cut < tokens.size()) {
            CHECK(decode(ctx, 0, tokens, at, cut, config.n_batch) == 0);
            at = cut;
        }
    }
    CHECK(decode(ctx, 0, tokens, at, tokens.size(), config.n_batch) == 0);
    const logits_t out = logits(ctx);
    llama_free(ctx);
    return out;
}

struct temp_dir {
    std::string path;
    temp_dir() {
        const char *tmp = std::getenv("TMPDIR");
        path = std::string(tmp ? tmp : "/tmp") + "/kvtier-tier-XXXXXX";
        CHECK(mkdtemp(&path[0]) != nullptr);
    }
    ~temp_dir() { std::filesystem::remove_all(path); }
};

inline kvt_llama_tier_t *open_tier(llama_context *ctx, const kvt_llama_tier_opts_t &opts) {
    kvt_llama_tier_t *tier = nullptr;
    CHECK_OK(kvt_llama_tier_open(ctx, &opts, &tier, &why));
    return tier;
}

inline void close_tier(kvt_llama_tier_t **tier) {
    CHECK_OK(kvt_llama_tier_close(tier, &why));
    CHECK(*tier == nullptr);
}

inline kvt_llama_attached_t attach(kvt_llama_tier_t *tier, llama_seq_id seq, const tokens_t &tokens) {
    kvt_llama_attached_t out;
    CHECK_OK(kvt_llama_attach(tier, seq, tokens.data(), tokens.size(), &out, &why));
    CHECK(out.reused_tokens < tokens.size());
    CHECK(out.reused_tokens == out.kept_tokens + out.host_tokens + out.disk_tokens + out.recomputed_tokens);
    return out;
}

inline void commit(kvt_llama_tier_t *tier, llama_seq_id seq, const tokens_t &tokens) {
    CHECK_OK(kvt_llama_commit(tier, seq, tokens.data(), tokens.size(), &why));
}

inline void flush(kvt_llama_tier_t *tier) { CHECK_OK(kvt_llama_flush(tier, in_seconds(600), &why)); }

/// A request with a tier: attaches, prefills the rest, returns the logits.
inline logits_t run_with_tier(kvt_llama_tier_t *tier, llama_context *ctx, llama_seq_id seq,
                              const tokens_t &tokens, kvt_llama_attached_t *attached = nullptr) {
    const kvt_llama_attached_t out = attach(tier, seq, tokens);
    if (attached) {
        *attached = out;
    }
    CHECK_OK(kvt_llama_prefill(tier, seq, tokens.data(), tokens.size(), out.reused_tokens, &why));
    return logits(ctx);
}

inline kvt_llama_tier_stats_t stats(const kvt_llama_tier_t *tier) {
    kvt_llama_tier_stats_t out;
    CHECK_OK(kvt_llama_tier_stats(tier, &out));
    return out;
}

} // namespace world
