// The format of a sequence state, as llama_state_seq_get_data writes it.
//
// A blob is a magic word, the sequence id, then sections. Each section has a number of rows, and planes:
// one tensor of the engine each, whose rows follow a heading of constant bytes. The kinds of sections
// differ in how they tell the number of rows. All blobs of a context have the same *shape*; only cells
// and rows differ.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvtier_llama {

enum class section_kind {
    /// Attention: a cell and a row for each token, first all planes of K, then those of V.
    cells,
    /// A recurrent state: at most one row, which is the state at the position of its only cell.
    state,
    /// A state that is always present and has no cell: it is the state at the end of the sequence.
    end_state,
    /// Compressed keys: a row for each `row_tokens` tokens, from the start of the sequence on.
    compressed,
};

/// One tensor of a section.
struct plane_shape {
    /// Bytes before the rows. The number of rows, 64 bits, stands between both parts if `tail` is not
    /// empty.
    std::string heading, tail;
    /// ggml_type of the rows.
    int32_t type = 0;
    uint64_t row_bytes = 0;
    /// Bytes per element, if the plane is transposed; 0 = its rows are contiguous.
    uint32_t element_bytes = 0;
};

struct section_shape {
    section_kind kind = section_kind::cells;
    /// Bytes before the number of rows, and bytes between the rows' number or cells and the planes.
    std::string prefix, heading;
    std::vector<plane_shape> planes;
    /// The second half of the planes are V of the layers in the first half.
    bool has_v = false;
    /// Cells only: streams of the cache, 32-bit words of a cell besides its position and sequence (0, 2 or
    /// 3: x, y, token), and whether x and y of text are its position (M-RoPE) instead of 0.
    uint32_t streams = 1, extra_words = 0;
    bool spatial = false;
    /// The token of cells without one, if a cell has a word for it. Not part of a blob.
    int32_t no_token = -1;
    /// Cells only: the section forgets cells this many tokens back; 0 = never. Not part of a blob: see
    /// probe_windows.
    uint32_t window_tokens = 0;
    /// Compressed only.
    uint32_t row_tokens = 1;

    bool is_state() const { return kind == section_kind::state || kind == section_kind::end_state; }
    /// Number of layers of the store's layout. Planes without bytes are no layers.
    size_t layers() const;
};

struct shape {
    /// Bytes between the sequence id and the first section. Only memories that cannot copy a part of a
    /// sequence have them.
    std::string heading;
    std::vector<section_shape> sections;

    bool has_attention() const;
    bool has_states() const;
    bool has_windows() const { return window_tokens() != 0; }
    /// The longest window; 0 = no section has one.
    uint32_t window_tokens() const;
    /// Tokens of which a chunk must have a multiple.
    uint32_t row_tokens() const;
    uint32_t streams() const;
    /// Text of the shape for the identity; equal shapes have equal texts.
    std::string describe() const;
};

/// One cell. x, y and token are 0, 0 and -1 where the section has no words for them.
struct cell_t {
    int32_t position = 0, x = 0, y = 0, token = -1;
};

/// What one section of a blob has.
struct section_place {
    uint32_t stream = 0;
    /// Rows of each plane.
    uint32_t rows = 0;
    /// The cell of each row. An end_state gets the last position of the sections before it.
    std::vector<cell_t> cells;
    /// Offset of each plane's rows.
    std::vector<uint64_t> at;
    /// The index in the sequence of each cell; -1 = it is not of the sequence. Not part of a blob: see
    /// locate_cells.
    std::vector<int32_t> indices;
};

struct blob_place {
    uint64_t bytes = 0;
    /// Bytes without rows. Only build_blob counts them.
    uint64_t heading_bytes = 0;
    std::vector<section_place> sections;
};

/// Parses a blob of a known shape. False, with the reason, for anything else.
bool read_blob(const shape &is, const uint8_t *data, size_t bytes, int32_t sequence, blob_place *out,
               std::string *why);

/// Rows that a section of a new blob has, and their cells. A `state` has 0 or 1, an `end_state` 1.
struct cell_range {
    const cell_t *cells = nullptr;
    uint32_t count = 0;
    uint32_t stream = 0;
};

/// The cell as a section writes it: without what the section has no words for.
cell_t cell_of(const section_shape &is, const cell_t &cell);

/// Length of a blob with these numbers of rows; 0 if it exceeds a limit. Reads no cells.
uint64_t blob_bytes(const shape &is, const std::vector<cell_range> &cells);

/// Writes everything but rows into `data`, which has blob_bytes, and returns the places of the
/// rows. With `packed`, `data` has heading_bytes and no space for rows. `data` may be null.
blob_place build_blob(const shape &is, const std::vector<cell_range> &cells, int32_t sequence,
                      uint8_t *data, bool packed = false);

/// Finds the shape of a blob that holds `tokens`, the first tokens of a sequence and at least two, in
/// every section. Refuses anything that is not a blob, or that can be parsed in two ways.
bool learn_shape(const uint8_t *data, size_t bytes, int32_t sequence, const std::vector<int32_t> &tokens,
                 shape *out, std::string *why);

} // namespace kvtier_llama
