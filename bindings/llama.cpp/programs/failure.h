// An error that ends the program or one request: a message for the user and an exit status.
#pragma once

#include <stdexcept>
#include <string>

// Exit statuses, as --help lists them.
enum exit_status {
    exit_good = 0,
    exit_failed = 1,
    exit_usage = 2,
    exit_model = 3,
    exit_store = 4,
    exit_interrupted = 130,
};

struct failure : std::runtime_error {
    exit_status status;

    failure(exit_status why, const std::string &text) : std::runtime_error(text), status(why) {}
};
