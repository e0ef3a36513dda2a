// What a graph of llama.cpp has, by the part it plays.
//
// A graph is seen node by node through ggml_backend_sched_eval_callback. What a node is for follows
// from its operation and its sources: attention is a SOFT_MAX or FLASH_ATTN_EXT whose keys lie in a
// cache, its mask and its queries are its sources, the cells that are written are the indices of
// SET_ROWS into a cache. Three kinds of names are relied on, none of them part of llama.cpp's
// interface: "cache_k_l7" and "cache_v_l7" of caches, "l_out-7" of what a layer gives, and "-7" behind
// the name of a node of a layer. What is not found is said in words, by layer and role.
#ifndef KVTIER_LLAMA_ROLES_HPP
#define KVTIER_LLAMA_ROLES_HPP

#include <ggml-backend.h>
#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvt_llama {

enum role : uint32_t {
    role_q = 1u << 0,        // queries as the attention takes them: rotated, scaled
    role_k = 1u << 1,        // keys that are written: rotated
    role_v = 1u << 2,        // values that are written
    role_attention = 1u << 3, // SOFT_MAX or FLASH_ATTN_EXT
    role_soft_max = 1u << 4, // probabilities: without flash attention only
    role_mask = 1u << 5,
    role_k_idxs = 1u << 6, // cells that keys are written to
    role_v_idxs = 1u << 7, // cells, or single numbers where values are transposed
    role_cache_k = 1u << 8,
    role_cache_v = 1u << 9,
    role_layer_end = 1u << 10,
};

// The name of one role, for people.
const char *role_name(uint32_t role);

// What was found of one layer in the graph that is being computed. Tensors are the engine's, as the
// nodes have them: views with an offset and strides of their own. They are there until the graph has
// been computed; caches stay as long as the context.
struct layer_roles {
    uint32_t found = 0;
    ggml_tensor *q = nullptr;         // [numbers of a head, tokens, heads, streams]
    ggml_tensor *k = nullptr;         // [numbers of all heads, tokens]
    ggml_tensor *v = nullptr;         // the same, or [1, all numbers] where values are transposed
    ggml_tensor *attention = nullptr; // the node: probabilities [cells, tokens, heads] of SOFT_MAX
    ggml_tensor *keys = nullptr;      // of the cache, as it is read: [numbers, cells, heads, streams]
    ggml_tensor *mask = nullptr;      // [cells, tokens, 1, streams]
    ggml_tensor *k_idxs = nullptr;
    ggml_tensor *v_idxs = nullptr;
    ggml_tensor *cache_k = nullptr; // the whole cache: [numbers of all heads, cells, streams]
    ggml_tensor *cache_v = nullptr;
    ggml_tensor *end = nullptr;
    int cache_layer = -1; // whose cache the attention reads: another layer's where models share
};

enum class step {
    other,
    write_k,   // SET_ROWS into a cache of keys
    write_v,
    attention,
    layer_end,
    change,    // something else that writes to a cache: positions are shifted
};

struct seen {
    step what = step::other;
    int layer = -1;         // of a node that has one
    bool first = false;     // the first node of its layer
    bool new_graph = false; // the first node of another graph
};

// Nodes are told as they are asked for, in order, by one thread. Where a callback answers yes at
// write_k and write_v (cut), the queries and the written rows of the layer are there when its
// attention is asked for, and its mask and cache may be changed.
class roles {
  public:
    explicit roles(int n_layers) : layers_((size_t) n_layers) {}

    // Ask phase of every node.
    seen look(ggml_tensor *node);

    // All nodes that were looked at will have been computed when the next one is looked at: the
    // callback answers yes for this one.
    void cut();

    // Whether a tensor holds its numbers already: no node that writes to it came behind the last cut.
    bool is_computed(ggml_tensor *tensor) const;

    int n_layers() const { return (int) layers_.size(); }
    const layer_roles &layer(int il) const { return layers_[(size_t) il]; }

    // The next node of a layer begins another graph, whatever layer: llama_decode has come back.
    void restart() { restarted_ = true; }

    // Says in words which of the wanted roles the layer lacks; false and no words where none is.
    bool is_missing(int il, uint32_t wanted, char *words, size_t words_bytes) const;

  private:
    bool is_next_graph(int layer) const;
    void begin_graph();
    void see_write(ggml_tensor *node, ggml_tensor *cache, seen &out);
    bool see_attention(ggml_tensor *node, seen &out);

    std::vector<layer_roles> layers_;
    std::vector<ggml_tensor *> pending_;
    size_t last_layer_ = 0; // where the nodes of the last layer begin in pending_
    int current_ = -1;
    bool ended_ = false;
    bool restarted_ = true;
};

// The tensor whose memory a view shows.
ggml_tensor *storage_of(ggml_tensor *tensor);

// The number of the layer that a cache belongs to, and whether of keys ('k') or values ('v'); -1
// where the tensor is no cache.
int cache_layer(const ggml_tensor *storage, char *kind);

} // namespace kvt_llama

#endif
