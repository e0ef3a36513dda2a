// Infers the shape of a blob of which only the tokens are known. Headings give most of the shape. The
// kind of a section, the words of a cell and the presence of V are tried; exactly one way must end where
// the blob ends.
#include "common/engine.hpp"
#include "tier/cursor.hpp"
#include "tier/state.hpp"

#include <ggml.h>

#include <utility>

namespace kvtier_llama {

namespace {

constexpr size_t max_sections = 10;
/// The memory of DeepSeek V4 begins with a heading; compressed keys and states follow its cells.
constexpr uint32_t dsv4_magic = 0x34565344, dsv4_version = 1, dsv4_full = 0;
constexpr uint32_t dsv4_keys_version = 2, dsv4_state_version = 1;

struct search {
    const uint8_t *data;
    uint64_t bytes;
    int32_t sequence;
    const std::vector<int32_t> &tokens;
    shape now;
    shape found;
    uint32_t ways = 0;

    uint32_t count() const { return uint32_t(tokens.size()); }
};

void learn_next(search &all, uint64_t at);

/// Continues the search after one more section.
void learn_after(search &all, const section_shape &section, uint64_t at) {
    all.now.sections.push_back(section);
    learn_next(all, at);
    all.now.sections.pop_back();
}

bool type_fits(int32_t type, uint64_t bytes) {
    if (type < 0 || type >= int32_t(GGML_TYPE_COUNT) || bytes == 0 || bytes > max_row_bytes) {
        return false;
    }
    const size_t each = ggml_type_size(ggml_type(type));
    return each != 0 && bytes % each == 0;
}

/// Reads the cells of all tokens, with a number of words for each that is tried.
bool learn_cells(const search &all, reader &in, section_shape *out, uint32_t *later_streams) {
    out->streams = in.take<uint32_t>();
    if (!in.ok || out->streams == 0 || out->streams > max_streams) {
        return false;
    }
    uint32_t count = 0;
    for (uint32_t stream = 0; stream < out->streams && count == 0; stream++) {
        count = in.take<uint32_t>();
        *later_streams = out->streams - 1 - stream;
    }
    if (!in.ok || count != all.count()) {
        return false;
    }
    for (uint32_t i = 0; i < count; i++) {
        bool same = in.take<int32_t>() == int32_t(i) && in.take<uint32_t>() == 1;
        if (out->extra_words >= 2) {
            const int32_t x = in.take<int32_t>(), y = in.take<int32_t>();
            // Text has its position as x and y with M-RoPE, and 0 without.
            out->spatial = i == 1 ? x != 0 : out->spatial;
            same = same && x == y && x == (out->spatial ? int32_t(i) : 0);
        }
        same = same && (out->extra_words != 3 || in.take<int32_t>() == all.tokens[i]);
        if (!same || in.take<int32_t>() != all.sequence) {
            return false;
        }
    }
    return in.ok;
}

bool learn_keys(const search &all, reader &in, section_shape *out, bool *transposed) {
    const uint64_t from = in.at;
    const uint32_t trans = in.take<uint32_t>();
    const uint32_t layers = in.take<uint32_t>();
    if (has_rotations) {
        in.take<uint32_t>();
        in.take<uint32_t>();
    }
    if (!in.ok || trans > 1 || layers > max_layers) {
        return false;
    }
    *transposed = trans == 1;
    out->heading = in.since(from);
    for (uint32_t i = 0; i < layers; i++) {
        plane_shape plane;
        const uint64_t begin = in.at;
        plane.type = in.take<int32_t>();
        plane.row_bytes = in.take<uint64_t>();
        if (!in.ok || !type_fits(plane.type, plane.row_bytes)) {
            return false;
        }
        plane.heading = in.since(begin);
        in.skip(all.count(), plane.row_bytes);
        out->planes.push_back(plane);
    }
    return in.ok;
}

bool learn_values(const search &all, reader &in, section_shape *out, bool transposed) {
    const size_t layers = out->planes.size();
    for (size_t i = 0; i < layers; i++) {
        plane_shape plane;
        const uint64_t begin = in.at;
        plane.type = in.take<int32_t>();
        if (transposed) {
            plane.element_bytes = in.take<uint32_t>();
            plane.row_bytes = uint64_t(in.take<uint32_t>()) * plane.element_bytes;
        } else {
            plane.row_bytes = in.take<uint64_t>();
        }
        if (!in.ok || !type_fits(plane.type, plane.row_bytes)) {
            return false;
        }
        if (transposed && plane.element_bytes != ggml_type_size(ggml_type(plane.type))) {
            return false;
        }
        plane.heading = in.since(begin);
        in.skip(all.count(), plane.row_bytes);
        out->planes.push_back(plane);
    }
    out->has_v = true;
    return in.ok && layers != 0;
}

void learn_attention(search &all, uint64_t at, uint32_t extra_words) {
    reader in{all.data, all.bytes, at};
    section_shape section;
    section.extra_words = extra_words;
    uint32_t later_streams = 0;
    bool transposed = false;
    if (!learn_cells(all, in, &section, &later_streams) || !learn_keys(all, in, &section, &transposed)) {
        return;
    }
    const section_shape bare = section;
    for (const bool values : {false, true}) {
        reader rest = in;
        section = bare;
        if (values && !learn_values(all, rest, &section, transposed)) {
            continue;
        }
        // Later streams must be empty.
        bool good = true;
        for (uint32_t i = 0; i < later_streams && good; i++) {
            good = rest.take<uint32_t>() == 0 && rest.ok;
        }
        if (good) {
            learn_after(all, section, rest.at);
        }
    }
}

/// Reads one tensor of a recurrent section. The history of an n-gram convolution follows the tensor of
/// its layer, and has no type.
bool learn_state_plane(reader &in, bool is_first, plane_shape *out) {
    const uint64_t begin = in.at;
    reader typed = in;
    out->type = typed.take<int32_t>();
    out->row_bytes = typed.take<uint64_t>();
    // Convolutions without a state have rows of zero bytes.
    const bool empty = out->row_bytes == 0 && out->type == GGML_TYPE_F32;
    if (typed.ok && (empty || type_fits(out->type, out->row_bytes))) {
        in = typed;
    } else {
        out->type = GGML_TYPE_F32;
        out->row_bytes = in.take<uint64_t>();
        if (is_first || !in.ok || !type_fits(out->type, out->row_bytes)) {
            return false;
        }
    }
    out->heading = in.since(begin);
    in.skip(1, out->row_bytes);
    return in.ok;
}

/// No field has the number of tensors of a recurrent section: the search goes on after each of them.
void learn_recurrent(search &all, uint64_t at) {
    reader in{all.data, all.bytes, at};
    section_shape section;
    section.kind = section_kind::state;
    bool same = in.take<uint32_t>() == 1 && in.take<int32_t>() == int32_t(all.count()) - 1 &&
                in.take<uint32_t>() == 0;
    const uint64_t from = in.at;
    same = same && in.take<uint32_t>() == 0;
    const uint32_t model_layers = in.take<uint32_t>();
    if (!same || !in.ok || model_layers == 0 || model_layers > max_layers) {
        return;
    }
    section.heading = in.since(from);
    plane_shape plane;
    while (section.planes.size() < 3 * size_t(model_layers) &&
           learn_state_plane(in, section.planes.empty(), &plane)) {
        section.planes.push_back(plane);
        learn_after(all, section, in.at);
    }
}

/// Reads a tensor of DeepSeek V4: its layer, if it is the first one of that layer, type, elements,
/// number of rows, bytes of a row.
bool learn_dsv4_plane(reader &in, bool with_layer, uint32_t rows, plane_shape *out) {
    const uint64_t begin = in.at;
    if (with_layer) {
        in.take<uint32_t>();
    }
    out->type = in.take<int32_t>();
    in.take<uint64_t>();
    out->heading = in.since(begin);
    const uint64_t rows_here = in.take<uint64_t>();
    const uint64_t tail = in.at;
    out->row_bytes = in.take<uint64_t>();
    out->tail = in.since(tail);
    return in.ok && rows_here == rows && type_fits(out->type, out->row_bytes);
}

/// Compressed keys. Their number of rows stands in `row_tokens` until learn_dsv4_state.
void learn_compressed(search &all, uint64_t at) {
    reader in{all.data, all.bytes, at};
    section_shape section;
    section.kind = section_kind::compressed;
    bool same = in.take<uint32_t>() == dsv4_keys_version;
    section.prefix = in.since(at);
    const uint32_t rows = in.take<uint32_t>();
    const uint64_t from = in.at;
    same = same && in.take<uint32_t>() == 1;
    const uint32_t layers = in.take<uint32_t>();
    if (!same || !in.ok || layers > max_layers || rows > all.count()) {
        return;
    }
    section.heading = in.since(from);
    for (uint32_t i = 0; i < layers; i++) {
        plane_shape plane;
        if (!learn_dsv4_plane(in, true, rows, &plane)) {
            return;
        }
        in.skip(rows, plane.row_bytes);
        section.planes.push_back(plane);
    }
    section.row_tokens = rows;
    if (in.ok) {
        learn_after(all, section, in.at);
    }
}

/// The compressed keys of the next compressor's state: both are in the same order.
section_shape *keys_of_next_state(shape &now) {
    size_t states = 0;
    for (const section_shape &section : now.sections) {
        states += section.kind == section_kind::end_state;
    }
    for (section_shape &section : now.sections) {
        if (section.kind == section_kind::compressed && states-- == 0) {
            return &section;
        }
    }
    return nullptr;
}

/// The state of a compressor.
void learn_dsv4_state(search &all, uint64_t at) {
    reader in{all.data, all.bytes, at};
    section_shape section;
    section.kind = section_kind::end_state;
    bool same = in.take<uint32_t>() == dsv4_state_version;
    uint32_t row_tokens = in.take<uint32_t>();
    const uint32_t rows = in.take<uint32_t>();
    in.take<uint32_t>();
    same = same && in.take<uint32_t>() == 1;
    const uint32_t layers = in.take<uint32_t>();
    if (!same || !in.ok || layers > max_layers || row_tokens == 0 || rows == 0) {
        return;
    }
    section.heading = in.since(at);
    for (uint32_t i = 0; i < 2 * layers; i++) {
        plane_shape plane;
        if (!learn_dsv4_plane(in, i % 2 == 0, rows, &plane) || plane.row_bytes > max_row_bytes / rows) {
            return;
        }
        // The whole tensor is one row, since its size is constant.
        const std::string rows_word(reinterpret_cast<const char *>(all.data) + in.at - 16, 8);
        plane.heading += rows_word + plane.tail;
        plane.tail.clear();
        plane.row_bytes *= rows;
        in.skip(1, plane.row_bytes);
        section.planes.push_back(plane);
    }
    section_shape *keys = keys_of_next_state(all.now);
    if (in.ok && keys && all.count() / row_tokens == keys->row_tokens) {
        const size_t place = size_t(keys - all.now.sections.data());
        std::swap(keys->row_tokens, row_tokens);
        learn_after(all, section, in.at);
        all.now.sections[place].row_tokens = row_tokens;
    }
}

/// Tells whether compressed keys have their states, and something has planes.
bool is_complete(const shape &now) {
    size_t compressed = 0, states = 0, planes = 0;
    for (const section_shape &section : now.sections) {
        compressed += section.kind == section_kind::compressed;
        states += section.kind == section_kind::end_state;
        planes += section.planes.size();
    }
    return planes != 0 && compressed == states;
}

void learn_next(search &all, uint64_t at) {
    if (at == all.bytes && is_complete(all.now)) {
        all.found = all.now;
        all.ways++;
        return;
    }
    if (all.now.sections.size() == max_sections) {
        return;
    }
    for (const uint32_t extra_words : {0u, 2u, 3u}) {
        learn_attention(all, at, extra_words);
    }
    if (all.now.heading.empty()) {
        learn_recurrent(all, at);
    } else {
        learn_compressed(all, at);
        learn_dsv4_state(all, at);
    }
}

} // namespace

bool learn_shape(const uint8_t *data, size_t bytes, int32_t sequence, const std::vector<int32_t> &tokens,
                 shape *out, std::string *why) {
    reader in{data, bytes};
    search all{data, bytes, sequence, tokens, {}, {}};
    if (tokens.size() >= 2 && in.take<uint32_t>() == blob_magic && in.take<int32_t>() == sequence && in.ok) {
        reader heading = in;
        if (heading.take<uint32_t>() == dsv4_magic && heading.take<uint32_t>() == dsv4_version &&
            heading.take<uint32_t>() == dsv4_full && heading.ok) {
            all.now.heading = heading.since(in.at);
            in = heading;
        }
        learn_next(all, in.at);
    }
    if (all.ways == 1) {
        *out = all.found;
        return true;
    }
    *why = all.ways == 0 ? "this model's memory has a format that kvtier does not know: use a newer kvtier, or "
                           "run it without the KV tier"
                         : "the state of this model can be parsed in two ways: run it without the KV tier";
    return false;
}

} // namespace kvtier_llama
