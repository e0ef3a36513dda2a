// Infers the shape of a blob of which only the number of tokens is known. Headings give most of the
// shape. The kind of a section and the presence of V are tried; exactly one way must end where the
// blob ends.
#include "tier/cursor.hpp"
#include "tier/state.hpp"

#include <ggml.h>
#include <llama.h>

namespace kvtier_llama {

namespace {

constexpr size_t max_sections = 4;
constexpr bool has_rotations = LLAMA_STATE_SEQ_VERSION >= 4;

struct search {
    const uint8_t *data;
    uint64_t bytes;
    int32_t sequence;
    uint32_t tokens;
    shape now;
    shape found;
    uint32_t ways = 0;
};

bool type_fits(int32_t type, uint64_t bytes) {
    if (type < 0 || type >= int32_t(GGML_TYPE_COUNT) || bytes == 0 || bytes > max_row_bytes) {
        return false;
    }
    const size_t each = ggml_type_size(ggml_type(type));
    return each != 0 && bytes % each == 0;
}

bool learn_cells(const search &in_all, reader &in, section_shape *out, uint32_t *later_streams) {
    out->streams = in.take<uint32_t>();
    if (!in.ok || out->streams == 0 || out->streams > max_streams) {
        return false;
    }
    uint32_t count = 0;
    for (uint32_t stream = 0; stream < out->streams && count == 0; stream++) {
        count = in.take<uint32_t>();
        *later_streams = out->streams - 1 - stream;
    }
    if (!in.ok || count != in_all.tokens) {
        return false;
    }
    // Cells of M-RoPE have two more numbers here, so the comparison fails and the blob is refused.
    for (uint32_t i = 0; i < count; i++) {
        const bool same = in.take<int32_t>() == int32_t(i) && in.take<uint32_t>() == 1 &&
                          in.take<int32_t>() == in_all.sequence;
        if (!same) {
            return false;
        }
    }
    return in.ok;
}

bool learn_keys(const search &in_all, reader &in, section_shape *out) {
    const uint32_t transposed = in.take<uint32_t>();
    const uint32_t layers = in.take<uint32_t>();
    if (has_rotations) {
        out->rot_k = in.take<uint32_t>();
        out->rot_v = in.take<uint32_t>();
    }
    if (!in.ok || transposed > 1 || layers == 0 || layers > max_layers) {
        return false;
    }
    out->transposed = transposed == 1;
    for (uint32_t i = 0; i < layers; i++) {
        layer_shape layer;
        layer.k_type = in.take<int32_t>();
        layer.k_bytes = in.take<uint64_t>();
        if (!in.ok || !type_fits(layer.k_type, layer.k_bytes)) {
            return false;
        }
        in.skip(in_all.tokens, layer.k_bytes);
        out->layers.push_back(layer);
    }
    return in.ok;
}

bool learn_values(const search &in_all, reader &in, section_shape *out) {
    for (layer_shape &layer : out->layers) {
        layer.v_type = in.take<int32_t>();
        if (out->transposed) {
            layer.v_element_bytes = in.take<uint32_t>();
            layer.v_bytes = uint64_t(in.take<uint32_t>()) * layer.v_element_bytes;
        } else {
            layer.v_bytes = in.take<uint64_t>();
        }
        if (!in.ok || !type_fits(layer.v_type, layer.v_bytes)) {
            return false;
        }
        if (out->transposed && layer.v_element_bytes != ggml_type_size(ggml_type(layer.v_type))) {
            return false;
        }
        in.skip(in_all.tokens, layer.v_bytes);
    }
    return in.ok;
}

void learn_next(search &all, uint64_t at);

void learn_attention(search &all, uint64_t at) {
    reader in{all.data, all.bytes, at};
    section_shape section;
    uint32_t later_streams = 0;
    if (!learn_cells(all, in, &section, &later_streams) || !learn_keys(all, in, &section)) {
        return;
    }
    const section_shape bare = section;
    for (const bool values : {false, true}) {
        reader rest = in;
        section = bare;
        if (values && !learn_values(all, rest, &section)) {
            continue;
        }
        // Later streams must be empty.
        bool good = true;
        for (uint32_t i = 0; i < later_streams && good; i++) {
            good = rest.take<uint32_t>() == 0 && rest.ok;
        }
        if (good) {
            all.now.sections.push_back(section);
            learn_next(all, rest.at);
            all.now.sections.pop_back();
        }
    }
}

/// A recurrent section is always the last one: no field has its number of tensors.
void learn_recurrent(search &all, uint64_t at) {
    reader in{all.data, all.bytes, at};
    section_shape section;
    section.recurrent = true;
    const bool same = in.take<uint32_t>() == 1 && in.take<int32_t>() == int32_t(all.tokens) - 1 &&
                      in.take<uint32_t>() == 0 && in.take<uint32_t>() == 0;
    section.model_layers = in.take<uint32_t>();
    if (!same || !in.ok || section.model_layers == 0 || section.model_layers > max_layers) {
        return;
    }
    while (in.ok && in.at < all.bytes) {
        part_shape part;
        part.type = in.take<int32_t>();
        part.bytes = in.take<uint64_t>();
        // Convolutions without a state have rows of zero bytes.
        const bool fits = part.bytes == 0 ? part.type == GGML_TYPE_F32 : type_fits(part.type, part.bytes);
        if (!in.ok || !fits || section.parts.size() >= 2 * size_t(section.model_layers)) {
            return;
        }
        in.skip(1, part.bytes);
        section.parts.push_back(part);
    }
    if (in.ok && !section.parts.empty()) {
        all.now.sections.push_back(section);
        learn_next(all, in.at);
        all.now.sections.pop_back();
    }
}

void learn_next(search &all, uint64_t at) {
    if (at == all.bytes && !all.now.sections.empty()) {
        all.found = all.now;
        all.ways++;
        return;
    }
    if (all.now.sections.size() < max_sections) {
        learn_attention(all, at);
        learn_recurrent(all, at);
    }
}

} // namespace

bool learn_shape(const uint8_t *data, size_t bytes, int32_t sequence, uint32_t tokens, shape *out,
                 std::string *why) {
    reader in{data, bytes};
    search all{data, bytes, sequence, tokens, {}, {}};
    if (tokens >= 2 && in.take<uint32_t>() == blob_magic && in.take<int32_t>() == sequence && in.ok) {
        learn_next(all, in.at);
    }
    if (all.ways == 1) {
        *out = all.found;
        return true;
    }
    *why = all.ways == 0
               ? "this model's memory has a format that kvtier does not support (M-RoPE, or attention "
                 "with extra caches): run it without the KV tier"
               : "the state of this model can be parsed in two ways: run it without the KV tier";
    return false;
}

} // namespace kvtier_llama
