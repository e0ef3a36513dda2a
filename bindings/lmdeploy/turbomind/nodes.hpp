// Index of the engine's blocks by content. The engine keeps its own trie.

#ifndef KVTIER_TURBOMIND_NODES_HPP
#define KVTIER_TURBOMIND_NODES_HPP

#include <kvtier/turbomind.hpp>

#include <cstring>
#include <unordered_map>

namespace kvtier_turbomind {

/// A block's content: its tokens, and its parent. A node keeps its parents alive, because a lookup
/// in the store may need them long after the engine has recycled their blocks.
struct node {
    std::shared_ptr<const node> parent;
    std::vector<std::uint32_t> tokens;
    std::vector<kvt_media_t> media;  // token positions are relative to the block
    std::uint64_t id = 0;            // object id for policies; the store compares tokens
    std::uint32_t index = 0;         // number of blocks before this one

    /// State of class `order`. It is kept here because each pass visits all blocks.
    struct order_state {
        bool in_policy = false;          // the policy has an object for this node
        bool resident = false;           // its content is on the device
        bool acquired = false;           // the policy's object is referenced
        std::uint64_t evictable_in = 0;  // last pass in which it was a candidate
        std::uint64_t used_in = 0;       // last pass in which it was in use
        std::size_t row = 0;             // its index in the candidates of that pass
    };
    mutable order_state state;
};
using node_ptr = std::shared_ptr<const node>;

inline std::uint64_t mix(std::uint64_t x) noexcept {
    x += UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

inline std::uint64_t id_of(const node &n) noexcept {
    std::uint64_t id = n.parent ? n.parent->id : 1;
    for (const std::uint32_t t : n.tokens) id = mix(id ^ t);
    for (const kvt_media_t &m : n.media) {
        id = mix(id ^ m.token);
        for (std::size_t i = 0; i < sizeof m.digest; i += 8) {
            std::uint64_t word;
            std::memcpy(&word, m.digest + i, 8);
            id = mix(id ^ word);
        }
    }
    return id;
}

/// The content of a path, from its first block on.
struct sequence {
    std::vector<std::uint32_t> tokens;
    std::vector<kvt_media_t> media;
};

inline std::vector<const node *> path_of(const node_ptr &last) {
    std::vector<const node *> path(last ? last->index + 1 : 0);
    for (const node *n = last.get(); n != nullptr; n = n->parent.get()) path[n->index] = n;
    return path;
}

inline sequence sequence_of(const node_ptr &last) {
    sequence all;
    for (const node *n : path_of(last)) {
        const std::uint64_t first = all.tokens.size();
        all.tokens.insert(all.tokens.end(), n->tokens.begin(), n->tokens.end());
        for (kvt_media_t m : n->media) {
            m.token += first;
            all.media.push_back(m);
        }
    }
    return all;
}

/// The blocks of the engine's trie with their nodes.
class block_index {
public:
    void add(block_t block, block_t parent, const int *tokens, std::size_t count,
             const kvt_media_t *media, std::size_t media_count) {
        auto n = std::make_shared<node>();
        n->parent = find(parent);
        if (parent != nullptr && !n->parent) return; // the parent is not indexed
        n->tokens.assign(tokens, tokens + count);
        n->media.assign(media, media + media_count);
        n->index = n->parent ? n->parent->index + 1 : 0;
        n->id = id_of(*n);
        nodes_[block] = std::move(n);
    }
    void remove(block_t block) { nodes_.erase(block); }
    node_ptr find(block_t block) const {
        const auto it = nodes_.find(block);
        return it != nodes_.end() ? it->second : nullptr;
    }

    const node *peek(block_t block) const {
        const auto it = block != nullptr ? nodes_.find(block) : nodes_.end();
        return it != nodes_.end() ? it->second.get() : nullptr;
    }

private:
    std::unordered_map<block_t, node_ptr> nodes_;
};

}  // namespace kvtier_turbomind

#endif  // KVTIER_TURBOMIND_NODES_HPP
