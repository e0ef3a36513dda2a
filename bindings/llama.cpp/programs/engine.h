// The model and its context: owns the objects of the public llama.h and explains failures.
#pragma once

#include "adapters.h"
#include "options.h"
#include "screen.h"

#include <llama.h>

#include <memory>
#include <string>
#include <vector>

struct message {
    std::string role;
    std::string text;
};

class engine {
  public:
    // Loads the model and opens a context. Throws failure{exit_model}.
    engine(const options &o, screen &out, adapters_t adapters);
    ~engine();
    engine(const engine &) = delete;
    engine &operator=(const engine &) = delete;

    llama_model *model() const { return model_.get(); }
    llama_context *context() const { return ctx_.get(); }
    uint32_t n_ctx() const { return n_ctx_; }

    // Tokenizes; markers such as <|im_end|> become control tokens. `start`: the text begins a sequence.
    std::vector<llama_token> tokens_of(const std::string &text, bool start) const;
    // The first such marker in a text; empty if the text has none.
    std::string marker_in(const std::string &text) const;
    std::string bytes_of(llama_token token) const;
    bool is_end(llama_token token) const;
    llama_token end_of_turn() const;

    // The conversation in the model's chat template. `answer`: with the start of an answer at the end.
    std::string chat_text(const std::vector<message> &messages, bool answer) const;
    // Throws failure{exit_usage} if there is no usable template.
    void check_template() const;

    // Samples the next token after the last decode. start_answer resets the sampler.
    llama_token sample();
    void start_answer();

    // A hash that is equal for models with the same tokens.
    std::string vocabulary() const;
    std::string name() const;
    uint64_t model_bytes() const;

    // Decodes at the end of sequence 0. `last`: compute logits of the last token. Throws failure, with the
    // reason from the adapter that caused it.
    void decode(const llama_token *tokens, size_t n_tokens, bool last = true);

    // The reason that an adapter gives for a failure; empty if no adapter gives one.
    std::string failure_reason() const;

    const adapters_t &adapters() const { return adapters_; }

    double load_ns = 0;

  private:
    struct deleter {
        void operator()(llama_model *model) const { llama_model_free(model); }
        void operator()(llama_context *ctx) const { llama_free(ctx); }
        void operator()(llama_sampler *chain) const { llama_sampler_free(chain); }
    };

    int32_t decode_batch(const llama_token *tokens, size_t n_tokens, bool last);
    void load(const options &o, screen &out);
    void open_context(const options &o);

    // Members are destroyed in reverse order: the context, the model, the adapters that both use.
    adapters_t adapters_;
    std::unique_ptr<llama_model, deleter> model_;
    std::unique_ptr<llama_context, deleter> ctx_;
    std::unique_ptr<llama_sampler, deleter> sampler_;
    const llama_vocab *vocab_ = nullptr;
    std::string template_;
    std::string path_;
    uint32_t n_ctx_ = 0;
};

// Nanoseconds of a monotonic clock.
uint64_t now_ns();
