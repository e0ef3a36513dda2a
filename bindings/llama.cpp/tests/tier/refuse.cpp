// Refusals by engine, caller or store have a status and a message, and the request continues without the
// tier.
#include "common/engine.hpp"
#include "fixture.hpp"

#include <array>

using namespace tier_test;

namespace {

using namespace_key = std::array<uint8_t, KVT_KEY_BYTES>;

struct test_model {
    llama_model *model;
    std::string path;
};

kvt_llama_tier_opts_t default_opts(const test_model &m) {
    kvt_llama_tier_opts_t opts = KVT_LLAMA_TIER_OPTS_INIT;
    opts.model_path = m.path.c_str();
    opts.host_bytes = uint64_t(64) << 20;
    return opts;
}

namespace_key key_of(const test_model &m, const context_config &config, const kvt_llama_tier_opts_t &opts) {
    llama_context *ctx = context(m.model, config);
    kvt_llama_tier_t *tier = open_tier(ctx, opts);
    namespace_key key;
    CHECK_OK(kvt_llama_tier_key(tier, key.data()));
    close_tier(&tier);
    llama_free(ctx);
    return key;
}

/// A model loaded with overrides has another key, although its metadata is that of the file.
void metadata_overrides_change_the_key(const test_model &m) {
    kvt_llama_tier_opts_t opts = default_opts(m);
    std::vector<namespace_key> all = {key_of(m, context_config{}, opts)};
    for (const double base : {20000.0, 30000.0}) {
        llama_model_kv_override list[2] = {};
        list[0].tag = LLAMA_KV_OVERRIDE_TYPE_FLOAT;
        std::strcpy(list[0].key, "llama.rope.freq_base");
        list[0].val_f64 = base;
        llama_model_params params = llama_model_default_params();
        params.kv_overrides = list;
        const test_model other{llama_model_load_from_file(m.path.c_str(), params), m.path};
        CHECK(other.model != nullptr);
        opts.model_params = &params;
        all.push_back(key_of(other, context_config{}, opts));
        CHECK(key_of(other, context_config{}, opts) == all.back());
        llama_model_free(other.model);
    }
    CHECK(all[0] != all[1] && all[0] != all[2] && all[1] != all[2]);
    llama_model_params params = llama_model_default_params();
    opts.model_params = &params;
    CHECK(key_of(m, context_config{}, opts) == all[0]);
}

/// Contexts beyond the model's original length use another RoPE. The model's length decides, not
/// yarn_orig_ctx of the context.
void context_length_changes_the_key_of_rope_scaling(const test_model &m) {
    llama_model_kv_override list[2] = {};
    list[0].tag = LLAMA_KV_OVERRIDE_TYPE_INT;
    std::strcpy(list[0].key, "llama.rope.scaling.original_context_length");
    list[0].val_i64 = 1024;
    llama_model_params params = llama_model_default_params();
    params.kv_overrides = list;
    const test_model other{llama_model_load_from_file(m.path.c_str(), params), m.path};
    CHECK(other.model != nullptr);
    kvt_llama_tier_opts_t opts = default_opts(m);
    opts.model_params = &params;
    std::vector<namespace_key> all;
    for (const uint32_t n_ctx : {512u, 1024u, 1280u, 2048u}) {
        context_config config;
        config.n_ctx = n_ctx;
        llama_context_params made = params_of(config);
        made.yarn_orig_ctx = 4096;
        opts.params = &made;
        all.push_back(key_of(other, config, opts));
    }
    CHECK(all[0] == all[1] && all[1] != all[2] && all[2] == all[3]);
    llama_model_free(other.model);
}

/// Options that change the KV change the key; other options do not.
void options_that_change_kv_change_the_key(const test_model &m) {
    metadata_overrides_change_the_key(m);
    context_length_changes_the_key_of_rope_scaling(m);
    std::vector<namespace_key> all;
    const auto add = [&](const context_config &config, const kvt_llama_tier_opts_t &opts) {
        all.push_back(key_of(m, config, opts));
    };
    context_config config;
    kvt_llama_tier_opts_t opts = default_opts(m);
    llama_context_params params = params_of(config);
    add(config, opts);
    opts.params = &params;
    CHECK(key_of(m, config, opts) == all[0]); /* equal to the defaults */
    context_config larger = config;
    larger.n_ctx = 4096;
    larger.n_seq = 8;
    larger.threads = 2;
    larger.n_batch = 64;
    CHECK(key_of(m, larger, opts) == all[0]);
    params.rope_freq_base = 12345;
    add(config, opts);
    params = params_of(config);
    params.yarn_ext_factor = 0.5f;
    add(config, opts);
    opts = default_opts(m);
    opts.adapters = "lora one 1.0";
    add(config, opts);
    opts.adapters = nullptr;
    opts.salt = "somebody";
    add(config, opts);
    opts.salt = nullptr;
    opts.chunk_tokens = 64;
    add(config, opts);
    opts = default_opts(m);
    opts.model_path = nullptr;
    opts.model_id = "my model";
    add(config, opts);
    opts = default_opts(m);
    config.flash = false;
    add(config, opts);
    config = context_config{};
    config.kv = GGML_TYPE_Q8_0;
    add(config, opts);
    config = context_config{};
    config.unified = false;
    add(config, opts);
    for (size_t i = 0; i < all.size(); i++) {
        for (size_t j = 0; j < i; j++) {
            CHECK(all[i] != all[j]);
        }
    }
}

kvt_status_t open_status(llama_context *ctx, const kvt_llama_tier_opts_t &opts) {
    kvt_llama_tier_t *tier = nullptr;
    const kvt_status_t status = kvt_llama_tier_open(ctx, &opts, &tier, &why);
    CHECK((status == KVT_OK) == (tier != nullptr) && (status == KVT_OK) == (why.text[0] == 0));
    CHECK_OK(kvt_llama_tier_close(&tier, nullptr));
    return status;
}

void invalid_options_are_refused(const test_model &m) {
    llama_context *ctx = context(m.model);
    kvt_llama_tier_opts_t opts = default_opts(m);
    CHECK(open_status(ctx, opts) == KVT_OK);
    opts.model_path = nullptr;
    CHECK(open_status(ctx, opts) == KVT_E_INVALID);
    opts.model_path = "/nowhere/model.gguf";
    CHECK(open_status(ctx, opts) != KVT_OK);
    opts = default_opts(m);
    opts.scratch_seq = 17;
    CHECK(open_status(ctx, opts) == KVT_E_INVALID);
    opts = default_opts(m);
    opts.chunk_tokens = 1 << 20;
    CHECK(open_status(ctx, opts) == KVT_E_LIMIT);
    opts = default_opts(m);
    opts.flags = 1u << 30;
    CHECK(open_status(ctx, opts) == KVT_E_INVALID);
    opts = default_opts(m);
    opts.policy = "no-such-policy";
    CHECK(open_status(ctx, opts) == KVT_E_SPEC);
    // The scratch sequence has tokens.
    opts = default_opts(m);
    const tokens_t tokens = prompt(m.model, 1, 8);
    CHECK(decode(ctx, 3, tokens, 0, 8, 8) == 0);
    CHECK(open_status(ctx, opts) == KVT_E_STATE);
    opts.scratch_seq = 2;
    CHECK(open_status(ctx, opts) == KVT_OK);
    for (llama_seq_id seq = 0; seq < 3; seq++) {
        CHECK(decode(ctx, seq, tokens, 0, 8, 8) == 0);
    }
    opts.scratch_seq = -1;
    CHECK(open_status(ctx, opts) == KVT_E_STATE);
    llama_free(ctx);
}

void invalid_arguments_are_refused(const test_model &m) {
    llama_context *ctx = context(m.model);
    kvt_llama_tier_t *tier = open_tier(ctx, default_opts(m));
    const tokens_t tokens = prompt(m.model, 1, 64);
    kvt_llama_attached_t at;
    CHECK(kvt_llama_attach(tier, 3, tokens.data(), 64, &at, &why) == KVT_E_INVALID && why.text[0] != 0);
    CHECK(kvt_llama_attach(tier, -1, tokens.data(), 64, &at, &why) == KVT_E_INVALID);
    CHECK(kvt_llama_attach(tier, 4, tokens.data(), 64, &at, &why) == KVT_E_INVALID);
    CHECK(kvt_llama_attach(tier, 0, tokens.data(), 0, &at, &why) == KVT_E_INVALID);
    CHECK(kvt_llama_attach(tier, 0, tokens.data(), 1, nullptr, nullptr) == KVT_OK);
    CHECK(kvt_llama_commit(tier, 0, tokens.data(), 64, &why) == KVT_E_INVALID && why.text[0] != 0);
    CHECK(kvt_llama_prefill(tier, 0, tokens.data(), 64, 64, &why) == KVT_E_INVALID);
    CHECK_OK(kvt_llama_prefill(tier, 0, tokens.data(), 64, 0, &why));
    CHECK(kvt_llama_commit(tier, 0, tokens.data(), 65, &why) == KVT_E_INVALID);
    CHECK_OK(kvt_llama_commit(tier, 0, nullptr, 0, &why));
    close_tier(&tier);
    llama_free(ctx);
}

/// A prompt longer than the context, and a context that other sequences fill.
void full_context_restores_what_fits(const test_model &m) {
    context_config config, small;
    small.n_ctx = 512;
    small.n_batch = config.n_batch = 128;
    llama_context *large = context(m.model, config);
    kvt_runtime_t *runtime = nullptr;
    CHECK_OK(kvt_runtime_open(nullptr, &runtime, nullptr));
    kvt_store_t *store = nullptr;
    CHECK_OK(kvt_store_open(runtime, nullptr, nullptr, &store, nullptr));
    kvt_llama_tier_opts_t opts = default_opts(m);
    opts.store = store;
    kvt_llama_tier_t *tier = open_tier(large, opts);
    const tokens_t tokens = prompt(m.model, 1, 1000);
    run_with_tier(tier, large, 0, tokens);
    flush(tier);
    close_tier(&tier);
    llama_free(large);

    llama_context *ctx = context(m.model, small);
    tier = open_tier(ctx, opts);
    kvt_llama_attached_t at = attach(tier, 0, tokens);
    const char *status = kvt_status_name(at.refused);
    std::printf("1000 tokens for 512 cells: %u restored, %s\n", at.reused_tokens, status);
    CHECK(at.refused != KVT_OK && at.reused_tokens <= 512 && stats(tier).refused_restores == 1);
    CHECK(why.text[0] != 0);
    CHECK(llama_memory_seq_pos_max(llama_get_memory(ctx), 0) + 1 == llama_pos(at.reused_tokens));
    CHECK(kvt_llama_prefill(tier, 0, tokens.data(), 1000, at.reused_tokens, &why) == KVT_E_BUDGET);
    const tokens_t fits(tokens.begin(), tokens.begin() + 400);
    const logits_t logits_with_tier = run_with_tier(tier, ctx, 0, fits, &at);
    CHECK(at.reused_tokens >= 384);
    const size_t kept = at.reused_tokens;
    CHECK(distance(logits_with_tier, run_without_tier(m.model, small, fits, {kept})) < 0.5);

    // Sequence 1 has 112 free cells. A refused restore keeps the tokens that fit.
    at = attach(tier, 1, fits);
    CHECK(at.refused != KVT_OK && at.reused_tokens <= 112);
    llama_memory_seq_rm(llama_get_memory(ctx), 0, -1, -1);
    at = attach(tier, 1, fits);
    CHECK(at.refused == KVT_OK && at.reused_tokens == 384);
    close_tier(&tier);
    llama_free(ctx);
    CHECK_OK(kvt_store_close(&store, 0, nullptr));
    CHECK_OK(kvt_runtime_close(&runtime, 0, nullptr, nullptr));
}

/// The caller truncates, clears or extends a sequence without notice, or after kvt_llama_forget.
void edited_sequences_are_detected(const test_model &m) {
    llama_context *ctx = context(m.model);
    llama_memory_t memory = llama_get_memory(ctx);
    kvt_llama_tier_t *tier = open_tier(ctx, default_opts(m));
    const tokens_t tokens = prompt(m.model, 1, 300);
    run_with_tier(tier, ctx, 0, tokens);
    CHECK(llama_memory_seq_rm(memory, 0, 200, -1));
    kvt_llama_attached_t at = attach(tier, 0, tokens);
    CHECK(at.reused_tokens == 288 && at.kept_tokens <= 200);
    llama_memory_seq_rm(memory, 0, -1, -1);
    at = attach(tier, 0, tokens);
    CHECK(at.reused_tokens == 288 && at.kept_tokens == 0);
    // Uncommitted tokens are not reused.
    CHECK(decode(ctx, 0, prompt(m.model, 2, 310), 288, 310, 32) == 0);
    at = attach(tier, 0, tokens);
    CHECK(at.reused_tokens == 288);
    CHECK(llama_memory_seq_pos_max(memory, 0) == 287);
    CHECK_OK(kvt_llama_forget(tier, 0));
    at = attach(tier, 0, tokens);
    CHECK(at.kept_tokens == 0 && at.reused_tokens == 288);
    CHECK(decode(ctx, 0, tokens, 288, 300, 256) == 0);
    CHECK(distance(logits(ctx), run_without_tier(m.model, context_config{}, tokens, {288})) < 0.5);
    CHECK(stats(tier).failed_saves == 0);
    close_tier(&tier);
    llama_free(ctx);
}

/// Prompts of 5 to 64 tokens. The tier keeps a few incomplete last chunks.
void prompts_shorter_than_a_chunk_are_reused(const test_model &m) {
    llama_context *ctx = context(m.model);
    kvt_llama_tier_opts_t opts = default_opts(m);
    opts.buffer_bytes = 256 << 10;
    kvt_llama_tier_t *tier = open_tier(ctx, opts);
    std::vector<tokens_t> all;
    for (uint32_t i = 0; i < 90; i++) {
        all.push_back(prompt(m.model, 500 + i % 80, 5 + i % 60));
        run_with_tier(tier, ctx, llama_seq_id(i % 3), all.back());
        // The prompt before the last is still resident, in another sequence or as a stored tail.
        tokens_t before = all[all.size() < 2 ? 0 : all.size() - 2];
        before.push_back(llama_token(7 + i));
        kvt_llama_attached_t at;
        const logits_t logits_with_tier = run_with_tier(tier, ctx, llama_seq_id(i % 3), before, &at);
        CHECK(distance(logits_with_tier, run_without_tier(m.model, context_config{}, before)) < 0.5);
        CHECK(at.reused_tokens + 32 >= before.size() - 1);
    }
    CHECK(stats(tier).failed_saves == 0 && stats(tier).refused_restores == 0);
    CHECK(stats(tier).most_buffer_bytes <= opts.buffer_bytes + (512 << 10));
    close_tier(&tier);
    llama_free(ctx);
}

/// The caller decodes into the tier's scratch sequence. Restores and saves are refused until it is empty.
void occupied_scratch_sequence_is_refused(const test_model &m) {
    llama_context *ctx = context(m.model);
    llama_memory_t memory = llama_get_memory(ctx);
    kvt_llama_tier_t *tier = open_tier(ctx, default_opts(m));
    const tokens_t tokens = prompt(m.model, 21, 130), other = prompt(m.model, 22, 130);
    CHECK(decode(ctx, 3, other, 0, 130, 130) == 0);
    kvt_llama_attached_t at;
    CHECK_OK(kvt_llama_attach(tier, 0, tokens.data(), 130, &at, &why));
    CHECK(at.refused == KVT_E_STATE && why.text[0] != 0 && stats(tier).refused_restores == 1);
    CHECK(decode(ctx, 0, tokens, 0, 130, 130) == 0);
    CHECK(kvt_llama_commit(tier, 0, tokens.data(), 130, &why) == KVT_E_STATE && why.text[0] != 0);
    CHECK(stats(tier).failed_saves == 1 && stats(tier).saved_bytes == 0);
    CHECK(llama_memory_seq_pos_max(memory, 3) == 129);
    llama_memory_seq_rm(memory, 3, -1, -1);
    // With the scratch sequence empty, the next commit saves the tokens.
    commit(tier, 0, tokens);
    flush(tier);
    llama_memory_seq_rm(memory, 0, -1, -1);
    CHECK(attach(tier, 1, tokens).reused_tokens == 128);
    CHECK(decode(ctx, 1, tokens, 128, 130, 130) == 0);
    CHECK(distance(logits(ctx), run_without_tier(m.model, context_config{}, tokens, {128})) < 0.5);
    close_tier(&tier);
    llama_free(ctx);
}

/// Moved cells no longer match their tokens. After kvt_llama_forget nothing of the sequence is saved.
void shifted_cells_are_not_saved(const test_model &m) {
    llama_context *ctx = context(m.model);
    llama_memory_t memory = llama_get_memory(ctx);
    kvt_llama_tier_t *tier = open_tier(ctx, default_opts(m));
    tokens_t tokens = prompt(m.model, 23, 300);
    run_with_tier(tier, ctx, 0, tokens);
    CHECK_OK(kvt_llama_forget(tier, 0));
    CHECK(llama_memory_seq_rm(memory, 0, 32, 96));
    llama_memory_seq_add(memory, 0, 96, -1, -64);
    tokens.erase(tokens.begin() + 32, tokens.begin() + 96);
    commit(tier, 0, tokens);
    tokens.push_back(5);
    CHECK(decode(ctx, 0, tokens, 236, 237, 1) == 0);
    commit(tier, 0, tokens);
    flush(tier);
    CHECK(attach(tier, 1, tokens).reused_tokens == 32);
    // The next attach resets this, and commits save again.
    run_with_tier(tier, ctx, 0, tokens);
    flush(tier);
    llama_memory_seq_rm(memory, 1, -1, -1);
    CHECK(attach(tier, 1, tokens).reused_tokens == 224);
    // kvt_llama_forget has no effect on an empty sequence.
    llama_memory_seq_rm(memory, 2, -1, -1);
    CHECK_OK(kvt_llama_forget(tier, 2));
    const tokens_t other = prompt(m.model, 24, 64);
    CHECK(decode(ctx, 2, other, 0, 64, 64) == 0);
    commit(tier, 2, other);
    flush(tier);
    llama_memory_seq_rm(memory, 2, -1, -1);
    const tokens_t more = concat(other, prompt(m.model, 25, 1));
    CHECK(attach(tier, 1, more).reused_tokens == 64);
    close_tier(&tier);
    llama_free(ctx);
}

/// Placeholder tokens of images are equal for different images, so that their KV must not be shared.
void tokens_outside_the_vocabulary_are_refused(const test_model &m) {
    llama_context *ctx = context(m.model);
    kvt_llama_tier_t *tier = open_tier(ctx, default_opts(m));
    tokens_t tokens = prompt(m.model, 26, 64);
    CHECK(decode(ctx, 0, tokens, 0, 64, 64) == 0);
    const llama_token vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(m.model));
    for (const llama_token bad : {llama_token(-1), vocabulary}) {
        tokens[40] = bad;
        kvt_llama_attached_t at;
        CHECK(kvt_llama_commit(tier, 0, tokens.data(), 64, &why) == KVT_E_INVALID && why.text[0] != 0);
        CHECK(kvt_llama_attach(tier, 1, tokens.data(), 64, &at, &why) == KVT_E_INVALID);
        CHECK(kvt_llama_prefill(tier, 0, tokens.data(), 64, 63, &why) == KVT_E_INVALID);
        CHECK(llama_memory_seq_pos_max(llama_get_memory(ctx), 0) == 63);
    }
    close_tier(&tier);
    llama_free(ctx);
}

/// A context with n_batch = 1 works like others. Non-causal attention is refused.
void single_token_context_works_and_non_causal_is_refused(const test_model &m) {
    context_config config;
    config.n_batch = config.n_seq = 1;
    llama_context *ctx = context(m.model, config);
    kvt_llama_tier_t *tier = open_tier(ctx, default_opts(m));
    const tokens_t tokens = prompt(m.model, 27, 40);
    run_with_tier(tier, ctx, 0, tokens);
    flush(tier);
    llama_memory_seq_rm(llama_get_memory(ctx), 0, -1, -1);
    CHECK(attach(tier, 0, tokens).reused_tokens == 32);
    close_tier(&tier);
    llama_free(ctx);

    llama_context_params params = params_of(context_config{});
    params.attention_type = LLAMA_ATTENTION_TYPE_NON_CAUSAL;
    ctx = llama_init_from_model(m.model, params);
    CHECK(ctx != nullptr);
    kvt_llama_tier_opts_t opts = default_opts(m);
    // Older engines do not report the kind of attention, so it must be in the options.
    using kvtier_llama::llama_get_causal_attn;
    CHECK(llama_get_causal_attn(ctx) || open_status(ctx, opts) == KVT_E_UNSUPPORTED);
    opts.params = &params;
    CHECK(open_status(ctx, opts) == KVT_E_UNSUPPORTED);
    llama_free(ctx);
}

/// A chunk longer than the model's window would never be complete in it.
void chunks_longer_than_the_window_are_refused() {
    const char *folder = std::getenv("KVTIER_LLAMA_MODELS");
    if (!std::filesystem::exists(std::string(folder ? folder : ".") + "/tiny-swa.gguf")) {
        return;
    }
    test_model m{nullptr, model_path("tiny-swa")};
    m.model = load(m.path);
    llama_context *ctx = context(m.model);
    kvt_llama_tier_opts_t opts = default_opts(m);
    opts.chunk_tokens = uint32_t(llama_model_n_swa(m.model)) + 1;
    CHECK(open_status(ctx, opts) == KVT_E_INVALID);
    opts.chunk_tokens = uint32_t(llama_model_n_swa(m.model));
    CHECK(open_status(ctx, opts) == KVT_OK);
    llama_free(ctx);
    llama_model_free(m.model);
}

} // namespace

int main(int argc, char **argv) {
    CHECK(argc == 2);
    test_model m{nullptr, model_path(argv[1])};
    m.model = load(m.path);
    options_that_change_kv_change_the_key(m);
    invalid_options_are_refused(m);
    invalid_arguments_are_refused(m);
    full_context_restores_what_fits(m);
    edited_sequences_are_detected(m);
    prompts_shorter_than_a_chunk_are_reused(m);
    occupied_scratch_sequence_is_refused(m);
    shifted_cells_are_not_saved(m);
    tokens_outside_the_vocabulary_are_refused(m);
    single_token_context_works_and_non_causal_is_refused(m);
    chunks_longer_than_the_window_are_refused();
    llama_model_free(m.model);
    return 0;
}
