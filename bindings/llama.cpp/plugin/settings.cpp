#include "settings.h"

#include "routing.h"

#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace kvtier_plugin {

namespace {

constexpr uint64_t MAX_SLOTS = 64;
constexpr uint64_t MAX_THREADS = 512;

// Null if a variable is not set, or empty.
const char * variable(const char * name) {
    const char * value = std::getenv(name);
    return value && *value ? value : nullptr;
}

bool number_read(const char * name, uint64_t least, uint64_t most, uint64_t & out, std::string & why) {
    const char * text = variable(name);
    if (!text) {
        return true;
    }
    uint64_t value = 0;
    for (const char * at = text; *at; at++) {
        if (*at < '0' || *at > '9' || value > most) {
            value = most + 1;
            break;
        }
        value = value * 10 + uint64_t(*at - '0');
    }
    if (value < least || value > most) {
        why = std::string(name) + "=" + text + " is not a number from " + std::to_string(least) + " to " +
              std::to_string(most);
        return false;
    }
    out = value;
    return true;
}

bool path_read(const char * name, mode_t kind, std::string & out, std::string & why) {
    const char * path = variable(name);
    if (!path) {
        return true;
    }
    struct stat seen;
    if (stat(path, &seen) != 0 || (seen.st_mode & S_IFMT) != kind) {
        why = std::string(name) + "=" + path + " is not a " +
              (kind == S_IFDIR ? "directory" : "file") + ", or cannot be accessed";
        return false;
    }
    out = path;
    return true;
}

} // namespace

bool size_parse(const char * text, uint64_t & out) {
    constexpr uint64_t MOST = uint64_t(1) << 56;
    uint64_t value = 0;
    const char * at = text;
    for (; *at >= '0' && *at <= '9'; at++) {
        value = value * 10 + uint64_t(*at - '0');
        if (value > MOST) {
            return false;
        }
    }
    if (at == text) {
        return false;
    }
    const char * units = "KMGT";
    const char * unit = *at ? std::strchr(units, *at) : nullptr;
    if (unit) {
        for (const char * step = units; step <= unit; step++) {
            value *= 1024;
            if (value > MOST) {
                return false;
            }
        }
        at++;
        if (std::strcmp(at, "iB") == 0) {
            at += 2;
        }
    }
    if (*at != 0 || value == 0) {
        return false;
    }
    out = value;
    return true;
}

static bool size_read(const char * name, uint64_t & out, std::string & why) {
    const char * text = variable(name);
    if (!text || size_parse(text, out)) {
        return true;
    }
    why = std::string(name) + "=" + text + " is not a size such as 500000000, 512M or 3G";
    return false;
}

bool settings_read(Settings & out, std::string & why) {
    if (!size_read("KVTIER_BUDGET", out.budget_bytes, why) ||
        !size_read("KVTIER_DEVICE_BUDGET", out.device_bytes, why)) {
        return false;
    }
    uint64_t slots = out.slots, threads = 0, has_stats = 0, spills = 0, predicts = 1;
    if (!number_read("KVTIER_RING", 2, MAX_SLOTS, slots, why) ||
        !number_read("KVTIER_THREADS", 1, MAX_THREADS, threads, why) ||
        !number_read("KVTIER_STATS", 0, 1, has_stats, why) ||
        !number_read("KVTIER_SPILL", 0, 1, spills, why) ||
        !number_read("KVTIER_PREDICT", 0, 1, predicts, why) ||
        !path_read("KVTIER_MODEL", S_IFREG, out.model, why) ||
        !path_read("KVTIER_DIR", S_IFDIR, out.directory, why)) {
        return false;
    }
    out.slots = uint32_t(slots);
    out.threads = uint32_t(threads);
    out.has_stats = has_stats != 0;
    out.spills = spills != 0;
    out.predicts = predicts != 0;
    if (out.spills && out.directory.empty()) {
        why = "KVTIER_SPILL=1 needs KVTIER_DIR: set it to the directory that weights are written to";
        return false;
    }
    if (const char * inner = variable("KVTIER_UNDER")) {
        out.inner = inner;
    }
    if (const char * policy = variable("KVTIER_EXPERT_POLICY")) {
        out.expert_policy = policy;
    }
    const char * trace = variable("KVTIER_ROUTING_TRACE");
    if (trace && !routing_trace_open(trace)) {
        why = std::string("KVTIER_ROUTING_TRACE=") + trace + " cannot be written: name a file in a directory "
              "that you may write to";
        return false;
    }
    return true;
}

void log_line(const std::string & text) {
    std::fprintf(stderr, "kvtier: %s\n", text.c_str());
}

} // namespace kvtier_plugin
