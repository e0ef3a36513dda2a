// No exception leaves a C function.
#pragma once

#include <cstdio>
#include <new>

namespace kvtier_llama {

inline void tell(kvt_llama_why_t *why, const char *words) noexcept {
    if (why) {
        std::snprintf(why->text, sizeof why->text, "%s", words);
    }
}

template <typename F> kvt_status_t guarded(kvt_llama_why_t *why, F &&body) noexcept {
    tell(why, "");
    try {
        return body();
    } catch (const failure &one) {
        tell(why, one.words.c_str());
        return one.status;
    } catch (const std::bad_alloc &) {
        tell(why, "no memory");
        return KVT_E_NOMEM;
    } catch (const std::exception &one) {
        tell(why, one.what());
        return KVT_E_STATE;
    } catch (...) {
        tell(why, "an exception of no known kind");
        return KVT_E_STATE;
    }
}

} // namespace kvtier_llama
