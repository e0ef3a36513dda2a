#ifndef KVTIER_PLUGIN_BUFFER_H
#define KVTIER_PLUGIN_BUFFER_H

#include "plugin.h"
#include "weights.h"

#include <atomic>
#include <memory>

namespace kvtier_plugin {

// A range of addresses. It is charged and backed by memory, except in a buffer of weights. There only
// resident weights have memory; the other addresses stand for streamed weights.
struct Buffer {
    char * base = nullptr;
    size_t bytes = 0;
    uint64_t charged_bytes = 0;
    // The counter of its bytes; null for weights.
    std::atomic<uint64_t> * count = nullptr;
    // For a buffer of the inner device: that device's own free function.
    void (*inner_free)(ggml_backend_buffer_t buffer) = nullptr;
    std::unique_ptr<Weights> weights;
};

// The record of a tensor of weights, or of the tensor that it is a view of; null for any other tensor.
Record * record_of(const ggml_tensor * tensor);

ggml_backend_buffer_i buffer_interface();

// Buffers of the inner device are registered until they are freed.
void inner_buffer_register(ggml_backend_buffer_t made, std::unique_ptr<Buffer> buffer);
void inner_buffer_free(ggml_backend_buffer_t made);

} // namespace kvtier_plugin

#endif
