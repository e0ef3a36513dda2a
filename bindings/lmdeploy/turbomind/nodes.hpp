// What the adapter knows of blocks: by content, beside the engine's own tree.

#ifndef KVTIER_TURBOMIND_NODES_HPP
#define KVTIER_TURBOMIND_NODES_HPP

#include <kvtier/turbomind.hpp>

#include <cstring>
#include <unordered_map>

namespace kvtier_turbomind {

/// A block's content: its tokens, and all before it. Parents are held: what was evicted here may be
/// asked of the store long after the engine has recycled its parents.
struct node {
    std::shared_ptr<const node> parent;
    std::vector<std::uint32_t> tokens;
    std::vector<kvt_media_t> media;  // by the index in the block
    std::uint64_t id = 0;            // a name for policies; never trusted for bytes
    std::uint32_t index = 0;         // blocks before it

    /// What the order of victims notes of it: kept here, since each pass looks at all blocks.
    struct note {
        bool known = false;      // the policy has it, by this node
        bool here = false;       // its content is on the device
        bool held = false;       // it is referenced there
        std::uint64_t pass = 0;  // the last one in which it might have left
        std::uint64_t used = 0;  // or was in use
        std::size_t row = 0;     // where it stood then
    };
    mutable note noted;
};
using node_ptr = std::shared_ptr<const node>;

inline std::uint64_t mixed(std::uint64_t x) noexcept {
    x += UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

inline std::uint64_t id_of(const node &n) noexcept {
    std::uint64_t id = n.parent ? n.parent->id : 1;
    for (const std::uint32_t t : n.tokens) id = mixed(id ^ t);
    for (const kvt_media_t &m : n.media) {
        id = mixed(id ^ m.token);
        for (std::size_t i = 0; i < sizeof m.digest; i += 8) {
            std::uint64_t word;
            std::memcpy(&word, m.digest + i, 8);
            id = mixed(id ^ word);
        }
    }
    return id;
}

/// A whole sequence, from the first block to this one.
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

/// The engine's blocks that are in its trie.
class book {
public:
    void add(block_t block, block_t parent, const int *tokens, std::size_t count,
             const kvt_media_t *media, std::size_t media_count) {
        auto n = std::make_shared<node>();
        n->parent = find(parent);
        if (parent != nullptr && !n->parent) return; // it continues what is not known
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

    const node *look(block_t block) const {
        const auto it = block != nullptr ? nodes_.find(block) : nodes_.end();
        return it != nodes_.end() ? it->second.get() : nullptr;
    }

private:
    std::unordered_map<block_t, node_ptr> nodes_;
};

}  // namespace kvtier_turbomind

#endif  // KVTIER_TURBOMIND_NODES_HPP
