// The whole test framework: CHECK prints what failed, done() makes it the exit code.
#ifndef KVTIER_TEST_CHECK_HPP
#define KVTIER_TEST_CHECK_HPP

#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

inline std::atomic<int> &failures() {
    static std::atomic<int> count{0};
    return count;
}

#define CHECK(condition)                                                            \
    do {                                                                            \
        if (!(condition)) {                                                         \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);    \
            ++failures();                                                           \
        }                                                                           \
    } while (0)

#define CHECK_THROWS(expression, code)                                              \
    do {                                                                            \
        kvt_status_t got_ = KVT_OK;                                                 \
        try {                                                                       \
            (void)(expression);                                                     \
        } catch (const kvt::exception &e_) {                                        \
            got_ = e_.status();                                                     \
        }                                                                           \
        if (got_ != (code)) {                                                       \
            std::fprintf(stderr, "%s:%d: %s gave %s\n", __FILE__, __LINE__,         \
                         #expression, kvt_status_name(got_));                       \
            ++failures();                                                           \
        }                                                                           \
    } while (0)

// A wait that takes longer is a hang: no test asserts that something is faster than that.
constexpr std::chrono::minutes HANG_GUARD{10};

// Looks until the condition is true; false where that is a hang.
template <typename Condition> bool comes_true(Condition condition) {
    const auto end = std::chrono::steady_clock::now() + HANG_GUARD;
    while (!condition()) {
        if (std::chrono::steady_clock::now() > end) return false;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
}

// Whoever ended an op counts it for a moment after it was told: waits until none counts.
template <typename Runtime> void no_ops_left(const Runtime &runtime) {
    const auto is_idle = [&] { return runtime.stats().ops_open + runtime.stats().ops_live == 0; };
    if (comes_true(is_idle)) return;
    std::fprintf(stderr, "%llu ops are left\n",
                 static_cast<unsigned long long>(runtime.stats().ops_live));
    ++failures();
}

inline int done() { return failures() == 0 ? 0 : 1; }

#endif
