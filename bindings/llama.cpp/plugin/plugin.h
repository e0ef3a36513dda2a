// Declarations that the parts of the plugin share.
#ifndef KVTIER_PLUGIN_PLUGIN_H
#define KVTIER_PLUGIN_PLUGIN_H

#include "common/engine.hpp"
#include "settings.h"

#include <cstddef>
#include <cstdint>

namespace kvtier_plugin {

class Weights;

// The settings as they were when the plugin was loaded.
const Settings & settings();

// The device that computes: in host memory, or in memory of its own (inner_device.h).
ggml_backend_dev_t inner_device();

ggml_backend_buffer_type_t buffer_type();
bool buffer_is_ours(ggml_backend_buffer_t buffer);

ggml_backend_t backend_open(ggml_backend_dev_t device);
bool backend_is_ours(ggml_backend_t backend);
// Functions that the engine asks for by name, forwarded to the inner backend.
void * backend_proc(const char * name);

constexpr size_t ALIGNMENT = 64;

} // namespace kvtier_plugin

#endif
