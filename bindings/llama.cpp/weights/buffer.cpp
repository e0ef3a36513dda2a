// The buffer type in which the engine's loader places all weights: addresses without memory.
#include "weights/weights.hpp"

#include <algorithm>
#include <cstring>
#include <sys/mman.h>

namespace kvt_weights {

namespace {

/// Addresses of a buffer. They read as zeros, so that a stray read is harmless.
struct Range {
    Weights *weights = nullptr;
    void *base = nullptr;
    size_t bytes = 0;
};

Weights &weights_of(ggml_backend_buffer_type_t type) { return *static_cast<Weights *>(type->context); }
Range &range_of(ggml_backend_buffer_t buffer) { return *static_cast<Range *>(buffer->context); }

void refuse(Weights &w, const char *message) {
    std::lock_guard<std::mutex> guard(w.lock);
    if (w.refusal.empty()) {
        w.refusal = message;
    }
}

const char *type_name(ggml_backend_buffer_type_t) { return "kvtier"; }
size_t type_alignment(ggml_backend_buffer_type_t) { return 64; }

/// False while the engine loads, so that it does not read into addresses without memory.
bool type_is_host(ggml_backend_buffer_type_t type) { return weights_of(type).is_host.load(); }

/// The model was freed; another one may be loaded.
void forget_model(Weights &w) {
    w.by_tensor.clear();
    w.entries.clear();
    for (Unit &unit : w.units) {
        unit.entries.clear();
        unit.copied.clear();
    }
    w.phase = Phase::idle;
    w.is_host = false;
}

void buffer_free(ggml_backend_buffer_t buffer) {
    Range *range = &range_of(buffer);
    Weights &w = *range->weights;
    munmap(range->base, range->bytes);
    delete range;
    std::vector<std::unique_ptr<Context>> ended;
    {
        std::lock_guard<std::mutex> guard(w.lock);
        if (--w.buffers == 0) {
            forget_model(w);
            ended.swap(w.contexts);
        }
    }
    for (auto &context : ended) {
        release_all(*context);
    }
}

void *buffer_base(ggml_backend_buffer_t buffer) { return range_of(buffer).base; }

ggml_status buffer_init_tensor(ggml_backend_buffer_t buffer, ggml_tensor *tensor) {
    Weights &w = *range_of(buffer).weights;
    if (tensor->view_src) {
        return GGML_STATUS_SUCCESS;
    }
    kvt_llama_why_t why;
    const kvt_status_t status = guarded(&why, [&]() -> kvt_status_t {
        auto entry = std::make_unique<Entry>();
        entry->tensor = tensor;
        entry->placeholder = tensor->data;
        const kvt_status_t found = describe(w, tensor, *entry, &why);
        if (found == KVT_OK) {
            std::lock_guard<std::mutex> guard(w.lock);
            w.by_tensor[tensor] = entry.get();
            w.entries.push_back(std::move(entry));
        }
        return found;
    });
    if (status != KVT_OK) {
        refuse(w, why.text);
        return GGML_STATUS_FAILED;
    }
    return GGML_STATUS_SUCCESS;
}

/// The bytes are those of the file, so the loader's writes are ignored.
void buffer_set_tensor(ggml_backend_buffer_t, ggml_tensor *, const void *, size_t, size_t) {}
void buffer_memset_tensor(ggml_backend_buffer_t, ggml_tensor *, uint8_t, size_t, size_t) {}
void buffer_clear(ggml_backend_buffer_t, uint8_t) {}

struct Piece {
    uint32_t unit;
    uint64_t at, from, bytes;
};

/// Serves direct reads of a weight, such as those of llama_model_save_to_file, from its unit.
bool read_piece(Weights &w, const Piece &piece, uint8_t *out, uint64_t offset, uint64_t bytes) {
    const uint64_t from = std::max(offset, piece.from);
    const uint64_t end = std::min(offset + bytes, piece.from + piece.bytes);
    if (from >= end) {
        return true;
    }
    kvt_unit_lease_t lease = KVT_UNIT_LEASE_INIT;
    if (kvt_stream_acquire(w.stream, piece.unit, 0, now_ns() + max_read_ns, &lease, nullptr) != KVT_OK) {
        return false;
    }
    const auto *bytes_of_unit = static_cast<const uint8_t *>(lease.address);
    std::memcpy(out + (from - offset), bytes_of_unit + piece.at + (from - piece.from), end - from);
    kvt_stream_release(w.stream, &lease, 0, nullptr);
    return true;
}

/// Finds a weight by its name. When a model is saved, the engine asks with copies of its tensors.
const Entry *find_by_name(const Weights &w, const ggml_tensor *tensor) {
    for (const auto &entry : w.entries) {
        const bool is_named = std::strncmp(entry->tensor->name, tensor->name, GGML_MAX_NAME) == 0;
        if (is_named && entry->tensor->type == tensor->type && entry->bytes == ggml_nbytes(tensor)) {
            return entry.get();
        }
    }
    return nullptr;
}

bool read_whole(Weights &w, const Entry &entry, uint8_t *out, uint64_t begin, uint64_t bytes) {
    return read_piece(w, {entry.unit, entry.at, 0, entry.bytes}, out, begin, bytes);
}

/// Reads the requested range from the parts of all experts.
bool read_divided(Weights &w, const Entry &entry, uint8_t *out, uint64_t begin, uint64_t bytes) {
    constexpr uint64_t max_parts = 16;
    uint32_t number = 0;
    kvt_model_find_tensor(w.file, entry.tensor->name, std::strlen(entry.tensor->name), &number);
    for (uint32_t unit : entry.experts) {
        kvt_part_t parts[max_parts];
        uint64_t count = 0;
        kvt_model_unit_parts(w.file, unit, parts, max_parts, sizeof parts[0], &count);
        if (count > max_parts) {
            return false;
        }
        for (uint64_t i = 0; i < count; i++) {
            const Piece piece = {unit, parts[i].at, parts[i].from, parts[i].bytes};
            if (parts[i].tensor == number && !read_piece(w, piece, out, begin, bytes)) {
                return false;
            }
        }
    }
    return true;
}

void buffer_get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor *tensor, void *data, size_t offset,
                       size_t bytes) {
    Weights &w = *range_of(buffer).weights;
    const ggml_tensor *root = tensor->view_src ? tensor->view_src : tensor;
    const Entry *known = entry_of(w, root);
    const Entry *entry = known ? known : find_by_name(w, root);
    const uint64_t begin = offset + (tensor->view_src ? tensor->view_offs : 0);
    auto *out = static_cast<uint8_t *>(data);
    std::memset(out, 0, bytes);
    bool done = entry && begin <= entry->bytes && bytes <= entry->bytes - begin;
    if (done) {
        done = entry->kind == Kind::whole ? read_whole(w, *entry, out, begin, bytes)
                                          : read_divided(w, *entry, out, begin, bytes);
    }
    if (!done) {
        refuse(w, "a weight could not be read: the engine received zeros");
    }
}

ggml_backend_buffer_t type_alloc(ggml_backend_buffer_type_t type, size_t bytes) {
    Weights &w = weights_of(type);
    {
        std::lock_guard<std::mutex> guard(w.lock);
        if (w.phase != Phase::loading) {
            // Adapters (LoRA) are allocated in the buffer type of their weights. They are small and not
            // streamed.
            return ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), bytes);
        }
    }
    auto range = std::unique_ptr<Range>(new (std::nothrow) Range);
    if (!range) {
        refuse(w, "out of memory: lower budget_bytes, or free memory");
        return nullptr;
    }
    range->weights = &w;
    range->bytes = std::max<size_t>(bytes, 4096);
    const int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    range->base = mmap(nullptr, range->bytes, PROT_READ, kind, -1, 0);
    if (range->base == MAP_FAILED) {
        refuse(w, "the model's addresses cannot be reserved: raise the limit on address space (ulimit -v)");
        return nullptr;
    }
    ggml_backend_buffer_i calls = {};
    calls.free_buffer = buffer_free;
    calls.get_base = buffer_base;
    calls.init_tensor = buffer_init_tensor;
    calls.memset_tensor = buffer_memset_tensor;
    calls.set_tensor = buffer_set_tensor;
    calls.get_tensor = buffer_get_tensor;
    calls.clear = buffer_clear;
    std::lock_guard<std::mutex> guard(w.lock);
    w.buffers++;
    return ggml_backend_buffer_init(type, calls, range.release(), bytes);
}

} // namespace

void make_buffer_type(Weights &w) {
    w.buft.iface.get_name = type_name;
    w.buft.iface.alloc_buffer = type_alloc;
    w.buft.iface.get_alignment = type_alignment;
    w.buft.iface.is_host = type_is_host;
    w.buft.device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    w.buft.context = &w;
    // One type for all tensors: they are found by name, whatever buffer they are in.
    w.overrides[0] = {".", &w.buft};
    w.overrides[1] = {nullptr, nullptr};
}

bool read_entry(Weights &w, const Entry &entry, void *out) {
    return read_whole(w, entry, static_cast<uint8_t *>(out), 0, entry.bytes);
}

const Entry *entry_of(const Weights &w, const ggml_tensor *tensor) {
    if (!tensor->buffer || tensor->buffer->buft != &w.buft) {
        return nullptr;
    }
    const auto found = w.by_tensor.find(tensor);
    return found == w.by_tensor.end() ? nullptr : found->second;
}

} // namespace kvt_weights
