// Media: batches of embeddings in place of tokens, such as an image. They are identified by the embeddings,
// and reused completely or not at all. The store has full chunks only, so media wait for the text after them:
// with it they are restored, or else decoded.
#include "run/context.hpp"

#include "run/digest.hpp"
#include "tier/tier.hpp"

#include <algorithm>
#include <cstring>

namespace kvtier_run {

namespace {

/// Embeddings of media that the engine holds are kept up to this size, to decode them again if a restore fails.
constexpr size_t max_kept_bytes = size_t(64) << 20;

/// The cell of each token as offsets from the first position: position, x and y.
std::vector<llama_pos> layout_of(const batch_t &batch) {
    const llama_pos start = batch.entries[0].pos[0];
    std::vector<llama_pos> out;
    for (const entry_t &entry : batch.entries) {
        for (const size_t which : {0, 2, 1}) {
            out.push_back(entry.pos[which] - start);
        }
    }
    return out;
}

/// The engine's order: one kind of position after the other.
std::vector<llama_pos> positions_of(const batch_t &batch, size_t kinds) {
    std::vector<llama_pos> out;
    for (size_t kind = 0; kind < kinds; kind++) {
        for (const entry_t &entry : batch.entries) {
            out.push_back(entry.pos[kind]);
        }
    }
    return out;
}

} // namespace

/// Adds media to what the program decoded. False if they cannot be described.
bool context_t::add_media(llama_seq_id seq, const batch_t &batch) {
    sequence_t &has = known[seq];
    kvt_llama_tier_t *tier = current();
    const size_t count = batch.entries.size();
    if (!tier || batch.rows.size() != count * width) {
        return false;
    }
    kvt_llama_media_t media{};
    media.first = has.program;
    media.tokens = media.positions = uint32_t(count);
    std::vector<llama_pos> layout;
    if (positions == 4) {
        layout = layout_of(batch);
        // What the program takes is seen when text follows: engines take the largest side.
        media.positions = uint32_t(*std::max_element(layout.begin(), layout.end()) + 1);
        media.layout = layout.data();
    }
    digest_t digest;
    digest.add(batch.rows.data(), batch.rows.size() * sizeof batch.rows[0]);
    const uint8_t causal = (special & special_attention) == 0;
    digest.add(&causal, 1);
    const std::array<uint8_t, 32> value = digest.value();
    std::memcpy(media.digest, value.data(), value.size());
    const kvt_llama_prompt_t prompt = {nullptr, has.program + count, &media, 1};
    const kvt_status_t status = kvtier_llama::guarded(nullptr, [&] {
        has.text.media.push_back(kvtier_llama::read_media(*tier, prompt, 0, has.program,
                                                          has.prompt().position(has.program)));
        return KVT_OK;
    });
    if (status != KVT_OK) {
        return false;
    }
    has.text.tokens.resize(has.program + count, LLAMA_TOKEN_NULL);
    has.embeddings[has.program] = {batch.rows, positions_of(batch, positions), causal != 0};
    has.program += count;
    return true;
}

int32_t context_t::decode_media(const batch_t &batch, const runs_t &runs, const decode_t &as_it_is) {
    const llama_seq_id seq = runs.begin()->first;
    const run_t &run = runs.begin()->second;
    sequence_t &has = known[seq];
    const bool has_output = run.first_output != run.tokens.size();
    const bool described = runs.size() == 1 && run.alone && !has_output && !has.unknown &&
                           (special & ~uint32_t(special_attention)) == 0 &&
                           batch.entries[0].pos[0] == has.prompt().position(has.program);
    if (described) {
        rewind(seq, has.program);
    }
    if (!described || !add_media(seq, batch)) {
        for (const auto &one : runs) {
            if (const int32_t status = decode_missing(one.first)) {
                return status;
            }
        }
        const int32_t status = as_it_is();
        for (const auto &one : runs) {
            changed(one.first);
        }
        return status;
    }
    decoded_tokens += batch.entries.size();
    indices.assign(batch.entries.size(), INT32_MAX);
    indices_changed = true;
    return 0;
}

int32_t context_t::decode_embeddings(llama_seq_id seq, const kvtier_llama::media_t &media) {
    sequence_t &has = known[seq];
    const auto found = has.embeddings.find(media.first);
    if (found == has.embeddings.end()) {
        return -1;
    }
    embeddings_t &of = found->second;
    const int32_t count = int32_t(media.tokens);
    std::vector<int32_t> counts(media.tokens, 1);
    std::vector<llama_seq_id *> sequence_of(media.tokens, &seq);
    std::vector<int8_t> outputs(media.tokens, 0);
    llama_batch batch{};
    batch.n_tokens = count;
    batch.embd = of.rows.data();
    batch.pos = of.positions.data();
    batch.n_seq_id = counts.data();
    batch.seq_id = sequence_of.data();
    batch.logits = outputs.data();
    const bool causal = (special & special_attention) == 0;
    if (causal != of.causal) {
        engine().llama_set_causal_attn(ctx, of.causal);
    }
    const int32_t status = engine().llama_decode(ctx, batch);
    if (causal != of.causal) {
        engine().llama_set_causal_attn(ctx, causal);
    }
    if (status == 0) {
        has.engine = media.end();
        commit(seq, true);
    }
    return status;
}

/// Tells whether everything that the engine holds could be decoded again: a restore that fails may have
/// removed it.
bool context_t::can_lose_engine(const sequence_t &has) const {
    return std::all_of(has.text.media.begin(), has.text.media.end(), [&](const auto &one) {
        return has.embeddings.count(one.first) != 0;
    });
}

/// Frees embeddings of media that the engine holds, if there are too many.
void context_t::drop_embeddings() {
    size_t bytes = 0;
    for (auto &one : known) {
        for (auto at = one.second.embeddings.begin(); at != one.second.embeddings.end();) {
            bytes += at->second.rows.size() * sizeof(float);
            const bool held = at->first < one.second.engine;
            at = held && bytes > max_kept_bytes ? one.second.embeddings.erase(at) : std::next(at);
        }
    }
}

} // namespace kvtier_run
