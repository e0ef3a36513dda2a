// An unmodified program for the tests of the plugin: it uses llama.h and ggml-backend.h only.
//
//   stock MODEL [-n STEPS] [-p PROMPT] [-c CONTEXT] [-u BATCH] [-t THREADS] [-l LOAD] [-x CONTEXTS]
//         [-k KV] [-g LAYERS] [-r REPACK] [-o] [-a] [-s] [-d FILE STEP] [-y MODEL] [-z] [--load LIBRARY]...
//         [--device NAME]
//
// Decodes a prompt of pseudorandom tokens, then greedily. Prints one line per context with a hash of the
// logits and the token of each step. Then prints the memory of the process, and the nanoseconds of the
// prompt, of all steps and of one.
//
//   -l         load mode of llama.h
//   -k 1       keeps KV on the CPU
//   -r 0       does not repack weights
//   -o         observes every node
//   -a         computes logits of all tokens, not only of the last one
//   -s         decodes pseudorandom tokens instead of the likeliest ones; some are much more frequent
//   -d         truncates FILE to half its length before a step
//   -y         a second model, for every second context
//   -z         opens a context after the previous one has decoded
//   --load     loads a backend before all others
//   --device   gives the model to this device only
#include <ggml-backend.h>
#include <llama.h>

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <sys/stat.h>
#include <thread>
#include <vector>

namespace {

struct Options {
    const char * model = nullptr, * second = nullptr;
    int steps = 8, prompt = 24, context = 64, batch = 0, threads = 1, load = -1, contexts = 1, layers = 99;
    bool kv_on_cpu = false, observes = false, repacks = true, sequential = false, all_logits = false;
    bool is_skewed = false;
    const char * truncate_path = nullptr;
    int truncate_step = -1;
    std::vector<const char *> libraries;
    const char * device = nullptr;
};

struct Outcome {
    std::string text;
    std::vector<long long> step_ns;
    bool is_good = false;
};

bool options_read(int argc, char ** argv, Options & out) {
    for (int i = 1; i < argc; i++) {
        const std::string word = argv[i];
        const auto number = [&] { return i + 1 < argc ? std::atoi(argv[++i]) : 0; };
        if (word == "-n") {
            out.steps = number();
        } else if (word == "-p") {
            out.prompt = number();
        } else if (word == "-c") {
            out.context = number();
        } else if (word == "-u") {
            out.batch = number();
        } else if (word == "-t") {
            out.threads = number();
        } else if (word == "-l") {
            out.load = number();
        } else if (word == "-x") {
            out.contexts = number();
        } else if (word == "-g") {
            out.layers = number();
        } else if (word == "-k") {
            out.kv_on_cpu = number() != 0;
        } else if (word == "-r") {
            out.repacks = number() != 0;
        } else if (word == "-z") {
            out.sequential = true;
        } else if (word == "-y" && i + 1 < argc) {
            out.second = argv[++i];
        } else if (word == "-o") {
            out.observes = true;
        } else if (word == "-a") {
            out.all_logits = true;
        } else if (word == "-s") {
            out.is_skewed = true;
        } else if (word == "-d" && i + 2 < argc) {
            out.truncate_path = argv[++i];
            out.truncate_step = std::atoi(argv[++i]);
        } else if (word == "--load" && i + 1 < argc) {
            out.libraries.push_back(argv[++i]);
        } else if (word == "--device" && i + 1 < argc) {
            out.device = argv[++i];
        } else if (!out.model) {
            out.model = argv[i];
        } else {
            return false;
        }
    }
    return out.model != nullptr;
}

uint64_t hash(const float * values, int count) {
    uint64_t sum = 14695981039346656037u;
    const unsigned char * bytes = reinterpret_cast<const unsigned char *>(values);
    for (size_t i = 0; i < size_t(count) * sizeof(float); i++) {
        sum = (sum ^ bytes[i]) * 1099511628211u;
    }
    return sum;
}

bool observe_all(ggml_tensor *, bool, void *) {
    return true;
}

llama_context * context_open(llama_model * model, const Options & options) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = uint32_t(options.context);
    params.n_batch = uint32_t(options.batch ? options.batch : options.context);
    params.n_ubatch = params.n_batch;
    params.n_threads = params.n_threads_batch = options.threads;
    params.offload_kqv = !options.kv_on_cpu;
    params.cb_eval = options.observes ? observe_all : nullptr;
    return llama_init_from_model(model, params);
}

// Decodes pseudorandom tokens, different for each context, then greedily.
void decode(llama_model * model, llama_context * context, const Options & options, int context_index,
            Outcome & out) {
    const int vocab_size = llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::vector<llama_token> next;
    uint32_t seed = 12345u + 77u * uint32_t(context_index);
    for (int i = 0; i < options.prompt; i++) {
        seed = seed * 1664525u + 1013904223u;
        next.push_back(llama_token((seed >> 8) % uint32_t(vocab_size)));
    }
    for (int step = 0; step < options.steps; step++) {
        struct stat seen;
        if (step == options.truncate_step && stat(options.truncate_path, &seen) == 0 &&
            truncate(options.truncate_path, seen.st_size / 2) != 0) {
            return;
        }
        const auto begin = std::chrono::steady_clock::now();
        for (size_t done = 0; done < next.size();) {
            const size_t most = options.batch ? size_t(options.batch) : next.size();
            const size_t count = std::min(most, next.size() - done);
            llama_batch batch = llama_batch_get_one(next.data() + done, int32_t(count));
            std::vector<int8_t> outputs(count, 1);
            batch.logits = options.all_logits ? outputs.data() : nullptr;
            const int status = llama_decode(context, batch);
            for (size_t i = 0; status == 0 && options.all_logits && i + 1 < count; i++) {
                char line[32];
                const float * logits = llama_get_logits_ith(context, int32_t(i));
                std::snprintf(line, sizeof line, "%016llx ", (unsigned long long) hash(logits, vocab_size));
                out.text += line;
            }
            if (status != 0) {
                out.text += "failed " + std::to_string(status) + " at step " + std::to_string(step);
                return;
            }
            done += count;
        }
        const auto passed = std::chrono::steady_clock::now() - begin;
        out.step_ns.push_back(std::chrono::duration_cast<std::chrono::nanoseconds>(passed).count());
        const float * logits = llama_get_logits_ith(context, -1);
        int best = 0;
        for (int i = 1; i < vocab_size; i++) {
            best = logits[i] > logits[best] ? i : best;
        }
        char line[64];
        std::snprintf(line, sizeof line, "%016llx:%d ", (unsigned long long) hash(logits, vocab_size), best);
        out.text += line;
        if (options.is_skewed) {
            seed = seed * 1664525u + 1013904223u;
            const double share = double(seed >> 8) / double(1 << 24);
            best = int(share * share * share * vocab_size);
        }
        next.assign(1, best);
    }
    out.is_good = true;
}

// Prints anonymous and resident memory, in KiB.
void print_memory() {
    long anonymous = -1, all = -1;
    if (std::FILE * file = std::fopen("/proc/self/status", "r")) {
        char line[256];
        while (std::fgets(line, sizeof line, file)) {
            std::sscanf(line, "RssAnon: %ld", &anonymous);
            std::sscanf(line, "VmRSS: %ld", &all);
        }
        std::fclose(file);
    }
    std::printf("memory %ld %ld\n", anonymous, all);
}

void log_warnings(ggml_log_level level, const char * text, void *) {
    if (level >= GGML_LOG_LEVEL_WARN && level != GGML_LOG_LEVEL_CONT) {
        std::fputs(text, stderr);
    }
}

llama_model * model_open(const char * path, const Options & options) {
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = options.layers;
    params.use_extra_bufts = options.repacks;
    if (options.load >= 0) {
        params.load_mode = llama_load_mode(options.load);
    }
    ggml_backend_dev_t devices[] = {nullptr, nullptr};
    if (options.device) {
        devices[0] = ggml_backend_dev_by_name(options.device);
        if (!devices[0]) {
            std::fprintf(stderr, "no device %s\n", options.device);
            return nullptr;
        }
        params.devices = devices;
    }
    return llama_model_load_from_file(path, params);
}

void print_all(std::vector<Outcome> & outcomes) {
    for (const Outcome & outcome : outcomes) {
        std::printf("%s\n", outcome.text.c_str());
    }
    print_memory();
    // The prompt, all steps, and the median of the steps without the prompt.
    std::vector<long long> & times = outcomes.front().step_ns;
    if (times.size() > 0) {
        std::printf("prompt %lld\n", times.front());
        std::printf("total %lld\n", std::accumulate(times.begin(), times.end(), 0LL));
    }
    if (times.size() > 1) {
        std::sort(times.begin() + 1, times.end());
        std::printf("time %lld\n", times[1 + (times.size() - 1) / 2]);
    }
}

int run(const Options & options) {
    std::vector<llama_model *> models = {model_open(options.model, options)};
    if (options.second) {
        models.push_back(model_open(options.second, options));
    }
    if (std::find(models.begin(), models.end(), nullptr) != models.end()) {
        std::printf("no model\n");
        return 4;
    }
    std::vector<llama_context *> contexts;
    std::vector<Outcome> outcomes(size_t(options.contexts));
    std::vector<std::thread> threads;
    bool is_good = true;
    for (size_t i = 0; i < outcomes.size() && is_good; i++) {
        llama_model * model = models[i % models.size()];
        llama_context * context = context_open(model, options);
        is_good = context != nullptr;
        contexts.push_back(context);
        if (options.sequential && is_good) {
            decode(model, context, options, int(i), outcomes[i]);
        }
    }
    if (!is_good) {
        std::printf("no context\n");
        return 5;
    }
    for (size_t i = 0; i < contexts.size() && !options.sequential; i++) {
        llama_model * model = models[i % models.size()];
        threads.emplace_back([&, i, model] { decode(model, contexts[i], options, int(i), outcomes[i]); });
    }
    for (std::thread & thread : threads) {
        thread.join();
    }
    print_all(outcomes);
    for (llama_context * context : contexts) {
        llama_free(context);
    }
    for (llama_model * model : models) {
        llama_model_free(model);
    }
    is_good = std::all_of(outcomes.begin(), outcomes.end(), [](const Outcome & one) { return one.is_good; });
    return is_good ? 0 : 3;
}

} // namespace

int main(int argc, char ** argv) {
    Options options;
    if (!options_read(argc, argv, options)) {
        std::fprintf(stderr, "usage: stock MODEL [options], see the comment in stock.cpp\n");
        return 2;
    }
    for (const char * library : options.libraries) {
        if (!ggml_backend_load(library)) {
            std::fprintf(stderr, "%s cannot be loaded as a backend\n", library);
            return 2;
        }
    }
    llama_log_set(log_warnings, nullptr);
    // Tools with -dev do this. Builds with backends in files do it at start.
    ggml_backend_load_all();
    llama_backend_init();
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        std::printf("%s%s", i ? " " : "devices ", ggml_backend_dev_name(ggml_backend_dev_get(i)));
    }
    std::printf("\n");
    return run(options);
}
