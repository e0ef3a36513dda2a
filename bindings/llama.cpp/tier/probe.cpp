// Learns the layout of a context's KV from the state of a sequence that holds tokens.
#include "tier/tier.hpp"

#include <algorithm>
#include <cstring>

namespace kvtier_llama {

namespace {

constexpr uint32_t probe_tokens = 2;
/// A few pieces of this size stay in the CPU's cache between the store and the engine.
constexpr uint64_t piece_bytes = uint64_t(3) << 19;
constexpr uint32_t max_piece_tokens = 256;

/// Empties the probed sequence at the end of the scope.
struct cleaner {
    llama_memory_t memory;
    llama_seq_id seq;
    ~cleaner() { llama_memory_seq_rm(memory, seq, -1, -1); }
};

std::vector<uint8_t> state_of(tier_t &tier, llama_seq_id seq) {
    std::vector<uint8_t> blob(llama_state_seq_get_size(tier.ctx, seq));
    if (blob.empty() || llama_state_seq_get_data(tier.ctx, blob.data(), blob.size(), seq) != blob.size()) {
        fail(KVT_E_UNSUPPORTED,
             "the engine returns no sequence state for this model: run it without the KV tier");
    }
    return blob;
}

void decode_probe(tier_t &tier, llama_seq_id seq) {
    const llama_vocab *vocab = llama_model_get_vocab(llama_get_model(tier.ctx));
    const llama_token bos = llama_vocab_bos(vocab);
    struct owner {
        llama_batch batch;
        ~owner() { llama_batch_free(batch); }
    } own{llama_batch_init(probe_tokens, 0, 1)};
    // llama_decode aborts on a batch longer than n_batch.
    const uint32_t step = std::min(probe_tokens, llama_n_batch(tier.ctx));
    for (uint32_t at = 0; at < probe_tokens; at += step) {
        own.batch.n_tokens = int32_t(step);
        for (uint32_t i = 0; i < step; i++) {
            own.batch.token[i] = bos == LLAMA_TOKEN_NULL ? 0 : bos;
            own.batch.pos[i] = llama_pos(at + i);
            own.batch.n_seq_id[i] = 1;
            own.batch.seq_id[i][0] = seq;
            own.batch.logits[i] = at + i + 1 == probe_tokens;
        }
        if (llama_decode(tier.ctx, own.batch) != 0) {
            fail(KVT_E_STATE, "the context cannot decode two tokens: free cells of its KV cache first");
        }
    }
}

/// Fails unless building from the parsed blob gives the same bytes again.
void check_building(const tier_t &tier, const std::vector<uint8_t> &blob, llama_seq_id seq) {
    blob_place read;
    std::string why;
    if (!read_blob(tier.shape, blob.data(), blob.size(), seq, &read, &why)) {
        fail(KVT_E_UNSUPPORTED, why);
    }
    std::vector<cell_range> cells;
    for (size_t i = 0; i < read.sections.size(); i++) {
        const section_place &section = read.sections[i];
        cells.push_back({section.positions[0], uint32_t(section.positions.size()), section.stream});
    }
    std::vector<uint8_t> built = blob;
    bool same = blob_bytes(tier.shape, cells) == blob.size();
    if (same) {
        const blob_place place = build_blob(tier.shape, cells, seq, built.data());
        for (size_t i = 0; i < read.sections.size(); i++) {
            same = same && place.sections[i].k_at == read.sections[i].k_at &&
                   place.sections[i].v_at == read.sections[i].v_at;
        }
    }
    if (!same || built != blob) {
        fail(KVT_E_UNSUPPORTED,
             "a sequence state cannot be rebuilt from its parsed form: run without the KV tier");
    }
}

/// Finds sections with a window. Such a section omits cells a window back when it is written. Two
/// cells that far apart, which were never decoded, show which sections do.
void probe_windows(tier_t &tier, llama_seq_id seq) {
    const int32_t window = llama_model_n_swa(llama_get_model(tier.ctx));
    if (window <= 1 || !tier.shape.has_attention()) {
        return;
    }
    std::vector<cell_range> cells;
    for (const section_shape &section : tier.shape.sections) {
        cells.push_back({0, section.recurrent ? 0u : 2u, 0, window});
    }
    std::vector<uint8_t> blob(blob_bytes(tier.shape, cells));
    build_blob(tier.shape, cells, seq, blob.data());
    if (llama_state_seq_set_data(tier.ctx, blob.data(), blob.size(), seq) != blob.size()) {
        fail(KVT_E_UNSUPPORTED, "the context refused a state of two cells: free cells of its KV cache first");
    }
    blob = state_of(tier, seq);
    blob_place place;
    std::string why;
    if (!read_blob(tier.shape, blob.data(), blob.size(), seq, &place, &why)) {
        fail(KVT_E_UNSUPPORTED, why);
    }
    for (size_t i = 0; i < place.sections.size(); i++) {
        section_shape &section = tier.shape.sections[i];
        section.window_tokens =
            !section.recurrent && place.sections[i].positions.size() < 2 ? uint32_t(window) : 0;
    }
}

llama_seq_id empty_sequence(const tier_t &tier, int32_t scratch_wanted) {
    const int32_t last = int32_t(tier.n_seq_max) - 1;
    if (scratch_wanted < -1 || scratch_wanted > last) {
        fail(KVT_E_INVALID, "scratch_seq is " + std::to_string(scratch_wanted) +
                                ", the context's sequences are 0 to " + std::to_string(last));
    }
    const llama_seq_id scratch = scratch_wanted == 0 ? last : scratch_wanted;
    if (scratch > 0) {
        if (llama_memory_seq_pos_max(tier.memory, scratch) >= 0) {
            fail(KVT_E_STATE, "the scratch sequence " + std::to_string(scratch) +
                                  " is in use: raise n_seq_max by one, or set scratch_seq = -1");
        }
        return scratch;
    }
    for (llama_seq_id seq = 0; seq <= last; seq++) {
        if (llama_memory_seq_pos_max(tier.memory, seq) < 0) {
            return seq;
        }
    }
    fail(KVT_E_STATE, "all sequences of the context are in use: open the tier before the first request");
}

void choose_piece(tier_t &tier) {
    uint64_t tokens = max_piece_tokens;
    for (const section_shape &section : tier.shape.sections) {
        for (const layer_shape &layer : section.layers) {
            tier.token_bytes += layer.k_bytes + layer.v_bytes;
        }
        if (section.window_tokens != 0 && tier.chunk > section.window_tokens) {
            fail(KVT_E_INVALID, "chunk_tokens is " + std::to_string(tier.chunk) +
                                    ", longer than the model's window: at most " +
                                    std::to_string(section.window_tokens) + " is allowed");
        }
        // A copied piece has only cells in the window of its last token, so a piece is no longer
        // than the window.
        tokens = section.window_tokens != 0 ? std::min<uint64_t>(tokens, section.window_tokens) : tokens;
    }
    tokens = std::min(piece_bytes / std::max<uint64_t>(tier.token_bytes, 1), tokens);
    tier.piece = std::max(tier.chunk, uint32_t(tokens) / tier.chunk * tier.chunk);
}

} // namespace

void probe(tier_t &tier, const kvt_llama_tier_opts_t &opts) {
    const llama_model *model = llama_get_model(tier.ctx);
    tier.n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    const bool decodes = llama_model_has_decoder(model) && !llama_model_has_encoder(model);
    if (!tier.memory || !decodes || llama_model_is_diffusion(model)) {
        fail(KVT_E_UNSUPPORTED,
             "this model has no KV to store: only decoder-only language models are supported");
    }
    const llama_rope_type rope = llama_model_rope_type(model);
    if (rope == LLAMA_ROPE_TYPE_MROPE || rope == LLAMA_ROPE_TYPE_IMROPE) {
        fail(KVT_E_UNSUPPORTED, "this model uses M-RoPE, whose positions are not supported: run it without "
                                "the KV tier");
    }
    if (!is_causal(tier.ctx, opts.params)) {
        fail(KVT_E_UNSUPPORTED, "the attention of this context is not causal, so the KV of a prefix depends "
                                "on what follows and cannot be reused: run it without the KV tier");
    }
    const llama_seq_id seq = empty_sequence(tier, opts.scratch_seq);
    cleaner clean{tier.memory, seq};
    decode_probe(tier, seq);
    const std::vector<uint8_t> blob = state_of(tier, seq);
    std::string why;
    if (!learn_shape(blob.data(), blob.size(), seq, probe_tokens, &tier.shape, &why)) {
        fail(KVT_E_UNSUPPORTED, why);
    }
    check_building(tier, blob, seq);
    probe_windows(tier, seq);
    const bool together = tier.shape.streams() == 1 && tier.n_seq_max > 1;
    // A rollback of states in one sequence does not roll back its copy in the scratch sequence.
    const bool copies = !tier.shape.has_states() || llama_n_rs_seq(tier.ctx) == 0;
    tier.scratch = together && copies && opts.scratch_seq >= 0 && seq > 0 ? seq : -1;
    choose_piece(tier);
}

} // namespace kvtier_llama
