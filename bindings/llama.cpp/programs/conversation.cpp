// A chat template renders whole conversations. A turn adds the difference of two renderings. Earlier tokens
// are kept: tokenizing the text again may give other tokens, for which no KV exists.
#include "conversation.h"

namespace {

bool starts_with(const std::string &text, const std::string &with) {
    return text.compare(0, with.size(), with) == 0;
}

std::string trimmed(const std::string &text) {
    const char *blanks = " \t\r\n\v\f";
    const size_t first = text.find_first_not_of(blanks);
    return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(blanks) - first + 1);
}

} // namespace

conversation::conversation(const engine &e, const std::string &system) : engine_(&e) {
    if (!system.empty()) {
        messages_.push_back({"system", system});
    }
}

tokens_t conversation::ask(const std::string &text) {
    // Some templates put the system message into the first question; earlier text is no prefix before it.
    const std::string before = tokens.empty() ? "" : engine_->chat_text(messages_, false);
    messages_.push_back({"user", text});
    const std::string now = engine_->chat_text(messages_, true);
    if (starts_with(now, before)) {
        return engine_->tokens_of(now.substr(before.size()), before.empty());
    }
    tokens.clear();
    return engine_->tokens_of(now, true);
}

tokens_t conversation::end_answer(const std::string &text) {
    const std::string before = engine_->chat_text(messages_, true);
    // If the template rewrites the answer, the model's end-of-turn token follows it.
    messages_.push_back({"assistant", text});
    const std::string now = engine_->chat_text(messages_, false);
    for (const std::string &said : {text, trimmed(text)}) {
        if (starts_with(now, before + said)) {
            return engine_->tokens_of(now.substr(before.size() + said.size()), false);
        }
    }
    return {engine_->end_of_turn()};
}

void conversation::withdraw_question(const tokens_t &before) {
    messages_.pop_back();
    tokens = before;
}
