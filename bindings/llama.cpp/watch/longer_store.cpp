#include "watch/longer_store.hpp"

#include <cstring>
#include <random>

namespace kvt_llama {
namespace longer {
namespace {

// What takes longer is broken: an op is given up then.
constexpr uint64_t wait_ns = 60ull * 1000000000u;

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

// The store may use what is left of the memory by the policy, tables and staging.
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
                                     kvt_llama_why_t *why) {
    const std::string salt = set.has_name ? "name " + set.name : "nameless " + random_text();
    const std::string made = std::string("llama.cpp ") + KVTIER_LLAMA_VERSION + ", ggml " +
                             KVTIER_GGML_VERSION + ", K " + ggml_type_name(model_.k_type) + ", V " +
                             ggml_type_name(model_.v_type) + ", longer";
    kvt_identity_extra_t extra;
    std::memset(&extra, 0, sizeof extra);
    extra.tag = 0x80000001u;
    extra.value = made.data();
    extra.value_bytes = made.size();
    kvt_identity_t identity = KVT_IDENTITY_INIT;
    identity.model = description;
    identity.model_bytes = std::strlen(description);
    identity.weights = set.model_id.data();
    identity.weights_bytes = set.model_id.size();
    identity.salt = salt.data();
    identity.salt_bytes = salt.size();
    identity.extra = &extra;
    identity.extra_count = 1;
    identity.extra_stride_bytes = sizeof extra;
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
    const kvt_status_t status =
        kvt_namespace_open(used_store_, &identity, &layout, 0, &space_, &err);
    return status == KVT_OK ? KVT_OK : failed(why, status, "opening a namespace", err);
}

kvt_status_t backing::open_session(kvt_llama_why_t *why) {
    kvt_session_opts_t session = KVT_SESSION_OPTS_INIT;
    session.max_tokens = max_tokens_;
    kvt_error_t *err = nullptr;
    const kvt_status_t status = kvt_session_open(space_, &session, &session_, &err);
    return status == KVT_OK ? KVT_OK : failed(why, status, "opening a session", err);
}

kvt_status_t backing::begin(const settings &set, const shape &model, const char *description,
                            uint64_t own_bytes, kvt_llama_why_t *why) {
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
    if (account_) {
        kvt_error_t *err = nullptr;
        kvt_status_t status = kvt_account_reserve(account_, KVT_TIER_HOST, own_bytes, &err);
        if (status == KVT_OK) {
            status = kvt_account_commit(account_, KVT_TIER_HOST, own_bytes, own_bytes, &err);
        }
        if (status != KVT_OK) {
            return failed(why, status, "memory for maps of cells and staging", err);
        }
        reserved_bytes_ = own_bytes;
    }
    kvt_status_t status = open_namespace(set, description, why);
    if (status == KVT_OK) {
        status = open_session(why);
    }
    return status == KVT_OK ? open_policy(set, why) : status;
}

kvt_status_t backing::append(const llama_token *tokens, size_t n, kvt_llama_why_t *why) {
    static_assert(sizeof(llama_token) == sizeof(uint32_t), "tokens are 32 bits");
    std::vector<uint32_t> ids(tokens, tokens + n);
    kvt_error_t *err = nullptr;
    const kvt_status_t status = kvt_session_append(session_, ids.data(), ids.size(), &err);
    return status == KVT_OK ? KVT_OK : failed(why, status, "adding tokens to the session", err);
}

kvt_status_t backing::truncate(uint32_t tokens, uint32_t policy_tokens, kvt_llama_why_t *why) {
    kvt_error_t *err = nullptr;
    kvt_status_t status = kvt_sparse_truncate(policy_, policy_tokens, &err);
    if (status == KVT_OK) {
        status = kvt_session_truncate(session_, tokens, &err);
    }
    return status == KVT_OK ? KVT_OK : failed(why, status, "cutting the sequence", err);
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

// The memory is the library's until the op is released: there is no way on before that.
kvt_status_t backing::finish(kvt_op_t **op, const char *doing, kvt_llama_why_t *why) {
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

kvt_status_t backing::put(uint32_t first, uint32_t n, const std::vector<place> &layers,
                          bool is_durable, kvt_llama_why_t *why) {
    std::vector<kvt_view_t> k, v;
    for (const place &layer : layers) {
        k.push_back(view(layer.k, layer.k_pages, layer.page_tokens, model_.k_row_bytes));
        v.push_back(view(layer.v, layer.v_pages, layer.page_tokens, model_.v_row_bytes));
    }
    kvt_move_t move = KVT_MOVE_INIT;
    move.first_token = first;
    move.tokens = n;
    move.layers = model_.layers;
    move.k = k.data();
    move.v = v.data();
    move.stride_bytes = sizeof(kvt_view_t);
    move.level = is_durable && has_disk_ ? KVT_LEVEL_DURABLE : KVT_LEVEL_RAM;
    kvt_submit_opts_t submit = KVT_SUBMIT_OPTS_INIT;
    submit.deadline_ns = now_ns() + wait_ns / 2;
    kvt_error_t *err = nullptr;
    kvt_op_t *op = nullptr;
    kvt_status_t status = kvt_session_put(session_, &move, &submit, &op, &err);
    if (status == KVT_E_UNAVAILABLE && move.level != KVT_LEVEL_RAM) {
        // A store that was lent does not say before that it has no disk.
        has_disk_ = false;
        move.level = KVT_LEVEL_RAM;
        kvt_error_free(&err);
        status = kvt_session_put(session_, &move, &submit, &op, &err);
    }
    return status == KVT_OK ? finish(&op, "storing blocks", why)
                            : failed(why, status, "storing blocks", err);
}

kvt_status_t backing::get(uint32_t layer, const std::vector<uint32_t> &blocks, const place &to,
                          kvt_llama_why_t *why) {
    const kvt_view_t k = view(to.k, to.k_pages, to.page_tokens, model_.k_row_bytes);
    const kvt_view_t v = view(to.v, to.v_pages, to.page_tokens, model_.v_row_bytes);
    kvt_move_t move = KVT_MOVE_INIT;
    move.tokens = (uint64_t) (blocks.back() + 1) * block_tokens_;
    move.first_layer = layer;
    move.layers = 1;
    move.k = &k;
    move.v = &v;
    move.stride_bytes = sizeof(kvt_view_t);
    move.chunks = blocks.data();
    move.chunk_count = blocks.size();
    kvt_submit_opts_t submit = KVT_SUBMIT_OPTS_INIT;
    submit.deadline_ns = now_ns() + wait_ns / 2;
    kvt_error_t *err = nullptr;
    kvt_op_t *op = nullptr;
    const kvt_status_t status = kvt_session_get(session_, &move, &submit, &op, &err);
    return status == KVT_OK ? finish(&op, "loading blocks", why)
                            : failed(why, status, "loading blocks", err);
}

kvt_status_t backing::lookup(const llama_token *tokens, size_t n, size_t &found,
                             kvt_llama_why_t *why) {
    std::vector<uint32_t> ids(tokens, tokens + n);
    kvt_lookup_t sum = KVT_LOOKUP_INIT;
    kvt_error_t *err = nullptr;
    const kvt_status_t status = kvt_namespace_lookup(space_, ids.data(), ids.size(), nullptr, 0,
                                                     sizeof(kvt_range_t), nullptr, &sum, &err);
    if (status != KVT_OK && status != KVT_E_TOO_SMALL) {
        return failed(why, status, "looking for stored blocks", err);
    }
    kvt_error_free(&err);
    found = (size_t) sum.reusable_tokens;
    return KVT_OK;
}

// What has no name is nobody's afterwards: its blocks make room at once.
kvt_status_t backing::close(kvt_llama_why_t *why) {
    kvt_sparse_close(&policy_);
    kvt_session_close(&session_);
    if (space_ && !has_name_) {
        kvt_namespace_clear(space_, now_ns() + wait_ns, nullptr, nullptr);
    }
    kvt_namespace_close(&space_);
    if (reserved_bytes_) {
        kvt_account_release(account_, KVT_TIER_HOST, reserved_bytes_, nullptr);
        reserved_bytes_ = 0;
    }
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
