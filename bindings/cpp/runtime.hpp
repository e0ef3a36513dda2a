/// @file
/// kvt::runtime, kvt::op, kvt::queue: how work is submitted and how its end is learnt; kvt::reactor:
/// ops that coroutines await.
///
/// kvt::store::open(spec) opens a runtime of its own; a program that wants several stores on the same
/// threads opens it itself. Each submission returns an op at once. The caller waits for it, or takes
/// completions from a queue.
///
/// Life cycle: runtime::open, open_queue, submissions, queue::wait or op::finish. The destructor of an
/// op cancels it and waits for its release, so buffers that were declared before it may be freed after
/// it. The destructor of a queue does so for the ops that report to it, that of a runtime for all.
///
///     kvt::queue queue = runtime.open_queue();
///     kvt::submit_opts opts;
///     opts.queue = &queue;
///     opts.tag = 7; // comes back with the completion
///     const kvt::op op = session.put(transfer, opts);
///     compute_next_layer();
///     kvt_completion_t done[64];
///     const std::size_t count = queue.wait(done, kvt::deadline::in(std::chrono::seconds(10)));
///     for (std::size_t i = 0; i < count; i++)
///         if (done[i].status != KVT_OK) std::fprintf(stderr, "%s\n", op.error().message());

#ifndef KVTIER_RUNTIME_HPP
#define KVTIER_RUNTIME_HPP

#include <kvtier/base.hpp>
#include <kvtier/runtime.h>

#include <mutex>

#if defined(__cpp_impl_coroutine) && defined(__has_include)
#if __has_include(<coroutine>)
#include <coroutine>
#define KVTIER_HAS_COROUTINES 1
#endif
#endif

struct kvt_buffer_item_t; // kvtier/memory.h

namespace kvt {
inline namespace KVTIER_ERRORS_ {

class account;
class budget;
class buffer;
struct budget_opts;
struct buffer_opts;

/// The completions that a callback receives. Strided, because entries of a newer library may be
/// longer than those of this header.
class batch {
public:
    class iterator {
    public:
        using iterator_category = std::forward_iterator_tag;
        using value_type = kvt_completion_t;
        using difference_type = std::ptrdiff_t;
        using pointer = const kvt_completion_t *;
        using reference = const kvt_completion_t &;
        iterator() noexcept = default;
        iterator(const batch *of, std::size_t at) noexcept : of_(of), at_(at) {}
        reference operator*() const noexcept { return (*of_)[at_]; }
        pointer operator->() const noexcept { return &(*of_)[at_]; }
        iterator &operator++() noexcept { return ++at_, *this; }
        iterator operator++(int) noexcept { return iterator(of_, at_++); }
        bool operator==(const iterator &other) const noexcept { return at_ == other.at_; }
        bool operator!=(const iterator &other) const noexcept { return at_ != other.at_; }

    private:
        const batch *of_ = nullptr;
        std::size_t at_ = 0;
    };

    batch(const kvt_completion_t *first, std::uint64_t count, std::uint64_t stride_bytes) noexcept
        : first_(reinterpret_cast<const std::byte *>(first)),
          count_(static_cast<std::size_t>(count)), stride_(static_cast<std::size_t>(stride_bytes)) {
    }
    std::size_t size() const noexcept { return count_; }
    bool empty() const noexcept { return count_ == 0; }
    const kvt_completion_t &operator[](std::size_t i) const noexcept {
        return *static_cast<const kvt_completion_t *>(
            static_cast<const void *>(first_ + i * stride_));
    }
    iterator begin() const noexcept { return iterator(this, 0); }
    iterator end() const noexcept { return iterator(this, count_); }

private:
    const std::byte *first_;
    std::size_t count_;
    std::size_t stride_;
};

// --- op ----------------------------------------------------------------------

/// A submitted operation. Its destructor cancels it and waits for its release, so that buffers of
/// the op may be freed afterwards.
class op : public detail::owner<op, kvt_op_t> {
    friend class detail::owner<op, kvt_op_t>;
    static void drop(kvt_op_t *raw) noexcept {
        kvt_status_t status = kvt_op_free(&raw);
        if (status == KVT_E_BUSY) {
            settle(raw);
            status = kvt_op_free(&raw);
        }
        if (!detail::ended(status)) detail::report("kvt::op", status);
    }

public:
    /// Cancels an op and waits until the library has released its memory.
    static void settle(kvt_op_t *raw) noexcept {
        (void)kvt_op_cancel(raw);
        if (kvt_op_wait(raw, KVT_OP_RELEASED, 0) != KVT_E_REENTRANT) return;
        // Callbacks must not wait. The workers go on while this thread polls.
        (void)detail::poll_until([raw] {
            kvt_op_info_t info = KVT_OP_INFO_INIT;
            return kvt_op_info(raw, &info) != KVT_OK || (info.state & KVT_OP_RELEASED) != 0;
        });
    }

    ret<kvt_op_info_t> info() const {
        kvt_op_info_t info = KVT_OP_INFO_INIT;
        const kvt_status_t status = kvt_op_info(raw_, &info);
        return detail::give(status, info);
    }
    /// Waits for moments of the op (KVT_OP_*). True when they were reached, false at the deadline.
    ret<bool> wait(kvt_op_moments_t moments = KVT_OP_RELEASED, deadline by = {}) const {
        const kvt_status_t status = kvt_op_wait(raw_, moments, by.ns);
        return detail::give(status == KVT_E_TIMEOUT ? KVT_OK : status, status == KVT_OK);
    }
    ret<void> cancel() const { return detail::check(kvt_op_cancel(raw_)); }
    /// Waits for the release. Fails with the op's status if the op failed.
    ret<kvt_op_info_t> finish() const {
        kvt_op_info_t info = KVT_OP_INFO_INIT;
        kvt_status_t status = kvt_op_wait(raw_, KVT_OP_RELEASED, 0);
        if (status == KVT_OK) status = kvt_op_info(raw_, &info);
        if (status != KVT_OK) return detail::fail<kvt_op_info_t>(kvt::error(status));
        if (info.status != KVT_OK) return detail::fail<kvt_op_info_t>(error_of(raw_, info.status));
        return ret<kvt_op_info_t>(info);
    }
    /// Reads the op's items from index `first` on; returns the number written.
    ret<std::size_t> items(span<kvt_op_item_t> out, std::uint64_t first = 0) const {
        std::uint64_t count = 0;
        const kvt_status_t status = kvt_op_items(raw_, first, out.data(), out.size(),
                                                 sizeof(kvt_op_item_t), &count);
        return detail::give(status, static_cast<std::size_t>(count));
    }
    /// The op's error. Its status() is KVT_OK if the op succeeded, KVT_E_STATE before it resolves.
    kvt::error error() const noexcept {
        kvt_op_info_t info = KVT_OP_INFO_INIT;
        kvt_status_t status = kvt_op_info(raw_, &info);
        if (status == KVT_OK && (info.state & KVT_OP_RESOLVED) == 0) status = KVT_E_STATE;
        return status != KVT_OK ? kvt::error(status) : error_of(raw_, info.status);
    }
    /// The error of a resolved op with a known status.
    static kvt::error error_of(const kvt_op_t *raw, kvt_status_t status) noexcept {
        kvt_error_t *text = nullptr;
        (void)kvt_op_error(raw, &text);
        return kvt::error(status, text);
    }
};

// --- queue -------------------------------------------------------------------

using completion_fn = std::function<void(const batch &)>;

// [kvt_queue_opts_t: by generate.py]
/// Options of a queue.
struct queue_opts {
    /// Entries, at most 1048576; 0 = 4096. Each op reserves one for its release and one for each
    /// other moment in `notify`. An entry is free again when it is drained or not needed.
    std::uint64_t capacity = 0;
    /// Receives the completions, on the notifier thread; empty = the queue is polled. An exception
    /// goes to the defect hook, and the rest of that batch is lost.
    completion_fn callback{};

    kvt_queue_opts_t to_c() const noexcept {
        kvt_queue_opts_t c = KVT_QUEUE_OPTS_INIT;
        c.capacity = capacity;
        return c;
    }
};
// [end]

/// A completion queue. The destructor cancels the ops that report to it and waits for them.
class queue : public detail::owner<queue, kvt_queue_t> {
    friend class detail::owner<queue, kvt_queue_t>;
    static void drop(kvt_queue_t *raw) noexcept {
        const kvt_status_t status = kvt_queue_close(&raw, 0, nullptr);
        if (!detail::ended(status)) detail::report("kvt::queue", status);
    }

public:
    /// Fails with KVT_E_BUSY at the deadline. The queue is closing then, and this object still owns
    /// it: call again.
    ret<void> close(deadline by = {}) {
        detail::failure f;
        const kvt_status_t status = kvt_queue_close(&raw_, by.ns, f.out());
        return detail::check(status, f);
    }
    /// Takes completions without waiting; returns the number written.
    ret<std::size_t> poll(span<kvt_completion_t> out) const {
        std::uint64_t count = 0;
        const kvt_status_t status =
            kvt_queue_poll(raw_, out.data(), out.size(), sizeof(kvt_completion_t), &count);
        return detail::give(status, static_cast<std::size_t>(count));
    }
    /// Waits for completions; returns the number written, 0 at the deadline.
    ret<std::size_t> wait(span<kvt_completion_t> out, deadline by = {}) const {
        std::uint64_t count = 0;
        const kvt_status_t status = kvt_queue_wait(raw_, by.ns, out.data(), out.size(),
                                                   sizeof(kvt_completion_t), &count);
        return detail::give(status == KVT_E_TIMEOUT ? KVT_OK : status,
                            static_cast<std::size_t>(status == KVT_OK ? count : 0));
    }
    /// A descriptor that is readable while the queue has completions. The queue closes it.
    ret<int> fd() const {
        std::int32_t fd = -1;
        const kvt_status_t status = kvt_queue_fd(raw_, &fd);
        return detail::give(status, static_cast<int>(fd));
    }
    ret<kvt_queue_stats_t> stats() const {
        kvt_queue_stats_t stats = KVT_QUEUE_STATS_INIT;
        const kvt_status_t status = kvt_queue_stats(raw_, &stats);
        return detail::give(status, stats);
    }
};

// [kvt_submit_opts_t: by generate.py]
/// Options of a submission.
struct submit_opts {
    /// Receives the completions; null = none, and the call must return a handle.
    ref<kvt_queue_t> queue{};
    /// The caller's value, returned in completions.
    std::uint64_t tag = 0;
    /// The op resolves with KVT_E_TIMEOUT at this time; 0 = never.
    kvt::deadline deadline{};
    /// KVT_OP_ISSUED, _RESOLVED, _RELEASED: moments that post a completion. Moments that come
    /// together share one. 0 = KVT_OP_RELEASED.
    std::uint32_t notify = 0;
    /// KVT_PRIORITY_DEMAND, KVT_PRIORITY_PREFETCH, KVT_PRIORITY_BACKGROUND.
    kvt_priority_t priority = KVT_PRIORITY_DEMAND;

    kvt_submit_opts_t to_c() const noexcept {
        kvt_submit_opts_t c = KVT_SUBMIT_OPTS_INIT;
        c.queue = queue.get();
        c.tag = tag;
        c.deadline_ns = deadline.ns;
        c.notify = notify;
        c.priority = priority;
        return c;
    }
};
// [end]

// --- runtime -----------------------------------------------------------------

/// Called first in every thread of the library; must not call the library. Arguments: role, index in
/// that role.
using thread_fn = std::function<void(kvt_thread_role_t, std::uint32_t)>;

// [kvt_runtime_opts_t: by generate.py]
/// Options of a runtime.
struct runtime_opts {
    /// Worker threads, at most 256; 0 = the number of cores, at most 4.
    std::uint32_t workers = 0;
    /// Most ops that are not freed, at most 524288; 0 = 65536.
    std::uint32_t max_ops = 0;
    /// Prefix of thread names, at most 10 bytes; empty = "kvt".
    std::string_view name{};
    /// Faults to inject, for tests of error paths, such as "faults(pin=at(fail=1))"; empty = none.
    /// See "Injected faults" in docs/reference/c.md.
    std::string_view faults{};
    /// Called first in every thread; empty = none.
    thread_fn on_thread{};

    kvt_runtime_opts_t to_c() const noexcept {
        kvt_runtime_opts_t c = KVT_RUNTIME_OPTS_INIT;
        c.workers = workers;
        c.max_ops = max_ops;
        detail::text(name, c.name, c.name_bytes);
        detail::text(faults, c.faults, c.faults_bytes);
        return c;
    }
};
// [end]

/// The root object: threads, clock, log target. The destructor cancels ops, waits for them and
/// joins the threads. Objects that are still open stay valid; only close() counts them.
class runtime : public detail::owner<runtime, kvt_runtime_t> {
    friend class detail::owner<runtime, kvt_runtime_t>;
    static void drop(kvt_runtime_t *raw) noexcept {
        const kvt_status_t status = kvt_runtime_close(&raw, 0, nullptr, nullptr);
        if (!detail::ended(status)) detail::report("kvt::runtime", status);
    }

public:
    static ret<runtime> open(runtime_opts opts = {}) {
        struct box {
            thread_fn call;
            static void on_thread(void *user_data, kvt_thread_role_t role,
                                  std::uint32_t index) noexcept {
                detail::guarded_void("kvt on_thread", static_cast<box *>(user_data)->call, role,
                                     index);
            }
        };
        detail::failure f;
        kvt_runtime_opts_t c = opts.to_c();
        std::unique_ptr<box> boxed = detail::boxed<box>(opts.on_thread);
        if (boxed) c.on_thread = &box::on_thread;
        detail::pass(boxed, c);
        kvt_runtime_t *raw = nullptr;
        const kvt_status_t status = kvt_runtime_open(&c, &raw, f.out());
        if (status == KVT_OK) (void)boxed.release();
        return detail::give(status, f, runtime::adopt(raw));
    }

    /// Returns the number of objects that are still open. Fails with KVT_E_BUSY at the deadline;
    /// this object still owns the runtime then.
    ret<kvt_close_report_t> close(deadline by = {}) {
        detail::failure f;
        kvt_close_report_t report = KVT_CLOSE_REPORT_INIT;
        const kvt_status_t status = kvt_runtime_close(&raw_, by.ns, &report, f.out());
        return detail::give(status, f, report);
    }
    ret<std::uint64_t> now_ns() const {
        std::uint64_t ns = 0;
        const kvt_status_t status = kvt_runtime_now(raw_, &ns);
        return detail::give(status, ns);
    }
    ret<kvt_runtime_stats_t> stats() const {
        kvt_runtime_stats_t stats = KVT_RUNTIME_STATS_INIT;
        const kvt_status_t status = kvt_runtime_stats(raw_, &stats);
        return detail::give(status, stats);
    }

    ret<queue> open_queue(queue_opts opts = {}) const {
        struct box {
            completion_fn call;
            static void complete(void *user_data, const kvt_completion_t *first,
                                 std::uint64_t count, std::uint64_t stride_bytes) noexcept {
                detail::guarded_void("kvt completion callback", static_cast<box *>(user_data)->call,
                                     batch(first, count, stride_bytes));
            }
        };
        detail::failure f;
        kvt_queue_opts_t c = opts.to_c();
        std::unique_ptr<box> boxed = detail::boxed<box>(opts.callback);
        if (boxed) c.callback = &box::complete;
        detail::pass(boxed, c);
        kvt_queue_t *raw = nullptr;
        const kvt_status_t status = kvt_queue_open(raw_, &c, &raw, f.out());
        if (status == KVT_OK) (void)boxed.release();
        return detail::give(status, f, queue::adopt(raw));
    }

    // Defined in <kvtier/memory.hpp>.

    inline ret<budget> open_budget(const budget_opts &opts) const;
    inline ret<budget> open_budget() const;
    inline ret<buffer> alloc(const buffer_opts &opts) const;
    inline ret<buffer> alloc(std::uint64_t bytes) const;
    /// Makes a buffer of the caller's memory. `on_free` runs once the buffer is freed and no op
    /// uses it.
    inline ret<buffer> wrap(span<std::byte> memory, std::function<void()> on_free = {}) const;
    /// Submits all items as one op.
    inline ret<op> submit(span<const kvt_buffer_item_t> items, const submit_opts &opts = {}) const;
    inline ret<op> submit(const kvt_buffer_item_t &item, const submit_opts &opts = {}) const;
    /// Submits one op for each item.
    inline ret<std::vector<op>> submit_each(span<const kvt_buffer_item_t> items,
                                            const submit_opts &opts = {}) const;
    /// Submits without op handles: only the queue of `opts` reports completions.
    inline ret<void> post(span<const kvt_buffer_item_t> items, const submit_opts &opts,
                          bool each = false) const;
    /// submit() for hot paths, which expect KVT_E_AGAIN: formats no message.
    inline kvt_status_t try_submit(span<const kvt_buffer_item_t> items, const submit_opts &opts,
                                   op &out) const noexcept;
};

// --- coroutines --------------------------------------------------------------

#if defined(KVTIER_HAS_COROUTINES)
/// The result of an awaited op.
struct outcome {
    std::uint64_t value = 0;
    std::uint64_t bytes_done = 0;
};

namespace detail {
struct reactor_core;

/// An op in flight. The coroutine and the pending completion share it, since either may end first.
struct flight {
    enum : int { pending, awaited, completed, abandoned };
    std::atomic<int> refs{2};
    std::atomic<int> phase{pending};
    std::coroutine_handle<> waiter{};
    kvt_op_t *raw = nullptr;
    kvt_completion_t completion{};
    flight *next = nullptr;
    flight *prev = nullptr;

    void unref() noexcept {
        if (refs.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
        op::adopt(raw).reset();
        delete this;
    }
};

struct reactor_core {
    std::mutex lock;
    kvt::queue completions;
    flight *first = nullptr;
    std::size_t in_flight = 0;
    bool closing = false;

    void complete(const kvt_completion_t &c) noexcept {
        auto *f = reinterpret_cast<flight *>(static_cast<std::uintptr_t>(c.tag));
        {
            // The lock also makes the submitting thread's writes to the flight visible here.
            std::lock_guard<std::mutex> held(lock);
            if (f->prev != nullptr) f->prev->next = f->next;
            else first = f->next;
            if (f->next != nullptr) f->next->prev = f->prev;
            --in_flight;
        }
        f->completion = c;
        if (f->phase.exchange(flight::completed, std::memory_order_acq_rel) == flight::awaited)
            guarded_void("kvt coroutine", f->waiter);
        f->unref();
    }

    /// Takes completions of the queue and resumes their coroutines. With `wait`, waits for the
    /// first completion. `count` receives their number.
    kvt_status_t pump(deadline by, bool wait, std::size_t &count) noexcept {
        kvt_completion_t batch[32];
        std::uint64_t n = 0;
        const kvt_status_t status =
            wait ? kvt_queue_wait(completions.get(), by.ns, batch, 32, sizeof(batch[0]), &n)
                 : kvt_queue_poll(completions.get(), batch, 32, sizeof(batch[0]), &n);
        count = status == KVT_OK ? static_cast<std::size_t>(n) : 0;
        for (std::size_t i = 0; i < count; ++i) complete(batch[i]);
        return status;
    }
};
}  // namespace detail

/// An op in flight that one coroutine may co_await once. Destroying it cancels the op and waits for
/// its release. Destroying the coroutine destroys it.
class async_op {
public:
    async_op() noexcept = default;
    explicit async_op(detail::flight *f) noexcept : flight_(f) {}
    async_op(async_op &&other) noexcept : flight_(std::exchange(other.flight_, nullptr)) {}
    async_op &operator=(async_op &&other) noexcept {
        if (this != &other) {
            abandon();
            flight_ = std::exchange(other.flight_, nullptr);
        }
        return *this;
    }
    async_op(const async_op &) = delete;
    async_op &operator=(const async_op &) = delete;
    ~async_op() { abandon(); }

    void cancel() const noexcept {
        if (flight_ != nullptr) (void)kvt_op_cancel(flight_->raw);
    }

    bool await_ready() const noexcept {
        return flight_ == nullptr ||
               flight_->phase.load(std::memory_order_acquire) == detail::flight::completed;
    }
    bool await_suspend(std::coroutine_handle<> waiter) noexcept {
        flight_->waiter = waiter;
        int phase = detail::flight::pending;
        // After this succeeds another thread may run the coroutine: do not touch *this any more.
        return flight_->phase.compare_exchange_strong(phase, detail::flight::awaited,
                                                      std::memory_order_acq_rel);
    }
    ret<outcome> await_resume() {
        if (flight_ == nullptr) return detail::fail<outcome>(kvt::error(KVT_E_HANDLE));
        const kvt_completion_t &c = flight_->completion;
        if (c.status != KVT_OK) return detail::fail<outcome>(op::error_of(flight_->raw, c.status));
        outcome o;
        o.value = c.value;
        o.bytes_done = c.bytes_done;
        return ret<outcome>(o);
    }

private:
    void abandon() noexcept {
        detail::flight *f = std::exchange(flight_, nullptr);
        if (f == nullptr) return;
        if (f->phase.exchange(detail::flight::abandoned, std::memory_order_acq_rel) !=
            detail::flight::completed)
            op::settle(f->raw);
        f->unref();
    }
    detail::flight *flight_ = nullptr;
};

/// Submits ops that coroutines can await, and resumes the coroutines:
///
/// - `driven`: in run(), run_once() and poll(), which the program calls;
/// - `spontaneous`: on the notifier thread, where a coroutine may submit but must not block.
///
/// The reactor must live while coroutines await its ops. The destructor cancels ops in flight and
/// resumes their coroutines with that result.
class reactor {
public:
    enum class mode { driven, spontaneous };

    static ret<reactor> open(const runtime &rt, mode m = mode::driven, std::uint64_t capacity = 0) {
        reactor r;
        r.core_.reset(new detail::reactor_core);
        queue_opts opts;
        opts.capacity = capacity;
        if (m == mode::spontaneous) {
            detail::reactor_core *core = r.core_.get();
            opts.callback = [core](const batch &done) {
                for (const kvt_completion_t &c : done) core->complete(c);
            };
        }
        ret<queue> q = rt.open_queue(std::move(opts));
#if defined(KVTIER_NO_EXCEPTIONS)
        if (!q) return detail::fail<reactor>(kvt::error(q.status()));
        r.core_->completions = *std::move(q);
#else
        r.core_->completions = std::move(q);
#endif
        r.driven_ = m == mode::driven;
        return ret<reactor>(std::move(r));
    }

    reactor() noexcept = default;
    reactor(reactor &&) noexcept = default;
    reactor &operator=(reactor &&other) noexcept {
        if (this != &other) {
            shut();
            core_ = std::move(other.core_);
            driven_ = other.driven_;
        }
        return *this;
    }
    ~reactor() { shut(); }

    // Defined in <kvtier/memory.hpp>.

    inline ret<async_op> submit(const runtime &rt, span<const kvt_buffer_item_t> items,
                                const submit_opts &opts = {});
    inline ret<async_op> submit(const runtime &rt, const kvt_buffer_item_t &item,
                                const submit_opts &opts = {});
    /// `tier`: kvt_tier_t.
    inline ret<async_op> reserve(const account &a, std::uint32_t tier, std::uint64_t bytes,
                                 const submit_opts &opts = {});

    /// Resumes coroutines whose ops have ended, without waiting; returns the number of ops.
    ret<std::size_t> poll() {
        std::size_t count = 0;
        const kvt_status_t status = core_ ? core_->pump({}, false, count) : KVT_E_HANDLE;
        return detail::give(status, count);
    }
    /// Waits until an op has ended, then does what poll() does. Returns 0 at the deadline, and at
    /// once if nothing is in flight.
    ret<std::size_t> run_once(deadline by = {}) {
        std::size_t count = 0;
        kvt_status_t status = core_ ? KVT_OK : KVT_E_HANDLE;
        if (status == KVT_OK && in_flight() != 0) status = core_->pump(by, true, count);
        return detail::give(status == KVT_E_TIMEOUT ? KVT_OK : status, count);
    }
    /// Resumes coroutines until no op is in flight.
    ret<void> run() {
        kvt_status_t status = core_ ? KVT_OK : KVT_E_HANDLE;
        std::size_t count = 0;
        while (status == KVT_OK && in_flight() != 0) status = core_->pump({}, true, count);
        return detail::check(status);
    }
    /// A descriptor for an event loop: call poll() when it is readable. Driven reactors only.
    ret<int> fd() const { return core_ ? core_->completions.fd() : queue().fd(); }
    std::size_t in_flight() const noexcept {
        if (!core_) return 0;
        std::lock_guard<std::mutex> held(core_->lock);
        return core_->in_flight;
    }

private:
    template <class Call> ret<async_op> launch(const submit_opts &opts, Call call) {
        if (!core_) return detail::fail<async_op>(kvt::error(KVT_E_HANDLE));
        detail::failure f;
        std::unique_ptr<detail::flight> flight(new detail::flight);
        kvt_submit_opts_t c = opts.to_c();
        c.queue = core_->completions.get();
        c.tag = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(flight.get()));
        c.notify = KVT_OP_RELEASED;
        kvt_status_t status = KVT_E_CLOSED;
        {
            // Locked during the call, so that no completion is handled before the flight is listed.
            std::lock_guard<std::mutex> held(core_->lock);
            if (!core_->closing) status = call(&c, &flight->raw, f.out());
            if (status == KVT_OK) {
                flight->next = core_->first;
                if (core_->first != nullptr) core_->first->prev = flight.get();
                core_->first = flight.get();
                ++core_->in_flight;
            }
        }
        if (status != KVT_OK) return detail::fail<async_op>(f.take(status));
        return ret<async_op>(async_op(flight.release()));
    }

    void shut() noexcept {
        if (!core_) return;
        {
            std::lock_guard<std::mutex> held(core_->lock);
            core_->closing = true;
            for (detail::flight *f = core_->first; f != nullptr; f = f->next)
                (void)kvt_op_cancel(f->raw);
        }
        kvt_status_t status = KVT_OK;
        std::size_t count = 0;
        // Closing a polled queue drops completions that were not polled. Their coroutines would
        // never be resumed.
        while (driven_ && status == KVT_OK && in_flight() != 0)
            status = core_->pump({}, true, count);
        kvt_queue_t *raw = core_->completions.release();
        const kvt_status_t closed = kvt_queue_close(&raw, 0, nullptr);
        if (!detail::ended(closed)) {
            // The callback may still be called: leak the core that it uses.
            detail::report("kvt::reactor", closed);
            (void)core_.release();
        }
        core_.reset();
    }

    std::unique_ptr<detail::reactor_core> core_;
    bool driven_ = true;
};
#endif  // KVTIER_HAS_COROUTINES

}  // namespace KVTIER_ERRORS_
}  // namespace kvt

#endif  // KVTIER_RUNTIME_HPP
