// JSON, as much as lines of it need: objects are written field by field, and read whole.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

// A text in quotes, valid whatever its bytes are.
std::string json_text(const std::string &text);

// Writes one object. Fields come in the order of the calls.
class json_object {
  public:
    json_object &text(const char *name, const std::string &value);
    json_object &number(const char *name, double value);
    json_object &count(const char *name, uint64_t value);
    json_object &flag(const char *name, bool value);
    json_object &raw(const char *name, const std::string &json);
    std::string str() const { return "{" + fields + "}"; }

  private:
    std::string fields;
};

// What was read. Numbers are kept as they are.
struct json_value {
    enum kind { null, boolean, number, string, array, object } is = null;
    bool truth = false;
    double amount = 0;
    std::string text;
    std::vector<json_value> items;
    std::map<std::string, json_value> fields;

    const json_value *find(const std::string &name) const;
};

// Reads one value that fills all of the text. Throws std::runtime_error with what is wrong and where.
json_value read_json(const std::string &text);
