// What the program loaded: models, adapters, and the text that identifies them.
#pragma once

#include <llama.h>

#include <string>
#include <vector>

namespace kvtier_run {

struct model_t {
    std::string path;
    llama_model_params params{};
    /// The program may free its own array after loading.
    std::vector<llama_model_kv_override> overrides;
};

void note_model(const llama_model *model, const char *path, const llama_model_params &params);
void forget_model(const llama_model *model);
/// False = loaded in a way that this library does not see.
bool find_model(const llama_model *model, model_t *out);

void note_lora(const llama_adapter_lora *adapter, const char *path);
void forget_lora(const llama_adapter_lora *adapter);
/// Text of adapters and their scales; empty = none. False = one of them is unknown.
bool describe_loras(llama_adapter_lora **adapters, size_t count, const float *scales, std::string *out);
std::string describe_vector(const float *data, size_t count, int32_t width, int32_t first, int32_t last);

} // namespace kvtier_run
