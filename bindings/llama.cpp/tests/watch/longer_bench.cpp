// Measures the cost and the loss of a sequence of four times its cells, against a context with all cells:
//
//   watch_longer_bench MODEL.gguf TEXT... [--tokens 2048] [--cells 512] [--threads 2] [--spec SPEC]
//                     [--steps 48] [--block 8] [--sinks 16] [--slots N] [--part-tokens 16]
//                     [--only tokens|prefill|needles]
//
// Prints one JSON object per line. Use natural text: on random words no selection of blocks is good.
#include "longer.hpp"

#include <chrono>
#include <cstring>

using namespace watch_test;

namespace {

struct options {
    std::string model;
    std::vector<char *> texts{nullptr};
    size_t tokens = 2048;
    uint32_t cells = 512;
    int threads = 2;
    const char *spec = nullptr, *only = "";
    size_t steps = 48;
    uint32_t block = 0, sinks = 0, slots = 0, part = 0; // 0: the adapter's default

    bool wants(const char *part_name) const { return !*only || std::strcmp(only, part_name) == 0; }
};

constexpr size_t measured_steps = 12;

double now_ms() {
    using namespace std::chrono;
    return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values.empty() ? 0 : values[values.size() / 2];
}

void bar(const char *name, double value, const char *unit, const char *baseline,
         double baseline_value, double goal, bool lower) {
    std::printf("{\"group\":\"llama\",\"bar\":\"longer_%s\",\"value\":%.4g,\"unit\":\"%s\","
                "\"baseline\":\"%s\","
                "\"baseline_value\":%.4g,\"goal\":%.4g,\"better\":\"%s\",\"ok\":%s}\n",
                name, value, unit, baseline, baseline_value, goal, lower ? "lower" : "higher",
                (lower ? value <= goal : value >= goal) ? "true" : "false");
    std::fflush(stdout);
}

bool read_options(int argc, char **argv, options &out) {
    for (int i = 1; i < argc; i++) {
        const std::string a = argv[i];
        const bool has_value = i + 1 < argc;
        if (a == "--tokens" && has_value) {
            out.tokens = (size_t) std::atoi(argv[++i]);
        } else if (a == "--cells" && has_value) {
            out.cells = (uint32_t) std::atoi(argv[++i]);
        } else if (a == "--threads" && has_value) {
            out.threads = std::atoi(argv[++i]);
        } else if (a == "--spec" && has_value) {
            out.spec = argv[++i];
        } else if (a == "--only" && has_value) {
            out.only = argv[++i];
        } else if (a == "--steps" && has_value) {
            out.steps = std::max<size_t>((size_t) std::atoi(argv[++i]), measured_steps);
        } else if (a == "--block" && has_value) {
            out.block = (uint32_t) std::atoi(argv[++i]);
        } else if (a == "--sinks" && has_value) {
            out.sinks = (uint32_t) std::atoi(argv[++i]);
        } else if (a == "--slots" && has_value) {
            out.slots = (uint32_t) std::atoi(argv[++i]);
        } else if (a == "--part-tokens" && has_value) {
            out.part = (uint32_t) std::atoi(argv[++i]);
        } else if (out.model.empty()) {
            out.model = a;
        } else {
            out.texts.push_back(argv[i]);
        }
    }
    return !out.model.empty() && out.texts.size() > 1 && out.tokens > out.cells;
}

llama_context_params params_of(const options &o, size_t n_ctx) {
    llama_context_params p = params((uint32_t) n_ctx, true);
    p.n_threads = p.n_threads_batch = o.threads;
    return p;
}

kvt_llama_longer_opts_t opts_of(const options &o, const shared_store &store, const char *name) {
    kvt_llama_longer_opts_t opts = KVT_LLAMA_LONGER_OPTS_INIT;
    opts.store = store.store;
    opts.account = store.account;
    opts.name = name;
    opts.model_id = "bench";
    opts.spec = o.spec;
    opts.block_tokens = o.block;
    opts.sink_tokens = o.sinks;
    opts.slot_tokens = o.slots;
    opts.part_tokens = o.part;
    return opts;
}

bool copy_sequence(llama_context *from, llama_context *to) {
    std::vector<uint8_t> blob(llama_state_seq_get_size(from, 0));
    return llama_state_seq_get_data(from, blob.data(), blob.size(), 0) == blob.size() &&
           llama_state_seq_set_data(to, blob.data(), blob.size(), 0) == blob.size();
}

// For each step: blocks selected in the small context, and the next token of full attention.
struct record {
    std::vector<std::vector<std::vector<uint32_t>>> chosen;
    std::vector<kvt_llama_longer_stats_t> stats;
    std::vector<int> full;
};

// Decodes text in a small context and in one with all cells, token by token in turn.
void bench_tokens(longer_context &small, llama_context *plain, const std::vector<llama_token> &text, size_t n,
                uint32_t layers, size_t steps, record &out) {
    std::vector<double> sparse_ms, dense_token_ms, selecting, loading;
    size_t same = 0;
    const kvt_llama_longer_stats_t first = stats_of(small);
    kvt_llama_longer_stats_t before = first;
    for (size_t i = 0; i < steps; i++) {
        double t = now_ms();
        CHECK(decode_longer(small, text.data() + n + i, 1));
        const int next = argmax(logits(small.ctx.get()));
        sparse_ms.push_back(now_ms() - t);
        t = now_ms();
        CHECK(decode(plain, text, n + i, n + i + 1));
        out.full.push_back(argmax(logits(plain)));
        dense_token_ms.push_back(now_ms() - t);
        same += next == out.full.back();
        const kvt_llama_longer_stats_t stats = stats_of(small);
        selecting.push_back((double) (stats.choose_ns - before.choose_ns) / 1e6);
        loading.push_back((double) (stats.load_ns - before.load_ns) / 1e6);
        before = stats;
        out.stats.push_back(stats);
        out.chosen.emplace_back();
        for (uint32_t il = 0; il < layers; il++) {
            out.chosen.back().push_back(chosen_of(small, il));
        }
    }
    const double blocks = (double) (before.chosen_blocks - first.chosen_blocks);
    const double loaded = (double) (before.loaded_blocks - first.loaded_blocks);
    const double block_bytes =
        (double) before.loaded_bytes / (double) std::max<uint64_t>(before.loaded_blocks, 1);
    bar("token", median(sparse_ms) / median(dense_token_ms), "x", "ms a token with all cells",
        median(dense_token_ms), 1.1, true);
    bar("choose", median(selecting) / median(dense_token_ms), "of a token", "ms a token with all cells",
        median(dense_token_ms), 0.03, true);
    bar("load", median(loading) / median(dense_token_ms), "of a token", "ms a token with all cells",
        median(dense_token_ms), 0.1, true);
    bar("bytes", loaded / blocks, "of chosen blocks", "MB a token if all were written",
        blocks * block_bytes / 1e6 / (double) steps, 0.5, true);
    bar("agreement", (double) same / (double) steps, "of next tokens", "KV computed with all cells",
        1, 0.8, false);
}

void bench_recall(longer_context &big, masked_reference &reference, const std::vector<llama_token> &text,
                  size_t n, const record &rec) {
    reference.measures = true;
    for (size_t i = 0; i < measured_steps; i++) {
        reference.chosen = rec.chosen[i];
        reference.sinks = (uint32_t) rec.stats[i].sink_cells;
        reference.window_first =
            (uint32_t) (rec.stats[i].sink_cells + rec.stats[i].stored_tokens);
        reference.tokens = (uint32_t) rec.stats[i].tokens;
        CHECK(decode_longer(big, text.data() + n + i, 1));
    }
    reference.measures = false;
    const double seen = (double) rec.stats[0].cells / (double) rec.stats[0].tokens;
    bar("attention_seen", reference.share / reference.rows, "of attention", "cells of tokens", seen,
        0.85, false);
    bar("attention_recall", reference.old_share / reference.old_rows, "of attention to blocks",
        "cells of tokens", seen, 0.6, false);
}

// Computes the prompt in the small context, too, in parts.
void bench_prefill(const options &o, llama_model *model, const std::vector<llama_token> &text,
               double dense_ms, const record &rec) {
    shared_store store("store(host=256MiB)");
    longer_context small = open_longer(model, opts_of(o, store, nullptr), params_of(o, o.cells));
    double t = now_ms();
    CHECK(decode_longer(small, text.data(), o.tokens));
    const double ms = now_ms() - t;
    size_t same = 0;
    for (size_t i = 0; i < o.steps; i++) {
        CHECK(decode_longer(small, text.data() + o.tokens + i, 1));
        same += argmax(logits(small.ctx.get())) == rec.full[i];
    }
    bar("prefill", ms / dense_ms, "x", "ms of a prefill with all cells", dense_ms, 2, true);
    bar("agreement_prefilled", (double) same / (double) o.steps, "of next tokens",
        "KV computed in parts", 1, 0.6, false);
}

// Sentences in the first part of a text; the model must complete them after it. They differ in form,
// because a small model confuses similar ones even with all cells.
struct needle {
    const char *start, *answer;
};

constexpr needle all_needles[] = {
    {"The secret code of the harbour is", "7421"}, {"The password of the library is", "elephant"},
    {"Maria's favourite fruit is", "mango"},       {"The captain of the ship is called", "Brandt"},
    {"The meeting takes place in", "Helsinki"},    {"The dog of our neighbour is named", "Biscuit"},
};

std::vector<llama_token> haystack(llama_model *model, const std::vector<llama_token> &text,
                                  size_t n) {
    const size_t count = std::size(all_needles), gap = n * 3 / 5 / count;
    std::vector<llama_token> out;
    size_t at = 0;
    for (size_t i = 0; i < count; i++) {
        out.insert(out.end(), text.begin() + (std::ptrdiff_t) at,
                   text.begin() + (std::ptrdiff_t) (at + gap));
        at += gap;
        const needle &n = all_needles[i];
        const std::vector<llama_token> sentence =
            tokenize(model, std::string("\n\n") + n.start + " " + n.answer + ".\n\n");
        out.insert(out.end(), sentence.begin(), sentence.end());
    }
    out.insert(out.end(), text.begin() + (std::ptrdiff_t) at, text.end());
    out.resize(n);
    return out;
}

size_t answers(longer_context &s, llama_model *model, size_t n) {
    size_t right = 0;
    const llama_vocab *vocab = llama_model_get_vocab(model);
    for (const needle &one : all_needles) {
        const std::vector<llama_token> question = tokenize(model, std::string("\n\n") + one.start);
        CHECK(decode_longer(s, question.data(), question.size()));
        std::string answer;
        for (int k = 0; k < 6; k++) {
            const llama_token next = argmax(logits(s.ctx.get()));
            char piece[64];
            const int bytes = llama_token_to_piece(vocab, next, piece, sizeof piece, 0, false);
            answer.append(piece, (size_t) std::max(bytes, 0));
            CHECK(decode_longer(s, &next, 1));
        }
        right += answer.find(one.answer) != std::string::npos;
        kvt_llama_why_t why;
        CHECK(ok(kvt_llama_longer_truncate(s.longer.get(), n, &why), why, "truncate"));
    }
    return right;
}

void bench_needles(const options &o, llama_model *model, const std::vector<llama_token> &text) {
    const size_t n = o.tokens / 16 * 16;
    const std::vector<llama_token> haystack_tokens = haystack(model, text, n);
    shared_store store("store(host=256MiB)");
    longer_context big = open_longer(model, opts_of(o, store, "needles"), params_of(o, n + 256));
    kvt_llama_why_t why;
    CHECK(decode_longer(big, haystack_tokens.data(), n));
    CHECK(ok(kvt_llama_longer_save(big.longer.get(), &why), why, "save"));
    const size_t full = answers(big, model, n);
    longer_context small = open_longer(model, opts_of(o, store, "needles"), params_of(o, o.cells));
    size_t found = 0;
    std::vector<llama_token> more = haystack_tokens;
    more.push_back(haystack_tokens.back());
    CHECK(ok(kvt_llama_longer_resume(small.longer.get(), more.data(), more.size(), &found, &why),
             why, "resume"));
    CHECK(found == n);
    const size_t resumed = answers(small, model, n);
    longer_context prefilled_sparse = open_longer(model, opts_of(o, store, nullptr), params_of(o, o.cells));
    CHECK(decode_longer(prefilled_sparse, haystack_tokens.data(), n));
    const size_t parts = answers(prefilled_sparse, model, n);
    const double all = (double) std::size(all_needles);
    bar("needles", (double) resumed / all, "found", "with all cells", (double) full / all,
        (double) full / all, false);
    bar("needles_prefilled", (double) parts / all, "found", "with all cells", (double) full / all,
        (double) full / all, false);
}

} // namespace

int main(int argc, char **argv) {
    options o;
    if (!read_options(argc, argv, o)) {
        std::fprintf(
            stderr,
            "usage: watch_longer_bench MODEL.gguf TEXT... [--tokens N] [--cells N] [--threads N] "
            "[--spec SPEC]\n"
            "    [--steps N] [--block N] [--sinks N] [--slots N] [--part-tokens N]\n"
            "    [--only tokens|prefill|needles]\n");
        return 2;
    }
    model_ptr model = load(o.model.c_str());
    if (!model) {
        skip("no " + o.model);
    }
    const uint32_t layers = (uint32_t) llama_model_n_layer(model.get());
    const std::vector<llama_token> text =
        text_of(model.get(), (int) o.texts.size(), o.texts.data(), o.tokens + o.steps + 1);
    record rec;
    double dense_ms = 0;
    if (o.wants("tokens") || o.wants("prefill")) {
        shared_store store("store(host=256MiB)");
        masked_reference reference((int) layers);
        reference.block = o.block ? o.block : reference.block;
        llama_context_params p = params_of(o, o.tokens + 256);
        context_ptr plain = open(model.get(), p);
        p.cb_eval = masked_reference::on_node;
        p.cb_eval_user_data = &reference;
        longer_context big = open_longer(model.get(), opts_of(o, store, "text"), p);
        const double t = now_ms();
        CHECK(decode_longer(big, text.data(), o.tokens));
        dense_ms = now_ms() - t;
        kvt_llama_why_t why;
        CHECK(ok(kvt_llama_longer_save(big.longer.get(), &why), why, "save"));
        CHECK(copy_sequence(big.ctx.get(), plain.get()));
        longer_context small = open_longer(model.get(), opts_of(o, store, "text"), params_of(o, o.cells));
        size_t found = 0;
        CHECK(
            ok(kvt_llama_longer_resume(small.longer.get(), text.data(), o.tokens + 1, &found, &why),
               why, "resume"));
        CHECK(found == o.tokens || decode_longer(small, text.data() + found, o.tokens - found));
        bench_tokens(small, plain.get(), text, o.tokens, layers, o.steps, rec);
        bench_recall(big, reference, text, o.tokens, rec);
        const kvt_llama_longer_stats_t stats = stats_of(small);
        const double rows =
            (double) stats.loaded_bytes / (double) std::max<uint64_t>(stats.loaded_blocks, 1) / 8;
        const double kv = (double) o.tokens * rows * layers;
        bar("memory",
            (double) (stats.cells * rows * layers + stats.own_bytes + stats.policy_bytes) / kv, "x",
            "bytes of K and V with all cells", kv, 0.5, true);
    }
    if (o.wants("prefill")) {
        bench_prefill(o, model.get(), text, dense_ms, rec);
    }
    if (o.wants("needles")) {
        bench_needles(o, model.get(), text);
    }
    return failures != 0;
}
