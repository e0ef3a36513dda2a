// kvtier for C++ (C++17 or later): header-only, move-only owners of the C handles.
//
// Error handling is chosen before the include:
//   default               a call that fails throws kvt::exception
//   KVTIER_NO_EXCEPTIONS  calls return kvt::result<T> instead (also under -fno-exceptions)
//
// kvt::span is std::span if the standard library has it. kvt::reactor, which makes ops
// awaitable, exists if the compiler supports coroutines.
//
// The library never dereferences a handle. A call on a moved-from or empty object fails with
// KVT_E_HANDLE, and objects may be destroyed in any order.

#ifndef KVTIER_HPP
#define KVTIER_HPP

#include <kvtier/kvtier.h>

#include <atomic>
#include <cassert>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#if __cplusplus >= 202002L && defined(__has_include)
#if __has_include(<span>)
#include <span>
#endif
#endif
#if defined(__cpp_impl_coroutine) && defined(__has_include)
#if __has_include(<coroutine>)
#include <coroutine>
#define KVTIER_HAS_COROUTINES 1
#endif
#endif

#if !defined(__cpp_exceptions) && !defined(KVTIER_NO_EXCEPTIONS)
#define KVTIER_NO_EXCEPTIONS 1
#endif

// A program may link objects that were compiled with different error handling. The inline
// namespace keeps the linker from merging functions of equal names and different code.
#if !defined(KVTIER_NO_EXCEPTIONS)
#define KVTIER_FACE_ throwing
#elif defined(__cpp_exceptions)
#define KVTIER_FACE_ results
#else
#define KVTIER_FACE_ results_no_unwind
#endif

namespace kvt {

// --- defect hook -------------------------------------------------------------

/// Receives errors that no caller can receive: a callback threw, or a destructor could not
/// close its handle. `what` is valid during the call. Called on any thread.
using defect_hook = void (*)(const char *where, kvt_status_t status, const char *what) noexcept;

namespace shared {
inline std::atomic<defect_hook> &hook_slot() noexcept {
    static std::atomic<defect_hook> slot{nullptr};
    return slot;
}
}  // namespace shared

/// Sets the process-wide hook and returns the previous one. Without a hook such errors are
/// ignored: the binding never prints and never terminates the program.
inline defect_hook set_defect_hook(defect_hook hook) noexcept {
    return shared::hook_slot().exchange(hook, std::memory_order_acq_rel);
}

inline namespace KVTIER_FACE_ {

// --- span --------------------------------------------------------------------

#if defined(__cpp_lib_span)
template <class T> using span = std::span<T>;
#else
/// The subset of std::span that the binding needs.
template <class T> class span {
public:
    using element_type = T;
    using value_type = std::remove_cv_t<T>;
    using size_type = std::size_t;
    using iterator = T *;

    constexpr span() noexcept = default;
    constexpr span(T *data, std::size_t size) noexcept : data_(data), size_(size) {}
    template <std::size_t N>
    constexpr span(T (&array)[N]) noexcept : data_(array), size_(N) {}
    /// From any contiguous container: vector, array, string, a span of the non-const type.
    template <class C, class P = decltype(std::data(std::declval<C &>())),
              class = decltype(std::size(std::declval<C &>())),
              class = std::enable_if_t<
                  std::is_convertible_v<std::remove_pointer_t<P> (*)[], T (*)[]> &&
                  !std::is_array_v<std::remove_reference_t<C>> &&
                  !std::is_same_v<std::remove_cv_t<std::remove_reference_t<C>>, span> &&
                  (std::is_lvalue_reference_v<C> || std::is_const_v<T>)>>
    constexpr span(C &&c) : data_(std::data(c)), size_(std::size(c)) {}

    constexpr T *data() const noexcept { return data_; }
    constexpr std::size_t size() const noexcept { return size_; }
    constexpr std::size_t size_bytes() const noexcept { return size_ * sizeof(T); }
    constexpr bool empty() const noexcept { return size_ == 0; }
    constexpr T &operator[](std::size_t i) const noexcept { return data_[i]; }
    constexpr T &front() const noexcept { return data_[0]; }
    constexpr T &back() const noexcept { return data_[size_ - 1]; }
    constexpr T *begin() const noexcept { return data_; }
    constexpr T *end() const noexcept { return data_ + size_; }
    constexpr span first(std::size_t n) const noexcept { return span(data_, n); }
    constexpr span last(std::size_t n) const noexcept { return span(data_ + (size_ - n), n); }
    constexpr span subspan(std::size_t from) const noexcept {
        return span(data_ + from, size_ - from);
    }
    constexpr span subspan(std::size_t from, std::size_t n) const noexcept {
        return span(data_ + from, n);
    }

private:
    T *data_ = nullptr;
    std::size_t size_ = 0;
};
#endif

// --- owners ------------------------------------------------------------------

namespace detail {
inline void report(const char *where, kvt_status_t status, const char *what) noexcept {
    if (defect_hook hook = shared::hook_slot().load(std::memory_order_acquire))
        hook(where, status, what);
}
inline void report(const char *where, kvt_status_t status) noexcept {
    report(where, status, kvt_status_str(status));
}

/// Base of all owners: move-only, closes its handle with the derived class's drop().
template <class Derived, class Raw> class owner {
public:
    using raw_type = Raw;
    owner() noexcept = default;
    owner(owner &&other) noexcept : raw_(std::exchange(other.raw_, nullptr)) {}
    owner &operator=(owner &&other) noexcept {
        if (this != &other) {
            reset();
            raw_ = std::exchange(other.raw_, nullptr);
        }
        return *this;
    }
    owner(const owner &) = delete;
    owner &operator=(const owner &) = delete;
    ~owner() { reset(); }

    /// Takes ownership of a handle of the C interface.
    static Derived adopt(Raw *raw) noexcept {
        Derived d;
        d.raw_ = raw;
        return d;
    }
    /// The handle, for calls of the C interface. This object still owns it.
    Raw *get() const noexcept { return raw_; }
    /// Returns the handle and gives up its ownership.
    Raw *release() noexcept { return std::exchange(raw_, nullptr); }
    explicit operator bool() const noexcept { return raw_ != nullptr; }
    void swap(owner &other) noexcept { std::swap(raw_, other.raw_); }
    /// Closes the handle now. A failure is reported to the defect hook, and the handle is leaked.
    void reset() noexcept {
        if (raw_ == nullptr) return;
        Derived::drop(raw_);
        raw_ = nullptr;
    }

protected:
    Raw *raw_ = nullptr;
};

/// Whether a close is no defect. KVT_E_FORKED is none: a forked child owns no handle of its parent.
inline bool ended(kvt_status_t status) noexcept {
    return status == KVT_OK || status == KVT_E_FORKED;
}

/// Polls until `done()` is true, at most for `limit`; for callers that must not block.
template <class F>
bool poll_until(F done, std::chrono::milliseconds limit = std::chrono::seconds(5)) noexcept {
    const auto end = std::chrono::steady_clock::now() + limit;
    while (!done()) {
        if (std::chrono::steady_clock::now() >= end) return false;
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return true;
}
}  // namespace detail

// --- errors ------------------------------------------------------------------

/// Why a call failed: the status, and the library's message if it wrote one.
class error : public detail::owner<error, kvt_error_t> {
    friend class detail::owner<error, kvt_error_t>;
    static void drop(kvt_error_t *raw) noexcept { (void)kvt_error_free(&raw); }

public:
    error() noexcept = default;
    explicit error(kvt_status_t status, kvt_error_t *raw = nullptr) noexcept : status_(status) {
        raw_ = raw;
    }

    kvt_status_t status() const noexcept { return status_; }
    /// The status constant's name, such as "KVT_E_BUSY".
    const char *name() const noexcept { return kvt_status_name(status_); }
    /// The library's message, else a description of the status. Valid as long as this object.
    const char *message() const noexcept {
        const char *text = kvt_error_message(raw_);
        return *text != '\0' ? text : kvt_status_str(status_);
    }
    /// Offset of the error in the input text; UINT64_MAX if the error is not about a text.
    std::uint64_t offset() const noexcept { return info().offset; }
    /// errno of the system call that failed; 0 if none did.
    int os_errno() const noexcept { return info().os_errno; }

private:
    kvt_error_info_t info() const noexcept {
        kvt_error_info_t info = KVT_ERROR_INFO_INIT;
        info.offset = UINT64_MAX;
        if (raw_ != nullptr) (void)kvt_error_info(raw_, &info);
        return info;
    }
    kvt_status_t status_ = KVT_OK;
};

#if !defined(KVTIER_NO_EXCEPTIONS)
/// Thrown by a call that fails. what() is "KVT_E_NAME: message".
class exception : public std::runtime_error {
public:
    explicit exception(const error &e)
        : std::runtime_error(std::string(e.name()) + ": " + e.message()), status_(e.status()),
          os_errno_(e.os_errno()), offset_(e.offset()),
          prefix_(std::char_traits<char>::length(e.name()) + 2) {}

    kvt_status_t status() const noexcept { return status_; }
    const char *message() const noexcept { return what() + prefix_; }
    std::uint64_t offset() const noexcept { return offset_; }
    int os_errno() const noexcept { return os_errno_; }

private:
    kvt_status_t status_;
    int os_errno_;
    std::uint64_t offset_;
    std::size_t prefix_;
};
#endif

/// A value, or the error of the call that should have returned it.
template <class T> class [[nodiscard]] result {
public:
    result(T value) : value_(std::move(value)) {}
    result(kvt::error e) noexcept : error_(std::move(e)) {}

    bool ok() const noexcept { return value_.has_value(); }
    explicit operator bool() const noexcept { return ok(); }
    kvt_status_t status() const noexcept { return ok() ? KVT_OK : error_.status(); }
    const kvt::error &error() const noexcept { return error_; }
    /// Only if ok().
    T &operator*() & noexcept { return assert(ok()), *value_; }
    const T &operator*() const & noexcept { return assert(ok()), *value_; }
    T &&operator*() && noexcept { return assert(ok()), std::move(*value_); }
    T *operator->() noexcept { return assert(ok()), &*value_; }
    const T *operator->() const noexcept { return assert(ok()), &*value_; }
    T value_or(T other) && { return ok() ? std::move(*value_) : std::move(other); }

private:
    std::optional<T> value_;
    kvt::error error_;
};

template <> class [[nodiscard]] result<void> {
public:
    result() noexcept = default;
    result(kvt::error e) noexcept : error_(std::move(e)) {}
    bool ok() const noexcept { return error_.status() == KVT_OK; }
    explicit operator bool() const noexcept { return ok(); }
    kvt_status_t status() const noexcept { return error_.status(); }
    const kvt::error &error() const noexcept { return error_; }

private:
    kvt::error error_;
};

/// The return type of calls: T, or result<T> without exceptions.
#if defined(KVTIER_NO_EXCEPTIONS)
template <class T> using ret = result<T>;
#else
template <class T> using ret = T;
#endif

namespace detail {
/// Owns the error that a call writes to its trailing kvt_error_t **.
class failure {
public:
    failure() noexcept = default;
    failure(const failure &) = delete;
    failure &operator=(const failure &) = delete;
    ~failure() { (void)kvt_error_free(&raw_); }
    kvt_error_t **out() noexcept { return &raw_; }
    error take(kvt_status_t status) noexcept {
        return error(status, std::exchange(raw_, nullptr));
    }

private:
    kvt_error_t *raw_ = nullptr;
};

#if defined(KVTIER_NO_EXCEPTIONS)
template <class T> ret<T> fail(error e) noexcept { return ret<T>(std::move(e)); }
#else
template <class T> [[noreturn]] T fail(const error &e) { throw exception(e); }
#endif

inline ret<void> check(kvt_status_t status, error e) {
    if (status != KVT_OK) return fail<void>(std::move(e));
    return ret<void>();
}
inline ret<void> check(kvt_status_t status, failure &f) { return check(status, f.take(status)); }
inline ret<void> check(kvt_status_t status) { return check(status, error(status)); }

template <class T> ret<T> give(kvt_status_t status, failure &f, T value) {
    if (status != KVT_OK) return fail<T>(f.take(status));
    return ret<T>(std::move(value));
}
template <class T> ret<T> give(kvt_status_t status, T value) {
    if (status != KVT_OK) return fail<T>(error(status));
    return ret<T>(std::move(value));
}

inline const void *address_of(const std::byte *p) noexcept { return p; }

/// Passes a text to the library; an empty text becomes null.
inline void text(std::string_view from, const char *&data, std::uint64_t &bytes) noexcept {
    data = from.empty() ? nullptr : from.data();
    bytes = from.size();
}

/// Reads a text from a call that reports its length. Grows the buffer until the text fits.
template <class Call> kvt_status_t read_text(std::string &text, Call call) {
    std::uint64_t bytes = 0;
    text.resize(4096);
    for (;;) {
        const kvt_status_t status = call(&text[0], text.size(), &bytes);
        text.resize(static_cast<std::size_t>(bytes));
        if (status != KVT_E_TOO_SMALL) return status;
    }
}

/// Runs a callable that the library called. Exceptions must not unwind into the library: they go
/// to the defect hook, and the call returns `otherwise`.
template <class R, class F, class... A>
R guarded(const char *where, R otherwise, F &f, A &&...args) noexcept {
#if defined(__cpp_exceptions)
    try {
        return f(std::forward<A>(args)...);
    } catch (const std::exception &e) {
        report(where, KVT_E_STATE, e.what());
    } catch (...) {
        report(where, KVT_E_STATE, "an exception that is no std::exception was thrown");
    }
    return otherwise;
#else
    (void)where;
    (void)otherwise;
    return f(std::forward<A>(args)...);
#endif
}
template <class F, class... A>
void guarded_void(const char *where, F &f, A &&...args) noexcept {
    auto call = [&]() -> int { return f(std::forward<A>(args)...), 0; };
    (void)guarded<int>(where, 0, call);
}

/// Deletes a boxed callable. A capture whose destructor throws terminates the program, as
/// everywhere in C++.
template <class Box> void unbox(void *user_data) noexcept { delete static_cast<Box *>(user_data); }
}  // namespace detail

// --- enumerations, deadlines, batches ----------------------------------------

enum class tier : std::uint32_t {
    device = KVT_TIER_DEVICE,
    host = KVT_TIER_HOST,
    disk = KVT_TIER_DISK,
    remote = KVT_TIER_REMOTE,
    pinned = KVT_TIER_PINNED
};
enum class priority : std::uint32_t {
    demand = KVT_PRIORITY_DEMAND,
    prefetch = KVT_PRIORITY_PREFETCH,
    background = KVT_PRIORITY_BACKGROUND
};
enum class thread_role : std::uint32_t {
    worker = KVT_THREAD_WORKER,
    notifier = KVT_THREAD_NOTIFIER,
    store = KVT_THREAD_STORE,
    streamer = KVT_THREAD_STREAMER
};
enum class log_level : std::uint32_t {
    off = KVT_LOG_OFF,
    error = KVT_LOG_ERROR,
    warn = KVT_LOG_WARN,
    info = KVT_LOG_INFO,
    debug = KVT_LOG_DEBUG,
    trace = KVT_LOG_TRACE
};

/// A time on the library's clock (CLOCK_MONOTONIC); the default is no deadline.
struct deadline {
    std::uint64_t ns = 0;
    constexpr deadline() noexcept = default;
    constexpr explicit deadline(std::uint64_t monotonic_ns) noexcept : ns(monotonic_ns) {}
    static constexpr deadline never() noexcept { return deadline(); }
    /// The time `d` from now. At least 1 ns, because 0 means no deadline.
    template <class Rep, class Period>
    static deadline in(std::chrono::duration<Rep, Period> d) noexcept {
        // steady_clock is CLOCK_MONOTONIC in every standard library for Linux.
        const auto at = std::chrono::steady_clock::now().time_since_epoch() +
                        std::chrono::duration_cast<std::chrono::nanoseconds>(d);
        const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(at).count();
        return deadline(ns > 0 ? static_cast<std::uint64_t>(ns) : 1);
    }
};

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
        return *static_cast<const kvt_completion_t *>(detail::address_of(first_ + i * stride_));
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
    ret<bool> wait(std::uint32_t moments = KVT_OP_RELEASED, deadline by = {}) const {
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
        if (info.status != KVT_OK) return detail::fail<kvt_op_info_t>(words(raw_, info.status));
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
        return status != KVT_OK ? kvt::error(status) : words(raw_, info.status);
    }
    /// The error of a resolved op with a known status.
    static kvt::error words(const kvt_op_t *raw, kvt_status_t status) noexcept {
        kvt_error_t *text = nullptr;
        (void)kvt_op_error(raw, &text);
        return kvt::error(status, text);
    }
};

// --- queue -------------------------------------------------------------------

using completion_fn = std::function<void(const batch &)>;

struct queue_opts {
    std::uint64_t capacity = 0;
    /// Called on the notifier thread; empty = the queue is polled. An exception goes to the defect
    /// hook, and the rest of that batch is lost.
    completion_fn callback{};
};

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

struct submit_opts {
    const kvt::queue *queue = nullptr;
    std::uint64_t tag = 0;
    kvt::deadline deadline{};
    /// Moments that post a completion each (KVT_OP_*); 0 = KVT_OP_RELEASED.
    std::uint32_t notify = 0;
    kvt::priority priority = kvt::priority::demand;
};

namespace detail {
inline kvt_submit_opts_t lower(const submit_opts &o) noexcept {
    kvt_submit_opts_t c = KVT_SUBMIT_OPTS_INIT;
    c.queue = o.queue != nullptr ? o.queue->get() : nullptr;
    c.tag = o.tag;
    c.deadline_ns = o.deadline.ns;
    c.notify = o.notify;
    c.priority = static_cast<std::uint32_t>(o.priority);
    return c;
}
}  // namespace detail

// --- budget ------------------------------------------------------------------

/// Releases bytes of a tier for another owner. Returns the bytes that it promises to release by
/// `by`. An exception counts as 0.
using reclaim_fn = std::function<std::uint64_t(tier, std::uint64_t bytes, deadline by)>;

struct account_opts {
    std::string_view name{};
    std::int64_t priority = 0;
    reclaim_fn reclaim{};
};

/// One owner's part of a budget. Release all bytes before it is destroyed: an account that holds
/// bytes cannot be closed. It is then reported to the defect hook and leaked.
class account : public detail::owner<account, kvt_account_t> {
    friend class detail::owner<account, kvt_account_t>;
    static void drop(kvt_account_t *raw) noexcept {
        const kvt_status_t status = kvt_account_close(&raw, nullptr);
        if (!detail::ended(status)) detail::report("kvt::account", status);
    }

public:
    struct holding {
        std::uint64_t reserved_bytes = 0;
        std::uint64_t used_bytes = 0;
    };

    ret<void> close() {
        detail::failure f;
        const kvt_status_t status = kvt_account_close(&raw_, f.out());
        return detail::check(status, f);
    }
    ret<void> reserve(tier t, std::uint64_t bytes) const {
        detail::failure f;
        const kvt_status_t status = kvt_account_reserve(raw_, num(t), bytes, f.out());
        return detail::check(status, f);
    }
    /// Returns false if reserve() would fail with KVT_E_BUDGET. Formats no message.
    ret<bool> try_reserve(tier t, std::uint64_t bytes) const {
        const kvt_status_t status = kvt_account_reserve(raw_, num(t), bytes, nullptr);
        return detail::give(status == KVT_E_BUDGET ? KVT_OK : status, status == KVT_OK);
    }
    /// Reserves bytes as soon as they are free; owners' reclaim callbacks are called meanwhile. The
    /// op ends with KVT_OK when the bytes are reserved.
    ret<op> reserve_later(tier t, std::uint64_t bytes, const submit_opts &opts = {}) const {
        detail::failure f;
        const kvt_submit_opts_t c = detail::lower(opts);
        kvt_op_t *raw = nullptr;
        const kvt_status_t status =
            kvt_account_reserve_later(raw_, num(t), bytes, &c, &raw, f.out());
        return detail::give(status, f, op::adopt(raw));
    }
    ret<void> commit(tier t, std::uint64_t reserved_bytes, std::uint64_t used_bytes) const {
        detail::failure f;
        const kvt_status_t status =
            kvt_account_commit(raw_, num(t), reserved_bytes, used_bytes, f.out());
        return detail::check(status, f);
    }
    ret<void> release_bytes(tier t, std::uint64_t bytes) const {
        detail::failure f;
        const kvt_status_t status = kvt_account_release(raw_, num(t), bytes, f.out());
        return detail::check(status, f);
    }
    ret<holding> held(tier t) const {
        holding h;
        const kvt_status_t status =
            kvt_account_held(raw_, num(t), &h.reserved_bytes, &h.used_bytes);
        return detail::give(status, h);
    }

private:
    static std::uint32_t num(tier t) noexcept { return static_cast<std::uint32_t>(t); }
};

struct budget_opts {
    std::uint64_t flags = 0;
    std::uint64_t device_bytes = 0;
    std::uint64_t host_bytes = 0;
    std::uint64_t disk_bytes = 0;
    std::uint64_t remote_bytes = 0;
    std::uint64_t pinned_bytes = 0;
    std::uint64_t reserve_bytes = 0;
};

/// Hard limits on the bytes in use, one for each tier.
class budget : public detail::owner<budget, kvt_budget_t> {
    friend class detail::owner<budget, kvt_budget_t>;
    static void drop(kvt_budget_t *raw) noexcept {
        const kvt_status_t status = kvt_budget_close(&raw, nullptr);
        if (!detail::ended(status)) detail::report("kvt::budget", status);
    }

public:
    ret<void> close() {
        detail::failure f;
        const kvt_status_t status = kvt_budget_close(&raw_, f.out());
        return detail::check(status, f);
    }
    ret<void> resize(tier t, std::uint64_t bytes) const {
        detail::failure f;
        const kvt_status_t status =
            kvt_budget_resize(raw_, static_cast<std::uint32_t>(t), bytes, f.out());
        return detail::check(status, f);
    }
    ret<kvt_budget_report_t> report() const {
        kvt_budget_report_t report = KVT_BUDGET_REPORT_INIT;
        const kvt_status_t status = kvt_budget_report(raw_, &report);
        return detail::give(status, report);
    }
    ret<kvt_tier_report_t> tier_report(tier t) const {
        kvt_tier_report_t report = KVT_TIER_REPORT_INIT;
        const kvt_status_t status =
            kvt_budget_tier(raw_, static_cast<std::uint32_t>(t), &report);
        return detail::give(status, report);
    }
    ret<account> open_account(account_opts opts = {}) const {
        struct box {
            reclaim_fn call;
            static std::uint64_t reclaim(void *user_data, std::uint32_t t, std::uint64_t bytes,
                                         std::uint64_t deadline_ns) noexcept {
                return detail::guarded<std::uint64_t>("kvt reclaimer", 0,
                                                      static_cast<box *>(user_data)->call,
                                                      static_cast<kvt::tier>(t), bytes,
                                                      deadline(deadline_ns));
            }
        };
        detail::failure f;
        kvt_account_opts_t c = KVT_ACCOUNT_OPTS_INIT;
        detail::text(opts.name, c.name, c.name_bytes);
        c.priority = opts.priority;
        std::unique_ptr<box> boxed;
        if (opts.reclaim) {
            boxed.reset(new box{std::move(opts.reclaim)});
            c.reclaim = &box::reclaim;
            c.user_data = boxed.get();
            c.destroy = &detail::unbox<box>;
        }
        kvt_account_t *raw = nullptr;
        const kvt_status_t status = kvt_account_open(raw_, &c, &raw, f.out());
        if (status == KVT_OK) (void)boxed.release();
        return detail::give(status, f, account::adopt(raw));
    }
};

// --- buffer ------------------------------------------------------------------

struct buffer_opts {
    std::uint64_t bytes = 0;
    std::uint64_t flags = 0;
    std::uint64_t align_bytes = 0;
    const kvt::account *account = nullptr;
};

/// A range of host memory that ops may read and write.
class buffer : public detail::owner<buffer, kvt_buffer_t> {
    friend class detail::owner<buffer, kvt_buffer_t>;
    static void drop(kvt_buffer_t *raw) noexcept {
        kvt_status_t status = kvt_buffer_free(&raw);
        // Ops on the buffer end by themselves, but there is no handle to wait for: poll. A buffer
        // that stays in use is leaked, because freeing it would be unsafe.
        if (status == KVT_E_BUSY)
            (void)detail::poll_until(
                [&] { return (status = kvt_buffer_free(&raw)) != KVT_E_BUSY; });
        if (!detail::ended(status)) detail::report("kvt::buffer", status);
    }

public:
    ret<kvt_buffer_info_t> info() const {
        kvt_buffer_info_t info = KVT_BUFFER_INFO_INIT;
        const kvt_status_t status = kvt_buffer_info(raw_, &info);
        return detail::give(status, info);
    }
    /// The memory; empty for an empty owner. Do not touch it from the submission of an op that uses
    /// it until the op's release.
    span<std::byte> bytes() const noexcept {
        void *address = nullptr;
        std::uint64_t size = 0;
        if (kvt_buffer_address(raw_, &address, &size) != KVT_OK) return span<std::byte>();
        return span<std::byte>(static_cast<std::byte *>(address), static_cast<std::size_t>(size));
    }
    /// The memory as elements of a trivial type, without an incomplete last element.
    template <class T> span<T> as() const noexcept {
        static_assert(std::is_trivially_copyable_v<T>, "a buffer holds plain data");
        const span<std::byte> b = bytes();
        return span<T>(static_cast<T *>(static_cast<void *>(b.data())), b.size() / sizeof(T));
    }
    std::byte *data() const noexcept { return bytes().data(); }
    std::size_t size() const noexcept { return bytes().size(); }
};

/// Items for runtime::submit.
namespace item {
inline kvt_buffer_item_t copy(const buffer &dst, std::uint64_t dst_offset, const buffer &src,
                              std::uint64_t src_offset, std::uint64_t bytes) noexcept {
    kvt_buffer_item_t i = kvt_buffer_item_t();
    i.kind = KVT_ITEM_COPY;
    i.dst = dst.get();
    i.dst_offset = dst_offset;
    i.src = src.get();
    i.src_offset = src_offset;
    i.bytes = bytes;
    return i;
}
inline kvt_buffer_item_t checksum(const buffer &src, std::uint64_t offset,
                                  std::uint64_t bytes) noexcept {
    kvt_buffer_item_t i = kvt_buffer_item_t();
    i.kind = KVT_ITEM_CHECKSUM;
    i.src = src.get();
    i.src_offset = offset;
    i.bytes = bytes;
    return i;
}
inline kvt_buffer_item_t verify(const buffer &src, std::uint64_t offset, std::uint64_t bytes,
                                std::uint64_t expect) noexcept {
    kvt_buffer_item_t i = checksum(src, offset, bytes);
    i.kind = KVT_ITEM_VERIFY;
    i.expect = expect;
    return i;
}
inline kvt_buffer_item_t prefault(const buffer &dst, std::uint64_t offset,
                                  std::uint64_t bytes) noexcept {
    kvt_buffer_item_t i = kvt_buffer_item_t();
    i.kind = KVT_ITEM_PREFAULT;
    i.dst = dst.get();
    i.dst_offset = offset;
    i.bytes = bytes;
    return i;
}
}  // namespace item

// --- runtime -----------------------------------------------------------------

struct runtime_opts {
    std::uint32_t workers = 0;
    std::uint32_t max_ops = 0;
    std::string_view name{};
    std::string_view faults{};
    /// Called at the start of every thread of the library; must not call the library.
    std::function<void(thread_role, std::uint32_t index)> on_thread{};
};

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
            std::function<void(thread_role, std::uint32_t)> call;
            static void on_thread(void *user_data, std::uint32_t role,
                                  std::uint32_t index) noexcept {
                detail::guarded_void("kvt on_thread", static_cast<box *>(user_data)->call,
                                     static_cast<thread_role>(role), index);
            }
        };
        detail::failure f;
        kvt_runtime_opts_t c = KVT_RUNTIME_OPTS_INIT;
        c.workers = opts.workers;
        c.max_ops = opts.max_ops;
        detail::text(opts.name, c.name, c.name_bytes);
        detail::text(opts.faults, c.faults, c.faults_bytes);
        std::unique_ptr<box> boxed;
        if (opts.on_thread) {
            boxed.reset(new box{std::move(opts.on_thread)});
            c.on_thread = &box::on_thread;
            c.user_data = boxed.get();
            c.destroy = &detail::unbox<box>;
        }
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
        kvt_queue_opts_t c = KVT_QUEUE_OPTS_INIT;
        c.capacity = opts.capacity;
        std::unique_ptr<box> boxed;
        if (opts.callback) {
            boxed.reset(new box{std::move(opts.callback)});
            c.callback = &box::complete;
            c.user_data = boxed.get();
            c.destroy = &detail::unbox<box>;
        }
        kvt_queue_t *raw = nullptr;
        const kvt_status_t status = kvt_queue_open(raw_, &c, &raw, f.out());
        if (status == KVT_OK) (void)boxed.release();
        return detail::give(status, f, queue::adopt(raw));
    }

    ret<budget> open_budget(const budget_opts &opts = {}) const {
        detail::failure f;
        kvt_budget_opts_t c = KVT_BUDGET_OPTS_INIT;
        c.flags = opts.flags;
        c.device_bytes = opts.device_bytes;
        c.host_bytes = opts.host_bytes;
        c.disk_bytes = opts.disk_bytes;
        c.remote_bytes = opts.remote_bytes;
        c.pinned_bytes = opts.pinned_bytes;
        c.reserve_bytes = opts.reserve_bytes;
        kvt_budget_t *raw = nullptr;
        const kvt_status_t status = kvt_budget_open(raw_, &c, &raw, f.out());
        return detail::give(status, f, budget::adopt(raw));
    }

    ret<buffer> alloc(const buffer_opts &opts) const {
        detail::failure f;
        kvt_buffer_opts_t c = KVT_BUFFER_OPTS_INIT;
        c.flags = opts.flags;
        c.bytes = opts.bytes;
        c.align_bytes = opts.align_bytes;
        c.account = opts.account != nullptr ? opts.account->get() : nullptr;
        kvt_buffer_t *raw = nullptr;
        const kvt_status_t status = kvt_buffer_alloc(raw_, &c, &raw, f.out());
        return detail::give(status, f, buffer::adopt(raw));
    }
    ret<buffer> alloc(std::uint64_t bytes) const {
        buffer_opts opts;
        opts.bytes = bytes;
        return alloc(opts);
    }

    /// Makes a buffer of the caller's memory. `on_free` runs once the buffer is freed and no op
    /// uses it.
    ret<buffer> wrap(span<std::byte> memory, std::function<void()> on_free = {}) const {
        struct box {
            std::function<void()> call;
            static void destroy(void *user_data) noexcept {
                std::unique_ptr<box> self(static_cast<box *>(user_data));
                detail::guarded_void("kvt buffer on_free", self->call);
            }
        };
        detail::failure f;
        std::unique_ptr<box> boxed;
        if (on_free) boxed.reset(new box{std::move(on_free)});
        kvt_buffer_t *raw = nullptr;
        const kvt_status_t status =
            kvt_buffer_wrap(raw_, memory.data(), memory.size(), boxed.get(),
                            boxed ? &box::destroy : nullptr, &raw, f.out());
        if (status == KVT_OK) (void)boxed.release();
        return detail::give(status, f, buffer::adopt(raw));
    }

    /// Submits all items as one op.
    ret<op> submit(span<const kvt_buffer_item_t> items, const submit_opts &opts = {}) const {
        detail::failure f;
        const kvt_submit_opts_t c = detail::lower(opts);
        kvt_op_t *raw = nullptr;
        const kvt_status_t status = kvt_buffer_submit(raw_, &c, items.data(), items.size(),
                                                      sizeof(kvt_buffer_item_t), &raw, f.out());
        return detail::give(status, f, op::adopt(raw));
    }
    ret<op> submit(const kvt_buffer_item_t &item, const submit_opts &opts = {}) const {
        return submit(span<const kvt_buffer_item_t>(&item, 1), opts);
    }
    /// Submits one op for each item.
    ret<std::vector<op>> submit_each(span<const kvt_buffer_item_t> items,
                                     const submit_opts &opts = {}) const {
        detail::failure f;
        kvt_submit_opts_t c = detail::lower(opts);
        c.flags |= KVT_SUBMIT_EACH;
        // Allocate first: nothing may throw between the submission and the ownership of the ops.
        std::vector<kvt_op_t *> raw(items.size());
        std::vector<op> ops;
        ops.reserve(items.size());
        const kvt_status_t status = kvt_buffer_submit(raw_, &c, items.data(), items.size(),
                                                      sizeof(kvt_buffer_item_t), raw.data(), f.out());
        for (kvt_op_t *one : raw)
            if (status == KVT_OK) ops.push_back(op::adopt(one));
        return detail::give(status, f, std::move(ops));
    }
    /// Submits without op handles: only the queue of `opts` reports completions.
    ret<void> post(span<const kvt_buffer_item_t> items, const submit_opts &opts,
                   bool each = false) const {
        detail::failure f;
        kvt_submit_opts_t c = detail::lower(opts);
        if (each) c.flags |= KVT_SUBMIT_EACH;
        const kvt_status_t status = kvt_buffer_submit(raw_, &c, items.data(), items.size(),
                                                      sizeof(kvt_buffer_item_t), nullptr, f.out());
        return detail::check(status, f);
    }
    /// submit() for hot paths, which expect KVT_E_AGAIN: formats no message.
    kvt_status_t try_submit(span<const kvt_buffer_item_t> items, const submit_opts &opts,
                            op &out) const noexcept {
        const kvt_submit_opts_t c = detail::lower(opts);
        kvt_op_t *raw = nullptr;
        const kvt_status_t status = kvt_buffer_submit(raw_, &c, items.data(), items.size(),
                                                      sizeof(kvt_buffer_item_t), &raw, nullptr);
        if (status == KVT_OK) out = op::adopt(raw);
        return status;
    }
};

// --- functions of the library ------------------------------------------------

inline const char *version() noexcept { return kvt_version_str(); }

/// Fails with KVT_E_ABI if library and header are incompatible. Call it once, first.
inline ret<void> check_abi() {
    detail::failure f;
    const kvt_status_t status = kvt_abi_check(KVT_HEADER_VERSION, f.out());
    return detail::check(status, f);
}

inline ret<std::uint64_t> checksum(span<const std::byte> data) {
    std::uint64_t value = 0;
    const kvt_status_t status = kvt_checksum(data.data(), data.size(), &value);
    return detail::give(status, value);
}

/// Checks a spec string and returns its canonical form.
inline ret<std::string> check_spec(std::string_view spec) {
    std::string out(spec.size() + 64, '\0');
    for (;;) {
        detail::failure f;
        std::uint64_t bytes = 0;
        const kvt_status_t status =
            kvt_spec_check(spec.data(), spec.size(), &out[0], out.size(), &bytes, f.out());
        if (status == KVT_E_TOO_SMALL && bytes > out.size()) {
            out.resize(static_cast<std::size_t>(bytes));
            continue;
        }
        if (status != KVT_OK) return detail::fail<std::string>(f.take(status));
        out.resize(static_cast<std::size_t>(bytes));
        return ret<std::string>(std::move(out));
    }
}

/// An optional feature of the library. Its texts live as long as the library.
struct feature {
    std::string_view name;
    std::string_view note;
    bool built = false;
    bool present = false;
};

namespace detail {
inline feature lift(const kvt_feature_t &c) noexcept {
    feature f;
    f.name = std::string_view(c.name, static_cast<std::size_t>(c.name_bytes));
    f.note = std::string_view(c.note, static_cast<std::size_t>(c.note_bytes));
    f.built = c.built != 0;
    f.present = c.present != 0;
    return f;
}
}  // namespace detail

inline ret<std::vector<feature>> features() {
    std::uint64_t count = 0;
    kvt_status_t status = kvt_feature_count(&count);
    std::vector<feature> all;
    for (std::uint64_t i = 0; status == KVT_OK && i < count; ++i) {
        kvt_feature_t one = KVT_FEATURE_INIT;
        status = kvt_feature_at(i, &one);
        if (status == KVT_OK) all.push_back(detail::lift(one));
    }
    return detail::give(status, std::move(all));
}

inline ret<feature> find_feature(std::string_view name) {
    detail::failure f;
    kvt_feature_t one = KVT_FEATURE_INIT;
    const kvt_status_t status = kvt_feature_find(name.data(), name.size(), &one, f.out());
    if (status != KVT_OK) return detail::fail<feature>(f.take(status));
    return ret<feature>(detail::lift(one));
}

using log_fn = std::function<void(log_level, std::string_view target, std::string_view message)>;

/// Sets the process-wide log sink. Several threads may call it at once, and a call that has begun
/// may end after the sink was replaced.
inline ret<void> set_log(log_level most_detailed, log_fn sink) {
    struct box {
        log_fn call;
        static void write(void *user_data, std::uint32_t level, const char *target,
                          std::uint64_t target_bytes, const char *message,
                          std::uint64_t message_bytes) noexcept {
            detail::guarded_void("kvt log sink", static_cast<box *>(user_data)->call,
                                 static_cast<log_level>(level),
                                 std::string_view(target, static_cast<std::size_t>(target_bytes)),
                                 std::string_view(message, static_cast<std::size_t>(message_bytes)));
        }
    };
    detail::failure f;
    std::unique_ptr<box> boxed;
    if (sink) boxed.reset(new box{std::move(sink)});
    const kvt_status_t status =
        kvt_log_set(static_cast<std::uint32_t>(most_detailed), boxed ? &box::write : nullptr,
                    boxed.get(), boxed ? &detail::unbox<box> : nullptr, f.out());
    if (status == KVT_OK) (void)boxed.release();
    return detail::check(status, f);
}
inline ret<void> clear_log() { return set_log(log_level::off, log_fn()); }

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
        if (c.status != KVT_OK) return detail::fail<outcome>(op::words(flight_->raw, c.status));
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

    ret<async_op> submit(const runtime &rt, span<const kvt_buffer_item_t> items,
                         submit_opts opts = {}) {
        return launch(opts, [&](const kvt_submit_opts_t *c, kvt_op_t **raw, kvt_error_t **err) {
            return kvt_buffer_submit(rt.get(), c, items.data(), items.size(),
                                     sizeof(kvt_buffer_item_t), raw, err);
        });
    }
    ret<async_op> submit(const runtime &rt, const kvt_buffer_item_t &item, submit_opts opts = {}) {
        return submit(rt, span<const kvt_buffer_item_t>(&item, 1), opts);
    }
    ret<async_op> reserve(const account &a, tier t, std::uint64_t bytes, submit_opts opts = {}) {
        return launch(opts, [&](const kvt_submit_opts_t *c, kvt_op_t **raw, kvt_error_t **err) {
            return kvt_account_reserve_later(a.get(), static_cast<std::uint32_t>(t), bytes, c, raw,
                                             err);
        });
    }

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
        kvt_submit_opts_t c = detail::lower(opts);
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

}  // namespace KVTIER_FACE_
}  // namespace kvt

#include "kvtier_policy.hpp"
#include "kvtier_lab.hpp"
#include "kvtier_device.hpp"
#include "kvtier_store.hpp"
#include "kvtier_offload.hpp"
#include "kvtier_sparse.hpp"
#include "kvtier_stream.hpp"

#undef KVTIER_FACE_

#endif  // KVTIER_HPP
