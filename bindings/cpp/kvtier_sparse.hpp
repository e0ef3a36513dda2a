// kvt::sparse and kvt::job: sparse policies and kernels alone, for engines that keep KV
// themselves. Part of kvtier.hpp, which includes it.

#ifndef KVTIER_SPARSE_HPP
#define KVTIER_SPARSE_HPP

#ifndef KVTIER_HPP
#error "include <kvtier/kvtier.hpp>"
#endif

namespace kvt {
inline namespace KVTIER_FACE_ {

/// Which keys queries are computed with, as kvt_index_t says it. No head = all keys.
struct sparse_index {
    std::vector<kvt_index_head_t> heads;
    std::vector<std::uint32_t> starts;
    std::vector<std::uint32_t> items;

    /// Adds a list and returns its number.
    std::uint32_t add(span<const std::uint32_t> list) {
        if (starts.empty()) starts.push_back(0);
        items.insert(items.end(), list.begin(), list.end());
        starts.push_back(static_cast<std::uint32_t>(items.size()));
        return static_cast<std::uint32_t>(starts.size() - 2);
    }
    /// An empty one again; memory stays.
    void clear() noexcept {
        heads.clear();
        starts.clear();
        items.clear();
    }
    /// List `number`, which must be one.
    span<const std::uint32_t> list(std::size_t number) const noexcept {
        return span<const std::uint32_t>(items.data() + starts[number],
                                         starts[number + 1] - starts[number]);
    }
};

/// What is to be computed. Rows are those of kvt::rows; what they lead to, and `select`, stay
/// as they are until the job is closed.
struct attention_args {
    kvt_rows_t queries = KVT_ROWS_INIT;
    kvt_rows_t keys = KVT_ROWS_INIT;
    kvt_rows_t values = KVT_ROWS_INIT;
    /// Null = all keys.
    const sparse_index *select = nullptr;
    std::uint32_t first_query = 0;
    std::uint32_t first_key = 0;
    /// 0 = 1 / sqrt(key dim).
    float scale = 0;
};

/// A sparse policy of the engine's own: traits, and the functions that they ask for. They
/// return KVT_OK, or what the call that led to them fails with; one that throws is reported
/// to the hook, and is KVT_E_STATE. What they are handed is borrowed for the call.
struct sparse_custom {
    kvt_sparse_traits_t traits = KVT_SPARSE_TRAITS_INIT;
    /// Block, layer, position of the first token, keys.
    std::function<kvt_status_t(std::uint32_t, std::uint32_t, std::uint32_t, const kvt_rows_t &)>
        on_prefill_offload;
    /// Block, position of the first token, keys of all layers.
    std::function<kvt_status_t(std::uint32_t, std::uint32_t, span<const kvt_rows_t>)>
        on_decode_offload;
    /// Layer, query (may be null), candidates; adds those that it chooses to the empty list.
    std::function<kvt_status_t(std::uint32_t, const kvt_rows_t *, span<const std::uint32_t>,
                               const sparse_context &, std::vector<std::uint32_t> &)>
        select_blocks;
    /// Layer, queries, keys (may be null); fills the empty index.
    std::function<kvt_status_t(std::uint32_t, const kvt_rows_t &, const kvt_rows_t *,
                               const sparse_context &, sparse_index &)>
        index;
    /// Layer, queries, keys, values; writes outputs, and log-sum-exps unless that is empty.
    std::function<kvt_status_t(std::uint32_t, const kvt_rows_t &, const kvt_rows_t &,
                               const kvt_rows_t &, const sparse_context &, span<float>,
                               span<float>)>
        sparse_prefill_attention;
    /// Layer, of how many queries, sums, how many tokens are kept.
    std::function<kvt_status_t(std::uint32_t, std::uint32_t, span<const float>, std::uint32_t)>
        observe;
    /// Layer; fills the empty lists with what stays, or leaves them where all does.
    std::function<kvt_status_t(std::uint32_t, const sparse_context &, kept_tokens &)> evict;
    std::function<kvt_status_t(std::uint32_t, const kept_tokens &)> evicted;
    /// How many tokens are left; 0 = the sequence begins anew.
    std::function<kvt_status_t(std::uint32_t)> truncate;
    /// A policy for a copy, with the same functions set; null = KVT_E_UNSUPPORTED.
    std::function<std::unique_ptr<sparse_custom>()> fork;
};

namespace detail {
/// An index as C reads it, or fills it: its arrays are the room.
inline kvt_index_t lower(const sparse_index &of) noexcept {
    kvt_index_t c = KVT_INDEX_INIT;
    c.heads = const_cast<kvt_index_head_t *>(of.heads.data()); // read, where `of` is const
    c.head_capacity = c.head_count = of.heads.size();
    c.starts = const_cast<std::uint32_t *>(of.starts.data());
    c.start_capacity = c.start_count = of.starts.size();
    c.items = const_cast<std::uint32_t *>(of.items.data());
    c.item_capacity = c.item_count = of.items.size();
    return c;
}

/// As many entries as C says that there are.
inline void resize(sparse_index &out, const kvt_index_t &to) {
    out.heads.resize(static_cast<std::size_t>(to.head_count));
    out.starts.resize(static_cast<std::size_t>(to.start_count));
    out.items.resize(static_cast<std::size_t>(to.item_count));
}

/// Lists one behind the other, as C has them.
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

/// The user data of a policy of the engine's own: the functions, and their last answers.
struct sparse_box {
    sparse_custom own;
    std::uint32_t layers;
    std::uint32_t query_heads;
    std::uint32_t value_dim;
    std::vector<std::uint32_t> chosen;
    std::vector<kvt_rows_t> rows;
    sparse_index index;
    flat_lists kept;

    /// Runs a function of the box.
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
            // A newer library's entries may be longer.
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
            // More than there is room for is refused by its number alone.
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
            kept_tokens stays;
            const kvt_status_t status = box.own.evict(layer, lift(*context), stays);
            box.kept.set(stays);
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
            // The library goes on with the same functions.
            if (!has_all(*copy, box.own)) return KVT_E_INVALID;
            *copy_out = new sparse_box{
                std::move(*copy), box.layers, box.query_heads, box.value_dim, {}, {}, {}, {}};
            return KVT_OK;
        });
    }
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

    /// The table of C: of what is there.
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

/// An index for KVT_DEVICE_KERNEL_PREFILL, and what the kernel is told of it: its query_count,
/// query_heads, key_heads, tokens and first are read; count, numbers, counts, index and
/// scratch_bytes are written. The bytes that come back are for the caller to bring to `address`.
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
/// A problem as C has it, with the structs that it leads to.
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

/// An array that may be absent: an empty span is.
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
        // They are the library's now.
        for (auto &box : boxes) (void)box.release();
    }
    return opened;
}

/// A sparse policy for one sequence. Any thread may use it, one at a time: a call that comes
/// while another is inside fails with KVT_E_BUSY.
class sparse : public detail::owner<sparse, kvt_sparse_t> {
    friend class detail::owner<sparse, kvt_sparse_t>;
    static void drop(kvt_sparse_t *raw) noexcept {
        const kvt_status_t status = kvt_sparse_close(&raw);
        if (!detail::ended(status)) detail::report("kvt::sparse", status);
    }

public:
    /// By a spec, such as "minference(budget=0.2)". The account pays for what it keeps.
    static ret<sparse> open(const attention &shape, std::string_view spec,
                            const account *pays = nullptr) {
        kvt_sparse_opts_t c = KVT_SPARSE_OPTS_INIT;
        detail::spec(spec, c.spec, c.spec_bytes);
        return open_with(shape, c, pays);
    }
    /// Of the engine's own.
    static ret<sparse> open(const attention &shape, sparse_custom own,
                            const account *pays = nullptr) {
        std::unique_ptr<detail::sparse_box> box(new detail::sparse_box{
            std::move(own), shape.layers, shape.query_heads, shape.value_dim, {}, {}, {}, {}});
        const kvt_sparse_custom_t custom = box->lower_custom();
        kvt_sparse_opts_t c = KVT_SPARSE_OPTS_INIT;
        c.custom = &custom;
        return open_with(shape, c, pays, &box);
    }
    ret<void> close() { return detail::check(kvt_sparse_close(&raw_)); }
    /// A copy for a sequence that goes on from here.
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

    /// Keys of tokens have been computed.
    ret<void> append(std::uint32_t layer, std::uint32_t first, const kvt_rows_t &keys) const {
        detail::failure f;
        const kvt_status_t status = kvt_sparse_append(raw_, layer, first, &keys, f.out());
        return detail::check(status, f);
    }
    /// A block of a layer is about to be moved away.
    ret<void> seal(std::uint32_t layer, std::uint32_t block, std::uint32_t first,
                   const kvt_rows_t &keys) const {
        detail::failure f;
        const kvt_status_t status = kvt_sparse_add_block(raw_, layer, block, first, &keys, f.out());
        return detail::check(status, f);
    }
    /// A block is complete: its keys, a view for each layer.
    ret<void> seal_all(std::uint32_t block, std::uint32_t first,
                       span<const kvt_rows_t> keys) const {
        detail::failure f;
        const kvt_status_t status = kvt_sparse_seal_all(raw_, block, first, keys.data(),
                                                        keys.size(), sizeof(kvt_rows_t), f.out());
        return detail::check(status, f);
    }
    /// What each kept key got of the attention of some queries: a row of `tokens` numbers for
    /// each query head, or one for all.
    ret<void> observe(std::uint32_t layer, std::uint32_t queries, span<const float> sums,
                      std::uint32_t tokens) const {
        detail::failure f;
        const kvt_status_t status = kvt_sparse_observe(raw_, layer, queries, sums.data(),
                                                       sums.size(), tokens, f.out());
        return detail::check(status, f);
    }
    /// The engine's numbers for the next question about a layer.
    ret<void> score(std::uint32_t layer, span<const float> scores) const {
        detail::failure f;
        const kvt_status_t status =
            kvt_sparse_add_scores(raw_, layer, scores.data(), scores.size(), f.out());
        return detail::check(status, f);
    }
    ret<void> truncate(std::uint32_t tokens) const {
        detail::failure f;
        const kvt_status_t status = kvt_sparse_truncate(raw_, tokens, f.out());
        return detail::check(status, f);
    }
    /// Begins anew; reset() closes the object.
    ret<void> restart() const { return detail::check(kvt_sparse_reset(raw_)); }
    /// What it knows of a block, to be kept beside it; nothing where it keeps nothing there.
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
    /// What was saved of a block, which came back.
    ret<void> load(std::uint32_t layer, std::uint32_t block, std::uint32_t first,
                   span<const std::uint8_t> saved) const {
        detail::failure f;
        const kvt_status_t status = kvt_sparse_load(raw_, layer, block, first, saved.data(),
                                                    saved.size(), f.out());
        return detail::check(status, f);
    }

    /// Which candidates are to be loaded for a query, ascending; without one all are.
    ret<std::vector<std::uint32_t>> select(std::uint32_t layer, const kvt_rows_t *query,
                                           span<const std::uint32_t> candidates,
                                           const sparse_context &at) const {
        detail::failure f;
        std::vector<std::uint32_t> ids;
        const kvt_status_t status = select_into(ids, layer, query, candidates, at, f.out());
        return detail::give(status, f, std::move(ids));
    }
    /// The same with a vector that is kept from call to call: it does not allocate once it is
    /// large enough.
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
    /// Which keys queries are computed with; `keys` may be null unless the traits want them.
    ret<sparse_index> index(std::uint32_t layer, const kvt_rows_t &queries,
                            const kvt_rows_t *keys, const sparse_context &at) const {
        detail::failure f;
        sparse_index out;
        const kvt_status_t status = index_into(out, layer, queries, keys, at, f.out());
        return detail::give(status, f, std::move(out));
    }
    /// The same with vectors that are kept from call to call.
    kvt_status_t index_into(sparse_index &out, std::uint32_t layer, const kvt_rows_t &queries,
                            const kvt_rows_t *keys, const sparse_context &at,
                            kvt_error_t **err = nullptr) const {
        const kvt_sparse_context_t c = detail::lower(at);
        return lists(out, [&](kvt_index_t *to) {
            return kvt_sparse_index(raw_, layer, &queries, keys, &c, to, err);
        }, err);
    }
    /// The last index, again.
    ret<sparse_index> last_index() const {
        detail::failure f;
        sparse_index out;
        const kvt_status_t status = lists(out, [&](kvt_index_t *to) {
            return kvt_sparse_last_index(raw_, to, f.out());
        }, f.out());
        return detail::give(status, f, std::move(out));
    }
    /// Which tokens stay, if some have to go; no list = all stay. Nothing has gone before
    /// evicted() says it.
    ret<kept_tokens> evict(std::uint32_t layer, const sparse_context &at) const {
        const kvt_sparse_context_t c = detail::lower(at);
        std::uint32_t some = 0;
        return keep([&](kvt_token_lists_t *to, kvt_error_t **err) {
            return kvt_sparse_plan_eviction(raw_, layer, &c, to, &some, err);
        });
    }
    /// What evict() answered last, again.
    ret<kept_tokens> last_kept() const {
        return keep([&](kvt_token_lists_t *to, kvt_error_t **err) {
            return kvt_sparse_last_retained(raw_, to, err);
        });
    }
    /// These tokens are all there is now of a layer.
    ret<void> evicted(std::uint32_t layer, const kept_tokens &kept) const {
        detail::failure f;
        detail::flat_lists lists;
        lists.set(kept);
        const kvt_token_lists_t c = lists.lower();
        const kvt_status_t status = kvt_sparse_commit_eviction(raw_, layer, &c, f.out());
        return detail::check(status, f);
    }
    /// Attention of a prompt as the policy wants it, on this thread; `lse` may be empty.
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
                                 const account *pays,
                                 std::unique_ptr<detail::sparse_box> *box = nullptr) {
        detail::failure f;
        const kvt_attention_t of = detail::lower(shape);
        c.attention = &of;
        if (pays != nullptr) {
            // An account that is closed is no reason to go on without one.
            if (!*pays) return detail::fail<sparse>(error(KVT_E_HANDLE));
            c.account = pays->get();
        }
        kvt_sparse_t *raw = nullptr;
        const kvt_status_t status = kvt_sparse_open(&c, &raw, f.out());
        if (status == KVT_OK && box != nullptr) (void)box->release();
        return detail::give(status, f, sparse::adopt(raw));
    }
    /// Lists; what did not fit at first is read again.
    template <class Call>
    ret<kept_tokens> keep(Call call) const {
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
    /// Fills an index; what did not fit at first is asked for again.
    template <class Call>
    kvt_status_t lists(sparse_index &out, Call call, kvt_error_t **err) const {
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

/// Attention that is to be computed, in items that the engine's threads run: each once, those
/// of a step once all of the step before have ended. All that it was opened with stays until
/// it is closed; closing waits for items that run.
class job : public detail::owner<job, kvt_attention_job_t> {
    friend class detail::owner<job, kvt_attention_job_t>;
    static void drop(kvt_attention_job_t *raw) noexcept {
        const kvt_status_t status = kvt_attention_job_close(&raw);
        if (!detail::ended(status)) detail::report("kvt::job", status);
    }

public:
    /// Attention of a prompt, or of a part of one: [queries, query heads, value dim], and
    /// [queries, query heads] log-sum-exps unless that is empty.
    static ret<job> prefill(const attention_args &problem, span<float> out,
                            span<float> lse = {}) {
        detail::failure f;
        const detail::lowered_args p(problem);
        kvt_attention_job_t *raw = nullptr;
        const kvt_status_t status = kvt_prefill_open(
            &p.c, out.data(), out.size(), detail::or_null(lse), lse.size(), &raw, f.out());
        return detail::give(status, f, job::adopt(raw));
    }
    /// How many numbers of memory a decode needs.
    static ret<std::size_t> decode_memory(const attention_args &problem,
                                          bool keeps_scores = false) {
        detail::failure f;
        const detail::lowered_args p(problem);
        std::uint64_t count = 0;
        const kvt_status_t status = kvt_decode_memory(&p.c, flags(keeps_scores), &count, f.out());
        return detail::give(status, f, static_cast<std::size_t>(count));
    }
    /// Attention of the next token, or of a few, in two steps. With scores add_sums() says
    /// what each key got.
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
    /// What each key got of the attention of a prompt's queries from `first` on, by the
    /// log-sum-exps that came out: [query heads, keys], or [keys].
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
    /// Runs items of a step on this thread; scratch is this thread's.
    ret<void> run(std::uint32_t step, std::uint32_t first, std::uint32_t items,
                  span<float> scratch) const {
        detail::failure f;
        const kvt_status_t status =
            kvt_attention_job_run(raw_, step, first, items, scratch.data(), scratch.size(), f.out());
        return detail::check(status, f);
    }
    /// Runs all of it on this thread.
    ret<void> run() const {
        detail::failure f;
        kvt_attention_job_info_t cut = KVT_ATTENTION_JOB_INFO_INIT;
        kvt_status_t status = kvt_attention_job_info(raw_, &cut);
        std::vector<float> scratch(static_cast<std::size_t>(cut.scratch_count));
        for (std::uint32_t step = 0; status == KVT_OK && step < cut.steps; step++)
            status = kvt_attention_job_run(raw_, step, 0, UINT32_MAX, scratch.data(), scratch.size(),
                                 f.out());
        return detail::check(status, f);
    }
    /// Adds what each key got of the attention of a decode that has ended and kept scores.
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

/// Adds keys to the boxes of pages, [pages, key heads, 2 * key dim].
inline ret<void> extend_pages(span<float> boxes, std::uint32_t page_tokens, std::uint32_t first,
                              const kvt_rows_t &keys) {
    detail::failure f;
    const kvt_status_t status =
        kvt_pages_extend(boxes.data(), boxes.size(), page_tokens, first, &keys, f.out());
    return detail::check(status, f);
}

/// The largest product that each query can have with a key of each page: [queries, query heads,
/// count]. Scratch of queries * query heads * (2 * key dim + 96) + 4096 numbers is enough.
inline ret<void> score_pages(const kvt_rows_t &boxes, const kvt_rows_t &queries,
                             std::uint32_t first, std::uint32_t count, span<float> scores,
                             span<float> scratch) {
    detail::failure f;
    const kvt_status_t status =
        kvt_pages_score(&boxes, &queries, first, count, scores.data(), scores.size(),
                        scratch.data(), scratch.size(), f.out());
    return detail::check(status, f);
}

/// Puts attention to other keys together with what is there, by their log-sum-exps.
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

/// Tokens in a buffer: some blocks, ascending, and the last tokens behind them.
struct block_placement {
    span<const std::uint32_t> blocks;
    std::uint32_t block_tokens = 0;
    /// The position of the first of the last tokens.
    std::uint32_t tail_first = 0;
    std::uint32_t tail_tokens = 0;
};

/// An index of rows, and the row of the first query.
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

/// Says of the rows of a buffer what an index (null = all keys) says of positions, for `count`
/// queries from position `first` on.
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

/// Adds sums over the rows of a buffer to those of the tokens that are there, as observe()
/// wants them. `kept` are lists of evicted(), tokens from `from` on came after it; with
/// `select` sums are those of add_sums() of a decode.
inline ret<void> place_sums(const attention &shape, std::uint32_t tokens,
                            const block_placement &placed, span<const float> sums, span<float> out,
                            const placed_index *select = nullptr, std::uint32_t queries = 0,
                            const kept_tokens &kept = {}, std::uint32_t from = 0) {
    detail::failure f;
    const kvt_attention_t of = detail::lower(shape);
    const kvt_block_placement_t in = detail::lower(placed);
    detail::flat_lists lists;
    lists.set(kept);
    const kvt_token_lists_t stayed = lists.lower();
    kvt_resident_tokens_t there = KVT_RESIDENT_TOKENS_INIT;
    there.attention = &of;
    there.kept = kept.empty() ? nullptr : &stayed;
    there.since = from;
    there.tokens = tokens;
    const kvt_index_t by = select == nullptr ? kvt_index_t{} : detail::lower(select->index);
    const kvt_status_t status = kvt_column_sums_place(
        &there, &in, select == nullptr ? nullptr : &by, select == nullptr ? 0 : select->first_query,
        queries, sums.data(), sums.size(), out.data(), out.size(), f.out());
    return detail::check(status, f);
}

/// Numbers of memory that a job, and each of its threads, needs at most.
struct kernel_workspace {
    std::size_t memory = 0, scratch = 0;
};

/// What no problem within some limits needs more of: memory to be lent once.
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

/// Fails unless all numbers are finite.
inline ret<void> check_rows(const kvt_rows_t &rows) {
    detail::failure f;
    const kvt_status_t status = kvt_rows_check(&rows, f.out());
    return detail::check(status, f);
}

/// The sparse policies that can be opened.
inline ret<std::vector<policy_info>> sparse_policies() {
    std::uint64_t count = 0;
    kvt_status_t status = kvt_sparse_count(&count);
    std::vector<policy_info> all;
    for (std::uint64_t i = 0; status == KVT_OK && i < count; ++i) {
        kvt_sparse_info_t c = KVT_SPARSE_INFO_INIT;
        status = kvt_sparse_info(i, &c);
        if (status != KVT_OK) break;
        policy_info one;
        one.name = std::string_view(c.name, static_cast<std::size_t>(c.name_bytes));
        one.about = std::string_view(c.about, static_cast<std::size_t>(c.about_bytes));
        all.push_back(one);
    }
    return detail::give(status, std::move(all));
}

}  // namespace KVTIER_FACE_
}  // namespace kvt

#endif  // KVTIER_SPARSE_HPP
