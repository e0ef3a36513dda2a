// custom_policy: a function of the engine decides what a store keeps, in C++17.
//
//   custom_policy [SPEC OF A POLICY]...     default: custom lru
//
// The engine stores the KV of documents that prompts refer to, and keeps `capacity` blocks at most.
// Before it puts a new document, a policy chooses the documents to drop. The policy `custom` calls a
// lambda, which weighs the cost of computing a document again. The store has room for more: its
// tiers accept policies of the library only.
#include <kvtier/kvtier.hpp>

#include <array>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace {

constexpr std::uint32_t kv_heads = 2, head_dim = 32, chunk = 16, most_blocks = 8, capacity = 40;
constexpr std::uint64_t documents = 24;
constexpr int requests = 600;
using row = std::array<float, kv_heads * head_dim>;

struct document_kv {
    std::vector<row> k, v; // one layer
};

std::uint32_t blocks_of(std::uint64_t document) { return 1 + static_cast<std::uint32_t>(document * 5 % most_blocks); }

// Names of the blocks of a document: any bytes that identify the content.
struct document_names {
    std::vector<std::uint64_t> ids;
    explicit document_names(std::uint64_t document) {
        for (std::uint64_t i = 0; i < blocks_of(document); i++) ids.push_back(document << 8 | i);
    }
    kvt::block_names get() const {
        kvt::block_names names;
        names.bytes = {reinterpret_cast<const std::uint8_t *>(ids.data()), ids.size() * sizeof ids[0]};
        names.each_bytes = sizeof ids[0];
        return names;
    }
};

// The model, which the engine wants to run as rarely as possible.
document_kv compute(std::uint64_t document) {
    document_kv kv;
    for (std::uint32_t t = 0; t < blocks_of(document) * chunk; t++) {
        row k, v;
        for (std::uint32_t i = 0; i < k.size(); i++) k[i] = static_cast<float>(document * 31 + t * 7 + i), v[i] = -k[i];
        kv.k.push_back(k);
        kv.v.push_back(v);
    }
    return kv;
}

// Calls `use` with the blocks of a document and their tensors.
template <class Use> void with_blocks(std::uint64_t document, document_kv &kv, Use use) {
    const document_names names(document);
    const kvt_view_t k = kvt::view(kv.k.data(), head_dim * sizeof(float), kv_heads);
    const kvt_view_t v = kvt::view(kv.v.data(), head_dim * sizeof(float), kv_heads);
    kvt::blocks blocks;
    blocks.names = names.get();
    blocks.k = {&k, 1};
    blocks.v = {&v, 1};
    use(blocks);
}

void run(std::string_view spec) {
    const kvt::store store = kvt::store::open("store(host=64MiB)");
    const kvt::namespace_ ns =
        store.open_namespace({}, kvt::layout::gqa(1, kv_heads, head_dim, KVT_DTYPE_F32, chunk));
    const kvt::session session = ns.open_session();

    std::uint64_t calls = 0;
    kvt::policy_opts opts;
    opts.spec = spec;
    opts.max_objects = documents;
    opts.capacity_units = capacity;
    // Writes a score for each candidate; the lowest is evicted first. An exception fails the eviction.
    opts.score = [&calls](const kvt_policy_columns_t &of, std::int64_t now_ns, kvt::span<double> scores) {
        calls++;
        for (std::size_t i = 0; i < scores.size(); i++) {
            const double tokens = static_cast<double>(of.tokens[i]);
            const double idle = static_cast<double>(now_ns - of.last_access_ns[i]) / 1e9;
            const double cost = tokens * (1 + tokens / 64); // of a prefill: attention grows with the square
            scores[i] = static_cast<double>(of.count[i]) * cost / static_cast<double>(of.blocks[i]) / (idle + 1);
        }
        return KVT_OK;
    };
    const kvt::policy policy = kvt::policy::open(opts);

    std::uint64_t in_use = 0, random = 88172645463325252u;
    for (int request = 1; request <= requests; request++) {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        const std::uint64_t document = (random >> 16) % documents * ((random >> 40) % 8) / 7; // low ones are popular
        const std::uint32_t blocks = blocks_of(document);
        const std::int64_t now_ns = request * std::int64_t{1000000000}; // the engine's clock
        kvt::policy_context context;
        context.tokens_each = context.length = blocks * chunk;
        document_kv computed = compute(document); // on a hit only to compare
        if (policy.lookup({&document, 1}, context, now_ns) > 0) {
            document_kv loaded{std::vector<row>(computed.k.size()), std::vector<row>(computed.v.size())};
            with_blocks(document, loaded, [&](const kvt::blocks &of) { session.get_blocks(of).finish(); });
            if (loaded.k != computed.k || loaded.v != computed.v) throw std::runtime_error("wrong bytes");
            continue;
        }
        if (in_use + blocks > capacity) {
            const kvt::eviction evicted = policy.evict(in_use + blocks - capacity, documents, now_ns);
            for (const kvt_policy_victim_t &victim : evicted.victims) session.drop_blocks(document_names(victim.id).get());
            in_use -= evicted.freed_units;
        }
        with_blocks(document, computed, [&](const kvt::blocks &of) { session.put_blocks(of).finish(); });
        kvt_policy_object_t object = kvt::policy_object(document, blocks);
        object.tokens = blocks * chunk;
        policy.insert(object, context, now_ns);
        in_use += blocks;
    }
    const kvt_policy_stats_t stats = policy.stats();
    if (in_use != stats.units || in_use > capacity || store.stats().host_cells != in_use)
        throw std::runtime_error("the store and the policy differ");
    std::printf("%-8s hits %.1f %%, computing saved %.1f %%; evicted %u documents; the lambda was called %u times\n",
                std::string(spec).c_str(), 100 * stats.hit_ratio, 100 * stats.cost_hit_ratio,
                static_cast<unsigned>(stats.evictions), static_cast<unsigned>(calls));
}

} // namespace

int main(int argc, char **argv) try {
    std::vector<std::string_view> specs(argv + 1, argv + argc);
    if (specs.empty()) specs = {"custom", "lru"};
    for (const std::string_view spec : specs) run(spec);
    return 0;
} catch (const std::exception &error) { // kvt::exception has the library's message
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
