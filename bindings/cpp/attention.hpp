/// @file
/// Attention on the processor: rows of queries, keys and values, and jobs that compute with them.
///
/// The kernels compute exact attention over the keys that a selection lists: prefill, decode, and sums
/// of attention weights by key. A job is divided into steps and items, so that an engine runs it on its
/// own threads.
///
/// Life cycle: attention_job::prefill or decode, run for each step, then the destructor. Outputs and
/// inputs stay in place until the job is closed.
///
///     // Decode: one query of 8 heads over 4096 keys of 2 heads, 128 elements each.
///     kvt::attention_args args;
///     args.queries = kvt::rows(query, 1, 8, 128 * sizeof(float), KVT_DTYPE_F32);
///     args.keys = kvt::rows(keys, 4096, 2, 128 * 2, KVT_DTYPE_F16);
///     args.values = kvt::rows(values, 4096, 2, 128 * 2, KVT_DTYPE_F16);
///     args.first_query = 4095;
///     std::vector<float> out(8 * 128), lse(8), memory(kvt::attention_job::decode_memory(args));
///     kvt::attention_job::decode(args, out, lse, memory).run();

#ifndef KVTIER_ATTENTION_HPP
#define KVTIER_ATTENTION_HPP

#include <kvtier/attention.h>
#include <kvtier/memory.hpp>

namespace kvt {
inline namespace KVTIER_ERRORS_ {

// [kvt_attention_t: by generate.py]
/// Attention shape of a model.
struct attention {
    /// 1 to 2048.
    std::uint32_t layers = 0;
    /// 1 to 1024, a multiple of key_heads.
    std::uint32_t query_heads = 0;
    /// At least 1; 1 with KVT_ATTENTION_LATENT.
    std::uint32_t key_heads = 0;
    /// Elements of a query and key head, 1 to 2048.
    std::uint32_t key_dim = 0;
    /// Elements of a value head, 1 to 2048; at most key_dim with KVT_ATTENTION_LATENT.
    std::uint32_t value_dim = 0;
    /// KVT_ATTENTION_SPLIT, KVT_ATTENTION_LATENT.
    kvt_attention_kind_t kind = KVT_ATTENTION_SPLIT;
    /// Tokens of a block, the unit of loading: 1 to 2^20. With a session: its chunk_tokens.
    std::uint32_t block_tokens = 0;
    /// Longest sequence, 1 to 2^30 tokens.
    std::uint32_t max_tokens = 0;
    /// Factor of query-key products, finite; 0 = 1 / sqrt(key_dim).
    float scale = 0;

    kvt_attention_t to_c() const noexcept {
        kvt_attention_t c = KVT_ATTENTION_INIT;
        c.layers = layers;
        c.query_heads = query_heads;
        c.key_heads = key_heads;
        c.key_dim = key_dim;
        c.value_dim = value_dim;
        c.kind = kind;
        c.block_tokens = block_tokens;
        c.max_tokens = max_tokens;
        c.scale = scale;
        return c;
    }
};
// [end]

// [kvt_sparse_context_t: by generate.py]
/// Place of a call in its sequence.
struct sparse_context {
    /// True = prefill, false = decode.
    bool is_prefill = false;
    /// Index of this part of the prompt, below `parts`.
    std::uint32_t part = 0;
    /// Parts in which the prompt is computed; 0 = 1.
    std::uint32_t parts = 0;
    /// Position of the first query, at most `tokens`.
    std::uint32_t first_query = 0;
    /// Tokens of the sequence, those of the queries included.
    std::uint32_t tokens = 0;

    kvt_sparse_context_t to_c() const noexcept {
        kvt_sparse_context_t c = KVT_SPARSE_CONTEXT_INIT;
        c.is_prefill = is_prefill ? 1 : 0;
        c.part = part;
        c.parts = parts;
        c.first_query = first_query;
        c.tokens = tokens;
        return c;
    }
};
// [end]

/// Queries, keys or values, [tokens][heads][dim] without gaps. Change the fields that differ.
inline kvt_rows_t rows(const void *address, std::uint32_t tokens, std::uint32_t heads,
                       std::uint64_t run_bytes, kvt_dtype_t dtype) noexcept {
    kvt_rows_t r = KVT_ROWS_INIT;
    r.view.address = const_cast<void *>(address); // only read
    r.view.tokens = tokens;
    r.view.heads = heads;
    r.view.run_bytes = run_bytes;
    r.dtype = dtype;
    return r;
}

// [kvt_attention_args_t: by generate.py]
/// Input of an attention kernel. Queries see the keys up to their own position.
struct attention_args {
    /// [queries, query_heads, key_dim].
    kvt_rows_t queries = KVT_ROWS_INIT;
    /// [keys, key_heads, key_dim].
    kvt_rows_t keys = KVT_ROWS_INIT;
    /// [keys, key_heads, value_dim]. Latent rows: the first elements of the keys, at the same
    /// address.
    kvt_rows_t values = KVT_ROWS_INIT;
    /// Positions of the keys to use, from sparse_index::to_c; null = all.
    const kvt_index_t *select = nullptr;
    /// Position of the first query.
    std::uint32_t first_query = 0;
    /// Position of the first key. If keys come in pieces, kvt_attention_merge merges their results.
    std::uint32_t first_key = 0;
    /// Factor of query-key products, finite; 0 = 1 / sqrt(key_dim).
    float scale = 0;

    kvt_attention_args_t to_c() const noexcept {
        kvt_attention_args_t c = KVT_ATTENTION_ARGS_INIT;
        c.queries = &queries;
        c.keys = &keys;
        c.values = &values;
        c.select = select;
        c.first_query = first_query;
        c.first_key = first_key;
        c.scale = scale;
        return c;
    }
};
// [end]

namespace detail {
/// The data of an optional array: null for an empty span.
inline float *or_null(span<float> of) noexcept { return of.empty() ? nullptr : of.data(); }
}  // namespace detail

/// An attention computation, cut into items that threads of the engine run. Run each item once, and
/// those of a step after all items of the step before. The job borrows its input and output until
/// it is closed; closing waits for running items.
class attention_job : public detail::owner<attention_job, kvt_attention_job_t> {
    friend class detail::owner<attention_job, kvt_attention_job_t>;
    static void drop(kvt_attention_job_t *raw) noexcept {
        const kvt_status_t status = kvt_attention_job_close(&raw);
        if (!detail::ended(status)) detail::report("kvt::attention_job", status);
    }

public:
    /// Computes the attention of a prompt or of a part of one. `out` is [queries, query heads,
    /// value dim], `lse` is [queries, query heads] log-sum-exps or empty.
    static ret<attention_job> prefill(const attention_args &args, span<float> out,
                                      span<float> lse = {}) {
        detail::failure f;
        const kvt_attention_args_t p = args.to_c();
        kvt_attention_job_t *raw = nullptr;
        const kvt_status_t status = kvt_prefill_open(
            &p, out.data(), out.size(), detail::or_null(lse), lse.size(), &raw, f.out());
        return detail::give(status, f, attention_job::adopt(raw));
    }
    /// Number of floats of memory that a decode needs.
    static ret<std::size_t> decode_memory(const attention_args &args,
                                          bool keeps_scores = false) {
        detail::failure f;
        const kvt_attention_args_t p = args.to_c();
        std::uint64_t count = 0;
        const kvt_status_t status = kvt_decode_memory(&p, flags(keeps_scores), &count, f.out());
        return detail::give(status, f, static_cast<std::size_t>(count));
    }
    /// Computes the attention of the next token or of a few, in two steps. decode_sums() needs
    /// keeps_scores.
    static ret<attention_job> decode(const attention_args &args, span<float> out,
                                     span<float> lse, span<float> memory,
                                     bool keeps_scores = false) {
        detail::failure f;
        const kvt_attention_args_t p = args.to_c();
        kvt_attention_job_t *raw = nullptr;
        const kvt_status_t status =
            kvt_decode_open(&p, flags(keeps_scores), out.data(), out.size(), lse.data(),
                            lse.size(), memory.data(), memory.size(), &raw, f.out());
        return detail::give(status, f, attention_job::adopt(raw));
    }
    /// Sums, for each key, the attention that it received from a prompt's queries from `first` on.
    /// `lse` are the log-sum-exps of prefill(). `sums` is [query heads, keys], or [keys] without
    /// by_head.
    static ret<attention_job> column_sums(const attention_args &args, span<const float> lse,
                                          span<float> sums, bool by_head = true,
                                          std::uint32_t first = 0) {
        detail::failure f;
        const kvt_attention_args_t p = args.to_c();
        kvt_attention_job_t *raw = nullptr;
        const kvt_status_t status =
            kvt_column_sums_open(&p, lse.data(), lse.size(), first, by_head ? KVT_SUMS_BY_HEAD : 0,
                                 sums.data(), sums.size(), &raw, f.out());
        return detail::give(status, f, attention_job::adopt(raw));
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
            kvt_attention_job_run(raw_, step, first, items, scratch.data(), scratch.size(),
                                  f.out());
        return detail::check(status, f);
    }
    /// Runs all items on the calling thread.
    ret<void> run() const {
        detail::failure f;
        kvt_attention_job_info_t info = KVT_ATTENTION_JOB_INFO_INIT;
        kvt_status_t status = kvt_attention_job_info(raw_, &info);
        std::vector<float> scratch(static_cast<std::size_t>(info.scratch_count));
        for (std::uint32_t step = 0; status == KVT_OK && step < info.steps; step++)
            status = kvt_attention_job_run(raw_, step, 0, UINT32_MAX, scratch.data(),
                                           scratch.size(), f.out());
        return detail::check(status, f);
    }
    /// Adds, for each key, the attention that it received in a decode with keeps_scores. All items
    /// of the decode must have ended.
    ret<void> decode_sums(span<float> sums, bool by_head = true) const {
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

/// Fails unless all elements and scales of the rows are finite.
inline ret<void> check_rows(const kvt_rows_t &rows) {
    detail::failure f;
    const kvt_status_t status = kvt_rows_check(&rows, f.out());
    return detail::check(status, f);
}

}  // namespace KVTIER_ERRORS_
}  // namespace kvt

#endif  // KVTIER_ATTENTION_HPP
