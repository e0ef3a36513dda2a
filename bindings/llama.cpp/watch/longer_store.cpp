#include "watch/longer_store.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>

namespace kvt_llama {
namespace longer {
namespace {

// An op that takes longer is cancelled.
constexpr uint64_t wait_ns = 60ull * 1000000000u;
// How long a submit is retried while other users keep the store busy.
constexpr uint64_t retry_ns = 5ull * 1000000000u;

template <typename F> kvt_status_t retry_while_busy(kvt_error_t **err, F submit) {
    const uint64_t until = now_ns() + retry_ns;
    kvt_status_t status = submit();
    while (status == KVT_E_AGAIN && now_ns() < until) {
        kvt_error_free(err);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        status = submit();
    }
    return status;
}

std::string random_text() {
    std::random_device device;
    std::string text(32, 0);
    for (char &c : text) {
        c = (char) (device() & 0xff);
    }
    return text;
}

kvt_view_t no_view() {
    kvt_view_t view;
    std::memset(&view, 0, sizeof view);
    return view;
}

} // namespace

// Opens an own store. It may use the memory that policy, tables and staging leave.
kvt_status_t backing::open_own(const settings &set, kvt_llama_why_t *why) {
    kvt_error_t *err = nullptr;
    kvt_runtime_opts_t runtime = KVT_RUNTIME_OPTS_INIT;
    runtime.workers = 2;
    kvt_status_t status = kvt_runtime_open(&runtime, &runtime_, &err);
    if (status != KVT_OK) {
        return failed(why, status, "opening a runtime", err);
    }
    kvt_budget_opts_t budget = KVT_BUDGET_OPTS_INIT;
    budget.host_bytes = set.host_bytes;
    budget.disk_bytes = set.has_disk ? set.disk_bytes : 0;
    status = kvt_budget_open(runtime_, &budget, &budget_, &err);
    if (status != KVT_OK) {
        return failed(why, status, "opening a budget", err);
    }
    kvt_account_opts_t account = KVT_ACCOUNT_OPTS_INIT;
    account.name = "llama longer";
    account.name_bytes = std::strlen(account.name);
    status = kvt_account_open(budget_, &account, &own_account_, &err);
    if (status != KVT_OK) {
        return failed(why, status, "opening an account", err);
    }
    account_ = own_account_;
    kvt_store_opts_t store = KVT_STORE_OPTS_INIT;
    store.host_bytes = set.host_bytes - set.host_bytes / 8;
    if (set.has_disk) {
        store.disk_path = set.disk_path.data();
        store.disk_path_bytes = set.disk_path.size();
        store.disk_bytes = set.disk_bytes;
    }
    status = kvt_store_open(runtime_, budget_, &store, &store_, &err);
    return status == KVT_OK ? KVT_OK : failed(why, status, "opening a store", err);
}

kvt_status_t backing::open(const settings &set, kvt_llama_why_t *why) {
    has_name_ = set.has_name;
    if (set.store) {
        used_store_ = set.store;
        account_ = set.account;
        has_disk_ = true;
        return KVT_OK;
    }
    has_disk_ = set.has_disk;
    const kvt_status_t status = open_own(set, why);
    used_store_ = store_;
    return status;
}

kvt_status_t backing::open_namespace(const settings &set, const char *description,
                                     const std::string &sparse, kvt_namespace_t **out,
                                     kvt_llama_why_t *why) {
    const std::string salt = set.has_name ? "name " + set.name : "nameless " + random_text();
    const std::string made = std::string("llama.cpp ") + KVTIER_LLAMA_VERSION + ", ggml " +
                             KVTIER_GGML_VERSION + ", K " + ggml_type_name(model_.k_type) + ", V " +
                             ggml_type_name(model_.v_type) + ", longer, " + set.context;
    kvt_identity_extra_t extra[2];
    std::memset(&extra, 0, sizeof extra);
    extra[0].tag = 0x80000001u;
    extra[0].value = made.data();
    extra[0].value_bytes = made.size();
    extra[1].tag = 0x80000002u;
    extra[1].value = sparse.data();
    extra[1].value_bytes = sparse.size();
    kvt_identity_t identity = KVT_IDENTITY_INIT;
    identity.model = description;
    identity.model_bytes = std::strlen(description);
    identity.weights = set.model_id.data();
    identity.weights_bytes = set.model_id.size();
    identity.lora = set.adapters.empty() ? nullptr : set.adapters.data();
    identity.lora_bytes = set.adapters.size();
    identity.salt = salt.data();
    identity.salt_bytes = salt.size();
    identity.extra = extra;
    identity.extra_count = sparse.empty() ? 1 : 2;
    identity.extra_stride_bytes = sizeof extra[0];
    std::vector<uint16_t> layers(model_.layers);
    for (uint32_t i = 0; i < model_.layers; i++) {
        layers[i] = (uint16_t) i;
    }
    kvt_group_t group;
    std::memset(&group, 0, sizeof group);
    group.dtype =
        model_.k_type == model_.v_type ? dtype_of(model_.k_type) : (uint32_t) KVT_DTYPE_BYTES;
    group.kv_heads = group.dtype == KVT_DTYPE_BYTES ? 0 : model_.key_heads;
    group.k_bytes = model_.k_row_bytes;
    group.v_bytes = model_.v_row_bytes;
    group.layers = layers.data();
    group.layer_count = layers.size();
    kvt_layout_t layout = KVT_LAYOUT_INIT;
    layout.chunk_tokens = block_tokens_;
    layout.groups = &group;
    layout.group_count = 1;
    layout.stride_bytes = sizeof group;
    kvt_error_t *err = nullptr;
    // The sparse namespace continues the exact one, so its beginning is missing.
    const uint64_t flags = sparse.empty() ? 0 : KVT_NAMESPACE_HOLES;
    const kvt_status_t status =
        kvt_namespace_open(used_store_, &identity, &layout, flags, out, &err);
    return status == KVT_OK ? KVT_OK : failed(why, status, "opening a namespace", err);
}

kvt_status_t backing::open_session(const kvt_namespace_t *ns, kvt_session_t **out,
                                   kvt_llama_why_t *why) {
    kvt_session_opts_t session = KVT_SESSION_OPTS_INIT;
    session.max_tokens = max_tokens_;
    kvt_error_t *err = nullptr;
    const kvt_status_t status = kvt_session_open(ns, &session, out, &err);
    return status == KVT_OK ? KVT_OK : failed(why, status, "opening a session", err);
}

kvt_status_t backing::reserve(uint64_t bytes, kvt_llama_why_t *why) {
    if (!account_) {
        return KVT_OK;
    }
    kvt_error_t *err = nullptr;
    kvt_status_t status = kvt_account_reserve(account_, KVT_TIER_HOST, bytes, &err);
    if (status == KVT_OK) {
        status = kvt_account_commit(account_, KVT_TIER_HOST, bytes, bytes, &err);
        if (status == KVT_OK) {
            reserved_bytes_ = bytes;
            return KVT_OK;
        }
        kvt_account_commit(account_, KVT_TIER_HOST, bytes, 0, nullptr);
    }
    return failed(why, status, "reserving memory for maps of cells and staging", err);
}

// May be called again for another context after a failure.
kvt_status_t backing::begin(const settings &set, const shape &model, const char *description,
                            uint64_t own_bytes, kvt_llama_why_t *why) {
    end();
    model_ = model;
    block_tokens_ = set.block_tokens;
    max_tokens_ = set.max_tokens;
    if (dtype_of(model.k_type) == KVT_DTYPE_BYTES) {
        if (!ggml_get_type_traits(model.k_type)->to_float) {
            return refuse(why, KVT_E_UNSUPPORTED,
                          "keys of type %s cannot be read: open the context with another "
                          "type_k",
                          ggml_type_name(model.k_type));
        }
        keys_.resize((size_t) block_tokens_ * model.key_heads * model.key_dim);
    }
    kvt_status_t status = reserve(own_bytes, why);
    if (status == KVT_OK) {
        status = open_namespace(set, description, "", &namespace_, why);
    }
    if (status == KVT_OK) {
        status = open_session(namespace_, &session_, why);
    }
    if (status == KVT_OK && has_name_) {
        status = open_namespace(set, description, set.sparse, &sparse_namespace_, why);
    }
    if (status == KVT_OK && has_name_) {
        status = open_session(sparse_namespace_, &sparse_session_, why);
    }
    if (status == KVT_OK) {
        status = open_policy(set, why);
    }
    if (status != KVT_OK) {
        end();
    }
    return status;
}

kvt_status_t backing::append(const llama_token *tokens, size_t n, size_t exact,
                             kvt_llama_why_t *why) {
    static_assert(sizeof(llama_token) == sizeof(uint32_t), "tokens are 32 bits");
    std::vector<uint32_t> ids(tokens, tokens + n);
    kvt_error_t *err = nullptr;
    kvt_status_t status = kvt_session_append(session_, ids.data(), ids.size(), &err);
    if (status == KVT_OK && sparse_session_) {
        status = kvt_session_append(sparse_session_, ids.data(), ids.size(), &err);
        if (status != KVT_OK) {
            kvt_session_truncate(session_, tokens_, nullptr);
        }
    }
    if (status != KVT_OK) {
        return failed(why, status, "appending tokens to the session", err);
    }
    exact_ += exact_ == tokens_ ? (uint32_t) exact : 0;
    tokens_ += (uint32_t) n;
    return KVT_OK;
}

kvt_status_t backing::truncate(uint32_t tokens, uint32_t policy_tokens, kvt_llama_why_t *why) {
    kvt_error_t *err = nullptr;
    kvt_status_t status = kvt_sparse_truncate(policy_, policy_tokens, &err);
    if (status == KVT_OK) {
        status = kvt_session_truncate(session_, tokens, &err);
    }
    if (status == KVT_OK && sparse_session_) {
        status = kvt_session_truncate(sparse_session_, tokens, &err);
    }
    if (status == KVT_OK) {
        tokens_ = tokens;
        exact_ = std::min(exact_, tokens);
    }
    return status == KVT_OK ? KVT_OK : failed(why, status, "truncating the sequence", err);
}

kvt_view_t backing::view(void *address, const std::vector<void *> &pages, uint32_t page_tokens,
                         size_t row_bytes) const {
    kvt_view_t view = no_view();
    if (pages.empty()) {
        view.address = address;
    } else {
        view.pages = pages.data();
        view.page_count = pages.size();
        view.page_tokens = page_tokens;
    }
    view.run_bytes = row_bytes;
    return view;
}

// The library owns the memory until the op is released, so this waits for that without a limit.
kvt_status_t backing::wait_op(kvt_op_t **op, const char *doing, kvt_llama_why_t *why) {
    kvt_status_t status = kvt_op_wait(*op, KVT_OP_RELEASED, now_ns() + wait_ns);
    if (status != KVT_OK) {
        kvt_op_cancel(*op);
        kvt_op_wait(*op, KVT_OP_RELEASED, 0);
    }
    kvt_op_info_t info = KVT_OP_INFO_INIT;
    kvt_error_t *err = nullptr;
    const kvt_status_t asked = kvt_op_info(*op, &info);
    status = status != KVT_OK ? status : asked != KVT_OK ? asked : info.status;
    if (status != KVT_OK) {
        kvt_op_error(*op, &err);
        failed(why, status, doing, err);
    }
    kvt_op_free(op);
    return status;
}

// End of the exact blocks. Blocks from here on have sparsely computed tokens and are in the other
// session.
uint32_t backing::exact_end() const {
    return sparse_session_ ? exact_ / block_tokens_ * block_tokens_ : UINT32_MAX;
}

kvt_status_t backing::put(uint32_t first, uint32_t n, const std::vector<place> &layers,
                          bool is_durable, kvt_llama_why_t *why) {
    const uint32_t end = exact_end();
    const uint32_t exact = end > first ? std::min(n, end - first) : 0;
    kvt_status_t status = KVT_OK;
    if (exact > 0) {
        status = put_run(session_, first, exact, layers, is_durable, why);
    }
    if (status == KVT_OK && exact < n) {
        std::vector<place> rest;
        for (const place &layer : layers) {
            rest.push_back(layer.skip_tokens(exact, model_));
        }
        status = put_run(sparse_session_, first + exact, n - exact, rest, is_durable, why);
    }
    return status;
}

kvt_status_t backing::put_run(const kvt_session_t *session, uint32_t first, uint32_t n,
                              const std::vector<place> &layers, bool is_durable,
                              kvt_llama_why_t *why) {
    std::vector<kvt_view_t> k, v;
    for (const place &layer : layers) {
        k.push_back(view(layer.k, layer.k_pages, layer.page_tokens, model_.k_row_bytes));
        v.push_back(view(layer.v, layer.v_pages, layer.page_tokens, model_.v_row_bytes));
    }
    kvt_transfer_t transfer = KVT_TRANSFER_INIT;
    transfer.first_token = first;
    transfer.tokens = n;
    transfer.layers = model_.layers;
    transfer.k = k.data();
    transfer.v = v.data();
    transfer.stride_bytes = sizeof(kvt_view_t);
    transfer.level = is_durable && has_disk_ ? KVT_LEVEL_DURABLE : KVT_LEVEL_RAM;
    kvt_submit_opts_t submit = KVT_SUBMIT_OPTS_INIT;
    submit.deadline_ns = now_ns() + wait_ns / 2;
    kvt_error_t *err = nullptr;
    kvt_op_t *op = nullptr;
    const auto submit_put = [&] { return kvt_session_put(session, &transfer, &submit, &op, &err); };
    kvt_status_t status = retry_while_busy(&err, submit_put);
    if (status == KVT_E_UNAVAILABLE && transfer.level != KVT_LEVEL_RAM) {
        // Only the put shows whether a caller's store has a disk.
        has_disk_ = false;
        transfer.level = KVT_LEVEL_RAM;
        kvt_error_free(&err);
        status = retry_while_busy(&err, submit_put);
    }
    return status == KVT_OK ? wait_op(&op, "storing blocks", why)
                            : failed(why, status, "storing blocks", err);
}

kvt_status_t backing::get(uint32_t layer, const std::vector<uint32_t> &blocks, const place &to,
                          kvt_llama_why_t *why) {
    const auto middle =
        std::lower_bound(blocks.begin(), blocks.end(), exact_end() / block_tokens_);
    const size_t exact = (size_t) (middle - blocks.begin()), rest = blocks.size() - exact;
    kvt_status_t status = KVT_OK;
    if (exact > 0) {
        status = get_run(session_, layer, blocks.data(), exact, to, why);
    }
    if (status == KVT_OK && rest > 0) {
        status = get_run(sparse_session_, layer, blocks.data() + exact, rest,
                         to.skip_tokens((uint32_t) exact * block_tokens_, model_), why);
    }
    return status;
}

kvt_status_t backing::get_run(const kvt_session_t *session, uint32_t layer, const uint32_t *blocks,
                              size_t count, const place &to, kvt_llama_why_t *why) {
    const kvt_view_t k = view(to.k, to.k_pages, to.page_tokens, model_.k_row_bytes);
    const kvt_view_t v = view(to.v, to.v_pages, to.page_tokens, model_.v_row_bytes);
    kvt_transfer_t transfer = KVT_TRANSFER_INIT;
    transfer.tokens = (uint64_t) (blocks[count - 1] + 1) * block_tokens_;
    transfer.first_layer = layer;
    transfer.layers = 1;
    transfer.k = &k;
    transfer.v = &v;
    transfer.stride_bytes = sizeof(kvt_view_t);
    transfer.chunks = blocks;
    transfer.chunk_count = count;
    kvt_submit_opts_t submit = KVT_SUBMIT_OPTS_INIT;
    submit.deadline_ns = now_ns() + wait_ns / 2;
    kvt_error_t *err = nullptr;
    kvt_op_t *op = nullptr;
    const kvt_status_t status = retry_while_busy(
        &err, [&] { return kvt_session_get(session, &transfer, &submit, &op, &err); });
    return status == KVT_OK ? wait_op(&op, "loading blocks", why)
                            : failed(why, status, "loading blocks", err);
}

kvt_status_t backing::lookup(const llama_token *tokens, size_t n, size_t &found, size_t &exact,
                             kvt_llama_why_t *why) {
    std::vector<uint32_t> ids(tokens, tokens + n);
    kvt_lookup_t sum = KVT_LOOKUP_INIT;
    kvt_error_t *err = nullptr;
    const kvt_status_t status = kvt_namespace_lookup(namespace_, ids.data(), ids.size(), nullptr, 0,
                                                     sizeof(kvt_range_t), nullptr, &sum, &err);
    if (status != KVT_OK && status != KVT_E_TOO_SMALL) {
        return failed(why, status, "looking up stored blocks", err);
    }
    kvt_error_free(&err);
    found = exact = (size_t) sum.reusable_tokens;
    return sparse_namespace_ ? lookup_sparse(ids.data(), ids.size(), found, why) : KVT_OK;
}

// Extends `found` by sparsely computed blocks.
kvt_status_t backing::lookup_sparse(const uint32_t *tokens, size_t n, size_t &found,
                                    kvt_llama_why_t *why) const {
    std::vector<kvt_range_t> ranges(n / block_tokens_ + 1);
    uint64_t count = 0;
    kvt_error_t *err = nullptr;
    const kvt_status_t status =
        kvt_namespace_lookup(sparse_namespace_, tokens, n, ranges.data(), ranges.size(),
                             sizeof(kvt_range_t), &count, nullptr, &err);
    if (status != KVT_OK) {
        return failed(why, status, "looking up stored blocks", err);
    }
    ranges.resize(count);
    for (const kvt_range_t &range : ranges) {
        const uint64_t end = range.first_token + range.tokens;
        if (range.state == KVT_RANGE_HIT && range.first_token <= found && end > found) {
            found = (size_t) end;
        }
    }
    return KVT_OK;
}

// Blocks without a name cannot be used again, so their space is freed at once.
void backing::end() {
    kvt_sparse_close(&policy_);
    kvt_session_close(&session_);
    kvt_session_close(&sparse_session_);
    if (namespace_ && !has_name_) {
        kvt_namespace_clear(namespace_, now_ns() + wait_ns, nullptr, nullptr);
    }
    kvt_namespace_close(&namespace_);
    kvt_namespace_close(&sparse_namespace_);
    tokens_ = exact_ = 0;
    if (reserved_bytes_) {
        kvt_account_release(account_, KVT_TIER_HOST, reserved_bytes_, nullptr);
        reserved_bytes_ = 0;
    }
}

kvt_status_t backing::close(kvt_llama_why_t *why) {
    end();
    kvt_error_t *err = nullptr;
    kvt_status_t status = kvt_store_close(&store_, now_ns() + wait_ns, &err);
    if (status != KVT_OK) {
        return failed(why, status, "closing the store", err);
    }
    kvt_account_close(&own_account_, nullptr);
    kvt_budget_close(&budget_, nullptr);
    status = kvt_runtime_close(&runtime_, now_ns() + wait_ns, nullptr, &err);
    return status == KVT_OK ? KVT_OK : failed(why, status, "closing the runtime", err);
}

} // namespace longer
} // namespace kvt_llama
