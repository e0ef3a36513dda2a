// Restores a sequence from blocks of the store. The engine has no call that gives cells to tokens
// without computing them. But it assigns cells before it computes, and a callback can end the
// computation.
#include "watch/longer.hpp"

#include <algorithm>
#include <utility>

using namespace kvt_llama;
using namespace kvt_llama::longer;

// Gives empty cells to positions [first, first + n) of a sequence.
kvt_status_t kvt_llama_longer_t::claim(llama_seq_id seq, llama_pos first, uint32_t n,
                                       std::vector<uint32_t> &at, kvt_llama_why_t *why) {
    new_cells_.clear();
    for (uint32_t done = 0; done < n;) {
        const uint32_t part = std::min(n - done, batch_tokens_);
        work_ = work::claim;
        const int rc = run_batch(nullptr, part, first + (llama_pos) done, seq, false);
        if (failure_ != KVT_OK) {
            return refuse(why, failure_, "%s", failure_why_.text);
        }
        done += part;
        if (rc != 0 || new_cells_.size() != done) {
            return refuse(why, KVT_E_BUSY, "llama_decode returned %d instead of giving cells", rc);
        }
    }
    at = new_cells_;
    return KVT_OK;
}

// Claims cells for sinks, slots and window, in the cache's order, so that they are read in the order of
// the sequence. Window and slots are claimed as one run of positions, because the engine allows no gap.
kvt_status_t kvt_llama_longer_t::claim_divided(uint32_t tokens, kvt_llama_why_t *why) {
    const uint32_t sinks = cells_->sink_tokens(), held = cells_->slot_tokens(),
                   block = settings_.block_tokens;
    const uint32_t window = (model_.cells - sinks - held - settings_.part_tokens) / block * block;
    const uint32_t window_first = tokens - window;
    std::vector<uint32_t> sinks_at, rest_at;
    kvt_status_t status = claim(settings_.seq, 0, sinks, sinks_at, why);
    if (status == KVT_OK) {
        status =
            claim(settings_.held_seq, (llama_pos) (window_first - held), held + window, rest_at, why);
    }
    if (status != KVT_OK) {
        return status;
    }
    llama_memory_seq_cp(memory_, settings_.held_seq, settings_.seq, (llama_pos) window_first,
                        (llama_pos) tokens);
    llama_memory_seq_rm(memory_, settings_.held_seq, (llama_pos) window_first, (llama_pos) tokens);
    const auto middle = rest_at.begin() + (std::ptrdiff_t) held;
    cells_->divide(window_first, std::move(sinks_at),
                   std::vector<uint32_t>(rest_at.begin(), middle),
                   std::vector<uint32_t>(middle, rest_at.end()));
    return KVT_OK;
}

kvt_status_t kvt_llama_longer_t::fill_cells(uint32_t tokens, kvt_llama_why_t *why) {
    std::vector<uint32_t> blocks, at;
    for (uint32_t block = 0; block < tokens / settings_.block_tokens; block++) {
        const uint32_t first = block * settings_.block_tokens;
        if (cells_->is_divided() && first >= cells_->sink_tokens() &&
            first < cells_->window_first()) {
            continue;
        }
        blocks.push_back(block);
        for (uint32_t i = 0; i < settings_.block_tokens; i++) {
            at.push_back(cells_->cell_of(first + i));
        }
    }
    for (uint32_t il = 0; il < model_.layers; il++) {
        const kvt_status_t status = get_cells(il, blocks, at, why);
        if (status != KVT_OK) {
            return status;
        }
    }
    return KVT_OK;
}

// Seals all blocks in the policy.
kvt_status_t kvt_llama_longer_t::seal_all(uint32_t tokens, kvt_llama_why_t *why) {
    constexpr uint32_t group = 16;
    const size_t k_bytes = settings_.block_tokens * model_.k_row_bytes,
                 v_bytes = settings_.block_tokens * model_.v_row_bytes;
    std::vector<uint8_t> rows(group * (k_bytes + v_bytes));
    place to;
    to.k = rows.data();
    to.v = rows.data() + group * k_bytes;
    const uint32_t end = tokens / settings_.block_tokens;
    std::vector<uint32_t> blocks;
    for (uint32_t il = 0; il < model_.layers; il++) {
        for (uint32_t first = 0; first < end; first += group) {
            blocks.clear();
            for (uint32_t block = first; block < std::min(end, first + group); block++) {
                blocks.push_back(block);
            }
            kvt_status_t status = store_.get(il, blocks, to, why);
            for (size_t i = 0; i < blocks.size() && status == KVT_OK; i++) {
                status = store_.seal(il, blocks[i], rows.data() + i * k_bytes, why);
            }
            if (status != KVT_OK) {
                return status;
            }
        }
    }
    return KVT_OK;
}

kvt_status_t kvt_llama_longer_t::resume(const llama_token *tokens, size_t n, size_t &found,
                                        kvt_llama_why_t *why) {
    const stopwatch time(stats_.decode_ns);
    if (cells_->tokens() > 0) {
        return refuse(why, KVT_E_STATE, "the sequence has %u tokens: truncate it to 0 first",
                      cells_->tokens());
    }
    found = 0;
    size_t there = 0, exact = 0;
    const size_t most = std::min<size_t>(n ? n - 1 : 0, settings_.max_tokens - 1) / settings_.block_tokens *
                        settings_.block_tokens;
    kvt_status_t status = most ? store_.lookup(tokens, most, there, exact, why) : KVT_OK;
    const uint32_t end = (uint32_t) (std::min(there, most) / settings_.block_tokens * settings_.block_tokens);
    if (status != KVT_OK || end == 0) {
        return status;
    }
    try {
        status = restore(tokens, end, std::min<size_t>(exact, end), why);
    } catch (...) {
        work_ = work::none;
        reset(nullptr);
        throw;
    }
    if (status != KVT_OK) {
        reset(nullptr);
        return status;
    }
    saved_end_ = end;
    found = end;
    return KVT_OK;
}

// Restores the first `end` tokens, the first `exact` of which are exact.
kvt_status_t kvt_llama_longer_t::restore(const llama_token *tokens, uint32_t end, size_t exact,
                                         kvt_llama_why_t *why) {
    kvt_status_t status = store_.append(tokens, end, exact, why);
    if (status == KVT_OK && end + settings_.part_tokens <= model_.cells) {
        std::vector<uint32_t> at;
        status = claim(settings_.seq, 0, end, at, why);
        if (status == KVT_OK) {
            cells_->append(at);
        }
    } else if (status == KVT_OK) {
        status = claim_divided(end, why);
    }
    if (status == KVT_OK) {
        status = fill_cells(end, why);
    }
    return status == KVT_OK ? seal_all(end, why) : status;
}
