// Restore, prefill, decode, save.
#include "answer.h"

#include "failure.h"
#include "input.h"
#include "text.h"

#include <algorithm>

namespace {

// Tokens between two saves: a kill loses at most so many tokens of an answer.
constexpr size_t save_every = 32;

class answer_run {
  public:
    answer_run(engine &e, kv_cache &cache, screen &out, tokens_t &tokens, const answer_options &opts)
        : engine_(e), cache_(cache), out_(out), tokens_(tokens), opts_(opts), start_ns_(now_ns()) {
        done_.prompt_tokens = (uint32_t) tokens.size();
    }

    answer_t run() {
        check_room(cache_, tokens_);
        if (prefill_prompt()) {
            decode_answer();
        }
        save();
        return done_;
    }

  private:
    bool prefill_prompt() {
        out_.activity("restoring");
        done_.reused = cache_.attach(tokens_);
        out_.clear();
        const uint64_t start = now_ns();
        const size_t first = done_.reused.all(), all = tokens_.size();
        const size_t piece = llama_n_batch(engine_.context());
        size_t at = first;
        while (at < all && !answer_interrupted()) {
            const size_t upto = std::min(all, at + piece);
            if (all - first > piece) {
                out_.progress("prompt", at - first, all - first);
            }
            cache_.prefill(tokens_, at, upto);
            at = upto;
        }
        out_.clear();
        done_.prefilled = (uint32_t) (at - first);
        done_.prefill_ns = (double) (now_ns() - start);
        if (at < all) {
            done_.stop = stop_t::interrupted;
            context_tokens_ = at;
        }
        return at == all;
    }

    void decode_answer() {
        context_tokens_ = tokens_.size();
        saved_ = context_tokens_;
        const uint64_t start = now_ns();
        engine_.start_answer();
        done_.stop = stop_t::length;
        while (done_.decoded < opts_.max_tokens) {
            const llama_token token = engine_.sample();
            if (done_.decoded == 0) {
                done_.first_ns = (double) (now_ns() - start_ns_);
            }
            if (engine_.is_end(token)) {
                done_.stop = stop_t::end;
                break;
            }
            emit(characters_.feed(engine_.bytes_of(token)));
            tokens_.push_back(token);
            ++done_.decoded;
            if (answer_interrupted() || !out_.is_open()) {
                done_.stop = stop_t::interrupted;
                break;
            }
            if (tokens_.size() >= cache_.max_tokens()) {
                done_.stop = stop_t::context;
                break;
            }
            if (done_.decoded < opts_.max_tokens) {
                cache_.decode(token);
                context_tokens_ = tokens_.size();
            }
            if (context_tokens_ - saved_ >= save_every) {
                save();
            }
        }
        emit(characters_.rest());
        done_.decode_ns = (double) (now_ns() - start);
    }

    void emit(const std::string &part) {
        done_.text += part;
        unsaved_ += part;
        if (opts_.on_text) {
            opts_.on_text(part);
        }
    }

    // The last token of an answer was sampled but not decoded, so the context does not hold it.
    void save() {
        if (context_tokens_ == 0) {
            return;
        }
        cache_.commit(tokens_t(tokens_.begin(), tokens_.begin() + (ptrdiff_t) context_tokens_));
        const size_t reported = std::max(saved_, (size_t) done_.prompt_tokens);
        if (opts_.on_saved && tokens_.size() > reported) {
            opts_.on_saved(unsaved_, tokens_t(tokens_.begin() + (ptrdiff_t) reported, tokens_.end()));
        }
        unsaved_.clear();
        saved_ = tokens_.size();
    }

    engine &engine_;
    kv_cache &cache_;
    screen &out_;
    tokens_t &tokens_;
    const answer_options &opts_;
    const uint64_t start_ns_;
    answer_t done_;
    utf8_stream characters_;
    std::string unsaved_;
    size_t context_tokens_ = 0;
    size_t saved_ = 0;
};

} // namespace

const char *stop_text(stop_t why) {
    switch (why) {
    case stop_t::end:
        return "end";
    case stop_t::length:
        return "length";
    case stop_t::context:
        return "context";
    case stop_t::interrupted:
        return "interrupted";
    }
    return "";
}

void check_room(const kv_cache &cache, const tokens_t &tokens) {
    if (tokens.size() >= cache.max_tokens()) {
        throw failure(exit_failed, "the text has " + std::to_string(tokens.size()) +
                                       " tokens, the context has room for " +
                                       std::to_string(cache.max_tokens()) +
                                       ": shorten the text or raise --ctx (with --longer: raise --longer)");
    }
    if (tokens.empty()) {
        throw failure(exit_failed, "the prompt is empty: give at least one token");
    }
}

answer_t answer(engine &e, kv_cache &cache, screen &out, tokens_t &tokens, const answer_options &opts) {
    return answer_run(e, cache, out, tokens, opts).run();
}
