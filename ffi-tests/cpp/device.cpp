// kvt::device: a custom device with threads that passes conformance and serves a store and a
// streamer; copies, events and memory as owners; exceptions in callbacks.
#include <kvtier/kvtier.hpp>

#include "check.hpp"

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

kvt::deadline soon() { return kvt::deadline::in(HANG_GUARD); }

/// An entry of the table of KVT_DEVICE_KERNEL_MOVE.
struct piece {
    std::uint64_t from, to;
    std::int64_t from_stride, to_stride;
    std::uint32_t run_bytes, runs;
};

/// An accelerator as an engine might have one: a thread for each stream, and host memory that
/// counts as device memory.
class thread_device : public kvt::custom_device {
public:
    static constexpr std::uint32_t STREAMS = 3;
    static constexpr std::uint64_t MEMORY = std::uint64_t{64} << 20;

    thread_device() {
        for (std::uint32_t stream = 0; stream < STREAMS; stream++)
            workers_.emplace_back([this, stream] { serve(stream); });
    }
    ~thread_device() override {
        {
            const std::lock_guard<std::mutex> locked(lock_);
            stopping_ = true;
        }
        changed_.notify_all();
        for (std::thread &worker : workers_) worker.join();
        for (const auto &one : memory_) ::operator delete(one.second, std::align_val_t{256});
        ++deleted();
    }
    thread_device(const thread_device &) = delete;
    thread_device &operator=(const thread_device &) = delete;

    /// Number of devices that were deleted.
    static std::atomic<int> &deleted() {
        static std::atomic<int> count{0};
        return count;
    }
    /// The next `submit` or `allocate` throws.
    std::atomic<bool> work_throws{false};
    /// The next `query` throws.
    std::atomic<bool> query_throws{false};
    /// Number of events that are not released.
    std::size_t live_events() {
        const std::lock_guard<std::mutex> locked(lock_);
        return events_.size();
    }
    /// Creates an event of the engine, which `complete` completes.
    std::uint64_t pending_event() {
        const std::lock_guard<std::mutex> locked(lock_);
        events_[++last_] = KVT_E_AGAIN;
        return last_;
    }
    void complete(std::uint64_t event) { set_status(event, KVT_OK); }

    std::uint64_t flags() const override { return KVT_DEVICE_HAS_MEMORY; }
    std::uint32_t streams() const override { return STREAMS; }
    std::uint64_t kernels() const override { return 1 << KVT_DEVICE_KERNEL_MOVE; }

    kvt_status_t submit(std::uint32_t stream, std::uint64_t after,
                        kvt::span<const kvt_copy_rows_t> copies, std::uint64_t &event) override {
        return enqueue(stream, after, work{0, 0, {copies.begin(), copies.end()}, {}}, event);
    }
    kvt_status_t launch(std::uint32_t stream, std::uint64_t after,
                        kvt::span<const kvt_kernel_t> kernels, std::uint64_t &event) override {
        work launched;
        launched.kernels.assign(kernels.begin(), kernels.end());
        return enqueue(stream, after, std::move(launched), event);
    }
    kvt_status_t query(std::uint64_t event) override {
        if (query_throws.exchange(false)) throw std::runtime_error("the query failed");
        const std::lock_guard<std::mutex> locked(lock_);
        const auto found = events_.find(event);
        return found == events_.end() ? KVT_E_HANDLE : found->second;
    }
    kvt_status_t wait(std::uint64_t event, kvt::deadline by) override {
        std::unique_lock<std::mutex> locked(lock_);
        const auto is_done = [&] { return events_[event] != KVT_E_AGAIN; };
        const std::chrono::steady_clock::time_point end{std::chrono::nanoseconds(by.ns)};
        if (by.ns == 0) changed_.wait(locked, is_done);
        else (void)changed_.wait_until(locked, end, is_done);
        return KVT_OK;
    }
    void release(std::uint64_t event) override {
        const std::lock_guard<std::mutex> locked(lock_);
        events_.erase(event);
    }
    kvt_status_t allocate(std::uint64_t bytes, std::uint64_t &address) override {
        if (work_throws.exchange(false)) throw std::bad_alloc();
        const std::lock_guard<std::mutex> locked(lock_);
        if (bytes > MEMORY - used_) return KVT_E_NOMEM;
        void *const memory =
            ::operator new(static_cast<std::size_t>(bytes), std::align_val_t{256});
        address = reinterpret_cast<std::uintptr_t>(memory);
        memory_[address] = memory;
        used_ += bytes;
        return KVT_OK;
    }
    void free(std::uint64_t address, std::uint64_t bytes) override {
        const std::lock_guard<std::mutex> locked(lock_);
        ::operator delete(memory_.at(address), std::align_val_t{256});
        memory_.erase(address);
        used_ -= bytes;
    }
    std::optional<std::uint64_t> free_bytes() override {
        const std::lock_guard<std::mutex> locked(lock_);
        return MEMORY - used_;
    }
    kvt_status_t register_host(std::uint64_t address, std::uint64_t bytes) override {
        const std::lock_guard<std::mutex> locked(lock_);
        if (bytes != 0) return pinned_.insert(address), KVT_OK;
        return pinned_.erase(address) != 0 ? KVT_OK : KVT_E_NOT_FOUND;
    }
    kvt_status_t import_event(std::uint64_t raw, std::uint64_t &event) override {
        // An event of its own: the engine may release `raw` before.
        return enqueue(STREAMS - 1, raw, work{}, event);
    }
    kvt_status_t stream_wait(std::uint64_t raw_stream, std::uint64_t event) override {
        std::uint64_t mark = 0;
        return enqueue(static_cast<std::uint32_t>(raw_stream), event, work{}, mark, true);
    }
    kvt_status_t create_event(std::uint64_t &event) override {
        return event = pending_event(), KVT_OK;
    }
    kvt_status_t signal_event(std::uint64_t event) override { return complete(event), KVT_OK; }

private:
    struct work {
        std::uint64_t event = 0;
        std::uint64_t after = 0;
        std::vector<kvt_copy_rows_t> copies;
        /// Kernels of KVT_DEVICE_KERNEL_MOVE. Their tables are read when they run.
        std::vector<kvt_kernel_t> kernels;
        /// Its event is not recorded.
        bool without_event = false;
    };

    kvt_status_t enqueue(std::uint32_t stream, std::uint64_t after, work what,
                         std::uint64_t &event, bool without_event = false) {
        if (work_throws.exchange(false)) throw std::runtime_error("the accelerator failed");
        {
            const std::lock_guard<std::mutex> locked(lock_);
            if (stream >= STREAMS) return KVT_E_INVALID;
            if (after != 0 && events_.count(after) == 0) return KVT_E_HANDLE;
            event = what.event = ++last_;
            what.after = after;
            what.without_event = without_event;
            if (!without_event) events_[event] = KVT_E_AGAIN;
            // A completed event may be released before the work runs.
            if (after != 0 && events_[after] == KVT_OK) what.after = 0;
            queues_[stream].push_back(std::move(what));
        }
        changed_.notify_all();
        return KVT_OK;
    }
    void set_status(std::uint64_t event, kvt_status_t status) {
        {
            const std::lock_guard<std::mutex> locked(lock_);
            const auto found = events_.find(event);
            if (found != events_.end()) found->second = status;
        }
        changed_.notify_all();
    }
    void serve(std::uint32_t stream) {
        for (;;) {
            std::unique_lock<std::mutex> locked(lock_);
            std::deque<work> &queue = queues_[stream];
            changed_.wait(locked, [&] { return stopping_ || !queue.empty(); });
            if (queue.empty()) return;
            const work now = std::move(queue.front());
            queue.pop_front();
            const auto is_ready = [&] {
                const auto found = events_.find(now.after);
                return stopping_ || found == events_.end() || found->second != KVT_E_AGAIN;
            };
            if (now.after != 0) changed_.wait(locked, is_ready);
            const auto after = events_.find(now.after);
            const kvt_status_t status =
                now.after == 0 || after == events_.end() ? KVT_OK : after->second;
            locked.unlock();
            if (status == KVT_OK) execute(now);
            if (!now.without_event) set_status(now.event, status);
        }
    }
    static void execute(const work &now) {
        for (const kvt_copy_rows_t &rows : now.copies) copy(rows);
        for (const kvt_kernel_t &kernel : now.kernels) {
            const piece *const pieces = reinterpret_cast<const piece *>(kernel.table);
            for (std::uint32_t i = 0; i < kernel.count; i++) {
                kvt_copy_rows_t rows{};
                rows.from = pieces[i].from;
                rows.to = pieces[i].to;
                rows.from_stride_bytes = static_cast<std::uint64_t>(pieces[i].from_stride);
                rows.to_stride_bytes = static_cast<std::uint64_t>(pieces[i].to_stride);
                rows.run_bytes = pieces[i].run_bytes;
                rows.runs = pieces[i].runs;
                copy(rows);
            }
        }
    }
    static void copy(const kvt_copy_rows_t &rows) {
        for (std::uint64_t i = 0; i < rows.runs; i++)
            std::memcpy(reinterpret_cast<void *>(rows.to + i * rows.to_stride_bytes),
                        reinterpret_cast<const void *>(rows.from + i * rows.from_stride_bytes),
                        static_cast<std::size_t>(rows.run_bytes));
    }

    std::mutex lock_;
    std::condition_variable changed_;
    std::deque<work> queues_[STREAMS];
    std::map<std::uint64_t, kvt_status_t> events_;
    std::map<std::uint64_t, void *> memory_;
    std::set<std::uint64_t> pinned_;
    std::vector<std::thread> workers_;
    std::uint64_t last_ = 0;
    std::uint64_t used_ = 0;
    bool stopping_ = false;
};

/// A custom device, and the engine's object behind it, which the device owns.
struct rig {
    thread_device *engine;
    kvt::device device;

    explicit rig(const kvt::runtime &runtime) {
        std::unique_ptr<thread_device> own(new thread_device);
        engine = own.get();
        device = kvt::device::custom(runtime, std::move(own));
    }
};

void device_passes_conformance(const kvt::device &device) {
    kvt::conformance_opts opts;
    opts.seed = 7;
    opts.rounds = 10;
    const kvt::conformance_report report = device.conformance(opts);
    for (const kvt::conformance_check &check : report.checks)
        if (check.verdict == KVT_VERDICT_FAILED)
            std::fprintf(stderr, "%s: %s\n", check.name.c_str(), check.why.c_str());
    CHECK(report.failed == 0 && report.passed >= 10);
    CHECK(report.checks.size() == report.passed + report.skipped);
}

/// Copies tokens with gaps to the device, and back without gaps.
void copies_and_kernels_move_rows(const rig &on) {
    constexpr std::uint32_t TOKENS = 33, HEADS = 2, RUN = 48, GAP = 16;
    constexpr std::size_t PLANE = std::size_t{TOKENS} * HEADS * RUN;
    std::vector<std::uint8_t> from(TOKENS * (HEADS * RUN + GAP)), to(PLANE), plain;
    for (std::size_t i = 0; i < from.size(); i++)
        from[i] = static_cast<std::uint8_t>(i * 37 + i / 251);
    for (std::uint32_t token = 0; token < TOKENS; token++) {
        const auto at = from.begin() + token * (HEADS * RUN + GAP);
        plain.insert(plain.end(), at, at + HEADS * RUN);
    }
    kvt_view_t view = kvt::view(from.data(), RUN, HEADS);
    view.token_stride_bytes = HEADS * RUN + GAP;
    view.tokens = TOKENS;
    kvt::device_memory memory = on.device.alloc(PLANE);
    CHECK(memory.memory() == KVT_MEMORY_DEVICE && memory.address() % 256 == 0);
    CHECK(memory.bytes() == PLANE);
    const kvt::device_event gathered =
        on.device.copy(kvt::gather(view, memory.data(), memory.memory()), 0);
    const kvt::device_event downloaded =
        on.device.copy(kvt::download(memory.data(), to.data(), PLANE), 1, gathered.number());
    downloaded.wait(soon());
    CHECK(downloaded.is_done() && gathered.is_done() && to == plain);

    // The reverse, with a kernel in between that moves the bytes.
    std::vector<std::uint8_t> again(from.size(), 0);
    kvt::device_memory other = on.device.alloc(PLANE);
    kvt_kernel_t kernel{};
    kernel.kind = KVT_DEVICE_KERNEL_MOVE;
    const piece whole{memory.address(), other.address(), 0, 0, PLANE, 1};
    kernel.table = reinterpret_cast<std::uintptr_t>(&whole);
    kernel.count = 1;
    view.address = again.data();
    const kvt::device_event moved = on.device.launch(kvt::span<const kvt_kernel_t>(&kernel, 1));
    const kvt::device_event scattered = on.device.copy(
        kvt::scatter(view, other.data(), other.memory()), 2, moved.number());
    scattered.wait(soon());
    for (std::uint32_t token = 0; token < TOKENS; token++) {
        const std::size_t at = std::size_t{token} * (HEADS * RUN + GAP);
        CHECK(std::memcmp(&again[at], &from[at], HEADS * RUN) == 0);
        CHECK(token + 1 == TOKENS || again[at + HEADS * RUN] == 0);
    }
    kernel.kind = KVT_DEVICE_KERNEL_DECODE;
    CHECK_THROWS(on.device.launch(kvt::span<const kvt_kernel_t>(&kernel, 1)), KVT_E_UNSUPPORTED);
    CHECK_THROWS(on.device.copy(kvt::download(other.data(), to.data(), PLANE), 9),
                 KVT_E_INVALID);
    other.free();
    CHECK(!other);
}

/// An index is packed for a kernel: heads, starts of lists, items.
void pack_index_packs_an_index() {
    kvt::sparse_index index;
    index.heads.push_back({KVT_INDEX_LINES, 0, 2, 0, 0, UINT32_MAX});
    index.starts = {0, 2, 3};
    index.items = {0, 5, 0};
    const kvt_index_t packed = index.to_c();
    kvt_kernel_t kernel{};
    kernel.kind = KVT_DEVICE_KERNEL_PREFILL;
    kernel.query_count = 10;
    kernel.first = 54;
    kernel.tokens = 64;
    kernel.query_heads = 4;
    kernel.key_heads = 2;
    const std::vector<std::uint8_t> bytes = kvt::pack_index(&packed, kernel, 0x1000);
    CHECK(bytes.size() == 48 && kernel.count == 1 && kernel.numbers == 0x1000);
    CHECK(kernel.counts == 0x1018 && kernel.index == 0x1024);
    CHECK(kernel.scratch_bytes == 12 * (64 / 32 + 8));
    CHECK(std::memcmp(bytes.data() + 36, index.items.data(), 12) == 0);
    CHECK_THROWS(kvt::pack_index(&packed, kernel, 0x1001), KVT_E_INVALID);
    CHECK(kvt::pack_index(nullptr, kernel, 0x1000).empty() && kernel.count == 0);
}

/// Work after an imported event waits for the event on the device; no thread waits.
void work_waits_for_events_of_the_engine(const rig &on) {
    std::vector<std::uint8_t> host(4096, 7), back(4096, 0);
    const kvt::device_memory memory = on.device.alloc(host.size());
    const std::uint64_t computed = on.engine->pending_event();
    const kvt::device_event imported = on.device.import_event(computed);
    kvt::device_event uploaded = on.device.copy(
        kvt::upload(host.data(), memory.data(), host.size()), 0, imported.number());
    on.device.stream_wait(1, uploaded.number());
    const kvt::device_event downloaded =
        on.device.copy(kvt::download(memory.data(), back.data(), back.size()), 1);
    CHECK(!imported.is_done() && !uploaded.is_done() && !downloaded.is_done());
    CHECK_THROWS(uploaded.wait(kvt::deadline::in(std::chrono::milliseconds(20))), KVT_E_TIMEOUT);
    on.engine->complete(computed);
    downloaded.wait(soon());
    CHECK(back == host && uploaded.is_done());
    CHECK_THROWS(on.device.import_event(1 << 30), KVT_E_HANDLE);
    on.engine->release(computed);

    /* Created events: one is signalled, one is destroyed pending, which signals it. */
    std::vector<std::uint8_t> once(4096, 0), twice(4096, 0);
    const kvt::device_event first = on.device.create_event();
    kvt::device_event second = on.device.create_event();
    const kvt::device_event early = on.device.copy(
        kvt::download(memory.data(), once.data(), once.size()), 0, first.number());
    const kvt::device_event late = on.device.copy(
        kvt::download(memory.data(), twice.data(), twice.size()), 1, second.number());
    CHECK(!first.is_done() && !early.is_done() && !late.is_done());
    first.signal();
    early.wait(soon());
    CHECK(once == host && !late.is_done());
    second.reset();
    late.wait(soon());
    CHECK(twice == host);
    CHECK_THROWS(early.signal(), KVT_E_HANDLE);
    std::set<std::uint64_t> polled;
    for (const std::uint64_t event : on.device.poll()) polled.insert(event);
    CHECK(polled.count(uploaded.number()) == 1 && polled.count(downloaded.number()) == 1);
    on.device.register_host(host.data(), host.size());
    on.device.unregister_host(host.data());
    CHECK_THROWS(on.device.unregister_host(host.data()), KVT_E_NOT_FOUND);
}

std::atomic<int> &defects() {
    static std::atomic<int> count{0};
    return count;
}

/// An exception of the engine becomes a status, and the device stays usable.
void exceptions_of_the_engine_become_statuses(const rig &on) {
    std::vector<std::uint8_t> host(64, 3);
    const kvt::device_memory memory = on.device.alloc(host.size());
    const kvt_copy_t copy = kvt::upload(host.data(), memory.data(), host.size());
    const kvt::defect_hook previous = kvt::set_defect_hook(
        [](const char *, kvt_status_t, const char *) noexcept { ++defects(); });
    on.engine->work_throws = true;
    CHECK_THROWS(on.device.copy(copy), KVT_E_STATE);
    on.engine->work_throws = true;
    CHECK_THROWS(on.device.alloc(64), KVT_E_NOMEM);
    CHECK(defects() == 2);
    // After a query that throws, the library queries the event again.
    on.engine->query_throws = true;
    on.device.copy(copy).wait(soon());
    CHECK(!on.engine->query_throws && defects() == 3);
    (void)kvt::set_defect_hook(previous);
    CHECK_THROWS(on.device.alloc(thread_device::MEMORY + 1), KVT_E_NOMEM);
    CHECK_THROWS(on.device.alloc(0), KVT_E_INVALID);
}

/// Puts KV from device memory into a store, and gets it back.
void store_transfers_device_memory(const kvt::runtime &runtime, rig &on) {
    constexpr std::uint32_t TOKENS = 16, RUN = 64;
    constexpr std::size_t PLANE = TOKENS * RUN;
    kvt::store_opts opts;
    opts.host_bytes = 1 << 20;
    opts.device = &on.device;
    kvt::store store = kvt::store::open(runtime, opts);
    CHECK_THROWS(on.device.close(), KVT_E_BUSY);
    kvt::layer_group group;
    group.layers = {0, 1};
    group.k_bytes = group.v_bytes = RUN;
    kvt::layout layout;
    layout.chunk_tokens = 4;
    layout.groups = {group};
    kvt::identity identity;
    identity.model = "m";
    kvt::session session = store.open_namespace(identity, layout).open_session();
    std::vector<std::uint32_t> tokens(TOKENS);
    for (std::uint32_t i = 0; i < TOKENS; i++) tokens[i] = i;
    session.append(tokens);

    const kvt::device_memory cache = on.device.alloc(4 * PLANE);
    std::vector<std::uint8_t> image(4 * PLANE), found(4 * PLANE, 0);
    for (std::size_t i = 0; i < image.size(); i++)
        image[i] = static_cast<std::uint8_t>(i * 11 + i / 256);
    std::vector<kvt_view_t> k, v;
    for (std::size_t i = 0; i < 4; i++) {
        kvt_view_t plane = kvt::view(static_cast<std::uint8_t *>(cache.data()) + i * PLANE, RUN);
        plane.tokens = static_cast<std::uint32_t>(PLANE / RUN);
        plane.memory = cache.memory();
        (i % 2 == 0 ? k : v).push_back(plane);
    }
    kvt::transfer all;
    all.k = k;
    all.v = v;
    on.device.copy(kvt::upload(image.data(), cache.data(), image.size())).wait(soon());
    CHECK(session.put(all).finish().value == TOKENS);
    on.device.copy(kvt::upload(found.data(), cache.data(), found.size())).wait(soon());
    CHECK(session.get(all).finish().value == TOKENS);
    on.device.copy(kvt::download(cache.data(), found.data(), found.size())).wait(soon());
    CHECK(found == image);
    session.close();
    store.close();
}

/// Streams weights of a file to the device; leases are released after events of the engine.
void streamer_loads_units_to_the_device(const kvt::runtime &runtime, rig &on) {
    constexpr std::uint32_t UNITS = 5;
    constexpr std::uint64_t BYTES = 40960;
    char path[] = "/tmp/kvt-device-cpp-XXXXXX";
    const int file = mkstemp(path);
    CHECK(file >= 0);
    std::vector<char> image(UNITS * BYTES);
    for (std::size_t i = 0; i < image.size(); i++) image[i] = static_cast<char>(i * 13 + i / 99);
    CHECK(write(file, image.data(), image.size()) == static_cast<ssize_t>(image.size()));
    CHECK(close(file) == 0);
    std::vector<kvt::unit_entry> units(UNITS);
    for (std::uint32_t i = 0; i < UNITS; i++) {
        units[i].name = "layer " + std::to_string(i);
        units[i].role = KVT_ROLE_LAYER;
        units[i].layer = i;
        units[i].ranges = {kvt_file_range_t{0, 0, i * BYTES, BYTES}};
    }
    const std::vector<std::string> paths = {path};
    const kvt::model model = kvt::model::table(paths, units);
    kvt::stream_opts opts;
    opts.device = &on.device;
    opts.terms.device_safety_bytes = opts.terms.kv_bytes = opts.terms.host_reserve_bytes = 0;
    opts.terms.device_ceiling_bytes = 3 * BYTES;
    kvt::streamer streamer = kvt::streamer::open(runtime, model, opts);
    CHECK_THROWS(on.device.close(), KVT_E_BUSY);
    std::vector<char> found(BYTES);
    for (int pass = 0; pass < 2; pass++) {
        streamer.pass_begin();
        for (std::uint32_t unit = 0; unit < UNITS; unit++) {
            kvt::unit_lease lease = streamer.acquire_submitted(unit, soon());
            CHECK(lease.memory() == KVT_MEMORY_DEVICE);
            kvt::device_event read = on.device.copy(
                kvt::download(lease.data(), found.data(), BYTES), 2, lease.event());
            read.wait(soon());
            CHECK(std::memcmp(found.data(), &image[unit * BYTES], BYTES) == 0);
            const std::uint64_t computed = on.engine->pending_event();
            kvt::device_event after = on.device.import_event(computed);
            lease.release(std::move(after));
            CHECK(!lease && !after);
            on.engine->complete(computed);
            on.engine->release(computed);
        }
        streamer.pass_end();
    }
    streamer.close();
    CHECK(std::remove(path) == 0);
}

void host_simulated_and_cuda_devices_open(const kvt::runtime &runtime) {
    const kvt::device host = kvt::device::host(runtime);
    const kvt::device_info info = host.info();
    CHECK(info.kind == KVT_DEVICE_KIND_HOST && info.checksums && !info.asynchronous && !info.has_memory);
    std::vector<std::uint8_t> from(5000, 9), to(5000, 0);
    kvt_view_t view = kvt::view(from.data(), 100);
    view.tokens = 50;
    kvt_copy_t copy = kvt::gather(view, to.data());
    copy.flags = KVT_COPY_CHECKSUM;
    CHECK(host.copy(kvt::span<kvt_copy_t>(&copy, 1)).is_done() && to == from);
    CHECK(copy.sum ==
          kvt::checksum({reinterpret_cast<const std::byte *>(to.data()), to.size()}));
    CHECK(!host.describe().empty());

    {
        kvt::device_opts sums;
        sums.verify = true;
        const kvt::device device = kvt::device::simulated(runtime, sums);
        const kvt::device_memory memory = device.alloc(to.size());
        copy = kvt::upload(from.data(), memory.data(), from.size());
        copy.flags = KVT_COPY_CHECKSUM;
        const kvt::device_event event = device.copy(kvt::span<kvt_copy_t>(&copy, 1));
        event.wait();
        CHECK(device.info().checksums && event.checksums().size() == 1);
        CHECK(event.checksums()[0] ==
              kvt::checksum({reinterpret_cast<const std::byte *>(from.data()), from.size()}));
    }

    kvt::device_opts opts;
    opts.memory_bytes = 1 << 20;
    opts.latency = std::chrono::microseconds(200);
    kvt::device simulated = kvt::device::simulated(runtime, opts);
    CHECK(simulated.info().has_memory && simulated.info().free_bytes == opts.memory_bytes);
    {
        const kvt::device_memory memory = simulated.alloc(to.size());
        // Each event waits in its destructor.
        (void)simulated.copy(kvt::upload(from.data(), memory.data(), from.size()));
        to.assign(to.size(), 0);
        (void)simulated.copy(kvt::download(memory.data(), to.data(), to.size()));
        CHECK(to == from);
    }
    simulated.close();
    CHECK_THROWS(simulated.info(), KVT_E_HANDLE);

    kvt::device_opts none;
    none.library = "/nowhere/libcuda.so.1";
    CHECK_THROWS(kvt::device::cuda(runtime, none), KVT_E_UNAVAILABLE);
    CHECK_THROWS(kvt::device::custom(runtime, nullptr), KVT_E_INVALID);
}

}  // namespace

int main() {
    kvt::check_abi();
    {
        const kvt::runtime runtime = kvt::runtime::open();
        host_simulated_and_cuda_devices_open(runtime);
        pack_index_packs_an_index();
        rig on(runtime);
        const kvt::device_info info = on.device.info();
        CHECK(info.kind == KVT_DEVICE_KIND_CUSTOM && info.asynchronous && info.has_memory);
        CHECK(info.streams == thread_device::STREAMS);
        CHECK(info.free_bytes == thread_device::MEMORY);
        CHECK(info.has_kernel(KVT_DEVICE_KERNEL_MOVE) && !info.has_kernel(KVT_DEVICE_KERNEL_DECODE));
        device_passes_conformance(on.device);
        copies_and_kernels_move_rows(on);
        work_waits_for_events_of_the_engine(on);
        exceptions_of_the_engine_become_statuses(on);
        store_transfers_device_memory(runtime, on);
        streamer_loads_units_to_the_device(runtime, on);
        CHECK(on.engine->live_events() == 0);
        CHECK(on.engine->free_bytes() == thread_device::MEMORY);
        CHECK(thread_device::deleted() == 0);
        on.device.close(soon());
        CHECK(thread_device::deleted() == 1);
    }
    return done();
}
