// Templates only make whole texts. What a turn adds is the difference of two of them, and the tokens of
// what was said before stay as they are: a text that is cut into tokens anew may be cut otherwise, and
// then its KV is of no use.
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
    // Some templates put the system's words into the first question: a prefix only from then on.
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
    // Where the template does not say what belongs behind an answer, the model's own mark does.
    messages_.push_back({"assistant", text});
    const std::string now = engine_->chat_text(messages_, false);
    for (const std::string &said : {text, trimmed(text)}) {
        if (starts_with(now, before + said)) {
            return engine_->tokens_of(now.substr(before.size() + said.size()), false);
        }
    }
    return {engine_->end_of_turn()};
}

void conversation::unask(const tokens_t &before) {
    messages_.pop_back();
    tokens = before;
}
