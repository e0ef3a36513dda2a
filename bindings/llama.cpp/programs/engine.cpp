// Loading, tokenizing, chat templates, sampling.
#include "engine.h"

#include "failure.h"
#include "input.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <utility>

namespace {

constexpr uint32_t default_ctx = 4096;
// Limit of a batch. Ctrl-C and the progress bar are handled between batches.
constexpr uint32_t batch_tokens = 256;

// The engine's last error message. Messages quote it, because llama.h returns no reason for a failed load.
std::string last_engine_error;

void on_engine_log(ggml_log_level level, const char *text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) {
        last_engine_error = text;
        while (!last_engine_error.empty() && last_engine_error.back() == '\n') {
            last_engine_error.pop_back();
        }
    }
}

bool loading(float done, void *data) {
    static_cast<screen *>(data)->progress("loading", (uint64_t) (done * 1000), 1000);
    return !answer_interrupted();
}

// After SIGTERM the token in progress has 5 s to finish. A hanging disk must not block the exit.
bool should_abort(void *) {
    constexpr uint64_t grace_ns = 5000000000ull;
    static std::atomic<uint64_t> since_ns{0};
    if (!termination_requested()) {
        return false;
    }
    uint64_t none = 0;
    since_ns.compare_exchange_strong(none, now_ns());
    return now_ns() - since_ns > grace_ns;
}

} // namespace

uint64_t now_ns() {
    using namespace std::chrono;
    return (uint64_t) duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

engine::engine(const options &o, screen &out, adapters_t adapters)
    : adapters_(std::move(adapters)), path_(o.model) {
    llama_log_set(on_engine_log, nullptr);
    const uint64_t start = now_ns();
    load(o, out);
    out.clear();
    vocab_ = llama_model_get_vocab(model());
    const char *own = llama_model_chat_template(model(), nullptr);
    template_ = !o.chat_template.empty() ? o.chat_template : own ? own : "";
    open_context(o);
    sampler_.reset(llama_sampler_chain_init(llama_sampler_chain_default_params()));
    if (o.temp <= 0) {
        llama_sampler_chain_add(sampler_.get(), llama_sampler_init_greedy());
    } else {
        llama_sampler_chain_add(sampler_.get(), llama_sampler_init_top_k(40));
        llama_sampler_chain_add(sampler_.get(), llama_sampler_init_top_p(0.95f, 1));
        llama_sampler_chain_add(sampler_.get(), llama_sampler_init_temp(o.temp));
        llama_sampler_chain_add(sampler_.get(), llama_sampler_init_dist(o.seed));
    }
    load_ns = (double) (now_ns() - start);
}

engine::~engine() {
    for (const auto &p : adapters_) {
        p->unbind();
    }
}

void engine::load(const options &o, screen &out) {
    if (FILE *file = std::fopen(o.model.c_str(), "rb")) {
        std::fclose(file);
    } else {
        throw failure(exit_model, o.model + ": " + std::strerror(errno));
    }
    llama_model_params params = llama_model_default_params();
    params.progress_callback = loading;
    params.progress_callback_user_data = &out;
    for (const auto &p : adapters_) {
        if (!model_) {
            model_.reset(p->load(params));
        }
    }
    if (!model_) {
        model_.reset(llama_model_load_from_file(o.model.c_str(), params));
    }
    if (!model_ && answer_interrupted()) {
        throw failure(exit_interrupted, "interrupted");
    }
    if (!model_) {
        throw failure(exit_model, o.model + " cannot be loaded: " + last_engine_error);
    }
    if (llama_model_has_encoder(model()) || !llama_model_has_decoder(model())) {
        throw failure(exit_model, o.model + " is not a text generation model: use one with a decoder and no "
                                            "encoder");
    }
}

void engine::open_context(const options &o) {
    const uint32_t trained = (uint32_t) std::max(1, llama_model_n_ctx_train(model()));
    llama_context_params params = llama_context_default_params();
    params.n_ctx = o.ctx ? o.ctx : std::min(default_ctx, trained);
    params.n_batch = params.n_ubatch = std::min(batch_tokens, params.n_ctx);
    params.n_threads = params.n_threads_batch = (int32_t) o.threads;
    // Sequence 0 for the conversation, sequence 1 as the adapters' scratch sequence, in the same cells.
    params.n_seq_max = 2;
    params.kv_unified = true;
    params.abort_callback = should_abort;
    for (const auto &p : adapters_) {
        p->prepare(model(), params);
    }
    ctx_.reset(llama_init_from_model(model(), params));
    if (!ctx_) {
        throw failure(exit_model, o.model + ": the engine cannot create a context of " +
                                      std::to_string(params.n_ctx) + " tokens (try a smaller --ctx): " +
                                      last_engine_error);
    }
    n_ctx_ = llama_n_ctx(context());
    for (const auto &p : adapters_) {
        p->bind(context());
    }
}

int32_t engine::decode_batch(const llama_token *tokens, size_t n_tokens, bool last) {
    llama_batch batch = llama_batch_get_one(const_cast<llama_token *>(tokens), (int32_t) n_tokens);
    std::vector<int8_t> wanted(n_tokens, 0);
    wanted.back() = last;
    batch.logits = wanted.data();
    for (const auto &p : adapters_) {
        int32_t status = 0;
        if (p->decode(batch, &status)) {
            return status;
        }
    }
    return llama_decode(context(), batch);
}

void engine::decode(const llama_token *tokens, size_t n_tokens, bool last) {
    const size_t batch = llama_n_batch(context());
    for (size_t at = 0; at < n_tokens; at += batch) {
        const size_t n = std::min(batch, n_tokens - at);
        const int32_t status = decode_batch(tokens + at, n, last && at + n == n_tokens);
        if (status == 0) {
            continue;
        }
        const std::string why = failure_reason();
        if (status == 2 && termination_requested()) {
            throw failure(exit_interrupted, "interrupted");
        }
        throw failure(exit_failed, "decoding failed: " +
                                       (!why.empty()  ? why
                                        : status == 1 ? "the context is full"
                                                      : "status " + std::to_string(status)));
    }
}

std::string engine::failure_reason() const {
    std::string why;
    for (const auto &p : adapters_) {
        why = why.empty() ? p->failure_reason() : why;
    }
    return why;
}

std::vector<llama_token> engine::tokens_of(const std::string &text, bool start) const {
    const int32_t bytes = (int32_t) text.size();
    const int32_t wanted = -llama_tokenize(vocab_, text.data(), bytes, nullptr, 0, start, true);
    std::vector<llama_token> tokens((size_t) std::max(0, wanted));
    const int32_t got = llama_tokenize(vocab_, text.data(), bytes, tokens.data(), wanted, start, true);
    if (got < 0 || got != wanted) {
        throw failure(exit_failed, "the engine cannot tokenize the text");
    }
    return tokens;
}

std::string engine::marker_in(const std::string &text) const {
    for (const llama_token token : tokens_of(text, false)) {
        if (llama_vocab_is_control(vocab_, token) || llama_vocab_is_eog(vocab_, token)) {
            return llama_vocab_get_text(vocab_, token);
        }
    }
    return "";
}

std::string engine::bytes_of(llama_token token) const {
    char piece_buffer[256];
    const int32_t got = llama_token_to_piece(vocab_, token, piece_buffer, sizeof piece_buffer, 0, false);
    if (got >= 0) {
        return std::string(piece_buffer, (size_t) got);
    }
    std::string piece((size_t) -got, 0);
    llama_token_to_piece(vocab_, token, &piece[0], -got, 0, false);
    return piece;
}

bool engine::is_end(llama_token token) const {
    return llama_vocab_is_eog(vocab_, token);
}

llama_token engine::end_of_turn() const {
    const llama_token turn = llama_vocab_eot(vocab_);
    return turn >= 0 ? turn : llama_vocab_eos(vocab_);
}

void engine::check_template() const {
    if (template_.empty()) {
        throw failure(exit_usage, "the model has no chat template: choose one with --template, such as "
                                  "chatml, llama3 or gemma, or use the command complete");
    }
    chat_text({{"user", "?"}}, true);
}

std::string engine::chat_text(const std::vector<message> &messages, bool answer) const {
    std::vector<llama_chat_message> chat;
    size_t bytes = 256;
    for (const message &m : messages) {
        chat.push_back({m.role.c_str(), m.text.c_str()});
        bytes += 2 * m.text.size() + 64;
    }
    std::string text(bytes, 0);
    for (int round = 0; round < 2; ++round) {
        const int32_t got = llama_chat_apply_template(template_.c_str(), chat.data(), chat.size(), answer,
                                                      &text[0], (int32_t) text.size());
        if (got < 0) {
            throw failure(exit_usage, "llama.cpp does not support the chat template of this model: choose "
                                      "one with --template, such as chatml, llama3 or gemma");
        }
        const bool fits = (size_t) got <= text.size();
        text.resize((size_t) got);
        if (fits) {
            break;
        }
    }
    return text;
}

llama_token engine::sample() {
    return llama_sampler_sample(sampler_.get(), context(), -1);
}

void engine::start_answer() {
    llama_sampler_reset(sampler_.get());
}

std::string engine::vocabulary() const {
    uint64_t hash = 14695981039346656037ull;
    const int32_t n = llama_vocab_n_tokens(vocab_);
    for (int32_t token = 0; token < n; ++token) {
        for (const char *c = llama_vocab_get_text(vocab_, token);; ++c) {
            hash = (hash ^ (unsigned char) *c) * 1099511628211ull;
            if (*c == 0) {
                break;
            }
        }
    }
    char out[48];
    std::snprintf(out, sizeof out, "%d-%016llx", n, (unsigned long long) hash);
    return out;
}

std::string engine::name() const {
    char text[128] = "";
    llama_model_desc(model(), text, sizeof text);
    return path_.substr(path_.rfind('/') + 1) + " (" + text + ")";
}

uint64_t engine::model_bytes() const {
    return llama_model_size(model());
}
