// Maps tokens to cells, and blocks to slots of a layer.
#ifndef KVTIER_LLAMA_LONGER_CELLS_HPP
#define KVTIER_LLAMA_LONGER_CELLS_HPP

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

namespace kvt_llama {
namespace longer {

// Cells of the sequence: sinks, then the window. Once the sequence is longer than the cache, a gap lies
// between them, whose tokens are in the store only. Positions are consecutive in both parts.
class cells {
  public:
    cells(uint32_t count, uint32_t block_tokens, uint32_t sink_tokens, uint32_t slot_count);

    // Tokens of the sequence; the first token after the gap; whether there is a gap.
    uint32_t tokens() const { return window_first_ + (uint32_t) window_.size(); }
    uint32_t window_first() const { return window_first_; }
    bool is_divided() const { return window_first_ > 0; }
    uint32_t sink_tokens() const { return sink_tokens_; }
    uint32_t block_tokens() const { return block_tokens_; }
    uint32_t slot_count() const { return slot_count_; }
    uint32_t slot_tokens() const { return slot_count_ * block_tokens_; }

    // Number of free cells.
    uint32_t free_count() const;

    uint32_t cell_of(uint32_t position) const;

    // Appends new tokens in these cells.
    void append(const std::vector<uint32_t> &at);
    void truncate(uint32_t tokens);

    // Divides a sequence without a gap: the cells of the first blocks after the sinks become slots.
    void divide();
    // The same for an empty sequence of which only these tokens have cells.
    void divide(uint32_t window_first, std::vector<uint32_t> sinks, std::vector<uint32_t> slots,
                const std::vector<uint32_t> &window);

    // Tokens [window_first, first) leave their cells.
    void remove_from_window(uint32_t first);

    const uint32_t *slot_cells(uint32_t slot) const {
        return slots_.data() + (size_t) slot * block_tokens_;
    }

    uint64_t bytes() const;

  private:
    uint32_t count_, block_tokens_, sink_tokens_, slot_count_;
    uint32_t window_first_ = 0;
    std::vector<uint32_t> sinks_, slots_;
    std::deque<uint32_t> window_;
};

// The block in each slot of one layer, and the slots that were chosen last.
class slots {
  public:
    static constexpr uint32_t none = UINT32_MAX;

    explicit slots(uint32_t count) : block_(count, none), used_(count, 0), chosen_(count, 0) {}

    void reset();

    // Finds slots for chosen blocks (ascending, at most as many as slots). Blocks that must be loaded
    // are in `missing`, with their slot. Other blocks keep their slots; the least recently chosen ones
    // are replaced.
    struct load {
        uint32_t block, slot;
    };
    void place(const std::vector<uint32_t> &chosen, bool is_ordered, std::vector<load> &missing);

    // Records that a block is in its slot, or that its load failed.
    void set(const load &done, bool is_there) { block_[done.slot] = is_there ? done.block : none; }

    uint32_t block(uint32_t slot) const { return block_[slot]; }
    bool is_chosen(uint32_t slot) const { return chosen_[slot] != 0; }
    uint64_t bytes() const { return block_.size() * (4 + 8 + 1); }

  private:
    void place_ordered(const std::vector<uint32_t> &chosen, std::vector<load> &missing);

    std::vector<uint32_t> block_;
    std::vector<uint64_t> used_;
    std::vector<char> chosen_;
    uint64_t open_layer_ = 0;
    std::vector<load> resident_; // used by place
    std::vector<uint32_t> free_;
};

} // namespace longer
} // namespace kvt_llama

#endif
