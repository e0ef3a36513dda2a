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

// Whoever ended an op counts it for a moment after it was told: waits until none counts.
template <typename Runtime> void no_ops_left(const Runtime &runtime) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (runtime.stats().ops_open + runtime.stats().ops_live != 0) {
        if (std::chrono::steady_clock::now() > end) {
            std::fprintf(stderr, "%llu ops are left\n",
                         static_cast<unsigned long long>(runtime.stats().ops_live));
            ++failures();
            return;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

inline int done() { return failures() == 0 ? 0 : 1; }

#endif
