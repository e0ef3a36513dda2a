// Acquires only those experts that the router chose.
#include "weights/weights.hpp"

#include <algorithm>
#include <cstring>
#include <sys/mman.h>

namespace kvt_weights {

namespace {

/// The source of a node that has the row ids for another source, or -1.
int ids_source(const ggml_tensor *node, int source) {
    switch (node->op) {
    case GGML_OP_MUL_MAT_ID:
        return source == 0 ? 2 : -1;
    case GGML_OP_ADD_ID:
        return source == 1 ? 2 : -1;
    case GGML_OP_GET_ROWS:
        return source == 0 ? 1 : -1;
    default:
        return -1;
    }
}

/// Tells whether ids are available: computed in this graph, or an input of the graph.
bool is_known(const Context &c, const ggml_tensor *ids) {
    const ggml_tensor *root = ids->view_src ? ids->view_src : ids;
    const auto &known = c.integer_nodes;
    return root->op == GGML_OP_NONE || std::find(known.begin(), known.end(), root) != known.end() ||
           std::find(known.begin(), known.end(), ids) != known.end();
}

/// Writes the units of the chosen experts to `wanted`, each once.
bool read_ids(Context &c, const Entry &entry, const ggml_tensor *ids) {
    const auto *bytes = static_cast<const uint8_t *>(ids->data);
    std::fill(c.seen.begin(), c.seen.end(), 0);
    c.wanted.clear();
    const int64_t rows = ids->ne[1] * ids->ne[2] * ids->ne[3];
    if (ids->ne[2] * ids->ne[3] != 1 || c.seen.size() < entry.experts.size()) {
        return false;
    }
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t i = 0; i < ids->ne[0]; i++) {
            int32_t id = 0;
            std::memcpy(&id, bytes + row * ids->nb[1] + i * ids->nb[0], sizeof id);
            if (id < 0 || static_cast<size_t>(id) >= entry.experts.size()) {
                return false;
            }
            if (!c.seen[id]) {
                c.seen[id] = 1;
                c.wanted.push_back(entry.experts[id]);
            }
        }
    }
    return true;
}

bool has_lease(const Context &c, uint32_t unit) {
    for (const Lease &lease : c.leases) {
        if (lease.handle.unit == unit) {
            return true;
        }
    }
    return false;
}

} // namespace

bool acquire_experts(Context &c, const Entry &entry, const ggml_tensor *node, int source) {
    Weights &w = *c.weights;
    const int from = ids_source(node, source);
    const ggml_tensor *ids = from < 0 ? nullptr : node->src[from];
    if (!ids || ids->type != GGML_TYPE_I32 || !ids->data || !is_known(c, ids)) {
        fail(c, KVT_E_UNSUPPORTED,
             "%s (%s) reads experts of %s in an unsupported way: run this model without this adapter",
             node->name, ggml_op_name(node->op), entry.tensor->name);
        return false;
    }
    if (!read_ids(c, entry, ids)) {
        fail(c, KVT_E_CORRUPT, "%s has ids of experts outside 0..%zu, or an unsupported shape", ids->name,
             entry.experts.size() - 1);
        return false;
    }
    if (c.wanted.size() > w.experts_at_once) {
        fail(c, KVT_E_BUDGET,
             "a batch uses %zu experts of a layer, but only %u fit: make contexts with n_ubatch of at "
             "most %u",
             c.wanted.size(), w.experts_at_once, std::max(1u, w.experts_at_once / w.experts_used));
        return false;
    }
    c.missing.clear();
    for (uint32_t unit : c.wanted) {
        if (!has_lease(c, unit)) {
            c.missing.push_back(unit);
        }
    }
    if (c.missing.size() > 1) {
        kvt_stream_hint(w.stream, c.missing.data(), c.missing.size(), nullptr);
    }
    for (uint32_t unit : c.wanted) {
        if (!acquire(c, unit)) {
            return false;
        }
    }
    return true;
}

void copy_parts(Weights &w, uint32_t unit, const void *address) {
    const auto *bytes = static_cast<const uint8_t *>(address);
    for (const kvt_part_t &part : w.units[unit].copied) {
        auto *placeholder = static_cast<uint8_t *>(w.entries[part.tensor]->placeholder);
        std::memcpy(placeholder + part.from, bytes + part.at, part.bytes);
        w.copied_bytes += part.bytes;
    }
}

/// Frees pages that lie in the tensor completely; pages at its ends are shared with other tensors.
void drop_copies(Weights &w, uint32_t layer) {
    for (const auto &entry : w.entries) {
        if (entry->kind != Kind::copied || entry->layer != layer) {
            continue;
        }
        const auto begin = reinterpret_cast<uintptr_t>(entry->placeholder);
        const uintptr_t page = page_bytes();
        const uintptr_t from = (begin + page - 1) & ~(page - 1);
        const uintptr_t end = (begin + entry->bytes) & ~(page - 1);
        if (from < end) {
            madvise(reinterpret_cast<void *>(from), end - from, MADV_DONTNEED);
        }
    }
}

} // namespace kvt_weights
