#include "watch/roles.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace kvt_llama {
namespace {

// More layers than any model has: numbers from names are not trusted.
constexpr int layers_max = 4096;

// The number that a text is, up to its end or a space (" (view)"), or -1.
int number_of(const char *text) {
    int number = 0, digits = 0;
    for (; *text >= '0' && *text <= '9' && digits < 5; text++, digits++) {
        number = number * 10 + (*text - '0');
    }
    return digits > 0 && (*text == 0 || *text == ' ') && number < layers_max ? number : -1;
}

// The layer in "Qcur-7", or -1.
int layer_of_name(const ggml_tensor *node) {
    const char *dash = std::strrchr(node->name, '-');
    return dash ? number_of(dash + 1) : -1;
}

bool is_view(const ggml_tensor *node) {
    return node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_PERMUTE ||
           node->op == GGML_OP_TRANSPOSE;
}

// Finds the product of keys and queries. Its scores may be scaled, capped or biased before the
// SOFT_MAX.
ggml_tensor *product_of(ggml_tensor *node) {
    for (int depth = 0; node && depth < 8; depth++) {
        if (node->op == GGML_OP_MUL_MAT) {
            return node;
        }
        if (node->op != GGML_OP_SCALE && node->op != GGML_OP_UNARY && node->op != GGML_OP_ADD) {
            return nullptr;
        }
        node = node->src[0];
    }
    return nullptr;
}

struct role_text {
    uint32_t role;
    const char *text;
};

constexpr role_text role_texts[] = {
    {role_q, "queries after RoPE"},
    {role_k, "keys after RoPE"},
    {role_v, "values"},
    {role_attention, "attention (SOFT_MAX or FLASH_ATTN_EXT with keys of a cache)"},
    {role_soft_max, "SOFT_MAX (flash attention has none: open the context with "
                    "LLAMA_FLASH_ATTN_TYPE_DISABLED)"},
    {role_mask, "mask of the attention"},
    {role_k_idxs, "cells that keys are written to (SET_ROWS into cache_k_l)"},
    {role_v_idxs, "cells that values are written to (SET_ROWS into cache_v_l)"},
    {role_cache_k, "cache of keys (cache_k_l)"},
    {role_cache_v, "cache of values (cache_v_l)"},
    {role_layer_end, "end of the layer (l_out)"},
};

} // namespace

const char *role_name(uint32_t role) {
    for (const role_text &entry : role_texts) {
        if (entry.role == role) {
            return entry.text;
        }
    }
    return "?";
}

ggml_tensor *storage_of(ggml_tensor *tensor) {
    while (tensor && tensor->view_src) {
        tensor = tensor->view_src;
    }
    return tensor;
}

// A qualifier of the cache may stand between "cache_" and the kind.
int cache_layer(const ggml_tensor *storage, char *kind) {
    if (!storage || storage->op != GGML_OP_NONE || std::strncmp(storage->name, "cache_", 6) != 0) {
        return -1;
    }
    const char *mark = std::strstr(storage->name, "_l");
    if (!mark || (mark[-1] != 'k' && mark[-1] != 'v')) {
        return -1;
    }
    *kind = mark[-1];
    return number_of(mark + 2);
}

// In-place nodes and SET_ROWS are views of the tensor that they change.
bool roles::is_computed(ggml_tensor *tensor) const {
    const ggml_tensor *storage = storage_of(tensor);
    return storage && std::none_of(pending_.begin(), pending_.end(), [&](ggml_tensor *node) {
        return storage_of(node) == storage;
    });
}

// Layers come in order, so an earlier layer belongs to another graph. In a model with one layer, the
// end of that layer shows it.
bool roles::is_next_graph(int layer) const {
    return restarted_ || layer < current_ ||
           (layer == current_ && ended_ && layers_.size() == 1);
}

// Nodes before the last layer of the previous graph have been computed. Later nodes stay pending,
// because some may belong to the new graph, before its first layer.
void roles::begin_graph() {
    std::fill(layers_.begin(), layers_.end(), layer_roles{});
    pending_.erase(pending_.begin(), pending_.begin() + (std::ptrdiff_t) last_layer_);
    last_layer_ = 0;
    restarted_ = false;
}

void roles::mark_computed() {
    pending_.clear();
    last_layer_ = 0;
}

void roles::visit_write(ggml_tensor *node, ggml_tensor *cache, node_info &out) {
    char kind = 0;
    const int il = cache_layer(cache, &kind);
    if (il < 0 || il >= n_layers()) {
        return;
    }
    out.layer = il;
    if (node->op != GGML_OP_SET_ROWS) {
        out.what = step::change;
        return;
    }
    layer_roles &layer = layers_[(size_t) il];
    if (kind == 'k') {
        out.what = step::write_k;
        layer.k = node->src[0];
        layer.k_idxs = node->src[1];
        layer.cache_k = cache;
        layer.found |= role_k | role_k_idxs | role_cache_k;
    } else {
        out.what = step::write_v;
        layer.v = node->src[0];
        layer.v_idxs = node->src[1];
        layer.cache_v = cache;
        layer.found |= role_v | role_v_idxs | role_cache_v;
    }
}

bool roles::visit_attention(ggml_tensor *node, node_info &out) {
    const bool is_flash = node->op == GGML_OP_FLASH_ATTN_EXT;
    ggml_tensor *product = is_flash ? nullptr : product_of(node->src[0]);
    ggml_tensor *keys = is_flash ? node->src[1] : (product ? product->src[0] : nullptr);
    ggml_tensor *queries = is_flash ? node->src[0] : (product ? product->src[1] : nullptr);
    char kind = 0;
    const int read = cache_layer(storage_of(keys), &kind);
    const int il = out.layer >= 0 ? out.layer : current_;
    if (read < 0 || kind != 'k' || il < 0 || il >= n_layers()) {
        return false;
    }
    layer_roles &layer = layers_[(size_t) il];
    layer.attention = node;
    layer.keys = keys;
    layer.q = queries;
    layer.mask = is_flash ? node->src[3] : node->src[1];
    layer.cache_k = storage_of(keys);
    layer.cache_layer = read;
    layer.found |= role_attention | role_cache_k | (is_flash ? 0u : (uint32_t) role_soft_max) |
                   (layer.q ? (uint32_t) role_q : 0u) | (layer.mask ? (uint32_t) role_mask : 0u);
    // Without flash attention the values come after this node: their cache is known by the write.
    // Layers that share caches write nothing here.
    if (is_flash) {
        layer.cache_v = storage_of(node->src[2]);
        layer.found |= role_cache_v;
    }
    out.layer = il;
    out.what = step::attention;
    return true;
}

node_info roles::visit(ggml_tensor *node) {
    node_info out;
    if (is_view(node)) {
        return out;
    }
    pending_.push_back(node);
    const int named = layer_of_name(node);
    if (named >= 0 && named < n_layers()) {
        out.layer = named;
        if (is_next_graph(named)) {
            out.new_graph = true;
            begin_graph();
        }
        out.first = out.new_graph || named != current_;
        if (out.first) {
            last_layer_ = pending_.size() - 1;
        }
        current_ = named;
        ended_ = false;
    }
    if (node->op == GGML_OP_SOFT_MAX || node->op == GGML_OP_FLASH_ATTN_EXT) {
        visit_attention(node, out);
    } else if (node->view_src) {
        visit_write(node, storage_of(node), out);
    } else if (out.layer >= 0 && std::strncmp(node->name, "l_out-", 6) == 0) {
        layers_[(size_t) out.layer].end = node;
        layers_[(size_t) out.layer].found |= role_layer_end;
        out.what = step::layer_end;
        ended_ = true;
    }
    return out;
}

bool roles::is_missing(int il, uint32_t wanted, char *message, size_t message_bytes) const {
    if (message_bytes) {
        message[0] = 0;
    }
    if (il < 0 || il >= n_layers()) {
        return false;
    }
    const uint32_t lacking = wanted & ~layer(il).found;
    if (!lacking) {
        return false;
    }
    int used = std::snprintf(message, message_bytes, "layer %d of this graph has no ", il);
    const char *separator = "";
    for (const role_text &entry : role_texts) {
        if ((lacking & entry.role) && used > 0 && (size_t) used < message_bytes) {
            used += std::snprintf(message + used, message_bytes - (size_t) used, "%s%s", separator,
                                  entry.text);
            separator = "; no ";
        }
    }
    return true;
}

} // namespace kvt_llama
