// A damaged, truncated or changed file fails the decode with a message. It never ends the process.
#include "weights/run.hpp"

#include <cmath>
#include <fcntl.h>
#include <fstream>
#include <unistd.h>

static std::string original, copy_path;
static const Shape shape = [] {
    Shape made;
    made.prompt = 8;
    made.ubatch = 1;
    return made;
}();

static void copy_model() {
    std::ifstream from(original, std::ios::binary);
    std::ofstream to(copy_path, std::ios::binary | std::ios::trunc);
    to << from.rdbuf();
    CHECK(to.good());
}

static kvt_llama_weights_opts_t opts_of(const Sizes &sizes, uint32_t flags) {
    kvt_llama_weights_opts_t opts = KVT_LLAMA_WEIGHTS_OPTS_INIT;
    opts.model_path = copy_path.c_str();
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

static void truncated_file_fails_the_decode(const Sizes &sizes) {
    copy_model();
    Streamed s = start(sizes, 0);
    const llama_token token = 7;
    CHECK(truncate(copy_path.c_str(), static_cast<off_t>(file_bytes(copy_path) / 2)) == 0);
    CHECK(decode(s.ctx, &token, 1, 1) == 2);
    CHECK(decode(s.ctx, &token, 1, 1) == 2);
    CHECK_IS(kvt_llama_weights_error(s.weights, &why), KVT_E_CORRUPT);
    CHECK(std::strstr(why.text, copy_path.c_str()));
    CHECK_IS(kvt_llama_weights_error(s.weights, &why), KVT_OK);
    // The file stays refused after the error was read.
    CHECK(decode(s.ctx, &token, 1, 1) == 2);
    CHECK_IS(kvt_llama_weights_error(s.weights, &why), KVT_E_CORRUPT);
    CHECK(s.stats().failed_decodes == 2);
    s.close();
}

/// Flips a bit of the weights and keeps the file's times, so that only a checksum finds the change.
static void change_byte(uint64_t at) {
    struct stat was {};
    const int file = open(copy_path.c_str(), O_RDWR);
    uint8_t byte = 0;
    CHECK(file >= 0 && fstat(file, &was) == 0 && pread(file, &byte, 1, static_cast<off_t>(at)) == 1);
    byte ^= 1;
    CHECK(pwrite(file, &byte, 1, static_cast<off_t>(at)) == 1);
    const timespec times[2] = {was.st_atim, was.st_mtim};
    CHECK(futimens(file, times) == 0 && close(file) == 0);
}

/// Offset of weights that every token uses.
static uint64_t weight_offset() {
    const kvt_str_t text = {copy_path.c_str(), copy_path.size()};
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

static void verify_finds_a_changed_byte(const Sizes &sizes) {
    copy_model();
    const uint64_t at = weight_offset() + 100;
    const std::string sums = copy_path + ".kvtsum";
    Streamed s = start(sizes, KVT_LLAMA_WEIGHTS_VERIFY);
    const llama_token token = 7;
    change_byte(at);
    // Slots may still hold the old bytes; after some decodes all weights were read again.
    int result = 0;
    for (uint32_t i = 1; i < 6 && result == 0; i++) {
        result = decode(s.ctx, &token, 1, i);
    }
    CHECK(result == 2);
    CHECK_IS(kvt_llama_weights_error(s.weights, &why), KVT_E_CORRUPT);
    CHECK(std::strstr(why.text, copy_path.c_str()));
    // With the old byte back, decodes succeed: each read is verified, an earlier failure is not remembered.
    change_byte(at);
    CHECK(llama_memory_seq_rm(llama_get_memory(s.ctx), 0, -1, -1));
    CHECK(decode(s.ctx, &token, 1, 0) == 0);
    s.close();
    CHECK(std::remove(sums.c_str()) == 0);
}

static bool never_abort(void *) { return false; }
static bool always_abort(void *) { return true; }

/// If the caller replaces the abort callback, logits are NaN, and the error has its message.
static void fault_without_abort_callback_gives_nan(const Sizes &sizes) {
    copy_model();
    Streamed s = start(sizes, 0);
    llama_set_abort_callback(s.ctx, never_abort, nullptr);
    CHECK(truncate(copy_path.c_str(), static_cast<off_t>(file_bytes(copy_path) / 2)) == 0);
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

/// The caller's cb_eval and abort_callback still work.
static void callbacks_of_the_caller_are_called(const Sizes &sizes) {
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
    s.params.abort_callback = always_abort;
    CHECK_IS(kvt_llama_weights_context(s.weights, &s.params, &why), KVT_OK);
    s.ctx = llama_init_from_model(s.model, s.params);
    CHECK(decode(s.ctx, &token, 1, 0) == 2);
    CHECK_IS(kvt_llama_weights_error(s.weights, &why), KVT_OK);
    s.close();
}

/// Files truncated before the open, and a missing file.
static void invalid_files_are_refused(const Sizes &sizes) {
    copy_model();
    kvt_llama_weights_t *none = nullptr;
    kvt_llama_weights_opts_t opts = opts_of(sizes, 0);
    CHECK(truncate(copy_path.c_str(), static_cast<off_t>(file_bytes(copy_path) - 5000)) == 0);
    CHECK_IS(kvt_llama_weights_open(&opts, &none, &why), KVT_E_CORRUPT);
    CHECK(truncate(copy_path.c_str(), 100) == 0);
    CHECK_IS(kvt_llama_weights_open(&opts, &none, &why), KVT_E_CORRUPT);
    CHECK(std::remove(copy_path.c_str()) == 0);
    CHECK_IS(kvt_llama_weights_open(&opts, &none, &why), KVT_E_NOT_FOUND);
    CHECK(why.text[0] && !none);
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    original = model_path(argv[1]);
    char folder[] = "weights-faults-XXXXXX";
    CHECK(mkdtemp(folder));
    copy_path = std::string(folder) + "/model.gguf";
    const Sizes sizes = sizes_of(original);
    truncated_file_fails_the_decode(sizes);
    verify_finds_a_changed_byte(sizes);
    fault_without_abort_callback_gives_nan(sizes);
    callbacks_of_the_caller_are_called(sizes);
    invalid_files_are_refused(sizes);
    CHECK(rmdir(folder) == 0);
    llama_backend_free();
    return 0;
}
