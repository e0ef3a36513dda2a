// Looks up the engine's functions behind those of this library.
#include "run/engine.hpp"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <atomic>
#include <cstring>

#ifdef KVTIER_RUN_TEST_MISSING
extern "C" void llama_kvtier_test();
#endif

namespace kvtier_run {

#ifdef KVTIER_RUN_TEST_MISSING
/// A reference to a function that no engine has.
__attribute__((used)) void call_missing() { llama_kvtier_test(); }
#endif

namespace {

thread_local int depth = 0;

/// A libllama that the program opened itself, whose symbols are not among the next ones.
void *opened_engine() {
    void *found = nullptr;
    dl_iterate_phdr(
        [](dl_phdr_info *info, size_t, void *out) {
            if (!info->dlpi_name || !std::strstr(info->dlpi_name, "libllama.so")) {
                return 0;
            }
            *static_cast<void **>(out) = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
            return 1;
        },
        &found);
    return found;
}

template <typename F> void find(F *&out, void *opened, const char *name) {
    void *symbol = dlsym(RTLD_NEXT, name);
    out = reinterpret_cast<F *>(symbol || !opened ? symbol : dlsym(opened, name));
}

ElfW(Addr) entry_of(const ElfW(Dyn) *table, ElfW(Sxword) tag) {
    for (; table->d_tag != DT_NULL; table++) {
        if (table->d_tag == tag) {
            return table->d_un.d_ptr;
        }
    }
    return 0;
}

/// The first symbol of the engine that this library refers to and that no loaded library has. Calls are
/// bound when they are first made, so such a symbol would end the program then.
std::string missing_symbol() {
    Dl_info info{};
    link_map *map = nullptr;
    if (!dladdr1(reinterpret_cast<void *>(&missing_symbol), &info, reinterpret_cast<void **>(&map),
                 RTLD_DL_LINKMAP)) {
        return "(unknown)";
    }
    const auto *symbols = reinterpret_cast<const ElfW(Sym) *>(entry_of(map->l_ld, DT_SYMTAB));
    const auto *names = reinterpret_cast<const char *>(entry_of(map->l_ld, DT_STRTAB));
    const auto *hash = reinterpret_cast<const uint32_t *>(entry_of(map->l_ld, DT_HASH));
    if (!symbols || !names || !hash) {
        return "(unknown)";
    }
    for (uint32_t i = 1; i < hash[1]; i++) {
        const char *name = names + symbols[i].st_name;
        const bool ours = std::strncmp(name, "llama_", 6) == 0 || std::strncmp(name, "ggml_", 5) == 0;
        if (symbols[i].st_shndx == SHN_UNDEF && ours && !dlsym(RTLD_DEFAULT, name)) {
            return name;
        }
    }
    return "";
}

engine_t load() {
    engine_t out;
    void *opened = dlsym(RTLD_NEXT, "llama_decode") ? nullptr : opened_engine();
#define KVTIER_RUN_FIND(name) find(out.name, opened, #name);
    KVTIER_RUN_REQUIRED(KVTIER_RUN_FIND)
    KVTIER_RUN_OPTIONAL(KVTIER_RUN_FIND)
    KVTIER_RUN_BATCH_EXT(KVTIER_RUN_FIND)
#undef KVTIER_RUN_FIND
    find(out.set_embeddings_nextn, opened, "_Z26llama_set_embeddings_nextnP13llama_contextbb");
    find(out.get_embeddings_nextn_ith, opened, "_Z30llama_get_embeddings_nextn_ithP13llama_contexti");
    find(out.set_embeddings_layer_inp, opened, "_Z30llama_set_embeddings_layer_inpP13llama_contextjb");
#ifdef KVTIER_LLAMA_BATCH_EXT
    find(out.set_decision_order, opened,
         "_Z34llama_batch_ext_set_decision_orderP15llama_batch_exti20llama_decision_order");
#endif
    out.missing = missing_symbol();
#define KVTIER_RUN_REQUIRE(name)                                                                              \
    if (out.missing.empty() && !out.name) {                                                                   \
        out.missing = #name;                                                                                  \
    }
    KVTIER_RUN_REQUIRED(KVTIER_RUN_REQUIRE)
    KVTIER_RUN_BATCH_EXT(KVTIER_RUN_REQUIRE)
#undef KVTIER_RUN_REQUIRE
    // A failed lookup leaves an error that the program could take for one of its own.
    dlerror();
    return out;
}

} // namespace

const engine_t &engine() {
    static std::atomic<const engine_t *> found{nullptr};
    const engine_t *all = found.load(std::memory_order_acquire);
    if (!all) {
        // A program may open libllama later. The functions of this library are called before only by it.
        const engine_t *loaded = new engine_t(load());
        static const engine_t none;
        if (!loaded->llama_decode) {
            delete loaded;
            return none;
        }
        found.store(loaded, std::memory_order_release);
        all = loaded;
    }
    return *all;
}

bool inside() { return depth != 0; }

inside_scope::inside_scope() { depth++; }
inside_scope::~inside_scope() { depth--; }

} // namespace kvtier_run
