// Unit tests of cells and slots. Each chosen block has a slot, and resident blocks do not move. The block
// chosen least recently is evicted first.
#include "model.hpp"
#include "watch/longer_cells.hpp"

#include <algorithm>
#include <set>

using namespace kvt_llama::longer;
using namespace watch_test;

namespace {

uint64_t seed = 12345;

uint32_t random_below(uint32_t below) {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t) (seed >> 33) % below;
}

std::vector<uint32_t> random_blocks(uint32_t max_count, uint32_t below) {
    std::set<uint32_t> out;
    for (uint32_t n = random_below(max_count + 1); out.size() < n;) {
        out.insert(random_below(below));
    }
    return {out.begin(), out.end()};
}

// Checks that the visible blocks are the chosen ones.
void check_visible(const slots &layer, uint32_t count, const std::vector<uint32_t> &chosen) {
    std::vector<uint32_t> visible;
    for (uint32_t slot = 0; slot < count; slot++) {
        if (layer.is_chosen(slot)) {
            visible.push_back(layer.block(slot));
        }
    }
    std::sort(visible.begin(), visible.end());
    CHECK(visible == chosen);
}

void slots_hold_the_chosen_blocks(bool is_ordered) {
    constexpr uint32_t count = 12, blocks = 40;
    slots layer(count);
    std::vector<slots::load> missing;
    std::vector<uint32_t> last_chosen(blocks, 0);
    for (uint32_t round = 1; round < 3000; round++) {
        const std::vector<uint32_t> chosen = random_blocks(count, blocks);
        std::vector<uint32_t> before;
        for (uint32_t slot = 0; slot < count; slot++) {
            before.push_back(layer.block(slot));
        }
        layer.place(chosen, is_ordered, missing);
        for (const slots::load &one : missing) {
            // No unchosen resident block was chosen less recently than the evicted one.
            const uint32_t evicted = before[one.slot];
            for (uint32_t slot = 0; !is_ordered && evicted != slots::none && slot < count; slot++) {
                const uint32_t resident = layer.block(slot);
                const bool is_left = resident != slots::none && !layer.is_chosen(slot);
                CHECK(!is_left || last_chosen[resident] >= last_chosen[evicted]);
            }
        }
        for (const slots::load &one : missing) {
            CHECK(is_ordered || std::find(before.begin(), before.end(), one.block) == before.end());
            layer.set(one, true);
        }
        for (const uint32_t block : chosen) {
            last_chosen[block] = round;
        }
        check_visible(layer, count, chosen);
        for (uint32_t slot = 0; is_ordered && slot < chosen.size(); slot++) {
            CHECK(layer.block(slot) == chosen[slot]);
        }
        if (!missing.empty() && round % 7 == 0) {
            layer.set(missing[0], false); // a failed load
            CHECK(layer.block(missing[0].slot) == slots::none);
        }
    }
}

void cells_follow_one_sequence() {
    cells map(64, 4, 4, 6); // 64 cells: 4 of sinks, 24 of slots
    std::vector<uint32_t> at;
    for (uint32_t i = 0; i < 64; i++) {
        at.push_back(63 - i);
    }
    map.append(at);
    CHECK(map.tokens() == 64 && map.free_count() == 0 && !map.is_divided());
    map.truncate(60);
    CHECK(map.tokens() == 60 && map.free_count() == 4 && map.cell_of(59) == 4);
    map.append({3, 2, 1, 0});
    map.divide();
    CHECK(map.is_divided() && map.window_first() == 28 && map.tokens() == 64);
    CHECK(map.cell_of(3) == 60 && map.cell_of(28) == 35 && map.free_count() == 0);
    CHECK(map.slot_cells(0)[0] == 59 && map.slot_cells(5)[3] == 36);
    map.remove_from_window(36);
    CHECK(map.free_count() == 8 && map.cell_of(36) == 27 && map.tokens() == 64);
    map.append({35, 34});
    CHECK(map.tokens() == 66 && map.cell_of(65) == 34);
    map.truncate(0);
    CHECK(map.tokens() == 0 && map.free_count() == 64 && !map.is_divided());
    map.divide(40, {0, 1, 2, 3}, std::vector<uint32_t>(24, 5), {9, 8});
    CHECK(map.tokens() == 42 && map.cell_of(41) == 8 && map.cell_of(1) == 1);
}

} // namespace

int main() {
    slots_hold_the_chosen_blocks(false);
    slots_hold_the_chosen_blocks(true);
    cells_follow_one_sequence();
    return failures != 0;
}
