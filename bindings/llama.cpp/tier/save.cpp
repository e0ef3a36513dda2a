// Save: copies chunks out of the context and submits them to the store.
#include "tier/tier.hpp"

#include <algorithm>

namespace kvtier_llama {

namespace {

/// Without a scratch sequence every save copies the whole sequence, so saves are less frequent.
constexpr size_t whole_step_tokens = 256;

uint64_t piece_blob_bytes(const tier_t &tier, uint32_t tokens) {
    std::vector<cell_range> cells;
    for (const section_shape &section : tier.shape.sections) {
        const uint32_t rows = section.is_state() ? 1 : tokens / section.row_tokens;
        cells.push_back({nullptr, rows});
    }
    return blob_bytes(tier.shape, cells);
}

/// Tells whether the blob has every position in all sections without a window.
bool has_all_rows(const tier_t &tier, const blob_place &place, uint32_t first, uint32_t end) {
    for (size_t i = 0; i < place.sections.size(); i++) {
        const section_shape &is = tier.shape.sections[i];
        const bool all = is.is_state() || is.window_tokens != 0 ||
                         rows_begin(is, place.sections[i], first, end) == first;
        if (!all) {
            return false;
        }
    }
    return true;
}

uint64_t copy_out(tier_t &tier, llama_seq_id seq, uint32_t first, uint32_t end, buffer_t &buffer) {
    if (tier.scratch < 0) {
        return llama_state_seq_get_data(tier.ctx, buffer.data, buffer.bytes, seq);
    }
    const prompt_t of = tier.sequences[seq].prompt();
    llama_memory_seq_cp(tier.memory, seq, tier.scratch, of.cell(first).position, of.end_position(end));
    const uint64_t bytes = llama_state_seq_get_data(tier.ctx, buffer.data, buffer.bytes, tier.scratch);
    llama_memory_seq_rm(tier.memory, tier.scratch, -1, -1);
    return bytes;
}

bool copy_pays_off(const tier_t &tier, const sequence_t &has) {
    const size_t end = full_chunks(tier, has.tokens.size());
    return tier.scratch >= 0 || end - has.saved >= std::max(whole_step_tokens, has.saved / 4);
}

void check_committed(const tier_t &tier, llama_seq_id seq, const prompt_t &of) {
    if (llama_memory_seq_pos_max(tier.memory, seq) + 1 < of.end_position(of.count)) {
        fail(KVT_E_INVALID, std::to_string(of.count) + " tokens are committed, but the sequence holds fewer: "
                            "commit a sampled token after it was decoded");
    }
}

/// Records what the sequence holds now. True if it changed by more than one appended token.
bool update_tokens(const tier_t &tier, sequence_t &has, const prompt_t &of) {
    const size_t before = has.tokens.size(), count = of.count;
    const size_t common = of.common(has.prompt());
    has.tokens.resize(common);
    has.tokens.insert(has.tokens.end(), of.tokens + common, of.tokens + count);
    has.media = of.media ? *of.media : std::vector<media_t>();
    has.saved = std::min(has.saved, full_chunks(tier, common));
    has.state_saved = std::min(has.state_saved, common);
    return common < before || count > before + 1;
}

/// End of the piece that begins at `at`. Attention in chunks masks all cells before a multiple of its
/// window, so that a copied piece must not cross one.
size_t piece_end(const tier_t &tier, size_t at, size_t end) {
    if (tier.scratch < 0) {
        return end;
    }
    const size_t to = std::min<size_t>(at + tier.piece, end);
    const size_t window = tier.shape.window_tokens();
    const size_t border = window != 0 ? full_chunks(tier, at / window * window + window) : to;
    return border > at ? std::min(to, border) : to;
}

} // namespace

size_t full_chunks(const tier_t &tier, size_t tokens) { return tokens / tier.chunk * tier.chunk; }

void check_sequence(const tier_t &tier, llama_seq_id seq) {
    if (seq < 0 || uint32_t(seq) >= tier.n_seq_max || seq == tier.scratch) {
        fail(KVT_E_INVALID, "sequence " + std::to_string(seq) + " is not in the context (n_seq_max), or is "
                            "the tier's scratch sequence");
    }
}

void check_tokens(const tier_t &tier, const prompt_t &of) {
    for (size_t i = 0; i < of.count; i++) {
        const bool known = of.tokens[i] >= 0 && of.tokens[i] < tier.n_vocab;
        if (!known && !of.is_media(i)) {
            fail(KVT_E_INVALID, "token " + std::to_string(i) + " is " + std::to_string(of.tokens[i]) +
                                ", not in the vocabulary: placeholders do not identify an image or other "
                                "embeddings; describe media, or commit and attach only the tokens before it");
        }
    }
}

void check_scratch(tier_t &tier) {
    if (tier.scratch_stuck) {
        if (!reap_stuck(tier)) {
            fail(KVT_E_STATE, "the disk has not answered a restore yet, which keeps the tier's scratch "
                              "sequence: nothing is saved or restored until it answers");
        }
        llama_memory_seq_rm(tier.memory, tier.scratch, -1, -1);
        tier.scratch_stuck = false;
    }
    if (tier.scratch >= 0 && llama_memory_seq_pos_max(tier.memory, tier.scratch) >= 0) {
        fail(KVT_E_STATE, "sequence " + std::to_string(tier.scratch) + " is the tier's scratch sequence, "
                          "but it is not empty: empty it, or set another scratch_seq");
    }
}

size_t trim(tier_t &tier, llama_seq_id seq) {
    sequence_t &has = tier.sequences[seq];
    const size_t end = size_t(llama_memory_seq_pos_max(tier.memory, seq) + 1);
    const size_t length = has.prompt().length_before(llama_pos(end));
    if (length < has.tokens.size()) {
        // A recurrent state cannot be shortened, so nothing of the sequence can be reused.
        has.shorten(tier.shape.has_states() ? 0 : length);
        has.saved = std::min(has.saved, full_chunks(tier, has.tokens.size()));
        has.state_saved = std::min(has.state_saved, has.tokens.size());
    }
    return end;
}

held_buffer export_rows(tier_t &tier, llama_seq_id seq, uint32_t first, uint32_t end,
                        uint64_t deadline_ns, blob_place *place) {
    try {
        check_scratch(tier);
    } catch (...) {
        tier.stats.failed_saves++;
        throw;
    }
    const bool whole = tier.scratch < 0;
    // A copy has all cells of media that begin or end in it, because these may share one position.
    const prompt_t of = tier.sequences[seq].prompt();
    const size_t tokens = of.complete(end) - of.cut(first);
    const uint64_t room =
        whole ? llama_state_seq_get_size(tier.ctx, seq) : piece_blob_bytes(tier, uint32_t(tokens));
    held_buffer buffer = room != 0 ? take_buffer(tier, room, deadline_ns) : nullptr;
    if (!buffer) {
        tier.stats.skipped_saves++;
        return nullptr;
    }
    const uint64_t bytes = copy_out(tier, seq, first, end, *buffer);
    std::string why;
    bool good = bytes != 0 && bytes <= buffer->bytes &&
                read_blob(tier.shape, buffer->data, bytes, whole ? seq : tier.scratch, place, &why);
    if (good) {
        locate_cells(tier.shape, of, place);
        good = has_all_rows(tier, *place, first, end);
    }
    if (!good) {
        tier.stats.failed_saves++;
        tier.save_failure = KVT_E_STATE;
        return nullptr;
    }
    return buffer;
}

void save(tier_t &tier, llama_seq_id seq, uint64_t deadline_ns, bool state) {
    trim(tier, seq);
    sequence_t &has = tier.sequences[seq];
    const size_t end = full_chunks(tier, has.tokens.size());
    const bool with_state = state && tier.shape.has_states() && end == has.tokens.size() && end != 0 &&
                            end > has.state_saved;
    // A model with states alone has only those to save.
    size_t at = tier.shape.has_attention() ? has.saved : end;
    if (at >= end && with_state) {
        at = end - tier.chunk;
    }
    if (at >= end) {
        has.saved = end;
        return;
    }
    const session all(tier, has.prompt().prefix(end));
    while (at < end) {
        const size_t to = piece_end(tier, at, end);
        blob_place place;
        const held_buffer buffer = export_rows(tier, seq, uint32_t(at), uint32_t(to), deadline_ns, &place);
        if (!buffer) {
            return;
        }
        buffer->tokens = to > has.saved ? to - std::max(at, has.saved) : 0;
        const kvt_status_t status = put_rows(tier, all, *buffer, place, uint32_t(at), uint32_t(to),
                                             with_state && to == end);
        if (status != KVT_OK) {
            tier.stats.skipped_saves++;
            tier.save_failure = status == KVT_E_AGAIN ? tier.save_failure : status;
            return;
        }
        at = to;
        has.saved = std::max(has.saved, to);
    }
    has.state_saved = with_state ? end : has.state_saved;
}

void commit(tier_t &tier, llama_seq_id seq, const prompt_t &of, bool state) {
    const size_t count = of.count;
    check_sequence(tier, seq);
    check_committed(tier, seq, of);
    sequence_t &has = tier.sequences[seq];
    has.forgotten = has.forgotten && llama_memory_seq_pos_max(tier.memory, seq) >= 0;
    if (has.forgotten) {
        return;
    }
    const bool jumped = update_tokens(tier, has, of);
    const bool checkpoint = count >= has.state_saved + tier.checkpoint;
    // A copy of a whole sequence has only the last window, so that one is made where a prompt may be reused.
    const bool at_end = state || jumped || checkpoint;
    const bool last_window = tier.scratch < 0 && tier.shape.has_windows() && at_end;
    const bool new_chunk = full_chunks(tier, count) > has.saved && (last_window || copy_pays_off(tier, has));
    const bool new_state = tier.shape.has_states() && at_end;
    if (new_chunk || new_state) {
        save(tier, seq, now_ns() + tier.save_wait_ns, new_state);
    }
}

} // namespace kvtier_llama

using namespace kvtier_llama;

extern "C" kvt_status_t kvt_llama_commit_prompt(kvt_llama_tier_t *tier, llama_seq_id seq,
                                                const kvt_llama_prompt_t *prompt, kvt_llama_why_t *why) {
    return guarded(why, [&] {
        if (!tier || !prompt) {
            fail(KVT_E_INVALID, "tier or prompt is null: both are required");
        }
        const uint64_t start = now_ns();
        const given_t given(*tier, *prompt);
        commit(*tier, seq, given.prompt, false);
        tier->stats.commits++;
        tier->stats.commit_ns += now_ns() - start;
        return KVT_OK;
    });
}

extern "C" kvt_status_t kvt_llama_commit(kvt_llama_tier_t *tier, llama_seq_id seq,
                                         const llama_token *tokens, size_t n_tokens,
                                         kvt_llama_why_t *why) {
    const kvt_llama_prompt_t prompt = {tokens, n_tokens, nullptr, 0};
    return kvt_llama_commit_prompt(tier, seq, &prompt, why);
}

extern "C" kvt_status_t kvt_llama_flush(kvt_llama_tier_t *tier, uint64_t deadline_ns,
                                        kvt_llama_why_t *why) {
    return guarded(why, [&]() -> kvt_status_t {
        if (!tier) {
            fail(KVT_E_INVALID, "tier is null: pass an open tier");
        }
        const uint64_t until = deadline_ns != 0 ? deadline_ns : UINT64_MAX / 2;
        bool all = true;
        for (auto &one : tier->sequences) {
            save(*tier, one.first, until, true);
            all = all && one.second.saved >= full_chunks(*tier, one.second.tokens.size());
        }
        if (!drain(*tier, until)) {
            fail(KVT_E_TIMEOUT, "not everything was stored before the deadline: saving continues");
        }
        const kvt_status_t status = tier->save_failure;
        tier->save_failure = KVT_OK;
        if (status != KVT_OK || !all) {
            fail(status != KVT_OK ? status : KVT_E_TIMEOUT,
                 "some chunks could not be stored: the store has no space for them, or its disk failed");
        }
        return KVT_OK;
    });
}
