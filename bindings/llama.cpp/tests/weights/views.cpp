// A view of a weight is set to the weight's current address. A direct read of a weight returns its bytes.
#include "weights/run.hpp"

#include <fcntl.h>
#include <unistd.h>

static const char *const weight_name = "blk.2.attn_q.weight";

static bool find_weight(ggml_tensor *node, bool ask, void *data) {
    for (const ggml_tensor *source : node->src) {
        if (ask && source && std::strcmp(source->name, weight_name) == 0) {
            *static_cast<const ggml_tensor **>(data) = source;
        }
    }
    return false;
}

/// Bytes of the weight in the file.
static std::vector<uint8_t> bytes_of_file(const std::string &path) {
    const kvt_str_t text = {path.c_str(), path.size()};
    kvt_model_t *model = nullptr;
    uint32_t number = 0;
    kvt_tensor_t tensor = KVT_TENSOR_INIT;
    CHECK(kvt_model_open(&text, 1, sizeof text, &model, nullptr) == KVT_OK);
    CHECK(kvt_model_find_tensor(model, weight_name, std::strlen(weight_name), &number) == KVT_OK);
    CHECK(kvt_model_tensor(model, number, &tensor) == KVT_OK);
    std::vector<uint8_t> bytes(tensor.bytes);
    const int file = open(path.c_str(), O_RDONLY);
    CHECK(pread(file, bytes.data(), bytes.size(), static_cast<off_t>(tensor.offset)) == ssize_t(bytes.size()));
    CHECK(close(file) == 0 && kvt_model_close(&model) == KVT_OK);
    return bytes;
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    llama_log_set(log_errors, nullptr);
    llama_backend_init();
    const std::string path = model_path(argv[1]);
    kvt_llama_weights_opts_t opts = KVT_LLAMA_WEIGHTS_OPTS_INIT;
    opts.model_path = path.c_str();
    opts.budget_bytes = sizes_of(path).floor_bytes + (64u << 10);
    Streamed s;
    s.open(opts);
    s.load();
    const Shape shape;
    const ggml_tensor *weight = nullptr;
    s.params = context_params(shape);
    s.params.cb_eval = find_weight;
    s.params.cb_eval_user_data = &weight;
    CHECK_IS(kvt_llama_weights_context(s.weights, &s.params, &why), KVT_OK);
    s.ctx = llama_init_from_model(s.model, s.params);
    const llama_token token = 3;
    CHECK(s.ctx && decode(s.ctx, &token, 1, 0) == 0 && weight);

    const std::vector<uint8_t> bytes = bytes_of_file(path);
    std::vector<uint8_t> read_bytes(bytes.size());
    ggml_backend_tensor_get(weight, read_bytes.data(), 0, read_bytes.size());
    CHECK(read_bytes == bytes);

    // A node with a view, created while the weight had another address.
    const ggml_init_params memory = {1u << 16, nullptr, true};
    ggml_context *graph = ggml_init(memory);
    auto *root = const_cast<ggml_tensor *>(weight);
    const size_t offset = root->nb[1] * 3;
    ggml_tensor *view = ggml_view_1d(graph, root, root->ne[0], offset);
    ggml_tensor *node = ggml_dup(graph, view);
    view->data = nullptr;
    s.params.cb_eval(node, true, s.params.cb_eval_user_data);
    CHECK(view->data && view->data == static_cast<uint8_t *>(root->data) + offset);
    CHECK(std::memcmp(view->data, bytes.data() + offset, ggml_nbytes(view)) == 0);
    CHECK(s.params.cb_eval(node, false, s.params.cb_eval_user_data));
    ggml_free(graph);
    CHECK(decode(s.ctx, &token, 1, 1) == 0);
    s.close();
    llama_backend_free();
    return 0;
}
