// The parser of sequence states: it refuses flipped header bits and wrong lengths, or they change only
// cells, which callers compare. Valid states are parsed, and built again bit for bit.
#include "fixture.hpp"

#include "tier/state.hpp"

using namespace tier_test;
using namespace kvtier_llama;

namespace {

constexpr int32_t seq = 1;
constexpr uint32_t seq_tokens = 48;

struct sample {
    shape layout;
    tokens_t tokens;
    std::vector<uint8_t> blob;
    blob_place place;
};

std::vector<uint8_t> state_of(llama_context *ctx) {
    std::vector<uint8_t> blob(llama_state_seq_get_size(ctx, seq));
    CHECK(llama_state_seq_get_data(ctx, blob.data(), blob.size(), seq) == blob.size());
    return blob;
}

sample make_sample(llama_model *model, const context_config &config) {
    llama_context *ctx = context(model, config);
    const tokens_t tokens = prompt(model, 3, seq_tokens);
    sample out;
    std::string why;
    CHECK(decode(ctx, seq, tokens, 0, 2, 2) == 0);
    const std::vector<uint8_t> two = state_of(ctx);
    const tokens_t first(tokens.begin(), tokens.begin() + 2), more(tokens.begin(), tokens.begin() + 3);
    out.tokens = tokens;
    CHECK(!learn_shape(two.data(), two.size(), seq, more, &out.layout, &why) && !why.empty());
    CHECK(decode(ctx, seq, tokens, 2, seq_tokens, 64) == 0);
    out.blob = state_of(ctx);
    shape again;
    CHECK(learn_shape(out.blob.data(), out.blob.size(), seq, tokens, &again, &why));
    CHECK(learn_shape(two.data(), two.size(), seq, first, &out.layout, &why));
    CHECK(again.describe() == out.layout.describe());
    CHECK(read_blob(out.layout, out.blob.data(), out.blob.size(), seq, &out.place, &why));
    CHECK(!read_blob(out.layout, out.blob.data(), out.blob.size(), 0, &out.place, &why));
    CHECK(read_blob(out.layout, out.blob.data(), out.blob.size(), seq, &out.place, &why));
    llama_free(ctx);
    return out;
}

/// Marks the bytes of rows. The parser does not interpret them.
std::vector<bool> rows_of(const sample &s) {
    std::vector<bool> rows(s.blob.size(), false);
    const auto mark = [&](uint64_t at, uint64_t bytes) {
        CHECK(at + bytes <= rows.size());
        std::fill(rows.begin() + long(at), rows.begin() + long(at + bytes), true);
    };
    for (size_t i = 0; i < s.layout.sections.size(); i++) {
        const section_shape &layout = s.layout.sections[i];
        const section_place &place = s.place.sections[i];
        for (size_t j = 0; j < layout.planes.size(); j++) {
            mark(place.at[j], layout.planes[j].row_bytes * place.rows);
        }
    }
    return rows;
}

bool same_rows(const blob_place &a, const blob_place &b) {
    for (size_t i = 0; i < a.sections.size(); i++) {
        const section_place &x = a.sections[i], &y = b.sections[i];
        if (x.at != y.at || x.rows != y.rows) {
            return false;
        }
    }
    return true;
}

bool same_cells(const blob_place &a, const blob_place &b) {
    for (size_t i = 0; i < a.sections.size(); i++) {
        const auto same = [](const cell_t &x, const cell_t &y) {
            return x.position == y.position && x.x == y.x && x.y == y.y && x.token == y.token;
        };
        if (!std::equal(a.sections[i].cells.begin(), a.sections[i].cells.end(), b.sections[i].cells.begin(),
                        same)) {
            return false;
        }
    }
    return true;
}

/// A flip may change cells only: positions, and what M-RoPE adds. They are free content of a state; callers
/// compare them with the expected cells.
void flipped_header_bits_are_refused_or_change_cells(const sample &s) {
    const std::vector<bool> rows = rows_of(s);
    std::string why;
    blob_place place;
    size_t refused = 0, moved = 0, header_bytes = 0;
    for (size_t i = 0; i < s.blob.size(); i++) {
        if (rows[i]) {
            continue;
        }
        header_bytes++;
        for (const int bit : {0, 3, 7}) {
            std::vector<uint8_t> other = s.blob;
            other[i] ^= uint8_t(1 << bit);
            if (!read_blob(s.layout, other.data(), other.size(), seq, &place, &why)) {
                refused++;
                continue;
            }
            CHECK(same_rows(place, s.place) && !same_cells(place, s.place));
            moved++;
            shape learned;
            CHECK(!learn_shape(other.data(), other.size(), seq, s.tokens, &learned, &why));
        }
    }
    std::printf("%zu header bytes: %zu flips refused, %zu read as other cells\n", header_bytes, refused,
                moved);
    CHECK(refused > 0);
}

void wrong_lengths_are_refused(const sample &s) {
    std::string why;
    blob_place place;
    shape learned;
    const size_t step = std::max<size_t>(1, s.blob.size() / 3000);
    for (size_t bytes = 0; bytes < s.blob.size(); bytes += bytes < 2048 ? 1 : step) {
        CHECK(!read_blob(s.layout, s.blob.data(), bytes, seq, &place, &why));
        // A state cut between tensors looks like the state of a model with fewer tensors.
        if (learn_shape(s.blob.data(), bytes, seq, s.tokens, &learned, &why)) {
            CHECK(learned.describe() != s.layout.describe());
        }
    }
    std::vector<uint8_t> longer = s.blob;
    for (size_t i = 0; i < 64; i++) {
        longer.push_back(0);
        CHECK(!read_blob(s.layout, longer.data(), longer.size(), seq, &place, &why));
    }
}

/// Random header bytes cause no read out of bounds and no oversized allocation.
void random_headers_are_read_within_bounds(const sample &s) {
    std::string why;
    blob_place place;
    shape learned;
    uint64_t x = 7;
    const std::vector<bool> rows = rows_of(s);
    for (int round = 0; round < 2000; round++) {
        std::vector<uint8_t> other = s.blob;
        for (size_t i = 8; i < other.size(); i++) {
            x = x * 6364136223846793005u + 1442695040888963407u;
            if (!rows[i] && (x >> 60) == 0) {
                other[i] = uint8_t(x >> 40);
            }
        }
        if (read_blob(s.layout, other.data(), other.size(), seq, &place, &why)) {
            CHECK(same_rows(place, s.place));
        }
        learn_shape(other.data(), other.size(), seq, s.tokens, &learned, &why);
    }
}

void built_state_equals_the_engines_state(const sample &s) {
    std::vector<cell_range> cells;
    for (const section_place &place : s.place.sections) {
        cells.push_back({place.cells.data(), place.rows, place.stream});
    }
    CHECK(blob_bytes(s.layout, cells) == s.blob.size());
    std::vector<uint8_t> built = s.blob;
    const std::vector<bool> rows = rows_of(s);
    for (size_t i = 0; i < built.size(); i++) {
        built[i] = rows[i] ? built[i] : 0xa5;
    }
    build_blob(s.layout, cells, seq, built.data());
    CHECK(built == s.blob);
    cells[0].count = UINT32_MAX;
    CHECK(blob_bytes(s.layout, cells) == 0);
}

/// Two cells with one position are ambiguous, unless M-RoPE gives them another x or y.
void equal_cells_are_refused(const sample &s) {
    const bool spatial = std::any_of(s.layout.sections.begin(), s.layout.sections.end(),
                                     [](const section_shape &one) { return one.spatial; });
    std::string why;
    blob_place place;
    for (const int other : {0, 1, 2}) {
        const cell_t both[2] = {{3, 3, 3, 5}, {other == 1 ? 4 : 3, other == 2 ? 4 : 3, 3, 5}};
        std::vector<cell_range> cells;
        for (const section_shape &layout : s.layout.sections) {
            const bool attention = layout.kind == section_kind::cells;
            cells.push_back({both, attention ? 2u : layout.kind == section_kind::end_state ? 1u : 0u});
        }
        std::vector<uint8_t> blob(blob_bytes(s.layout, cells));
        build_blob(s.layout, cells, seq, blob.data());
        const bool wanted = other == 1 || (other == 2 && spatial) || !s.layout.has_attention();
        CHECK(read_blob(s.layout, blob.data(), blob.size(), seq, &place, &why) == wanted);
    }
}

} // namespace

int main(int argc, char **argv) {
    CHECK(argc == 2);
    llama_model *model = load(model_path(argv[1]));
    for (const bool flash : {true, false}) {
        for (const bool unified : {true, false}) {
            context_config config;
            config.flash = flash;
            config.unified = unified;
            const sample s = make_sample(model, config);
            built_state_equals_the_engines_state(s);
            flipped_header_bits_are_refused_or_change_cells(s);
            wrong_lengths_are_refused(s);
            random_headers_are_read_within_bounds(s);
            equal_cells_are_refused(s);
        }
    }
    llama_model_free(model);
    return 0;
}
