/// @file
/// kvt::policy: eviction policies, over a table of the library or of the engine.
///
/// A store uses policies by their names in its spec. This header gives the same policies to an engine
/// that keeps blocks itself: the policy is notified of lookups, inserts and references, and chooses
/// victims.
///
/// Life cycle: policy::open, record or lookup and insert, evict; or select among candidates of the
/// caller's own table, then report_evicted. The destructor closes the policy.
///
///     kvt::policy_opts opts;
///     opts.spec = "horizon";
///     opts.max_objects = 1 << 20;
///     opts.capacity_units = 50000; // blocks of the engine's cache
///     const kvt::policy policy = kvt::policy::open(std::move(opts));
///     // A request used blocks 11, 12 and 13, of one unit each; 12 continues 11, and 13 continues 12.
///     const std::uint64_t ids[] = {11, 12, 13};
///     policy.record(ids, {}, now_ns);
///     // Room for two blocks is needed.
///     const kvt::eviction out = policy.evict(2, 2, now_ns);
///     for (const kvt_policy_victim_t &victim : out.victims) use(victim.id);

#ifndef KVTIER_POLICY_HPP
#define KVTIER_POLICY_HPP

#include <kvtier/policy.h>
#include <kvtier/runtime.hpp>

namespace kvt {
inline namespace KVTIER_ERRORS_ {

// [kvt_policy_context_t: by generate.py]
/// The request that a call belongs to. Every field is optional.
struct policy_context {
    /// The caller's id of a sequence; absent = none.
    std::optional<std::uint64_t> session{};
    /// Tenant of the session; must be 0 without a session.
    std::uint32_t tenant = 0;
    /// Class of the session, 0 to 255; 0 is evicted first. Absent = the class stays as it is, at
    /// first 1. Needs a session.
    std::optional<std::uint32_t> priority{};
    /// Tokens of the whole request; 0 = tokens_each for each id.
    std::uint32_t length = 0;
    /// Most tokens that the sequence can have; 0 = unknown.
    std::uint32_t max_length = 0;
    /// Tokens of each object of the path, of which the last may have fewer; 0 = 1.
    std::uint32_t tokens_each = 0;

    kvt_policy_context_t to_c() const noexcept {
        kvt_policy_context_t c = KVT_POLICY_CONTEXT_INIT;
        if (session) c.flags |= KVT_CONTEXT_SESSION;
        c.session = session.value_or(0);
        c.tenant = tenant;
        if (priority) c.flags |= KVT_CONTEXT_PRIORITY;
        c.priority = priority.value_or(0);
        c.length = length;
        c.max_length = max_length;
        c.tokens_each = tokens_each;
        return c;
    }
};
// [end]

// [kvt_policy_hint_t: by generate.py]
/// Expectations of the engine about future uses of objects.
struct policy_hint {
    /// The objects will not be used again.
    bool done = false;
    /// Expected time of the next use, by the clock of now_ns; 0 = unknown.
    std::int64_t next_use_ns = 0;
    /// Confidence of next_use_ns, 0 to 1; absent = 1.
    std::optional<double> confidence{};
    /// Why the request that used the objects stopped. KVT_STOP_*.
    kvt_stop_t stop = KVT_STOP_UNKNOWN;

    kvt_policy_hint_t to_c() const noexcept {
        kvt_policy_hint_t c = KVT_POLICY_HINT_INIT;
        if (done) c.flags |= KVT_HINT_DONE;
        c.next_use_ns = next_use_ns;
        if (confidence) c.flags |= KVT_HINT_ZERO_CONFIDENCE;
        c.confidence = confidence.value_or(0);
        c.stop = stop;
        return c;
    }
};
// [end]

/// An object to insert: its id, its size, and optionally the object that it continues.
inline kvt_policy_object_t policy_object(std::uint64_t id, std::uint64_t units = 1) noexcept {
    kvt_policy_object_t row{};
    row.id = id;
    row.units = units;
    return row;
}
inline kvt_policy_object_t policy_object(std::uint64_t id, std::uint64_t units,
                                         std::uint64_t parent) noexcept {
    kvt_policy_object_t row = policy_object(id, units);
    row.parent = parent;
    row.flags = KVT_OBJECT_HAS_PARENT;
    return row;
}

/// Scores candidates; the lowest score is evicted first. Arguments: columns, time, output scores.
using score_fn =
    std::function<kvt_status_t(const kvt_policy_columns_t &, std::int64_t, span<double>)>;
/// A predicted next use or end: seconds from now, with a confidence of 0 to 1.
struct prediction {
    double seconds = 0;
    double confidence = 0;
};
/// Predicts for a sequence. Arguments: sequence, length, maximum length in tokens. Empty = unknown.
using predict_fn = std::function<std::optional<prediction>(std::uint64_t, std::uint64_t,
                                                           std::uint64_t)>;

// [kvt_policy_opts_t: by generate.py]
/// Options of kvt_policy_open.
struct policy_opts {
    /// The engine can use objects behind a missing one, so objects are evicted in any order.
    /// Otherwise children are evicted before their parents.
    bool holes = false;
    /// Such as "arc" or "qos(inner=s3fifo)"; empty = "lru".
    std::string_view spec{};
    /// Most objects in the table, up to 2^28; 0 = 1048576.
    std::uint64_t max_objects = 0;
    /// Capacity of the cache in units; 0 = unknown.
    std::uint64_t capacity_units = 0;
    /// Evictions that the log keeps, up to 2^20; 0 = none.
    std::uint64_t log_entries = 0;
    /// Evicted ids that are remembered for the re-prefill rate, up to 2^28; absent = 1048576.
    std::optional<std::uint64_t> remember{};
    /// Recomputing n tokens after l tokens of context costs n * beta + alpha * (n * l + n * n / 2).
    /// Absent = 1 / 53800 and 1, which describe a model of the 70B class.
    struct cost {
        /// 0 to 1e12.
        double alpha = 0;
        /// 0 to 1e12.
        double beta = 0;
    };
    std::optional<cost> costs{};
    /// Scores candidates; the spec "custom" requires it.
    score_fn score{};
    /// Predicts uses; may be empty.
    predict_fn predict{};

    kvt_policy_opts_t to_c() const noexcept {
        kvt_policy_opts_t c = KVT_POLICY_OPTS_INIT;
        if (holes) c.flags |= KVT_POLICY_HOLES;
        detail::text(spec, c.spec, c.spec_bytes);
        c.max_objects = max_objects;
        c.capacity_units = capacity_units;
        c.log_entries = log_entries;
        if (remember) c.flags |= KVT_POLICY_ZERO_REMEMBER;
        c.remember = remember.value_or(0);
        if (costs) {
            c.flags |= KVT_POLICY_COST;
            c.alpha = costs->alpha;
            c.beta = costs->beta;
        }
        return c;
    }
};
// [end]

// [kvt_policy_advice_rules_t: by generate.py]
/// Rules of the advice.
struct policy_advice_rules {
    /// Re-prefill rate of a window above which batches are halved, 0 to 1; absent = 0.3.
    std::optional<double> shrink_above{};
    /// Evictions in a window below which batches are doubled; absent = 10.
    std::optional<std::uint64_t> grow_below{};
    /// Smallest batch; 0 = 1.
    std::uint64_t min_batch = 0;
    /// Largest batch; 0 = 128.
    std::uint64_t max_batch = 0;
    /// Lookups in a window; 0 = 100.
    std::uint64_t window = 0;
    /// Consecutive windows that must agree; 0 = 2.
    std::uint64_t patience = 0;

    kvt_policy_advice_rules_t to_c() const noexcept {
        kvt_policy_advice_rules_t c = KVT_POLICY_ADVICE_RULES_INIT;
        if (shrink_above) c.flags |= KVT_ADVICE_ZERO_SHRINK;
        c.shrink_above = shrink_above.value_or(0);
        if (grow_below) c.flags |= KVT_ADVICE_ZERO_GROW;
        c.grow_below = grow_below.value_or(0);
        c.min_batch = min_batch;
        c.max_batch = max_batch;
        c.window = window;
        c.patience = patience;
        return c;
    }
};
// [end]

/// The result of an eviction.
struct eviction {
    std::vector<kvt_policy_victim_t> victims;
    std::uint64_t freed_units = 0;
    std::uint64_t shortfall_units = 0;
    std::uint64_t decision_ns = 0;
    /// Lives as long as the library.
    std::string_view decided_by;
};

/// The result of a selection among the caller's candidates.
struct selection {
    std::vector<kvt_policy_pick_t> victims;
    /// Freed blocks, by victim.
    std::vector<std::uint64_t> block_ids;
    std::uint64_t freed_blocks = 0;
    std::uint64_t shortfall_blocks = 0;
    std::uint64_t decision_ns = 0;
    /// Lives as long as the library.
    std::string_view decided_by;
};

/// A number particular to a policy, such as "arc_p" of arc.
struct gauge_value {
    /// Lives as long as the library.
    std::string_view name;
    double value = 0;
};

/// A policy that can be opened. Its texts live as long as the library.
struct policy_info {
    std::string_view name;
    std::string_view about;

    static policy_info from_c(const kvt_policy_info_t &c) noexcept {
        policy_info info;
        info.name = detail::view(c.name, c.name_bytes);
        info.about = detail::view(c.about, c.about_bytes);
        return info;
    }
};

namespace detail {
struct score_box {
    score_fn call;
    static kvt_status_t run(void *user_data, const kvt_policy_columns_t *columns,
                            std::int64_t now_ns, double *out_scores) noexcept {
        return guarded<kvt_status_t>(
            "kvt score function", KVT_E_STATE, static_cast<score_box *>(user_data)->call, *columns,
            now_ns, span<double>(out_scores, static_cast<std::size_t>(columns->rows)));
    }
};

struct predict_box {
    predict_fn call;
    static std::uint32_t run(void *user_data, std::uint64_t sequence, std::uint64_t length,
                             std::uint64_t max_length, double *out_seconds,
                             double *out_confidence) noexcept {
        const std::optional<prediction> predicted = guarded<std::optional<prediction>>(
            "kvt predictor", std::nullopt, static_cast<predict_box *>(user_data)->call, sequence,
            length, max_length);
        if (!predicted) return 0;
        *out_seconds = predicted->seconds;
        *out_confidence = predicted->confidence;
        return 1;
    }
};
}  // namespace detail

/// Columns over the caller's arrays, which are not copied. Set the pointers of further columns.
inline kvt_policy_columns_t policy_columns(span<const std::uint64_t> ids) noexcept {
    kvt_policy_columns_t columns = KVT_POLICY_COLUMNS_INIT;
    columns.ids = ids.data();
    columns.rows = ids.size();
    return columns;
}

/// An eviction policy with its table of objects. Any thread may use it. Times `now_ns` are the
/// caller's monotonic clock; 0 = CLOCK_MONOTONIC. Use one clock per policy.
class policy : public detail::owner<policy, kvt_policy_t> {
    friend class detail::owner<policy, kvt_policy_t>;
    static void drop(kvt_policy_t *raw) noexcept {
        const kvt_status_t status = kvt_policy_close(&raw);
        if (!detail::ended(status)) detail::report("kvt::policy", status);
    }

public:
    static ret<policy> open(policy_opts opts = {}) {
        detail::failure f;
        kvt_policy_opts_t c = opts.to_c();
        kvt_policy_custom_t custom = KVT_POLICY_CUSTOM_INIT;
        std::unique_ptr<detail::score_box> score = detail::boxed<detail::score_box>(opts.score);
        if (score) {
            custom.score = &detail::score_box::run;
            detail::pass(score, custom);
            c.custom = &custom;
        }
        kvt_policy_predictor_t predictor = KVT_POLICY_PREDICTOR_INIT;
        std::unique_ptr<detail::predict_box> predict =
            detail::boxed<detail::predict_box>(opts.predict);
        if (predict) {
            predictor.predict = &detail::predict_box::run;
            detail::pass(predict, predictor);
            c.predictor = &predictor;
        }
        kvt_policy_t *raw = nullptr;
        const kvt_status_t status = kvt_policy_open(&c, &raw, f.out());
        if (status == KVT_OK) {
            (void)score.release();
            (void)predict.release();
        }
        return detail::give(status, f, policy::adopt(raw));
    }
    ret<void> close() { return detail::check(kvt_policy_close(&raw_)); }

    /// Looks up a path of objects and touches the hits. Returns the number of hits before the first
    /// miss. `found` receives 1 or 0 for each id, unless it is empty.
    ret<std::uint64_t> lookup(span<const std::uint64_t> ids, const policy_context &context = {},
                              std::int64_t now_ns = 0, span<std::uint8_t> found = {}) const {
        detail::failure f;
        if (!found.empty() && found.size() != ids.size())
            return detail::fail<std::uint64_t>(error(KVT_E_INVALID));
        const kvt_policy_context_t ctx = context.to_c();
        std::uint64_t n = 0;
        const kvt_status_t status =
            kvt_policy_lookup(raw_, now_ns, &ctx, ids.data(), ids.size(),
                              found.empty() ? nullptr : found.data(), &n, f.out());
        return detail::give(status, f, n);
    }
    /// Touches objects without counting a lookup; returns their number. Skips unknown ids.
    ret<std::uint64_t> touch(span<const std::uint64_t> ids, const policy_context &context = {},
                             std::int64_t now_ns = 0) const {
        detail::failure f;
        const kvt_policy_context_t ctx = context.to_c();
        std::uint64_t n = 0;
        const kvt_status_t status =
            kvt_policy_touch(raw_, now_ns, &ctx, ids.data(), ids.size(), &n, f.out());
        return detail::give(status, f, n);
    }
    /// Records a use: touches objects in the table and inserts the others; returns the number
    /// inserted. `units` are sizes of new objects; empty = 1 each.
    ret<std::uint64_t> record(span<const std::uint64_t> ids, const policy_context &context = {},
                              std::int64_t now_ns = 0,
                              span<const std::uint64_t> units = {}) const {
        detail::failure f;
        if (!units.empty() && units.size() != ids.size())
            return detail::fail<std::uint64_t>(error(KVT_E_INVALID));
        const kvt_policy_context_t ctx = context.to_c();
        std::uint64_t n = 0;
        const kvt_status_t status =
            kvt_policy_record(raw_, now_ns, &ctx, ids.data(),
                              units.empty() ? nullptr : units.data(), ids.size(), &n, f.out());
        return detail::give(status, f, n);
    }
    /// Inserts objects, all or none; parents before children.
    ret<void> insert(span<const kvt_policy_object_t> rows, const policy_context &context = {},
                     std::int64_t now_ns = 0) const {
        detail::failure f;
        const kvt_policy_context_t ctx = context.to_c();
        const kvt_status_t status =
            kvt_policy_insert(raw_, now_ns, &ctx, rows.data(), rows.size(),
                              sizeof(kvt_policy_object_t), f.out());
        return detail::check(status, f);
    }
    ret<void> insert(const kvt_policy_object_t &row, const policy_context &context = {},
                     std::int64_t now_ns = 0) const {
        return insert(span<const kvt_policy_object_t>(&row, 1), context, now_ns);
    }
    /// Removes objects that their owner gave up, all or none. Does not count as an eviction.
    ret<void> remove(span<const std::uint64_t> ids, std::int64_t now_ns = 0) const {
        detail::failure f;
        const kvt_status_t status =
            kvt_policy_remove(raw_, now_ns, ids.data(), ids.size(), f.out());
        return detail::check(status, f);
    }
    /// Reports that the objects chosen by select() were freed; removes them as evicted.
    ret<void> report_evicted(span<const std::uint64_t> ids, std::int64_t now_ns = 0) const {
        detail::failure f;
        const kvt_status_t status =
            kvt_policy_report_evicted(raw_, now_ns, ids.data(), ids.size(), f.out());
        return detail::check(status, f);
    }
    /// Changes the sizes of objects, all or none.
    ret<void> resize(span<const std::uint64_t> ids, span<const std::uint64_t> units) const {
        detail::failure f;
        if (units.size() != ids.size()) return detail::fail<void>(error(KVT_E_INVALID));
        const kvt_status_t status =
            kvt_policy_resize(raw_, ids.data(), units.data(), ids.size(), f.out());
        return detail::check(status, f);
    }
    /// Adds a reference to each object, all or none. Referenced objects are never evicted.
    ret<void> acquire(span<const std::uint64_t> ids) const {
        detail::failure f;
        const kvt_status_t status = kvt_policy_acquire(raw_, ids.data(), ids.size(), f.out());
        return detail::check(status, f);
    }
    /// Removes a reference from each object; release() gives up the handle instead.
    ret<void> release_refs(span<const std::uint64_t> ids) const {
        detail::failure f;
        const kvt_status_t status = kvt_policy_release(raw_, ids.data(), ids.size(), f.out());
        return detail::check(status, f);
    }
    /// Pins objects, all or none. Pinned objects are never evicted; pins are not counted.
    ret<void> pin(span<const std::uint64_t> ids) const {
        detail::failure f;
        const kvt_status_t status = kvt_policy_pin(raw_, ids.data(), ids.size(), f.out());
        return detail::check(status, f);
    }
    ret<void> unpin(span<const std::uint64_t> ids) const {
        detail::failure f;
        const kvt_status_t status = kvt_policy_unpin(raw_, ids.data(), ids.size(), f.out());
        return detail::check(status, f);
    }
    /// Passes a hint about objects to the policy; returns the number of ids in the table.
    ret<std::uint64_t> hint(span<const std::uint64_t> ids, const policy_hint &given,
                            const policy_context &context = {}, std::int64_t now_ns = 0) const {
        detail::failure f;
        const kvt_policy_context_t ctx = context.to_c();
        const kvt_policy_hint_t c = given.to_c();
        std::uint64_t n = 0;
        const kvt_status_t status =
            kvt_policy_hint(raw_, now_ns, &ctx, ids.data(), ids.size(), &c, &n, f.out());
        return detail::give(status, f, n);
    }

    /// Evicts objects until `required_units` are free, at most `max_victims`.
    ret<eviction> evict(std::uint64_t required_units, std::size_t max_victims = 1024,
                        std::int64_t now_ns = 0) const {
        return choose_victims(&kvt_policy_evict, required_units, max_victims, now_ns);
    }
    /// Reports the victims that evict() would choose, and evicts nothing.
    ret<eviction> preview(std::uint64_t required_units, std::size_t max_victims = 1024,
                          std::int64_t now_ns = 0) const {
        return choose_victims(&kvt_policy_preview, required_units, max_victims, now_ns);
    }
    /// Chooses victims among candidates of the caller's own tables. Evicts nothing: free the
    /// victims and call report_evicted().
    ret<selection> select(const kvt_policy_columns_t &candidates, std::uint64_t required_blocks,
                          kvt_select_flags_t flags = 0, std::int64_t now_ns = 0) const {
        detail::failure f;
        selection out;
        const kvt_status_t status =
            select_into(out, candidates, required_blocks, flags, now_ns, f.out());
        return detail::give(status, f, std::move(out));
    }
    /// select() into vectors that the caller reuses: does not allocate once they are large enough.
    kvt_status_t select_into(selection &out, const kvt_policy_columns_t &candidates,
                             std::uint64_t required_blocks, kvt_select_flags_t flags = 0,
                             std::int64_t now_ns = 0, kvt_error_t **err = nullptr) const {
        kvt_policy_selection_t c = KVT_POLICY_SELECTION_INIT;
        out.victims.resize(static_cast<std::size_t>(candidates.rows));
        out.block_ids.resize(static_cast<std::size_t>(candidates.block_entries));
        c.victims = out.victims.data();
        c.victim_capacity = out.victims.size();
        c.stride_bytes = sizeof(kvt_policy_pick_t);
        c.block_ids = out.block_ids.data();
        c.block_capacity = out.block_ids.size();
        const kvt_status_t status =
            kvt_policy_select(raw_, now_ns, &candidates, required_blocks, flags, &c, err);
        const bool ok = status == KVT_OK;
        out.victims.resize(ok ? static_cast<std::size_t>(c.victim_count) : 0);
        out.block_ids.resize(ok ? static_cast<std::size_t>(c.block_count) : 0);
        out.freed_blocks = c.freed_blocks;
        out.shortfall_blocks = c.shortfall_blocks;
        out.decision_ns = c.decision_ns;
        out.decided_by = detail::view(c.decided_by, c.decided_by_bytes);
        return status;
    }

    /// Switches to another policy. Objects keep their uses, references and pins. Learned state
    /// passes only to a policy of the same kind.
    ret<void> switch_to(std::string_view spec) const {
        detail::failure f;
        const kvt_status_t status = kvt_policy_switch(raw_, spec.data(), spec.size(), f.out());
        return detail::check(status, f);
    }
    /// Sets the capacity; evicts nothing. 0 = unknown.
    ret<void> set_capacity(std::uint64_t units) const {
        return detail::check(kvt_policy_set_capacity(raw_, units));
    }
    /// The policy's spec in canonical form.
    ret<std::string> spec() const {
        std::string text;
        const auto read = [&](char *to, auto capacity, auto *bytes) {
            return kvt_policy_spec(raw_, to, capacity, bytes);
        };
        const kvt_status_t status = detail::read_text(text, read);
        return detail::give(status, std::move(text));
    }
    ret<kvt_policy_stats_t> stats() const {
        kvt_policy_stats_t stats = KVT_POLICY_STATS_INIT;
        const kvt_status_t status = kvt_policy_stats(raw_, &stats);
        return detail::give(status, stats);
    }
    ret<double> gauge(std::string_view name) const {
        detail::failure f;
        double value = 0;
        const kvt_status_t status =
            kvt_policy_gauge(raw_, name.data(), name.size(), &value, f.out());
        return detail::give(status, f, value);
    }
    /// All gauges of the policy.
    ret<std::vector<gauge_value>> gauges() const {
        std::vector<gauge_value> all;
        kvt_status_t status = KVT_OK;
        while (true) {
            const char *name = nullptr;
            std::uint64_t bytes = 0;
            gauge_value one;
            status = kvt_policy_gauge_at(raw_, all.size(), &name, &bytes, &one.value);
            if (status != KVT_OK) break;
            one.name = detail::view(name, bytes);
            all.push_back(one);
        }
        if (status == KVT_E_NOT_FOUND) status = KVT_OK; // past the last gauge
        return detail::give(status, std::move(all));
    }
    /// Log entries from number `from` on that were not overwritten, at most `max_entries`.
    ret<std::vector<kvt_policy_log_entry_t>> log(std::uint64_t from = 0,
                                                 std::size_t max_entries = 1024) const {
        std::vector<kvt_policy_log_entry_t> entries(max_entries);
        std::uint64_t n = 0;
        const kvt_status_t status = kvt_policy_log(raw_, from, entries.data(), entries.size(),
                                                   sizeof(kvt_policy_log_entry_t), &n);
        entries.resize(static_cast<std::size_t>(n));
        return detail::give(status, std::move(entries));
    }
    /// Advises a scheduler on its batch size.
    ret<kvt_policy_advice_t> advise(std::uint64_t batch) const {
        kvt_policy_advice_t advice = KVT_POLICY_ADVICE_INIT;
        const kvt_status_t status = kvt_policy_advise(raw_, batch, &advice);
        return detail::give(status, advice);
    }
    ret<void> set_advice(const policy_advice_rules &rules) const {
        detail::failure f;
        const kvt_policy_advice_rules_t c = rules.to_c();
        const kvt_status_t status = kvt_policy_set_advice(raw_, &c, f.out());
        return detail::check(status, f);
    }

private:
    template <class Call>
    ret<eviction> choose_victims(Call call, std::uint64_t required, std::size_t max_victims,
                                 std::int64_t now_ns) const {
        detail::failure f;
        eviction out;
        out.victims.resize(max_victims);
        kvt_policy_outcome_t c = KVT_POLICY_OUTCOME_INIT;
        const kvt_status_t status = call(raw_, now_ns, required, out.victims.data(), max_victims,
                                         sizeof(kvt_policy_victim_t), &c, f.out());
        out.victims.resize(static_cast<std::size_t>(c.victims));
        out.freed_units = c.freed_units;
        out.shortfall_units = c.shortfall_units;
        out.decision_ns = c.decision_ns;
        out.decided_by = detail::view(c.decided_by, c.decided_by_bytes);
        return detail::give(status, f, std::move(out));
    }
};

/// The eviction policies that can be opened by name.
inline ret<std::vector<policy_info>> policies() {
    std::uint64_t count = 0;
    kvt_status_t status = kvt_policy_count(&count);
    std::vector<policy_info> all;
    for (std::uint64_t i = 0; status == KVT_OK && i < count; ++i) {
        kvt_policy_info_t c = KVT_POLICY_INFO_INIT;
        status = kvt_policy_info(i, &c);
        if (status == KVT_OK) all.push_back(policy_info::from_c(c));
    }
    return detail::give(status, std::move(all));
}

}  // namespace KVTIER_ERRORS_
}  // namespace kvt

#endif  // KVTIER_POLICY_HPP
