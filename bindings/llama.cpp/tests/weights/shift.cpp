// A shift of positions makes the engine rotate the keys of its cache. The RoPE factors, which are weights,
// are available then.
#include "weights/run.hpp"

#include <ggml.h>
#include <gguf.h>
#include <unistd.h>

/// Writes a copy of the model with RoPE factors, as newer Llama models have.
static void write_with_factors(const std::string &from, const std::string &to) {
    ggml_context *tensors = nullptr;
    gguf_init_params params = {};
    params.ctx = &tensors;
    gguf_context *file = gguf_init_from_file(from.c_str(), params);
    CHECK(file && tensors);
    const int64_t key = gguf_find_key(file, "llama.rope.dimension_count");
    CHECK(key >= 0);
    const int64_t count = gguf_get_val_u32(file, key) / 2;
    ggml_init_params own_params = {};
    own_params.mem_size = 1 << 20;
    ggml_context *own = ggml_init(own_params);
    gguf_context *made = gguf_init_empty();
    gguf_set_kv(made, file);
    for (ggml_tensor *one = ggml_get_first_tensor(tensors); one; one = ggml_get_next_tensor(tensors, one)) {
        // gguf adds a tensor for the file's data section, which must not be copied.
        if (gguf_find_tensor(file, one->name) >= 0) {
            gguf_add_tensor(made, one);
        }
    }
    ggml_tensor *factors = ggml_new_tensor_1d(own, GGML_TYPE_F32, count);
    ggml_set_name(factors, "rope_freqs.weight");
    for (int64_t i = 0; i < count; i++) {
        static_cast<float *>(factors->data)[i] = 1.0f + static_cast<float>(i) / 8.0f;
    }
    gguf_add_tensor(made, factors);
    CHECK(gguf_write_to_file(made, to.c_str(), false));
    ggml_free(own);
    ggml_free(tensors);
    gguf_free(made);
    gguf_free(file);
}

static std::vector<uint8_t> saved_state;

/// Shifts a restored state before the first decode. The engine recreates its scheduler for that, which has no
/// callback yet.
static std::vector<float> logits_after_shift(llama_model *model, llama_context *ctx) {
    const std::vector<llama_token> tokens = tokens_of(model, 16);
    if (saved_state.empty()) {
        CHECK(decode(ctx, tokens.data(), 12, 0) == 0);
        saved_state.resize(llama_state_get_size(ctx));
        CHECK(llama_state_get_data(ctx, saved_state.data(), saved_state.size()) == saved_state.size());
    } else {
        CHECK(llama_state_set_data(ctx, saved_state.data(), saved_state.size()) == saved_state.size());
    }
    llama_memory_t memory = llama_get_memory(ctx);
    CHECK(llama_memory_seq_rm(memory, 0, 2, 6));
    llama_memory_seq_add(memory, 0, 6, -1, -4);
    llama_set_adapter_cvec(ctx, nullptr, 0, 0, 0, 0);
    CHECK(decode(ctx, tokens.data() + 12, 1, 8) == 0);
    const float *logits = llama_get_logits_ith(ctx, -1);
    return {logits, logits + llama_vocab_n_tokens(llama_model_get_vocab(model))};
}

static std::vector<float> logits_after_shift_plain(const std::string &path, const Shape &shape) {
    llama_model *model = load_plain(path);
    llama_context *ctx = llama_init_from_model(model, context_params(shape));
    CHECK(ctx);
    const std::vector<float> out = logits_after_shift(model, ctx);
    llama_free(ctx);
    llama_model_free(model);
    return out;
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    llama_log_set(log_errors, nullptr);
    llama_backend_init();
    const Shape shape = {32, 16, 2, 1};
    const std::string original = model_path(argv[1]);
    const std::string path = "factors-" + std::to_string(getpid()) + ".gguf";
    write_with_factors(original, path);
    const std::vector<float> expected = logits_after_shift_plain(path, shape);
    CHECK(same(logits_after_shift_plain(path, shape), expected));
    CHECK(!same(logits_after_shift_plain(original, shape), expected));
    for (uint32_t flags : {0u, KVT_LLAMA_WEIGHTS_IN_PLACE}) {
        kvt_llama_weights_opts_t opts = KVT_LLAMA_WEIGHTS_OPTS_INIT;
        opts.model_path = path.c_str();
        opts.budget_bytes = sizes_of(path).floor_bytes + (256u << 10);
        opts.flags = flags;
        Streamed s;
        s.open(opts);
        s.load();
        s.context(shape);
        CHECK(same(logits_after_shift(s.model, s.ctx), expected));
        s.close();
    }
    CHECK(unlink(path.c_str()) == 0);
    llama_backend_free();
    return 0;
}
