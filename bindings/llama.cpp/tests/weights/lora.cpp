// LoRA adapters are loaded by the engine and give the same bits on streamed weights.
#include "weights/run.hpp"

#include <gguf.h>
#include <unistd.h>

static const Shape shape;

/// Writes an adapter of rank 4 for the query weights of two layers.
static void write_adapter(const std::string &path, int64_t width, int64_t queries) {
    ggml_init_params memory = {16u << 20, nullptr, false};
    ggml_context *ctx = ggml_init(memory);
    gguf_context *file = gguf_init_empty();
    gguf_set_val_str(file, "general.type", "adapter");
    gguf_set_val_str(file, "general.architecture", "llama");
    gguf_set_val_str(file, "adapter.type", "lora");
    gguf_set_val_f32(file, "adapter.lora.alpha", 8.0f);
    uint32_t state = 99;
    for (int layer = 1; layer <= 2; layer++) {
        for (int half = 0; half < 2; half++) {
            ggml_tensor *tensor = half == 0 ? ggml_new_tensor_2d(ctx, GGML_TYPE_F32, width, 4)
                                            : ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 4, queries);
            ggml_format_name(tensor, "blk.%d.attn_q.weight.lora_%c", layer, half == 0 ? 'a' : 'b');
            auto *numbers = static_cast<float *>(tensor->data);
            for (int64_t i = 0; i < ggml_nelements(tensor); i++) {
                state = state * 1103515245u + 12345u;
                numbers[i] = float(int(state >> 16) % 1000 - 500) / 2000.0f;
            }
            gguf_add_tensor(file, tensor);
        }
    }
    CHECK(gguf_write_to_file(file, path.c_str(), false));
    gguf_free(file);
    ggml_free(ctx);
}

static std::vector<float> run_adapted(llama_model *model, llama_context *ctx, const std::string &adapter) {
    llama_adapter_lora *lora = llama_adapter_lora_init(model, adapter.c_str());
    CHECK(lora);
    float scale = 1.0f;
    CHECK(llama_set_adapters_lora(ctx, &lora, 1, &scale) == 0);
    return run(model, ctx, shape);
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    llama_log_set(log_errors, nullptr);
    llama_backend_init();
    const std::string path = model_path(argv[1]);
    const Sizes sizes = sizes_of(path);
    char folder[] = "weights-lora-XXXXXX";
    CHECK(mkdtemp(folder));
    const std::string adapter = std::string(folder) + "/adapter.gguf";

    llama_model *model = load_plain(path);
    const int64_t width = llama_model_n_embd(model);
    write_adapter(adapter, width, width);
    llama_context *ctx = llama_init_from_model(model, context_params(shape));
    CHECK(ctx);
    const std::vector<float> plain = run_adapted(model, ctx, adapter);
    llama_free(ctx);
    llama_model_free(model);
    CHECK(!same(plain, run_plain(path, shape)));

    kvt_llama_weights_opts_t opts = KVT_LLAMA_WEIGHTS_OPTS_INIT;
    opts.model_path = path.c_str();
    opts.budget_bytes = sizes.floor_bytes + (64u << 10);
    Streamed s;
    s.open(opts);
    s.load();
    s.context(shape);
    CHECK(same(plain, run_adapted(s.model, s.ctx, adapter)));
    s.close();
    CHECK(std::remove(adapter.c_str()) == 0 && rmdir(folder) == 0);
    llama_backend_free();
    return 0;
}
