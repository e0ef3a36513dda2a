// Shared by the tests of the watch adapter: models, contexts, decoding, checks.
#ifndef KVTIER_LLAMA_TESTS_WATCH_MODEL_HPP
#define KVTIER_LLAMA_TESTS_WATCH_MODEL_HPP

#include <llama.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

namespace watch_test {

inline int failures = 0;

inline void check(bool ok, const char *what, const char *file, int line) {
    if (!ok && failures < 20) {
        std::fprintf(stderr, "%s:%d: %s\n", file, line, what);
    }
    failures += !ok;
}

#define CHECK(expression) watch_test::check((expression), #expression, __FILE__, __LINE__)

// Ends the test as skipped.
[[noreturn]] inline void skip(const std::string &why) {
    std::printf("SKIP: %s\n", why.c_str());
    std::exit(77);
}

struct model_free {
    void operator()(llama_model *model) const { llama_model_free(model); }
};
struct context_free {
    void operator()(llama_context *ctx) const { llama_free(ctx); }
};
using model_ptr = std::unique_ptr<llama_model, model_free>;
using context_ptr = std::unique_ptr<llama_context, context_free>;

// Null if the file is absent.
inline model_ptr load(const char *name) {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    const char *folder = std::getenv("KVTIER_LLAMA_MODELS");
    const std::string path = std::string(folder ? folder : ".") + "/" + name;
    std::FILE *file = std::fopen(path.c_str(), "rb");
    if (!file) {
        return nullptr;
    }
    std::fclose(file);
    return model_ptr(llama_model_load_from_file(path.c_str(), llama_model_default_params()));
}

inline llama_context_params params(uint32_t n_ctx, bool flash) {
    llama_context_params p = llama_context_default_params();
    p.n_ctx = n_ctx;
    p.n_batch = 512;
    p.n_seq_max = 4;
    p.kv_unified = true;
    p.n_threads = p.n_threads_batch = 1;
    p.flash_attn_type = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    return p;
}

inline context_ptr open(llama_model *model, const llama_context_params &p) {
    return context_ptr(llama_init_from_model(model, p));
}

inline std::vector<llama_token> tokenize(const llama_model *model, const std::string &text) {
    std::vector<llama_token> out(text.size() + 8);
    const int n = llama_tokenize(llama_model_get_vocab(model), text.data(), (int) text.size(),
                                 out.data(), (int) out.size(), true, true);
    out.resize(n > 0 ? (size_t) n : 0);
    return out;
}

// Decodes tokens [first, last) at their positions, with logits of the last one.
inline bool decode(llama_context *ctx, const std::vector<llama_token> &tokens, size_t first,
                   size_t last, llama_seq_id seq = 0) {
    while (first < last) {
        const size_t n = std::min(last - first, (size_t) llama_n_batch(ctx));
        llama_batch batch = llama_batch_init((int32_t) n, 0, 1);
        batch.n_tokens = (int32_t) n;
        for (size_t i = 0; i < n; i++) {
            batch.token[i] = tokens[first + i];
            batch.pos[i] = (llama_pos) (first + i);
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = seq;
            batch.logits[i] = first + i + 1 == last;
        }
        const int rc = llama_decode(ctx, batch);
        llama_batch_free(batch);
        if (rc != 0) {
            return false;
        }
        first += n;
    }
    return true;
}

inline std::vector<float> logits(llama_context *ctx) {
    const float *data = llama_get_logits_ith(ctx, -1);
    const int n = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    return data ? std::vector<float>(data, data + n) : std::vector<float>();
}

} // namespace watch_test

#endif
