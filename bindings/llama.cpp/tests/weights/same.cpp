// Streamed weights give the same bits as the plain model, in less memory.
#include "weights/run.hpp"

#include <algorithm>

static std::string path;
static Sizes sizes;

/// One streamed run. With a budget below half the model, it must read more bytes than the budget.
static void check_run(const std::vector<float> &plain, const Shape &shape, uint64_t budget_bytes,
                      uint32_t flags, uint32_t slots) {
    kvt_llama_weights_opts_t opts = KVT_LLAMA_WEIGHTS_OPTS_INIT;
    opts.model_path = path.c_str();
    opts.budget_bytes = budget_bytes;
    opts.flags = flags;
    opts.slots = slots;
    Streamed s;
    s.open(opts);
    s.load();
    s.context(shape);
    const std::vector<float> streamed = run(s.model, s.ctx, shape);
    if (streamed.empty()) {
        kvt_llama_weights_error(s.weights, &why);
        std::fprintf(stderr, "%s\n", why.text);
    }
    const kvt_llama_weights_stats_t stats = s.stats();
    std::printf("budget %llu of %llu, flags %u: %u units resident, %u streamed, %u + %u slots, "
                "read %llu, %llu passes, peak %llu, expert hits %llu misses %llu copied %llu, ubatch %u\n",
                (unsigned long long) budget_bytes, (unsigned long long) sizes.model_bytes, flags,
                stats.resident_units, stats.streamed_units, stats.slots, stats.expert_slots,
                (unsigned long long) stats.read_bytes, (unsigned long long) stats.passes,
                (unsigned long long) stats.peak_bytes, (unsigned long long) stats.expert_hits,
                (unsigned long long) stats.expert_misses, (unsigned long long) stats.copied_bytes,
                s.params.n_ubatch);
    CHECK(same(plain, streamed));
    CHECK(stats.passes >= shape.decodes);
    CHECK(stats.failed_decodes == 0);
    if (budget_bytes < sizes.model_bytes / 2 && stats.streamed_units > 4) {
        CHECK(stats.read_bytes > budget_bytes);
    }
    s.close();
}

/// A budget for some of the experts. Tokens are computed one by one, as in the plain run.
static void check_experts(Shape shape) {
    shape.ubatch = 1;
    shape.prompt = 24;
    const std::vector<float> plain = run_plain(path, shape);
    // Slack for copies of experts, which flags may require.
    const uint64_t slack = 256u << 10, most = sizes.model_bytes * 3 / 4;
    check_run(plain, shape, sizes.floor_bytes + slack, 0, 0);
    check_run(plain, shape, most, 0, 0);
    check_run(plain, shape, most, KVT_LLAMA_WEIGHTS_NOT_IN_PLACE, 0);
    check_run(plain, shape, most, KVT_LLAMA_WEIGHTS_VERIFY, 0);
    std::remove((path + ".kvtsum").c_str());
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    llama_log_set(log_errors, nullptr);
    llama_backend_init();
    path = model_path(argv[1]);
    sizes = sizes_of(path);
    std::printf("floor %llu, layers %llu of %llu, %u experts\n", (unsigned long long) sizes.floor_bytes,
                (unsigned long long) sizes.layers_bytes, (unsigned long long) sizes.model_bytes,
                sizes.experts);
    const Shape shape;
    const std::vector<float> plain = run_plain(path, shape);
    const uint64_t slack = 64u << 10;
    if (sizes.experts) {
        check_experts(shape);
    } else {
        const uint64_t less = sizes.layers_bytes * 3 / 4;
        const uint64_t quarter = std::max(sizes.floor_bytes, sizes.model_bytes - less);
        const Shape two_threads = {12, 8, 2, 2};
        check_run(run_plain(path, two_threads), two_threads, sizes.floor_bytes + slack, 0, 0);
        check_run(plain, shape, quarter + slack, 0, 0);
        check_run(plain, shape, quarter + slack, KVT_LLAMA_WEIGHTS_BUFFERED, 0);
        check_run(plain, shape, sizes_of(path, 4).floor_bytes + slack, 0, 4);
        check_run(plain, shape, quarter + slack, KVT_LLAMA_WEIGHTS_IN_PLACE, 0);
    }
    check_run(plain, shape, 2 * sizes.model_bytes + (64u << 20), 0, 0);
    llama_backend_free();
    return 0;
}
