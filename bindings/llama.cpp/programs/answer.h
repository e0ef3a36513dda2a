// One request: restore, prefill, decode, save.
#pragma once

#include "engine.h"
#include "kv_cache.h"
#include "screen.h"

#include <functional>
#include <string>

enum class stop_t { end, length, context, interrupted };

const char *stop_text(stop_t why);

struct answer_t {
    std::string text;
    stop_t stop = stop_t::end;
    uint32_t prompt_tokens = 0;
    prefix_reuse reused;
    uint32_t prefilled = 0;
    uint32_t decoded = 0; // tokens of the answer
    double prefill_ns = 0;
    double decode_ns = 0;
    double first_ns = 0; // from the request to the first token
};

struct answer_options {
    uint32_t max_tokens = 0;
    // Called with each part of the text.
    std::function<void(const std::string &)> on_text;
    // Called every 32 tokens and at the end, after these tokens were committed to the store.
    std::function<void(const std::string &, const tokens_t &)> on_saved;
};

// Throws failure unless the context has room for the tokens and one more.
void check_room(const kv_cache &cache, const tokens_t &tokens);

// Answers the prompt and appends the answer's tokens to `tokens`. An interrupt during the prefill gives an
// empty text. Throws failure.
answer_t answer(engine &e, kv_cache &cache, screen &out, tokens_t &tokens, const answer_options &opts);
