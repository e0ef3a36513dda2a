#ifndef KVTIER_PLUGIN_BUFFER_H
#define KVTIER_PLUGIN_BUFFER_H

#include "plugin.h"
#include "weights.h"

#include <atomic>
#include <memory>

namespace kvtier_plugin {

// A stretch of addresses. All of it is memory that was paid for, except where it is of weights: there
// only what stays is memory, and the rest stands for what is streamed.
struct Buffer {
    char * base = nullptr;
    size_t bytes = 0;
    uint64_t charged_bytes = 0;
    // What it counts as; null where it is of weights.
    std::atomic<uint64_t> * count = nullptr;
    // Of a buffer of the device underneath: how that frees it.
    void (*far_free)(ggml_backend_buffer_t buffer) = nullptr;
    std::unique_ptr<Weights> weights;
};

// What is known of a tensor of weights, or of what it is a view of; null of any other.
Record * record_of(const ggml_tensor * tensor);

ggml_backend_buffer_i buffer_interface();

// Buffers of the device underneath are known until they are freed.
void far_buffer_note(ggml_backend_buffer_t made, std::unique_ptr<Buffer> buffer);
void far_buffer_free(ggml_backend_buffer_t made);

} // namespace kvtier_plugin

#endif
