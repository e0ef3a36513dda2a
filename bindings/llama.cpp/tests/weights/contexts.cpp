// Contexts of one model decode at the same time with the right bits.
#include "weights/run.hpp"

#include <thread>

static const Shape shape = [] {
    Shape made;
    made.prompt = 32;
    made.ubatch = 16;
    made.decodes = 12;
    return made;
}();

struct Pair {
    Streamed s;
    llama_context_params params[2];
    llama_context *ctx[2] = {nullptr, nullptr};

    void open(const std::string &path, uint64_t budget_bytes) {
        kvt_llama_weights_opts_t opts = KVT_LLAMA_WEIGHTS_OPTS_INIT;
        opts.model_path = path.c_str();
        opts.budget_bytes = budget_bytes;
        opts.contexts = 2;
        s.open(opts);
        s.load();
        for (int i = 0; i < 2; i++) {
            params[i] = context_params(shape);
            CHECK_IS(kvt_llama_weights_context(s.weights, &params[i], &why), KVT_OK);
            ctx[i] = llama_init_from_model(s.model, params[i]);
            CHECK(ctx[i]);
        }
        llama_context_params third = context_params(shape);
        CHECK_IS(kvt_llama_weights_context(s.weights, &third, &why), KVT_E_LIMIT);
    }
    void close() {
        CHECK(kvt_llama_weights_error(s.weights, &why) == KVT_OK);
        s.stats();
        llama_free(ctx[0]);
        s.ctx = ctx[1];
        s.close();
    }
};

static std::vector<float> run_batches(const std::string &path, uint32_t ubatch) {
    llama_model *model = load_plain(path);
    llama_context_params params = context_params(shape);
    params.n_ubatch = ubatch;
    llama_context *ctx = llama_init_from_model(model, params);
    CHECK(ctx);
    std::vector<float> all = run(model, ctx, shape);
    llama_free(ctx);
    llama_model_free(model);
    return all;
}

static void contexts_on_two_threads_give_the_same_bits(const std::string &path, uint64_t budget_bytes) {
    Pair pair;
    pair.open(path, budget_bytes);
    const std::vector<float> plain = run_batches(path, pair.params[0].n_ubatch);
    std::vector<float> got[2];
    std::thread other([&] { got[1] = run(pair.s.model, pair.ctx[1], shape); });
    got[0] = run(pair.s.model, pair.ctx[0], shape);
    other.join();
    if (!same(plain, got[0]) || !same(plain, got[1])) {
        kvt_llama_weights_error(pair.s.weights, &why);
        std::fprintf(stderr, "%s\n", why.text);
    }
    CHECK(same(plain, got[0]));
    CHECK(same(plain, got[1]));
    pair.close();
}

/// One thread decodes in two contexts in turn. Then one context is freed, and a new one takes its slot.
static void freed_context_can_be_replaced(const std::string &path, uint64_t budget_bytes) {
    Pair pair;
    pair.open(path, budget_bytes);
    const std::vector<llama_token> tokens = tokens_of(pair.s.model, 16);
    const int32_t vocab_size = llama_vocab_n_tokens(llama_model_get_vocab(pair.s.model));
    for (uint32_t i = 0; i < 16; i++) {
        std::vector<float> logits[2];
        for (int c = 0; c < 2; c++) {
            CHECK(decode(pair.ctx[c], &tokens[i], 1, i) == 0);
            const float *row = llama_get_logits_ith(pair.ctx[c], -1);
            logits[c].assign(row, row + vocab_size);
        }
        CHECK(same(logits[0], logits[1]));
    }
    llama_free(pair.ctx[0]);
    CHECK(kvt_llama_weights_context_end(pair.s.weights, &pair.params[0]) == KVT_OK);
    CHECK(kvt_llama_weights_context_end(pair.s.weights, &pair.params[0]) == KVT_E_NOT_FOUND);
    pair.params[0] = context_params(shape);
    CHECK_IS(kvt_llama_weights_context(pair.s.weights, &pair.params[0], &why), KVT_OK);
    pair.ctx[0] = llama_init_from_model(pair.s.model, pair.params[0]);
    CHECK(pair.ctx[0] && decode(pair.ctx[0], tokens.data(), 1, 0) == 0);
    pair.close();
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    llama_log_set(log_errors, nullptr);
    llama_backend_init();
    const std::string path = model_path(argv[1]);
    const Sizes sizes = sizes_of(path, 3);
    // Slack for the experts of two tokens.
    const uint64_t slack = sizes.experts ? sizes.model_bytes / 4 : 64u << 10;
    contexts_on_two_threads_give_the_same_bits(path, sizes.floor_bytes + slack);
    contexts_on_two_threads_give_the_same_bits(path, sizes.model_bytes * 2);
    freed_context_can_be_replaced(path, sizes.floor_bytes + slack);
    llama_backend_free();
    return 0;
}
