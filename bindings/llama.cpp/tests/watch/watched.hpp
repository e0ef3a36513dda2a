// A context with a watch, and decoding through the watch.
#ifndef KVTIER_LLAMA_TESTS_WATCH_WATCHED_HPP
#define KVTIER_LLAMA_TESTS_WATCH_WATCHED_HPP

#include "model.hpp"

#include <kvtier/llama_watch.h>

#include <algorithm>

namespace watch_test {

struct watched {
    kvt_llama_watch_t *watch = nullptr;
    context_ptr ctx;
    int32_t rc = 0;
    kvt_llama_why_t why = {};

    watched(llama_model *model, llama_context_params p, const kvt_llama_watch_opts_t *opts = nullptr) {
        CHECK(kvt_llama_watch_open(model, opts, &watch, &why) == KVT_OK);
        CHECK(kvt_llama_watch_params(watch, &p, &why) == KVT_OK);
        ctx = open(model, p);
        CHECK(ctx && kvt_llama_watch_attach(watch, ctx.get(), &why) == KVT_OK);
    }
    watched(const watched &) = delete;
    watched &operator=(const watched &) = delete;
    ~watched() {
        ctx.reset();
        kvt_llama_watch_close(&watch);
    }

    kvt_status_t policy(llama_seq_id seq, const char *spec, uint32_t block_tokens = 0,
                        uint32_t audit_every = 0, uint32_t keep_tokens = 0) {
        kvt_llama_sparse_opts_t opts = {};
        opts.spec = spec;
        opts.block_tokens = block_tokens;
        opts.audit_every = audit_every;
        opts.keep_tokens = keep_tokens;
        return kvt_llama_watch_policy(watch, seq, &opts, &why);
    }

    // Decodes tokens [first, last) in one batch, with logits of the last one.
    kvt_status_t decode(const std::vector<llama_token> &tokens, size_t first, size_t last,
                        llama_seq_id seq = 0, bool wants_logits = true) {
        const size_t n = last - first;
        llama_batch batch = llama_batch_init((int32_t) n, 0, 1);
        batch.n_tokens = (int32_t) n;
        for (size_t i = 0; i < n; i++) {
            batch.token[i] = tokens[first + i];
            batch.pos[i] = (llama_pos) (first + i);
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = seq;
            batch.logits[i] = wants_logits && i + 1 == n;
        }
        const kvt_status_t status = kvt_llama_watch_decode(watch, batch, &rc, &why);
        llama_batch_free(batch);
        if (status != KVT_OK) {
            std::printf("  message: %s\n", why.text);
        }
        return status;
    }

    uint64_t evicted(llama_seq_id seq = 0) const {
        uint64_t tokens = 0;
        CHECK(kvt_llama_watch_evicted(watch, seq, &tokens) == KVT_OK);
        return tokens;
    }

    bool is_exact(llama_seq_id seq = 0) const {
        int exact = -1;
        CHECK(kvt_llama_watch_is_exact(watch, seq, &exact) == KVT_OK);
        return exact != 0;
    }

    kvt_llama_watch_stats_t stats() const {
        kvt_llama_watch_stats_t out = {};
        CHECK(kvt_llama_watch_stats(watch, &out) == KVT_OK);
        return out;
    }
};

// Pseudorandom tokens, equal in every run.
inline std::vector<llama_token> random_tokens(const llama_model *model, size_t n, uint32_t seed = 1) {
    const uint32_t n_vocab = (uint32_t) llama_vocab_n_tokens(llama_model_get_vocab(model));
    const uint32_t limit = std::min(n_vocab, 30000u);
    std::vector<llama_token> out;
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        out.push_back((llama_token) (limit / 8 + (seed >> 8) % (limit / 2)));
    }
    return out;
}

} // namespace watch_test

#endif
