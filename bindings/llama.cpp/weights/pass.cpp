// The engine's callback: which weights the next nodes need, and which ones are not needed any more.
//
// The engine asks about nodes in the order of the graph and computes them together up to one that it is
// told to stop at. So all units of such a span are held until it was computed. Where one group of units (a
// layer) ends and the next one begins is seen by the weights that nodes read. After the first pass the last
// node of each group is known by its name: there is where to stop, and only one group is held at a time.
#include "weights/weights.hpp"

#include <cstring>

namespace kvt_weights {

namespace {

bool is_aside(const Context &c, const Hold &hold) {
    return c.weights->units[hold.held.unit].group == no_group;
}

/// Of a group that is over.
bool is_over(const Context &c, const Hold &hold) {
    return !is_aside(c, hold) && c.weights->units[hold.held.unit].group != c.group;
}

bool is_grouped(const Context &c, const Hold &hold) { return !is_aside(c, hold); }

bool has_grouped(const Context &c) {
    for (const Hold &hold : c.holds) {
        if (is_grouped(c, hold)) {
            return true;
        }
    }
    return false;
}

/// What was kept through a pass and is not needed now.
bool is_left(const Context &c, const Hold &hold) { return is_aside(c, hold) && hold.used_in != c.span; }

bool begin_pass(Context &c) {
    Weights &w = *c.weights;
    release_if(c, is_left);
    if (c.has_pass) {
        kvt_stream_pass_end(w.stream, nullptr);
    }
    c.has_pass = true;
    c.has_layers = false;
    c.highest = no_group;
    kvt_error_t *error = nullptr;
    const kvt_status_t status = kvt_stream_pass_begin(w.stream, &error);
    if (status != KVT_OK) {
        fail_with(c, status, "weights are not used any more", error);
        return false;
    }
    return true;
}

/// The node before was the last one of the group that was computed with.
void learn(Context &c) {
    Marker &marker = c.markers[c.group];
    if (!marker.is_wrong && c.group != no_group && !marker.name[0] && c.last_name[0]) {
        std::memcpy(marker.name, c.last_name, sizeof marker.name);
    }
}

/// The node reads weights of a group, or of what comes after all layers. True if the group before has to be
/// given back after it.
bool turn_to(Context &c, uint32_t group, bool is_layer) {
    if (group == c.group) {
        if (group != no_group && !has_grouped(c) && c.markers[group].name[0]) {
            // It was given back too early: its name stands elsewhere in the graph too.
            c.markers[group].is_wrong = true;
            c.markers[group].name[0] = 0;
        }
        return false;
    }
    const bool had = has_grouped(c);
    if (had) {
        learn(c);
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

/// A source of a node that is a weight. True if the engine has to stop after the node.
bool need_weight(Context &c, const ggml_tensor *node, int source, const Entry &entry) {
    Weights &w = *c.weights;
    ggml_tensor *tensor = node->src[source];
    const ggml_tensor *root = root_of(tensor);
    const Unit &unit = w.units[entry.unit];
    const bool looks_up = unit.role == KVT_ROLE_EMBEDDING && node->op == GGML_OP_GET_ROWS;
    bool stop = false;
    if (unit.group != no_group) {
        stop = turn_to(c, unit.group, unit.role == KVT_ROLE_LAYER || unit.role == KVT_ROLE_EXPERT);
    } else if (c.has_layers && looks_up) {
        stop = turn_to(c, no_group, false);
        begin_pass(c);
    } else if (c.has_layers && unit.role != KVT_ROLE_OTHER) {
        stop = turn_to(c, no_group, false);
    }
    if (c.status != KVT_OK) {
        return true;
    }
    if (entry.kind == Kind::whole) {
        hold(c, entry.unit);
    } else {
        hold_experts(c, entry, node, source);
    }
    // Views were made when the graph was, from where the weight was then.
    if (tensor != root) {
        tensor->data = static_cast<uint8_t *>(root->data) + tensor->view_offs;
    }
    return stop;
}

bool ask(Context &c, ggml_tensor *node) {
    bool stop = false;
    const bool had_all = c.status == KVT_OK;
    for (int i = 0; had_all && i < GGML_MAX_SRC; i++) {
        const Entry *entry = node->src[i] ? entry_of(*c.weights, root_of(node->src[i])) : nullptr;
        if (entry) {
            stop = need_weight(c, node, i, *entry) || stop;
        }
    }
    if (c.weights->experts && node->type == GGML_TYPE_I32) {
        // Ids of experts may be among them: they have to be known before weights are asked for.
        auto &known = c.numbers;
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
        c.let_go = true;
        stop = true;
    }
    std::memcpy(c.last_name, node->name, sizeof c.last_name);
    return stop || c.status != KVT_OK;
}

/// What comes of zeros must not look like a result, should the engine not have ended the decode.
void spoil(ggml_tensor *node) {
    const bool plain = node->type == GGML_TYPE_F32 && !node->view_src && node->data && node->buffer;
    if (plain && ggml_is_contiguous(node) && ggml_backend_buffer_is_host(node->buffer)) {
        std::memset(node->data, 0xff, ggml_nbytes(node));
    }
}

void computed(Context &c, ggml_tensor *node) {
    c.span++;
    if (c.status != KVT_OK) {
        spoil(node);
        return;
    }
    if (c.weights->experts && node->type == GGML_TYPE_I32) {
        c.numbers.push_back(node);
    }
    release_if(c, c.let_go ? is_grouped : is_over);
    c.let_go = false;
}

} // namespace

bool on_node(ggml_tensor *node, bool is_ask, void *data) {
    Context &c = *static_cast<Context *>(data);
    try {
        if (is_ask) {
            c.user_asked = c.user_eval && c.user_eval(node, true, c.user_eval_data);
            return ask(c, node) || c.user_asked;
        }
        computed(c, node);
        return !c.user_asked || c.user_eval(node, false, c.user_eval_data);
    } catch (...) {
        fail(c, KVT_E_NOMEM, "no memory");
        return true;
    }
}

bool on_abort(void *data) {
    Context &c = *static_cast<Context *>(data);
    return c.status != KVT_OK || (c.user_abort && c.user_abort(c.user_abort_data));
}

} // namespace kvt_weights
