// kvt::sparse and kvt::attention_job: prefill with an index and a job on threads, eviction by sums, decode by
// pages, custom policies. Results are compared with attention that this file computes in double,
// key by key.
#include <kvtier/kvtier.hpp>

#include "check.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr std::uint32_t LAYERS = 3, QUERY_HEADS = 4, HEADS = 2, DIM = 16, VALUES = 8, BLOCK = 16;
constexpr std::uint32_t TOKENS = 128, THREADS = 3, BLOCKS = TOKENS / BLOCK;

std::vector<float> numbers(std::size_t count, std::uint64_t seed) {
    std::vector<float> all(count);
    for (float &x : all) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        x = static_cast<float>(seed >> 40) / static_cast<float>(1 << 23) - 1.0f;
    }
    return all;
}

const std::vector<float> q = numbers(TOKENS * QUERY_HEADS * DIM, 1);
const std::vector<float> k = numbers(TOKENS * HEADS * DIM, 2);
const std::vector<float> v = numbers(TOKENS * HEADS * VALUES, 3);

kvt::attention model_shape() {
    kvt::attention shape;
    shape.layers = LAYERS;
    shape.query_heads = QUERY_HEADS;
    shape.key_heads = HEADS;
    shape.key_dim = DIM;
    shape.value_dim = VALUES;
    shape.block_tokens = BLOCK;
    shape.max_tokens = 4096;
    return shape;
}

kvt_rows_t rows(const std::vector<float> &of, std::uint32_t first, std::uint32_t tokens,
                std::uint32_t heads, std::uint32_t dim) {
    return kvt::rows(of.data() + std::size_t{first} * heads * dim, tokens, heads,
                     dim * sizeof(float), KVT_DTYPE_F32);
}

kvt_rows_t queries_from(std::uint32_t first) {
    return rows(q, first, TOKENS - first, QUERY_HEADS, DIM);
}

kvt::attention_args attention_of(std::uint32_t first, const kvt_index_t *select) {
    kvt::attention_args args;
    args.queries = queries_from(first);
    args.keys = rows(k, 0, TOKENS, HEADS, DIM);
    args.values = rows(v, 0, TOKENS, HEADS, VALUES);
    args.select = select;
    args.first_query = first;
    return args;
}

kvt::sparse_context at(bool is_prefill, std::uint32_t first) {
    kvt::sparse_context context;
    context.is_prefill = is_prefill;
    context.first_query = first;
    context.tokens = TOKENS;
    return context;
}

bool has(const kvt::sparse_index &index, std::uint32_t list, std::uint32_t item) {
    const kvt::span<const std::uint32_t> items = index.list(list);
    return std::find(items.begin(), items.end(), item) != items.end();
}

/// Whether a query at a position sees a key, by the definition of kvt_index_t.
bool sees(const kvt::sparse_index &index, std::uint32_t head, std::uint32_t first,
          std::uint32_t query, std::uint32_t key) {
    if (key > query) return false;
    if (index.heads.empty()) return true;
    const std::size_t n = index.heads.size();
    const kvt_index_head_t of =
        index.heads[n == 1 ? 0 : n == HEADS ? head / (QUERY_HEADS / HEADS) : head];
    const std::uint32_t row = of.query_block == 0 ? 0 : (query - first) / of.query_block;
    if (of.kind == KVT_INDEX_DENSE || query >= of.dense_from) return true;
    if (of.kind == KVT_INDEX_LINES)
        return has(index, of.first, key) || has(index, of.first + 1, query - key);
    if (of.kind == KVT_INDEX_BLOCKS) return has(index, of.first + row, key / of.key_block);
    if (has(index, of.first, key)) return true;
    const kvt::span<const std::uint32_t> ranges = index.list(of.first + 1 + row);
    for (std::size_t i = 0; i + 1 < ranges.size(); i += 2)
        if (key >= ranges[i] && key < ranges[i + 1]) return true;
    return false;
}

/// Attention of one query and head; adds the attention that each key received to the head's sums.
double attend(const kvt::sparse_index &index, std::uint32_t first, std::uint32_t query,
              std::uint32_t head, std::vector<double> &result, std::vector<double> *sums) {
    const std::uint32_t of = head / (QUERY_HEADS / HEADS);
    std::vector<double> logits(TOKENS, -INFINITY);
    double most = -INFINITY, all = 0;
    for (std::uint32_t key = 0; key < TOKENS; key++) {
        if (!sees(index, head, first, query, key)) continue;
        double dot = 0;
        for (std::uint32_t d = 0; d < DIM; d++)
            dot += double{q[(query * QUERY_HEADS + head) * DIM + d]} *
                   double{k[(key * HEADS + of) * DIM + d]};
        logits[key] = dot / std::sqrt(double{DIM});
        most = std::max(most, logits[key]);
    }
    for (const double logit : logits) all += std::exp(logit - most);
    result.assign(VALUES, 0);
    for (std::uint32_t key = 0; key < TOKENS; key++) {
        const double share = std::exp(logits[key] - most) / all;
        for (std::uint32_t d = 0; d < VALUES; d++)
            result[d] += share * double{v[(key * HEADS + of) * VALUES + d]};
        if (sums != nullptr) (*sums)[head * TOKENS + key] += share;
    }
    return most + std::log(all);
}

bool near(double got, double want) { return std::fabs(got - want) < 2e-5; }

/// Whether the outputs of all queries from `first` on equal the attention computed here.
bool is_right(const kvt::sparse_index &index, std::uint32_t first, const std::vector<float> &out,
           const std::vector<float> &lse) {
    std::vector<double> want;
    for (std::uint32_t query = first; query < TOKENS; query++)
        for (std::uint32_t head = 0; head < QUERY_HEADS; head++) {
            const std::size_t row = (query - first) * QUERY_HEADS + head;
            if (!near(double{lse[row]}, attend(index, first, query, head, want, nullptr)))
                return false;
            for (std::uint32_t d = 0; d < VALUES; d++)
                if (!near(double{out[row * VALUES + d]}, want[d])) return false;
        }
    return true;
}

/// Runs a job on several threads, which take turns in the items of a step.
void run_on_threads(const kvt::attention_job &job) {
    const kvt_attention_job_info_t info = job.info();
    for (std::uint32_t step = 0; step < info.steps; step++) {
        const std::uint32_t items = step == 0 ? info.items : info.last_items;
        std::vector<std::thread> threads;
        for (std::uint32_t i = 0; i < THREADS; i++)
            threads.emplace_back([&job, &info, step, items, i] {
                std::vector<float> scratch(static_cast<std::size_t>(info.scratch_count));
                for (std::uint32_t item = i; item < items; item += THREADS)
                    job.run(step, item, 1, scratch);
            });
        for (std::thread &thread : threads) thread.join();
    }
    CHECK_THROWS(job.run(info.steps, 0, 1, {}), KVT_E_INVALID);
}

void prefill_matches_dense_reference(const char *spec) {
    const kvt::sparse policy = kvt::sparse::open(model_shape(), spec);
    const kvt_sparse_traits_t traits = policy.traits();
    CHECK((traits.caps & KVT_SPARSE_INDEX_PREFILL) != 0);
    const kvt::attention_args all = attention_of(0, nullptr);
    const bool wants_keys = (traits.needs & KVT_NEEDS_ALL_KEYS) != 0;
    const kvt::sparse_index index =
        policy.index(1, all.queries, wants_keys ? &all.keys : nullptr, at(true, 0));
    const kvt::sparse_index again = policy.last_index();
    CHECK(again.items == index.items && again.starts == index.starts);

    std::vector<float> out(TOKENS * QUERY_HEADS * VALUES), lse(TOKENS * QUERY_HEADS);
    const kvt_index_t selected = index.to_c();
    const kvt::attention_args p = attention_of(0, &selected);
    kvt::attention_job job = kvt::attention_job::prefill(p, out, lse);
    run_on_threads(job);
    job.close();
    CHECK(!job && is_right(index, 0, out, lse));
    // On one thread, and in one call, the bits are equal.
    std::vector<float> same(out.size());
    kvt::attention_job::prefill(p, same).run();
    CHECK(same == out);
    std::fill(same.begin(), same.end(), 0.0f);
    policy.prefill_attention(1, all.queries, all.keys, all.values, at(true, 0), same);
    CHECK(same == out);
    same.pop_back();
    CHECK_THROWS(policy.prefill_attention(1, all.queries, all.keys, all.values, at(true, 0), same),
                 KVT_E_TOO_SMALL);
    CHECK_THROWS(kvt::attention_job::prefill(p, same), KVT_E_TOO_SMALL);
}

void attention_over_pieces_of_keys_merges() {
    std::vector<float> out(TOKENS * QUERY_HEADS * VALUES), lse(TOKENS * QUERY_HEADS);
    std::vector<float> part(out.size()), part_lse(lse.size());
    const std::uint32_t cuts[] = {0, 50, 53, TOKENS};
    for (std::uint32_t i = 0; i < 3; i++) {
        kvt::attention_args p = attention_of(0, nullptr);
        p.keys = rows(k, cuts[i], cuts[i + 1] - cuts[i], HEADS, DIM);
        p.values = rows(v, cuts[i], cuts[i + 1] - cuts[i], HEADS, VALUES);
        p.first_key = cuts[i];
        kvt::attention_job::prefill(p, i == 0 ? out : part, i == 0 ? lse : part_lse).run();
        if (i > 0) kvt::merge_attention(out, lse, part, part_lse);
    }
    CHECK(is_right({}, 0, out, lse));
    part.pop_back();
    CHECK_THROWS(kvt::merge_attention(out, lse, part, part_lse), KVT_E_INVALID);
}

void evict_keeps_the_keys_with_most_attention(const kvt::runtime &runtime) {
    kvt::budget_opts limits;
    limits.host_bytes = 1 << 24;
    const kvt::budget budget = runtime.open_budget(limits);
    const kvt::account account = budget.open_account();
    const kvt::attention_args p = attention_of(0, nullptr);
    std::vector<float> out(TOKENS * QUERY_HEADS * VALUES), lse(TOKENS * QUERY_HEADS);
    std::vector<float> sums(QUERY_HEADS * TOKENS);
    kvt::attention_job::prefill(p, out, lse).run();
    run_on_threads(kvt::attention_job::column_sums(p, lse, sums));
    std::vector<double> want(sums.size()), result;
    for (std::uint32_t query = 0; query < TOKENS; query++)
        for (std::uint32_t head = 0; head < QUERY_HEADS; head++)
            attend({}, 0, query, head, result, &want);
    for (std::size_t i = 0; i < want.size(); i++)
        CHECK(std::fabs(double{sums[i]} - want[i]) < 1e-3);

    kvt::sparse policy =
        kvt::sparse::open(model_shape(), "h2o(sink=2,recent=10,budget=20)", &account);
    policy.append(0, 0, p.keys);
    policy.observe(0, TOKENS, sums, TOKENS);
    CHECK_THROWS(policy.observe(LAYERS, TOKENS, sums, TOKENS), KVT_E_INVALID);
    const kvt_sparse_stats_t stats = policy.stats();
    CHECK(stats.state_bytes > 0);
    CHECK(static_cast<kvt::account::holding>(account.held(KVT_TIER_HOST)).used_bytes ==
          stats.state_bytes);
    kvt::token_lists kept = policy.plan_eviction(0, at(true, 0));
    CHECK(kept.size() == HEADS);
    for (std::uint32_t head = 0; head < kept.size(); head++) {
        const std::vector<std::uint32_t> &list = kept[head];
        CHECK(list.size() == 32);
        double least_kept = INFINITY, most_evicted = 0;
        for (std::uint32_t key = 0; key < TOKENS; key++) {
            const double sum = want[2 * head * TOKENS + key] + want[(2 * head + 1) * TOKENS + key];
            const bool stays = std::binary_search(list.begin(), list.end(), key);
            if (key < 2 || key >= TOKENS - 10)
                CHECK(stays);
            else if (stays)
                least_kept = std::min(least_kept, sum);
            else
                most_evicted = std::max(most_evicted, sum);
        }
        CHECK(least_kept > most_evicted - 1e-3);
    }
    policy.commit_eviction(0, kept);
    CHECK(static_cast<kvt::token_lists>(policy.plan_eviction(0, at(true, 0))).empty());
    std::swap(kept[0][0], kept[0][1]);
    CHECK_THROWS(policy.commit_eviction(0, kept), KVT_E_INVALID);
    policy.restart();
    policy.close();
    CHECK(static_cast<kvt::account::holding>(account.held(KVT_TIER_HOST)).used_bytes == 0);
    const kvt::account none;
    CHECK_THROWS(kvt::sparse::open(model_shape(), "full", &none), KVT_E_HANDLE);
}

void decode_selects_blocks_by_pages() {
    const kvt::sparse policy = kvt::sparse::open(model_shape(), "quest(budget=48,page=16,dense=0)");
    std::vector<std::uint32_t> candidates;
    for (std::uint32_t id = 0; id < BLOCKS; id++) {
        policy.add_block(2, id, id * BLOCK, rows(k, id * BLOCK, BLOCK, HEADS, DIM));
        candidates.insert(candidates.begin(), id);
    }
    const std::uint32_t last = TOKENS - 1;
    const kvt_rows_t query = queries_from(last);
    const std::vector<std::uint32_t> ids = policy.select(2, &query, candidates, at(false, last));
    CHECK(ids.size() >= 3 && ids.size() < BLOCKS && std::is_sorted(ids.begin(), ids.end()));
    candidates[0] = candidates[1];
    CHECK_THROWS(policy.select(2, &query, candidates, at(false, last)), KVT_E_INVALID);
    candidates[0] = BLOCKS - 1;

    // Every key in the index is in a selected block.
    const kvt::sparse_index index = policy.index(2, query, nullptr, at(false, last));
    for (std::uint32_t head = 0; head < QUERY_HEADS; head++)
        for (std::uint32_t key = 0; key < TOKENS; key++)
            CHECK(!sees(index, head, last, last, key) ||
                  std::binary_search(ids.begin(), ids.end(), key / BLOCK));
    std::vector<float> out(QUERY_HEADS * VALUES), lse(QUERY_HEADS);
    const kvt_index_t selected = index.to_c();
    const kvt::attention_args p = attention_of(last, &selected);
    std::vector<float> memory(kvt::attention_job::decode_memory(p));
    run_on_threads(kvt::attention_job::decode(p, out, lse, memory));
    CHECK(is_right(index, last, out, lse));

    // Attention over all keys, and the attention that each key received.
    const kvt::attention_args all = attention_of(last, nullptr);
    memory.resize(kvt::attention_job::decode_memory(all, true));
    const kvt::attention_job job = kvt::attention_job::decode(all, out, lse, memory, true);
    job.run();
    std::vector<float> sums(QUERY_HEADS * TOKENS);
    job.decode_sums(sums);
    std::vector<double> want(sums.size()), result;
    for (std::uint32_t head = 0; head < QUERY_HEADS; head++)
        attend({}, last, last, head, result, &want);
    for (std::size_t i = 0; i < want.size(); i++) CHECK(near(double{sums[i]}, want[i]));

    // State of a block can be saved and loaded; a fork has the state, too.
    std::vector<std::uint8_t> saved = policy.save(2, 3);
    CHECK(!saved.empty());
    CHECK_THROWS(policy.save(1, 3), KVT_E_NOT_FOUND);
    const kvt::sparse copy = policy.fork();
    policy.restart();
    policy.load(2, 3, 3 * BLOCK, saved);
    CHECK(static_cast<std::vector<std::uint8_t>>(policy.save(2, 3)) == saved);
    saved.pop_back();
    CHECK_THROWS(policy.load(2, 4, 4 * BLOCK, saved), KVT_E_CORRUPT);
    CHECK(static_cast<std::vector<std::uint32_t>>(
              copy.select(2, &query, candidates, at(false, last))) == ids);
    copy.truncate(100);

    std::vector<float> boxes(BLOCKS * HEADS * 2 * DIM), scores(QUERY_HEADS * BLOCKS);
    std::vector<float> scratch(QUERY_HEADS * (2 * DIM + 96) + 4096);
    kvt::extend_pages(boxes, BLOCK, 0, p.keys);
    kvt::score_pages(rows(boxes, 0, BLOCKS, HEADS, 2 * DIM), query, 0, BLOCKS, scores, scratch);
    for (std::uint32_t head = 0; head < QUERY_HEADS; head++)
        for (std::uint32_t key = 0; key < TOKENS; key++) {
            double dot = 0;
            for (std::uint32_t d = 0; d < DIM; d++)
                dot += double{q[(last * QUERY_HEADS + head) * DIM + d]} *
                       double{k[(key * HEADS + head / 2) * DIM + d]};
            CHECK(double{scores[head * BLOCKS + key / BLOCK]} > dot - 1e-4);
        }
}

/// Some blocks and the tail in a buffer: an index of their rows, and sums over them.
void index_and_sums_are_placed_in_a_buffer() {
    const std::vector<std::uint32_t> blocks = {0, 2, 5};
    const std::uint32_t last = TOKENS - 1;
    kvt::block_placement placed;
    placed.blocks = blocks;
    placed.block_tokens = BLOCK;
    placed.tail_first = TOKENS - 5;
    placed.tail_tokens = 5;
    std::vector<std::uint32_t> position;
    for (const std::uint32_t block : blocks)
        for (std::uint32_t i = 0; i < BLOCK; i++) position.push_back(block * BLOCK + i);
    for (std::uint32_t i = 0; i < 5; i++) position.push_back(TOKENS - 5 + i);
    const std::uint32_t n = static_cast<std::uint32_t>(position.size());

    kvt::sparse_index wanted;
    for (std::uint32_t head = 0; head < QUERY_HEADS; head++) {
        const std::vector<std::uint32_t> list = {0, 1 + head % 2, 4, 11, 15};
        wanted.heads.push_back({KVT_INDEX_BLOCKS, wanted.add(list), 1, 0, 8, UINT32_MAX});
    }
    const kvt::placed_index of_rows = kvt::place_index(model_shape(), placed, &wanted, last, 1);
    CHECK(of_rows.first_query == n - 1);
    std::size_t most = 0;
    for (std::uint32_t head = 0; head < QUERY_HEADS; head++) {
        std::size_t count = 0;
        for (std::uint32_t row = 0; row < n; row++) {
            const bool visible = sees(of_rows.index, head, n - 1, n - 1, row);
            CHECK(visible == sees(wanted, head, last, last, position[row]));
            count += visible ? 1 : 0;
        }
        most = std::max(most, count);
    }

    std::vector<float> some_k, some_v, out(QUERY_HEADS * VALUES), lse(QUERY_HEADS);
    for (const std::uint32_t at : position) {
        some_k.insert(some_k.end(), &k[at * HEADS * DIM], &k[at * HEADS * DIM] + HEADS * DIM);
        some_v.insert(some_v.end(), &v[at * HEADS * VALUES],
                      &v[at * HEADS * VALUES] + HEADS * VALUES);
    }
    kvt::attention_args p;
    p.queries = queries_from(last);
    p.keys = rows(some_k, 0, n, HEADS, DIM);
    p.values = rows(some_v, 0, n, HEADS, VALUES);
    const kvt_index_t selected = of_rows.index.to_c();
    p.select = &selected;
    p.first_query = of_rows.first_query;
    kvt::kernel_limits limits;
    limits.scores = true;
    limits.queries = 1;
    limits.keys = limits.tokens = TOKENS;
    limits.query_heads = QUERY_HEADS;
    limits.key_dim = DIM;
    limits.value_dim = VALUES;
    const kvt::kernel_workspace workspace = kvt::workspace(KVT_KERNEL_DECODE, limits);
    std::vector<float> memory(kvt::attention_job::decode_memory(p, true)), sums(QUERY_HEADS * most);
    CHECK(memory.size() <= workspace.memory && workspace.scratch > 0);
    const kvt::attention_job job = kvt::attention_job::decode(p, out, lse, memory, true);
    CHECK(static_cast<kvt_attention_job_info_t>(job.info()).sum_keys == most);
    job.run();
    job.decode_sums(sums);
    std::vector<float> token_sums(QUERY_HEADS * TOKENS, 1.0f);
    kvt::place_column_sums(model_shape(), TOKENS, placed, sums, token_sums, &of_rows, 1);
    // Only tokens in the buffer received attention.
    std::vector<double> logits(TOKENS);
    for (std::uint32_t head = 0; head < QUERY_HEADS; head++) {
        double all = 0;
        std::fill(logits.begin(), logits.end(), -INFINITY);
        for (const std::uint32_t key : position) {
            if (!sees(wanted, head, last, last, key)) continue;
            double dot = 0;
            for (std::uint32_t d = 0; d < DIM; d++)
                dot += double{q[(last * QUERY_HEADS + head) * DIM + d]} *
                       double{k[(key * HEADS + head / 2) * DIM + d]};
            logits[key] = dot / std::sqrt(double{DIM});
            all += std::exp(logits[key]);
        }
        for (std::uint32_t key = 0; key < TOKENS; key++)
            CHECK(near(double{token_sums[head * TOKENS + key]}, 1 + std::exp(logits[key]) / all));
    }
    token_sums.pop_back();
    CHECK_THROWS(kvt::place_column_sums(model_shape(), TOKENS, placed, sums, token_sums, &of_rows, 1),
                 KVT_E_INVALID);
    placed.tail_first = 3;
    CHECK_THROWS(kvt::place_index(model_shape(), placed, &wanted, last, 1), KVT_E_INVALID);
}

/// The calls that a custom policy received. Its copies share them.
struct record {
    std::uint32_t sealed = 0, sealed_all = 0, forks = 0, observed = 0, length = 99;
    kvt::token_lists evicted;
    const kvt::sparse *self = nullptr;
};

kvt::sparse_custom custom_policy(const std::shared_ptr<record> &own) {
    kvt::sparse_custom custom;
    custom.traits.caps =
        KVT_SPARSE_LOAD_DECODE | KVT_SPARSE_INDEX_PREFILL | KVT_SPARSE_EVICT_DECODE;
    custom.traits.needs = KVT_NEEDS_QUERIES;
    custom.traits.scope = KVT_SCOPE_LAYER;
    custom.traits.granularity = KVT_GRANULARITY_BLOCK;
    custom.traits.flags = KVT_SPARSE_SELECTS;
    custom.on_prefill_offload = [own](std::uint32_t block, std::uint32_t layer, std::uint32_t first,
                                      const kvt_rows_t &keys) {
        CHECK(first == block * BLOCK && keys.view.tokens == BLOCK);
        CHECK(std::memcmp(keys.view.address, &k[first * HEADS * DIM],
                          BLOCK * HEADS * DIM * sizeof(float)) == 0);
        own->sealed += layer + 1;
        return layer == 2 ? KVT_E_LIMIT : KVT_OK;
    };
    custom.on_decode_offload = [own](std::uint32_t block, std::uint32_t first,
                                     kvt::span<const kvt_rows_t> keys) {
        CHECK(keys.size() == LAYERS && keys[LAYERS - 1].view.tokens == BLOCK);
        CHECK(keys[1].view.address == &k[BLOCK * HEADS * DIM]);
        own->sealed_all += block + first;
        return KVT_OK;
    };
    custom.select_blocks = [own](std::uint32_t layer, const kvt_rows_t *query,
                                 kvt::span<const std::uint32_t> candidates,
                                 const kvt::sparse_context &context,
                                 std::vector<std::uint32_t> &chosen) -> kvt_status_t {
        if (query == nullptr) throw std::runtime_error("no query");
        CHECK(query->view.heads == QUERY_HEADS && context.tokens == TOKENS);
        // A call from a callback finds the policy busy.
        CHECK_THROWS(own->self->restart(), KVT_E_BUSY);
        for (const std::uint32_t id : candidates)
            if (id % 4 == 0) chosen.insert(chosen.begin(), id);
        if (layer == 1) chosen[0] = 1000; // no candidate
        if (layer == 2) chosen.resize(100, 0);
        return KVT_OK;
    };
    custom.index = [](std::uint32_t, const kvt_rows_t &, const kvt_rows_t *,
                      const kvt::sparse_context &, kvt::sparse_index &out) {
        const std::vector<std::uint32_t> sinks = {0}, near_by = {0, 1, 2, 3, 4, 5, 6, 7};
        out.add(sinks);
        out.add(near_by);
        out.heads = {{KVT_INDEX_LINES, 0, 2, 0, 0, UINT32_MAX}};
        return KVT_OK;
    };
    custom.observe = [own](std::uint32_t, std::uint32_t queries, kvt::span<const float> sums,
                           std::uint32_t tokens) {
        own->observed = queries * 10000 + static_cast<std::uint32_t>(sums.size()) * 100 + tokens;
        return KVT_OK;
    };
    custom.evict = [](std::uint32_t layer, const kvt::sparse_context &, kvt::token_lists &stays) {
        if (layer > 0) stays = {{0, 5}, {1, 2, 3}};
        return KVT_OK;
    };
    custom.evicted = [own](std::uint32_t, const kvt::token_lists &kept) {
        own->evicted = kept;
        return KVT_OK;
    };
    custom.truncate = [own](std::uint32_t tokens) {
        own->length = tokens;
        return KVT_OK;
    };
    custom.fork = [own]() -> std::unique_ptr<kvt::sparse_custom> {
        if (++own->forks > 1) return nullptr;
        return std::make_unique<kvt::sparse_custom>(custom_policy(own));
    };
    return custom;
}

void custom_policy_is_called_and_checked() {
    const std::shared_ptr<record> own = std::make_shared<record>();
    kvt::sparse_custom without = custom_policy(own);
    without.select_blocks = nullptr;
    CHECK_THROWS(kvt::sparse::open(model_shape(), std::move(without)), KVT_E_INVALID);
    const kvt::sparse policy = kvt::sparse::open(model_shape(), custom_policy(own));
    own->self = &policy;
    const kvt_rows_t block = rows(k, BLOCK, BLOCK, HEADS, DIM);
    policy.add_block(1, 1, BLOCK, block);
    CHECK(own->sealed == 2);
    CHECK_THROWS(policy.add_block(2, 1, BLOCK, block), KVT_E_LIMIT);
    std::vector<kvt_rows_t> all(LAYERS, block);
    policy.seal_all(9, 32, all);
    CHECK(own->sealed_all == 41);
    all.pop_back();
    CHECK_THROWS(policy.seal_all(9, 32, all), KVT_E_INVALID);

    std::vector<std::uint32_t> candidates(10);
    std::iota(candidates.begin(), candidates.end(), 0u);
    const kvt_rows_t query = queries_from(TOKENS - 1);
    const kvt::sparse_context now = at(false, TOKENS - 1);
    const std::vector<std::uint32_t> wanted = {0, 4, 8};
    CHECK(static_cast<std::vector<std::uint32_t>>(policy.select(0, &query, candidates, now)) ==
          wanted);
    CHECK_THROWS(policy.select(1, &query, candidates, now), KVT_E_INVALID);
    CHECK_THROWS(policy.select(2, &query, candidates, now), KVT_E_INVALID);
    static std::string defect;
    defect.clear();
    const kvt::defect_hook previous = kvt::set_defect_hook(
        [](const char *, kvt_status_t, const char *what) noexcept { defect = what; });
    CHECK_THROWS(policy.select(0, nullptr, candidates, now), KVT_E_STATE);
    kvt::set_defect_hook(previous);
    CHECK(defect == "no query");

    const kvt::attention_args p = attention_of(0, nullptr);
    const kvt::sparse_index index = policy.index(0, p.queries, nullptr, at(true, 0));
    CHECK(index.items.size() == 9 && index.heads.size() == 1);
    std::vector<float> out(TOKENS * QUERY_HEADS * VALUES), lse(TOKENS * QUERY_HEADS);
    policy.prefill_attention(0, p.queries, p.keys, p.values, at(true, 0), out, lse);
    CHECK(is_right(index, 0, out, lse));
    const kvt::sparse_index again = policy.index(0, p.queries, nullptr, at(true, 0));
    CHECK(again.items == index.items);

    const std::vector<float> sums(7, 1.0f);
    policy.observe(0, 3, sums, 7);
    CHECK(own->observed == 30707);
    CHECK(static_cast<kvt::token_lists>(policy.plan_eviction(0, now)).empty());
    const kvt::token_lists kept = policy.plan_eviction(1, now), two = {{0, 5}, {1, 2, 3}};
    CHECK(kept == two);
    CHECK(static_cast<kvt::token_lists>(policy.last_retained()) == two);
    policy.commit_eviction(1, kept);
    CHECK(own->evicted == two);
    policy.truncate(5);
    CHECK(own->length == 5);
    policy.restart();
    CHECK(own->length == 0);

    CHECK(own.use_count() > 1);
    {
        const kvt::sparse copy = policy.fork();
        copy.truncate(33);
        CHECK(own->length == 33);
        CHECK_THROWS(policy.fork(), KVT_E_UNSUPPORTED);
    }

    // A policy with its own kernel.
    kvt::sparse_custom custom = custom_policy(own);
    custom.sparse_prefill_attention = [](std::uint32_t, const kvt_rows_t &, const kvt_rows_t &,
                                         const kvt_rows_t &, const kvt::sparse_context &,
                                         kvt::span<float> to, kvt::span<float> logs) {
        CHECK(to.size() == TOKENS * QUERY_HEADS * VALUES && logs.empty());
        std::fill(to.begin(), to.end(), 7.0f);
        return KVT_OK;
    };
    const kvt::sparse other = kvt::sparse::open(model_shape(), std::move(custom));
    other.prefill_attention(0, p.queries, p.keys, p.values, at(true, 0), out);
    CHECK(out.front() == 7.0f && out.back() == 7.0f);
    // A copy that lacks a function of the original is rejected.
    own->forks = 0;
    CHECK_THROWS(other.fork(), KVT_E_INVALID);
}

void closing_a_custom_policy_destroys_its_functions() {
    const std::shared_ptr<record> own = std::make_shared<record>();
    {
        const kvt::sparse policy = kvt::sparse::open(model_shape(), custom_policy(own));
        const kvt::sparse copy = policy.fork();
        CHECK(own.use_count() > 2);
    }
    CHECK(own.use_count() == 1);
}

void invalid_calls_throw() {
    CHECK_THROWS(kvt::sparse::open(model_shape(), "qest"), KVT_E_SPEC);
    CHECK_THROWS(kvt::sparse::open(model_shape(), ""), KVT_E_INVALID);
    const kvt::sparse none;
    CHECK_THROWS(none.stats(), KVT_E_HANDLE);
    CHECK_THROWS(none.restart(), KVT_E_HANDLE);
    CHECK_THROWS(kvt::attention_job().info(), KVT_E_HANDLE);
    std::vector<float> out(TOKENS * QUERY_HEADS * VALUES);
    kvt::attention_args p = attention_of(0, nullptr);
    p.values = rows(v, 0, TOKENS - 1, HEADS, VALUES);
    CHECK_THROWS(kvt::attention_job::prefill(p, out), KVT_E_INVALID);
    kvt::sparse_index nonsense;
    nonsense.heads = {{9, 0, 0, 0, 0, 0}};
    const kvt_index_t selected = nonsense.to_c();
    CHECK_THROWS(kvt::attention_job::prefill(attention_of(0, &selected), out), KVT_E_INVALID);
    std::vector<float> bad(DIM * HEADS, 1.0f);
    kvt::check_rows(rows(bad, 0, 1, HEADS, DIM));
    bad[3] = NAN;
    CHECK_THROWS(kvt::check_rows(rows(bad, 0, 1, HEADS, DIM)), KVT_E_INVALID);
    const std::vector<kvt::sparse_info> all = kvt::sparse_policies();
    CHECK(all.size() >= 18);
    CHECK(std::any_of(all.begin(), all.end(), [](const kvt::sparse_info &one) {
        return one.name == "quest" && !one.about.empty();
    }));
}

}  // namespace

int main() {
    const kvt::runtime runtime = kvt::runtime::open();
    prefill_matches_dense_reference("minference(budget=0.2,last_q=16,sinks=4,recent=8)");
    prefill_matches_dense_reference("minference(type=tri_shape,sinks=8,recent=32,dense_rows=20)");
    prefill_matches_dense_reference("xattention(block=32,stride=4)");
    prefill_matches_dense_reference("streaming(sinks=4,recent=40)");
    prefill_matches_dense_reference("full");
    attention_over_pieces_of_keys_merges();
    evict_keeps_the_keys_with_most_attention(runtime);
    decode_selects_blocks_by_pages();
    index_and_sums_are_placed_in_a_buffer();
    custom_policy_is_called_and_checked();
    closing_a_custom_policy_destroys_its_functions();
    invalid_calls_throw();
    return done();
}
