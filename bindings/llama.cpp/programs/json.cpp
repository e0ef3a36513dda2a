// Writes JSON objects; parses values strictly, with a limit of the depth.
#include "json.h"

#include "text.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

namespace {

constexpr int max_depth = 32; // the message of parse_value names it

void add_utf8(std::string &out, uint32_t c) {
    if (c < 0x80) {
        out += (char) c;
    } else if (c < 0x800) {
        out += (char) (0xC0 | c >> 6);
        out += (char) (0x80 | (c & 63));
    } else if (c < 0x10000) {
        out += (char) (0xE0 | c >> 12);
        out += (char) (0x80 | (c >> 6 & 63));
        out += (char) (0x80 | (c & 63));
    } else {
        out += (char) (0xF0 | c >> 18);
        out += (char) (0x80 | (c >> 12 & 63));
        out += (char) (0x80 | (c >> 6 & 63));
        out += (char) (0x80 | (c & 63));
    }
}

class reader {
  public:
    explicit reader(const std::string &what) : text(what) {}

    json_value parse() {
        json_value value = parse_value(0);
        skip();
        if (at != text.size()) {
            fail("text after the value");
        }
        return value;
    }

  private:
    const std::string &text;
    size_t at = 0;

    [[noreturn]] void fail(const char *what) const {
        throw std::runtime_error("invalid JSON: " + std::string(what) + " at byte " + std::to_string(at));
    }

    void skip() {
        at = std::min(text.find_first_not_of(" \t\r\n", at), text.size());
    }

    bool take(char c) {
        skip();
        const bool found = at < text.size() && text[at] == c;
        at += found;
        return found;
    }

    void expect(char c, const char *what) {
        if (!take(c)) {
            fail(what);
        }
    }

    bool literal(const char *letters) {
        const std::string all = letters;
        const bool found = text.compare(at, all.size(), all) == 0;
        at += found ? all.size() : 0;
        return found;
    }

    json_value parse_value(int depth) {
        if (depth > max_depth) {
            fail("more than 32 nested values");
        }
        skip();
        json_value value;
        const char c = at < text.size() ? text[at] : 0;
        if (c == '{') {
            object(value, depth);
        } else if (c == '[') {
            array(value, depth);
        } else if (c == '"') {
            value.is = json_value::string;
            value.text = string();
        } else if (literal("true") || literal("false")) {
            value.is = json_value::boolean;
            value.truth = c == 't';
        } else if (!literal("null")) {
            number(value);
        }
        return value;
    }

    void object(json_value &value, int depth) {
        value.is = json_value::object;
        ++at;
        if (take('}')) {
            return;
        }
        do {
            skip();
            if (at >= text.size() || text[at] != '"') {
                fail("a member name in quotes is missing");
            }
            const std::string name = string();
            expect(':', "':' is missing");
            if (!value.fields.emplace(name, parse_value(depth + 1)).second) {
                fail("a repeated member name");
            }
        } while (take(','));
        expect('}', "',' or '}' is missing");
    }

    void array(json_value &value, int depth) {
        value.is = json_value::array;
        ++at;
        if (take(']')) {
            return;
        }
        do {
            value.items.push_back(parse_value(depth + 1));
        } while (take(','));
        expect(']', "',' or ']' is missing");
    }

    void number(json_value &value) {
        const size_t start = at;
        while (at < text.size() && text.find_first_of("+-.eE0123456789", at) == at) {
            ++at;
        }
        const std::string digits = text.substr(start, at - start);
        char *end = nullptr;
        value.is = json_value::number;
        value.amount = std::strtod(digits.c_str(), &end);
        const size_t first = !digits.empty() && digits[0] == '-' ? 1 : 0;
        const bool starts = digits.size() > first && digits[first] >= '0' && digits[first] <= '9';
        if (!starts || *end != 0 || !std::isfinite(value.amount)) {
            at = start;
            fail("no valid value");
        }
    }

    uint32_t hex4() {
        uint32_t c = 0;
        for (int i = 0; i < 4; ++i, ++at) {
            const char digit = at < text.size() ? text[at] : 0;
            const char lower = (char) (digit >= 'A' && digit <= 'F' ? digit + 32 : digit);
            const size_t digit_value = std::string("0123456789abcdef").find(lower);
            if (digit == 0 || digit_value == std::string::npos) {
                fail("\\u without four hexadecimal digits");
            }
            c = c << 4 | (uint32_t) digit_value;
        }
        return c;
    }

    void escape(std::string &out) {
        const char c = at < text.size() ? text[at++] : 0;
        const char *from = "\"\\/bfnrt";
        const char *to = "\"\\/\b\f\n\r\t";
        const size_t known = c ? std::string(from).find(c) : std::string::npos;
        if (known != std::string::npos) {
            out += to[known];
            return;
        }
        if (c != 'u') {
            fail("an unknown escape");
        }
        uint32_t code = hex4();
        if (code >= 0xD800 && code < 0xDC00 && text.compare(at, 2, "\\u") == 0) {
            at += 2;
            const uint32_t low = hex4();
            const bool pair = low >= 0xDC00 && low < 0xE000;
            code = pair ? 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00) : 0xFFFD;
        }
        add_utf8(out, code >= 0xD800 && code < 0xE000 ? 0xFFFD : code);
    }

    std::string string() {
        std::string out;
        ++at;
        while (at < text.size() && text[at] != '"') {
            const char c = text[at++];
            if ((unsigned char) c < 0x20) {
                fail("a control character in a string");
            }
            if (c == '\\') {
                escape(out);
            } else {
                out += c;
            }
        }
        if (at >= text.size()) {
            fail("an unterminated string");
        }
        ++at;
        return out;
    }
};

} // namespace

std::string json_text(const std::string &text) {
    std::string out = "\"";
    for (const char c : clean_utf8(text)) {
        char code[8];
        if (c == '"' || c == '\\') {
            out += '\\';
            out += c;
        } else if (c == '\n') {
            out += "\\n";
        } else if ((unsigned char) c < 0x20 || c == 0x7F) {
            std::snprintf(code, sizeof code, "\\u%04x", (unsigned) (unsigned char) c);
            out += code;
        } else {
            out += c;
        }
    }
    return out + "\"";
}

json_object &json_object::raw(const char *name, const std::string &json) {
    fields += (fields.empty() ? "" : ",") + json_text(name) + ":" + json;
    return *this;
}

json_object &json_object::text(const char *name, const std::string &value) {
    return raw(name, json_text(value));
}

json_object &json_object::number(const char *name, double value) {
    char digits[40];
    std::snprintf(digits, sizeof digits, "%.6g", std::isfinite(value) ? value : 0.0);
    return raw(name, digits);
}

json_object &json_object::count(const char *name, uint64_t value) {
    return raw(name, std::to_string(value));
}

json_object &json_object::flag(const char *name, bool value) {
    return raw(name, value ? "true" : "false");
}

const json_value *json_value::find(const std::string &name) const {
    const auto it = fields.find(name);
    return it == fields.end() ? nullptr : &it->second;
}

json_value read_json(const std::string &text) {
    return reader(text).parse();
}
