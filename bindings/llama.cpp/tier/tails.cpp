// Ends of conversations that fill no chunk. The store shares full chunks only, and what a session of it
// has beyond them goes with the session; here they are kept as the engine wrote them, as long as there
// is room, so that who comes back finds all of it.
#include "tier/tier.hpp"

#include <algorithm>
#include <iterator>

namespace kvtier_llama {

namespace {

constexpr size_t most_tails = 64;

void drop(tier_t &tier, std::list<std::shared_ptr<const tail_t>>::iterator one) {
    tier.tail_bytes -= (*one)->blob.size();
    release_charge(tier, (*one)->blob.size());
    tier.tails.erase(one);
}

/// Makes room for one more, and pays for it.
bool make_room(tier_t &tier, const tokens_t &same, uint64_t bytes) {
    const uint64_t limit = tier.buffer_limit / 4;
    for (auto one = tier.tails.begin(); one != tier.tails.end(); ++one) {
        if ((*one)->tokens == same) {
            drop(tier, one);
            break;
        }
    }
    while (!tier.tails.empty() && (tier.tails.size() >= most_tails || tier.tail_bytes + bytes > limit)) {
        drop(tier, std::prev(tier.tails.end()));
    }
    return bytes <= limit && charge(tier, bytes);
}

} // namespace

void keep_tail(tier_t &tier, llama_seq_id seq) {
    const sequence_t &has = tier.sequences[seq];
    const size_t end = has.tokens.size(), first = full_chunks(tier, end);
    const bool alone = !tier.shape.has_attention();
    const bool ends_here = llama_memory_seq_pos_max(tier.memory, seq) + 1 == llama_pos(end);
    if (first == end || (tier.scratch < 0 && !alone) || !ends_here) {
        return;
    }
    blob_place place;
    const held_buffer buffer = export_rows(tier, seq, uint32_t(first), uint32_t(end),
                                           now_ns() + tier.save_wait_ns, &place);
    if (!buffer) {
        return;
    }
    if (make_room(tier, has.tokens, place.bytes)) {
        auto tail = std::make_shared<tail_t>();
        tail->tokens = has.tokens;
        tail->blob.assign(buffer->data, buffer->data + place.bytes);
        tier.tails.push_front(std::move(tail));
        tier.tail_bytes += place.bytes;
    }
}

std::shared_ptr<const tail_t> find_tail(const tier_t &tier, const llama_token *tokens, size_t limit,
                                        size_t longer_than) {
    std::shared_ptr<const tail_t> best;
    for (const std::shared_ptr<const tail_t> &one : tier.tails) {
        const size_t count = one->tokens.size();
        const bool longer = count > longer_than && (!best || count > best->tokens.size());
        if (longer && count <= limit && std::equal(one->tokens.begin(), one->tokens.end(), tokens)) {
            best = one;
        }
    }
    return best;
}

} // namespace kvtier_llama
