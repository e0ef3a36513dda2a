// Describes units to kvtier's streamer as a table of byte ranges, in place of a known model format.
#include "plugin.h"
#include "weights.h"

#include <algorithm>

namespace kvtier_plugin {

namespace {

// Reads where tensors start in their units: the library keeps the order of files.
bool read_parts(const kvt_model_t * table, std::vector<Unit> & units) {
    for (uint32_t number = 0; number < units.size(); number++) {
        std::vector<Range> & ranges = units[number].ranges;
        std::vector<kvt_part_t> parts(ranges.size());
        uint64_t count = 0;
        if (kvt_model_unit_parts(table, number, parts.data(), parts.size(), sizeof(kvt_part_t), &count) !=
                KVT_OK ||
            count != ranges.size()) {
            return false;
        }
        for (const kvt_part_t & part : parts) {
            kvt_tensor_t tensor = KVT_TENSOR_INIT;
            if (kvt_model_tensor(table, part.tensor, &tensor) != KVT_OK) {
                return false;
            }
            bool found = false;
            for (const Range & range : ranges) {
                const Place & place = range.record->place;
                if (place.file == tensor.file && place.offset + range.from == tensor.offset) {
                    range.record->at[range.index] = part.at;
                    found = true;
                }
            }
            if (!found) {
                return false;
            }
        }
    }
    return true;
}

} // namespace

bool table_open(const Source & source, std::vector<Unit> & units, kvt_model_t ** out, std::string & why) {
    const std::vector<std::string> paths = source.paths();
    std::vector<kvt_str_t> texts;
    for (const std::string & path : paths) {
        texts.push_back({path.c_str(), path.size()});
    }
    std::vector<std::vector<kvt_file_range_t>> ranges(units.size());
    std::vector<kvt_unit_entry_t> entries;
    for (size_t i = 0; i < units.size(); i++) {
        for (const Range & range : units[i].ranges) {
            const Place & place = range.record->place;
            ranges[i].push_back({place.file, 0, place.offset + range.from, range.bytes});
        }
        const Unit & unit = units[i];
        const uint32_t role = unit.layer == KVT_NONE    ? KVT_ROLE_OTHER
                              : unit.expert == KVT_NONE ? KVT_ROLE_LAYER
                                                        : KVT_ROLE_EXPERT;
        entries.push_back({unit.name.c_str(), unit.name.size(), role, unit.layer, unit.expert, 0,
                           ranges[i].data(), ranges[i].size()});
    }
    kvt_model_table_t table = KVT_MODEL_TABLE_INIT;
    table.paths = texts.data();
    table.path_count = texts.size();
    table.path_stride_bytes = sizeof(kvt_str_t);
    table.units = entries.data();
    table.unit_count = entries.size();
    table.unit_stride_bytes = sizeof(kvt_unit_entry_t);
    table.range_stride_bytes = sizeof(kvt_file_range_t);
    Failure failure;
    const kvt_status_t status = kvt_model_table(&table, out, failure.out());
    if (status != KVT_OK) {
        why = failure.text("describing the model's file to the streamer", status);
        return false;
    }
    if (!read_parts(*out, units)) {
        why = "the streamer's units differ from the plugin's: this is a defect of kvtier";
        return false;
    }
    return true;
}

kvt_stream_terms_t table_terms(uint32_t slots) {
    kvt_stream_terms_t terms = KVT_STREAM_TERMS_INIT;
    terms.flags = KVT_TERMS_SHRINKS | KVT_TERMS_HOST_RESERVE | KVT_TERMS_KV;
    terms.compute = KVT_COMPUTE_HOST;
    if (inner_has_memory()) {
        terms.compute = KVT_COMPUTE_DEVICE;
        // The budget limits the device's memory.
        terms.flags |= KVT_TERMS_DEVICE_SAFETY;
    }
    terms.slots = slots;
    return terms;
}

namespace {

// A plan, and the residency of its units.
struct Trial {
    kvt_stream_plan_t plan = KVT_STREAM_PLAN_INIT;
    std::vector<kvt_unit_residency_t> residency;
};

// The status of a plan for this much memory.
kvt_status_t plan_status(const kvt_model_t * table, const kvt_stream_terms_t & terms, uint64_t bytes,
                         Trial * out, kvt_error_t ** err) {
    constexpr uint64_t PLENTY_BYTES = uint64_t(1) << 46;
    kvt_stream_memory_t memory = KVT_STREAM_MEMORY_INIT;
    memory.host_free_bytes = inner_has_memory() ? PLENTY_BYTES : bytes;
    memory.host_total_bytes = memory.host_free_bytes;
    memory.device_free_bytes = inner_has_memory() ? bytes : 0;
    memory.lockable_bytes = UINT64_MAX;
    return kvt_model_plan(table, &terms, &memory, out ? &out->plan : nullptr, nullptr,
                          out ? out->residency.data() : nullptr, out ? out->residency.size() : 0,
                          sizeof(kvt_unit_residency_t), err);
}

// Tells whether all units but experts are resident.
bool all_layers_stay(const std::vector<Unit> & units, const Trial & trial) {
    for (size_t i = 0; i < units.size(); i++) {
        if (units[i].expert == KVT_NONE && trial.residency[i].residency == KVT_RESIDENT_FILE) {
            return false;
        }
    }
    return true;
}

} // namespace

bool table_expert_terms(const kvt_model_t * table, const std::vector<Unit> & units, uint32_t used,
                        uint64_t bytes, kvt_stream_terms_t & terms) {
    constexpr uint32_t LEAST = 2;
    bool is_whole = true;
    Trial trial;
    trial.residency.resize(units.size());
    const auto fits = [&](uint32_t count) {
        terms.expert_slots = count;
        if (plan_status(table, terms, bytes, &trial, nullptr) != KVT_OK) {
            return false;
        }
        if (!inner_has_memory() && kvt_model_plan(table, &terms, nullptr, nullptr, nullptr, nullptr, 0,
                                                  sizeof(kvt_unit_residency_t), nullptr) != KVT_OK) {
            is_whole = false;
            return false;
        }
        return count <= used + 1 || all_layers_stay(units, trial);
    };
    const auto is_expert = [](const Unit & unit) { return unit.expert != KVT_NONE; };
    uint32_t most = uint32_t(std::count_if(units.begin(), units.end(), is_expert));
    uint32_t least = std::min(LEAST, most);
    while (least < most) {
        const uint32_t middle = least + (most - least + 1) / 2;
        if (fits(middle)) {
            least = middle;
        } else {
            most = middle - 1;
        }
    }
    if (!fits(least)) {
        return is_whole;
    }
    // All experts share the slots: a plan would use what is left for copies of some that stay.
    terms.host_ceiling_bytes = trial.plan.host_bytes;
    for (uint32_t i = 0; i < units.size(); i++) {
        kvt_unit_t unit = KVT_UNIT_INIT;
        const bool stays = is_expert(units[i]) && trial.residency[i].residency != KVT_RESIDENT_FILE;
        if (stays && kvt_model_unit(table, i, &unit) == KVT_OK) {
            terms.host_ceiling_bytes -= unit.image_bytes;
        }
    }
    return is_whole;
}

// Finds the least memory by bisection of plans.
uint32_t table_slots(const kvt_model_t * table, uint64_t bytes) {
    // With a third slot one layer is read while another waits. Slots do not shrink for later contexts, so
    // that it takes nothing that those could need.
    const uint32_t more = LEAST_SLOTS + 1;
    return plan_status(table, table_terms(more), bytes / 2, nullptr, nullptr) == KVT_OK ? more : LEAST_SLOTS;
}

bool table_floor(const kvt_model_t * table, uint32_t slots, uint64_t & out, std::string & why) {
    constexpr uint64_t TOLERANCE_BYTES = 4096;
    kvt_model_info_t info = KVT_MODEL_INFO_INIT;
    kvt_model_info(table, &info);
    const kvt_stream_terms_t terms = table_terms(slots);
    Failure failure;
    const auto has_plan = [&](uint64_t bytes, kvt_error_t ** err) {
        return plan_status(table, terms, bytes, nullptr, err);
    };
    // Images are whole pages; each range adds at most two pages to its bytes. All slots may come on
    // top.
    uint64_t most = (info.bytes + 2 * uint64_t(info.tensors) * TOLERANCE_BYTES) * (uint64_t(slots) + 1);
    uint64_t least = 0;
    const kvt_status_t status = has_plan(most, failure.out());
    if (status != KVT_OK) {
        why = failure.text("planning the streamer", status);
        return false;
    }
    while (most - least > TOLERANCE_BYTES) {
        const uint64_t middle = least + (most - least) / 2;
        if (has_plan(middle, nullptr) == KVT_OK) {
            most = middle;
        } else {
            least = middle;
        }
    }
    out = most;
    return true;
}

} // namespace kvtier_plugin
