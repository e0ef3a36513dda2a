// Calls in the wrong order or with invalid arguments are refused with a message.
#include "weights/run.hpp"

#include <fstream>
#include <unistd.h>

static std::string path;
static const Shape shape = {24, 8, 4, 1};

static kvt_llama_weights_opts_t opts_of(uint64_t budget_bytes) {
    kvt_llama_weights_opts_t opts = KVT_LLAMA_WEIGHTS_OPTS_INIT;
    opts.model_path = path.c_str();
    opts.budget_bytes = budget_bytes;
    return opts;
}

static void check_refused(const kvt_llama_weights_opts_t &opts, kvt_status_t status, const char *word) {
    kvt_llama_weights_t *none = nullptr;
    CHECK_IS(kvt_llama_weights_open(&opts, &none, &why), status);
    CHECK(!none && std::strstr(why.text, word));
}

static void invalid_options_are_refused(uint64_t budget_bytes) {
    kvt_llama_weights_opts_t opts = opts_of(budget_bytes);
    opts.model_path = nullptr;
    check_refused(opts, KVT_E_INVALID, "model_path");
    opts = opts_of(budget_bytes);
    opts.flags = 1u << 20;
    check_refused(opts, KVT_E_INVALID, "flags");
    opts = opts_of(budget_bytes);
    opts.flags = KVT_LLAMA_WEIGHTS_IN_PLACE | KVT_LLAMA_WEIGHTS_NOT_IN_PLACE;
    check_refused(opts, KVT_E_INVALID, "IN_PLACE");
    opts = opts_of(budget_bytes);
    opts.contexts = 1000;
    check_refused(opts, KVT_E_LIMIT, "contexts");
    opts = opts_of(100 << 10);
    check_refused(opts, KVT_E_BUDGET, "needs");
    CHECK(kvt_llama_weights_open(nullptr, nullptr, nullptr) == KVT_E_INVALID);
    kvt_llama_weights_t *none = nullptr;
    CHECK_IS(kvt_llama_weights_close(&none, &why), KVT_OK);
    CHECK_IS(kvt_llama_weights_close(nullptr, &why), KVT_OK);
    CHECK(!kvt_llama_weights_stream(nullptr));
}

/// The engine's loader with the params of kvt_llama_weights_params, instead of kvt_llama_weights_load.
static void engine_loader_with_our_params_gives_the_same_bits(uint64_t budget_bytes) {
    Streamed s;
    s.open(opts_of(budget_bytes));
    llama_context_params early = context_params(shape);
    CHECK_IS(kvt_llama_weights_context(s.weights, &early, &why), KVT_E_STATE);
    llama_model_params params = llama_model_default_params();
    params.vocab_only = true;
    CHECK_IS(kvt_llama_weights_params(s.weights, &params, &why), KVT_E_INVALID);
    params = llama_model_default_params();
    CHECK_IS(kvt_llama_weights_params(s.weights, &params, &why), KVT_OK);
    CHECK_IS(kvt_llama_weights_bind(s.weights, nullptr, &why), KVT_E_INVALID);
    s.model = llama_model_load_from_file(path.c_str(), params);
    CHECK(s.model);
    CHECK_IS(kvt_llama_weights_context(s.weights, &early, &why), KVT_E_STATE);
    CHECK_IS(kvt_llama_weights_bind(s.weights, s.model, &why), KVT_OK);
    CHECK_IS(kvt_llama_weights_bind(s.weights, s.model, &why), KVT_E_STATE);
    s.context(shape);
    CHECK_IS(kvt_llama_weights_context(s.weights, &s.params, &why), KVT_E_INVALID);
    Shape own = shape;
    own.ubatch = s.params.n_ubatch;
    CHECK(same(run(s.model, s.ctx, own), run_plain(path, own)));
    s.close();
}

/// A caller may take the params and load nothing.
static void close_works_without_a_load(uint64_t budget_bytes) {
    Streamed s;
    s.open(opts_of(budget_bytes));
    llama_model_params params = llama_model_default_params();
    CHECK_IS(kvt_llama_weights_params(s.weights, &params, &why), KVT_OK);
    CHECK_IS(kvt_llama_weights_close(&s.weights, &why), KVT_OK);
}

/// The engine takes n_ubatch = 0 as n_batch. With few expert slots the adapter lowers it.
static void zero_ubatch_becomes_a_size_that_fits(uint64_t budget_bytes) {
    Streamed s;
    s.open(opts_of(budget_bytes));
    s.load();
    Shape whole = shape;
    whole.ubatch = 0;
    s.context(whole);
    CHECK(!run(s.model, s.ctx, whole).empty());
    s.close();
}

/// Another file with the same path is used neither for headers nor for weights.
static void replaced_file_is_refused(uint64_t budget_bytes) {
    const std::string original = path;
    path = "other-" + std::to_string(getpid()) + ".gguf";
    for (const bool is_own_load : {false, true}) {
        CHECK(symlink(original.c_str(), path.c_str()) == 0);
        Streamed s;
        s.open(opts_of(budget_bytes));
        CHECK(unlink(path.c_str()) == 0);
        {
            std::ifstream from(original, std::ios::binary);
            std::ofstream to(path, std::ios::binary);
            to << from.rdbuf();
        }
        llama_model_params params = llama_model_default_params();
        if (is_own_load) {
            CHECK_IS(kvt_llama_weights_params(s.weights, &params, &why), KVT_OK);
            s.model = llama_model_load_from_file(path.c_str(), params);
            CHECK(s.model);
            CHECK_IS(kvt_llama_weights_bind(s.weights, s.model, &why), KVT_E_CORRUPT);
            llama_model_free(s.model);
        } else {
            CHECK_IS(kvt_llama_weights_load(s.weights, &params, &s.model, &why), KVT_E_IO);
        }
        CHECK(std::strstr(why.text, path.c_str()));
        CHECK_IS(kvt_llama_weights_close(&s.weights, &why), KVT_OK);
        CHECK(unlink(path.c_str()) == 0);
    }
    path = original;
}

static void calls_in_the_wrong_order_are_refused(uint64_t budget_bytes) {
    Streamed s;
    s.open(opts_of(budget_bytes));
    s.load();
    llama_model *second = nullptr;
    const llama_model_params params = llama_model_default_params();
    CHECK_IS(kvt_llama_weights_load(s.weights, &params, &second, &why), KVT_E_STATE);
    CHECK(!second);
    s.context(shape);
    kvt_llama_weights_t *weights = s.weights;
    CHECK_IS(kvt_llama_weights_close(&s.weights, &why), KVT_E_BUSY);
    CHECK(s.weights == weights && std::strstr(why.text, "free"));
    const llama_token token = 3;
    CHECK(decode(s.ctx, &token, 1, 0) == 0);
    llama_free(s.ctx);
    CHECK_IS(kvt_llama_weights_close(&s.weights, &why), KVT_E_BUSY);
    llama_model_free(s.model);
    // After the model is freed, the same handle loads another one.
    s.load();
    CHECK(kvt_llama_weights_context_end(s.weights, &s.params) != KVT_E_INVALID);
    s.context(shape);
    CHECK(decode(s.ctx, &token, 1, 0) == 0);
    s.close();
}

static bool cancel_load(float part, void *data) {
    *static_cast<float *>(data) = part;
    return false;
}

static bool record_progress(float part, void *data) {
    auto &last = *static_cast<float *>(data);
    CHECK(part >= last && part <= 1.0f);
    last = part;
    return true;
}

static void progress_callback_can_cancel_the_load(uint64_t budget_bytes) {
    Streamed s;
    s.open(opts_of(budget_bytes));
    llama_model_params params = llama_model_default_params();
    float last = -1;
    params.progress_callback_user_data = &last;
    params.progress_callback = cancel_load;
    CHECK_IS(kvt_llama_weights_load(s.weights, &params, &s.model, &why), KVT_E_CANCELLED);
    CHECK(!s.model && last >= 0);
    last = 0;
    params.progress_callback = record_progress;
    CHECK_IS(kvt_llama_weights_load(s.weights, &params, &s.model, &why), KVT_OK);
    CHECK(last == 1.0f);
    s.context(shape);
    s.close();
}

/// The caller's budget, which needs the caller's runtime.
static void shared_budget_is_respected(uint64_t budget_bytes) {
    kvt_runtime_t *runtime = nullptr;
    kvt_runtime_opts_t runtime_opts = KVT_RUNTIME_OPTS_INIT;
    CHECK(kvt_runtime_open(&runtime_opts, &runtime, nullptr) == KVT_OK);
    kvt_budget_opts_t limits = KVT_BUDGET_OPTS_INIT;
    limits.host_bytes = budget_bytes + (1u << 20);
    kvt_budget_t *budget = nullptr;
    CHECK(kvt_budget_open(runtime, &limits, &budget, nullptr) == KVT_OK);
    kvt_llama_weights_opts_t opts = opts_of(budget_bytes);
    opts.budget = budget;
    check_refused(opts, KVT_E_INVALID, "runtime");
    opts.runtime = runtime;
    Streamed s;
    s.open(opts);
    s.load();
    s.context(shape);
    const llama_token token = 3;
    CHECK(decode(s.ctx, &token, 1, 0) == 0);
    CHECK(s.stats().used_bytes <= budget_bytes);
    s.close();
    CHECK(kvt_budget_close(&budget, nullptr) == KVT_OK);
    CHECK(kvt_runtime_close(&runtime, 0, nullptr, nullptr) == KVT_OK);
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    llama_log_set(log_errors, nullptr);
    llama_backend_init();
    path = model_path(argv[1]);
    const uint64_t budget_bytes = sizes_of(path).floor_bytes + (256u << 10);
    invalid_options_are_refused(budget_bytes);
    engine_loader_with_our_params_gives_the_same_bits(budget_bytes);
    close_works_without_a_load(budget_bytes);
    zero_ubatch_becomes_a_size_that_fits(budget_bytes);
    replaced_file_is_refused(budget_bytes);
    calls_in_the_wrong_order_are_refused(budget_bytes);
    progress_callback_can_cancel_the_load(budget_bytes);
    shared_budget_is_respected(budget_bytes);
    llama_backend_free();
    return 0;
}
