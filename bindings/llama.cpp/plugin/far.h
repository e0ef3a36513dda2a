// A device underneath whose memory the processor cannot follow, such as a GPU.
//
// Streamed weights go there by way of a device of kvtier's that copies with ggml's own functions, as bytes: the
// backend has to keep tensors as files have them. Addresses of that device are ours: of pages that nobody may touch, each of which stands
// for a byte of a buffer of the backend's.
#ifndef KVTIER_PLUGIN_FAR_H
#define KVTIER_PLUGIN_FAR_H

#include "plugin.h"

#include <kvtier/kvtier.h>

namespace kvtier_plugin {

// Whether the device underneath is such a one.
bool is_far();
// The type of its buffers.
ggml_backend_buffer_type_t far_type();
// Bytes of a tensor there: kernels may read a little behind its end.
uint64_t far_bytes(const ggml_tensor * tensor);
// What it has left for us.
uint64_t far_free_bytes();

// Where bytes are for the backend.
struct FarPlace {
    ggml_backend_buffer_t buffer = nullptr;
    char * data = nullptr;
};

// The place that an address of kvtier's device stands for; no buffer where it stands for none.
FarPlace far_place(const void * address);

kvt_status_t far_open(const kvt_runtime_t * runtime, kvt_device_t ** out, kvt_error_t ** error);

} // namespace kvtier_plugin

#endif
