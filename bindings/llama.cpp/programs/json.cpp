// A writer of JSON objects and a strict reader with limits.
#include "json.h"

#include "text.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

namespace {

constexpr int most_depth = 32;

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

    json_value whole() {
        json_value value = any(0);
        skip();
        if (at != text.size()) {
            wrong("something follows the value");
        }
        return value;
    }

  private:
    const std::string &text;
    size_t at = 0;

    [[noreturn]] void wrong(const char *what) const {
        throw std::runtime_error("no JSON: " + std::string(what) + " at byte " + std::to_string(at));
    }

    void skip() {
        at = std::min(text.find_first_not_of(" \t\r\n", at), text.size());
    }

    bool take(char c) {
        skip();
        const bool there = at < text.size() && text[at] == c;
        at += there;
        return there;
    }

    void want(char c, const char *what) {
        if (!take(c)) {
            wrong(what);
        }
    }

    bool word(const char *letters) {
        const std::string all = letters;
        const bool there = text.compare(at, all.size(), all) == 0;
        at += there ? all.size() : 0;
        return there;
    }

    json_value any(int depth) {
        if (depth > most_depth) {
            wrong("too deep");
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
        } else if (word("true") || word("false")) {
            value.is = json_value::boolean;
            value.truth = c == 't';
        } else if (!word("null")) {
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
                wrong("a name is missing");
            }
            const std::string name = string();
            want(':', "':' is missing");
            if (!value.fields.emplace(name, any(depth + 1)).second) {
                wrong("a name is there twice");
            }
        } while (take(','));
        want('}', "',' or '}' is missing");
    }

    void array(json_value &value, int depth) {
        value.is = json_value::array;
        ++at;
        if (take(']')) {
            return;
        }
        do {
            value.items.push_back(any(depth + 1));
        } while (take(','));
        want(']', "',' or ']' is missing");
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
            wrong("no value");
        }
    }

    uint32_t hex4() {
        uint32_t c = 0;
        for (int i = 0; i < 4; ++i, ++at) {
            const char digit = at < text.size() ? text[at] : 0;
            const char lower = (char) (digit >= 'A' && digit <= 'F' ? digit + 32 : digit);
            const size_t worth = std::string("0123456789abcdef").find(lower);
            if (digit == 0 || worth == std::string::npos) {
                wrong("\\u wants four digits");
            }
            c = c << 4 | (uint32_t) worth;
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
            wrong("an escape that there is not");
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
                wrong("a control character in a text");
            }
            if (c == '\\') {
                escape(out);
            } else {
                out += c;
            }
        }
        if (at >= text.size()) {
            wrong("a text does not end");
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
    return reader(text).whole();
}
