// Cells and slots by themselves: what is chosen has a slot, what stays does not move, what was
// chosen longest ago goes first.
#include "model.hpp"
#include "watch/longer_cells.hpp"

#include <algorithm>
#include <set>

using namespace kvt_llama::longer;
using namespace watch_test;

namespace {

uint64_t seed = 12345;

uint32_t number(uint32_t below) {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t) (seed >> 33) % below;
}

std::vector<uint32_t> some_blocks(uint32_t most, uint32_t below) {
    std::set<uint32_t> out;
    for (uint32_t n = number(most + 1); out.size() < n;) {
        out.insert(number(below));
    }
    return {out.begin(), out.end()};
}

// Whether a slot shows what the choice wanted, and nothing else is shown.
void check_shown(const slots &layer, uint32_t count, const std::vector<uint32_t> &chosen) {
    std::vector<uint32_t> shown;
    for (uint32_t slot = 0; slot < count; slot++) {
        if (layer.is_chosen(slot)) {
            shown.push_back(layer.block(slot));
        }
    }
    std::sort(shown.begin(), shown.end());
    CHECK(shown == chosen);
}

void random_choices(bool is_ordered) {
    constexpr uint32_t count = 12, blocks = 40;
    slots layer(count);
    std::vector<slots::load> missing;
    std::vector<uint32_t> last_chosen(blocks, 0);
    for (uint32_t round = 1; round < 3000; round++) {
        const std::vector<uint32_t> chosen = some_blocks(count, blocks);
        std::vector<uint32_t> before;
        for (uint32_t slot = 0; slot < count; slot++) {
            before.push_back(layer.block(slot));
        }
        layer.place(chosen, is_ordered, missing);
        for (const slots::load &one : missing) {
            // Nothing that was chosen before what is thrown out stays, unless it is chosen now.
            const uint32_t gone = before[one.slot];
            for (uint32_t slot = 0; !is_ordered && gone != slots::none && slot < count; slot++) {
                const uint32_t stays = layer.block(slot);
                const bool is_left = stays != slots::none && !layer.is_chosen(slot);
                CHECK(!is_left || last_chosen[stays] >= last_chosen[gone]);
            }
        }
        for (const slots::load &one : missing) {
            CHECK(is_ordered || std::find(before.begin(), before.end(), one.block) == before.end());
            layer.set(one, true);
        }
        for (const uint32_t block : chosen) {
            last_chosen[block] = round;
        }
        check_shown(layer, count, chosen);
        for (uint32_t slot = 0; is_ordered && slot < chosen.size(); slot++) {
            CHECK(layer.block(slot) == chosen[slot]);
        }
        if (!missing.empty() && round % 7 == 0) {
            layer.set(missing[0], false); // it did not come
            CHECK(layer.block(missing[0].slot) == slots::none);
        }
    }
}

void one_sequence() {
    cells where(64, 4, 4, 6); // 64 cells: 4 of sinks, 24 of slots
    std::vector<uint32_t> at;
    for (uint32_t i = 0; i < 64; i++) {
        at.push_back(63 - i);
    }
    where.append(at);
    CHECK(where.tokens() == 64 && where.free_count() == 0 && !where.is_divided());
    where.truncate(60);
    CHECK(where.tokens() == 60 && where.free_count() == 4 && where.cell_of(59) == 4);
    where.append({3, 2, 1, 0});
    where.divide();
    CHECK(where.is_divided() && where.window_first() == 28 && where.tokens() == 64);
    CHECK(where.cell_of(3) == 60 && where.cell_of(28) == 35 && where.free_count() == 0);
    CHECK(where.slot_cells(0)[0] == 59 && where.slot_cells(5)[3] == 36);
    where.leave(36);
    CHECK(where.free_count() == 8 && where.cell_of(36) == 27 && where.tokens() == 64);
    where.append({35, 34});
    CHECK(where.tokens() == 66 && where.cell_of(65) == 34);
    where.truncate(0);
    CHECK(where.tokens() == 0 && where.free_count() == 64 && !where.is_divided());
    where.divide(40, {0, 1, 2, 3}, std::vector<uint32_t>(24, 5), {9, 8});
    CHECK(where.tokens() == 42 && where.cell_of(41) == 8 && where.cell_of(1) == 1);
}

} // namespace

int main() {
    random_choices(false);
    random_choices(true);
    one_sequence();
    return failures != 0;
}
