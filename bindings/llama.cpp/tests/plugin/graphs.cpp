// Graphs that no model makes, in a buffer of the plugin's beside one of the processor's: views of weights,
// rows of a matrix that is in pieces, weights that are written to, bytes that are not the file's.
//
//   graphs PLUGIN FOLDER
#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml.h>
#include <gguf.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace {

constexpr int64_t WIDE = 64, WORDS = 8192;

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            std::fprintf(stderr, "line %d: %s\n", __LINE__, #condition);                                     \
            std::exit(1);                                                                                    \
        }                                                                                                    \
    } while (0)

struct Weight {
    const char * name;
    int64_t rows;
};
const std::vector<Weight> ALL = {{"blk.0.first", WIDE},
                                 {"blk.0.second", WIDE},
                                 {"blk.1.first", WIDE},
                                 {"output.weight", WORDS},
                                 {"norm", 1}};
enum { FIRST, SECOND, NEXT, OUTPUT, NORM };

using Context = std::unique_ptr<ggml_context, decltype(&ggml_free)>;
using Buffer = std::unique_ptr<ggml_backend_buffer, decltype(&ggml_backend_buffer_free)>;

Context context_of(size_t tensors, bool has_no_memory) {
    const size_t data = has_no_memory ? 0 : size_t(4 * WORDS * WIDE) * sizeof(float);
    const size_t bytes = tensors * ggml_tensor_overhead() + ggml_graph_overhead() + data;
    return {ggml_init({bytes, nullptr, has_no_memory}), ggml_free};
}

std::vector<float> numbers(int64_t count, uint32_t seed) {
    std::vector<float> made;
    for (int64_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        made.push_back(float(int32_t(seed >> 8) % 2001 - 1000) / 1000.0f);
    }
    return made;
}

void file_write(const std::string & path) {
    Context context = context_of(ALL.size(), false);
    gguf_context * file = gguf_init_empty();
    for (size_t i = 0; i < ALL.size(); i++) {
        ggml_tensor * tensor = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, WIDE, ALL[i].rows);
        ggml_set_name(tensor, ALL[i].name);
        std::memcpy(tensor->data, numbers(WIDE * ALL[i].rows, uint32_t(i)).data(), ggml_nbytes(tensor));
        gguf_add_tensor(file, tensor);
    }
    CHECK(gguf_write_to_file(file, path.c_str(), false));
    gguf_free(file);
}

// Weights in a buffer of one kind, and what is computed with them.
class Side {
public:
    Side(ggml_backend_dev_t device, bool hands_over_others) : device_(device) {
        backend_.reset(ggml_backend_dev_init(device, nullptr));
        CHECK(backend_);
        for (const Weight & one : ALL) {
            weights.push_back(ggml_new_tensor_2d(context_.get(), GGML_TYPE_F32, WIDE, one.rows));
            ggml_set_name(weights.back(), one.name);
        }
        buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(context_.get(), type()));
        CHECK(buffer_);
        ggml_backend_buffer_set_usage(buffer_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        for (size_t i = 0; i < ALL.size(); i++) {
            const bool is_other = hands_over_others && i == NEXT;
            const std::vector<float> data = numbers(WIDE * ALL[i].rows, uint32_t(i) + (is_other ? 99 : 0));
            ggml_backend_tensor_set(weights[i], data.data(), 0, ggml_nbytes(weights[i]));
        }
    }

    ggml_backend_buffer_type_t type() const { return ggml_backend_dev_buffer_type(device_); }

    using Build = std::function<ggml_tensor *(ggml_context *, ggml_tensor *, ggml_tensor *)>;

    std::vector<float> compute(const Build & build, ggml_status status = GGML_STATUS_SUCCESS) {
        Context context = context_of(64, true);
        ggml_tensor * x = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, WIDE, 3);
        ggml_tensor * rows = ggml_new_tensor_1d(context.get(), GGML_TYPE_I32, 3);
        ggml_set_input(x);
        ggml_set_input(rows);
        ggml_tensor * result = build(context.get(), x, rows);
        ggml_set_output(result);
        ggml_cgraph * graph = ggml_new_graph(context.get());
        ggml_build_forward_expand(graph, result);
        std::unique_ptr<ggml_gallocr, decltype(&ggml_gallocr_free)> room(ggml_gallocr_new(type()),
                                                                         ggml_gallocr_free);
        CHECK(ggml_gallocr_alloc_graph(room.get(), graph));
        const int32_t which[3] = {5, WORDS - 1, 17};
        ggml_backend_tensor_set(x, numbers(3 * WIDE, 1000).data(), 0, ggml_nbytes(x));
        if (rows->buffer) {
            ggml_backend_tensor_set(rows, which, 0, sizeof which);
        }
        CHECK(ggml_backend_graph_compute(backend_.get(), graph) == status);
        std::vector<float> out(size_t(ggml_nelements(result)));
        ggml_backend_tensor_get(result, out.data(), 0, ggml_nbytes(result));
        return out;
    }

    std::vector<float> read(int which, int64_t from, int64_t count) const {
        std::vector<float> out(static_cast<size_t>(count));
        ggml_backend_tensor_get(weights[size_t(which)], out.data(), size_t(from) * sizeof(float),
                                size_t(count) * sizeof(float));
        return out;
    }

    std::vector<ggml_tensor *> weights;

private:
    ggml_backend_dev_t device_;
    Context context_ = context_of(ALL.size(), true);
    std::unique_ptr<ggml_backend, decltype(&ggml_backend_free)> backend_{nullptr, ggml_backend_free};
    Buffer buffer_{nullptr, ggml_backend_buffer_free};
};

// What a graph makes of the weights of either side has to be the same.
void same(Side & ours, Side & plain,
          const std::function<ggml_tensor *(Side &, ggml_context *, ggml_tensor *, ggml_tensor *)> & build) {
    std::vector<float> results[2];
    for (int i = 0; i < 2; i++) {
        Side & side = i == 0 ? ours : plain;
        results[i] = side.compute([&](ggml_context * context, ggml_tensor * x, ggml_tensor * rows) {
            return build(side, context, x, rows);
        });
    }
    CHECK(!results[0].empty() && results[0] == results[1]);
}

void check_graphs(Side & ours, Side & plain) {
    same(ours, plain, [](Side & side, ggml_context * context, ggml_tensor * x, ggml_tensor *) {
        ggml_tensor * first = ggml_mul_mat(context, side.weights[FIRST], x);
        ggml_tensor * next = ggml_mul_mat(context, side.weights[NEXT], first);
        return ggml_mul_mat(context, side.weights[SECOND], ggml_mul(context, next, side.weights[NORM]));
    });
    // Views, made before the weights are where they are computed with, of two layers at once.
    same(ours, plain, [](Side & side, ggml_context * context, ggml_tensor * x, ggml_tensor *) {
        ggml_tensor * part = ggml_view_2d(context, side.weights[SECOND], WIDE, 32, WIDE * 4, 16 * WIDE * 4);
        ggml_tensor * other = ggml_view_2d(context, side.weights[FIRST], WIDE, 32, WIDE * 4, 8 * WIDE * 4);
        ggml_tensor * third = ggml_view_2d(context, side.weights[NEXT], WIDE, 32, WIDE * 4, 0);
        ggml_tensor * sum = ggml_add(context, part, third);
        return ggml_add(context, ggml_mul_mat(context, sum, x), ggml_mul_mat(context, other, x));
    });
    // In pieces, with more after it.
    same(ours, plain, [](Side & side, ggml_context * context, ggml_tensor * x, ggml_tensor *) {
        return ggml_scale(context, ggml_mul_mat(context, side.weights[OUTPUT], x), 0.5f);
    });
    CHECK(ours.read(OUTPUT, 100, 1000) == plain.read(OUTPUT, 100, 1000));
    // Copies of tensors are asked with where a model is saved, also of what is not in memory now.
    for (const int which : {FIRST, NEXT, OUTPUT, NORM}) {
        const ggml_tensor copy = *ours.weights[size_t(which)];
        std::vector<float> out(size_t(WIDE * 1));
        ggml_backend_tensor_get(&copy, out.data(), 0, out.size() * sizeof(float));
        CHECK(out == plain.read(which, 0, WIDE));
    }
    // Not by rows of a product: all of it comes to stay.
    same(ours, plain, [](Side & side, ggml_context * context, ggml_tensor * x, ggml_tensor * rows) {
        return ggml_mul(context, ggml_get_rows(context, side.weights[OUTPUT], rows), x);
    });
    same(ours, plain, [](Side & side, ggml_context * context, ggml_tensor * x, ggml_tensor *) {
        return ggml_mul_mat(context, side.weights[OUTPUT], x);
    });
    // Written to, and read after that.
    same(ours, plain, [](Side & side, ggml_context * context, ggml_tensor * x, ggml_tensor *) {
        ggml_tensor * place = ggml_view_2d(context, side.weights[FIRST], WIDE, 3, WIDE * 4, 4 * WIDE * 4);
        return ggml_cpy(context, x, place);
    });
    same(ours, plain, [](Side & side, ggml_context * context, ggml_tensor * x, ggml_tensor *) {
        return ggml_mul_mat(context, side.weights[FIRST], x);
    });
    CHECK(ours.read(FIRST, 0, WIDE * WIDE) == plain.read(FIRST, 0, WIDE * WIDE));
}

void check_access(Side & ours, Side & plain) {
    for (Side * side : {&ours, &plain}) {
        ggml_backend_tensor_memset(side->weights[SECOND], 0, 128, 256);
        const std::vector<float> data = numbers(10, 7);
        ggml_backend_tensor_set(side->weights[SECOND], data.data(), 400, 40);
    }
    CHECK(ours.read(SECOND, 0, WIDE * WIDE) == plain.read(SECOND, 0, WIDE * WIDE));
    ggml_backend_tensor_copy(plain.weights[NORM], ours.weights[NORM]);
    ggml_backend_tensor_copy(ours.weights[NEXT], plain.weights[FIRST]);
    CHECK(ours.read(NEXT, 0, WIDE * WIDE) == plain.read(FIRST, 0, WIDE * WIDE));
    ggml_backend_tensor_copy(plain.weights[OUTPUT], ours.weights[OUTPUT]);
    CHECK(ours.read(OUTPUT, 0, WIDE * WORDS) == plain.read(OUTPUT, 0, WIDE * WORDS));
}

void touch(ggml_tensor * to, const ggml_tensor * from, int part, int, void * path) {
    if (part == 0) {
        std::memcpy(to->data, from->data, ggml_nbytes(from));
        CHECK(utimensat(AT_FDCWD, static_cast<const char *>(path), nullptr, 0) == 0);
    }
}

// A file that is written to while a pass is under way: nothing comes of that pass.
void check_changed(const std::string & path, ggml_backend_dev_t device) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    CHECK(file >= 0);
    Side ours(device, false);
    close(file);
    const auto build = [&](ggml_context * context, ggml_tensor * x, ggml_tensor *, bool touches) {
        x = ggml_mul_mat(context, ours.weights[FIRST], x);
        x = ggml_mul_mat(context, ours.weights[SECOND], x);
        void * data = const_cast<char *>(path.c_str());
        x = touches ? ggml_map_custom1(context, x, touch, 1, data) : x;
        x = ggml_mul_mat(context, ours.weights[NEXT], x);
        return ggml_mul_mat(context, ours.weights[OUTPUT], x);
    };
    using namespace std::placeholders;
    ours.compute(std::bind(build, _1, _2, _3, false));
    ours.compute(std::bind(build, _1, _2, _3, true), GGML_STATUS_FAILED);
    ours.compute(std::bind(build, _1, _2, _3, false), GGML_STATUS_FAILED);
}

} // namespace

int main(int count, char ** words) {
    CHECK(count == 3);
    const std::string path = std::string(words[2]) + "/graphs.gguf";
    file_write(path);
    CHECK(ggml_backend_load(words[1]));
    ggml_backend_dev_t device = ggml_backend_dev_by_name("KVTIER");
    CHECK(device);
    check_changed(path, device);
    for (const bool hands_over_others : {false, true}) {
        // As a loader has it; it is gone before anything is computed.
        const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        CHECK(file >= 0);
        Side ours(device, hands_over_others);
        Side plain(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), hands_over_others);
        close(file);
        if (hands_over_others) {
            unlink(path.c_str());
        }
        check_graphs(ours, plain);
        check_access(ours, plain);
    }
    return 0;
}
