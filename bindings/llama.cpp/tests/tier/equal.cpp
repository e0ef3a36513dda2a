// A prompt that was restored goes on with the same logits as one that was decoded here: whole, in part,
// from memory, from disk after everything was closed, by branches, A then B then A, in every shape of a
// context. Where the engine is asked for the same batches over the same cells the logits are equal to
// the last bit; where other requests have used the context before, cells lie elsewhere, and sums differ.
#include "world.hpp"

using namespace world;

namespace {

struct variant {
    const char *name;
    how is;
};

struct subject {
    llama_model *model;
    std::string path;
    bool has_states, has_windows;
    size_t count;
};

/// Of the range of logits, where cells lie elsewhere.
constexpr double tolerance = 0.02;

void agree(const variant &of, const char *what, const logits_t &with, const logits_t &without, bool exact) {
    const double range = *std::max_element(without.begin(), without.end()) -
                         *std::min_element(without.begin(), without.end());
    const double far = distance(with, without) / range;
    const bool same = bitwise(with, without);
    std::printf("%-14s %-16s %s (%g)\n", of.name, what, same ? "bitwise equal" : "close", far);
    CHECK(exact ? same : far <= tolerance);
}

bool has_scratch(const variant &of) { return of.is.unified && of.is.n_seq > 1; }

kvt_llama_tier_opts_t options(const subject &of, const llama_context_params *params) {
    kvt_llama_tier_opts_t opts = KVT_LLAMA_TIER_OPTS_INIT;
    opts.model_path = of.path.c_str();
    opts.host_bytes = uint64_t(256) << 20;
    opts.params = params;
    return opts;
}

/// Decodes a prompt as every run here does, with or without us: in batches that end at multiples of
/// n_batch, and at the last chunk.
void decode_all(const variant &of, llama_context *ctx, kvt_llama_tier_t *tier, llama_seq_id seq,
                const tokens_t &tokens) {
    const size_t last = (tokens.size() - 1) / 32 * 32;
    for (size_t at = 0; at < tokens.size();) {
        size_t end = std::min(at + of.is.n_batch, tokens.size());
        end = at < last ? std::min(end, last) : end;
        CHECK(decode(ctx, seq, tokens, at, end, of.is.n_batch) == 0);
        at = end;
        if (tier) {
            CHECK_OK(kvt_llama_commit(tier, seq, tokens.data(), at, &why));
        }
    }
}

/// The run without us: `first` is decoded, cut at `keep`, and gone on from with the rest of `then`.
logits_t reference(const subject &on, const variant &of, const tokens_t &first, size_t keep,
                   const tokens_t &then) {
    llama_context *ctx = context(on.model, of.is);
    if (on.has_states) {
        const tokens_t start(first.begin(), first.begin() + keep);
        CHECK(decode(ctx, 0, start, 0, keep, of.is.n_batch) == 0);
    } else if (keep != 0) {
        decode_all(of, ctx, nullptr, 0, first);
        CHECK(llama_memory_seq_rm(llama_get_memory(ctx), 0, llama_pos(keep), -1));
    }
    CHECK(decode(ctx, 0, then, keep, then.size(), of.is.n_batch) == 0);
    const logits_t out = logits(ctx);
    llama_free(ctx);
    return out;
}

logits_t go_on(const variant &of, llama_context *ctx, llama_seq_id seq, const tokens_t &tokens, size_t at) {
    CHECK(decode(ctx, seq, tokens, at, tokens.size(), of.is.n_batch) == 0);
    return logits(ctx);
}

/// A context and its tier that nobody has used.
struct fresh {
    llama_context_params params;
    llama_context *ctx;
    kvt_llama_tier_t *tier;
    fresh(const subject &on, const variant &of, const std::string *folder) : params(params_of(of.is)) {
        kvt_llama_tier_opts_t opts = options(on, &params);
        if (folder) {
            opts.disk_path = folder->c_str();
            opts.disk_bytes = uint64_t(512) << 20;
        }
        ctx = context(on.model, of.is);
        tier = open_tier(ctx, opts);
    }
    ~fresh() {
        CHECK(stats(tier).failed_saves == 0 && stats(tier).refused_restores == 0);
        close_tier(&tier);
        llama_free(ctx);
    }
};

/// Closed and opened again; then the same prompt, and one that leaves it half way.
void restart(const subject &on, const variant &of) {
    folder place;
    const tokens_t whole = prompt(on.model, 5, on.count);
    tokens_t other(whole.begin(), whole.begin() + on.count * 2 / 3);
    other = joined(other, prompt(on.model, 6, 40));
    {
        fresh one(on, of, &place.path);
        decode_all(of, one.ctx, one.tier, 0, whole);
        flush(one.tier);
    }
    // Windows leave out cells that are masked; others then lie elsewhere.
    const bool exact = !on.has_windows;
    const size_t last = (on.count - 1) / 32 * 32;
    {
        fresh one(on, of, &place.path);
        const llama_seq_id seq = of.is.n_seq > 2 ? 1 : 0;
        const kvt_llama_attached_t at = attach(one.tier, seq, whole);
        CHECK(at.refused == KVT_OK && at.reused_tokens == last && at.disk_tokens == last);
        const logits_t with = go_on(of, one.ctx, seq, whole, at.reused_tokens);
        agree(of, "restart", with, reference(on, of, whole, last, whole), exact);
    }
    {
        fresh one(on, of, &place.path);
        const kvt_llama_attached_t at = attach(one.tier, 0, other);
        const size_t common = on.count * 2 / 3 / 32 * 32;
        // States are there where a batch has ended. Of a window only the end is there, too, where whole
        // sequences are copied: then nothing is reused in the middle.
        const size_t end = common >= of.is.n_batch ? of.is.n_batch : 0;
        const size_t want = on.has_states || (on.has_windows && !has_scratch(of)) ? end : common;
        std::printf("%-14s part: %u of %zu reused\n", of.name, at.reused_tokens, other.size());
        CHECK(at.refused == KVT_OK && at.reused_tokens == want);
        const logits_t with = go_on(of, one.ctx, 0, other, at.reused_tokens);
        agree(of, "part", with, reference(on, of, whole, want, other), exact);
    }
}

/// P+x, P+y, P+x, then A again after B, in one sequence: what a cache of whole sequences loses.
void stories(const subject &on, const variant &of) {
    fresh one(on, of, nullptr);
    const size_t half = on.count / 2, last = (on.count - 1) / 32 * 32;
    const tokens_t common = prompt(on.model, 1, half);
    const tokens_t x = joined(common, prompt(on.model, 2, on.count - half));
    const tokens_t y = joined(common, prompt(on.model, 3, on.count - half));
    const tokens_t b = prompt(on.model, 4, on.count);
    decode_all(of, one.ctx, one.tier, 0, x);

    kvt_llama_attached_t at = attach(one.tier, 0, y);
    const size_t shared = half / 32 * 32;
    std::printf("%-14s y: %u of %zu reused\n", of.name, at.reused_tokens, y.size());
    CHECK(on.has_states || at.reused_tokens >= shared);
    go_on(of, one.ctx, 0, y, at.reused_tokens);
    commit(one.tier, 0, y);

    at = attach(one.tier, 0, x);
    CHECK(at.refused == KVT_OK && at.reused_tokens == last);
    agree(of, "branch", go_on(of, one.ctx, 0, x, last), reference(on, of, x, last, x), false);
    commit(one.tier, 0, x);

    at = attach(one.tier, 0, b);
    CHECK(at.reused_tokens == 0);
    go_on(of, one.ctx, 0, b, 0);
    commit(one.tier, 0, b);

    // A comes back with a question more: all of it is there, the end that fills no chunk too.
    const tokens_t more = joined(x, prompt(on.model, 7, 20));
    at = attach(one.tier, 0, more);
    const bool tails = has_scratch(of) || llama_model_is_recurrent(on.model);
    std::printf("%-14s A again: %u of %zu reused\n", of.name, at.reused_tokens, x.size());
    CHECK(at.refused == KVT_OK && at.reused_tokens == (tails ? x.size() : x.size() / 32 * 32));
    const logits_t with = go_on(of, one.ctx, 0, more, at.reused_tokens);
    agree(of, "A B A", with, reference(on, of, x, at.reused_tokens, more), false);
}

} // namespace

int main(int argc, char **argv) {
    CHECK(argc >= 2);
    subject on{nullptr, model_path(argv[1]), false, false, argc > 2 ? size_t(std::atoi(argv[2])) : 300};
    on.model = load(on.path);
    on.has_states = llama_model_is_recurrent(on.model) || llama_model_is_hybrid(on.model);
    on.has_windows = llama_model_n_swa(on.model) > 0;
    std::vector<variant> all = {
        {"flash", {}}, {"no flash", {}}, {"q8_0", {}}, {"not unified", {}}, {"one sequence", {}}};
    all[1].is.flash = false;
    all[2].is.kv = GGML_TYPE_Q8_0;
    all[3].is.unified = false;
    all[4].is.n_seq = 1;
    for (const variant &of : all) {
        if (argc <= 3 || std::strcmp(argv[3], of.name) == 0) {
            stories(on, of);
            restart(on, of);
        }
    }
    llama_model_free(on.model);
    return 0;
}
