// llama_model_save_to_file writes the right weights of a streamed model. It reads through copies of tensors.
#include "weights/run.hpp"

#include <unistd.h>

static const Shape shape = {8, 4, 2, 1};

int main(int argc, char **argv) {
    CHECK(argc == 2);
    llama_log_set(log_errors, nullptr);
    llama_backend_init();
    const std::string path = model_path(argv[1]);
    const std::string saved = "saved-" + std::to_string(getpid()) + ".gguf";
    kvt_llama_weights_opts_t opts = KVT_LLAMA_WEIGHTS_OPTS_INIT;
    opts.model_path = path.c_str();
    opts.budget_bytes = sizes_of(path).floor_bytes + (256u << 10);
    opts.flags = KVT_LLAMA_WEIGHTS_NOT_IN_PLACE;
    Streamed s;
    s.open(opts);
    s.load();
    s.context(shape);
    const llama_token token = 3;
    CHECK(decode(s.ctx, &token, 1, 0) == 0);
    llama_model_save_to_file(s.model, saved.c_str());
    CHECK_IS(kvt_llama_weights_error(s.weights, &why), KVT_OK);
    s.close();
    CHECK(same(run_plain(saved, shape), run_plain(path, shape)));
    CHECK(unlink(saved.c_str()) == 0);
    llama_backend_free();
    return 0;
}
