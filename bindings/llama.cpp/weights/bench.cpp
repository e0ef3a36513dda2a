// Compares streamed weights with their lower bounds, and with a memory map. Prints JSON, one bar per
// line.
//
//   kvtier-llama-weights-bench MODEL.gguf [--tokens N] [--pairs N] [--threads N] [--slots N]
//                              [--budget BYTES]
//
// The default budget is the model's minimum plus a quarter of its layers. Child processes (--child) run
// in a memory cgroup of version 1 or 2, where one can be made.
#include "bench.hpp"

#include <atomic>
#include <fcntl.h>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

namespace {

/// Bytes per second of direct reads of a file, `at_once` in parallel, into allocated memory.
double read_some(int file, uint64_t wanted_bytes, uint64_t chunk, uint32_t at_once, uint8_t *memory) {
    const uint64_t chunks = static_cast<uint64_t>(lseek(file, 0, SEEK_END)) / chunk;
    const uint64_t wanted = std::max<uint64_t>(1, wanted_bytes / chunk);
    std::atomic<uint64_t> next{0};
    std::atomic<bool> failed{chunks == 0};
    const double begin = now_s();
    std::vector<std::thread> readers;
    for (uint32_t i = 0; i < at_once; i++) {
        readers.emplace_back([&, i] {
            for (uint64_t n = next++; n < wanted && !failed; n = next++) {
                const auto at = static_cast<off_t>(n % chunks * chunk);
                failed = pread(file, memory + i * chunk, chunk, at) != ssize_t(chunk);
            }
        });
    }
    for (std::thread &reader : readers) {
        reader.join();
    }
    return failed ? 0 : double(wanted * chunk) / (now_s() - begin);
}

/// The disk's rate: the better of few large reads and many small ones, into huge pages.
double read_raw(const std::string &path, uint64_t bytes) {
    constexpr size_t memory_bytes = 32u << 20;
    static uint8_t *memory = nullptr;
    if (!memory) {
        void *made = nullptr;
        if (posix_memalign(&made, 2u << 20, memory_bytes) != 0) {
            return 0;
        }
        madvise(made, memory_bytes, MADV_HUGEPAGE);
        memory = static_cast<uint8_t *>(std::memset(made, 1, memory_bytes));
    }
    const int file = ::open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
    if (file < 0) {
        return 0;
    }
    const double rate = std::max(read_some(file, bytes, 4u << 20, 8, memory),
                                 read_some(file, bytes, 1u << 20, 16, memory));
    ::close(file);
    return rate;
}

/// The smallest budget that the model can run in, by bisection of plans, plus a quarter of its layers.
uint64_t quarter_budget(const std::string &path) {
    const kvt_str_t text = {path.c_str(), path.size()};
    kvt_model_t *model = nullptr;
    if (kvt_model_open(&text, 1, sizeof text, &model, nullptr) != KVT_OK) {
        die("cannot open the model " + path);
    }
    kvt_model_info_t info = KVT_MODEL_INFO_INIT;
    kvt_model_info(model, &info);
    uint64_t layers = 0;
    for (uint32_t i = 0; i < info.units; i++) {
        kvt_unit_t unit = KVT_UNIT_INIT;
        kvt_model_unit(model, i, &unit);
        layers += unit.role == KVT_ROLE_LAYER || unit.role == KVT_ROLE_EXPERT ? unit.image_bytes : 0;
    }
    uint64_t low = 4096, high = info.bytes * 2 + (64u << 20);
    while (low + 4096 < high) {
        kvt_stream_terms_t terms = KVT_STREAM_TERMS_INIT;
        terms.compute = KVT_COMPUTE_HOST;
        terms.flags = KVT_TERMS_KV | KVT_TERMS_HOST_CEILING | KVT_TERMS_HOST_RESERVE | KVT_TERMS_SHRINKS;
        terms.host_ceiling_bytes = (low + high) / 2;
        kvt_stream_plan_t plan = KVT_STREAM_PLAN_INIT;
        const auto status = kvt_model_plan(model, &terms, nullptr, &plan, nullptr, nullptr, 0, 0, nullptr);
        (status == KVT_OK ? high : low) = terms.host_ceiling_bytes;
    }
    kvt_model_close(&model);
    return std::max(high, info.bytes - std::min(info.bytes, layers * 3 / 4)) + (64u << 10);
}

void bench_token(const Options &options) {
    const Bar bar = {"weights_token", "the longer of computing in memory and raw reading", "lower",
                     1.15};
    const Bar resident_bar = {"weights_resident", "the same model without kvtier", "lower", 1.05};
    Runner resident, streamed, roomy;
    Options all = options;
    all.budget_bytes = 1ull << 40;
    resident.open(options, false, LLAMA_LOAD_MODE_NONE);
    streamed.open(options, true, LLAMA_LOAD_MODE_NONE);
    resident.decode(4);
    streamed.decode(4);
    std::vector<double> ratios, bounds, fits;
    for (uint32_t i = 0; i < options.pairs; i++) {
        const double computing = resident.decode(options.tokens);
        const uint64_t before = streamed.read_bytes();
        const double token = streamed.decode(options.tokens);
        const double bytes = double(streamed.read_bytes() - before) / options.tokens;
        const double rate = read_raw(options.model, static_cast<uint64_t>(bytes) * options.tokens);
        if (rate <= 0) {
            print_none(bar, "direct reads of the model's file are not possible");
            return;
        }
        bounds.push_back(std::max(computing, bytes / rate));
        ratios.push_back(token / bounds.back());
        std::fprintf(stderr, "computing %.2f ms, reading %.2f ms (%.0f MB at %.2f GB/s), streamed %.2f ms\n",
                     computing * 1e3, bytes / rate * 1e3, bytes / 1e6, rate / 1e9, token * 1e3);
    }
    print(bar, median(ratios), median(bounds));
    streamed.close();
    roomy.open(all, true, LLAMA_LOAD_MODE_NONE);
    roomy.decode(4);
    std::vector<double> plain;
    for (uint32_t i = 0; i < options.pairs; i++) {
        plain.push_back(resident.decode(options.tokens));
        fits.push_back(roomy.decode(options.tokens) / plain.back());
    }
    print(resident_bar, median(fits), median(plain));
    roomy.close();
    resident.close();
}

constexpr const char *usage =
    "usage: MODEL.gguf [--tokens N] [--pairs N] [--threads N] [--slots N] [--budget BYTES]";

Options parse(int argc, char **argv) {
    Options options;
    for (int i = 1; i < argc; i++) {
        const std::string word = argv[i];
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (word.rfind("--", 0) != 0) {
            options.model = word;
            continue;
        }
        i++;
        const auto number = std::strtoull(value, nullptr, 10);
        if (word == "--child") {
            options.child = value;
        } else if (word == "--budget" && number) {
            options.budget_bytes = number;
        } else if (word == "--tokens" && number && number < 400) {
            options.tokens = static_cast<uint32_t>(number);
        } else if (word == "--pairs" && number && number < 1000) {
            options.pairs = static_cast<uint32_t>(number);
        } else if (word == "--threads" && number && number < 1000) {
            options.threads = static_cast<uint32_t>(number);
        } else if (word == "--slots" && number && number < 1000) {
            options.slots = static_cast<uint32_t>(number);
        } else {
            die(usage);
        }
    }
    if (options.model.empty()) {
        die(usage);
    }
    return options;
}

} // namespace

int main(int argc, char **argv) {
    Options options = parse(argc, argv);
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    if (options.budget_bytes == 0) {
        options.budget_bytes = quarter_budget(options.model);
    }
    if (!options.child.empty()) {
        return run_child(options);
    }
    bench_token(options);
    bench_mmap(options);
    llama_backend_free();
    return 0;
}
