// The scheduler's callback. It sees each node before it is computed. It requests a stop after a layer
// writes K and V, so that the queries are available at the attention, and this layer's cache and mask
// can be changed.
#include "watch/longer.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>

using namespace kvt_llama;
using namespace kvt_llama::longer;

namespace {

constexpr uint16_t half_zero = 0, half_minus_infinity = 0xFC00;

float op_number(const ggml_tensor *node, size_t i) {
    float number = 0;
    std::memcpy(&number, (const char *) node->op_params + i * sizeof number, sizeof number);
    return number;
}

} // namespace

bool kvt_llama_longer_t::on_node(ggml_tensor *node, bool is_ask, void *user_data) noexcept {
    kvt_llama_longer_t &self = *static_cast<kvt_llama_longer_t *>(user_data);
    try {
        return is_ask ? self.before_node(node) : self.after_node(node);
    } catch (const std::bad_alloc &) {
        refuse(&self.failure_why_, KVT_E_NOMEM, "out of memory: free memory");
        self.fail(KVT_E_NOMEM);
    } catch (const std::exception &e) {
        refuse(&self.failure_why_, KVT_E_PANIC, "%s", e.what());
        self.fail(KVT_E_PANIC);
    }
    return is_ask;
}

// Tells whether the scheduler must compute this node before it asks about the next one.
bool kvt_llama_longer_t::before_node(ggml_tensor *node) {
    if (work_ == work::none) {
        user_asked_ = user_eval_ && user_eval_(node, true, user_eval_data_);
        stop_requested_ = false;
        return user_asked_;
    }
    const node_info info = roles_->visit(node);
    stop_requested_ = wants(info);
    user_asked_ = work_ == work::run && user_eval_ && user_eval_(node, true, user_eval_data_);
    if (stop_requested_ || user_asked_) {
        roles_->mark_computed();
        return true;
    }
    return false;
}

bool kvt_llama_longer_t::wants(const node_info &info) {
    if (failure_ != KVT_OK || is_claimed_) {
        return true;
    }
    if (info.layer < 0) {
        return false;
    }
    const uint32_t il = (uint32_t) info.layer;
    if (info.what == step::attention) {
        if (work_ == work::inspect) {
            inspect_layer(il);
        } else if (work_ == work::run) {
            at_attention(il);
        }
        return false;
    }
    if (info.what == step::write_k || info.what == step::write_v) {
        if (work_ == work::claim) {
            return info.what == step::write_k;
        }
        // Cells are read once, at layer 0; queries in every layer that chooses by them.
        const uint32_t both = role_k | role_v;
        return work_ == work::run && (il == 0 || cells_->is_divided()) &&
               (roles_->layer((int) il).found & both) == both;
    }
    return false;
}

// False ends the computation: a claim is complete, or a failure makes the rest useless.
bool kvt_llama_longer_t::after_node(ggml_tensor *node) {
    const bool next = !user_asked_ || user_eval_(node, false, user_eval_data_);
    if (!next && work_ == work::run) {
        refuse(&failure_why_, KVT_E_CANCELLED,
               "the caller's cb_eval callback ended the computation");
        fail(KVT_E_CANCELLED);
    }
    if (work_ == work::claim && failure_ == KVT_OK && !is_claimed_) {
        const kvt_status_t status = read_cells(roles_->layer(0));
        is_claimed_ = true;
        fail(status);
    }
    return next && !(work_ != work::none && (failure_ != KVT_OK || is_claimed_));
}

bool kvt_llama_longer_t::check_layer(uint32_t il, const layer_roles &found) {
    char message[256];
    kvt_llama_why_t *why = &failure_why_;
    if (roles_->is_missing((int) il,
                           role_q | role_k | role_attention | role_mask | role_k_idxs |
                               role_cache_k | role_cache_v,
                           message, sizeof message)) {
        refuse(why, KVT_E_UNSUPPORTED,
               "%s: layers without their own cache, and latents (MLA), are not supported", message);
        return false;
    }
    if (found.attention->op != GGML_OP_FLASH_ATTN_EXT) {
        refuse(why, KVT_E_UNSUPPORTED,
               "layer %u computes without flash attention, which transposes V: open the context "
               "with LLAMA_FLASH_ATTN_TYPE_ENABLED",
               il);
    } else if (op_number(found.attention, 1) != 0) {
        refuse(why, KVT_E_UNSUPPORTED,
               "layer %u has ALiBi, which is not supported: its mask depends on positions", il);
    } else if (found.cache_v == found.cache_k || found.cache_layer != (int) il) {
        refuse(why, KVT_E_UNSUPPORTED,
               "layer %u has no K and V of its own (MLA, or a shared cache), which is not supported", il);
    } else if (found.cache_k->ne[2] != 1 || found.keys->ne[3] != 1) {
        refuse(why, KVT_E_UNSUPPORTED,
               "each sequence has separate cells: open the context with kv_unified");
    } else if (found.mask->type != GGML_TYPE_F16 || found.mask->ne[2] != 1 ||
               found.mask->ne[3] != 1 || found.q->type != GGML_TYPE_F32 ||
               found.k_idxs->type != GGML_TYPE_I64) {
        refuse(why, KVT_E_UNSUPPORTED,
               "layer %u: the mask, the queries or the cell indices have an unsupported type or "
               "shape in this engine",
               il);
    } else {
        return true;
    }
    return false;
}

void kvt_llama_longer_t::inspect_layer(uint32_t il) {
    const layer_roles &found = roles_->layer((int) il);
    if (il != inspected_layers_) {
        refuse(&failure_why_, KVT_E_UNSUPPORTED,
               "layer %u has no attention: recurrent layers are not supported", inspected_layers_);
        return fail(KVT_E_UNSUPPORTED);
    }
    if (!check_layer(il, found)) {
        return fail(KVT_E_UNSUPPORTED);
    }
    shape now;
    now.layers = model_.layers;
    now.query_heads = (uint32_t) found.q->ne[2];
    now.key_heads = (uint32_t) found.keys->ne[2];
    now.key_dim = (uint32_t) found.keys->ne[0];
    now.value_dim = (uint32_t) (found.cache_v->ne[0] / found.keys->ne[2]);
    now.cells = (uint32_t) found.cache_k->ne[1];
    now.k_row_bytes = found.cache_k->nb[1];
    now.v_row_bytes = found.cache_v->nb[1];
    now.k_type = found.cache_k->type;
    now.v_type = found.cache_v->type;
    now.scale = op_number(found.attention, 0);
    const bool is_same = now.query_heads == model_.query_heads &&
                         now.key_heads == model_.key_heads && now.key_dim == model_.key_dim &&
                         now.value_dim == model_.value_dim && now.cells == model_.cells &&
                         now.k_row_bytes == model_.k_row_bytes &&
                         now.v_row_bytes == model_.v_row_bytes && now.k_type == model_.k_type &&
                         now.v_type == model_.v_type;
    if (il > 0 && !is_same) {
        refuse(&failure_why_, KVT_E_UNSUPPORTED,
               "layer %u has other heads or another cache than earlier layers, which is not supported",
               il);
        return fail(KVT_E_UNSUPPORTED);
    }
    model_ = now;
    k_.push_back(found.cache_k);
    v_.push_back(found.cache_v);
    is_host_ = is_host_ && ggml_backend_buffer_is_host(found.cache_k->buffer) &&
               ggml_backend_buffer_is_host(found.cache_v->buffer);
    inspected_layers_++;
}

kvt_status_t kvt_llama_longer_t::read_cells(const layer_roles &found) {
    if (!(found.found & role_k_idxs) || found.k_idxs->ne[0] != (int64_t) part_) {
        return refuse(&failure_why_, KVT_E_UNSUPPORTED,
                      "the graph does not show the cells of its tokens: this engine is not supported");
    }
    idxs_.resize(part_);
    ggml_backend_tensor_get(found.k_idxs, idxs_.data(), 0, part_ * sizeof(int64_t));
    for (const int64_t cell : idxs_) {
        if (cell < 0 || cell >= (int64_t) model_.cells) {
            return refuse(&failure_why_, KVT_E_UNSUPPORTED,
                          "the engine gave a token cell %lld, but has only %u",
                          (long long) cell, model_.cells);
        }
        new_cells_.push_back((uint32_t) cell);
    }
    return KVT_OK;
}

void kvt_llama_longer_t::at_attention(uint32_t il) {
    const layer_roles &found = roles_->layer((int) il);
    kvt_status_t status = KVT_OK;
    if (il == 0) {
        mask_of_ = nullptr;
        status = read_cells(found);
    }
    if (status == KVT_OK && cells_->is_divided()) {
        status = choose(il, found);
        if (status == KVT_OK) {
            status = load(il);
        }
        if (status == KVT_OK) {
            status = write_mask(il, found.mask);
        }
    }
    fail(status);
}

kvt_status_t kvt_llama_longer_t::choose(uint32_t il, const layer_roles &found) {
    const stopwatch time(stats_.choose_ns);
    ggml_tensor *q = found.q;
    const bool is_known = (found.found & role_q) && found.q && roles_->is_computed(q);
    if (!is_known || q->type != GGML_TYPE_F32 || q->ne[0] != model_.key_dim ||
        q->ne[1] != (int64_t) part_ || q->ne[2] != model_.query_heads ||
        q->nb[0] != sizeof(float)) {
        return refuse(&failure_why_, KVT_E_UNSUPPORTED,
                      "the queries of layer %u have changed their shape since the bind", il);
    }
    const size_t bytes =
        (q->ne[1] - 1) * q->nb[1] + (q->ne[2] - 1) * q->nb[2] + q->ne[0] * q->nb[0];
    query_.resize(bytes);
    ggml_backend_tensor_get(q, query_.data(), 0, bytes);
    kvt_rows_t rows = KVT_ROWS_INIT;
    rows.dtype = KVT_DTYPE_F32;
    rows.view.address = query_.data();
    rows.view.tokens = part_;
    rows.view.heads = model_.query_heads;
    rows.view.run_bytes = q->ne[0] * sizeof(float);
    rows.view.token_stride_bytes = q->nb[1];
    rows.view.head_stride_bytes = q->nb[2];
    const uint32_t first = cells_->sink_tokens() / settings_.block_tokens;
    const uint32_t end = cells_->window_first() / settings_.block_tokens;
    const kvt_status_t status =
        store_.choose(il, rows, cells_->tokens() + part_, first, end, chosen[il], &failure_why_);
    if (status != KVT_OK) {
        return status;
    }
    if (chosen[il].size() > cells_->slot_count()) {
        return refuse(&failure_why_, KVT_E_LIMIT,
                      "%s chose %zu blocks for layer %u, but there are %u slots: lower its budget, "
                      "or raise slot_tokens",
                      settings_.spec.c_str(), chosen[il].size(), il, cells_->slot_count());
    }
    stats_.choices++;
    stats_.candidate_blocks += end - first;
    stats_.chosen_blocks += chosen[il].size();
    return KVT_OK;
}

kvt_status_t kvt_llama_longer_t::load(uint32_t il) {
    slots_[il].place(chosen[il], settings_.is_ordered, missing_);
    stats_.kept_blocks += chosen[il].size() - missing_.size();
    if (missing_.empty()) {
        return KVT_OK;
    }
    const stopwatch time(stats_.load_ns);
    load_blocks_.clear();
    load_cells_.clear();
    for (const slots::load &one : missing_) {
        const uint32_t *at = cells_->slot_cells(one.slot);
        load_blocks_.push_back(one.block);
        load_cells_.insert(load_cells_.end(), at, at + settings_.block_tokens);
        slots_[il].set(one, false);
    }
    const kvt_status_t status = get_cells(il, load_blocks_, load_cells_, &failure_why_);
    if (status != KVT_OK) {
        return status;
    }
    for (const slots::load &one : missing_) {
        slots_[il].set(one, true);
    }
    stats_.loaded_blocks += missing_.size();
    stats_.loaded_bytes += load_cells_.size() * (model_.k_row_bytes + model_.v_row_bytes);
    return KVT_OK;
}

// The engine's mask hides held cells from all tokens of the part. All layers read the same mask, so
// each layer writes which of its slots are visible.
kvt_status_t kvt_llama_longer_t::write_mask(uint32_t il, ggml_tensor *mask) {
    const size_t bytes = mask->nb[1] * (size_t) mask->ne[1];
    if (mask->ne[1] < (int64_t) part_ || mask->type != GGML_TYPE_F16) {
        return refuse(&failure_why_, KVT_E_UNSUPPORTED,
                      "the mask of layer %u has changed its type or shape since the bind", il);
    }
    const bool is_host = !settings_.is_staged && ggml_backend_buffer_is_host(mask->buffer);
    if (!is_host && mask_of_ != mask) {
        mask_.resize(bytes);
        ggml_backend_tensor_get(mask, mask_.data(), 0, bytes);
        mask_of_ = mask;
    }
    uint8_t *rows = is_host ? (uint8_t *) mask->data : mask_.data();
    for (uint32_t slot = 0; slot < cells_->slot_count(); slot++) {
        const uint16_t value = slots_[il].is_chosen(slot) ? half_zero : half_minus_infinity;
        const uint32_t *at = cells_->slot_cells(slot);
        if (*std::max_element(at, at + settings_.block_tokens) >= mask->ne[0]) {
            return refuse(&failure_why_, KVT_E_UNSUPPORTED,
                          "the mask of layer %u does not cover the slots", il);
        }
        for (uint32_t row = 0; row < part_; row++) {
            uint16_t *numbers = (uint16_t *) (rows + row * mask->nb[1]);
            for (uint32_t i = 0; i < settings_.block_tokens; i++) {
                numbers[at[i]] = value;
            }
        }
    }
    if (!is_host) {
        ggml_backend_tensor_set(mask, mask_.data(), 0, mask->nb[1] * part_);
    }
    return KVT_OK;
}
