// Files that are damaged, cut or changed end a decode with words, and never a process.
#include "weights/run.hpp"

#include <cmath>
#include <fcntl.h>
#include <fstream>
#include <unistd.h>

static std::string given, copied;
static const Shape shape = [] {
    Shape made;
    made.prompt = 8;
    made.ubatch = 1;
    return made;
}();

static void copy_model() {
    std::ifstream from(given, std::ios::binary);
    std::ofstream to(copied, std::ios::binary | std::ios::trunc);
    to << from.rdbuf();
    CHECK(to.good());
}

static kvt_llama_weights_opts_t opts_of(const Sizes &sizes, uint32_t flags) {
    kvt_llama_weights_opts_t opts = KVT_LLAMA_WEIGHTS_OPTS_INIT;
    opts.model_path = copied.c_str();
    opts.budget_bytes = sizes.floor_bytes + (256u << 10);
    opts.flags = flags;
    return opts;
}

/// A model that has decoded once.
static Streamed start(const Sizes &sizes, uint32_t flags) {
    Streamed s;
    s.open(opts_of(sizes, flags));
    s.load();
    s.context(shape);
    const llama_token token = 5;
    CHECK(decode(s.ctx, &token, 1, 0) == 0);
    return s;
}

static void check_cut(const Sizes &sizes) {
    copy_model();
    Streamed s = start(sizes, 0);
    const llama_token token = 7;
    CHECK(truncate(copied.c_str(), static_cast<off_t>(file_bytes(copied) / 2)) == 0);
    CHECK(decode(s.ctx, &token, 1, 1) == 2);
    CHECK(decode(s.ctx, &token, 1, 1) == 2);
    CHECK_IS(kvt_llama_weights_error(s.weights, &why), KVT_E_CORRUPT);
    CHECK(std::strstr(why.text, copied.c_str()));
    CHECK_IS(kvt_llama_weights_error(s.weights, &why), KVT_OK);
    // It is not what it was: nothing is computed with it any more.
    CHECK(decode(s.ctx, &token, 1, 1) == 2);
    CHECK_IS(kvt_llama_weights_error(s.weights, &why), KVT_E_CORRUPT);
    CHECK(s.stats().failed_decodes == 2);
    s.close();
}

/// A byte in the middle of the weights becomes another, and the file says nothing of it.
static void damage(uint64_t at) {
    struct stat was {};
    const int file = open(copied.c_str(), O_RDWR);
    uint8_t byte = 0;
    CHECK(file >= 0 && fstat(file, &was) == 0 && pread(file, &byte, 1, static_cast<off_t>(at)) == 1);
    byte ^= 1;
    CHECK(pwrite(file, &byte, 1, static_cast<off_t>(at)) == 1);
    const timespec times[2] = {was.st_atim, was.st_mtim};
    CHECK(futimens(file, times) == 0 && close(file) == 0);
}

/// Where a layer's weights begin that every token uses.
static uint64_t weight_offset() {
    const kvt_str_t text = {copied.c_str(), copied.size()};
    kvt_model_t *model = nullptr;
    CHECK(kvt_model_open(&text, 1, sizeof text, &model, nullptr) == KVT_OK);
    uint32_t number = 0;
    kvt_tensor_t tensor = KVT_TENSOR_INIT;
    CHECK(kvt_model_find_tensor(model, "blk.1.attn_q.weight", 19, &number) == KVT_OK);
    CHECK(kvt_model_tensor(model, number, &tensor) == KVT_OK);
    const uint64_t offset = tensor.offset;
    CHECK(kvt_model_close(&model) == KVT_OK);
    return offset;
}

static void check_damage(const Sizes &sizes) {
    copy_model();
    const uint64_t at = weight_offset() + 100;
    const std::string sums = copied + ".kvtsum";
    Streamed s = start(sizes, KVT_LLAMA_WEIGHTS_VERIFY);
    const llama_token token = 7;
    damage(at);
    // Slots may have it from before still: some decodes later all has been read again.
    int result = 0;
    for (uint32_t i = 1; i < 6 && result == 0; i++) {
        result = decode(s.ctx, &token, 1, i);
    }
    CHECK(result == 2);
    CHECK_IS(kvt_llama_weights_error(s.weights, &why), KVT_E_CORRUPT);
    CHECK(std::strstr(why.text, copied.c_str()));
    // As it was before, it is used again: what is read is compared, not what is remembered.
    damage(at);
    CHECK(llama_memory_seq_rm(llama_get_memory(s.ctx), 0, -1, -1));
    CHECK(decode(s.ctx, &token, 1, 0) == 0);
    s.close();
    CHECK(std::remove(sums.c_str()) == 0);
}

static bool never(void *) { return false; }
static bool always(void *) { return true; }

/// Who takes the abort callback away gets no result, and the words.
static void check_no_abort(const Sizes &sizes) {
    copy_model();
    Streamed s = start(sizes, 0);
    llama_set_abort_callback(s.ctx, never, nullptr);
    CHECK(truncate(copied.c_str(), static_cast<off_t>(file_bytes(copied) / 2)) == 0);
    const llama_token token = 7;
    CHECK(decode(s.ctx, &token, 1, 1) == 0);
    CHECK(std::isnan(llama_get_logits_ith(s.ctx, -1)[0]));
    CHECK_IS(kvt_llama_weights_error(s.weights, &why), KVT_E_CORRUPT);
    s.close();
}

struct Counts {
    int asked = 0, seen = 0;
};

static bool count(ggml_tensor *node, bool ask, void *data) {
    auto &counts = *static_cast<Counts *>(data);
    const bool mine = std::strncmp(node->name, "l_out", 5) == 0;
    (ask ? counts.asked : counts.seen)++;
    CHECK(ask || mine);
    return ask ? mine : true;
}

/// Callbacks of the caller go on as if they were alone.
static void check_callbacks(const Sizes &sizes) {
    copy_model();
    Streamed s;
    s.open(opts_of(sizes, 0));
    s.load();
    Counts counts;
    s.params = context_params(shape);
    s.params.cb_eval = count;
    s.params.cb_eval_user_data = &counts;
    CHECK_IS(kvt_llama_weights_context(s.weights, &s.params, &why), KVT_OK);
    s.ctx = llama_init_from_model(s.model, s.params);
    const llama_token token = 5;
    CHECK(decode(s.ctx, &token, 1, 0) == 0);
    CHECK(counts.seen >= llama_model_n_layer(s.model) && counts.asked > counts.seen);
    llama_free(s.ctx);
    CHECK(kvt_llama_weights_context_end(s.weights, &s.params) == KVT_OK);
    s.params = context_params(shape);
    s.params.abort_callback = always;
    CHECK_IS(kvt_llama_weights_context(s.weights, &s.params, &why), KVT_OK);
    s.ctx = llama_init_from_model(s.model, s.params);
    CHECK(decode(s.ctx, &token, 1, 0) == 2);
    CHECK_IS(kvt_llama_weights_error(s.weights, &why), KVT_OK);
    s.close();
}

/// Files that are none, or cut before they are opened.
static void check_bad_files(const Sizes &sizes) {
    copy_model();
    kvt_llama_weights_t *none = nullptr;
    kvt_llama_weights_opts_t opts = opts_of(sizes, 0);
    CHECK(truncate(copied.c_str(), static_cast<off_t>(file_bytes(copied) - 5000)) == 0);
    CHECK_IS(kvt_llama_weights_open(&opts, &none, &why), KVT_E_CORRUPT);
    CHECK(truncate(copied.c_str(), 100) == 0);
    CHECK_IS(kvt_llama_weights_open(&opts, &none, &why), KVT_E_CORRUPT);
    CHECK(std::remove(copied.c_str()) == 0);
    CHECK_IS(kvt_llama_weights_open(&opts, &none, &why), KVT_E_NOT_FOUND);
    CHECK(why.text[0] && !none);
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    given = model_path(argv[1]);
    char folder[] = "weights-faults-XXXXXX";
    CHECK(mkdtemp(folder));
    copied = std::string(folder) + "/model.gguf";
    const Sizes sizes = sizes_of(given);
    check_cut(sizes);
    check_damage(sizes);
    check_no_abort(sizes);
    check_callbacks(sizes);
    check_bad_files(sizes);
    CHECK(rmdir(folder) == 0);
    llama_backend_free();
    return 0;
}
