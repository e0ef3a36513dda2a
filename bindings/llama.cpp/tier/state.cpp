// Parses, measures and builds blobs of a known shape.
#include "tier/state.hpp"

#include "tier/cursor.hpp"

#include <llama.h>

#include <algorithm>
#include <cstdio>

#if LLAMA_STATE_SEQ_VERSION != 3 && LLAMA_STATE_SEQ_VERSION != 4
#error "kvtier supports LLAMA_STATE_SEQ_VERSION 3 and 4: use a newer kvtier or an older engine"
#endif

namespace kvtier_llama {

namespace {

constexpr bool has_rotations = LLAMA_STATE_SEQ_VERSION >= 4;

bool refuse(std::string *why, const char *what) {
    *why = std::string("the engine's sequence state cannot be parsed: ") + what;
    return false;
}

/// Positions must be unique. Cells of images share a position, and are indistinguishable.
bool repeats(std::vector<int32_t> positions) {
    std::sort(positions.begin(), positions.end());
    return std::adjacent_find(positions.begin(), positions.end()) != positions.end();
}

bool read_cells(const section_shape &is, reader &in, int32_t sequence, section_place *out) {
    if (in.take<uint32_t>() != is.streams) {
        return false;
    }
    uint32_t count = 0;
    // Streams of other sequences are empty. In this sequence's stream the tensors follow the cells.
    for (uint32_t stream = 0; stream < is.streams && count == 0; stream++) {
        count = in.take<uint32_t>();
        out->stream = count != 0 ? stream : 0;
    }
    if (!in.ok || count > max_cells || uint64_t(count) * 12 > in.bytes - in.at) {
        return false;
    }
    out->positions.resize(count);
    for (uint32_t i = 0; i < count; i++) {
        out->positions[i] = in.take<int32_t>();
        if (in.take<uint32_t>() != 1 || in.take<int32_t>() != sequence || out->positions[i] < 0) {
            return false;
        }
    }
    return in.ok && !repeats(out->positions);
}

bool read_v(const section_shape &is, reader &in, uint64_t cells, section_place *out) {
    for (const layer_shape &layer : is.layers) {
        if (layer.v_bytes == 0) {
            out->v_at.push_back(0);
            continue;
        }
        bool same = in.take<int32_t>() == layer.v_type;
        if (is.transposed) {
            same = same && in.take<uint32_t>() == layer.v_element_bytes &&
                   in.take<uint32_t>() == layer.v_bytes / layer.v_element_bytes;
        } else {
            same = same && in.take<uint64_t>() == layer.v_bytes;
        }
        if (!same) {
            return false;
        }
        out->v_at.push_back(in.skip(cells, layer.v_bytes));
    }
    return in.ok;
}

bool read_attention(const section_shape &is, reader &in, int32_t sequence, section_place *out) {
    if (!read_cells(is, in, sequence, out)) {
        return false;
    }
    const uint64_t cells = out->positions.size();
    if (cells == 0) {
        return true;
    }
    bool same = in.take<uint32_t>() == uint32_t(is.transposed) &&
                in.take<uint32_t>() == is.layers.size();
    if (has_rotations) {
        same = same && in.take<uint32_t>() == is.rot_k && in.take<uint32_t>() == is.rot_v;
    }
    if (!same) {
        return false;
    }
    for (const layer_shape &layer : is.layers) {
        if (in.take<int32_t>() != layer.k_type || in.take<uint64_t>() != layer.k_bytes) {
            return false;
        }
        out->k_at.push_back(in.skip(cells, layer.k_bytes));
    }
    if (!read_v(is, in, cells, out)) {
        return false;
    }
    for (uint32_t stream = out->stream + 1; stream < is.streams; stream++) {
        if (in.take<uint32_t>() != 0) {
            return false;
        }
    }
    return in.ok;
}

bool read_recurrent(const section_shape &is, reader &in, section_place *out) {
    const uint32_t cells = in.take<uint32_t>();
    if (!in.ok || cells > 1) {
        return false;
    }
    if (cells == 1) {
        out->positions.push_back(in.take<int32_t>());
        if (in.take<uint32_t>() != 0 || out->positions[0] < 0) {
            return false;
        }
    }
    if (in.take<uint32_t>() != 0 || in.take<uint32_t>() != is.model_layers) {
        return false;
    }
    for (const part_shape &part : is.parts) {
        if (in.take<int32_t>() != part.type || in.take<uint64_t>() != part.bytes) {
            return false;
        }
        out->k_at.push_back(in.skip(cells, part.bytes));
    }
    return in.ok;
}

void build_attention(const section_shape &is, const cell_range &want, int32_t sequence, writer &out,
                     section_place *place) {
    out.put(is.streams);
    for (uint32_t stream = 0; stream < want.stream; stream++) {
        out.put(uint32_t(0));
    }
    out.put(want.count);
    place->stream = want.count != 0 ? want.stream : 0;
    for (uint32_t i = 0; i < want.count; i++) {
        place->positions.push_back(want.first + int32_t(i) * want.step);
        out.put(place->positions.back());
        out.put(uint32_t(1));
        out.put(sequence);
    }
    if (want.count != 0) {
        out.put(uint32_t(is.transposed));
        out.put(uint32_t(is.layers.size()));
        if (has_rotations) {
            out.put(is.rot_k);
            out.put(is.rot_v);
        }
        for (const layer_shape &layer : is.layers) {
            out.put(layer.k_type);
            out.put(layer.k_bytes);
            place->k_at.push_back(out.skip(layer.k_bytes * want.count));
        }
        for (const layer_shape &layer : is.layers) {
            if (layer.v_bytes == 0) {
                place->v_at.push_back(0);
                continue;
            }
            out.put(layer.v_type);
            if (is.transposed) {
                out.put(layer.v_element_bytes);
                out.put(uint32_t(layer.v_bytes / layer.v_element_bytes));
            } else {
                out.put(layer.v_bytes);
            }
            place->v_at.push_back(out.skip(layer.v_bytes * want.count));
        }
    }
    for (uint32_t stream = want.stream + 1; stream < is.streams; stream++) {
        out.put(uint32_t(0));
    }
}

void build_recurrent(const section_shape &is, const cell_range &want, writer &out,
                     section_place *place) {
    out.put(want.count);
    if (want.count != 0) {
        place->positions.push_back(want.first);
        out.put(want.first);
        out.put(uint32_t(0));
    }
    out.put(uint32_t(0));
    out.put(is.model_layers);
    for (const part_shape &part : is.parts) {
        out.put(part.type);
        out.put(part.bytes);
        place->k_at.push_back(out.skip(part.bytes * want.count));
    }
}

} // namespace

size_t section_shape::planes() const {
    size_t count = layers.size();
    for (const part_shape &part : parts) {
        count += part.bytes != 0;
    }
    return count;
}

bool shape::has_attention() const {
    for (const section_shape &section : sections) {
        if (!section.recurrent) {
            return true;
        }
    }
    return false;
}

bool shape::has_states() const {
    for (const section_shape &section : sections) {
        if (section.recurrent) {
            return true;
        }
    }
    return false;
}

bool shape::has_windows() const {
    for (const section_shape &section : sections) {
        if (section.window_tokens != 0) {
            return true;
        }
    }
    return false;
}

uint32_t shape::streams() const {
    for (const section_shape &section : sections) {
        if (!section.recurrent) {
            return section.streams;
        }
    }
    return 1;
}

std::string shape::describe() const {
    std::string text = "state " + std::to_string(LLAMA_STATE_SEQ_VERSION);
    char word[160];
    for (const section_shape &section : sections) {
        std::snprintf(word, sizeof word, "; %s streams %u transposed %d rot %u %u window %u layers %u",
                      section.recurrent ? "recurrent" : "attention", section.streams,
                      int(section.transposed), section.rot_k, section.rot_v, section.window_tokens,
                      section.model_layers);
        text += word;
        for (const layer_shape &layer : section.layers) {
            std::snprintf(word, sizeof word, ", %d %llu %d %llu %u", int(layer.k_type),
                          (unsigned long long) layer.k_bytes, int(layer.v_type),
                          (unsigned long long) layer.v_bytes, layer.v_element_bytes);
            text += word;
        }
        for (const part_shape &part : section.parts) {
            std::snprintf(word, sizeof word, ", %d %llu", int(part.type),
                          (unsigned long long) part.bytes);
            text += word;
        }
    }
    return text;
}

bool read_blob(const shape &is, const uint8_t *data, size_t bytes, int32_t sequence, blob_place *out,
               std::string *why) {
    reader in{data, bytes};
    out->bytes = bytes;
    out->sections.assign(is.sections.size(), section_place{});
    if (in.take<uint32_t>() != blob_magic || in.take<int32_t>() != sequence || !in.ok) {
        return refuse(why, "its magic word or its sequence id is wrong");
    }
    for (size_t i = 0; i < is.sections.size(); i++) {
        const section_shape &section = is.sections[i];
        section_place *place = &out->sections[i];
        const bool good = section.recurrent ? read_recurrent(section, in, place)
                                            : read_attention(section, in, sequence, place);
        if (!good) {
            return refuse(why, "a section differs from the shape of this context's states");
        }
    }
    return in.at == bytes || refuse(why, "it has bytes after its last section");
}

uint64_t blob_bytes(const shape &is, const std::vector<cell_range> &cells) {
    uint64_t rows = 0;
    for (size_t i = 0; i < is.sections.size(); i++) {
        uint64_t each = 12;
        for (const layer_shape &layer : is.sections[i].layers) {
            each += layer.k_bytes + layer.v_bytes;
        }
        for (const part_shape &part : is.sections[i].parts) {
            each += part.bytes;
        }
        if (cells[i].count > max_cells || each > (uint64_t(1) << 48) / (cells[i].count + 1)) {
            return 0;
        }
        rows += each * cells[i].count;
    }
    // The rest are headings: a few words for each stream and tensor.
    return rows > uint64_t(1) << 48 ? 0 : build_blob(is, cells, 0, nullptr).bytes;
}

blob_place build_blob(const shape &is, const std::vector<cell_range> &cells, int32_t sequence,
                      uint8_t *data) {
    writer out{data};
    blob_place place;
    place.sections.assign(is.sections.size(), section_place{});
    out.put(blob_magic);
    out.put(sequence);
    for (size_t i = 0; i < is.sections.size(); i++) {
        if (is.sections[i].recurrent) {
            build_recurrent(is.sections[i], cells[i], out, &place.sections[i]);
        } else {
            build_attention(is.sections[i], cells[i], sequence, out, &place.sections[i]);
        }
    }
    place.bytes = out.at;
    return place;
}

} // namespace kvtier_llama
