#include "watch/longer_cells.hpp"

#include <algorithm>
#include <utility>

namespace kvt_llama {
namespace longer {

cells::cells(uint32_t count, uint32_t block_tokens, uint32_t sink_tokens, uint32_t slot_count)
    : count_(count), block_tokens_(block_tokens), sink_tokens_(sink_tokens),
      slot_count_(slot_count) {
    // Reserved here: dividing also changes the engine's cells, so it must not fail half way.
    sinks_.reserve(sink_tokens);
    slots_.reserve(slot_tokens());
}

uint32_t cells::free_count() const {
    return count_ - (uint32_t) (sinks_.size() + slots_.size() + window_.size());
}

// Without a gap all tokens are in the window, including the sinks.
uint32_t cells::cell_of(uint32_t position) const {
    return position < window_first_ ? sinks_[position] : window_[position - window_first_];
}

void cells::append(const std::vector<uint32_t> &at) {
    window_.insert(window_.end(), at.begin(), at.end());
}

void cells::truncate(uint32_t tokens) {
    if (tokens == 0) {
        window_first_ = 0;
        sinks_.clear();
        slots_.clear();
        window_.clear();
    } else {
        window_.resize(tokens - window_first_);
    }
}

void cells::divide() {
    const auto sinks_end = window_.begin() + (std::ptrdiff_t) sink_tokens_;
    const auto slots_end = sinks_end + (std::ptrdiff_t) slot_tokens();
    sinks_.assign(window_.begin(), sinks_end);
    slots_.assign(sinks_end, slots_end);
    window_.erase(window_.begin(), slots_end);
    window_first_ = sink_tokens_ + slot_tokens();
}

void cells::divide(uint32_t window_first, std::vector<uint32_t> sinks, std::vector<uint32_t> slots,
                   const std::vector<uint32_t> &window) {
    window_first_ = window_first;
    sinks_ = std::move(sinks);
    slots_ = std::move(slots);
    window_.assign(window.begin(), window.end());
}

void cells::remove_from_window(uint32_t first) {
    window_.erase(window_.begin(), window_.begin() + (std::ptrdiff_t) (first - window_first_));
    window_first_ = first;
}

uint64_t cells::bytes() const {
    return (sinks_.capacity() + slots_.capacity() + window_.size()) * sizeof(uint32_t);
}

void slots::reset() {
    std::fill(block_.begin(), block_.end(), none);
    std::fill(used_.begin(), used_.end(), 0);
    std::fill(chosen_.begin(), chosen_.end(), 0);
}

void slots::place_ordered(const std::vector<uint32_t> &chosen, std::vector<load> &missing) {
    for (uint32_t slot = 0; slot < chosen.size(); slot++) {
        chosen_[slot] = 1;
        if (block_[slot] != chosen[slot]) {
            missing.push_back({chosen[slot], slot});
        }
    }
}

void slots::place(const std::vector<uint32_t> &chosen, bool is_ordered,
                  std::vector<load> &missing) {
    missing.clear();
    std::fill(chosen_.begin(), chosen_.end(), 0);
    if (is_ordered) {
        place_ordered(chosen, missing);
        return;
    }
    open_layer_++;
    resident_.clear();
    for (uint32_t slot = 0; slot < block_.size(); slot++) {
        if (block_[slot] != none) {
            resident_.push_back({block_[slot], slot});
        }
    }
    std::sort(resident_.begin(), resident_.end(),
              [](const load &a, const load &b) { return a.block < b.block; });
    auto at = resident_.begin();
    for (const uint32_t block : chosen) {
        while (at != resident_.end() && at->block < block) {
            ++at;
        }
        if (at != resident_.end() && at->block == block) {
            chosen_[at->slot] = 1;
            used_[at->slot] = open_layer_;
        } else {
            missing.push_back({block, none});
        }
    }
    free_.clear();
    for (uint32_t slot = 0; slot < block_.size(); slot++) {
        if (!chosen_[slot]) {
            free_.push_back(slot);
        }
    }
    // Empty slots count as the least recently used.
    std::stable_sort(free_.begin(), free_.end(), [this](uint32_t a, uint32_t b) {
        return (block_[a] == none ? 0 : used_[a]) < (block_[b] == none ? 0 : used_[b]);
    });
    for (size_t i = 0; i < missing.size(); i++) {
        missing[i].slot = free_[i];
        chosen_[free_[i]] = 1;
        used_[free_[i]] = open_layer_;
    }
}

} // namespace longer
} // namespace kvt_llama
