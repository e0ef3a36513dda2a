// Remembers the files of the models and adapters that the program loaded.
#include "run/models.hpp"

#include <kvtier/kvtier.h>

#include <cstdio>
#include <fstream>
#include <mutex>
#include <unordered_map>

namespace kvtier_run {

namespace {

constexpr size_t max_overrides = 1024;

/// Never destroyed: objects of the program may be freed after those of this library.
struct loaded_t {
    std::mutex lock;
    std::unordered_map<const llama_model *, model_t> models;
    /// Text of each LoRA adapter: checksum and length of its file.
    std::unordered_map<const llama_adapter_lora *, std::string> loras;
};

loaded_t &loaded() {
    static auto *const made = new loaded_t;
    return *made;
}

std::string text_of_sum(uint64_t sum, uint64_t bytes) {
    char text[64];
    std::snprintf(text, sizeof text, "%016llx %llu", (unsigned long long) sum, (unsigned long long) bytes);
    return text;
}

/// Checksum of a file's checksums of 1 MiB each; empty = it cannot be read.
std::string sum_of_file(const char *path) {
    std::ifstream file(path, std::ios::binary);
    std::vector<char> part(1 << 20);
    std::vector<uint64_t> sums;
    uint64_t bytes = 0;
    while (file) {
        file.read(part.data(), std::streamsize(part.size()));
        const uint64_t count = uint64_t(file.gcount());
        bytes += count;
        sums.push_back(0);
        kvt_checksum(part.data(), count, &sums.back());
    }
    if (!file.eof() || bytes == 0) {
        return "";
    }
    uint64_t sum = 0;
    kvt_checksum(sums.data(), sums.size() * sizeof sums[0], &sum);
    return text_of_sum(sum, bytes);
}

} // namespace

void note_model(const llama_model *model, const char *path, const llama_model_params &params) {
    model_t one;
    one.path = path ? path : "";
    one.params = params;
    for (size_t i = 0; params.kv_overrides && params.kv_overrides[i].key[0] != 0 && i < max_overrides; i++) {
        one.overrides.push_back(params.kv_overrides[i]);
    }
    one.overrides.push_back({});
    const std::lock_guard<std::mutex> held(loaded().lock);
    loaded().models[model] = std::move(one);
}

void forget_model(const llama_model *model) {
    const std::lock_guard<std::mutex> held(loaded().lock);
    loaded().models.erase(model);
}

bool find_model(const llama_model *model, model_t *out) {
    const std::lock_guard<std::mutex> held(loaded().lock);
    const auto found = loaded().models.find(model);
    if (found == loaded().models.end()) {
        return false;
    }
    *out = found->second;
    return true;
}

void note_lora(const llama_adapter_lora *adapter, const char *path) {
    std::string text = path ? sum_of_file(path) : "";
    const std::lock_guard<std::mutex> held(loaded().lock);
    loaded().loras[adapter] = std::move(text);
}

void forget_lora(const llama_adapter_lora *adapter) {
    const std::lock_guard<std::mutex> held(loaded().lock);
    loaded().loras.erase(adapter);
}

bool describe_loras(llama_adapter_lora **adapters, size_t count, const float *scales, std::string *out) {
    const std::lock_guard<std::mutex> held(loaded().lock);
    out->clear();
    for (size_t i = 0; i < count; i++) {
        const auto found = loaded().loras.find(adapters[i]);
        if (found == loaded().loras.end() || found->second.empty()) {
            return false;
        }
        char scale[64];
        std::snprintf(scale, sizeof scale, " %a", double(scales[i]));
        *out += "lora " + found->second + scale + "\n";
    }
    return true;
}

std::string describe_vector(const float *data, size_t count, int32_t width, int32_t first, int32_t last) {
    if (!data) {
        return "";
    }
    uint64_t sum = 0;
    kvt_checksum(data, count * sizeof *data, &sum);
    return "control vector " + text_of_sum(sum, count) + " " + std::to_string(width) + " " +
           std::to_string(first) + " " + std::to_string(last) + "\n";
}

} // namespace kvtier_run
