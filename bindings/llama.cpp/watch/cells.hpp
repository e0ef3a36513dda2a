// Which cells of a cache hold the tokens of one sequence, in the order in which these came.
//
// The row of the mask that belongs to a single token says which cells it sees: those are the cells
// of its sequence, whoever filled them. Cells that were not seen before are taken in the order of
// their numbers; what restores a sequence in the order of its positions leaves them so. Nothing of
// this decides what is computed right: a mask is only ever narrowed.
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

    // False where the mask is of another kind than one token's, or computed by the graph.
    bool read(ggml_tensor *mask);
    bool is_visible(size_t cell) const;
};

class cell_order {
  public:
    // One token is being computed: what it sees, and the cell that it is written to.
    void see(const mask_row &row, int64_t own_cell);

    // Cells are written to by something that need not be this sequence.
    void overwritten(const int64_t *cells, size_t n);

    // Nothing is known any more.
    void clear();

    // Tokens that came, those that went since included.
    size_t size() const { return cells_.size(); }
    size_t visible() const { return visible_; }

    // The cell of a token; -1 where it has gone.
    int32_t cell(size_t token) const { return cells_[token]; }

    // Tokens from here on are others than they were when this was asked last; SIZE_MAX = none.
    size_t take_changed();

  private:
    void forget(size_t token);
    void add(int64_t cell);

    std::vector<int32_t> cells_;  // by token
    std::vector<int32_t> tokens_; // by cell; -1
    size_t visible_ = 0;
    size_t changed_ = SIZE_MAX;
};

// Numbers that tell whether the rows of cells are still those that were read: some bytes of each.
class cell_marks {
  public:
    // Takes new tokens in, and says whether one that was known is another now. Caches that are not
    // in host memory are not looked at: true is never said of them.
    bool is_other(ggml_tensor *cache, int64_t first_cell, const cell_order &order, int64_t own_cell);
    // Tokens from here on are others.
    void forget_from(size_t token) { marks_.resize(token < marks_.size() ? token : marks_.size()); }

  private:
    std::vector<uint64_t> marks_; // by token; 0 = none yet
};

// Rows of a cache, heads of one token next to each other, as f32 or as they lie.
struct rows_view {
    const void *data = nullptr;
    ggml_type type = GGML_TYPE_F32; // f32, f16 or bf16
    size_t stride_bytes = 0;
};

// KVT_DTYPE_* of numbers of a plain type.
uint32_t dtype_of(ggml_type type);

class row_reader {
  public:
    // Rows of `n` cells, in this order. Valid until the next call. False where the numbers of the
    // cache cannot be read.
    bool read(ggml_tensor *cache, const int64_t *cells, size_t n, rows_view &out);

    // Rows that were copied or converted so far.
    uint64_t rows() const { return rows_; }

  private:
    std::vector<uint8_t> raw_;
    std::vector<float> numbers_;
    uint64_t rows_ = 0;
};

// Bytes of a tensor that can be read in place; null where it is not in host memory.
const uint8_t *host_bytes(const ggml_tensor *tensor);

} // namespace kvt_llama

#endif
