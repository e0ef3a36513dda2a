// kvt::sparse and kvt::job: sparse policies and attention kernels without a store, for engines that
// keep KV themselves. kvtier.hpp includes this file.

#ifndef KVTIER_SPARSE_HPP
#define KVTIER_SPARSE_HPP

#ifndef KVTIER_HPP
#error "include <kvtier/kvtier.hpp>"
#endif

namespace kvt {
inline namespace KVTIER_FACE_ {

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
};

/// Input of an attention kernel. Rows are made by kvt::rows. Do not change their memory, nor
/// `select`, until the job is closed.
struct attention_args {
    kvt_rows_t queries = KVT_ROWS_INIT;
    kvt_rows_t keys = KVT_ROWS_INIT;
    kvt_rows_t values = KVT_ROWS_INIT;
    /// Keys to use; null = all keys.
    const sparse_index *select = nullptr;
    /// Positions of the first query and of the first key.
    std::uint32_t first_query = 0;
    std::uint32_t first_key = 0;
    /// Factor of query-key products; 0 = 1 / sqrt(key dim).
    float scale = 0;
};

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
    std::function<kvt_status_t(std::uint32_t, const sparse_context &, kept_tokens &)> evict;
    /// Called after an eviction. Arguments: layer, retained tokens.
    std::function<kvt_status_t(std::uint32_t, const kept_tokens &)> evicted;
    /// Truncates the sequence to a number of tokens; 0 = a new sequence starts.
    std::function<kvt_status_t(std::uint32_t)> truncate;
    /// Creates the policy of a copy, with the same functions set; null = KVT_E_UNSUPPORTED.
    std::function<std::unique_ptr<sparse_custom>()> fork;
};

namespace detail {
/// An index for C, which reads its arrays or fills them up to their sizes.
inline kvt_index_t lower(const sparse_index &of) noexcept {
    kvt_index_t c = KVT_INDEX_INIT;
    c.heads = const_cast<kvt_index_head_t *>(of.heads.data()); // only read if `of` is const
    c.head_capacity = c.head_count = of.heads.size();
    c.starts = const_cast<std::uint32_t *>(of.starts.data());
    c.start_capacity = c.start_count = of.starts.size();
    c.items = const_cast<std::uint32_t *>(of.items.data());
    c.item_capacity = c.item_count = of.items.size();
    return c;
}

/// Resizes the arrays of an index to the counts that C wrote.
inline void resize(sparse_index &out, const kvt_index_t &to) {
    out.heads.resize(static_cast<std::size_t>(to.head_count));
    out.starts.resize(static_cast<std::size_t>(to.start_count));
    out.items.resize(static_cast<std::size_t>(to.item_count));
}

/// Lists of tokens in the two arrays that C uses.
struct flat_lists {
    std::vector<std::uint32_t> starts;
    std::vector<std::uint32_t> items;

    void set(const kept_tokens &lists) {
        starts.clear();
        items.clear();
        if (lists.empty()) return;
        starts.push_back(0);
        for (const std::vector<std::uint32_t> &list : lists) {
            items.insert(items.end(), list.begin(), list.end());
            starts.push_back(static_cast<std::uint32_t>(items.size()));
        }
    }
    kvt_token_lists_t lower() noexcept {
        kvt_token_lists_t c = KVT_TOKEN_LISTS_INIT;
        c.starts = starts.data();
        c.start_capacity = c.start_count = starts.size();
        c.items = items.data();
        c.item_capacity = c.item_count = items.size();
        return c;
    }
};

inline kept_tokens lift(const kvt_token_lists_t &from) {
    kept_tokens lists;
    for (std::uint64_t i = 0; i + 1 < from.start_count; i++)
        lists.emplace_back(from.items + from.starts[i], from.items + from.starts[i + 1]);
    return lists;
}

inline sparse_context lift(const kvt_sparse_context_t &from) noexcept {
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
                box.own.select_blocks(layer, query, among, lift(*context), box.chosen);
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
                box.own.index(layer, *queries, keys, lift(*context), box.index);
            const kvt_index_t answer = lower(box.index);
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
                layer, *queries, *keys, *values, lift(*context),
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
                              const kvt_sparse_context_t *context, kvt_token_lists_t *out) noexcept {
        return call(user_data, [&](sparse_box &box) {
            kept_tokens lists;
            const kvt_status_t status = box.own.evict(layer, lift(*context), lists);
            box.kept.set(lists);
            const kvt_token_lists_t answer = box.kept.lower();
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
                    [&](sparse_box &box) { return box.own.evicted(layer, lift(*kept)); });
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
    kvt_sparse_custom_t lower_custom() noexcept {
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

} // namespace detail

/// Packs an index for KVT_DEVICE_KERNEL_PREFILL and enters it in a kernel. Reads the kernel's query_count,
/// query_heads, key_heads, tokens and first; writes its count, numbers, counts, index and
/// scratch_bytes. Copy the returned bytes to `address`.
inline ret<std::vector<std::uint8_t>> launch_index(const sparse_index &index, kvt_kernel_t &kernel,
                                                   std::uint64_t address) {
    const kvt_index_t c = detail::lower(index);
    std::vector<std::uint8_t> bytes(index.heads.size() * sizeof(kvt_index_head_t) +
                                    (index.starts.size() + index.items.size()) * 4);
    detail::failure f;
    std::uint64_t count = 0;
    const kvt_status_t status =
        kvt_kernel_pack_index(&c, &kernel, address, bytes.data(), bytes.size(), &count, f.out());
    bytes.resize(static_cast<std::size_t>(count));
    return detail::give(status, f, std::move(bytes));
}

namespace detail {
/// The input of a kernel for C, with the index that it points to.
struct lowered_args {
    kvt_index_t select = KVT_INDEX_INIT;
    kvt_attention_args_t c = KVT_ATTENTION_ARGS_INIT;

    explicit lowered_args(const attention_args &of) noexcept {
        c.queries = &of.queries;
        c.keys = &of.keys;
        c.values = &of.values;
        if (of.select != nullptr) {
            select = lower(*of.select);
            c.select = &select;
        }
        c.first_query = of.first_query;
        c.first_key = of.first_key;
        c.scale = of.scale;
    }
    lowered_args(const lowered_args &) = delete;
    lowered_args &operator=(const lowered_args &) = delete;
};

/// The data of an optional array: null for an empty span.
inline float *or_null(span<float> of) noexcept { return of.empty() ? nullptr : of.data(); }
}  // namespace detail

inline ret<offload> offload::open(const session &on, const offload_opts &opts,
                                  std::unique_ptr<sparse_custom> prefill,
                                  std::unique_ptr<sparse_custom> decode) {
    std::unique_ptr<detail::sparse_box> boxes[2];
    kvt_sparse_custom_t tables[2] = {KVT_SPARSE_CUSTOM_INIT, KVT_SPARSE_CUSTOM_INIT};
    std::unique_ptr<sparse_custom> *const own[2] = {&prefill, &decode};
    for (int i = 0; i < 2; i++) {
        if (!*own[i]) continue;
        boxes[i].reset(new detail::sparse_box{std::move(**own[i]), opts.shape.layers,
                                              opts.shape.query_heads, opts.shape.value_dim,
                                              {}, {}, {}, {}});
        tables[i] = boxes[i]->lower_custom();
    }
    ret<offload> opened = open_with(on, opts, boxes[0] ? &tables[0] : nullptr,
                                    boxes[1] ? &tables[1] : nullptr);
    if (opened) {
        // The library owns the boxes now.
        for (auto &box : boxes) (void)box.release();
    }
    return opened;
}

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
                            const kvt::account *account = nullptr) {
        kvt_sparse_opts_t c = KVT_SPARSE_OPTS_INIT;
        detail::spec(spec, c.spec, c.spec_bytes);
        return open_with(shape, c, account);
    }
    /// Opens a custom policy.
    static ret<sparse> open(const attention &shape, sparse_custom own,
                            const kvt::account *account = nullptr) {
        std::unique_ptr<detail::sparse_box> box(new detail::sparse_box{
            std::move(own), shape.layers, shape.query_heads, shape.value_dim, {}, {}, {}, {}});
        const kvt_sparse_custom_t custom = box->lower_custom();
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
    ret<void> seal(std::uint32_t layer, std::uint32_t block, std::uint32_t first,
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
    ret<void> score(std::uint32_t layer, span<const float> scores) const {
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
        const kvt_sparse_context_t c = detail::lower(at);
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
        const kvt_sparse_context_t c = detail::lower(at);
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
    /// Nothing is evicted before evicted() is called.
    ret<kept_tokens> evict(std::uint32_t layer, const sparse_context &at) const {
        const kvt_sparse_context_t c = detail::lower(at);
        std::uint32_t evicts = 0;
        return read_lists([&](kvt_token_lists_t *to, kvt_error_t **err) {
            return kvt_sparse_plan_eviction(raw_, layer, &c, to, &evicts, err);
        });
    }
    /// Reads the last answer of evict() again.
    ret<kept_tokens> last_kept() const {
        return read_lists([&](kvt_token_lists_t *to, kvt_error_t **err) {
            return kvt_sparse_last_retained(raw_, to, err);
        });
    }
    /// Confirms an eviction: only the tokens in `kept` are left in the layer.
    ret<void> evicted(std::uint32_t layer, const kept_tokens &kept) const {
        detail::failure f;
        detail::flat_lists lists;
        lists.set(kept);
        const kvt_token_lists_t c = lists.lower();
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
        const kvt_sparse_context_t c = detail::lower(at);
        const kvt_status_t status = kvt_sparse_prefill_attention(
            raw_, layer, &queries, &keys, &values, &c, out.data(), out.size(),
            detail::or_null(lse), lse.size(), f.out());
        return detail::check(status, f);
    }

private:
    static ret<sparse> open_with(const attention &shape, kvt_sparse_opts_t &c,
                                 const kvt::account *account,
                                 std::unique_ptr<detail::sparse_box> *box = nullptr) {
        detail::failure f;
        const kvt_attention_t of = detail::lower(shape);
        c.attention = &of;
        if (account != nullptr) {
            // A closed account is an error, not the absence of an account.
            if (!*account) return detail::fail<sparse>(error(KVT_E_HANDLE));
            c.account = account->get();
        }
        kvt_sparse_t *raw = nullptr;
        const kvt_status_t status = kvt_sparse_open(&c, &raw, f.out());
        if (status == KVT_OK && box != nullptr) (void)box->release();
        return detail::give(status, f, sparse::adopt(raw));
    }
    /// Reads lists of tokens from a call. If they do not fit, reads them again with larger arrays.
    template <class Call>
    ret<kept_tokens> read_lists(Call call) const {
        detail::failure f;
        detail::flat_lists lists;
        lists.starts.resize(65);
        lists.items.resize(4096);
        kvt_token_lists_t to = lists.lower();
        kvt_status_t status = call(&to, f.out());
        while (status == KVT_E_TOO_SMALL) {
            lists.starts.resize(static_cast<std::size_t>(to.start_count));
            lists.items.resize(static_cast<std::size_t>(to.item_count));
            to = lists.lower();
            status = kvt_sparse_last_retained(raw_, &to, f.out());
        }
        return detail::give(status, f, status == KVT_OK ? detail::lift(to) : kept_tokens());
    }
    /// Reads an index from a call. If it does not fit, reads it again with larger arrays.
    template <class Call>
    kvt_status_t read_index(sparse_index &out, Call call, kvt_error_t **err) const {
        kvt_index_t to = detail::lower(out);
        kvt_status_t status = call(&to);
        while (status == KVT_E_TOO_SMALL) {
            detail::resize(out, to);
            to = detail::lower(out);
            status = kvt_sparse_last_index(raw_, &to, err);
        }
        if (status == KVT_OK)
            detail::resize(out, to);
        else
            out.clear();
        return status;
    }
};

/// An attention computation, cut into items that threads of the engine run. Run each item once, and
/// those of a step after all items of the step before. The job borrows its input and output until
/// it is closed; closing waits for running items.
class job : public detail::owner<job, kvt_attention_job_t> {
    friend class detail::owner<job, kvt_attention_job_t>;
    static void drop(kvt_attention_job_t *raw) noexcept {
        const kvt_status_t status = kvt_attention_job_close(&raw);
        if (!detail::ended(status)) detail::report("kvt::job", status);
    }

public:
    /// Computes the attention of a prompt or of a part of one. `out` is [queries, query heads,
    /// value dim], `lse` is [queries, query heads] log-sum-exps or empty.
    static ret<job> prefill(const attention_args &problem, span<float> out,
                            span<float> lse = {}) {
        detail::failure f;
        const detail::lowered_args p(problem);
        kvt_attention_job_t *raw = nullptr;
        const kvt_status_t status = kvt_prefill_open(
            &p.c, out.data(), out.size(), detail::or_null(lse), lse.size(), &raw, f.out());
        return detail::give(status, f, job::adopt(raw));
    }
    /// Number of floats of memory that a decode needs.
    static ret<std::size_t> decode_memory(const attention_args &problem,
                                          bool keeps_scores = false) {
        detail::failure f;
        const detail::lowered_args p(problem);
        std::uint64_t count = 0;
        const kvt_status_t status = kvt_decode_memory(&p.c, flags(keeps_scores), &count, f.out());
        return detail::give(status, f, static_cast<std::size_t>(count));
    }
    /// Computes the attention of the next token or of a few, in two steps. add_sums() needs
    /// keeps_scores.
    static ret<job> decode(const attention_args &problem, span<float> out, span<float> lse,
                           span<float> memory, bool keeps_scores = false) {
        detail::failure f;
        const detail::lowered_args p(problem);
        kvt_attention_job_t *raw = nullptr;
        const kvt_status_t status =
            kvt_decode_open(&p.c, flags(keeps_scores), out.data(), out.size(), lse.data(),
                            lse.size(), memory.data(), memory.size(), &raw, f.out());
        return detail::give(status, f, job::adopt(raw));
    }
    /// Sums, for each key, the attention that it received from a prompt's queries from `first` on.
    /// `lse` are the log-sum-exps of prefill(). `sums` is [query heads, keys], or [keys] without
    /// by_head.
    static ret<job> sums(const attention_args &problem, span<const float> lse,
                         span<float> sums, bool by_head = true, std::uint32_t first = 0) {
        detail::failure f;
        const detail::lowered_args p(problem);
        kvt_attention_job_t *raw = nullptr;
        const kvt_status_t status =
            kvt_column_sums_open(&p.c, lse.data(), lse.size(), first, by_head ? KVT_SUMS_BY_HEAD : 0,
                          sums.data(), sums.size(), &raw, f.out());
        return detail::give(status, f, job::adopt(raw));
    }

    ret<void> close() { return detail::check(kvt_attention_job_close(&raw_)); }
    ret<kvt_attention_job_info_t> info() const {
        kvt_attention_job_info_t info = KVT_ATTENTION_JOB_INFO_INIT;
        const kvt_status_t status = kvt_attention_job_info(raw_, &info);
        return detail::give(status, info);
    }
    /// Runs items of a step on the calling thread. No other thread may use `scratch` meanwhile.
    ret<void> run(std::uint32_t step, std::uint32_t first, std::uint32_t items,
                  span<float> scratch) const {
        detail::failure f;
        const kvt_status_t status =
            kvt_attention_job_run(raw_, step, first, items, scratch.data(), scratch.size(), f.out());
        return detail::check(status, f);
    }
    /// Runs all items on the calling thread.
    ret<void> run() const {
        detail::failure f;
        kvt_attention_job_info_t info = KVT_ATTENTION_JOB_INFO_INIT;
        kvt_status_t status = kvt_attention_job_info(raw_, &info);
        std::vector<float> scratch(static_cast<std::size_t>(info.scratch_count));
        for (std::uint32_t step = 0; status == KVT_OK && step < info.steps; step++)
            status = kvt_attention_job_run(raw_, step, 0, UINT32_MAX, scratch.data(), scratch.size(),
                                 f.out());
        return detail::check(status, f);
    }
    /// Adds, for each key, the attention that it received in a decode with keeps_scores. All items
    /// of the decode must have ended.
    ret<void> add_sums(span<float> sums, bool by_head = true) const {
        detail::failure f;
        const kvt_status_t status = kvt_decode_sums(raw_, by_head ? KVT_SUMS_BY_HEAD : 0,
                                                    sums.data(), sums.size(), f.out());
        return detail::check(status, f);
    }

private:
    static constexpr std::uint64_t flags(bool keeps_scores) noexcept {
        return keeps_scores ? KVT_DECODE_SCORES : 0;
    }
};

/// Adds keys to the bounding boxes of pages, [pages, key heads, 2 * key dim].
inline ret<void> extend_pages(span<float> boxes, std::uint32_t page_tokens, std::uint32_t first,
                              const kvt_rows_t &keys) {
    detail::failure f;
    const kvt_status_t status =
        kvt_pages_extend(boxes.data(), boxes.size(), page_tokens, first, &keys, f.out());
    return detail::check(status, f);
}

/// Computes the largest product that each query can have with a key of each page: [queries, query
/// heads, count]. Scratch: queries * query heads * (2 * key dim + 96) + 4096 floats suffice.
inline ret<void> score_pages(const kvt_rows_t &boxes, const kvt_rows_t &queries,
                             std::uint32_t first, std::uint32_t count, span<float> scores,
                             span<float> scratch) {
    detail::failure f;
    const kvt_status_t status =
        kvt_pages_score(&boxes, &queries, first, count, scores.data(), scores.size(),
                        scratch.data(), scratch.size(), f.out());
    return detail::check(status, f);
}

/// Merges the attention of the same queries to other keys into `out`, by the log-sum-exps of both.
inline ret<void> merge_attention(span<float> out, span<float> lse, span<const float> other,
                                 span<const float> other_lse) {
    detail::failure f;
    const std::size_t rows = lse.size(), dim = rows == 0 ? 0 : out.size() / rows;
    if (other.size() != out.size() || other_lse.size() != rows || rows * dim != out.size() ||
        dim > UINT32_MAX)
        return detail::fail<void>(error(KVT_E_INVALID));
    const kvt_status_t status =
        kvt_attention_merge(out.data(), lse.data(), other.data(), other_lse.data(), rows,
                            static_cast<std::uint32_t>(dim), f.out());
    return detail::check(status, f);
}

/// Tokens in a buffer: full blocks, ascending, then the tail of the sequence.
struct block_placement {
    span<const std::uint32_t> blocks;
    std::uint32_t block_tokens = 0;
    /// Position of the first token of the tail.
    std::uint32_t tail_first = 0;
    std::uint32_t tail_tokens = 0;
};

/// An index of rows of a buffer, and the row of the first query.
struct placed_index {
    sparse_index index;
    std::uint32_t first_query = 0;
};

namespace detail {
inline kvt_block_placement_t lower(const block_placement &of) noexcept {
    kvt_block_placement_t c = KVT_BLOCK_PLACEMENT_INIT;
    c.blocks = of.blocks.data();
    c.block_count = of.blocks.size();
    c.block_tokens = of.block_tokens;
    c.tail_first = of.tail_first;
    c.tail_tokens = of.tail_tokens;
    return c;
}
}  // namespace detail

/// Translates an index of positions (null = all keys) into an index of the rows of a buffer, for
/// `count` queries from position `first` on.
inline ret<placed_index> place_index(const attention &shape, const block_placement &placed,
                                     const sparse_index *index, std::uint32_t first,
                                     std::uint32_t count) {
    detail::failure f;
    const kvt_attention_t of = detail::lower(shape);
    const kvt_block_placement_t in = detail::lower(placed);
    const kvt_index_t wanted = index == nullptr ? kvt_index_t{} : detail::lower(*index);
    placed_index out;
    kvt_index_t to = detail::lower(out.index);
    kvt_status_t status = KVT_E_TOO_SMALL;
    for (bool again = false; status == KVT_E_TOO_SMALL; again = true) {
        if (again) {
            detail::resize(out.index, to);
            to = detail::lower(out.index);
        }
        status = kvt_index_place(&of, &in, index == nullptr ? nullptr : &wanted, first, count, &to,
                                 &out.first_query, f.out());
    }
    detail::resize(out.index, to);
    return detail::give(status, f, std::move(out));
}

/// Adds sums over the rows of a buffer to sums over the resident tokens, as sparse::observe takes
/// them. `kept` are the lists of the last sparse::evicted; tokens from `from` on came after it.
/// With `select`, `sums` are those of job::add_sums of a decode.
inline ret<void> place_sums(const attention &shape, std::uint32_t tokens,
                            const block_placement &placed, span<const float> sums, span<float> out,
                            const placed_index *select = nullptr, std::uint32_t queries = 0,
                            const kept_tokens &kept = {}, std::uint32_t from = 0) {
    detail::failure f;
    const kvt_attention_t of = detail::lower(shape);
    const kvt_block_placement_t in = detail::lower(placed);
    detail::flat_lists lists;
    lists.set(kept);
    const kvt_token_lists_t retained = lists.lower();
    kvt_resident_tokens_t resident = KVT_RESIDENT_TOKENS_INIT;
    resident.attention = &of;
    resident.kept = kept.empty() ? nullptr : &retained;
    resident.since = from;
    resident.tokens = tokens;
    const kvt_index_t rows = select == nullptr ? kvt_index_t{} : detail::lower(select->index);
    const kvt_status_t status =
        kvt_column_sums_place(&resident, &in, select == nullptr ? nullptr : &rows,
                       select == nullptr ? 0 : select->first_query, queries, sums.data(),
                       sums.size(), out.data(), out.size(), f.out());
    return detail::check(status, f);
}

/// Floats of memory that a job needs at most, and floats of scratch of each of its threads.
struct kernel_workspace {
    std::size_t memory = 0, scratch = 0;
};

/// Computes how much memory suffices for every problem within some limits, to be allocated once.
inline ret<kernel_workspace> workspace(std::uint32_t kernel,
                                       const kvt_kernel_limits_t &limits) {
    detail::failure f;
    std::uint64_t memory = 0, scratch = 0;
    const kvt_status_t status =
        kvt_kernel_workspace(kernel, &limits, &memory, &scratch, f.out());
    kernel_workspace all;
    all.memory = static_cast<std::size_t>(memory);
    all.scratch = static_cast<std::size_t>(scratch);
    return detail::give(status, f, all);
}

/// Fails unless all elements and scales of the rows are finite.
inline ret<void> check_rows(const kvt_rows_t &rows) {
    detail::failure f;
    const kvt_status_t status = kvt_rows_check(&rows, f.out());
    return detail::check(status, f);
}

/// The sparse policies that can be opened by name.
inline ret<std::vector<policy_info>> sparse_policies() {
    std::uint64_t count = 0;
    kvt_status_t status = kvt_sparse_count(&count);
    std::vector<policy_info> all;
    for (std::uint64_t i = 0; status == KVT_OK && i < count; ++i) {
        kvt_sparse_info_t c = KVT_SPARSE_INFO_INIT;
        status = kvt_sparse_info(i, &c);
        if (status == KVT_OK) all.push_back(detail::lift_info(c));
    }
    return detail::give(status, std::move(all));
}

}  // namespace KVTIER_FACE_
}  // namespace kvt

#endif  // KVTIER_SPARSE_HPP
