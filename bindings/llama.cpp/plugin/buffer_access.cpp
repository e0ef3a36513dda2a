// Reads and writes tensors in the plugin's buffers.
#include "buffer.h"
#include "stats.h"

#include <sys/mman.h>

#include <cstring>
#include <map>
#include <vector>

namespace kvtier_plugin {

namespace {

Buffer & of(ggml_backend_buffer_t buffer) {
    return *static_cast<Buffer *>(buffer->context);
}

// Such a tensor may have addresses without memory.
bool is_of_weights(const ggml_tensor * tensor) {
    const ggml_tensor * root = tensor->view_src ? tensor->view_src : tensor;
    return buffer_is_ours(root->buffer) && of(root->buffer).weights;
}

// A view's offset is relative to its source tensor.
uint64_t offset_in(const ggml_tensor * tensor, size_t offset) {
    return tensor->view_src ? tensor->view_offs + offset : offset;
}

// Subtracts the buffer from its counter and from the budget.
void unaccount(const Buffer & buffer) {
    if (buffer.count) {
        Totals::less(*buffer.count, buffer.bytes);
    }
    Memory * memory = Memory::opened();
    if (memory && buffer.charged_bytes > 0) {
        memory->release(buffer.charged_bytes);
        const std::lock_guard<std::mutex> guard(weights_lock());
        totals().rebalance();
    }
}

void buffer_free(ggml_backend_buffer_t wrapped) {
    std::unique_ptr<Buffer> buffer(&of(wrapped));
    buffer->weights.reset();
    munmap(buffer->base, buffer->bytes);
    unaccount(*buffer);
}

std::mutex inner_lock;

std::map<ggml_backend_buffer_t, std::unique_ptr<Buffer>> & inner_buffers() {
    static auto * all = new std::map<ggml_backend_buffer_t, std::unique_ptr<Buffer>>;
    return *all;
}

void * buffer_base(ggml_backend_buffer_t buffer) {
    return of(buffer).base;
}

// Also finds weights by a copy of their tensor.
Record * record_like(const ggml_tensor * tensor) {
    if (Record * record = record_of(tensor)) {
        return record;
    }
    const ggml_tensor * root = tensor->view_src ? tensor->view_src : tensor;
    return is_of_weights(root) ? of(root->buffer).weights->find_like(root) : nullptr;
}

void put(const ggml_tensor * tensor, const void * data, size_t offset, size_t bytes) {
    if (Record * record = record_like(tensor)) {
        const std::lock_guard<std::mutex> guard(weights_lock());
        record->owner->put(*record, data, offset_in(tensor, offset), bytes);
    } else if (is_of_weights(tensor)) {
        log_line(std::string(ggml_get_name(tensor)) +
                 " is not one of this model's weights: nothing is written");
    } else {
        std::memcpy(static_cast<char *>(tensor->data) + offset, data, bytes);
    }
}

void get(const ggml_tensor * tensor, void * data, size_t offset, size_t bytes) {
    if (const Record * record = record_like(tensor)) {
        const std::lock_guard<std::mutex> guard(weights_lock());
        if (!record->owner->get(*record, data, offset_in(tensor, offset), bytes)) {
            // This function cannot report an error. NaN values make the failure visible in the results.
            std::memset(data, 0xff, bytes);
            log_line(std::string(ggml_get_name(tensor)) + " cannot be read from its file: it reads as NaN");
        }
    } else if (is_of_weights(tensor)) {
        std::memset(data, 0xff, bytes);
        log_line(std::string(ggml_get_name(tensor)) + " is not one of this model's weights: it reads as NaN");
    } else {
        std::memcpy(data, static_cast<const char *>(tensor->data) + offset, bytes);
    }
}

void buffer_put(ggml_backend_buffer_t, ggml_tensor * tensor, const void * data, size_t offset, size_t bytes) {
    try {
        put(tensor, data, offset, bytes);
    } catch (...) {
        log_line("out of memory while a tensor is written: free memory");
    }
}

void buffer_get(ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t bytes) {
    get(tensor, data, offset, bytes);
}

void buffer_memset(ggml_backend_buffer_t, ggml_tensor * tensor, uint8_t value, size_t offset, size_t bytes) {
    if (!is_of_weights(tensor)) {
        std::memset(static_cast<char *>(tensor->data) + offset, value, bytes);
        return;
    }
    try {
        const std::vector<uint8_t> filled(bytes, value);
        put(tensor, filled.data(), offset, bytes);
    } catch (...) {
        log_line("out of memory while a tensor is filled: free memory");
    }
}

// ggml has made sure that both are contiguous, so bytes are copied as they are.
bool buffer_copy(ggml_backend_buffer_t, const ggml_tensor * from, ggml_tensor * to) {
    const ggml_backend_buffer_t source = from->view_src ? from->view_src->buffer : from->buffer;
    if (is_of_weights(to) || is_of_weights(from)) {
        return false;
    }
    if (!buffer_is_ours(source) && !ggml_backend_buffer_is_host(source)) {
        return false;
    }
    std::memmove(to->data, from->data, ggml_nbytes(from));
    return true;
}

void buffer_clear(ggml_backend_buffer_t wrapped, uint8_t value) {
    Buffer & buffer = of(wrapped);
    if (buffer.weights) {
        return;
    }
    // Fresh pages are zeros, and take no memory until they are used.
    if (value != 0 || madvise(buffer.base, buffer.bytes, MADV_DONTNEED) != 0) {
        std::memset(buffer.base, value, buffer.bytes);
    }
}

} // namespace

void inner_buffer_register(ggml_backend_buffer_t made, std::unique_ptr<Buffer> buffer) {
    const std::lock_guard<std::mutex> guard(inner_lock);
    inner_buffers()[made] = std::move(buffer);
}

void inner_buffer_free(ggml_backend_buffer_t made) {
    std::unique_ptr<Buffer> buffer;
    {
        const std::lock_guard<std::mutex> guard(inner_lock);
        buffer = std::move(inner_buffers().at(made));
        inner_buffers().erase(made);
    }
    if (buffer->inner_free) {
        buffer->inner_free(made);
    }
    unaccount(*buffer);
}

Record * record_of(const ggml_tensor * tensor) {
    const ggml_tensor * root = tensor->view_src ? tensor->view_src : tensor;
    return is_of_weights(root) ? of(root->buffer).weights->find(root) : nullptr;
}

ggml_backend_buffer_i buffer_interface() {
    ggml_backend_buffer_i made = {};
    made.free_buffer = buffer_free;
    made.get_base = buffer_base;
    made.memset_tensor = buffer_memset;
    made.set_tensor = buffer_put;
    made.get_tensor = buffer_get;
    made.cpy_tensor = buffer_copy;
    made.clear = buffer_clear;
    return made;
}

} // namespace kvtier_plugin
