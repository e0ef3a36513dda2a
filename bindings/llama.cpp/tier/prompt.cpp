// Indices and positions of prompts with media, and the caller's prompts.
#include "tier/tier.hpp"

#include <algorithm>
#include <cstring>

namespace kvtier_llama {

namespace {

constexpr size_t max_media = size_t(1) << 24;
constexpr int32_t max_offset = int32_t(1) << 24;

void refuse_media(size_t number, const std::string &what) {
    fail(KVT_E_INVALID, "media " + std::to_string(number) + " of the prompt: " + what);
}

/// Binds the shape of media to the digest of their content.
void mix_shape(media_t &one) {
    uint64_t words[4] = {one.tokens, uint64_t(one.positions), one.width, 0};
    const uint64_t bytes = one.layout.size() * sizeof(int32_t);
    if (bytes != 0) {
        demand(kvt_checksum(one.layout.data(), bytes, &words[3]), nullptr, "summing a layout");
    }
    uint8_t mask[sizeof words];
    std::memcpy(mask, words, sizeof words);
    for (size_t i = 0; i < sizeof words; i++) {
        one.digest[i] = uint8_t(one.digest[i] ^ mask[i]);
    }
}

/// Whether all caches with cells tell cells of one position apart.
bool has_grids(const tier_t &tier) {
    return std::all_of(tier.shape.sections.begin(), tier.shape.sections.end(), [](const section_shape &one) {
        return one.kind != section_kind::cells || (one.spatial && one.window_tokens == 0);
    });
}

void check_layout(size_t number, const media_t &one) {
    for (size_t i = 0; i < one.layout.size(); i++) {
        if (one.layout[i] < 0 || one.layout[i] > max_offset) {
            refuse_media(number, "its layout has a number that is not in 0..2^24");
        }
        if (i % 3 == 0 && i != 0 && one.layout[i] < one.layout[i - 3]) {
            refuse_media(number, "the positions of its layout must not decrease");
        }
    }
    const int32_t last = one.layout.empty() ? 0 : one.layout[one.layout.size() - 3];
    if (last >= one.positions) {
        refuse_media(number, "its layout has a position of " + std::to_string(last) + ", but it takes " +
                                 std::to_string(one.positions) + " positions");
    }
}

} // namespace

media_t read_media(const tier_t &tier, const kvt_llama_prompt_t &of, size_t number, size_t from,
                   int32_t position) {
    const kvt_llama_media_t &given = of.media[number];
    if (given.first < from || given.tokens == 0 || given.first >= of.n_tokens ||
        given.tokens > of.n_tokens - given.first) {
        refuse_media(number, "its tokens are not in the prompt, or overlap with the media before it");
    }
    media_t one;
    one.first = size_t(given.first);
    one.tokens = given.tokens;
    one.width = given.width;
    const uint64_t start = uint64_t(position) + (one.first - from);
    if (given.positions == 0 || start + given.positions > INT32_MAX) {
        refuse_media(number, "its number of positions is 0 or too large");
    }
    one.start = int32_t(start);
    one.positions = int32_t(given.positions);
    const bool is_grid = given.width != 0 || given.layout;
    if (is_grid && !has_grids(tier)) {
        fail(KVT_E_UNSUPPORTED, "media " + std::to_string(number) + " of the prompt have a width or a layout, "
                                "but this model has no M-RoPE, or a window or another cache without it: set "
                                "both to 0, or commit and attach only the tokens before it");
    }
    if (given.layout) {
        one.layout.assign(given.layout, given.layout + 3 * size_t(given.tokens));
    }
    const uint32_t height = given.width != 0 ? (given.tokens - 1) / given.width + 1 : 0;
    if (!is_grid && given.positions != given.tokens) {
        refuse_media(number, "without a width or a layout it takes as many positions as tokens");
    }
    if (!given.layout && is_grid && given.positions < std::max(std::min(given.width, given.tokens), height)) {
        refuse_media(number, "it takes fewer positions than its width or height");
    }
    check_layout(number, one);
    std::memcpy(one.digest.data(), given.digest, one.digest.size());
    mix_shape(one);
    return one;
}

cell_t media_t::cell(uint32_t at) const {
    if (!layout.empty()) {
        const int32_t *place = layout.data() + 3 * size_t(at);
        return {start + place[0], start + place[1], start + place[2], -1};
    }
    if (width != 0) {
        return {start, start + int32_t(at % width), start + int32_t(at / width), -1};
    }
    const int32_t position = start + int32_t(at);
    return {position, position, position, -1};
}

uint32_t media_t::find(const cell_t &cell) const {
    if (!layout.empty()) {
        for (uint32_t i = 0; i < tokens; i++) {
            const cell_t own = this->cell(i);
            if (own.position == cell.position && own.x == cell.x && own.y == cell.y) {
                return i;
            }
        }
        return tokens;
    }
    const int64_t x = int64_t(cell.x) - start, y = int64_t(cell.y) - start;
    if (width != 0) {
        const bool inside = x >= 0 && x < int64_t(width) && y >= 0 && y * width + x < int64_t(tokens);
        return inside ? uint32_t(y * width + x) : tokens;
    }
    return std::min(uint32_t(cell.position - start), tokens);
}

const media_t *prompt_t::before(size_t index) const {
    if (!media) {
        return nullptr;
    }
    const auto after = std::lower_bound(media->begin(), media->end(), index,
                                        [](const media_t &one, size_t at) { return one.first < at; });
    return after == media->begin() ? nullptr : &*(after - 1);
}

int32_t prompt_t::position(size_t index) const {
    const media_t *last = before(index);
    if (!last) {
        return int32_t(index);
    }
    return index < last->end() ? last->cell(uint32_t(index - last->first)).position
                               : last->start + last->positions + int32_t(index - last->end());
}

cell_t prompt_t::cell(size_t index) const {
    const media_t *last = before(index + 1);
    if (last && index < last->end()) {
        return last->cell(uint32_t(index - last->first));
    }
    const int32_t at = position(index);
    return {at, at, at, tokens[index]};
}

size_t prompt_t::length_before(int32_t end) const {
    size_t low = 0, high = count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (cell(middle).position < end) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

size_t prompt_t::find(const cell_t &cell) const {
    const media_t *last = nullptr;
    if (media) {
        const auto after =
            std::upper_bound(media->begin(), media->end(), cell.position,
                             [](int32_t position, const media_t &one) { return position < one.start; });
        last = after == media->begin() ? nullptr : &*(after - 1);
    }
    if (!last) {
        return size_t(cell.position);
    }
    const int32_t past = cell.position - last->start - last->positions;
    if (past >= 0) {
        return last->end() + size_t(past);
    }
    const uint32_t at = last->find(cell);
    return at < last->tokens ? last->first + at : count;
}

size_t prompt_t::cut(size_t length) const {
    const media_t *last = before(length);
    return last && length < last->end() ? last->first : length;
}

size_t prompt_t::complete(size_t length) const {
    const media_t *last = before(length);
    return last && length < last->end() ? last->end() : length;
}

size_t prompt_t::common(const prompt_t &other) const {
    const size_t both = std::min(count, other.count);
    size_t same = size_t(std::mismatch(tokens, tokens + both, other.tokens).first - tokens);
    static const std::vector<media_t> none;
    const std::vector<media_t> &a = media ? *media : none, &b = other.media ? *other.media : none;
    for (size_t i = 0; i < std::max(a.size(), b.size()); i++) {
        const bool equal = i < a.size() && i < b.size() && a[i].first == b[i].first && a[i].digest == b[i].digest;
        if (!equal) {
            const size_t first = i < a.size() ? a[i].first : b[i].first;
            same = std::min(same, i < b.size() ? std::min(first, b[i].first) : first);
            break;
        }
    }
    return cut(same);
}

void text_t::assign(const prompt_t &of) {
    tokens.assign(of.tokens, of.tokens + of.count);
    media.clear();
    for (size_t i = 0; of.media && i < of.media->size() && (*of.media)[i].first < of.count; i++) {
        media.push_back((*of.media)[i]);
    }
}

void text_t::shorten(size_t length) {
    if (length < tokens.size()) {
        tokens.resize(prompt().cut(length));
        while (!media.empty() && media.back().first >= tokens.size()) {
            media.pop_back();
        }
    }
}

given_t::given_t(const tier_t &tier, const kvt_llama_prompt_t &of) {
    if ((!of.tokens && of.n_tokens != 0) || of.n_tokens > INT32_MAX || (!of.media && of.n_media != 0) ||
        of.n_media > max_media) {
        fail(KVT_E_INVALID, "tokens or media are null, or n_tokens is above INT32_MAX, or n_media above 2^24");
    }
    const llama_token *tokens = of.tokens;
    size_t from = 0;
    int32_t position = 0;
    for (size_t i = 0; i < of.n_media; i++) {
        own.media.push_back(read_media(tier, of, i, from, position));
        from = own.media.back().end();
        position = own.media.back().start + own.media.back().positions;
    }
    if (of.n_media != 0) {
        own.tokens.assign(of.tokens, of.tokens + of.n_tokens);
        for (const media_t &one : own.media) {
            std::fill_n(own.tokens.begin() + long(one.first), one.tokens, LLAMA_TOKEN_NULL);
        }
        tokens = own.tokens.data();
    }
    prompt = {tokens, of.n_tokens, &own.media};
    check_tokens(tier, prompt);
}

} // namespace kvtier_llama
