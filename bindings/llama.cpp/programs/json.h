// JSON as far as its lines need: objects are written field by field; values are read whole.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

// A string in quotes, valid JSON for any bytes.
std::string json_text(const std::string &text);

// Writes one object, with fields in the order of the calls.
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

// A parsed value.
struct json_value {
    enum kind { null, boolean, number, string, array, object } is = null;
    bool truth = false;
    double amount = 0;
    std::string text;
    std::vector<json_value> items;
    std::map<std::string, json_value> fields;

    const json_value *find(const std::string &name) const;
};

// Parses one value that fills the text. Throws std::runtime_error with the error and its offset.
json_value read_json(const std::string &text);
