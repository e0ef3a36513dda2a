// Reads the environment variables of `kvtier run`.
#include "run/settings.hpp"

#include <cstdio>
#include <cstdlib>

namespace kvtier_run {

namespace {

std::string variable(const char *name) {
    const char *value = std::getenv(name);
    return value ? value : "";
}

settings_t read() {
    settings_t out;
    out.store = variable("KVTIER_RUN_STORE");
    out.salt = variable("KVTIER_RUN_SALT");
    out.stats = variable("KVTIER_RUN_STATS");
    out.quiet = variable("KVTIER_RUN_QUIET") == "1";
    return out;
}

} // namespace

const settings_t &settings() {
    static const settings_t all = read();
    return all;
}

void warn(const std::string &what) { std::fprintf(stderr, "kvtier: %s\n", what.c_str()); }

void tell(const std::string &what) {
    if (!settings().quiet) {
        warn(what);
    }
}

} // namespace kvtier_run
