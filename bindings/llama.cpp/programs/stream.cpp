// --stream-budget: streams weights from the file ahead of their use, under a memory limit.
#include "adapters.h"
#include "failure.h"
#include "screen.h"

#include <kvtier/llama_weights.h>

#include <cstdio>

namespace {

class stream_adapter final : public adapter {
  public:
    explicit stream_adapter(const options &o) : model_(o.model) {
        kvt_llama_weights_opts_t opts = {};
        opts.model_path = o.model.c_str();
        opts.budget_bytes = o.stream_bytes;
        const kvt_status_t status = kvt_llama_weights_open(&opts, &weights_, &why_);
        if (status != KVT_OK) {
            throw failure(status == KVT_E_BUDGET ? exit_usage : exit_model,
                          o.model + ": --stream-budget " + bytes_text((double) o.stream_bytes) + ": " +
                              message(status));
        }
    }

    ~stream_adapter() override { kvt_llama_weights_close(&weights_, nullptr); }

    llama_model *load(const llama_model_params &params) override {
        llama_model *model = nullptr;
        const kvt_status_t status = kvt_llama_weights_load(weights_, &params, &model, &why_);
        if (status == KVT_E_CANCELLED) {
            throw failure(exit_interrupted, "interrupted");
        }
        if (status != KVT_OK) {
            throw failure(exit_model, model_ + " cannot be loaded: " + message(status));
        }
        return model;
    }

    void prepare(llama_model *, llama_context_params &params) override {
        const kvt_status_t status = kvt_llama_weights_context(weights_, &params, &why_);
        if (status != KVT_OK) {
            throw failure(exit_model, "--stream-budget: " + message(status));
        }
    }

    std::string failure_reason() override {
        const kvt_status_t status = kvt_llama_weights_error(weights_, &why_);
        return status == KVT_OK ? "" : message(status);
    }

    std::string rows() const override {
        const kvt_llama_weights_stats_t s = stats();
        char out[400];
        std::snprintf(out, sizeof out,
                      "  %-26s peak %s of %s; %s of weights, %u units resident, %u streamed\n"
                      "  %-26s %s in %llu passes, waited %s\n",
                      "weights", bytes_text((double) s.peak_bytes).c_str(),
                      bytes_text((double) s.budget_bytes).c_str(),
                      bytes_text((double) s.model_bytes).c_str(), s.resident_units, s.streamed_units,
                      "streamed", bytes_text((double) s.read_bytes).c_str(), (unsigned long long) s.passes,
                      time_text((double) s.wait_ns).c_str());
        return out;
    }

    void fields(json_object &line) const override {
        const kvt_llama_weights_stats_t s = stats();
        line.count("weights_bytes", s.model_bytes).count("weights_budget_bytes", s.budget_bytes);
        line.count("weights_peak_bytes", s.peak_bytes).count("streamed_bytes", s.read_bytes);
        line.count("passes", s.passes).number("stream_wait_ms", (double) s.wait_ns / 1e6);
        line.count("resident_units", s.resident_units).count("streamed_units", s.streamed_units);
    }

  private:
    std::string message(kvt_status_t status) const {
        return why_.text[0] ? why_.text : kvt_status_str(status);
    }

    kvt_llama_weights_stats_t stats() const {
        kvt_llama_weights_stats_t s = {};
        kvt_llama_weights_stats(weights_, &s);
        return s;
    }

    const std::string model_;
    kvt_llama_weights_t *weights_ = nullptr;
    kvt_llama_why_t why_ = {};
};

} // namespace

std::unique_ptr<adapter> open_stream(const options &o) {
    return std::make_unique<stream_adapter>(o);
}
