#include "inner_device.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <vector>

namespace kvtier_plugin {

namespace {

// Addresses that stand for a buffer.
struct Range {
    ggml_backend_buffer_t buffer = nullptr;
    uint64_t bytes = 0;
};

std::mutex lock;

// Lives as long as the process, because buffers may.
std::map<uint64_t, Range> & ranges() {
    static auto * all = new std::map<uint64_t, Range>;
    return *all;
}

// `bytes` from an address on, as a tensor for ggml's functions; false outside all ranges.
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

// Copies contiguous bytes that is_covered() has checked.
void copy(uint64_t from, bool is_from_inner, uint64_t to, bool is_to_inner, uint64_t bytes,
          std::vector<char> & staging) {
    ggml_tensor source, target;
    if (bytes == 0) {
        return;
    }
    if (is_from_inner && is_to_inner) {
        for (uint64_t done = 0; done < bytes; done += staging.size()) {
            const uint64_t part = std::min<uint64_t>(bytes - done, staging.size());
            bytes_at(from + done, part, source);
            bytes_at(to + done, part, target);
            ggml_backend_tensor_get(&source, staging.data(), 0, part);
            ggml_backend_tensor_set(&target, staging.data(), 0, part);
        }
    } else if (is_from_inner) {
        bytes_at(from, bytes, source);
        ggml_backend_tensor_get(&source, reinterpret_cast<void *>(to), 0, bytes);
    } else if (is_to_inner) {
        bytes_at(to, bytes, target);
        ggml_backend_tensor_set(&target, reinterpret_cast<const void *>(from), 0, bytes);
    } else {
        std::memmove(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), bytes);
    }
}

bool is_on_device(uint32_t memory) {
    return memory == KVT_MEMORY_DEVICE;
}

// Joins contiguous runs into one.
kvt_copy_rows_t join_runs(kvt_copy_rows_t rows) {
    if (rows.runs > 1 && rows.from_stride_bytes == rows.run_bytes && rows.to_stride_bytes == rows.run_bytes) {
        rows.run_bytes *= rows.runs;
        rows.runs = 1;
    }
    return rows;
}

// Tells whether all device addresses lie in known ranges.
bool is_covered(const kvt_copy_rows_t & rows) {
    ggml_tensor at;
    bool is_covered = true;
    for (uint64_t i = 0; i < rows.runs && rows.run_bytes > 0 && is_covered; i++) {
        const uint64_t from = rows.from + i * rows.from_stride_bytes, to = rows.to + i * rows.to_stride_bytes;
        is_covered = (!is_on_device(rows.from_memory) || bytes_at(from, rows.run_bytes, at)) &&
                  (!is_on_device(rows.to_memory) || bytes_at(to, rows.run_bytes, at));
    }
    return is_covered;
}

// Copies are complete when it returns; the calling thread of kvtier does nothing else. A refused call
// has copied nothing.
kvt_status_t submit(void *, uint32_t, uint64_t, const kvt_copy_rows_t * copies, uint64_t count,
                    uint64_t stride_bytes, uint64_t * event) {
    static std::atomic<uint64_t> last{0};
    constexpr size_t staging_bytes = 1 << 20;
    const auto rows_at = [&](uint64_t i) {
        const char * at = reinterpret_cast<const char *>(copies) + i * stride_bytes;
        return join_runs(*reinterpret_cast<const kvt_copy_rows_t *>(at));
    };
    std::vector<char> staging;
    for (uint64_t i = 0; i < count; i++) {
        const kvt_copy_rows_t rows = rows_at(i);
        if (!is_covered(rows)) {
            return KVT_E_INVALID;
        }
        if (is_on_device(rows.from_memory) && is_on_device(rows.to_memory) && staging.empty()) {
            try {
                staging.resize(staging_bytes);
            } catch (const std::bad_alloc &) {
                return KVT_E_NOMEM;
            }
        }
    }
    for (uint64_t i = 0; i < count; i++) {
        const kvt_copy_rows_t rows = rows_at(i);
        for (uint64_t run = 0; run < rows.runs; run++) {
            copy(rows.from + run * rows.from_stride_bytes, is_on_device(rows.from_memory),
                 rows.to + run * rows.to_stride_bytes, is_on_device(rows.to_memory), rows.run_bytes, staging);
        }
    }
    *event = ++last;
    return KVT_OK;
}

kvt_status_t query(void *, uint64_t) {
    return KVT_OK;
}

kvt_status_t allocate(void *, uint64_t bytes, uint64_t * address) {
    void * at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
        return KVT_E_NOMEM;
    }
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(inner_buffer_type(), bytes);
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
    *out = inner_free_bytes();
    return KVT_OK;
}

} // namespace

bool inner_has_memory() {
    return ggml_backend_dev_type(inner_device()) != GGML_BACKEND_DEVICE_TYPE_CPU;
}

ggml_backend_buffer_type_t inner_buffer_type() {
    return ggml_backend_dev_buffer_type(inner_device());
}

uint64_t inner_bytes(const ggml_tensor * tensor) {
    return GGML_PAD(ggml_backend_buft_get_alloc_size(inner_buffer_type(), tensor),
                    ggml_backend_buft_get_alignment(inner_buffer_type()));
}

uint64_t inner_free_bytes() {
    // Memory that a GPU's own libraries allocate during computation. Without it they end the process.
    constexpr uint64_t LIBRARY_BYTES = 256 << 20;
    size_t left = 0, total = 0;
    ggml_backend_dev_memory(inner_device(), &left, &total);
    return left - std::min<uint64_t>(left, LIBRARY_BYTES);
}

InnerPlace inner_place(const void * address) {
    ggml_tensor byte;
    InnerPlace place;
    if (bytes_at(reinterpret_cast<uint64_t>(address), 1, byte)) {
        place = {byte.buffer, static_cast<char *>(byte.data)};
    }
    return place;
}

kvt_status_t copy_device_open(const kvt_runtime_t * runtime, kvt_device_t ** out, kvt_error_t ** error) {
    kvt_device_custom_t custom = KVT_DEVICE_CUSTOM_INIT;
    custom.flags = KVT_DEVICE_HAS_MEMORY;
    // kvtier uses one of two streams for copies that wait for events; no copy waits here.
    custom.streams = 2;
    custom.submit = submit;
    custom.query = query;
    custom.allocate = allocate;
    custom.free = free_range;
    custom.free_bytes = free_bytes;
    kvt_device_opts_t opts = KVT_DEVICE_OPTS_INIT;
    opts.kind = KVT_DEVICE_KIND_CUSTOM;
    opts.custom = &custom;
    return kvt_device_open(runtime, &opts, out, error);
}

} // namespace kvtier_plugin
