// Measures the cost of a watch and the gain of block selection, against plain decoding in the same run. Two
// contexts decode the same tokens in turn; results are medians.
//
//   watch_bench [--quick] [--one-thread] [TEXT]       KVTIER_LLAMA_MODELS has smollm2.gguf
#include "watched.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <ctime>
#include <fstream>
#include <sstream>
#include <thread>

using namespace watch_test;

namespace {

bool is_quick = false, is_one_thread = false;

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values.empty() ? 0 : values[values.size() / 2];
}

// With --one-thread the CPU time of the thread, which other load on the machine does not change.
double now_ns() {
    timespec now;
    clock_gettime(is_one_thread ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &now);
    return (double) now.tv_sec * 1e9 + (double) now.tv_nsec;
}

void print(const char *bar, double value, const char *unit, const char *baseline, double base,
           double goal, bool is_lower) {
    const bool ok = is_lower ? value <= goal : value >= goal;
    std::printf("{\"group\":\"llama\",\"bar\":\"%s\",\"value\":%.4f,\"unit\":\"%s\",\"baseline\":\"%s\","
                "\"baseline_value\":%.4f,\"goal\":%.4f,\"better\":\"%s\",\"ok\":%s}\n",
                bar, value, unit, baseline, base, goal, is_lower ? "lower" : "higher",
                ok ? "true" : "false");
    std::fflush(stdout);
}

// Prints a value without a goal.
void print_value(const char *what, double value, const char *unit, const char *baseline) {
    std::printf("{\"group\":\"llama\",\"bar\":\"%s\",\"value\":%.4f,\"unit\":\"%s\",\"baseline\":\"%s\","
                "\"baseline_value\":1,\"goal\":null,\"better\":\"higher\",\"ok\":null}\n",
                what, value, unit, baseline);
    std::fflush(stdout);
}

llama_context_params bench_params(uint32_t n_ctx, bool flash) {
    llama_context_params p = params(n_ctx, flash);
    const unsigned n = is_one_thread ? 1 : std::max(1u, std::thread::hardware_concurrency());
    p.n_threads = p.n_threads_batch = (int32_t) n;
    return p;
}

// Fills sequence 0 with `n` tokens: copies the state of a prompt of 1,000 tokens to successive positions.
std::vector<uint8_t> long_state(llama_model *model, const std::vector<llama_token> &tokens, size_t n,
                                uint32_t n_ctx, bool flash) {
    constexpr size_t part = 1000;
    context_ptr ctx = open(model, bench_params(n_ctx, flash));
    llama_memory_t memory = llama_get_memory(ctx.get());
    const size_t first = std::min(n, part);
    CHECK(decode(ctx.get(), tokens, 0, first, 0));
    std::vector<uint8_t> one(llama_state_seq_get_size(ctx.get(), 0));
    llama_state_seq_get_data(ctx.get(), one.data(), one.size(), 0);
    for (size_t at = first; at < n; at += part) {
        llama_state_seq_set_data(ctx.get(), one.data(), one.size(), 1);
        llama_memory_seq_rm(memory, 1, (llama_pos) std::min(part, n - at), -1);
        llama_memory_seq_add(memory, 1, 0, -1, (llama_pos) at);
        llama_memory_seq_cp(memory, 1, 0, -1, -1);
        llama_memory_seq_rm(memory, 1, -1, -1);
    }
    // The engine computes the position shift with the next token, which is then removed.
    CHECK(decode(ctx.get(), std::vector<llama_token>(n + 1, tokens[0]), n, n + 1, 0));
    llama_memory_seq_rm(memory, 0, (llama_pos) n, -1);
    std::vector<uint8_t> out(llama_state_seq_get_size(ctx.get(), 0));
    llama_state_seq_get_data(ctx.get(), out.data(), out.size(), 0);
    return out;
}

struct run {
    std::vector<double> plain_ns, ratios; // ratio: watched / plain, of one pair
    double policy_ns = 0;                 // per token
    double agreement = 0;                 // share of tokens with the same most likely next token
    kvt_llama_watch_stats_t stats = {};
};

size_t argmax(const std::vector<float> &x) {
    return (size_t) (std::max_element(x.begin(), x.end()) - x.begin());
}

// Decodes the tokens after `n` in both contexts. The order of the two alternates.
run measure(watched &w, llama_context *plain, const std::vector<llama_token> &tokens, size_t n,
            size_t steps) {
    run out;
    CHECK(w.decode(tokens, n, n + 1) == KVT_OK && decode(plain, tokens, n, n + 1));
    const uint64_t before = w.stats().policy_ns;
    size_t same = 0;
    for (size_t i = 1; i <= steps; i++) {
        double watched_ns = 0, plain_ns_now = 0;
        for (int turn = 0; turn < 2; turn++) {
            const bool is_watched = (turn == 0) == (i % 2 == 0);
            const double from = now_ns();
            CHECK(is_watched ? w.decode(tokens, n + i, n + i + 1) == KVT_OK
                         : decode(plain, tokens, n + i, n + i + 1));
            (is_watched ? watched_ns : plain_ns_now) = now_ns() - from;
        }
        out.plain_ns.push_back(plain_ns_now);
        out.ratios.push_back(watched_ns / plain_ns_now);
        same += argmax(logits(w.ctx.get())) == argmax(logits(plain));
    }
    out.stats = w.stats();
    out.policy_ns = (double) (out.stats.policy_ns - before) / (double) steps;
    out.agreement = (double) same / (double) steps;
    return out;
}

void bench_h2o(llama_model *model, const std::vector<llama_token> &tokens, size_t steps) {
    const size_t n = 1024;
    watched w(model, bench_params(2048, false));
    context_ptr plain = open(model, bench_params(2048, false));
    CHECK(w.policy(0, "h2o(sink=4, recent=256, budget=4096)") == KVT_OK);
    for (size_t at = 0; at < n; at += 512) {
        CHECK(w.decode(tokens, at, at + 512, 0, at + 512 == n) == KVT_OK);
    }
    CHECK(decode(plain.get(), tokens, 0, n));
    const run r = measure(w, plain.get(), tokens, n, steps);
    print("h2o_observation_1024", median(r.ratios), "x", "token without", 1, 1.04, true);
    print_value("h2o_policy_share_1024", r.policy_ns / median(r.plain_ns), "x", "token without");
}

// Selects a quarter of the blocks of a context, for each token or for several, and all of them.
void bench_quest(llama_model *model, const std::vector<llama_token> &tokens, size_t n, size_t steps,
                 const std::string &length) {
    const uint32_t n_ctx = n > 2000 ? 8192 : 2048;
    const std::vector<uint8_t> state = long_state(model, tokens, n, n_ctx, true);
    char spec[96], bar[96];
    struct setting {
        size_t budget;
        uint32_t keep_tokens;
    };
    for (const auto &[budget, keep] : {setting{n / 4, 1}, {n / 4, 4}, {(size_t) 1 << 20, 1}}) {
        const std::string kept = keep > 1 ? "_keep" + std::to_string(keep) : "";
        const std::string full_name = length + kept;
        const char *name = full_name.c_str();
        watched w(model, bench_params(n_ctx, true));
        context_ptr plain = open(model, bench_params(n_ctx, true));
        std::snprintf(spec, sizeof spec, "quest(budget=%zu, share=bound, dense=0)", budget);
        CHECK(w.policy(0, spec, 0, 0, keep) == KVT_OK);
        llama_state_seq_set_data(w.ctx.get(), state.data(), state.size(), 0);
        llama_state_seq_set_data(plain.get(), state.data(), state.size(), 0);
        std::vector<llama_token> padded(n, 0);
        padded.insert(padded.end(), tokens.begin() + (std::ptrdiff_t) std::min<size_t>(n, 1000),
                      tokens.end());
        const run r = measure(w, plain.get(), padded, n, steps);
        const double token_ns = median(r.plain_ns);
        if (budget > n) {
            std::snprintf(bar, sizeof bar, "quest_all_%s", name);
            print(bar, median(r.ratios), "x", "token without", 1, 1.03, true);
            continue;
        }
        std::snprintf(bar, sizeof bar, "quest_policy_%s", name);
        print(bar, r.policy_ns / token_ns, "share", "token without", 1, 0.015, true);
        std::snprintf(bar, sizeof bar, "quest_quarter_%s", name);
        if (n > 2000) {
            print(bar, 1 / median(r.ratios), "x faster", "token without", 1, 1.5, false);
        } else {
            print(bar, median(r.ratios), "x", "token without", 1, 1.0, true);
        }
        std::snprintf(bar, sizeof bar, "quest_masked_%s", name);
        print_value(bar, (double) r.stats.masked_cells / (double) std::max<uint64_t>(r.stats.seen_cells, 1),
             "share", "cells of the sequence");
        std::snprintf(bar, sizeof bar, "quest_agreement_%s", name);
        print_value(bar, r.agreement, "share", "most likely token of full attention");
        std::fprintf(stderr, "%s: a plain token takes %.2f ms, the policy %.3f ms\n", name,
                     token_ns / 1e6, r.policy_ns / 1e6);
    }
}

// The share of the attention in a selected quarter of the blocks, on text.
void print_recall(llama_model *model, const std::vector<llama_token> &tokens, size_t steps) {
    const size_t n = 1000;
    for (const char *spec : {"quest(budget=256, share=bound, dense=0)", "quest(budget=256, dense=0)",
                             "arkvale(budget=256, page=16, sinks=1, window=2, dense=0)"}) {
        watched w(model, bench_params(2048, false));
        CHECK(w.policy(0, spec, 16, 1) == KVT_OK);
        for (size_t at = 0; at < n; at += 500) {
            CHECK(w.decode(tokens, at, at + 500) == KVT_OK);
        }
        for (size_t i = n; i < n + steps; i++) {
            CHECK(w.decode(tokens, i, i + 1) == KVT_OK);
        }
        const kvt_llama_watch_stats_t s = w.stats();
        char bar[128];
        std::snprintf(bar, sizeof bar, "recall_1000 %s, masked %.2f", spec,
                      (double) s.masked_cells / (double) std::max<uint64_t>(s.seen_cells, 1));
        print_value(bar, (double) s.audited_mass / 1e6 / (double) std::max<uint64_t>(s.audited_layers, 1),
             "share", "attention of all cells");
    }
}

} // namespace

int main(int argc, char **argv) {
    const char *path = KVT_BENCH_TEXT;
    for (int i = 1; i < argc; i++) {
        is_quick = is_quick || std::strcmp(argv[i], "--quick") == 0;
        is_one_thread = is_one_thread || std::strcmp(argv[i], "--one-thread") == 0;
        path = argv[i][0] == '-' ? path : argv[i];
    }
    model_ptr model = load("smollm2.gguf");
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    std::vector<llama_token> tokens;
    if (model) {
        tokens = tokenize(model.get(), text.str());
    }
    if (tokens.size() < 1400) {
        std::printf("{\"group\":\"llama\",\"bar\":\"watch\",\"ok\":null,\"why\":\"needs smollm2.gguf in "
                    "KVTIER_LLAMA_MODELS and a text of 1400 tokens\"}\n");
        return 0;
    }
    tokens.resize(1400);
    const size_t steps = is_quick ? 24 : 96;
    bench_h2o(model.get(), tokens, steps);
    bench_quest(model.get(), tokens, 1024, steps, "1024");
    bench_quest(model.get(), tokens, 8000, std::min<size_t>(steps, 48), "8k");
    print_recall(model.get(), tokens, is_quick ? 8 : 32);
    return failures != 0;
}
