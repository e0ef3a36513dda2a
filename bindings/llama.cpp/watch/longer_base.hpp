// Error text, time, and the shape of a model, shared by the sources of long sequences.
#ifndef KVTIER_LLAMA_LONGER_BASE_HPP
#define KVTIER_LLAMA_LONGER_BASE_HPP

#include <ggml.h>
#include <kvtier/llama_longer.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <ctime>

namespace kvt_llama {
namespace longer {

#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
inline kvt_status_t refuse(kvt_llama_why_t *why, kvt_status_t status, const char *format, ...) {
    if (why) {
        va_list list;
        va_start(list, format);
        std::vsnprintf(why->text, sizeof why->text, format, list);
        va_end(list);
    }
    return status;
}

// Writes the library's error with a prefix, and frees it.
inline kvt_status_t failed(kvt_llama_why_t *why, kvt_status_t status, const char *doing,
                           kvt_error_t *err) {
    const char *message = err ? kvt_error_message(err) : nullptr;
    refuse(why, status, "%s: %s (status %d)", doing, message && message[0] ? message : "failed",
           (int) status);
    kvt_error_free(&err);
    return status;
}

inline uint64_t now_ns() {
    timespec t = {};
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t) t.tv_sec * 1000000000u + (uint64_t) t.tv_nsec;
}

// Adds the time until the end of a scope.
class stopwatch {
  public:
    explicit stopwatch(uint64_t &sum) : sum_(sum), begun_(now_ns()) {}
    ~stopwatch() { sum_ += now_ns() - begun_; }
    stopwatch(const stopwatch &) = delete;
    stopwatch &operator=(const stopwatch &) = delete;

  private:
    uint64_t &sum_;
    uint64_t begun_;
};

// The attention of the layers, which all have the same shape.
struct shape {
    uint32_t layers = 0, query_heads = 0, key_heads = 0, key_dim = 0, value_dim = 0;
    uint32_t cells = 0; // rows of a cache
    size_t k_row_bytes = 0, v_row_bytes = 0;
    ggml_type k_type = GGML_TYPE_F16, v_type = GGML_TYPE_F16;
    float scale = 0;
};

// The dtype by which policies read rows of a cache; other types are bytes to them.
inline uint32_t dtype_of(ggml_type type) {
    switch (type) {
    case GGML_TYPE_F32: return KVT_DTYPE_F32;
    case GGML_TYPE_F16: return KVT_DTYPE_F16;
    case GGML_TYPE_BF16: return KVT_DTYPE_BF16;
    default: return KVT_DTYPE_BYTES;
    }
}

} // namespace longer
} // namespace kvt_llama

#endif
