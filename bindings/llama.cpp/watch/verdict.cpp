// Asks a policy which tokens of a sequence to evict, and removes them.
#include "watch/evict.hpp"

#include <algorithm>

namespace kvt_llama {

// Passes the keys of new tokens in all layers to the policy, as the cache has them.
kvt_status_t token_evict::append_keys(std::string &message) {
    const size_t first = positions_.size() - new_.size();
    cells_.assign(new_.size(), -1);
    for (size_t cell = 0; !pools_.empty() && cell < pools_[0].owners.size(); cell++) {
        const int32_t owner = pools_[0].owners[cell];
        if (owner >= (int32_t) first) {
            cells_[(size_t) owner - first] = (int64_t) cell;
        }
    }
    if (std::count(cells_.begin(), cells_.end(), -1) != 0) {
        message = "the keys of new tokens are not in the cache: decode with kvt_llama_watch_decode only";
        return KVT_E_STATE;
    }
    kvt_status_t status = KVT_OK;
    for (uint32_t il = 0; il < shape_.layers && status == KVT_OK; il++) {
        status = append_layer(il, (uint32_t) first, message);
    }
    return status;
}

kvt_status_t token_evict::append_layer(uint32_t il, uint32_t first, std::string &message) {
    ggml_tensor *cache = caches_[il];
    rows_view rows;
    if (!cache || cache->ne[0] % shape_.key_heads != 0 || cache->ne[2] != 1 ||
        !reader_.read(cache, cells_.data(), cells_.size(), rows)) {
        message = "the keys of layer " + std::to_string(il) + " cannot be read: open the context with "
                "kv_unified, and use a model with a cache in all layers";
        return KVT_E_UNSUPPORTED;
    }
    const uint32_t dim = (uint32_t) cache->ne[0] / shape_.key_heads;
    if (!has_shape_) {
        shape_.key_dim = dim;
        const kvt_status_t status = policy_.open(shape_, message);
        if (status != KVT_OK) {
            return status;
        }
        has_shape_ = true;
    }
    kvt_rows_t keys = KVT_ROWS_INIT;
    keys.view.address = const_cast<void *>(rows.data);
    keys.view.tokens = (uint32_t) cells_.size();
    keys.view.heads = shape_.key_heads;
    keys.view.run_bytes = dim * ggml_type_size(rows.type);
    keys.view.token_stride_bytes = rows.stride_bytes;
    keys.dtype = dtype_of(rows.type);
    kvt_error_t *error = nullptr;
    const kvt_status_t status = kvt_sparse_append(policy_.get(), il, first, &keys, &error);
    if (status != KVT_OK) {
        message = take_message(&error, status);
    }
    return status;
}

// Reads one layer's answer. `any`: it evicts at least one token.
kvt_status_t token_evict::read_answer(uint32_t layer, const kvt_sparse_context_t &context, bool &any,
                              std::string &message) {
    starts_.resize(shape_.key_heads + 1);
    items_.resize(kept_.size() * shape_.key_heads);
    kvt_token_lists_t keep = KVT_TOKEN_LISTS_INIT;
    keep.starts = starts_.data();
    keep.start_capacity = starts_.size();
    keep.items = items_.data();
    keep.item_capacity = items_.size();
    uint32_t evicted = 0;
    kvt_error_t *error = nullptr;
    const kvt_status_t status =
        kvt_sparse_plan_eviction(policy_.get(), layer, &context, &keep, &evicted, &error);
    if (status != KVT_OK) {
        message = take_message(&error, status);
        return status;
    }
    any = evicted != 0 && keep.start_count > 1;
    starts_.resize(any ? keep.start_count : 0);
    items_.resize(any ? keep.item_count : 0);
    return KVT_OK;
}

void token_evict::count_votes(size_t &longest) {
    for (size_t list = 0; list + 1 < starts_.size(); list++) {
        const size_t from = starts_[list], to = starts_[list + 1];
        longest = std::max(longest, to - from);
        for (size_t i = from; i < to && i < items_.size(); i++) {
            if (items_[i] < votes_.size()) {
                votes_[items_[i]]++;
            }
        }
    }
}

kvt_status_t token_evict::evict(llama_memory_t memory, llama_seq_id seq, std::string &message) {
    const uint32_t caps = policy_.traits().caps;
    const bool is_end = is_prompt_ && wants_logits_;
    const bool is_due = is_end ? (caps & KVT_SPARSE_EVICT_PREFILL) != 0
                               : is_decode_ && (caps & KVT_SPARSE_EVICT_DECODE);
    if (!is_due || kept_.empty()) {
        return KVT_OK;
    }
    kvt_sparse_context_t context = KVT_SPARSE_CONTEXT_INIT;
    context.is_prefill = is_end;
    context.tokens = (uint32_t) positions_.size();
    context.first_query = (uint32_t) (positions_.size() - new_.size());
    votes_.assign(positions_.size(), 0);
    size_t longest = 0;
    uint32_t answers = 0;
    for (uint32_t layer = 0; layer < shape_.layers; layer++) {
        bool any = false;
        const kvt_status_t status = read_answer(layer, context, any, message);
        if (status != KVT_OK) {
            return status;
        }
        answers += any;
        count_votes(longest);
    }
    // A layer that keeps all returns no list. It votes for every token, which only raises the number of
    // kept tokens.
    longest = answers < shape_.layers ? kept_.size() : longest;
    // The newest token always stays: the engine requires that the next position follows it.
    longest = std::max<size_t>(longest, 1);
    votes_[kept_.back()] = UINT32_MAX;
    if (longest >= kept_.size()) {
        return KVT_OK;
    }
    survivors_ = kept_;
    std::stable_sort(survivors_.begin(), survivors_.end(), [&](uint32_t a, uint32_t b) {
        return votes_[a] != votes_[b] ? votes_[a] > votes_[b] : a > b;
    });
    survivors_.resize(longest);
    std::sort(survivors_.begin(), survivors_.end());
    return remove(memory, seq, message);
}

// Removes all tokens of kept_ that are not in stay_, in runs.
kvt_status_t token_evict::remove(llama_memory_t memory, llama_seq_id seq, std::string &message) {
    for (size_t i = 0; i < kept_.size();) {
        if (std::binary_search(survivors_.begin(), survivors_.end(), kept_[i])) {
            i++;
            continue;
        }
        size_t end = i + 1;
        while (end < kept_.size() && !std::binary_search(survivors_.begin(), survivors_.end(), kept_[end])) {
            end++;
        }
        const llama_pos from = positions_[kept_[i]], to = positions_[kept_[end - 1]] + 1;
        if (!llama_memory_seq_rm(memory, seq, from, to)) {
            message = "the memory of this model cannot remove tokens in the middle of a sequence: use "
                      "quest or "
                    "arkvale";
            return KVT_E_UNSUPPORTED;
        }
        counts_.evicted += end - i;
        i = end;
    }
    counts_.evictions++;
    const uint32_t starts[2] = {0, (uint32_t) survivors_.size()};
    kvt_token_lists_t keep = KVT_TOKEN_LISTS_INIT;
    keep.starts = const_cast<uint32_t *>(starts);
    keep.start_capacity = keep.start_count = 2;
    keep.items = survivors_.data();
    keep.item_capacity = keep.item_count = survivors_.size();
    kept_ = survivors_;
    for (uint32_t layer = 0; layer < shape_.layers; layer++) {
        kvt_error_t *error = nullptr;
        const kvt_status_t status = kvt_sparse_commit_eviction(policy_.get(), layer, &keep, &error);
        if (status != KVT_OK) {
            message = take_message(&error, status);
            return status;
        }
    }
    return KVT_OK;
}

} // namespace kvt_llama
