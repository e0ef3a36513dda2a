// Decodes UTF-8 from a stream of bytes.
#include "text.h"

namespace {

const char replacement[] = "\xEF\xBF\xBD";

// Length of the character that starts with this byte, in bytes; 0 if no character starts with it.
size_t length_of(unsigned char first) {
    if (first < 0x80) {
        return 1;
    }
    if (first >= 0xC2 && first < 0xE0) {
        return 2;
    }
    if (first >= 0xE0 && first < 0xF0) {
        return 3;
    }
    return first >= 0xF0 && first < 0xF5 ? 4 : 0;
}

// Whether `byte` is valid at index `at` (from 1) after `first`. Rejects overlong forms and surrogates.
bool follows(unsigned char first, size_t at, unsigned char byte) {
    unsigned char least = 0x80, most = 0xBF;
    if (at == 1) {
        least = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : least;
        most = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : most;
    }
    return byte >= least && byte <= most;
}

} // namespace

std::string utf8_stream::feed(const std::string &bytes) {
    const std::string all = held + bytes;
    std::string out;
    held.clear();
    for (size_t at = 0; at < all.size();) {
        const unsigned char first = (unsigned char) all[at];
        const size_t wanted = length_of(first);
        size_t have = wanted ? 1 : 0;
        while (have > 0 && have < wanted && at + have < all.size() &&
               follows(first, have, (unsigned char) all[at + have])) {
            ++have;
        }
        if (wanted && have == wanted) {
            out.append(all, at, have);
        } else if (wanted && at + have == all.size()) {
            held = all.substr(at);
            break;
        } else {
            out += replacement;
            have = have ? have : 1;
        }
        at += have;
    }
    return out;
}

std::string utf8_stream::rest() {
    const std::string out = held.empty() ? "" : replacement;
    held.clear();
    return out;
}

std::string clean_utf8(const std::string &bytes) {
    utf8_stream stream;
    const std::string out = stream.feed(bytes);
    return out + stream.rest();
}
