// The model and its context: what the public llama.h has, with owners and words for failures.
#pragma once

#include "options.h"
#include "parts.h"
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
    // Loads. Throws failure{exit_model}.
    engine(const options &o, screen &out, parts_t parts);
    ~engine();
    engine(const engine &) = delete;
    engine &operator=(const engine &) = delete;

    llama_model *model() const { return model_.get(); }
    llama_context *context() const { return ctx_.get(); }
    uint32_t n_ctx() const { return n_ctx_; }

    // Markers such as <|im_end|> in the text count as what they stand for. `start`: it begins a sequence.
    std::vector<llama_token> tokens_of(const std::string &text, bool start) const;
    // The first such marker in a text, for texts that are to have none; empty where there is none.
    std::string marker_in(const std::string &text) const;
    std::string bytes_of(llama_token token) const;
    bool ends(llama_token token) const;
    llama_token end_of_turn() const;

    // The conversation as the model wants it; `answer`: with what begins an answer behind it.
    std::string chat_text(const std::vector<message> &messages, bool answer) const;
    // Throws failure{exit_usage} where there is no template to use.
    void need_template() const;

    // The likeliest token, or one drawn by the options, after the last decode. A new answer starts anew.
    llama_token choose();
    void start_answer();

    // Equal for models with the same tokens.
    std::string vocabulary() const;
    std::string name() const;
    uint64_t model_bytes() const;

    // Decodes at the end of sequence 0; `last`: logits of the last token are wanted. A failure is explained
    // by the part that caused it. Throws failure.
    void decode(const llama_token *tokens, size_t n_tokens, bool last = true);

    // What a part has to say of a failure; empty where none has.
    std::string trouble() const;

    const parts_t &parts() const { return parts_; }

    double load_ns = 0;

  private:
    struct freeing {
        void operator()(llama_model *model) const { llama_model_free(model); }
        void operator()(llama_context *ctx) const { llama_free(ctx); }
        void operator()(llama_sampler *chain) const { llama_sampler_free(chain); }
    };

    int32_t decode_batch(const llama_token *tokens, size_t n_tokens, bool last);
    void load(const options &o, screen &out);
    void open_context(const options &o);

    // The context goes first, then the model, then what they use.
    parts_t parts_;
    std::unique_ptr<llama_model, freeing> model_;
    std::unique_ptr<llama_context, freeing> ctx_;
    std::unique_ptr<llama_sampler, freeing> sampler_;
    const llama_vocab *vocab_ = nullptr;
    std::string template_;
    std::string path_;
    uint32_t n_ctx_ = 0;
};

// Nanoseconds of a clock that only goes forward.
uint64_t now_ns();
