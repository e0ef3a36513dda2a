// A fake GPU for tests, the device FAKE0. Its pages are accessible only inside its functions, so that any
// other access to its addresses crashes.
//
//   FAKE_BYTES  bytes of its memory; 1 GiB by default
//   FAKE_STATS  1: print a line of statistics at exit
//
// The CPU backend computes, after a check that the graph uses memory of the device only.
#include <ggml-backend-impl.h>
#include <ggml-impl.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

namespace {

constexpr size_t ALIGNMENT = 128;
// GPU kernels read quantised rows in steps of this many values, beyond the end of the last row.
constexpr int64_t ROW_STEP = 512;

// The mapping of a buffer and the number of its users. Protected by the lock of Memory.
struct Buffer {
    char * base = nullptr; // null after the free
    size_t bytes = 0, mapped_bytes = 0;
    int users = 0;
};

using Handle = std::shared_ptr<Buffer>;

[[noreturn]] void fail(const char * what, const ggml_tensor * tensor, const ggml_tensor * node) {
    std::fprintf(stderr, "fake: %s (%s), a source of %s (%s): %s\n", tensor->name,
                 ggml_op_name(tensor->op), node->name, ggml_op_name(node->op), what);
    std::abort();
}

void protect(const Buffer & buffer, int access) {
    if (mprotect(buffer.base, buffer.mapped_bytes, access) != 0) {
        std::perror("fake: mprotect");
        std::abort();
    }
}

// All buffers. Never destroyed, because engines may free buffers at exit.
class Memory {
public:
    static Memory & get() {
        static Memory * only = new Memory;
        return *only;
    }

    Handle alloc(size_t bytes) {
        const std::lock_guard<std::mutex> guard(lock_);
        if (bytes > total_bytes() - used_bytes_) {
            std::fprintf(stderr, "fake: no %zu bytes: %zu of %zu are in use\n", bytes, used_bytes_,
                         total_bytes());
            return nullptr;
        }
        const Handle made = std::make_shared<Buffer>();
        const size_t page = size_t(sysconf(_SC_PAGESIZE));
        made->bytes = bytes;
        made->mapped_bytes = GGML_PAD(bytes, page);
        void * at = mmap(nullptr, made->mapped_bytes, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) {
            return nullptr;
        }
        made->base = static_cast<char *>(at);
        live_.push_back(made);
        used_bytes_ += bytes;
        peak_bytes_ = std::max(peak_bytes_, used_bytes_);
        return made;
    }

    void free(const Handle & buffer) {
        const std::lock_guard<std::mutex> guard(lock_);
        munmap(buffer->base, buffer->mapped_bytes);
        buffer->base = nullptr;
        used_bytes_ -= buffer->bytes;
        live_.erase(std::find(live_.begin(), live_.end(), buffer));
    }

    std::vector<Handle> live() {
        const std::lock_guard<std::mutex> guard(lock_);
        return live_;
    }

    void open(const Handle & buffer) {
        const std::lock_guard<std::mutex> guard(lock_);
        if (buffer->base && buffer->users++ == 0) {
            protect(*buffer, PROT_READ | PROT_WRITE);
        }
    }

    // Another context may have freed the buffer meanwhile.
    void close(const Handle & buffer) {
        const std::lock_guard<std::mutex> guard(lock_);
        if (buffer->base && --buffer->users == 0) {
            protect(*buffer, PROT_NONE);
        }
    }

    static size_t total_bytes() {
        static const size_t bytes = [] {
            const char * value = std::getenv("FAKE_BYTES");
            return value ? size_t(std::strtoull(value, nullptr, 10)) : size_t(1) << 30;
        }();
        return bytes;
    }

    size_t free_bytes() {
        const std::lock_guard<std::mutex> guard(lock_);
        return total_bytes() - used_bytes_;
    }

    void print() {
        const std::lock_guard<std::mutex> guard(lock_);
        std::fprintf(stderr, "fake: {\"peak_bytes\":%zu,\"buffers\":%zu,\"graphs\":%llu,\"set_bytes\":%llu}\n",
                     peak_bytes_, live_.size(), (unsigned long long) graphs, (unsigned long long) set_bytes);
    }

    std::atomic<uint64_t> graphs{0}, set_bytes{0};

private:
    std::mutex lock_;
    std::vector<Handle> live_;
    size_t used_bytes_ = 0, peak_bytes_ = 0;
};

// Makes buffers accessible during its lifetime.
class Accessible {
public:
    explicit Accessible(std::vector<Handle> buffers) : buffers_(std::move(buffers)) {
        for (const Handle & buffer : buffers_) {
            Memory::get().open(buffer);
        }
    }

    ~Accessible() {
        for (const Handle & buffer : buffers_) {
            Memory::get().close(buffer);
        }
    }

    Accessible(const Accessible &) = delete;
    Accessible & operator=(const Accessible &) = delete;

private:
    std::vector<Handle> buffers_;
};

ggml_backend_device & device();
ggml_backend_buffer_type_t buffer_type();

const Handle & handle_of(ggml_backend_buffer_t buffer) {
    return *static_cast<Handle *>(buffer->context);
}

// Empty buffers have no context.
bool is_device_buffer(ggml_backend_buffer_t buffer) {
    return buffer && buffer->buft == buffer_type() && buffer->context;
}

const ggml_tensor * root_of(const ggml_tensor * tensor) {
    return tensor->view_src ? tensor->view_src : tensor;
}

size_t padding_bytes(const ggml_tensor * tensor) {
    const int64_t over = tensor->ne[0] % ROW_STEP;
    return ggml_is_quantized(tensor->type) && over != 0 ? ggml_row_size(tensor->type, ROW_STEP - over) : 0;
}

void buffer_free(ggml_backend_buffer_t wrapped) {
    Memory::get().free(handle_of(wrapped));
    delete static_cast<Handle *>(wrapped->context);
}

void * buffer_base(ggml_backend_buffer_t wrapped) {
    return handle_of(wrapped)->base;
}

// Clears the padding of weights. In compute buffers the padding may hold other tensors' bytes, so that
// kernels clear it themselves.
ggml_status buffer_init(ggml_backend_buffer_t wrapped, ggml_tensor * tensor) {
    const size_t padding = padding_bytes(tensor);
    if (!tensor->view_src && padding > 0 && wrapped->usage != GGML_BACKEND_BUFFER_USAGE_COMPUTE) {
        const Accessible accessible({handle_of(wrapped)});
        std::memset(static_cast<char *>(tensor->data) + ggml_nbytes(tensor), 0, padding);
    }
    return GGML_STATUS_SUCCESS;
}

void buffer_memset(ggml_backend_buffer_t wrapped, ggml_tensor * tensor, uint8_t value, size_t offset,
                   size_t bytes) {
    const Accessible accessible({handle_of(wrapped)});
    std::memset(static_cast<char *>(tensor->data) + offset, value, bytes);
}

void buffer_set(ggml_backend_buffer_t wrapped, ggml_tensor * tensor, const void * data, size_t offset,
                size_t bytes) {
    const Accessible accessible({handle_of(wrapped)});
    std::memcpy(static_cast<char *>(tensor->data) + offset, data, bytes);
    Memory::get().set_bytes += bytes;
}

void buffer_get(ggml_backend_buffer_t wrapped, const ggml_tensor * tensor, void * data, size_t offset,
                size_t bytes) {
    const Accessible accessible({handle_of(wrapped)});
    std::memcpy(data, static_cast<const char *>(tensor->data) + offset, bytes);
}

// Both tensors are contiguous, as ggml checks. A source in other memory is copied by ggml over host memory.
bool buffer_copy(ggml_backend_buffer_t wrapped, const ggml_tensor * from, ggml_tensor * to) {
    const ggml_backend_buffer_t source = root_of(from)->buffer;
    if (!is_device_buffer(source)) {
        return false;
    }
    const Accessible accessible({handle_of(source), handle_of(wrapped)});
    std::memmove(to->data, from->data, ggml_nbytes(from));
    return true;
}

void buffer_clear(ggml_backend_buffer_t wrapped, uint8_t value) {
    const Accessible accessible({handle_of(wrapped)});
    std::memset(handle_of(wrapped)->base, value, handle_of(wrapped)->bytes);
}

ggml_backend_buffer_i buffer_interface() {
    ggml_backend_buffer_i made = {};
    made.free_buffer = buffer_free;
    made.get_base = buffer_base;
    made.init_tensor = buffer_init;
    made.memset_tensor = buffer_memset;
    made.set_tensor = buffer_set;
    made.get_tensor = buffer_get;
    made.cpy_tensor = buffer_copy;
    made.clear = buffer_clear;
    return made;
}

const char * device_name(ggml_backend_dev_t) {
    return "FAKE0";
}

const char * type_name(ggml_backend_buffer_type_t) {
    return "FAKE0";
}

ggml_backend_buffer_t type_alloc(ggml_backend_buffer_type_t type, size_t bytes) {
    const Handle made = Memory::get().alloc(bytes);
    return made ? ggml_backend_buffer_init(type, buffer_interface(), new Handle(made), bytes) : nullptr;
}

size_t type_alignment(ggml_backend_buffer_type_t) {
    return ALIGNMENT;
}

size_t type_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor * tensor) {
    return ggml_nbytes(tensor) + padding_bytes(tensor);
}

ggml_backend_buffer_type_t buffer_type() {
    static ggml_backend_buffer_type type = [] {
        ggml_backend_buffer_type made = {};
        made.iface.get_name = type_name;
        made.iface.alloc_buffer = type_alloc;
        made.iface.get_alignment = type_alignment;
        made.iface.get_alloc_size = type_alloc_size;
        made.device = &device();
        return made;
    }();
    return &type;
}

// Checks that a graph uses memory of the device only, with zeroed padding.
class Check {
public:
    explicit Check(const std::vector<Handle> & live) : live_(live) {}

    void check_graph(const ggml_cgraph * graph) const {
        for (int i = 0; i < graph->n_nodes; i++) {
            const ggml_tensor * node = graph->nodes[i];
            // The CPU backend skips these, too.
            if (ggml_op_is_empty(node->op) || !(node->flags & GGML_TENSOR_FLAG_COMPUTE)) {
                continue;
            }
            check_in_buffer(node, node);
            // GPU backends write products without gaps between columns.
            if (node->op == GGML_OP_MUL_MAT && !ggml_is_contiguous(node)) {
                fail("the product has gaps between columns", node, node);
            }
            for (const ggml_tensor * source : node->src) {
                if (source) {
                    check_in_buffer(source, node);
                    check_padding(root_of(source), node);
                }
            }
        }
    }

private:
    bool is_within(ggml_backend_buffer_t wrapped, const void * data, size_t bytes) const {
        const Buffer & buffer = *handle_of(wrapped);
        const uintptr_t base = uintptr_t(buffer.base), at = uintptr_t(data);
        return at >= base && at - base <= buffer.bytes && bytes <= buffer.bytes - (at - base);
    }

    void check_in_buffer(const ggml_tensor * tensor, const ggml_tensor * node) const {
        const ggml_backend_buffer_t buffer = root_of(tensor)->buffer;
        const size_t bytes = ggml_nbytes(tensor);
        // Empty tensors are never read.
        if (bytes == 0) {
            return;
        }
        if (!buffer || buffer->buft != buffer_type()) {
            fail(buffer ? ggml_backend_buft_name(buffer->buft) : "the tensor has no buffer", tensor, node);
        }
        if (!buffer->context || std::find(live_.begin(), live_.end(), handle_of(buffer)) == live_.end()) {
            fail("the buffer was freed", tensor, node);
        }
        if (!is_within(buffer, tensor->data, bytes)) {
            fail("the tensor exceeds its buffer", tensor, node);
        }
    }

    void check_padding(const ggml_tensor * root, const ggml_tensor * node) const {
        const size_t padding = padding_bytes(root);
        if (padding == 0 || ggml_n_dims(root) != 2 || ggml_nbytes(root) == 0) {
            return;
        }
        const char * end = static_cast<const char *>(root->data) + ggml_nbytes(root);
        if (!is_within(root->buffer, root->data, ggml_nbytes(root) + padding)) {
            fail("the buffer has no room for the padding", root, node);
        }
        // In compute buffers kernels clear the padding themselves.
        const bool is_clear = root->buffer->usage == GGML_BACKEND_BUFFER_USAGE_COMPUTE ||
                              std::all_of(end, end + padding, [](char byte) { return byte == 0; });
        if (!is_clear) {
            fail("the padding is not zero", root, node);
        }
    }

    const std::vector<Handle> & live_;
};

// Looked up late, because this library may be loaded before the CPU backend.
ggml_backend_dev_t cpu_device() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

ggml_backend_t cpu_backend(ggml_backend_t backend) {
    return static_cast<ggml_backend_t>(backend->context);
}

const char * backend_name(ggml_backend_t) {
    return "FAKE0";
}

void backend_free(ggml_backend_t backend) {
    ggml_backend_free(cpu_backend(backend));
    delete backend;
}

ggml_status graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    const std::vector<Handle> live = Memory::get().live();
    const Accessible accessible(live);
    Check(live).check_graph(graph);
    Memory::get().graphs++;
    return ggml_backend_graph_compute(cpu_backend(backend), graph);
}

void set_threads(ggml_backend_t backend, int threads) {
    void * set = ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu_device()),
                                                   "ggml_backend_set_n_threads");
    reinterpret_cast<ggml_backend_set_n_threads_t>(set)(cpu_backend(backend), threads);
}

ggml_guid_t guid() {
    static ggml_guid id = {0x6b, 0x76, 0x74, 0x69, 0x65, 0x72, 0x2d, 0x66,
                           0x61, 0x72, 0x2d, 0x74, 0x65, 0x73, 0x74, 0x31};
    return &id;
}

const char * device_description(ggml_backend_dev_t) {
    return "fake GPU for tests";
}

void device_memory(ggml_backend_dev_t, size_t * free_bytes, size_t * total_bytes) {
    *free_bytes = Memory::get().free_bytes();
    *total_bytes = Memory::total_bytes();
}

enum ggml_backend_dev_type device_type(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_GPU;
}

void device_props(ggml_backend_dev_t which, ggml_backend_dev_props * out) {
    std::memset(out, 0, sizeof *out);
    out->name = device_name(which);
    out->description = device_description(which);
    device_memory(which, &out->memory_free, &out->memory_total);
    out->type = device_type(which);
}

ggml_backend_t device_open(ggml_backend_dev_t which, const char *) {
    const ggml_backend_t computing_backend = ggml_backend_dev_init(cpu_device(), nullptr);
    if (!computing_backend) {
        return nullptr;
    }
    ggml_backend_t made = new ggml_backend{};
    made->guid = guid();
    made->iface.get_name = backend_name;
    made->iface.free = backend_free;
    made->iface.graph_compute = graph_compute;
    made->device = which;
    made->context = computing_backend;
    return made;
}

ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t) {
    return buffer_type();
}

bool device_supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    return ggml_backend_dev_supports_op(cpu_device(), op);
}

bool device_supports_type(ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
    return type == buffer_type();
}

const char * registry_name(ggml_backend_reg_t) {
    return "FAKE";
}

size_t registry_count(ggml_backend_reg_t) {
    return 1;
}

ggml_backend_dev_t registry_device(ggml_backend_reg_t, size_t) {
    return &device();
}

void * registry_proc(ggml_backend_reg_t, const char * name) {
    const bool is_known = std::strcmp(name, "ggml_backend_set_n_threads") == 0;
    return is_known ? reinterpret_cast<void *>(set_threads) : nullptr;
}

ggml_backend_reg & registry() {
    static ggml_backend_reg made = [] {
        ggml_backend_reg one = {};
        one.api_version = GGML_BACKEND_API_VERSION;
        one.iface.get_name = registry_name;
        one.iface.get_device_count = registry_count;
        one.iface.get_device = registry_device;
        one.iface.get_proc_address = registry_proc;
        return one;
    }();
    return made;
}

ggml_backend_device & device() {
    static ggml_backend_device made = [] {
        ggml_backend_device one = {};
        one.iface.get_name = device_name;
        one.iface.get_description = device_description;
        one.iface.get_memory = device_memory;
        one.iface.get_type = device_type;
        one.iface.get_props = device_props;
        one.iface.init_backend = device_open;
        one.iface.get_buffer_type = device_buffer_type;
        one.iface.supports_op = device_supports_op;
        one.iface.supports_buft = device_supports_type;
        one.reg = &registry();
        return one;
    }();
    return made;
}

} // namespace

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
    const char * stats_variable = std::getenv("FAKE_STATS");
    if (stats_variable && std::strcmp(stats_variable, "1") == 0) {
        std::atexit([] { Memory::get().print(); });
    }
    return &registry();
}
