// A sequence longer than the cache gives the bits of a large cache whose masks hide the same tokens. A
// sequence that fits gives the bits of the engine alone.
#include "longer.hpp"

using namespace watch_test;

namespace {

// At least 512 cells: with fewer, the CPU kernel adds in another order.
constexpr uint32_t cells = 512, many = 1280;
constexpr size_t prompt = 1024, steps = 16;

llama_context_params one_thread(uint32_t n_ctx) {
    llama_context_params p = params(n_ctx, true);
    p.n_ubatch = 128;
    return p;
}

// Bits are equal up to the last cell.
void full_cache_gives_the_engines_bits(llama_model *model, const std::vector<llama_token> &text) {
    context_ptr plain = open(model, one_thread(cells));
    longer_context s = open_longer(model, KVT_LLAMA_LONGER_OPTS_INIT, one_thread(cells));
    if (!s.longer) {
        return;
    }
    CHECK(decode(plain.get(), text, 0, cells - 6));
    CHECK(decode_longer(s, text.data(), cells - 6));
    CHECK(same_bits(logits(plain.get()), logits(s.ctx.get())));
    for (size_t i = cells - 6; i < cells; i++) {
        CHECK(decode(plain.get(), text, i, i + 1));
        CHECK(decode_longer(s, text.data() + i, 1));
        CHECK(same_bits(logits(plain.get()), logits(s.ctx.get())));
    }
    kvt_llama_longer_stats_t stats = stats_of(s);
    CHECK(stats.tokens == cells && stats.stored_tokens == 0 && stats.saved_bytes == 0 &&
          stats.choices == 0);
    // The engine alone has no cell for the next token.
    CHECK(!decode(plain.get(), text, cells, cells + 1));
    CHECK(decode_longer(s, text.data() + cells, 1));
    stats = stats_of(s);
    CHECK(stats.tokens == cells + 1 && stats.stored_tokens > 0 && stats.sparse_tokens == 1);
    CHECK(stats.choices == (uint64_t) llama_model_n_layer(model));
}

struct mode {
    const char *name;
    ggml_type type; // of the cache
    bool measures;  // real text through a trained model
    const char *spec;
    uint32_t flags;
};

// Decodes one more token in both contexts; logits must be equal.
bool step_of(longer_context &big, longer_context &small, masked_reference &reference, llama_token token,
             bool measures) {
    CHECK(decode_longer(small, &token, 1));
    const std::vector<float> ours = logits(small.ctx.get());
    const kvt_llama_longer_stats_t stats = stats_of(small);
    for (size_t il = 0; il < reference.chosen.size(); il++) {
        reference.chosen[il] = chosen_of(small, (uint32_t) il);
        CHECK(!reference.chosen[il].empty() &&
              reference.chosen[il].size() <= stats.slot_cells / reference.block);
    }
    reference.sinks = (uint32_t) stats.sink_cells;
    reference.window_first = (uint32_t) (stats.sink_cells + stats.stored_tokens);
    reference.tokens = (uint32_t) stats.tokens;
    reference.applies_masks = true;
    reference.measures = measures;
    CHECK(decode_longer(big, &token, 1));
    const std::vector<float> theirs = logits(big.ctx.get());
    if (!same_bits(ours, theirs)) {
        std::fprintf(stderr, "after %u tokens logits differ by up to %g\n", reference.tokens,
                     distance(ours, theirs));
        failures++;
        return false;
    }
    return true;
}

// Prefills in a large context, then continues in a small context and in the large one with masks.
void selected_blocks_equal_masks(llama_model *model, const std::vector<llama_token> &text, const mode &mode) {
    shared_store store("store(host=256MiB)");
    masked_reference reference(llama_model_n_layer(model));
    kvt_llama_longer_opts_t opts = KVT_LLAMA_LONGER_OPTS_INIT;
    opts.store = store.store;
    opts.account = store.account;
    opts.name = "a text";
    opts.model_id = "a model";
    opts.spec = mode.spec;
    llama_context_params p = one_thread(many);
    p.type_k = p.type_v = mode.type;
    llama_context_params p_small = p;
    p_small.n_ctx = cells;
    p.cb_eval = masked_reference::on_node;
    p.cb_eval_user_data = &reference;
    longer_context big = open_longer(model, opts, p);
    opts.flags = mode.flags | KVT_LLAMA_LONGER_ORDERED;
    longer_context small = open_longer(model, opts, p_small);
    if (!big.longer || !small.longer || !decode_longer(big, text.data(), prompt)) {
        return;
    }
    kvt_llama_why_t why;
    CHECK(ok(kvt_llama_longer_save(big.longer.get(), &why), why, "save"));
    size_t found = 0;
    CHECK(ok(kvt_llama_longer_resume(small.longer.get(), text.data(), prompt + 1, &found, &why),
             why, "resume"));
    CHECK(found == prompt);
    size_t i = 0;
    while (i < steps && step_of(big, small, reference, text[prompt + i], mode.measures)) {
        i++;
    }
    const kvt_llama_longer_stats_t stats = stats_of(small);
    std::printf("%s: %zu steps after %zu tokens in %u cells equal the masks; %.2f MB per "
                "token loaded\n",
                mode.name, i, prompt, cells, (double) stats.loaded_bytes / 1e6 / (double) steps);
    CHECK(stats.loaded_blocks + stats.kept_blocks == stats.chosen_blocks);
    if (mode.measures) {
        std::printf("visible: %.3f of the attention, %.3f of the attention to blocks\n",
                    reference.share / reference.rows, reference.old_share / reference.old_rows);
        CHECK(reference.share / reference.rows > 0.8);
    }
}

// Decodes from the first token on, so that the window wraps and slots are refilled. Visible tokens then have
// another order of cells than in the large context, and sums differ in their last digits.
void token_by_token_decode_is_close_to_masks(llama_model *model, const std::vector<llama_token> &text,
                                             const char *name) {
    masked_reference reference(llama_model_n_layer(model));
    llama_context_params p = one_thread(many);
    p.cb_eval = masked_reference::on_node;
    p.cb_eval_user_data = &reference;
    context_ptr big = open(model, p);
    longer_context s = open_longer(model, KVT_LLAMA_LONGER_OPTS_INIT, one_thread(cells));
    const size_t dense_tokens = cells - 8, end = prompt;
    if (!s.longer || !decode_longer(s, text.data(), dense_tokens)) {
        return;
    }
    CHECK(decode(big.get(), text, 0, dense_tokens));
    double max_difference = 0, max_logit = 0;
    for (size_t i = dense_tokens; i < end; i++) {
        CHECK(decode_longer(s, text.data() + i, 1));
        const kvt_llama_longer_stats_t stats = stats_of(s);
        reference.applies_masks = stats.stored_tokens > 0;
        reference.sinks = (uint32_t) stats.sink_cells;
        reference.window_first = (uint32_t) (stats.sink_cells + stats.stored_tokens);
        reference.tokens = (uint32_t) stats.tokens;
        for (size_t il = 0; il < reference.chosen.size(); il++) {
            reference.chosen[il] = chosen_of(s, (uint32_t) il);
        }
        reference.found.restart();
        CHECK(decode(big.get(), text, i, i + 1));
        const std::vector<float> theirs = logits(big.get());
        max_difference = std::max(max_difference, distance(logits(s.ctx.get()), theirs));
        max_logit = std::max(max_logit, (double) std::fabs(theirs[(size_t) argmax(theirs)]));
    }
    const kvt_llama_longer_stats_t stats = stats_of(s);
    std::printf(
        "%s: %zu tokens in %u cells, one by one: logits (up to %.3g) differ by up to %.3g\n", name,
        (size_t) stats.tokens, cells, max_logit, max_difference);
    CHECK(stats.stored_tokens > stats.slot_cells && stats.loaded_blocks > 0 &&
          stats.kept_blocks > 0);
    CHECK(max_difference < 0.02 * max_logit);
}

// Without KVT_LLAMA_LONGER_ORDERED blocks keep their slots, so that less is loaded.
void unordered_slots_load_less_and_agree(llama_model *model, const std::vector<llama_token> &text,
            const std::vector<std::vector<float>> &full) {
    uint64_t loaded[2] = {};
    for (int ordered = 0; ordered < 2; ordered++) {
        kvt_llama_longer_opts_t opts = KVT_LLAMA_LONGER_OPTS_INIT;
        opts.flags = ordered ? KVT_LLAMA_LONGER_ORDERED : 0;
        longer_context s = open_longer(model, opts, one_thread(cells));
        if (!s.longer || !decode_longer(s, text.data(), prompt)) {
            return;
        }
        size_t same = 0;
        for (size_t i = 0; i < full.size(); i++) {
            CHECK(decode_longer(s, text.data() + prompt + i, 1));
            same += argmax(logits(s.ctx.get())) == argmax(full[i]);
        }
        const kvt_llama_longer_stats_t stats = stats_of(s);
        loaded[ordered] = stats.loaded_bytes;
        CHECK(stats.tokens == prompt + full.size());
        CHECK(stats.dense_tokens == cells &&
              stats.dense_tokens + stats.sparse_tokens == stats.tokens);
        CHECK(stats.saved_tokens >= stats.stored_tokens && stats.failed_parts == 0);
        std::printf(
            "prompt and text in %u cells%s: %zu of %zu next tokens are those of full attention\n",
            cells, ordered ? ", ordered" : "", same, full.size());
        CHECK(same * 2 > full.size());
    }
    CHECK(loaded[0] < loaded[1]);
}

// The tests on a trained model.
void trained_model(int argc, char **argv) {
    model_ptr model = load("smollm2.gguf");
    if (!model) {
        skip("no smollm2.gguf: bindings/llama.cpp/models.sh fetches it");
    }
    const std::vector<llama_token> text = text_of(model.get(), argc, argv, prompt + steps + 1);
    full_cache_gives_the_engines_bits(model.get(), text);
    selected_blocks_equal_masks(model.get(), text, {"smollm2", GGML_TYPE_F16, true, nullptr, 0});
    std::vector<std::vector<float>> full;
    context_ptr big = open(model.get(), one_thread(many));
    CHECK(decode(big.get(), text, 0, prompt));
    for (size_t i = 0; i < steps; i++) {
        CHECK(decode(big.get(), text, prompt + i, prompt + i + 1));
        full.push_back(logits(big.get()));
    }
    unordered_slots_load_less_and_agree(model.get(), text, full);
}

} // namespace

// longer [--trained] TEXT...
int main(int argc, char **argv) {
    if (argc > 1 && std::string(argv[1]) == "--trained") {
        trained_model(argc - 1, argv + 1);
        return failures != 0;
    }
    model_ptr model = load("tiny-llama-f16.gguf");
    if (!model) {
        skip("no tiny-llama-f16.gguf: bindings/llama.cpp/models/make.py writes it");
    }
    const std::vector<llama_token> text = text_of(model.get(), argc, argv, prompt + steps + 1);
    full_cache_gives_the_engines_bits(model.get(), text);
    selected_blocks_equal_masks(model.get(), text, {"f16", GGML_TYPE_F16, false, nullptr, 0});
    selected_blocks_equal_masks(model.get(), text,
          {"f16, staged", GGML_TYPE_F16, false, nullptr, KVT_LLAMA_LONGER_STAGED});
    selected_blocks_equal_masks(model.get(), text, {"f16, bf16 cache", GGML_TYPE_BF16, false, nullptr, 0});
    selected_blocks_equal_masks(model.get(), text, {"f16, q8_0 cache", GGML_TYPE_Q8_0, false, nullptr, 0});
    selected_blocks_equal_masks(
        model.get(), text,
        {"f16, quest", GGML_TYPE_F16, false, "quest(share=bound, page=8, budget=128, dense=0)", 0});
    token_by_token_decode_is_close_to_masks(model.get(), text, "f16");
    model_ptr experts = load("tiny-moe.gguf");
    if (experts) {
        const std::vector<llama_token> other =
            text_of(experts.get(), argc, argv, prompt + steps + 1);
        selected_blocks_equal_masks(experts.get(), other, {"experts", GGML_TYPE_F16, false, nullptr, 0});
    } else {
        std::printf("SKIP: no tiny-moe.gguf\n");
    }
    return failures != 0;
}
