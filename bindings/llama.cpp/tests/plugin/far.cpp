// A device for tests, FAR0, which stands for a GPU: the processor cannot follow its memory. Pages are closed
// but while a function of this device works on them, so that whoever uses an address of it himself dies.
//
//   FAR_BYTES  how much memory it has, 1 GiB if nothing is said
//   FAR_STATS  1: a line of figures when the process ends
//
// The processor's backend computes, after it was checked that all it reads and writes is memory of ours.
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
// Kernels of GPUs read quantised rows in steps of so many values, past the end of the last one.
constexpr int64_t ROW_STEP = 512;

// What is mapped of a buffer, and how many work on it. It is used under the lock of the memory.
struct Buffer {
    char * base = nullptr; // none once it is freed
    size_t bytes = 0, mapped_bytes = 0;
    int users = 0;
};

using Handle = std::shared_ptr<Buffer>;

[[noreturn]] void die(const char * what, const ggml_tensor * tensor, const ggml_tensor * node) {
    std::fprintf(stderr, "far: %s (%s), of which %s (%s) is made: %s\n", tensor->name,
                 ggml_op_name(tensor->op), node->name, ggml_op_name(node->op), what);
    std::abort();
}

void protect(const Buffer & buffer, int access) {
    if (mprotect(buffer.base, buffer.mapped_bytes, access) != 0) {
        std::perror("far: mprotect");
        std::abort();
    }
}

// All buffers there are. It lives as long as the process: engines free theirs when they like.
class Memory {
public:
    static Memory & get() {
        static Memory * only = new Memory;
        return *only;
    }

    Handle alloc(size_t bytes) {
        const std::lock_guard<std::mutex> guard(lock_);
        if (bytes > total_bytes() - used_bytes_) {
            std::fprintf(stderr, "far: no %zu bytes: %zu of %zu are used\n", bytes, used_bytes_,
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

    // Another context may have freed a buffer that was opened with all others.
    void close(const Handle & buffer) {
        const std::lock_guard<std::mutex> guard(lock_);
        if (buffer->base && --buffer->users == 0) {
            protect(*buffer, PROT_NONE);
        }
    }

    static size_t total_bytes() {
        static const size_t bytes = [] {
            const char * said = std::getenv("FAR_BYTES");
            return said ? size_t(std::strtoull(said, nullptr, 10)) : size_t(1) << 30;
        }();
        return bytes;
    }

    size_t free_bytes() {
        const std::lock_guard<std::mutex> guard(lock_);
        return total_bytes() - used_bytes_;
    }

    void print() {
        const std::lock_guard<std::mutex> guard(lock_);
        std::fprintf(stderr, "far: {\"peak_bytes\":%zu,\"buffers\":%zu,\"graphs\":%llu,\"set_bytes\":%llu}\n",
                     peak_bytes_, live_.size(), (unsigned long long) graphs, (unsigned long long) set_bytes);
    }

    std::atomic<uint64_t> graphs{0}, set_bytes{0};

private:
    std::mutex lock_;
    std::vector<Handle> live_;
    size_t used_bytes_ = 0, peak_bytes_ = 0;
};

// Memory that may be used as long as this lives.
class Opened {
public:
    explicit Opened(std::vector<Handle> buffers) : buffers_(std::move(buffers)) {
        for (const Handle & buffer : buffers_) {
            Memory::get().open(buffer);
        }
    }

    ~Opened() {
        for (const Handle & buffer : buffers_) {
            Memory::get().close(buffer);
        }
    }

    Opened(const Opened &) = delete;
    Opened & operator=(const Opened &) = delete;

private:
    std::vector<Handle> buffers_;
};

ggml_backend_device & device();
ggml_backend_buffer_type_t buffer_type();

const Handle & of(ggml_backend_buffer_t buffer) {
    return *static_cast<Handle *>(buffer->context);
}

// Buffers of no bytes have no context.
bool is_ours(ggml_backend_buffer_t buffer) {
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
    Memory::get().free(of(wrapped));
    delete static_cast<Handle *>(wrapped->context);
}

void * buffer_base(ggml_backend_buffer_t wrapped) {
    return of(wrapped)->base;
}

// In memory that is computed in, others' bytes may lie there: devices clear it when they need it.
ggml_status buffer_init(ggml_backend_buffer_t wrapped, ggml_tensor * tensor) {
    const size_t padding = padding_bytes(tensor);
    if (!tensor->view_src && padding > 0 && wrapped->usage != GGML_BACKEND_BUFFER_USAGE_COMPUTE) {
        const Opened opened({of(wrapped)});
        std::memset(static_cast<char *>(tensor->data) + ggml_nbytes(tensor), 0, padding);
    }
    return GGML_STATUS_SUCCESS;
}

void buffer_memset(ggml_backend_buffer_t wrapped, ggml_tensor * tensor, uint8_t value, size_t offset,
                   size_t bytes) {
    const Opened opened({of(wrapped)});
    std::memset(static_cast<char *>(tensor->data) + offset, value, bytes);
}

void buffer_set(ggml_backend_buffer_t wrapped, ggml_tensor * tensor, const void * data, size_t offset,
                size_t bytes) {
    const Opened opened({of(wrapped)});
    std::memcpy(static_cast<char *>(tensor->data) + offset, data, bytes);
    Memory::get().set_bytes += bytes;
}

void buffer_get(ggml_backend_buffer_t wrapped, const ggml_tensor * tensor, void * data, size_t offset,
                size_t bytes) {
    const Opened opened({of(wrapped)});
    std::memcpy(data, static_cast<const char *>(tensor->data) + offset, bytes);
}

// Contiguous both, as ggml has made sure. What is no memory of ours goes by way of the processor's.
bool buffer_copy(ggml_backend_buffer_t wrapped, const ggml_tensor * from, ggml_tensor * to) {
    const ggml_backend_buffer_t source = root_of(from)->buffer;
    if (!is_ours(source)) {
        return false;
    }
    const Opened opened({of(source), of(wrapped)});
    std::memmove(to->data, from->data, ggml_nbytes(from));
    return true;
}

void buffer_clear(ggml_backend_buffer_t wrapped, uint8_t value) {
    const Opened opened({of(wrapped)});
    std::memset(of(wrapped)->base, value, of(wrapped)->bytes);
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
    return "FAR0";
}

const char * type_name(ggml_backend_buffer_type_t) {
    return "FAR0";
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

// What a graph may use.
class Check {
public:
    explicit Check(const std::vector<Handle> & live) : live_(live) {}

    void all(const ggml_cgraph * graph) const {
        for (int i = 0; i < graph->n_nodes; i++) {
            const ggml_tensor * node = graph->nodes[i];
            // As the processor's backend leaves them out.
            if (ggml_op_is_empty(node->op) || !(node->flags & GGML_TENSOR_FLAG_COMPUTE)) {
                continue;
            }
            lies_here(node, node);
            // Products of GPUs have no gaps between their columns.
            if (node->op == GGML_OP_MUL_MAT && !ggml_is_contiguous(node)) {
                die("a product with gaps", node, node);
            }
            for (const ggml_tensor * source : node->src) {
                if (source) {
                    lies_here(source, node);
                    is_padded(root_of(source), node);
                }
            }
        }
    }

private:
    bool is_within(ggml_backend_buffer_t wrapped, const void * data, size_t bytes) const {
        const Buffer & buffer = *of(wrapped);
        const uintptr_t base = uintptr_t(buffer.base), at = uintptr_t(data);
        return at >= base && at - base <= buffer.bytes && bytes <= buffer.bytes - (at - base);
    }

    void lies_here(const ggml_tensor * tensor, const ggml_tensor * node) const {
        const ggml_backend_buffer_t buffer = root_of(tensor)->buffer;
        const size_t bytes = ggml_nbytes(tensor);
        // Nothing is read of what is empty.
        if (bytes == 0) {
            return;
        }
        if (!buffer || buffer->buft != buffer_type()) {
            die(buffer ? ggml_backend_buft_name(buffer->buft) : "it has no buffer", tensor, node);
        }
        if (!buffer->context || std::find(live_.begin(), live_.end(), of(buffer)) == live_.end()) {
            die("its buffer is not alive", tensor, node);
        }
        if (!is_within(buffer, tensor->data, bytes)) {
            die("it is not in its buffer", tensor, node);
        }
    }

    void is_padded(const ggml_tensor * root, const ggml_tensor * node) const {
        const size_t padding = padding_bytes(root);
        if (padding == 0 || ggml_n_dims(root) != 2 || ggml_nbytes(root) == 0) {
            return;
        }
        const char * end = static_cast<const char *>(root->data) + ggml_nbytes(root);
        if (!is_within(root->buffer, root->data, ggml_nbytes(root) + padding)) {
            die("there is no room for padding behind it", root, node);
        }
        // Kernels clear it themselves in memory that is computed in.
        const bool is_clear = root->buffer->usage == GGML_BACKEND_BUFFER_USAGE_COMPUTE ||
                              std::all_of(end, end + padding, [](char byte) { return byte == 0; });
        if (!is_clear) {
            die("the padding behind it is not zero", root, node);
        }
    }

    const std::vector<Handle> & live_;
};

// It may be loaded before the processor's backend is.
ggml_backend_dev_t processor() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

ggml_backend_t inner(ggml_backend_t backend) {
    return static_cast<ggml_backend_t>(backend->context);
}

const char * backend_name(ggml_backend_t) {
    return "FAR0";
}

void backend_free(ggml_backend_t backend) {
    ggml_backend_free(inner(backend));
    delete backend;
}

ggml_status graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    const std::vector<Handle> live = Memory::get().live();
    const Opened opened(live);
    Check(live).all(graph);
    Memory::get().graphs++;
    return ggml_backend_graph_compute(inner(backend), graph);
}

void set_threads(ggml_backend_t backend, int threads) {
    void * set = ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(processor()),
                                                   "ggml_backend_set_n_threads");
    reinterpret_cast<ggml_backend_set_n_threads_t>(set)(inner(backend), threads);
}

ggml_guid_t guid() {
    static ggml_guid id = {0x6b, 0x76, 0x74, 0x69, 0x65, 0x72, 0x2d, 0x66,
                           0x61, 0x72, 0x2d, 0x74, 0x65, 0x73, 0x74, 0x31};
    return &id;
}

const char * device_description(ggml_backend_dev_t) {
    return "memory that the processor cannot follow";
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
    const ggml_backend_t computes = ggml_backend_dev_init(processor(), nullptr);
    if (!computes) {
        return nullptr;
    }
    ggml_backend_t made = new ggml_backend{};
    made->guid = guid();
    made->iface.get_name = backend_name;
    made->iface.free = backend_free;
    made->iface.graph_compute = graph_compute;
    made->device = which;
    made->context = computes;
    return made;
}

ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t) {
    return buffer_type();
}

bool device_supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    return ggml_backend_dev_supports_op(processor(), op);
}

bool device_supports_type(ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
    return type == buffer_type();
}

const char * registry_name(ggml_backend_reg_t) {
    return "FAR";
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
    const char * says = std::getenv("FAR_STATS");
    if (says && std::strcmp(says, "1") == 0) {
        std::atexit([] { Memory::get().print(); });
    }
    return &registry();
}
