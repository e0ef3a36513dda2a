// sparse_decode: a long context in the store; each token that is written loads a few pages, in C++17.
//
//   sparse_decode [SPEC OF A SPARSE POLICY]     default: quest(budget=96,page=16,dense=0)
//
// An offload keeps the KV of a session in a store. For each layer of a decode step the policy
// selects, by the layer's query, the blocks to load, and the engine computes attention with them.
// The program compares each output with attention over all keys, and prints what was saved.
#include <kvtier/kvtier.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <vector>

namespace {

constexpr std::uint32_t layers = 2, query_heads = 4, kv_heads = 2, dim = 64, block = 32, prompt = 2048, steps = 24;
using kv_row = std::array<float, kv_heads * dim>;
using query_row = std::array<float, query_heads * dim>;

float number() { // between -1 and 1
    static std::uint64_t state = 88172645463325252u;
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return static_cast<float>(state >> 40) / static_cast<float>(1 << 23) - 1.0f;
}

// A layer of the model. It keeps its own copy of all KV, to compare.
struct layer_kv {
    std::vector<kv_row> k, v;
    kv_row topic{};

    // KV of the next token. As in trained models, keys of neighbours are similar.
    void compute() {
        if (k.size() % 24 == 0)
            for (float &element : topic) element = number();
        kv_row key, value;
        for (std::size_t i = 0; i < key.size(); i++) key[i] = topic[i] + 0.3f * number(), value[i] = number();
        k.push_back(key);
        v.push_back(value);
    }
    // A query that resembles the keys of two earlier places.
    query_row query(std::size_t salt) const {
        const std::size_t n = k.size(), a = (n * 37 + salt * 911) % (prompt - 8), b = (n * 101 + 500) % (prompt - 8);
        query_row q;
        for (std::size_t i = 0; i < q.size(); i++) {
            const std::size_t of = i / dim / (query_heads / kv_heads) * dim + i % dim; // in its key head
            q[i] = 0.3f * number() + 4.0f * (k[a][of] + k[b][of]);
        }
        return q;
    }
};

kvt_rows_t rows_of(const void *address, std::size_t tokens, std::uint32_t heads) {
    return kvt::rows(address, static_cast<std::uint32_t>(tokens), heads, dim * sizeof(float), KVT_DTYPE_F32);
}

// Attention of one query over rows of K and V, on this thread. attention_job::run(step, ...) shares it among
// threads.
query_row attend(const query_row &query, const void *keys, const void *values, std::uint32_t tokens) {
    kvt::attention_args args;
    args.queries = rows_of(query.data(), 1, query_heads);
    args.keys = rows_of(keys, tokens, kv_heads);
    args.values = rows_of(values, tokens, kv_heads);
    args.first_query = tokens - 1; // sees all rows: positions are encoded in the keys already
    query_row out;
    std::array<float, query_heads> lse;
    std::vector<float> memory(kvt::attention_job::decode_memory(args));
    kvt::attention_job::decode(args, out, lse, memory).run();
    return out;
}

double cosine(const query_row &a, const query_row &b) {
    double dot = 0, aa = 0, bb = 0;
    for (std::size_t i = 0; i < a.size(); i++)
        dot += double{a[i]} * b[i], aa += double{a[i]} * a[i], bb += double{b[i]} * b[i];
    return dot / std::sqrt(aa * bb);
}

// Computes KV of the next tokens of a layer and puts it.
void put_layer(const kvt::offload &offload, std::uint32_t number_of_layer, layer_kv &layer, std::uint32_t tokens) {
    const auto first = static_cast<std::uint32_t>(layer.k.size());
    for (std::uint32_t t = 0; t < tokens; t++) layer.compute();
    const kvt_view_t k = kvt::view(layer.k[first].data(), dim * sizeof(float), kv_heads, tokens);
    const kvt_view_t v = kvt::view(layer.v[first].data(), dim * sizeof(float), kv_heads, tokens);
    const kvt::op op = offload.put(number_of_layer, first, tokens, k, &v);
    if (op) op.finish(); // empty if the tokens only went to the tail
}

void run(std::string_view policy, double least_wanted) {
    const kvt::store store = kvt::store::open("store(host=64MiB)");
    const kvt::namespace_ ns = store.open_namespace({}, kvt::layout::gqa(layers, kv_heads, dim, KVT_DTYPE_F32, block));
    const kvt::session session = ns.open_session();
    kvt::offload_opts opts;
    opts.attention = {layers, query_heads, kv_heads, dim, dim, KVT_ATTENTION_SPLIT, block, 2 * prompt, 0};
    opts.dtype = KVT_DTYPE_F32;
    opts.buffer_tokens = 2 * prompt;
    opts.decode = policy;
    opts.audit_every = 1; // measures the recall; costs more than the policy saves
    const kvt::offload offload = kvt::offload::open(session, opts);

    std::vector<std::uint32_t> tokens(prompt + steps);
    for (std::uint32_t i = 0; i < tokens.size(); i++) tokens[i] = 1000 + i;
    session.append(kvt::span<const std::uint32_t>(tokens).first(prompt));
    std::array<layer_kv, layers> model;
    for (std::uint32_t layer = 0; layer < layers; layer++) put_layer(offload, layer, model[layer], prompt);

    double least = 1, used = 0;
    for (std::uint32_t n = prompt; n < prompt + steps; n++) { // n tokens are known, one is added
        session.append({&tokens[n], 1});
        kvt::sparse_context step;
        step.first_query = n;
        step.tokens = n + 1;
        offload.begin(step);
        for (std::uint32_t layer = 0; layer < layers; layer++) {
            put_layer(offload, layer, model[layer], 1);
            const query_row query = model[layer].query(layer);
            const kvt_rows_t rows = rows_of(query.data(), 1, query_heads);
            const kvt_offload_kv_t kv = offload.take(layer, &rows); // selects, loads, appends the tail
            const query_row sparse = attend(query, kv.k, kv.v, kv.tokens);
            offload.give_back(layer);
            const double similar = cosine(sparse, attend(query, model[layer].k.data(), model[layer].v.data(), n + 1));
            if (!(similar >= least)) least = similar;
            used += double{1} * kv.tokens / (n + 1) / steps / layers;
        }
    }
    const kvt_offload_stats_t stats = offload.stats();
    const double mib = 1 << 20;
    std::printf("%u steps after %u tokens: %.1f %% of the rows were read; %.1f MiB were loaded, %.1f MiB were not\n",
                steps, prompt, 100 * used, stats.loaded_bytes / mib, stats.saved_bytes / mib);
    if (stats.audited > 0)
        std::printf("recall of the selections %.3f, share of the attention that they cover %.4f\n",
                    double(stats.found) / double(stats.wanted), double(stats.found_ppm) / double(stats.audited) / 1e6);
    std::printf("least cosine of the outputs and those of full attention: %.5f\n", least);
    if (!(least > least_wanted)) throw std::runtime_error("the outputs differ too much");
}

} // namespace

int main(int argc, char **argv) try {
    run(argc > 1 ? argv[1] : "quest(budget=96,page=16,dense=0)", argc > 1 ? -2 : 0.99);
    return 0;
} catch (const std::exception &error) { // kvt::exception has the library's message
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
