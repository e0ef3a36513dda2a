// kvt::model and kvt::streamer: stream the weights of models that are larger than memory, unit by
// unit. kvtier.hpp includes this file.

#ifndef KVTIER_STREAM_HPP
#define KVTIER_STREAM_HPP

#ifndef KVTIER_HPP
#error "include <kvtier/kvtier.hpp>"
#endif

namespace kvt {
inline namespace KVTIER_FACE_ {

/// A unit that the engine names, for files of formats that the library does not know.
struct unit_entry {
    std::string name;
    /// KVT_ROLE_*.
    std::uint32_t role = KVT_ROLE_OTHER;
    std::uint32_t layer = KVT_NONE;
    std::uint32_t expert = KVT_NONE;
    /// Bytes of the unit, at least one range.
    std::vector<kvt_file_range_t> ranges;
};

/// A plan with its forecast, and the residency of each unit.
struct stream_plan {
    kvt_stream_plan_t numbers = KVT_STREAM_PLAN_INIT;
    kvt_forecast_t forecast = KVT_FORECAST_INIT;
    /// One entry for each unit.
    std::vector<kvt_unit_residency_t> residency;
};

struct stream_opts {
    /// Memory limits and link rates; KVT_TERMS_SHRINKS is one of their flags.
    kvt_stream_terms_t terms = KVT_STREAM_TERMS_INIT;
    /// KVT_STREAM_*.
    std::uint64_t flags = 0;
    /// The budget reclaims from owners of low priority first.
    std::int64_t priority = 0;
    /// Units in the order of a pass; absent = the order of their numbers.
    std::optional<std::vector<std::uint32_t>> order;
    /// Spec of the policy that chooses victims in a ring; empty = "fifo".
    std::string_view policy;
    /// Spec of the policy of the expert slots; empty = "lru".
    std::string_view expert_policy;
    /// Path of the checksum file.
    std::string_view sidecar;
    /// KVT_VERIFY_*.
    std::uint32_t verify = KVT_VERIFY_NEVER;
    /// Reader threads; 0 = 4.
    std::uint32_t readers = 0;
    /// Reads in flight of one thread; 0 = 64.
    std::uint32_t depth = 0;
    /// Spans kept for streamer::marks; 0 = none.
    std::uint32_t marks = 0;
    /// Percent of the expert slots that the most used experts keep; 0 = 50.
    std::uint32_t pinned_percent = 0;
    /// Device with memory of its own that the engine computes on; null = the processor.
    const kvt::device *device = nullptr;
};

namespace detail {
inline std::vector<kvt_str_t> texts(span<const std::string> all) {
    std::vector<kvt_str_t> list;
    list.reserve(all.size());
    for (const std::string &one : all) list.push_back(kvt_str_t{one.data(), one.size()});
    return list;
}

}  // namespace detail

/// The files of a model: tensors, and the units that they are loaded in. Immutable; any thread may
/// use it. Texts of its structs are valid until it is closed.
class model : public detail::owner<model, kvt_model_t> {
    friend class detail::owner<model, kvt_model_t>;
    static void drop(kvt_model_t *raw) noexcept {
        const kvt_status_t status = kvt_model_close(&raw);
        if (!detail::ended(status)) detail::report("kvt::model", status);
    }

public:
    /// Opens a model. `paths` are all its files, or one path: a GGUF or safetensors file, the index
    /// of a sharded model, its directory, or any file of a split GGUF model.
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
    /// Makes a model from units that the engine names.
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
    /// The parts of tensors in a unit, by offset in the unit.
    ret<std::vector<kvt_part_t>> unit_parts(std::uint32_t unit) const {
        std::vector<kvt_part_t> list;
        const auto read = [&](auto *to, auto capacity, auto stride, auto *n) {
            return kvt_model_unit_parts(raw_, unit, to, capacity, stride, n);
        };
        const kvt_status_t status = detail::all_rows(list, read);
        return detail::give(status, std::move(list));
    }
    /// The parts of a tensor, by offset in the tensor: one, or one for each expert.
    ret<std::vector<kvt_part_t>> tensor_parts(std::uint32_t tensor) const {
        std::vector<kvt_part_t> list;
        const auto read = [&](auto *to, auto capacity, auto stride, auto *n) {
            return kvt_model_tensor_parts(raw_, tensor, to, capacity, stride, n);
        };
        const kvt_status_t status = detail::all_rows(list, read);
        return detail::give(status, std::move(list));
    }
    /// The index of the tensor with a name; fails with KVT_E_NOT_FOUND.
    ret<std::uint32_t> find(std::string_view name) const {
        std::uint32_t number = KVT_NONE;
        const kvt_status_t status = kvt_model_find_tensor(raw_, name.data(), name.size(), &number);
        return detail::give(status, number);
    }
    /// The unit of a layer, or of an expert of a layer.
    ret<std::uint32_t> layer(std::uint32_t layer, std::uint32_t expert = KVT_NONE) const {
        std::uint32_t number = KVT_NONE;
        const kvt_status_t status = kvt_model_find_unit(raw_, layer, expert, &number);
        return detail::give(status, number);
    }
    /// Plans where units are resident, and forecasts a pass. `memory` null = this machine, without
    /// a device.
    ret<stream_plan> plan(const kvt_stream_terms_t &terms,
                          const kvt_stream_memory_t *memory = nullptr) const {
        detail::failure f;
        stream_plan p;
        kvt_model_info_t about = KVT_MODEL_INFO_INIT;
        kvt_status_t status = kvt_model_info(raw_, &about);
        p.residency.resize(about.units);
        if (status == KVT_OK)
            status = kvt_model_plan(raw_, &terms, memory, &p.numbers, &p.forecast,
                                    p.residency.data(), p.residency.size(),
                                    sizeof(kvt_unit_residency_t), f.out());
        return detail::give(status, f, std::move(p));
    }
    /// Describes that plan: KVT_PLAN_TEXT or KVT_PLAN_JSON.
    ret<std::string> plan_describe(const kvt_stream_terms_t &terms,
                                   const kvt_stream_memory_t *memory = nullptr,
                                   std::uint32_t kind = KVT_PLAN_TEXT) const {
        detail::failure f;
        std::string text;
        const auto read = [&](char *to, auto capacity, auto *bytes) {
            return kvt_model_plan_describe(raw_, &terms, memory, kind, to, capacity, bytes,
                                           f.out());
        };
        const kvt_status_t status = detail::read_text(text, read);
        return detail::give(status, f, std::move(text));
    }
    /// Forecasts a pass of that plan with other link rates in GB/s, such as "h2d=13,disk=3.3".
    ret<kvt_forecast_t> what_if(const kvt_stream_terms_t &terms, std::string_view links,
                                const kvt_stream_memory_t *memory = nullptr) const {
        detail::failure f;
        kvt_forecast_t c = KVT_FORECAST_INIT;
        const kvt_status_t status =
            kvt_model_forecast(raw_, &terms, memory, links.data(), links.size(), &c, f.out());
        return detail::give(status, f, c);
    }
};

/// A lease of a unit: the right to read its bytes. Move-only. The destructor releases it. A
/// streamer cannot be closed while its units are leased.
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
    /// KVT_MEMORY_*: address space of `data`.
    std::uint32_t memory() const noexcept { return raw_.memory; }
    /// The device event that completes the bytes; 0 = the bytes are complete.
    std::uint64_t event() const noexcept { return raw_.event; }
    /// The bytes of a part of a tensor in the unit.
    span<const std::byte> part(const kvt_part_t &part) const noexcept {
        return span<const std::byte>(data() + part.at, static_cast<std::size_t>(part.bytes));
    }
    /// Releases the lease.
    ret<void> release() {
        detail::failure f;
        const kvt_status_t status = kvt_stream_release(stream_, &raw_, 0, f.out());
        stream_ = nullptr;
        return detail::check(status, f);
    }
    /// Releases the lease; its memory may be reused after the device event `after`. The streamer
    /// takes the event over. If it rejects the event, lease and event are unchanged. If a copy to
    /// the device failed, the lease is released and the call fails with the status of the copy.
    ret<void> release(device_event &&after) {
        detail::failure f;
        const kvt_status_t status =
            kvt_stream_release(stream_, &raw_, after.number(), f.out());
        const bool rejected = status == KVT_E_UNSUPPORTED || status == KVT_E_INVALID ||
                              status == KVT_E_HANDLE || status == KVT_E_STATE ||
                              status == KVT_E_FORKED;
        if (!rejected) {
            stream_ = nullptr;
            (void)after.release();
        }
        return detail::check(status, f);
    }
    /// Releases the lease; reports a failure to the defect hook.
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

/// Loads the units of a model ahead of their use, under a budget of memory. Any thread may use it.
class streamer : public detail::owner<streamer, kvt_stream_t> {
    friend class detail::owner<streamer, kvt_stream_t>;
    static void drop(kvt_stream_t *raw) noexcept {
        const kvt_status_t status = kvt_stream_close(&raw, 0, nullptr);
        if (!detail::ended(status)) detail::report("kvt::streamer", status);
    }

public:
    /// Opens a streamer and begins to load resident units. `budget` is charged for all memory; null
    /// = no budget.
    static ret<streamer> open(const runtime &on, const model &of, const stream_opts &opts = {},
                              const kvt::budget *budget = nullptr) {
        detail::failure f;
        kvt_stream_opts_t c = KVT_STREAM_OPTS_INIT;
        static constexpr std::uint32_t none = 0; // null means the order of the units' numbers
        c.model = of.get();
        c.terms = &opts.terms;
        c.budget = budget != nullptr ? budget->get() : nullptr;
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
    /// Fails with KVT_E_BUSY while units are leased; this object still owns the streamer then.
    ret<void> close(deadline by = {}) {
        detail::failure f;
        const kvt_status_t status = kvt_stream_close(&raw_, by.ns, f.out());
        return detail::check(status, f);
    }
    /// Waits until all resident units are loaded. Optional: acquired units are loaded first.
    ret<void> load(deadline by = {}) const {
        detail::failure f;
        const kvt_status_t status = kvt_stream_wait_resident(raw_, by.ns, f.out());
        return detail::check(status, f);
    }
    /// The progress of loading the resident units.
    ret<kvt_stream_progress_t> progress() const {
        kvt_stream_progress_t c = KVT_STREAM_PROGRESS_INIT;
        const kvt_status_t status = kvt_stream_progress(raw_, &c);
        return detail::give(status, c);
    }
    /// Begins a pass, in which units are prefetched in their order.
    ret<void> pass_begin() const {
        detail::failure f;
        const kvt_status_t status = kvt_stream_pass_begin(raw_, f.out());
        return detail::check(status, f);
    }
    /// Ends a pass.
    ret<void> pass_end() const {
        detail::failure f;
        const kvt_status_t status = kvt_stream_pass_end(raw_, f.out());
        return detail::check(status, f);
    }
    /// Leases a unit, and waits until it is loaded.
    ret<held> acquire(std::uint32_t unit, deadline by = {}) const {
        return acquire_as(unit, 0, by);
    }
    /// Leases a unit on a device, without waiting for copies in flight: the bytes are complete
    /// after held::event.
    ret<held> acquire_early(std::uint32_t unit, deadline by = {}) const {
        return acquire_as(unit, KVT_ACQUIRE_SUBMITTED, by);
    }
    /// Leases a unit if it is loaded; else returns an empty lease, and the unit is being loaded.
    ret<held> try_acquire(std::uint32_t unit) const {
        kvt_unit_lease_t c = KVT_UNIT_LEASE_INIT;
        kvt_status_t status = kvt_stream_acquire(raw_, unit, KVT_ACQUIRE_POLL, 0, &c, nullptr);
        const bool leased = status == KVT_OK;
        if (status == KVT_E_AGAIN) status = KVT_OK;
        return detail::give(status, held(leased ? raw_ : nullptr, c));
    }
    /// Prefetches units that the engine will use, such as the experts that a router chose.
    ret<void> hint(span<const std::uint32_t> units) const {
        detail::failure f;
        const kvt_status_t status = kvt_stream_hint(raw_, units.data(), units.size(), f.out());
        return detail::check(status, f);
    }
    /// Gives weights more or less memory; returns the new plan. Start with KVT_STREAM_LIMITS_INIT.
    ret<kvt_stream_plan_t> rebalance(const kvt_stream_limits_t &limits) const {
        detail::failure f;
        kvt_stream_plan_t c = KVT_STREAM_PLAN_INIT;
        const kvt_status_t status = kvt_stream_rebalance(raw_, &limits, &c, f.out());
        return detail::give(status, f, c);
    }
    /// The current plan, its forecast, and the residency of each unit.
    ret<stream_plan> plan() const {
        stream_plan p;
        const auto read = [&](auto *to, auto capacity, auto stride, auto *n) {
            kvt_stream_plan_t c = KVT_STREAM_PLAN_INIT;
            const kvt_status_t status = kvt_stream_plan(raw_, &c, nullptr, nullptr, 0, stride);
            *n = status == KVT_OK ? std::uint64_t{c.device_units} + c.host_units + c.file_units : 0;
            if (status != KVT_OK) return status;
            return kvt_stream_plan(raw_, &p.numbers, &p.forecast, to, capacity, stride);
        };
        const kvt_status_t status = detail::all_rows(p.residency, read);
        return detail::give(status, std::move(p));
    }
    /// Describes the current plan: KVT_PLAN_TEXT or KVT_PLAN_JSON.
    ret<std::string> plan_describe(std::uint32_t kind = KVT_PLAN_TEXT) const {
        std::string text;
        const auto read = [&](char *to, auto capacity, auto *bytes) {
            return kvt_stream_plan_describe(raw_, kind, to, capacity, bytes);
        };
        const kvt_status_t status = detail::read_text(text, read);
        return detail::give(status, std::move(text));
    }
    /// Forecasts a pass of the current plan with other link rates in GB/s, such as "disk=3.3".
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
    /// Expert counters, one row for each layer that has experts.
    ret<std::vector<kvt_expert_stats_t>> layers() const {
        std::vector<kvt_expert_stats_t> list;
        const auto read = [&](auto *to, auto capacity, auto stride, auto *n) {
            return kvt_stream_layers(raw_, to, capacity, stride, n);
        };
        const kvt_status_t status = detail::all_rows(list, read);
        return detail::give(status, std::move(list));
    }
    /// The last stream_opts::marks spans of time, the oldest first.
    ret<std::vector<kvt_stream_span_t>> marks() const {
        std::vector<kvt_stream_span_t> list;
        const auto read = [&](auto *to, auto capacity, auto stride, auto *n) {
            return kvt_stream_marks(raw_, to, capacity, stride, n);
        };
        const kvt_status_t status = detail::all_rows(list, read);
        return detail::give(status, std::move(list));
    }
    /// Describes how files are read, and why no faster method is used.
    ret<std::string> engine() const {
        std::string text;
        const auto read = [&](char *to, auto capacity, auto *bytes) {
            return kvt_stream_describe_io(raw_, to, capacity, bytes);
        };
        const kvt_status_t status = detail::read_text(text, read);
        return detail::give(status, std::move(text));
    }
    /// Reads a unit from its files and compares it with its checksums; stores unknown ones. Returns
    /// the checksum of the unit.
    ret<std::uint64_t> verify(std::uint32_t unit) const {
        detail::failure f;
        std::uint64_t sum = 0;
        const kvt_status_t status = kvt_stream_verify(raw_, unit, &sum, f.out());
        return detail::give(status, f, sum);
    }
    /// The checksum of a unit; fails with KVT_E_NOT_FOUND if it is unknown.
    ret<std::uint64_t> sum(std::uint32_t unit) const {
        std::uint64_t sum = 0;
        const kvt_status_t status = kvt_stream_checksum(raw_, unit, &sum);
        return detail::give(status, sum);
    }
    /// The fixed address of a unit (KVT_STREAM_IN_PLACE); KVT_NONE = the start of the range of all
    /// units.
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
