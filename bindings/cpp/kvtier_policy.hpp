// kvt::policy: eviction policies. kvtier.hpp includes this file.

#ifndef KVTIER_POLICY_HPP
#define KVTIER_POLICY_HPP

#ifndef KVTIER_HPP
#error "include <kvtier/kvtier.hpp>"
#endif

namespace kvt {
inline namespace KVTIER_FACE_ {

/// The request that a call belongs to. Every field is optional.
struct policy_context {
    std::optional<std::uint64_t> session;
    std::optional<std::uint8_t> priority;
    std::uint32_t tenant = 0;
    /// Tokens of the whole request; 0 = tokens_each for each id.
    std::uint32_t length = 0;
    /// Most tokens that the sequence can have; 0 = unknown.
    std::uint32_t max_length = 0;
    /// Tokens of each object; 0 = 1.
    std::uint32_t tokens_each = 0;
};

/// A hint: the engine's expectation of the future of objects.
struct policy_hint {
    /// KVT_STOP_*.
    std::uint32_t stop = KVT_STOP_UNKNOWN;
    /// Expected time of the next use, by the clock of the calls; 0 = unknown.
    std::int64_t next_use_ns = 0;
    /// Confidence of next_use_ns, 0 to 1.
    double confidence = 1.0;
    /// The objects will not be used again.
    bool done = false;
};

/// An object to insert: its id, its size, and optionally the object that it continues.
inline kvt_policy_object_t policy_row(std::uint64_t id, std::uint64_t units = 1) noexcept {
    kvt_policy_object_t row{};
    row.id = id;
    row.units = units;
    return row;
}
inline kvt_policy_object_t policy_row(std::uint64_t id, std::uint64_t units,
                                   std::uint64_t parent) noexcept {
    kvt_policy_object_t row = policy_row(id, units);
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

struct policy_opts {
    std::string_view spec = "lru";
    std::uint64_t flags = 0;
    /// 0 = 1048576.
    std::uint64_t max_objects = 0;
    /// 0 = unknown.
    std::uint64_t capacity_units = 0;
    /// Evictions that the log keeps.
    std::uint64_t log_entries = 0;
    /// Evicted ids that are remembered for the re-prefill rate; 0 = 1048576.
    std::uint64_t remember = 0;
    /// Recompute cost; see kvt_policy_opts_t. 0 = the default.
    double alpha = 0;
    double beta = 0;
    /// Required by the spec "custom".
    score_fn score;
    predict_fn predict;
};

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
};

namespace detail {
/// From kvt_policy_info_t or kvt_sparse_info_t.
template <class Info> policy_info lift_info(const Info &c) noexcept {
    policy_info info;
    info.name = std::string_view(c.name, static_cast<std::size_t>(c.name_bytes));
    info.about = std::string_view(c.about, static_cast<std::size_t>(c.about_bytes));
    return info;
}

inline kvt_policy_context_t lower(const policy_context &context) noexcept {
    kvt_policy_context_t c = KVT_POLICY_CONTEXT_INIT;
    if (context.session) c.flags |= KVT_CONTEXT_SESSION;
    if (context.priority) c.flags |= KVT_CONTEXT_PRIORITY;
    c.session = context.session.value_or(0);
    c.priority = context.priority.value_or(0);
    c.tenant = context.tenant;
    c.length = context.length;
    c.max_length = context.max_length;
    c.tokens_each = context.tokens_each;
    return c;
}

inline kvt_policy_hint_t lower(const policy_hint &hint) noexcept {
    kvt_policy_hint_t c = KVT_POLICY_HINT_INIT;
    c.flags = KVT_HINT_ZERO_CONFIDENCE | (hint.done ? KVT_HINT_DONE : 0);
    c.stop = hint.stop;
    c.next_use_ns = hint.next_use_ns;
    c.confidence = hint.confidence;
    return c;
}

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
        kvt_policy_opts_t c = KVT_POLICY_OPTS_INIT;
        detail::text(opts.spec, c.spec, c.spec_bytes);
        c.flags = opts.flags;
        c.max_objects = opts.max_objects;
        c.capacity_units = opts.capacity_units;
        c.log_entries = opts.log_entries;
        c.remember = opts.remember;
        c.alpha = opts.alpha;
        c.beta = opts.beta;
        kvt_policy_custom_t custom = KVT_POLICY_CUSTOM_INIT;
        std::unique_ptr<detail::score_box> score;
        if (opts.score) {
            score.reset(new detail::score_box{std::move(opts.score)});
            custom.score = &detail::score_box::run;
            custom.user_data = score.get();
            custom.destroy = &detail::unbox<detail::score_box>;
            c.custom = &custom;
        }
        kvt_policy_predictor_t predictor = KVT_POLICY_PREDICTOR_INIT;
        std::unique_ptr<detail::predict_box> predict;
        if (opts.predict) {
            predict.reset(new detail::predict_box{std::move(opts.predict)});
            predictor.predict = &detail::predict_box::run;
            predictor.user_data = predict.get();
            predictor.destroy = &detail::unbox<detail::predict_box>;
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
        const kvt_policy_context_t ctx = detail::lower(context);
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
        const kvt_policy_context_t ctx = detail::lower(context);
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
        const kvt_policy_context_t ctx = detail::lower(context);
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
        const kvt_policy_context_t ctx = detail::lower(context);
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
    ret<void> evicted(span<const std::uint64_t> ids, std::int64_t now_ns = 0) const {
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
        const kvt_policy_context_t ctx = detail::lower(context);
        const kvt_policy_hint_t c = detail::lower(given);
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
    /// victims and call evicted().
    ret<selection> select(const kvt_policy_columns_t &candidates, std::uint64_t required_blocks,
                          std::uint64_t flags = 0, std::int64_t now_ns = 0) const {
        detail::failure f;
        selection out;
        const kvt_status_t status =
            select_into(out, candidates, required_blocks, flags, now_ns, f.out());
        return detail::give(status, f, std::move(out));
    }
    /// select() into vectors that the caller reuses: does not allocate once they are large enough.
    kvt_status_t select_into(selection &out, const kvt_policy_columns_t &candidates,
                             std::uint64_t required_blocks, std::uint64_t flags = 0,
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
        out.decided_by = std::string_view(c.decided_by, static_cast<std::size_t>(c.decided_by_bytes));
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
        std::string text(4096 + 1024, '\0'); // longer than any spec
        std::uint64_t bytes = 0;
        const kvt_status_t status = kvt_policy_spec(raw_, &text[0], text.size(), &bytes);
        text.resize(status == KVT_OK ? static_cast<std::size_t>(bytes) : 0);
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
            one.name = std::string_view(name, static_cast<std::size_t>(bytes));
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
    ret<void> set_advice(const kvt_policy_advice_rules_t &rules) const {
        detail::failure f;
        const kvt_status_t status = kvt_policy_set_advice(raw_, &rules, f.out());
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
        out.decided_by = std::string_view(c.decided_by, static_cast<std::size_t>(c.decided_by_bytes));
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
        if (status == KVT_OK) all.push_back(detail::lift_info(c));
    }
    return detail::give(status, std::move(all));
}

}  // namespace KVTIER_FACE_
}  // namespace kvt

#endif  // KVTIER_POLICY_HPP
