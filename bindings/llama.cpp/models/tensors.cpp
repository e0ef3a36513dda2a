// Prints the tensors that the engine wants for a GGUF file of metadata only, one a line:
//
//   tensors FILE.gguf   ->   NAME DIM DIM...
//
// The first dimension is the innermost one, as the engine counts them. Optional tensors are printed too. When
// the engine rejects the metadata, its messages go to stderr and the exit status is 1.
#include <gguf.h>
#include <llama.h>

#include <cstdio>

static void print(ggml_tensor *tensor, void *) {
    std::printf("%s", ggml_get_name(tensor));
    for (int dim = 0; dim < ggml_n_dims(tensor); dim++) std::printf(" %lld", (long long)tensor->ne[dim]);
    std::printf("\n");
}

static void warn(ggml_log_level level, const char *text, void *) {
    if (level >= GGML_LOG_LEVEL_WARN) std::fputs(text, stderr);
}

int main(int argc, char **argv) {
    if (argc != 2) {
        std::fprintf(stderr, "usage: tensors FILE.gguf\n");
        return 2;
    }
    llama_log_set(warn, nullptr);
    gguf_context *metadata = gguf_init_from_file(argv[1], {true, nullptr});
    if (metadata == nullptr) return 1;
    llama_model *model = llama_model_init_from_user(metadata, print, nullptr, llama_model_default_params());
    if (model == nullptr) return 1;
    llama_model_free(model);
    gguf_free(metadata);
    return 0;
}
