// Describes units to kvtier's streamer as a table of byte ranges, in place of a known model format.
#include "plugin.h"
#include "weights.h"

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
                    const uint64_t piece =
                        range.record->piece_rows ? number - range.record->units.front() : 0;
                    range.record->at[piece] = part.at;
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
        const uint32_t role = units[i].layer == KVT_NONE ? KVT_ROLE_OTHER : KVT_ROLE_LAYER;
        entries.push_back({units[i].name.c_str(), units[i].name.size(), role, units[i].layer, KVT_NONE, 0,
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

// Finds the least memory by bisection of plans.
bool table_floor(const kvt_model_t * table, uint32_t slots, uint64_t & out, std::string & why) {
    constexpr uint64_t TOLERANCE_BYTES = 4096, PLENTY_BYTES = uint64_t(1) << 46;
    kvt_model_info_t info = KVT_MODEL_INFO_INIT;
    kvt_model_info(table, &info);
    const kvt_stream_terms_t terms = table_terms(slots);
    Failure failure;
    const auto has_plan = [&](uint64_t bytes, kvt_error_t ** err) {
        kvt_stream_memory_t memory = KVT_STREAM_MEMORY_INIT;
        memory.host_free_bytes = inner_has_memory() ? PLENTY_BYTES : bytes;
        memory.host_total_bytes = memory.host_free_bytes;
        memory.device_free_bytes = inner_has_memory() ? bytes : 0;
        memory.lockable_bytes = UINT64_MAX;
        return kvt_model_plan(table, &terms, &memory, nullptr, nullptr, nullptr, 0,
                              sizeof(kvt_unit_residency_t), err);
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
