#include "far.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace kvtier_plugin {

namespace {

// Addresses that stand for a buffer.
struct Range {
    ggml_backend_buffer_t buffer = nullptr;
    uint64_t bytes = 0;
};

std::mutex lock;

// Lives as long as the process, as buffers may.
std::map<uint64_t, Range> & ranges() {
    static auto * all = new std::map<uint64_t, Range>;
    return *all;
}

// So many bytes from an address on, as a tensor that ggml's functions take; false where it is not ours.
bool bytes_at(uint64_t address, uint64_t bytes, ggml_tensor & out) {
    const std::lock_guard<std::mutex> guard(lock);
    auto at = ranges().upper_bound(address);
    if (at == ranges().begin()) {
        return false;
    }
    --at;
    const uint64_t from = address - at->first;
    if (from > at->second.bytes || bytes > at->second.bytes - from) {
        return false;
    }
    out = {};
    out.type = GGML_TYPE_I8;
    out.ne[0] = int64_t(bytes);
    out.ne[1] = out.ne[2] = out.ne[3] = 1;
    out.nb[0] = 1;
    out.nb[1] = out.nb[2] = out.nb[3] = bytes;
    out.buffer = at->second.buffer;
    out.data = static_cast<char *>(ggml_backend_buffer_get_base(out.buffer)) + from;
    return true;
}

kvt_status_t copy(uint64_t from, bool is_from_far, uint64_t to, bool is_to_far, uint64_t bytes) {
    ggml_tensor source, target;
    if (bytes == 0) {
        return KVT_OK;
    }
    if ((is_from_far && !bytes_at(from, bytes, source)) || (is_to_far && !bytes_at(to, bytes, target))) {
        return KVT_E_INVALID;
    }
    if (is_from_far && is_to_far) {
        std::vector<char> between(bytes);
        ggml_backend_tensor_get(&source, between.data(), 0, bytes);
        ggml_backend_tensor_set(&target, between.data(), 0, bytes);
    } else if (is_from_far) {
        ggml_backend_tensor_get(&source, reinterpret_cast<void *>(to), 0, bytes);
    } else if (is_to_far) {
        ggml_backend_tensor_set(&target, reinterpret_cast<const void *>(from), 0, bytes);
    } else {
        std::memmove(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), bytes);
    }
    return KVT_OK;
}

kvt_status_t copy_rows(const kvt_copy_rows_t & rows) {
    const bool is_dense = rows.runs <= 1 || (rows.from_stride_bytes == rows.run_bytes &&
                                             rows.to_stride_bytes == rows.run_bytes);
    const uint64_t runs = is_dense ? 1 : rows.runs;
    const uint64_t bytes = is_dense ? rows.run_bytes * rows.runs : rows.run_bytes;
    const bool is_from_far = rows.from_memory == KVT_MEMORY_DEVICE;
    const bool is_to_far = rows.to_memory == KVT_MEMORY_DEVICE;
    kvt_status_t status = KVT_OK;
    for (uint64_t i = 0; i < runs && status == KVT_OK; i++) {
        status = copy(rows.from + i * rows.from_stride_bytes, is_from_far,
                      rows.to + i * rows.to_stride_bytes, is_to_far, bytes);
    }
    return status;
}

// Copies are done when it returns: what calls it is a thread of kvtier's that does nothing else.
kvt_status_t submit(void *, uint32_t, uint64_t, const kvt_copy_rows_t * copies, uint64_t count,
                    uint64_t stride_bytes, uint64_t * event) {
    static std::atomic<uint64_t> last{0};
    kvt_status_t status = KVT_OK;
    try {
        for (uint64_t i = 0; i < count && status == KVT_OK; i++) {
            const char * at = reinterpret_cast<const char *>(copies) + i * stride_bytes;
            status = copy_rows(*reinterpret_cast<const kvt_copy_rows_t *>(at));
        }
    } catch (...) {
        status = KVT_E_NOMEM;
    }
    *event = ++last;
    return status;
}

kvt_status_t query(void *, uint64_t) {
    return KVT_OK;
}

kvt_status_t allocate(void *, uint64_t bytes, uint64_t * address) {
    void * at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
        return KVT_E_NOMEM;
    }
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(far_type(), bytes);
    if (buffer) {
        try {
            ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
            const std::lock_guard<std::mutex> guard(lock);
            ranges()[reinterpret_cast<uint64_t>(at)] = {buffer, bytes};
            *address = reinterpret_cast<uint64_t>(at);
            return KVT_OK;
        } catch (...) {
            ggml_backend_buffer_free(buffer);
        }
    }
    munmap(at, bytes);
    return KVT_E_NOMEM;
}

void free_range(void *, uint64_t address, uint64_t bytes) {
    ggml_backend_buffer_t buffer = nullptr;
    {
        const std::lock_guard<std::mutex> guard(lock);
        const auto at = ranges().find(address);
        if (at == ranges().end()) {
            return;
        }
        buffer = at->second.buffer;
        ranges().erase(at);
    }
    ggml_backend_buffer_free(buffer);
    munmap(reinterpret_cast<void *>(address), bytes);
}

kvt_status_t free_bytes(void *, uint64_t * out) {
    *out = far_free_bytes();
    return KVT_OK;
}

} // namespace

bool is_far() {
    return ggml_backend_dev_type(under_device()) != GGML_BACKEND_DEVICE_TYPE_CPU;
}

ggml_backend_buffer_type_t far_type() {
    return ggml_backend_dev_buffer_type(under_device());
}

uint64_t far_bytes(const ggml_tensor * tensor) {
    return GGML_PAD(ggml_backend_buft_get_alloc_size(far_type(), tensor), ggml_backend_buft_get_alignment(far_type()));
}

uint64_t far_free_bytes() {
    // What a GPU's own libraries take beside us while they compute: without it they end the process.
    constexpr uint64_t THEIRS_BYTES = 256 << 20;
    size_t left = 0, total = 0;
    ggml_backend_dev_memory(under_device(), &left, &total);
    return left - std::min<uint64_t>(left, THEIRS_BYTES);
}

FarPlace far_place(const void * address) {
    ggml_tensor byte;
    FarPlace place;
    if (bytes_at(reinterpret_cast<uint64_t>(address), 1, byte)) {
        place = {byte.buffer, static_cast<char *>(byte.data)};
    }
    return place;
}

kvt_status_t far_open(const kvt_runtime_t * runtime, kvt_device_t ** out, kvt_error_t ** error) {
    kvt_device_custom_t custom = KVT_DEVICE_CUSTOM_INIT;
    custom.flags = KVT_DEVICE_HAS_MEMORY;
    // Of two streams one is for what waits for events: nothing does here.
    custom.streams = 2;
    custom.submit = submit;
    custom.query = query;
    custom.allocate = allocate;
    custom.free = free_range;
    custom.free_bytes = free_bytes;
    kvt_device_opts_t opts = KVT_DEVICE_OPTS_INIT;
    opts.kind = KVT_DEVICE_CUSTOM;
    opts.custom = &custom;
    return kvt_device_open(runtime, &opts, out, error);
}

} // namespace kvtier_plugin
