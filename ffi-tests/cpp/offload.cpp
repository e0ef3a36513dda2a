// kvt::offload: puts and loads of a prompt, decode passes, forks, eviction, custom policies, device
// memory, errors as exceptions.
#include <kvtier/kvtier.hpp>

#include "check.hpp"

#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr std::uint32_t LAYERS = 3, BLOCK = 16, HEADS = 2, QUERY_HEADS = 4, DIM = 8;
constexpr std::uint32_t ROW = HEADS * DIM;

kvt::namespace_ open_namespace(const kvt::store &store) {
    kvt::layer_group group;
    group.layers = {0, 1, 2};
    group.dtype = KVT_DTYPE_F32;
    group.k_bytes = group.v_bytes = ROW * sizeof(float);
    kvt::layout layout;
    layout.chunk_tokens = BLOCK;
    layout.groups = {group};
    return store.open_namespace({}, layout);
}

kvt::offload_opts model_opts() {
    kvt::offload_opts opts;
    opts.attention.layers = LAYERS;
    opts.attention.query_heads = QUERY_HEADS;
    opts.attention.key_heads = HEADS;
    opts.attention.key_dim = opts.attention.value_dim = DIM;
    opts.attention.block_tokens = BLOCK;
    opts.attention.max_tokens = 512;
    opts.dtype = KVT_DTYPE_F32;
    opts.buffer_tokens = 256;
    return opts;
}

std::vector<float> numbers(std::size_t count, float seed) {
    std::vector<float> all(count);
    for (std::size_t i = 0; i < count; i++)
        all[i] = static_cast<float>((i * 7919) % 1009) / 1009.0f + seed;
    return all;
}

kvt_view_t view_of(std::vector<float> &rows, std::uint32_t first) {
    return kvt::view(rows.data() + std::size_t{first} * ROW, DIM * sizeof(float), HEADS);
}

void append(const kvt::session &session, std::uint32_t first, std::uint32_t count) {
    std::vector<std::uint32_t> tokens(count);
    std::iota(tokens.begin(), tokens.end(), first);
    session.append(tokens);
}

void put(const kvt::offload &offload, std::uint32_t layer, std::vector<float> &k,
         std::vector<float> &v, std::uint32_t first, std::uint32_t count) {
    const kvt_view_t of_k = view_of(k, first), of_v = view_of(v, first);
    const kvt::op op = offload.put(layer, first, count, of_k, &of_v);
    if (op) op.finish();
}

/// Whether every row of a buffer equals the row that was put.
bool same(const kvt::offload &offload, const kvt_offload_kv_t &kv, const std::vector<float> &k,
          const std::vector<float> &v, std::uint32_t tokens) {
    std::vector<std::uint32_t> at;
    for (const std::uint32_t id : offload.blocks(kv.buffer))
        for (std::uint32_t i = 0; i < BLOCK; i++) at.push_back(id * BLOCK + i);
    for (std::uint32_t i = kv.tail_tokens; i > 0; i--) at.push_back(tokens - i);
    if (at.size() != kv.tokens) return false;
    for (std::size_t i = 0; i < at.size(); i++) {
        const std::size_t bytes = ROW * sizeof(float), from = std::size_t{at[i]} * ROW;
        if (std::memcmp(static_cast<const float *>(kv.k) + i * ROW, &k[from], bytes) != 0 ||
            std::memcmp(static_cast<const float *>(kv.v) + i * ROW, &v[from], bytes) != 0)
            return false;
    }
    const std::vector<std::uint32_t> rows = offload.rows_of(kv.buffer, at);
    for (std::uint32_t i = 0; i < rows.size(); i++)
        if (rows[i] != i) return false;
    return rows.size() == at.size();
}

void loads_return_the_rows_that_were_put(const kvt::store &store) {
    const kvt::namespace_ ns = open_namespace(store);
    const kvt::session session = ns.open_session();
    kvt::offload_opts opts = model_opts();
    opts.decode = "quest(budget=48,page=16,dense=1)";
    kvt::offload first = kvt::offload::open(session, opts);
    const kvt::offload offload = std::move(first);
    CHECK(!first && offload);
    std::vector<std::vector<float>> k, v;
    for (std::uint32_t i = 0; i < LAYERS; i++) {
        k.push_back(numbers(512 * ROW, static_cast<float>(i)));
        v.push_back(numbers(512 * ROW, static_cast<float>(i) + 100));
    }
    append(session, 0, 120);
    for (std::uint32_t i = 0; i < LAYERS; i++) put(offload, i, k[i], v[i], 0, 120);
    CHECK(offload.tokens(2).stored == 112 && offload.tokens(2).tail == 8);

    kvt::sparse_context at;
    at.is_prefill = true;
    at.tokens = 120;
    const std::vector<std::uint32_t> some = {1, 4};
    CHECK(offload.load(1, 2, some, at) == 2);
    CHECK_THROWS(offload.load(1, 2, at), KVT_E_BUSY);
    kvt_offload_kv_t kv = offload.wait(1);
    CHECK(kv.blocks == 2 && kv.tail_tokens == 0 && same(offload, kv, k[2], v[2], 120));
    offload.release_buffer(1);
    CHECK(offload.load(1, 2, kvt::span<const std::uint32_t>(), at) == 0);
    CHECK(offload.wait(1).tokens == 0);
    offload.release_buffer(1);
    CHECK(offload.load_chosen(1, 2, some, at) == 2 && offload.blocks(1).size() == 2);
    kv = offload.wait(1);
    CHECK(kv.blocks == 2 && kv.tail_tokens == 8 && same(offload, kv, k[2], v[2], 120));
    offload.release_buffer(1);
    CHECK(offload.load_chosen(1, 2, kvt::span<const std::uint32_t>(), at) == 0);
    CHECK(offload.wait(1).tokens == 8);
    offload.release_buffer(1);

    std::vector<float> queries = numbers(QUERY_HEADS * DIM, 0);
    const kvt_rows_t query =
        kvt::rows(queries.data(), 1, QUERY_HEADS, DIM * sizeof(float), KVT_DTYPE_F32);
    for (std::uint32_t token = 120; token < 140; token++) {
        append(session, token, 1);
        kvt::sparse_context now;
        now.first_query = token;
        now.tokens = token + 1;
        offload.begin(now);
        for (std::uint32_t i = 0; i < LAYERS; i++) {
            put(offload, i, k[i], v[i], token, 1);
            kv = offload.take(i, &query);
            CHECK(same(offload, kv, k[i], v[i], token + 1));
            offload.give_back(i);
        }
    }
    CHECK(offload.stats().selections > 0 && offload.stats().saved_bytes > 0);
    offload.truncate(70);
    session.truncate(70);
    CHECK(offload.tokens(0).stored == 64 && offload.tokens(0).tail == 6);
    at.tokens = 70;
    offload.load(0, 1, at);
    CHECK(same(offload, offload.wait(0), k[1], v[1], 70));
    CHECK_THROWS(offload.wait(5), KVT_E_INVALID);
    CHECK_THROWS(offload.resume(16), KVT_E_BUSY);
    CHECK_THROWS(offload.take(9), KVT_E_STATE);
    CHECK_THROWS(offload.score(0, false, queries), KVT_E_UNSUPPORTED);
    CHECK_THROWS(offload.append_keys(9, 0, query), KVT_E_INVALID);
}

void fork_has_tails_and_policies_of_its_own(const kvt::store &store) {
    const kvt::namespace_ ns = open_namespace(store);
    const kvt::session session = ns.open_session();
    kvt::offload_opts opts = model_opts();
    opts.decode = "quest(budget=48,page=16,dense=1)";
    opts.audit_every = 1;
    kvt::offload offload = kvt::offload::open(session, opts);
    std::vector<float> k = numbers(150 * ROW, 3), v = numbers(150 * ROW, 4);
    append(session, 5000, 100);
    for (std::uint32_t i = 0; i < LAYERS; i++) put(offload, i, k, v, 0, 100);
    const kvt::session second = session.fork();
    const kvt::offload fork = offload.fork(second);
    CHECK_THROWS(offload.fork(session), KVT_E_INVALID);
    std::vector<float> other_k = k, other_v = v;
    for (std::size_t i = 100 * ROW; i < k.size(); i++) other_k[i] += 1, other_v[i] -= 1;
    append(session, 6000, 50);
    append(second, 7000, 50);
    for (std::uint32_t i = 0; i < LAYERS; i++) {
        put(offload, i, k, v, 100, 50);
        put(fork, i, other_k, other_v, 100, 50);
    }
    std::vector<float> queries = numbers(QUERY_HEADS * DIM, 0);
    const kvt_rows_t query =
        kvt::rows(queries.data(), 1, QUERY_HEADS, DIM * sizeof(float), KVT_DTYPE_F32);
    kvt::sparse_context at;
    at.first_query = 149;
    at.tokens = 150;
    for (std::uint32_t i = 0; i < LAYERS; i++) {
        offload.load(0, i, at, &query);
        fork.load(0, i, at, &query);
        CHECK(same(offload, offload.wait(0), k, v, 150));
        CHECK(same(fork, fork.wait(0), other_k, other_v, 150));
        offload.release_buffer(0);
        fork.release_buffer(0);
    }
    CHECK(fork.stats().audited > 0 && fork.stats().audited == offload.stats().audited);
    offload.close();
    fork.load(0, 1, at);
    CHECK(same(fork, fork.wait(0), other_k, other_v, 150));
}

void evict_keeps_the_keys_with_most_attention(const kvt::store &store) {
    const kvt::namespace_ ns = open_namespace(store);
    const kvt::session session = ns.open_session();
    kvt::offload_opts opts = model_opts();
    opts.decode = "h2o(sink=4,recent=20,budget=8,heads=all)";
    kvt::offload offload = kvt::offload::open(session, opts);
    std::vector<float> k = numbers(150 * ROW, 7), v = numbers(150 * ROW, 8);
    append(session, 1000, 150);
    put(offload, 0, k, v, 0, 150);
    CHECK(static_cast<kvt::token_lists>(offload.retained(0)).empty());
    std::vector<float> sums(150, 0.01f);
    for (std::size_t i = 40; i < 48; i++) sums[i] = 9;
    offload.observe(0, 150, sums, 150);
    kvt::sparse_context at;
    at.is_prefill = true;
    at.tokens = 150;
    CHECK(offload.evict(0, at));
    const kvt::token_lists kept = offload.retained(0);
    CHECK(kept.size() == 1 && kept[0].size() == 32 && kept[0][4] == 40 && kept[0][31] == 149);
    offload.close();
    CHECK(!offload);
}

void invalid_options_throw(const kvt::store &store) {
    const kvt::namespace_ ns = open_namespace(store);
    const kvt::session session = ns.open_session();
    kvt::offload_opts opts = model_opts();
    opts.decode = "questt";
    CHECK_THROWS(kvt::offload::open(session, opts), KVT_E_SPEC);
    opts = model_opts();
    opts.attention.layers = 4;
    CHECK_THROWS(kvt::offload::open(session, opts), KVT_E_INVALID);
    const kvt::offload none;
    CHECK_THROWS(none.stats(), KVT_E_HANDLE);
    CHECK_THROWS(none.blocks(0), KVT_E_HANDLE);
}

/// A custom policy that selects every second block, and counts the blocks that are moved away.
void custom_policy_selects_blocks(const kvt::store &store) {
    const kvt::namespace_ ns = open_namespace(store);
    const kvt::session session = ns.open_session();
    std::uint32_t by_layer = 0, all_layers = 0;
    auto own = std::make_unique<kvt::sparse_custom>();
    own->traits.caps = KVT_SPARSE_LOAD_DECODE;
    own->traits.needs = KVT_NEEDS_QUERIES | KVT_NEEDS_KEYS;
    own->traits.scope = KVT_SCOPE_LAYER;
    own->traits.granularity = KVT_GRANULARITY_BLOCK;
    own->traits.flags = KVT_SPARSE_SELECTS;
    own->on_prefill_offload = [&](std::uint32_t, std::uint32_t, std::uint32_t,
                                  const kvt_rows_t &) {
        by_layer++;
        return KVT_OK;
    };
    own->on_decode_offload = [&](std::uint32_t, std::uint32_t,
                                 kvt::span<const kvt_rows_t> keys) {
        all_layers += keys.size() == LAYERS ? 1 : 100;
        return KVT_OK;
    };
    own->select_blocks = [](std::uint32_t, const kvt_rows_t *query,
                            kvt::span<const std::uint32_t> candidates,
                            const kvt::sparse_context &, std::vector<std::uint32_t> &chosen) {
        for (const std::uint32_t id : candidates)
            if (query != nullptr && id % 2 == 0) chosen.push_back(id);
        return KVT_OK;
    };
    kvt::offload_opts opts = model_opts();
    opts.buffers = 0;
    CHECK_THROWS(kvt::offload::open(session, opts, nullptr,
                                    std::make_unique<kvt::sparse_custom>(*own)),
                 KVT_E_INVALID);
    opts = model_opts();
    const kvt::offload offload = kvt::offload::open(session, opts, nullptr, std::move(own));
    std::vector<float> k = numbers(512 * ROW, 3), v = numbers(512 * ROW, 4);
    // Tokens that no other test uses: equal tokens have equal KV.
    append(session, 9000, 90);
    for (std::uint32_t i = 0; i < LAYERS; i++) put(offload, i, k, v, 0, 90);
    std::vector<float> queries = numbers(QUERY_HEADS * DIM, 0);
    const kvt_rows_t query =
        kvt::rows(queries.data(), 1, QUERY_HEADS, DIM * sizeof(float), KVT_DTYPE_F32);
    for (std::uint32_t token = 90; token < 96; token++) {
        append(session, 9000 + token, 1);
        kvt::sparse_context now;
        now.first_query = token;
        now.tokens = token + 1;
        offload.begin(now);
        for (std::uint32_t i = 0; i < LAYERS; i++) {
            put(offload, i, k, v, token, 1);
            const kvt_offload_kv_t kv = offload.take(i, &query);
            CHECK(kv.blocks == 3 && same(offload, kv, k, v, token + 1));
            offload.give_back(i);
        }
    }
    CHECK(by_layer == 5 * LAYERS && all_layers == 1);
}

/// Ring, tails and tensors are in device memory, which the device allocates or the engine lends.
void ring_and_tails_are_in_device_memory(const kvt::runtime &runtime) {
    const kvt::device device = kvt::device::simulated(runtime);
    for (const bool lends : {false, true}) {
        kvt::store_opts with;
        with.host_bytes = 4 << 20;
        with.device = &device;
        const kvt::store store = kvt::store::open(runtime, with);
        const kvt::session session = open_namespace(store).open_session();
        kvt::offload_opts opts = model_opts();
        opts.on_device = true;
        const std::uint64_t bytes = kvt::offload::memory_bytes(session, opts);
        CHECK(bytes == (2 * (256 + BLOCK) + 2 * LAYERS * BLOCK) * 2 * ROW * sizeof(float));
        kvt::device_memory lent;
        if (lends) {
            lent = device.alloc(bytes);
            opts.memory = lent.address();
            opts.memory_bytes = bytes - 1;
            CHECK_THROWS(kvt::offload::open(session, opts), KVT_E_TOO_SMALL);
            opts.memory_bytes = bytes;
        }
        kvt::offload offload = kvt::offload::open(session, opts);
        std::vector<float> k = numbers(512 * ROW, 5), v = numbers(512 * ROW, 6);
        append(session, 0, 70);
        const std::uint64_t half = 70 * ROW * sizeof(float);
        const kvt::device_memory tensors = device.alloc(2 * half);
        auto *const second = static_cast<unsigned char *>(tensors.data()) + half;
        for (std::uint32_t layer = 0; layer < LAYERS; layer++) {
            // The put is submitted before the uploads have completed.
            const kvt::device_event first =
                device.copy(kvt::upload(k.data(), tensors.data(), half));
            const kvt::device_event uploaded =
                device.copy(kvt::upload(v.data(), second, half), 0, first.number());
            offload.set_ready_event(uploaded.number());
            kvt_view_t of_k = kvt::view(tensors.data(), DIM * sizeof(float), HEADS);
            kvt_view_t of_v = kvt::view(second, DIM * sizeof(float), HEADS);
            of_k.memory = of_v.memory = KVT_MEMORY_DEVICE;
            const kvt::op op = offload.put(layer, 0, 70, of_k, &of_v);
            op.finish();
            offload.set_ready_event(0);
        }
        CHECK_THROWS(offload.set_ready_event(std::uint64_t{1} << 60), KVT_E_HANDLE);
        kvt::sparse_context now;
        now.first_query = 69;
        now.tokens = 70;
        for (std::uint32_t layer = 0; layer < LAYERS; layer++) {
            const auto by = kvt::deadline::in(HANG_GUARD);
            offload.load(0, layer, now);
            kvt_offload_kv_t kv = offload.wait(0);
            CHECK(kv.memory == KVT_MEMORY_DEVICE && kv.tokens == 70);
            std::vector<float> got_k(70 * ROW), got_v(70 * ROW);
            device.copy(kvt::download(kv.k, got_k.data(), half)).wait(by);
            device.copy(kvt::download(kv.v, got_v.data(), half)).wait(by);
            kv.k = got_k.data();
            kv.v = got_v.data();
            CHECK(same(offload, kv, k, v, 70));
            offload.release_buffer(0);
        }
        offload.close();
    }
}

}  // namespace

int main() {
    const kvt::runtime runtime = kvt::runtime::open();
    const kvt::store store = kvt::store::open(runtime, "store(host=4MiB)");
    loads_return_the_rows_that_were_put(store);
    fork_has_tails_and_policies_of_its_own(store);
    evict_keeps_the_keys_with_most_attention(store);
    custom_policy_selects_blocks(store);
    invalid_options_throw(store);
    ring_and_tails_are_in_device_memory(runtime);
    return done();
}
