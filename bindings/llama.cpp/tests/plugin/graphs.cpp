// Hand-made graphs give equal results on the plugin and on the CPU. They have views of weights, rows of a
// matrix in pieces, experts, written weights, and weights that differ from the file.
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

constexpr int64_t WIDTH = 64, VOCAB = 8192, EXPERTS = 5;

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
    int64_t experts = 1;

    int64_t count() const { return WIDTH * rows * experts; }
    ggml_tensor * make(ggml_context * context) const {
        ggml_tensor * made = ggml_new_tensor_3d(context, GGML_TYPE_F32, WIDTH, rows, experts);
        ggml_set_name(made, name);
        return made;
    }
};
const std::vector<Weight> WEIGHTS = {{"blk.0.first", WIDTH},
                                 {"blk.0.second", WIDTH},
                                 {"blk.1.first", WIDTH},
                                 {"output.weight", VOCAB},
                                 {"norm", 1},
                                 {"blk.2.up_exps.weight", WIDTH, EXPERTS},
                                 {"blk.2.down_exps.weight", WIDTH, EXPERTS},
                                 {"blk.2.up_exps.bias", EXPERTS}};
enum { FIRST, SECOND, NEXT, OUTPUT, NORM, UP, DOWN, BIAS };

using Context = std::unique_ptr<ggml_context, decltype(&ggml_free)>;
using Buffer = std::unique_ptr<ggml_backend_buffer, decltype(&ggml_backend_buffer_free)>;

Context context_of(size_t tensors, bool has_no_memory) {
    const size_t data = has_no_memory ? 0 : size_t(4 * VOCAB * WIDTH) * sizeof(float);
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
    Context context = context_of(WEIGHTS.size(), false);
    gguf_context * file = gguf_init_empty();
    for (size_t i = 0; i < WEIGHTS.size(); i++) {
        ggml_tensor * tensor = WEIGHTS[i].make(context.get());
        std::memcpy(tensor->data, numbers(WEIGHTS[i].count(), uint32_t(i)).data(), ggml_nbytes(tensor));
        gguf_add_tensor(file, tensor);
    }
    CHECK(gguf_write_to_file(file, path.c_str(), false));
    gguf_free(file);
}

// The weights in a buffer of one device, and graphs on them.
class Side {
public:
    Side(ggml_backend_dev_t device, bool differs_from_file) : device_(device) {
        backend_.reset(ggml_backend_dev_init(device, nullptr));
        CHECK(backend_);
        for (const Weight & one : WEIGHTS) {
            weights.push_back(one.make(context_.get()));
        }
        buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(context_.get(), type()));
        CHECK(buffer_);
        ggml_backend_buffer_set_usage(buffer_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        for (size_t i = 0; i < WEIGHTS.size(); i++) {
            const bool is_changed = differs_from_file && i == NEXT;
            const std::vector<float> data = numbers(WEIGHTS[i].count(), uint32_t(i) + (is_changed ? 99 : 0));
            ggml_backend_tensor_set(weights[i], data.data(), 0, ggml_nbytes(weights[i]));
        }
    }

    ggml_backend_buffer_type_t type() const { return ggml_backend_dev_buffer_type(device_); }

    using Build = std::function<ggml_tensor *(ggml_context *, ggml_tensor *, ggml_tensor *)>;

    std::vector<float> compute(const Build & build, ggml_status status = GGML_STATUS_SUCCESS) {
        Context context = context_of(64, true);
        ggml_tensor * x = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, WIDTH, 3);
        ggml_tensor * rows = ggml_new_tensor_1d(context.get(), GGML_TYPE_I32, 3);
        ggml_set_input(x);
        ggml_set_input(rows);
        ggml_tensor * result = build(context.get(), x, rows);
        ggml_set_output(result);
        ggml_cgraph * graph = ggml_new_graph(context.get());
        ggml_build_forward_expand(graph, result);
        std::unique_ptr<ggml_gallocr, decltype(&ggml_gallocr_free)> allocator(ggml_gallocr_new(type()),
                                                                         ggml_gallocr_free);
        CHECK(ggml_gallocr_alloc_graph(allocator.get(), graph));
        const int32_t which[3] = {5, VOCAB - 1, 17};
        ggml_backend_tensor_set(x, numbers(3 * WIDTH, 1000).data(), 0, ggml_nbytes(x));
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
    Context context_ = context_of(WEIGHTS.size(), true);
    std::unique_ptr<ggml_backend, decltype(&ggml_backend_free)> backend_{nullptr, ggml_backend_free};
    Buffer buffer_{nullptr, ggml_backend_buffer_free};
};

// A graph must give equal results on both sides.
void check_equal(Side & plugin, Side & cpu,
          const std::function<ggml_tensor *(Side &, ggml_context *, ggml_tensor *, ggml_tensor *)> & build) {
    std::vector<float> results[2];
    for (int i = 0; i < 2; i++) {
        Side & side = i == 0 ? plugin : cpu;
        results[i] = side.compute([&](ggml_context * context, ggml_tensor * x, ggml_tensor * rows) {
            return build(side, context, x, rows);
        });
    }
    CHECK(!results[0].empty() && results[0] == results[1]);
}

void graphs_give_the_bits_of_the_cpu(Side & plugin, Side & cpu) {
    check_equal(plugin, cpu, [](Side & side, ggml_context * context, ggml_tensor * x, ggml_tensor *) {
        ggml_tensor * first = ggml_mul_mat(context, side.weights[FIRST], x);
        ggml_tensor * next = ggml_mul_mat(context, side.weights[NEXT], first);
        return ggml_mul_mat(context, side.weights[SECOND], ggml_mul(context, next, side.weights[NORM]));
    });
    // Views of two layers, created before the weights have their final addresses.
    check_equal(plugin, cpu, [](Side & side, ggml_context * context, ggml_tensor * x, ggml_tensor *) {
        ggml_tensor * part = ggml_view_2d(context, side.weights[SECOND], WIDTH, 32, WIDTH * 4, 16 * WIDTH * 4);
        ggml_tensor * other = ggml_view_2d(context, side.weights[FIRST], WIDTH, 32, WIDTH * 4, 8 * WIDTH * 4);
        ggml_tensor * third = ggml_view_2d(context, side.weights[NEXT], WIDTH, 32, WIDTH * 4, 0);
        ggml_tensor * sum = ggml_add(context, part, third);
        return ggml_add(context, ggml_mul_mat(context, sum, x), ggml_mul_mat(context, other, x));
    });
    // A product in pieces, with an op after it.
    check_equal(plugin, cpu, [](Side & side, ggml_context * context, ggml_tensor * x, ggml_tensor *) {
        return ggml_scale(context, ggml_mul_mat(context, side.weights[OUTPUT], x), 0.5f);
    });
    CHECK(plugin.read(OUTPUT, 100, 1000) == cpu.read(OUTPUT, 100, 1000));
    // A save of a model reads through copies of tensors, also for weights that are not resident.
    for (const int which : {FIRST, NEXT, OUTPUT, NORM}) {
        const ggml_tensor copy = *plugin.weights[size_t(which)];
        std::vector<float> out(size_t(WIDTH * 1));
        ggml_backend_tensor_get(&copy, out.data(), 0, out.size() * sizeof(float));
        CHECK(out == cpu.read(which, 0, WIDTH));
    }
    // This op is no product, so the whole matrix becomes resident.
    check_equal(plugin, cpu, [](Side & side, ggml_context * context, ggml_tensor * x, ggml_tensor * rows) {
        return ggml_mul(context, ggml_get_rows(context, side.weights[OUTPUT], rows), x);
    });
    check_equal(plugin, cpu, [](Side & side, ggml_context * context, ggml_tensor * x, ggml_tensor *) {
        return ggml_mul_mat(context, side.weights[OUTPUT], x);
    });
    // Writes to a weight, then reads it.
    check_equal(plugin, cpu, [](Side & side, ggml_context * context, ggml_tensor * x, ggml_tensor *) {
        ggml_tensor * place = ggml_view_2d(context, side.weights[FIRST], WIDTH, 3, WIDTH * 4, 4 * WIDTH * 4);
        return ggml_cpy(context, x, place);
    });
    check_equal(plugin, cpu, [](Side & side, ggml_context * context, ggml_tensor * x, ggml_tensor *) {
        return ggml_mul_mat(context, side.weights[FIRST], x);
    });
    CHECK(plugin.read(FIRST, 0, WIDTH * WIDTH) == cpu.read(FIRST, 0, WIDTH * WIDTH));
}

// The experts that three tokens use; expert 4 is not used, and one token uses an expert twice.
constexpr int32_t IDS[6] = {3, 0, 1, 1, 0, 2};

// Ids that are computed in the graph, as a router does.
ggml_tensor * expert_ids(ggml_context * context, ggml_tensor * x, const int32_t * ids) {
    const auto copy_ids = [](ggml_tensor * to, int part, int, void * from) {
        if (part == 0) {
            std::memcpy(to->data, from, ggml_nbytes(to));
        }
    };
    ggml_tensor * source[] = {x};
    return ggml_custom_4d(context, GGML_TYPE_I32, 2, 3, 1, 1, source, 1, copy_ids, 1,
                          const_cast<int32_t *>(ids));
}

void experts_give_the_bits_of_the_cpu(Side & plugin, Side & cpu) {
    // The usual order, and one with a bias in place, whose activations are used again after the last product.
    for (const bool is_usual : {true, false}) {
        check_equal(plugin, cpu, [=](Side & side, ggml_context * context, ggml_tensor * x, ggml_tensor *) {
            x = ggml_mul_mat(context, side.weights[FIRST], x);
            ggml_tensor * ids = expert_ids(context, x, IDS);
            x = ggml_reshape_3d(context, x, WIDTH, 1, 3);
            ggml_tensor * up = ggml_mul_mat_id(context, side.weights[UP], x, ids);
            up = ggml_add_id(context, up, side.weights[BIAS], ids);
            ggml_tensor * gate = ggml_view_3d(context, up, WIDTH / 2, 2, 3, up->nb[1], up->nb[2], WIDTH * 2);
            ggml_tensor * active = is_usual ? ggml_silu(context, up) : ggml_relu_inplace(context, up);
            ggml_tensor * down = ggml_mul_mat_id(context, side.weights[DOWN], active, ids);
            return is_usual ? down : ggml_add(context, down, ggml_repeat(context, gate, down));
        });
    }
    // Products of several inputs, without activations between.
    check_equal(plugin, cpu, [](Side & side, ggml_context * context, ggml_tensor * x, ggml_tensor *) {
        ggml_tensor * ids = expert_ids(context, x, IDS);
        ggml_tensor * both = ggml_reshape_3d(context, ggml_repeat_4d(context, x, WIDTH, 6, 1, 1), WIDTH, 2, 3);
        ggml_tensor * one = ggml_reshape_3d(context, x, WIDTH, 1, 3);
        return ggml_add(context, ggml_mul_mat_id(context, side.weights[UP], both, ids),
                        ggml_mul_mat_id(context, side.weights[DOWN], one, ids));
    });
    CHECK(plugin.read(UP, 100, 1000) == cpu.read(UP, 100, 1000));
    // A use that is no product of experts: the tensor becomes resident.
    check_equal(plugin, cpu, [](Side & side, ggml_context * context, ggml_tensor * x, ggml_tensor *) {
        ggml_tensor * expert = ggml_view_2d(context, side.weights[DOWN], WIDTH, WIDTH, WIDTH * 4,
                                            2 * WIDTH * WIDTH * 4);
        ggml_tensor * ids = expert_ids(context, x, IDS);
        x = ggml_reshape_3d(context, ggml_mul_mat(context, expert, x), WIDTH, 1, 3);
        return ggml_mul_mat_id(context, side.weights[DOWN], ggml_mul_mat_id(context, side.weights[UP], x, ids),
                               ids);
    });
}

// The router of a damaged model may choose experts that do not exist.
void wrong_ids_fail_the_graph(Side & plugin) {
    for (const int32_t id : {-1, int32_t(EXPERTS), INT32_MAX}) {
        const int32_t ids[6] = {0, 1, 2, 3, id, 0};
        const auto build = [&](ggml_context * context, ggml_tensor * x, ggml_tensor *) {
            ggml_tensor * chosen = expert_ids(context, x, ids);
            return ggml_mul_mat_id(context, plugin.weights[UP], ggml_reshape_3d(context, x, WIDTH, 1, 3),
                                   chosen);
        };
        plugin.compute(build, GGML_STATUS_FAILED);
    }
}

void reads_writes_and_copies_give_the_bits_of_the_cpu(Side & plugin, Side & cpu) {
    for (Side * side : {&plugin, &cpu}) {
        ggml_backend_tensor_memset(side->weights[SECOND], 0, 128, 256);
        const std::vector<float> data = numbers(10, 7);
        ggml_backend_tensor_set(side->weights[SECOND], data.data(), 400, 40);
    }
    CHECK(plugin.read(SECOND, 0, WIDTH * WIDTH) == cpu.read(SECOND, 0, WIDTH * WIDTH));
    ggml_backend_tensor_copy(cpu.weights[NORM], plugin.weights[NORM]);
    ggml_backend_tensor_copy(plugin.weights[NEXT], cpu.weights[FIRST]);
    CHECK(plugin.read(NEXT, 0, WIDTH * WIDTH) == cpu.read(FIRST, 0, WIDTH * WIDTH));
    ggml_backend_tensor_copy(cpu.weights[OUTPUT], plugin.weights[OUTPUT]);
    CHECK(plugin.read(OUTPUT, 0, WIDTH * VOCAB) == cpu.read(OUTPUT, 0, WIDTH * VOCAB));
}

void copy_and_touch_file(ggml_tensor * to, const ggml_tensor * from, int part, int, void * path) {
    if (part == 0) {
        std::memcpy(to->data, from->data, ggml_nbytes(from));
        CHECK(utimensat(AT_FDCWD, static_cast<const char *>(path), nullptr, 0) == 0);
    }
}

// A file changed during a graph fails that graph and later ones.
void changed_file_fails_the_graph(const std::string & path, ggml_backend_dev_t device) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    CHECK(file >= 0);
    Side plugin(device, false);
    close(file);
    const auto build = [&](ggml_context * context, ggml_tensor * x, ggml_tensor *, bool touches) {
        x = ggml_mul_mat(context, plugin.weights[FIRST], x);
        x = ggml_mul_mat(context, plugin.weights[SECOND], x);
        void * data = const_cast<char *>(path.c_str());
        x = touches ? ggml_map_custom1(context, x, copy_and_touch_file, 1, data) : x;
        x = ggml_mul_mat(context, plugin.weights[NEXT], x);
        return ggml_mul_mat(context, plugin.weights[OUTPUT], x);
    };
    using namespace std::placeholders;
    plugin.compute(std::bind(build, _1, _2, _3, false));
    plugin.compute(std::bind(build, _1, _2, _3, true), GGML_STATUS_FAILED);
    plugin.compute(std::bind(build, _1, _2, _3, false), GGML_STATUS_FAILED);
}

} // namespace

int main(int argc, char ** argv) {
    CHECK(argc == 3);
    const std::string path = std::string(argv[2]) + "/graphs.gguf";
    file_write(path);
    CHECK(ggml_backend_load(argv[1]));
    ggml_backend_dev_t device = ggml_backend_dev_by_name("KVTIER");
    CHECK(device);
    changed_file_fails_the_graph(path, device);
    for (const bool differs_from_file : {false, true}) {
        // A loader has the file open, and closes it before the first graph.
        const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        CHECK(file >= 0);
        Side plugin(device, differs_from_file);
        Side cpu(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), differs_from_file);
        close(file);
        if (differs_from_file) {
            unlink(path.c_str());
        }
        wrong_ids_fail_the_graph(plugin);
        experts_give_the_bits_of_the_cpu(plugin, cpu);
        graphs_give_the_bits_of_the_cpu(plugin, cpu);
        reads_writes_and_copies_give_the_bits_of_the_cpu(plugin, cpu);
    }
    return 0;
}
