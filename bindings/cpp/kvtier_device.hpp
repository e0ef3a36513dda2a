// kvt::device: who copies between the engine's memory and the library's. Part of kvtier.hpp,
// which includes it.

#ifndef KVTIER_DEVICE_HPP
#define KVTIER_DEVICE_HPP

#ifndef KVTIER_HPP
#error "include <kvtier/kvtier.hpp>"
#endif

namespace kvt {
inline namespace KVTIER_FACE_ {

/// A GPU by way of CUDA.
struct cuda_opts {
    std::uint32_t ordinal = 0;
    /// The engine's CUcontext, which outlives the device; 0 = the one that the process shares.
    std::uint64_t context = 0;
    /// The engine's streams (CUstream) of that context; none = some of the device's own.
    std::vector<std::uint64_t> streams;
    /// The path of the driver's library; empty = the system's.
    std::string_view library;
    /// Memory of that device, which outlives it, and how much: what it gives out comes from
    /// there. 0 = the driver is asked.
    std::uint64_t arena = 0;
    std::uint64_t arena_bytes = 0;
    /// The path of cuFile's, which KVT_STREAM_DIRECT loads; empty = the system's.
    std::string_view cufile;
    /// Other devices of the process (ordinals) whose memory copies may name, too.
    std::vector<std::uint32_t> peers;
    /// It sums what it copies, where it lies in its memory, and stores compare.
    bool verify = false;
};

/// A device that is none, for tests: it takes its time, and spoils what is not waited for.
struct simulated_opts {
    /// 0 = no limit.
    std::uint64_t memory_bytes = 0;
    std::uint64_t seed = 0;
    std::uint64_t latency_ns = 0;
    std::uint64_t bytes_per_s = 0;
    /// As of `cuda_opts`.
    bool verify = false;
};

/// What a device is and can do.
struct device_info {
    /// KVT_DEVICE_KIND_HOST and so on.
    std::uint32_t kind = 0;
    /// Work goes on after a call has returned.
    bool asynchronous = false;
    /// It sums what it copies.
    bool sums = false;
    /// It has memory that only it reaches.
    bool has_memory = false;
    /// Host memory that copies use is to be made known: device::register_host.
    bool wants_pinned = false;
    /// How many it has: work on one is in order.
    std::uint32_t streams = 0;
    /// 1 << KVT_DEVICE_KERNEL_* for each.
    std::uint64_t kernels = 0;
    /// What it has left to give; nothing where it does not know.
    std::optional<std::uint64_t> free_bytes;

    bool has_kernel(std::uint32_t kind_of_kernel) const noexcept {
        return kind_of_kernel < 64 && (kernels >> kind_of_kernel & 1) != 0;
    }
};

struct conformance_opts {
    /// Chooses all that is left to chance.
    std::uint64_t seed = 0;
    /// How long an event may take; 0 = 30 s.
    std::uint64_t patience_ns = 0;
    /// How often what is left to chance is tried; 0 = 40.
    std::uint32_t rounds = 0;
    /// The device is closed at the end, which is a check as well.
    bool closes = false;
};

/// A check that a device was put to.
struct conformance_check {
    std::string name;
    /// KVT_VERDICT_*.
    std::uint32_t verdict = KVT_VERDICT_PASSED;
    /// Why it failed, or was skipped.
    std::string why;
};

struct conformance_report {
    std::uint32_t passed = 0;
    std::uint32_t skipped = 0;
    std::uint32_t failed = 0;
    std::vector<conformance_check> checks;
};

/// A device of the engine's own: derive from it. Methods are called from any thread, from
/// several at once, and must not call the device they are of. Those that are not overridden
/// say that there is no such thing. What throws fails with KVT_E_STATE, and the defect hook
/// hears of it; what `query` throws is no answer, and the event is asked for again.
/// KVT_E_UNAVAILABLE, from any, says that the device is gone.
class custom_device {
public:
    virtual ~custom_device() = default;

    /// KVT_DEVICE_HAS_MEMORY, KVT_DEVICE_WANTS_PINNED. This and the next two are asked once.
    virtual std::uint64_t flags() const { return 0; }
    /// 1 to 64.
    virtual std::uint32_t streams() const { return 1; }
    /// The kernels that `launch` knows: 1 << KVT_DEVICE_KERNEL_* for each.
    virtual std::uint64_t kernels() const { return 0; }

    /// Puts copies on a stream, behind an event if `after` is not 0, and writes the event of
    /// their end, any number but 0. No copies: the event marks the place. What is refused must
    /// not have begun, what throws neither.
    virtual kvt_status_t submit(std::uint32_t stream, std::uint64_t after,
                                span<const kvt_copy_rows_t> copies, std::uint64_t &event) = 0;
    /// KVT_OK: it has come; KVT_E_AGAIN: not yet; else what its batch failed with.
    virtual kvt_status_t query(std::uint64_t event) = 0;
    /// Until a deadline; it may return early.
    virtual kvt_status_t wait(std::uint64_t, deadline) { return KVT_OK; }

    // A lock may be held around these four: they call nothing of the library, and wait for
    // nobody who does.
    /// Nobody asks for an event any more.
    virtual void release(std::uint64_t) {}
    /// Memory at a multiple of 256.
    virtual kvt_status_t allocate(std::uint64_t, std::uint64_t &) { return KVT_E_UNSUPPORTED; }
    virtual void free(std::uint64_t, std::uint64_t) {}
    /// What it has left to give.
    virtual std::optional<std::uint64_t> free_bytes() { return std::nullopt; }

    /// Host memory that copies use again and again; with 0 bytes: that it goes.
    virtual kvt_status_t register_host(std::uint64_t, std::uint64_t) { return KVT_OK; }
    /// An event of its own that comes with one that the engine names.
    virtual kvt_status_t import_event(std::uint64_t, std::uint64_t &) { return KVT_E_UNSUPPORTED; }
    /// A stream that the engine names goes on only after an event.
    virtual kvt_status_t stream_wait(std::uint64_t, std::uint64_t) { return KVT_E_UNSUPPORTED; }
    /// An event of its own that comes when `signal_event` says so.
    virtual kvt_status_t create_event(std::uint64_t &) { return KVT_E_UNSUPPORTED; }
    /// Has such an event come; it must not wait.
    virtual kvt_status_t signal_event(std::uint64_t) { return KVT_E_UNSUPPORTED; }
    /// Puts kernels on a stream, as copies.
    virtual kvt_status_t launch(std::uint32_t, std::uint64_t, span<const kvt_kernel_t>,
                                std::uint64_t &) {
        return KVT_E_UNSUPPORTED;
    }
};

namespace detail {
/// Entries of an array; `room` has them where a newer library's are longer.
template <class Row>
span<const Row> entries(const Row *first, std::uint64_t count, std::uint64_t stride,
                        std::vector<Row> &room) {
    if (stride == sizeof(Row)) return span<const Row>(first, static_cast<std::size_t>(count));
    const auto *at = reinterpret_cast<const unsigned char *>(first);
    for (std::uint64_t i = 0; i < count; i++)
        room.push_back(*reinterpret_cast<const Row *>(at + i * stride));
    return span<const Row>(room);
}

/// What C calls: a device of the engine's, and nothing unwinds.
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
            std::vector<kvt_copy_rows_t> room;
            return own.submit(stream, after, entries(copies, count, stride, room), *event);
        });
    }
    static kvt_status_t query(void *user_data, std::uint64_t event) noexcept {
        // The question failed, the batch perhaps not: it may use its memory still.
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
    static kvt_status_t import_event(void *user_data, std::uint64_t raw, std::uint64_t *event) noexcept {
        return call(user_data, [&](custom_device &own) { return own.import_event(raw, *event); });
    }
    static kvt_status_t stream_wait(void *user_data, std::uint64_t raw, std::uint64_t event) noexcept {
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
            std::vector<kvt_kernel_t> room;
            return own.launch(stream, after, entries(kernels, count, stride, room), *event);
        });
    }

    /// The table of C.
    kvt_device_custom_t lower() {
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

/// Collects what conformance says.
struct verdicts {
    std::vector<conformance_check> checks;

    static void hear(void *user_data, const char *name, std::uint64_t name_bytes,
                     std::uint32_t verdict, const char *why, std::uint64_t why_bytes) noexcept {
        auto note = [&] {
            const auto size = [](std::uint64_t bytes) { return static_cast<std::size_t>(bytes); };
            static_cast<verdicts *>(user_data)->checks.push_back(
                conformance_check{std::string(name, size(name_bytes)), verdict,
                                  std::string(why, size(why_bytes))});
        };
        guarded_void("kvt conformance", note);
    }
};
}  // namespace detail

/// A moment on a stream of a device. When this goes it waits until the moment has come, so that
/// the memory of the copies is nobody else's then, and forgets it. Move-only; the device
/// outlives it.
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
    /// What it is called where an event is asked for as a number; 0 = none. Stays owned.
    std::uint64_t number() const noexcept { return number_; }
    /// The number, not owned any more.
    std::uint64_t release() noexcept { return std::exchange(number_, 0); }
    /// Whether it has come; fails with what its batch failed with.
    ret<bool> is_done() const {
        const kvt_status_t status = kvt_device_query(device_, number_);
        return detail::give(status == KVT_E_AGAIN ? KVT_OK : status, status == KVT_OK);
    }
    /// Fails with what its batch failed with, or KVT_E_TIMEOUT.
    ret<void> wait(deadline by = {}) const {
        detail::failure f;
        const kvt_status_t status = kvt_device_wait(device_, number_, by.ns, f.out());
        return detail::check(status, f);
    }
    /// Of one that device::create_event made: it comes, if it has not.
    ret<void> signal() const {
        detail::failure f;
        const kvt_status_t status = kvt_device_signal_event(device_, number_, f.out());
        return detail::check(status, f);
    }
    /// The checksums of its copies that wanted one, once it has come: of asynchronous devices that
    /// sum.
    ret<std::vector<std::uint64_t>> sums() const {
        detail::failure f;
        std::vector<std::uint64_t> all(65536);
        std::uint64_t count = 0;
        const kvt_status_t status =
            kvt_device_checksums(device_, number_, all.data(), all.size(), &count, f.out());
        all.resize(static_cast<std::size_t>(status == KVT_OK ? count : 0));
        return detail::give(status, f, std::move(all));
    }
    /// Waits and forgets it; how it ended is not looked at. A promise is kept before.
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

/// Memory of a device, given back when this goes; before that, who uses it has to end.
/// Move-only.
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
    /// Where it starts: a multiple of 256.
    void *data() const noexcept {
        return reinterpret_cast<void *>(static_cast<std::uintptr_t>(raw_.address));
    }
    std::uint64_t address() const noexcept { return raw_.address; }
    std::uint64_t bytes() const noexcept { return raw_.bytes; }
    /// KVT_MEMORY_*: where the address is valid.
    std::uint32_t memory() const noexcept { return raw_.memory; }
    /// Gives it back; KVT_E_BUSY while work under way is seen to use it, and it stays.
    ret<void> free() {
        detail::failure f;
        const kvt_status_t status = kvt_device_free(device_, &raw_, f.out());
        if (status == KVT_OK) device_ = nullptr;
        return detail::check(status, f);
    }
    /// Gives it back; what fails is told to the hook.
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

/// From the engine's tokens into a plane; `where` is KVT_MEMORY_*.
inline kvt_copy_t gather(const kvt_view_t &view, void *plane,
                         std::uint32_t where = KVT_MEMORY_HOST) noexcept {
    kvt_copy_t copy{};
    copy.view = view;
    copy.plane = plane;
    copy.plane_memory = where;
    copy.direction = KVT_COPY_GATHER;
    return copy;
}
/// From a plane to the engine's tokens.
inline kvt_copy_t scatter(const kvt_view_t &view, const void *plane,
                          std::uint32_t where = KVT_MEMORY_HOST) noexcept {
    kvt_copy_t copy = gather(view, const_cast<void *>(plane), where);
    copy.direction = KVT_COPY_SCATTER;
    return copy;
}
/// Plain bytes, from host memory to where `where` says.
inline kvt_copy_t upload(const void *host, void *to, std::uint64_t bytes,
                         std::uint32_t where = KVT_MEMORY_DEVICE) noexcept {
    kvt_view_t view{};
    view.address = to;
    view.tokens = 1;
    view.run_bytes = bytes;
    view.memory = where;
    return scatter(view, host);
}
/// Plain bytes, from where `where` says to host memory.
inline kvt_copy_t download(const void *from, void *host, std::uint64_t bytes,
                           std::uint32_t where = KVT_MEMORY_DEVICE) noexcept {
    kvt_copy_t copy = upload(host, const_cast<void *>(from), bytes, where);
    copy.direction = KVT_COPY_GATHER;
    return copy;
}

/// Who copies between the engine's memory and the library's. Stores and streamers are opened
/// with one, and have to be closed before it. Any thread may use it.
class device : public detail::owner<device, kvt_device_t> {
    friend class detail::owner<device, kvt_device_t>;
    static void drop(kvt_device_t *raw) noexcept {
        const kvt_status_t status = kvt_device_close(&raw, 0, nullptr);
        if (!detail::ended(status)) detail::report("kvt::device", status);
    }

public:
    /// The processor.
    static ret<device> host(const runtime &on) {
        kvt_device_opts_t c = KVT_DEVICE_OPTS_INIT;
        c.kind = KVT_DEVICE_KIND_HOST;
        return open(on, c);
    }
    /// A GPU; KVT_E_UNAVAILABLE where there is none, and the message says why.
    static ret<device> cuda(const runtime &on, const cuda_opts &opts = {}) {
        kvt_device_opts_t c = KVT_DEVICE_OPTS_INIT;
        c.kind = KVT_DEVICE_KIND_CUDA;
        c.ordinal = opts.ordinal;
        c.context = opts.context;
        c.streams = opts.streams.data();
        c.stream_count = opts.streams.size();
        detail::text(opts.library, c.library, c.library_bytes);
        c.arena = opts.arena;
        c.arena_bytes = opts.arena_bytes;
        detail::text(opts.cufile, c.cufile, c.cufile_bytes);
        c.peers = opts.peers.data();
        c.peer_count = opts.peers.size();
        c.flags = opts.verify ? KVT_DEVICE_VERIFY : 0;
        return open(on, c);
    }
    static ret<device> simulated(const runtime &on, const simulated_opts &opts = {}) {
        kvt_device_opts_t c = KVT_DEVICE_OPTS_INIT;
        c.kind = KVT_DEVICE_KIND_SIMULATED;
        c.memory_bytes = opts.memory_bytes;
        c.seed = opts.seed;
        c.latency_ns = opts.latency_ns;
        c.bytes_per_s = opts.bytes_per_s;
        c.flags = opts.verify ? KVT_DEVICE_VERIFY : 0;
        return open(on, c);
    }
    /// The engine's own. It is deleted when the device has been closed and nobody asks for its
    /// events any more. `conformance` says whether all is as it should be.
    static ret<device> custom(const runtime &on, std::unique_ptr<custom_device> own) {
        if (!own) return detail::fail<device>(kvt::error(KVT_E_INVALID));
        std::unique_ptr<detail::device_box> box(new detail::device_box{std::move(own)});
        const kvt_device_custom_t table = box->lower();
        kvt_device_opts_t c = KVT_DEVICE_OPTS_INIT;
        c.kind = KVT_DEVICE_KIND_CUSTOM;
        c.custom = &table;
        detail::failure f;
        kvt_device_t *raw = nullptr;
        const kvt_status_t status = kvt_device_open(on.get(), &c, &raw, f.out());
        if (status == KVT_OK) (void)box.release();
        return detail::give(status, f, device::adopt(raw));
    }
    /// As C has it.
    static ret<device> open(const runtime &on, const kvt_device_opts_t &opts) {
        detail::failure f;
        kvt_device_t *raw = nullptr;
        const kvt_status_t status = kvt_device_open(on.get(), &opts, &raw, f.out());
        return detail::give(status, f, device::adopt(raw));
    }
    /// Waits for what is under way. Fails with KVT_E_BUSY while a store or a streamer has it, or
    /// at the deadline, and stays owned.
    ret<void> close(deadline by = {}) {
        detail::failure f;
        const kvt_status_t status = kvt_device_close(&raw_, by.ns, f.out());
        return detail::check(status, f);
    }
    ret<device_info> info() const {
        kvt_device_info_t c = KVT_DEVICE_INFO_INIT;
        const kvt_status_t status = kvt_device_info(raw_, &c);
        device_info about;
        about.kind = c.kind;
        about.asynchronous = (c.flags & KVT_DEVICE_ASYNCHRONOUS) != 0;
        about.sums = (c.flags & KVT_DEVICE_CHECKSUMS) != 0;
        about.has_memory = (c.flags & KVT_DEVICE_HAS_MEMORY) != 0;
        about.wants_pinned = (c.flags & KVT_DEVICE_WANTS_PINNED) != 0;
        about.streams = c.streams;
        about.kernels = c.kernels;
        if (c.free_bytes != UINT64_MAX) about.free_bytes = c.free_bytes;
        return detail::give(status, about);
    }
    /// For logs.
    ret<std::string> describe() const {
        std::string text;
        const kvt_status_t status = detail::words(text, [&](char *to, auto room, auto *bytes) {
            return kvt_device_describe(raw_, to, room, bytes);
        });
        return detail::give(status, std::move(text));
    }
    ret<device_memory> alloc(std::uint64_t bytes) const {
        detail::failure f;
        kvt_device_memory_t c = KVT_DEVICE_MEMORY_INIT;
        const kvt_status_t status = kvt_device_alloc(raw_, bytes, &c, f.out());
        return detail::give(status, f, device_memory(status == KVT_OK ? raw_ : nullptr, c));
    }
    /// Host memory that copies will use again and again. Where CUDA cannot pin it, they are
    /// slower, and `describe` says so.
    ret<void> register_host(void *address, std::uint64_t bytes) const {
        detail::failure f;
        const kvt_status_t status = kvt_device_register_host(raw_, address, bytes, f.out());
        return detail::check(status, f);
    }
    /// Before the memory goes.
    ret<void> unregister_host(void *address) const {
        detail::failure f;
        const kvt_status_t status = kvt_device_unregister_host(raw_, address, f.out());
        return detail::check(status, f);
    }
    /// Puts copies on a stream, behind the event `after` if that is not 0; none: marks the
    /// place. Sums that are wanted are written.
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
    /// Puts kernels on a stream.
    ret<device_event> launch(span<const kvt_kernel_t> kernels, std::uint32_t stream = 0,
                             std::uint64_t after = 0) const {
        detail::failure f;
        std::uint64_t event = 0;
        const kvt_status_t status =
            kvt_device_launch(raw_, stream, after, kernels.data(), kernels.size(),
                              sizeof(kvt_kernel_t), &event, f.out());
        return detail::give(status, f, device_event(raw_, event));
    }
    /// Events that have ended, well or not, each told once. They stay their owners'.
    ret<std::vector<std::uint64_t>> poll(std::size_t most = 256) const {
        std::vector<std::uint64_t> events(most);
        std::uint64_t count = 0;
        const kvt_status_t status = kvt_device_poll(raw_, events.data(), most, &count);
        events.resize(static_cast<std::size_t>(count));
        return detail::give(status, std::move(events));
    }
    /// An event that comes with one of the engine's own: for CUDA a CUevent that was recorded.
    ret<device_event> import_event(std::uint64_t raw_event) const {
        detail::failure f;
        std::uint64_t event = 0;
        const kvt_status_t status = kvt_device_import_event(raw_, raw_event, &event, f.out());
        return detail::give(status, f, device_event(raw_, event));
    }
    /// A stream of the engine's own (for CUDA a CUstream) goes on only when an event has come.
    ret<void> stream_wait(std::uint64_t raw_stream, std::uint64_t event) const {
        detail::failure f;
        const kvt_status_t status = kvt_device_stream_wait(raw_, raw_stream, event, f.out());
        return detail::check(status, f);
    }
    /// A stream of the engine's own goes on only when an op was released, well or not.
    ret<void> stream_wait(std::uint64_t raw_stream, const op &until) const {
        detail::failure f;
        const kvt_status_t status = kvt_device_stream_wait_op(raw_, raw_stream, until.get(), f.out());
        return detail::check(status, f);
    }
    /// An event that comes when its `signal_event` says so: what is behind it waits until then.
    ret<device_event> create_event() const {
        detail::failure f;
        std::uint64_t event = 0;
        const kvt_status_t status = kvt_device_create_event(raw_, &event, f.out());
        return detail::give(status, f, device_event(raw_, event, true));
    }
    /// Puts it to the test; nothing else should use it meanwhile.
    ret<conformance_report> conformance(const conformance_opts &opts = {}) const {
        detail::failure f;
        kvt_conformance_opts_t c = KVT_CONFORMANCE_OPTS_INIT;
        c.flags = opts.closes ? KVT_CONFORMANCE_CLOSES : 0;
        c.seed = opts.seed;
        c.patience_ns = opts.patience_ns;
        c.rounds = opts.rounds;
        detail::verdicts heard;
        kvt_conformance_report_t count = KVT_CONFORMANCE_REPORT_INIT;
        const kvt_status_t status = kvt_device_conformance(raw_, &c, &detail::verdicts::hear,
                                                           &heard, &count, f.out());
        conformance_report report;
        report.passed = count.passed;
        report.skipped = count.skipped;
        report.failed = count.failed;
        report.checks = std::move(heard.checks);
        return detail::give(status, f, std::move(report));
    }
};

}  // namespace KVTIER_FACE_
}  // namespace kvt

#endif  // KVTIER_DEVICE_HPP
