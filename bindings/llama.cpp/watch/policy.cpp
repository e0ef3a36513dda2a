#include "watch/policy.hpp"

#include <algorithm>
#include <cstring>

namespace kvt_llama {

std::string take_message(kvt_error_t **error, kvt_status_t status) {
    std::string message = error && *error ? kvt_error_message(*error) : kvt_status_str(status);
    kvt_error_free(error);
    return message;
}

policy::~policy() {
    if (is_custom_ && owns_data_ && !handle_ && custom_.destroy) {
        custom_.destroy(custom_.user_data);
    }
    kvt_sparse_close(&handle_);
}

kvt_status_t policy::set_source(const policy_source &source, std::string &message) {
    spec_ = source.spec;
    if (!source.custom) {
        return KVT_OK;
    }
    const uint64_t bytes = source.custom->struct_size;
    if (bytes != sizeof custom_ || !source.custom->traits ||
        source.custom->traits->struct_size != sizeof traits_) {
        message = "custom has a wrong struct_size or no traits: initialise both structs with their "
                  "_INIT macros";
        return KVT_E_INVALID;
    }
    custom_ = *source.custom;
    traits_ = *source.custom->traits;
    is_custom_ = true;
    return KVT_OK;
}

kvt_status_t policy::open(const attention_shape &shape, std::string &message) {
    kvt_attention_t attention = KVT_ATTENTION_INIT;
    attention.layers = shape.layers;
    attention.query_heads = shape.query_heads;
    attention.key_heads = shape.key_heads;
    attention.key_dim = attention.value_dim = shape.key_dim;
    attention.kind = KVT_ATTENTION_SPLIT;
    attention.block_tokens = shape.block_tokens;
    attention.max_tokens = shape.max_tokens;
    kvt_sparse_opts_t opts = KVT_SPARSE_OPTS_INIT;
    opts.attention = &attention;
    custom_.traits = &traits_;
    opts.custom = is_custom_ ? &custom_ : nullptr;
    opts.spec = is_custom_ ? nullptr : spec_.c_str();
    opts.spec_bytes = is_custom_ ? 0 : KVT_NUL_TERMINATED;
    if (is_custom_ && handle_) {
        message = "a custom policy serves one shape of heads: layers with other heads are not supported";
        return KVT_E_STATE;
    }

    kvt_sparse_t *opened = nullptr;
    kvt_error_t *error = nullptr;
    kvt_status_t status = kvt_sparse_open(&opts, &opened, &error);
    kvt_sparse_traits_t traits = KVT_SPARSE_TRAITS_INIT;
    if (status == KVT_OK) {
        status = kvt_sparse_traits(opened, &traits);
    }
    if (status != KVT_OK) {
        message = take_message(&error, status);
        kvt_sparse_close(&opened);
        return status;
    }
    kvt_sparse_close(&handle_);
    handle_ = opened;
    traits_ = traits;
    return KVT_OK;
}

} // namespace kvt_llama
