// A restored prompt gives the logits of a decoded prompt, for every kind of context. Restores are full or
// partial, from memory or a reopened disk, with branches, and in the order A, B, A. Logits are bitwise equal if
// batches and cells are equal. Earlier requests move cells, which changes the order of sums.
#include "common/engine.hpp"
#include "fixture.hpp"

using namespace tier_test;

namespace {

struct variant {
    const char *name;
    context_config config;
};

struct test_model {
    llama_model *model;
    std::string path;
    bool has_states, has_windows;
    size_t count;
};

void check_logits(const variant &v, const char *what, const logits_t &with_tier, const logits_t &without_tier,
                  bool exact) {
    const double relative = relative_distance(with_tier, without_tier);
    const bool same = bitwise_equal(with_tier, without_tier);
    std::printf("%-14s %-16s %s (%g)\n", v.name, what, same ? "bitwise equal" : "close", relative);
    CHECK(exact ? same : relative <= tolerance);
}

bool has_scratch_seq(const variant &v) { return v.config.unified && v.config.n_seq > 1; }

kvt_llama_tier_opts_t options(const test_model &m, const llama_context_params *params) {
    kvt_llama_tier_opts_t opts = KVT_LLAMA_TIER_OPTS_INIT;
    opts.model_path = m.path.c_str();
    opts.host_bytes = uint64_t(256) << 20;
    opts.params = params;
    return opts;
}

/// Decodes a prompt, with or without a tier. Batches end at multiples of n_batch and at the last chunk.
void decode_all(const variant &v, llama_context *ctx, kvt_llama_tier_t *tier, llama_seq_id seq,
                const tokens_t &tokens) {
    const size_t last = (tokens.size() - 1) / 32 * 32;
    for (size_t at = 0; at < tokens.size();) {
        size_t end = std::min(at + v.config.n_batch, tokens.size());
        end = at < last ? std::min(end, last) : end;
        CHECK(decode(ctx, seq, tokens, at, end, v.config.n_batch) == 0);
        at = end;
        if (tier) {
            CHECK_OK(kvt_llama_commit(tier, seq, tokens.data(), at, &why));
        }
    }
}

/// The run without a tier: decodes `first`, truncates to `keep`, then decodes the rest of `then`.
logits_t reference(const test_model &m, const variant &v, const tokens_t &first, size_t keep,
                   const tokens_t &then) {
    llama_context *ctx = context(m.model, v.config);
    if (m.has_states) {
        const tokens_t start(first.begin(), first.begin() + keep);
        CHECK(decode(ctx, 0, start, 0, keep, v.config.n_batch) == 0);
    } else if (keep != 0) {
        decode_all(v, ctx, nullptr, 0, first);
        CHECK(llama_memory_seq_rm(llama_get_memory(ctx), 0, llama_pos(keep), -1));
    }
    CHECK(decode(ctx, 0, then, keep, then.size(), v.config.n_batch) == 0);
    const logits_t out = logits(ctx);
    llama_free(ctx);
    return out;
}

logits_t continue_decode(const variant &v, llama_context *ctx, llama_seq_id seq, const tokens_t &tokens,
                         size_t at) {
    CHECK(decode(ctx, seq, tokens, at, tokens.size(), v.config.n_batch) == 0);
    return logits(ctx);
}

/// A new context and its tier.
struct open_context {
    llama_context_params params;
    llama_context *ctx;
    kvt_llama_tier_t *tier;
    open_context(const test_model &m, const variant &v, const std::string *disk_path)
        : params(params_of(v.config)) {
        kvt_llama_tier_opts_t opts = options(m, &params);
        if (disk_path) {
            opts.disk_path = disk_path->c_str();
            opts.disk_bytes = uint64_t(512) << 20;
        }
        ctx = context(m.model, v.config);
        tier = open_tier(ctx, opts);
    }
    ~open_context() {
        CHECK(stats(tier).failed_saves == 0 && stats(tier).refused_restores == 0);
        close_tier(&tier);
        llama_free(ctx);
    }
};

/// Restores the same prompt and a prompt that shares two thirds of it.
void reopened_store_restores_prefixes(const test_model &m, const variant &v) {
    temp_dir dir;
    const tokens_t whole = prompt(m.model, 5, m.count);
    tokens_t other(whole.begin(), whole.begin() + m.count * 2 / 3);
    other = concat(other, prompt(m.model, 6, 40));
    {
        open_context one(m, v, &dir.path);
        decode_all(v, one.ctx, one.tier, 0, whole);
        flush(one.tier);
    }
    // With windows masked cells are not restored, so that cells differ.
    const bool exact = !m.has_windows;
    const size_t last = (m.count - 1) / 32 * 32;
    {
        open_context one(m, v, &dir.path);
        const llama_seq_id seq = v.config.n_seq > 2 ? 1 : 0;
        const kvt_llama_attached_t at = attach(one.tier, seq, whole);
        CHECK(at.refused == KVT_OK && at.reused_tokens == last && at.disk_tokens == last);
        const logits_t with_tier = continue_decode(v, one.ctx, seq, whole, at.reused_tokens);
        check_logits(v, "restart", with_tier, reference(m, v, whole, last, whole), exact);
    }
    if (has_scratch_seq(v) && !m.has_windows) {
        open_context one(m, v, &dir.path);
        const size_t part = m.has_states ? v.config.n_batch : last / 64 * 32;
        tokens_t first(whole.begin(), whole.begin() + part + 1);
        CHECK(attach(one.tier, 0, first).reused_tokens == part);
        const kvt_llama_attached_t at = attach(one.tier, 0, whole);
        CHECK(at.refused == KVT_OK && at.reused_tokens == last);
        CHECK(at.kept_tokens == part && at.disk_tokens == last - part);
        const logits_t with_tier = continue_decode(v, one.ctx, 0, whole, at.reused_tokens);
        check_logits(v, "in two parts", with_tier, reference(m, v, whole, last, whole), exact);
    }
    {
        open_context one(m, v, &dir.path);
        const kvt_llama_attached_t at = attach(one.tier, 0, other);
        const size_t common = m.count * 2 / 3 / 32 * 32;
        // A state exists only where a batch ended. If whole sequences are copied, the same holds for a
        // window: only its end is stored.
        const size_t end = common >= v.config.n_batch ? v.config.n_batch : 0;
        const size_t want = m.has_states || (m.has_windows && !has_scratch_seq(v)) ? end : common;
        std::printf("%-14s part: %u of %zu reused\n", v.name, at.reused_tokens, other.size());
        CHECK(at.refused == KVT_OK && at.reused_tokens == want);
        const logits_t with_tier = continue_decode(v, one.ctx, 0, other, at.reused_tokens);
        check_logits(v, "part", with_tier, reference(m, v, whole, want, other), exact);
    }
}

/// P+x, P+y, P+x, then A, B, A, in one sequence: a cache of whole sequences reuses nothing here.
void branches_and_returning_prompts_are_reused(const test_model &m, const variant &v) {
    open_context one(m, v, nullptr);
    const size_t half = m.count / 2, last = (m.count - 1) / 32 * 32;
    const tokens_t common = prompt(m.model, 1, half);
    const tokens_t x = concat(common, prompt(m.model, 2, m.count - half));
    const tokens_t y = concat(common, prompt(m.model, 3, m.count - half));
    const tokens_t b = prompt(m.model, 4, m.count);
    decode_all(v, one.ctx, one.tier, 0, x);

    kvt_llama_attached_t at = attach(one.tier, 0, y);
    const size_t shared = half / 32 * 32;
    std::printf("%-14s y: %u of %zu reused\n", v.name, at.reused_tokens, y.size());
    CHECK(m.has_states || at.reused_tokens >= shared);
    continue_decode(v, one.ctx, 0, y, at.reused_tokens);
    commit(one.tier, 0, y);

    at = attach(one.tier, 0, x);
    CHECK(at.refused == KVT_OK && at.reused_tokens == last);
    check_logits(v, "branch", continue_decode(v, one.ctx, 0, x, last), reference(m, v, x, last, x), false);
    commit(one.tier, 0, x);

    at = attach(one.tier, 0, b);
    CHECK(at.reused_tokens == 0);
    continue_decode(v, one.ctx, 0, b, 0);
    commit(one.tier, 0, b);

    // A returns with 20 more tokens: all of A is reused, including its incomplete last chunk.
    const tokens_t more = concat(x, prompt(m.model, 7, 20));
    at = attach(one.tier, 0, more);
    const bool tails = has_scratch_seq(v) || llama_model_is_recurrent(m.model);
    std::printf("%-14s A again: %u of %zu reused\n", v.name, at.reused_tokens, x.size());
    CHECK(at.refused == KVT_OK && at.reused_tokens == (tails ? x.size() : x.size() / 32 * 32));
    const logits_t with_tier = continue_decode(v, one.ctx, 0, more, at.reused_tokens);
    check_logits(v, "A B A", with_tier, reference(m, v, x, at.reused_tokens, more), false);
}

/// Leaves every other eight cells of the context free.
void scatter_free_cells(const test_model &m, const variant &v, llama_context *ctx) {
    const tokens_t filler = prompt(m.model, 9, v.config.n_ctx / 2);
    for (size_t at = 0; at < filler.size(); at += 8) {
        for (llama_seq_id seq = 1; seq < 3; seq++) {
            CHECK(decode(ctx, seq, filler, at, at + 8, 8) == 0);
        }
    }
    CHECK(llama_memory_seq_rm(llama_get_memory(ctx), 1, -1, -1));
}

/// A restore copies from the store into the cache if its cells are in a row, else through buffers.
void restores_into_scattered_cells_pass_through_buffers(const test_model &m) {
    variant v = {"in place", {}};
    v.config.n_ctx = uint32_t(2 * m.count / 256 + 1) * 256;
    const tokens_t whole = prompt(m.model, 8, m.count);
    const size_t last = (m.count - 1) / 32 * 32;
    open_context one(m, v, nullptr);
    decode_all(v, one.ctx, one.tier, 0, whole);
    flush(one.tier);
    for (const bool scattered : {false, true}) {
        CHECK_OK(kvt_llama_forget(one.tier, 0));
        llama_memory_clear(llama_get_memory(one.ctx), true);
        if (scattered) {
            scatter_free_cells(m, v, one.ctx);
        }
        const uint64_t before = stats(one.tier).in_place_bytes;
        const kvt_llama_attached_t at = attach(one.tier, 0, whole);
        const uint64_t in_place = stats(one.tier).in_place_bytes - before;
        CHECK(at.refused == KVT_OK && at.reused_tokens == last);
        CHECK(in_place == (scattered || !(KVTIER_TEST_IN_PLACE && KVTIER_LLAMA_TENSOR_READER) ? 0 : at.bytes));
        const logits_t with_tier = continue_decode(v, one.ctx, 0, whole, last);
        check_logits(v, scattered ? "scattered" : "in a row", with_tier, reference(m, v, whole, last, whole),
                     !scattered);
    }
}

} // namespace

int main(int argc, char **argv) {
    CHECK(argc >= 2);
    test_model m{nullptr, model_path(argv[1]), false, false, argc > 2 ? size_t(std::atoi(argv[2])) : 300};
    m.model = load(m.path);
    m.has_states = llama_model_is_recurrent(m.model) || llama_model_is_hybrid(m.model);
    m.has_windows = llama_model_n_swa(m.model) > 0;
    std::vector<variant> variants = {
        {"flash", {}}, {"no flash", {}}, {"q8_0", {}}, {"not unified", {}}, {"one sequence", {}}};
    variants[1].config.flash = false;
    variants[2].config.kv = GGML_TYPE_Q8_0;
    variants[3].config.unified = false;
    variants[4].config.n_seq = 1;
    for (const variant &v : variants) {
        if (argc <= 3 || std::strcmp(argv[3], v.name) == 0) {
            branches_and_returning_prompts_are_reused(m, v);
            reopened_store_restores_prefixes(m, v);
        }
    }
    if (!m.has_states && !m.has_windows) {
        restores_into_scattered_cells_pass_through_buffers(m);
    }
    llama_model_free(m.model);
    return 0;
}
