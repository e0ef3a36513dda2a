// Parses, measures and builds blobs of a known shape.
#include "tier/state.hpp"

#include "common/engine.hpp"
#include "tier/cursor.hpp"

#include <algorithm>
#include <cstdio>
#include <tuple>

namespace kvtier_llama {

namespace {

bool refuse(std::string *why, const char *what) {
    *why = std::string("the engine's sequence state cannot be parsed: ") + what;
    return false;
}

/// Cells must be distinguishable. Cells of an image share a position, but not x and y.
bool repeats(const std::vector<cell_t> &cells) {
    using place_t = std::tuple<int32_t, int32_t, int32_t>;
    std::vector<place_t> places;
    for (const cell_t &cell : cells) {
        places.emplace_back(cell.position, cell.x, cell.y);
    }
    std::sort(places.begin(), places.end());
    return std::adjacent_find(places.begin(), places.end()) != places.end();
}

/// Reads the number of rows, and the cells if the section has some.
bool read_cells(const section_shape &is, reader &in, int32_t sequence, section_place *out) {
    if (in.take<uint32_t>() != is.streams) {
        return false;
    }
    // Streams of other sequences are empty. In this sequence's stream the tensors follow the cells.
    for (uint32_t stream = 0; stream < is.streams && out->rows == 0; stream++) {
        out->rows = in.take<uint32_t>();
        out->stream = out->rows != 0 ? stream : 0;
    }
    const uint64_t each = 12 + 4 * uint64_t(is.extra_words);
    if (!in.ok || out->rows > max_cells || out->rows * each > in.bytes - in.at) {
        return false;
    }
    out->cells.resize(out->rows);
    for (cell_t &cell : out->cells) {
        cell.position = in.take<int32_t>();
        bool same = in.take<uint32_t>() == 1;
        if (is.extra_words >= 2) {
            cell.x = in.take<int32_t>();
            cell.y = in.take<int32_t>();
        }
        if (is.extra_words == 3) {
            cell.token = in.take<int32_t>();
        }
        same = same && in.take<int32_t>() == sequence && cell.position >= 0;
        same = same && (is.spatial || (cell.x == 0 && cell.y == 0));
        if (!same) {
            return false;
        }
    }
    return in.ok && !repeats(out->cells);
}

bool read_state_cell(reader &in, section_place *out) {
    out->rows = in.take<uint32_t>();
    if (!in.ok || out->rows > 1) {
        return false;
    }
    if (out->rows == 1) {
        out->cells.push_back(cell_t{in.take<int32_t>(), 0, 0, -1});
        return in.take<uint32_t>() == 0 && out->cells[0].position >= 0;
    }
    return true;
}

bool read_planes(const section_shape &is, reader &in, section_place *out) {
    if (!in.matches(is.heading)) {
        return false;
    }
    for (const plane_shape &plane : is.planes) {
        bool same = in.matches(plane.heading);
        if (!plane.tail.empty()) {
            same = same && in.take<uint64_t>() == out->rows && in.matches(plane.tail);
        }
        if (!same) {
            return false;
        }
        out->at.push_back(in.skip(out->rows, plane.row_bytes));
    }
    return in.ok;
}

/// `last` is the last position of the sections before this one.
bool read_section(const section_shape &is, reader &in, int32_t sequence, int32_t last, section_place *out) {
    if (!in.matches(is.prefix)) {
        return false;
    }
    switch (is.kind) {
    case section_kind::cells: {
        if (!read_cells(is, in, sequence, out) || (out->rows != 0 && !read_planes(is, in, out))) {
            return false;
        }
        for (uint32_t stream = out->stream + 1; out->rows != 0 && stream < is.streams; stream++) {
            if (in.take<uint32_t>() != 0) {
                return false;
            }
        }
        return in.ok;
    }
    case section_kind::state: return read_state_cell(in, out) && read_planes(is, in, out);
    case section_kind::end_state:
        out->rows = 1;
        out->cells.push_back(cell_t{last, 0, 0, -1});
        return read_planes(is, in, out);
    case section_kind::compressed:
        out->rows = in.take<uint32_t>();
        return in.ok && out->rows <= max_cells && read_planes(is, in, out);
    }
    return false;
}

void build_cells(const section_shape &is, const cell_range &want, int32_t sequence, writer &out,
                 section_place *place) {
    out.put(is.streams);
    for (uint32_t stream = 0; stream < want.stream; stream++) {
        out.put(uint32_t(0));
    }
    out.put(want.count);
    place->stream = want.count != 0 ? want.stream : 0;
    if (!out.data) {
        out.at += want.count * (12 + 4 * uint64_t(is.extra_words));
        return;
    }
    for (uint32_t i = 0; i < want.count; i++) {
        const cell_t cell = cell_of(is, want.cells[i]);
        place->cells.push_back(cell);
        out.put(cell.position);
        out.put(uint32_t(1));
        if (is.extra_words >= 2) {
            out.put(cell.x);
            out.put(cell.y);
        }
        if (is.extra_words == 3) {
            out.put(cell.token);
        }
        out.put(sequence);
    }
}

void build_planes(const section_shape &is, writer &out, section_place *place) {
    out.put_bytes(is.heading);
    for (const plane_shape &plane : is.planes) {
        out.put_bytes(plane.heading);
        if (!plane.tail.empty()) {
            out.put(uint64_t(place->rows));
            out.put_bytes(plane.tail);
        }
        place->at.push_back(out.skip(plane.row_bytes * place->rows));
    }
}

void build_section(const section_shape &is, const cell_range &want, int32_t sequence, writer &out,
                   section_place *place) {
    out.put_bytes(is.prefix);
    place->rows = want.count;
    if (is.kind == section_kind::cells) {
        build_cells(is, want, sequence, out, place);
        if (want.count != 0) {
            build_planes(is, out, place);
        }
        for (uint32_t stream = want.stream + 1; stream < is.streams; stream++) {
            out.put(uint32_t(0));
        }
        return;
    }
    if (is.kind != section_kind::end_state) {
        out.put(want.count);
    }
    if (is.is_state() && want.count != 0) {
        place->cells.push_back(cell_t{want.cells ? want.cells[0].position : 0, 0, 0, -1});
    }
    if (is.kind == section_kind::state && want.count != 0) {
        out.put(place->cells[0].position);
        out.put(uint32_t(0));
    }
    build_planes(is, out, place);
}

/// Hexadecimal text of bytes.
std::string text_of(const std::string &bytes) {
    std::string text = " ";
    char word[4];
    for (const char byte : bytes) {
        std::snprintf(word, sizeof word, "%02x", unsigned(uint8_t(byte)));
        text += word;
    }
    return text;
}

} // namespace

size_t section_shape::layers() const {
    if (!is_state()) {
        return has_v ? planes.size() / 2 : planes.size();
    }
    return size_t(std::count_if(planes.begin(), planes.end(),
                                [](const plane_shape &plane) { return plane.row_bytes != 0; }));
}

bool shape::has_attention() const {
    return std::any_of(sections.begin(), sections.end(),
                       [](const section_shape &one) { return !one.is_state(); });
}

bool shape::has_states() const {
    return std::any_of(sections.begin(), sections.end(),
                       [](const section_shape &one) { return one.is_state(); });
}

uint32_t shape::window_tokens() const {
    uint32_t most = 0;
    for (const section_shape &section : sections) {
        most = std::max(most, section.window_tokens);
    }
    return most;
}

uint32_t shape::row_tokens() const {
    uint32_t most = 1;
    for (const section_shape &section : sections) {
        most = std::max(most, section.row_tokens);
    }
    return most;
}

uint32_t shape::streams() const {
    for (const section_shape &section : sections) {
        if (section.kind == section_kind::cells) {
            return section.streams;
        }
    }
    return 1;
}

std::string shape::describe() const {
    std::string text = "state " + std::to_string(LLAMA_STATE_SEQ_VERSION) + text_of(heading);
    char word[160];
    for (const section_shape &section : sections) {
        std::snprintf(word, sizeof word, "; kind %d streams %u words %u %d window %u row %u v %d",
                      int(section.kind), section.streams, section.extra_words, int(section.spatial),
                      section.window_tokens, section.row_tokens, int(section.has_v));
        text += word + text_of(section.prefix) + text_of(section.heading);
        for (const plane_shape &plane : section.planes) {
            std::snprintf(word, sizeof word, ", %d %llu %u", int(plane.type),
                          (unsigned long long) plane.row_bytes, plane.element_bytes);
            text += word + text_of(plane.heading) + text_of(plane.tail);
        }
    }
    return text;
}

bool read_blob(const shape &is, const uint8_t *data, size_t bytes, int32_t sequence, blob_place *out,
               std::string *why) {
    reader in{data, bytes};
    out->bytes = bytes;
    out->sections.assign(is.sections.size(), section_place{});
    if (in.take<uint32_t>() != blob_magic || in.take<int32_t>() != sequence || !in.matches(is.heading)) {
        return refuse(why, "its magic word or its sequence id is wrong");
    }
    int32_t last = -1;
    for (size_t i = 0; i < is.sections.size(); i++) {
        section_place *place = &out->sections[i];
        if (!read_section(is.sections[i], in, sequence, last, place)) {
            return refuse(why, "a section differs from the shape of this context's states");
        }
        for (const cell_t &cell : place->cells) {
            last = std::max(last, cell.position);
        }
    }
    return in.at == bytes || refuse(why, "it has bytes after its last section");
}

cell_t cell_of(const section_shape &is, const cell_t &cell) {
    return {cell.position, is.spatial ? cell.x : 0, is.spatial ? cell.y : 0,
            is.extra_words != 3 ? -1 : cell.token < 0 ? is.no_token : cell.token};
}

uint64_t blob_bytes(const shape &is, const std::vector<cell_range> &cells) {
    uint64_t rows = 0;
    for (size_t i = 0; i < is.sections.size(); i++) {
        uint64_t each = 24;
        for (const plane_shape &plane : is.sections[i].planes) {
            each += plane.row_bytes;
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
                      uint8_t *data, bool packed) {
    writer out{data, packed};
    blob_place place;
    place.sections.assign(is.sections.size(), section_place{});
    out.put(blob_magic);
    out.put(sequence);
    out.put_bytes(is.heading);
    for (size_t i = 0; i < is.sections.size(); i++) {
        build_section(is.sections[i], cells[i], sequence, out, &place.sections[i]);
    }
    place.bytes = out.at;
    place.heading_bytes = out.at - out.skipped;
    return place;
}

} // namespace kvtier_llama
