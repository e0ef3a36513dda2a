// The KV tier of one context.
#include "failure.h"
#include "kv_cache.h"

#include <kvtier/llama.h>

#include <cstring>
#include <utility>

namespace {

class tier_cache final : public kv_cache {
  public:
    tier_cache(const options &o, engine &e, std::shared_ptr<kv_store> store)
        : engine_(e), store_(std::move(store)) {
        kvt_llama_tier_opts_t opts = {};
        opts.store = store_->store;
        opts.model_path = o.model.c_str();
        // A sparse policy changes the KV, so the policy's spec is part of the identity.
        const std::string sparse = "sparse " + o.sparse;
        opts.adapters = o.sparse.empty() ? nullptr : sparse.c_str();
        opts.salt = o.salt.empty() ? nullptr : o.salt.c_str();
        const kvt_status_t status = kvt_llama_tier_open(e.context(), &opts, &tier_, &why_);
        if (status != KVT_OK) {
            throw failure(exit_store, std::string("the KV tier cannot be opened: ") +
                                          (why_.text[0] ? why_.text : kvt_status_str(status)) +
                                          " (--no-kv runs without a KV tier)");
        }
    }

    ~tier_cache() override { kvt_llama_tier_close(&tier_, nullptr); }

    prefix_reuse attach(const tokens_t &tokens) override {
        kvt_llama_attached_t got;
        std::memset(&got, 0, sizeof got);
        check(kvt_llama_attach(tier_, 0, tokens.data(), tokens.size(), &got, &why_), "attach");
        prefix_reuse out;
        out.kept = got.kept_tokens;
        out.host = got.host_tokens;
        out.disk = got.disk_tokens;
        out.recomputed = got.recomputed_tokens;
        out.bytes = got.bytes;
        out.ns = got.ns;
        if (got.refused != KVT_OK) {
            out.refused = why_.text[0] ? why_.text : kvt_status_str(got.refused);
        }
        return out;
    }

    void prefill(const tokens_t &tokens, size_t first, size_t upto) override {
        check(kvt_llama_prefill(tier_, 0, tokens.data(), upto, first, &why_), "prefill");
    }

    void decode(llama_token token) override { engine_.decode(&token, 1); }
    size_t max_tokens() const override { return engine_.n_ctx(); }

    void commit(const tokens_t &tokens) override {
        check(kvt_llama_commit(tier_, 0, tokens.data(), tokens.size(), &why_), "commit");
    }

    std::string flush() override {
        const kvt_status_t status = kvt_llama_flush(tier_, flush_deadline_ns(), &why_);
        return status == KVT_OK ? "" : why_.text[0] ? why_.text : kvt_status_str(status);
    }

    cache_totals totals() const override {
        cache_totals out;
        kvt_llama_tier_stats_t t;
        std::memset(&t, 0, sizeof t);
        if (kvt_llama_tier_stats(tier_, &t) == KVT_OK) {
            out.saved_tokens = t.saved_tokens;
            out.saved_bytes = t.saved_bytes;
            out.failed_saves = t.failed_saves;
            out.refused_restores = t.refused_restores;
            out.save_ns = t.commit_ns;
        }
        add_store_totals(*store_, out);
        return out;
    }

  private:
    engine &engine_;
    std::shared_ptr<kv_store> store_;
    kvt_llama_tier_t *tier_ = nullptr;
    kvt_llama_why_t why_ = {};

    void check(kvt_status_t status, const char *what) const {
        if (status != KVT_OK) {
            const std::string failure_reason = engine_.failure_reason();
            throw failure(exit_failed, std::string("kvtier, ") + what + ": " +
                                           (!failure_reason.empty() ? failure_reason
                                            : why_.text[0]   ? why_.text
                                                             : kvt_status_str(status)));
        }
    }
};

} // namespace

void add_store_totals(const kv_store &store, cache_totals &out) {
    kvt_store_stats_t s = KVT_STORE_STATS_INIT;
    if (kvt_store_stats(store.store, &s) == KVT_OK) {
        out.host_bytes = s.host_used_bytes;
        out.host_limit_bytes = s.host_limit_bytes;
        out.disk_bytes = s.disk_used_bytes;
        out.disk_limit_bytes = s.disk_limit_bytes;
        out.to_disk_chunks = s.demoted_chunks;
        out.dropped_chunks = s.dropped_chunks;
        out.disk_evicted_chunks = s.evicted_chunks;
    }
}

std::unique_ptr<kv_cache> open_tier(const options &o, engine &e, std::shared_ptr<kv_store> store) {
    return std::make_unique<tier_cache>(o, e, std::move(store));
}
