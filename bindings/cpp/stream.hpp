/// @file
/// kvt::model, kvt::streamer, kvt::unit_lease: weights in files, and streamers that load their units.
///
/// A model is a GGUF or safetensors file, or a table of byte ranges; its units are layers, experts and
/// embeddings. A streamer keeps as many units resident as the memory allows, and loads the others ahead
/// of their use, pass after pass. A lease keeps a unit in place while it is used.
///
/// Life cycle: model::open, streamer::open, for each pass acquire of each unit. The destructor of a
/// lease releases the unit; that of a streamer closes it, once all leases are released.
///
///     const kvt::model model = kvt::model::open("model.gguf");
///     kvt::stream_opts opts;
///     opts.terms.host_ceiling_bytes = UINT64_C(4) << 30; // weights get at most 4 GiB
///     const kvt::streamer streamer = kvt::streamer::open(runtime, model, opts);
///     const kvt_model_info_t facts = model.info();
///     for (std::uint32_t unit = 0; unit < facts.units; unit++) { // a pass
///         const kvt::unit_lease lease = streamer.acquire(unit);
///         use(lease.data(), lease.bytes()); // as in the file
///     }

#ifndef KVTIER_STREAM_HPP
#define KVTIER_STREAM_HPP

#include <kvtier/device.hpp>
#include <kvtier/memory.hpp>
#include <kvtier/stream.h>

namespace kvt {
inline namespace KVTIER_ERRORS_ {

// --- models ------------------------------------------------------------------

// [kvt_stream_terms_t: by generate.py]
/// Memory limits and link rates of a plan.
struct stream_terms {
    /// Weights must be able to give memory back later, by kvt_stream_rebalance or to the budget.
    /// Slots exist even where all units fit, of the size that lets most memory be given back.
    /// Experts get no more slots than a layer needs, unless expert_slots is set; slots beyond that
    /// need are given back, too. Always set with a budget; no effect with KVT_STREAM_RING.
    bool shrinks = false;
    /// 0 = on the device if there is one. KVT_COMPUTE_HOST, KVT_COMPUTE_DEVICE.
    kvt_compute_t compute = 0;
    /// KVT_STREAM_TIERED or KVT_STREAM_RING.
    kvt_stream_mode_t mode = KVT_STREAM_TIERED;
    /// KVT_PLACE_INTERLEAVED, KVT_PLACE_FIRST, KVT_PLACE_LAST.
    kvt_place_t placement = KVT_PLACE_INTERLEAVED;
    /// At most 65536; 0 = 2. Slots for units that are not resident; in a ring the least number.
    std::uint32_t slots = 0;
    /// Most device memory for weights; absent = as much as is free.
    std::optional<std::uint64_t> device_ceiling_bytes{};
    /// Most host memory for weights, slots and staging; absent = as much as is free.
    std::optional<std::uint64_t> host_ceiling_bytes{};
    /// Device memory that stays free; absent = 256 MiB.
    std::optional<std::uint64_t> device_safety_bytes{};
    /// Host memory that stays free; absent = 6 GiB, a quarter of a machine with less than 24 GiB,
    /// or a sixteenth (64 MiB to 6 GiB) of a cgroup's limit.
    std::optional<std::uint64_t> host_reserve_bytes{};
    /// Tokens that KV is reserved for, where the engine computes; 0 = the model's, at most 4096.
    std::uint32_t context = 0;
    /// Concurrent sequences; 0 = 1.
    std::uint32_t sequences = 0;
    /// Bytes of a KV element; 0 = 2.
    std::uint32_t kv_element_bytes = 0;
    /// Number of last layers that the processor computes; only if the engine computes on a device.
    std::uint32_t processor_layers = 0;
    /// Bytes of KV; absent = computed from context, sequences and kv_element_bytes.
    std::optional<std::uint64_t> kv_bytes{};
    /// Workspace of the engine.
    std::uint64_t workspace_bytes = 0;
    /// Buffers for hidden states.
    std::uint64_t hidden_bytes = 0;
    /// Absent = as many as fit; with `shrinks` as few as a layer needs.
    std::optional<std::uint32_t> expert_slots{};
    /// Host memory for reads on their way to a device; 0 = chosen, usually 16 chunks.
    std::uint64_t staging_bytes = 0;
    /// Bytes of one read or copy, at most 1 GiB; 0 = 4 MiB.
    std::uint64_t chunk_bytes = 0;
    /// Time to compute a layer, for forecasts.
    std::chrono::nanoseconds layer_compute{0};
    /// Rate from the file to host memory; 0 = not known.
    std::uint64_t disk_bytes_per_s = 0;
    /// Rate from host memory to the device; 0 = not known.
    std::uint64_t device_bytes_per_s = 0;
    /// Rate at which the processor computes with weights in host memory; 0 = not known.
    std::uint64_t processor_bytes_per_s = 0;

    kvt_stream_terms_t to_c() const noexcept {
        kvt_stream_terms_t c = KVT_STREAM_TERMS_INIT;
        if (shrinks) c.flags |= KVT_TERMS_SHRINKS;
        c.compute = compute;
        c.mode = mode;
        c.placement = placement;
        c.slots = slots;
        if (device_ceiling_bytes) c.flags |= KVT_TERMS_DEVICE_CEILING;
        c.device_ceiling_bytes = device_ceiling_bytes.value_or(0);
        if (host_ceiling_bytes) c.flags |= KVT_TERMS_HOST_CEILING;
        c.host_ceiling_bytes = host_ceiling_bytes.value_or(0);
        if (device_safety_bytes) c.flags |= KVT_TERMS_DEVICE_SAFETY;
        c.device_safety_bytes = device_safety_bytes.value_or(0);
        if (host_reserve_bytes) c.flags |= KVT_TERMS_HOST_RESERVE;
        c.host_reserve_bytes = host_reserve_bytes.value_or(0);
        c.context = context;
        c.sequences = sequences;
        c.kv_element_bytes = kv_element_bytes;
        c.processor_layers = processor_layers;
        if (kv_bytes) c.flags |= KVT_TERMS_KV;
        c.kv_bytes = kv_bytes.value_or(0);
        c.workspace_bytes = workspace_bytes;
        c.hidden_bytes = hidden_bytes;
        if (expert_slots) c.flags |= KVT_TERMS_EXPERT_SLOTS;
        c.expert_slots = expert_slots.value_or(0);
        c.staging_bytes = staging_bytes;
        c.chunk_bytes = chunk_bytes;
        c.layer_compute_ns = detail::count(layer_compute);
        c.disk_bytes_per_s = disk_bytes_per_s;
        c.device_bytes_per_s = device_bytes_per_s;
        c.processor_bytes_per_s = processor_bytes_per_s;
        return c;
    }
};
// [end]

// [kvt_stream_memory_t: by generate.py]
/// Memory that a plan is made for.
struct stream_memory {
    /// Free on the device; 0 = no device.
    std::uint64_t device_free_bytes = 0;
    /// Host memory that the process may still use.
    std::uint64_t host_free_bytes = 0;
    /// RAM of the machine, or the limit of its cgroup if that is less; 0 = host_free_bytes.
    std::uint64_t host_total_bytes = 0;
    /// Memory that may be locked; UINT64_MAX = no limit.
    std::uint64_t lockable_bytes = 0;

    kvt_stream_memory_t to_c() const noexcept {
        kvt_stream_memory_t c = KVT_STREAM_MEMORY_INIT;
        c.device_free_bytes = device_free_bytes;
        c.host_free_bytes = host_free_bytes;
        c.host_total_bytes = host_total_bytes;
        c.lockable_bytes = lockable_bytes;
        return c;
    }
};
// [end]

// [kvt_unit_entry_t: by generate.py]
/// A unit that the engine names.
struct unit_entry {
    std::string name{};
    /// KVT_ROLE_*.
    kvt_role_t role = KVT_ROLE_OTHER;
    /// Below 65536 with KVT_ROLE_LAYER and KVT_ROLE_EXPERT; else 0 or KVT_NONE.
    std::uint32_t layer = KVT_NONE;
    /// Below 65536 with KVT_ROLE_EXPERT; else 0 or KVT_NONE.
    std::uint32_t expert = KVT_NONE;
    /// Bytes of the unit, at least one range; each range becomes a tensor.
    std::vector<kvt_file_range_t> ranges{};

    kvt_unit_entry_t to_c() const noexcept {
        kvt_unit_entry_t c = kvt_unit_entry_t();
        detail::text(name, c.name, c.name_bytes);
        c.role = role;
        c.layer = layer;
        c.expert = expert;
        detail::list(ranges, c.ranges, c.range_count);
        return c;
    }
};
// [end]

/// A plan with its forecast, and the residency of each unit.
struct stream_plan {
    kvt_stream_plan_t totals = KVT_STREAM_PLAN_INIT;
    kvt_forecast_t forecast = KVT_FORECAST_INIT;
    /// One entry for each unit.
    std::vector<kvt_unit_residency_t> residency;
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
        for (const unit_entry &unit : units) entries.push_back(unit.to_c());
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
        const auto read = [&](auto... to) { return kvt_model_unit_parts(raw_, unit, to...); };
        const kvt_status_t status = detail::all_rows(list, read);
        return detail::give(status, std::move(list));
    }
    /// The parts of a tensor, by offset in the tensor: one, or one for each expert.
    ret<std::vector<kvt_part_t>> tensor_parts(std::uint32_t tensor) const {
        std::vector<kvt_part_t> list;
        const auto read = [&](auto... to) { return kvt_model_tensor_parts(raw_, tensor, to...); };
        const kvt_status_t status = detail::all_rows(list, read);
        return detail::give(status, std::move(list));
    }
    /// The index of the tensor with a name; fails with KVT_E_NOT_FOUND.
    ret<std::uint32_t> find_tensor(std::string_view name) const {
        std::uint32_t number = KVT_NONE;
        const kvt_status_t status = kvt_model_find_tensor(raw_, name.data(), name.size(), &number);
        return detail::give(status, number);
    }
    /// The unit of a layer, or of an expert of a layer.
    ret<std::uint32_t> find_unit(std::uint32_t layer, std::uint32_t expert = KVT_NONE) const {
        std::uint32_t number = KVT_NONE;
        const kvt_status_t status = kvt_model_find_unit(raw_, layer, expert, &number);
        return detail::give(status, number);
    }
    /// Plans where units are resident, and forecasts a pass. `memory` absent = this machine,
    /// without a device.
    ret<stream_plan> plan(const stream_terms &terms,
                          const std::optional<stream_memory> &memory = {}) const {
        const lowered on(terms, memory);
        detail::failure f;
        stream_plan p;
        kvt_model_info_t about = KVT_MODEL_INFO_INIT;
        kvt_status_t status = kvt_model_info(raw_, &about);
        p.residency.resize(about.units);
        if (status == KVT_OK)
            status = kvt_model_plan(raw_, &on.terms, on.memory, &p.totals, &p.forecast,
                                    p.residency.data(), p.residency.size(),
                                    sizeof(kvt_unit_residency_t), f.out());
        return detail::give(status, f, std::move(p));
    }
    /// Describes that plan: KVT_PLAN_TEXT or KVT_PLAN_JSON.
    ret<std::string> plan_describe(const stream_terms &terms,
                                   const std::optional<stream_memory> &memory = {},
                                   kvt_plan_format_t format = KVT_PLAN_TEXT) const {
        const lowered on(terms, memory);
        detail::failure f;
        std::string text;
        const auto read = [&](auto... to) {
            return kvt_model_plan_describe(raw_, &on.terms, on.memory, format, to..., f.out());
        };
        const kvt_status_t status = detail::read_text(text, read);
        return detail::give(status, f, std::move(text));
    }
    /// Forecasts a pass of that plan with other link rates in GB/s, such as "h2d=13,disk=3.3".
    ret<kvt_forecast_t> forecast(const stream_terms &terms, std::string_view links,
                                 const std::optional<stream_memory> &memory = {}) const {
        const lowered on(terms, memory);
        detail::failure f;
        kvt_forecast_t c = KVT_FORECAST_INIT;
        const kvt_status_t status = kvt_model_forecast(raw_, &on.terms, on.memory, links.data(),
                                                       links.size(), &c, f.out());
        return detail::give(status, f, c);
    }

private:
    /// The input of a plan for C.
    struct lowered {
        kvt_stream_terms_t terms;
        kvt_stream_memory_t place = KVT_STREAM_MEMORY_INIT;
        const kvt_stream_memory_t *memory = nullptr;

        lowered(const stream_terms &given, const std::optional<stream_memory> &of) noexcept
            : terms(given.to_c()) {
            if (!of) return;
            place = of->to_c();
            memory = &place;
        }
        lowered(const lowered &) = delete;
        lowered &operator=(const lowered &) = delete;
    };
};

// --- streamers ---------------------------------------------------------------

/// A lease of a unit: the right to read its bytes. Move-only. The destructor releases it. A
/// streamer cannot be closed while its units are leased.
class unit_lease {
public:
    unit_lease() noexcept = default;
    unit_lease(unit_lease &&other) noexcept
        : stream_(std::exchange(other.stream_, nullptr)), raw_(other.raw_) {}
    unit_lease &operator=(unit_lease &&other) noexcept {
        if (this != &other) {
            reset();
            stream_ = std::exchange(other.stream_, nullptr);
            raw_ = other.raw_;
        }
        return *this;
    }
    unit_lease(const unit_lease &) = delete;
    unit_lease &operator=(const unit_lease &) = delete;
    ~unit_lease() { reset(); }

    explicit operator bool() const noexcept { return stream_ != nullptr; }
    std::uint32_t unit() const noexcept { return raw_.unit; }
    const std::byte *data() const noexcept { return static_cast<const std::byte *>(raw_.address); }
    std::uint64_t bytes() const noexcept { return raw_.bytes; }
    /// KVT_MEMORY_*: address space of `data`.
    kvt_memory_t memory() const noexcept { return raw_.memory; }
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
        if (!detail::ended(status)) detail::report("kvt::unit_lease", status);
    }

private:
    friend class streamer;
    unit_lease(const kvt_stream_t *stream, const kvt_unit_lease_t &raw) noexcept
        : stream_(stream), raw_(raw) {}
    const kvt_stream_t *stream_ = nullptr;
    kvt_unit_lease_t raw_ = KVT_UNIT_LEASE_INIT;
};

// [kvt_stream_opts_t: by generate.py]
/// Options of kvt_stream_open.
struct stream_opts {
    /// Measure the disk first if its rate is not set; reads up to 256 MiB.
    bool measure = false;
    /// Passes do not follow each other: nothing is prefetched across the end of a pass.
    bool once = false;
    /// Each unit has a fixed address, and memory only while it is loaded: see
    /// kvt_stream_unit_address. On a device, a unit takes a multiple of the mapping granularity (2
    /// MiB on CUDA), which the plan counts.
    bool in_place = false;
    /// Read through the page cache, and drop the pages afterwards.
    bool buffered = false;
    /// Do not use io_uring.
    bool no_uring = false;
    /// Copy from a memory map: slow, for comparison. A file that is truncated meanwhile ends the
    /// process (SIGBUS).
    bool mapped = false;
    /// The device reads files into its slots, bypassing host memory (CUDA: cuFile, whose
    /// compatibility mode is disabled in the whole process). Opening returns KVT_E_UNAVAILABLE and
    /// the reason where it cannot: no library, no kernel module, a file system other than ext4 and
    /// XFS. Unaligned chunks, resident units and failed reads go through host memory:
    /// kvt_stream_stats_t.direct_bytes, direct_failed. The number of slots is fixed. Not with
    /// KVT_VERIFY_ALWAYS or `in_place`.
    bool direct = false;
    /// Memory limits and link rates.
    kvt::stream_terms terms{};
    /// Charged for all memory, of the same runtime; null = none. Implies KVT_TERMS_SHRINKS: the
    /// budget can reclaim resident units and expert slots.
    ref<kvt_budget_t> budget{};
    /// 32 bits; the budget reclaims from owners of low priority first.
    std::int64_t priority = 0;
    /// Units in the order of a pass, without experts; absent = the order of their numbers.
    std::optional<std::vector<std::uint32_t>> order{};
    /// Policy spec that chooses victims in KVT_STREAM_RING; empty = "fifo".
    std::string_view policy{};
    /// Policy spec of the expert slots; empty = "lru".
    std::string_view expert_policy{};
    /// Path of the checksum file; empty = beside the model (.kvtsum). Absent = no file. Ignored
    /// with KVT_VERIFY_NEVER.
    std::optional<std::string_view> sidecar{};
    /// KVT_VERIFY_NEVER, KVT_VERIFY_FIRST, KVT_VERIFY_ALWAYS.
    kvt_verify_t verify = KVT_VERIFY_NEVER;
    /// Reader threads, at most 64; 0 = 8.
    std::uint32_t readers = 0;
    /// Reads in flight of one thread, at most 64; 0 = 64.
    std::uint32_t depth = 0;
    /// Spans kept for kvt_stream_marks, at most 2^20; with any, each acquire takes a lock.
    std::uint32_t marks = 0;
    /// Percent of the expert slots that the most used experts keep; absent = 50.
    std::optional<std::uint32_t> pinned_percent{};
    /// Device of the same runtime, with memory of its own, that the engine computes on; null = the
    /// processor.
    ref<kvt_device_t> device{};

    kvt_stream_opts_t to_c(kvt_stream_terms_t &terms_c) const noexcept {
        kvt_stream_opts_t c = KVT_STREAM_OPTS_INIT;
        if (measure) c.flags |= KVT_STREAM_MEASURE;
        if (once) c.flags |= KVT_STREAM_ONCE;
        if (in_place) c.flags |= KVT_STREAM_IN_PLACE;
        if (buffered) c.flags |= KVT_STREAM_BUFFERED;
        if (no_uring) c.flags |= KVT_STREAM_NO_URING;
        if (mapped) c.flags |= KVT_STREAM_MAPPED;
        if (direct) c.flags |= KVT_STREAM_DIRECT;
        terms_c = terms.to_c();
        c.terms = &terms_c;
        c.budget = budget.get();
        c.priority = priority;
        detail::list(order, c.order, c.order_count);
        detail::text(policy, c.policy, c.policy_bytes);
        detail::text(expert_policy, c.expert_policy, c.expert_policy_bytes);
        if (sidecar) {
            c.flags |= KVT_STREAM_SIDECAR;
            detail::text(*sidecar, c.sidecar, c.sidecar_bytes);
        }
        c.verify = verify;
        c.readers = readers;
        c.depth = depth;
        c.marks = marks;
        if (pinned_percent) c.flags |= KVT_STREAM_SET_PINNED_PERCENT;
        c.pinned_percent = pinned_percent.value_or(0);
        c.device = device.get();
        return c;
    }
};
// [end]

// [kvt_stream_limits_t: by generate.py]
/// Memory for weights from now on; an absent limit is unchanged.
struct stream_limits {
    /// Most host memory.
    std::optional<std::uint64_t> host_bytes{};
    /// Most device memory.
    std::optional<std::uint64_t> device_bytes{};
    /// Tokens that KV is reserved for.
    std::uint32_t context = 0;

    kvt_stream_limits_t to_c() const noexcept {
        kvt_stream_limits_t c = KVT_STREAM_LIMITS_INIT;
        if (host_bytes) c.flags |= KVT_LIMIT_HOST;
        c.host_bytes = host_bytes.value_or(0);
        if (device_bytes) c.flags |= KVT_LIMIT_DEVICE;
        c.device_bytes = device_bytes.value_or(0);
        c.context = context;
        return c;
    }
};
// [end]

/// Loads the units of a model ahead of their use, under a budget of memory. Any thread may use it.
class streamer : public detail::owner<streamer, kvt_stream_t> {
    friend class detail::owner<streamer, kvt_stream_t>;
    static void drop(kvt_stream_t *raw) noexcept {
        const kvt_status_t status = kvt_stream_close(&raw, 0, nullptr);
        if (!detail::ended(status)) detail::report("kvt::streamer", status);
    }

public:
    /// Opens a streamer and begins to load resident units.
    static ret<streamer> open(const runtime &on, const model &of, const stream_opts &opts = {}) {
        detail::failure f;
        kvt_stream_terms_t terms;
        kvt_stream_opts_t c = opts.to_c(terms);
        c.model = of.get();
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
    ret<void> wait_resident(deadline by = {}) const {
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
    ret<unit_lease> acquire(std::uint32_t unit, deadline by = {}) const {
        return acquire_as(unit, 0, by);
    }
    /// Leases a unit on a device, without waiting for copies in flight: the bytes are complete
    /// after unit_lease::event.
    ret<unit_lease> acquire_submitted(std::uint32_t unit, deadline by = {}) const {
        return acquire_as(unit, KVT_ACQUIRE_SUBMITTED, by);
    }
    /// Leases a unit if it is loaded; else returns an empty lease, and the unit is being loaded.
    ret<unit_lease> try_acquire(std::uint32_t unit) const {
        kvt_unit_lease_t c = KVT_UNIT_LEASE_INIT;
        kvt_status_t status = kvt_stream_acquire(raw_, unit, KVT_ACQUIRE_POLL, 0, &c, nullptr);
        const bool leased = status == KVT_OK;
        if (status == KVT_E_AGAIN) status = KVT_OK;
        return detail::give(status, unit_lease(leased ? raw_ : nullptr, c));
    }
    /// Prefetches units that the engine will use, such as the experts that a router chose.
    ret<void> hint(span<const std::uint32_t> units) const {
        detail::failure f;
        const kvt_status_t status = kvt_stream_hint(raw_, units.data(), units.size(), f.out());
        return detail::check(status, f);
    }
    /// Gives weights more or less memory; returns the new plan.
    ret<kvt_stream_plan_t> rebalance(const stream_limits &limits) const {
        detail::failure f;
        const kvt_stream_limits_t to = limits.to_c();
        kvt_stream_plan_t c = KVT_STREAM_PLAN_INIT;
        const kvt_status_t status = kvt_stream_rebalance(raw_, &to, &c, f.out());
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
            return kvt_stream_plan(raw_, &p.totals, &p.forecast, to, capacity, stride);
        };
        const kvt_status_t status = detail::all_rows(p.residency, read);
        return detail::give(status, std::move(p));
    }
    /// Describes the current plan: KVT_PLAN_TEXT or KVT_PLAN_JSON.
    ret<std::string> plan_describe(kvt_plan_format_t format = KVT_PLAN_TEXT) const {
        std::string text;
        const auto read = [&](auto... to) { return kvt_stream_plan_describe(raw_, format, to...); };
        const kvt_status_t status = detail::read_text(text, read);
        return detail::give(status, std::move(text));
    }
    /// Forecasts a pass of the current plan with other link rates in GB/s, such as "disk=3.3".
    ret<kvt_forecast_t> forecast(std::string_view links) const {
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
        const auto read = [&](auto... to) { return kvt_stream_layers(raw_, to...); };
        const kvt_status_t status = detail::all_rows(list, read);
        return detail::give(status, std::move(list));
    }
    /// The last stream_opts::marks spans of time, the oldest first.
    ret<std::vector<kvt_stream_span_t>> marks() const {
        std::vector<kvt_stream_span_t> list;
        const auto read = [&](auto... to) { return kvt_stream_marks(raw_, to...); };
        const kvt_status_t status = detail::all_rows(list, read);
        return detail::give(status, std::move(list));
    }
    /// Describes how files are read, and why no faster method is used.
    ret<std::string> describe_io() const {
        std::string text;
        const auto read = [&](auto... to) { return kvt_stream_describe_io(raw_, to...); };
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
    ret<std::uint64_t> checksum(std::uint32_t unit) const {
        std::uint64_t sum = 0;
        const kvt_status_t status = kvt_stream_checksum(raw_, unit, &sum);
        return detail::give(status, sum);
    }
    /// The fixed address of a unit (KVT_STREAM_IN_PLACE); KVT_NONE = the start of the range of all
    /// units.
    ret<const void *> unit_address(std::uint32_t unit) const {
        const void *address = nullptr;
        const kvt_status_t status = kvt_stream_unit_address(raw_, unit, &address, nullptr);
        return detail::give(status, address);
    }

private:
    ret<unit_lease> acquire_as(std::uint32_t unit, std::uint64_t flags, deadline by) const {
        detail::failure f;
        kvt_unit_lease_t c = KVT_UNIT_LEASE_INIT;
        const kvt_status_t status = kvt_stream_acquire(raw_, unit, flags, by.ns, &c, f.out());
        return detail::give(status, f, unit_lease(status == KVT_OK ? raw_ : nullptr, c));
    }
};

}  // namespace KVTIER_ERRORS_
}  // namespace kvt

#endif  // KVTIER_STREAM_HPP
