// The whole test framework: CHECK prints what failed, done() makes it the exit code.
#ifndef KVTIER_TEST_CHECK_HPP
#define KVTIER_TEST_CHECK_HPP

#include <atomic>
#include <cstdio>

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

inline int done() { return failures() == 0 ? 0 : 1; }

#endif
