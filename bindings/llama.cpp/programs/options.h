// The options of the command line.
#pragma once

#include <cstdint>
#include <string>

enum class command { chat, complete, batch };

struct options {
    command action = command::complete;
    std::string model;
    uint32_t ctx = 0;
    uint32_t threads = 0;
    uint32_t answer_tokens = 512;

    uint64_t host_bytes = uint64_t(1) << 30;
    uint64_t disk_bytes = uint64_t(8) << 30;
    std::string disk;
    std::string policy;
    std::string salt;
    bool kv = true;

    std::string prompt;
    bool prompt_given = false;
    std::string input;
    std::string session;
    std::string system;
    std::string chat_template;

    uint32_t seed = 0;
    bool seed_given = false;
    float temp = 0.8f;

    std::string sparse;
    uint32_t longer_tokens = 0;
    uint64_t stream_bytes = 0;

    bool json = false;
    bool quiet = false;
};

// Parses the command line. False: help was printed. Throws failure{exit_usage}.
bool parse_options(int argc, char **argv, options &out);

// Bytes of a size such as 65536, 512MiB or 1.5GB. kB and MB are powers of 1000; KiB, MiB, K and M of 1024.
// Throws failure{exit_usage}.
uint64_t parse_size(const std::string &flag, const std::string &text);
