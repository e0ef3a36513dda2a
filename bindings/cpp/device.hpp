/// @file
/// kvt::device, kvt::device_event, kvt::device_memory: memory, copies, events, kernels, custom devices.
///
/// A device copies between host memory and its own, in streams, and says when with events. The CPU is
/// one, a GPU through the CUDA driver is one, and an engine can bring its own: kvt::custom_device. A
/// store or a streamer that is given a device accepts views of its memory.
///
/// Life cycle: device::cuda (or host, simulated, custom), copy, device_event::wait; the destructor of an
/// event waits for it and releases it. Close stores and streamers before the device that they use.
///
///     // Loads the driver: KVT_E_UNAVAILABLE where there is none.
///     const kvt::device device = kvt::device::cuda(runtime);
///     const kvt::device_memory memory = device.alloc(host.size());
///     const kvt::device_event uploaded =
///         device.copy(kvt::upload(host.data(), memory.data(), host.size()));
///     uploaded.wait();
///     kvt::store_opts opts; // its transfers take views of device memory
///     opts.device = &device;
///     opts.spec = "store(host=8GiB, device=device(capacity=2GiB))";
///     const kvt::store store = kvt::store::open(runtime, opts);

#ifndef KVTIER_DEVICE_HPP
#define KVTIER_DEVICE_HPP

#include <kvtier/device.h>
#include <kvtier/memory.hpp>

namespace kvt {
inline namespace KVTIER_ERRORS_ {

// [kvt_device_opts_t: by generate.py]
/// Options of kvt_device_open. Fields for other kinds of devices must be 0.
struct device_opts {
    /// The device computes checksums of copied planes in its own memory, and stores compare them
    /// with the bytes on the host. A copy that differs is repeated once, then fails with
    /// KVT_E_CORRUPT.
    bool verify = false;
    /// CUDA: index of the device, unless `context` is given.
    std::uint32_t ordinal = 0;
    /// CUDA: the engine's context (CUcontext), which must outlive the device; 0 = the primary
    /// context.
    std::uint64_t context = 0;
    /// CUDA: at most 64 streams (CUstream) of the engine in `context`, no default streams; empty =
    /// four of the device's own.
    std::vector<std::uint64_t> streams{};
    /// CUDA: path of the driver's library; empty = the system's.
    std::string_view library{};
    /// Simulated: bytes that can be allocated; 0 = no limit.
    std::uint64_t memory_bytes = 0;
    /// Simulated: seed of all random choices.
    std::uint64_t seed = 0;
    /// Simulated: least duration of a batch of copies; 0 = 10 us.
    std::chrono::nanoseconds latency{0};
    /// Simulated: bandwidth of a stream; 0 = 20 GB/s.
    std::uint64_t bytes_per_s = 0;
    /// CUDA: device memory of the engine that stores, streamers and kvt_device_alloc allocate from;
    /// it must outlive the device. 0 = allocate from the driver.
    std::uint64_t arena = 0;
    std::uint64_t arena_bytes = 0;
    /// CUDA: ordinals of at most 63 other devices of the process. Copies may name memory of their
    /// primary contexts. Empty = none.
    std::vector<std::uint32_t> peers{};
    /// CUDA: path of cuFile's library, which KVT_STREAM_DIRECT loads; empty = the system's.
    std::string_view cufile{};

    kvt_device_opts_t to_c() const noexcept {
        kvt_device_opts_t c = KVT_DEVICE_OPTS_INIT;
        if (verify) c.flags |= KVT_DEVICE_VERIFY;
        c.ordinal = ordinal;
        c.context = context;
        detail::list(streams, c.streams, c.stream_count);
        detail::text(library, c.library, c.library_bytes);
        c.memory_bytes = memory_bytes;
        c.seed = seed;
        c.latency_ns = detail::count(latency);
        c.bytes_per_s = bytes_per_s;
        c.arena = arena;
        c.arena_bytes = arena_bytes;
        detail::list(peers, c.peers, c.peer_count);
        detail::text(cufile, c.cufile, c.cufile_bytes);
        return c;
    }
};
// [end]

/// Properties of a device.
struct device_info {
    /// KVT_DEVICE_KIND_HOST, _CUDA, _CUSTOM or _SIMULATED.
    kvt_device_kind_t kind = 0;
    /// Work continues after a call has returned.
    bool asynchronous = false;
    /// The device computes checksums of the planes that it copies.
    bool checksums = false;
    /// The device has memory that only it can access.
    bool has_memory = false;
    /// Copies of host memory are slow unless the memory is registered: device::register_host.
    bool wants_pinned = false;
    /// Number of streams. Work runs in order within a stream.
    std::uint32_t streams = 0;
    /// Available kernels: a set of 1 << KVT_DEVICE_KERNEL_*.
    std::uint64_t kernels = 0;
    /// Bytes that can still be allocated; empty = unknown.
    std::optional<std::uint64_t> free_bytes;

    bool has_kernel(kvt_device_kernel_t kind_of_kernel) const noexcept {
        return kind_of_kernel < 64 && (kernels >> kind_of_kernel & 1) != 0;
    }
    static device_info from_c(const kvt_device_info_t &c) noexcept {
        device_info about;
        about.kind = c.kind;
        about.asynchronous = (c.flags & KVT_DEVICE_ASYNCHRONOUS) != 0;
        about.checksums = (c.flags & KVT_DEVICE_CHECKSUMS) != 0;
        about.has_memory = (c.flags & KVT_DEVICE_HAS_MEMORY) != 0;
        about.wants_pinned = (c.flags & KVT_DEVICE_WANTS_PINNED) != 0;
        about.streams = c.streams;
        about.kernels = c.kernels;
        if (c.free_bytes != UINT64_MAX) about.free_bytes = c.free_bytes;
        return about;
    }
};

// [kvt_conformance_opts_t: by generate.py]
/// Options of kvt_device_conformance.
struct conformance_opts {
    /// Close the device at the end, and check that.
    bool closes = false;
    /// Seed of all random choices.
    std::uint64_t seed = 0;
    /// Time limit of an event; 0 = 30 s.
    std::chrono::nanoseconds patience{0};
    /// Random trials, at most 100,000; 0 = 40.
    std::uint32_t rounds = 0;

    kvt_conformance_opts_t to_c() const noexcept {
        kvt_conformance_opts_t c = KVT_CONFORMANCE_OPTS_INIT;
        if (closes) c.flags |= KVT_CONFORMANCE_CLOSES;
        c.seed = seed;
        c.patience_ns = detail::count(patience);
        c.rounds = rounds;
        return c;
    }
};
// [end]

/// The result of one conformance check.
struct conformance_check {
    std::string name;
    /// KVT_VERDICT_*.
    kvt_verdict_t verdict = KVT_VERDICT_PASSED;
    /// Why the check failed or was skipped; empty if it passed.
    std::string why;
};

/// The number of checks with each result, and all results.
struct conformance_report {
    std::uint32_t passed = 0;
    std::uint32_t skipped = 0;
    std::uint32_t failed = 0;
    std::vector<conformance_check> checks;
};

/// A device that the engine implements: derive from this class, and test it with
/// device::conformance. Methods that are not overridden do nothing, or report that the device lacks
/// the feature.
///
/// Threading: methods are called from any thread, several at once. They must not call this device.
///
/// Errors: a method that throws fails with KVT_E_STATE (`allocate`: KVT_E_NOMEM) and is reported to
/// the defect hook. If `query` throws, the library queries the event again. KVT_E_UNAVAILABLE, from
/// any method, means that the device is lost.
class custom_device {
public:
    virtual ~custom_device() = default;

    /// KVT_DEVICE_HAS_MEMORY, KVT_DEVICE_WANTS_PINNED. Called once, as the next two.
    virtual kvt_device_features_t flags() const { return 0; }
    /// Number of streams, 1 to 64.
    virtual std::uint32_t streams() const { return 1; }
    /// Kernels of `launch`: a set of 1 << KVT_DEVICE_KERNEL_*.
    virtual std::uint64_t kernels() const { return 0; }

    /// Submits copies to a stream, after the event `after` (0 = none). Writes the event that
    /// completes with them, a number other than 0. Without copies it only records an event. If it
    /// returns an error or throws, the batch must not have begun.
    virtual kvt_status_t submit(std::uint32_t stream, std::uint64_t after,
                                span<const kvt_copy_rows_t> copies, std::uint64_t &event) = 0;
    /// KVT_OK: completed; KVT_E_AGAIN: pending; else the status that its batch failed with.
    virtual kvt_status_t query(std::uint64_t event) = 0;
    /// Waits for an event until a deadline. It may return early.
    virtual kvt_status_t wait(std::uint64_t, deadline) { return KVT_OK; }

    // The library may hold a lock while it calls the next four. They must not call the library, nor
    // wait for a thread that does.
    /// Releases an event: the library uses it no more.
    virtual void release(std::uint64_t) {}
    /// Allocates memory at a multiple of 256.
    virtual kvt_status_t allocate(std::uint64_t, std::uint64_t &) { return KVT_E_UNSUPPORTED; }
    virtual void free(std::uint64_t, std::uint64_t) {}
    /// Bytes that can still be allocated; empty = unknown.
    virtual std::optional<std::uint64_t> free_bytes() { return std::nullopt; }

    /// Registers host memory that many copies will use; with 0 bytes, unregisters it.
    virtual kvt_status_t register_host(std::uint64_t, std::uint64_t) { return KVT_OK; }
    /// Imports an event of the engine: writes an event of the device that completes with it.
    virtual kvt_status_t import_event(std::uint64_t, std::uint64_t &) { return KVT_E_UNSUPPORTED; }
    /// Makes a stream of the engine wait for an event.
    virtual kvt_status_t stream_wait(std::uint64_t, std::uint64_t) { return KVT_E_UNSUPPORTED; }
    /// Creates an event that completes when `signal_event` is called with it.
    virtual kvt_status_t create_event(std::uint64_t &) { return KVT_E_UNSUPPORTED; }
    /// Signals an event of `create_event`. Must not wait.
    virtual kvt_status_t signal_event(std::uint64_t) { return KVT_E_UNSUPPORTED; }
    /// Submits kernels to a stream, as `submit` does copies.
    virtual kvt_status_t launch(std::uint32_t, std::uint64_t, span<const kvt_kernel_t>,
                                std::uint64_t &) {
        return KVT_E_UNSUPPORTED;
    }
};

namespace detail {
/// The entries of an array. If those of a newer library are longer, they are copied to `copies`.
template <class Row>
span<const Row> entries(const Row *first, std::uint64_t count, std::uint64_t stride,
                        std::vector<Row> &copies) {
    if (stride == sizeof(Row)) return span<const Row>(first, static_cast<std::size_t>(count));
    const auto *at = reinterpret_cast<const unsigned char *>(first);
    for (std::uint64_t i = 0; i < count; i++)
        copies.push_back(*reinterpret_cast<const Row *>(at + i * stride));
    return span<const Row>(copies);
}

/// The C callbacks of a custom device. Exceptions do not unwind into C.
struct device_box {
    std::unique_ptr<custom_device> own;

    template <class F>
    static kvt_status_t call(void *user_data, F f, kvt_status_t thrown = KVT_E_STATE) noexcept {
        custom_device &own = *static_cast<device_box *>(user_data)->own;
        auto body = [&]() -> kvt_status_t { return f(own); };
        return guarded<kvt_status_t>("kvt custom device", thrown, body);
    }
    static kvt_status_t submit(void *user_data, std::uint32_t stream, std::uint64_t after,
                               const kvt_copy_rows_t *copies, std::uint64_t count,
                               std::uint64_t stride, std::uint64_t *event) noexcept {
        return call(user_data, [&](custom_device &own) {
            std::vector<kvt_copy_rows_t> rows;
            return own.submit(stream, after, entries(copies, count, stride, rows), *event);
        });
    }
    static kvt_status_t query(void *user_data, std::uint64_t event) noexcept {
        // Only the query failed. The batch may still access its memory.
        return call(
            user_data, [&](custom_device &own) { return own.query(event); }, KVT_E_AGAIN);
    }
    static kvt_status_t wait(void *user_data, std::uint64_t event, std::uint64_t by) noexcept {
        return call(user_data,
                    [&](custom_device &own) { return own.wait(event, deadline(by)); });
    }
    static void release(void *user_data, std::uint64_t event) noexcept {
        (void)call(user_data, [&](custom_device &own) { return own.release(event), KVT_OK; });
    }
    static kvt_status_t allocate(void *user_data, std::uint64_t bytes,
                                 std::uint64_t *address) noexcept {
        return call(
            user_data, [&](custom_device &own) { return own.allocate(bytes, *address); },
            KVT_E_NOMEM);
    }
    static void free(void *user_data, std::uint64_t address, std::uint64_t bytes) noexcept {
        (void)call(user_data,
                   [&](custom_device &own) { return own.free(address, bytes), KVT_OK; });
    }
    static kvt_status_t free_bytes(void *user_data, std::uint64_t *bytes) noexcept {
        return call(user_data, [&](custom_device &own) -> kvt_status_t {
            const std::optional<std::uint64_t> left = own.free_bytes();
            if (!left) return KVT_E_UNSUPPORTED;
            *bytes = *left;
            return KVT_OK;
        });
    }
    static kvt_status_t register_host(void *user_data, std::uint64_t address,
                                      std::uint64_t bytes) noexcept {
        return call(user_data,
                    [&](custom_device &own) { return own.register_host(address, bytes); });
    }
    static kvt_status_t import_event(void *user_data, std::uint64_t raw,
                                     std::uint64_t *event) noexcept {
        return call(user_data, [&](custom_device &own) { return own.import_event(raw, *event); });
    }
    static kvt_status_t stream_wait(void *user_data, std::uint64_t raw,
                                    std::uint64_t event) noexcept {
        return call(user_data, [&](custom_device &own) { return own.stream_wait(raw, event); });
    }
    static kvt_status_t create_event(void *user_data, std::uint64_t *event) noexcept {
        return call(user_data, [&](custom_device &own) { return own.create_event(*event); });
    }
    static kvt_status_t signal_event(void *user_data, std::uint64_t event) noexcept {
        return call(user_data, [&](custom_device &own) { return own.signal_event(event); });
    }
    static kvt_status_t launch(void *user_data, std::uint32_t stream, std::uint64_t after,
                               const kvt_kernel_t *kernels, std::uint64_t count,
                               std::uint64_t stride, std::uint64_t *event) noexcept {
        return call(user_data, [&](custom_device &own) {
            std::vector<kvt_kernel_t> copies;
            return own.launch(stream, after, entries(kernels, count, stride, copies), *event);
        });
    }

    /// The callback table for C.
    kvt_device_custom_t to_c() {
        kvt_device_custom_t c = KVT_DEVICE_CUSTOM_INIT;
        c.flags = own->flags();
        c.streams = own->streams();
        c.kernels = own->kernels();
        c.submit = &device_box::submit;
        c.query = &device_box::query;
        c.wait = &device_box::wait;
        c.release = &device_box::release;
        c.allocate = &device_box::allocate;
        c.free = &device_box::free;
        c.free_bytes = &device_box::free_bytes;
        c.register_host = &device_box::register_host;
        c.import_event = &device_box::import_event;
        c.stream_wait = &device_box::stream_wait;
        c.create_event = &device_box::create_event;
        c.signal_event = &device_box::signal_event;
        if (c.kernels != 0) c.launch = &device_box::launch;
        c.user_data = this;
        c.destroy = &unbox<device_box>;
        return c;
    }
};

/// Collects the results of conformance checks.
struct check_collector {
    std::vector<conformance_check> checks;

    static void add(void *user_data, const char *name, std::uint64_t name_bytes,
                    kvt_verdict_t verdict, const char *why, std::uint64_t why_bytes) noexcept {
        auto append = [&] {
            static_cast<check_collector *>(user_data)->checks.push_back(conformance_check{
                std::string(view(name, name_bytes)), verdict, std::string(view(why, why_bytes))});
        };
        guarded_void("kvt conformance", append);
    }
};
}  // namespace detail

/// An event of a device, which must outlive it. Move-only. The destructor waits for the event and
/// releases it, so that memory of its copies may be freed afterwards.
class device_event {
public:
    device_event() noexcept = default;
    device_event(device_event &&other) noexcept
        : device_(other.device_), number_(std::exchange(other.number_, 0)),
          created_(other.created_) {}
    device_event &operator=(device_event &&other) noexcept {
        if (this != &other) {
            reset();
            device_ = other.device_;
            number_ = std::exchange(other.number_, 0);
            created_ = other.created_;
        }
        return *this;
    }
    device_event(const device_event &) = delete;
    device_event &operator=(const device_event &) = delete;
    ~device_event() { reset(); }

    explicit operator bool() const noexcept { return number_ != 0; }
    /// The event's number, as other calls take it; 0 = none. This object still owns the event.
    std::uint64_t number() const noexcept { return number_; }
    /// Returns the number and gives up ownership of the event.
    std::uint64_t release() noexcept { return std::exchange(number_, 0); }
    /// Whether the event has completed. Fails with the status of its batch.
    ret<bool> is_done() const {
        const kvt_status_t status = kvt_device_query(device_, number_);
        return detail::give(status == KVT_E_AGAIN ? KVT_OK : status, status == KVT_OK);
    }
    /// Waits for the event. Fails with KVT_E_TIMEOUT, or with the status of its batch.
    ret<void> wait(deadline by = {}) const {
        detail::failure f;
        const kvt_status_t status = kvt_device_wait(device_, number_, by.ns, f.out());
        return detail::check(status, f);
    }
    /// Signals an event of device::create_event. Signalling it again does nothing.
    ret<void> signal() const {
        detail::failure f;
        const kvt_status_t status = kvt_device_signal_event(device_, number_, f.out());
        return detail::check(status, f);
    }
    /// The checksums that its copies requested (KVT_COPY_CHECKSUM), once the event has completed.
    /// Only of asynchronous devices that compute checksums.
    ret<std::vector<std::uint64_t>> checksums() const {
        detail::failure f;
        std::vector<std::uint64_t> all(65536);
        std::uint64_t count = 0;
        const kvt_status_t status =
            kvt_device_checksums(device_, number_, all.data(), all.size(), &count, f.out());
        all.resize(static_cast<std::size_t>(status == KVT_OK ? count : 0));
        return detail::give(status, f, std::move(all));
    }
    /// Waits for the event and releases it; ignores its status. An event of device::create_event is
    /// signalled first.
    void reset() noexcept {
        if (number_ == 0) return;
        const std::uint64_t number = release();
        if (created_) (void)kvt_device_signal_event(device_, number, nullptr);
        (void)kvt_device_wait(device_, number, 0, nullptr);
        const kvt_status_t status = kvt_device_release(device_, &number, 1, nullptr);
        if (!detail::ended(status)) detail::report("kvt::device_event", status);
    }

private:
    friend class device;
    device_event(const kvt_device_t *device, std::uint64_t number, bool created = false) noexcept
        : device_(device), number_(number), created_(created) {}
    const kvt_device_t *device_ = nullptr;
    std::uint64_t number_ = 0;
    bool created_ = false;
};

/// An allocation of device memory. Move-only. The destructor frees it: work that uses the memory
/// must have ended.
class device_memory {
public:
    device_memory() noexcept = default;
    device_memory(device_memory &&other) noexcept
        : device_(std::exchange(other.device_, nullptr)), raw_(other.raw_) {}
    device_memory &operator=(device_memory &&other) noexcept {
        if (this != &other) {
            reset();
            device_ = std::exchange(other.device_, nullptr);
            raw_ = other.raw_;
        }
        return *this;
    }
    device_memory(const device_memory &) = delete;
    device_memory &operator=(const device_memory &) = delete;
    ~device_memory() { reset(); }

    explicit operator bool() const noexcept { return device_ != nullptr; }
    /// Start of the memory: a multiple of 256.
    void *data() const noexcept {
        return reinterpret_cast<void *>(static_cast<std::uintptr_t>(raw_.address));
    }
    std::uint64_t address() const noexcept { return raw_.address; }
    std::uint64_t bytes() const noexcept { return raw_.bytes; }
    /// KVT_MEMORY_*: address space of the address.
    kvt_memory_t memory() const noexcept { return raw_.memory; }
    /// Frees the memory. Fails with KVT_E_BUSY if work in flight is known to use it; this object
    /// still owns it then.
    ret<void> free() {
        detail::failure f;
        const kvt_status_t status = kvt_device_free(device_, &raw_, f.out());
        if (status == KVT_OK) device_ = nullptr;
        return detail::check(status, f);
    }
    /// Frees the memory; reports a failure to the defect hook.
    void reset() noexcept {
        if (device_ == nullptr) return;
        const kvt_status_t status = kvt_device_free(device_, &raw_, nullptr);
        device_ = nullptr;
        if (!detail::ended(status)) detail::report("kvt::device_memory", status);
    }

private:
    friend class device;
    device_memory(const kvt_device_t *device, const kvt_device_memory_t &raw) noexcept
        : device_(device), raw_(raw) {}
    const kvt_device_t *device_ = nullptr;
    kvt_device_memory_t raw_ = KVT_DEVICE_MEMORY_INIT;
};

/// A copy from a view of the engine's tensor into a plane. `where` is the plane's KVT_MEMORY_*.
inline kvt_copy_t gather(const kvt_view_t &view, void *plane,
                         kvt_memory_t where = KVT_MEMORY_HOST) noexcept {
    kvt_copy_t copy{};
    copy.view = view;
    copy.plane = plane;
    copy.plane_memory = where;
    copy.direction = KVT_COPY_GATHER;
    return copy;
}
/// A copy from a plane into a view of the engine's tensor.
inline kvt_copy_t scatter(const kvt_view_t &view, const void *plane,
                          kvt_memory_t where = KVT_MEMORY_HOST) noexcept {
    kvt_copy_t copy = gather(view, const_cast<void *>(plane), where);
    copy.direction = KVT_COPY_SCATTER;
    return copy;
}
/// A copy of bytes from host memory to memory of the kind `where` (KVT_MEMORY_*).
inline kvt_copy_t upload(const void *host, void *to, std::uint64_t bytes,
                         kvt_memory_t where = KVT_MEMORY_DEVICE) noexcept {
    kvt_view_t view{};
    view.address = to;
    view.tokens = 1;
    view.run_bytes = bytes;
    view.memory = where;
    return scatter(view, host);
}
/// A copy of bytes to host memory from memory of the kind `where` (KVT_MEMORY_*).
inline kvt_copy_t download(const void *from, void *host, std::uint64_t bytes,
                           kvt_memory_t where = KVT_MEMORY_DEVICE) noexcept {
    kvt_copy_t copy = upload(host, const_cast<void *>(from), bytes, where);
    copy.direction = KVT_COPY_GATHER;
    return copy;
}

/// Copies between the engine's memory and the library's. Close stores and streamers that were
/// opened with a device before the device. Any thread may use it.
class device : public detail::owner<device, kvt_device_t> {
    friend class detail::owner<device, kvt_device_t>;
    static void drop(kvt_device_t *raw) noexcept {
        const kvt_status_t status = kvt_device_close(&raw, 0, nullptr);
        if (!detail::ended(status)) detail::report("kvt::device", status);
    }

public:
    /// The processor as a device; its copies are synchronous.
    static ret<device> host(const runtime &on) { return open(on, KVT_DEVICE_KIND_HOST); }
    /// A GPU. Fails with KVT_E_UNAVAILABLE if it cannot be used; the message gives the reason.
    static ret<device> cuda(const runtime &on, const device_opts &opts = {}) {
        return open(on, KVT_DEVICE_KIND_CUDA, opts);
    }
    /// A simulated device, for tests. Copies take time, and targets hold garbage until their event
    /// has completed.
    static ret<device> simulated(const runtime &on, const device_opts &opts = {}) {
        return open(on, KVT_DEVICE_KIND_SIMULATED, opts);
    }
    /// A device that the engine implements. `own` is deleted once the device is closed and its
    /// events are not used any more. Test it with conformance().
    static ret<device> custom(const runtime &on, std::unique_ptr<custom_device> own) {
        if (!own) return detail::fail<device>(kvt::error(KVT_E_INVALID));
        std::unique_ptr<detail::device_box> box(new detail::device_box{std::move(own)});
        const kvt_device_custom_t table = box->to_c();
        ret<device> opened = open(on, KVT_DEVICE_KIND_CUSTOM, {}, &table);
        if (opened) (void)box.release();
        return opened;
    }
    /// Opens a device of a kind. `table` is required by KVT_DEVICE_KIND_CUSTOM.
    static ret<device> open(const runtime &on, kvt_device_kind_t kind, const device_opts &opts = {},
                            const kvt_device_custom_t *table = nullptr) {
        kvt_device_opts_t c = opts.to_c();
        c.kind = kind;
        c.custom = table;
        detail::failure f;
        kvt_device_t *raw = nullptr;
        const kvt_status_t status = kvt_device_open(on.get(), &c, &raw, f.out());
        return detail::give(status, f, device::adopt(raw));
    }
    /// Waits for work in flight. Fails with KVT_E_BUSY if a store or streamer uses the device, or
    /// at the deadline; this object still owns it then.
    ret<void> close(deadline by = {}) {
        detail::failure f;
        const kvt_status_t status = kvt_device_close(&raw_, by.ns, f.out());
        return detail::check(status, f);
    }
    ret<device_info> info() const {
        kvt_device_info_t c = KVT_DEVICE_INFO_INIT;
        const kvt_status_t status = kvt_device_info(raw_, &c);
        return detail::give(status, device_info::from_c(c));
    }
    /// Describes the device for logs: its name, and how it copies.
    ret<std::string> describe() const {
        std::string text;
        const auto read = [&](auto... to) { return kvt_device_describe(raw_, to...); };
        const kvt_status_t status = detail::read_text(text, read);
        return detail::give(status, std::move(text));
    }
    /// Allocates device memory with undefined content.
    ret<device_memory> alloc(std::uint64_t bytes) const {
        detail::failure f;
        kvt_device_memory_t c = KVT_DEVICE_MEMORY_INIT;
        const kvt_status_t status = kvt_device_alloc(raw_, bytes, &c, f.out());
        return detail::give(status, f, device_memory(status == KVT_OK ? raw_ : nullptr, c));
    }
    /// Registers host memory that many copies will use. If CUDA cannot pin the memory, its copies
    /// are slower, and describe() states the amount.
    ret<void> register_host(void *address, std::uint64_t bytes) const {
        detail::failure f;
        const kvt_status_t status = kvt_device_register_host(raw_, address, bytes, f.out());
        return detail::check(status, f);
    }
    /// Unregisters host memory. Call it before the memory is unmapped.
    ret<void> unregister_host(void *address) const {
        detail::failure f;
        const kvt_status_t status = kvt_device_unregister_host(raw_, address, f.out());
        return detail::check(status, f);
    }
    /// Submits copies to a stream, after the event `after` (0 = none). Without copies it only
    /// records an event. A synchronous device writes requested checksums to the copies.
    ret<device_event> copy(span<kvt_copy_t> copies, std::uint32_t stream = 0,
                           std::uint64_t after = 0) const {
        detail::failure f;
        std::uint64_t event = 0;
        const kvt_status_t status =
            kvt_device_copy(raw_, stream, after, copies.data(), copies.size(),
                            sizeof(kvt_copy_t), &event, f.out());
        return detail::give(status, f, device_event(raw_, event));
    }
    ret<device_event> copy(kvt_copy_t one, std::uint32_t stream = 0,
                           std::uint64_t after = 0) const {
        return copy(span<kvt_copy_t>(&one, 1), stream, after);
    }
    /// Submits kernels to a stream, after the event `after` (0 = none).
    ret<device_event> launch(span<const kvt_kernel_t> kernels, std::uint32_t stream = 0,
                             std::uint64_t after = 0) const {
        detail::failure f;
        std::uint64_t event = 0;
        const kvt_status_t status =
            kvt_device_launch(raw_, stream, after, kernels.data(), kernels.size(),
                              sizeof(kvt_kernel_t), &event, f.out());
        return detail::give(status, f, device_event(raw_, event));
    }
    /// Returns events that have completed or failed, each once, at most `max_events`. Their owners
    /// keep them.
    ret<std::vector<std::uint64_t>> poll(std::size_t max_events = 256) const {
        std::vector<std::uint64_t> events(max_events);
        std::uint64_t count = 0;
        const kvt_status_t status = kvt_device_poll(raw_, events.data(), max_events, &count);
        events.resize(static_cast<std::size_t>(count));
        return detail::give(status, std::move(events));
    }
    /// Imports an event of the engine (CUDA: a recorded CUevent): a device event that completes
    /// with it.
    ret<device_event> import_event(std::uint64_t raw_event) const {
        detail::failure f;
        std::uint64_t event = 0;
        const kvt_status_t status = kvt_device_import_event(raw_, raw_event, &event, f.out());
        return detail::give(status, f, device_event(raw_, event));
    }
    /// Makes a stream of the engine (CUDA: a CUstream) wait for a device event.
    ret<void> stream_wait(std::uint64_t raw_stream, std::uint64_t event) const {
        detail::failure f;
        const kvt_status_t status = kvt_device_stream_wait(raw_, raw_stream, event, f.out());
        return detail::check(status, f);
    }
    /// Makes a stream of the engine wait until an op is released, whether it succeeded or not.
    ret<void> stream_wait(std::uint64_t raw_stream, const op &until) const {
        detail::failure f;
        const kvt_status_t status =
            kvt_device_stream_wait_op(raw_, raw_stream, until.get(), f.out());
        return detail::check(status, f);
    }
    /// Creates an event that completes when device_event::signal is called. Work may wait for it
    /// before that.
    ret<device_event> create_event() const {
        detail::failure f;
        std::uint64_t event = 0;
        const kvt_status_t status = kvt_device_create_event(raw_, &event, f.out());
        return detail::give(status, f, device_event(raw_, event, true));
    }
    /// Runs the conformance suite. Nothing else should use the device meanwhile.
    ret<conformance_report> conformance(const conformance_opts &opts = {}) const {
        detail::failure f;
        const kvt_conformance_opts_t c = opts.to_c();
        detail::check_collector results;
        kvt_conformance_report_t count = KVT_CONFORMANCE_REPORT_INIT;
        const kvt_status_t status = kvt_device_conformance(raw_, &c, &detail::check_collector::add,
                                                           &results, &count, f.out());
        conformance_report report;
        report.passed = count.passed;
        report.skipped = count.skipped;
        report.failed = count.failed;
        report.checks = std::move(results.checks);
        return detail::give(status, f, std::move(report));
    }
};

/// Packs an index (sparse_index::to_c) for KVT_DEVICE_KERNEL_PREFILL and enters it in a kernel. Reads
/// the kernel's query_count, query_heads, key_heads, tokens and first; writes its count, numbers,
/// counts, index and scratch_bytes. Copy the returned bytes to `address`.
inline ret<std::vector<std::uint8_t>> pack_index(const kvt_index_t *index, kvt_kernel_t &kernel,
                                                 std::uint64_t address) {
    detail::failure f;
    std::vector<std::uint8_t> bytes;
    std::uint64_t count = 0;
    kvt_status_t status =
        kvt_kernel_pack_index(index, &kernel, address, nullptr, 0, &count, f.out());
    if (status == KVT_E_TOO_SMALL) { // the number of bytes is known now
        bytes.resize(static_cast<std::size_t>(count));
        status = kvt_kernel_pack_index(index, &kernel, address, bytes.data(), bytes.size(), &count,
                                       f.out());
    }
    return detail::give(status, f, std::move(bytes));
}

}  // namespace KVTIER_ERRORS_
}  // namespace kvt

#endif  // KVTIER_DEVICE_HPP
