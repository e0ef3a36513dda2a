// Block selection by masks: selected tokens give the same logits as without a policy, masked tokens have the
// effect of removed ones.
#include "watched.hpp"

using namespace watch_test;

namespace {

constexpr size_t n_prompt = 200, n_all = 240;

// Logits of each token after the prompt, without a watch.
std::vector<std::vector<float>> plain(llama_model *model, const std::vector<llama_token> &tokens,
                                      const llama_context_params &p) {
    context_ptr ctx = open(model, p);
    std::vector<std::vector<float>> out;
    CHECK(decode(ctx.get(), tokens, 0, n_prompt));
    for (size_t i = n_prompt; i < n_all; i++) {
        CHECK(decode(ctx.get(), tokens, i, i + 1));
        out.push_back(logits(ctx.get()));
    }
    return out;
}

void unreached_budget_changes_nothing(llama_model *model, bool flash, const char *spec, uint32_t block) {
    const std::vector<llama_token> tokens = random_tokens(model, n_all);
    const auto expected = plain(model, tokens, params(1024, flash));
    watched w(model, params(1024, flash));
    CHECK(w.policy(0, spec, block) == KVT_OK);
    CHECK(w.decode(tokens, 0, n_prompt) == KVT_OK);
    size_t equal = 0;
    for (size_t i = n_prompt; i < n_all; i++) {
        CHECK(w.decode(tokens, i, i + 1) == KVT_OK && w.rc == 0);
        equal += logits(w.ctx.get()) == expected[i - n_prompt];
    }
    CHECK(equal == expected.size());
    CHECK(w.stats().sparse_tokens == n_all - n_prompt && w.stats().masked_cells == 0);
    CHECK(w.stats().ended == 0 && kvt_llama_watch_fault(w.watch, nullptr) == KVT_OK);
    CHECK(w.is_exact());
}

// A custom policy that selects every second block, and the last one.
kvt_status_t select_even_blocks(void *, uint32_t, const kvt_rows_t *, const uint32_t *candidates, uint64_t n,
                       const kvt_sparse_context_t *, uint32_t *ids, uint64_t *count_out) {
    *count_out = 0;
    for (uint64_t i = 0; i < n; i++) {
        if (candidates[i] % 2 == 0 || i + 1 == n) {
            ids[(*count_out)++] = candidates[i];
        }
    }
    return KVT_OK;
}

kvt_status_t ignore_keys(void *, uint32_t, uint32_t, uint32_t, const kvt_rows_t *) {
    return KVT_OK;
}

void count_destroy(void *user_data) {
    ++*static_cast<int *>(user_data);
}

kvt_sparse_custom_t even_blocks_policy(const kvt_sparse_traits_t &traits, int &released) {
    kvt_sparse_custom_t custom = KVT_SPARSE_CUSTOM_INIT;
    custom.traits = &traits;
    custom.on_prefill_offload = ignore_keys;
    custom.select_blocks = select_even_blocks;
    custom.user_data = &released;
    custom.destroy = count_destroy;
    return custom;
}

kvt_status_t count_and_select_even_blocks(void *user_data, uint32_t layer, const kvt_rows_t *query,
                                          const uint32_t *candidates, uint64_t n,
                                          const kvt_sparse_context_t *context, uint32_t *ids,
                                          uint64_t *count_out) {
    ++*static_cast<int *>(user_data);
    return select_even_blocks(nullptr, layer, query, candidates, n, context, ids, count_out);
}

kvt_sparse_traits_t even_blocks_traits() {
    kvt_sparse_traits_t traits = KVT_SPARSE_TRAITS_INIT;
    traits.caps = KVT_SPARSE_LOAD_DECODE;
    traits.needs = KVT_NEEDS_KEYS | KVT_NEEDS_QUERIES;
    traits.scope = KVT_SCOPE_LAYER;
    traits.granularity = KVT_GRANULARITY_BLOCK;
    traits.flags = KVT_SPARSE_SELECTS;
    return traits;
}

// With keep_tokens, a layer asks the policy every few tokens, and sees blocks completed since.
void kept_choices_serve_later_tokens(llama_model *model, bool flash) {
    constexpr size_t n_steps = 8; // no block is completed in these
    const std::vector<llama_token> tokens = random_tokens(model, n_all, 9);
    const kvt_sparse_traits_t traits = even_blocks_traits();
    std::vector<std::vector<float>> expected;
    for (const uint32_t keep : {1u, 4u}) {
        int calls = 0;
        kvt_sparse_custom_t custom = even_blocks_policy(traits, calls);
        custom.select_blocks = count_and_select_even_blocks;
        custom.destroy = nullptr;
        watched w(model, params(1024, flash));
        kvt_llama_sparse_opts_t opts = {};
        opts.custom = &custom;
        opts.keep_tokens = keep;
        CHECK(kvt_llama_watch_policy(w.watch, 0, &opts, &w.why) == KVT_OK);
        CHECK(w.decode(tokens, 0, n_prompt) == KVT_OK);
        for (size_t i = n_prompt; i < n_all; i++) {
            CHECK(w.decode(tokens, i, i + 1) == KVT_OK);
            if (i >= n_prompt + n_steps) {
                continue;
            }
            if (keep == 1) {
                expected.push_back(logits(w.ctx.get()));
            } else {
                CHECK(logits(w.ctx.get()) == expected[i - n_prompt]);
            }
        }
        const kvt_llama_watch_stats_t stats = w.stats();
        const uint64_t all = (n_all - n_prompt) * (uint64_t) llama_model_n_layer(model);
        CHECK(stats.sparse_layers == all && (uint64_t) calls + stats.kept_layers == all);
        CHECK(keep == 1 ? !stats.kept_layers : stats.kept_layers >= all * 7 / 10);
        CHECK(!w.is_exact() && stats.masked_cells > 0);
    }
    // Kept choices of everything change nothing.
    watched w(model, params(1024, flash));
    CHECK(w.policy(0, "quest(budget=4096, dense=0)", 0, 0, 4) == KVT_OK);
    CHECK(w.decode(tokens, 0, n_prompt) == KVT_OK);
    for (size_t i = n_prompt; i < n_all; i++) {
        CHECK(w.decode(tokens, i, i + 1) == KVT_OK);
    }
    CHECK(w.is_exact() && w.stats().masked_cells == 0);
}

// Blocks masked in every layer equal blocks removed from a sequence without a watch. A second sequence
// keeps the removed cells in use, so that new tokens do not reuse them in another order.
void masked_blocks_equal_removed_blocks(llama_model *model, llama_context_params p) {
    constexpr size_t block = 16;
    const std::vector<llama_token> tokens = random_tokens(model, n_all, 7);
    int released = 0;
    {
        watched w(model, p);
        const kvt_sparse_traits_t traits = even_blocks_traits();
        const kvt_sparse_custom_t custom = even_blocks_policy(traits, released);
        kvt_llama_sparse_opts_t opts = {};
        opts.custom = &custom;
        CHECK(kvt_llama_watch_policy(w.watch, 0, &opts, &w.why) == KVT_OK);
        CHECK(w.decode(tokens, 0, n_prompt) == KVT_OK && w.is_exact());
        context_ptr other = open(model, p);
        CHECK(decode(other.get(), tokens, 0, n_prompt));
        llama_memory_seq_cp(llama_get_memory(other.get()), 0, 1, -1, -1);
        const auto full = plain(model, tokens, p);
        size_t equal = 0, differs_from_all = 0, removed = 0;
        for (size_t i = n_prompt; i < n_all; i++) {
            for (; (removed + 2) * block <= i; removed++) {
                if (removed % 2 == 1) {
                    CHECK(llama_memory_seq_rm(llama_get_memory(other.get()), 1,
                                              (llama_pos) (removed * block),
                                              (llama_pos) ((removed + 1) * block)));
                }
            }
            CHECK(w.decode(tokens, i, i + 1) == KVT_OK);
            CHECK(decode(other.get(), tokens, i, i + 1, 1));
            equal += logits(w.ctx.get()) == logits(other.get());
            differs_from_all += logits(w.ctx.get()) != full[i - n_prompt];
        }
        CHECK(equal == n_all - n_prompt);
        CHECK(differs_from_all == n_all - n_prompt);
        const kvt_llama_watch_stats_t stats = w.stats();
        CHECK(stats.sparse_layers == (n_all - n_prompt) * (uint64_t) llama_model_n_layer(model));
        CHECK(stats.masked_cells > 0 && stats.masked_cells < stats.seen_cells);
        CHECK(released == 0);

        // Removing the policy does not make the sequence exact again; clearing the sequence does.
        CHECK(!w.is_exact() && w.evicted() == 0);
        CHECK(w.policy(0, nullptr) == KVT_OK && !w.is_exact() && w.is_exact(1));
        llama_memory_clear(llama_get_memory(w.ctx.get()), true);
        CHECK(w.decode(tokens, 0, n_prompt) == KVT_OK && w.is_exact());
    }
    CHECK(released == 1);
}

// A policy that selects by queries of an earlier layer cannot serve the first layer.
void layers_without_earlier_queries_see_all(llama_model *model) {
    const std::vector<llama_token> tokens = random_tokens(model, n_all, 7);
    const uint64_t layers = (uint64_t) llama_model_n_layer(model);
    int released = 0;
    watched w(model, params(1024, true));
    kvt_sparse_traits_t traits = KVT_SPARSE_TRAITS_INIT;
    traits.caps = KVT_SPARSE_LOAD_DECODE;
    traits.needs = KVT_NEEDS_KEYS | KVT_NEEDS_QUERIES;
    traits.scope = KVT_SCOPE_LAYER;
    traits.granularity = KVT_GRANULARITY_BLOCK;
    traits.flags = KVT_SPARSE_SELECTS;
    traits.ahead = 1;
    const kvt_sparse_custom_t custom = even_blocks_policy(traits, released);
    kvt_llama_sparse_opts_t opts = KVT_LLAMA_SPARSE_OPTS_INIT;
    opts.custom = &custom;
    CHECK(kvt_llama_watch_policy(w.watch, 0, &opts, &w.why) == KVT_OK);
    CHECK(w.decode(tokens, 0, n_prompt) == KVT_OK);
    CHECK(w.decode(tokens, n_prompt, n_prompt + 1) == KVT_OK && w.rc == 0);
    CHECK(w.stats().sparse_layers == layers - 1);
}

// Quest in one sequence does not change the logits of another sequence.
void other_sequences_are_unchanged(llama_model *model, bool flash, bool unified) {
    const std::vector<llama_token> a = random_tokens(model, n_all, 3), b = random_tokens(model, n_all, 4);
    llama_context_params p = params(unified ? 1024 : 4096, flash);
    p.kv_unified = unified;
    watched w(model, p);
    CHECK(w.policy(1, "quest(budget=64, share=bound, dense=0)") == KVT_OK);
    context_ptr other = open(model, p);
    CHECK(w.decode(a, 0, n_prompt, 0) == KVT_OK && w.decode(b, 0, n_prompt, 1) == KVT_OK);
    CHECK(decode(other.get(), a, 0, n_prompt, 0) && decode(other.get(), b, 0, n_prompt, 1));
    size_t equal = 0, same = 0;
    for (size_t i = n_prompt; i < n_all; i++) {
        CHECK(w.decode(a, i, i + 1, 0) == KVT_OK && decode(other.get(), a, i, i + 1, 0));
        equal += logits(w.ctx.get()) == logits(other.get());
        CHECK(w.decode(b, i, i + 1, 1) == KVT_OK && decode(other.get(), b, i, i + 1, 1));
        same += logits(w.ctx.get()) == logits(other.get());
    }
    CHECK(equal == n_all - n_prompt);
    CHECK(same < n_all - n_prompt);
    CHECK(w.stats().masked_cells > 0 && w.stats().sparse_tokens == n_all - n_prompt);
}

// A state of another sequence is restored over this one; later the end is truncated and decoded again.
void replaced_and_truncated_sequences_are_followed(llama_model *model, bool flash) {
    const char *spec = "quest(budget=64, share=bound, dense=0)";
    const std::vector<llama_token> a = random_tokens(model, n_all, 5), b = random_tokens(model, n_all, 6);
    context_ptr maker = open(model, params(1024, flash));
    CHECK(decode(maker.get(), b, 0, n_prompt));
    std::vector<uint8_t> blob(llama_state_seq_get_size(maker.get(), 0));
    CHECK(llama_state_seq_get_data(maker.get(), blob.data(), blob.size(), 0) == blob.size());

    watched w(model, params(1024, flash)), fresh(model, params(1024, flash));
    CHECK(w.policy(0, spec) == KVT_OK && fresh.policy(0, spec) == KVT_OK);
    CHECK(w.decode(a, 0, n_prompt) == KVT_OK);
    for (size_t i = n_prompt; i < n_all; i++) {
        CHECK(w.decode(a, i, i + 1) == KVT_OK);
    }
    for (watched *one : {&w, &fresh}) {
        llama_memory_clear(llama_get_memory(one->ctx.get()), true);
        CHECK(llama_state_seq_set_data(one->ctx.get(), blob.data(), blob.size(), 0) == blob.size());
    }
    size_t equal = 0;
    for (size_t i = n_prompt; i < n_all; i++) {
        CHECK(w.decode(b, i, i + 1) == KVT_OK && fresh.decode(b, i, i + 1) == KVT_OK);
        equal += logits(w.ctx.get()) == logits(fresh.ctx.get());
    }
    CHECK(equal == n_all - n_prompt);
    CHECK(w.stats().rebuilds == 1 && fresh.stats().rebuilds == 0);

    // Truncates into the prompt and decodes the same tokens again.
    const std::vector<float> last = logits(w.ctx.get());
    CHECK(llama_memory_seq_rm(llama_get_memory(w.ctx.get()), 0, n_prompt - 40, -1));
    CHECK(w.decode(b, n_prompt - 40, n_prompt) == KVT_OK);
    for (size_t i = n_prompt; i < n_all; i++) {
        CHECK(w.decode(b, i, i + 1) == KVT_OK);
    }
    // Tokens decoded in another batch differ in their last bits.
    const std::vector<float> again = logits(w.ctx.get());
    float max_difference = 0;
    for (size_t i = 0; i < last.size() && i < again.size(); i++) {
        max_difference = std::max(max_difference, std::abs(last[i] - again[i]));
    }
    std::printf("  after truncating and decoding again: %g\n", max_difference);
    CHECK(w.stats().ended == 0 && w.stats().rebuilds == 1);
}

// Audits measure the attention in the selected blocks. Selection by earlier queries works.
void larger_budget_has_more_attention(llama_model *model) {
    const std::vector<llama_token> tokens = random_tokens(model, n_all, 8);
    double masses[2];
    const char *const specs[] = {"quest(budget=160, share=bound, dense=0)",
                                 "quest(budget=48, share=bound, dense=0)"};
    for (int i = 0; i < 2; i++) {
        watched w(model, params(1024, false));
        CHECK(w.policy(0, specs[i], 16, 4) == KVT_OK);
        CHECK(w.decode(tokens, 0, n_prompt) == KVT_OK);
        for (size_t t = n_prompt; t < n_all; t++) {
            CHECK(w.decode(tokens, t, t + 1) == KVT_OK);
        }
        const kvt_llama_watch_stats_t stats = w.stats();
        const uint64_t n = (n_all - n_prompt) / 4 * (uint64_t) llama_model_n_layer(model);
        CHECK(stats.audited_layers == n);
        masses[i] = (double) stats.audited_mass / 1e6 / (double) n;
        CHECK(masses[i] > 0 && masses[i] <= 1.0001);
    }
    std::printf("  attention in selected blocks: %.3f with 160 tokens, %.3f with 48\n", masses[0], masses[1]);
    CHECK(masses[0] > masses[1]);

    watched w(model, params(1024, true));
    CHECK(w.policy(0, "predict(of=quest(budget=64, share=bound, dense=0), ahead=1)") == KVT_OK);
    CHECK(w.decode(tokens, 0, n_prompt) == KVT_OK);
    for (size_t t = n_prompt; t < n_all; t++) {
        CHECK(w.decode(tokens, t, t + 1) == KVT_OK);
    }
    CHECK(w.stats().masked_cells > 0 && w.stats().ended == 0);
}

// Only layers without a window select, once the context is longer than the budget.
void windowed_layers_are_not_masked(llama_model *model) {
    const size_t window = (size_t) llama_model_n_swa(model), n = window + 70;
    const std::vector<llama_token> tokens = random_tokens(model, n + 10, 9);
    watched w(model, params(2048, true));
    CHECK(w.policy(0, "quest(budget=64, share=bound, dense=0)") == KVT_OK);
    for (size_t at = 0; at < n; at += 256) {
        CHECK(w.decode(tokens, at, std::min(at + 256, n)) == KVT_OK);
    }
    for (size_t i = n; i < n + 10; i++) {
        CHECK(w.decode(tokens, i, i + 1) == KVT_OK && w.rc == 0);
    }
    const kvt_llama_watch_stats_t stats = w.stats();
    std::printf("  window %zu: %llu of %d layers select\n", window,
                (unsigned long long) stats.sparse_layers / 10, llama_model_n_layer(model));
    CHECK(stats.ended == 0 && stats.sparse_layers > 0 && stats.sparse_layers % 10 == 0);
    CHECK(stats.sparse_layers < 10 * (uint64_t) llama_model_n_layer(model));
    CHECK(stats.seen_cells > stats.sparse_layers * window);
}

} // namespace

int main() {
    int models = 0;
    for (const char *name : {"tiny-llama-f16.gguf", "tiny-moe.gguf", "smollm2.gguf"}) {
        model_ptr model = load(name);
        if (!model) {
            continue;
        }
        models++;
        std::printf("%s\n", name);
        // The real model runs the two main tests; the others run on tiny models.
        if (name[0] != 't') {
            unreached_budget_changes_nothing(model.get(), true, "quest(budget=4096)", 0);
            masked_blocks_equal_removed_blocks(model.get(), params(1024, true));
            continue;
        }
        for (const bool flash : {false, true}) {
            unreached_budget_changes_nothing(model.get(), flash, "quest(budget=4096)", 0);
            unreached_budget_changes_nothing(model.get(), flash, "full", 16);
            masked_blocks_equal_removed_blocks(model.get(), params(1024, flash));
            layers_without_earlier_queries_see_all(model.get());
            other_sequences_are_unchanged(model.get(), flash, true);
            other_sequences_are_unchanged(model.get(), flash, false);
            replaced_and_truncated_sequences_are_followed(model.get(), flash);
            kept_choices_serve_later_tokens(model.get(), flash);
        }
        // 8-bit keys are read, too.
        llama_context_params p = params(1024, true);
        p.type_k = p.type_v = GGML_TYPE_Q8_0;
        masked_blocks_equal_removed_blocks(model.get(), p);
        larger_budget_has_more_attention(model.get());
    }
    // Models with windowed layers.
    for (const char *name : {"tiny-swa.gguf", "gemma3.gguf"}) {
        model_ptr model = load(name);
        if (!model) {
            continue;
        }
        models++;
        std::printf("%s\n", name);
        if (name[0] == 't') {
            unreached_budget_changes_nothing(model.get(), false, "quest(budget=4096)", 0);
            unreached_budget_changes_nothing(model.get(), true, "quest(budget=4096)", 0);
        }
        windowed_layers_are_not_masked(model.get());
    }
    if (!models && !failures) {
        skip("no model in KVTIER_LLAMA_MODELS");
    }
    return failures != 0;
}
