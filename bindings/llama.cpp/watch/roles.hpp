// Finds the nodes of llama.cpp's graphs by their role.
//
// A graph is seen node by node through ggml_backend_sched_eval_callback. A node's role follows from its
// operation and its sources. Attention is a SOFT_MAX or FLASH_ATTN_EXT whose keys lie in a cache; its
// mask and queries are its sources. The cells that are written are the indices of SET_ROWS into a
// cache. Three kinds of names are relied on, although llama.cpp does not document them: "cache_k_l7"
// and "cache_v_l7" of caches, "l_out-7" of a layer's output, and the suffix "-7" of a layer's nodes. A
// missing role is reported by its name and layer.
#ifndef KVTIER_LLAMA_ROLES_HPP
#define KVTIER_LLAMA_ROLES_HPP

#include <ggml-backend.h>
#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvt_llama {

enum role : uint32_t {
    role_q = 1u << 0, // queries as the attention takes them: after RoPE, scaled
    role_k = 1u << 1, // keys that are written, after RoPE
    role_v = 1u << 2, // values that are written
    role_attention = 1u << 3, // SOFT_MAX or FLASH_ATTN_EXT
    role_soft_max = 1u << 4, // probabilities; without flash attention only
    role_mask = 1u << 5,
    role_k_idxs = 1u << 6, // cells that keys are written to
    role_v_idxs = 1u << 7, // cells, or single elements if values are transposed
    role_cache_k = 1u << 8,
    role_cache_v = 1u << 9,
    role_layer_end = 1u << 10,
};

// The readable name of one role.
const char *role_name(uint32_t role);

// Nodes found for one layer in the graph that is being computed. Tensors are the engine's, as the nodes
// have them: views with an offset and strides. They are valid until the graph has been computed, caches
// as long as the context.
struct layer_roles {
    uint32_t found = 0;
    ggml_tensor *q = nullptr; // [elements of a head, tokens, heads, streams]
    ggml_tensor *k = nullptr; // [elements of all heads, tokens]
    ggml_tensor *v = nullptr; // the same, or [1, all elements] if values are transposed
    ggml_tensor *attention = nullptr; // the node: probabilities [cells, tokens, heads] of SOFT_MAX
    ggml_tensor *keys = nullptr; // the cache as it is read: [elements, cells, heads, streams]
    ggml_tensor *mask = nullptr;      // [cells, tokens, 1, streams]
    ggml_tensor *k_idxs = nullptr;
    ggml_tensor *v_idxs = nullptr;
    ggml_tensor *cache_k = nullptr; // the whole cache: [elements of all heads, cells, streams]
    ggml_tensor *cache_v = nullptr;
    ggml_tensor *end = nullptr;
    int cache_layer = -1; // layer of the cache that the attention reads, which may be shared
};

enum class step {
    other,
    write_k,   // SET_ROWS into a cache of keys
    write_v,
    attention,
    layer_end,
    change, // another write to a cache: positions are shifted
};

struct node_info {
    step what = step::other;
    int layer = -1; // layer of the node, if it has one
    bool first = false; // the first node of its layer
    bool new_graph = false; // the first node of another graph
};

// Receives nodes as the scheduler asks about them, in order, on one thread. If a callback requests a
// stop at write_k and write_v (cut), the layer's queries and written rows are available when its
// attention is asked about. Its mask and cache may then be changed.
class roles {
  public:
    explicit roles(int n_layers) : layers_((size_t) n_layers) {}

    // Processes the ask phase of a node.
    node_info visit(ggml_tensor *node);

    // The callback requests a stop at this node: all nodes so far are computed before the next one is
    // asked about.
    void mark_computed();

    // Tells whether a tensor is computed already: no node after the last cut writes to it.
    bool is_computed(ggml_tensor *tensor) const;

    int n_layers() const { return (int) layers_.size(); }
    const layer_roles &layer(int il) const { return layers_[(size_t) il]; }

    // llama_decode has returned: the next node of a layer begins another graph, whatever its layer.
    void restart() { restarted_ = true; }

    // True, with a text, if the layer lacks one of the wanted roles.
    bool is_missing(int il, uint32_t wanted, char *message, size_t message_bytes) const;

  private:
    bool is_next_graph(int layer) const;
    void begin_graph();
    void visit_write(ggml_tensor *node, ggml_tensor *cache, node_info &out);
    bool visit_attention(ggml_tensor *node, node_info &out);

    std::vector<layer_roles> layers_;
    std::vector<ggml_tensor *> pending_;
    size_t last_layer_ = 0; // index in pending_ of the first node of the last layer
    int current_ = -1;
    bool ended_ = false;
    bool restarted_ = true;
};

// The tensor that owns the memory of a view.
ggml_tensor *storage_of(ggml_tensor *tensor);

// The layer that a cache belongs to, and its kind, keys ('k') or values ('v'); -1 if the tensor is not
// a cache.
int cache_layer(const ggml_tensor *storage, char *kind);

} // namespace kvt_llama

#endif
