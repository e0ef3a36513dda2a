// kvt::policy: who leaves first. Part of kvtier.hpp, which includes it.

#ifndef KVTIER_POLICY_HPP
#define KVTIER_POLICY_HPP

#ifndef KVTIER_HPP
#error "include <kvtier/kvtier.hpp>"
#endif

namespace kvt {
inline namespace KVTIER_FACE_ {

/// Who asks. All of it is optional.
struct policy_context {
    std::optional<std::uint64_t> session;
    std::optional<std::uint8_t> priority;
    std::uint32_t tenant = 0;
    std::uint32_t length = 0;
    std::uint32_t max_length = 0;
    std::uint32_t tokens_each = 0;
};

/// What the engine says of the future of objects.
struct policy_hint {
    std::uint32_t stop = KVT_STOP_UNKNOWN;
    /// On the clock of the calls; 0 = not said.
    std::int64_t next_use_ns = 0;
    double confidence = 1.0;
    bool done = false;
};

/// A row to be inserted: an id, a size, perhaps what it continues.
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

/// Scores candidates, the least leaves first: columns, the time, room for the scores.
using score_fn =
    std::function<kvt_status_t(const kvt_policy_columns_t &, std::int64_t, span<double>)>;
/// What a predictor says: seconds from now, and how sure that is.
struct prediction {
    double seconds = 0;
    double confidence = 0;
};
/// Sequence, length, maximum length; nothing when it does not know.
using predict_fn = std::function<std::optional<prediction>(std::uint64_t, std::uint64_t,
                                                           std::uint64_t)>;

struct policy_opts {
    std::string_view spec = "lru";
    std::uint64_t flags = 0;
    std::uint64_t max_objects = 0;
    std::uint64_t capacity_units = 0;
    std::uint64_t log_entries = 0;
    std::uint64_t remember = 0;
    double alpha = 0;
    double beta = 0;
    /// For the spec "custom".
    score_fn score;
    predict_fn predict;
};

/// What an eviction came to.
struct eviction {
    std::vector<kvt_policy_victim_t> victims;
    std::uint64_t freed_units = 0;
    std::uint64_t shortfall_units = 0;
    std::uint64_t decision_ns = 0;
    /// Lives as long as the library.
    std::string_view decided_by;
};

/// What was chosen among candidates.
struct selection {
    std::vector<kvt_policy_pick_t> victims;
    /// Blocks that are free, by victim.
    std::vector<std::uint64_t> block_ids;
    std::uint64_t freed_blocks = 0;
    std::uint64_t shortfall_blocks = 0;
    std::uint64_t decision_ns = 0;
    std::string_view decided_by;
};

/// A number of a policy's own.
struct gauge_value {
    /// Lives as long as the library.
    std::string_view name;
    double value = 0;
};

struct policy_info {
    std::string_view name;
    std::string_view about;
};

namespace detail {
inline kvt_policy_context_t lower(const policy_context &who) noexcept {
    kvt_policy_context_t c = KVT_POLICY_CONTEXT_INIT;
    if (who.session) c.flags |= KVT_CONTEXT_SESSION;
    if (who.priority) c.flags |= KVT_CONTEXT_PRIORITY;
    c.session = who.session.value_or(0);
    c.priority = who.priority.value_or(0);
    c.tenant = who.tenant;
    c.length = who.length;
    c.max_length = who.max_length;
    c.tokens_each = who.tokens_each;
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
        const std::optional<prediction> told = guarded<std::optional<prediction>>(
            "kvt predictor", std::nullopt, static_cast<predict_box *>(user_data)->call, sequence,
            length, max_length);
        if (!told) return 0;
        *out_seconds = told->seconds;
        *out_confidence = told->confidence;
        return 1;
    }
};
}  // namespace detail

/// Columns over arrays that stay where they are: fill in the pointers of those there are.
inline kvt_policy_columns_t policy_columns(span<const std::uint64_t> ids) noexcept {
    kvt_policy_columns_t columns = KVT_POLICY_COLUMNS_INIT;
    columns.ids = ids.data();
    columns.rows = ids.size();
    return columns;
}

/// An eviction policy. Any thread may use it; `now_ns` 0 is the library's clock.
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

    /// How many from the start on are there; `found`, if not empty, says it for each.
    ret<std::uint64_t> lookup(span<const std::uint64_t> ids, const policy_context &who = {},
                              std::int64_t now_ns = 0, span<std::uint8_t> found = {}) const {
        detail::failure f;
        if (!found.empty() && found.size() != ids.size())
            return detail::fail<std::uint64_t>(error(KVT_E_INVALID));
        const kvt_policy_context_t w = detail::lower(who);
        std::uint64_t n = 0;
        const kvt_status_t status =
            kvt_policy_lookup(raw_, now_ns, &w, ids.data(), ids.size(),
                              found.empty() ? nullptr : found.data(), &n, f.out());
        return detail::give(status, f, n);
    }
    ret<std::uint64_t> touch(span<const std::uint64_t> ids, const policy_context &who = {},
                             std::int64_t now_ns = 0) const {
        detail::failure f;
        const kvt_policy_context_t w = detail::lower(who);
        std::uint64_t n = 0;
        const kvt_status_t status =
            kvt_policy_touch(raw_, now_ns, &w, ids.data(), ids.size(), &n, f.out());
        return detail::give(status, f, n);
    }
    /// Touches what is there and inserts the rest; `units` empty: 1 each.
    ret<std::uint64_t> record(span<const std::uint64_t> ids, const policy_context &who = {},
                              std::int64_t now_ns = 0,
                              span<const std::uint64_t> units = {}) const {
        detail::failure f;
        if (!units.empty() && units.size() != ids.size())
            return detail::fail<std::uint64_t>(error(KVT_E_INVALID));
        const kvt_policy_context_t w = detail::lower(who);
        std::uint64_t n = 0;
        const kvt_status_t status =
            kvt_policy_record(raw_, now_ns, &w, ids.data(), units.empty() ? nullptr : units.data(),
                              ids.size(), &n, f.out());
        return detail::give(status, f, n);
    }
    ret<void> insert(span<const kvt_policy_object_t> rows, const policy_context &who = {},
                     std::int64_t now_ns = 0) const {
        detail::failure f;
        const kvt_policy_context_t w = detail::lower(who);
        const kvt_status_t status = kvt_policy_insert(raw_, now_ns, &w, rows.data(), rows.size(),
                                                      sizeof(kvt_policy_object_t), f.out());
        return detail::check(status, f);
    }
    ret<void> insert(const kvt_policy_object_t &row, const policy_context &who = {},
                     std::int64_t now_ns = 0) const {
        return insert(span<const kvt_policy_object_t>(&row, 1), who, now_ns);
    }
    ret<void> remove(span<const std::uint64_t> ids, std::int64_t now_ns = 0) const {
        detail::failure f;
        const kvt_status_t status =
            kvt_policy_remove(raw_, now_ns, ids.data(), ids.size(), f.out());
        return detail::check(status, f);
    }
    ret<void> evicted(span<const std::uint64_t> ids, std::int64_t now_ns = 0) const {
        detail::failure f;
        const kvt_status_t status =
            kvt_policy_report_evicted(raw_, now_ns, ids.data(), ids.size(), f.out());
        return detail::check(status, f);
    }
    ret<void> resize(span<const std::uint64_t> ids, span<const std::uint64_t> units) const {
        detail::failure f;
        if (units.size() != ids.size()) return detail::fail<void>(error(KVT_E_INVALID));
        const kvt_status_t status =
            kvt_policy_resize(raw_, ids.data(), units.data(), ids.size(), f.out());
        return detail::check(status, f);
    }
    ret<void> acquire(span<const std::uint64_t> ids) const {
        detail::failure f;
        const kvt_status_t status = kvt_policy_acquire(raw_, ids.data(), ids.size(), f.out());
        return detail::check(status, f);
    }
    /// Gives references back; release() gives the handle up.
    ret<void> release_refs(span<const std::uint64_t> ids) const {
        detail::failure f;
        const kvt_status_t status = kvt_policy_release(raw_, ids.data(), ids.size(), f.out());
        return detail::check(status, f);
    }
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
    ret<std::uint64_t> hint(span<const std::uint64_t> ids, const policy_hint &told,
                            const policy_context &who = {}, std::int64_t now_ns = 0) const {
        detail::failure f;
        const kvt_policy_context_t w = detail::lower(who);
        kvt_policy_hint_t c = KVT_POLICY_HINT_INIT;
        c.flags = KVT_HINT_ZERO_CONFIDENCE | (told.done ? KVT_HINT_DONE : 0);
        c.stop = told.stop;
        c.next_use_ns = told.next_use_ns;
        c.confidence = told.confidence;
        std::uint64_t n = 0;
        const kvt_status_t status =
            kvt_policy_hint(raw_, now_ns, &w, ids.data(), ids.size(), &c, &n, f.out());
        return detail::give(status, f, n);
    }

    /// Evicts until `required_units` are free, at most `most` victims.
    ret<eviction> evict(std::uint64_t required_units, std::size_t most = 1024,
                        std::int64_t now_ns = 0) const {
        return leave(&kvt_policy_evict, required_units, most, now_ns);
    }
    /// Who would leave, without anything leaving.
    ret<eviction> preview(std::uint64_t required_units, std::size_t most = 1024,
                          std::int64_t now_ns = 0) const {
        return leave(&kvt_policy_preview, required_units, most, now_ns);
    }
    /// Chooses among candidates in the caller's own tables.
    ret<selection> select(const kvt_policy_columns_t &candidates, std::uint64_t required_blocks,
                          std::uint64_t flags = 0, std::int64_t now_ns = 0) const {
        detail::failure f;
        selection out;
        const kvt_status_t status =
            select_into(out, candidates, required_blocks, flags, now_ns, f.out());
        return detail::give(status, f, std::move(out));
    }
    /// The same with vectors that are kept from call to call: it does not allocate once they
    /// are large enough.
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

    /// Goes on with another policy; what carries over does.
    ret<void> switch_to(std::string_view spec) const {
        detail::failure f;
        const kvt_status_t status = kvt_policy_switch(raw_, spec.data(), spec.size(), f.out());
        return detail::check(status, f);
    }
    ret<void> set_capacity(std::uint64_t units) const {
        return detail::check(kvt_policy_set_capacity(raw_, units));
    }
    ret<std::string> spec() const {
        std::string text(4096 + 1024, '\0'); // longer than any
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
    /// All numbers of the policy's own.
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
        if (status == KVT_E_NOT_FOUND) status = KVT_OK; // that was the last
        return detail::give(status, std::move(all));
    }
    /// Evictions from number `from` on that the log still has, at most `most`.
    ret<std::vector<kvt_policy_log_entry_t>> log(std::uint64_t from = 0,
                                                 std::size_t most = 1024) const {
        std::vector<kvt_policy_log_entry_t> entries(most);
        std::uint64_t n = 0;
        const kvt_status_t status = kvt_policy_log(raw_, from, entries.data(), entries.size(),
                                                   sizeof(kvt_policy_log_entry_t), &n);
        entries.resize(static_cast<std::size_t>(n));
        return detail::give(status, std::move(entries));
    }
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
    ret<eviction> leave(Call call, std::uint64_t required, std::size_t most,
                        std::int64_t now_ns) const {
        detail::failure f;
        eviction out;
        out.victims.resize(most);
        kvt_policy_outcome_t c = KVT_POLICY_OUTCOME_INIT;
        const kvt_status_t status = call(raw_, now_ns, required, out.victims.data(), most,
                                         sizeof(kvt_policy_victim_t), &c, f.out());
        out.victims.resize(static_cast<std::size_t>(c.victims));
        out.freed_units = c.freed_units;
        out.shortfall_units = c.shortfall_units;
        out.decision_ns = c.decision_ns;
        out.decided_by = std::string_view(c.decided_by, static_cast<std::size_t>(c.decided_by_bytes));
        return detail::give(status, f, std::move(out));
    }
};

/// The policies that can be opened.
inline ret<std::vector<policy_info>> policies() {
    std::uint64_t count = 0;
    kvt_status_t status = kvt_policy_count(&count);
    std::vector<policy_info> all;
    for (std::uint64_t i = 0; status == KVT_OK && i < count; ++i) {
        kvt_policy_info_t c = KVT_POLICY_INFO_INIT;
        status = kvt_policy_info(i, &c);
        if (status != KVT_OK) break;
        policy_info one;
        one.name = std::string_view(c.name, static_cast<std::size_t>(c.name_bytes));
        one.about = std::string_view(c.about, static_cast<std::size_t>(c.about_bytes));
        all.push_back(one);
    }
    return detail::give(status, std::move(all));
}

}  // namespace KVTIER_FACE_
}  // namespace kvt

#endif  // KVTIER_POLICY_HPP
