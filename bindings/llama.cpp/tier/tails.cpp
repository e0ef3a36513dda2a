// Ends of conversations that fill no chunk. The store shares full chunks only. Tails are kept here
// as the engine wrote them, within a limit, so that a returning conversation is restored
// completely.
#include "tier/tier.hpp"

#include <algorithm>
#include <iterator>

namespace kvtier_llama {

namespace {

constexpr size_t max_tails = 64;

void drop(tier_t &tier, std::list<std::shared_ptr<const tail_t>>::iterator one) {
    tier.tail_bytes -= (*one)->blob.size();
    release_memory(tier, (*one)->blob.size());
    tier.tails.erase(one);
}

/// Evicts tails until one more fits, and charges the budget for it.
bool make_room(tier_t &tier, const prompt_t &same, uint64_t bytes) {
    const uint64_t limit = tier.buffer_limit / 4;
    for (auto one = tier.tails.begin(); one != tier.tails.end(); ++one) {
        if ((*one)->tokens.size() == same.count && same.common((*one)->prompt()) == same.count) {
            drop(tier, one);
            break;
        }
    }
    while (!tier.tails.empty() && (tier.tails.size() >= max_tails || tier.tail_bytes + bytes > limit)) {
        drop(tier, std::prev(tier.tails.end()));
    }
    return bytes <= limit && reserve_memory(tier, bytes);
}

} // namespace

void keep_tail(tier_t &tier, llama_seq_id seq) {
    const sequence_t &has = tier.sequences[seq];
    const size_t end = has.tokens.size(), first = full_chunks(tier, end);
    const bool alone = !tier.shape.has_attention();
    const bool ends_here = llama_memory_seq_pos_max(tier.memory, seq) + 1 == has.prompt().end_position(end);
    if (first == end || (tier.scratch < 0 && !alone) || !ends_here) {
        return;
    }
    blob_place place;
    const held_buffer buffer = export_rows(tier, seq, uint32_t(first), uint32_t(end),
                                           now_ns() + tier.save_wait_ns, &place);
    if (!buffer) {
        return;
    }
    if (make_room(tier, has.prompt(), place.bytes)) {
        auto tail = std::make_shared<tail_t>();
        tail->assign(has.prompt());
        tail->blob.assign(buffer->data, buffer->data + place.bytes);
        tier.tails.push_front(std::move(tail));
        tier.tail_bytes += place.bytes;
    }
}

std::shared_ptr<const tail_t> find_tail(const tier_t &tier, const prompt_t &of, size_t longer_than) {
    std::shared_ptr<const tail_t> best;
    for (const std::shared_ptr<const tail_t> &one : tier.tails) {
        const size_t count = one->tokens.size();
        const bool longer = count > longer_than && (!best || count > best->tokens.size());
        if (longer && count <= of.count && of.common(one->prompt()) == count) {
            best = one;
        }
    }
    return best;
}

} // namespace kvtier_llama
