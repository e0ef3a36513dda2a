// Sequence states that were damaged: each flipped byte of a heading, and each length but the right one,
// is refused, or says nothing that is believed. Whole ones are read and built again.
#include "world.hpp"

#include "tier/state.hpp"

using namespace world;
using namespace kvtier_llama;

namespace {

constexpr int32_t seq = 1;
constexpr uint32_t held = 48;

struct sample {
    shape is;
    std::vector<uint8_t> blob;
    blob_place place;
};

std::vector<uint8_t> state_of(llama_context *ctx) {
    std::vector<uint8_t> blob(llama_state_seq_get_size(ctx, seq));
    CHECK(llama_state_seq_get_data(ctx, blob.data(), blob.size(), seq) == blob.size());
    return blob;
}

sample take(llama_model *model, const how &is) {
    llama_context *ctx = context(model, is);
    const tokens_t tokens = prompt(model, 3, held);
    sample out;
    std::string why;
    CHECK(decode(ctx, seq, tokens, 0, 2, 2) == 0);
    const std::vector<uint8_t> two = state_of(ctx);
    CHECK(learn_shape(two.data(), two.size(), seq, 2, &out.is, &why));
    CHECK(!learn_shape(two.data(), two.size(), seq, 3, &out.is, &why) && !why.empty());
    CHECK(decode(ctx, seq, tokens, 2, held, 64) == 0);
    out.blob = state_of(ctx);
    shape again;
    CHECK(learn_shape(out.blob.data(), out.blob.size(), seq, held, &again, &why));
    CHECK(learn_shape(two.data(), two.size(), seq, 2, &out.is, &why));
    CHECK(again.words() == out.is.words());
    CHECK(read_blob(out.is, out.blob.data(), out.blob.size(), seq, &out.place, &why));
    CHECK(!read_blob(out.is, out.blob.data(), out.blob.size(), 0, &out.place, &why));
    CHECK(read_blob(out.is, out.blob.data(), out.blob.size(), seq, &out.place, &why));
    llama_free(ctx);
    return out;
}

/// Which bytes are rows: what they say is the engine's, and nobody else's.
std::vector<bool> rows_of(const sample &of) {
    std::vector<bool> rows(of.blob.size(), false);
    const auto mark = [&](uint64_t at, uint64_t bytes) {
        CHECK(at + bytes <= rows.size());
        std::fill(rows.begin() + long(at), rows.begin() + long(at + bytes), true);
    };
    for (size_t i = 0; i < of.is.sections.size(); i++) {
        const section_shape &is = of.is.sections[i];
        const section_place &place = of.place.sections[i];
        for (size_t j = 0; j < is.layers.size(); j++) {
            mark(place.k_at[j], is.layers[j].k_bytes * place.positions.size());
            if (is.layers[j].v_bytes != 0) {
                mark(place.v_at[j], is.layers[j].v_bytes * place.positions.size());
            }
        }
        for (size_t j = 0; j < is.parts.size(); j++) {
            mark(place.k_at[j], is.parts[j].bytes);
        }
    }
    return rows;
}

bool same_rows(const blob_place &a, const blob_place &b) {
    for (size_t i = 0; i < a.sections.size(); i++) {
        const section_place &x = a.sections[i], &y = b.sections[i];
        if (x.k_at != y.k_at || x.v_at != y.v_at || x.positions.size() != y.positions.size()) {
            return false;
        }
    }
    return true;
}

bool same_positions(const blob_place &a, const blob_place &b) {
    for (size_t i = 0; i < a.sections.size(); i++) {
        if (a.sections[i].positions != b.sections[i].positions) {
            return false;
        }
    }
    return true;
}

/// Only positions may be other ones afterwards, since they are what a state may say; whoever uses them
/// compares them with those that are wanted.
void flip_all(const sample &of) {
    const std::vector<bool> rows = rows_of(of);
    std::string why;
    blob_place place;
    size_t refused = 0, moved = 0, headings = 0;
    for (size_t i = 0; i < of.blob.size(); i++) {
        if (rows[i]) {
            continue;
        }
        headings++;
        for (const int bit : {0, 3, 7}) {
            std::vector<uint8_t> other = of.blob;
            other[i] ^= uint8_t(1 << bit);
            if (!read_blob(of.is, other.data(), other.size(), seq, &place, &why)) {
                refused++;
                continue;
            }
            CHECK(same_rows(place, of.place) && !same_positions(place, of.place));
            moved++;
            shape learned;
            CHECK(!learn_shape(other.data(), other.size(), seq, held, &learned, &why));
        }
    }
    std::printf("%zu bytes of headings: %zu flips refused, %zu seen as other positions\n", headings, refused,
                moved);
    CHECK(refused > 0);
}

void cut_all(const sample &of) {
    std::string why;
    blob_place place;
    shape learned;
    const size_t step = std::max<size_t>(1, of.blob.size() / 3000);
    for (size_t bytes = 0; bytes < of.blob.size(); bytes += bytes < 2048 ? 1 : step) {
        CHECK(!read_blob(of.is, of.blob.data(), bytes, seq, &place, &why));
        // One that ends between tensors may be taken for a whole one, of a model that has fewer.
        if (learn_shape(of.blob.data(), bytes, seq, held, &learned, &why)) {
            CHECK(learned.words() != of.is.words());
        }
    }
    std::vector<uint8_t> longer = of.blob;
    for (size_t i = 0; i < 64; i++) {
        longer.push_back(0);
        CHECK(!read_blob(of.is, longer.data(), longer.size(), seq, &place, &why));
    }
}

/// Numbers where headings are: none of them makes anyone read or allocate beyond what is there.
void rubbish(const sample &of) {
    std::string why;
    blob_place place;
    shape learned;
    uint64_t x = 7;
    const std::vector<bool> rows = rows_of(of);
    for (int round = 0; round < 2000; round++) {
        std::vector<uint8_t> other = of.blob;
        for (size_t i = 8; i < other.size(); i++) {
            x = x * 6364136223846793005u + 1442695040888963407u;
            if (!rows[i] && (x >> 60) == 0) {
                other[i] = uint8_t(x >> 40);
            }
        }
        if (read_blob(of.is, other.data(), other.size(), seq, &place, &why)) {
            CHECK(same_rows(place, of.place));
        }
        learn_shape(other.data(), other.size(), seq, held, &learned, &why);
    }
}

void build_again(const sample &of) {
    std::vector<cells_wanted> cells;
    for (const section_place &place : of.place.sections) {
        cells.push_back({place.positions[0], uint32_t(place.positions.size()), place.stream});
    }
    CHECK(blob_bytes(of.is, cells) == of.blob.size());
    std::vector<uint8_t> built = of.blob;
    const std::vector<bool> rows = rows_of(of);
    for (size_t i = 0; i < built.size(); i++) {
        built[i] = rows[i] ? built[i] : 0xa5;
    }
    build_blob(of.is, cells, seq, built.data());
    CHECK(built == of.blob);
    cells[0].count = UINT32_MAX;
    CHECK(blob_bytes(of.is, cells) == 0);
}

/// Two cells of one position are two rows of which nobody knows which one is meant.
void repeated(const sample &of) {
    std::vector<cells_wanted> cells;
    for (const section_shape &is : of.is.sections) {
        cells.push_back({3, is.recurrent ? 0u : 2u, 0, 1});
    }
    std::string why;
    blob_place place;
    for (const bool twice : {false, true}) {
        for (cells_wanted &one : cells) {
            one.step = twice ? 0 : 1;
        }
        std::vector<uint8_t> blob(blob_bytes(of.is, cells));
        build_blob(of.is, cells, seq, blob.data());
        const bool wanted = !twice || !of.is.has_attention();
        CHECK(read_blob(of.is, blob.data(), blob.size(), seq, &place, &why) == wanted);
    }
}

} // namespace

int main(int argc, char **argv) {
    CHECK(argc == 2);
    llama_model *model = load(model_path(argv[1]));
    for (const bool flash : {true, false}) {
        for (const bool unified : {true, false}) {
            how is;
            is.flash = flash;
            is.unified = unified;
            const sample of = take(model, is);
            build_again(of);
            flip_all(of);
            cut_all(of);
            rubbish(of);
            repeated(of);
        }
    }
    llama_model_free(model);
    return 0;
}
