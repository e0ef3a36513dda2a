// What the tests of the tier share: models, contexts, prompts, logits, checks.
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

namespace world {

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
                         kvt_status_name(status_), world::why.text);                                         \
            std::exit(1);                                                                                    \
        }                                                                                                    \
    } while (0)

inline thread_local kvt_llama_why_t why{};

inline uint64_t now_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return uint64_t(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

inline uint64_t in_seconds(uint64_t seconds) { return now_ns() + seconds * 1000000000; }

inline void quiet(ggml_log_level level, const char *text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR && std::getenv("KVTIER_TEST_LOUD")) {
        std::fputs(text, stderr);
    }
}

/// The path of a model; ends the program with SKIP where it is absent.
inline std::string model_path(const std::string &name) {
    const char *folder = std::getenv("KVTIER_LLAMA_MODELS");
    const std::string path = std::string(folder ? folder : ".") + "/" + name + ".gguf";
    if (!std::filesystem::exists(path)) {
        std::printf("SKIP: there is no model %s\n", path.c_str());
        std::exit(skipped);
    }
    return path;
}

inline llama_model *load(const std::string &path) {
    llama_log_set(quiet, nullptr);
    llama_backend_init();
    llama_model *model = llama_model_load_from_file(path.c_str(), llama_model_default_params());
    CHECK(model != nullptr);
    return model;
}

struct how {
    uint32_t n_ctx = 2048;
    uint32_t n_seq = 4;
    bool flash = true;
    ggml_type kv = GGML_TYPE_F16;
    bool unified = true;
    uint32_t n_batch = 256;
    int32_t threads = 1;
};

inline llama_context_params params_of(const how &is) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = is.n_ctx;
    params.n_batch = params.n_ubatch = is.n_batch;
    params.n_seq_max = is.n_seq;
    params.n_threads = params.n_threads_batch = is.threads;
    params.flash_attn_type = is.flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.type_k = is.kv;
    params.type_v = is.flash ? is.kv : GGML_TYPE_F16;
    params.kv_unified = is.unified;
    params.swa_full = false;
    return params;
}

inline llama_context *context(llama_model *model, const how &is = how{}) {
    llama_context *ctx = llama_init_from_model(model, params_of(is));
    CHECK(ctx != nullptr);
    return ctx;
}

/// Tokens that are the same in every run; `text` says which.
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

inline tokens_t joined(tokens_t first, const tokens_t &then) {
    first.insert(first.end(), then.begin(), then.end());
    return first;
}

/// Decodes [first, end) in batches of `batch`, logits of the last.
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

inline bool bitwise(const logits_t &a, const logits_t &b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0;
}

inline double distance(const logits_t &a, const logits_t &b) {
    double most = 0;
    for (size_t i = 0; i < a.size(); i++) {
        most = std::max(most, double(std::fabs(a[i] - b[i])));
    }
    return most;
}

inline size_t best(const logits_t &a) { return size_t(std::max_element(a.begin(), a.end()) - a.begin()); }

/// Logits of one token after `tokens`, in a context of its own: the run without us. `cuts` are where
/// batches end besides.
inline logits_t without_us(llama_model *model, const how &is, const tokens_t &tokens,
                           const std::vector<size_t> &cuts = {}) {
    llama_context *ctx = context(model, is);
    size_t at = 0;
    for (size_t cut : cuts) {
        if (cut > at && cut < tokens.size()) {
            CHECK(decode(ctx, 0, tokens, at, cut, is.n_batch) == 0);
            at = cut;
        }
    }
    CHECK(decode(ctx, 0, tokens, at, tokens.size(), is.n_batch) == 0);
    const logits_t out = logits(ctx);
    llama_free(ctx);
    return out;
}

struct folder {
    std::string path;
    folder() {
        const char *where = std::getenv("TMPDIR");
        path = std::string(where ? where : "/tmp") + "/kvtier-tier-XXXXXX";
        CHECK(mkdtemp(&path[0]) != nullptr);
    }
    ~folder() { std::filesystem::remove_all(path); }
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

/// A request with us: attach, prefill of the rest, logits.
inline logits_t with_us(kvt_llama_tier_t *tier, llama_context *ctx, llama_seq_id seq, const tokens_t &tokens,
                        kvt_llama_attached_t *attached = nullptr) {
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
