/// @file
/// Stands in for NIXL's header of the same name, which needs Abseil: the part that NIXL's plugin
/// interface uses. Messages go to standard error, as NIXL's do.

#ifndef KVTIER_NIXL_LOG_H
#define KVTIER_NIXL_LOG_H

#include <cstdio>
#include <sstream>

namespace kvtier_nixl {
/// One message. Its destructor writes it.
class log_line {
public:
    log_line() = default;
    log_line(const log_line &) = delete;
    log_line &operator=(const log_line &) = delete;
    ~log_line() { std::fprintf(stderr, "kvtier NIXL backend: %s\n", text_.str().c_str()); }
    template <class T> log_line &operator<<(const T &value) {
        text_ << value;
        return *this;
    }

private:
    std::ostringstream text_;
};
}  // namespace kvtier_nixl

#define NIXL_ERROR ::kvtier_nixl::log_line()
#define NIXL_ASSERT(condition) ((void)0)

#endif
