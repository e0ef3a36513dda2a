// Restore, prefill, decode, save.
#include "answer.h"

#include "failure.h"
#include "input.h"
#include "text.h"

#include <algorithm>

namespace {

// How many tokens of an answer a kill may cost.
constexpr size_t save_every = 32;

class request {
  public:
    request(engine &e, keeper &k, screen &out, tokens_t &tokens, const asked_t &asked)
        : engine_(e), keeper_(k), out_(out), tokens_(tokens), asked_(asked), start_ns_(now_ns()) {
        done_.prompt_tokens = (uint32_t) tokens.size();
    }

    answer_t run() {
        need_room(keeper_, tokens_);
        if (prompt()) {
            speak();
        }
        keep();
        return done_;
    }

  private:
    bool prompt() {
        out_.busy("restoring");
        done_.reused = keeper_.attach(tokens_);
        out_.clear();
        const uint64_t start = now_ns();
        const size_t first = done_.reused.all(), all = tokens_.size();
        const size_t piece = llama_n_batch(engine_.context());
        size_t at = first;
        while (at < all && !answer_stopped()) {
            const size_t upto = std::min(all, at + piece);
            if (all - first > piece) {
                out_.bar("prompt", at - first, all - first);
            }
            keeper_.prefill(tokens_, at, upto);
            at = upto;
        }
        out_.clear();
        done_.prefilled = (uint32_t) (at - first);
        done_.prefill_ns = (double) (now_ns() - start);
        if (at < all) {
            done_.stop = stop_t::interrupted;
            held_ = at;
        }
        return at == all;
    }

    void speak() {
        held_ = tokens_.size();
        saved_ = held_;
        const uint64_t start = now_ns();
        engine_.start_answer();
        done_.stop = stop_t::length;
        while (done_.decoded < asked_.most_tokens) {
            const llama_token token = engine_.choose();
            if (done_.decoded == 0) {
                done_.first_ns = (double) (now_ns() - start_ns_);
            }
            if (engine_.ends(token)) {
                done_.stop = stop_t::end;
                break;
            }
            say(characters_.feed(engine_.bytes_of(token)));
            tokens_.push_back(token);
            ++done_.decoded;
            if (answer_stopped() || !out_.alive()) {
                done_.stop = stop_t::interrupted;
                break;
            }
            if (tokens_.size() >= keeper_.most_tokens()) {
                done_.stop = stop_t::context;
                break;
            }
            if (done_.decoded < asked_.most_tokens) {
                keeper_.decode(token);
                held_ = tokens_.size();
            }
            if (held_ - saved_ >= save_every) {
                keep();
            }
        }
        say(characters_.rest());
        done_.decode_ns = (double) (now_ns() - start);
    }

    void say(const std::string &part) {
        done_.text += part;
        unsaved_ += part;
        if (asked_.on_text) {
            asked_.on_text(part);
        }
    }

    // The last token of an answer was chosen but never decoded: it is not in the context.
    void keep() {
        if (held_ == 0) {
            return;
        }
        const tokens_t held(tokens_.begin(), tokens_.begin() + (ptrdiff_t) held_);
        keeper_.commit(held);
        const size_t told = std::max(saved_, (size_t) done_.prompt_tokens);
        if (asked_.on_saved && tokens_.size() > told) {
            asked_.on_saved(unsaved_, tokens_t(tokens_.begin() + (ptrdiff_t) told, tokens_.end()));
        }
        unsaved_.clear();
        saved_ = tokens_.size();
    }

    engine &engine_;
    keeper &keeper_;
    screen &out_;
    tokens_t &tokens_;
    const asked_t &asked_;
    const uint64_t start_ns_;
    answer_t done_;
    utf8_stream characters_;
    std::string unsaved_;
    size_t held_ = 0;
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

void need_room(const keeper &k, const tokens_t &tokens) {
    if (tokens.size() >= k.most_tokens()) {
        throw failure(exit_failed, "there are " + std::to_string(tokens.size()) +
                                       " tokens, and the context has " + std::to_string(k.most_tokens()) +
                                       ": say less, or take a greater --ctx");
    }
    if (tokens.empty()) {
        throw failure(exit_failed, "the prompt is empty");
    }
}

answer_t answer(engine &e, keeper &k, screen &out, tokens_t &tokens, const asked_t &asked) {
    return request(e, k, out, tokens, asked).run();
}
