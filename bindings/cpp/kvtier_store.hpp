// kvt::store, kvt::name_space, kvt::session: KV in tiers. Part of kvtier.hpp, which
// includes it.

#ifndef KVTIER_STORE_HPP
#define KVTIER_STORE_HPP

#ifndef KVTIER_HPP
#error "include <kvtier/kvtier.hpp>"
#endif

namespace kvt {
inline namespace KVTIER_FACE_ {

/// Which part of the KV this rank holds.
struct shard {
    std::uint32_t index = 0;
    std::uint32_t count = 1;
};

/// A field of the engine's own, with a tag of 0x80000000 at least.
struct identity_extra {
    std::uint32_t tag = 0;
    std::string_view value;
};

/// Everything that makes KV other KV. What is not given differs from what is empty.
struct identity {
    std::optional<std::string_view> model;
    std::optional<std::string_view> weights;
    std::optional<std::string_view> lora;
    std::optional<std::string_view> media;
    std::optional<std::string_view> salt;
    std::optional<std::string_view> recipe;
    std::optional<kvt::shard> shard;
    std::vector<identity_extra> extra;
};

/// Layers that keep the same, and need the same.
struct layer_group {
    std::vector<std::uint16_t> layers;
    std::uint32_t rule = KVT_RULE_FULL;
    std::uint32_t dtype = KVT_DTYPE_BYTES;
    std::uint32_t kv_heads = 0;
    std::uint32_t window_tokens = 0;
    std::uint64_t k_bytes = 0;
    std::uint64_t v_bytes = 0;
    std::uint64_t state_bytes = 0;
};

struct layout {
    std::uint32_t chunk_tokens = 0;
    std::vector<layer_group> groups;
};

struct session_opts {
    std::string_view name;
    std::uint32_t tenant = 0;
    std::optional<std::uint8_t> priority;
    std::uint32_t max_tokens = 0;
};

/// Tokens by layers of a session, and where the engine has them: as many views as layers.
struct rectangle {
    std::uint64_t first_token = 0;
    /// 0 = to the end.
    std::uint64_t tokens = 0;
    std::uint32_t first_layer = 0;
    /// 0 = as many as `k` has; without views all from the first on.
    std::uint32_t layers = 0;
    span<const kvt_view_t> k{};
    /// Empty where no layer has V.
    span<const kvt_view_t> v{};
    /// Of a put.
    std::uint32_t level = KVT_LEVEL_RAM;
};

/// Tokens one after the other, heads without gaps. Set what differs.
inline kvt_view_t view(void *address, std::uint64_t run_bytes, std::uint32_t heads = 1) noexcept {
    kvt_view_t v{};
    v.address = address;
    v.run_bytes = run_bytes;
    v.heads = heads;
    return v;
}
/// Tokens in pages.
inline kvt_view_t view(span<void *const> pages, std::uint32_t page_tokens, std::uint64_t run_bytes,
                       std::uint32_t heads = 1) noexcept {
    kvt_view_t v = view(nullptr, run_bytes, heads);
    v.pages = pages.data();
    v.page_count = pages.size();
    v.page_tokens = page_tokens;
    return v;
}

namespace detail {
inline kvt_session_opts_t lower(const session_opts &o) noexcept {
    kvt_session_opts_t c = KVT_SESSION_OPTS_INIT;
    c.name = o.name.data();
    c.name_bytes = o.name.size();
    c.tenant = o.tenant;
    if (o.priority) c.flags |= KVT_SESSION_PRIORITY;
    c.priority = o.priority.value_or(0);
    c.max_tokens = o.max_tokens;
    return c;
}

/// A field that is empty has a pointer, one that is absent has none.
inline void field(const std::optional<std::string_view> &from, const void *&data,
                  std::uint64_t &bytes) noexcept {
    if (!from) return;
    data = from->empty() ? "" : from->data();
    bytes = from->size();
}

inline kvt_move_t lower(const rectangle &r, std::uint64_t flags) noexcept {
    kvt_move_t c = KVT_MOVE_INIT;
    c.flags = flags;
    c.first_token = r.first_token;
    c.tokens = r.tokens;
    c.first_layer = r.first_layer;
    c.layers = r.layers != 0 ? r.layers : static_cast<std::uint32_t>(r.k.size());
    c.k = r.k.empty() ? nullptr : r.k.data();
    c.v = r.v.empty() ? nullptr : r.v.data();
    c.stride_bytes = sizeof(kvt_view_t);
    c.level = r.level;
    return c;
}

/// The library reads as many views as there are layers.
inline bool fits(const rectangle &r, bool with_views) noexcept {
    const std::size_t layers = r.layers != 0 ? r.layers : r.k.size();
    const bool k = with_views ? r.k.size() == layers && layers != 0 : r.k.empty();
    return k && (r.v.empty() || r.v.size() == layers);
}
}  // namespace detail

/// A sequence of tokens whose KV is kept. Any thread may use it. Ops outlive it.
class session : public detail::owner<session, kvt_session_t> {
    friend class detail::owner<session, kvt_session_t>;
    friend class name_space;
    static void drop(kvt_session_t *raw) noexcept {
        const kvt_status_t status = kvt_session_close(&raw);
        if (!detail::ended(status)) detail::report("kvt::session", status);
    }

public:
    ret<void> close() { return detail::check(kvt_session_close(&raw_)); }
    ret<void> append(span<const std::uint32_t> tokens) const {
        detail::failure f;
        const kvt_status_t status =
            kvt_session_append(raw_, tokens.data(), tokens.size(), f.out());
        return detail::check(status, f);
    }
    ret<void> truncate(std::uint64_t tokens) const {
        detail::failure f;
        const kvt_status_t status = kvt_session_truncate(raw_, tokens, f.out());
        return detail::check(status, f);
    }
    /// Another session that goes on from here.
    ret<session> fork(const session_opts &opts = {}) const {
        detail::failure f;
        const kvt_session_opts_t c = detail::lower(opts);
        kvt_session_t *raw = nullptr;
        const kvt_status_t status = kvt_session_fork(raw_, &c, &raw, f.out());
        return detail::give(status, f, session::adopt(raw));
    }
    /// Keeps chunks until a time; tokens 0 = to the end, no time = for ever.
    ret<void> pin(std::uint64_t first_token, std::uint64_t tokens, std::uint8_t priority = 0,
                  deadline until = {}) const {
        detail::failure f;
        const kvt_status_t status =
            kvt_session_pin(raw_, first_token, tokens, priority, until.ns, f.out());
        return detail::check(status, f);
    }
    /// Times are CLOCK_MONOTONIC.
    ret<void> hint(const policy_hint &told) const {
        detail::failure f;
        kvt_policy_hint_t c = KVT_POLICY_HINT_INIT;
        c.flags = KVT_HINT_CONFIDENCE | (told.done ? KVT_HINT_DONE : 0);
        c.next_use_ns = told.next_use_ns;
        c.confidence = told.confidence;
        c.stop = told.stop;
        const kvt_status_t status = kvt_session_hint(raw_, &c, f.out());
        return detail::check(status, f);
    }
    ret<kvt_session_info_t> info() const {
        kvt_session_info_t info = KVT_SESSION_INFO_INIT;
        const kvt_status_t status = kvt_session_info(raw_, &info);
        return detail::give(status, info);
    }

    /// Stores; info().value of the op is how many tokens without a gap.
    ret<op> put(const rectangle &what, const submit_opts &opts = {}) const {
        return one(&kvt_session_put, what, opts, true);
    }
    /// Loads; the op fails with KVT_E_NOT_FOUND when something was missing.
    ret<op> get(const rectangle &what, const submit_opts &opts = {}) const {
        return one(&kvt_session_get, what, opts, true);
    }
    /// Into memory, for a get to come; without views.
    ret<op> prefetch(const rectangle &what, const submit_opts &opts = {}) const {
        return one(&kvt_session_prefetch, what, opts, false);
    }
    /// The same with an op for each layer, whose tags count up.
    ret<std::vector<op>> put_each(const rectangle &what, const submit_opts &opts = {}) const {
        return each(&kvt_session_put, what, opts, true);
    }
    ret<std::vector<op>> get_each(const rectangle &what, const submit_opts &opts = {}) const {
        return each(&kvt_session_get, what, opts, true);
    }

private:
    using call = kvt_status_t (*)(const kvt_session_t *, const kvt_move_t *,
                                  const kvt_submit_opts_t *, kvt_op_t **, kvt_error_t **);

    ret<op> one(call move, const rectangle &what, const submit_opts &opts, bool views) const {
        if (!detail::fits(what, views)) return detail::fail<op>(kvt::error(KVT_E_INVALID));
        detail::failure f;
        const kvt_move_t m = detail::lower(what, 0);
        const kvt_submit_opts_t c = detail::lower(opts);
        kvt_op_t *raw = nullptr;
        const kvt_status_t status = move(raw_, &m, &c, &raw, f.out());
        return detail::give(status, f, op::adopt(raw));
    }
    ret<std::vector<op>> each(call move, const rectangle &what, const submit_opts &opts,
                              bool views) const {
        if (!detail::fits(what, views))
            return detail::fail<std::vector<op>>(kvt::error(KVT_E_INVALID));
        detail::failure f;
        const kvt_move_t m = detail::lower(what, KVT_MOVE_EACH_LAYER);
        const kvt_submit_opts_t c = detail::lower(opts);
        std::vector<kvt_op_t *> raw(m.layers, nullptr);
        std::vector<op> ops;
        ops.reserve(m.layers); // nothing may throw once the moves are under way
        const kvt_status_t status = move(raw_, &m, &c, raw.data(), f.out());
        for (kvt_op_t *r : raw)
            if (r != nullptr) ops.push_back(op::adopt(r));
        return detail::give(status, f, std::move(ops));
    }
};

/// Who may share. Any thread may use it; sessions outlive it.
class name_space : public detail::owner<name_space, kvt_namespace_t> {
    friend class detail::owner<name_space, kvt_namespace_t>;
    friend class store;
    static void drop(kvt_namespace_t *raw) noexcept {
        const kvt_status_t status = kvt_namespace_close(&raw);
        if (!detail::ended(status)) detail::report("kvt::name_space", status);
    }

public:
    using key_bytes = std::vector<std::uint8_t>;

    ret<void> close() { return detail::check(kvt_namespace_close(&raw_)); }
    ret<key_bytes> key() const {
        key_bytes key(KVT_KEY_BYTES);
        const kvt_status_t status = kvt_namespace_key(raw_, key.data());
        return detail::give(status, std::move(key));
    }
    ret<session> open_session(const session_opts &opts = {}) const {
        detail::failure f;
        const kvt_session_opts_t c = detail::lower(opts);
        kvt_session_t *raw = nullptr;
        const kvt_status_t status = kvt_session_open(raw_, &c, &raw, f.out());
        return detail::give(status, f, session::adopt(raw));
    }
};

/// KV in tiers. The destructor cancels, waits and lets the directory go.
class store : public detail::owner<store, kvt_store_t> {
    friend class detail::owner<store, kvt_store_t>;
    static void drop(kvt_store_t *raw) noexcept {
        kvt_status_t status = kvt_store_close(&raw, 0, nullptr);
        if (status == KVT_E_IO) {
            detail::report("kvt::store", status);
            status = kvt_store_close(&raw, 0, nullptr); // it is closed: this frees it
        }
        if (!detail::ended(status)) detail::report("kvt::store", status);
    }

public:
    static ret<store> open(const runtime &on, std::string_view spec = "store",
                           const budget *pays = nullptr) {
        detail::failure f;
        kvt_store_opts_t c = KVT_STORE_OPTS_INIT;
        c.spec = spec.data();
        c.spec_bytes = spec.size();
        kvt_store_t *raw = nullptr;
        const kvt_status_t status =
            kvt_store_open(on.get(), pays != nullptr ? pays->get() : nullptr, &c, &raw, f.out());
        return detail::give(status, f, store::adopt(raw));
    }
    /// Fails with KVT_E_BUSY at the deadline, and stays owned.
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
    /// In the text format of Prometheus.
    ret<std::string> metrics() const {
        std::string text;
        std::uint64_t bytes = 0;
        kvt_status_t status = kvt_store_metrics(raw_, nullptr, 0, &bytes);
        while (status == KVT_OK) {
            text.resize(static_cast<std::size_t>(bytes) + 256); // it may have grown meanwhile
            status = kvt_store_metrics(raw_, &text[0], text.size(), &bytes);
            if (status != KVT_E_TOO_SMALL) break;
            status = KVT_OK;
        }
        if (status == KVT_OK) text.resize(static_cast<std::size_t>(bytes));
        return detail::give(status, std::move(text));
    }
    ret<name_space> open_name_space(const identity &who, const layout &what,
                                    std::uint64_t flags = 0) const {
        std::vector<kvt_identity_extra_t> extra(who.extra.size());
        for (std::size_t i = 0; i < extra.size(); i++) {
            extra[i] = kvt_identity_extra_t{};
            extra[i].tag = who.extra[i].tag;
            extra[i].value = who.extra[i].value.data();
            extra[i].value_bytes = who.extra[i].value.size();
        }
        kvt_identity_t id = KVT_IDENTITY_INIT;
        detail::field(who.model, id.model, id.model_bytes);
        detail::field(who.weights, id.weights, id.weights_bytes);
        detail::field(who.lora, id.lora, id.lora_bytes);
        detail::field(who.media, id.media, id.media_bytes);
        detail::field(who.salt, id.salt, id.salt_bytes);
        detail::field(who.recipe, id.recipe, id.recipe_bytes);
        if (who.shard) {
            id.shard_index = who.shard->index;
            id.shard_count = who.shard->count;
        }
        id.extra = extra.data();
        id.extra_count = extra.size();
        id.extra_stride_bytes = sizeof(kvt_identity_extra_t);
        std::vector<kvt_group_t> groups(what.groups.size());
        for (std::size_t i = 0; i < groups.size(); i++) {
            const layer_group &from = what.groups[i];
            kvt_group_t &g = groups[i] = kvt_group_t{};
            g.rule = from.rule;
            g.dtype = from.dtype;
            g.kv_heads = from.kv_heads;
            g.window_tokens = from.window_tokens;
            g.k_bytes = from.k_bytes;
            g.v_bytes = from.v_bytes;
            g.state_bytes = from.state_bytes;
            g.layers = from.layers.data();
            g.layer_count = from.layers.size();
        }
        kvt_layout_t layout = KVT_LAYOUT_INIT;
        layout.chunk_tokens = what.chunk_tokens;
        layout.groups = groups.data();
        layout.group_count = groups.size();
        layout.stride_bytes = sizeof(kvt_group_t);
        detail::failure f;
        kvt_namespace_t *raw = nullptr;
        const kvt_status_t status =
            kvt_namespace_open(raw_, &id, &layout, flags, &raw, f.out());
        return detail::give(status, f, name_space::adopt(raw));
    }
};

}  // namespace KVTIER_FACE_
}  // namespace kvt

#endif  // KVTIER_STORE_HPP
