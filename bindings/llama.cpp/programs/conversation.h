// One conversation, as messages and as the tokens that the context is to hold for it.
#pragma once

#include "engine.h"
#include "keeper.h"

#include <string>
#include <vector>

class conversation {
  public:
    conversation(const engine &e, const std::string &system);

    // A question: what is to be decoded behind the tokens so far. The last message is the question now.
    tokens_t ask(const std::string &text);
    // The answer to it: what belongs behind it, as the template has it.
    tokens_t end_answer(const std::string &text);
    // Takes a question back that could not be answered: these were the tokens before it.
    void unask(const tokens_t &before);

    // As they were written down.
    void restore(const message &m) { messages_.push_back(m); }

    void add(const tokens_t &more) { tokens.insert(tokens.end(), more.begin(), more.end()); }

    const std::vector<message> &messages() const { return messages_; }

    tokens_t tokens;

  private:
    const engine *engine_;
    std::vector<message> messages_;
};
