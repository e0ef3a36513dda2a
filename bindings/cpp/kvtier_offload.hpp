// kvt::offload: layer-wise loading and storing of a session's KV through a ring of buffers.
// kvtier.hpp includes this file.

#ifndef KVTIER_OFFLOAD_HPP
#define KVTIER_OFFLOAD_HPP

#ifndef KVTIER_HPP
#error "include <kvtier/kvtier.hpp>"
#endif

namespace kvt {
inline namespace KVTIER_FACE_ {

/// The attention shape of a model.
struct attention {
    std::uint32_t layers = 0;
    std::uint32_t query_heads = 0;
    std::uint32_t key_heads = 0;
    std::uint32_t key_dim = 0;
    std::uint32_t value_dim = 0;
    /// KVT_ATTENTION_*.
    std::uint32_t kind = KVT_ATTENTION_SPLIT;
    /// Tokens of a block, the unit of loading. With a session: its chunk_tokens.
    std::uint32_t block_tokens = 0;
    /// Longest sequence.
    std::uint32_t max_tokens = 0;
    /// 0 = 1 / sqrt(key_dim).
    float scale = 0;
};

struct offload_opts {
    attention shape;
    /// KVT_DTYPE_* of K and V.
    std::uint32_t dtype = KVT_DTYPE_F16;
    /// Buffers of the ring, 1 to 256. A pass loads up to buffers - 1 layers ahead.
    std::uint32_t buffers = 2;
    /// Tokens of a buffer, 1 to max_tokens.
    std::uint32_t buffer_tokens = 0;
    /// KVT_LEVEL_* at which a put completes.
    std::uint32_t level = KVT_LEVEL_RAM;
    /// Specs of the sparse policies for prefill and for decode; absent = all blocks are loaded.
    std::optional<std::string_view> prefill;
    std::optional<std::string_view> decode;
    /// Audit every n-th load that leaves out blocks; 0 = none.
    std::uint32_t audit_every = 0;
    /// The ring and the tails are in memory of the store's device.
    bool on_device = false;
    /// With on_device: address of device memory that the engine lends for the ring and the tails
    /// until the offload is closed, a multiple of 256. 0 = the device allocates it.
    std::uint64_t memory = 0;
    /// Bytes of `memory`, at least offload::memory_bytes.
    std::uint64_t memory_bytes = 0;
};

/// Place of a call in its sequence.
struct sparse_context {
    /// Position of the first query.
    std::uint32_t first_query = 0;
    /// Tokens of the sequence, those of the queries included.
    std::uint32_t tokens = 0;
    bool is_prefill = false;
    /// Index of this part of the prompt, and the number of parts.
    std::uint32_t part = 0;
    std::uint32_t parts = 1;
};

/// Queries, keys or values, [tokens][heads][dim] without gaps. Change the fields that differ.
inline kvt_rows_t rows(const void *address, std::uint32_t tokens, std::uint32_t heads,
                       std::uint64_t run_bytes, std::uint32_t dtype) noexcept {
    kvt_rows_t r = KVT_ROWS_INIT;
    r.view.address = const_cast<void *>(address); // only read
    r.view.tokens = tokens;
    r.view.heads = heads;
    r.view.run_bytes = run_bytes;
    r.dtype = dtype;
    return r;
}

/// Number of tokens of a layer: in whole blocks in the store, and in the tail that follows.
struct offload_tokens {
    std::uint32_t stored = 0;
    std::uint32_t tail = 0;
};

/// Positions of the retained tokens of a layer: a list for each head, or one for all heads. No list
/// = all tokens are retained.
using kept_tokens = std::vector<std::vector<std::uint32_t>>;

namespace detail {
inline kvt_sparse_context_t lower(const sparse_context &at) noexcept {
    kvt_sparse_context_t c = KVT_SPARSE_CONTEXT_INIT;
    c.is_prefill = at.is_prefill ? 1 : 0;
    c.part = at.part;
    c.parts = at.parts;
    c.first_query = at.first_query;
    c.tokens = at.tokens;
    return c;
}

inline kvt_attention_t lower(const attention &a) noexcept {
    kvt_attention_t c = KVT_ATTENTION_INIT;
    c.layers = a.layers;
    c.query_heads = a.query_heads;
    c.key_heads = a.key_heads;
    c.key_dim = a.key_dim;
    c.value_dim = a.value_dim;
    c.kind = a.kind;
    c.block_tokens = a.block_tokens;
    c.max_tokens = a.max_tokens;
    c.scale = a.scale;
    return c;
}

/// Passes an optional spec. An absent one becomes null; an empty one is passed, and is an error.
inline void spec(const std::optional<std::string_view> &from, const char *&data,
                 std::uint64_t &bytes) noexcept {
    if (!from) return;
    data = from->empty() ? "" : from->data();
    bytes = from->size();
}
}  // namespace detail

struct sparse_custom;

/// Layer-wise KV of one session, in a ring of buffers. It keeps the session open. Loaded rows are
/// valid until their buffer is given back. Calls run one at a time: a second call waits.
class offload : public detail::owner<offload, kvt_offload_t> {
    friend class detail::owner<offload, kvt_offload_t>;
    static void drop(kvt_offload_t *raw) noexcept {
        const kvt_status_t status = kvt_offload_close(&raw);
        if (!detail::ended(status)) detail::report("kvt::offload", status);
    }

    static kvt_offload_opts_t lower(const session &on, const offload_opts &opts,
                                    const kvt_attention_t &shape) noexcept {
        kvt_offload_opts_t c = KVT_OFFLOAD_OPTS_INIT;
        c.flags = opts.on_device ? KVT_OFFLOAD_ON_DEVICE : 0;
        c.memory = opts.memory;
        c.memory_bytes = opts.memory_bytes;
        c.session = static_cast<const detail::owner<session, kvt_session_t> &>(on).get();
        c.attention = &shape;
        c.dtype = opts.dtype;
        c.buffers = opts.buffers;
        c.buffer_tokens = opts.buffer_tokens;
        c.level = opts.level;
        detail::spec(opts.prefill, c.prefill, c.prefill_bytes);
        detail::spec(opts.decode, c.decode, c.decode_bytes);
        c.audit_every = opts.audit_every;
        return c;
    }

    static ret<offload> open_with(const session &on, const offload_opts &opts,
                                  const kvt_sparse_custom_t *prefill,
                                  const kvt_sparse_custom_t *decode) {
        const kvt_attention_t shape = detail::lower(opts.shape);
        kvt_offload_opts_t c = lower(on, opts, shape);
        c.prefill_custom = prefill;
        c.decode_custom = decode;
        detail::failure f;
        kvt_offload_t *raw = nullptr;
        const kvt_status_t status = kvt_offload_open(&c, &raw, f.out());
        return detail::give(status, f, offload::adopt(raw));
    }

public:
    static ret<offload> open(const session &on, const offload_opts &opts) {
        return open_with(on, opts, nullptr, nullptr);
    }
    /// Opens an offload with custom policies. A policy that is not null replaces opts.prefill or
    /// opts.decode.
    static ret<offload> open(const session &on, const offload_opts &opts,
                             std::unique_ptr<sparse_custom> prefill,
                             std::unique_ptr<sparse_custom> decode);
    /// Bytes that the ring and the tails of an offload with these options take.
    static ret<std::uint64_t> memory_bytes(const session &on, const offload_opts &opts) {
        const kvt_attention_t shape = detail::lower(opts.shape);
        const kvt_offload_opts_t c = lower(on, opts, shape);
        detail::failure f;
        std::uint64_t bytes = 0;
        const kvt_status_t status = kvt_offload_memory_bytes(&c, &bytes, f.out());
        return detail::give(status, f, bytes);
    }
    /// Sets the ready event of copies that begin from now on: an event of the store's device, 0 =
    /// none. The caller keeps the event. Release it once another one was set, or the offload was
    /// closed, and all puts and loads that began before have ended.
    ret<void> after(std::uint64_t event) const {
        detail::failure f;
        const kvt_status_t status = kvt_offload_set_ready_event(raw_, event, f.out());
        return detail::check(status, f);
    }
    /// Opens another offload, for a session that was forked from this offload's session.
    ret<offload> fork(const session &on) const {
        detail::failure f;
        kvt_offload_t *raw = nullptr;
        const kvt_status_t status = kvt_offload_fork(
            raw_, static_cast<const detail::owner<session, kvt_session_t> &>(on).get(), &raw,
            f.out());
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
        const kvt_submit_opts_t c = detail::lower(opts);
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
    ret<void> done(std::uint32_t buffer) const {
        detail::failure f;
        const kvt_status_t status = kvt_offload_release(raw_, buffer, f.out());
        return detail::check(status, f);
    }
    /// Begins a pass over all layers in order.
    ret<void> begin(const sparse_context &at) const {
        detail::failure f;
        const kvt_sparse_context_t c = detail::lower(at);
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
        const kvt_sparse_context_t c = detail::lower(at);
        std::uint32_t evicted = 0;
        const kvt_status_t status = kvt_offload_evict(raw_, layer, &c, &evicted, f.out());
        return detail::give(status, f, evicted != 0);
    }
    /// The retained tokens of a layer.
    ret<kept_tokens> kept(std::uint32_t layer) const {
        kept_tokens lists;
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
    ret<std::uint32_t> begin_load(std::uint32_t buffer, std::uint32_t layer,
                                  const std::uint32_t *blocks, std::uint64_t block_count,
                                  std::uint64_t flags, const sparse_context &at,
                                  const kvt_rows_t *query) const {
        detail::failure f;
        const kvt_sparse_context_t c = detail::lower(at);
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

}  // namespace KVTIER_FACE_
}  // namespace kvt

#endif  // KVTIER_OFFLOAD_HPP
