// What the environment says. A stock binary gives a backend nothing else.
#ifndef KVTIER_PLUGIN_SETTINGS_H
#define KVTIER_PLUGIN_SETTINGS_H

#include <cstdint>
#include <string>

namespace kvtier_plugin {

struct Settings {
    // KVTIER_BUDGET: bytes of host memory for weights and KV; 0 = half of what is free.
    uint64_t budget_bytes = 0;
    // KVTIER_DEVICE_BUDGET: the same of a device with memory of its own; 0 = nine tenths of what is free.
    uint64_t device_bytes = 0;
    // KVTIER_MODEL: the model's file, where it is not to be found out. Empty = it is.
    std::string model;
    // KVTIER_DIR: where weights are written to if no file is found that has them.
    std::string directory;
    // KVTIER_SPILL=1: they are written there in any case.
    bool spills = false;
    // KVTIER_RING: slots that layers pass through.
    uint32_t slots = 2;
    // KVTIER_UNDER: the device that computes.
    std::string under = "CPU";
    // KVTIER_THREADS: instead of what the engine says; 0 = what the engine says.
    uint32_t threads = 0;
    // KVTIER_STATS=1: a line of figures at exit.
    bool has_stats = false;
};

// Reads the environment. False with words where a value cannot be meant.
bool settings_read(Settings & out, std::string & why);

// A size such as 512M; false where it is none.
bool size_parse(const char * text, uint64_t & out);

// A line on stderr: the one place where a user of a stock binary sees us.
void say(const std::string & words);

} // namespace kvtier_plugin

#endif
