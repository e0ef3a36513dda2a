// What `kvtier run` passes in the environment, and lines on stderr.
#pragma once

#include <string>

namespace kvtier_run {

struct settings_t {
    /// Spec of the store; empty = the library does nothing.
    std::string store;
    /// Separates tenants.
    std::string salt;
    /// File that gets a line of JSON for each context that is closed.
    std::string stats;
    bool quiet = false;
};

const settings_t &settings();

/// One line on stderr that says why something is not done; never silenced.
void warn(const std::string &what);
/// One line on stderr, unless `--quiet`.
void tell(const std::string &what);

} // namespace kvtier_run
