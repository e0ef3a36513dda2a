/// @file
/// Parameters of the backend.

#ifndef KVTIER_NIXL_PARAMS_HPP
#define KVTIER_NIXL_PARAMS_HPP

#include <chrono>
#include <string>
#include <unordered_map>

namespace kvtier_nixl {

/// The parameters that `create_backend` passes.
using given_params = std::unordered_map<std::string, std::string>;

struct params {
    /// The store, such as `store(host=8GiB, remote=dir(path="/shared/kv"))`.
    std::string spec;
    /// When a WRITE is done: ram, disk, durable, remote; empty = the farthest tier that the store has.
    std::string level;
    /// A text that changes with the model and its weights.
    std::string weights;
    /// Separates objects of equal keys.
    std::string bucket;
    /// Most time of a remote lookup.
    std::chrono::nanoseconds lookup{};
};

/// The names of the parameters, with their defaults.
const given_params &default_params();

/// Reads the parameters. A parameter that is absent or empty is taken from the environment:
/// KVTIER_NIXL_SPEC for `spec`. Throws std::invalid_argument for an unknown name, unless
/// `stands_for_obj`: NIXL's object plugin has parameters that mean nothing here.
params read_params(const given_params &given, bool stands_for_obj);

}  // namespace kvtier_nixl

#endif
