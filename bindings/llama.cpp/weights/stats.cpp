// Statistics of streamed weights.
#include "weights/weights.hpp"

using namespace kvt_weights;

kvt_status_t kvt_llama_weights_stats(const kvt_llama_weights_t *weights, kvt_llama_weights_stats_t *out) {
    return guarded(nullptr, [&]() -> kvt_status_t {
        if (!weights || !out) {
            return KVT_E_INVALID;
        }
        const Weights &w = *weights;
        kvt_stream_stats_t stream = KVT_STREAM_STATS_INIT;
        kvt_stream_plan_t plan = KVT_STREAM_PLAN_INIT;
        kvt_status_t status = kvt_stream_stats(w.stream, &stream);
        if (status == KVT_OK) {
            status = kvt_stream_plan(w.stream, &plan, nullptr, nullptr, 0, 0);
        }
        if (status != KVT_OK) {
            return status;
        }
        kvt_llama_weights_stats_t stats = {};
        stats.model_bytes = w.info.bytes;
        stats.resident_units = plan.host_units;
        stats.streamed_units = plan.file_units;
        stats.slots = plan.slots;
        stats.slot_bytes = plan.slot_bytes;
        stats.expert_slots = plan.expert_slots;
        stats.expert_slot_bytes = plan.expert_slot_bytes;
        stats.passes = stream.passes;
        stats.acquires = stream.acquires;
        stats.waited = stream.waited;
        stats.read_bytes = stream.read_bytes;
        stats.wait_ns = stream.wait_read_ns + stream.wait_slot_ns;
        stats.expert_hits = stream.expert_hits;
        stats.expert_misses = stream.expert_misses;
        stats.failed_reads = stream.failed;
        kvt_tier_report_t report = KVT_TIER_REPORT_INIT;
        if (w.budget && kvt_budget_tier(w.budget, KVT_TIER_HOST, &report) == KVT_OK) {
            stats.budget_bytes = report.limit_bytes;
            stats.used_bytes = report.committed_bytes + report.reserved_bytes;
            stats.peak_bytes = report.peak_bytes;
        }
        std::lock_guard<std::mutex> guard(w.lock);
        stats.copied_bytes = w.copied_bytes;
        stats.failed_decodes = w.failed_decodes;
        *out = stats;
        return KVT_OK;
    });
}

const kvt_stream_t *kvt_llama_weights_stream(const kvt_llama_weights_t *weights) {
    return weights ? weights->stream : nullptr;
}
