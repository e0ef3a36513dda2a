// Decodes on behalf of the tier: prompts with saves in between, and holes.
#include "tier/tier.hpp"

#include <algorithm>

namespace kvtier_llama {

namespace {

/// End of the next batch. It ends at n_batch; at n_ubatch with windows, because they forget older
/// cells; at a checkpoint and at the last chunk with recurrent states, which exist at one position
/// only.
size_t batch_end(const tier_t &tier, size_t at, size_t end) {
    size_t step = llama_n_batch(tier.ctx);
    if (tier.shape.has_windows()) {
        step = std::min<size_t>(step, llama_n_ubatch(tier.ctx));
    }
    size_t next = std::min(at + step, end);
    if (tier.shape.has_states()) {
        const size_t last = full_chunks(tier, end - 1);
        next = std::min(next, at / tier.checkpoint * tier.checkpoint + tier.checkpoint);
        next = at < last ? std::min(next, last) : next;
    }
    return next;
}

struct batch_owner {
    llama_batch batch;
    explicit batch_owner(int32_t tokens) : batch(llama_batch_init(tokens, 0, 1)) {}
    batch_owner(const batch_owner &) = delete;
    batch_owner &operator=(const batch_owner &) = delete;
    ~batch_owner() { llama_batch_free(batch); }
};

} // namespace

int decode(tier_t &tier, llama_seq_id seq, const prompt_t &of, size_t first, size_t end, bool logits) {
    const size_t most = llama_n_batch(tier.ctx);
    batch_owner own(int32_t(std::min(end - first, most)));
    for (size_t at = first; at < end;) {
        const size_t count = std::min(end - at, most);
        own.batch.n_tokens = int32_t(count);
        for (size_t i = 0; i < count; i++) {
            own.batch.token[i] = of.tokens[at + i];
            own.batch.pos[i] = of.position(at + i);
            own.batch.n_seq_id[i] = 1;
            own.batch.seq_id[i][0] = seq;
            own.batch.logits[i] = logits && at + i + 1 == end;
        }
        const uint64_t start = now_ns();
        if (const int status = llama_decode(tier.ctx, own.batch)) {
            return status;
        }
        llama_synchronize(tier.ctx);
        const uint64_t took = std::max<uint64_t>(now_ns() - start, 1);
        kvt_namespace_observe_prefill(tier.kv_namespace, at, count, took, nullptr);
        tier.stats.decoded_tokens += count;
        at += count;
    }
    return 0;
}

} // namespace kvtier_llama

using namespace kvtier_llama;

extern "C" kvt_status_t kvt_llama_prefill(kvt_llama_tier_t *tier, llama_seq_id seq,
                                          const llama_token *tokens, size_t n_tokens, size_t first,
                                          kvt_llama_why_t *why) {
    return guarded(why, [&] {
        if (!tier || !tokens || first >= n_tokens || n_tokens > INT32_MAX) {
            fail(KVT_E_INVALID, "tier or tokens is null, or first is not below n_tokens: at least one "
                                "token is required");
        }
        check_sequence(*tier, seq);
        const prompt_t of{tokens, n_tokens};
        check_tokens(*tier, of);
        for (size_t at = first; at < n_tokens;) {
            const size_t end = batch_end(*tier, at, n_tokens);
            const int status = decode(*tier, seq, of, at, end, end == n_tokens);
            if (status != 0) {
                fail(status == 1 ? KVT_E_BUDGET : KVT_E_STATE,
                     status == 1 ? "the KV cache has no free cells for these tokens: free sequences, or make "
                                   "the context with a larger n_ctx"
                                 : "llama_decode failed with " + std::to_string(status));
            }
            at = end;
            const uint64_t start = now_ns();
            const kvt_status_t saved = guarded(nullptr, [&] {
                commit(*tier, seq, of.prefix(at), true);
                return KVT_OK;
            });
            // A failed save must not fail the prompt.
            tier->stats.failed_saves += saved != KVT_OK;
            tier->stats.commit_ns += now_ns() - start;
        }
        return KVT_OK;
    });
}
