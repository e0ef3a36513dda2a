// What a sequence of four times its cells costs, and what it loses, beside the same with all cells:
//
//   watch_longer_bench MODEL.gguf TEXT... [--tokens 2048] [--cells 512] [--threads 2] [--spec SPEC]
//
// One JSON object a line. Texts are of people: with random words no choice of blocks is a good one.
#include "longer.hpp"

#include <chrono>

using namespace watch_test;

namespace {

struct options {
    std::string model;
    std::vector<char *> texts{nullptr};
    size_t tokens = 2048;
    uint32_t cells = 512;
    int threads = 2;
    const char *spec = nullptr;
};

constexpr size_t steps = 48, measured_steps = 12;

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
    return opts;
}

bool copy_sequence(llama_context *from, llama_context *to) {
    std::vector<uint8_t> blob(llama_state_seq_get_size(from, 0));
    return llama_state_seq_get_data(from, blob.data(), blob.size(), 0) == blob.size() &&
           llama_state_seq_set_data(to, blob.data(), blob.size(), 0) == blob.size();
}

// What each step of the small context chose, and what full attention says next.
struct record {
    std::vector<std::vector<std::vector<uint32_t>>> chosen;
    std::vector<kvt_llama_longer_stats_t> stats;
    std::vector<int> full;
};

// Text in a small context and in one with all cells, a token each in turn.
void text_steps(served &small, llama_context *plain, const std::vector<llama_token> &text, size_t n,
                uint32_t layers, record &out) {
    std::vector<double> ours, theirs, choosing, loading;
    size_t same = 0;
    const kvt_llama_longer_stats_t first = stats_of(small);
    kvt_llama_longer_stats_t before = first;
    for (size_t i = 0; i < steps; i++) {
        double t = now_ms();
        CHECK(feed(small, text.data() + n + i, 1));
        const int next = argmax(logits(small.ctx.get()));
        ours.push_back(now_ms() - t);
        t = now_ms();
        CHECK(decode(plain, text, n + i, n + i + 1));
        out.full.push_back(argmax(logits(plain)));
        theirs.push_back(now_ms() - t);
        same += next == out.full.back();
        const kvt_llama_longer_stats_t stats = stats_of(small);
        choosing.push_back((double) (stats.choose_ns - before.choose_ns) / 1e6);
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
    bar("token", median(ours) / median(theirs), "x", "ms a token with all cells", median(theirs),
        1.1, true);
    bar("choose", median(choosing) / median(theirs), "of a token", "ms a token with all cells",
        median(theirs), 0.03, true);
    bar("load", median(loading) / median(theirs), "of a token", "ms a token with all cells",
        median(theirs), 0.1, true);
    bar("bytes", loaded / blocks, "of chosen blocks", "MB a token if all were written",
        blocks * block_bytes / 1e6 / (double) steps, 0.5, true);
    bar("agreement", (double) same / (double) steps, "of next tokens", "KV computed with all cells",
        1, 0.8, false);
}

void recall(served &big, masked &reference, const std::vector<llama_token> &text, size_t n,
            const record &what) {
    reference.measures = true;
    for (size_t i = 0; i < measured_steps; i++) {
        reference.chosen = what.chosen[i];
        reference.sinks = (uint32_t) what.stats[i].sink_cells;
        reference.window_first =
            (uint32_t) (what.stats[i].sink_cells + what.stats[i].stored_tokens);
        reference.tokens = (uint32_t) what.stats[i].tokens;
        CHECK(feed(big, text.data() + n + i, 1));
    }
    reference.measures = false;
    const double seen = (double) what.stats[0].cells / (double) what.stats[0].tokens;
    bar("attention_seen", reference.share / reference.rows, "of attention", "cells of tokens", seen,
        0.85, false);
    bar("attention_recall", reference.old_share / reference.old_rows, "of attention to blocks",
        "cells of tokens", seen, 0.6, false);
}

// The prompt too is computed in the small context, in parts.
void prefilled(const options &o, llama_model *model, const std::vector<llama_token> &text,
               double dense_ms, const record &what) {
    shared_store store("store(host=256MiB)");
    served small = serve(model, opts_of(o, store, nullptr), params_of(o, o.cells));
    double t = now_ms();
    CHECK(feed(small, text.data(), o.tokens));
    const double ms = now_ms() - t;
    size_t same = 0;
    for (size_t i = 0; i < steps; i++) {
        CHECK(feed(small, text.data() + o.tokens + i, 1));
        same += argmax(logits(small.ctx.get())) == what.full[i];
    }
    bar("prefill", ms / dense_ms, "x", "ms of a prefill with all cells", dense_ms, 2, true);
    bar("agreement_prefilled", (double) same / (double) steps, "of next tokens",
        "KV computed in parts", 1, 0.6, false);
}

// Sentences in the first part of a text, which are begun again behind it. They are not alike: a
// small model confuses those that are, with all cells too.
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
        const std::vector<llama_token> told =
            tokenize(model, std::string("\n\n") + n.start + " " + n.answer + ".\n\n");
        out.insert(out.end(), told.begin(), told.end());
    }
    out.insert(out.end(), text.begin() + (std::ptrdiff_t) at, text.end());
    out.resize(n);
    return out;
}

size_t answers(served &s, llama_model *model, size_t n) {
    size_t right = 0;
    const llama_vocab *vocab = llama_model_get_vocab(model);
    for (const needle &one : all_needles) {
        const std::vector<llama_token> asked = tokenize(model, std::string("\n\n") + one.start);
        CHECK(feed(s, asked.data(), asked.size()));
        std::string answer;
        for (int k = 0; k < 6; k++) {
            const llama_token next = argmax(logits(s.ctx.get()));
            char piece[64];
            const int bytes = llama_token_to_piece(vocab, next, piece, sizeof piece, 0, false);
            answer.append(piece, (size_t) std::max(bytes, 0));
            CHECK(feed(s, &next, 1));
        }
        right += answer.find(one.answer) != std::string::npos;
        kvt_llama_why_t why;
        CHECK(ok(kvt_llama_longer_truncate(s.longer.get(), n, &why), why, "truncate"));
    }
    return right;
}

void needles(const options &o, llama_model *model, const std::vector<llama_token> &text) {
    const size_t n = o.tokens / 16 * 16;
    const std::vector<llama_token> hay = haystack(model, text, n);
    shared_store store("store(host=256MiB)");
    served big = serve(model, opts_of(o, store, "needles"), params_of(o, n + 256));
    kvt_llama_why_t why;
    CHECK(feed(big, hay.data(), n));
    CHECK(ok(kvt_llama_longer_save(big.longer.get(), &why), why, "save"));
    const size_t full = answers(big, model, n);
    served small = serve(model, opts_of(o, store, "needles"), params_of(o, o.cells));
    size_t found = 0;
    std::vector<llama_token> more = hay;
    more.push_back(hay.back());
    CHECK(ok(kvt_llama_longer_resume(small.longer.get(), more.data(), more.size(), &found, &why),
             why, "resume"));
    CHECK(found == n);
    const size_t resumed = answers(small, model, n);
    served alone = serve(model, opts_of(o, store, nullptr), params_of(o, o.cells));
    CHECK(feed(alone, hay.data(), n));
    const size_t parts = answers(alone, model, n);
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
            "[--spec SPEC]\n");
        return 2;
    }
    model_ptr model = load(o.model.c_str());
    if (!model) {
        skip(o.model + " is not there");
    }
    const uint32_t layers = (uint32_t) llama_model_n_layer(model.get());
    const std::vector<llama_token> text =
        text_of(model.get(), (int) o.texts.size(), o.texts.data(), o.tokens + steps + 1);
    record what;
    double dense_ms = 0;
    {
        shared_store store("store(host=256MiB)");
        masked reference((int) layers);
        llama_context_params p = params_of(o, o.tokens + 256);
        context_ptr plain = open(model.get(), p);
        p.cb_eval = masked::on_node;
        p.cb_eval_user_data = &reference;
        served big = serve(model.get(), opts_of(o, store, "text"), p);
        const double t = now_ms();
        CHECK(feed(big, text.data(), o.tokens));
        dense_ms = now_ms() - t;
        kvt_llama_why_t why;
        CHECK(ok(kvt_llama_longer_save(big.longer.get(), &why), why, "save"));
        CHECK(copy_sequence(big.ctx.get(), plain.get()));
        served small = serve(model.get(), opts_of(o, store, "text"), params_of(o, o.cells));
        size_t found = 0;
        CHECK(
            ok(kvt_llama_longer_resume(small.longer.get(), text.data(), o.tokens + 1, &found, &why),
               why, "resume"));
        CHECK(found == o.tokens || feed(small, text.data() + found, o.tokens - found));
        text_steps(small, plain.get(), text, o.tokens, layers, what);
        recall(big, reference, text, o.tokens, what);
        const kvt_llama_longer_stats_t stats = stats_of(small);
        const double rows =
            (double) stats.loaded_bytes / (double) std::max<uint64_t>(stats.loaded_blocks, 1) / 8;
        const double kv = (double) o.tokens * rows * layers;
        bar("memory",
            (double) (stats.cells * rows * layers + stats.own_bytes + stats.policy_bytes) / kv, "x",
            "bytes of K and V with all cells", kv, 0.5, true);
    }
    prefilled(o, model.get(), text, dense_ms, what);
    needles(o, model.get(), text);
    return failures != 0;
}
