// The test framework: CHECK prints conditions that fail, done() returns the exit code.
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

// A longer wait counts as a hang. No test asserts that anything is faster.
constexpr std::chrono::minutes HANG_GUARD{10};

// Polls until the condition is true; returns false after HANG_GUARD.
template <typename Condition> bool wait_until(Condition condition) {
    const auto end = std::chrono::steady_clock::now() + HANG_GUARD;
    while (!condition()) {
        if (std::chrono::steady_clock::now() > end) return false;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
}

// Checks that the runtime has no ops. The counters may fall only after an op's completion: waits.
template <typename Runtime> void check_no_ops(const Runtime &runtime) {
    const auto is_idle = [&] { return runtime.stats().ops_open + runtime.stats().ops_live == 0; };
    if (wait_until(is_idle)) return;
    std::fprintf(stderr, "%llu ops are still live, expected 0\n",
                 static_cast<unsigned long long>(runtime.stats().ops_live));
    ++failures();
}

inline int done() { return failures() == 0 ? 0 : 1; }

#endif
