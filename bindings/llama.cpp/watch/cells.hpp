// Maps the tokens of one sequence, in the order in which they arrived, to cells of a cache.
//
// A single token's row of the mask shows which cells it sees; these are the cells of its sequence,
// no matter what filled them. New cells are taken in the order of their numbers: a restore leaves
// them in that order. The map does not affect correctness, because masks are only ever narrowed.
#ifndef KVTIER_LLAMA_CELLS_HPP
#define KVTIER_LLAMA_CELLS_HPP

#include <ggml-backend.h>
#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvt_llama {

// The row of a mask, as the engine filled it.
struct mask_row {
    ggml_type type = GGML_TYPE_F32;
    size_t cells = 0;
    std::vector<uint8_t> bytes;

    // False if the mask has more than one token's row, or is computed by the graph.
    bool read(ggml_tensor *mask);
    bool is_visible(size_t cell) const;
};

class cell_order {
  public:
    // One token is being computed: updates the map with what it sees and the cell that it is written
    // to.
    void update(const mask_row &row, int64_t own_cell);

    // These cells are written to, perhaps by another sequence.
    void overwritten(const int64_t *cells, size_t n);

    // Discards the map.
    void clear();

    // Tokens that arrived, including those removed since.
    size_t size() const { return cells_.size(); }
    size_t visible() const { return visible_; }

    // The cell of a token; -1 if it was removed.
    int32_t cell(size_t token) const { return cells_[token]; }

    // First token that has changed since the last call; SIZE_MAX = none.
    size_t take_changed();

  private:
    void forget(size_t token);
    void add(int64_t cell);

    std::vector<int32_t> cells_; // by token
    std::vector<int32_t> tokens_; // by cell; -1
    size_t visible_ = 0;
    size_t changed_ = SIZE_MAX;
};

// Detects whether rows of cells have changed since they were read, by some bytes of each.
class cell_marks {
  public:
    // Records new tokens, and tells whether a known one has changed. Caches outside host memory are not
    // checked, so it returns false for them.
    bool has_changed(ggml_tensor *cache, int64_t first_cell, const cell_order &order, int64_t own_cell);
    // Discards the marks of tokens from here on.
    void forget_from(size_t token) { marks_.resize(token < marks_.size() ? token : marks_.size()); }

  private:
    std::vector<uint64_t> marks_; // by token; 0 = none yet
};

// Rows of a cache, with the heads of one token next to each other, as f32 or in the cache's type.
struct rows_view {
    const void *data = nullptr;
    ggml_type type = GGML_TYPE_F32; // f32, f16 or bf16
    size_t stride_bytes = 0;
};

// KVT_DTYPE_* of a plain type.
uint32_t dtype_of(ggml_type type);

class row_reader {
  public:
    // Rows of `n` cells, in this order, valid until the next call. False if the cache's type cannot be
    // converted.
    bool read(ggml_tensor *cache, const int64_t *cells, size_t n, rows_view &out);

    // Rows that were copied or converted so far.
    uint64_t rows() const { return rows_; }

  private:
    std::vector<uint8_t> raw_;
    std::vector<float> numbers_;
    uint64_t rows_ = 0;
};

// Bytes of a tensor that can be read in place; null outside host memory.
const uint8_t *host_bytes(const ggml_tensor *tensor);

} // namespace kvt_llama

#endif
