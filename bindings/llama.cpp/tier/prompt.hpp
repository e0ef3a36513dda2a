// Prompts and sequences: tokens, and images or sounds among them. A token has an index, and its cell has a
// position. The two differ after media of M-RoPE models.
#pragma once

#include "tier/state.hpp"

#include <kvtier/llama.h>

#include <array>
#include <vector>

namespace kvtier_llama {

using tokens_t = std::vector<llama_token>;

/// Embeddings in a prompt, in place of tokens.
struct media_t {
    size_t first = 0;
    uint32_t tokens = 0;
    /// The position of the first one, and how many positions all of them take.
    int32_t start = 0, positions = 0;
    /// Width of a grid; 0 = consecutive positions, or a layout: position, x and y of each, from `start` on.
    uint32_t width = 0;
    std::vector<int32_t> layout;
    /// Of the content and of the fields above.
    std::array<uint8_t, 32> digest{};

    size_t end() const { return first + tokens; }
    cell_t cell(uint32_t at) const;
    /// The index in the media of a cell; `tokens` = it has no such cell.
    uint32_t find(const cell_t &cell) const;
};

/// A prefix of a prompt or of a sequence. Does not own the tokens or the media.
struct prompt_t {
    const llama_token *tokens = nullptr;
    size_t count = 0;
    const std::vector<media_t> *media = nullptr;

    prompt_t prefix(size_t length) const { return {tokens, length, media}; }
    /// The engine's cell of one token.
    cell_t cell(size_t index) const;
    /// The position at which the engine decodes the token at an index.
    int32_t position(size_t index) const;
    /// What the engine's last position plus one is after a number of tokens.
    int32_t end_position(size_t length) const { return length == 0 ? 0 : cell(length - 1).position + 1; }
    /// Inverse of end_position: tokens with a position below `end`.
    size_t length_before(int32_t end) const;
    /// The index of a cell; `count` or more = none.
    size_t find(const cell_t &cell) const;
    /// Whether an index is one of media.
    bool is_media(size_t index) const {
        const media_t *last = before(index + 1);
        return last && index < last->end();
    }
    /// Whether [first, end) has tokens of media.
    bool has_media(size_t first, size_t end) const {
        const media_t *last = before(end);
        return last && last->end() > first;
    }
    /// The start of the media that a length would cut, or the length.
    size_t cut(size_t length) const;
    /// The end of the media that a length would cut, or the length.
    size_t complete(size_t length) const;
    /// Length of the common start of two prompts, which does not cut media.
    size_t common(const prompt_t &other) const;

private:
    /// The last media that begin before an index; null = none.
    const media_t *before(size_t index) const;
};

/// Tokens and media that are owned.
struct text_t {
    tokens_t tokens;
    std::vector<media_t> media;

    prompt_t prompt() const { return {tokens.data(), tokens.size(), &media}; }
    void assign(const prompt_t &of);
    /// Shortens to at most `length` tokens, without cutting media.
    void shorten(size_t length);
};

} // namespace kvtier_llama
