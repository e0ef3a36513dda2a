// hello_kv: KV that survives a restart, in C++17.
//
//   hello_kv [DIRECTORY]
//
// A prompt's KV is put into a store with a disk tier. The store is closed and opened again, the
// prompt is found by its tokens, and its KV is got layer by layer. Objects close themselves, and a
// call that fails throws kvt::exception with the library's message.
#include <kvtier/kvtier.hpp>

#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr std::uint32_t layers = 4, kv_heads = 2, head_dim = 64, chunk = 32, tokens = 4 * chunk;
using row = std::array<std::uint16_t, kv_heads * head_dim>;

// The engine's tensors: K and V of each layer, contiguous, F16.
struct tensors {
    std::vector<row> k[layers], v[layers];
    tensors() {
        for (std::uint32_t layer = 0; layer < layers; layer++) k[layer].resize(tokens), v[layer].resize(tokens);
    }
};

kvt_view_t view_of(std::vector<row> &rows) {
    return kvt::view(rows.data(), head_dim * sizeof(rows[0][0]), kv_heads, tokens);
}

// The objects that an engine opens once. They are closed in reverse order.
struct cache {
    kvt::store store;
    kvt::namespace_ ns;

    explicit cache(const std::string &directory) {
        store = kvt::store::open("store(host=64MiB, disk=disk(path=\"" + directory + "/kv\", bytes=256MiB))");
        kvt::identity identity; // sessions share KV if identity and layout are equal
        identity.model = "hello";
        identity.weights = "v1"; // a digest of the weights
        ns = store.open_namespace(identity, kvt::layout::gqa(layers, kv_heads, head_dim, KVT_DTYPE_F16, chunk));
    }
    kvt::session open_session(const std::vector<std::uint32_t> &prompt) const {
        kvt::session session = ns.open_session();
        session.append(prompt); // tokens name the KV
        return session;
    }
};

void put(const kvt::session &session, tensors &kv) {
    std::vector<kvt_view_t> k, v;
    for (std::uint32_t layer = 0; layer < layers; layer++) {
        k.push_back(view_of(kv.k[layer]));
        v.push_back(view_of(kv.v[layer]));
    }
    kvt::transfer what;
    what.k = k;
    what.v = v;
    what.level = KVT_LEVEL_DURABLE;       // survives kill -9 and power loss
    const kvt::op op = session.put(what); // returned at once: an engine computes meanwhile
    op.finish();
}

void get_layer(const kvt::session &session, tensors &kv, std::uint32_t layer) {
    const kvt_view_t k = view_of(kv.k[layer]), v = view_of(kv.v[layer]);
    kvt::transfer what;
    what.first_layer = layer;
    what.k = {&k, 1};
    what.v = {&v, 1};
    session.get_wait(what);
}

void run(const std::string &directory) {
    std::vector<std::uint32_t> prompt;
    for (std::uint32_t i = 0; i < tokens; i++) prompt.push_back(1000 + i);
    tensors computed, loaded;
    for (std::uint32_t layer = 0; layer < layers; layer++)
        for (std::uint32_t t = 0; t < tokens; t++)
            for (std::uint32_t i = 0; i < kv_heads * head_dim; i++) {
                computed.k[layer][t][i] = static_cast<std::uint16_t>(layer * 7919 + t * 131 + i);
                computed.v[layer][t][i] = static_cast<std::uint16_t>(~computed.k[layer][t][i]);
            }
    {
        const cache first(directory);
        put(first.open_session(prompt), computed);
        std::printf("stored %u tokens of %u layers\n", tokens, layers);
    } // closed here, as at the end of a process

    const cache again(directory);
    const kvt::lookup_result found = again.ns.lookup(prompt);
    std::printf("opened again: a prefix of %u tokens is reusable\n", static_cast<unsigned>(found.totals.reusable_tokens));
    const kvt::session session = again.open_session(prompt);
    for (std::uint32_t layer = 0; layer < layers; layer++) get_layer(session, loaded, layer);
    for (std::uint32_t layer = 0; layer < layers; layer++)
        if (computed.k[layer] != loaded.k[layer] || computed.v[layer] != loaded.v[layer])
            throw std::runtime_error("layer " + std::to_string(layer) + " is wrong");
    std::printf("read back %u layers, one by one: every byte is equal\n", layers);
}

} // namespace

int main(int argc, char **argv) try {
    if (argc > 1) return run(argv[1]), 0;
    char made[] = "/tmp/kvtier-example-XXXXXX";
    if (mkdtemp(made) == nullptr) throw std::runtime_error("cannot make a directory in /tmp");
    const auto remove = [](char *path) { std::filesystem::remove_all(path); };
    const std::unique_ptr<char, decltype(remove)> directory(made, remove);
    run(directory.get());
    return 0;
} catch (const std::exception &error) { // kvt::exception is one
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
