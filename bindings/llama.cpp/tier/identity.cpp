// The identity of KV: the parts of the namespace's key besides the layout.
#include "tier/tier.hpp"

#include <ggml.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>

namespace kvtier_llama {

namespace {

/// Files up to this length are checksummed completely; of longer ones, blocks of each tensor.
constexpr uint64_t whole_bytes = uint64_t(512) << 20;
constexpr uint64_t block_bytes = 4096;
constexpr uint64_t blocks_of_tensor = 16;
constexpr size_t max_sums = 8000;
constexpr size_t max_overrides = 1024;

void append_sum(std::vector<uint64_t> &sums, size_t place, const void *data, uint64_t bytes) {
    uint64_t sum = 0;
    demand(kvt_checksum(data, bytes, &sum), nullptr, "summing the model");
    if (sums.size() < max_sums) {
        sums.push_back(sum);
        return;
    }
    // A model with very many tensors: several share a slot.
    const uint64_t both[2] = {sums[place % max_sums], sum};
    demand(kvt_checksum(both, sizeof both, &sums[place % max_sums]), nullptr, "summing the model");
}

void read_at(std::ifstream &file, uint64_t offset, uint64_t bytes, uint8_t *out, const char *path) {
    file.seekg(std::streamoff(offset));
    file.read(reinterpret_cast<char *>(out), std::streamsize(bytes));
    if (!file) {
        fail(KVT_E_IO, std::string("cannot read ") + path +
                           " for the model's fingerprint: check the file, or set model_id");
    }
}

void sum_tensor(std::vector<uint64_t> &sums, size_t number, std::ifstream &file,
                const kvt_tensor_t &tensor, bool whole, const char *path) {
    std::vector<uint8_t> bytes;
    if (whole || tensor.bytes <= blocks_of_tensor * block_bytes) {
        constexpr uint64_t step = uint64_t(1) << 20;
        std::vector<uint64_t> parts;
        for (uint64_t at = 0; at < tensor.bytes; at += step) {
            bytes.resize(std::min(step, tensor.bytes - at));
            read_at(file, tensor.offset + at, bytes.size(), bytes.data(), path);
            parts.push_back(0);
            demand(kvt_checksum(bytes.data(), bytes.size(), &parts.back()), nullptr, "summing");
        }
        append_sum(sums, number, parts.data(), parts.size() * sizeof parts[0]);
        return;
    }
    bytes.resize(blocks_of_tensor * block_bytes);
    const uint64_t last = tensor.bytes - block_bytes;
    for (uint64_t i = 0; i < blocks_of_tensor; i++) {
        const uint64_t at = last / (blocks_of_tensor - 1) * i;
        read_at(file, tensor.offset + at, block_bytes, bytes.data() + i * block_bytes, path);
    }
    append_sum(sums, number, bytes.data(), bytes.size());
}

/// Fingerprint of a model's file. The library covers headers, names, types and offsets of all
/// tensors; checksums of the weights follow.
std::string fingerprint(const char *path) {
    kvt_str_t text{path, std::char_traits<char>::length(path)};
    kvt_model_t *handle = nullptr;
    kvt_error_t *error = nullptr;
    const kvt_status_t opened = kvt_model_open(&text, 1, sizeof text, &handle, &error);
    demand(opened, error, "cannot fingerprint the model's file (or set model_id)");
    struct closer {
        kvt_model_t *model;
        ~closer() { kvt_model_close(&model); }
    } model{handle};

    kvt_model_info_t info = KVT_MODEL_INFO_INIT;
    demand(kvt_model_info(model.model, &info), nullptr, "the model's file");
    std::string out(reinterpret_cast<const char *>(info.fingerprint), sizeof info.fingerprint);
    std::vector<uint64_t> sums;
    std::ifstream file;
    std::string name;
    uint32_t opened_file = UINT32_MAX;
    for (uint32_t i = 0; i < info.tensors; i++) {
        kvt_tensor_t tensor = KVT_TENSOR_INIT;
        demand(kvt_model_tensor(model.model, i, &tensor), nullptr, "the model's file");
        if (tensor.file != opened_file) {
            kvt_model_file_t one = KVT_MODEL_FILE_INIT;
            demand(kvt_model_file(model.model, tensor.file, &one), nullptr, "the model's file");
            name.assign(one.path, one.path_bytes);
            file = std::ifstream(name, std::ios::binary);
            opened_file = tensor.file;
        }
        sum_tensor(sums, i, file, tensor, info.bytes <= whole_bytes, name.c_str());
    }
    out.append(reinterpret_cast<const char *>(sums.data()), sums.size() * sizeof sums[0]);
    return out;
}

/// Checksum of the metadata in the model's file. It does not include overrides at load.
std::string metadata(const llama_model *model) {
    std::string all;
    char key[256], value[1024];
    for (int32_t i = 0; i < llama_model_meta_count(model); i++) {
        if (llama_model_meta_key_by_index(model, i, key, sizeof key) >= 0 &&
            llama_model_meta_val_str_by_index(model, i, value, sizeof value) >= 0) {
            all += std::string(key) + "=" + value + "\n";
        }
    }
    uint64_t sum = 0;
    demand(kvt_checksum(all.data(), all.size(), &sum), nullptr, "summing");
    return std::to_string(sum);
}

std::string value_of(const llama_model_kv_override &one) {
    char value[160];
    switch (one.tag) {
    case LLAMA_KV_OVERRIDE_TYPE_INT: return std::to_string(one.val_i64);
    case LLAMA_KV_OVERRIDE_TYPE_FLOAT: std::snprintf(value, sizeof value, "%a", one.val_f64); return value;
    case LLAMA_KV_OVERRIDE_TYPE_BOOL: return one.val_bool ? "true" : "false";
    case LLAMA_KV_OVERRIDE_TYPE_STR:
        std::snprintf(value, sizeof value, "%.*s", int(sizeof one.val_str), one.val_str);
        return value;
    }
    fail(KVT_E_INVALID, "model_params: kv_overrides has an entry of the unknown type " +
                            std::to_string(int(one.tag)));
}

/// Text of the overrides with which the model was loaded; an entry with an empty key ends the list.
std::string overrides(const llama_model_params *params) {
    std::string all;
    const llama_model_kv_override *one = params ? params->kv_overrides : nullptr;
    for (size_t i = 0; one && one[i].key[0] != 0; i++) {
        if (i == max_overrides) {
            fail(KVT_E_LIMIT, "model_params: kv_overrides has more than 1024 entries; end the list with "
                              "an empty key");
        }
        all += std::string(one[i].key, strnlen(one[i].key, sizeof one[i].key)) + "=" +
               std::to_string(int(one[i].tag)) + " " + value_of(one[i]) + "\n";
    }
    return all;
}

/// The value of a metadata key after overrides; empty = the model has no such key.
std::string value_of(const llama_model *model, const llama_model_params *params, const std::string &key) {
    const llama_model_kv_override *one = params ? params->kv_overrides : nullptr;
    for (; one && one->key[0] != 0; one++) {
        if (std::strncmp(one->key, key.c_str(), sizeof one->key) == 0) {
            return value_of(*one);
        }
    }
    char value[256];
    return llama_model_meta_val_str(model, key.c_str(), value, sizeof value) >= 0 ? value : "";
}

/// Tells whether the context is longer than the model's original context. Some models then scale
/// RoPE in another way. The engine compares with the metadata, regardless of the context's YaRN
/// settings.
bool is_long(const llama_context *ctx, const llama_model_params *params) {
    const llama_model *model = llama_get_model(ctx);
    const std::string arch = value_of(model, params, "general.architecture");
    std::string original_text = value_of(model, params, arch + ".rope.scaling.original_context_length");
    if (original_text.empty()) {
        // Opening a context may change llama_model_n_ctx_train.
        original_text = value_of(model, params, arch + ".context_length");
    }
    const uint64_t original = original_text.empty() ? uint64_t(std::max(llama_model_n_ctx_train(model), 0))
                                           : std::strtoull(original_text.c_str(), nullptr, 10);
    return llama_n_ctx_seq(ctx) > original;
}

std::string settings(const llama_context *ctx, const llama_context_params &of,
                     const llama_model_params *params) {
    char text[320];
    std::snprintf(text, sizeof text,
                  "rope %d %a %a yarn %a %a %a %a %u attention %d long %d causal", int(of.rope_scaling_type),
                  double(of.rope_freq_base), double(of.rope_freq_scale), double(of.yarn_ext_factor),
                  double(of.yarn_attn_factor), double(of.yarn_beta_fast), double(of.yarn_beta_slow),
                  of.yarn_orig_ctx, int(of.attention_type), int(is_long(ctx, params)));
    return text;
}

} // namespace

bool is_causal(const llama_context *ctx, const llama_context_params *params) {
    const llama_model *model = llama_get_model(ctx);
    const std::string arch = value_of(model, nullptr, "general.architecture");
    const bool asked = !params || params->attention_type != LLAMA_ATTENTION_TYPE_NON_CAUSAL;
    return asked && llama_get_causal_attn(ctx) &&
           value_of(model, nullptr, arch + ".attention.causal") != "false";
}

llama_token media_token(const llama_model *model) {
    const std::string arch = value_of(model, nullptr, "general.architecture");
    const std::string image = value_of(model, nullptr, arch + ".ple.image_token_id");
    const std::string end = value_of(model, nullptr, arch + ".ple.eos_token_id");
    const bool has_image = !image.empty() && image != "0";
    return has_image || !end.empty() ? llama_token(std::atoi((has_image ? image : end).c_str())) : -1;
}

identity identify(const tier_t &tier, const kvt_llama_tier_opts_t &opts) {
    const llama_model *model = llama_get_model(tier.ctx);
    const llama_context_params plain = llama_context_default_params();
    char text[256];
    identity out;
    llama_model_desc(model, text, sizeof text);
    out.model = std::string(text) + " " + metadata(model) + "\n" + overrides(opts.model_params);
    if (opts.model_id) {
        out.weights = std::string("id ") + opts.model_id;
    } else if (opts.model_path) {
        out.weights = "file " + fingerprint(opts.model_path);
    } else {
        fail(KVT_E_INVALID, "the options do not identify the model: set model_path, the model's file, "
                            "or model_id");
    }
    const llama_context_params &params = opts.params ? *opts.params : plain;
    out.context = settings(tier.ctx, params, opts.model_params) + "; " + tier.shape.describe();
    out.engine = std::string("llama.cpp ") + llama_version() + " ggml " + ggml_version();
    return out;
}

} // namespace kvtier_llama
