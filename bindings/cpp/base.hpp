/// @file
/// Errors, owners of handles, spans, versions, logging, features and spec strings.
///
/// kvtier for C++ (C++17 or later) is header-only. A class owns one handle of the C interface and has
/// its functions as methods: kvt_store_stats(store, &out) is store.stats(). The comments of the C
/// headers hold for both; those here say what differs.
///
/// - Errors: a call that fails throws kvt::exception. With KVTIER_NO_EXCEPTIONS, defined before the
///   first include, calls return kvt::result<T> instead; under -fno-exceptions they always do.
/// - Owners are movable and not copyable. A destructor closes the handle, cancels work in flight and
///   waits for it. Objects may be destroyed in any order. A call on a moved-from or empty object fails
///   with KVT_E_HANDLE: the library never dereferences a handle.
/// - Enumerations have the names of C (kvt_level_t, KVT_LEVEL_DURABLE). Calls return structs of C, so a
///   value read from one call is passed to the next without a cast, and values may be added.
/// - Option structs are aggregates with a default for every member; C++20 can name members. They are
///   generated from the description of the C header (generate.py) and have to_c(). A std::string_view or
///   span in them is borrowed: its target must live until the call that takes the struct returns.
/// - Callbacks are std::function. Their exceptions go to the defect hook.
///
///     kvt::check_abi(); // header and library fit
///     kvt::set_log(KVT_LOG_WARN, [](kvt_log_level_t, std::string_view, std::string_view message) {
///         std::fprintf(stderr, "%.*s\n", static_cast<int>(message.size()), message.data());
///     });
///     try {
///         const std::string policy = kvt::check_spec("qos(inner = s3fifo)"); // canonical form
///         use(policy);
///     } catch (const kvt::exception &error) {
///         std::fprintf(stderr, "%s\n", error.what()); // KVT_E_SPEC: ...
///     }

#ifndef KVTIER_BASE_HPP
#define KVTIER_BASE_HPP

#include <kvtier/base.h>

#include <atomic>
#include <cassert>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <iterator>
#include <memory>
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

#if !defined(__cpp_exceptions) && !defined(KVTIER_NO_EXCEPTIONS)
#define KVTIER_NO_EXCEPTIONS 1
#endif

// A program may link objects that were compiled with different error handling. The inline
// namespace keeps the linker from merging functions of equal names and different code.
#if !defined(KVTIER_NO_EXCEPTIONS)
#define KVTIER_ERRORS_ throwing
#elif defined(__cpp_exceptions)
#define KVTIER_ERRORS_ results
#else
#define KVTIER_ERRORS_ results_no_unwind
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

inline namespace KVTIER_ERRORS_ {

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

/// A handle that a struct borrows: null, of an owner (`opts.queue = &queue`), or of the C
/// interface. The object must live during the call that takes the struct. An empty owner is not
/// the same as null: the call fails with KVT_E_HANDLE.
template <class Raw> class ref {
public:
    constexpr ref() noexcept = default;
    constexpr ref(std::nullptr_t) noexcept {}
    constexpr ref(const Raw *raw) noexcept : raw_(raw) {}
    template <class Derived>
    ref(const detail::owner<Derived, Raw> *owner) noexcept {
        if (owner == nullptr) return;
        raw_ = owner->get();
        // No handle has this value.
        if (raw_ == nullptr) raw_ = reinterpret_cast<const Raw *>(std::uintptr_t{1});
    }
    const Raw *get() const noexcept { return raw_; }

private:
    const Raw *raw_ = nullptr;
};

/// An object that another one owns: its destructor closes nothing. Use it like a pointer.
template <class Owner> class borrowed {
public:
    explicit borrowed(typename Owner::raw_type *raw) noexcept : of_(Owner::adopt(raw)) {}
    borrowed(borrowed &&other) noexcept = default;
    borrowed &operator=(borrowed &&) = delete;
    ~borrowed() { (void)of_.release(); }
    const Owner &operator*() const noexcept { return of_; }
    const Owner *operator->() const noexcept { return &of_; }

private:
    Owner of_;
};

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

// Members of option structs, for C.

/// Passes a text; an empty text becomes null.
inline void text(std::string_view from, const char *&data, std::uint64_t &bytes) noexcept {
    data = from.empty() ? nullptr : from.data();
    bytes = from.size();
}
/// Passes a text that is required: an empty one is an error of the call.
inline void required(std::string_view from, const char *&data, std::uint64_t &bytes) noexcept {
    data = from.empty() ? "" : from.data();
    bytes = from.size();
}
/// Passes bytes. Absent ones become null, empty ones a pointer with length 0.
inline void bytes(const std::optional<std::string_view> &from, const void *&data,
                  std::uint64_t &count) noexcept {
    if (!from) return;
    data = from->empty() ? "" : from->data();
    count = from->size();
}
/// Passes an array; an empty one becomes null.
template <class List, class T>
void list(const List &from, const T *&data, std::uint64_t &count) noexcept {
    data = from.size() == 0 ? nullptr : from.data();
    count = from.size();
}
/// Passes an array that may be absent. An empty one becomes a pointer with count 0.
template <class List, class T>
void list(const std::optional<List> &from, const T *&data, std::uint64_t &count) noexcept {
    static constexpr T none{};
    if (!from) return;
    data = from->size() == 0 ? &none : from->data();
    count = from->size();
}
/// A duration as a number of nanoseconds. The library rejects what a negative one becomes.
inline std::uint64_t count(std::chrono::nanoseconds of) noexcept {
    return static_cast<std::uint64_t>(of.count());
}

// Outputs of unknown length.

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
/// Reads rows from a call that reports their number. Grows the vector until they fit.
template <class Row, class Call> kvt_status_t all_rows(std::vector<Row> &rows, Call call) {
    std::uint64_t count = 0;
    rows.resize(16);
    for (;;) {
        const kvt_status_t status = call(rows.data(), rows.size(), sizeof(Row), &count);
        rows.resize(static_cast<std::size_t>(status == KVT_OK || status == KVT_E_TOO_SMALL
                                                 ? count
                                                 : 0));
        if (status != KVT_E_TOO_SMALL) return status;
    }
}
/// A text of the library.
inline std::string_view view(const char *text, std::uint64_t bytes) noexcept {
    return std::string_view(text, static_cast<std::size_t>(bytes));
}

// Callbacks.

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

/// Puts a callable into a box, unless it is empty. The library owns the box once a call that it is
/// passed to succeeds: release it then.
template <class Box, class F> std::unique_ptr<Box> boxed(F &f) {
    std::unique_ptr<Box> box;
    if (f) box.reset(new Box{std::move(f)});
    return box;
}
/// Enters a box and its destructor in a struct.
template <class Box, class C> void pass(const std::unique_ptr<Box> &box, C &c) noexcept {
    c.user_data = box.get();
    c.destroy = box ? &unbox<Box> : nullptr;
}
}  // namespace detail

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

// --- versions, specs, features, logging --------------------------------------

inline const char *version() noexcept { return kvt_version_str(); }

/// Fails with KVT_E_ABI if library and header are incompatible. Call it once, first.
inline ret<void> check_abi() {
    detail::failure f;
    const kvt_status_t status = kvt_abi_check(KVT_HEADER_VERSION, f.out());
    return detail::check(status, f);
}

/// Checks a spec string and returns its canonical form.
inline ret<std::string> check_spec(std::string_view spec) {
    detail::failure f;
    std::string text;
    const auto read = [&](char *to, auto capacity, auto *bytes) {
        return kvt_spec_check(spec.data(), spec.size(), to, capacity, bytes, f.out());
    };
    const kvt_status_t status = detail::read_text(text, read);
    return detail::give(status, f, std::move(text));
}

/// An optional feature of the library. Its texts live as long as the library.
struct feature {
    std::string_view name;
    std::string_view note;
    bool built = false;
    bool present = false;

    static feature from_c(const kvt_feature_t &c) noexcept {
        feature f;
        f.name = detail::view(c.name, c.name_bytes);
        f.note = detail::view(c.note, c.note_bytes);
        f.built = c.built != 0;
        f.present = c.present != 0;
        return f;
    }
};

inline ret<std::vector<feature>> features() {
    std::uint64_t count = 0;
    kvt_status_t status = kvt_feature_count(&count);
    std::vector<feature> all;
    for (std::uint64_t i = 0; status == KVT_OK && i < count; ++i) {
        kvt_feature_t one = KVT_FEATURE_INIT;
        status = kvt_feature_at(i, &one);
        if (status == KVT_OK) all.push_back(feature::from_c(one));
    }
    return detail::give(status, std::move(all));
}

inline ret<feature> find_feature(std::string_view name) {
    detail::failure f;
    kvt_feature_t one = KVT_FEATURE_INIT;
    const kvt_status_t status = kvt_feature_find(name.data(), name.size(), &one, f.out());
    if (status != KVT_OK) return detail::fail<feature>(f.take(status));
    return ret<feature>(feature::from_c(one));
}

using log_fn =
    std::function<void(kvt_log_level_t, std::string_view target, std::string_view message)>;

/// Sets the process-wide log sink. Several threads may call it at once, and a call that has begun
/// may end after the sink was replaced. An empty sink removes the present one.
inline ret<void> set_log(kvt_log_level_t most_detailed, log_fn sink) {
    struct box {
        log_fn call;
        static void write(void *user_data, kvt_log_level_t level, const char *target,
                          std::uint64_t target_bytes, const char *message,
                          std::uint64_t message_bytes) noexcept {
            detail::guarded_void("kvt log sink", static_cast<box *>(user_data)->call, level,
                                 detail::view(target, target_bytes),
                                 detail::view(message, message_bytes));
        }
    };
    detail::failure f;
    std::unique_ptr<box> boxed = detail::boxed<box>(sink);
    const kvt_status_t status =
        kvt_log_set(most_detailed, boxed ? &box::write : nullptr, boxed.get(),
                    boxed ? &detail::unbox<box> : nullptr, f.out());
    if (status == KVT_OK) (void)boxed.release();
    return detail::check(status, f);
}
inline ret<void> clear_log() { return set_log(KVT_LOG_OFF, log_fn()); }

}  // namespace KVTIER_ERRORS_
}  // namespace kvt

#endif  // KVTIER_BASE_HPP
