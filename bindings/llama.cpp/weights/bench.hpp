// Options, bars and runs that the benchmarks of streamed weights share.
#ifndef KVTIER_LLAMA_WEIGHTS_BENCH_HPP
#define KVTIER_LLAMA_WEIGHTS_BENCH_HPP

#include <kvtier/llama_weights.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

struct Options {
    std::string model, child;
    uint32_t tokens = 8, pairs = 5, threads = 2, slots = 0;
    uint64_t budget_bytes = 0;
};

[[noreturn]] inline void die(const std::string &text) {
    std::fprintf(stderr, "kvtier-llama-weights-bench: %s\n", text.c_str());
    std::exit(1);
}

inline double now_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values.empty() ? 0 : values[values.size() / 2];
}

struct Bar {
    const char *name, *baseline, *better;
    double goal;
};

inline void print(const Bar &bar, double value, double baseline_value) {
    const bool ok = std::strcmp(bar.better, "lower") == 0 ? value <= bar.goal : value >= bar.goal;
    std::printf("{\"group\":\"llama\",\"bar\":\"%s\",\"value\":%.4f,\"unit\":\"ratio\",\"baseline\":\"%s\","
                "\"baseline_value\":%.6f,\"goal\":%.2f,\"better\":\"%s\",\"ok\":%s}\n",
                bar.name, value, bar.baseline, baseline_value, bar.goal, bar.better, ok ? "true" : "false");
    std::fflush(stdout);
}

inline void print_none(const Bar &bar, const std::string &text) {
    std::printf("{\"group\":\"llama\",\"bar\":\"%s\",\"value\":null,\"unit\":\"ratio\",\"baseline\":\"%s\","
                "\"baseline_value\":null,\"goal\":%.2f,\"better\":\"%s\",\"ok\":null,\"why\":\"%s\"}\n",
                bar.name, bar.baseline, bar.goal, bar.better, text.c_str());
    std::fflush(stdout);
}

/// A model that decodes tokens one by one.
struct Runner {
    kvt_llama_weights_t *weights = nullptr;
    llama_model *model = nullptr;
    llama_context *ctx = nullptr;
    int32_t position = 0;

    void open(const Options &options, bool streamed, llama_load_mode mode) {
        kvt_llama_why_t why{};
        llama_model_params params = llama_model_default_params();
        params.use_extra_bufts = false;
        params.load_mode = mode;
        if (streamed) {
            kvt_llama_weights_opts_t opts = KVT_LLAMA_WEIGHTS_OPTS_INIT;
            opts.model_path = options.model.c_str();
            opts.budget_bytes = options.budget_bytes;
            opts.slots = options.slots;
            if (kvt_llama_weights_open(&opts, &weights, &why) != KVT_OK ||
                kvt_llama_weights_load(weights, &params, &model, &why) != KVT_OK) {
                die(why.text);
            }
        } else {
            model = llama_model_load_from_file(options.model.c_str(), params);
        }
        llama_context_params context = llama_context_default_params();
        context.n_ctx = 512;
        context.n_batch = context.n_ubatch = 64;
        context.n_threads = context.n_threads_batch = static_cast<int32_t>(options.threads);
        if (streamed && kvt_llama_weights_context(weights, &context, &why) != KVT_OK) {
            die(why.text);
        }
        ctx = model ? llama_init_from_model(model, context) : nullptr;
        if (!ctx) {
            die("the engine cannot load " + options.model);
        }
    }

    /// Decodes; returns the seconds per token.
    double decode(uint32_t tokens) {
        const double begin = now_s();
        for (uint32_t i = 0; i < tokens; i++) {
            if (position >= 500) {
                llama_memory_clear(llama_get_memory(ctx), false);
                position = 0;
            }
            llama_token token = static_cast<llama_token>(100 + position++ % 50);
            if (llama_decode(ctx, llama_batch_get_one(&token, 1)) != 0) {
                kvt_llama_why_t why{};
                kvt_llama_weights_error(weights, &why);
                die(std::string("llama_decode failed: ") + why.text);
            }
        }
        return (now_s() - begin) / tokens;
    }

    uint64_t read_bytes() const {
        kvt_llama_weights_stats_t stats{};
        kvt_llama_weights_stats(weights, &stats);
        return stats.read_bytes;
    }

    void close() {
        llama_free(ctx);
        llama_model_free(model);
        kvt_llama_weights_close(&weights, nullptr);
    }
};

void bench_mmap(const Options &options);
int run_child(const Options &options);

#endif
