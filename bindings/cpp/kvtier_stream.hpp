// kvt::model and kvt::streamer: weights of models larger than memory, unit by unit. Part of
// kvtier.hpp, which includes it.

#ifndef KVTIER_STREAM_HPP
#define KVTIER_STREAM_HPP

#ifndef KVTIER_HPP
#error "include <kvtier/kvtier.hpp>"
#endif

namespace kvt {
inline namespace KVTIER_FACE_ {

/// A unit as the engine names it, for files of a format that is not known.
struct unit_entry {
    std::string name;
    /// KVT_ROLE_*.
    std::uint32_t role = KVT_ROLE_OTHER;
    std::uint32_t layer = KVT_NONE;
    std::uint32_t expert = KVT_NONE;
    std::vector<kvt_file_range_t> ranges;
};

/// What a plan is, and who lives where.
struct stream_plan {
    kvt_stream_plan_t numbers = KVT_STREAM_PLAN_INIT;
    kvt_forecast_t forecast = KVT_FORECAST_INIT;
    /// By unit.
    std::vector<kvt_unit_residency_t> residency;
};

struct stream_opts {
    /// What is decided about memory; KVT_TERMS_SHRINKS is one of its flags.
    kvt_stream_terms_t terms = KVT_STREAM_TERMS_INIT;
    /// KVT_STREAM_*.
    std::uint64_t flags = 0;
    /// Its rank in the budget.
    std::int64_t priority = 0;
    /// Units in the order of a pass; nothing = as they are numbered.
    std::optional<std::vector<std::uint32_t>> order;
    /// Specs; empty = the defaults.
    std::string_view policy;
    std::string_view expert_policy;
    /// Where checksums are kept.
    std::string_view sidecar;
    /// KVT_VERIFY_*.
    std::uint32_t verify = KVT_VERIFY_NEVER;
    std::uint32_t readers = 0;
    std::uint32_t depth = 0;
    std::uint32_t marks = 0;
    std::uint32_t pinned_percent = 0;
    /// Where the engine computes, with memory of its own; null = on the processor.
    const kvt::device *device = nullptr;
};

namespace detail {
inline std::vector<kvt_str_t> texts(span<const std::string> all) {
    std::vector<kvt_str_t> list;
    list.reserve(all.size());
    for (const std::string &one : all) list.push_back(kvt_str_t{one.data(), one.size()});
    return list;
}

/// Rows of which the library says how many there are.
template <class Row, class Call> kvt_status_t rows(std::vector<Row> &list, Call call) {
    std::uint64_t count = 0;
    list.resize(64);
    for (;;) {
        const kvt_status_t status = call(list.data(), list.size(), sizeof(Row), &count);
        list.resize(static_cast<std::size_t>(count));
        if (status != KVT_E_TOO_SMALL) return status;
    }
}
}  // namespace detail

/// What is in the files of a model. It never changes; any thread may use it. Texts in its
/// answers live as long as it does.
class model : public detail::owner<model, kvt_model_t> {
    friend class detail::owner<model, kvt_model_t>;
    static void drop(kvt_model_t *raw) noexcept {
        const kvt_status_t status = kvt_model_close(&raw);
        if (!detail::ended(status)) detail::report("kvt::model", status);
    }

public:
    /// A GGUF or safetensors file, the index of a sharded model, a directory, any file of a
    /// split GGUF model; or all its files.
    static ret<model> open(span<const std::string> paths) {
        detail::failure f;
        const std::vector<kvt_str_t> c = detail::texts(paths);
        kvt_model_t *raw = nullptr;
        const kvt_status_t status =
            kvt_model_open(c.data(), c.size(), sizeof(kvt_str_t), &raw, f.out());
        return detail::give(status, f, model::adopt(raw));
    }
    static ret<model> open(const std::string &path) {
        return open(span<const std::string>(&path, 1));
    }
    /// Units that the engine names.
    static ret<model> table(span<const std::string> paths, span<const unit_entry> units) {
        detail::failure f;
        const std::vector<kvt_str_t> files = detail::texts(paths);
        std::vector<kvt_unit_entry_t> entries;
        entries.reserve(units.size());
        for (const unit_entry &unit : units) {
            kvt_unit_entry_t e{};
            detail::text(unit.name, e.name, e.name_bytes);
            e.role = unit.role;
            e.layer = unit.layer;
            e.expert = unit.expert;
            e.ranges = unit.ranges.data();
            e.range_count = unit.ranges.size();
            entries.push_back(e);
        }
        kvt_model_table_t c = KVT_MODEL_TABLE_INIT;
        c.paths = files.data();
        c.path_count = files.size();
        c.path_stride_bytes = sizeof(kvt_str_t);
        c.units = entries.data();
        c.unit_count = entries.size();
        c.unit_stride_bytes = sizeof(kvt_unit_entry_t);
        c.range_stride_bytes = sizeof(kvt_file_range_t);
        kvt_model_t *raw = nullptr;
        const kvt_status_t status = kvt_model_table(&c, &raw, f.out());
        return detail::give(status, f, model::adopt(raw));
    }
    ret<void> close() { return detail::check(kvt_model_close(&raw_)); }
    ret<kvt_model_info_t> info() const {
        kvt_model_info_t c = KVT_MODEL_INFO_INIT;
        const kvt_status_t status = kvt_model_info(raw_, &c);
        return detail::give(status, c);
    }
    ret<kvt_model_file_t> file(std::uint32_t number) const {
        kvt_model_file_t c = KVT_MODEL_FILE_INIT;
        const kvt_status_t status = kvt_model_file(raw_, number, &c);
        return detail::give(status, c);
    }
    ret<kvt_unit_t> unit(std::uint32_t number) const {
        kvt_unit_t c = KVT_UNIT_INIT;
        const kvt_status_t status = kvt_model_unit(raw_, number, &c);
        return detail::give(status, c);
    }
    ret<kvt_tensor_t> tensor(std::uint32_t number) const {
        kvt_tensor_t c = KVT_TENSOR_INIT;
        const kvt_status_t status = kvt_model_tensor(raw_, number, &c);
        return detail::give(status, c);
    }
    /// What is in a unit, in the order of places.
    ret<std::vector<kvt_part_t>> unit_parts(std::uint32_t unit) const {
        std::vector<kvt_part_t> list;
        const kvt_status_t status = detail::rows(list, [&](auto *to, auto room, auto each, auto *n) {
            return kvt_model_unit_parts(raw_, unit, to, room, each, n);
        });
        return detail::give(status, std::move(list));
    }
    /// Where a tensor is: one part, or one for each expert.
    ret<std::vector<kvt_part_t>> tensor_parts(std::uint32_t tensor) const {
        std::vector<kvt_part_t> list;
        const kvt_status_t status = detail::rows(list, [&](auto *to, auto room, auto each, auto *n) {
            return kvt_model_tensor_parts(raw_, tensor, to, room, each, n);
        });
        return detail::give(status, std::move(list));
    }
    /// The tensor of a name; KVT_E_NOT_FOUND.
    ret<std::uint32_t> find(std::string_view name) const {
        std::uint32_t number = KVT_NONE;
        const kvt_status_t status = kvt_model_find_tensor(raw_, name.data(), name.size(), &number);
        return detail::give(status, number);
    }
    /// The unit of a layer, or of an expert of it.
    ret<std::uint32_t> layer(std::uint32_t layer, std::uint32_t expert = KVT_NONE) const {
        std::uint32_t number = KVT_NONE;
        const kvt_status_t status = kvt_model_find_unit(raw_, layer, expert, &number);
        return detail::give(status, number);
    }
    /// Who would live where. `memory` null: what this machine has.
    ret<stream_plan> plan(const kvt_stream_terms_t &terms,
                          const kvt_stream_memory_t *memory = nullptr) const {
        detail::failure f;
        stream_plan p;
        kvt_model_info_t about = KVT_MODEL_INFO_INIT;
        kvt_status_t status = kvt_model_info(raw_, &about);
        p.residency.resize(about.units);
        if (status == KVT_OK)
            status = kvt_model_plan(raw_, &terms, memory, &p.numbers, &p.forecast, p.residency.data(),
                                    p.residency.size(), sizeof(kvt_unit_residency_t), f.out());
        return detail::give(status, f, std::move(p));
    }
    /// The plan in words: KVT_PLAN_TEXT or KVT_PLAN_JSON.
    ret<std::string> plan_describe(const kvt_stream_terms_t &terms,
                                const kvt_stream_memory_t *memory = nullptr,
                                std::uint32_t kind = KVT_PLAN_TEXT) const {
        detail::failure f;
        std::string text;
        const kvt_status_t status = detail::words(text, [&](char *to, auto room, auto *bytes) {
            return kvt_model_plan_describe(raw_, &terms, memory, kind, to, room, bytes, f.out());
        });
        return detail::give(status, f, std::move(text));
    }
    /// What a pass would take over other links, such as "h2d=13,disk=3.3".
    ret<kvt_forecast_t> what_if(const kvt_stream_terms_t &terms, std::string_view links,
                                const kvt_stream_memory_t *memory = nullptr) const {
        detail::failure f;
        kvt_forecast_t c = KVT_FORECAST_INIT;
        const kvt_status_t status =
            kvt_model_forecast(raw_, &terms, memory, links.data(), links.size(), &c, f.out());
        return detail::give(status, f, c);
    }
};

/// A unit that the engine has. Given back when this goes; the streamer cannot be closed
/// before. Move-only.
class held {
public:
    held() noexcept = default;
    held(held &&other) noexcept
        : stream_(std::exchange(other.stream_, nullptr)), raw_(other.raw_) {}
    held &operator=(held &&other) noexcept {
        if (this != &other) {
            reset();
            stream_ = std::exchange(other.stream_, nullptr);
            raw_ = other.raw_;
        }
        return *this;
    }
    held(const held &) = delete;
    held &operator=(const held &) = delete;
    ~held() { reset(); }

    explicit operator bool() const noexcept { return stream_ != nullptr; }
    std::uint32_t unit() const noexcept { return raw_.unit; }
    const std::byte *data() const noexcept { return static_cast<const std::byte *>(raw_.address); }
    std::uint64_t bytes() const noexcept { return raw_.bytes; }
    /// KVT_MEMORY_*: where `data` is valid.
    std::uint32_t memory() const noexcept { return raw_.memory; }
    /// The device's event from which on the bytes are complete; 0 = they are.
    std::uint64_t event() const noexcept { return raw_.event; }
    /// A part of a tensor in it.
    span<const std::byte> part(const kvt_part_t &part) const noexcept {
        return span<const std::byte>(data() + part.at, static_cast<std::size_t>(part.bytes));
    }
    /// Gives it back.
    ret<void> release() {
        detail::failure f;
        const kvt_status_t status = kvt_stream_release(stream_, &raw_, 0, f.out());
        stream_ = nullptr;
        return detail::check(status, f);
    }
    /// Gives it back; its memory is used for another after this event of the device's, which
    /// the streamer takes over. Where that is refused both stay what they were. What a copy to
    /// the device failed with is told here, too, and then the unit has gone back.
    ret<void> release(device_event &&after) {
        detail::failure f;
        const kvt_status_t status =
            kvt_stream_release(stream_, &raw_, after.number(), f.out());
        const bool refused = status == KVT_E_UNSUPPORTED || status == KVT_E_INVALID ||
                             status == KVT_E_HANDLE || status == KVT_E_STATE ||
                             status == KVT_E_FORKED;
        if (!refused) {
            stream_ = nullptr;
            (void)after.release();
        }
        return detail::check(status, f);
    }
    /// Gives it back; what fails is told to the hook.
    void reset() noexcept {
        if (stream_ == nullptr) return;
        const kvt_status_t status = kvt_stream_release(stream_, &raw_, 0, nullptr);
        stream_ = nullptr;
        if (!detail::ended(status)) detail::report("kvt::held", status);
    }

private:
    friend class streamer;
    held(const kvt_stream_t *stream, const kvt_unit_lease_t &raw) noexcept
        : stream_(stream), raw_(raw) {}
    const kvt_stream_t *stream_ = nullptr;
    kvt_unit_lease_t raw_ = KVT_UNIT_LEASE_INIT;
};

/// Weights that come as the engine computes. Any thread may use it.
class streamer : public detail::owner<streamer, kvt_stream_t> {
    friend class detail::owner<streamer, kvt_stream_t>;
    static void drop(kvt_stream_t *raw) noexcept {
        const kvt_status_t status = kvt_stream_close(&raw, 0, nullptr);
        if (!detail::ended(status)) detail::report("kvt::streamer", status);
    }

public:
    static ret<streamer> open(const runtime &on, const model &of, const stream_opts &opts = {},
                              const budget *pays = nullptr) {
        detail::failure f;
        kvt_stream_opts_t c = KVT_STREAM_OPTS_INIT;
        static constexpr std::uint32_t none = 0; // null would be the order of units
        c.model = of.get();
        c.terms = &opts.terms;
        c.budget = pays != nullptr ? pays->get() : nullptr;
        c.flags = opts.flags;
        c.priority = opts.priority;
        if (opts.order) {
            c.order = opts.order->empty() ? &none : opts.order->data();
            c.order_count = opts.order->size();
        }
        detail::text(opts.policy, c.policy, c.policy_bytes);
        detail::text(opts.expert_policy, c.expert_policy, c.expert_policy_bytes);
        detail::text(opts.sidecar, c.sidecar, c.sidecar_bytes);
        c.verify = opts.verify;
        c.readers = opts.readers;
        c.depth = opts.depth;
        c.marks = opts.marks;
        c.pinned_percent = opts.pinned_percent;
        c.device = opts.device != nullptr ? opts.device->get() : nullptr;
        kvt_stream_t *raw = nullptr;
        const kvt_status_t status = kvt_stream_open(on.get(), &c, &raw, f.out());
        return detail::give(status, f, streamer::adopt(raw));
    }
    /// Fails with KVT_E_BUSY while units are in use, and stays owned.
    ret<void> close(deadline by = {}) {
        detail::failure f;
        const kvt_status_t status = kvt_stream_close(&raw_, by.ns, f.out());
        return detail::check(status, f);
    }
    /// Waits until all residents are at home.
    ret<void> load(deadline by = {}) const {
        detail::failure f;
        const kvt_status_t status = kvt_stream_wait_resident(raw_, by.ns, f.out());
        return detail::check(status, f);
    }
    ret<kvt_stream_progress_t> progress() const {
        kvt_stream_progress_t c = KVT_STREAM_PROGRESS_INIT;
        const kvt_status_t status = kvt_stream_progress(raw_, &c);
        return detail::give(status, c);
    }
    ret<void> pass_begin() const {
        detail::failure f;
        const kvt_status_t status = kvt_stream_pass_begin(raw_, f.out());
        return detail::check(status, f);
    }
    ret<void> pass_end() const {
        detail::failure f;
        const kvt_status_t status = kvt_stream_pass_end(raw_, f.out());
        return detail::check(status, f);
    }
    /// Waits until a unit is there.
    ret<held> acquire(std::uint32_t unit, deadline by = {}) const {
        return acquire_as(unit, 0, by);
    }
    /// The same on a device, without waiting for copies that are on their way: held::event
    /// says when the bytes are there.
    ret<held> acquire_early(std::uint32_t unit, deadline by = {}) const {
        return acquire_as(unit, KVT_ACQUIRE_SUBMITTED, by);
    }
    /// The unit if it is there, else nothing: it is on its way.
    ret<held> try_acquire(std::uint32_t unit) const {
        kvt_unit_lease_t c = KVT_UNIT_LEASE_INIT;
        kvt_status_t status = kvt_stream_acquire(raw_, unit, KVT_ACQUIRE_POLL, 0, &c, nullptr);
        const bool there = status == KVT_OK;
        if (status == KVT_E_AGAIN) status = KVT_OK;
        return detail::give(status, held(there ? raw_ : nullptr, c));
    }
    /// The engine will use these.
    ret<void> hint(span<const std::uint32_t> units) const {
        detail::failure f;
        const kvt_status_t status = kvt_stream_hint(raw_, units.data(), units.size(), f.out());
        return detail::check(status, f);
    }
    /// Other memory for weights; start with KVT_STREAM_LIMITS_INIT.
    ret<kvt_stream_plan_t> rebalance(const kvt_stream_limits_t &room) const {
        detail::failure f;
        kvt_stream_plan_t c = KVT_STREAM_PLAN_INIT;
        const kvt_status_t status = kvt_stream_rebalance(raw_, &room, &c, f.out());
        return detail::give(status, f, c);
    }
    ret<stream_plan> plan() const {
        stream_plan p;
        const kvt_status_t status = detail::rows(p.residency, [&](auto *to, auto room, auto each,
                                                              auto *n) {
            kvt_stream_plan_t c = KVT_STREAM_PLAN_INIT;
            const kvt_status_t known = kvt_stream_plan(raw_, &c, nullptr, nullptr, 0, each);
            *n = known == KVT_OK ? std::uint64_t{c.device_units} + c.host_units + c.file_units : 0;
            if (known != KVT_OK) return known;
            return kvt_stream_plan(raw_, &p.numbers, &p.forecast, to, room, each);
        });
        return detail::give(status, std::move(p));
    }
    /// The plan in words: KVT_PLAN_TEXT or KVT_PLAN_JSON.
    ret<std::string> plan_describe(std::uint32_t kind = KVT_PLAN_TEXT) const {
        std::string text;
        const kvt_status_t status = detail::words(text, [&](char *to, auto room, auto *bytes) {
            return kvt_stream_plan_describe(raw_, kind, to, room, bytes);
        });
        return detail::give(status, std::move(text));
    }
    /// What a pass would take over other links, such as "disk=3.3".
    ret<kvt_forecast_t> what_if(std::string_view links) const {
        detail::failure f;
        kvt_forecast_t c = KVT_FORECAST_INIT;
        const kvt_status_t status =
            kvt_stream_forecast(raw_, links.data(), links.size(), &c, f.out());
        return detail::give(status, f, c);
    }
    ret<kvt_stream_stats_t> stats() const {
        kvt_stream_stats_t c = KVT_STREAM_STATS_INIT;
        const kvt_status_t status = kvt_stream_stats(raw_, &c);
        return detail::give(status, c);
    }
    /// Experts by layer.
    ret<std::vector<kvt_expert_stats_t>> layers() const {
        std::vector<kvt_expert_stats_t> list;
        const kvt_status_t status = detail::rows(list, [&](auto *to, auto room, auto each, auto *n) {
            return kvt_stream_layers(raw_, to, room, each, n);
        });
        return detail::give(status, std::move(list));
    }
    /// What happened last.
    ret<std::vector<kvt_stream_span_t>> marks() const {
        std::vector<kvt_stream_span_t> list;
        const kvt_status_t status = detail::rows(list, [&](auto *to, auto room, auto each, auto *n) {
            return kvt_stream_marks(raw_, to, room, each, n);
        });
        return detail::give(status, std::move(list));
    }
    /// How files are read, and why not better.
    ret<std::string> engine() const {
        std::string text;
        const kvt_status_t status = detail::words(text, [&](char *to, auto room, auto *bytes) {
            return kvt_stream_describe_io(raw_, to, room, bytes);
        });
        return detail::give(status, std::move(text));
    }
    /// Reads a unit anew and compares it with its checksums, or notes them; its checksum.
    ret<std::uint64_t> verify(std::uint32_t unit) const {
        detail::failure f;
        std::uint64_t sum = 0;
        const kvt_status_t status = kvt_stream_verify(raw_, unit, &sum, f.out());
        return detail::give(status, f, sum);
    }
    /// The checksum of a unit, if it is known.
    ret<std::uint64_t> sum(std::uint32_t unit) const {
        std::uint64_t sum = 0;
        const kvt_status_t status = kvt_stream_checksum(raw_, unit, &sum);
        return detail::give(status, sum);
    }
    /// The address that a unit has in place; KVT_NONE = where all begin.
    ret<const void *> fixed(std::uint32_t unit) const {
        const void *address = nullptr;
        const kvt_status_t status = kvt_stream_unit_address(raw_, unit, &address, nullptr);
        return detail::give(status, address);
    }

private:
    ret<held> acquire_as(std::uint32_t unit, std::uint64_t flags, deadline by) const {
        detail::failure f;
        kvt_unit_lease_t c = KVT_UNIT_LEASE_INIT;
        const kvt_status_t status = kvt_stream_acquire(raw_, unit, flags, by.ns, &c, f.out());
        return detail::give(status, f, held(status == KVT_OK ? raw_ : nullptr, c));
    }
};

}  // namespace KVTIER_FACE_
}  // namespace kvt

#endif  // KVTIER_STREAM_HPP
