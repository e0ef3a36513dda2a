// Prompts with images: restarts, branches, returning conversations, other images in the same place. Random
// embeddings take the place of a projector's.
//
//   tier_media MODEL
#include "fixture.hpp"

#include "tier/tier.hpp"

#include <random>

using namespace tier_test;

namespace {

constexpr size_t batch_tokens = 128;

struct image_t {
    size_t first;
    /// Zero height = consecutive positions.
    uint32_t width, height;
    /// Selects the embeddings and the digest.
    uint32_t content;

    uint32_t tokens() const { return height == 0 ? width : width * height; }
    uint32_t positions() const { return height == 0 ? width : std::max(width, height); }
};

struct conversation {
    tokens_t tokens;
    std::vector<image_t> images;
    /// Describes grids by the place of each token.
    bool by_layout = false;
};

struct test_model {
    llama_model *model;
    std::string path;
    bool grids;
};

/// The tier's description of the first `count` tokens.
struct described {
    std::vector<kvt_llama_media_t> media;
    std::vector<std::vector<llama_pos>> layouts;
    kvt_llama_prompt_t prompt{};

    described(const conversation &of, size_t count) {
        layouts.reserve(of.images.size());
        for (const image_t &one : of.images) {
            if (one.first < count) {
                kvt_llama_media_t out{};
                out.first = one.first;
                out.tokens = one.tokens();
                out.positions = one.positions();
                out.width = one.height == 0 ? 0 : one.width;
                std::memset(out.digest, int(one.content), sizeof out.digest);
                if (of.by_layout && one.height != 0) {
                    layouts.emplace_back();
                    for (uint32_t i = 0; i < out.tokens; i++) {
                        const llama_pos places[3] = {0, llama_pos(i % one.width), llama_pos(i / one.width)};
                        layouts.back().insert(layouts.back().end(), places, places + 3);
                    }
                    out.layout = layouts.back().data();
                    out.width = 0;
                }
                media.push_back(out);
            }
        }
        prompt = {of.tokens.data(), count, media.data(), media.size()};
    }
};

/// Text of `texts` tokens each, with an image after each but the last.
conversation talk(const test_model &m, const std::vector<size_t> &texts, uint32_t content) {
    conversation out;
    for (size_t i = 0; i < texts.size(); i++) {
        out.tokens = concat(out.tokens, prompt(m.model, 50 + uint32_t(i), texts[i]));
        if (i + 1 < texts.size()) {
            image_t one{out.tokens.size(), i == 0 ? 6u : 8u, i == 0 ? 5u : 8u, content + uint32_t(i)};
            if (!m.grids) {
                one = {out.tokens.size(), one.tokens(), 0, one.content};
            }
            out.images.push_back(one);
            // Any ids, since the tier ignores them.
            out.tokens.resize(out.tokens.size() + one.tokens(), -7);
        }
    }
    return out;
}

/// Decodes one image in a batch of its own.
void decode_image(llama_context *ctx, llama_seq_id seq, const image_t &image, llama_pos position) {
    const llama_model *model = llama_get_model(ctx);
    const int32_t width = llama_model_n_embd_inp(model);
    const uint32_t count = image.tokens();
    std::vector<float> embeddings(size_t(width) * count);
    std::mt19937 draw(image.content);
    for (float &value : embeddings) {
        value = float(draw() % 2000) / 1000 - 1;
    }
    // Position, y, x and an unused number of all tokens, one after the other.
    std::vector<llama_pos> positions(4 * size_t(count));
    for (uint32_t i = 0; i < count; i++) {
        const bool grid = image.height != 0;
        positions[i] = position + (grid ? 0 : llama_pos(i));
        positions[count + i] = position + llama_pos(grid ? i / image.width : i);
        positions[2 * count + i] = position + llama_pos(grid ? i % image.width : i);
    }
    std::vector<int32_t> counts(count, 1);
    std::vector<llama_seq_id *> ids(count, &seq);
    std::vector<int8_t> outputs(count, 0);
    llama_batch batch{};
    batch.n_tokens = int32_t(count);
    batch.embd = embeddings.data();
    batch.pos = positions.data();
    batch.n_seq_id = counts.data();
    batch.seq_id = ids.data();
    batch.logits = outputs.data();
    CHECK(llama_decode(ctx, batch) == 0);
}

void decode_text(llama_context *ctx, llama_seq_id seq, const conversation &of, size_t first, size_t end,
                 llama_pos position) {
    llama_batch batch = llama_batch_init(int32_t(end - first), 0, 1);
    batch.n_tokens = int32_t(end - first);
    for (size_t i = first; i < end; i++) {
        batch.token[i - first] = of.tokens[i];
        batch.pos[i - first] = position + llama_pos(i - first);
        batch.n_seq_id[i - first] = 1;
        batch.seq_id[i - first][0] = seq;
        batch.logits[i - first] = i + 1 == end;
    }
    CHECK(llama_decode(ctx, batch) == 0);
    llama_batch_free(batch);
}

/// Decodes a conversation from `at` on, in parts that end at images and at `cuts`. Commits after each part
/// if there is a tier.
logits_t decode_rest(kvt_llama_tier_t *tier, llama_context *ctx, llama_seq_id seq, const conversation &of,
                     size_t at, llama_pos position, const std::vector<size_t> &cuts) {
    while (at < of.tokens.size()) {
        size_t end = of.tokens.size();
        const image_t *image = nullptr;
        for (const image_t &one : of.images) {
            image = one.first == at ? &one : image;
            end = one.first > at ? std::min(end, one.first) : end;
        }
        for (const size_t cut : cuts) {
            end = cut > at ? std::min(end, cut) : end;
        }
        if (image) {
            decode_image(ctx, seq, *image, position);
            end = at + image->tokens();
            position += llama_pos(image->positions());
        } else {
            decode_text(ctx, seq, of, at, end, position);
            position += llama_pos(end - at);
        }
        at = end;
        if (tier) {
            const described given(of, at);
            CHECK_OK(kvt_llama_commit_prompt(tier, seq, &given.prompt, &why));
        }
    }
    return logits(ctx);
}

kvt_llama_attached_t attach(kvt_llama_tier_t *tier, llama_seq_id seq, const conversation &of) {
    kvt_llama_attached_t out;
    const described given(of, of.tokens.size());
    CHECK_OK(kvt_llama_attach_prompt(tier, seq, &given.prompt, &out, &why));
    CHECK(out.refused == KVT_OK);
    return out;
}

logits_t run(kvt_llama_tier_t *tier, llama_context *ctx, llama_seq_id seq, const conversation &of,
             const std::vector<size_t> &cuts, kvt_llama_attached_t *at) {
    *at = attach(tier, seq, of);
    return decode_rest(tier, ctx, seq, of, at->reused_tokens, at->next_position, cuts);
}

logits_t run_alone(const test_model &m, const context_config &config, const conversation &of,
                   const std::vector<size_t> &cuts) {
    llama_context *ctx = context(m.model, config);
    const logits_t out = decode_rest(nullptr, ctx, 0, of, 0, 0, cuts);
    llama_free(ctx);
    return out;
}

context_config media_context(bool unified) {
    context_config config;
    config.n_ctx = 1024;
    config.n_seq = 3;
    config.n_batch = batch_tokens;
    config.unified = unified;
    return config;
}

kvt_llama_tier_opts_t default_opts(const test_model &m) {
    kvt_llama_tier_opts_t opts = KVT_LLAMA_TIER_OPTS_INIT;
    opts.model_path = m.path.c_str();
    opts.host_bytes = uint64_t(16) << 20;
    return opts;
}

/// Images are in [40, 70) and [120, 184); the last full chunk ends at 192.
const std::vector<size_t> texts = {40, 50, 30}, cuts = {96, 192};

void a_restart_restores_images(const test_model &m, bool unified, bool by_layout) {
    temp_dir dir;
    const std::string path = dir.path + "/kv";
    const context_config config = media_context(unified);
    kvt_llama_tier_opts_t opts = default_opts(m);
    opts.disk_path = path.c_str();
    opts.disk_bytes = uint64_t(64) << 20;
    conversation all = talk(m, texts, 1);
    all.by_layout = by_layout;
    kvt_llama_attached_t at;
    logits_t cold;
    for (const bool again : {false, true}) {
        llama_context *ctx = context(m.model, config);
        kvt_llama_tier_t *tier = open_tier(ctx, opts);
        const logits_t out = run(tier, ctx, 0, all, cuts, &at);
        CHECK(at.reused_tokens == (again ? 192 : 0) && at.disk_tokens == at.reused_tokens);
        CHECK(at.next_position == llama_pos(!again ? 0 : m.grids ? 192 - 30 - 64 + 6 + 8 : 192));
        CHECK(!again || bitwise_equal(out, cold));
        cold = out;
        flush(tier);
        close_tier(&tier);
        llama_free(ctx);
    }
    CHECK(bitwise_equal(cold, run_alone(m, config, all, cuts)));
}

/// The same images and another question, in another sequence; then other images in the same place.
void a_branch_reuses_equal_images_only(const test_model &m) {
    const context_config config = media_context(false);
    llama_context *ctx = context(m.model, config);
    kvt_llama_tier_t *tier = open_tier(ctx, default_opts(m));
    const conversation first = talk(m, texts, 1);
    kvt_llama_attached_t at;
    run(tier, ctx, 0, first, cuts, &at);
    flush(tier);
    conversation other = first;
    other.tokens.resize(200);
    other.tokens = concat(other.tokens, prompt(m.model, 60, 20));
    const logits_t with = run(tier, ctx, 1, other, cuts, &at);
    CHECK(at.reused_tokens == 192);
    CHECK(bitwise_equal(with, run_alone(m, config, other, cuts)));

    const auto restored = [&](const conversation &of) {
        llama_memory_seq_rm(llama_get_memory(ctx), 1, -1, -1);
        return attach(tier, 1, of);
    };
    // States exist at the cuts only.
    const uint32_t before_images = tier->shape.has_states() ? 0 : 32;
    other = first;
    other.images[1].content = 77;
    CHECK(restored(other).reused_tokens == 96);
    other.images[0].content = 78;
    CHECK(restored(other).reused_tokens == before_images);
    other = first;
    // The chunk that ends at 160 is stored, but cuts the second image.
    other.tokens.resize(186);
    const kvt_llama_attached_t part = restored(other);
    CHECK(part.reused_tokens == 96 && part.next_position == (m.grids ? 72 : 96));
    if (m.grids) {
        std::swap(other.images[0].width, other.images[0].height);
        CHECK(restored(other).reused_tokens == before_images);
    }
    close_tier(&tier);
    llama_free(ctx);
}

/// A conversation that ends within a chunk is restored completely after another one used its sequence.
void a_returning_conversation_has_its_tail(const test_model &m) {
    const context_config config = media_context(true);
    llama_context *ctx = context(m.model, config);
    kvt_llama_tier_t *tier = open_tier(ctx, default_opts(m));
    const conversation first = talk(m, texts, 1), second = talk(m, texts, 5);
    conversation longer = first;
    longer.tokens = concat(longer.tokens, prompt(m.model, 61, 6));
    kvt_llama_attached_t at;
    run(tier, ctx, 0, first, cuts, &at);
    run(tier, ctx, 0, second, cuts, &at);
    CHECK(at.reused_tokens <= texts[0]);
    const logits_t with = run(tier, ctx, 0, longer, cuts, &at);
    CHECK(at.reused_tokens == first.tokens.size() && at.kept_tokens <= texts[0]);
    CHECK(bitwise_equal(with, run_alone(m, config, longer, {96, 192, first.tokens.size()})));
    close_tier(&tier);
    llama_free(ctx);
}

void wrong_media_are_refused(const test_model &m) {
    llama_context *ctx = context(m.model, media_context(true));
    kvt_llama_tier_t *tier = open_tier(ctx, default_opts(m));
    const conversation all = talk(m, texts, 1);
    const auto status = [&](auto &&change) {
        described given(all, all.tokens.size());
        change(given);
        return kvt_llama_attach_prompt(tier, 0, &given.prompt, nullptr, &why);
    };
    CHECK(status([](described &) {}) == KVT_OK);
    CHECK(status([](described &of) { of.prompt.n_media = 1; }) == KVT_E_INVALID);
    CHECK(status([](described &of) { of.prompt.media = nullptr; }) == KVT_E_INVALID);
    CHECK(status([](described &of) { of.media[0].tokens = 0; }) == KVT_E_INVALID);
    CHECK(status([](described &of) { of.media[1].tokens = 1000; }) == KVT_E_INVALID);
    CHECK(status([](described &of) { of.media[1].first = UINT64_MAX; }) == KVT_E_INVALID);
    CHECK(status([](described &of) { of.media[1].first = 69; }) == KVT_E_INVALID);
    CHECK(status([](described &of) { of.media[0].positions = 0; }) == KVT_E_INVALID);
    CHECK(status([](described &of) { of.media[0].positions = UINT32_MAX; }) == KVT_E_INVALID);
    const std::vector<llama_pos> falling = {1, 0, 0, 0, 0, 0};
    std::vector<llama_pos> layout(90, 0);
    std::copy(falling.begin(), falling.end(), layout.begin());
    const auto with_layout = [&](described &of) { of.media[0].layout = layout.data(); };
    CHECK(status(with_layout) == (m.grids ? KVT_E_INVALID : KVT_E_UNSUPPORTED));
    layout[0] = -1;
    CHECK(status(with_layout) != KVT_OK);
    const auto narrow = [](described &of) { of.media[0].width = 1; };
    CHECK(status(narrow) == (m.grids ? KVT_E_INVALID : KVT_E_UNSUPPORTED));
    close_tier(&tier);
    llama_free(ctx);
}

} // namespace

int main(int argc, char **argv) {
    CHECK(argc == 2);
    test_model m{nullptr, model_path(argv[1]), false};
    m.model = load(m.path);
    const llama_rope_type rope = llama_model_rope_type(m.model);
    m.grids = rope == LLAMA_ROPE_TYPE_MROPE || rope == LLAMA_ROPE_TYPE_IMROPE;
    a_restart_restores_images(m, true, false);
    a_restart_restores_images(m, true, true);
    a_restart_restores_images(m, false, false);
    a_branch_reuses_equal_images_only(m);
    a_returning_conversation_has_its_tail(m);
    wrong_media_are_refused(m);
    llama_model_free(m.model);
    return 0;
}
