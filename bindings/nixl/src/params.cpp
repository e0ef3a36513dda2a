#include "params.hpp"

#include <cctype>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>

namespace kvtier_nixl {

namespace {

/// Most seconds of a remote lookup.
constexpr double max_lookup_s = 3600;

std::string value_of(const given_params &given, const std::string &name) {
    const auto found = given.find(name);
    if (found != given.end() && !found->second.empty()) return found->second;
    std::string variable = "KVTIER_NIXL_" + name;
    for (char &letter : variable) letter = static_cast<char>(std::toupper(letter));
    const char *value = std::getenv(variable.c_str());
    return value != nullptr && *value != '\0' ? value : default_params().at(name);
}

std::chrono::nanoseconds seconds(const std::string &text) {
    double value = 0;
    const char *end = text.data() + text.size();
    const auto [at, error] = std::from_chars(text.data(), end, value); // in any locale
    if (error != std::errc() || at != end || !(value > 0 && value <= max_lookup_s))
        throw std::invalid_argument("lookup_s=\"" + text + "\" is invalid: give seconds, above 0 and at "
                                    "most 3600");
    return std::chrono::nanoseconds(static_cast<std::int64_t>(value * 1e9));
}

}  // namespace

const given_params &default_params() {
    static const given_params defaults = {
        {"spec", ""}, {"level", ""}, {"weights", ""}, {"bucket", ""}, {"lookup_s", "5"}};
    return defaults;
}

params read_params(const given_params &given, bool stands_for_obj) {
    for (const auto &[name, value] : given)
        if (!stands_for_obj && default_params().count(name) == 0)
            throw std::invalid_argument("there is no parameter \"" + name +
                                        "\": use spec, level, weights, bucket or lookup_s");
    params out;
    out.spec = value_of(given, "spec");
    if (out.spec.empty())
        throw std::invalid_argument(
            "the parameter spec is missing: give a store, such as store(host=8GiB, "
            "remote=dir(path=\"/shared/kv\")), or set KVTIER_NIXL_SPEC");
    out.level = value_of(given, "level");
    if (!out.level.empty() && out.level != "ram" && out.level != "disk" && out.level != "durable" &&
        out.level != "remote")
        throw std::invalid_argument("level=\"" + out.level +
                                    "\" is unknown: use ram, disk, durable or remote");
    out.weights = value_of(given, "weights");
    out.bucket = value_of(given, "bucket");
    out.lookup = seconds(value_of(given, "lookup_s"));
    return out;
}

}  // namespace kvtier_nixl
