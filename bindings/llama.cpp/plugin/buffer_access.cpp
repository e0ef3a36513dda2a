// Reading and writing what lies in our buffers.
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

// Addresses without memory may be behind it.
bool is_of_weights(const ggml_tensor * tensor) {
    const ggml_tensor * root = tensor->view_src ? tensor->view_src : tensor;
    return buffer_is_ours(root->buffer) && of(root->buffer).weights;
}

// Of a view the offset in what it is a view of.
uint64_t offset_in(const ggml_tensor * tensor, size_t offset) {
    return tensor->view_src ? tensor->view_offs + offset : offset;
}

// What it was counted as and paid with.
void settle_up(const Buffer & buffer) {
    if (buffer.count) {
        Totals::less(*buffer.count, buffer.bytes);
    }
    Memory * memory = Memory::opened();
    if (memory && buffer.charged_bytes > 0) {
        memory->give_back(buffer.charged_bytes);
        const std::lock_guard<std::mutex> guard(weights_lock());
        totals().spread();
    }
}

void buffer_free(ggml_backend_buffer_t wrapped) {
    std::unique_ptr<Buffer> buffer(&of(wrapped));
    buffer->weights.reset();
    munmap(buffer->base, buffer->bytes);
    settle_up(*buffer);
}

std::mutex far_lock;

std::map<ggml_backend_buffer_t, std::unique_ptr<Buffer>> & far_buffers() {
    static auto * all = new std::map<ggml_backend_buffer_t, std::unique_ptr<Buffer>>;
    return *all;
}

void * buffer_base(ggml_backend_buffer_t buffer) {
    return of(buffer).base;
}

// Of weights also where a copy of the tensor is asked with.
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
        say(std::string(ggml_get_name(tensor)) + " is no weight that is known: it is not written to");
    } else {
        std::memcpy(static_cast<char *>(tensor->data) + offset, data, bytes);
    }
}

void get(const ggml_tensor * tensor, void * data, size_t offset, size_t bytes) {
    if (const Record * record = record_like(tensor)) {
        const std::lock_guard<std::mutex> guard(weights_lock());
        if (!record->owner->get(*record, data, offset_in(tensor, offset), bytes)) {
            // There is no way to say so here. Numbers that are none make it seen further on.
            std::memset(data, 0xff, bytes);
            say(std::string(ggml_get_name(tensor)) + " cannot be read from its file");
        }
    } else if (is_of_weights(tensor)) {
        std::memset(data, 0xff, bytes);
        say(std::string(ggml_get_name(tensor)) + " is no weight that is known: it cannot be read");
    } else {
        std::memcpy(data, static_cast<const char *>(tensor->data) + offset, bytes);
    }
}

void buffer_put(ggml_backend_buffer_t, ggml_tensor * tensor, const void * data, size_t offset, size_t bytes) {
    try {
        put(tensor, data, offset, bytes);
    } catch (...) {
        say("no memory to take a tensor over");
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
        say("no memory to fill a tensor");
    }
}

// Contiguous both, as ggml has made sure: bytes are copied as they are.
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

void far_buffer_note(ggml_backend_buffer_t made, std::unique_ptr<Buffer> buffer) {
    const std::lock_guard<std::mutex> guard(far_lock);
    far_buffers()[made] = std::move(buffer);
}

void far_buffer_free(ggml_backend_buffer_t made) {
    std::unique_ptr<Buffer> buffer;
    {
        const std::lock_guard<std::mutex> guard(far_lock);
        buffer = std::move(far_buffers().at(made));
        far_buffers().erase(made);
    }
    if (buffer->far_free) {
        buffer->far_free(made);
    }
    settle_up(*buffer);
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
