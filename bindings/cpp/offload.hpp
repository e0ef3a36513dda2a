/// @file
/// kvt::offload: layer-wise offload of the KV of one session, for contexts larger than the engine's
/// memory.
///
/// An offload keeps the KV of a session in a store, and a ring of buffers for the layers that are being
/// computed. Loads of the next layers run while a layer is computed. With a sparse policy only the
/// blocks that it selects are loaded.
///
/// Life cycle: offload::open, put for each layer of the prompt, then for each step of decode begin, take
/// and give_back for each layer, put for the new token. The destructor closes.
///
///     kvt::offload_opts opts;
///     opts.attention = shape;
///     opts.buffers = 3;
///     opts.buffer_tokens = 4096;
///     opts.decode = "quest(budget=2048)";
///     const kvt::offload offload = kvt::offload::open(session, opts);
///     kvt::sparse_context step;
///     step.tokens = 65536;
///     step.first_query = 65535;
///     offload.begin(step); // loads begin
///     for (std::uint32_t layer = 0; layer < shape.layers; layer++) {
///         const kvt_offload_kv_t kv = offload.take(layer, &rows);
///         use(kv.k, kv.v); // attention over these rows
///         offload.give_back(layer);
///     }

#ifndef KVTIER_OFFLOAD_HPP
#define KVTIER_OFFLOAD_HPP

#include <kvtier/offload.h>
#include <kvtier/session.hpp>
#include <kvtier/sparse.hpp>

namespace kvt {
inline namespace KVTIER_ERRORS_ {

// [kvt_offload_opts_t: by generate.py]
/// Options of kvt_offload_open.
struct offload_opts {
    /// The ring and the tails are in memory of the store's device.
    bool on_device = false;
    /// Shape of the attention; block_tokens must be the chunk_tokens of the session's namespace.
    kvt::attention attention{};
    /// Elements of K and V. KVT_DTYPE_*.
    kvt_dtype_t dtype = KVT_DTYPE_F16;
    /// Buffers of the ring, 1 to 256. A pass loads up to buffers - 1 layers ahead.
    std::uint32_t buffers = 2;
    /// Tokens of a buffer, 1 to max_tokens, rounded up to blocks; the tail has room in addition.
    std::uint32_t buffer_tokens = 0;
    /// Level at which a put completes. KVT_LEVEL_*.
    kvt_level_t level = KVT_LEVEL_RAM;
    /// Spec of the sparse policy for prefill; empty = all blocks are loaded.
    std::string_view prefill{};
    /// Spec of the sparse policy for decode; empty = all blocks are loaded.
    std::string_view decode{};
    /// Audit every n-th load that leaves out blocks; 0 = none. An audit loads the keys of all
    /// blocks, and compares the selection with the attention of the layer's own queries.
    std::uint32_t audit_every = 0;
    /// With `on_device`: device address of memory that the engine lends for the ring and the tails
    /// until the offload is closed, a multiple of 256. 0 = the device allocates it.
    std::uint64_t memory = 0;
    /// Bytes of `memory`, at least kvt_offload_memory_bytes.
    std::uint64_t memory_bytes = 0;

    kvt_offload_opts_t to_c(kvt_attention_t &attention_c) const noexcept {
        kvt_offload_opts_t c = KVT_OFFLOAD_OPTS_INIT;
        if (on_device) c.flags |= KVT_OFFLOAD_ON_DEVICE;
        attention_c = attention.to_c();
        c.attention = &attention_c;
        c.dtype = dtype;
        c.buffers = buffers;
        c.buffer_tokens = buffer_tokens;
        c.level = level;
        detail::text(prefill, c.prefill, c.prefill_bytes);
        detail::text(decode, c.decode, c.decode_bytes);
        c.audit_every = audit_every;
        c.memory = memory;
        c.memory_bytes = memory_bytes;
        return c;
    }
};
// [end]

/// Number of tokens of a layer: in whole blocks in the store, and in the tail that follows.
struct offload_tokens {
    std::uint32_t stored = 0;
    std::uint32_t tail = 0;
};

/// Layer-wise KV of one session, in a ring of buffers. It keeps the session open. Loaded rows are
/// valid until their buffer is given back. Calls run one at a time: a second call waits.
class offload : public detail::owner<offload, kvt_offload_t> {
    friend class detail::owner<offload, kvt_offload_t>;
    static void drop(kvt_offload_t *raw) noexcept {
        const kvt_status_t status = kvt_offload_close(&raw);
        if (!detail::ended(status)) detail::report("kvt::offload", status);
    }

public:
    static ret<offload> open(const session &on, const offload_opts &opts) {
        return open_with(on, opts, nullptr, nullptr);
    }
    /// Opens an offload with custom policies. A policy that is not null replaces opts.prefill or
    /// opts.decode.
    static ret<offload> open(const session &on, const offload_opts &opts,
                             std::unique_ptr<sparse_custom> prefill,
                             std::unique_ptr<sparse_custom> decode) {
        std::unique_ptr<detail::sparse_box> boxes[2];
        kvt_sparse_custom_t tables[2] = {KVT_SPARSE_CUSTOM_INIT, KVT_SPARSE_CUSTOM_INIT};
        std::unique_ptr<sparse_custom> *const own[2] = {&prefill, &decode};
        for (int i = 0; i < 2; i++) {
            if (!*own[i]) continue;
            boxes[i].reset(new detail::sparse_box{
                std::move(**own[i]), opts.attention.layers, opts.attention.query_heads,
                opts.attention.value_dim, {}, {}, {}, {}});
            tables[i] = boxes[i]->to_c();
        }
        ret<offload> opened = open_with(on, opts, boxes[0] ? &tables[0] : nullptr,
                                        boxes[1] ? &tables[1] : nullptr);
        if (opened) {
            // The library owns the boxes now.
            for (auto &box : boxes) (void)box.release();
        }
        return opened;
    }
    /// Bytes that the ring and the tails of an offload with these options take.
    static ret<std::uint64_t> memory_bytes(const session &on, const offload_opts &opts) {
        kvt_attention_t shape;
        kvt_offload_opts_t c = opts.to_c(shape);
        c.session = on.get();
        detail::failure f;
        std::uint64_t bytes = 0;
        const kvt_status_t status = kvt_offload_memory_bytes(&c, &bytes, f.out());
        return detail::give(status, f, bytes);
    }
    /// Sets the ready event of copies that begin from now on: an event of the store's device, 0 =
    /// none. The caller keeps the event. Release it once another one was set, or the offload was
    /// closed, and all puts and loads that began before have ended.
    ret<void> set_ready_event(std::uint64_t event) const {
        detail::failure f;
        const kvt_status_t status = kvt_offload_set_ready_event(raw_, event, f.out());
        return detail::check(status, f);
    }
    /// Opens another offload, for a session that was forked from this offload's session.
    ret<offload> fork(const session &on) const {
        detail::failure f;
        kvt_offload_t *raw = nullptr;
        const kvt_status_t status = kvt_offload_fork(raw_, on.get(), &raw, f.out());
        return detail::give(status, f, offload::adopt(raw));
    }
    ret<void> close() { return detail::check(kvt_offload_close(&raw_)); }
    ret<offload_tokens> tokens(std::uint32_t layer) const {
        offload_tokens n;
        const kvt_status_t status = kvt_offload_tokens(raw_, layer, &n.stored, &n.tail);
        return detail::give(status, n);
    }
    ret<kvt_offload_stats_t> stats() const {
        kvt_offload_stats_t stats = KVT_OFFLOAD_STATS_INIT;
        const kvt_status_t status = kvt_offload_stats(raw_, &stats);
        return detail::give(status, stats);
    }
    /// Drops the tokens from position `tokens` on, in all layers. Call it before session::truncate.
    ret<void> truncate(std::uint32_t tokens) const {
        detail::failure f;
        const kvt_status_t status = kvt_offload_truncate(raw_, tokens, f.out());
        return detail::check(status, f);
    }
    /// Resumes from tokens that the store has, in whole blocks. Call it before the first put.
    ret<void> resume(std::uint32_t tokens) const {
        detail::failure f;
        const kvt_status_t status = kvt_offload_resume(raw_, tokens, f.out());
        return detail::check(status, f);
    }
    /// Puts K and V of the next tokens of a layer. The release of the op ends the use of the views.
    /// The op is empty if their use has already ended. `v` is null for a latent.
    ret<op> put(std::uint32_t layer, std::uint32_t first, std::uint32_t tokens,
                const kvt_view_t &k, const kvt_view_t *v, const submit_opts &opts = {}) const {
        detail::failure f;
        const kvt_submit_opts_t c = opts.to_c();
        kvt_op_t *raw = nullptr;
        const kvt_status_t status =
            kvt_offload_put(raw_, layer, first, tokens, &k, v, &c, &raw, f.out());
        return detail::give(status, f, op::adopt(raw));
    }
    /// Begins to load the blocks of a layer and its tail into a buffer; returns the number of
    /// blocks.
    ret<std::uint32_t> load(std::uint32_t buffer, std::uint32_t layer, const sparse_context &at,
                            const kvt_rows_t *query = nullptr) const {
        return begin_load(buffer, layer, nullptr, 0, 0, at, query);
    }
    /// Begins to load from these blocks only, ascending, without the tail.
    ret<std::uint32_t> load(std::uint32_t buffer, std::uint32_t layer,
                            span<const std::uint32_t> blocks, const sparse_context &at,
                            const kvt_rows_t *query = nullptr) const {
        static constexpr std::uint32_t none = 0; // null means all blocks
        return begin_load(buffer, layer, blocks.empty() ? &none : blocks.data(), blocks.size(),
                          0, at, query);
    }
    /// Begins to load blocks that the caller has chosen, ascending, and the tail. No policy
    /// selects; a query is used for audits only.
    ret<std::uint32_t> load_chosen(std::uint32_t buffer, std::uint32_t layer,
                                   span<const std::uint32_t> blocks, const sparse_context &at,
                                   const kvt_rows_t *query = nullptr) const {
        return begin_load(buffer, layer, blocks.data(), blocks.size(), KVT_OFFLOAD_LOAD_CHOSEN, at,
                          query);
    }
    /// Waits for the load of a buffer, and appends the layer's tail as it is now.
    ret<kvt_offload_kv_t> wait(std::uint32_t buffer) const {
        detail::failure f;
        kvt_offload_kv_t kv = KVT_OFFLOAD_KV_INIT;
        const kvt_status_t status = kvt_offload_wait(raw_, buffer, &kv, f.out());
        return detail::give(status, f, kv);
    }
    /// Frees a buffer that the engine does not read any more.
    ret<void> release_buffer(std::uint32_t buffer) const {
        detail::failure f;
        const kvt_status_t status = kvt_offload_release(raw_, buffer, f.out());
        return detail::check(status, f);
    }
    /// Begins a pass over all layers in order.
    ret<void> begin(const sparse_context &at) const {
        detail::failure f;
        const kvt_sparse_context_t c = at.to_c();
        const kvt_status_t status = kvt_offload_begin(raw_, &c, f.out());
        return detail::check(status, f);
    }
    /// Waits for the next layer of the pass: its blocks and its tail. Policies select by `query`.
    ret<kvt_offload_kv_t> take(std::uint32_t layer, const kvt_rows_t *query = nullptr) const {
        detail::failure f;
        kvt_offload_kv_t kv = KVT_OFFLOAD_KV_INIT;
        const kvt_status_t status = kvt_offload_take(raw_, layer, query, &kv, f.out());
        return detail::give(status, f, kv);
    }
    /// Gives back the layer that was taken, and loads a later layer into its buffer.
    ret<void> give_back(std::uint32_t layer) const {
        detail::failure f;
        const kvt_status_t status = kvt_offload_give_back(raw_, layer, f.out());
        return detail::check(status, f);
    }
    /// The blocks of a buffer, ascending.
    ret<std::vector<std::uint32_t>> blocks(std::uint32_t buffer) const {
        std::vector<std::uint32_t> list;
        const kvt_status_t status =
            numbers(list, [&](std::uint32_t *to, std::uint64_t capacity, std::uint64_t *count) {
                return kvt_offload_blocks(raw_, buffer, to, capacity, count);
            });
        return detail::give(status, std::move(list));
    }
    /// The rows of a buffer that hold tokens at these positions, both ascending. Positions that are
    /// not in the buffer are skipped.
    ret<std::vector<std::uint32_t>> rows_of(std::uint32_t buffer,
                                            span<const std::uint32_t> positions) const {
        std::vector<std::uint32_t> found(positions.size() + 1); // data() is never null
        std::uint64_t count = 0;
        const kvt_status_t status = kvt_offload_rows(raw_, buffer, positions.data(),
                                                     positions.size(), found.data(), &count);
        found.resize(static_cast<std::size_t>(count));
        return detail::give(status, std::move(found));
    }
    /// Passes the attention that each retained key received from some queries to the policies: a
    /// row of `tokens` sums for each query head, or one row for all.
    ret<void> observe(std::uint32_t layer, std::uint32_t queries, span<const float> sums,
                      std::uint32_t tokens) const {
        detail::failure f;
        const kvt_status_t status = kvt_offload_observe(raw_, layer, queries, sums.data(),
                                                        sums.size(), tokens, f.out());
        return detail::check(status, f);
    }
    /// Lets the policy evict tokens of a layer, if it has to; returns whether it evicted some.
    ret<bool> evict(std::uint32_t layer, const sparse_context &at) const {
        detail::failure f;
        const kvt_sparse_context_t c = at.to_c();
        std::uint32_t evicted = 0;
        const kvt_status_t status = kvt_offload_evict(raw_, layer, &c, &evicted, f.out());
        return detail::give(status, f, evicted != 0);
    }
    /// The retained tokens of a layer.
    ret<token_lists> retained(std::uint32_t layer) const {
        token_lists lists;
        std::uint64_t count = 0;
        std::uint32_t heads = 0;
        kvt_status_t status = kvt_offload_retained(raw_, layer, 0, nullptr, 0, &count, &heads);
        for (std::uint32_t head = 0; status == KVT_OK && head < heads; head++) {
            lists.emplace_back();
            status = numbers(lists.back(), [&](std::uint32_t *to, std::uint64_t capacity,
                                               std::uint64_t *length) {
                return kvt_offload_retained(raw_, layer, head, to, capacity, length, nullptr);
            });
        }
        return detail::give(status, std::move(lists));
    }
    /// Passes keys to a policy with rows of its own, from position `first` on. Call it before the
    /// put of these tokens.
    ret<void> append_keys(std::uint32_t layer, std::uint32_t first, const kvt_rows_t &keys) const {
        detail::failure f;
        const kvt_status_t status = kvt_offload_append_keys(raw_, layer, first, &keys, f.out());
        return detail::check(status, f);
    }
    /// Passes scores of the engine to a policy, for the next load of a layer.
    ret<void> score(std::uint32_t layer, bool is_prefill, span<const float> scores) const {
        detail::failure f;
        const kvt_status_t status = kvt_offload_score(raw_, layer, is_prefill ? 1 : 0,
                                                      scores.data(), scores.size(), f.out());
        return detail::check(status, f);
    }

private:
    static ret<offload> open_with(const session &on, const offload_opts &opts,
                                  const kvt_sparse_custom_t *prefill,
                                  const kvt_sparse_custom_t *decode) {
        kvt_attention_t shape;
        kvt_offload_opts_t c = opts.to_c(shape);
        c.session = on.get();
        c.prefill_custom = prefill;
        c.decode_custom = decode;
        detail::failure f;
        kvt_offload_t *raw = nullptr;
        const kvt_status_t status = kvt_offload_open(&c, &raw, f.out());
        return detail::give(status, f, offload::adopt(raw));
    }
    ret<std::uint32_t> begin_load(std::uint32_t buffer, std::uint32_t layer,
                                  const std::uint32_t *blocks, std::uint64_t block_count,
                                  std::uint64_t flags, const sparse_context &at,
                                  const kvt_rows_t *query) const {
        detail::failure f;
        const kvt_sparse_context_t c = at.to_c();
        std::uint32_t count = 0;
        const kvt_status_t status = kvt_offload_load(raw_, buffer, layer, blocks, block_count,
                                                     flags, query, &c, &count, f.out());
        return detail::give(status, f, count);
    }
    /// Reads a list from a call that reports its length. Grows the list until it fits.
    template <class Call>
    static kvt_status_t numbers(std::vector<std::uint32_t> &list, Call call) {
        std::uint64_t count = 0;
        list.resize(64);
        for (;;) {
            const kvt_status_t status = call(list.data(), list.size(), &count);
            list.resize(static_cast<std::size_t>(count));
            if (status != KVT_E_TOO_SMALL) return status;
        }
    }
};

}  // namespace KVTIER_ERRORS_
}  // namespace kvt

#endif  // KVTIER_OFFLOAD_HPP
