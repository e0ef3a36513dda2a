// The life of a tier.
#include "tier/tier.hpp"

#include <algorithm>

namespace kvtier_llama {

namespace {

constexpr uint32_t default_chunk = 32, most_chunk = 4096;
constexpr uint32_t default_checkpoint = 512;
constexpr uint64_t default_save_wait_ns = 50000000;
constexpr uint64_t close_wait_ns = uint64_t(60) * 1000000000;

void open(tier_t &tier, llama_context *ctx, const kvt_llama_tier_opts_t &opts) {
    tier.ctx = ctx;
    tier.memory = llama_get_memory(ctx);
    tier.n_seq_max = llama_n_seq_max(ctx);
    tier.chunk = opts.chunk_tokens != 0 ? opts.chunk_tokens : default_chunk;
    if (tier.chunk > most_chunk) {
        fail(KVT_E_LIMIT, "a chunk has 4096 tokens at most (chunk_tokens)");
    }
    if ((opts.flags & ~KVT_LLAMA_HOLES) != 0) {
        fail(KVT_E_INVALID, "flags has a bit that is not known");
    }
    const uint32_t checkpoint = opts.checkpoint_tokens != 0 ? opts.checkpoint_tokens : default_checkpoint;
    tier.checkpoint = std::max(tier.chunk, checkpoint / tier.chunk * tier.chunk);
    tier.holes = (opts.flags & KVT_LLAMA_HOLES) != 0;
    tier.save_wait_ns = opts.save_wait_ns != 0 ? opts.save_wait_ns : default_save_wait_ns;
    probe(tier, opts);
    if (tier.holes && (tier.shape.has_states() || tier.shape.has_windows())) {
        fail(KVT_E_UNSUPPORTED, "holes cannot be computed in models with windows or recurrent states: "
                                "leave KVT_LLAMA_HOLES out");
    }
    if (tier.holes && tier.scratch < 0) {
        fail(KVT_E_UNSUPPORTED, "holes need a context with kv_unified and one sequence more than is used");
    }
    open_store_side(tier, opts);
}

} // namespace

} // namespace kvtier_llama

using namespace kvtier_llama;

extern "C" kvt_status_t kvt_llama_tier_open(llama_context *ctx, const kvt_llama_tier_opts_t *opts,
                                            kvt_llama_tier_t **out, kvt_llama_why_t *why) {
    if (!out) {
        tell(why, "there is no place for the tier");
        return KVT_E_INVALID;
    }
    *out = nullptr;
    const kvt_status_t fits = kvt_llama_check(why);
    if (fits != KVT_OK) {
        return fits;
    }
    return guarded(why, [&] {
        if (!ctx || !opts) {
            fail(KVT_E_INVALID, "a context and options are wanted");
        }
        auto tier = std::make_unique<kvt_llama_tier_t>();
        try {
            open(*tier, ctx, *opts);
        } catch (...) {
            std::string ignored;
            close_store_side(*tier, &ignored);
            throw;
        }
        *out = tier.release();
        return KVT_OK;
    });
}

extern "C" kvt_status_t kvt_llama_tier_close(kvt_llama_tier_t **tier, kvt_llama_why_t *why) {
    if (!tier || !*tier) {
        tell(why, "");
        return KVT_OK;
    }
    std::unique_ptr<kvt_llama_tier_t> own(*tier);
    *tier = nullptr;
    kvt_status_t flushed = kvt_llama_flush(own.get(), now_ns() + close_wait_ns, why);
    kvt_llama_why_t said{};
    std::string words;
    const kvt_status_t closed = guarded(&said, [&] { return close_store_side(*own, &words); });
    if (flushed == KVT_OK && closed != KVT_OK) {
        tell(why, words.empty() ? said.text : words.c_str());
        flushed = closed;
    }
    return flushed;
}

extern "C" kvt_status_t kvt_llama_forget(kvt_llama_tier_t *tier, llama_seq_id seq) {
    return guarded(nullptr, [&] {
        if (!tier) {
            return KVT_E_INVALID;
        }
        check_sequence(*tier, seq);
        sequence_t &has = tier->sequences[seq];
        has = sequence_t{};
        has.forgotten = llama_memory_seq_pos_max(tier->memory, seq) >= 0;
        return KVT_OK;
    });
}

extern "C" kvt_status_t kvt_llama_tier_stats(const kvt_llama_tier_t *tier, kvt_llama_tier_stats_t *out) {
    if (!tier || !out) {
        return KVT_E_INVALID;
    }
    *out = tier->stats;
    return KVT_OK;
}

extern "C" kvt_status_t kvt_llama_tier_key(const kvt_llama_tier_t *tier, uint8_t *out_key) {
    return tier && out_key ? kvt_namespace_key(tier->space, out_key) : KVT_E_INVALID;
}
