// What the engine, the caller or the store refuses: a clean word, and the request goes on without us.
#include "world.hpp"

#include <array>

using namespace world;

namespace {

using space_key = std::array<uint8_t, KVT_KEY_BYTES>;

struct subject {
    llama_model *model;
    std::string path;
};

kvt_llama_tier_opts_t plain(const subject &of) {
    kvt_llama_tier_opts_t opts = KVT_LLAMA_TIER_OPTS_INIT;
    opts.model_path = of.path.c_str();
    opts.host_bytes = uint64_t(64) << 20;
    return opts;
}

space_key key_of(const subject &of, const how &is, const kvt_llama_tier_opts_t &opts) {
    llama_context *ctx = context(of.model, is);
    kvt_llama_tier_t *tier = open_tier(ctx, opts);
    space_key key;
    CHECK_OK(kvt_llama_tier_key(tier, key.data()));
    close_tier(&tier);
    llama_free(ctx);
    return key;
}

/// A model that was loaded with overrides is another one, though its metadata says the file's.
void overridden(const subject &of) {
    kvt_llama_tier_opts_t opts = plain(of);
    std::vector<space_key> all = {key_of(of, how{}, opts)};
    for (const double base : {20000.0, 30000.0}) {
        llama_model_kv_override list[2] = {};
        list[0].tag = LLAMA_KV_OVERRIDE_TYPE_FLOAT;
        std::strcpy(list[0].key, "llama.rope.freq_base");
        list[0].val_f64 = base;
        llama_model_params params = llama_model_default_params();
        params.kv_overrides = list;
        const subject other{llama_model_load_from_file(of.path.c_str(), params), of.path};
        CHECK(other.model != nullptr);
        opts.model_params = &params;
        all.push_back(key_of(other, how{}, opts));
        CHECK(key_of(other, how{}, opts) == all.back());
        llama_model_free(other.model);
    }
    CHECK(all[0] != all[1] && all[0] != all[2] && all[1] != all[2]);
    llama_model_params params = llama_model_default_params();
    opts.model_params = &params;
    CHECK(key_of(of, how{}, opts) == all[0]);
}

/// Where RoPE is another one in a long context, how long is what the model says, not the context.
void long_contexts(const subject &of) {
    llama_model_kv_override list[2] = {};
    list[0].tag = LLAMA_KV_OVERRIDE_TYPE_INT;
    std::strcpy(list[0].key, "llama.rope.scaling.original_context_length");
    list[0].val_i64 = 1024;
    llama_model_params params = llama_model_default_params();
    params.kv_overrides = list;
    const subject other{llama_model_load_from_file(of.path.c_str(), params), of.path};
    CHECK(other.model != nullptr);
    kvt_llama_tier_opts_t opts = plain(of);
    opts.model_params = &params;
    std::vector<space_key> all;
    for (const uint32_t n_ctx : {512u, 1024u, 1280u, 2048u}) {
        how is;
        is.n_ctx = n_ctx;
        llama_context_params made = params_of(is);
        made.yarn_orig_ctx = 4096;
        opts.params = &made;
        all.push_back(key_of(other, is, opts));
    }
    CHECK(all[0] == all[1] && all[1] != all[2] && all[2] == all[3]);
    llama_model_free(other.model);
}

/// Whatever changes the KV changes the key; what does not does not.
void keys(const subject &of) {
    overridden(of);
    long_contexts(of);
    std::vector<space_key> all;
    const auto add = [&](const how &is, const kvt_llama_tier_opts_t &opts) {
        all.push_back(key_of(of, is, opts));
    };
    how is;
    kvt_llama_tier_opts_t opts = plain(of);
    llama_context_params params = params_of(is);
    add(is, opts);
    opts.params = &params;
    CHECK(key_of(of, is, opts) == all[0]); /* those are the defaults */
    how larger = is;
    larger.n_ctx = 4096;
    larger.n_seq = 8;
    larger.threads = 2;
    larger.n_batch = 64;
    CHECK(key_of(of, larger, opts) == all[0]);
    params.rope_freq_base = 12345;
    add(is, opts);
    params = params_of(is);
    params.yarn_ext_factor = 0.5f;
    add(is, opts);
    opts = plain(of);
    opts.adapters = "lora one 1.0";
    add(is, opts);
    opts.adapters = nullptr;
    opts.salt = "somebody";
    add(is, opts);
    opts.salt = nullptr;
    opts.chunk_tokens = 64;
    add(is, opts);
    opts = plain(of);
    opts.model_path = nullptr;
    opts.model_id = "my model";
    add(is, opts);
    opts = plain(of);
    is.flash = false;
    add(is, opts);
    is = how{};
    is.kv = GGML_TYPE_Q8_0;
    add(is, opts);
    is = how{};
    is.unified = false;
    add(is, opts);
    for (size_t i = 0; i < all.size(); i++) {
        for (size_t j = 0; j < i; j++) {
            CHECK(all[i] != all[j]);
        }
    }
}

kvt_status_t opens(llama_context *ctx, const kvt_llama_tier_opts_t &opts) {
    kvt_llama_tier_t *tier = nullptr;
    const kvt_status_t status = kvt_llama_tier_open(ctx, &opts, &tier, &why);
    CHECK((status == KVT_OK) == (tier != nullptr) && (status == KVT_OK) == (why.text[0] == 0));
    CHECK_OK(kvt_llama_tier_close(&tier, nullptr));
    return status;
}

void openings(const subject &of) {
    llama_context *ctx = context(of.model);
    kvt_llama_tier_opts_t opts = plain(of);
    CHECK(opens(ctx, opts) == KVT_OK);
    opts.model_path = nullptr;
    CHECK(opens(ctx, opts) == KVT_E_INVALID);
    opts.model_path = "/nowhere/model.gguf";
    CHECK(opens(ctx, opts) != KVT_OK);
    opts = plain(of);
    opts.scratch_seq = 17;
    CHECK(opens(ctx, opts) == KVT_E_INVALID);
    opts = plain(of);
    opts.chunk_tokens = 1 << 20;
    CHECK(opens(ctx, opts) == KVT_E_LIMIT);
    opts = plain(of);
    opts.flags = 1u << 30;
    CHECK(opens(ctx, opts) == KVT_E_INVALID);
    opts = plain(of);
    opts.policy = "no-such-policy";
    CHECK(opens(ctx, opts) == KVT_E_SPEC);
    // The scratch sequence is somebody's.
    opts = plain(of);
    const tokens_t tokens = prompt(of.model, 1, 8);
    CHECK(decode(ctx, 3, tokens, 0, 8, 8) == 0);
    CHECK(opens(ctx, opts) == KVT_E_STATE);
    opts.scratch_seq = 2;
    CHECK(opens(ctx, opts) == KVT_OK);
    for (llama_seq_id seq = 0; seq < 3; seq++) {
        CHECK(decode(ctx, seq, tokens, 0, 8, 8) == 0);
    }
    opts.scratch_seq = -1;
    CHECK(opens(ctx, opts) == KVT_E_STATE);
    llama_free(ctx);
}

void calls(const subject &of) {
    llama_context *ctx = context(of.model);
    kvt_llama_tier_t *tier = open_tier(ctx, plain(of));
    const tokens_t tokens = prompt(of.model, 1, 64);
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

/// A prompt that is longer than what the context has room for, and a context that others fill.
void no_room(const subject &of) {
    how is, small;
    small.n_ctx = 512;
    small.n_batch = is.n_batch = 128;
    llama_context *large = context(of.model, is);
    kvt_runtime_t *runtime = nullptr;
    CHECK_OK(kvt_runtime_open(nullptr, &runtime, nullptr));
    kvt_store_t *store = nullptr;
    CHECK_OK(kvt_store_open(runtime, nullptr, nullptr, &store, nullptr));
    kvt_llama_tier_opts_t opts = plain(of);
    opts.store = store;
    kvt_llama_tier_t *tier = open_tier(large, opts);
    const tokens_t tokens = prompt(of.model, 1, 1000);
    with_us(tier, large, 0, tokens);
    flush(tier);
    close_tier(&tier);
    llama_free(large);

    llama_context *ctx = context(of.model, small);
    tier = open_tier(ctx, opts);
    kvt_llama_attached_t at = attach(tier, 0, tokens);
    const char *status = kvt_status_name(at.refused);
    std::printf("1000 tokens for 512 cells: %u restored, %s\n", at.reused_tokens, status);
    CHECK(at.refused != KVT_OK && at.reused_tokens <= 512 && stats(tier).refused_restores == 1);
    CHECK(why.text[0] != 0);
    CHECK(llama_memory_seq_pos_max(llama_get_memory(ctx), 0) + 1 == llama_pos(at.reused_tokens));
    CHECK(kvt_llama_prefill(tier, 0, tokens.data(), 1000, at.reused_tokens, &why) == KVT_E_BUDGET);
    const tokens_t fits(tokens.begin(), tokens.begin() + 400);
    const logits_t with = with_us(tier, ctx, 0, fits, &at);
    CHECK(at.reused_tokens >= 384);
    const size_t kept = at.reused_tokens;
    CHECK(distance(with, without_us(of.model, small, fits, {kept})) < 0.5);

    // Sequence 1 finds 112 cells; nothing is lost that it had.
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

/// A caller that cuts, empties or goes on with a sequence without a word; and one that says so.
void edited(const subject &of) {
    llama_context *ctx = context(of.model);
    llama_memory_t memory = llama_get_memory(ctx);
    kvt_llama_tier_t *tier = open_tier(ctx, plain(of));
    const tokens_t tokens = prompt(of.model, 1, 300);
    with_us(tier, ctx, 0, tokens);
    CHECK(llama_memory_seq_rm(memory, 0, 200, -1));
    kvt_llama_attached_t at = attach(tier, 0, tokens);
    CHECK(at.reused_tokens == 288 && at.kept_tokens <= 200);
    llama_memory_seq_rm(memory, 0, -1, -1);
    at = attach(tier, 0, tokens);
    CHECK(at.reused_tokens == 288 && at.kept_tokens == 0);
    // Tokens that were never committed are not gone on from.
    CHECK(decode(ctx, 0, prompt(of.model, 2, 310), 288, 310, 32) == 0);
    at = attach(tier, 0, tokens);
    CHECK(at.reused_tokens == 288);
    CHECK(llama_memory_seq_pos_max(memory, 0) == 287);
    CHECK_OK(kvt_llama_forget(tier, 0));
    at = attach(tier, 0, tokens);
    CHECK(at.kept_tokens == 0 && at.reused_tokens == 288);
    CHECK(decode(ctx, 0, tokens, 288, 300, 256) == 0);
    CHECK(distance(logits(ctx), without_us(of.model, how{}, tokens, {288})) < 0.5);
    CHECK(stats(tier).failed_saves == 0);
    close_tier(&tier);
    llama_free(ctx);
}

/// Prompts that fill no chunk, or one and a bit: the tier has room for a few of their ends.
void short_prompts(const subject &of) {
    llama_context *ctx = context(of.model);
    kvt_llama_tier_opts_t opts = plain(of);
    opts.buffer_bytes = 256 << 10;
    kvt_llama_tier_t *tier = open_tier(ctx, opts);
    std::vector<tokens_t> all;
    for (uint32_t i = 0; i < 90; i++) {
        all.push_back(prompt(of.model, 500 + i % 80, 5 + i % 60));
        with_us(tier, ctx, llama_seq_id(i % 3), all.back());
        // The one before the last is still there, in another sequence or as an end.
        tokens_t before = all[all.size() < 2 ? 0 : all.size() - 2];
        before.push_back(llama_token(7 + i));
        kvt_llama_attached_t at;
        const logits_t with = with_us(tier, ctx, llama_seq_id(i % 3), before, &at);
        CHECK(distance(with, without_us(of.model, how{}, before)) < 0.5);
        CHECK(at.reused_tokens + 32 >= before.size() - 1);
    }
    CHECK(stats(tier).failed_saves == 0 && stats(tier).refused_restores == 0);
    CHECK(stats(tier).most_buffer_bytes <= opts.buffer_bytes + (512 << 10));
    close_tier(&tier);
    llama_free(ctx);
}

/// The context's last sequence is the tier's: who uses it all the same is told, and nothing is mixed up.
void scratch_in_use(const subject &of) {
    llama_context *ctx = context(of.model);
    llama_memory_t memory = llama_get_memory(ctx);
    kvt_llama_tier_t *tier = open_tier(ctx, plain(of));
    const tokens_t tokens = prompt(of.model, 21, 130), other = prompt(of.model, 22, 130);
    CHECK(decode(ctx, 3, other, 0, 130, 130) == 0);
    kvt_llama_attached_t at;
    CHECK_OK(kvt_llama_attach(tier, 0, tokens.data(), 130, &at, &why));
    CHECK(at.refused == KVT_E_STATE && why.text[0] != 0 && stats(tier).refused_restores == 1);
    CHECK(decode(ctx, 0, tokens, 0, 130, 130) == 0);
    CHECK(kvt_llama_commit(tier, 0, tokens.data(), 130, &why) == KVT_E_STATE && why.text[0] != 0);
    CHECK(stats(tier).failed_saves == 1 && stats(tier).saved_bytes == 0);
    CHECK(llama_memory_seq_pos_max(memory, 3) == 129);
    llama_memory_seq_rm(memory, 3, -1, -1);
    // Free again: what was not saved is saved now, and it is right.
    commit(tier, 0, tokens);
    flush(tier);
    llama_memory_seq_rm(memory, 0, -1, -1);
    CHECK(attach(tier, 1, tokens).reused_tokens == 128);
    CHECK(decode(ctx, 1, tokens, 128, 130, 130) == 0);
    CHECK(distance(logits(ctx), without_us(of.model, how{}, tokens, {128})) < 0.5);
    close_tier(&tier);
    llama_free(ctx);
}

/// Cells that were moved are not what their tokens say: nothing of a sequence is saved after a forget.
void shifted(const subject &of) {
    llama_context *ctx = context(of.model);
    llama_memory_t memory = llama_get_memory(ctx);
    kvt_llama_tier_t *tier = open_tier(ctx, plain(of));
    tokens_t tokens = prompt(of.model, 23, 300);
    with_us(tier, ctx, 0, tokens);
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
    // The next attach begins anew, and what follows is kept again.
    with_us(tier, ctx, 0, tokens);
    flush(tier);
    llama_memory_seq_rm(memory, 1, -1, -1);
    CHECK(attach(tier, 1, tokens).reused_tokens == 224);
    // An empty sequence has nothing to forget.
    llama_memory_seq_rm(memory, 2, -1, -1);
    CHECK_OK(kvt_llama_forget(tier, 2));
    const tokens_t other = prompt(of.model, 24, 64);
    CHECK(decode(ctx, 2, other, 0, 64, 64) == 0);
    commit(tier, 2, other);
    flush(tier);
    llama_memory_seq_rm(memory, 2, -1, -1);
    const tokens_t more = joined(other, prompt(of.model, 25, 1));
    CHECK(attach(tier, 1, more).reused_tokens == 64);
    close_tier(&tier);
    llama_free(ctx);
}

/// Numbers that stand for an image are the same for every image.
void placeholders(const subject &of) {
    llama_context *ctx = context(of.model);
    kvt_llama_tier_t *tier = open_tier(ctx, plain(of));
    tokens_t tokens = prompt(of.model, 26, 64);
    CHECK(decode(ctx, 0, tokens, 0, 64, 64) == 0);
    const llama_token vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(of.model));
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

/// Contexts that nothing can be kept of, and one of a token at a time, which is one as others are.
void contexts(const subject &of) {
    how is;
    is.n_batch = is.n_seq = 1;
    llama_context *ctx = context(of.model, is);
    kvt_llama_tier_t *tier = open_tier(ctx, plain(of));
    const tokens_t tokens = prompt(of.model, 27, 40);
    with_us(tier, ctx, 0, tokens);
    flush(tier);
    llama_memory_seq_rm(llama_get_memory(ctx), 0, -1, -1);
    CHECK(attach(tier, 0, tokens).reused_tokens == 32);
    close_tier(&tier);
    llama_free(ctx);

    llama_context_params params = params_of(how{});
    params.attention_type = LLAMA_ATTENTION_TYPE_NON_CAUSAL;
    ctx = llama_init_from_model(of.model, params);
    CHECK(ctx != nullptr);
    kvt_llama_tier_opts_t opts = plain(of);
    CHECK(opens(ctx, opts) == KVT_E_UNSUPPORTED);
    opts.params = &params;
    CHECK(opens(ctx, opts) == KVT_E_UNSUPPORTED);
    llama_free(ctx);
}

/// A chunk that is longer than the window of a model would never be in it.
void long_chunks() {
    const char *folder = std::getenv("KVTIER_LLAMA_MODELS");
    if (!std::filesystem::exists(std::string(folder ? folder : ".") + "/tiny-swa.gguf")) {
        return;
    }
    subject of{nullptr, model_path("tiny-swa")};
    of.model = load(of.path);
    llama_context *ctx = context(of.model);
    kvt_llama_tier_opts_t opts = plain(of);
    opts.chunk_tokens = uint32_t(llama_model_n_swa(of.model)) + 1;
    CHECK(opens(ctx, opts) == KVT_E_INVALID);
    opts.chunk_tokens = uint32_t(llama_model_n_swa(of.model));
    CHECK(opens(ctx, opts) == KVT_OK);
    llama_free(ctx);
    llama_model_free(of.model);
}

} // namespace

int main(int argc, char **argv) {
    CHECK(argc == 2);
    subject of{nullptr, model_path(argv[1])};
    of.model = load(of.path);
    keys(of);
    openings(of);
    calls(of);
    no_room(of);
    edited(of);
    short_prompts(of);
    scratch_in_use(of);
    shifted(of);
    placeholders(of);
    contexts(of);
    long_chunks();
    llama_model_free(of.model);
    return 0;
}
