// Compares the versions that the adapters were compiled against with the loaded ones.
#include <kvtier/llama.h>

#include <ggml.h>

#include <cstdio>
#include <cstring>

namespace {

void set_mismatch(kvt_llama_why_t *why, const char *what, const char *built, const char *loaded) {
    if (why) {
        std::snprintf(why->text, sizeof why->text,
                      "%s %s is loaded, but kvtier's adapter was compiled against %s: compile it "
                      "against the headers of the loaded library",
                      what, loaded, built);
    }
}

} // namespace

kvt_status_t kvt_llama_check(kvt_llama_why_t *why) {
    if (why) {
        why->text[0] = 0;
    }
    if (std::strcmp(ggml_version(), KVTIER_GGML_VERSION) != 0) {
        set_mismatch(why, "ggml", KVTIER_GGML_VERSION, ggml_version());
        return KVT_E_UNSUPPORTED;
    }
    if (std::strcmp(llama_version(), KVTIER_LLAMA_VERSION) != 0) {
        set_mismatch(why, "llama.cpp", KVTIER_LLAMA_VERSION, llama_version());
        return KVT_E_UNSUPPORTED;
    }
    const kvt_status_t abi = kvt_abi_check(KVT_HEADER_VERSION, nullptr);
    if (abi != KVT_OK) {
        set_mismatch(why, "kvtier", "another version of its header", kvt_version_str());
    }
    return abi;
}
