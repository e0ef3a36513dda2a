// The inner device (KVTIER_UNDER) if it has memory that the CPU cannot address, such as a GPU.
//
// Streamed weights reach it through a custom device of kvtier's, which copies bytes with ggml's
// functions. The inner backend must keep tensors as files have them. Addresses of the custom device lie
// in inaccessible pages; each byte stands for a byte of one of the inner backend's buffers.
#ifndef KVTIER_PLUGIN_INNER_DEVICE_H
#define KVTIER_PLUGIN_INNER_DEVICE_H

#include "plugin.h"

#include <kvtier/kvtier.h>

namespace kvtier_plugin {

// Tells whether the inner device has memory of its own.
bool inner_has_memory();
// The buffer type of the inner device.
ggml_backend_buffer_type_t inner_buffer_type();
// Bytes that a tensor takes there: kernels may read a little past its end.
uint64_t inner_bytes(const ggml_tensor * tensor);
// Free bytes of the inner device, less a reserve for its libraries.
uint64_t inner_free_bytes();

// A place in a buffer of the inner backend.
struct InnerPlace {
    ggml_backend_buffer_t buffer = nullptr;
    char * data = nullptr;
};

// The place that an address of the custom device stands for; no buffer if it stands for none.
InnerPlace inner_place(const void * address);

kvt_status_t copy_device_open(const kvt_runtime_t * runtime, kvt_device_t ** out, kvt_error_t ** error);

} // namespace kvtier_plugin

#endif
