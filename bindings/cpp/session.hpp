/// @file
/// kvt::session, kvt::transfer, plans, named blocks, ready events.
///
/// A session is a sequence of tokens in a namespace. Its tokens name its KV, so a session that is
/// opened with tokens which another one stored finds their KV. While it is open it references its
/// chunks: they stay in some tier.
///
/// Life cycle: namespace_::open_session, append, plan, then get for what is stored and put for what the
/// engine computed. Transfers that were submitted continue after the session is closed.
///
///     const kvt::session session = ns.open_session();
///     session.append(tokens);
///     const kvt::session_plan plan = session.plan();
///     for (const kvt_plan_step_t &step : plan.steps) { // load, or compute and put
///         kvt::transfer part;
///         part.first_token = step.first_token;
///         part.tokens = step.tokens;
///         part.k = k_views;
///         part.v = v_views;
///         part.needed_only = step.kind == KVT_PLAN_LOAD;
///         if (step.kind == KVT_PLAN_LOAD) session.get_wait(part);
///         if (step.kind != KVT_PLAN_RECOMPUTE) continue;
///         compute_next_layer();
///         session.put_wait(part);
///     }

#ifndef KVTIER_SESSION_HPP
#define KVTIER_SESSION_HPP

#include <kvtier/session.h>
#include <kvtier/store.hpp>

namespace kvt {
inline namespace KVTIER_ERRORS_ {

// --- transfers, plans --------------------------------------------------------

// [kvt_session_opts_t: by generate.py]
/// Options of a session.
struct session_opts {
    /// At most 256 bytes; empty = no name.
    std::string_view name{};
    /// Tenant number, for fairness and statistics.
    std::uint32_t tenant = 0;
    /// Priority class, 0 to 255; 0 is evicted first. Absent = the default.
    std::optional<std::uint32_t> priority{};
    /// Expected maximum length in tokens, for policies; not enforced; 0 = unknown.
    std::uint32_t max_tokens = 0;
    /// Time to live of chunks that the session stores first, in nanoseconds; 0 = no end. Each put
    /// or get of them by a session with a TTL starts the time again, but never shortens it; a put
    /// without a TTL removes the end. At its end a chunk is removed from all tiers, once nothing
    /// references, pins or continues it. Ends are not stored: a chunk that is on disk when the
    /// store is opened has none.
    std::chrono::nanoseconds ttl{0};

    kvt_session_opts_t to_c() const noexcept {
        kvt_session_opts_t c = KVT_SESSION_OPTS_INIT;
        detail::text(name, c.name, c.name_bytes);
        c.tenant = tenant;
        if (priority) c.flags |= KVT_SESSION_PRIORITY;
        c.priority = priority.value_or(0);
        c.max_tokens = max_tokens;
        c.ttl_ns = detail::count(ttl);
        return c;
    }
};
// [end]

/// A ready event: the engine signals it when the memory of a transfer may be touched. If it is
/// closed pending, transfers that wait for it end with KVT_E_CANCELLED. Any thread may use it.
class ready_event : public detail::owner<ready_event, kvt_ready_event_t> {
    friend class detail::owner<ready_event, kvt_ready_event_t>;
    static void drop(kvt_ready_event_t *raw) noexcept {
        const kvt_status_t status = kvt_ready_event_close(&raw);
        if (!detail::ended(status)) detail::report("kvt::ready_event", status);
    }

public:
    static ret<ready_event> open() {
        detail::failure f;
        kvt_ready_event_t *raw = nullptr;
        const kvt_status_t status = kvt_ready_event_open(0, &raw, f.out());
        return detail::give(status, f, ready_event::adopt(raw));
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

// [kvt_transfer_t: by generate.py]
/// A range of tokens by a range of layers of a session, and the engine's tensors for them.
struct transfer {
    /// Gets and prefetches: only the cells that are needed to continue after the last token. Layers
    /// with a window need the chunks of the window's last tokens, layers with a state the last
    /// chunk. Their other cells are not touched and are no misses. A load step of a plan is got
    /// like this. Views describe all tokens of the transfer.
    bool needed_only = false;
    /// A multiple of chunk_tokens.
    std::uint64_t first_token = 0;
    /// Up to a multiple of chunk_tokens or the end of the session. 0 = to the end at submission;
    /// views must then state their tokens.
    std::uint64_t tokens = 0;
    std::uint32_t first_layer = 0;
    /// 0 = as many as `k` has; without views, all from first_layer on.
    std::uint32_t layers = 0;
    /// One view per layer of K, the latent or the states; empty for a prefetch.
    span<const kvt_view_t> k{};
    /// One view per layer of V, all zero for a layer without V; empty if no layer has V.
    span<const kvt_view_t> v{};
    /// Puts only. KVT_LEVEL_*.
    kvt_level_t level = KVT_LEVEL_RAM;
    /// The transfer begins when this event is signalled: sources are complete then, targets unused.
    /// Null = at once. At most 65536 transfers wait for one event. The handle may be closed after
    /// the signal. To read from disk in the meantime, submit a prefetch first.
    ref<kvt_ready_event_t> ready{};
    /// Gets and prefetches: only these chunks, for example those that a sparse policy selects.
    /// Ascending; 0 = the chunk of first_token. Views have the tokens of these chunks without gaps.
    /// At most 2^22; absent = all, and an empty list is an error.
    std::optional<span<const std::uint32_t>> chunks{};
    /// Event of the store's device (kvt_device_copy, kvt_device_launch, kvt_device_import_event,
    /// kvt_device_create_event); 0 = none. Not for prefetches. Copies between tensors and store run
    /// after it, on the device; no thread waits. Reads from disk do not wait for it. The caller
    /// keeps the event, may use it for several transfers, and releases it after the last of their
    /// ops. If it fails, or is released before the library saw it complete, the transfer fails with
    /// that status, and tensors of cells that were not copied are unchanged. With `ready`, the
    /// transfer waits for both.
    std::uint64_t after = 0;

    kvt_transfer_t to_c() const noexcept {
        kvt_transfer_t c = KVT_TRANSFER_INIT;
        if (needed_only) c.flags |= KVT_TRANSFER_NEEDED_ONLY;
        c.first_token = first_token;
        c.tokens = tokens;
        c.first_layer = first_layer;
        c.layers = layers != 0 ? layers : static_cast<std::uint32_t>(k.size());
        c.k = k.empty() ? nullptr : k.data();
        c.stride_bytes = sizeof(kvt_view_t);
        c.v = v.empty() ? nullptr : v.data();
        c.level = level;
        c.ready = ready.get();
        detail::list(chunks, c.chunks, c.chunk_count);
        c.after = after;
        return c;
    }
};
// [end]

// [kvt_plan_terms_t: by generate.py]
/// How the engine will run, as input of a plan.
struct plan_terms {
    /// Loads and computation run one after the other, not at the same time.
    bool no_overlap = false;
    /// Ignore KV that is still on its way into the store.
    bool no_wait = false;
    /// Cost of prefill; absent = the cost that the namespace observed, or that was set.
    std::optional<prefill_cost> costs{};
    /// Of the loads. KVT_PRIORITY_DEMAND, KVT_PRIORITY_PREFETCH, KVT_PRIORITY_BACKGROUND.
    kvt_priority_t priority = KVT_PRIORITY_DEMAND;

    kvt_plan_terms_t to_c() const noexcept {
        kvt_plan_terms_t c = KVT_PLAN_TERMS_INIT;
        if (no_overlap) c.flags |= KVT_PLAN_NO_OVERLAP;
        if (no_wait) c.flags |= KVT_PLAN_NO_WAIT;
        if (costs) {
            c.flags |= KVT_PLAN_COST;
            c.alpha_ns = costs->alpha_ns;
            c.beta_ns = costs->beta_ns;
        }
        c.priority = priority;
        return c;
    }
};
// [end]

/// The steps of a plan, and their totals.
struct session_plan {
    std::vector<kvt_plan_step_t> steps;
    kvt_plan_t totals = KVT_PLAN_INIT;
};

// --- named blocks ------------------------------------------------------------

/// Names of blocks, one after the other: `each_bytes` bytes each, or up to `ends`.
struct block_names {
    span<const std::uint8_t> bytes{};
    /// 1 to 65536; 0 if `ends` is set.
    std::uint64_t each_bytes = 0;
    /// The end of each name as an offset in `bytes`, ascending; empty = all have each_bytes bytes.
    span<const std::uint64_t> ends{};

    /// Number of names.
    std::uint64_t count() const noexcept {
        if (!ends.empty()) return ends.size();
        return each_bytes == 0 ? 0 : bytes.size() / each_bytes;
    }
    /// Whether the names fill their bytes exactly, or end within them.
    bool fits() const noexcept {
        if (ends.empty()) return bytes.size() == count() * each_bytes;
        return each_bytes == 0 && ends[ends.size() - 1] <= bytes.size();
    }
    kvt_block_names_t to_c() const noexcept {
        kvt_block_names_t c = KVT_BLOCK_NAMES_INIT;
        c.bytes = bytes.data();
        c.ends = ends.empty() ? nullptr : ends.data();
        c.each_bytes = each_bytes;
        c.count = count();
        return c;
    }
};

// [kvt_blocks_t: by generate.py]
/// Blocks to transfer, and the engine's tensors for them.
struct blocks {
    /// 1 to 65536 names.
    kvt::block_names names{};
    std::uint32_t first_layer = 0;
    /// 0 = as many as `k` has; without views, all from first_layer on.
    std::uint32_t layers = 0;
    /// One view per layer of K, the latent or the states: the tokens of all blocks, in the order of
    /// their names. Pages of chunk_tokens tokens give each block an address of its own. Empty for a
    /// prefetch.
    span<const kvt_view_t> k{};
    /// As in transfer; so are the next members.
    span<const kvt_view_t> v{};
    /// KVT_LEVEL_*.
    kvt_level_t level = KVT_LEVEL_RAM;
    ref<kvt_ready_event_t> ready{};
    std::uint64_t after = 0;

    kvt_blocks_t to_c(kvt_block_names_t &names_c) const noexcept {
        kvt_blocks_t c = KVT_BLOCKS_INIT;
        names_c = names.to_c();
        c.names = &names_c;
        c.first_layer = first_layer;
        c.layers = layers != 0 ? layers : static_cast<std::uint32_t>(k.size());
        c.k = k.empty() ? nullptr : k.data();
        c.stride_bytes = sizeof(kvt_view_t);
        c.v = v.empty() ? nullptr : v.data();
        c.level = level;
        c.ready = ready.get();
        c.after = after;
        return c;
    }
};
// [end]

namespace detail {
/// A sequence of tokens with the media that start in them.
inline kvt_sequence_t sequence(span<const std::uint32_t> tokens,
                               span<const kvt_media_t> media) noexcept {
    kvt_sequence_t c = KVT_SEQUENCE_INIT;
    c.tokens = tokens.data();
    c.token_count = tokens.size();
    list(media, c.media, c.media_count);
    c.media_stride_bytes = sizeof(kvt_media_t);
    return c;
}

/// Whether a transfer has one view per layer, which the library relies on.
template <class Transfer> bool fits(const Transfer &r, bool with_views) noexcept {
    const std::size_t layers = r.layers != 0 ? r.layers : r.k.size();
    const bool k = with_views ? r.k.size() == layers && layers != 0 : r.k.empty();
    return k && (r.v.empty() || r.v.size() == layers);
}
}  // namespace detail

// --- sessions ----------------------------------------------------------------

/// Blocks that a session holds (session::hold_blocks). They stay in at least one tier until this
/// object is destroyed or the session is closed. It may outlive the session.
class block_references {
public:
    block_references() noexcept = default;
    block_references(block_references &&other) noexcept
        : session_(std::exchange(other.session_, nullptr)), found_(std::move(other.found_)),
          bytes_(std::move(other.bytes_)), ends_(std::move(other.ends_)) {}
    block_references &operator=(block_references &&other) noexcept {
        if (this != &other) {
            reset();
            session_ = std::exchange(other.session_, nullptr);
            found_ = std::move(other.found_);
            bytes_ = std::move(other.bytes_);
            ends_ = std::move(other.ends_);
        }
        return *this;
    }
    block_references(const block_references &) = delete;
    block_references &operator=(const block_references &) = delete;
    ~block_references() { reset(); }

    /// A byte for each name of the call, as namespace_::blocks_exist; 0 = not held.
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
    explicit block_references(const block_names &names) {
        found_.resize(names.count());
        bytes_.reserve(names.bytes.size());
        ends_.reserve(found_.size());
    }
    /// Stores the names of the blocks that the session holds now.
    void take_over(kvt_session_t *session, const block_names &names) noexcept {
        std::uint64_t from = 0;
        for (std::size_t i = 0; i < found_.size(); i++) {
            const std::uint64_t to =
                names.ends.empty() ? from + names.each_bytes : names.ends[i];
            if (found_[i] != 0) {
                bytes_.insert(bytes_.end(), names.bytes.data() + from, names.bytes.data() + to);
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
        if (!detail::ended(status)) detail::report("kvt::block_references", status);
        session_ = nullptr;
    }
};

/// A sequence of tokens in a namespace. While it is open, its chunks stay in at least one tier. Any
/// thread may use it. Ops outlive it.
class session : public detail::owner<session, kvt_session_t> {
    friend class detail::owner<session, kvt_session_t>;
    static void drop(kvt_session_t *raw) noexcept {
        const kvt_status_t status = kvt_session_close(&raw);
        if (!detail::ended(status)) detail::report("kvt::session", status);
    }

public:
    using detail::owner<session, kvt_session_t>::get;

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
        const kvt_sequence_t c = detail::sequence(tokens, media);
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
        const kvt_session_opts_t c = opts.to_c();
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
        const kvt_plan_terms_t c = terms.to_c();
        detail::failure f;
        session_plan plan;
        const auto read = [&](auto... to) {
            return kvt_session_plan(raw_, &c, to..., &plan.totals, f.out());
        };
        const kvt_status_t status = detail::all_rows(plan.steps, read);
        return detail::give(status, f, std::move(plan));
    }
    /// Passes a hint about the future of the session to the policies. Times are CLOCK_MONOTONIC.
    ret<void> hint(const policy_hint &given) const {
        detail::failure f;
        const kvt_policy_hint_t c = given.to_c();
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
    /// Puts and waits until the tensors are free. Fails with the status of the op.
    ret<void> put_wait(const transfer &what, const submit_opts &opts = {}) const {
        return wait(&kvt_session_put_wait, what, opts);
    }
    /// Gets and waits until the tensors are free. Fails with KVT_E_NOT_FOUND if cells are missing;
    /// the others have arrived.
    ret<void> get_wait(const transfer &what, const submit_opts &opts = {}) const {
        return wait(&kvt_session_get_wait, what, opts);
    }
    /// Submits a prefetch into host memory, for a later get; without views.
    ret<op> prefetch(const transfer &what, const submit_opts &opts = {}) const {
        return submit(&kvt_session_prefetch, what, opts, false);
    }
    /// Starts a remote lookup of the session's chunks. The op's value is the number of tokens, from
    /// the first on, that can be reused from this store and its remote.
    ret<op> remote_lookup(const submit_opts &opts = {}) const {
        detail::failure f;
        const kvt_submit_opts_t c = opts.to_c();
        kvt_op_t *raw = nullptr;
        const kvt_status_t status = kvt_session_remote_lookup(raw_, &c, &raw, f.out());
        return detail::give(status, f, op::adopt(raw));
    }
    /// Starts a lookup of blocks in this store and its remote. The op has an item for each block,
    /// and fails with KVT_E_NOT_FOUND if some are in neither.
    ret<op> remote_lookup_blocks(const block_names &names, const submit_opts &opts = {}) const {
        if (!names.fits()) return detail::fail<op>(kvt::error(KVT_E_INVALID));
        detail::failure f;
        const kvt_block_names_t n = names.to_c();
        const kvt_submit_opts_t c = opts.to_c();
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
    ret<kvt_clear_report_t> drop_blocks(const block_names &names) const {
        if (!names.fits())
            return detail::fail<kvt_clear_report_t>(kvt::error(KVT_E_INVALID));
        detail::failure f;
        kvt_clear_report_t report = KVT_CLEAR_REPORT_INIT;
        const kvt_block_names_t c = names.to_c();
        const kvt_status_t status = kvt_session_drop_blocks(raw_, &c, &report, f.out());
        return detail::give(status, f, report);
    }
    /// References the blocks that are stored: they stay in at least one tier until the result is
    /// released. They may be demoted to disk. Holds are counted.
    ret<block_references> hold_blocks(const block_names &names) const {
        if (!names.fits()) return detail::fail<block_references>(kvt::error(KVT_E_INVALID));
        block_references held(names);
        detail::failure f;
        const kvt_block_names_t c = names.to_c();
        const kvt_status_t status =
            kvt_session_hold_blocks(raw_, &c, held.found_.data(), f.out());
        if (status == KVT_OK) held.take_over(raw_, names);
        return detail::give(status, f, std::move(held));
    }
    /// Passes a hint about the future of blocks to the policies. Times are CLOCK_MONOTONIC. Names
    /// without a block are skipped.
    ret<void> hint_blocks(const block_names &names, const policy_hint &given) const {
        if (!names.fits()) return detail::fail<void>(kvt::error(KVT_E_INVALID));
        detail::failure f;
        const kvt_block_names_t c = names.to_c();
        const kvt_policy_hint_t h = given.to_c();
        const kvt_status_t status = kvt_session_hint_blocks(raw_, &c, &h, f.out());
        return detail::check(status, f);
    }
    /// Pins blocks until a time, which is not 0. Names without a block are skipped.
    ret<void> pin_blocks(const block_names &names, deadline until,
                         std::uint8_t priority = 0) const {
        if (!names.fits()) return detail::fail<void>(kvt::error(KVT_E_INVALID));
        detail::failure f;
        const kvt_block_names_t c = names.to_c();
        const kvt_status_t status =
            kvt_session_pin_blocks(raw_, &c, priority, until.ns, f.out());
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
    using wait_fn = kvt_status_t (*)(const kvt_session_t *, const kvt_transfer_t *,
                                     const kvt_submit_opts_t *, kvt_error_t **);
    using transfer_fn = kvt_status_t (*)(const kvt_session_t *, const kvt_transfer_t *,
                                         const kvt_submit_opts_t *, kvt_op_t **, kvt_error_t **);
    using blocks_fn = kvt_status_t (*)(const kvt_session_t *, const kvt_blocks_t *,
                                       const kvt_submit_opts_t *, kvt_op_t **, kvt_error_t **);

    ret<void> wait(wait_fn call, const transfer &what, const submit_opts &opts) const {
        if (!detail::fits(what, true)) return detail::fail<void>(kvt::error(KVT_E_INVALID));
        detail::failure f;
        const kvt_transfer_t m = what.to_c();
        const kvt_submit_opts_t c = opts.to_c();
        const kvt_status_t status = call(raw_, &m, &c, f.out());
        return detail::check(status, f);
    }
    ret<op> submit(transfer_fn call, const transfer &what, const submit_opts &opts,
                   bool views) const {
        if (!detail::fits(what, views)) return detail::fail<op>(kvt::error(KVT_E_INVALID));
        detail::failure f;
        const kvt_transfer_t m = what.to_c();
        const kvt_submit_opts_t c = opts.to_c();
        kvt_op_t *raw = nullptr;
        const kvt_status_t status = call(raw_, &m, &c, &raw, f.out());
        return detail::give(status, f, op::adopt(raw));
    }
    ret<op> submit_blocks(blocks_fn call, const blocks &what, const submit_opts &opts,
                          bool views) const {
        if (!what.names.fits() || !detail::fits(what, views))
            return detail::fail<op>(kvt::error(KVT_E_INVALID));
        detail::failure f;
        kvt_block_names_t names;
        const kvt_blocks_t b = what.to_c(names);
        const kvt_submit_opts_t c = opts.to_c();
        kvt_op_t *raw = nullptr;
        const kvt_status_t status = call(raw_, &b, &c, &raw, f.out());
        return detail::give(status, f, op::adopt(raw));
    }
    ret<std::vector<op>> submit_each(transfer_fn call, const transfer &what,
                                     const submit_opts &opts) const {
        if (!detail::fits(what, true))
            return detail::fail<std::vector<op>>(kvt::error(KVT_E_INVALID));
        detail::failure f;
        kvt_transfer_t m = what.to_c();
        m.flags |= KVT_TRANSFER_EACH_LAYER;
        const kvt_submit_opts_t c = opts.to_c();
        std::vector<kvt_op_t *> raw(m.layers, nullptr);
        std::vector<op> ops;
        ops.reserve(m.layers); // nothing may throw once the transfers are submitted
        const kvt_status_t status = call(raw_, &m, &c, raw.data(), f.out());
        for (kvt_op_t *r : raw)
            if (r != nullptr) ops.push_back(op::adopt(r));
        return detail::give(status, f, std::move(ops));
    }
};

// --- methods of namespace_ ---------------------------------------------------

inline ret<session> namespace_::open_session(const session_opts &opts) const {
    detail::failure f;
    const kvt_session_opts_t c = opts.to_c();
    kvt_session_t *raw = nullptr;
    const kvt_status_t status = kvt_session_open(raw_, &c, &raw, f.out());
    return detail::give(status, f, session::adopt(raw));
}
inline ret<session> namespace_::open_session() const { return open_session(session_opts()); }

inline ret<lookup_result> namespace_::lookup(span<const std::uint32_t> tokens,
                                             span<const kvt_media_t> media) const {
    const kvt_sequence_t c = detail::sequence(tokens, media);
    return read_ranges([&](auto... to) { return kvt_namespace_lookup_media(raw_, &c, to...); });
}
inline ret<std::vector<std::uint8_t>> namespace_::chunk_keys(span<const std::uint32_t> tokens,
                                                             span<const kvt_media_t> media) const {
    const kvt_sequence_t c = detail::sequence(tokens, media);
    detail::failure f;
    std::uint64_t count = 0;
    kvt_status_t status = kvt_namespace_chunk_keys(raw_, &c, nullptr, 0, &count, f.out());
    std::vector<std::uint8_t> keys(static_cast<std::size_t>(count) * KVT_KEY_BYTES);
    if (status == KVT_OK && count > 0)
        status = kvt_namespace_chunk_keys(raw_, &c, keys.data(), count, &count, f.out());
    return detail::give(status, f, std::move(keys));
}
inline ret<std::vector<std::uint8_t>> namespace_::chunk_keys(
    span<const std::uint32_t> tokens) const {
    return chunk_keys(tokens, span<const kvt_media_t>());
}
inline ret<std::vector<std::uint8_t>> namespace_::blocks_exist(const block_names &names) const {
    if (!names.fits()) return detail::fail<std::vector<std::uint8_t>>(kvt::error(KVT_E_INVALID));
    std::vector<std::uint8_t> found(static_cast<std::size_t>(names.count()));
    detail::failure f;
    const kvt_block_names_t c = names.to_c();
    const kvt_status_t status = kvt_namespace_blocks_exist(raw_, &c, found.data(), f.out());
    return detail::give(status, f, std::move(found));
}
inline ret<std::vector<std::uint8_t>> namespace_::block_keys(const block_names &names) const {
    if (!names.fits()) return detail::fail<std::vector<std::uint8_t>>(kvt::error(KVT_E_INVALID));
    std::vector<std::uint8_t> keys(static_cast<std::size_t>(names.count()) * KVT_KEY_BYTES);
    detail::failure f;
    const kvt_block_names_t c = names.to_c();
    const kvt_status_t status = kvt_namespace_block_keys(raw_, &c, keys.data(), f.out());
    return detail::give(status, f, std::move(keys));
}
inline ret<kvt_clear_report_t> namespace_::clear(deadline by) const {
    detail::failure f;
    kvt_clear_report_t report = KVT_CLEAR_REPORT_INIT;
    const kvt_status_t status = kvt_namespace_clear(raw_, by.ns, &report, f.out());
    return detail::give(status, f, report);
}

}  // namespace KVTIER_ERRORS_
}  // namespace kvt

#endif  // KVTIER_SESSION_HPP
