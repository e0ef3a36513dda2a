// --no-kv: reuses the prefix that is resident in the context, as engines do, and decodes the rest.
// Overwritten KV is lost.
#include "kv_cache.h"

#include <algorithm>

namespace {

class context_cache final : public kv_cache {
  public:
    context_cache(const options &o, engine &e)
        : engine_(e),
          can_truncate_(!llama_model_is_recurrent(e.model()) && !llama_model_is_hybrid(e.model()) &&
                            llama_model_n_swa(e.model()) == 0 && o.sparse.empty()) {}

    prefix_reuse attach(const tokens_t &tokens) override {
        const size_t most = std::min(context_tokens_.size(), tokens.size() - 1);
        size_t same = 0;
        while (same < most && context_tokens_[same] == tokens[same]) {
            ++same;
        }
        // Recurrent states, windows and sparse contexts cannot be truncated: a prompt either extends all
        // tokens or reuses none.
        if (same < context_tokens_.size() && !can_truncate_) {
            same = 0;
        }
        llama_memory_seq_rm(llama_get_memory(engine_.context()), 0, (llama_pos) same, -1);
        context_tokens_.resize(same);
        prefix_reuse out;
        out.kept = (uint32_t) same;
        return out;
    }

    void prefill(const tokens_t &tokens, size_t first, size_t upto) override {
        engine_.decode(tokens.data() + first, upto - first, upto == tokens.size());
        context_tokens_.assign(tokens.begin(), tokens.begin() + (ptrdiff_t) upto);
    }

    void decode(llama_token token) override { engine_.decode(&token, 1); }
    size_t max_tokens() const override { return engine_.n_ctx(); }

    void commit(const tokens_t &tokens) override { context_tokens_ = tokens; }
    std::string flush() override { return ""; }
    cache_totals totals() const override { return {}; }

  private:
    engine &engine_;
    const bool can_truncate_;
    tokens_t context_tokens_;
};

} // namespace

std::unique_ptr<kv_cache> no_tier(const options &o, engine &e) {
    return std::make_unique<context_cache>(o, e);
}
