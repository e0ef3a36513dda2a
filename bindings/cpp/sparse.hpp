/// @file
/// kvt::sparse: sparse policies for engines that keep KV themselves: which keys to compute with, which
/// to load, which to evict.
///
/// A policy sees keys as they are appended, and answers for a query. What it can do and what it must be
/// given stands in its traits. kvt::offload uses the same policies over KV that a store keeps.
/// kvt::sparse_custom is a policy of the engine's own.
///
/// Life cycle: sparse::open, append for each layer, select or index for a query, plan_eviction and
/// commit_eviction; the destructor closes. Calls on one policy run one at a time.
///
///     kvt::attention shape;
///     shape.layers = 32;
///     shape.query_heads = 32;
///     shape.key_heads = 8;
///     shape.key_dim = shape.value_dim = 128;
///     shape.block_tokens = 16;
///     shape.max_tokens = 131072;
///     const kvt::sparse policy = kvt::sparse::open(shape, "quest(budget=2048)");
///     policy.append(0, 0, rows); // keys of layer 0, from position 0 on
///     kvt::sparse_context step;
///     step.tokens = 4096;
///     step.first_query = 4095;
///     const kvt::sparse_index index = policy.index(0, rows, nullptr, step);
///     const kvt_index_t selected = index.to_c();
///     kvt::attention_args args; // attention over these keys only
///     args.select = &selected;

#ifndef KVTIER_SPARSE_HPP
#define KVTIER_SPARSE_HPP

#include <kvtier/attention.hpp>
#include <kvtier/sparse.h>

namespace kvt {
inline namespace KVTIER_ERRORS_ {

// --- selections --------------------------------------------------------------

/// The keys that queries are computed with, as in kvt_index_t. No heads = all keys.
struct sparse_index {
    /// How the lists of each head are read.
    std::vector<kvt_index_head_t> heads;
    /// Start of each list in `items`, then the end of the last list.
    std::vector<std::uint32_t> starts;
    /// Contents of all lists.
    std::vector<std::uint32_t> items;

    /// Adds a list; returns its index.
    std::uint32_t add(span<const std::uint32_t> list) {
        if (starts.empty()) starts.push_back(0);
        items.insert(items.end(), list.begin(), list.end());
        starts.push_back(static_cast<std::uint32_t>(items.size()));
        return static_cast<std::uint32_t>(starts.size() - 2);
    }
    /// Empties the index and keeps its memory.
    void clear() noexcept {
        heads.clear();
        starts.clear();
        items.clear();
    }
    /// List `number`, which must exist.
    span<const std::uint32_t> list(std::size_t number) const noexcept {
        return span<const std::uint32_t>(items.data() + starts[number],
                                         starts[number + 1] - starts[number]);
    }
    /// The arrays for C, which reads them. Calls with an output fill those of an index that is not
    /// const, up to their sizes.
    kvt_index_t to_c() const noexcept {
        kvt_index_t c = KVT_INDEX_INIT;
        c.heads = const_cast<kvt_index_head_t *>(heads.data());
        c.head_capacity = c.head_count = heads.size();
        c.starts = const_cast<std::uint32_t *>(starts.data());
        c.start_capacity = c.start_count = starts.size();
        c.items = const_cast<std::uint32_t *>(items.data());
        c.item_capacity = c.item_count = items.size();
        return c;
    }
    /// Resizes the arrays to the counts that C wrote.
    void resize(const kvt_index_t &to) {
        heads.resize(static_cast<std::size_t>(to.head_count));
        starts.resize(static_cast<std::size_t>(to.start_count));
        items.resize(static_cast<std::size_t>(to.item_count));
    }
};

/// Positions of the retained tokens of a layer: a list for each head, or one for all heads. No list
/// = all tokens are retained.
using token_lists = std::vector<std::vector<std::uint32_t>>;

// --- custom policies ---------------------------------------------------------

/// A custom sparse policy: its traits, and the functions that they require. A function returns
/// KVT_OK or the status that the engine's call fails with. An exception is reported to the defect
/// hook and counts as KVT_E_STATE. Arguments are borrowed for the call.
struct sparse_custom {
    kvt_sparse_traits_t traits = KVT_SPARSE_TRAITS_INIT;
    /// Called before a block of a layer is moved away. Arguments: block, layer, position of the
    /// first token, keys.
    std::function<kvt_status_t(std::uint32_t, std::uint32_t, std::uint32_t, const kvt_rows_t &)>
        on_prefill_offload;
    /// Called when decode has completed a block. Arguments: block, position of the first token,
    /// keys of all layers.
    std::function<kvt_status_t(std::uint32_t, std::uint32_t, span<const kvt_rows_t>)>
        on_decode_offload;
    /// Selects blocks. Arguments: layer, query (may be null), candidates, context. Adds the chosen
    /// candidates to the list, which is empty.
    std::function<kvt_status_t(std::uint32_t, const kvt_rows_t *, span<const std::uint32_t>,
                               const sparse_context &, std::vector<std::uint32_t> &)>
        select_blocks;
    /// Selects keys. Arguments: layer, queries, keys (may be null), context. Fills the index, which
    /// is empty.
    std::function<kvt_status_t(std::uint32_t, const kvt_rows_t &, const kvt_rows_t *,
                               const sparse_context &, sparse_index &)>
        index;
    /// Computes attention. Arguments: layer, queries, keys, values, context. Writes outputs, and
    /// log-sum-exps unless that span is empty.
    std::function<kvt_status_t(std::uint32_t, const kvt_rows_t &, const kvt_rows_t &,
                               const kvt_rows_t &, const sparse_context &, span<float>,
                               span<float>)>
        sparse_prefill_attention;
    /// Takes the attention that keys received. Arguments: layer, number of queries, sums, number of
    /// retained tokens.
    std::function<kvt_status_t(std::uint32_t, std::uint32_t, span<const float>, std::uint32_t)>
        observe;
    /// Chooses the tokens of a layer that stay. Fills the lists, which are empty; no list = all
    /// stay.
    std::function<kvt_status_t(std::uint32_t, const sparse_context &, token_lists &)> evict;
    /// Called after an eviction. Arguments: layer, retained tokens.
    std::function<kvt_status_t(std::uint32_t, const token_lists &)> evicted;
    /// Truncates the sequence to a number of tokens; 0 = a new sequence starts.
    std::function<kvt_status_t(std::uint32_t)> truncate;
    /// Creates the policy of a copy, with the same functions set; null = KVT_E_UNSUPPORTED.
    std::function<std::unique_ptr<sparse_custom>()> fork;
};

namespace detail {
/// Lists of tokens in the two arrays that C uses.
struct flat_lists {
    std::vector<std::uint32_t> starts;
    std::vector<std::uint32_t> items;

    void set(const token_lists &lists) {
        starts.clear();
        items.clear();
        if (lists.empty()) return;
        starts.push_back(0);
        for (const std::vector<std::uint32_t> &list : lists) {
            items.insert(items.end(), list.begin(), list.end());
            starts.push_back(static_cast<std::uint32_t>(items.size()));
        }
    }
    kvt_token_lists_t to_c() noexcept {
        kvt_token_lists_t c = KVT_TOKEN_LISTS_INIT;
        c.starts = starts.data();
        c.start_capacity = c.start_count = starts.size();
        c.items = items.data();
        c.item_capacity = c.item_count = items.size();
        return c;
    }
};

inline token_lists from_c(const kvt_token_lists_t &from) {
    token_lists lists;
    for (std::uint64_t i = 0; i + 1 < from.start_count; i++)
        lists.emplace_back(from.items + from.starts[i], from.items + from.starts[i + 1]);
    return lists;
}

inline sparse_context from_c(const kvt_sparse_context_t &from) noexcept {
    sparse_context at;
    at.first_query = from.first_query;
    at.tokens = from.tokens;
    at.is_prefill = from.is_prefill != 0;
    at.part = from.part;
    at.parts = from.parts;
    return at;
}

/// The user data of a custom policy: the functions, and their last answers.
struct sparse_box {
    sparse_custom own;
    std::uint32_t layers;
    std::uint32_t query_heads;
    std::uint32_t value_dim;
    std::vector<std::uint32_t> chosen;
    std::vector<kvt_rows_t> rows;
    sparse_index index;
    flat_lists kept;

    /// Calls `f` with the box; exceptions become KVT_E_STATE.
    template <class F> static kvt_status_t call(void *user_data, F f) noexcept {
        sparse_box &box = *static_cast<sparse_box *>(user_data);
        auto body = [&]() -> kvt_status_t { return f(box); };
        return guarded<kvt_status_t>("kvt sparse policy", KVT_E_STATE, body);
    }

    static kvt_status_t on_prefill_offload(void *user_data, std::uint32_t block,
                                           std::uint32_t layer, std::uint32_t first,
                                           const kvt_rows_t *keys) noexcept {
        return call(user_data, [&](sparse_box &box) {
            return box.own.on_prefill_offload(block, layer, first, *keys);
        });
    }
    static kvt_status_t on_decode_offload(void *user_data, std::uint32_t block,
                                          std::uint32_t first, const kvt_rows_t *keys,
                                          std::uint32_t layers) noexcept {
        return call(user_data, [&](sparse_box &box) {
            // Entries of a newer library may be longer.
            const std::size_t size = static_cast<std::size_t>(keys->struct_size);
            const auto *at = reinterpret_cast<const unsigned char *>(keys);
            box.rows.clear();
            for (std::uint32_t i = 0; i < layers; i++)
                box.rows.push_back(*reinterpret_cast<const kvt_rows_t *>(at + i * size));
            return box.own.on_decode_offload(block, first, span<const kvt_rows_t>(box.rows));
        });
    }
    static kvt_status_t select_blocks(void *user_data, std::uint32_t layer,
                                      const kvt_rows_t *query, const std::uint32_t *candidates,
                                      std::uint64_t count, const kvt_sparse_context_t *context,
                                      std::uint32_t *ids, std::uint64_t *count_out) noexcept {
        return call(user_data, [&](sparse_box &box) {
            box.chosen.clear();
            const span<const std::uint32_t> among(candidates, static_cast<std::size_t>(count));
            const kvt_status_t status =
                box.own.select_blocks(layer, query, among, from_c(*context), box.chosen);
            *count_out = box.chosen.size();
            // Too many ids: the library rejects their number.
            for (std::size_t i = 0; i < box.chosen.size() && i < count; i++)
                ids[i] = box.chosen[i];
            return status;
        });
    }
    static kvt_status_t on_index(void *user_data, std::uint32_t layer, const kvt_rows_t *queries,
                                 const kvt_rows_t *keys, const kvt_sparse_context_t *context,
                                 kvt_index_t *out) noexcept {
        return call(user_data, [&](sparse_box &box) {
            box.index.clear();
            const kvt_status_t status =
                box.own.index(layer, *queries, keys, from_c(*context), box.index);
            const kvt_index_t answer = box.index.to_c();
            out->heads = answer.heads;
            out->head_count = answer.head_count;
            out->starts = answer.starts;
            out->start_count = answer.start_count;
            out->items = answer.items;
            out->item_count = answer.item_count;
            return status;
        });
    }
    static kvt_status_t attend(void *user_data, std::uint32_t layer, const kvt_rows_t *queries,
                               const kvt_rows_t *keys, const kvt_rows_t *values,
                               const kvt_sparse_context_t *context, float *out,
                               float *lse) noexcept {
        return call(user_data, [&](sparse_box &box) {
            const std::size_t n = std::size_t{queries->view.tokens} * box.query_heads;
            return box.own.sparse_prefill_attention(
                layer, *queries, *keys, *values, from_c(*context),
                span<float>(out, n * box.value_dim), span<float>(lse, lse == nullptr ? 0 : n));
        });
    }
    static kvt_status_t observe(void *user_data, std::uint32_t layer, std::uint32_t queries,
                                const float *sums, std::uint64_t count,
                                std::uint32_t tokens) noexcept {
        return call(user_data, [&](sparse_box &box) {
            const span<const float> all(sums, static_cast<std::size_t>(count));
            return box.own.observe(layer, queries, all, tokens);
        });
    }
    static kvt_status_t evict(void *user_data, std::uint32_t layer,
                              const kvt_sparse_context_t *context,
                              kvt_token_lists_t *out) noexcept {
        return call(user_data, [&](sparse_box &box) {
            token_lists lists;
            const kvt_status_t status = box.own.evict(layer, from_c(*context), lists);
            box.kept.set(lists);
            const kvt_token_lists_t answer = box.kept.to_c();
            out->starts = answer.starts;
            out->start_count = answer.start_count;
            out->items = answer.items;
            out->item_count = answer.item_count;
            return status;
        });
    }
    static kvt_status_t evicted(void *user_data, std::uint32_t layer,
                                const kvt_token_lists_t *kept) noexcept {
        return call(user_data,
                    [&](sparse_box &box) { return box.own.evicted(layer, from_c(*kept)); });
    }
    static kvt_status_t truncate(void *user_data, std::uint32_t tokens) noexcept {
        return call(user_data, [&](sparse_box &box) { return box.own.truncate(tokens); });
    }
    static kvt_status_t fork(void *user_data, void **copy_out) noexcept {
        return call(user_data, [&](sparse_box &box) -> kvt_status_t {
            std::unique_ptr<sparse_custom> copy = box.own.fork();
            if (!copy) return KVT_E_UNSUPPORTED;
            // The library calls the same functions for the copy.
            if (!has_all(*copy, box.own)) return KVT_E_INVALID;
            *copy_out = new sparse_box{
                std::move(*copy), box.layers, box.query_heads, box.value_dim, {}, {}, {}, {}};
            return KVT_OK;
        });
    }
    /// Whether `copy` has every function that `own` has.
    static bool has_all(const sparse_custom &copy, const sparse_custom &own) noexcept {
        const auto has = [](bool here, bool there) { return here || !there; };
        return has(bool(copy.on_prefill_offload), bool(own.on_prefill_offload)) &&
               has(bool(copy.on_decode_offload), bool(own.on_decode_offload)) &&
               has(bool(copy.select_blocks), bool(own.select_blocks)) &&
               has(bool(copy.index), bool(own.index)) &&
               has(bool(copy.sparse_prefill_attention), bool(own.sparse_prefill_attention)) &&
               has(bool(copy.observe), bool(own.observe)) &&
               has(bool(copy.evict), bool(own.evict)) &&
               has(bool(copy.evicted), bool(own.evicted)) &&
               has(bool(copy.truncate), bool(own.truncate)) &&
               has(bool(copy.fork), bool(own.fork));
    }

    /// The callback table for C, with the functions that are set.
    kvt_sparse_custom_t to_c() noexcept {
        kvt_sparse_custom_t c = KVT_SPARSE_CUSTOM_INIT;
        c.traits = &own.traits;
        if (own.on_prefill_offload) c.on_prefill_offload = &sparse_box::on_prefill_offload;
        if (own.on_decode_offload) c.on_decode_offload = &sparse_box::on_decode_offload;
        if (own.select_blocks) c.select_blocks = &sparse_box::select_blocks;
        if (own.index) c.index = &sparse_box::on_index;
        if (own.sparse_prefill_attention) c.sparse_prefill_attention = &sparse_box::attend;
        if (own.observe) c.observe = &sparse_box::observe;
        if (own.evict) c.evict = &sparse_box::evict;
        if (own.evicted) c.evicted = &sparse_box::evicted;
        if (own.truncate) c.truncate = &sparse_box::truncate;
        if (own.fork) c.fork = &sparse_box::fork;
        c.user_data = this;
        c.destroy = &unbox<sparse_box>;
        return c;
    }
};
}  // namespace detail

// --- policies ----------------------------------------------------------------

/// A sparse policy for one sequence. Any thread may use it, one at a time: a call during another
/// one fails with KVT_E_BUSY.
class sparse : public detail::owner<sparse, kvt_sparse_t> {
    friend class detail::owner<sparse, kvt_sparse_t>;
    static void drop(kvt_sparse_t *raw) noexcept {
        const kvt_status_t status = kvt_sparse_close(&raw);
        if (!detail::ended(status)) detail::report("kvt::sparse", status);
    }

public:
    /// Opens a policy by its spec, such as "minference(budget=0.2)". The account is charged for its
    /// state; null = no account.
    static ret<sparse> open(const attention &shape, std::string_view spec,
                            ref<kvt_account_t> account = {}) {
        kvt_sparse_opts_t c = KVT_SPARSE_OPTS_INIT;
        detail::required(spec, c.spec, c.spec_bytes);
        return open_with(shape, c, account);
    }
    /// Opens a custom policy.
    static ret<sparse> open(const attention &shape, sparse_custom own,
                            ref<kvt_account_t> account = {}) {
        std::unique_ptr<detail::sparse_box> box(new detail::sparse_box{
            std::move(own), shape.layers, shape.query_heads, shape.value_dim, {}, {}, {}, {}});
        const kvt_sparse_custom_t custom = box->to_c();
        kvt_sparse_opts_t c = KVT_SPARSE_OPTS_INIT;
        c.custom = &custom;
        return open_with(shape, c, account, &box);
    }
    ret<void> close() { return detail::check(kvt_sparse_close(&raw_)); }
    /// A copy with its state, for a sequence that continues from here.
    ret<sparse> fork() const {
        detail::failure f;
        kvt_sparse_t *raw = nullptr;
        const kvt_status_t status = kvt_sparse_fork(raw_, &raw, f.out());
        return detail::give(status, f, sparse::adopt(raw));
    }
    ret<kvt_sparse_traits_t> traits() const {
        kvt_sparse_traits_t traits = KVT_SPARSE_TRAITS_INIT;
        const kvt_status_t status = kvt_sparse_traits(raw_, &traits);
        return detail::give(status, traits);
    }
    ret<kvt_sparse_stats_t> stats() const {
        kvt_sparse_stats_t stats = KVT_SPARSE_STATS_INIT;
        const kvt_status_t status = kvt_sparse_stats(raw_, &stats);
        return detail::give(status, stats);
    }

    /// Adds the keys of new tokens of a layer.
    ret<void> append(std::uint32_t layer, std::uint32_t first, const kvt_rows_t &keys) const {
        detail::failure f;
        const kvt_status_t status = kvt_sparse_append(raw_, layer, first, &keys, f.out());
        return detail::check(status, f);
    }
    /// Registers a block of a layer as a candidate. Call it before the block is moved away.
    ret<void> add_block(std::uint32_t layer, std::uint32_t block, std::uint32_t first,
                        const kvt_rows_t &keys) const {
        detail::failure f;
        const kvt_status_t status = kvt_sparse_add_block(raw_, layer, block, first, &keys, f.out());
        return detail::check(status, f);
    }
    /// Registers a block that decode has completed in all layers. `keys` has an entry for each
    /// layer.
    ret<void> seal_all(std::uint32_t block, std::uint32_t first,
                       span<const kvt_rows_t> keys) const {
        detail::failure f;
        const kvt_status_t status = kvt_sparse_seal_all(raw_, block, first, keys.data(),
                                                        keys.size(), sizeof(kvt_rows_t), f.out());
        return detail::check(status, f);
    }
    /// Adds the attention that each retained key received from some queries: a row of `tokens` sums
    /// for each query head, or one row for all.
    ret<void> observe(std::uint32_t layer, std::uint32_t queries, span<const float> sums,
                      std::uint32_t tokens) const {
        detail::failure f;
        const kvt_status_t status = kvt_sparse_observe(raw_, layer, queries, sums.data(),
                                                       sums.size(), tokens, f.out());
        return detail::check(status, f);
    }
    /// Passes scores of the engine for the next select() or index() of a layer.
    ret<void> add_scores(std::uint32_t layer, span<const float> scores) const {
        detail::failure f;
        const kvt_status_t status =
            kvt_sparse_add_scores(raw_, layer, scores.data(), scores.size(), f.out());
        return detail::check(status, f);
    }
    /// Truncates the sequence to its first `tokens` tokens.
    ret<void> truncate(std::uint32_t tokens) const {
        detail::failure f;
        const kvt_status_t status = kvt_sparse_truncate(raw_, tokens, f.out());
        return detail::check(status, f);
    }
    /// Starts a new, empty sequence; reset() closes the policy instead.
    ret<void> restart() const { return detail::check(kvt_sparse_reset(raw_)); }
    /// Saves the policy's state of a block, to be stored with the block. Empty = the policy saves
    /// nothing with blocks.
    ret<std::vector<std::uint8_t>> save(std::uint32_t layer, std::uint32_t block) const {
        detail::failure f;
        std::vector<std::uint8_t> bytes;
        std::uint64_t count = 0;
        kvt_status_t status = kvt_sparse_save(raw_, layer, block, nullptr, 0, &count, f.out());
        if (status == KVT_OK && count > 0) {
            bytes.resize(static_cast<std::size_t>(count));
            status = kvt_sparse_save(raw_, layer, block, bytes.data(), bytes.size(), &count,
                                     f.out());
        }
        return detail::give(status, f, std::move(bytes));
    }
    /// Restores the state that save() returned for a block.
    ret<void> load(std::uint32_t layer, std::uint32_t block, std::uint32_t first,
                   span<const std::uint8_t> saved) const {
        detail::failure f;
        const kvt_status_t status = kvt_sparse_load(raw_, layer, block, first, saved.data(),
                                                    saved.size(), f.out());
        return detail::check(status, f);
    }

    /// Selects the candidates to load for a query, ascending. Without a query, policies that select
    /// by queries choose all.
    ret<std::vector<std::uint32_t>> select(std::uint32_t layer, const kvt_rows_t *query,
                                           span<const std::uint32_t> candidates,
                                           const sparse_context &at) const {
        detail::failure f;
        std::vector<std::uint32_t> ids;
        const kvt_status_t status = select_into(ids, layer, query, candidates, at, f.out());
        return detail::give(status, f, std::move(ids));
    }
    /// select() into a vector that the caller reuses: does not allocate once it is large enough.
    kvt_status_t select_into(std::vector<std::uint32_t> &ids, std::uint32_t layer,
                             const kvt_rows_t *query, span<const std::uint32_t> candidates,
                             const sparse_context &at, kvt_error_t **err = nullptr) const {
        const kvt_sparse_context_t c = at.to_c();
        std::uint64_t count = 0;
        ids.resize(candidates.size());
        const kvt_status_t status =
            kvt_sparse_select(raw_, layer, query, candidates.data(), candidates.size(), &c,
                              ids.data(), ids.size(), &count, err);
        ids.resize(status == KVT_OK ? static_cast<std::size_t>(count) : 0);
        return status;
    }
    /// Selects the keys that queries are computed with. `keys` may be null without
    /// KVT_NEEDS_ALL_KEYS.
    ret<sparse_index> index(std::uint32_t layer, const kvt_rows_t &queries,
                            const kvt_rows_t *keys, const sparse_context &at) const {
        detail::failure f;
        sparse_index out;
        const kvt_status_t status = index_into(out, layer, queries, keys, at, f.out());
        return detail::give(status, f, std::move(out));
    }
    /// index() into vectors that the caller reuses.
    kvt_status_t index_into(sparse_index &out, std::uint32_t layer, const kvt_rows_t &queries,
                            const kvt_rows_t *keys, const sparse_context &at,
                            kvt_error_t **err = nullptr) const {
        const kvt_sparse_context_t c = at.to_c();
        return read_index(out, [&](kvt_index_t *to) {
            return kvt_sparse_index(raw_, layer, &queries, keys, &c, to, err);
        }, err);
    }
    /// Reads the last index of the policy again.
    ret<sparse_index> last_index() const {
        detail::failure f;
        sparse_index out;
        const kvt_status_t status = read_index(out, [&](kvt_index_t *to) {
            return kvt_sparse_last_index(raw_, to, f.out());
        }, f.out());
        return detail::give(status, f, std::move(out));
    }
    /// Chooses the tokens of a layer that stay, if some are to be evicted; no list = all stay.
    /// Nothing is evicted before commit_eviction().
    ret<token_lists> plan_eviction(std::uint32_t layer, const sparse_context &at) const {
        const kvt_sparse_context_t c = at.to_c();
        std::uint32_t evicts = 0;
        return read_lists([&](kvt_token_lists_t *to, kvt_error_t **err) {
            return kvt_sparse_plan_eviction(raw_, layer, &c, to, &evicts, err);
        });
    }
    /// Reads the last answer of plan_eviction() again.
    ret<token_lists> last_retained() const {
        return read_lists([&](kvt_token_lists_t *to, kvt_error_t **err) {
            return kvt_sparse_last_retained(raw_, to, err);
        });
    }
    /// Confirms an eviction: only the tokens in `kept` are left in the layer.
    ret<void> commit_eviction(std::uint32_t layer, const token_lists &kept) const {
        detail::failure f;
        detail::flat_lists lists;
        lists.set(kept);
        const kvt_token_lists_t c = lists.to_c();
        const kvt_status_t status = kvt_sparse_commit_eviction(raw_, layer, &c, f.out());
        return detail::check(status, f);
    }
    /// Computes the attention of a prompt on the calling thread, with the policy's index. `lse` may
    /// be empty.
    ret<void> prefill_attention(std::uint32_t layer, const kvt_rows_t &queries,
                                const kvt_rows_t &keys, const kvt_rows_t &values,
                                const sparse_context &at, span<float> out,
                                span<float> lse = {}) const {
        detail::failure f;
        const kvt_sparse_context_t c = at.to_c();
        const kvt_status_t status = kvt_sparse_prefill_attention(
            raw_, layer, &queries, &keys, &values, &c, out.data(), out.size(),
            detail::or_null(lse), lse.size(), f.out());
        return detail::check(status, f);
    }

private:
    static ret<sparse> open_with(const attention &shape, kvt_sparse_opts_t &c,
                                 ref<kvt_account_t> account,
                                 std::unique_ptr<detail::sparse_box> *box = nullptr) {
        detail::failure f;
        const kvt_attention_t of = shape.to_c();
        c.attention = &of;
        c.account = account.get();
        kvt_sparse_t *raw = nullptr;
        const kvt_status_t status = kvt_sparse_open(&c, &raw, f.out());
        if (status == KVT_OK && box != nullptr) (void)box->release();
        return detail::give(status, f, sparse::adopt(raw));
    }
    /// Reads lists of tokens from a call. If they do not fit, reads them again with larger arrays.
    template <class Call>
    ret<token_lists> read_lists(Call call) const {
        detail::failure f;
        detail::flat_lists lists;
        lists.starts.resize(65);
        lists.items.resize(4096);
        kvt_token_lists_t to = lists.to_c();
        kvt_status_t status = call(&to, f.out());
        while (status == KVT_E_TOO_SMALL) {
            lists.starts.resize(static_cast<std::size_t>(to.start_count));
            lists.items.resize(static_cast<std::size_t>(to.item_count));
            to = lists.to_c();
            status = kvt_sparse_last_retained(raw_, &to, f.out());
        }
        return detail::give(status, f, status == KVT_OK ? detail::from_c(to) : token_lists());
    }
    /// Reads an index from a call. If it does not fit, reads it again with larger arrays.
    template <class Call>
    kvt_status_t read_index(sparse_index &out, Call call, kvt_error_t **err) const {
        kvt_index_t to = out.to_c();
        kvt_status_t status = call(&to);
        while (status == KVT_E_TOO_SMALL) {
            out.resize(to);
            to = out.to_c();
            status = kvt_sparse_last_index(raw_, &to, err);
        }
        if (status == KVT_OK)
            out.resize(to);
        else
            out.clear();
        return status;
    }
};

// --- placement in buffers, memory of kernels ---------------------------------

// [kvt_block_placement_t: by generate.py]
/// Tokens in a buffer, in the order of their positions: full blocks of a sequence, then its tail.
struct block_placement {
    /// Blocks, ascending: block n starts at position n * block_tokens. At most 2^28.
    span<const std::uint32_t> blocks{};
    /// Tokens of a block, at least 1.
    std::uint32_t block_tokens = 0;
    /// Position of the first token of the tail, after all blocks.
    std::uint32_t tail_first = 0;
    /// Tokens of the tail.
    std::uint32_t tail_tokens = 0;

    kvt_block_placement_t to_c() const noexcept {
        kvt_block_placement_t c = KVT_BLOCK_PLACEMENT_INIT;
        detail::list(blocks, c.blocks, c.block_count);
        c.block_tokens = block_tokens;
        c.tail_first = tail_first;
        c.tail_tokens = tail_tokens;
        return c;
    }
};
// [end]

/// An index of rows of a buffer, and the row of the first query.
struct placed_index {
    sparse_index index;
    std::uint32_t first_query = 0;
};

/// Translates an index of positions (null = all keys) into an index of the rows of a buffer, for
/// `count` queries from position `first` on.
inline ret<placed_index> place_index(const attention &shape, const block_placement &placed,
                                     const sparse_index *index, std::uint32_t first,
                                     std::uint32_t count) {
    detail::failure f;
    const kvt_attention_t of = shape.to_c();
    const kvt_block_placement_t in = placed.to_c();
    const kvt_index_t wanted = index == nullptr ? kvt_index_t{} : index->to_c();
    placed_index out;
    kvt_index_t to = out.index.to_c();
    kvt_status_t status = KVT_E_TOO_SMALL;
    for (bool again = false; status == KVT_E_TOO_SMALL; again = true) {
        if (again) {
            out.index.resize(to);
            to = out.index.to_c();
        }
        status = kvt_index_place(&of, &in, index == nullptr ? nullptr : &wanted, first, count, &to,
                                 &out.first_query, f.out());
    }
    out.index.resize(to);
    return detail::give(status, f, std::move(out));
}

/// Adds sums over the rows of a buffer to sums over the resident tokens, as sparse::observe takes
/// them. `kept` are the lists of the last sparse::commit_eviction; tokens from `from` on came after it.
/// With `select`, `sums` are those of attention_job::decode_sums of a decode.
inline ret<void> place_column_sums(const attention &shape, std::uint32_t tokens,
                                   const block_placement &placed, span<const float> sums,
                                   span<float> out, const placed_index *select = nullptr,
                                   std::uint32_t queries = 0, const token_lists &kept = {},
                                   std::uint32_t from = 0) {
    detail::failure f;
    const kvt_attention_t of = shape.to_c();
    const kvt_block_placement_t in = placed.to_c();
    detail::flat_lists lists;
    lists.set(kept);
    const kvt_token_lists_t retained = lists.to_c();
    kvt_resident_tokens_t resident = KVT_RESIDENT_TOKENS_INIT;
    resident.attention = &of;
    resident.kept = kept.empty() ? nullptr : &retained;
    resident.since = from;
    resident.tokens = tokens;
    const kvt_index_t rows = select == nullptr ? kvt_index_t{} : select->index.to_c();
    const kvt_status_t status =
        kvt_column_sums_place(&resident, &in, select == nullptr ? nullptr : &rows,
                              select == nullptr ? 0 : select->first_query, queries, sums.data(),
                              sums.size(), out.data(), out.size(), f.out());
    return detail::check(status, f);
}

// [kvt_kernel_limits_t: by generate.py]
/// Largest sizes of problems, independent of each other. Each is at least 1.
struct kernel_limits {
    /// Keep scores, for kvt_decode_sums.
    bool scores = false;
    /// Queries of a problem, at most `tokens`.
    std::uint32_t queries = 0;
    /// Keys of a problem, at most 2^30.
    std::uint32_t keys = 0;
    /// Positions of a sequence, at most 2^30.
    std::uint32_t tokens = 0;
    std::uint32_t query_heads = 0;
    /// Elements of a query or key head, at most 2,048.
    std::uint32_t key_dim = 0;
    /// Elements of a value head, at most 2,048.
    std::uint32_t value_dim = 0;

    kvt_kernel_limits_t to_c() const noexcept {
        kvt_kernel_limits_t c = KVT_KERNEL_LIMITS_INIT;
        if (scores) c.flags |= KVT_DECODE_SCORES;
        c.queries = queries;
        c.keys = keys;
        c.tokens = tokens;
        c.query_heads = query_heads;
        c.key_dim = key_dim;
        c.value_dim = value_dim;
        return c;
    }
};
// [end]

/// Floats of memory that a job needs at most, and floats of scratch of each of its threads.
struct kernel_workspace {
    std::size_t memory = 0, scratch = 0;
};

/// Computes how much memory suffices for every problem within some limits, to be allocated once.
inline ret<kernel_workspace> workspace(kvt_attention_kernel_t kernel,
                                       const kernel_limits &limits) {
    detail::failure f;
    const kvt_kernel_limits_t c = limits.to_c();
    std::uint64_t memory = 0, scratch = 0;
    const kvt_status_t status = kvt_kernel_workspace(kernel, &c, &memory, &scratch, f.out());
    kernel_workspace all;
    all.memory = static_cast<std::size_t>(memory);
    all.scratch = static_cast<std::size_t>(scratch);
    return detail::give(status, f, all);
}

/// A sparse policy that can be opened by name. Its texts live as long as the library.
struct sparse_info {
    std::string_view name;
    std::string_view about;

    static sparse_info from_c(const kvt_sparse_info_t &c) noexcept {
        sparse_info info;
        info.name = detail::view(c.name, c.name_bytes);
        info.about = detail::view(c.about, c.about_bytes);
        return info;
    }
};

/// The sparse policies that can be opened by name.
inline ret<std::vector<sparse_info>> sparse_policies() {
    std::uint64_t count = 0;
    kvt_status_t status = kvt_sparse_count(&count);
    std::vector<sparse_info> all;
    for (std::uint64_t i = 0; status == KVT_OK && i < count; ++i) {
        kvt_sparse_info_t c = KVT_SPARSE_INFO_INIT;
        status = kvt_sparse_info(i, &c);
        if (status == KVT_OK) all.push_back(sparse_info::from_c(c));
    }
    return detail::give(status, std::move(all));
}

}  // namespace KVTIER_ERRORS_
}  // namespace kvt

#endif  // KVTIER_SPARSE_HPP
