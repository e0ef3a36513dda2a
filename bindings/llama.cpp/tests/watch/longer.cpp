// Sequences that are longer than the cache compute what a cache with room for all computes where
// its masks hide the same tokens; and what the engine alone computes as long as they are not
// longer.
#include "longer.hpp"

using namespace watch_test;

namespace {

// The processor's kernel adds up in another order where there are less than 512 cells.
constexpr uint32_t cells = 512, many = 1280;
constexpr size_t prompt = 1024, steps = 16;

llama_context_params one_thread(uint32_t n_ctx) {
    llama_context_params p = params(n_ctx, true);
    p.n_ubatch = 128;
    return p;
}

// Up to the last cell nothing is different from the engine alone.
void dense(llama_model *model, const std::vector<llama_token> &text) {
    context_ptr plain = open(model, one_thread(cells));
    served s = serve(model, KVT_LLAMA_LONGER_OPTS_INIT, one_thread(cells));
    if (!s.longer) {
        return;
    }
    CHECK(decode(plain.get(), text, 0, cells - 6));
    CHECK(feed(s, text.data(), cells - 6));
    CHECK(same_bits(logits(plain.get()), logits(s.ctx.get())));
    for (size_t i = cells - 6; i < cells; i++) {
        CHECK(decode(plain.get(), text, i, i + 1));
        CHECK(feed(s, text.data() + i, 1));
        CHECK(same_bits(logits(plain.get()), logits(s.ctx.get())));
    }
    kvt_llama_longer_stats_t stats = stats_of(s);
    CHECK(stats.tokens == cells && stats.stored_tokens == 0 && stats.saved_bytes == 0 &&
          stats.choices == 0);
    // The engine alone has no room for the next one.
    CHECK(!decode(plain.get(), text, cells, cells + 1));
    CHECK(feed(s, text.data() + cells, 1));
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

// One token more in both, which must be the same.
bool step_of(served &big, served &small, masked &reference, llama_token token, bool measures) {
    CHECK(feed(small, &token, 1));
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
    reference.hides = true;
    reference.measures = measures;
    CHECK(feed(big, &token, 1));
    const std::vector<float> theirs = logits(big.ctx.get());
    if (!same_bits(ours, theirs)) {
        std::fprintf(stderr, "behind %u tokens logits differ by up to %g\n", reference.tokens,
                     distance(ours, theirs));
        failures++;
        return false;
    }
    return true;
}

// Prefilled in a big context, gone on with in a small one, and in the big one with masks.
void masks(llama_model *model, const std::vector<llama_token> &text, const mode &mode) {
    shared_store store("store(host=256MiB)");
    masked reference(llama_model_n_layer(model));
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
    p.cb_eval = masked::on_node;
    p.cb_eval_user_data = &reference;
    served big = serve(model, opts, p);
    opts.flags = mode.flags | KVT_LLAMA_LONGER_ORDERED;
    served small = serve(model, opts, p_small);
    if (!big.longer || !small.longer || !feed(big, text.data(), prompt)) {
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
    std::printf("%s: %zu steps behind %zu tokens in %u cells are those of the masks; %.2f MB a "
                "token were loaded\n",
                mode.name, i, prompt, cells, (double) stats.loaded_bytes / 1e6 / (double) steps);
    CHECK(stats.loaded_blocks + stats.kept_blocks == stats.chosen_blocks);
    if (mode.measures) {
        std::printf("%.3f of the attention was seen, %.3f of that to blocks\n",
                    reference.share / reference.rows, reference.old_share / reference.old_rows);
        CHECK(reference.share / reference.rows > 0.8);
    }
}

// From the first token on, with a window that goes around and slots that are filled anew: what is
// seen lies in the cells in another order than in the big context, so sums differ in their last
// digits.
void lockstep(llama_model *model, const std::vector<llama_token> &text, const char *name) {
    masked reference(llama_model_n_layer(model));
    llama_context_params p = one_thread(many);
    p.cb_eval = masked::on_node;
    p.cb_eval_user_data = &reference;
    context_ptr big = open(model, p);
    served s = serve(model, KVT_LLAMA_LONGER_OPTS_INIT, one_thread(cells));
    const size_t dense_tokens = cells - 8, end = prompt;
    if (!s.longer || !feed(s, text.data(), dense_tokens)) {
        return;
    }
    CHECK(decode(big.get(), text, 0, dense_tokens));
    double most = 0, size = 0;
    for (size_t i = dense_tokens; i < end; i++) {
        CHECK(feed(s, text.data() + i, 1));
        const kvt_llama_longer_stats_t stats = stats_of(s);
        reference.hides = stats.stored_tokens > 0;
        reference.sinks = (uint32_t) stats.sink_cells;
        reference.window_first = (uint32_t) (stats.sink_cells + stats.stored_tokens);
        reference.tokens = (uint32_t) stats.tokens;
        for (size_t il = 0; il < reference.chosen.size(); il++) {
            reference.chosen[il] = chosen_of(s, (uint32_t) il);
        }
        reference.found.restart();
        CHECK(decode(big.get(), text, i, i + 1));
        const std::vector<float> theirs = logits(big.get());
        most = std::max(most, distance(logits(s.ctx.get()), theirs));
        size = std::max(size, (double) std::fabs(theirs[(size_t) argmax(theirs)]));
    }
    const kvt_llama_longer_stats_t stats = stats_of(s);
    std::printf(
        "%s: %zu tokens in %u cells, one by one: logits (up to %.3g) differ by up to %.3g\n", name,
        (size_t) stats.tokens, cells, size, most);
    CHECK(stats.stored_tokens > stats.slot_cells && stats.loaded_blocks > 0 &&
          stats.kept_blocks > 0);
    CHECK(most < 0.02 * size);
}

// The order of blocks in slots is all that KVT_LLAMA_LONGER_ORDERED changes.
void orders(llama_model *model, const std::vector<llama_token> &text,
            const std::vector<std::vector<float>> &full) {
    uint64_t loaded[2] = {};
    for (int ordered = 0; ordered < 2; ordered++) {
        kvt_llama_longer_opts_t opts = KVT_LLAMA_LONGER_OPTS_INIT;
        opts.flags = ordered ? KVT_LLAMA_LONGER_ORDERED : 0;
        served s = serve(model, opts, one_thread(cells));
        if (!s.longer || !feed(s, text.data(), prompt)) {
            return;
        }
        size_t same = 0;
        for (size_t i = 0; i < full.size(); i++) {
            CHECK(feed(s, text.data() + prompt + i, 1));
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

// With a model that is trained.
void trained(int argc, char **argv) {
    model_ptr model = load("smollm2.gguf");
    if (!model) {
        skip("smollm2.gguf is not there: bindings/llama.cpp/models.sh fetches it");
    }
    const std::vector<llama_token> text = text_of(model.get(), argc, argv, prompt + steps + 1);
    dense(model.get(), text);
    masks(model.get(), text, {"smollm2", GGML_TYPE_F16, true, nullptr, 0});
    std::vector<std::vector<float>> full;
    context_ptr big = open(model.get(), one_thread(many));
    CHECK(decode(big.get(), text, 0, prompt));
    for (size_t i = 0; i < steps; i++) {
        CHECK(decode(big.get(), text, prompt + i, prompt + i + 1));
        full.push_back(logits(big.get()));
    }
    orders(model.get(), text, full);
}

} // namespace

// longer [--trained] TEXT...
int main(int argc, char **argv) {
    if (argc > 1 && std::string(argv[1]) == "--trained") {
        trained(argc - 1, argv + 1);
        return failures != 0;
    }
    model_ptr model = load("tiny-llama-f16.gguf");
    if (!model) {
        skip("tiny-llama-f16.gguf is not there: bindings/llama.cpp/models/make.py makes it");
    }
    const std::vector<llama_token> text = text_of(model.get(), argc, argv, prompt + steps + 1);
    dense(model.get(), text);
    masks(model.get(), text, {"f16", GGML_TYPE_F16, false, nullptr, 0});
    masks(model.get(), text,
          {"f16, staged", GGML_TYPE_F16, false, nullptr, KVT_LLAMA_LONGER_STAGED});
    masks(model.get(), text, {"f16, bf16 cache", GGML_TYPE_BF16, false, nullptr, 0});
    masks(model.get(), text, {"f16, q8_0 cache", GGML_TYPE_Q8_0, false, nullptr, 0});
    masks(
        model.get(), text,
        {"f16, quest", GGML_TYPE_F16, false, "quest(share=bound, page=8, budget=128, dense=0)", 0});
    lockstep(model.get(), text, "f16");
    model_ptr experts = load("tiny-moe.gguf");
    if (experts) {
        const std::vector<llama_token> other =
            text_of(experts.get(), argc, argv, prompt + steps + 1);
        masks(experts.get(), other, {"experts", GGML_TYPE_F16, false, nullptr, 0});
    } else {
        std::printf("SKIP: tiny-moe.gguf is not there\n");
    }
    return failures != 0;
}
