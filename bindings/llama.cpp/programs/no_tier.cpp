// The same run without kvtier, as engines do it: what the context still holds of a prompt is used, the
// rest is decoded, and what is overwritten is lost.
#include "keeper.h"

#include <algorithm>

namespace {

class plain final : public keeper {
  public:
    plain(const options &o, engine &e)
        : engine_(e), cuts_(!llama_model_is_recurrent(e.model()) && !llama_model_is_hybrid(e.model()) &&
                            llama_model_n_swa(e.model()) == 0 && o.sparse.empty()) {}

    found attach(const tokens_t &tokens) override {
        const size_t most = std::min(held_.size(), tokens.size() - 1);
        size_t same = 0;
        while (same < most && held_[same] == tokens[same]) {
            ++same;
        }
        // States, windows and what a policy has thinned out cannot go back: they serve only what goes on
        // right behind them.
        if (same < held_.size() && !cuts_) {
            same = 0;
        }
        llama_memory_seq_rm(llama_get_memory(engine_.context()), 0, (llama_pos) same, -1);
        held_.resize(same);
        found out;
        out.kept = (uint32_t) same;
        return out;
    }

    void prefill(const tokens_t &tokens, size_t first, size_t upto) override {
        engine_.decode(tokens.data() + first, upto - first, upto == tokens.size());
        held_.assign(tokens.begin(), tokens.begin() + (ptrdiff_t) upto);
    }

    void decode(llama_token token) override { engine_.decode(&token, 1); }
    size_t most_tokens() const override { return engine_.n_ctx(); }

    void commit(const tokens_t &tokens) override { held_ = tokens; }
    std::string flush() override { return ""; }
    kept_totals totals() const override { return {}; }

  private:
    engine &engine_;
    const bool cuts_;
    tokens_t held_;
};

} // namespace

std::unique_ptr<keeper> no_tier(const options &o, engine &e) {
    return std::make_unique<plain>(o, e);
}
