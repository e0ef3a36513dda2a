// Opening and closing a tier, and its small queries.
#include "tier/tier.hpp"

#include <algorithm>

namespace kvtier_llama {

namespace {

constexpr uint32_t max_chunk = 4096;
constexpr uint32_t default_checkpoint = 512;
constexpr uint64_t default_save_wait_ns = 50000000;
constexpr uint64_t close_wait_ns = uint64_t(60) * 1000000000;

void open(tier_t &tier, llama_context *ctx, const kvt_llama_tier_opts_t &opts) {
    tier.ctx = ctx;
    tier.memory = llama_get_memory(ctx);
    tier.n_seq_max = llama_n_seq_max(ctx);
    if (opts.chunk_tokens > max_chunk) {
        fail(KVT_E_LIMIT,
             "chunk_tokens is " + std::to_string(opts.chunk_tokens) + ", at most 4096 is allowed");
    }
    if ((opts.flags & ~KVT_LLAMA_HOLES) != 0) {
        fail(KVT_E_INVALID, "flags is " + std::to_string(opts.flags) + ", only KVT_LLAMA_HOLES is allowed");
    }
    tier.holes = (opts.flags & KVT_LLAMA_HOLES) != 0;
    tier.save_wait_ns = opts.save_wait_ns != 0 ? opts.save_wait_ns : default_save_wait_ns;
    probe(tier, opts);
    const uint32_t checkpoint = opts.checkpoint_tokens != 0 ? opts.checkpoint_tokens : default_checkpoint;
    tier.checkpoint = std::max(tier.chunk, checkpoint / tier.chunk * tier.chunk);
    if (tier.holes && (tier.shape.has_states() || tier.shape.has_windows())) {
        fail(KVT_E_UNSUPPORTED, "KVT_LLAMA_HOLES does not work with windows or recurrent states: "
                                "do not set it for this model");
    }
    if (tier.holes && tier.scratch < 0) {
        fail(KVT_E_UNSUPPORTED,
             "KVT_LLAMA_HOLES needs a scratch sequence: set kv_unified and one more n_seq_max");
    }
    open_tier_store(tier, opts);
}

} // namespace

} // namespace kvtier_llama

using namespace kvtier_llama;

extern "C" kvt_status_t kvt_llama_tier_open(llama_context *ctx, const kvt_llama_tier_opts_t *opts,
                                            kvt_llama_tier_t **out, kvt_llama_why_t *why) {
    if (!out) {
        set_why(why, "out is null: pass the address of a tier pointer");
        return KVT_E_INVALID;
    }
    *out = nullptr;
    const kvt_status_t fits = kvt_llama_check(why);
    if (fits != KVT_OK) {
        return fits;
    }
    return guarded(why, [&] {
        if (!ctx || !opts) {
            fail(KVT_E_INVALID, "ctx or opts is null: both are required");
        }
        auto tier = std::make_unique<kvt_llama_tier_t>();
        try {
            open(*tier, ctx, *opts);
        } catch (...) {
            std::string ignored;
            close_tier_store(*tier, &ignored);
            throw;
        }
        *out = tier.release();
        return KVT_OK;
    });
}

extern "C" kvt_status_t kvt_llama_tier_close(kvt_llama_tier_t **tier, kvt_llama_why_t *why) {
    if (!tier || !*tier) {
        set_why(why, "");
        return KVT_OK;
    }
    std::unique_ptr<kvt_llama_tier_t> own(*tier);
    *tier = nullptr;
    kvt_status_t flushed = kvt_llama_flush(own.get(), now_ns() + close_wait_ns, why);
    kvt_llama_why_t close_why{};
    std::string message;
    const kvt_status_t closed = guarded(&close_why, [&] { return close_tier_store(*own, &message); });
    if (flushed == KVT_OK && closed != KVT_OK) {
        set_why(why, message.empty() ? close_why.text : message.c_str());
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
    return tier && out_key ? kvt_namespace_key(tier->kv_namespace, out_key) : KVT_E_INVALID;
}
