// Adapters that this build was made with.
#include "parts.h"

#include "keeper.h"

#ifdef KVTIER_PROGRAM_STREAM
std::unique_ptr<part> open_stream(const options &o);

bool has_stream() {
    return true;
}
#else
bool has_stream() {
    return false;
}
#endif

std::unique_ptr<part> open_longer(const options &o, const std::shared_ptr<kv_store> &store);
std::unique_ptr<part> open_sparse(const options &o);

std::string stream_help() {
    return "memory for weights: layers come from the file while they are computed";
}

std::string longer_help() {
    return "most tokens, more than --ctx: what does not fit there is kept in the store";
}

std::string sparse_help() {
    return "attend to chosen blocks only, such as quest(budget=512); with --longer: who chooses what of "
           "the store is seen; with --no-kv also what leaves the context, such as h2o(budget=256)";
}

std::unique_ptr<keeper> part::make_keeper(engine &) {
    return nullptr;
}

parts_t open_parts(const options &o, const std::shared_ptr<kv_store> &store) {
    parts_t parts;
#ifdef KVTIER_PROGRAM_STREAM
    if (o.stream_bytes) {
        parts.push_back(open_stream(o));
    }
#endif
    if (o.longer_tokens) {
        parts.push_back(open_longer(o, store));
    } else if (!o.sparse.empty()) {
        parts.push_back(open_sparse(o));
    }
    return parts;
}
