// Statistics for KVTIER_STATS=1.
#ifndef KVTIER_PLUGIN_STATS_H
#define KVTIER_PLUGIN_STATS_H

#include "weights.h"

#include <atomic>
#include <cstdint>
#include <vector>

namespace kvtier_plugin {

// Statistics of the process. They include weights that were freed.
class Totals {
public:
    std::atomic<uint64_t> graphs{0}, streamed_graphs{0}, runs{0}, materialised{0};
    // Experts that layers used, each once for a batch; reads of predicted experts, and how many of these
    // experts were used.
    std::atomic<uint64_t> expert_uses{0}, guessed_reads{0}, guessed_needed{0};
    // Now, and at most so far.
    std::atomic<uint64_t> kv_bytes{0}, compute_bytes{0}, other_bytes{0};
    std::atomic<uint64_t> kv_peak_bytes{0}, compute_peak_bytes{0}, other_peak_bytes{0};

    static void more(std::atomic<uint64_t> & now, std::atomic<uint64_t> & peak, uint64_t bytes);
    static void less(std::atomic<uint64_t> & now, uint64_t bytes) { now -= bytes; }

    // Must be called under weights_lock().
    void add(Weights & weights);
    void remove(Weights & weights);
    void rebalance();

    // Prints one line of JSON to stderr.
    void print();

private:
    struct Streamed {
        uint64_t models = 0, units = 0, streamed_bytes = 0, resident_bytes = 0, floor_bytes = 0;
        uint64_t home_units = 0, slot_bytes = 0;
        uint64_t expert_slots = 0, expert_misses = 0;
        uint64_t acquires = 0, waited = 0, wait_ns = 0, read_bytes = 0, passes = 0, failed = 0;
        void add(const Weights & weights);
    };

    std::vector<Weights *> live_;
    Streamed freed_;
};

Totals & totals();

} // namespace kvtier_plugin

#endif
