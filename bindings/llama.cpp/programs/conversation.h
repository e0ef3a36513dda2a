// One conversation: its messages, and the tokens that the context holds for it.
#pragma once

#include "engine.h"
#include "kv_cache.h"

#include <string>
#include <vector>

class conversation {
  public:
    conversation(const engine &e, const std::string &system);

    // Appends a question. Returns the tokens to decode after the tokens so far. Clears `tokens` if the
    // template changed the text before the question.
    tokens_t ask(const std::string &text);
    // Appends the answer. Returns the tokens that the template puts after it.
    tokens_t end_answer(const std::string &text);
    // Removes the last question, which got no answer, and restores the tokens before it.
    void withdraw_question(const tokens_t &before);

    // Appends a message of a transcript.
    void restore(const message &m) { messages_.push_back(m); }

    void add(const tokens_t &more) { tokens.insert(tokens.end(), more.begin(), more.end()); }

    const std::vector<message> &messages() const { return messages_; }

    tokens_t tokens;

  private:
    const engine *engine_;
    std::vector<message> messages_;
};
