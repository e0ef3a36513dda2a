// Reads units, tensors and experts from the model's file.
#include "weights/weights.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <strings.h>

namespace kvt_weights {

namespace {

std::string text(const char *bytes, uint64_t length) {
    return std::string(bytes, static_cast<size_t>(length));
}

/// All parts of a tensor, or the library's error.
kvt_status_t parts_of(const Weights &w, uint32_t tensor, std::vector<kvt_part_t> &parts) {
    uint64_t count = 0;
    kvt_status_t status = kvt_model_tensor_parts(w.file, tensor, nullptr, 0, sizeof(kvt_part_t), &count);
    if (status != KVT_OK && status != KVT_E_TOO_SMALL) {
        return status;
    }
    parts.assign(count, kvt_part_t{});
    if (count == 0) {
        return KVT_OK;
    }
    status = kvt_model_tensor_parts(w.file, tensor, parts.data(), count, sizeof(kvt_part_t), &count);
    return status == KVT_OK && count != parts.size() ? KVT_E_CORRUPT : status;
}

/// Tells whether parts of experts are at equal distances when units are in place, one after the other.
bool are_strided(const Weights &w, const std::vector<kvt_part_t> &parts) {
    uint64_t image_bytes = 0;
    for (size_t i = 0; i < parts.size(); i++) {
        kvt_unit_t unit = KVT_UNIT_INIT;
        if (kvt_model_unit(w.file, parts[i].unit, &unit) != KVT_OK) {
            return false;
        }
        if (i == 0) {
            image_bytes = unit.image_bytes;
        }
        const bool fits = unit.image_bytes == image_bytes && parts[i].at == parts[0].at &&
                          parts[i].unit == parts[0].unit + i && parts[i].from == i * parts[i].bytes;
        if (!fits) {
            return false;
        }
    }
    return true;
}

kvt_status_t read_stacks(Weights &w, kvt_llama_why_t *why) {
    uint64_t strided_bytes = 0, copied_bytes = 0;
    for (uint32_t i = 0; i < w.info.tensors; i++) {
        kvt_tensor_t tensor = KVT_TENSOR_INIT;
        kvt_status_t status = kvt_model_tensor(w.file, i, &tensor);
        if (status == KVT_OK && tensor.parts <= 1) {
            continue;
        }
        std::vector<kvt_part_t> parts;
        if (status == KVT_OK) {
            status = parts_of(w, i, parts);
        }
        if (status != KVT_OK || parts.empty() || parts[0].unit >= w.units.size()) {
            return set_error(why, status == KVT_OK ? KVT_E_CORRUPT : status,
                             "the parts of tensor %s cannot be read",
                       text(tensor.name, tensor.name_bytes).c_str());
        }
        Stack stack;
        stack.layer = w.units[parts[0].unit].layer;
        stack.experts = tensor.parts;
        stack.part_bytes = parts[0].bytes;
        stack.strided = tensor.dim_count >= 3 && are_strided(w, parts);
        (stack.strided ? strided_bytes : copied_bytes) += tensor.bytes;
        w.experts = std::max(w.experts, tensor.parts);
        w.stacks.push_back(stack);
    }
    w.in_place = (w.flags & KVT_LLAMA_WEIGHTS_IN_PLACE) ||
                 (strided_bytes > copied_bytes && !(w.flags & KVT_LLAMA_WEIGHTS_NOT_IN_PLACE));
    w.experts_used = std::max(1u, std::min(w.experts, w.info.experts_used));
    return KVT_OK;
}

} // namespace

kvt_status_t read_units(Weights &w, kvt_llama_why_t *why) {
    w.units.resize(w.info.units);
    std::map<uint32_t, uint32_t> layers;
    for (uint32_t i = 0; i < w.info.units; i++) {
        kvt_unit_t unit = KVT_UNIT_INIT;
        const kvt_status_t status = kvt_model_unit(w.file, i, &unit);
        if (status != KVT_OK) {
            return set_error(why, status, "unit %u of the model cannot be read", i);
        }
        Unit &own = w.units[i];
        own.role = unit.role;
        if (unit.role == KVT_ROLE_LAYER || unit.role == KVT_ROLE_EXPERT) {
            own.layer = unit.layer;
            const auto known = layers.emplace(unit.layer, w.groups);
            w.groups += known.second ? 1 : 0;
            own.group = known.first->second;
        } else {
            own.group = w.groups++;
        }
    }
    w.layer_holders.assign(layers.empty() ? 0 : layers.rbegin()->first + 1, 0);
    return read_stacks(w, why);
}

kvt_status_t read_residency(Weights &w, kvt_llama_why_t *why) {
    std::vector<kvt_unit_residency_t> residency(w.units.size());
    const kvt_status_t status =
        kvt_stream_plan(w.stream, nullptr, nullptr, residency.data(), residency.size(), sizeof residency[0]);
    if (status != KVT_OK) {
        return set_error(why, status, "the streamer's plan cannot be read");
    }
    bool all_resident = true;
    for (size_t i = 0; i < residency.size(); i++) {
        all_resident = all_resident && (w.units[i].role != KVT_ROLE_EXPERT ||
                                        residency[i].residency != KVT_RESIDENT_FILE);
        // Units outside layers, such as factors of RoPE, are used between tensors of layers. They stay
        // leased for a whole pass, unless they would occupy a slot.
        const bool outside_layers = w.units[i].role != KVT_ROLE_LAYER && w.units[i].role != KVT_ROLE_EXPERT;
        if (outside_layers && residency[i].residency != KVT_RESIDENT_FILE) {
            w.units[i].group = no_group;
        }
    }
    if (all_resident) {
        w.experts_at_once = w.copied_at_once;
    }
    return KVT_OK;
}

kvt_status_t describe(const Weights &w, const ggml_tensor *tensor, Entry &entry, kvt_llama_why_t *why) {
    uint32_t number = 0;
    kvt_status_t status = kvt_model_find_tensor(w.file, tensor->name, std::strlen(tensor->name), &number);
    if (status != KVT_OK) {
        return set_error(why, KVT_E_UNSUPPORTED, "tensor %s is not in %s: load the model from this file",
                   tensor->name, w.path.c_str());
    }
    kvt_tensor_t found = KVT_TENSOR_INIT;
    std::vector<kvt_part_t> parts;
    status = kvt_model_tensor(w.file, number, &found);
    if (status == KVT_OK) {
        status = parts_of(w, number, parts);
    }
    if (status != KVT_OK || parts.empty()) {
        return set_error(why, KVT_E_UNSUPPORTED, "tensor %s is in no unit of the file", tensor->name);
    }
    const std::string dtype = text(found.dtype, found.dtype_bytes);
    if (found.bytes != ggml_nbytes(tensor) || strcasecmp(dtype.c_str(), ggml_type_name(tensor->type)) != 0) {
        return set_error(why, KVT_E_UNSUPPORTED,
                   "tensor %s is %llu bytes of %s in the file, %llu of %s in the engine",
                   tensor->name, (unsigned long long) found.bytes, dtype.c_str(),
                   (unsigned long long) ggml_nbytes(tensor), ggml_type_name(tensor->type));
    }
    entry.bytes = found.bytes;
    entry.file_offset = found.offset;
    if (parts.size() == 1) {
        entry.unit = parts[0].unit;
        entry.at = parts[0].at;
        return KVT_OK;
    }
    const int last = ggml_n_dims(tensor) - 1;
    if (tensor->ne[last] != static_cast<int64_t>(parts.size()) || tensor->nb[last] != parts[0].bytes) {
        return set_error(why, KVT_E_UNSUPPORTED,
                         "tensor %s has other dimensions than its experts in the file", tensor->name);
    }
    entry.kind = last == 2 && w.in_place && are_strided(w, parts) ? Kind::strided : Kind::copied;
    entry.unit = parts[0].unit;
    entry.at = parts[0].at;
    entry.layer = w.units[parts[0].unit].layer;
    for (const kvt_part_t &part : parts) {
        entry.experts.push_back(part.unit);
    }
    return KVT_OK;
}

} // namespace kvt_weights
