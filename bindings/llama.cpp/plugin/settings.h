// Settings from the environment: a stock binary passes a backend nothing else.
#ifndef KVTIER_PLUGIN_SETTINGS_H
#define KVTIER_PLUGIN_SETTINGS_H

#include <cstdint>
#include <string>

namespace kvtier_plugin {

struct Settings {
    // KVTIER_BUDGET: bytes of host memory for weights and KV; 0 = half of the free memory.
    uint64_t budget_bytes = 0;
    // KVTIER_DEVICE_BUDGET: bytes of the inner device's own memory; 0 = nine tenths of its free memory.
    uint64_t device_bytes = 0;
    // KVTIER_MODEL: the model's file; empty = found among the files that the process has open.
    std::string model;
    // KVTIER_DIR: directory for a copy of weights that no open file has.
    std::string directory;
    // KVTIER_SPILL=1: always write weights there.
    bool spills = false;
    // KVTIER_RING: slots for streamed layers, 2 to 64; 0 = 3 where there is plenty of memory, else 2.
    uint32_t slots = 0;
    // KVTIER_UNDER: the device that computes.
    std::string inner = "CPU";
    // KVTIER_THREADS: threads that compute, 1 to 512; 0 = as the engine says.
    uint32_t threads = 0;
    // KVTIER_EXPERT_POLICY: the policy that evicts experts. By default the best of these, as measured.
    std::string expert_policy = "auto(of=any(s3fifo,lru,lfu,wtinylfu),sample=1)";
    // KVTIER_PREDICT=0: do not read experts before the router has chosen them.
    bool predicts = true;
    // KVTIER_STATS=1: print a line of statistics at exit.
    bool has_stats = false;
};

// Reads the environment. False, with a text, for an invalid value.
bool settings_read(Settings & out, std::string & why);

// Parses a size such as 512M; false if it is not one.
bool size_parse(const char * text, uint64_t & out);

// Writes a line to stderr, the only channel that a user of a stock binary sees.
void log_line(const std::string & text);

} // namespace kvtier_plugin

#endif
