// The policy of a long sequence: requirements, sealing of blocks, choice.
#include "watch/longer_store.hpp"

namespace kvt_llama {
namespace longer {

// Checks that one mask for all heads and a choice by this layer's queries can serve the policy.
kvt_status_t backing::check_policy(const settings &set, kvt_llama_why_t *why) const {
    kvt_sparse_traits_t traits = KVT_SPARSE_TRAITS_INIT;
    const kvt_status_t status = kvt_sparse_traits(policy_, &traits);
    if (status != KVT_OK) {
        return refuse(why, status, "the policy's traits cannot be read");
    }
    const char *spec = set.spec.c_str();
    if (!(traits.caps & KVT_SPARSE_LOAD_DECODE)) {
        return refuse(why, KVT_E_UNSUPPORTED,
                      "%s selects no blocks to be loaded: use quest(share=bound, dense=0) "
                      "or arkvale(dense=0)",
                      spec);
    }
    if (traits.scope != KVT_SCOPE_LAYER) {
        return refuse(why, KVT_E_UNSUPPORTED,
                      "%s chooses blocks for each head, but llama.cpp has one mask for all "
                      "heads: use share=bound, or arkvale",
                      spec);
    }
    if (traits.dense_layers) {
        return refuse(why, KVT_E_UNSUPPORTED,
                      "%s gives the first %u layers full attention, which does not fit into "
                      "the slots: use dense=0",
                      spec, traits.dense_layers);
    }
    const uint32_t supported_needs = KVT_NEEDS_KEYS | KVT_NEEDS_QUERIES;
    if ((traits.needs & ~supported_needs) || traits.ahead || traits.own_dim) {
        return refuse(why, KVT_E_UNSUPPORTED,
                      "%s needs more than a layer's own keys and queries: use "
                      "quest(share=bound, dense=0) or arkvale(dense=0)",
                      spec);
    }
    return KVT_OK;
}

kvt_status_t backing::open_policy(const settings &set, kvt_llama_why_t *why) {
    kvt_attention_t attention = KVT_ATTENTION_INIT;
    attention.layers = model_.layers;
    attention.query_heads = model_.query_heads;
    attention.key_heads = model_.key_heads;
    attention.key_dim = model_.key_dim;
    attention.value_dim = model_.value_dim;
    attention.kind = KVT_ATTENTION_SPLIT;
    attention.block_tokens = block_tokens_;
    attention.max_tokens = max_tokens_;
    attention.scale = model_.scale;
    kvt_sparse_opts_t opts = KVT_SPARSE_OPTS_INIT;
    opts.attention = &attention;
    opts.spec = set.spec.c_str();
    opts.spec_bytes = KVT_NUL_TERMINATED;
    opts.account = account_;
    kvt_error_t *err = nullptr;
    const kvt_status_t status = kvt_sparse_open(&opts, &policy_, &err);
    return status == KVT_OK ? check_policy(set, why)
                            : failed(why, status, "opening the policy", err);
}

kvt_status_t backing::seal(uint32_t layer, uint32_t block, const void *keys, kvt_llama_why_t *why) {
    kvt_rows_t rows = KVT_ROWS_INIT;
    rows.dtype = dtype_of(model_.k_type);
    size_t head_bytes = model_.k_row_bytes / model_.key_heads;
    if (rows.dtype == KVT_DTYPE_BYTES) {
        const ggml_to_float_t to_float = ggml_get_type_traits(model_.k_type)->to_float;
        const size_t numbers = (size_t) model_.key_heads * model_.key_dim;
        for (uint32_t i = 0; i < block_tokens_; i++) {
            to_float((const char *) keys + i * model_.k_row_bytes, keys_.data() + i * numbers,
                     (int64_t) numbers);
        }
        rows.dtype = KVT_DTYPE_F32;
        keys = keys_.data();
        head_bytes = model_.key_dim * sizeof(float);
    }
    rows.view.address = const_cast<void *>(keys);
    rows.view.tokens = block_tokens_;
    rows.view.heads = model_.key_heads;
    rows.view.run_bytes = head_bytes;
    kvt_error_t *err = nullptr;
    const kvt_status_t status =
        kvt_sparse_add_block(policy_, layer, block, block * block_tokens_, &rows, &err);
    return status == KVT_OK ? KVT_OK
                            : failed(why, status, "sealing a block's keys in the policy", err);
}

kvt_status_t backing::choose(uint32_t layer, const kvt_rows_t &queries, uint32_t tokens,
                             uint32_t first, uint32_t end, std::vector<uint32_t> &chosen,
                             kvt_llama_why_t *why) {
    const uint32_t count = end - first;
    candidates_.resize(count);
    chosen.resize(count);
    for (uint32_t i = 0; i < count; i++) {
        candidates_[i] = first + i;
    }
    kvt_sparse_context_t context = KVT_SPARSE_CONTEXT_INIT;
    context.first_query = tokens - queries.view.tokens;
    context.tokens = tokens;
    uint64_t found = 0;
    kvt_error_t *err = nullptr;
    const kvt_status_t status =
        kvt_sparse_select(policy_, layer, &queries, candidates_.data(), count, &context,
                          chosen.data(), chosen.size(), &found, &err);
    if (status != KVT_OK) {
        return failed(why, status, "choosing blocks", err);
    }
    chosen.resize(found);
    return KVT_OK;
}

uint64_t backing::policy_bytes() const {
    kvt_sparse_stats_t stats = KVT_SPARSE_STATS_INIT;
    return policy_ && kvt_sparse_stats(policy_, &stats) == KVT_OK ? stats.state_bytes : 0;
}

} // namespace longer
} // namespace kvt_llama
