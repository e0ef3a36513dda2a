/// @file
/// kvt::store, kvt::namespace_: where KV is kept, and for which model.
///
/// A store keeps cells (the KV of a chunk of tokens in one layer) in tiers: device memory, host memory,
/// a disk, a remote. A namespace is a model with its layout and tenant: sessions share KV if their
/// namespaces are equal. (`namespace` is a keyword, hence the underscore.)
///
/// Life cycle: store::open, open_namespace, sessions. The destructor of a store writes back what is in
/// memory only. A store that is opened on the same directory again finds what was written.
///
///     const kvt::store store =
///         kvt::store::open("store(host=8GiB, disk=disk(path=\"/var/cache/kv\", bytes=200GiB))");
///     kvt::identity model;
///     model.model = "llama-3-8b";
///     model.weights = fingerprint;
///     // 32 layers, 8 KV heads of 128 elements, chunks of 64 tokens
///     const kvt::layout layout = kvt::layout::gqa(32, 8, 128, KVT_DTYPE_F16, 64);
///     const kvt::namespace_ ns = store.open_namespace(model, layout);
///     const kvt::lookup_result found = ns.lookup(tokens);
///     use(found.totals.reusable_tokens); // the longest prefix that need not be computed

#ifndef KVTIER_STORE_HPP
#define KVTIER_STORE_HPP

#include <kvtier/memory.hpp>
#include <kvtier/policy.hpp>
#include <kvtier/store.h>

struct kvt_clear_report_t; // these two: kvtier/session.h
struct kvt_media_t;

namespace kvt {
inline namespace KVTIER_ERRORS_ {

struct block_names;
struct session_opts;
class session;

// --- namespaces --------------------------------------------------------------

// [kvt_identity_extra_t: by generate.py]
/// A field of an identity that the engine defines.
struct identity_extra {
    /// At least 0x80000000, unique in the identity.
    std::uint32_t tag = 0;
    /// Bytes that are hashed unchanged.
    std::optional<std::string_view> value{};

    kvt_identity_extra_t to_c() const noexcept {
        kvt_identity_extra_t c = kvt_identity_extra_t();
        c.tag = tag;
        detail::bytes(value, c.value, c.value_bytes);
        return c;
    }
};
// [end]

// [kvt_identity_t: by generate.py]
/// Everything that KV depends on beside its tokens: sessions share KV if all fields are equal.
/// Fields are bytes, at most 65536 each, hashed unchanged. An absent field differs from an empty
/// one.
struct identity {
    /// Name of the model.
    std::optional<std::string_view> model{};
    /// Fingerprint of the weights, the engine's own.
    std::optional<std::string_view> weights{};
    /// Adapters that change the KV, in the order they apply.
    std::optional<std::string_view> lora{};
    /// Digest of media that all sequences of the namespace have.
    std::optional<std::string_view> media{};
    /// Separates the KV of tenants; long and random.
    std::optional<std::string_view> salt{};
    /// How KV is computed and encoded where that is not exact: a canonical spec. Its argument
    /// `codec` (none, lz4, int8) sets the codec on disk; without it the store's applies.
    std::optional<std::string_view> recipe{};
    /// Part of the KV that this rank holds, below shard_count.
    std::uint32_t shard_index = 0;
    /// Number of parts; 0 = all ranks hold the same KV (shard_index is 0).
    std::uint32_t shard_count = 0;
    /// Fields that the engine defines, in any order. At most 64.
    std::vector<identity_extra> extra{};
    /// Tenant in the names of the namespace's objects at a remote (`prefix/t42/...`), for access
    /// rules; 0 = no tenant. Not part of the identity.
    std::uint64_t remote_tenant = 0;

    kvt_identity_t to_c(std::vector<kvt_identity_extra_t> &extra_c) const {
        kvt_identity_t c = KVT_IDENTITY_INIT;
        detail::bytes(model, c.model, c.model_bytes);
        detail::bytes(weights, c.weights, c.weights_bytes);
        detail::bytes(lora, c.lora, c.lora_bytes);
        detail::bytes(media, c.media, c.media_bytes);
        detail::bytes(salt, c.salt, c.salt_bytes);
        detail::bytes(recipe, c.recipe, c.recipe_bytes);
        c.shard_index = shard_index;
        c.shard_count = shard_count;
        extra_c.clear();
        for (const identity_extra &one : extra) extra_c.push_back(one.to_c());
        detail::list(extra_c, c.extra, c.extra_count);
        c.extra_stride_bytes = sizeof(kvt_identity_extra_t);
        c.remote_tenant = remote_tenant;
        return c;
    }
};
// [end]

// [kvt_group_t: by generate.py]
/// Layers with equal sizes, dtype and reuse rule.
struct layer_group {
    /// KVT_RULE_FULL, KVT_RULE_WINDOW, KVT_RULE_STATE.
    kvt_rule_t rule = KVT_RULE_FULL;
    /// KVT_DTYPE_*.
    kvt_dtype_t dtype = KVT_DTYPE_BYTES;
    /// Heads of K and V, at most 65536; 0 = unspecified. Each head fills whole elements.
    std::uint32_t kv_heads = 0;
    /// With KVT_RULE_WINDOW: 1 to 2^30; else 0.
    std::uint32_t window_tokens = 0;
    /// Bytes of K, or of the latent, per token and layer.
    std::uint64_t k_bytes = 0;
    /// Bytes of V per token and layer; 0 = V is part of K.
    std::uint64_t v_bytes = 0;
    /// With KVT_RULE_STATE: bytes of a layer's state; k_bytes, v_bytes and kv_heads are 0.
    std::uint64_t state_bytes = 0;
    /// Layers in any order; each layer of the model, from 0, is in exactly one group. At least 1;
    /// at most 4096 in all groups.
    std::vector<std::uint16_t> layers{};

    kvt_group_t to_c() const noexcept {
        kvt_group_t c = kvt_group_t();
        c.rule = rule;
        c.dtype = dtype;
        c.kv_heads = kv_heads;
        c.window_tokens = window_tokens;
        c.k_bytes = k_bytes;
        c.v_bytes = v_bytes;
        c.state_bytes = state_bytes;
        detail::list(layers, c.layers, c.layer_count);
        return c;
    }
};
// [end]

/// Chunk length and contents of a model's cells. Part of the namespace's key.
struct layout {
    // [kvt_layout_t members: by generate.py]
    /// 1 to 32768 tokens of a chunk, the unit of sharing. A cell (a chunk in one layer) has at most
    /// 32 MiB.
    std::uint32_t chunk_tokens = 0;
    /// Groups of layers, in any order. 1 to 64.
    std::vector<layer_group> groups{};
    /// The layers of a model whose layers are alike, at most 4096: set by gqa, mla and window, with
    /// the members below. 0 = `groups` describes the layers; else `groups` is empty.
    std::uint32_t layers = 0;
    /// KVT_DTYPE_*.
    kvt_dtype_t dtype = KVT_DTYPE_BYTES;
    /// Heads of K and V; 0 = unspecified.
    std::uint32_t kv_heads = 0;
    /// Tokens of the window of layers that have one; 0 = all layers attend to all tokens.
    std::uint32_t window_tokens = 0;
    /// With a window: each full_every-th layer attends to all tokens; 0 = no layer does.
    std::uint32_t full_every = 0;
    /// The first layer that does, below full_every.
    std::uint32_t full_first = 0;
    /// Bytes of K, or of the latent, per token and layer.
    std::uint64_t k_bytes = 0;
    /// Bytes of V per token and layer; 0 = V is part of K.
    std::uint64_t v_bytes = 0;

    kvt_layout_t to_c(std::vector<kvt_group_t> &groups_c) const {
        kvt_layout_t c = KVT_LAYOUT_INIT;
        c.chunk_tokens = chunk_tokens;
        groups_c.clear();
        for (const layer_group &one : groups) groups_c.push_back(one.to_c());
        detail::list(groups_c, c.groups, c.group_count);
        c.stride_bytes = sizeof(kvt_group_t);
        c.layers = layers;
        c.dtype = dtype;
        c.kv_heads = kv_heads;
        c.window_tokens = window_tokens;
        c.full_every = full_every;
        c.full_first = full_first;
        c.k_bytes = k_bytes;
        c.v_bytes = v_bytes;
        return c;
    }
    // [end]

    /// Grouped-query, multi-query or multi-head attention: K and V by head, all layers alike.
    static ret<layout> gqa(std::uint32_t layers, std::uint32_t kv_heads, std::uint32_t head_dim,
                           kvt_dtype_t dtype, std::uint32_t chunk_tokens) {
        detail::failure f;
        kvt_layout_t c = KVT_LAYOUT_INIT;
        const kvt_status_t status =
            kvt_layout_gqa(&c, layers, kv_heads, head_dim, dtype, chunk_tokens, f.out());
        return detail::give(status, f, from_c(c));
    }
    /// Latent attention (MLA): one plane, K, of the latent and the rotated part of the key.
    static ret<layout> mla(std::uint32_t layers, std::uint32_t latent_dim, std::uint32_t rope_dim,
                           kvt_dtype_t dtype, std::uint32_t chunk_tokens) {
        detail::failure f;
        kvt_layout_t c = KVT_LAYOUT_INIT;
        const kvt_status_t status =
            kvt_layout_mla(&c, layers, latent_dim, rope_dim, dtype, chunk_tokens, f.out());
        return detail::give(status, f, from_c(c));
    }
    /// Layers that attend to the last `window_tokens` tokens, except each full_every-th, which
    /// attends to all: 6 for Gemma 3, 2 for gpt-oss. 0 = no layer does.
    static ret<layout> window(std::uint32_t layers, std::uint32_t kv_heads, std::uint32_t head_dim,
                              kvt_dtype_t dtype, std::uint32_t chunk_tokens,
                              std::uint32_t window_tokens, std::uint32_t full_every) {
        detail::failure f;
        kvt_layout_t c = KVT_LAYOUT_INIT;
        const kvt_status_t status = kvt_layout_window(&c, layers, kv_heads, head_dim, dtype,
                                                      chunk_tokens, window_tokens, full_every,
                                                      f.out());
        return detail::give(status, f, from_c(c));
    }
    /// The layout that kvt_layout_gqa, _mla or _window filled.
    static layout from_c(const kvt_layout_t &c) {
        layout l;
        l.chunk_tokens = c.chunk_tokens;
        l.layers = c.layers;
        l.dtype = c.dtype;
        l.kv_heads = c.kv_heads;
        l.window_tokens = c.window_tokens;
        l.full_every = c.full_every;
        l.full_first = c.full_first;
        l.k_bytes = c.k_bytes;
        l.v_bytes = c.v_bytes;
        return l;
    }
};

// [kvt_prefill_cost_t: by generate.py]
/// Cost of prefill. Computing n tokens after l tokens of context takes, in nanoseconds, n * beta_ns
/// + alpha_ns * (n * l + n * n / 2).
struct prefill_cost {
    /// Nanoseconds per token and token of context.
    double alpha_ns = 0;
    /// Nanoseconds per token.
    double beta_ns = 0;

    kvt_prefill_cost_t to_c() const noexcept {
        kvt_prefill_cost_t c = KVT_PREFILL_COST_INIT;
        c.alpha_ns = alpha_ns;
        c.beta_ns = beta_ns;
        return c;
    }
};
// [end]

/// The result of a lookup: ranges that cover all tokens, and their totals.
struct lookup_result {
    std::vector<kvt_range_t> ranges;
    kvt_lookup_t totals = KVT_LOOKUP_INIT;
};

/// A namespace of a store: its sessions share the KV of common prefixes. Any thread may use it.
/// Sessions outlive it.
class namespace_ : public detail::owner<namespace_, kvt_namespace_t> {
    friend class detail::owner<namespace_, kvt_namespace_t>;
    static void drop(kvt_namespace_t *raw) noexcept {
        const kvt_status_t status = kvt_namespace_close(&raw);
        if (!detail::ended(status)) detail::report("kvt::namespace_", status);
    }

public:
    using key_bytes = std::vector<std::uint8_t>;

    ret<void> close() { return detail::check(kvt_namespace_close(&raw_)); }
    /// The key of the namespace: the hash of its identity and layout.
    ret<key_bytes> key() const {
        key_bytes key(KVT_KEY_BYTES);
        const kvt_status_t status = kvt_namespace_key(raw_, key.data());
        return detail::give(status, std::move(key));
    }
    /// Looks up how much of a sequence is reusable. Counts no use and references nothing.
    ret<lookup_result> lookup(span<const std::uint32_t> tokens) const {
        return read_ranges([&](auto... to) {
            return kvt_namespace_lookup(raw_, tokens.data(), tokens.size(), to...);
        });
    }
    /// Looks up a sequence of `tokens` tokens by the keys of its full chunks, KVT_KEY_BYTES each.
    ret<lookup_result> lookup_keys(span<const std::uint8_t> keys, std::uint64_t tokens) const {
        if (keys.size() % KVT_KEY_BYTES != 0)
            return detail::fail<lookup_result>(kvt::error(KVT_E_INVALID));
        return read_ranges([&](auto... to) {
            return kvt_namespace_lookup_keys(raw_, keys.data(), keys.size() / KVT_KEY_BYTES, tokens,
                                             to...);
        });
    }
    /// The residency of chunks, a byte for each key: KVT_EXISTS_WHOLE, 1 << KVT_TIER_*.
    ret<std::vector<std::uint8_t>> exists(span<const std::uint8_t> keys) const {
        std::vector<std::uint8_t> found(keys.size() / KVT_KEY_BYTES);
        if (keys.size() % KVT_KEY_BYTES != 0)
            return detail::fail<std::vector<std::uint8_t>>(kvt::error(KVT_E_INVALID));
        const kvt_status_t status =
            kvt_namespace_exists(raw_, keys.data(), found.size(), found.data());
        return detail::give(status, std::move(found));
    }
    /// Records how long the engine took to compute `tokens` tokens after a context. Plans use the
    /// cost that these observations give.
    ret<void> observe_prefill(std::uint64_t context_tokens, std::uint64_t tokens,
                              std::chrono::nanoseconds duration) const {
        detail::failure f;
        const kvt_status_t status = kvt_namespace_observe_prefill(
            raw_, context_tokens, tokens, detail::count(duration), f.out());
        return detail::check(status, f);
    }
    /// Sets the cost of prefill, whatever is observed; absent = use observations again.
    ret<void> set_prefill_cost(std::optional<kvt::prefill_cost> cost) const {
        const kvt_prefill_cost_t c = cost.value_or(kvt::prefill_cost()).to_c();
        detail::failure f;
        const kvt_status_t status =
            kvt_namespace_set_prefill_cost(raw_, cost ? &c : nullptr, f.out());
        return detail::check(status, f);
    }
    /// The cost of prefill that plans use.
    ret<kvt_prefill_cost_t> prefill_cost() const {
        kvt_prefill_cost_t cost = KVT_PREFILL_COST_INIT;
        const kvt_status_t status = kvt_namespace_prefill_cost(raw_, &cost);
        return detail::give(status, cost);
    }

    // Defined in <kvtier/session.hpp>.

    /// Opens a session without tokens.
    inline ret<session> open_session(const session_opts &opts) const;
    inline ret<session> open_session() const;
    /// Looks up a sequence with images and sounds.
    inline ret<lookup_result> lookup(span<const std::uint32_t> tokens,
                                     span<const kvt_media_t> media) const;
    /// The keys of the full chunks of a sequence, as events have them: KVT_KEY_BYTES each.
    inline ret<std::vector<std::uint8_t>> chunk_keys(span<const std::uint32_t> tokens,
                                                     span<const kvt_media_t> media) const;
    inline ret<std::vector<std::uint8_t>> chunk_keys(span<const std::uint32_t> tokens) const;
    /// The residency of blocks, a byte for each block: KVT_EXISTS_WHOLE, 1 << KVT_TIER_*.
    inline ret<std::vector<std::uint8_t>> blocks_exist(const block_names &names) const;
    /// The keys of blocks, as events have them: KVT_KEY_BYTES each.
    inline ret<std::vector<std::uint8_t>> block_keys(const block_names &names) const;
    /// Removes all chunks that nothing references, and waits until no opening of the store finds
    /// them again.
    inline ret<kvt_clear_report_t> clear(deadline by = {}) const;

private:
    template <class Call> ret<lookup_result> read_ranges(Call call) const {
        detail::failure f;
        lookup_result found;
        const auto read = [&](kvt_range_t *to, std::uint64_t capacity, std::uint64_t stride,
                              std::uint64_t *count) {
            return call(to, capacity, stride, count, &found.totals, f.out());
        };
        const kvt_status_t status = detail::all_rows(found.ranges, read);
        return detail::give(status, f, std::move(found));
    }
};

// --- stores ------------------------------------------------------------------

// [kvt_store_opts_t: by generate.py]
/// Options of kvt_store_open. A field that is set overrides the spec's parameter that its comment
/// names, and is checked by the same rules.
struct store_opts {
    /// Spec (docs/reference/specs.md), such as "store(host=8GiB, disk=disk(path=\"kv\",
    /// bytes=200GiB))"; empty = "store(host=1GiB)".
    std::string_view spec{};
    /// Limit of cells in host memory, at least 64 KiB (`host`); 0 = as in the spec.
    std::uint64_t host_bytes = 0;
    /// Limit of all files (`disk(bytes=...)`); 0 = as in the spec.
    std::uint64_t disk_bytes = 0;
    /// Directory of the disk tier, UTF-8 (`disk(path=...)`); empty = as in the spec.
    std::string_view disk_path{};
    /// Eviction policy of HOST (`policy`); empty = as in the spec.
    std::string_view policy{};
    /// Eviction policy of DISK (`disk_policy`); empty = as in the spec.
    std::string_view disk_policy{};
    /// When chunks are written to disk, KVT_WRITE_* (`write`); 0 = as in the spec.
    kvt_write_t write = 0;
    /// Device of the same runtime that copies between the engine and the store; null = the CPU. If
    /// it has memory of its own, transfers accept views of that memory, and
    /// `device=device(capacity=8GiB)` in the spec adds a DEVICE tier.
    ref<kvt_device_t> device{};
    /// Credentials for the remote's server; empty = none. At most 16.
    span<const kvt_secret_t> secrets{};
    /// Custom backend, required by `remote=custom(...)` in the spec; null = none.
    const kvt_remote_custom_t *remote = nullptr;

    kvt_store_opts_t to_c() const noexcept {
        kvt_store_opts_t c = KVT_STORE_OPTS_INIT;
        detail::text(spec, c.spec, c.spec_bytes);
        c.host_bytes = host_bytes;
        c.disk_bytes = disk_bytes;
        detail::text(disk_path, c.disk_path, c.disk_path_bytes);
        detail::text(policy, c.policy, c.policy_bytes);
        detail::text(disk_policy, c.disk_policy, c.disk_policy_bytes);
        c.write = write;
        c.device = device.get();
        detail::list(secrets, c.secrets, c.secret_count);
        c.secret_stride_bytes = sizeof(kvt_secret_t);
        c.remote = remote;
        return c;
    }
};
// [end]

/// A credential of store_opts. Keep both texts valid until the store is open.
inline kvt_secret_t secret(std::string_view name, std::string_view bytes) noexcept {
    kvt_secret_t c = kvt_secret_t();
    detail::text(name, c.name, c.name_bytes);
    c.secret = bytes.data();
    c.secret_bytes = bytes.size();
    return c;
}

/// Events of a store from a cursor on.
struct store_events {
    std::vector<kvt_store_event_t> events;
    /// Events that were lost before these.
    std::uint64_t missed = 0;
};

/// A store: keeps KV in tiers. The destructor cancels ops, waits for them and releases its
/// directory.
class store : public detail::owner<store, kvt_store_t> {
    friend class detail::owner<store, kvt_store_t>;
    static void drop(kvt_store_t *raw) noexcept {
        kvt_status_t status = kvt_store_close(&raw, 0, nullptr);
        if (status == KVT_E_IO) {
            detail::report("kvt::store", status);
            status = kvt_store_close(&raw, 0, nullptr); // closed already: frees the handle
        }
        if (!detail::ended(status)) detail::report("kvt::store", status);
    }

public:
    /// Opens a store with a runtime and a budget of its own, which close with it. `spec` is
    /// "store(...)", or "kvtier(workers=4, budget=budget(host=8GiB), store=store(...))"; empty =
    /// "store(host=1GiB)".
    static ret<store> open(std::string_view spec = {}) {
        detail::failure f;
        const char *text = nullptr;
        std::uint64_t bytes = 0;
        detail::text(spec, text, bytes);
        kvt_store_t *raw = nullptr;
        const kvt_status_t status = kvt_open(text, bytes, &raw, f.out());
        return detail::give(status, f, store::adopt(raw));
    }
    /// Opens a store on a runtime. `budget` is charged for its memory; null = a private budget.
    static ret<store> open(const kvt::runtime &on, std::string_view spec = {},
                           ref<kvt_budget_t> budget = {}) {
        store_opts opts;
        opts.spec = spec;
        return open(on, opts, budget);
    }
    static ret<store> open(const kvt::runtime &on, const store_opts &opts,
                           ref<kvt_budget_t> budget = {}) {
        detail::failure f;
        const kvt_store_opts_t c = opts.to_c();
        kvt_store_t *raw = nullptr;
        const kvt_status_t status = kvt_store_open(on.get(), budget.get(), &c, &raw, f.out());
        return detail::give(status, f, store::adopt(raw));
    }
    /// The runtime of the store, for queues and devices: `store.runtime()->open_queue()`. It lives
    /// as long as the store, unless the store was opened on a runtime of the caller.
    ret<borrowed<kvt::runtime>> runtime() const {
        kvt_runtime_t *raw = nullptr;
        const kvt_status_t status = kvt_store_runtime(raw_, &raw);
        return detail::give(status, borrowed<kvt::runtime>(raw));
    }
    /// Fails with KVT_E_BUSY at the deadline; this object still owns the store then.
    ret<void> close(deadline by = {}) {
        detail::failure f;
        const kvt_status_t status = kvt_store_close(&raw_, by.ns, f.out());
        return detail::check(status, f);
    }
    ret<kvt_store_stats_t> stats() const {
        kvt_store_stats_t stats = KVT_STORE_STATS_INIT;
        const kvt_status_t status = kvt_store_stats(raw_, &stats);
        return detail::give(status, stats);
    }
    /// Counters of the remote; all 0 without a remote.
    ret<kvt_remote_stats_t> remote_stats() const {
        kvt_remote_stats_t stats = KVT_REMOTE_STATS_INIT;
        const kvt_status_t status = kvt_store_remote_stats(raw_, &stats);
        return detail::give(status, stats);
    }
    /// Switches the eviction policy of KVT_TIER_HOST, KVT_TIER_DISK or KVT_TIER_DEVICE.
    ret<void> set_policy(kvt_tier_t tier, std::string_view spec) const {
        detail::failure f;
        const kvt_status_t status =
            kvt_store_set_policy(raw_, tier, spec.data(), spec.size(), f.out());
        return detail::check(status, f);
    }
    /// Changes the limit of a tier. Chunks above a lower limit are evicted in the background.
    ret<void> set_limit(kvt_tier_t tier, std::uint64_t bytes) const {
        detail::failure f;
        const kvt_status_t status = kvt_store_set_limit(raw_, tier, bytes, f.out());
        return detail::check(status, f);
    }
    /// Sets the most bytes of a tenant's chunks in a tier; 0 removes its quota, so that `quota` of
    /// the spec applies again.
    ret<void> set_quota(std::uint32_t tenant, kvt_tier_t tier, std::uint64_t bytes) const {
        detail::failure f;
        const kvt_status_t status = kvt_store_set_quota(raw_, tenant, tier, bytes, f.out());
        return detail::check(status, f);
    }
    /// The last evictions of a tier, at most `max_entries`, the oldest first.
    ret<std::vector<kvt_policy_log_entry_t>> evictions(kvt_tier_t tier,
                                                       std::size_t max_entries = 256) const {
        std::vector<kvt_policy_log_entry_t> entries(max_entries);
        std::uint64_t count = 0;
        const kvt_status_t status = kvt_store_evictions(
            raw_, tier, entries.data(), max_entries, sizeof(kvt_policy_log_entry_t), &count);
        entries.resize(static_cast<std::size_t>(count));
        return detail::give(status, std::move(entries));
    }
    /// Traffic of each tenant. The last row may sum up further tenants.
    ret<std::vector<kvt_tenant_t>> tenants() const {
        std::vector<kvt_tenant_t> rows;
        const auto read = [&](auto... to) { return kvt_store_tenants(raw_, to...); };
        const kvt_status_t status = detail::all_rows(rows, read);
        return detail::give(status, std::move(rows));
    }
    /// Latency histograms: a row for each KVT_LATENCY_*.
    ret<std::vector<kvt_latency_t>> latencies() const {
        std::vector<kvt_latency_t> rows;
        const auto read = [&](auto... to) { return kvt_store_latencies(raw_, to...); };
        const kvt_status_t status = detail::all_rows(rows, read);
        return detail::give(status, std::move(rows));
    }
    /// Reads events from a cursor on, at most `max_events`, and advances the cursor. Cursor 0 =
    /// from the start, UINT64_MAX = future events only.
    ret<store_events> events(std::uint64_t &cursor, std::size_t max_events = 256) const {
        store_events read;
        read.events.resize(max_events);
        std::uint64_t count = 0;
        const kvt_status_t status =
            kvt_store_events(raw_, &cursor, read.events.data(), max_events,
                             sizeof(kvt_store_event_t), &count, &read.missed);
        read.events.resize(static_cast<std::size_t>(count));
        return detail::give(status, std::move(read));
    }
    /// Reads what is resident from a cursor on, at most `max_entries`, and advances the cursor: 0 =
    /// from the start, UINT64_MAX = all was read. See kvt_store_residents.
    ret<std::vector<kvt_store_event_t>> residents(std::uint64_t &cursor,
                                                  std::size_t max_entries = 256) const {
        std::vector<kvt_store_event_t> entries(max_entries);
        std::uint64_t count = 0;
        const kvt_status_t status = kvt_store_residents(
            raw_, &cursor, entries.data(), max_entries, sizeof(kvt_store_event_t), &count);
        entries.resize(static_cast<std::size_t>(count));
        return detail::give(status, std::move(entries));
    }
    /// Submits an op that completes when the event `from` or a later one exists. Its value is the
    /// number of events from `from` on. UINT64_MAX = the next event.
    ret<op> watch(std::uint64_t from, const submit_opts &opts = {}) const {
        detail::failure f;
        const kvt_submit_opts_t c = opts.to_c();
        kvt_op_t *raw = nullptr;
        const kvt_status_t status = kvt_store_watch(raw_, from, &c, &raw, f.out());
        return detail::give(status, f, op::adopt(raw));
    }
    /// The statistics of the store as Prometheus text.
    ret<std::string> metrics() const {
        std::string text;
        const auto read = [&](auto... to) { return kvt_store_metrics(raw_, to...); };
        const kvt_status_t status = detail::read_text(text, read);
        return detail::give(status, std::move(text));
    }
    /// Opens a namespace. Equal identities and layouts give the same namespace.
    ret<namespace_> open_namespace(const kvt::identity &identity, const kvt::layout &layout,
                                   kvt_namespace_flags_t flags = 0) const {
        std::vector<kvt_identity_extra_t> extra;
        std::vector<kvt_group_t> groups;
        const kvt_identity_t id = identity.to_c(extra);
        const kvt_layout_t cells = layout.to_c(groups);
        detail::failure f;
        kvt_namespace_t *raw = nullptr;
        const kvt_status_t status =
            kvt_namespace_open(raw_, &id, &cells, flags, &raw, f.out());
        return detail::give(status, f, namespace_::adopt(raw));
    }
};

}  // namespace KVTIER_ERRORS_
}  // namespace kvt

#endif  // KVTIER_STORE_HPP
