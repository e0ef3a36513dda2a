// layerwise: KV moves while the model computes, in C++17.
//
//   layerwise [SPEC OF A STORE]
//
// Prefill: each layer has a put that waits for an event. The engine signals it when the layer is
// computed, and computes the next layer while the store copies this one. Next turn: one get has an
// op for each layer; the engine waits for one op at a time, while later layers are still loading.
// See examples/c/layerwise.c for completion queues, which an engine with an event loop uses.
#include <kvtier/kvtier.hpp>

#include <array>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <vector>

namespace {

constexpr std::uint32_t layers = 8, kv_heads = 2, head_dim = 64, chunk = 32, tokens = 64 * chunk;
using row = std::array<float, kv_heads * head_dim>;
using hidden_state = std::vector<float>;

struct layer_kv {
    std::vector<row> k = std::vector<row>(tokens), v = std::vector<row>(tokens);
};
using tensors = std::array<layer_kv, layers>;

kvt_view_t view_of(std::vector<row> &rows) {
    return kvt::view(rows.data(), head_dim * sizeof(float), kv_heads, tokens);
}

// A stand-in for a model: K and V of a layer from the hidden state, ...
void compute_kv(const hidden_state &hidden, std::uint32_t layer, layer_kv &kv) {
    for (std::uint32_t t = 0; t < tokens; t++)
        for (std::uint32_t i = 0; i < kv_heads * head_dim; i++) {
            kv.k[t][i] = hidden[t] * (static_cast<float>(i % 7) - 3);
            kv.v[t][i] = hidden[t] + static_cast<float>(i * layer) * 0.25f;
        }
}
// ... and its attention, which reads all of them.
void attend(hidden_state &hidden, std::uint32_t layer, const layer_kv &kv) {
    float sum = 0;
    for (std::uint32_t t = 0; t < tokens; t++) {
        for (std::uint32_t i = 0; i < kv_heads * head_dim; i++) sum += kv.k[t][i] * kv.v[t][i];
        hidden[t] = sum / static_cast<float>((t + 1) * kv_heads * head_dim) + static_cast<float>(layer);
    }
}
hidden_state embed() {
    hidden_state hidden;
    for (std::uint32_t t = 0; t < tokens; t++) hidden.push_back(static_cast<float>(t % 13) * 0.5f);
    return hidden;
}

hidden_state prefill(const kvt::session &session, tensors &kv) {
    std::vector<kvt::ready_event> ready;
    std::vector<kvt::op> puts; // destroyed before `ready`; an op that has not ended is cancelled
    for (std::uint32_t layer = 0; layer < layers; layer++) { // submitted before anything is computed
        ready.push_back(kvt::ready_event::open());
        const kvt_view_t k = view_of(kv[layer].k), v = view_of(kv[layer].v);
        kvt::transfer what;
        what.first_layer = layer;
        what.k = {&k, 1};
        what.v = {&v, 1};
        what.ready = &ready.back();
        puts.push_back(session.put(what));
    }
    hidden_state hidden = embed();
    for (std::uint32_t layer = 0; layer < layers; layer++) {
        compute_kv(hidden, layer, kv[layer]);
        ready[layer].signal(); // never waits; the copy runs beside the next lines
        attend(hidden, layer, kv[layer]);
    }
    std::uint32_t running = 0;
    for (const kvt::op &put : puts) running += (put.info().state & KVT_OP_RELEASED) == 0;
    std::printf("prefill: %u of %u puts were still running when the last layer was computed\n", running, layers);
    for (const kvt::op &put : puts) put.finish(); // throws if the put failed; the tensors are free again
    return hidden;
}

hidden_state next_turn(const kvt::session &session, tensors &kv) {
    std::vector<kvt_view_t> k, v;
    for (layer_kv &layer : kv) k.push_back(view_of(layer.k)), v.push_back(view_of(layer.v));
    kvt::transfer what;
    what.k = k;
    what.v = v;
    const std::vector<kvt::op> gets = session.get_each(what); // an op for each layer
    hidden_state hidden = embed();
    for (std::uint32_t layer = 0; layer < layers; layer++) {
        gets[layer].finish();
        if (layer == 0) {
            std::uint32_t arrived = 0;
            for (const kvt::op &get : gets) arrived += (get.info().state & KVT_OP_RELEASED) != 0;
            std::printf("next turn: computing began when %u of %u layers had arrived\n", arrived, layers);
        }
        attend(hidden, layer, kv[layer]);
    }
    return hidden;
}

} // namespace

int main(int argc, char **argv) try {
    const kvt::store store = kvt::store::open(argc > 1 ? argv[1] : "store(host=64MiB)");
    const kvt::namespace_ ns =
        store.open_namespace({}, kvt::layout::gqa(layers, kv_heads, head_dim, KVT_DTYPE_F32, chunk));
    const kvt::session session = ns.open_session();
    std::vector<std::uint32_t> prompt;
    for (std::uint32_t i = 0; i < tokens; i++) prompt.push_back(1000 + i);
    session.append(prompt);

    tensors computed, loaded;
    const hidden_state want = prefill(session, computed), got = next_turn(session, loaded);
    for (std::uint32_t layer = 0; layer < layers; layer++)
        if (computed[layer].k != loaded[layer].k || computed[layer].v != loaded[layer].v)
            throw std::runtime_error("wrong bytes");
    if (want != got) throw std::runtime_error("wrong output");
    std::printf("both computed the same output\n");
    return 0;
} catch (const std::exception &error) { // kvt::exception has the library's message
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
