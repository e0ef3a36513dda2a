// --sparse: a sparse policy selects the blocks that attention reads, or evicts tokens from the context.
#include "adapters.h"
#include "failure.h"
#include "screen.h"

#include <kvtier/llama_watch.h>

#include <cstdio>

namespace {

// A block must be a whole number of the policy's pages, and only the spec tells the page size: try these.
constexpr uint32_t block_sizes[] = {16, 32, 64, 128, 256};

// The traits of the policy with this spec. Throws failure{exit_usage}.
kvt_sparse_traits_t traits_of(const std::string &spec) {
    kvt_attention_t attention = KVT_ATTENTION_INIT;
    attention.layers = 1;
    attention.query_heads = attention.key_heads = 1;
    attention.key_dim = attention.value_dim = 64;
    attention.kind = KVT_ATTENTION_SPLIT;
    attention.max_tokens = 1 << 20;
    kvt_sparse_opts_t opts = KVT_SPARSE_OPTS_INIT;
    opts.attention = &attention;
    opts.spec = spec.c_str();
    opts.spec_bytes = KVT_NUL_TERMINATED;
    kvt_sparse_t *policy = nullptr;
    kvt_error_t *error = nullptr;
    kvt_status_t status = KVT_E_SPEC;
    for (const uint32_t size : block_sizes) {
        attention.block_tokens = size;
        status = status == KVT_E_SPEC ? kvt_sparse_open(&opts, &policy, &error) : status;
    }
    kvt_sparse_traits_t traits = KVT_SPARSE_TRAITS_INIT;
    if (status == KVT_OK) {
        status = kvt_sparse_traits(policy, &traits);
    }
    const std::string message = error ? kvt_error_message(error) : kvt_status_str(status);
    kvt_error_free(&error);
    kvt_sparse_close(&policy);
    if (status != KVT_OK) {
        throw failure(exit_usage, "--sparse: " + message);
    }
    return traits;
}

class sparse_adapter final : public adapter {
  public:
    explicit sparse_adapter(const options &o) : spec_(o.sparse), traits_(traits_of(o.sparse)) {
        const uint32_t evicts = KVT_SPARSE_EVICT_PREFILL | KVT_SPARSE_EVICT_DECODE;
        if (o.kv && (traits_.caps & evicts)) {
            throw failure(exit_usage, "--sparse " + spec_ +
                                          ": this policy evicts tokens from the context, and a context with "
                                          "evicted tokens cannot be stored: add --no-kv, or use a policy that "
                                          "selects blocks, such as quest");
        }
    }

    ~sparse_adapter() override { kvt_llama_watch_close(&watch_); }

    void prepare(llama_model *model, llama_context_params &params) override {
        // Flash attention does not expose the attention weights that column sums are made of.
        if (traits_.needs & KVT_NEEDS_COLUMN_SUMS) {
            params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
        }
        check(kvt_llama_watch_open(model, nullptr, &watch_, &why_));
        check(kvt_llama_watch_params(watch_, &params, &why_));
    }

    void bind(llama_context *ctx) override {
        check(kvt_llama_watch_attach(watch_, ctx, &why_));
        kvt_llama_sparse_opts_t opts = {};
        opts.spec = spec_.c_str();
        check(kvt_llama_watch_policy(watch_, 0, &opts, &why_));
    }

    bool decode(const llama_batch &batch, int32_t *status) override {
        *status = -1;
        // A failed policy does not fail the decode; the table and the summary report it.
        kvt_llama_watch_decode(watch_, batch, status, &why_);
        return true;
    }

    std::string rows() const override {
        const kvt_llama_watch_stats_t s = stats();
        char out[400];
        std::snprintf(out, sizeof out,
                      "  %-26s %llu of %llu cells masked in %llu tokens, %llu tokens evicted; %s\n", "sparse",
                      (unsigned long long) s.masked_cells, (unsigned long long) s.seen_cells,
                      (unsigned long long) s.sparse_tokens, (unsigned long long) s.evicted_tokens,
                      time_text((double) s.policy_ns).c_str());
        const std::string fault = fault_message();
        return fault.empty() ? out : out + ("  " + std::string("the policy failed: ") + fault + "\n");
    }

    void fields(json_object &line) const override {
        const kvt_llama_watch_stats_t s = stats();
        line.count("sparse_tokens", s.sparse_tokens).count("sparse_seen_cells", s.seen_cells);
        line.count("sparse_masked_cells", s.masked_cells).count("sparse_evicted_tokens", s.evicted_tokens);
        line.number("sparse_policy_ms", (double) s.policy_ns / 1e6);
        const std::string fault = fault_message();
        if (!fault.empty()) {
            line.text("sparse_ended", fault);
        }
    }

  private:
    void check(kvt_status_t status) const {
        if (status != KVT_OK) {
            throw failure(exit_usage,
                          "--sparse " + spec_ + ": " + (why_.text[0] ? why_.text : kvt_status_str(status)));
        }
    }

    kvt_llama_watch_stats_t stats() const {
        kvt_llama_watch_stats_t s = {};
        kvt_llama_watch_stats(watch_, &s);
        return s;
    }

    std::string fault_message() const {
        kvt_llama_why_t why = {};
        const kvt_status_t status = kvt_llama_watch_fault(watch_, &why);
        return status == KVT_OK ? "" : why.text[0] ? why.text : kvt_status_str(status);
    }

    const std::string spec_;
    const kvt_sparse_traits_t traits_;
    kvt_llama_watch_t *watch_ = nullptr;
    kvt_llama_why_t why_ = {};
};

} // namespace

std::unique_ptr<adapter> open_sparse(const options &o) {
    return std::make_unique<sparse_adapter>(o);
}
