// The store's side of a tier: namespace and layout, buffers, ops, sessions.
#include "tier/tier.hpp"

#include <ggml.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <tuple>

namespace kvtier_llama {

namespace {

/// Transfers up to this length are copied by the calling thread. Waking another one takes longer than
/// copying a few MiB, and on a busy machine it then competes with the engine's threads.
constexpr const char *inline_bytes = "32MiB";
constexpr uint64_t default_buffers = uint64_t(64) << 20;
/// A disk that does not answer must not block closing.
constexpr uint64_t close_wait_ns = uint64_t(10) * 1000000000;
/// A store may have to write back all of its host memory.
constexpr uint64_t store_wait_ns = uint64_t(60) * 1000000000;

uint32_t dtype_of(int32_t k_type, int32_t v_type) {
    if (v_type != k_type) {
        return KVT_DTYPE_BYTES;
    }
    switch (k_type) {
    case GGML_TYPE_F32: return KVT_DTYPE_F32;
    case GGML_TYPE_F16: return KVT_DTYPE_F16;
    case GGML_TYPE_BF16: return KVT_DTYPE_BF16;
    default: return KVT_DTYPE_BYTES;
    }
}

/// Builds the layout: the layers of all sections in order, with equal ones in one group.
struct layout_builder {
    std::vector<kvt_group_t> groups;
    std::vector<std::vector<uint16_t>> layers;
    uint32_t count = 0;

    void add(const kvt_group_t &like) {
        size_t at = 0;
        const auto same = [&](const kvt_group_t &one) {
            return std::tie(one.rule, one.dtype, one.window_tokens, one.k_bytes, one.v_bytes,
                            one.state_bytes) == std::tie(like.rule, like.dtype, like.window_tokens,
                                                         like.k_bytes, like.v_bytes,
                                                         like.state_bytes);
        };
        while (at < groups.size() && !same(groups[at])) {
            at++;
        }
        if (at == groups.size()) {
            groups.push_back(like);
            layers.emplace_back();
        }
        layers[at].push_back(uint16_t(count++));
    }
};

void add_section(layout_builder &make, const section_shape &section) {
    if (section.is_state()) {
        for (const plane_shape &plane : section.planes) {
            kvt_group_t group{};
            group.rule = KVT_RULE_STATE;
            group.state_bytes = plane.row_bytes;
            if (plane.row_bytes != 0) {
                make.add(group);
            }
        }
        return;
    }
    for (size_t i = 0; i < section.layers(); i++) {
        const plane_shape &k = section.planes[i];
        const plane_shape *v = section.has_v ? &section.planes[section.layers() + i] : nullptr;
        kvt_group_t group{};
        group.rule = section.window_tokens != 0 ? KVT_RULE_WINDOW : KVT_RULE_FULL;
        group.window_tokens = section.window_tokens;
        group.dtype = dtype_of(k.type, v ? v->type : k.type);
        group.k_bytes = k.row_bytes / section.row_tokens;
        group.v_bytes = v ? v->row_bytes : 0;
        make.add(group);
    }
}

void open_namespace(tier_t &tier, const kvt_llama_tier_opts_t &opts) {
    layout_builder make;
    for (const section_shape &section : tier.shape.sections) {
        tier.layers.push_back({make.count, uint32_t(section.layers())});
        add_section(make, section);
    }
    for (size_t i = 0; i < make.groups.size(); i++) {
        make.groups[i].layers = make.layers[i].data();
        make.groups[i].layer_count = make.layers[i].size();
    }
    kvt_layout_t layout = KVT_LAYOUT_INIT;
    layout.chunk_tokens = tier.chunk;
    layout.groups = make.groups.data();
    layout.group_count = make.groups.size();
    layout.stride_bytes = sizeof make.groups[0];

    const identity id = identify(tier, opts);
    kvt_identity_t is = KVT_IDENTITY_INIT;
    const auto field = [](const void **data, uint64_t *bytes, const char *text, size_t length) {
        *data = text;
        *bytes = length;
    };
    field(&is.model, &is.model_bytes, id.model.data(), id.model.size());
    field(&is.weights, &is.weights_bytes, id.weights.data(), id.weights.size());
    if (opts.adapters) {
        field(&is.lora, &is.lora_bytes, opts.adapters, std::strlen(opts.adapters));
    }
    if (opts.salt) {
        field(&is.salt, &is.salt_bytes, opts.salt, std::strlen(opts.salt));
    }
    kvt_identity_extra_t extra[2] = {};
    extra[0].tag = 0x80000001;
    field(&extra[0].value, &extra[0].value_bytes, id.engine.data(), id.engine.size());
    extra[1].tag = 0x80000002;
    field(&extra[1].value, &extra[1].value_bytes, id.context.data(), id.context.size());
    is.extra = extra;
    is.extra_count = 2;
    is.extra_stride_bytes = sizeof extra[0];

    kvt_error_t *error = nullptr;
    const uint64_t flags = tier.holes ? KVT_NAMESPACE_HOLES : 0;
    const kvt_status_t status =
        kvt_namespace_open(tier.store, &is, &layout, flags, &tier.kv_namespace, &error);
    demand(status, error, "opening the model's namespace");
}

void open_own_store(tier_t &tier, const kvt_llama_tier_opts_t &opts) {
    kvt_error_t *error = nullptr;
    const kvt_runtime_t *runtime = opts.runtime;
    if (!runtime) {
        demand(kvt_runtime_open(nullptr, &tier.own_runtime, &error), error, "opening a runtime");
        runtime = tier.own_runtime;
    }
    kvt_store_opts_t so = KVT_STORE_OPTS_INIT;
    std::string spec = std::string("store(inline=") + inline_bytes;
    so.host_bytes = opts.host_bytes != 0 ? opts.host_bytes : uint64_t(1) << 30;
    if (opts.disk_path) {
        // Each opening begins a new segment, so a small disk must have space for many.
        const uint64_t disk_bytes = opts.disk_bytes != 0 ? opts.disk_bytes : uint64_t(8) << 30;
        const uint64_t segment_mib = std::min<uint64_t>(std::max<uint64_t>(disk_bytes >> 25, 1), 64);
        spec += ", disk=disk(path=\"kv\", bytes=1GiB, segment=" + std::to_string(segment_mib) + "MiB)";
        so.disk_path = opts.disk_path;
        so.disk_path_bytes = std::strlen(opts.disk_path);
        so.disk_bytes = disk_bytes;
    }
    spec += ")";
    so.spec = spec.c_str();
    so.spec_bytes = spec.size();
    if (opts.policy) {
        so.policy = opts.policy;
        so.policy_bytes = std::strlen(opts.policy);
    }
    demand(kvt_store_open(runtime, opts.budget, &so, &tier.own_store, &error), error, "opening the store");
    tier.store = tier.own_store;
}

bool resize_buffer(tier_t &tier, buffer_t &buffer, uint64_t bytes) {
    if (!reserve_memory(tier, bytes)) {
        return false;
    }
    uint8_t *data = nullptr;
    if (bytes > 0) {
        data = static_cast<uint8_t *>(std::aligned_alloc(4096, (bytes + 4095) & ~uint64_t(4095)));
    }
    if (bytes > 0 && !data) {
        release_memory(tier, bytes);
        return false;
    }
    release_memory(tier, buffer.bytes);
    std::free(buffer.data);
    buffer.data = data;
    tier.stats.buffer_bytes += bytes - buffer.bytes;
    buffer.bytes = bytes;
    tier.stats.most_buffer_bytes = std::max(tier.stats.most_buffer_bytes, tier.stats.buffer_bytes);
    return true;
}

buffer_t *free_buffer(tier_t &tier, uint64_t bytes) {
    // Prefer the buffer that was used last: it may be in the CPU's cache.
    for (auto one = tier.buffers.end(); one != tier.buffers.begin();) {
        --one;
        if (!one->taken && one->ops.empty() && one->bytes >= bytes) {
            tier.buffers.splice(tier.buffers.end(), tier.buffers, one);
            return &tier.buffers.back();
        }
    }
    // Free buffers that are too small, until a larger one fits.
    for (auto one = tier.buffers.begin(); one != tier.buffers.end();) {
        const bool idle = !one->taken && one->ops.empty();
        if (idle && tier.stats.buffer_bytes + bytes > tier.buffer_limit) {
            resize_buffer(tier, *one, 0);
            one = tier.buffers.erase(one);
        } else {
            ++one;
        }
    }
    if (tier.stats.buffer_bytes + bytes > tier.buffer_limit && tier.buffers.size() >= 2) {
        return nullptr;
    }
    tier.buffers.emplace_back();
    if (!resize_buffer(tier, tier.buffers.back(), bytes)) {
        tier.buffers.pop_back();
        return nullptr;
    }
    return &tier.buffers.back();
}

} // namespace

void fail(kvt_status_t status, const std::string &message) { throw failure{status, message}; }

void demand(kvt_status_t status, kvt_error_t *error, const char *what) {
    if (status == KVT_OK) {
        return;
    }
    std::string message = std::string(what) + ": ";
    message += error ? kvt_error_message(error) : kvt_status_str(status);
    kvt_error_free(&error);
    fail(status, message);
}

bool reserve_memory(tier_t &tier, uint64_t bytes) {
    if (!tier.account || bytes == 0) {
        return true;
    }
    if (kvt_account_reserve(tier.account, KVT_TIER_HOST, bytes, nullptr) != KVT_OK) {
        return false;
    }
    const bool used = kvt_account_commit(tier.account, KVT_TIER_HOST, bytes, bytes, nullptr) == KVT_OK;
    if (!used) {
        kvt_account_commit(tier.account, KVT_TIER_HOST, bytes, 0, nullptr);
    }
    return used;
}

void release_memory(tier_t &tier, uint64_t bytes) {
    if (tier.account && bytes != 0) {
        kvt_account_release(tier.account, KVT_TIER_HOST, bytes, nullptr);
    }
}

uint64_t now_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return uint64_t(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

void open_tier_store(tier_t &tier, const kvt_llama_tier_opts_t &opts) {
    tier.store = opts.store;
    if (!tier.store) {
        open_own_store(tier, opts);
    }
    tier.buffer_limit = opts.buffer_bytes != 0 ? opts.buffer_bytes : default_buffers;
    kvt_error_t *error = nullptr;
    if (opts.budget) {
        kvt_account_opts_t ao = KVT_ACCOUNT_OPTS_INIT;
        ao.name = "llama tier";
        ao.name_bytes = std::strlen(ao.name);
        demand(kvt_account_open(opts.budget, &ao, &tier.account, &error), error,
               "opening an account in the budget");
    }
    kvt_store_stats_t stats = KVT_STORE_STATS_INIT;
    demand(kvt_store_stats(tier.store, &stats), nullptr, "reading the store's statistics");
    tier.has_disk = stats.disk_limit_bytes != 0;
    kvt_remote_stats_t remote = KVT_REMOTE_STATS_INIT;
    demand(kvt_store_remote_stats(tier.store, &remote), nullptr, "reading the remote's statistics");
    tier.has_remote = remote.read_circuit != 0;
    open_namespace(tier, opts);
}

kvt_status_t close_tier_store(tier_t &tier, std::string *message) {
    const uint64_t until = now_ns() + close_wait_ns;
    bool all = true;
    for (buffer_t &buffer : tier.buffers) {
        kvt_status_t ignored = KVT_OK;
        if (reap(tier, buffer, until, &ignored)) {
            resize_buffer(tier, buffer, 0);
        } else {
            // The store may still write into this buffer, so it is never freed.
            all = false;
        }
    }
    release_memory(tier, tier.tail_bytes);
    kvt_account_close(&tier.account, nullptr);
    kvt_namespace_close(&tier.kv_namespace);
    kvt_error_t *error = nullptr;
    kvt_status_t status = kvt_store_close(&tier.own_store, now_ns() + store_wait_ns, &error);
    if (status != KVT_OK) {
        *message = error ? kvt_error_message(error) : kvt_status_str(status);
        kvt_error_free(&error);
        if (status != KVT_E_BUSY) {
            kvt_store_close(&tier.own_store, now_ns() + close_wait_ns, nullptr);
        }
    }
    kvt_runtime_close(&tier.own_runtime, now_ns() + close_wait_ns, nullptr, nullptr);
    if (!all && status == KVT_OK) {
        *message = "transfers did not complete in time: their buffers stay allocated";
        status = KVT_E_TIMEOUT;
    }
    return status;
}

bool reap(tier_t &tier, buffer_t &buffer, uint64_t deadline_ns, kvt_status_t *status) {
    while (!buffer.ops.empty()) {
        kvt_op_t *op = buffer.ops.back();
        if (kvt_op_wait(op, KVT_OP_RELEASED, deadline_ns) != KVT_OK) {
            return false;
        }
        kvt_op_info_t info = KVT_OP_INFO_INIT;
        kvt_op_info(op, &info);
        if (buffer.worst == KVT_OK) {
            buffer.worst = info.status;
        }
        if (buffer.tokens != 0) {
            tier.stats.saved_bytes += info.bytes_done;
        } else {
            tier.stats.restored_bytes += info.bytes_done;
        }
        kvt_op_free(&op);
        buffer.ops.pop_back();
    }
    *status = buffer.worst;
    buffer.worst = KVT_OK;
    return true;
}

bool reap_stuck(tier_t &tier) {
    bool all = true;
    for (buffer_t &buffer : tier.buffers) {
        kvt_status_t ignored = KVT_OK;
        if (buffer.stuck && reap(tier, buffer, 1, &ignored)) {
            buffer.stuck = buffer.taken = false;
        }
        all = all && !buffer.stuck;
    }
    return all;
}

namespace {

/// Collects saves that complete before the deadline.
bool reap_saves(tier_t &tier, uint64_t deadline_ns, bool only_one) {
    for (buffer_t &buffer : tier.buffers) {
        if (buffer.taken || buffer.ops.empty()) {
            continue;
        }
        kvt_status_t status = KVT_OK;
        if (!reap(tier, buffer, deadline_ns, &status)) {
            return false;
        }
        if (status == KVT_OK) {
            tier.stats.saved_tokens += buffer.tokens;
        } else {
            tier.stats.failed_saves++;
            tier.save_failure = status;
        }
        buffer.tokens = 0;
        if (only_one) {
            return true;
        }
    }
    return true;
}

} // namespace

bool drain(tier_t &tier, uint64_t deadline_ns) { return reap_saves(tier, deadline_ns, false); }

held_buffer take_buffer(tier_t &tier, uint64_t bytes, uint64_t deadline_ns) {
    reap_stuck(tier);
    // Deadline 1 ns: collects what has completed and does not wait.
    reap_saves(tier, 1, false);
    for (;;) {
        if (buffer_t *buffer = free_buffer(tier, bytes)) {
            buffer->taken = true;
            buffer->tokens = 0;
            return held_buffer(buffer);
        }
        bool busy = false;
        for (const buffer_t &buffer : tier.buffers) {
            busy = busy || (!buffer.taken && !buffer.ops.empty());
        }
        if (!busy || !reap_saves(tier, deadline_ns, true)) {
            return nullptr;
        }
    }
}

stored_sequence::stored_sequence(const prompt_t &of) : sequence KVT_SEQUENCE_INIT {
    static_assert(sizeof(llama_token) == sizeof(uint32_t), "tokens are hashed as 32 bits");
    for (size_t i = 0; of.media && i < of.media->size() && (*of.media)[i].first < of.count; i++) {
        kvt_media_t one{};
        one.token = (*of.media)[i].first;
        std::memcpy(one.digest, (*of.media)[i].digest.data(), sizeof one.digest);
        media_.push_back(one);
    }
    sequence.tokens = reinterpret_cast<const uint32_t *>(of.tokens);
    sequence.token_count = of.count;
    sequence.media = media_.empty() ? nullptr : media_.data();
    sequence.media_count = media_.size();
    sequence.media_stride_bytes = sizeof(kvt_media_t);
}

session::session(const tier_t &tier, const prompt_t &of) {
    kvt_error_t *error = nullptr;
    demand(kvt_session_open(tier.kv_namespace, nullptr, &handle, &error), error, "opening a session");
    const stored_sequence all(of);
    const kvt_status_t status =
        of.count != 0 ? kvt_session_append_media(handle, &all.sequence, &error) : KVT_OK;
    if (status != KVT_OK) {
        kvt_session_close(&handle);
        demand(status, error, "appending a session's tokens");
    }
}

} // namespace kvtier_llama
