// Keeps exceptions from leaving a C function.
#pragma once

#include <cstdio>
#include <new>

namespace kvtier_llama {

inline void set_why(kvt_llama_why_t *why, const char *message) noexcept {
    if (why) {
        std::snprintf(why->text, sizeof why->text, "%s", message);
    }
}

template <typename F> kvt_status_t guarded(kvt_llama_why_t *why, F &&body) noexcept {
    set_why(why, "");
    try {
        return body();
    } catch (const failure &one) {
        set_why(why, one.message.c_str());
        return one.status;
    } catch (const std::bad_alloc &) {
        set_why(why, "out of memory: lower buffer_bytes or host_bytes, or free memory");
        return KVT_E_NOMEM;
    } catch (const std::exception &one) {
        set_why(why, one.what());
        return KVT_E_STATE;
    } catch (...) {
        set_why(why, "internal error: an exception of unknown type");
        return KVT_E_STATE;
    }
}

} // namespace kvtier_llama
