// One request: restore, prefill, decode, save.
#pragma once

#include "engine.h"
#include "keeper.h"
#include "screen.h"

#include <functional>
#include <string>

enum class stop_t { end, length, context, interrupted };

const char *stop_text(stop_t why);

struct answer_t {
    std::string text;
    stop_t stop = stop_t::end;
    uint32_t prompt_tokens = 0;
    found reused;
    uint32_t prefilled = 0;
    uint32_t decoded = 0; // tokens of the answer
    double prefill_ns = 0;
    double decode_ns = 0;
    double first_ns = 0; // from the request to the first token
};

struct asked_t {
    uint32_t most_tokens = 0;
    // Called with each part of the text.
    std::function<void(const std::string &)> on_text;
    // Called every few tokens, when they are safe in the store's hands.
    std::function<void(const std::string &, const tokens_t &)> on_saved;
};

// Throws failure where the context has no room for these and one more.
void need_room(const keeper &k, const tokens_t &tokens);

// Answers the prompt; tokens get the answer's behind them. An interrupt in the prefill ends with no text.
// Throws failure.
answer_t answer(engine &e, keeper &k, screen &out, tokens_t &tokens, const asked_t &asked);
