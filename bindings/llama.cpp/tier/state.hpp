// The format of a sequence state, as llama_state_seq_get_data writes it.
//
// A blob is a magic word, the sequence id, then sections. An attention section has cells with a
// position each, then all K rows of every layer, then all V rows. A recurrent section has one cell.
// All blobs of a context have the same *shape*; only cells and rows differ.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvtier_llama {

/// One layer of an attention section.
struct layer_shape {
    int32_t k_type = 0;
    uint64_t k_bytes = 0;
    int32_t v_type = 0;
    /// Bytes per token; 0 = no V.
    uint64_t v_bytes = 0;
    /// Bytes per element, if V is transposed.
    uint32_t v_element_bytes = 0;
};

/// One tensor of a recurrent section.
struct part_shape {
    int32_t type = 0;
    uint64_t bytes = 0;
};

struct section_shape {
    bool recurrent = false;
    /// Attention only.
    uint32_t streams = 1;
    bool transposed = false;
    uint32_t rot_k = 0, rot_v = 0;
    std::vector<layer_shape> layers;
    /// The section forgets cells this many tokens back; 0 = never. Not part of a blob: see
    /// probe_windows.
    uint32_t window_tokens = 0;
    /// Recurrent only: layers of the model, then the tensors of the section.
    uint32_t model_layers = 0;
    std::vector<part_shape> parts;

    /// Number of layers, or of tensors that are not empty.
    size_t planes() const;
};

struct shape {
    std::vector<section_shape> sections;

    bool has_attention() const;
    bool has_states() const;
    bool has_windows() const;
    uint32_t streams() const;
    /// Text of the shape for the identity; equal shapes have equal texts.
    std::string describe() const;
};

/// Byte offsets of the parts of one blob.
struct section_place {
    uint32_t stream = 0;
    /// The position of each cell, in the order of rows.
    std::vector<int32_t> positions;
    /// Offset of each layer's K rows and V rows, or of each recurrent tensor.
    std::vector<uint64_t> k_at, v_at;
};

struct blob_place {
    uint64_t bytes = 0;
    std::vector<section_place> sections;
};

/// Parses a blob of a known shape. False, with the reason, for anything else.
bool read_blob(const shape &is, const uint8_t *data, size_t bytes, int32_t sequence, blob_place *out,
               std::string *why);

/// Cells that a section of a new blob has: `count` of them from position `first` on. A recurrent
/// section has 0 or 1, at that position.
struct cell_range {
    int32_t first = 0;
    uint32_t count = 0;
    uint32_t stream = 0;
    int32_t step = 1;
};

/// Length of a blob with these cells; 0 if it exceeds a limit.
uint64_t blob_bytes(const shape &is, const std::vector<cell_range> &cells);

/// Writes everything but rows into `data`, which has blob_bytes, and returns the places of the
/// rows.
blob_place build_blob(const shape &is, const std::vector<cell_range> &cells, int32_t sequence,
                      uint8_t *data);

/// Finds the shape of a blob that holds the first `tokens` tokens of a sequence, at least two, in
/// every section. Refuses anything that is not a blob, or that can be parsed in two ways.
bool learn_shape(const uint8_t *data, size_t bytes, int32_t sequence, uint32_t tokens, shape *out,
                 std::string *why);

} // namespace kvtier_llama
