// Shared by the tests of streamed weights: models, runs, comparisons.
#ifndef WEIGHTS_RUN_HPP
#define WEIGHTS_RUN_HPP

#include <kvtier/llama_weights.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <sys/stat.h>
#include <vector>

#define CHECK(holds)                                                                                         \
    do {                                                                                                     \
        if (!(holds)) {                                                                                      \
            std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #holds);                         \
            std::exit(1);                                                                                    \
        }                                                                                                    \
    } while (0)

#define CHECK_IS(call, expected)                                                                             \
    do {                                                                                                     \
        const kvt_status_t got_ = (call);                                                                    \
        if (got_ != (expected)) {                                                                            \
            std::fprintf(stderr, "%s:%d: %s is %d, not %d: %s\n", __FILE__, __LINE__, #call, (int) got_,     \
                         (int) (expected), why.text);                                                        \
            std::exit(1);                                                                                    \
        }                                                                                                    \
    } while (0)

/// The message of the last call.
inline kvt_llama_why_t why;

inline std::string model_path(const char *name) {
    const char *models = std::getenv("KVTIER_LLAMA_MODELS");
    const std::string path = std::string(models ? models : ".") + "/" + name + ".gguf";
    struct stat found {};
    if (stat(path.c_str(), &found) != 0) {
        std::printf("SKIP: no model %s\n", path.c_str());
        std::exit(77);
    }
    return path;
}

inline uint64_t file_bytes(const std::string &path) {
    struct stat found {};
    CHECK(stat(path.c_str(), &found) == 0);
    return static_cast<uint64_t>(found.st_size);
}

inline void log_errors(ggml_log_level level, const char *text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR || std::getenv("WEIGHTS_TEST_LOG")) {
        std::fputs(text, stderr);
    }
}

struct Shape {
    uint32_t prompt = 96, ubatch = 32, decodes = 6, threads = 1;
};

/// Pseudorandom tokens, equal in every run.
inline std::vector<llama_token> tokens_of(const llama_model *model, uint32_t count) {
    const uint32_t vocab_size = static_cast<uint32_t>(llama_vocab_n_tokens(llama_model_get_vocab(model)));
    std::vector<llama_token> tokens(count);
    uint32_t state = 12345;
    for (llama_token &token : tokens) {
        state = state * 1103515245u + 12345u;
        token = static_cast<llama_token>((state >> 8) % vocab_size);
    }
    return tokens;
}

inline llama_context_params context_params(const Shape &shape) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = shape.prompt + shape.decodes + 8;
    params.n_batch = shape.prompt;
    params.n_ubatch = shape.ubatch;
    params.n_threads = params.n_threads_batch = static_cast<int32_t>(shape.threads);
    params.no_perf = true;
    return params;
}

/// One decode, with logits of the last token. Returns the result of llama_decode.
inline int decode(llama_context *ctx, const llama_token *tokens, uint32_t count, uint32_t position) {
    llama_batch batch = llama_batch_init(static_cast<int32_t>(count), 0, 1);
    batch.n_tokens = static_cast<int32_t>(count);
    for (uint32_t i = 0; i < count; i++) {
        batch.token[i] = tokens[i];
        batch.pos[i] = static_cast<llama_pos>(position + i);
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = i + 1 == count;
    }
    const int result = llama_decode(ctx, batch);
    llama_batch_free(batch);
    return result;
}

/// Logits after the prompt and after each further token; empty if a decode fails.
inline std::vector<float> run(const llama_model *model, llama_context *ctx, const Shape &shape) {
    const int32_t vocab_size = llama_vocab_n_tokens(llama_model_get_vocab(model));
    const std::vector<llama_token> tokens = tokens_of(model, shape.prompt + shape.decodes);
    std::vector<float> all;
    for (uint32_t i = 0; i <= shape.decodes; i++) {
        const uint32_t at = i == 0 ? 0 : shape.prompt + i - 1;
        const int result = decode(ctx, tokens.data() + at, i == 0 ? shape.prompt : 1, at);
        if (result != 0) {
            std::fprintf(stderr, "decode %u: %d\n", i, result);
            return {};
        }
        const float *logits = llama_get_logits_ith(ctx, -1);
        all.insert(all.end(), logits, logits + vocab_size);
    }
    return all;
}

/// Loads the model without the adapter and without repacked weights.
inline llama_model *load_plain(const std::string &path) {
    llama_model_params params = llama_model_default_params();
    params.use_extra_bufts = false;
    llama_model *model = llama_model_load_from_file(path.c_str(), params);
    CHECK(model);
    return model;
}

inline std::vector<float> run_plain(const std::string &path, const Shape &shape) {
    llama_model *model = load_plain(path);
    llama_context *ctx = llama_init_from_model(model, context_params(shape));
    CHECK(ctx);
    std::vector<float> all = run(model, ctx, shape);
    CHECK(!all.empty());
    llama_free(ctx);
    llama_model_free(model);
    return all;
}

/// Sizes of a model: the smallest budget that kvt_model_plan accepts, layers, weights, experts.
struct Sizes {
    uint64_t floor_bytes = 0, layers_bytes = 0, model_bytes = 0;
    uint32_t experts = 0;
};

inline Sizes sizes_of(const std::string &path, uint32_t slots = 2) {
    Sizes sizes;
    const kvt_str_t text = {path.c_str(), path.size()};
    kvt_model_t *model = nullptr;
    CHECK(kvt_model_open(&text, 1, sizeof text, &model, nullptr) == KVT_OK);
    kvt_model_info_t info = KVT_MODEL_INFO_INIT;
    CHECK(kvt_model_info(model, &info) == KVT_OK);
    sizes.model_bytes = info.bytes;
    for (uint32_t i = 0; i < info.units; i++) {
        kvt_unit_t unit = KVT_UNIT_INIT;
        CHECK(kvt_model_unit(model, i, &unit) == KVT_OK);
        sizes.experts += unit.role == KVT_ROLE_EXPERT ? 1 : 0;
        const bool is_layer = unit.role == KVT_ROLE_LAYER || unit.role == KVT_ROLE_EXPERT;
        sizes.layers_bytes += is_layer ? unit.image_bytes : 0;
    }
    uint64_t low = 4096, high = info.bytes * 2 + (64u << 20);
    while (low + 4096 < high) {
        kvt_stream_terms_t terms = KVT_STREAM_TERMS_INIT;
        terms.compute = KVT_COMPUTE_HOST;
        terms.slots = slots;
        terms.flags = KVT_TERMS_KV | KVT_TERMS_HOST_CEILING | KVT_TERMS_HOST_RESERVE | KVT_TERMS_SHRINKS;
        terms.host_ceiling_bytes = (low + high) / 2;
        kvt_stream_plan_t plan = KVT_STREAM_PLAN_INIT;
        const bool fits =
            kvt_model_plan(model, &terms, nullptr, &plan, nullptr, nullptr, 0, 0, nullptr) == KVT_OK;
        (fits ? high : low) = terms.host_ceiling_bytes;
    }
    sizes.floor_bytes = high;
    CHECK(kvt_model_close(&model) == KVT_OK);
    return sizes;
}

/// A model with streamed weights, and a context.
struct Streamed {
    kvt_llama_weights_t *weights = nullptr;
    llama_model *model = nullptr;
    llama_context_params params{};
    llama_context *ctx = nullptr;

    void open(const kvt_llama_weights_opts_t &opts) {
        CHECK_IS(kvt_llama_weights_open(&opts, &weights, &why), KVT_OK);
    }
    void load() {
        const llama_model_params model_params = llama_model_default_params();
        CHECK_IS(kvt_llama_weights_load(weights, &model_params, &model, &why), KVT_OK);
    }
    void context(const Shape &shape) {
        params = context_params(shape);
        CHECK_IS(kvt_llama_weights_context(weights, &params, &why), KVT_OK);
        ctx = llama_init_from_model(model, params);
        CHECK(ctx);
    }
    kvt_llama_weights_stats_t stats() const {
        kvt_llama_weights_stats_t stats;
        CHECK(kvt_llama_weights_stats(weights, &stats) == KVT_OK);
        CHECK(stats.peak_bytes <= stats.budget_bytes);
        return stats;
    }
    void close() {
        llama_free(ctx);
        llama_model_free(model);
        CHECK_IS(kvt_llama_weights_close(&weights, &why), KVT_OK);
        CHECK(!weights);
    }
};

inline bool same(const std::vector<float> &one, const std::vector<float> &other) {
    return one.size() == other.size() && !one.empty() &&
           std::memcmp(one.data(), other.data(), one.size() * sizeof one[0]) == 0;
}

#endif
