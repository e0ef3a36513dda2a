#include "stats.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

namespace kvtier_plugin {

Totals & totals() {
    // Never destroyed: statistics are printed after static objects are destroyed.
    static Totals * all = new Totals;
    return *all;
}

void Totals::more(std::atomic<uint64_t> & now, std::atomic<uint64_t> & peak, uint64_t bytes) {
    const uint64_t sum = now += bytes;
    uint64_t before = peak.load();
    while (before < sum && !peak.compare_exchange_weak(before, sum)) {
    }
}

void Totals::add(Weights & weights) {
    const std::lock_guard<std::mutex> guard(weights_lock());
    live_.push_back(&weights);
}

void Totals::remove(Weights & weights) {
    const auto at = std::find(live_.begin(), live_.end(), &weights);
    if (at != live_.end()) {
        live_.erase(at);
        freed_.add(weights);
    }
}

void Totals::rebalance() {
    for (Weights * weights : live_) {
        weights->rebalance();
    }
}

void Totals::Streamed::add(const Weights & weights) {
    models++;
    units += weights.unit_count();
    streamed_bytes += weights.streamed_bytes();
    resident_bytes += weights.resident_bytes();
    floor_bytes += weights.floor_bytes();
    kvt_stream_stats_t done = KVT_STREAM_STATS_INIT;
    kvt_stream_plan_t plan = KVT_STREAM_PLAN_INIT;
    if (weights.stats(done, plan)) {
        home_units += inner_has_memory() ? plan.device_units : plan.host_units;
        slot_bytes += plan.slots * plan.slot_bytes + plan.expert_slots * plan.expert_slot_bytes;
        expert_slots += plan.expert_slots;
        expert_misses += done.expert_misses;
        acquires += done.acquires;
        waited += done.waited;
        wait_ns += done.wait_read_ns + done.wait_slot_ns;
        read_bytes += done.read_bytes;
        passes += done.passes;
        failed += done.failed;
    }
}

void Totals::print() {
    // At exit another thread may be inside a graph, and stay there.
    const std::unique_lock<std::mutex> guard(weights_lock(), std::try_to_lock);
    if (!guard.owns_lock()) {
        std::fprintf(stderr, "kvtier: no statistics: a graph is being computed\n");
        return;
    }
    Streamed all = freed_;
    for (const Weights * weights : live_) {
        all.add(*weights);
    }
    kvt_tier_report_t budget = KVT_TIER_REPORT_INIT;
    if (const Memory * memory = Memory::opened()) {
        budget = memory->report();
    }
    std::fprintf(stderr,
                 "kvtier: {\"budget_bytes\":%" PRIu64 ",\"peak_bytes\":%" PRIu64 ",\"models\":%" PRIu64
                 ",\"streamed_bytes\":%" PRIu64 ",\"resident_bytes\":%" PRIu64 ",\"floor_bytes\":%" PRIu64
                 ",\"kv_bytes\":%" PRIu64 ",\"other_bytes\":%" PRIu64 ",\"compute_bytes\":%" PRIu64
                 ",\"units\":%" PRIu64 ",\"home_units\":%" PRIu64 ",\"slot_bytes\":%" PRIu64
                 ",\"expert_slots\":%" PRIu64 ",\"expert_uses\":%" PRIu64 ",\"expert_misses\":%" PRIu64
                 ",\"guessed_reads\":%" PRIu64 ",\"guessed_needed\":%" PRIu64
                 ",\"graphs\":%" PRIu64 ",\"streamed_graphs\":%" PRIu64 ",\"runs\":%" PRIu64
                 ",\"passes\":%" PRIu64 ",\"acquires\":%" PRIu64 ",\"waited\":%" PRIu64
                 ",\"wait_ns\":%" PRIu64 ",\"read_bytes\":%" PRIu64 ",\"failed\":%" PRIu64
                 ",\"materialised\":%" PRIu64 "}\n",
                 budget.limit_bytes, budget.peak_bytes, all.models, all.streamed_bytes, all.resident_bytes,
                 all.floor_bytes, kv_peak_bytes.load(), other_peak_bytes.load(), compute_peak_bytes.load(),
                 all.units, all.home_units, all.slot_bytes, all.expert_slots, expert_uses.load(),
                 all.expert_misses, guessed_reads.load(), guessed_needed.load(), graphs.load(),
                 streamed_graphs.load(), runs.load(), all.passes, all.acquires, all.waited, all.wait_ns,
                 all.read_bytes, all.failed, materialised.load());
}

} // namespace kvtier_plugin
