// The plugin's buffer type: weights, KV, or the engine's compute buffers.
//
// It does not report host memory, although it is: the CPU backend would then read weights at their
// addresses, which is valid only inside graph_compute. Everything else asks for bytes.
#include "buffer.h"

#include "inner_device.h"
#include "stats.h"

#include <ggml-alloc.h>

#include <sys/mman.h>

#include <cstring>
#include <new>

namespace kvtier_plugin {

namespace {

constexpr size_t MAX_BYTES = size_t(1) << 46;

char * addresses(size_t bytes, bool is_memory) {
    const int access = is_memory ? PROT_READ | PROT_WRITE : PROT_NONE;
    void * at = mmap(nullptr, bytes, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? nullptr : static_cast<char *>(at);
}

ggml_backend_buffer_t wrap(ggml_backend_buffer_type_t type, std::unique_ptr<Buffer> buffer) {
    const size_t bytes = buffer->bytes;
    return ggml_backend_buffer_init(type, buffer_interface(), buffer.release(), bytes);
}

ggml_backend_buffer_t refused(const std::string & why) {
    log_line(why);
    return nullptr;
}

// A buffer of the inner device, which must see its own buffer type; only its free function is replaced.
ggml_backend_buffer_t open_inner(std::unique_ptr<Buffer> & buffer) {
    ggml_backend_buffer_t made = ggml_backend_buft_alloc_buffer(inner_buffer_type(), buffer->bytes);
    if (!made) {
        return nullptr;
    }
    buffer->inner_free = made->iface.free_buffer;
    try {
        inner_buffer_register(made, std::move(buffer));
    } catch (...) {
        ggml_backend_buffer_free(made);
        return nullptr;
    }
    made->iface.free_buffer = inner_buffer_free;
    return made;
}

// Allocates memory at once. Compute buffers are not charged: the engine's own options determine their
// size.
ggml_backend_buffer_t open_plain(ggml_backend_buffer_type_t type, size_t bytes, const char * what) {
    if (bytes > MAX_BYTES) {
        return refused(std::string(what) + " needs " + mebibytes(bytes) + ", at most " +
                       mebibytes(MAX_BYTES) + " is allowed");
    }
    std::unique_ptr<Buffer> buffer(new Buffer);
    Totals & all = totals();
    const bool is_kv = std::strcmp(what, "KV") == 0, is_compute = std::strcmp(what, "computing") == 0;
    buffer->bytes = bytes;
    if (!is_compute) {
        std::string why;
        Memory * memory = Memory::get(why);
        if (!memory || !memory->charge(bytes, what, why)) {
            return refused(why);
        }
        buffer->charged_bytes = bytes;
    }
    const uint64_t charged_bytes = buffer->charged_bytes;
    std::atomic<uint64_t> & count = is_kv ? all.kv_bytes : is_compute ? all.compute_bytes : all.other_bytes;
    buffer->count = &count;
    ggml_backend_buffer_t made = nullptr;
    if (inner_has_memory()) {
        made = open_inner(buffer);
    } else if ((buffer->base = addresses(bytes, true))) {
        made = wrap(type, std::move(buffer));
    }
    if (!made) {
        if (Memory * memory = Memory::opened()) {
            memory->release(charged_bytes);
        }
        return refused(mebibytes(bytes) + " of memory for " + what +
                       " cannot be allocated: lower the budget, or free memory");
    }
    Totals::more(count,
                 is_kv        ? all.kv_peak_bytes
                 : is_compute ? all.compute_peak_bytes
                              : all.other_peak_bytes,
                 bytes);
    return made;
}

ggml_backend_buffer_t open_weights(ggml_backend_buffer_type_t type, std::unique_ptr<Weights> weights,
                                   ggml_tensor ** tensors, int count) {
    std::unique_ptr<Buffer> buffer(new Buffer);
    buffer->bytes = size_t(weights->span_bytes());
    buffer->base = addresses(buffer->bytes, false);
    std::string why = "the weights' addresses cannot be reserved: raise the limit on address space "
                      "(ulimit -v)";
    if (!buffer->base || !weights->allocate(buffer->base, why)) {
        if (buffer->base) {
            munmap(buffer->base, buffer->bytes);
        }
        return refused(why);
    }
    buffer->weights = std::move(weights);
    Weights * owner = buffer->weights.get();
    ggml_backend_buffer_t wrapped = wrap(type, std::move(buffer));
    for (int i = 0; i < count; i++) {
        const Record & record = owner->record(size_t(i));
        if (ggml_backend_tensor_alloc(wrapped, tensors[i], record.reserved) != GGML_STATUS_SUCCESS) {
            ggml_backend_buffer_free(wrapped);
            return nullptr;
        }
    }
    return wrapped;
}

size_t plain_bytes(ggml_tensor * const * tensors, int count) {
    size_t bytes = 0;
    for (int i = 0; i < count; i++) {
        if (!tensors[i]->data && !tensors[i]->view_src) {
            bytes += inner_has_memory() ? inner_bytes(tensors[i]) : GGML_PAD(ggml_nbytes(tensors[i]),
                ALIGNMENT);
        }
    }
    return bytes;
}

bool is_kv(ggml_tensor * const * tensors, int count) {
    return count > 0 && std::strncmp(ggml_get_name(tensors[0]), "cache_", 6) == 0;
}

const char * type_name(ggml_backend_buffer_type_t) {
    return "KVTIER";
}

size_t type_alignment(ggml_backend_buffer_type_t) {
    return inner_has_memory() ? ggml_backend_buft_get_alignment(inner_buffer_type()) : ALIGNMENT;
}

thread_local kvtier_llama::sized_tensors sized;

size_t type_alloc_size(ggml_backend_buffer_type_t type, const ggml_tensor * tensor) {
    const size_t bytes = inner_has_memory() ? ggml_backend_buft_get_alloc_size(inner_buffer_type(), tensor)
                                            : ggml_nbytes(tensor);
    sized.add(tensor, GGML_PAD(bytes, type_alignment(type)));
    return bytes;
}

size_t type_max_size(ggml_backend_buffer_type_t) {
    return inner_has_memory() ? ggml_backend_buft_get_max_size(inner_buffer_type()) : SIZE_MAX;
}

bool type_is_host(ggml_backend_buffer_type_t) {
    return false;
}

ggml_backend_buffer_t alloc_list(ggml_backend_buffer_type_t type, ggml_tensor ** tensors, int count) {
    std::string why;
    std::unique_ptr<Weights> weights = Weights::make(tensors, count, why);
    if (weights) {
        return open_weights(type, std::move(weights), tensors, count);
    }
    if (!why.empty()) {
        return refused(why);
    }
    if (are_weights(tensors, count)) {
        log_line("no open file of this process has these weights, so they stay in memory: set "
                 "KVTIER_MODEL to the "
            "file, or KVTIER_DIR to a directory for a copy of them");
    }
    const size_t bytes = plain_bytes(tensors, count);
    const char * what = is_kv(tensors, count) ? "KV" : "tensors";
    ggml_backend_buffer_t buffer =
        bytes == 0 ? ggml_backend_buft_alloc_buffer(type, 0) : open_plain(type, bytes, what);
    if (!buffer) {
        return nullptr;
    }
    ggml_tallocr allocator = ggml_tallocr_new(buffer);
    for (int i = 0; i < count; i++) {
        ggml_tensor * tensor = tensors[i];
        ggml_status status = GGML_STATUS_SUCCESS;
        if (!tensor->data && !tensor->view_src) {
            status = ggml_tallocr_alloc(&allocator, tensor);
        } else if (tensor->view_src && !tensor->buffer) {
            status = ggml_backend_view_init(tensor);
        }
        if (status != GGML_STATUS_SUCCESS) {
            ggml_backend_buffer_free(buffer);
            return nullptr;
        }
    }
    return buffer;
}

ggml_backend_buffer_t type_alloc(ggml_backend_buffer_type_t type, size_t bytes) {
    try {
        std::vector<ggml_tensor *> tensors = sized.take(bytes);
        return tensors.empty() ? open_plain(type, bytes, "computing")
                               : alloc_list(type, tensors.data(), int(tensors.size()));
    } catch (...) {
        return nullptr;
    }
}

ggml_backend_buffer_t type_alloc_list(ggml_backend_buffer_type_t type, ggml_tensor ** tensors, int count) {
    try {
        return alloc_list(type, tensors, count);
    } catch (...) {
        return nullptr;
    }
}

// The memory that a list of tensors takes, for engines that check whether everything fits before
// loading.
size_t type_size_list(ggml_backend_buffer_type_t, ggml_tensor ** tensors, int count) {
    try {
        std::string why;
        const std::unique_ptr<Weights> weights = Weights::make(tensors, count, why);
        if (weights) {
            return size_t(weights->resident_bytes() + weights->floor_bytes());
        }
    } catch (...) {
        // Treat them as other tensors.
    }
    return plain_bytes(tensors, count);
}

} // namespace

ggml_backend_buffer_type_t buffer_type() {
    static ggml_backend_buffer_type type = [] {
        ggml_backend_buffer_type made = {};
        made.iface.get_name = type_name;
        made.iface.alloc_buffer = type_alloc;
        made.iface.get_alignment = type_alignment;
        made.iface.get_max_size = type_max_size;
        made.iface.get_alloc_size = type_alloc_size;
        made.iface.is_host = type_is_host;
        kvtier_llama::set_list_functions(made.iface, type_alloc_list, type_size_list);
        return made;
    }();
    return &type;
}

bool buffer_is_ours(ggml_backend_buffer_t buffer) {
    return buffer && buffer->context && buffer->buft == buffer_type();
}

} // namespace kvtier_plugin
