// What happens while a graph is computed. The engine's scheduler tells of each node before it is
// computed; behind the writes of K and V of a layer it is made to stop, so that at the attention
// the queries are there, and the cache and the mask of this layer can be changed.
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

bool kvt_llama_longer_t::on_node(ggml_tensor *node, bool ask, void *user_data) noexcept {
    kvt_llama_longer_t &self = *static_cast<kvt_llama_longer_t *>(user_data);
    try {
        return ask ? self.ask(node) : self.computed(node);
    } catch (const std::bad_alloc &) {
        refuse(&self.failure_why_, KVT_E_NOMEM, "no memory");
        self.fail(KVT_E_NOMEM);
    } catch (const std::exception &e) {
        refuse(&self.failure_why_, KVT_E_PANIC, "%s", e.what());
        self.fail(KVT_E_PANIC);
    }
    return ask;
}

// Whether the node's numbers are wanted: then all up to it is computed before the next is asked
// for.
bool kvt_llama_longer_t::ask(ggml_tensor *node) {
    if (work_ == work::none) {
        next_asked_ = next_ && next_(node, true, next_data_);
        asked_ = false;
        return next_asked_;
    }
    const seen seen = roles_->look(node);
    asked_ = wants(seen);
    next_asked_ = work_ == work::run && next_ && next_(node, true, next_data_);
    if (asked_ || next_asked_) {
        roles_->cut();
        return true;
    }
    return false;
}

bool kvt_llama_longer_t::wants(const seen &seen) {
    if (failure_ != KVT_OK || is_claimed_) {
        return true;
    }
    if (seen.layer < 0) {
        return false;
    }
    const uint32_t il = (uint32_t) seen.layer;
    if (seen.what == step::attention) {
        if (work_ == work::learn) {
            learn_layer(il);
        } else if (work_ == work::run) {
            attend(il);
        }
        return false;
    }
    if (seen.what == step::write_k || seen.what == step::write_v) {
        if (work_ == work::claim) {
            return seen.what == step::write_k;
        }
        // Cells are asked for once; queries where something is chosen by them.
        const uint32_t both = role_k | role_v;
        return work_ == work::run && (il == 0 || where_->is_divided()) &&
               (roles_->layer((int) il).found & both) == both;
    }
    return false;
}

// False ends the computation: what was claimed is claimed, what has failed is not used.
bool kvt_llama_longer_t::computed(ggml_tensor *node) {
    const bool next = !next_asked_ || next_(node, false, next_data_);
    if (!next && work_ == work::run) {
        refuse(&failure_why_, KVT_E_CANCELLED,
               "the callback that was there before ended the computation");
        fail(KVT_E_CANCELLED);
    }
    if (work_ == work::claim && failure_ == KVT_OK && !is_claimed_) {
        const kvt_status_t status = read_cells(roles_->layer(0));
        is_claimed_ = true;
        fail(status);
    }
    return next && !(work_ != work::none && (failure_ != KVT_OK || is_claimed_));
}

bool kvt_llama_longer_t::is_layer_fit(uint32_t il, const layer_roles &found) {
    char words[256];
    kvt_llama_why_t *why = &failure_why_;
    if (roles_->is_missing((int) il,
                           role_q | role_k | role_attention | role_mask | role_k_idxs |
                               role_cache_k | role_cache_v,
                           words, sizeof words)) {
        refuse(why, KVT_E_UNSUPPORTED,
               "%s: layers without a cache of their own, and latents (MLA), are not served", words);
        return false;
    }
    if (found.attention->op != GGML_OP_FLASH_ATTN_EXT) {
        refuse(why, KVT_E_UNSUPPORTED,
               "layer %u computes without flash attention, and its V lies transposed: open "
               "the context with LLAMA_FLASH_ATTN_TYPE_ENABLED",
               il);
    } else if (op_number(found.attention, 1) != 0) {
        refuse(why, KVT_E_UNSUPPORTED, "layer %u has ALiBi: its mask says where tokens are", il);
    } else if (found.cache_v == found.cache_k || found.cache_layer != (int) il) {
        refuse(why, KVT_E_UNSUPPORTED,
               "layer %u has no K and V of its own (MLA, or it shares a cache)", il);
    } else if (found.cache_k->ne[2] != 1 || found.keys->ne[3] != 1) {
        refuse(why, KVT_E_UNSUPPORTED,
               "each sequence has cells of its own: open the context with kv_unified");
    } else if (found.mask->type != GGML_TYPE_F16 || found.mask->ne[2] != 1 ||
               found.mask->ne[3] != 1 || found.q->type != GGML_TYPE_F32 ||
               found.k_idxs->type != GGML_TYPE_I64) {
        refuse(why, KVT_E_UNSUPPORTED,
               "layer %u: the mask, the queries or the cells of this engine have another form "
               "than this was written for",
               il);
    } else {
        return true;
    }
    return false;
}

void kvt_llama_longer_t::learn_layer(uint32_t il) {
    const layer_roles &found = roles_->layer((int) il);
    if (il != learned_) {
        refuse(&failure_why_, KVT_E_UNSUPPORTED,
               "layer %u has no attention: recurrent layers are not served", learned_);
        return fail(KVT_E_UNSUPPORTED);
    }
    if (!is_layer_fit(il, found)) {
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
               "layer %u has other heads, or another cache, than those before it", il);
        return fail(KVT_E_UNSUPPORTED);
    }
    model_ = now;
    k_.push_back(found.cache_k);
    v_.push_back(found.cache_v);
    is_host_ = is_host_ && ggml_backend_buffer_is_host(found.cache_k->buffer) &&
               ggml_backend_buffer_is_host(found.cache_v->buffer);
    learned_++;
}

kvt_status_t kvt_llama_longer_t::read_cells(const layer_roles &found) {
    if (!(found.found & role_k_idxs) || found.k_idxs->ne[0] != (int64_t) part_) {
        return refuse(&failure_why_, KVT_E_UNSUPPORTED,
                      "this graph does not say which cells its tokens have");
    }
    idxs_.resize(part_);
    ggml_backend_tensor_get(found.k_idxs, idxs_.data(), 0, part_ * sizeof(int64_t));
    for (const int64_t cell : idxs_) {
        if (cell < 0 || cell >= (int64_t) model_.cells) {
            return refuse(&failure_why_, KVT_E_UNSUPPORTED, "a token was given cell %lld of %u",
                          (long long) cell, model_.cells);
        }
        new_cells_.push_back((uint32_t) cell);
    }
    return KVT_OK;
}

void kvt_llama_longer_t::attend(uint32_t il) {
    const layer_roles &found = roles_->layer((int) il);
    kvt_status_t status = KVT_OK;
    if (il == 0) {
        mask_of_ = nullptr;
        status = read_cells(found);
    }
    if (status == KVT_OK && where_->is_divided()) {
        status = choose(il, found);
        if (status == KVT_OK) {
            status = load(il);
        }
        if (status == KVT_OK) {
            status = show(il, found.mask);
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
                      "the queries of layer %u are not where they were", il);
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
    const uint32_t first = where_->sink_tokens() / set_.block_tokens;
    const uint32_t end = where_->window_first() / set_.block_tokens;
    const kvt_status_t status =
        store_.choose(il, rows, where_->tokens() + part_, first, end, chosen[il], &failure_why_);
    if (status != KVT_OK) {
        return status;
    }
    if (chosen[il].size() > where_->slot_count()) {
        return refuse(&failure_why_, KVT_E_LIMIT,
                      "%s chose %zu blocks for layer %u, and there are %u slots: give it a "
                      "smaller budget, or more slot_tokens",
                      set_.spec.c_str(), chosen[il].size(), il, where_->slot_count());
    }
    stats_.choices++;
    stats_.candidate_blocks += end - first;
    stats_.chosen_blocks += chosen[il].size();
    return KVT_OK;
}

kvt_status_t kvt_llama_longer_t::load(uint32_t il) {
    slots_[il].place(chosen[il], set_.is_ordered, missing_);
    stats_.kept_blocks += chosen[il].size() - missing_.size();
    if (missing_.empty()) {
        return KVT_OK;
    }
    const stopwatch time(stats_.load_ns);
    load_blocks_.clear();
    load_cells_.clear();
    for (const slots::load &one : missing_) {
        const uint32_t *at = where_->slot_cells(one.slot);
        load_blocks_.push_back(one.block);
        load_cells_.insert(load_cells_.end(), at, at + set_.block_tokens);
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
// each layer says anew what is seen of its slots.
kvt_status_t kvt_llama_longer_t::show(uint32_t il, ggml_tensor *mask) {
    const size_t bytes = mask->nb[1] * (size_t) mask->ne[1];
    if (mask->ne[1] < (int64_t) part_ || mask->type != GGML_TYPE_F16) {
        return refuse(&failure_why_, KVT_E_UNSUPPORTED,
                      "the mask of layer %u has another form than before", il);
    }
    const bool is_near = !set_.is_staged && ggml_backend_buffer_is_host(mask->buffer);
    if (!is_near && mask_of_ != mask) {
        mask_.resize(bytes);
        ggml_backend_tensor_get(mask, mask_.data(), 0, bytes);
        mask_of_ = mask;
    }
    uint8_t *rows = is_near ? (uint8_t *) mask->data : mask_.data();
    for (uint32_t slot = 0; slot < where_->slot_count(); slot++) {
        const uint16_t value = slots_[il].is_chosen(slot) ? half_zero : half_minus_infinity;
        const uint32_t *at = where_->slot_cells(slot);
        if (*std::max_element(at, at + set_.block_tokens) >= mask->ne[0]) {
            return refuse(&failure_why_, KVT_E_UNSUPPORTED,
                          "the mask of layer %u ends before the slots", il);
        }
        for (uint32_t row = 0; row < part_; row++) {
            uint16_t *numbers = (uint16_t *) (rows + row * mask->nb[1]);
            for (uint32_t i = 0; i < set_.block_tokens; i++) {
                numbers[at[i]] = value;
            }
        }
    }
    if (!is_near) {
        ggml_backend_tensor_set(mask, mask_.data(), 0, mask->nb[1] * part_);
    }
    return KVT_OK;
}
