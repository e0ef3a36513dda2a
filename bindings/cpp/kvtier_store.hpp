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
    /// Whose names objects have at a remote; 0 = everybody's. No part of the identity.
    std::uint64_t remote_tenant = 0;
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

/// The engine's word that its memory may be touched; moves wait for it. Closed without
/// the word, those moves end with KVT_E_CANCELLED. Any thread may use it.
class event : public detail::owner<event, kvt_ready_event_t> {
    friend class detail::owner<event, kvt_ready_event_t>;
    static void drop(kvt_ready_event_t *raw) noexcept {
        const kvt_status_t status = kvt_ready_event_close(&raw);
        if (!detail::ended(status)) detail::report("kvt::event", status);
    }

public:
    static ret<event> open() {
        detail::failure f;
        kvt_ready_event_t *raw = nullptr;
        const kvt_status_t status = kvt_ready_event_open(0, &raw, f.out());
        return detail::give(status, f, event::adopt(raw));
    }
    ret<void> close() { return detail::check(kvt_ready_event_close(&raw_)); }
    /// Never waits; also in callbacks.
    ret<void> signal() const { return detail::check(kvt_ready_event_signal(raw_)); }
    ret<bool> is_signalled() const {
        std::uint32_t state = KVT_READY_EVENT_PENDING;
        const kvt_status_t status = kvt_ready_event_query(raw_, &state);
        return detail::give(status, state == KVT_READY_EVENT_SIGNALLED);
    }
};

/// Tokens by layers of a session, and where the engine has them: as many views as layers.
struct transfer {
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
    /// Of a get or a prefetch: only what going on after its last token needs.
    bool reuse = false;
    /// Nothing begins before it was signalled.
    const event *ready = nullptr;
    /// An event of the store's device that copies are behind; 0 = none.
    std::uint64_t after = 0;
    /// Of a get or a prefetch: the chunks that are wanted, 0 = the one of `first_token`,
    /// ascending; views have their tokens one after the other. Nothing = all, but an empty
    /// list is an error. The numbers must stay until the call returns, as must the views.
    std::optional<span<const std::uint32_t>> chunks{};
};

/// What an engine calls its blocks: all names, one after the other, of `each_bytes` each, or up
/// to `ends`.
struct names {
    span<const std::uint8_t> bytes{};
    std::uint64_t each_bytes = 0;
    /// Instead of each_bytes: where each name ends.
    span<const std::uint64_t> ends{};

    /// How many.
    std::uint64_t count() const noexcept {
        if (!ends.empty()) return ends.size();
        return each_bytes == 0 ? 0 : bytes.size() / each_bytes;
    }
};

/// Blocks that an engine names itself, and where it has them: as many views as layers.
struct blocks {
    names called{};
    std::uint32_t first_layer = 0;
    /// 0 = as many as `k` has; without views all from the first on.
    std::uint32_t layers = 0;
    span<const kvt_view_t> k{};
    /// Empty where no layer has V.
    span<const kvt_view_t> v{};
    /// Of a put.
    std::uint32_t level = KVT_LEVEL_RAM;
    /// Nothing begins before it was signalled.
    const event *ready = nullptr;
    /// An event of the store's device that copies are behind; 0 = none.
    std::uint64_t after = 0;
};

/// How the engine will run what is planned.
struct plan_terms {
    /// It computes while loads go on.
    bool overlap = true;
    /// What is on its way into the store is counted on.
    bool wait = true;
    kvt::priority priority = kvt::priority::demand;
    /// What computing costs, ns; else what was observed in the namespace, or fixed.
    struct cost {
        double alpha_ns = 0;
        double beta_ns = 0;
    };
    std::optional<cost> costs;
};

struct session_plan {
    std::vector<kvt_plan_step_t> steps;
    kvt_plan_t sum = KVT_PLAN_INIT;
};

/// How to open a store; what is set counts instead of what the spec says.
struct store_opts {
    std::string_view spec = "store";
    std::uint64_t host_bytes = 0;
    std::uint64_t disk_bytes = 0;
    std::string_view disk_path;
    std::string_view policy;
    std::string_view disk_policy;
    /// KVT_WRITE_*.
    std::uint32_t write = 0;
    /// Who copies between the engine's memory and the store's; null = the processor.
    const kvt::device *device = nullptr;
    /// What only the remote's server is to see: copied.
    span<const kvt_secret_t> secrets{};
};

/// A secret of a store's options; both texts must stay until the store is open.
inline kvt_secret_t secret(std::string_view name, std::string_view bytes) noexcept {
    kvt_secret_t c;
    detail::text(name, c.name, c.name_bytes);
    c.secret = bytes.data();
    c.secret_bytes = bytes.size();
    return c;
}

struct lookup_result {
    std::vector<kvt_range_t> ranges;
    kvt_lookup_t sum = KVT_LOOKUP_INIT;
};

/// What changed in a store, up to the next call's cursor.
struct store_events {
    std::vector<kvt_store_event_t> events;
    std::uint64_t missed = 0;
};

/// Tokens one after the other, heads without gaps. Set what differs.
inline kvt_view_t view(void *address, std::uint64_t run_bytes, std::uint32_t heads = 1,
                       std::uint32_t tokens = 0) noexcept {
    kvt_view_t v{};
    v.address = address;
    v.run_bytes = run_bytes;
    v.heads = heads;
    v.tokens = tokens;
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
    detail::text(o.name, c.name, c.name_bytes);
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

inline kvt_transfer_t lower(const transfer &r, std::uint64_t flags) noexcept {
    kvt_transfer_t c = KVT_TRANSFER_INIT;
    c.flags = flags | (r.reuse ? KVT_TRANSFER_NEEDED_ONLY : 0);
    c.first_token = r.first_token;
    c.tokens = r.tokens;
    c.first_layer = r.first_layer;
    c.layers = r.layers != 0 ? r.layers : static_cast<std::uint32_t>(r.k.size());
    c.k = r.k.empty() ? nullptr : r.k.data();
    c.v = r.v.empty() ? nullptr : r.v.data();
    c.stride_bytes = sizeof(kvt_view_t);
    c.level = r.level;
    c.ready = r.ready != nullptr ? r.ready->get() : nullptr;
    c.after = r.after;
    if (r.chunks) {
        static constexpr std::uint32_t none = 0; // null would be all
        c.chunks = r.chunks->empty() ? &none : r.chunks->data();
        c.chunk_count = r.chunks->size();
    }
    return c;
}

/// Tokens with the media that start in them.
inline kvt_sequence_t lower(span<const std::uint32_t> tokens,
                            span<const kvt_media_t> media) noexcept {
    kvt_sequence_t c = KVT_SEQUENCE_INIT;
    c.tokens = tokens.data();
    c.token_count = tokens.size();
    c.media = media.data();
    c.media_count = media.size();
    c.media_stride_bytes = sizeof(kvt_media_t);
    return c;
}

/// Fills rows of which the library says how many there are.
template <class Row, class Call> kvt_status_t all_rows(std::vector<Row> &rows, Call call) {
    std::uint64_t count = 0;
    rows.resize(16);
    for (;;) {
        const kvt_status_t status = call(rows.data(), rows.size(), sizeof(Row), &count);
        rows.resize(static_cast<std::size_t>(status == KVT_OK || status == KVT_E_TOO_SMALL
                                                 ? count
                                                 : 0));
        if (status != KVT_E_TOO_SMALL) return status;
    }
}

/// Names fill their bytes, and end in them.
inline bool fits(const names &n) noexcept {
    if (n.ends.empty()) return n.bytes.size() == n.count() * n.each_bytes;
    return n.each_bytes == 0 && n.ends[n.ends.size() - 1] <= n.bytes.size();
}

inline kvt_block_names_t lower(const names &n) noexcept {
    kvt_block_names_t c = KVT_BLOCK_NAMES_INIT;
    c.bytes = n.bytes.data();
    c.ends = n.ends.empty() ? nullptr : n.ends.data();
    c.each_bytes = n.each_bytes;
    c.count = n.count();
    return c;
}

/// The library reads as many views as there are layers.
template <class What> bool fits(const What &r, bool with_views) noexcept {
    const std::size_t layers = r.layers != 0 ? r.layers : r.k.size();
    const bool k = with_views ? r.k.size() == layers && layers != 0 : r.k.empty();
    return k && (r.v.empty() || r.v.size() == layers);
}

inline kvt_policy_hint_t lower(const policy_hint &told) noexcept {
    kvt_policy_hint_t c = KVT_POLICY_HINT_INIT;
    c.flags = KVT_HINT_ZERO_CONFIDENCE | (told.done ? KVT_HINT_DONE : 0);
    c.next_use_ns = told.next_use_ns;
    c.confidence = told.confidence;
    c.stop = told.stop;
    return c;
}
}  // namespace detail

/// Blocks that a session holds (session::hold_blocks): they do not leave before this ends, or
/// the session is closed. It may outlive the session.
class held_blocks {
public:
    held_blocks() noexcept = default;
    held_blocks(held_blocks &&other) noexcept
        : session_(std::exchange(other.session_, nullptr)), found_(std::move(other.found_)),
          bytes_(std::move(other.bytes_)), ends_(std::move(other.ends_)) {}
    held_blocks &operator=(held_blocks &&other) noexcept {
        if (this != &other) {
            reset();
            session_ = std::exchange(other.session_, nullptr);
            found_ = std::move(other.found_);
            bytes_ = std::move(other.bytes_);
            ends_ = std::move(other.ends_);
        }
        return *this;
    }
    held_blocks(const held_blocks &) = delete;
    held_blocks &operator=(const held_blocks &) = delete;
    ~held_blocks() { reset(); }

    /// A byte for each name that was given, as find_blocks has it; 0 = not held.
    const std::vector<std::uint8_t> &found() const noexcept { return found_; }
    /// Lets go of what is held. Doing so twice is fine.
    ret<void> release() {
        detail::failure f;
        const kvt_status_t status = let_go(f.out());
        return detail::check(status, f);
    }

private:
    friend class session;
    kvt_session_t *session_ = nullptr;
    std::vector<std::uint8_t> found_;
    /// The names of those that are held, and where each ends.
    std::vector<std::uint8_t> bytes_;
    std::vector<std::uint64_t> ends_;

    /// Takes the memory that it needs before anything is held.
    explicit held_blocks(const names &called) {
        found_.resize(called.count());
        bytes_.reserve(called.bytes.size());
        ends_.reserve(found_.size());
    }
    void note(kvt_session_t *session, const names &called) noexcept {
        std::uint64_t from = 0;
        for (std::size_t i = 0; i < found_.size(); i++) {
            const std::uint64_t to =
                called.ends.empty() ? from + called.each_bytes : called.ends[i];
            if (found_[i] != 0) {
                bytes_.insert(bytes_.end(), called.bytes.data() + from, called.bytes.data() + to);
                ends_.push_back(bytes_.size());
            }
            from = to;
        }
        session_ = ends_.empty() ? nullptr : session;
    }
    kvt_status_t let_go(kvt_error_t **err) noexcept {
        if (session_ == nullptr) return KVT_OK;
        kvt_block_names_t c = KVT_BLOCK_NAMES_INIT;
        c.bytes = bytes_.data();
        c.ends = ends_.data();
        c.count = ends_.size();
        const kvt_status_t status = kvt_session_release_blocks(session_, &c, err);
        // A session that is closed, or whose store is, holds nothing.
        const bool is_over = status == KVT_E_HANDLE || status == KVT_E_CLOSED;
        if (status != KVT_OK && !is_over) return status;
        session_ = nullptr;
        if (is_over && err != nullptr) (void)kvt_error_free(err);
        return KVT_OK;
    }
    void reset() noexcept {
        const kvt_status_t status = let_go(nullptr);
        if (!detail::ended(status)) detail::report("kvt::held_blocks", status);
        session_ = nullptr;
    }
};

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
    /// The same with images and sounds, by the index of the first token of each.
    ret<void> append(span<const std::uint32_t> tokens, span<const kvt_media_t> media) const {
        detail::failure f;
        const kvt_sequence_t c = detail::lower(tokens, media);
        const kvt_status_t status = kvt_session_append_media(raw_, &c, f.out());
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
    /// Takes pins away, whoever has set them.
    ret<void> unpin(std::uint64_t first_token = 0, std::uint64_t tokens = 0) const {
        detail::failure f;
        const kvt_status_t status = kvt_session_unpin(raw_, first_token, tokens, f.out());
        return detail::check(status, f);
    }
    /// Takes chunks away that nobody else holds.
    ret<kvt_clear_report_t> drop_chunks(std::uint64_t first_token = 0,
                                        std::uint64_t tokens = 0) const {
        detail::failure f;
        kvt_clear_report_t report = KVT_CLEAR_REPORT_INIT;
        const kvt_status_t status =
            kvt_session_drop(raw_, first_token, tokens, &report, f.out());
        return detail::give(status, f, report);
    }
    /// Sends chunks down; their memory is given back once they are on disk.
    ret<kvt_demote_report_t> demote(std::uint64_t first_token = 0,
                                    std::uint64_t tokens = 0) const {
        detail::failure f;
        kvt_demote_report_t report = KVT_DEMOTE_REPORT_INIT;
        const kvt_status_t status =
            kvt_session_demote(raw_, first_token, tokens, &report, f.out());
        return detail::give(status, f, report);
    }
    /// The cheapest way to have all of it.
    ret<session_plan> plan(const plan_terms &terms = {}) const {
        kvt_plan_terms_t c = KVT_PLAN_TERMS_INIT;
        c.flags = (terms.overlap ? 0 : KVT_PLAN_NO_OVERLAP) | (terms.wait ? 0 : KVT_PLAN_NO_WAIT) |
                  (terms.costs ? KVT_PLAN_COST : 0);
        c.alpha_ns = terms.costs ? terms.costs->alpha_ns : 0;
        c.beta_ns = terms.costs ? terms.costs->beta_ns : 0;
        c.priority = static_cast<std::uint32_t>(terms.priority);
        detail::failure f;
        session_plan plan;
        const kvt_status_t status = detail::all_rows(
            plan.steps, [&](kvt_plan_step_t *rows, std::uint64_t capacity,
                               std::uint64_t stride, std::uint64_t *count) {
                return kvt_session_plan(raw_, &c, rows, capacity, stride, count, &plan.sum,
                                        f.out());
            });
        return detail::give(status, f, std::move(plan));
    }
    /// Times are CLOCK_MONOTONIC.
    ret<void> hint(const policy_hint &told) const {
        detail::failure f;
        const kvt_policy_hint_t c = detail::lower(told);
        const kvt_status_t status = kvt_session_hint(raw_, &c, f.out());
        return detail::check(status, f);
    }
    ret<kvt_session_info_t> info() const {
        kvt_session_info_t info = KVT_SESSION_INFO_INIT;
        const kvt_status_t status = kvt_session_info(raw_, &info);
        return detail::give(status, info);
    }

    /// Stores; info().value of the op is how many tokens without a gap.
    ret<op> put(const transfer &what, const submit_opts &opts = {}) const {
        return one(&kvt_session_put, what, opts, true);
    }
    /// Loads; the op fails with KVT_E_NOT_FOUND when something was missing.
    ret<op> get(const transfer &what, const submit_opts &opts = {}) const {
        return one(&kvt_session_get, what, opts, true);
    }
    /// Into memory, for a get to come; without views.
    ret<op> prefetch(const transfer &what, const submit_opts &opts = {}) const {
        return one(&kvt_session_prefetch, what, opts, false);
    }
    /// Finds out how far it can go on with what is here and at the remote: the op's value.
    ret<op> locate(const submit_opts &opts = {}) const {
        detail::failure f;
        const kvt_submit_opts_t c = detail::lower(opts);
        kvt_op_t *raw = nullptr;
        const kvt_status_t status = kvt_session_remote_lookup(raw_, &c, &raw, f.out());
        return detail::give(status, f, op::adopt(raw));
    }
    /// Finds out which blocks are here or at the remote; the op has an item for each, and fails
    /// with KVT_E_NOT_FOUND where some are in neither.
    ret<op> locate_blocks(const names &called, const submit_opts &opts = {}) const {
        if (!detail::fits(called)) return detail::fail<op>(kvt::error(KVT_E_INVALID));
        detail::failure f;
        const kvt_block_names_t n = detail::lower(called);
        const kvt_submit_opts_t c = detail::lower(opts);
        kvt_op_t *raw = nullptr;
        const kvt_status_t status = kvt_session_remote_lookup_blocks(raw_, &n, &c, &raw, f.out());
        return detail::give(status, f, op::adopt(raw));
    }
    /// Stores blocks that the engine names itself; the op has an item for each.
    ret<op> put_blocks(const blocks &what, const submit_opts &opts = {}) const {
        return some(&kvt_session_put_blocks, what, opts, true);
    }
    /// Loads blocks; the op fails with KVT_E_NOT_FOUND where some are missing.
    ret<op> get_blocks(const blocks &what, const submit_opts &opts = {}) const {
        return some(&kvt_session_get_blocks, what, opts, true);
    }
    /// Into memory, for a get to come; without views.
    ret<op> prefetch_blocks(const blocks &what, const submit_opts &opts = {}) const {
        return some(&kvt_session_prefetch_blocks, what, opts, false);
    }
    /// Takes blocks away that nobody holds.
    ret<kvt_clear_report_t> drop_blocks(const names &called) const {
        if (!detail::fits(called))
            return detail::fail<kvt_clear_report_t>(kvt::error(KVT_E_INVALID));
        detail::failure f;
        kvt_clear_report_t report = KVT_CLEAR_REPORT_INIT;
        const kvt_block_names_t c = detail::lower(called);
        const kvt_status_t status = kvt_session_drop_blocks(raw_, &c, &report, f.out());
        return detail::give(status, f, report);
    }
    /// Keeps those that are there from leaving as long as what comes back is kept. They may go
    /// to disk and come back; several holds of a block count each.
    ret<held_blocks> hold_blocks(const names &called) const {
        if (!detail::fits(called)) return detail::fail<held_blocks>(kvt::error(KVT_E_INVALID));
        held_blocks held(called);
        detail::failure f;
        const kvt_block_names_t c = detail::lower(called);
        const kvt_status_t status =
            kvt_session_hold_blocks(raw_, &c, held.found_.data(), f.out());
        if (status == KVT_OK) held.note(raw_, called);
        return detail::give(status, f, std::move(held));
    }
    /// Tells the policies of some blocks; times are CLOCK_MONOTONIC. Those that are not there
    /// are passed over.
    ret<void> hint_blocks(const names &called, const policy_hint &told) const {
        if (!detail::fits(called)) return detail::fail<void>(kvt::error(KVT_E_INVALID));
        detail::failure f;
        const kvt_block_names_t c = detail::lower(called);
        const kvt_policy_hint_t h = detail::lower(told);
        const kvt_status_t status = kvt_session_hint_blocks(raw_, &c, &h, f.out());
        return detail::check(status, f);
    }
    /// The same with an op for each layer, whose tags count up.
    ret<std::vector<op>> put_each(const transfer &what, const submit_opts &opts = {}) const {
        return each(&kvt_session_put, what, opts, true);
    }
    ret<std::vector<op>> get_each(const transfer &what, const submit_opts &opts = {}) const {
        return each(&kvt_session_get, what, opts, true);
    }

private:
    using call = kvt_status_t (*)(const kvt_session_t *, const kvt_transfer_t *,
                                  const kvt_submit_opts_t *, kvt_op_t **, kvt_error_t **);

    ret<op> one(call move, const transfer &what, const submit_opts &opts, bool views) const {
        if (!detail::fits(what, views)) return detail::fail<op>(kvt::error(KVT_E_INVALID));
        detail::failure f;
        const kvt_transfer_t m = detail::lower(what, 0);
        const kvt_submit_opts_t c = detail::lower(opts);
        kvt_op_t *raw = nullptr;
        const kvt_status_t status = move(raw_, &m, &c, &raw, f.out());
        return detail::give(status, f, op::adopt(raw));
    }
    using block_call = kvt_status_t (*)(const kvt_session_t *, const kvt_blocks_t *,
                                        const kvt_submit_opts_t *, kvt_op_t **, kvt_error_t **);

    ret<op> some(block_call move, const blocks &what, const submit_opts &opts, bool views) const {
        if (!detail::fits(what.called) || !detail::fits(what, views))
            return detail::fail<op>(kvt::error(KVT_E_INVALID));
        detail::failure f;
        const kvt_block_names_t called = detail::lower(what.called);
        kvt_blocks_t b = KVT_BLOCKS_INIT;
        b.names = &called;
        b.first_layer = what.first_layer;
        b.layers = what.layers != 0 ? what.layers : static_cast<std::uint32_t>(what.k.size());
        b.k = what.k.empty() ? nullptr : what.k.data();
        b.v = what.v.empty() ? nullptr : what.v.data();
        b.stride_bytes = sizeof(kvt_view_t);
        b.level = what.level;
        b.ready = what.ready != nullptr ? what.ready->get() : nullptr;
        b.after = what.after;
        const kvt_submit_opts_t c = detail::lower(opts);
        kvt_op_t *raw = nullptr;
        const kvt_status_t status = move(raw_, &b, &c, &raw, f.out());
        return detail::give(status, f, op::adopt(raw));
    }
    ret<std::vector<op>> each(call move, const transfer &what, const submit_opts &opts,
                              bool views) const {
        if (!detail::fits(what, views))
            return detail::fail<std::vector<op>>(kvt::error(KVT_E_INVALID));
        detail::failure f;
        const kvt_transfer_t m = detail::lower(what, KVT_TRANSFER_EACH_LAYER);
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
    /// How far a sequence could go on with what is there. Nothing is held.
    ret<lookup_result> lookup(span<const std::uint32_t> tokens) const {
        detail::failure f;
        lookup_result found;
        const kvt_status_t status = detail::all_rows(
            found.ranges, [&](kvt_range_t *rows, std::uint64_t capacity, std::uint64_t stride,
                              std::uint64_t *count) {
                return kvt_namespace_lookup(raw_, tokens.data(), tokens.size(), rows, capacity,
                                            stride, count, &found.sum, f.out());
            });
        return detail::give(status, f, std::move(found));
    }
    /// The same for a sequence with images and sounds.
    ret<lookup_result> lookup(span<const std::uint32_t> tokens,
                              span<const kvt_media_t> media) const {
        detail::failure f;
        lookup_result found;
        const kvt_sequence_t c = detail::lower(tokens, media);
        const kvt_status_t status = detail::all_rows(
            found.ranges, [&](kvt_range_t *rows, std::uint64_t capacity, std::uint64_t stride,
                              std::uint64_t *count) {
                return kvt_namespace_lookup_media(raw_, &c, rows, capacity, stride, count,
                                                  &found.sum, f.out());
            });
        return detail::give(status, f, std::move(found));
    }
    /// The same by the keys of its full chunks, KVT_KEY_BYTES each.
    ret<lookup_result> lookup_keys(span<const std::uint8_t> keys, std::uint64_t tokens) const {
        if (keys.size() % KVT_KEY_BYTES != 0)
            return detail::fail<lookup_result>(kvt::error(KVT_E_INVALID));
        detail::failure f;
        lookup_result found;
        const kvt_status_t status = detail::all_rows(
            found.ranges, [&](kvt_range_t *rows, std::uint64_t capacity, std::uint64_t stride,
                              std::uint64_t *count) {
                return kvt_namespace_lookup_keys(raw_, keys.data(), keys.size() / KVT_KEY_BYTES,
                                                 tokens, rows, capacity, stride, count,
                                                 &found.sum, f.out());
            });
        return detail::give(status, f, std::move(found));
    }
    /// A byte for each block: KVT_EXISTS_WHOLE, 1 << KVT_TIER_*.
    ret<std::vector<std::uint8_t>> find_blocks(const names &called) const {
        if (!detail::fits(called))
            return detail::fail<std::vector<std::uint8_t>>(kvt::error(KVT_E_INVALID));
        std::vector<std::uint8_t> found(called.count());
        detail::failure f;
        const kvt_block_names_t c = detail::lower(called);
        const kvt_status_t status = kvt_namespace_blocks_exist(raw_, &c, found.data(), f.out());
        return detail::give(status, f, std::move(found));
    }
    /// What the full chunks of a sequence are called in events: KVT_KEY_BYTES each.
    ret<std::vector<std::uint8_t>> chunk_keys(span<const std::uint32_t> tokens,
                                              span<const kvt_media_t> media = {}) const {
        const kvt_sequence_t c = detail::lower(tokens, media);
        detail::failure f;
        std::uint64_t count = 0;
        kvt_status_t status = kvt_namespace_chunk_keys(raw_, &c, nullptr, 0, &count, f.out());
        std::vector<std::uint8_t> keys(static_cast<std::size_t>(count) * KVT_KEY_BYTES);
        if (status == KVT_OK && count > 0)
            status = kvt_namespace_chunk_keys(raw_, &c, keys.data(), count, &count, f.out());
        return detail::give(status, f, std::move(keys));
    }
    /// What blocks are called in events: KVT_KEY_BYTES each.
    ret<std::vector<std::uint8_t>> block_keys(const names &called) const {
        if (!detail::fits(called))
            return detail::fail<std::vector<std::uint8_t>>(kvt::error(KVT_E_INVALID));
        std::vector<std::uint8_t> keys(called.count() * KVT_KEY_BYTES);
        detail::failure f;
        const kvt_block_names_t c = detail::lower(called);
        const kvt_status_t status = kvt_namespace_block_keys(raw_, &c, keys.data(), f.out());
        return detail::give(status, f, std::move(keys));
    }
    /// A byte for each key: KVT_EXISTS_WHOLE, 1 << KVT_TIER_*.
    ret<std::vector<std::uint8_t>> exists(span<const std::uint8_t> keys) const {
        std::vector<std::uint8_t> found(keys.size() / KVT_KEY_BYTES);
        if (keys.size() % KVT_KEY_BYTES != 0)
            return detail::fail<std::vector<std::uint8_t>>(kvt::error(KVT_E_INVALID));
        const kvt_status_t status =
            kvt_namespace_exists(raw_, keys.data(), found.size(), found.data());
        return detail::give(status, std::move(found));
    }
    /// The engine computed tokens after a context; plans go by that.
    ret<void> observe_prefill(std::uint64_t context_tokens, std::uint64_t tokens,
                              std::uint64_t ns) const {
        detail::failure f;
        const kvt_status_t status =
            kvt_namespace_observe_prefill(raw_, context_tokens, tokens, ns, f.out());
        return detail::check(status, f);
    }
    /// Fixes what computing costs; nothing = what is observed counts again.
    ret<void> fix_prefill(std::optional<plan_terms::cost> cost) const {
        kvt_prefill_cost_t c = KVT_PREFILL_COST_INIT;
        c.alpha_ns = cost ? cost->alpha_ns : 0;
        c.beta_ns = cost ? cost->beta_ns : 0;
        detail::failure f;
        const kvt_status_t status =
            kvt_namespace_set_prefill_cost(raw_, cost ? &c : nullptr, f.out());
        return detail::check(status, f);
    }
    ret<kvt_prefill_cost_t> prefill() const {
        kvt_prefill_cost_t cost = KVT_PREFILL_COST_INIT;
        const kvt_status_t status = kvt_namespace_prefill_cost(raw_, &cost);
        return detail::give(status, cost);
    }
    /// Takes away what nobody holds, and waits until it is sure to stay away.
    ret<kvt_clear_report_t> clear(deadline by = {}) const {
        detail::failure f;
        kvt_clear_report_t report = KVT_CLEAR_REPORT_INIT;
        const kvt_status_t status = kvt_namespace_clear(raw_, by.ns, &report, f.out());
        return detail::give(status, f, report);
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
        store_opts opts;
        opts.spec = spec;
        return open(on, opts, pays);
    }
    static ret<store> open(const runtime &on, const store_opts &opts,
                           const budget *pays = nullptr) {
        detail::failure f;
        kvt_store_opts_t c = KVT_STORE_OPTS_INIT;
        detail::text(opts.spec, c.spec, c.spec_bytes);
        c.host_bytes = opts.host_bytes;
        c.disk_bytes = opts.disk_bytes;
        detail::text(opts.disk_path, c.disk_path, c.disk_path_bytes);
        detail::text(opts.policy, c.policy, c.policy_bytes);
        detail::text(opts.disk_policy, c.disk_policy, c.disk_policy_bytes);
        c.write = opts.write;
        c.device = opts.device != nullptr ? opts.device->get() : nullptr;
        c.secrets = opts.secrets.data();
        c.secret_count = opts.secrets.size();
        c.secret_stride_bytes = sizeof(kvt_secret_t);
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
    /// What it counts of its remote; all 0 where it has none.
    ret<kvt_remote_stats_t> remote_stats() const {
        kvt_remote_stats_t stats = KVT_REMOTE_STATS_INIT;
        const kvt_status_t status = kvt_store_remote_stats(raw_, &stats);
        return detail::give(status, stats);
    }
    /// Goes on with another policy for KVT_TIER_HOST or KVT_TIER_DISK.
    ret<void> set_policy(std::uint32_t tier, std::string_view spec) const {
        detail::failure f;
        const kvt_status_t status =
            kvt_store_set_policy(raw_, tier, spec.data(), spec.size(), f.out());
        return detail::check(status, f);
    }
    /// Changes how many bytes a tier may have; what is too much leaves by and by.
    ret<void> set_budget(std::uint32_t tier, std::uint64_t bytes) const {
        detail::failure f;
        const kvt_status_t status = kvt_store_set_limit(raw_, tier, bytes, f.out());
        return detail::check(status, f);
    }
    /// The last evictions of a tier, the oldest of them first.
    ret<std::vector<kvt_policy_log_entry_t>> evictions(std::uint32_t tier,
                                                       std::size_t most = 256) const {
        std::vector<kvt_policy_log_entry_t> entries(most);
        std::uint64_t count = 0;
        const kvt_status_t status = kvt_store_evictions(
            raw_, tier, entries.data(), most, sizeof(kvt_policy_log_entry_t), &count);
        entries.resize(static_cast<std::size_t>(count));
        return detail::give(status, std::move(entries));
    }
    /// What each tenant has moved; the last row may be the rest.
    ret<std::vector<kvt_tenant_t>> tenants() const {
        std::vector<kvt_tenant_t> rows;
        const kvt_status_t status = detail::all_rows(
            rows, [&](kvt_tenant_t *to, std::uint64_t capacity, std::uint64_t stride,
                      std::uint64_t *count) {
                return kvt_store_tenants(raw_, to, capacity, stride, count);
            });
        return detail::give(status, std::move(rows));
    }
    /// How long things took: a row for each KVT_TIMED_*.
    ret<std::vector<kvt_latency_t>> latencies() const {
        std::vector<kvt_latency_t> rows;
        const kvt_status_t status = detail::all_rows(
            rows, [&](kvt_latency_t *to, std::uint64_t capacity, std::uint64_t stride,
                      std::uint64_t *count) {
                return kvt_store_latencies(raw_, to, capacity, stride, count);
            });
        return detail::give(status, std::move(rows));
    }
    /// What changed from a cursor on, at most so many; the cursor moves on. 0 = from the
    /// start, UINT64_MAX = what is to come.
    ret<store_events> events(std::uint64_t &cursor, std::size_t most = 256) const {
        store_events read;
        read.events.resize(most);
        std::uint64_t count = 0;
        const kvt_status_t status =
            kvt_store_events(raw_, &cursor, read.events.data(), most, sizeof(kvt_store_event_t),
                             &count, &read.missed);
        read.events.resize(static_cast<std::size_t>(count));
        return detail::give(status, std::move(read));
    }
    /// An op that ends when there is an event with a number, or a later one; its value is how many
    /// there are. UINT64_MAX = the next one to come.
    ret<op> watch(std::uint64_t from, const submit_opts &opts = {}) const {
        detail::failure f;
        const kvt_submit_opts_t c = detail::lower(opts);
        kvt_op_t *raw = nullptr;
        const kvt_status_t status = kvt_store_watch(raw_, from, &c, &raw, f.out());
        return detail::give(status, f, op::adopt(raw));
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
        id.remote_tenant = who.remote_tenant;
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
