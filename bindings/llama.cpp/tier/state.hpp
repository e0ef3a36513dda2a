// The bytes of a sequence state, as llama_state_seq_get_data writes them.
//
// A blob is a magic word, the sequence, then sections: caches of attention (cells with a position
// each, then all K rows of every layer, then all V rows) and of recurrent states (one cell). What a
// context writes always has the same *shape*; only cells and rows differ.
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
    /// Of a token; 0 = there is no V.
    uint64_t v_bytes = 0;
    /// Of an element, where V lies transposed.
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
    /// It forgets what is as many tokens back; 0 = nothing. A blob does not say it: see probe_windows.
    uint32_t window_tokens = 0;
    /// Recurrent only: layers of the model, then the tensors that there are.
    uint32_t model_layers = 0;
    std::vector<part_shape> parts;

    /// Layers, or tensors that are not empty.
    size_t planes() const;
};

struct shape {
    std::vector<section_shape> sections;

    bool has_attention() const;
    bool has_states() const;
    bool has_windows() const;
    uint32_t streams() const;
    /// In words; equal shapes have equal words.
    std::string words() const;
};

/// Where things are in one blob.
struct section_place {
    uint32_t stream = 0;
    /// The position of each cell, in the order of rows.
    std::vector<int32_t> positions;
    /// Of each layer: the first byte of its K rows, of its V; or of each recurrent tensor.
    std::vector<uint64_t> k_at, v_at;
};

struct blob_place {
    uint64_t bytes = 0;
    std::vector<section_place> sections;
};

/// Reads a blob of a known shape. False, with the reason, for anything that is not exactly one.
bool read_blob(const shape &is, const uint8_t *data, size_t bytes, int32_t sequence, blob_place *out,
               std::string *why);

/// Cells that a section of a new blob is to have: `count` of them from position `first` on. Of a
/// recurrent section 0 or 1, at that position.
struct cells_wanted {
    int32_t first = 0;
    uint32_t count = 0;
    uint32_t stream = 0;
    int32_t step = 1;
};

/// How long a blob with these cells is; 0 where that is beyond all limits.
uint64_t blob_bytes(const shape &is, const std::vector<cells_wanted> &cells);

/// Writes everything but rows into `data`, which has room for blob_bytes, and says where they go.
blob_place build_blob(const shape &is, const std::vector<cells_wanted> &cells, int32_t sequence,
                      uint8_t *data);

/// Finds the shape of a blob that holds the tokens 0 and up to `tokens` of a sequence, at least two,
/// in every section. Refuses what is no blob, and what could be read in two ways.
bool learn_shape(const uint8_t *data, size_t bytes, int32_t sequence, uint32_t tokens, shape *out,
                 std::string *why);

} // namespace kvtier_llama
