// --longer: a sequence longer than the context. The adapter stores the KV itself, under the session's name.
#include "adapters.h"
#include "engine.h"
#include "failure.h"
#include "kv_cache.h"

#include <kvtier/llama_longer.h>

#include <algorithm>
#include <cstdio>

#include <sys/stat.h>

namespace {

std::string message(kvt_status_t status, const kvt_llama_why_t &why) {
    return why.text[0] ? why.text : kvt_status_str(status);
}

// The identity of the KV: model file, context size, sparse policy, salt. A rewritten file counts as another
// model. Context size and policy decide which tokens were visible, so they change the KV.
std::string identity(const options &o) {
    struct stat file = {};
    kvt_model_t *model = nullptr;
    kvt_model_info_t info = KVT_MODEL_INFO_INIT;
    const kvt_str_t path = {o.model.data(), o.model.size()};
    const bool known = stat(o.model.c_str(), &file) == 0 &&
                       kvt_model_open(&path, 1, sizeof path, &model, nullptr) == KVT_OK &&
                       kvt_model_info(model, &info) == KVT_OK;
    kvt_model_close(&model);
    if (!known) {
        throw failure(exit_model, o.model + " cannot be read as a model file");
    }
    std::string out;
    for (const uint8_t byte : info.fingerprint) {
        char hex[4];
        std::snprintf(hex, sizeof hex, "%02x", byte);
        out += hex;
    }
    return out + " " + std::to_string(file.st_size) + " " + std::to_string(file.st_mtim.tv_sec) + "." +
           std::to_string(file.st_mtim.tv_nsec) + " ctx " +
           std::to_string(o.ctx) + " sparse " + o.sparse + " " + o.salt;
}

// Owns the adapter. The context calls back into it, so both share it until the context is freed.
struct longer_t {
    kvt_llama_longer_t *handle = nullptr;
    std::shared_ptr<kv_store> store;
    size_t max_tokens = 0;

    ~longer_t() { kvt_llama_longer_close(&handle, nullptr); }
};

class longer_cache final : public kv_cache {
  public:
    longer_cache(engine &e, std::shared_ptr<longer_t> longer) : engine_(e), longer_(std::move(longer)) {}

    prefix_reuse attach(const tokens_t &tokens) override {
        const uint64_t start = now_ns();
        const size_t limit = std::min(context_tokens_.size(), tokens.size() - 1);
        size_t common = 0;
        while (common < limit && context_tokens_[common] == tokens[common]) {
            ++common;
        }
        prefix_reuse out;
        if (common < context_tokens_.size() && kvt_llama_longer_truncate(handle(), common, &why_) != KVT_OK) {
            common = 0;
            check(kvt_llama_longer_truncate(handle(), 0, &why_), "truncate");
        }
        out.kept = (uint32_t) common;
        if (common == 0) {
            size_t got = 0;
            const kvt_store_stats_t before = store_stats();
            const kvt_status_t status =
                kvt_llama_longer_resume(handle(), tokens.data(), tokens.size(), &got, &why_);
            const kvt_store_stats_t after = store_stats();
            const double disk = (double) (after.disk_hit_cells - before.disk_hit_cells);
            const double host = (double) (after.host_hit_cells - before.host_hit_cells);
            out.disk = (uint32_t) (disk > 0 ? (double) got * disk / (disk + host) : 0);
            out.host = (uint32_t) got - out.disk;
            out.refused = status == KVT_OK ? "" : message(status, why_);
        }
        context_tokens_.assign(tokens.begin(), tokens.begin() + (ptrdiff_t) out.all());
        out.ns = now_ns() - start;
        return out;
    }

    void prefill(const tokens_t &tokens, size_t first, size_t upto) override {
        check(kvt_llama_longer_decode(handle(), tokens.data() + first, upto - first, &why_), "prefill");
        context_tokens_.assign(tokens.begin(), tokens.begin() + (ptrdiff_t) upto);
    }

    void decode(llama_token token) override {
        check(kvt_llama_longer_decode(handle(), &token, 1, &why_), "decode");
        context_tokens_.push_back(token);
    }

    size_t max_tokens() const override { return longer_->max_tokens; }

    void commit(const tokens_t &) override {
        const kvt_status_t status = kvt_llama_longer_save(handle(), &why_);
        save_error_ = status == KVT_OK ? "" : message(status, why_);
    }

    std::string flush() override { return save_error_; }

    cache_totals totals() const override {
        cache_totals out;
        const kvt_llama_longer_stats_t s = stats();
        out.saved_tokens = s.saved_tokens;
        out.saved_bytes = s.saved_bytes;
        out.save_ns = s.save_ns;
        add_store_totals(*longer_->store, out);
        return out;
    }

    std::string rows() const override {
        const kvt_llama_longer_stats_t s = stats();
        char out[400];
        std::snprintf(out, sizeof out,
                      "  %-26s %llu of %llu tokens in the store, cells for %llu\n"
                      "  %-26s %llu of %llu blocks, %llu loaded (%s); selection %s, loading %s\n",
                      "longer than the context", (unsigned long long) s.stored_tokens,
                      (unsigned long long) s.tokens, (unsigned long long) s.cells, "selected",
                      (unsigned long long) s.chosen_blocks, (unsigned long long) s.candidate_blocks,
                      (unsigned long long) s.loaded_blocks, bytes_text((double) s.loaded_bytes).c_str(),
                      time_text((double) s.choose_ns).c_str(), time_text((double) s.load_ns).c_str());
        return out;
    }

    void fields(json_object &line) const override {
        const kvt_llama_longer_stats_t s = stats();
        line.count("longer_tokens", s.tokens).count("longer_stored_tokens", s.stored_tokens);
        line.count("longer_cells", s.cells).count("longer_sparse_tokens", s.sparse_tokens);
        line.count("longer_chosen_blocks", s.chosen_blocks).count("longer_loaded_bytes", s.loaded_bytes);
        line.count("longer_candidate_blocks", s.candidate_blocks);
        line.number("longer_choose_ms", (double) s.choose_ns / 1e6);
        line.number("longer_load_ms", (double) s.load_ns / 1e6);
    }

  private:
    kvt_llama_longer_t *handle() const { return longer_->handle; }

    kvt_store_stats_t store_stats() const {
        kvt_store_stats_t s = KVT_STORE_STATS_INIT;
        kvt_store_stats(longer_->store->store, &s);
        return s;
    }

    kvt_llama_longer_stats_t stats() const {
        kvt_llama_longer_stats_t s = {};
        kvt_llama_longer_stats(handle(), &s);
        return s;
    }

    void check(kvt_status_t status, const char *what) const {
        if (status != KVT_OK) {
            const std::string failure_reason = engine_.failure_reason();
            throw failure(exit_failed, std::string("kvtier, ") + what + ": " +
                                           (failure_reason.empty() ? message(status, why_) : failure_reason));
        }
    }

    engine &engine_;
    std::shared_ptr<longer_t> longer_;
    kvt_llama_why_t why_ = {};
    tokens_t context_tokens_;
    std::string save_error_;
};

class longer_adapter final : public adapter {
  public:
    longer_adapter(const options &o, const std::shared_ptr<kv_store> &store)
        : o_(o), longer_(std::make_shared<longer_t>()) {
        longer_->store = store;
        longer_->max_tokens = o.longer_tokens;
    }

    void prepare(llama_model *, llama_context_params &params) override {
        const std::string name = o_.session.empty() ? "complete" : "chat " + o_.session;
        const std::string id = identity(o_);
        kvt_llama_longer_opts_t opts = {};
        opts.store = longer_->store->store;
        opts.name = name.c_str();
        opts.model_id = id.c_str();
        opts.spec = o_.sparse.empty() ? nullptr : o_.sparse.c_str();
        opts.max_tokens = o_.longer_tokens;
        kvt_llama_why_t why = {};
        const kvt_status_t status = kvt_llama_longer_open(&opts, &params, &longer_->handle, &why);
        if (status != KVT_OK) {
            throw failure(exit_usage, "--longer: " + message(status, why));
        }
    }

    void bind(llama_context *ctx) override {
        kvt_llama_why_t why = {};
        const kvt_status_t status = kvt_llama_longer_bind(longer_->handle, ctx, &why);
        if (status != KVT_OK) {
            throw failure(exit_usage, "--longer: " + message(status, why));
        }
    }

    std::unique_ptr<kv_cache> make_kv_cache(engine &e) override {
        return std::make_unique<longer_cache>(e, longer_);
    }

  private:
    const options o_;
    std::shared_ptr<longer_t> longer_;
};

} // namespace

std::unique_ptr<adapter> open_longer(const options &o, const std::shared_ptr<kv_store> &store) {
    return std::make_unique<longer_adapter>(o, store);
}
