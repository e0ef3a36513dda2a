// The engine's evaluation callback. It acquires the weights that the next nodes need, and releases
// those that are not needed any more.
//
// The engine asks about nodes in the order of the graph. It computes them together, up to a node at
// which the callback requests a stop. All units of such a span stay leased until it was computed. The
// weights that nodes read show where one group of units (a layer) ends and the next one begins. After
// the first pass the last node of each group is known by its name. From then on the callback stops
// there, and only one group is leased at a time.
#include "weights/weights.hpp"

#include <cstring>

namespace kvt_weights {

namespace {

bool is_ungrouped(const Context &c, const Lease &lease) {
    return c.weights->units[lease.handle.unit].group == no_group;
}

/// The lease belongs to a group that has ended.
bool is_over(const Context &c, const Lease &lease) {
    return !is_ungrouped(c, lease) && c.weights->units[lease.handle.unit].group != c.group;
}

bool is_grouped(const Context &c, const Lease &lease) { return !is_ungrouped(c, lease); }

bool has_grouped(const Context &c) {
    for (const Lease &lease : c.leases) {
        if (is_grouped(c, lease)) {
            return true;
        }
    }
    return false;
}

/// Kept through a pass, and not needed now.
bool is_unused(const Context &c, const Lease &lease) { return is_ungrouped(c, lease) &&
                                                      lease.used_in != c.span; }

bool begin_pass(Context &c) {
    Weights &w = *c.weights;
    release_if(c, is_unused);
    if (c.has_pass) {
        kvt_stream_pass_end(w.stream, nullptr);
    }
    c.has_pass = true;
    c.has_layers = false;
    c.highest = no_group;
    kvt_error_t *error = nullptr;
    const kvt_status_t status = kvt_stream_pass_begin(w.stream, &error);
    if (status != KVT_OK) {
        fail_with(c, status, "beginning a pass through the weights", error);
        return false;
    }
    return true;
}

/// The previous node was the last one of the current group.
void learn_marker(Context &c) {
    Marker &marker = c.markers[c.group];
    if (!marker.is_wrong && c.group != no_group && !marker.name[0] && c.last_name[0]) {
        std::memcpy(marker.name, c.last_name, sizeof marker.name);
    }
}

/// The node reads weights of a group, or of the part after all layers. True if the previous group must
/// be released after it.
bool enter_group(Context &c, uint32_t group, bool is_layer) {
    if (group == c.group) {
        if (group != no_group && !has_grouped(c) && c.markers[group].name[0]) {
            // It was released too early: the graph has another node of the same name.
            c.markers[group].is_wrong = true;
            c.markers[group].name[0] = 0;
        }
        return false;
    }
    const bool had = has_grouped(c);
    if (had) {
        learn_marker(c);
    }
    c.group = group;
    if (group != no_group && (group <= c.highest || !c.has_pass)) {
        begin_pass(c);
    }
    c.highest = group > c.highest ? group : c.highest;
    c.has_layers = c.has_layers || is_layer;
    return had;
}

const ggml_tensor *root_of(const ggml_tensor *tensor) {
    return tensor->view_src ? tensor->view_src : tensor;
}

/// Acquires a weight that is a source of a node. True if the engine must stop after the node.
bool acquire_weight(Context &c, const ggml_tensor *node, int source, const Entry &entry) {
    Weights &w = *c.weights;
    ggml_tensor *tensor = node->src[source];
    const ggml_tensor *root = root_of(tensor);
    const Unit &unit = w.units[entry.unit];
    const bool looks_up = unit.role == KVT_ROLE_EMBEDDING && node->op == GGML_OP_GET_ROWS;
    bool stop = false;
    if (unit.group != no_group) {
        stop = enter_group(c, unit.group, unit.role == KVT_ROLE_LAYER || unit.role == KVT_ROLE_EXPERT);
    } else if (c.has_layers && looks_up) {
        stop = enter_group(c, no_group, false);
        begin_pass(c);
    } else if (c.has_layers && unit.role != KVT_ROLE_OTHER) {
        stop = enter_group(c, no_group, false);
    }
    if (c.status != KVT_OK) {
        return true;
    }
    if (entry.kind == Kind::whole) {
        acquire(c, entry.unit);
    } else {
        acquire_experts(c, entry, node, source);
    }
    // The view was created with the graph, from the address of the weight at that time.
    if (tensor != root) {
        tensor->data = static_cast<uint8_t *>(root->data) + tensor->view_offs;
    }
    return stop;
}

bool before_node(Context &c, ggml_tensor *node) {
    bool stop = false;
    const bool had_all = c.status == KVT_OK;
    for (int i = 0; had_all && i < GGML_MAX_SRC; i++) {
        const Entry *entry = node->src[i] ? entry_of(*c.weights, root_of(node->src[i])) : nullptr;
        if (entry) {
            stop = acquire_weight(c, node, i, *entry) || stop;
        }
    }
    if (c.weights->experts && node->type == GGML_TYPE_I32) {
        // Ids of experts may be among them, and must be known before weights are acquired.
        auto &known = c.integer_nodes;
        for (size_t i = 0; i < known.size(); i++) {
            if (known[i] == node) {
                known[i] = known.back();
                known.pop_back();
                break;
            }
        }
        stop = true;
    }
    const char *last = c.group == no_group ? "" : c.markers[c.group].name;
    if (*last && std::strncmp(last, node->name, GGML_MAX_NAME) == 0 && has_grouped(c)) {
        c.release_after = true;
        stop = true;
    }
    std::memcpy(c.last_name, node->name, sizeof c.last_name);
    return stop || c.status != KVT_OK;
}

/// Results computed from zeros must not look valid if the engine does not end the decode.
void poison(ggml_tensor *node) {
    const bool plain = node->type == GGML_TYPE_F32 && !node->view_src && node->data && node->buffer;
    if (plain && ggml_is_contiguous(node) && ggml_backend_buffer_is_host(node->buffer)) {
        std::memset(node->data, 0xff, ggml_nbytes(node));
    }
}

void after_node(Context &c, ggml_tensor *node) {
    c.span++;
    if (c.status != KVT_OK) {
        poison(node);
        return;
    }
    if (c.weights->experts && node->type == GGML_TYPE_I32) {
        c.integer_nodes.push_back(node);
    }
    release_if(c, c.release_after ? is_grouped : is_over);
    c.release_after = false;
}

} // namespace

bool on_node(ggml_tensor *node, bool is_ask, void *data) {
    Context &c = *static_cast<Context *>(data);
    try {
        if (is_ask) {
            c.user_asked = c.user_eval && c.user_eval(node, true, c.user_eval_data);
            return before_node(c, node) || c.user_asked;
        }
        after_node(c, node);
        return !c.user_asked || c.user_eval(node, false, c.user_eval_data);
    } catch (...) {
        fail(c, KVT_E_NOMEM, "out of memory in the engine's callback: free memory");
        return true;
    }
}

bool on_abort(void *data) {
    Context &c = *static_cast<Context *>(data);
    return c.status != KVT_OK || (c.user_abort && c.user_abort(c.user_abort_data));
}

} // namespace kvt_weights
