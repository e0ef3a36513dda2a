// kvt::store, kvt::name_space, kvt::session: KV in tiers. kvtier.hpp includes this file.

#ifndef KVTIER_STORE_HPP
#define KVTIER_STORE_HPP

#ifndef KVTIER_HPP
#error "include <kvtier/kvtier.hpp>"
#endif

namespace kvt {
inline namespace KVTIER_FACE_ {

/// The part of the KV that this rank holds: `index` of `count`.
struct shard {
    std::uint32_t index = 0;
    std::uint32_t count = 1;
};

/// A field of an identity that the engine defines. Its tag is at least 0x80000000.
struct identity_extra {
    std::uint32_t tag = 0;
    std::string_view value;
};

/// Everything that KV depends on beside its tokens: sessions share KV if all fields are equal. An
/// absent field differs from an empty one.
struct identity {
    std::optional<std::string_view> model;
    /// Fingerprint of the weights.
    std::optional<std::string_view> weights;
    /// Adapters that change the KV.
    std::optional<std::string_view> lora;
    /// Digest of media that all sequences have.
    std::optional<std::string_view> media;
    /// Separates the KV of tenants.
    std::optional<std::string_view> salt;
    /// How KV is computed and encoded if that is not exact.
    std::optional<std::string_view> recipe;
    std::optional<kvt::shard> shard;
    std::vector<identity_extra> extra;
    /// Tenant in the names of objects at a remote, for access rules; 0 = no tenant. Not part of the
    /// identity.
    std::uint64_t remote_tenant = 0;
};

/// Layers with equal sizes, dtype and reuse rule.
struct layer_group {
    std::vector<std::uint16_t> layers;
    /// KVT_RULE_*.
    std::uint32_t rule = KVT_RULE_FULL;
    /// KVT_DTYPE_*.
    std::uint32_t dtype = KVT_DTYPE_BYTES;
    std::uint32_t kv_heads = 0;
    /// With KVT_RULE_WINDOW.
    std::uint32_t window_tokens = 0;
    /// Bytes of K and of V per token and layer.
    std::uint64_t k_bytes = 0;
    std::uint64_t v_bytes = 0;
    /// With KVT_RULE_STATE: bytes of a layer's state.
    std::uint64_t state_bytes = 0;
};

/// Chunk length and contents of a model's cells.
struct layout {
    /// Tokens of a chunk, the unit of sharing.
    std::uint32_t chunk_tokens = 0;
    std::vector<layer_group> groups;
};

struct session_opts {
    std::string_view name;
    /// Tenant number, for fairness and statistics.
    std::uint32_t tenant = 0;
    /// Priority class; 0 is evicted first.
    std::optional<std::uint8_t> priority;
    /// Expected maximum length in tokens, for policies; 0 = unknown.
    std::uint32_t max_tokens = 0;
};

/// A ready event: the engine signals it when the memory of a transfer may be touched. If it is
/// closed pending, transfers that wait for it end with KVT_E_CANCELLED. Any thread may use it.
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
    /// Signals the event. Never blocks; allowed in callbacks.
    ret<void> signal() const { return detail::check(kvt_ready_event_signal(raw_)); }
    ret<bool> is_signalled() const {
        std::uint32_t state = KVT_READY_EVENT_PENDING;
        const kvt_status_t status = kvt_ready_event_query(raw_, &state);
        return detail::give(status, state == KVT_READY_EVENT_SIGNALLED);
    }
};

/// A range of tokens by a range of layers of a session, and the engine's tensors for them: one view
/// per layer.
struct transfer {
    /// A multiple of chunk_tokens.
    std::uint64_t first_token = 0;
    /// 0 = to the end of the session.
    std::uint64_t tokens = 0;
    std::uint32_t first_layer = 0;
    /// 0 = as many as `k` has; without views, all from first_layer on.
    std::uint32_t layers = 0;
    span<const kvt_view_t> k{};
    /// Empty if no layer has V.
    span<const kvt_view_t> v{};
    /// Puts only: KVT_LEVEL_* at which the put completes.
    std::uint32_t level = KVT_LEVEL_RAM;
    /// Gets and prefetches: only the cells that are needed to continue after the last token.
    bool reuse = false;
    /// The transfer begins when this event is signalled; null = at once.
    const event *ready = nullptr;
    /// Event of the store's device that copies run after; 0 = none.
    std::uint64_t after = 0;
    /// Gets and prefetches: only these chunks, ascending; 0 = the chunk of `first_token`. Views
    /// have the tokens of these chunks without gaps. Absent = all chunks; an empty list is an
    /// error. Keep the numbers and the views unchanged until the call returns.
    std::optional<span<const std::uint32_t>> chunks{};
};

/// Names of blocks, one after the other: `each_bytes` bytes each, or up to `ends`.
struct names {
    span<const std::uint8_t> bytes{};
    std::uint64_t each_bytes = 0;
    /// Instead of each_bytes: the end of each name as an offset in `bytes`.
    span<const std::uint64_t> ends{};

    /// Number of names.
    std::uint64_t count() const noexcept {
        if (!ends.empty()) return ends.size();
        return each_bytes == 0 ? 0 : bytes.size() / each_bytes;
    }
};

/// Blocks that the engine names, and its tensors for them: one view per layer.
struct blocks {
    /// Names of the blocks.
    names called{};
    std::uint32_t first_layer = 0;
    /// 0 = as many as `k` has; without views, all from first_layer on.
    std::uint32_t layers = 0;
    span<const kvt_view_t> k{};
    /// Empty if no layer has V.
    span<const kvt_view_t> v{};
    /// Puts only: KVT_LEVEL_* at which the put completes.
    std::uint32_t level = KVT_LEVEL_RAM;
    /// The transfer begins when this event is signalled; null = at once.
    const event *ready = nullptr;
    /// Event of the store's device that copies run after; 0 = none.
    std::uint64_t after = 0;
};

/// How the engine will run, as input of a plan.
struct plan_terms {
    /// The engine computes while loads are in flight.
    bool overlap = true;
    /// Use KV that is still on its way into the store.
    bool wait = true;
    /// Priority of the loads.
    kvt::priority priority = kvt::priority::demand;
    /// Cost of prefill: nanoseconds per token and token of context, and nanoseconds per token.
    struct cost {
        double alpha_ns = 0;
        double beta_ns = 0;
    };
    /// Absent = the cost that the namespace observed or that was fixed.
    std::optional<cost> costs;
};

/// The steps of a plan, and their totals.
struct session_plan {
    std::vector<kvt_plan_step_t> steps;
    kvt_plan_t sum = KVT_PLAN_INIT;
};

/// Options of a store. A field that is set overrides the spec's parameter.
struct store_opts {
    std::string_view spec = "store";
    /// Limit of cells in host memory; 0 = as in the spec.
    std::uint64_t host_bytes = 0;
    /// Limit of all files; 0 = as in the spec.
    std::uint64_t disk_bytes = 0;
    /// Directory of the disk tier; empty = as in the spec.
    std::string_view disk_path;
    /// Eviction policies of HOST and of DISK; empty = as in the spec.
    std::string_view policy;
    std::string_view disk_policy;
    /// KVT_WRITE_*; 0 = as in the spec.
    std::uint32_t write = 0;
    /// Device that copies between the engine's memory and the store's; null = the processor.
    const kvt::device *device = nullptr;
    /// Credentials for the remote's server; copied.
    span<const kvt_secret_t> secrets{};
};

/// A credential of store_opts. Keep both texts valid until the store is open.
inline kvt_secret_t secret(std::string_view name, std::string_view bytes) noexcept {
    kvt_secret_t c;
    detail::text(name, c.name, c.name_bytes);
    c.secret = bytes.data();
    c.secret_bytes = bytes.size();
    return c;
}

/// The result of a lookup: ranges that cover all tokens, and their totals.
struct lookup_result {
    std::vector<kvt_range_t> ranges;
    kvt_lookup_t sum = KVT_LOOKUP_INIT;
};

/// Events of a store from a cursor on.
struct store_events {
    std::vector<kvt_store_event_t> events;
    /// Events that were lost before these.
    std::uint64_t missed = 0;
};

/// A view of tokens without gaps. Change the fields that differ.
inline kvt_view_t view(void *address, std::uint64_t run_bytes, std::uint32_t heads = 1,
                       std::uint32_t tokens = 0) noexcept {
    kvt_view_t v{};
    v.address = address;
    v.run_bytes = run_bytes;
    v.heads = heads;
    v.tokens = tokens;
    return v;
}
/// A view of tokens in pages.
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

/// Passes an optional field. An absent one becomes null, an empty one a pointer with length 0.
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
        static constexpr std::uint32_t none = 0; // null means all chunks
        c.chunks = r.chunks->empty() ? &none : r.chunks->data();
        c.chunk_count = r.chunks->size();
    }
    return c;
}

/// A sequence of tokens with the media that start in them.
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

/// Reads rows from a call that reports their number. Grows the vector until they fit.
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

/// Whether names fill their bytes exactly, or end within them.
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

/// Whether a transfer has one view per layer, which the library relies on.
template <class Transfer> bool fits(const Transfer &r, bool with_views) noexcept {
    const std::size_t layers = r.layers != 0 ? r.layers : r.k.size();
    const bool k = with_views ? r.k.size() == layers && layers != 0 : r.k.empty();
    return k && (r.v.empty() || r.v.size() == layers);
}

}  // namespace detail

/// Blocks that a session holds (session::hold_blocks). They stay in at least one tier until this
/// object is destroyed or the session is closed. It may outlive the session.
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

    /// A byte for each name of the call, as name_space::find_blocks; 0 = not held.
    const std::vector<std::uint8_t> &found() const noexcept { return found_; }
    /// Releases the blocks. A second call does nothing.
    ret<void> release() {
        detail::failure f;
        const kvt_status_t status = release_once(f.out());
        return detail::check(status, f);
    }

private:
    friend class session;
    kvt_session_t *session_ = nullptr;
    std::vector<std::uint8_t> found_;
    /// Names of the held blocks, and the end of each.
    std::vector<std::uint8_t> bytes_;
    std::vector<std::uint64_t> ends_;

    /// Allocates all memory before anything is held.
    explicit held_blocks(const names &called) {
        found_.resize(called.count());
        bytes_.reserve(called.bytes.size());
        ends_.reserve(found_.size());
    }
    /// Stores the names of the blocks that the session holds now.
    void take_over(kvt_session_t *session, const names &called) noexcept {
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
    kvt_status_t release_once(kvt_error_t **err) noexcept {
        if (session_ == nullptr) return KVT_OK;
        kvt_block_names_t c = KVT_BLOCK_NAMES_INIT;
        c.bytes = bytes_.data();
        c.ends = ends_.data();
        c.count = ends_.size();
        const kvt_status_t status = kvt_session_release_blocks(session_, &c, err);
        // A closed session holds nothing, nor does a session of a closed store.
        const bool is_closed = status == KVT_E_HANDLE || status == KVT_E_CLOSED;
        if (status != KVT_OK && !is_closed) return status;
        session_ = nullptr;
        if (is_closed && err != nullptr) (void)kvt_error_free(err);
        return KVT_OK;
    }
    void reset() noexcept {
        const kvt_status_t status = release_once(nullptr);
        if (!detail::ended(status)) detail::report("kvt::held_blocks", status);
        session_ = nullptr;
    }
};

/// A sequence of tokens in a namespace. While it is open, its chunks stay in at least one tier. Any
/// thread may use it. Ops outlive it.
class session : public detail::owner<session, kvt_session_t> {
    friend class detail::owner<session, kvt_session_t>;
    friend class name_space;
    static void drop(kvt_session_t *raw) noexcept {
        const kvt_status_t status = kvt_session_close(&raw);
        if (!detail::ended(status)) detail::report("kvt::session", status);
    }

public:
    ret<void> close() { return detail::check(kvt_session_close(&raw_)); }
    /// Appends tokens.
    ret<void> append(span<const std::uint32_t> tokens) const {
        detail::failure f;
        const kvt_status_t status =
            kvt_session_append(raw_, tokens.data(), tokens.size(), f.out());
        return detail::check(status, f);
    }
    /// Appends tokens with images and sounds, by the index of the first token of each.
    ret<void> append(span<const std::uint32_t> tokens, span<const kvt_media_t> media) const {
        detail::failure f;
        const kvt_sequence_t c = detail::lower(tokens, media);
        const kvt_status_t status = kvt_session_append_media(raw_, &c, f.out());
        return detail::check(status, f);
    }
    /// Truncates the session to its first `tokens` tokens.
    ret<void> truncate(std::uint64_t tokens) const {
        detail::failure f;
        const kvt_status_t status = kvt_session_truncate(raw_, tokens, f.out());
        return detail::check(status, f);
    }
    /// Opens another session with the tokens of this one. Both share the full chunks.
    ret<session> fork(const session_opts &opts = {}) const {
        detail::failure f;
        const kvt_session_opts_t c = detail::lower(opts);
        kvt_session_t *raw = nullptr;
        const kvt_status_t status = kvt_session_fork(raw_, &c, &raw, f.out());
        return detail::give(status, f, session::adopt(raw));
    }
    /// Pins chunks until a time; tokens 0 = to the end, no time = without end. Pins of low priority
    /// are given up first.
    ret<void> pin(std::uint64_t first_token, std::uint64_t tokens, std::uint8_t priority = 0,
                  deadline until = {}) const {
        detail::failure f;
        const kvt_status_t status =
            kvt_session_pin(raw_, first_token, tokens, priority, until.ns, f.out());
        return detail::check(status, f);
    }
    /// Removes the pins of chunks, whichever session set them.
    ret<void> unpin(std::uint64_t first_token = 0, std::uint64_t tokens = 0) const {
        detail::failure f;
        const kvt_status_t status = kvt_session_unpin(raw_, first_token, tokens, f.out());
        return detail::check(status, f);
    }
    /// Removes chunks from all tiers, unless something else references them.
    ret<kvt_clear_report_t> drop_chunks(std::uint64_t first_token = 0,
                                        std::uint64_t tokens = 0) const {
        detail::failure f;
        kvt_clear_report_t report = KVT_CLEAR_REPORT_INIT;
        const kvt_status_t status =
            kvt_session_drop(raw_, first_token, tokens, &report, f.out());
        return detail::give(status, f, report);
    }
    /// Demotes chunks: their memory is freed once they are on disk.
    ret<kvt_demote_report_t> demote(std::uint64_t first_token = 0,
                                    std::uint64_t tokens = 0) const {
        detail::failure f;
        kvt_demote_report_t report = KVT_DEMOTE_REPORT_INIT;
        const kvt_status_t status =
            kvt_session_demote(raw_, first_token, tokens, &report, f.out());
        return detail::give(status, f, report);
    }
    /// Computes the cheapest way to get the KV of all tokens: what to load, what to compute.
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
            plan.steps, [&](kvt_plan_step_t *rows, std::uint64_t capacity, std::uint64_t stride,
                            std::uint64_t *count) {
                return kvt_session_plan(raw_, &c, rows, capacity, stride, count, &plan.sum,
                                        f.out());
            });
        return detail::give(status, f, std::move(plan));
    }
    /// Passes a hint about the future of the session to the policies. Times are CLOCK_MONOTONIC.
    ret<void> hint(const policy_hint &given) const {
        detail::failure f;
        const kvt_policy_hint_t c = detail::lower(given);
        const kvt_status_t status = kvt_session_hint(raw_, &c, f.out());
        return detail::check(status, f);
    }
    ret<kvt_session_info_t> info() const {
        kvt_session_info_t info = KVT_SESSION_INFO_INIT;
        const kvt_status_t status = kvt_session_info(raw_, &info);
        return detail::give(status, info);
    }

    /// Submits a put. The op's value is the number of tokens, from the first on, that were stored
    /// without a gap.
    ret<op> put(const transfer &what, const submit_opts &opts = {}) const {
        return submit(&kvt_session_put, what, opts, true);
    }
    /// Submits a get. The op fails with KVT_E_NOT_FOUND if cells are missing; the others arrive.
    ret<op> get(const transfer &what, const submit_opts &opts = {}) const {
        return submit(&kvt_session_get, what, opts, true);
    }
    /// Submits a prefetch into host memory, for a later get; without views.
    ret<op> prefetch(const transfer &what, const submit_opts &opts = {}) const {
        return submit(&kvt_session_prefetch, what, opts, false);
    }
    /// Starts a remote lookup of the session's chunks. The op's value is the number of tokens, from
    /// the first on, that can be reused from this store and its remote.
    ret<op> locate(const submit_opts &opts = {}) const {
        detail::failure f;
        const kvt_submit_opts_t c = detail::lower(opts);
        kvt_op_t *raw = nullptr;
        const kvt_status_t status = kvt_session_remote_lookup(raw_, &c, &raw, f.out());
        return detail::give(status, f, op::adopt(raw));
    }
    /// Starts a lookup of blocks in this store and its remote. The op has an item for each block,
    /// and fails with KVT_E_NOT_FOUND if some are in neither.
    ret<op> locate_blocks(const names &called, const submit_opts &opts = {}) const {
        if (!detail::fits(called)) return detail::fail<op>(kvt::error(KVT_E_INVALID));
        detail::failure f;
        const kvt_block_names_t n = detail::lower(called);
        const kvt_submit_opts_t c = detail::lower(opts);
        kvt_op_t *raw = nullptr;
        const kvt_status_t status = kvt_session_remote_lookup_blocks(raw_, &n, &c, &raw, f.out());
        return detail::give(status, f, op::adopt(raw));
    }
    /// Submits a put of blocks that the engine names. The op has an item for each block.
    ret<op> put_blocks(const blocks &what, const submit_opts &opts = {}) const {
        return submit_blocks(&kvt_session_put_blocks, what, opts, true);
    }
    /// Submits a get of blocks. The op fails with KVT_E_NOT_FOUND if blocks are missing.
    ret<op> get_blocks(const blocks &what, const submit_opts &opts = {}) const {
        return submit_blocks(&kvt_session_get_blocks, what, opts, true);
    }
    /// Submits a prefetch of blocks into host memory, for a later get; without views.
    ret<op> prefetch_blocks(const blocks &what, const submit_opts &opts = {}) const {
        return submit_blocks(&kvt_session_prefetch_blocks, what, opts, false);
    }
    /// Removes blocks from all tiers, unless transfers or sessions reference them.
    ret<kvt_clear_report_t> drop_blocks(const names &called) const {
        if (!detail::fits(called))
            return detail::fail<kvt_clear_report_t>(kvt::error(KVT_E_INVALID));
        detail::failure f;
        kvt_clear_report_t report = KVT_CLEAR_REPORT_INIT;
        const kvt_block_names_t c = detail::lower(called);
        const kvt_status_t status = kvt_session_drop_blocks(raw_, &c, &report, f.out());
        return detail::give(status, f, report);
    }
    /// References the blocks that are stored: they stay in at least one tier until the result is
    /// released. They may be demoted to disk. Holds are counted.
    ret<held_blocks> hold_blocks(const names &called) const {
        if (!detail::fits(called)) return detail::fail<held_blocks>(kvt::error(KVT_E_INVALID));
        held_blocks held(called);
        detail::failure f;
        const kvt_block_names_t c = detail::lower(called);
        const kvt_status_t status =
            kvt_session_hold_blocks(raw_, &c, held.found_.data(), f.out());
        if (status == KVT_OK) held.take_over(raw_, called);
        return detail::give(status, f, std::move(held));
    }
    /// Passes a hint about the future of blocks to the policies. Times are CLOCK_MONOTONIC. Names
    /// without a block are skipped.
    ret<void> hint_blocks(const names &called, const policy_hint &given) const {
        if (!detail::fits(called)) return detail::fail<void>(kvt::error(KVT_E_INVALID));
        detail::failure f;
        const kvt_block_names_t c = detail::lower(called);
        const kvt_policy_hint_t h = detail::lower(given);
        const kvt_status_t status = kvt_session_hint_blocks(raw_, &c, &h, f.out());
        return detail::check(status, f);
    }
    /// Submits a put with one op per layer. The tag of the i-th layer is the given tag plus i.
    ret<std::vector<op>> put_each(const transfer &what, const submit_opts &opts = {}) const {
        return submit_each(&kvt_session_put, what, opts);
    }
    /// Submits a get with one op per layer.
    ret<std::vector<op>> get_each(const transfer &what, const submit_opts &opts = {}) const {
        return submit_each(&kvt_session_get, what, opts);
    }

private:
    using transfer_fn = kvt_status_t (*)(const kvt_session_t *, const kvt_transfer_t *,
                                         const kvt_submit_opts_t *, kvt_op_t **, kvt_error_t **);
    using blocks_fn = kvt_status_t (*)(const kvt_session_t *, const kvt_blocks_t *,
                                       const kvt_submit_opts_t *, kvt_op_t **, kvt_error_t **);

    ret<op> submit(transfer_fn call, const transfer &what, const submit_opts &opts,
                   bool views) const {
        if (!detail::fits(what, views)) return detail::fail<op>(kvt::error(KVT_E_INVALID));
        detail::failure f;
        const kvt_transfer_t m = detail::lower(what, 0);
        const kvt_submit_opts_t c = detail::lower(opts);
        kvt_op_t *raw = nullptr;
        const kvt_status_t status = call(raw_, &m, &c, &raw, f.out());
        return detail::give(status, f, op::adopt(raw));
    }
    ret<op> submit_blocks(blocks_fn call, const blocks &what, const submit_opts &opts,
                          bool views) const {
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
        const kvt_status_t status = call(raw_, &b, &c, &raw, f.out());
        return detail::give(status, f, op::adopt(raw));
    }
    ret<std::vector<op>> submit_each(transfer_fn call, const transfer &what,
                                     const submit_opts &opts) const {
        if (!detail::fits(what, true))
            return detail::fail<std::vector<op>>(kvt::error(KVT_E_INVALID));
        detail::failure f;
        const kvt_transfer_t m = detail::lower(what, KVT_TRANSFER_EACH_LAYER);
        const kvt_submit_opts_t c = detail::lower(opts);
        std::vector<kvt_op_t *> raw(m.layers, nullptr);
        std::vector<op> ops;
        ops.reserve(m.layers); // nothing may throw once the transfers are submitted
        const kvt_status_t status = call(raw_, &m, &c, raw.data(), f.out());
        for (kvt_op_t *r : raw)
            if (r != nullptr) ops.push_back(op::adopt(r));
        return detail::give(status, f, std::move(ops));
    }
};

/// A namespace of a store: its sessions share the KV of common prefixes. Any thread may use it.
/// Sessions outlive it.
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
    /// The key of the namespace: the hash of its identity and layout.
    ret<key_bytes> key() const {
        key_bytes key(KVT_KEY_BYTES);
        const kvt_status_t status = kvt_namespace_key(raw_, key.data());
        return detail::give(status, std::move(key));
    }
    /// Opens a session without tokens.
    ret<session> open_session(const session_opts &opts = {}) const {
        detail::failure f;
        const kvt_session_opts_t c = detail::lower(opts);
        kvt_session_t *raw = nullptr;
        const kvt_status_t status = kvt_session_open(raw_, &c, &raw, f.out());
        return detail::give(status, f, session::adopt(raw));
    }
    /// Looks up how much of a sequence is reusable. Counts no use and references nothing.
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
    /// Looks up a sequence with images and sounds.
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
    /// Looks up a sequence of `tokens` tokens by the keys of its full chunks, KVT_KEY_BYTES each.
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
    /// The residency of blocks, a byte for each block: KVT_EXISTS_WHOLE, 1 << KVT_TIER_*.
    ret<std::vector<std::uint8_t>> find_blocks(const names &called) const {
        if (!detail::fits(called))
            return detail::fail<std::vector<std::uint8_t>>(kvt::error(KVT_E_INVALID));
        std::vector<std::uint8_t> found(called.count());
        detail::failure f;
        const kvt_block_names_t c = detail::lower(called);
        const kvt_status_t status = kvt_namespace_blocks_exist(raw_, &c, found.data(), f.out());
        return detail::give(status, f, std::move(found));
    }
    /// The keys of the full chunks of a sequence, as events have them: KVT_KEY_BYTES each.
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
    /// The keys of blocks, as events have them: KVT_KEY_BYTES each.
    ret<std::vector<std::uint8_t>> block_keys(const names &called) const {
        if (!detail::fits(called))
            return detail::fail<std::vector<std::uint8_t>>(kvt::error(KVT_E_INVALID));
        std::vector<std::uint8_t> keys(called.count() * KVT_KEY_BYTES);
        detail::failure f;
        const kvt_block_names_t c = detail::lower(called);
        const kvt_status_t status = kvt_namespace_block_keys(raw_, &c, keys.data(), f.out());
        return detail::give(status, f, std::move(keys));
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
    /// Records that the engine computed `tokens` tokens after a context in `ns`. Plans use the cost
    /// that these observations give.
    ret<void> observe_prefill(std::uint64_t context_tokens, std::uint64_t tokens,
                              std::uint64_t ns) const {
        detail::failure f;
        const kvt_status_t status =
            kvt_namespace_observe_prefill(raw_, context_tokens, tokens, ns, f.out());
        return detail::check(status, f);
    }
    /// Fixes the cost of prefill; absent = observe it again.
    ret<void> fix_prefill(std::optional<plan_terms::cost> cost) const {
        kvt_prefill_cost_t c = KVT_PREFILL_COST_INIT;
        c.alpha_ns = cost ? cost->alpha_ns : 0;
        c.beta_ns = cost ? cost->beta_ns : 0;
        detail::failure f;
        const kvt_status_t status =
            kvt_namespace_set_prefill_cost(raw_, cost ? &c : nullptr, f.out());
        return detail::check(status, f);
    }
    /// The cost of prefill that plans use.
    ret<kvt_prefill_cost_t> prefill() const {
        kvt_prefill_cost_t cost = KVT_PREFILL_COST_INIT;
        const kvt_status_t status = kvt_namespace_prefill_cost(raw_, &cost);
        return detail::give(status, cost);
    }
    /// Removes all chunks that nothing references, and waits until no opening of the store finds
    /// them again.
    ret<kvt_clear_report_t> clear(deadline by = {}) const {
        detail::failure f;
        kvt_clear_report_t report = KVT_CLEAR_REPORT_INIT;
        const kvt_status_t status = kvt_namespace_clear(raw_, by.ns, &report, f.out());
        return detail::give(status, f, report);
    }
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
    /// Opens a store by its spec. `budget` is charged for its memory; null = a private budget.
    static ret<store> open(const runtime &on, std::string_view spec = "store",
                           const kvt::budget *budget = nullptr) {
        store_opts opts;
        opts.spec = spec;
        return open(on, opts, budget);
    }
    static ret<store> open(const runtime &on, const store_opts &opts,
                           const kvt::budget *budget = nullptr) {
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
            kvt_store_open(on.get(), budget != nullptr ? budget->get() : nullptr, &c, &raw,
                           f.out());
        return detail::give(status, f, store::adopt(raw));
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
    ret<void> set_policy(std::uint32_t tier, std::string_view spec) const {
        detail::failure f;
        const kvt_status_t status =
            kvt_store_set_policy(raw_, tier, spec.data(), spec.size(), f.out());
        return detail::check(status, f);
    }
    /// Changes the limit of a tier. Chunks above a lower limit are evicted in the background.
    ret<void> set_budget(std::uint32_t tier, std::uint64_t bytes) const {
        detail::failure f;
        const kvt_status_t status = kvt_store_set_limit(raw_, tier, bytes, f.out());
        return detail::check(status, f);
    }
    /// The last evictions of a tier, at most `max_entries`, the oldest first.
    ret<std::vector<kvt_policy_log_entry_t>> evictions(std::uint32_t tier,
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
        const kvt_status_t status = detail::all_rows(
            rows, [&](kvt_tenant_t *to, std::uint64_t capacity, std::uint64_t stride,
                      std::uint64_t *count) {
                return kvt_store_tenants(raw_, to, capacity, stride, count);
            });
        return detail::give(status, std::move(rows));
    }
    /// Latency histograms: a row for each KVT_LATENCY_*.
    ret<std::vector<kvt_latency_t>> latencies() const {
        std::vector<kvt_latency_t> rows;
        const kvt_status_t status = detail::all_rows(
            rows, [&](kvt_latency_t *to, std::uint64_t capacity, std::uint64_t stride,
                      std::uint64_t *count) {
                return kvt_store_latencies(raw_, to, capacity, stride, count);
            });
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
    /// Submits an op that completes when the event `from` or a later one exists. Its value is the
    /// number of events from `from` on. UINT64_MAX = the next event.
    ret<op> watch(std::uint64_t from, const submit_opts &opts = {}) const {
        detail::failure f;
        const kvt_submit_opts_t c = detail::lower(opts);
        kvt_op_t *raw = nullptr;
        const kvt_status_t status = kvt_store_watch(raw_, from, &c, &raw, f.out());
        return detail::give(status, f, op::adopt(raw));
    }
    /// The statistics of the store as Prometheus text.
    ret<std::string> metrics() const {
        std::string text;
        std::uint64_t bytes = 0;
        kvt_status_t status = kvt_store_metrics(raw_, nullptr, 0, &bytes);
        while (status == KVT_OK) {
            text.resize(static_cast<std::size_t>(bytes) + 256); // it may grow between calls
            status = kvt_store_metrics(raw_, &text[0], text.size(), &bytes);
            if (status != KVT_E_TOO_SMALL) break;
            status = KVT_OK;
        }
        if (status == KVT_OK) text.resize(static_cast<std::size_t>(bytes));
        return detail::give(status, std::move(text));
    }
    /// Opens a namespace. Equal identities and layouts give the same namespace. `flags` are
    /// KVT_NAMESPACE_*.
    ret<name_space> open_name_space(const kvt::identity &identity, const kvt::layout &layout,
                                    std::uint64_t flags = 0) const {
        std::vector<kvt_identity_extra_t> extra(identity.extra.size());
        for (std::size_t i = 0; i < extra.size(); i++) {
            extra[i] = kvt_identity_extra_t{};
            extra[i].tag = identity.extra[i].tag;
            extra[i].value = identity.extra[i].value.data();
            extra[i].value_bytes = identity.extra[i].value.size();
        }
        kvt_identity_t id = KVT_IDENTITY_INIT;
        detail::field(identity.model, id.model, id.model_bytes);
        detail::field(identity.weights, id.weights, id.weights_bytes);
        detail::field(identity.lora, id.lora, id.lora_bytes);
        detail::field(identity.media, id.media, id.media_bytes);
        detail::field(identity.salt, id.salt, id.salt_bytes);
        detail::field(identity.recipe, id.recipe, id.recipe_bytes);
        if (identity.shard) {
            id.shard_index = identity.shard->index;
            id.shard_count = identity.shard->count;
        }
        id.extra = extra.data();
        id.extra_count = extra.size();
        id.extra_stride_bytes = sizeof(kvt_identity_extra_t);
        id.remote_tenant = identity.remote_tenant;
        std::vector<kvt_group_t> groups(layout.groups.size());
        for (std::size_t i = 0; i < groups.size(); i++) {
            const layer_group &from = layout.groups[i];
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
        kvt_layout_t c = KVT_LAYOUT_INIT;
        c.chunk_tokens = layout.chunk_tokens;
        c.groups = groups.data();
        c.group_count = groups.size();
        c.stride_bytes = sizeof(kvt_group_t);
        detail::failure f;
        kvt_namespace_t *raw = nullptr;
        const kvt_status_t status =
            kvt_namespace_open(raw_, &id, &c, flags, &raw, f.out());
        return detail::give(status, f, name_space::adopt(raw));
    }
};

}  // namespace KVTIER_FACE_
}  // namespace kvt

#endif  // KVTIER_STORE_HPP
