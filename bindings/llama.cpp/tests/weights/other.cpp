// An adapter compiled for another engine version is refused; the message names both versions.
#include "weights/run.hpp"

int main(int argc, char **argv) {
    CHECK(argc == 2);
    kvt_llama_weights_opts_t opts = KVT_LLAMA_WEIGHTS_OPTS_INIT;
    opts.model_path = "any.gguf";
    kvt_llama_weights_t *weights = nullptr;
    CHECK_IS(kvt_llama_weights_open(&opts, &weights, &why), KVT_E_UNSUPPORTED);
    CHECK(!weights);
    CHECK(std::strstr(why.text, "compile"));
    CHECK(std::strstr(why.text, std::strcmp(argv[1], "ggml") == 0 ? "0.25.3" : "0.5.0"));
    CHECK(std::strstr(why.text, std::strcmp(argv[1], "ggml") == 0 ? ggml_version() : llama_version()));
    return 0;
}
