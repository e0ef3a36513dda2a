// The adapters of this build, and their help texts.
#include "adapters.h"

#include "kv_cache.h"

#ifdef KVTIER_PROGRAM_STREAM
std::unique_ptr<adapter> open_stream(const options &o);

bool has_stream() {
    return true;
}
#else
bool has_stream() {
    return false;
}
#endif

std::unique_ptr<adapter> open_longer(const options &o, const std::shared_ptr<kv_store> &store);
std::unique_ptr<adapter> open_sparse(const options &o);

std::string stream_help() {
    return "limit of the memory for weights: layers are streamed from the file ahead of their use";
}

std::string longer_help() {
    return "limit of the sequence, in tokens; may exceed --ctx: the store keeps KV evicted from the context";
}

std::string sparse_help() {
    return "sparse policy, such as quest(budget=512): attend to selected blocks only; with --longer it "
           "selects blocks of the store; with --no-kv it may also evict tokens, such as h2o(budget=256)";
}

std::unique_ptr<kv_cache> adapter::make_kv_cache(engine &) {
    return nullptr;
}

adapters_t open_adapters(const options &o, const std::shared_ptr<kv_store> &store) {
    adapters_t adapters;
#ifdef KVTIER_PROGRAM_STREAM
    if (o.stream_bytes) {
        adapters.push_back(open_stream(o));
    }
#endif
    if (o.longer_tokens) {
        adapters.push_back(open_longer(o, store));
    } else if (!o.sparse.empty()) {
        adapters.push_back(open_sparse(o));
    }
    return adapters;
}
