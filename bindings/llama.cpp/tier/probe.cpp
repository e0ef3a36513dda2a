// Learns the layout of a context's KV from the state of a sequence that holds tokens.
#include "tier/tier.hpp"

#include <algorithm>
#include <cstring>

namespace kvtier_llama {

namespace {

constexpr uint32_t probe_tokens = 2;
constexpr uint32_t default_chunk = 32;
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

llama_token probe_token(const tier_t &tier) {
    const llama_token bos = llama_vocab_bos(llama_model_get_vocab(llama_get_model(tier.ctx)));
    return bos == LLAMA_TOKEN_NULL ? 0 : bos;
}

void decode_probe(tier_t &tier, llama_seq_id seq) {
    struct owner {
        llama_batch batch;
        ~owner() { llama_batch_free(batch); }
    } own{llama_batch_init(probe_tokens, 0, 1)};
    // llama_decode aborts on a batch longer than n_batch.
    const uint32_t step = std::min(probe_tokens, llama_n_batch(tier.ctx));
    for (uint32_t at = 0; at < probe_tokens; at += step) {
        own.batch.n_tokens = int32_t(step);
        for (uint32_t i = 0; i < step; i++) {
            own.batch.token[i] = probe_token(tier);
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
    for (const section_place &section : read.sections) {
        cells.push_back({section.cells.data(), section.rows, section.stream});
    }
    std::vector<uint8_t> built = blob;
    bool same = blob_bytes(tier.shape, cells) == blob.size();
    if (same) {
        const blob_place place = build_blob(tier.shape, cells, seq, built.data());
        for (size_t i = 0; i < read.sections.size(); i++) {
            same = same && place.sections[i].at == read.sections[i].at;
        }
    }
    if (!same || built != blob) {
        fail(KVT_E_UNSUPPORTED,
             "a sequence state cannot be rebuilt from its parsed form: run without the KV tier");
    }
}

/// Writes two cells `distance` apart, which were never decoded, and returns the sections that forget the
/// first one.
std::vector<bool> forgetting_sections(tier_t &tier, llama_seq_id seq, int32_t distance) {
    const llama_token token = probe_token(tier);
    const cell_t both[2] = {{0, 0, 0, token}, {distance, distance, distance, token}};
    std::vector<cell_range> cells;
    for (const section_shape &section : tier.shape.sections) {
        const bool attention = section.kind == section_kind::cells;
        cells.push_back({both, attention ? 2u : section.kind == section_kind::end_state ? 1u : 0u});
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
    std::vector<bool> forgets;
    for (size_t i = 0; i < place.sections.size(); i++) {
        forgets.push_back(tier.shape.sections[i].kind == section_kind::cells && place.sections[i].rows < 2);
    }
    return forgets;
}

/// Finds the window of each section: the least distance at which it forgets a cell. The engine tells
/// whether there are windows, except for DeepSeek V4.
void probe_windows(tier_t &tier, llama_seq_id seq) {
    const bool known = tier.shape.heading.empty();
    const int32_t named = llama_model_n_swa(llama_get_model(tier.ctx));
    if ((known && named <= 1) || !tier.shape.has_attention()) {
        return;
    }
    // Equal for contexts of any length, so that these share KV.
    const uint32_t most = std::max(llama_n_ctx_seq(tier.ctx), uint32_t(std::max(named, 0)));
    // DeepSeek V4 writes all keys up to a distance, so only short ones are tried there.
    const std::vector<bool> any = known ? forgetting_sections(tier, seq, int32_t(most)) : std::vector<bool>();
    for (size_t i = 0; i < tier.shape.sections.size(); i++) {
        const section_shape &section = tier.shape.sections[i];
        if (section.kind != section_kind::cells || section.planes.empty() || (known && !any[i])) {
            continue;
        }
        uint32_t kept = 0, lost = 1;
        while (lost <= most && !forgetting_sections(tier, seq, int32_t(lost))[i]) {
            kept = lost;
            lost *= 2;
        }
        while (lost <= most && lost - kept > 1) {
            const uint32_t middle = kept + (lost - kept) / 2;
            (forgetting_sections(tier, seq, int32_t(middle))[i] ? lost : kept) = middle;
        }
        tier.shape.sections[i].window_tokens = lost <= most ? lost : 0;
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

void choose_chunk(tier_t &tier, uint32_t wanted) {
    const uint32_t window = tier.shape.window_tokens(), row = tier.shape.row_tokens();
    tier.chunk = wanted != 0 ? wanted : std::max(default_chunk, row);
    while (wanted == 0 && window != 0 && tier.chunk > std::max(window, row)) {
        tier.chunk /= 2;
    }
    if (tier.chunk % row != 0) {
        fail(KVT_E_INVALID, "chunk_tokens is " + std::to_string(tier.chunk) +
                                ", but this model compresses keys of up to " + std::to_string(row) +
                                " tokens: set a multiple of that, or 0");
    }
    if (window != 0 && tier.chunk > window) {
        fail(KVT_E_INVALID, "chunk_tokens is " + std::to_string(tier.chunk) +
                                ", longer than the model's window: at most " + std::to_string(window) +
                                " is allowed");
    }
}

void choose_piece(tier_t &tier) {
    uint64_t tokens = max_piece_tokens;
    for (const section_shape &section : tier.shape.sections) {
        for (const plane_shape &plane : section.planes) {
            if (plane.row_bytes % section.row_tokens != 0) {
                fail(KVT_E_UNSUPPORTED, "the compressed keys of this model have " +
                                            std::to_string(plane.row_bytes) + " bytes for " +
                                            std::to_string(section.row_tokens) +
                                            " tokens, not a multiple: use another type of K");
            }
            tier.token_bytes += section.is_state() ? 0 : plane.row_bytes / section.row_tokens;
        }
    }
    // A copied piece has only cells in the window of its last token, so a piece is no longer than the
    // window.
    if (tier.shape.has_windows()) {
        tokens = std::min<uint64_t>(tokens, tier.shape.window_tokens());
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
    if (!is_causal(tier.ctx, opts.params)) {
        fail(KVT_E_UNSUPPORTED, "the attention of this context is not causal, so the KV of a prefix depends "
                                "on what follows and cannot be reused: run it without the KV tier");
    }
    const llama_seq_id seq = empty_sequence(tier, opts.scratch_seq);
    cleaner clean{tier.memory, seq};
    decode_probe(tier, seq);
    const std::vector<uint8_t> blob = state_of(tier, seq);
    const tokens_t tokens(probe_tokens, probe_token(tier));
    std::string why;
    if (!learn_shape(blob.data(), blob.size(), seq, tokens, &tier.shape, &why)) {
        fail(KVT_E_UNSUPPORTED, why);
    }
    for (section_shape &section : tier.shape.sections) {
        section.no_token = media_token(model);
    }
    check_building(tier, blob, seq);
    probe_windows(tier, seq);
    const bool partly = tier.shape.heading.empty();
    const bool together = partly && tier.shape.streams() == 1 && tier.n_seq_max > 1;
    // A rollback of states in one sequence does not roll back its copy in the scratch sequence.
    const bool copies = !tier.shape.has_states() || llama_n_rs_seq(tier.ctx) == 0;
    tier.scratch = together && copies && opts.scratch_seq >= 0 && seq > 0 ? seq : -1;
    choose_chunk(tier, opts.chunk_tokens);
    choose_piece(tier);
}

} // namespace kvtier_llama
